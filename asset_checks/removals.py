"""Promise: nothing is removed without evidence, and what is told of what was removed is so."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, combinations
from math import fsum
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from asset_checks.clusters import (
    AGAIN,
    DUPLICATES,
    I64,
    PLACE,
    all_signatures,
    near_components,
    other_rows,
    place_columns,
    rows_of,
    text_bytes,
)
from asset_checks.columns import (
    U8,
    Numbers,
    find_rows,
    group_numbers,
    joined,
    named,
    places_in,
    sorted_rows,
    whole,
)
from asset_checks.similarity import (
    MAX_COMPARED_BYTES,
    jaccard,
    sampling_keys,
    shingle_hashes,
    texts_of,
    within_budget,
)
from asset_checks.verdicts import Verdict, law, verdict_of
from pipeline_assets.clusters import slice_name, split_units
from pipeline_assets.corpus import PAIRS_AT_ONCE, Corpus
from pipeline_assets.duplicates import (
    BY_PAIR_NAME,
    EVIDENCE_NAME,
    EXAMPLES_NAME,
    EXAMPLES_PER_RANGE,
    EXCERPT_CHARACTERS,
    LARGEST_NAME,
    MAX_COMPARED_MEMBERS,
    NUM_LARGEST,
    NUM_NAMED,
)
from pipeline_assets.reference_hits import HITS_NAME
from pipeline_assets.signatures import minhash_params
from pipeline_assets.source import ROWS_NAME, pool_names
from pipeline_assets.stripes import Stage, units_in
from pipeline_assets.transforms.duplicates import SIMILARITY_EDGES
from pipeline_assets.transforms.rows import doc_id_matrix
from resources.artifact_store import ArtifactRef
from training_io.hashing import derive_seed, keyed_hash

Row = dict[str, Any]


def every_removal_has_evidence(
    stage: Stage, lsh_clusters: ArtifactRef, raw_row_groups: ArtifactRef, minhash_signatures: ArtifactRef
) -> Verdict:
    """The evidence names each removed row once, with the document kept in its place; exclusions have a hit.

    Its other columns, the examples, the largest clusters, the table by pools and crawls and the counts are recounted
    from rows, texts and signatures; similarities on a sample.
    """
    told = _Told(stage, lsh_clusters, raw_row_groups, minhash_signatures)
    if violations := other_rows(stage, told.table, raw_row_groups):
        return verdict_of("one row of evidence a removal", violations, f"{told.table.num_rows:,} decisions")
    violations = _other_pairs(told)
    if not violations:  # rows are matched with each other
        violations += chain(_misstated_evidence(told), _misstated_pairs(told), _misstated_examples(told))
        violations += chain(_misstated_clusters(told), _misstated_counts(told))
    violations += _excluded_without_a_hit(told)
    return verdict_of(
        "one row of evidence a removal, and tables that say so", violations, f"{len(told.removed):,} removals"
    )


@dataclass(frozen=True)
class _Told:
    """All decisions beside the rows that they are about, and what was told of them; rows by number, unit after unit."""

    stage: Stage
    lsh_clusters: ArtifactRef
    raw_row_groups: ArtifactRef
    minhash_signatures: ArtifactRef

    @cached_property
    def units(self) -> list[ArtifactRef]:
        return units_in(self.stage, self.raw_row_groups)

    @cached_property
    def corpus(self) -> Corpus:
        return Corpus(self.stage, self.units, split_units(units_in(self.stage, self.minhash_signatures))[0])

    def decided(self, *columns: str) -> Iterator[pa.Table]:
        """Columns of the decisions, unit after unit."""
        return (self.stage.table(self.lsh_clusters, slice_name(unit.unit), columns) for unit in self.units)

    def read(self, *columns: str) -> Iterator[pa.Table]:
        """Columns of the rows that were decided about, unit after unit."""
        return (self.stage.table(unit, ROWS_NAME, columns) for unit in self.units)

    def ids(self, column: str) -> U8:
        """A column of doc_ids of all decisions: uint8[n, 32]; not kept, for there are several."""
        return joined(doc_id_matrix(table.column(column)) for table in self.decided(column))

    @cached_property
    def table(self) -> pa.Table:
        """Whether each row is kept, and barred."""
        return pa.concat_tables(self.decided("kept", "barred"))

    @cached_property
    def reasons(self) -> tuple[Numbers, list[str]]:
        return named(table.column("reason") for table in self.decided("reason"))

    @cached_property
    def names(self) -> dict[str, tuple[Numbers, list[str]]]:
        """Number of each row's pool and crawl, and their names, sorted."""
        return {by: named(table.column(by) for table in self.read(by)) for by in ("pool", "dump")}

    def rows(self, numbers: Sequence[int] | I64, *columns: str) -> list[Row]:
        """Some rows, as the source has them."""
        wanted, places = np.unique(np.asarray(numbers, np.int64), return_inverse=True)
        found = self.corpus.rows(wanted, columns).take(pa.array(places))
        rows: list[Row] = pa.table({name: found.column(name).fill_null("") for name in columns}).to_pylist()
        return rows

    def stored(self, name: str) -> list[Row]:
        found: list[Row] = self.stage.table(self.lsh_clusters, name).to_pylist()
        return found

    @cached_property
    def evidence(self) -> pa.Table:
        return self.stage.table(self.lsh_clusters, EVIDENCE_NAME)

    @cached_property
    def num_bytes(self) -> I64:
        return text_bytes(self.stage, self.raw_row_groups)

    @cached_property
    def clusters(self) -> I64:
        """Number of each row's cluster."""
        return group_numbers(self.ids("cluster_id"))

    @cached_property
    def removed(self) -> I64:
        """The rows that were removed for another one."""
        numbers, names = self.reasons
        return np.flatnonzero(np.isin(numbers, places_in(names, pa.array(DUPLICATES))))

    @cached_property
    def removed_ids(self) -> U8:
        """Their doc_ids: uint8[r, 32]."""
        return _ids_of_rows(self.read("doc_id"), self.removed)

    @cached_property
    def named_ids(self) -> U8:
        """The doc_ids for which they were removed: uint8[r, 32]."""
        return _ids_of_rows(self.decided("kept_doc_id"), self.removed)

    @cached_property
    def kept(self) -> I64:
        """For each of those, the row that is kept in its place (itself where there is none)."""
        kept = np.flatnonzero(self.table.column("kept"))
        doc_ids = _ids_of_rows(self.decided("doc_id"), kept)
        found = find_rows(doc_ids, sorted_rows(doc_ids), self.named_ids)
        return np.where(found < 0, self.removed, np.append(kept, -1)[found])

    @cached_property
    def pairs(self) -> tuple[I64, I64]:
        """Numbers of the pairs of removed and kept texts, ascending with them: of the removals, of the evidence."""
        stated = (doc_id_matrix(self.evidence.column(f"{side}_doc_id")) for side in ("removed", "kept"))
        both = [np.hstack([self.removed_ids, self.named_ids]), np.hstack([*stated])]
        numbers = group_numbers(joined(both, 64))
        return numbers[: len(self.removed)], numbers[len(self.removed) :]

    def shared_bands(self) -> I64:
        """In how many bands each removed row's signature has the values of the kept one's."""
        rows_per_band = minhash_params(self.stage.recipe).rows_per_band
        found = np.empty(len(self.removed), np.int64)
        for start in range(0, len(found), PAIRS_AT_ONCE):
            some = slice(start, start + PAIRS_AT_ONCE)
            wanted, places = np.unique(np.stack([self.removed[some], self.kept[some]]), return_inverse=True)
            signatures = self.corpus.signatures(wanted)
            removed, kept = (signatures[rows] for rows in places.reshape(2, -1))
            equal = (removed == kept).reshape(len(removed), -1, rows_per_band)
            found[some] = equal.all(axis=2).sum(axis=1)
        return found

    def keys(self, doc_ids: U8, purpose: str) -> npt.NDArray[np.uint64]:
        """The keyed hashes by which the stage chose what to show, and those by which a sample is drawn here."""
        return keyed_hash(doc_ids, derive_seed(self.stage.recipe.seed, purpose))

    def texts(self, doc_ids: set[bytes]) -> dict[bytes, str]:
        return texts_of(self.stage, self.raw_row_groups, doc_ids)


def _ids_of_rows(tables: Iterable[pa.Table], rows: I64) -> U8:
    """The doc_ids in the only column of some rows, which ascend, of tables one after another: uint8[len(rows), 32]."""
    return doc_id_matrix(rows_of(tables, rows).column(0))


def _other_pairs(told: _Told) -> list[str]:
    """Pairs of texts that are not removed as often as the evidence says, first those that are more often."""
    removed, stated = told.pairs
    size = max(removed.max(initial=-1), stated.max(initial=-1)) + 1
    decisions, rows = np.bincount(removed, minlength=size), np.bincount(stated, minlength=size)
    ids = [np.hstack([told.removed_ids, told.named_ids])]
    ids += [np.hstack([doc_id_matrix(told.evidence.column(f"{side}_doc_id")) for side in ("removed", "kept")])]
    violations = []
    for numbers, some, is_more in ((removed, ids[0], decisions > rows), (stated, ids[1], rows > decisions)):
        pairs, firsts = np.unique(numbers, return_index=True)
        for first in np.sort(firsts[is_more[pairs]]).tolist():
            pair, (doc_id, kept) = numbers[first], (one.tobytes().hex()[:16] for one in some[first].reshape(2, 32))
            violations.append(f"{doc_id} removed for {kept}: {decisions[pair]} decisions, {rows[pair]} evidence rows")
    return violations


def _differing(where: str, wanted: Row, found: Row) -> Iterator[str]:
    for name, value in wanted.items():
        if found[name] != value:
            yield f"{where}: {name}: expected {_shown(value)}, found {_shown(found[name])}"


def _shown(value: Any) -> str:
    return value.hex()[:16] if isinstance(value, bytes) else repr(value)[:80]


def _misstated_evidence(told: _Told) -> Iterator[str]:
    """Rows of evidence whose names, bytes and bands are not those of the removal, laid side by side by pair and names.

    And similarities, on a sample of the pairs.
    """
    wanted = _names_of_removals(told) | {
        "removed_bytes": told.num_bytes[told.removed],
        "shared_bands": told.shared_bands(),
    }
    found, vocabulary = {}, {}
    for name, column in wanted.items():
        if isinstance(column, tuple):
            stated, names = named([told.evidence.column(name)], "null")
            vocabulary[name] = sorted({*names, *column[1]})
            found[name] = _renumbered(stated, names, vocabulary[name])
            wanted[name] = _renumbered(*column, vocabulary[name])
        else:
            found[name] = told.evidence.column(name).to_numpy()
    orders = [
        np.lexsort((side["removed_dump"], side["removed_pool"], pairs))
        for side, pairs in zip((wanted, found), told.pairs, strict=True)
    ]
    is_other = np.zeros(len(told.removed), np.bool_)
    for name, column in wanted.items():
        is_other |= column[orders[0]] != found[name][orders[1]]
    for place in np.flatnonzero(is_other).tolist():
        rows = [
            {name: _value(column[order[place]], vocabulary.get(name)) for name, column in side.items()}
            for side, order in zip((wanted, found), orders, strict=True)
        ]
        doc_id = told.evidence.column("removed_doc_id")[int(orders[1][place])].as_py()
        yield from _differing(f"the evidence of {doc_id.hex()[:16]}", *rows)
    yield from _misstated_similarities(told)


def _names_of_removals(told: _Told) -> dict[str, Any]:
    """Pool and crawl of each removed row and of the one kept in its place, as numbers into sorted names."""
    return {
        f"{side}_{by}": (numbers[rows], names)
        for side, rows in (("removed", told.removed), ("kept", told.kept))
        for by, (numbers, names) in told.names.items()
    }


def _renumbered(numbers: Numbers, names: Sequence[str], others: Sequence[str]) -> Numbers:
    return places_in(others, pa.array(names, pa.string()))[numbers]


def _value(number: Any, names: Sequence[str] | None) -> Any:
    return number.item() if names is None else names[number]


def _misstated_similarities(told: _Told) -> Iterator[str]:
    removed, stated = told.pairs
    firsts = np.sort(np.unique(removed, return_index=True)[1])
    sizes = told.num_bytes[told.removed[firsts]] + told.num_bytes[told.kept[firsts]]
    chosen = firsts[list(within_budget(sizes, told.keys(told.removed_ids[firsts], "judged")))]
    ids = {
        int(removed[first]): (told.removed_ids[first].tobytes(), told.named_ids[first].tobytes())
        for first in chosen.tolist()
    }
    ngram = told.stage.recipe.dedup.ngram
    hashes = {one: shingle_hashes(text, ngram) for one, text in told.texts({*chain(*ids.values())}).items()}
    similarities = told.evidence.column("jaccard")
    for row in np.flatnonzero(np.isin(stated, removed[chosen])).tolist():
        pair = ids[int(stated[row])]
        alike = jaccard(hashes[pair[0]], hashes[pair[1]])
        found = {"jaccard": similarities[row].as_py()}
        yield from _differing(f"the evidence of {pair[0].hex()[:16]}", {"jaccard": alike}, found)


def _misstated_pairs(told: _Told) -> Iterator[str]:
    wanted: list[Row] = []
    for by, (numbers, names) in told.names.items():
        pairs = numbers[told.removed].astype(np.int64) * len(names) + numbers[told.kept]
        found, places, counts = np.unique(pairs, return_inverse=True, return_counts=True)
        num_bytes = np.zeros(len(found), np.int64)
        np.add.at(num_bytes, places, told.num_bytes[told.removed])
        rows = [
            {"by": by, "removed": names[pair // len(names)], "kept": names[pair % len(names)], "documents": count}
            for pair, count in zip(found.tolist(), counts.tolist(), strict=True)
        ]
        rows = [row | {"bytes": total} for row, total in zip(rows, num_bytes.tolist(), strict=True)]
        wanted += sorted(rows, key=lambda row: (-row["documents"], row["removed"], row["kept"]))
    yield from _other_table(BY_PAIR_NAME, wanted, told.stored(BY_PAIR_NAME))


def _other_table(name: str, wanted: Sequence[Row], found: Sequence[Row]) -> Iterator[str]:
    if len(wanted) != len(found):
        yield f"{name}: expected {len(wanted):,} rows, found {len(found):,}"
    for number, (one, other) in enumerate(zip(wanted, found, strict=False)):
        yield from _differing(f"{name}: row {number:,}", one, other)


def _misstated_examples(told: _Told) -> Iterator[str]:
    """Of each range of similarity the removed texts of the smallest keys, most alike first."""
    similarities = told.evidence.column("jaccard").to_numpy()
    keys, numbers = np.unique(
        told.keys(doc_id_matrix(told.evidence.column("removed_doc_id")), "examples"), return_index=True
    )
    ranges = np.searchsorted(SIMILARITY_EDGES, similarities[numbers], side="right")
    chosen = np.concatenate(
        [np.flatnonzero(ranges == one)[:EXAMPLES_PER_RANGE] for one in range(len(SIMILARITY_EDGES) + 1)]
    )
    chosen = numbers[chosen[np.lexsort((keys[chosen], -similarities[numbers[chosen]]))]]
    evidence = told.evidence.select(["jaccard", "shared_bands"]).take(pa.array(chosen)).to_pylist()
    sides = {"removed": told.removed[chosen], "kept": told.kept[chosen]}
    rows = {side: told.rows(numbers, "doc_id", "dump", "url") for side, numbers in sides.items()}
    texts = told.texts({row["doc_id"] for some in rows.values() for row in some})
    wanted = []
    for place, one in enumerate(evidence):
        for side, some in rows.items():
            row = some[place]
            one |= {f"{side}_{name}": row[name] for name in ("doc_id", "dump", "url")}
            one[f"{side}_text"] = texts[row["doc_id"]][:EXCERPT_CHARACTERS]
        wanted.append(one)
    yield from _other_table(EXAMPLES_NAME, wanted, told.stored(EXAMPLES_NAME))


def _misstated_clusters(told: _Told) -> Iterator[str]:
    """The clusters of most rows, those of some of their rows that are compared; similarities on a sample of them."""
    largest = _largest(told)
    doc_ids = told.ids("doc_id")
    keys = told.keys(doc_ids, "members")
    compared = [np.sort(rows[np.argsort(keys[rows], kind="stable")[:MAX_COMPARED_MEMBERS]]) for _, rows in largest]
    sizes = [int(told.num_bytes[some].sum()) for some in compared]
    sample = {*within_budget(sizes, sampling_keys([name for name, _ in largest], told.stage.recipe.seed))}
    kept = _kept_of_rows(told, [_first_row(told, doc_ids, rows) for _, rows in largest])
    members = [told.rows(some, "doc_id", "pool", "dump", "file") for some in compared]
    texts = told.texts({*kept} | {row["doc_id"] for place in sample for row in members[place]})
    wanted: list[Row] = [
        {
            "cluster_id": name,
            "documents": len(rows),
            "compared": len(some),
            **{f"{by}s": _tally(row[by] for row in some) for by in ("pool", "dump", "file")},
            "first_words": texts[doc_id][:EXCERPT_CHARACTERS],
        }
        for (name, rows), some, doc_id in zip(largest, members, kept, strict=True)
    ]
    for place in sample:
        wanted[place] |= _alike([texts[row["doc_id"]] for row in members[place]], told.stage.recipe.dedup.ngram)
    yield from _other_table(LARGEST_NAME, wanted, told.stored(LARGEST_NAME))


def _largest(told: _Told) -> list[tuple[bytes, I64]]:
    """The clusters of most rows and their rows, of equal size those of the smallest key first."""
    by_cluster = np.argsort(told.clusters, kind="stable")
    ends = np.cumsum(np.bincount(told.clusters))
    sizes = np.diff(ends, prepend=0)
    shared = np.flatnonzero(sizes > 1)
    names = told.ids("cluster_id")[by_cluster[ends[shared] - 1]]
    order = np.lexsort((told.keys(names, "members"), -sizes[shared]))[:NUM_LARGEST].tolist()
    return [
        (names[place].tobytes(), by_cluster[ends[cluster] - sizes[cluster] : ends[cluster]])
        for place, cluster in zip(order, shared[order].tolist(), strict=True)
    ]


def _alike(texts: Sequence[str], ngram: int) -> dict[str, float]:
    hashes = [shingle_hashes(text, ngram) for text in texts]
    found = [jaccard(left, right) for left, right in combinations(hashes, 2)]
    return {"min_jaccard": min(found), "mean_jaccard": fsum(found) / len(found)}


def _first_row(told: _Told, doc_ids: U8, members: I64) -> int:
    """The row of a cluster's smallest doc_id, of several the first one in the source."""
    ids = whole(doc_ids[members])
    rows = members[ids == ids[np.argsort(ids)[0]]]
    place = place_columns(told.stage, told.corpus.rows(rows, PLACE))
    return int(rows[np.lexsort(place[::-1])[0]])


def _kept_of_rows(told: _Told, rows: Sequence[int]) -> list[bytes]:
    """What is kept for some rows."""
    wanted, places = np.unique(np.array(rows, np.int64), return_inverse=True)
    return [kept.tobytes() for kept in _ids_of_rows(told.decided("kept_doc_id"), wanted)[places]]


def _tally(names: Iterator[str]) -> str:
    counted = sorted(Counter(names).items(), key=lambda item: (-item[1], item[0]))
    others = [f"and {len(counted) - NUM_NAMED} others"] if len(counted) > NUM_NAMED else []
    return ", ".join([f"{name} × {count}" for name, count in counted[:NUM_NAMED]] + others)


def _misstated_counts(told: _Told) -> Iterator[str]:
    """Numbers of the manifest; those of reference sets and of verification are others' to judge."""
    sizes = np.bincount(told.clusters)
    by_size = dict(zip(*(column.tolist() for column in np.unique(sizes, return_counts=True)), strict=True))
    labels = dict.fromkeys(_size_label(size) for size in sorted(by_size))
    spread = _dumps_of_clusters(told, sizes)
    reasons = Counter({name: int((told.reasons[0] == number).sum()) for number, name in enumerate(told.reasons[1])})
    wanted = {
        "documents": told.table.num_rows,
        "clusters": len(sizes),
        "largest_cluster": max(by_size),
        "duplicate_clusters": len(spread),
        **{reason: reasons[reason] for reason in ("kept", *DUPLICATES, "reference")},
        "barred": pc.sum(pc.and_(told.table.column("barred"), told.table.column("kept"))).as_py(),
        "cluster_sizes": [
            [label, sum(count for size, count in by_size.items() if _size_label(size) == label)] for label in labels
        ],
        "text_bytes": int(told.num_bytes.sum()),
        "removed_bytes": int(told.num_bytes[told.removed].sum()),
        "clusters_within_one_dump": int((spread == 1).sum()),
        "clusters_over_several_dumps": int((spread > 1).sum()),
        "removed_by_pool": {name: _of_pool(told, name) for name in pool_names(told.stage.recipe)},
    }
    stated = told.stage.open(told.lsh_clusters)[1].counts
    for name, number in wanted.items():
        if stated[name] != number:
            yield f"{name}: counted {number}, found {stated[name]} in the manifest"


def _dumps_of_clusters(told: _Told, sizes: I64) -> I64:
    """Of how many crawls the rows of each cluster of several rows are."""
    numbers, names = told.names["dump"]
    shared = np.flatnonzero(sizes[told.clusters] > 1)
    pairs = np.unique(told.clusters[shared] * len(names) + numbers[shared])
    return np.unique(pairs // max(1, len(names)), return_counts=True)[1]


def _size_label(size: int) -> str:
    low = 1 << (size.bit_length() - 1)
    return str(size) if size < 5 else f"{max(5, low)} to {2 * low - 1}"


def _of_pool(told: _Told, name: str) -> dict[str, int]:
    numbers, names = told.names["pool"]
    inside = np.flatnonzero(numbers == names.index(name)) if name in names else np.empty(0, np.int64)
    removed = np.intersect1d(inside, told.removed)
    return {
        "documents": len(inside),
        "removed": len(removed),
        "bytes": int(told.num_bytes[inside].sum()),
        "removed_bytes": int(told.num_bytes[removed].sum()),
    }


def _excluded_without_a_hit(told: _Told) -> list[str]:
    """Documents that a reference set removed although nothing that is near them is a hit of a set that excludes."""
    numbers, names = told.reasons
    is_excluded = numbers == (names.index("reference") if "reference" in names else -1)
    if not is_excluded.any():
        return []
    excluding = {reference.name for reference in told.stage.recipe.references if reference.action == "exclude"}
    hits = told.stage.table(told.lsh_clusters, HITS_NAME, ["reference_set", "doc_id"])
    hits = hits.filter(pc.is_in(hits.column("reference_set"), pa.array(sorted(excluding), pa.string())))
    doc_ids, groups = told.ids("doc_id"), told.clusters
    if (
        told.stage.recipe.dedup.mode == "exact"
    ):  # a cluster is one text, and near copies of a hit are removed all the same
        signatures = all_signatures(told.stage, list(told.corpus.signed))
        rows_per_band = minhash_params(told.stage.recipe).rows_per_band
        groups = near_components(doc_ids, signatures, rows_per_band).astype(np.int64)
    is_proven = np.zeros(groups.max() + 1, np.bool_)
    is_proven[groups[np.isin(whole(doc_ids), whole(doc_id_matrix(hits.column("doc_id"))))]] = True
    return [
        f"{doc_ids[row].tobytes().hex()[:16]} was removed for a reference, but no document of its cluster is a hit"
        for row in np.flatnonzero(is_excluded & ~is_proven[groups]).tolist()
    ]


CHECKS = [
    law(
        every_removal_has_evidence,
        blocking=True,
        description="Fails when a document was removed without a row that says why, or when the evidence, the "
        "examples, the largest clusters, the table by pools and crawls or a count says what the rows, texts and "
        f"signatures do not. Similarities are recounted on a keyed sample of {MAX_COMPARED_BYTES // 1_000_000} MB of "
        f"text. {AGAIN}",
    ),
]
