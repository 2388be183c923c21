"""Promise: clusters are the components of documents that share a bucket, and the rule's document is kept of each.

Cost: columns of all rows, of which doc_ids are the widest, and the values of one band at a time.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
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
    joined,
    named,
    places_in,
    run_starts,
    sorted_rows,
    whole,
)
from asset_checks.likeness import likeness_to_kept
from asset_checks.similarity import Runs, are_alike, word_runs
from asset_checks.verdicts import MAX_EXAMPLES, Verdict, law, verdict_of
from pipeline_assets.clusters import LEFT, slice_name, split_units
from pipeline_assets.corpus import Corpus
from pipeline_assets.recipe import Dedup
from pipeline_assets.signatures import SIGNATURES, minhash_params
from pipeline_assets.source import ROWS_NAME, pool_names
from pipeline_assets.stripes import Stage, units_in
from pipeline_assets.transforms.rows import doc_id_matrix
from pipeline_assets.transforms.verify import MAX_COMPARED
from resources.artifact_store import ArtifactRef
from training_io.hashing import derive_seed, keyed_hash

Signatures = Sequence[npt.NDArray[np.uint32]]  # of each unit, [rows, num_perm]

MAX_REMOVED_SHARE = 0.5
MAX_CLUSTER_SHARE = 0.05
SMALL_CLUSTER = 100
PLACE = ("pool", "file", "row_group", "row")
DUPLICATES = ("exact_duplicate", "near_duplicate")
REASONS = (*DUPLICATES, "kept", "reference")
EXACT, NEAR, KEPT, REFERENCE = range(len(REASONS))
NO_VALUE = 0xFFFFFFFF  # all values of the signature of a text without words
MAX_VERIFIED_CLUSTERS = 100  # recounted with Python sets, and of so many members at most
MAX_VERIFIED_CLUSTER = 64
MAX_VERIFIED_PAIRS = 200


def every_row_has_one_decision(stage: Stage, lsh_clusters: ArtifactRef, raw_row_groups: ArtifactRef) -> Verdict:
    """Each raw unit's slice holds the unit's documents, one decision a row, in the unit's order, with their pools."""
    violations = []
    doc_ids = _ids(_read(stage, raw_row_groups, "doc_id"))
    by_doc_id = sorted_rows(doc_ids)
    pools, names = _pools_of_texts(stage, raw_row_groups, doc_ids, by_doc_id)
    decided = _Decided(stage, lsh_clusters, raw_row_groups).read("doc_id", "pools")
    tables = zip(units_in(stage, raw_row_groups), _read(stage, raw_row_groups, "doc_id"), decided, strict=True)
    for unit, rows_read, table in tables:
        read, found = (doc_id_matrix(some.column("doc_id")) for some in (rows_read, table))
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
    places, found = named(table.column("pool") for table in _read(stage, raw_row_groups, "pool"))
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
    decided = _Decided(stage, lsh_clusters, raw_row_groups)
    table = pa.concat_tables(decided.read("kept"))
    is_kept = np.asarray(table.column("kept"))
    clusters = group_numbers(_ids(decided.read("cluster_id")))
    violations = [] if stage.recipe.dedup.mode == "off" else _texts_kept_twice(decided, np.flatnonzero(is_kept))
    violations += _clusters_kept_otherwise(decided, clusters, is_kept)
    violations += other_rows(stage, table, raw_row_groups) or _decided_otherwise(decided, clusters, is_kept)
    return verdict_of("one kept document a cluster, by the rule", violations, f"{clusters.max() + 1:,} clusters")


@dataclass(frozen=True)
class _Decided:
    """What was decided about all rows; rows by number, unit after unit."""

    stage: Stage
    lsh_clusters: ArtifactRef
    raw_row_groups: ArtifactRef

    def read(self, *columns: str) -> Iterator[pa.Table]:
        """Columns of the decisions, unit after unit."""
        units = units_in(self.stage, self.raw_row_groups)
        return (self.stage.table(self.lsh_clusters, slice_name(unit.unit), columns) for unit in units)

    @property
    def reasons(self) -> Numbers:
        """Why each row is kept or not, as a place in REASONS, -1 for another reason: int32[n]."""
        return np.concatenate([places_in(REASONS, table.column("reason")) for table in self.read("reason")])


def _read(stage: Stage, raw_row_groups: ArtifactRef, *columns: str) -> Iterator[pa.Table]:
    """Columns of the rows, unit after unit."""
    return (stage.table(unit, ROWS_NAME, columns) for unit in units_in(stage, raw_row_groups))


def _ids(tables: Iterable[pa.Table]) -> U8:
    """The doc_ids in the only column of tables one after another: uint8[n, 32]."""
    return joined(doc_id_matrix(table.column(0)) for table in tables)


def rows_of(tables: Iterable[pa.Table], rows: I64) -> pa.Table:
    """Some rows, which ascend, of tables one after another."""
    found, first = [], 0
    for table in tables:
        start, end = np.searchsorted(rows, [first, first + table.num_rows])
        found.append(table.take(pa.array(rows[start:end] - first)))
        first += table.num_rows
    return pa.concat_tables(found)


def _first_rows(numbers: npt.NDArray[np.integer[Any]], wanted: I64) -> I64:
    """The first row of each wanted number, all of which are there; they ascend: int64[len(wanted)]."""
    rows = np.flatnonzero(np.isin(numbers, wanted))
    return rows[np.unique(numbers[rows], return_index=True)[1]]


def _in_several(numbers: I64) -> I64:
    """The rows whose number is that of other rows too."""
    return np.flatnonzero((np.bincount(numbers) > 1)[numbers])


def _texts_kept_twice(decided: _Decided, rows: I64) -> list[str]:
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


def _clusters_kept_otherwise(decided: _Decided, clusters: I64, is_kept: Flags) -> list[str]:
    """Clusters of which fewer or more rows are kept than may be, the earliest first."""
    sizes, kept = np.bincount(clusters), np.bincount(clusters[is_kept], minlength=clusters.max() + 1)
    is_excluded = np.zeros(len(sizes), np.bool_)
    is_excluded[clusters[decided.reasons == REFERENCE]] = True
    least, most = _kept_of(decided.stage.recipe.dedup, sizes, is_excluded)
    rows = np.sort(_first_rows(clusters, np.flatnonzero((kept < least) | (kept > most))))
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


def _decided_otherwise(decided: _Decided, clusters: I64, is_kept: Flags) -> list[str]:
    """Rows whose kept, kept_doc_id or reason does not follow from clusters, references and the rule."""
    doc_ids = _ids(decided.read("doc_id"))
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


def _kept_within_clusters(decided: _Decided, doc_ids: U8, clusters: I64, is_kept: Flags) -> I64:
    """For each row itself where it is kept, else a kept row of its cluster with the text that it names.

    Where a reference set excludes the cluster no row is kept, so any of that text will do.
    """
    kept = np.arange(len(doc_ids))
    several = _in_several(clusters)
    others = several[~is_kept[several]]
    held = _side_by_side(clusters[several], doc_ids[several], is_kept[several])
    names = doc_id_matrix(rows_of(decided.read("kept_doc_id"), others).column(0))
    wanted = _side_by_side(clusters[others], names, decided.reasons[others] != REFERENCE)
    found = find_rows(held, sorted_rows(held), wanted)
    kept[others] = np.where(found < 0, others, np.append(several, -1)[found])
    return kept


def _side_by_side(*columns: npt.NDArray[Any]) -> U8:
    """The bytes of each row's values, one column after another: uint8[n, w]."""
    tables = [one if one.ndim == 2 else one[:, None] for one in columns]
    return np.hstack([np.ascontiguousarray(one).view(np.uint8) for one in tables])


def _kept_by_rule(decided: _Decided, doc_ids: U8, clusters: I64) -> I64:
    """For each row the one of its group that comes first by the recipe's rule, a keyed hash, its id, its place."""
    stage, raw_row_groups = decided.stage, decided.raw_row_groups
    dedup = stage.recipe.dedup
    kept = np.arange(len(doc_ids))
    if dedup.mode == "off":
        return kept
    groups = group_numbers(doc_ids) if dedup.mode == "exact" else clusters
    rows = _in_several(groups)
    source = rows_of(_read(stage, raw_row_groups, *PLACE, "score"), rows)
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


def source_rows(stage: Stage, raw_row_groups: ArtifactRef, columns: Sequence[str]) -> pa.Table:
    """Narrow columns of all rows, unit after unit."""
    return pa.concat_tables([stage.table(unit, ROWS_NAME, columns) for unit in units_in(stage, raw_row_groups)])


def text_bytes(stage: Stage, raw_row_groups: ArtifactRef) -> I64:
    """UTF-8 bytes of all rows' texts, unit after unit: int64[n]."""
    texts = (stage.table(unit, ROWS_NAME, ["text"]).column("text") for unit in units_in(stage, raw_row_groups))
    return np.concatenate([np.asarray(pc.binary_length(some), np.int64) for some in texts])


def place_columns(stage: Stage, source: pa.Table) -> list[npt.NDArray[Any]]:
    """Where rows are in the source, as columns to sort by: pool by priority, file, row group, row."""
    pools, files = places_in(pool_names(stage.recipe), source.column("pool")), named([source.column("file")])[0]
    return [pools, files, *(np.asarray(source.column(name), np.int64) for name in ("row_group", "row"))]


def clusters_are_connected_components(
    stage: Stage, lsh_clusters: ArtifactRef, raw_row_groups: ArtifactRef, minhash_signatures: ArtifactRef
) -> Verdict:
    """Recounted from the whole signatures: rows with 8 equal values in a band, or equal texts, are in one component.

    The route is another one: no band keys and no buckets, but the bands' raw bytes, and scipy's components. Verified
    edges are recounted on a sample, with Python sets of words. A cluster is named after its smallest doc_id and says
    how many rows it has.
    """
    decided = _Decided(stage, lsh_clusters, raw_row_groups)
    claimed = group_numbers(_ids(decided.read("cluster_id")))
    if violations := other_rows(stage, pa.concat_tables(decided.read("kept")), raw_row_groups):
        return verdict_of("clusters = components of the bucket graph", violations, f"{len(claimed):,} decisions")
    doc_ids = _ids(decided.read("doc_id"))
    dedup = stage.recipe.dedup
    signed, _ = split_units(units_in(stage, minhash_signatures))
    corpus = Corpus(stage, units_in(stage, raw_row_groups), signed)
    signatures = all_signatures(stage, signed)
    rows_per_band = minhash_params(stage.recipe).rows_per_band
    if dedup.verify_jaccard is not None:
        violations = verified_differently(corpus, signatures, claimed)
    elif dedup.mode == "exact":
        violations = _other_partition(doc_ids, _components(len(doc_ids), _equal_rows(doc_ids)), claimed)
    else:
        violations = _other_partition(doc_ids, near_components(doc_ids, signatures, rows_per_band), claimed)
    if dedup.scope == "dump":
        violations += _removed_across_dumps(decided, doc_ids, signatures)
    violations += _misnamed(decided, doc_ids, claimed)
    return verdict_of("clusters = components of the bucket graph", violations, f"{claimed.max() + 1:,} clusters")


def _misnamed(decided: _Decided, doc_ids: U8, claimed: I64) -> list[str]:
    """Rows whose cluster is not named after its smallest doc_id, or that state another size of it."""
    by_id = sorted_rows(doc_ids)
    smallest = by_id[np.unique(claimed[by_id], return_index=True)[1]]
    del by_id
    sizes = np.bincount(claimed)
    violations, first = [], 0
    for table in decided.read("cluster_id", "cluster_size"):
        clusters = claimed[first : first + table.num_rows]
        found, stated = doc_id_matrix(table.column("cluster_id")), np.asarray(table.column("cluster_size"))
        names = doc_ids[smallest[clusters]]
        violations += [
            f"{doc_ids[first + row].tobytes().hex()[:16]}: expected cluster {names[row].tobytes().hex()[:16]}"
            f" of {sizes[clusters[row]]:,} rows, found {found[row].tobytes().hex()[:16]} of {stated[row]:,}"
            for row in np.flatnonzero((whole(found) != whole(names)) | (stated != sizes[clusters])).tolist()
        ]
        first += table.num_rows
    return violations


def all_signatures(stage: Stage, signed: list[ArtifactRef]) -> Signatures:
    """The signatures of each unit, mapped where they are large."""
    return [stage.array(unit, SIGNATURES) for unit in signed]


def near_components(doc_ids: U8, signatures: Signatures, rows_per_band: int, apart: U8 | None = None) -> Numbers:
    """Components of rows of equal text, or equal in a band; with `apart` (bytes a row), of rows equal in those too.

    Bands unite the components that those before them left, so the values of one at a time are held.
    """
    texts = doc_ids if apart is None else np.hstack([doc_ids, apart])
    labels = _components(len(texts), _equal_rows(texts))
    del texts
    for edges in _edges_of_bands(signatures, rows_per_band, apart):
        labels = _components(int(labels.max()) + 1, labels[edges])[labels]
    return labels


def _other_partition(doc_ids: U8, labels: Numbers, claimed: I64) -> list[str]:
    num_clusters = claimed.max() + 1
    pairs = np.unique(labels.astype(np.int64) * num_clusters + claimed)
    spread, joining = (np.flatnonzero(np.bincount(side) > 1) for side in (pairs // num_clusters, pairs % num_clusters))
    violations = [
        f"the component of document {doc_ids[row].tobytes().hex()[:16]} is spread over clusters"
        for row in _first_rows(labels, spread).tolist()
    ]
    return violations + [
        f"the cluster of document {doc_ids[row].tobytes().hex()[:16]} joins components"
        for row in _first_rows(claimed, joining).tolist()
    ]


def _removed_across_dumps(decided: _Decided, doc_ids: U8, signatures: Signatures) -> list[str]:
    """Removed rows whose component within their own crawl does not hold the text that is kept in their place."""
    crawls, _ = named(table.column("dump") for table in _read(decided.stage, decided.raw_row_groups, "dump"))
    rows_per_band = minhash_params(decided.stage.recipe).rows_per_band
    labels = near_components(doc_ids, signatures, rows_per_band, _side_by_side(crawls))
    removed = np.flatnonzero(np.isin(decided.reasons, (EXACT, NEAR)))
    kept = doc_id_matrix(rows_of(decided.read("kept_doc_id"), removed).column(0))
    held = _side_by_side(labels, doc_ids)
    is_lost = find_rows(held, sorted_rows(held), _side_by_side(labels[removed], kept)) < 0
    return [
        f"{doc_ids[removed[place]].tobytes().hex()[:16]} was removed for {kept[place].tobytes().hex()[:16]}, to which"
        " nothing of its crawl connects it"
        for place in np.flatnonzero(is_lost).tolist()
    ]


def verified_differently(corpus: Corpus, signatures: Signatures, claimed: I64) -> list[str]:
    """A sample of clusters that verified pairs do not connect, and of verified pairs that lie in two clusters."""
    groups = [members for members in _sampled_groups(claimed) if len(members) <= MAX_VERIFIED_CLUSTER]
    torn = _split_neighbours(corpus, signatures, claimed)
    runs = _runs_of(corpus, {*itertools.chain(*groups), *itertools.chain(*torn)})
    wanted = np.array(sorted(runs), np.int64)
    signed = dict(zip(wanted.tolist(), corpus.signatures(wanted), strict=True))
    names = {number: corpus.doc_ids[number].tobytes().hex()[:16] for number in runs}
    rows_per_band = minhash_params(corpus.stage.recipe).rows_per_band
    threshold = corpus.stage.recipe.dedup.verify_jaccard
    assert threshold is not None

    def are_joined(first: int, second: int) -> bool:
        if bool((corpus.doc_ids[first] == corpus.doc_ids[second]).all()):
            return True
        share_a_band = _share_a_band(signed[first], signed[second], rows_per_band)
        return share_a_band and are_alike(runs[first], runs[second], threshold)

    violations = []
    for members in groups:
        places = range(len(members))
        edges = [(a, b) for a, b in itertools.combinations(places, 2) if are_joined(members[a], members[b])]
        if _components(len(members), np.array(edges, np.int64).reshape(-1, 2)).any():
            violations.append(f"the cluster of {names[members[0]]} joins texts that are not alike")
    return violations + [
        f"{names[first]} and {names[second]} are alike, share a band and are in two clusters"
        for first, second in torn
        if are_joined(first, second)
    ]


def _runs_of(corpus: Corpus, numbers: set[int]) -> dict[int, Runs]:
    """The word runs of some documents."""
    wanted = sorted(numbers)
    texts = corpus.rows(np.array(wanted, np.int64), ["text"]).column("text").to_pylist()
    ngram = corpus.stage.recipe.dedup.ngram
    return {number: word_runs(text, ngram) for number, text in zip(wanted, texts, strict=True)}


def _sampled_groups(claimed: npt.NDArray[np.int64]) -> list[list[int]]:
    """The members of the first clusters of two or more: clusters are numbered by their ids, which are hashes."""
    shared = np.flatnonzero(np.bincount(claimed) > 1)[:MAX_VERIFIED_CLUSTERS]
    return [np.flatnonzero(claimed == cluster).tolist() for cluster in shared.tolist()]


def _share_a_band(first: npt.NDArray[np.uint32], second: npt.NDArray[np.uint32], rows_per_band: int) -> bool:
    """Whether two signatures agree in all values of a band; without words they agree in nothing."""
    equal = (first == second) & (first != NO_VALUE)
    return bool(equal.reshape(-1, rows_per_band).all(axis=1).any())


def _split_neighbours(corpus: Corpus, signatures: Signatures, claimed: I64) -> list[tuple[int, int]]:
    """Neighbours of two clusters in small groups of equal bands: larger groups are not compared in full."""
    found = np.empty((0, 2), np.int64)
    for pairs in _edges_of_bands(signatures, minhash_params(corpus.stage.recipe).rows_per_band):
        labels = _components(len(claimed), pairs)
        is_small = np.bincount(labels)[labels[pairs[:, 0]]] <= MAX_COMPARED
        pairs = pairs[is_small & (claimed[pairs[:, 0]] != claimed[pairs[:, 1]])]
        found = np.unique(np.concatenate([found, np.sort(pairs, axis=1)]), axis=0)[:MAX_VERIFIED_PAIRS]
    return [(first, second) for first, second in found.tolist()]


def _edges_of_bands(signatures: Signatures, rows_per_band: int, apart: U8 | None = None) -> Iterator[I64]:
    """For each band, edges between the rows with words that are equal there (and in `apart`): int64[m, 2]."""
    has_words = [unit.min(axis=1) != NO_VALUE for unit in signatures]  # the largest value: all are, where the least is
    worded = np.flatnonzero(np.concatenate(has_words))
    width = rows_per_band * signatures[0].itemsize
    for start in range(0, signatures[0].shape[1], rows_per_band):
        values = np.empty((len(worded), width + (0 if apart is None else apart.shape[1])), np.uint8)
        first = 0
        for unit, rows in zip(signatures, has_words, strict=True):
            band = np.ascontiguousarray(unit[:, start : start + rows_per_band][rows])
            values[first : first + len(band), :width] = band.view(np.uint8)
            first += len(band)
        if apart is not None:
            values[:, width:] = apart[worded]
        yield worded[_equal_rows(values)]


def _equal_rows(rows: U8) -> I64:
    """Edges between rows of equal bytes, neighbours in sorted order: int64[m, 2]."""
    order = sorted_rows(rows)
    same = np.flatnonzero(~run_starts(rows, order))
    return np.column_stack([order[same - 1], order[same]])


def _components(num_nodes: int, edges: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    from scipy.sparse import coo_array  # half a second: not with the code location
    from scipy.sparse.csgraph import connected_components

    graph = coo_array((np.ones(len(edges), np.int8), (edges[:, 0], edges[:, 1])), shape=(num_nodes, num_nodes))
    labels: npt.NDArray[np.int32] = connected_components(graph, directed=False)[1]
    return labels


def removal_is_plausible(stage: Stage, lsh_clusters: ArtifactRef, raw_row_groups: ArtifactRef) -> Verdict:
    """No pool loses half of its documents, no cluster holds a twentieth of the corpus, and no document was left out.

    Left out are documents of buckets so large that not all of them were compared, where pairs are verified. Nor are
    most of a pool's removed documents unlike the ones kept in their place, as the ends of a chain are.
    """
    documents: Counter[str] = Counter()
    removed: Counter[str] = Counter()
    decided = _Decided(stage, lsh_clusters, raw_row_groups)
    for unit, table in zip(units_in(stage, raw_row_groups), decided.read("kept"), strict=True):
        documents[unit.counts["pool"]] += table.num_rows
        removed[unit.counts["pool"]] += int((~np.asarray(table.column("kept"))).sum())
    shares = {name: removed[name] / count for name, count in documents.items() if count}
    violations = [
        f"pool {name} loses {share:.1%} of its documents" for name, share in shares.items() if share > MAX_REMOVED_SHARE
    ]
    largest = int(np.bincount(group_numbers(_ids(decided.read("cluster_id")))).max())
    limit = max(SMALL_CLUSTER, MAX_CLUSTER_SHARE * documents.total())
    if largest > limit:
        violations.append(f"the largest cluster holds {largest:,} of {documents.total():,} documents")
    if left := stage.open(lsh_clusters)[1].counts.get(LEFT, 0):
        violations.append(
            f"expected 0 documents left unverified, found {left:,}, once for each band that they share with too many:"
            " near copies among them may stay; raise dedup.rows_per_band (and dedup.num_bands with it), or take"
            " dedup.verify_jaccard out"
        )
    likeness = likeness_to_kept(stage, lsh_clusters)
    violations += likeness.violations
    listed = ", ".join(f"{name} {share:.1%}" for name, share in shares.items())
    return Verdict(
        expected=f"less than {MAX_REMOVED_SHARE:.0%} of each pool removed, no cluster above {limit:,.0f} documents,"
        f" none left unverified, most of a pool's removed at least {likeness.limit:.3f} similar to the document kept",
        found=f"removed: {listed}; largest cluster {largest:,}; left unverified {left:,}; {likeness.found}",
        num_violations=len(violations),
        examples=[{"violation": violation} for violation in violations[:MAX_EXAMPLES]],
        numbers={
            "largest_cluster": largest,
            LEFT: left,
            **likeness.numbers,
            **{f"removed_share_{name}": share for name, share in shares.items()},
        },
    )


def other_rows(stage: Stage, table: pa.Table, raw_row_groups: ArtifactRef) -> list[str]:
    """A violation where decisions cannot be laid beside the rows: `every_row_has_one_decision` says which are lost."""
    rows = sum(unit.counts["documents"] for unit in units_in(stage, raw_row_groups))
    return [] if table.num_rows == rows else [f"expected {rows:,} decisions, found {table.num_rows:,}"]


AGAIN = "Materialize lsh_clusters again; if it fails again, report it."

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
    law(
        clusters_are_connected_components,
        blocking=True,
        description="Fails when near-copies are in two clusters, unrelated texts in one, or a cluster's name or size "
        f"is another. Where pairs are verified, {MAX_VERIFIED_CLUSTERS} clusters and {MAX_VERIFIED_PAIRS} pairs are "
        f"recounted. {AGAIN}",
    ),
    law(
        removal_is_plausible,
        blocking=False,
        description="Warns when deduplication removes an unlikely share (a template, a wrong word rule or a broken "
        "source), leaves documents unverified, or chains documents together that are unlike. Look at the largest "
        "clusters and the evidence before you train.",
    ),
]
