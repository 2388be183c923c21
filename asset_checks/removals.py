"""Promise: nothing is removed without evidence, and what is told of what was removed is so."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
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
    decisions,
    group_codes,
    near_components,
    other_rows,
    place_columns,
    source_rows,
    text_bytes,
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
from pipeline_assets.clusters import split_units
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
from pipeline_assets.source import pool_names
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
    removed = Counter((row["removed_doc_id"], row["kept_doc_id"]) for row in told.removals)
    evidence = Counter((row["removed_doc_id"], row["kept_doc_id"]) for row in told.evidence)
    violations = [
        f"{doc_id.hex()[:16]} removed for {kept.hex()[:16]}: {removed[doc_id, kept]} decisions,"
        f" {evidence[doc_id, kept]} evidence rows"
        for doc_id, kept in (removed - evidence) | (evidence - removed)
    ]
    if not violations:  # rows are matched with each other
        violations += chain(_misstated_evidence(told), _misstated_pairs(told), _misstated_examples(told))
        violations += chain(_misstated_clusters(told), _misstated_counts(told))
    violations += _excluded_without_a_hit(stage, lsh_clusters, told.table, minhash_signatures)
    return verdict_of(
        "one row of evidence a removal, and tables that say so", violations, f"{removed.total():,} removals"
    )


@dataclass(frozen=True)
class _Told:
    """All decisions beside the rows that they are about, and what was told of them; rows by number, unit after unit."""

    stage: Stage
    lsh_clusters: ArtifactRef
    raw_row_groups: ArtifactRef
    minhash_signatures: ArtifactRef

    @cached_property
    def table(self) -> pa.Table:
        return decisions(self.stage, self.lsh_clusters, self.raw_row_groups)

    @cached_property
    def source(self) -> pa.Table:
        source = source_rows(self.stage, self.raw_row_groups, ["doc_id", "pool", "file", "dump", "url"])
        named = {name: source.column(name).fill_null("") for name in source.column_names}
        return pa.table({**named, "bytes": text_bytes(self.stage, self.raw_row_groups)})

    def rows(self, numbers: Sequence[int] | I64) -> list[Row]:
        """Some rows, as the source has them."""
        found: list[Row] = self.source.take(pa.array(numbers, pa.int64())).to_pylist()
        return found

    def stored(self, name: str) -> list[Row]:
        found: list[Row] = self.stage.table(self.lsh_clusters, name).to_pylist()
        return found

    @cached_property
    def evidence(self) -> list[Row]:
        return self.stored(EVIDENCE_NAME)

    @cached_property
    def num_bytes(self) -> I64:
        return np.asarray(self.source.column("bytes"), np.int64)

    @cached_property
    def in_source_order(self) -> I64:
        """Place of each row among all, by doc_id and then by where it is in the source."""
        source = source_rows(self.stage, self.raw_row_groups, PLACE)
        texts = group_codes(self.table.column("doc_id"))
        return np.argsort(np.lexsort([*place_columns(self.stage, source)[::-1], texts]))

    @cached_property
    def clusters(self) -> I64:
        """Number of each row's cluster."""
        return group_codes(self.table.column("cluster_id"))

    @cached_property
    def removed(self) -> I64:
        """The rows that were removed for another one."""
        return np.flatnonzero(pc.is_in(self.table.column("reason"), pa.array(DUPLICATES)))

    @cached_property
    def kept(self) -> list[int]:
        """For each of those, the row that is kept in its place (itself where there is none)."""
        named = self.table.column("kept_doc_id").take(pa.array(self.removed))
        is_named = pc.and_(self.table.column("kept"), pc.is_in(self.table.column("doc_id"), named.combine_chunks()))
        kept = np.flatnonzero(is_named)
        row_of = dict(zip(self.table.column("doc_id").take(pa.array(kept)).to_pylist(), kept.tolist(), strict=True))
        return [row_of.get(doc_id, row) for doc_id, row in zip(named.to_pylist(), self.removed.tolist(), strict=True)]

    @cached_property
    def removals(self) -> list[Row]:
        """What the evidence must say, row after row, but for the similarity."""
        named = self.table.column("kept_doc_id").take(pa.array(self.removed)).to_pylist()
        pairs = zip(self.rows(self.removed), self.rows(self.kept), strict=True)
        return [
            {
                "removed_doc_id": removed["doc_id"],
                "kept_doc_id": name,
                **{f"removed_{name}": removed[name] for name in ("pool", "dump", "bytes")},
                **{f"kept_{name}": kept[name] for name in ("pool", "dump")},
                "shared_bands": shared,
            }
            for (removed, kept), name, shared in zip(pairs, named, self._shared_bands(), strict=True)
        ]

    def _shared_bands(self) -> list[int]:
        """In how many bands each removed row's signature has the values of the kept one's."""
        signatures = all_signatures(self.stage, split_units(units_in(self.stage, self.minhash_signatures))[0])
        size = minhash_params(self.stage.recipe).rows_per_band
        shared = np.zeros(len(self.removed), np.int64)
        for start in range(0, signatures.shape[1], size):
            band = signatures[:, start : start + size]
            shared += (band[self.removed] == band[self.kept]).all(axis=1)
        return [int(number) for number in shared]

    def keys(self, doc_ids: pa.ChunkedArray | pa.Array, purpose: str) -> npt.NDArray[np.uint64]:
        """The keyed hashes by which the stage chose what to show."""
        return keyed_hash(doc_id_matrix(doc_ids), derive_seed(self.stage.recipe.seed, purpose))

    def texts(self, doc_ids: set[bytes]) -> dict[bytes, str]:
        return texts_of(self.stage, self.raw_row_groups, doc_ids)


def _differing(where: str, wanted: Row, found: Row) -> Iterator[str]:
    for name, value in wanted.items():
        if found[name] != value:
            yield f"{where}: {name}: expected {_shown(value)}, found {_shown(found[name])}"


def _shown(value: Any) -> str:
    return value.hex()[:16] if isinstance(value, bytes) else repr(value)[:80]


def _misstated_evidence(told: _Told) -> Iterator[str]:
    for wanted, found in zip(_in_order(told.removals), _in_order(told.evidence), strict=True):
        yield from _differing(f"the evidence of {found['removed_doc_id'].hex()[:16]}", wanted, found)
    kept = told.rows(told.kept)
    size_of = {
        (row["removed_doc_id"], row["kept_doc_id"]): row["removed_bytes"] + other["bytes"]
        for row, other in zip(told.removals, kept, strict=True)
    }
    pairs = list(size_of)
    keys = sampling_keys([removed for removed, _ in pairs], told.stage.recipe.seed)
    chosen = {pairs[number] for number in within_budget([*size_of.values()], keys)}
    ngram = told.stage.recipe.dedup.ngram
    hashes = {one: shingle_hashes(text, ngram) for one, text in told.texts({*chain(*chosen)}).items()}
    for row in told.evidence:
        pair = (row["removed_doc_id"], row["kept_doc_id"])
        if pair in chosen:
            alike = jaccard(hashes[pair[0]], hashes[pair[1]])
            yield from _differing(f"the evidence of {pair[0].hex()[:16]}", {"jaccard": alike}, row)


def _in_order(rows: Sequence[Row]) -> list[Row]:
    """By pair, the rows of one pair by what else they say."""
    return sorted(
        rows, key=lambda row: (row["removed_doc_id"], row["kept_doc_id"], row["removed_pool"], row["removed_dump"])
    )


def _misstated_pairs(told: _Told) -> Iterator[str]:
    wanted: list[Row] = []
    for by in ("pool", "dump"):
        documents: Counter[tuple[str, str]] = Counter()
        num_bytes: Counter[tuple[str, str]] = Counter()
        for row in told.removals:
            pair = (row[f"removed_{by}"], row[f"kept_{by}"])
            documents[pair] += 1
            num_bytes[pair] += row["removed_bytes"]
        wanted += [
            {"by": by, "removed": pair[0], "kept": pair[1], "documents": count, "bytes": num_bytes[pair]}
            for pair, count in sorted(documents.items(), key=lambda item: (-item[1], item[0]))
        ]
    yield from _other_table(BY_PAIR_NAME, wanted, told.stored(BY_PAIR_NAME))


def _other_table(name: str, wanted: Sequence[Row], found: Sequence[Row]) -> Iterator[str]:
    if len(wanted) != len(found):
        yield f"{name}: expected {len(wanted):,} rows, found {len(found):,}"
    for number, (one, other) in enumerate(zip(wanted, found, strict=False)):
        yield from _differing(f"{name}: row {number:,}", one, other)


def _misstated_examples(told: _Told) -> Iterator[str]:
    """Of each range of similarity the removed texts of the smallest keys, most alike first."""
    evidence = told.evidence
    removed = told.stage.table(told.lsh_clusters, EVIDENCE_NAME, ["removed_doc_id"]).column("removed_doc_id")
    keys = told.keys(removed, "examples").tolist()
    ranges: dict[int, dict[int, int]] = {}
    seen: set[int] = set()
    for number, (row, key) in enumerate(zip(evidence, keys, strict=True)):
        if key not in seen:
            seen.add(key)
            ranges.setdefault(bisect_right(SIMILARITY_EDGES, row["jaccard"]), {})[key] = number
    chosen = [some[key] for some in ranges.values() for key in sorted(some)[:EXAMPLES_PER_RANGE]]
    chosen.sort(key=lambda number: (-evidence[number]["jaccard"], keys[number]))
    sides = {"removed": told.removed[chosen], "kept": np.array(told.kept, np.int64)[chosen]}
    rows = {side: told.rows(numbers) for side, numbers in sides.items()}
    texts = told.texts({row["doc_id"] for some in rows.values() for row in some})
    wanted = []
    for place, number in enumerate(chosen):
        one: Row = {name: evidence[number][name] for name in ("jaccard", "shared_bands")}
        for side, some in rows.items():
            row = some[place]
            one |= {f"{side}_{name}": row[name] for name in ("doc_id", "dump", "url")}
            one[f"{side}_text"] = texts[row["doc_id"]][:EXCERPT_CHARACTERS]
        wanted.append(one)
    yield from _other_table(EXAMPLES_NAME, wanted, told.stored(EXAMPLES_NAME))


def _misstated_clusters(told: _Told) -> Iterator[str]:
    """The clusters of most rows, those of some of their rows that are compared; similarities on a sample of them."""
    largest = _largest(told)
    keys = told.keys(told.table.column("doc_id"), "members")
    compared = [np.sort(rows[np.argsort(keys[rows], kind="stable")[:MAX_COMPARED_MEMBERS]]) for _, rows in largest]
    sizes = [int(told.num_bytes[some].sum()) for some in compared]
    sample = {*within_budget(sizes, sampling_keys([name for name, _ in largest], told.stage.recipe.seed))}
    kept = [_kept_of_first_row(told, rows) for _, rows in largest]
    members = [told.rows(some) for some in compared]
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
    names = told.table.column("cluster_id").take(pa.array(by_cluster[ends[shared] - 1]))
    order = np.lexsort((told.keys(names, "members"), -sizes[shared]))[:NUM_LARGEST].tolist()
    return [
        (names[place].as_py(), by_cluster[ends[cluster] - sizes[cluster] : ends[cluster]])
        for place, cluster in zip(order, shared[order].tolist(), strict=True)
    ]


def _alike(texts: Sequence[str], ngram: int) -> dict[str, float]:
    hashes = [shingle_hashes(text, ngram) for text in texts]
    found = [jaccard(left, right) for left, right in combinations(hashes, 2)]
    return {"min_jaccard": min(found), "mean_jaccard": fsum(found) / len(found)}


def _kept_of_first_row(told: _Told, members: I64) -> bytes:
    """What is kept for the row of a cluster's smallest doc_id, of several the first one in the source."""
    first = members[np.argmin(told.in_source_order[members])]
    found: bytes = told.table.column("kept_doc_id")[int(first)].as_py()
    return found


def _tally(names: Iterator[str]) -> str:
    counted = sorted(Counter(names).items(), key=lambda item: (-item[1], item[0]))
    others = [f"and {len(counted) - NUM_NAMED} others"] if len(counted) > NUM_NAMED else []
    return ", ".join([f"{name} × {count}" for name, count in counted[:NUM_NAMED]] + others)


def _misstated_counts(told: _Told) -> Iterator[str]:
    """Numbers of the manifest; those of reference sets and of verification are others' to judge."""
    sizes = np.bincount(told.clusters)
    by_size = Counter(sizes.tolist())
    labels = dict.fromkeys(_size_label(size) for size in sorted(by_size))
    dumps = told.source.column("dump").to_pylist()
    of_dump = {*zip(told.clusters.tolist(), dumps, strict=True)}
    spread = Counter(cluster for cluster, _ in of_dump if sizes[cluster] > 1)
    reasons = Counter(told.table.column("reason").to_pylist())
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
        "clusters_within_one_dump": sum(number == 1 for number in spread.values()),
        "clusters_over_several_dumps": sum(number > 1 for number in spread.values()),
        "removed_by_pool": {name: _of_pool(told, name) for name in pool_names(told.stage.recipe)},
    }
    stated = told.stage.open(told.lsh_clusters)[1].counts
    for name, number in wanted.items():
        if stated[name] != number:
            yield f"{name}: counted {number}, found {stated[name]} in the manifest"


def _size_label(size: int) -> str:
    low = 1 << (size.bit_length() - 1)
    return str(size) if size < 5 else f"{max(5, low)} to {2 * low - 1}"


def _of_pool(told: _Told, name: str) -> dict[str, int]:
    inside = np.flatnonzero(pc.equal(told.source.column("pool"), name))
    removed = np.intersect1d(inside, told.removed)
    return {
        "documents": len(inside),
        "removed": len(removed),
        "bytes": int(told.num_bytes[inside].sum()),
        "removed_bytes": int(told.num_bytes[removed].sum()),
    }


def _excluded_without_a_hit(
    stage: Stage, lsh_clusters: ArtifactRef, table: pa.Table, minhash_signatures: ArtifactRef
) -> list[str]:
    """Documents that a reference set removed although nothing that is near them is a hit of a set that excludes."""
    doc_ids, reasons = table.column("doc_id").to_pylist(), table.column("reason").to_pylist()
    if "reference" not in reasons:
        return []
    excluding = {reference.name for reference in stage.recipe.references if reference.action == "exclude"}
    hits = stage.table(lsh_clusters, HITS_NAME, ["reference_set", "doc_id"])
    named = zip(*(hits.column(name).to_pylist() for name in hits.column_names), strict=True)
    hit = {doc_id for name, doc_id in named if name in excluding}
    groups = table.column("cluster_id").to_pylist()
    if stage.recipe.dedup.mode == "exact":  # a cluster is one text, and near copies of a hit are removed all the same
        signed, _ = split_units(units_in(stage, minhash_signatures))
        signatures, rows_per_band = all_signatures(stage, signed), minhash_params(stage.recipe).rows_per_band
        groups = near_components(doc_id_matrix(table.column("doc_id")), signatures, rows_per_band).tolist()
    rows = list(zip(doc_ids, groups, reasons, strict=True))
    proven = {group for doc_id, group, _ in rows if doc_id in hit}
    return [
        f"{doc_id.hex()[:16]} was removed for a reference, but no document of its cluster is a hit"
        for doc_id, group, reason in rows
        if reason == "reference" and group not in proven
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
