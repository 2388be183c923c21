"""Promise: nothing is removed without evidence, and what is told of what was removed is so."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain, combinations
from math import fsum
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from asset_checks.columns import I64, U8, Numbers, named, places_in, whole
from asset_checks.components import all_signatures, near_components
from asset_checks.decisions import AGAIN, DUPLICATES, other_rows, place_columns
from asset_checks.removal_records import RemovalRecords, Row, ids_of_rows
from asset_checks.similarity import MAX_COMPARED_BYTES, jaccard, sampling_keys, shingle_hashes, within_budget
from asset_checks.verdicts import Verdict, law, verdict_of
from pipeline_assets.duplicates import (
    BY_PAIR_NAME,
    EXAMPLES_NAME,
    EXAMPLES_PER_RANGE,
    EXCERPT_CHARACTERS,
    LARGEST_NAME,
    MAX_COMPARED_MEMBERS,
    NUM_LARGEST,
    NUM_NAMED,
)
from pipeline_assets.reference_hits import HITS_NAME
from pipeline_assets.schemas import PLACE
from pipeline_assets.signatures import minhash_params
from pipeline_assets.source import pool_names
from pipeline_assets.stripes import Stage
from pipeline_assets.transforms.duplicates import SIMILARITY_EDGES
from pipeline_assets.transforms.rows import doc_id_matrix
from resources.artifact_store import ArtifactRef


def every_removal_has_evidence(
    stage: Stage, lsh_clusters: ArtifactRef, raw_row_groups: ArtifactRef, minhash_signatures: ArtifactRef
) -> Verdict:
    """The evidence names each removed row once, with the document kept in its place; exclusions have a hit.

    Its other columns, the examples, the largest clusters, the table by pools and crawls and the counts are recounted
    from rows, texts and signatures; similarities on a sample.
    """
    records = RemovalRecords(stage, lsh_clusters, raw_row_groups, minhash_signatures)
    if violations := other_rows(stage, records.table, raw_row_groups):
        return verdict_of("one row of evidence a removal", violations, f"{records.table.num_rows:,} decisions")
    violations = _other_pairs(records)
    if not violations:  # rows are matched with each other
        violations += chain(_misstated_evidence(records), _misstated_pairs(records), _misstated_examples(records))
        violations += chain(_misstated_clusters(records), _misstated_counts(records))
    violations += _excluded_without_a_hit(records)
    return verdict_of(
        "one row of evidence a removal, and tables that say so", violations, f"{len(records.removed):,} removals"
    )


def _other_pairs(records: RemovalRecords) -> list[str]:
    """Pairs of texts that are not removed as often as the evidence says, first those that are more often."""
    removed, stated = records.pairs
    size = max(removed.max(initial=-1), stated.max(initial=-1)) + 1
    decisions, rows = np.bincount(removed, minlength=size), np.bincount(stated, minlength=size)
    ids = [np.hstack([records.removed_ids, records.named_ids])]
    ids += [np.hstack([doc_id_matrix(records.evidence.column(f"{side}_doc_id")) for side in ("removed", "kept")])]
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


def _misstated_evidence(records: RemovalRecords) -> Iterator[str]:
    """Rows of evidence whose names, bytes and bands are not those of the removal, laid side by side by pair and names.

    And similarities, on a sample of the pairs.
    """
    wanted = _names_of_removals(records) | {
        "removed_bytes": records.num_bytes[records.removed],
        "shared_bands": records.shared_bands(),
    }
    found, vocabulary = {}, {}
    for name, column in wanted.items():
        if isinstance(column, tuple):
            stated, names = named([records.evidence.column(name)], "null")
            vocabulary[name] = sorted({*names, *column[1]})
            found[name] = _renumbered(stated, names, vocabulary[name])
            wanted[name] = _renumbered(*column, vocabulary[name])
        else:
            found[name] = records.evidence.column(name).to_numpy()
    orders = [
        np.lexsort((side["removed_dump"], side["removed_pool"], pairs))
        for side, pairs in zip((wanted, found), records.pairs, strict=True)
    ]
    is_other = np.zeros(len(records.removed), np.bool_)
    for name, column in wanted.items():
        is_other |= column[orders[0]] != found[name][orders[1]]
    for place in np.flatnonzero(is_other).tolist():
        rows = [
            {name: _value(column[order[place]], vocabulary.get(name)) for name, column in side.items()}
            for side, order in zip((wanted, found), orders, strict=True)
        ]
        doc_id = records.evidence.column("removed_doc_id")[int(orders[1][place])].as_py()
        yield from _differing(f"the evidence of {doc_id.hex()[:16]}", *rows)
    yield from _misstated_similarities(records)


def _names_of_removals(records: RemovalRecords) -> dict[str, Any]:
    """Pool and crawl of each removed row and of the one kept in its place, as numbers into sorted names."""
    return {
        f"{side}_{by}": (numbers[rows], names)
        for side, rows in (("removed", records.removed), ("kept", records.kept))
        for by, (numbers, names) in records.names.items()
    }


def _renumbered(numbers: Numbers, names: Sequence[str], others: Sequence[str]) -> Numbers:
    return places_in(others, pa.array(names, pa.string()))[numbers]


def _value(number: Any, names: Sequence[str] | None) -> Any:
    return number.item() if names is None else names[number]


def _misstated_similarities(records: RemovalRecords) -> Iterator[str]:
    removed, stated = records.pairs
    firsts = np.sort(np.unique(removed, return_index=True)[1])
    sizes = records.num_bytes[records.removed[firsts]] + records.num_bytes[records.kept[firsts]]
    chosen = firsts[list(within_budget(sizes, records.keys(records.removed_ids[firsts], "judged")))]
    ids = {
        int(removed[first]): (records.removed_ids[first].tobytes(), records.named_ids[first].tobytes())
        for first in chosen.tolist()
    }
    ngram = records.stage.recipe.dedup.ngram
    hashes = {one: shingle_hashes(text, ngram) for one, text in records.texts({*chain(*ids.values())}).items()}
    similarities = records.evidence.column("jaccard")
    for row in np.flatnonzero(np.isin(stated, removed[chosen])).tolist():
        pair = ids[int(stated[row])]
        alike = jaccard(hashes[pair[0]], hashes[pair[1]])
        found = {"jaccard": similarities[row].as_py()}
        yield from _differing(f"the evidence of {pair[0].hex()[:16]}", {"jaccard": alike}, found)


def _misstated_pairs(records: RemovalRecords) -> Iterator[str]:
    wanted: list[Row] = []
    for by, (numbers, names) in records.names.items():
        pairs = numbers[records.removed].astype(np.int64) * len(names) + numbers[records.kept]
        found, places, counts = np.unique(pairs, return_inverse=True, return_counts=True)
        num_bytes = np.zeros(len(found), np.int64)
        np.add.at(num_bytes, places, records.num_bytes[records.removed])
        rows = [
            {"by": by, "removed": names[pair // len(names)], "kept": names[pair % len(names)], "documents": count}
            for pair, count in zip(found.tolist(), counts.tolist(), strict=True)
        ]
        rows = [row | {"bytes": total} for row, total in zip(rows, num_bytes.tolist(), strict=True)]
        wanted += sorted(rows, key=lambda row: (-row["documents"], row["removed"], row["kept"]))
    yield from _other_table(BY_PAIR_NAME, wanted, records.stored(BY_PAIR_NAME))


def _other_table(name: str, wanted: Sequence[Row], found: Sequence[Row]) -> Iterator[str]:
    if len(wanted) != len(found):
        yield f"{name}: expected {len(wanted):,} rows, found {len(found):,}"
    for number, (one, other) in enumerate(zip(wanted, found, strict=False)):
        yield from _differing(f"{name}: row {number:,}", one, other)


def _misstated_examples(records: RemovalRecords) -> Iterator[str]:
    """Of each range of similarity the removed texts of the smallest keys, most alike first."""
    similarities = records.evidence.column("jaccard").to_numpy()
    keys, numbers = np.unique(
        records.keys(doc_id_matrix(records.evidence.column("removed_doc_id")), "examples"), return_index=True
    )
    ranges = np.searchsorted(SIMILARITY_EDGES, similarities[numbers], side="right")
    chosen = np.concatenate(
        [np.flatnonzero(ranges == one)[:EXAMPLES_PER_RANGE] for one in range(len(SIMILARITY_EDGES) + 1)]
    )
    chosen = numbers[chosen[np.lexsort((keys[chosen], -similarities[numbers[chosen]]))]]
    evidence = records.evidence.select(["jaccard", "shared_bands"]).take(pa.array(chosen)).to_pylist()
    sides = {"removed": records.removed[chosen], "kept": records.kept[chosen]}
    rows = {side: records.rows(numbers, "doc_id", "dump", "url") for side, numbers in sides.items()}
    texts = records.texts({row["doc_id"] for some in rows.values() for row in some})
    wanted = []
    for place, one in enumerate(evidence):
        for side, some in rows.items():
            row = some[place]
            one |= {f"{side}_{name}": row[name] for name in ("doc_id", "dump", "url")}
            one[f"{side}_text"] = texts[row["doc_id"]][:EXCERPT_CHARACTERS]
        wanted.append(one)
    yield from _other_table(EXAMPLES_NAME, wanted, records.stored(EXAMPLES_NAME))


def _misstated_clusters(records: RemovalRecords) -> Iterator[str]:
    """The clusters of most rows, those of some of their rows that are compared; similarities on a sample of them."""
    largest = _largest(records)
    doc_ids = records.ids("doc_id")
    keys = records.keys(doc_ids, "members")
    compared = [np.sort(rows[np.argsort(keys[rows], kind="stable")[:MAX_COMPARED_MEMBERS]]) for _, rows in largest]
    sizes = [int(records.num_bytes[some].sum()) for some in compared]
    sample = {*within_budget(sizes, sampling_keys([name for name, _ in largest], records.stage.recipe.seed))}
    kept = _kept_of_rows(records, [_first_row(records, doc_ids, rows) for _, rows in largest])
    members = [records.rows(some, "doc_id", "pool", "dump", "file") for some in compared]
    texts = records.texts({*kept} | {row["doc_id"] for place in sample for row in members[place]})
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
        wanted[place] |= _alike([texts[row["doc_id"]] for row in members[place]], records.stage.recipe.dedup.ngram)
    yield from _other_table(LARGEST_NAME, wanted, records.stored(LARGEST_NAME))


def _largest(records: RemovalRecords) -> list[tuple[bytes, I64]]:
    """The clusters of most rows and their rows, of equal size those of the smallest key first."""
    by_cluster = np.argsort(records.clusters, kind="stable")
    ends = np.cumsum(np.bincount(records.clusters))
    sizes = np.diff(ends, prepend=0)
    shared = np.flatnonzero(sizes > 1)
    names = records.ids("cluster_id")[by_cluster[ends[shared] - 1]]
    order = np.lexsort((records.keys(names, "members"), -sizes[shared]))[:NUM_LARGEST].tolist()
    return [
        (names[place].tobytes(), by_cluster[ends[cluster] - sizes[cluster] : ends[cluster]])
        for place, cluster in zip(order, shared[order].tolist(), strict=True)
    ]


def _alike(texts: Sequence[str], ngram: int) -> dict[str, float]:
    hashes = [shingle_hashes(text, ngram) for text in texts]
    found = [jaccard(left, right) for left, right in combinations(hashes, 2)]
    return {"min_jaccard": min(found), "mean_jaccard": fsum(found) / len(found)}


def _first_row(records: RemovalRecords, doc_ids: U8, members: I64) -> int:
    """The row of a cluster's smallest doc_id, of several the first one in the source."""
    ids = whole(doc_ids[members])
    rows = members[ids == ids[np.argsort(ids)[0]]]
    place = place_columns(records.stage, records.corpus.rows(rows, PLACE))
    return int(rows[np.lexsort(place[::-1])[0]])


def _kept_of_rows(records: RemovalRecords, rows: Sequence[int]) -> list[bytes]:
    """What is kept for some rows."""
    wanted, places = np.unique(np.array(rows, np.int64), return_inverse=True)
    return [kept.tobytes() for kept in ids_of_rows(records.decided("kept_doc_id"), wanted)[places]]


def _tally(names: Iterator[str]) -> str:
    counted = sorted(Counter(names).items(), key=lambda item: (-item[1], item[0]))
    others = [f"and {len(counted) - NUM_NAMED} others"] if len(counted) > NUM_NAMED else []
    return ", ".join([f"{name} × {count}" for name, count in counted[:NUM_NAMED]] + others)


def _misstated_counts(records: RemovalRecords) -> Iterator[str]:
    """Numbers of the manifest; those of reference sets and of verification are others' to judge."""
    sizes = np.bincount(records.clusters)
    by_size = dict(zip(*(column.tolist() for column in np.unique(sizes, return_counts=True)), strict=True))
    labels = dict.fromkeys(_size_label(size) for size in sorted(by_size))
    spread = _dumps_of_clusters(records, sizes)
    numbers, names = records.reasons
    reasons = Counter({name: int((numbers == number).sum()) for number, name in enumerate(names)})
    wanted = {
        "documents": records.table.num_rows,
        "clusters": len(sizes),
        "largest_cluster": max(by_size),
        "duplicate_clusters": len(spread),
        **{reason: reasons[reason] for reason in ("kept", *DUPLICATES, "reference")},
        "barred": pc.sum(pc.and_(records.table.column("barred"), records.table.column("kept"))).as_py(),
        "cluster_sizes": [
            [label, sum(count for size, count in by_size.items() if _size_label(size) == label)] for label in labels
        ],
        "text_bytes": int(records.num_bytes.sum()),
        "removed_bytes": int(records.num_bytes[records.removed].sum()),
        "clusters_within_one_dump": int((spread == 1).sum()),
        "clusters_over_several_dumps": int((spread > 1).sum()),
        "removed_by_pool": {name: _of_pool(records, name) for name in pool_names(records.stage.recipe)},
    }
    stated = records.stage.open(records.lsh_clusters)[1].counts
    for name, number in wanted.items():
        if stated[name] != number:
            yield f"{name}: counted {number}, found {stated[name]} in the manifest"


def _dumps_of_clusters(records: RemovalRecords, sizes: I64) -> I64:
    """Of how many crawls the rows of each cluster of several rows are."""
    numbers, names = records.names["dump"]
    shared = np.flatnonzero(sizes[records.clusters] > 1)
    pairs = np.unique(records.clusters[shared] * len(names) + numbers[shared])
    return np.unique(pairs // max(1, len(names)), return_counts=True)[1]


def _size_label(size: int) -> str:
    low = 1 << (size.bit_length() - 1)
    return str(size) if size < 5 else f"{max(5, low)} to {2 * low - 1}"


def _of_pool(records: RemovalRecords, name: str) -> dict[str, int]:
    numbers, names = records.names["pool"]
    inside = np.flatnonzero(numbers == names.index(name)) if name in names else np.empty(0, np.int64)
    removed = np.intersect1d(inside, records.removed)
    return {
        "documents": len(inside),
        "removed": len(removed),
        "bytes": int(records.num_bytes[inside].sum()),
        "removed_bytes": int(records.num_bytes[removed].sum()),
    }


def _excluded_without_a_hit(records: RemovalRecords) -> list[str]:
    """Documents that a reference set removed although nothing that is near them is a hit of a set that excludes."""
    numbers, names = records.reasons
    is_excluded = numbers == (names.index("reference") if "reference" in names else -1)
    if not is_excluded.any():
        return []
    excluding = {reference.name for reference in records.stage.recipe.references if reference.action == "exclude"}
    hits = records.stage.table(records.lsh_clusters, HITS_NAME, ["reference_set", "doc_id"])
    hits = hits.filter(pc.is_in(hits.column("reference_set"), pa.array(sorted(excluding), pa.string())))
    doc_ids, groups = records.ids("doc_id"), records.clusters
    if (
        records.stage.recipe.dedup.mode == "exact"
    ):  # a cluster is one text, and near copies of a hit are removed all the same
        signatures = all_signatures(records.stage, list(records.corpus.signed))
        rows_per_band = minhash_params(records.stage.recipe).rows_per_band
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
