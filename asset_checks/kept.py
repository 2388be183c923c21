"""Promise: every raw row has one decision, and of each cluster the document is kept that the rule names.

Cost: columns of all rows, of which doc_ids are the widest.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from asset_checks.columns import (
    I64,
    U8,
    Flags,
    Numbers,
    find_rows,
    group_numbers,
    named,
    places_in,
    run_starts,
    sorted_rows,
    whole,
)
from asset_checks.decisions import (
    AGAIN,
    EXACT,
    KEPT,
    NEAR,
    REASONS,
    REFERENCE,
    Decided,
    first_rows,
    ids_in,
    other_rows,
    place_columns,
    rows_of,
    rows_read,
    side_by_side,
    text_bytes,
)
from asset_checks.verdicts import Verdict, law, verdict_of
from pipeline_assets.schemas import PLACE
from pipeline_assets.sections.dedup import Dedup
from pipeline_assets.source import pool_names
from pipeline_assets.stripes import Stage, units_in
from pipeline_assets.transforms.rows import doc_id_matrix
from resources.artifact_store import ArtifactRef
from training_io.hashing import derive_seed, keyed_hash


def every_row_has_one_decision(stage: Stage, lsh_clusters: ArtifactRef, raw_row_groups: ArtifactRef) -> Verdict:
    """Each raw unit's slice holds the unit's documents, one decision a row, in the unit's order, with their pools."""
    violations = []
    doc_ids = ids_in(rows_read(stage, raw_row_groups, "doc_id"))
    by_doc_id = sorted_rows(doc_ids)
    pools, names = _pools_of_texts(stage, raw_row_groups, doc_ids, by_doc_id)
    decided = Decided(stage, lsh_clusters, raw_row_groups).read("doc_id", "pools")
    tables = zip(units_in(stage, raw_row_groups), rows_read(stage, raw_row_groups, "doc_id"), decided, strict=True)
    for unit, source, table in tables:
        read, found = (doc_id_matrix(some.column("doc_id")) for some in (source, table))
        both = min(len(read), len(found))
        differing = np.flatnonzero(whole(read[:both]) != whole(found[:both]))
        if len(differing) or len(read) != len(found):
            at = int(differing[0]) if len(differing) else None
            violations.append(f"{unit.unit}: {len(read):,} rows, {len(found):,} decisions, first difference at {at}")
        rows = find_rows(doc_ids, by_doc_id, found)
        wanted, stated = pools[rows], table.column("pools")
        violations += [
            f"{unit.unit}: {found[row].tobytes().hex()[:16]} is in pools {names[wanted[row]]}, found {stated[row]}"
            for row in np.flatnonzero((places_in(names, stated) != wanted) & (rows >= 0)).tolist()
        ]
    return verdict_of("one decision for every raw row, in order", violations, f"{len(doc_ids):,} rows")


def _pools_of_texts(
    stage: Stage, raw_row_groups: ArtifactRef, doc_ids: U8, by_doc_id: I64
) -> tuple[Numbers, list[str]]:
    """For each row the number of the pools that hold its text, and their names, in the recipe's order, with commas."""
    pools = pool_names(stage.recipe)
    places, found = named(table.column("pool") for table in rows_read(stage, raw_row_groups, "pool"))
    bits = np.array([1 << pools.index(name) for name in found], np.uint64)[places]  # a recipe has at most 64 pools
    starts = np.flatnonzero(run_starts(doc_ids, by_doc_id))
    held = np.bitwise_or.reduceat(bits[by_doc_id], starts)
    sets, set_of_text = np.unique(held, return_inverse=True)
    numbers = np.empty(len(doc_ids), np.int32)
    numbers[by_doc_id] = np.repeat(set_of_text, np.diff(starts, append=len(doc_ids)))
    return numbers, [",".join(name for at, name in enumerate(pools) if one >> at & 1) for one in sets.tolist()]


def one_document_is_kept_per_cluster(stage: Stage, lsh_clusters: ArtifactRef, raw_row_groups: ArtifactRef) -> Verdict:
    """In each cluster exactly one row is kept (none where a reference set excludes it; every row in mode off).

    It is the one that the recipe's rule names, and the others were removed for it. Where near-copies are removed within
    a crawl only, at least one is kept, no text twice, and others were removed for a kept one of their cluster.
    """
    decided = Decided(stage, lsh_clusters, raw_row_groups)
    table = pa.concat_tables(decided.read("kept"))
    is_kept = np.asarray(table.column("kept"))
    clusters = group_numbers(ids_in(decided.read("cluster_id")))
    violations = [] if stage.recipe.dedup.mode == "off" else _texts_kept_twice(decided, np.flatnonzero(is_kept))
    violations += _clusters_kept_otherwise(decided, clusters, is_kept)
    violations += other_rows(stage, table, raw_row_groups) or _decided_otherwise(decided, clusters, is_kept)
    return verdict_of("one kept document a cluster, by the rule", violations, f"{clusters.max() + 1:,} clusters")


def _texts_kept_twice(decided: Decided, rows: I64) -> list[str]:
    """Texts that several of the kept rows have, the earliest first."""
    doc_ids = doc_id_matrix(rows_of(decided.read("doc_id"), rows).column(0))
    by_doc_id = sorted_rows(doc_ids)
    starts = np.flatnonzero(run_starts(doc_ids, by_doc_id))
    counts = np.diff(starts, append=len(doc_ids))
    firsts = sorted(zip(by_doc_id[starts[counts > 1]].tolist(), counts[counts > 1].tolist(), strict=True))
    return [
        f"text {doc_ids[row].tobytes().hex()[:16]}: expected once, found {count:,} times among the kept"
        for row, count in firsts
    ]


def _clusters_kept_otherwise(decided: Decided, clusters: I64, is_kept: Flags) -> list[str]:
    """Clusters of which fewer or more rows are kept than may be, the earliest first."""
    sizes, kept = np.bincount(clusters), np.bincount(clusters[is_kept], minlength=clusters.max() + 1)
    is_excluded = np.zeros(len(sizes), np.bool_)
    is_excluded[clusters[decided.reasons == REFERENCE]] = True
    least, most = _kept_of(decided.stage.recipe.dedup, sizes, is_excluded)
    rows = np.sort(first_rows(clusters, np.flatnonzero((kept < least) | (kept > most))))
    names = doc_id_matrix(rows_of(decided.read("cluster_id"), rows).column(0))
    return [
        f"cluster {name.tobytes().hex()[:16]} of {sizes[cluster]:,} rows: expected {least[cluster]:,} kept,"
        f" found {kept[cluster]:,}"
        for name, cluster in zip(names, clusters[rows].tolist(), strict=True)
    ]


def _kept_of(dedup: Dedup, sizes: I64, is_excluded: Flags) -> tuple[I64, I64]:
    """How many of each cluster's rows must be kept, and may be."""
    least = sizes if dedup.mode == "off" else np.ones_like(sizes)
    most = sizes if dedup.mode == "off" or dedup.scope == "dump" else np.ones_like(sizes)
    return np.where(is_excluded, 0, least), np.where(is_excluded, 0, most)


def _decided_otherwise(decided: Decided, clusters: I64, is_kept: Flags) -> list[str]:
    """Rows whose kept, kept_doc_id or reason does not follow from clusters, references and the rule."""
    doc_ids = ids_in(decided.read("doc_id"))
    if decided.stage.recipe.dedup.scope == "dump":
        kept = _kept_within_clusters(decided, doc_ids, clusters, is_kept)
    else:
        kept = _kept_by_rule(decided, doc_ids, clusters)
    excluding = {one.name for one in decided.stage.recipe.references if one.action == "exclude"}
    violations: list[str] = []
    first = 0
    for table in decided.read("kept_doc_id", "kept", "reason", "references"):
        rows = slice(first, first + table.num_rows)
        numbers = np.arange(first, first + table.num_rows)
        violations += _other_decisions(table, doc_ids[rows], doc_ids[kept[rows]], kept[rows] == numbers, excluding)
        first += table.num_rows
    return violations


def _other_decisions(table: pa.Table, doc_ids: U8, kept_ids: U8, is_own: Flags, excluding: set[str]) -> Iterator[str]:
    """Of the rows of a table those that state another decision than the one that follows from what is to be kept."""
    sets = table.column("references").unique().to_pylist()
    excluded = pa.array([one for one in sets if not excluding.isdisjoint(one.split(","))], pa.string())
    wanted = np.where(whole(doc_ids) == whole(kept_ids), EXACT, NEAR)
    wanted[is_own] = KEPT
    wanted[np.asarray(pc.is_in(table.column("references"), excluded))] = REFERENCE
    is_other = whole(doc_id_matrix(table.column("kept_doc_id"))) != whole(kept_ids)
    is_other |= np.asarray(table.column("kept")) != (wanted == KEPT)
    is_other |= places_in(REASONS, table.column("reason")) != wanted
    rows = np.flatnonzero(is_other)
    for row, found in zip(rows.tolist(), table.take(pa.array(rows)).to_pylist(), strict=True):
        yield (
            f"{doc_ids[row].tobytes().hex()[:16]}: expected {REASONS[wanted[row]]} for"
            f" {kept_ids[row].tobytes().hex()[:16]}, found {found['reason']} for {found['kept_doc_id'].hex()[:16]}"
            f" and kept {found['kept']}"
        )


def _kept_within_clusters(decided: Decided, doc_ids: U8, clusters: I64, is_kept: Flags) -> I64:
    """For each row itself where it is kept, else a kept row of its cluster with the text that it names.

    Where a reference set excludes the cluster no row is kept, so any of that text will do.
    """
    kept = np.arange(len(doc_ids))
    several = _in_several(clusters)
    others = several[~is_kept[several]]
    held = side_by_side(clusters[several], doc_ids[several], is_kept[several])
    names = doc_id_matrix(rows_of(decided.read("kept_doc_id"), others).column(0))
    wanted = side_by_side(clusters[others], names, decided.reasons[others] != REFERENCE)
    found = find_rows(held, sorted_rows(held), wanted)
    kept[others] = np.where(found < 0, others, np.append(several, -1)[found])
    return kept


def _kept_by_rule(decided: Decided, doc_ids: U8, clusters: I64) -> I64:
    """For each row the one of its group that comes first by the recipe's rule, a keyed hash, its id, its place."""
    stage, raw_row_groups = decided.stage, decided.raw_row_groups
    dedup = stage.recipe.dedup
    kept = np.arange(len(doc_ids))
    if dedup.mode == "off":
        return kept
    groups = group_numbers(doc_ids) if dedup.mode == "exact" else clusters
    rows = _in_several(groups)
    source = rows_of(rows_read(stage, raw_row_groups, *PLACE, "score"), rows)
    place = place_columns(stage, source)
    scores = source.column("score").to_numpy()
    has_none = np.isnan(scores)
    ids = doc_ids[rows]
    rule: list[npt.NDArray[Any]] = {
        "pool_priority": place[:1],
        "random": [],
        "longest": [-text_bytes(stage, raw_row_groups)[rows]] if dedup.keep == "longest" else [],
        "highest_score": [has_none, np.where(has_none, 0, -scores)],
    }[dedup.keep]
    columns = [*rule, keyed_hash(ids, derive_seed(stage.recipe.seed, "kept")), group_numbers(ids), *place]
    in_order = rows[np.lexsort([*columns[::-1], groups[rows]])]
    is_first = np.diff(groups[in_order], prepend=-1) > 0
    kept[in_order] = in_order[is_first][np.cumsum(is_first) - 1]
    return kept


def _in_several(numbers: I64) -> I64:
    """The rows whose number is that of other rows too."""
    return np.flatnonzero((np.bincount(numbers) > 1)[numbers])


CHECKS = [
    law(
        every_row_has_one_decision,
        blocking=True,
        description="Fails when a document was lost or decided twice between reading and clustering, or is said to be "
        f"in other pools than it is. {AGAIN}",
    ),
    law(
        one_document_is_kept_per_cluster,
        blocking=True,
        description="Fails when duplicates stay in, all copies of a text are removed, or another one is kept than the "
        f"rule names. {AGAIN}",
    ),
]
