"""Promise: clusters are the components of documents that share a bucket, and the rule's document is kept of each."""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

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

I64 = npt.NDArray[np.int64]

MAX_REMOVED_SHARE = 0.5
MAX_CLUSTER_SHARE = 0.05
SMALL_CLUSTER = 100
PLACE = ("pool", "file", "row_group", "row")
DUPLICATES = ("exact_duplicate", "near_duplicate")
MAX_VERIFIED_CLUSTERS = 100  # recounted with Python sets, and of so many members at most
MAX_VERIFIED_CLUSTER = 64
MAX_VERIFIED_PAIRS = 200


def every_row_has_one_decision(stage: Stage, lsh_clusters: ArtifactRef, raw_row_groups: ArtifactRef) -> Verdict:
    """Each raw unit's slice holds the unit's documents, one decision a row, in the unit's order, with their pools."""
    violations, rows = [], 0
    pools = _pools_of_texts(stage, raw_row_groups)
    for unit in units_in(stage, raw_row_groups):
        read = stage.table(unit, ROWS_NAME, ["doc_id"]).column("doc_id").to_pylist()
        decided = stage.table(lsh_clusters, slice_name(unit.unit), ["doc_id", "pools"])
        found = decided.column("doc_id").to_pylist()
        rows += len(read)
        if read != found:
            at = next((row for row, pair in enumerate(zip(read, found, strict=False)) if pair[0] != pair[1]), None)
            violations.append(f"{unit.unit}: {len(read):,} rows, {len(found):,} decisions, first difference at {at}")
        violations += [
            f"{unit.unit}: {doc_id.hex()[:16]} is in pools {pools[doc_id]}, found {stated}"
            for doc_id, stated in zip(found, decided.column("pools").to_pylist(), strict=True)
            if stated != pools.get(doc_id, stated)
        ]
    return verdict_of("one decision for every raw row, in order", violations, f"{rows:,} rows")


def _pools_of_texts(stage: Stage, raw_row_groups: ArtifactRef) -> dict[bytes, str]:
    """The names of all pools that hold each text, in the recipe's order, with commas."""
    names = pool_names(stage.recipe)
    found: dict[bytes, int] = {}
    for unit in units_in(stage, raw_row_groups):
        rows = stage.table(unit, ROWS_NAME, ["doc_id", "pool"])
        for doc_id, pool in zip(rows.column("doc_id").to_pylist(), rows.column("pool").to_pylist(), strict=True):
            found[doc_id] = found.get(doc_id, 0) | 1 << names.index(pool)
    listed = {bits: ",".join(name for at, name in enumerate(names) if bits >> at & 1) for bits in {*found.values()}}
    return {doc_id: listed[bits] for doc_id, bits in found.items()}


def one_document_is_kept_per_cluster(stage: Stage, lsh_clusters: ArtifactRef, raw_row_groups: ArtifactRef) -> Verdict:
    """In each cluster exactly one row is kept (none where a reference set excludes it; every row in mode off).

    It is the one that the recipe's rule names, and the others were removed for it. Where near-copies are removed within
    a crawl only, at least one is kept, no text twice, and others were removed for a kept one of their cluster.
    """
    table = decisions(stage, lsh_clusters, raw_row_groups)
    clusters = table.column("cluster_id").to_pylist()
    used = table.column("kept").to_pylist()
    kept = Counter(cluster for cluster, is_kept in zip(clusters, used, strict=True) if is_kept)
    size = Counter(clusters)
    reasons = table.column("reason").to_pylist()
    excluded = {cluster for cluster, reason in zip(clusters, reasons, strict=True) if reason == "reference"}
    dedup = stage.recipe.dedup
    texts = Counter(text for text, is_kept in zip(table.column("doc_id").to_pylist(), used, strict=True) if is_kept)
    violations = [
        f"text {text.hex()[:16]}: expected once, found {count:,} times among the kept"
        for text, count in texts.items()
        if count > 1 and dedup.mode != "off"
    ]
    violations += [
        f"cluster {cluster.hex()[:16]} of {rows:,} rows: expected {limits.start:,} kept, found {kept[cluster]:,}"
        for cluster, rows in size.items()
        if kept[cluster] not in (limits := _kept_of(dedup, rows, cluster in excluded))
    ]
    violations += other_rows(stage, table, raw_row_groups) or _decided_otherwise(stage, table, raw_row_groups)
    return verdict_of("one kept document a cluster, by the rule", violations, f"{len(size):,} clusters")


def _decided_otherwise(stage: Stage, table: pa.Table, raw_row_groups: ArtifactRef) -> list[str]:
    """Rows whose kept, kept_doc_id or reason does not follow from clusters, references and the rule."""
    doc_ids, named = (doc_id_matrix(table.column(name)) for name in ("doc_id", "kept_doc_id"))
    kept = (
        _kept_within_clusters(table)
        if stage.recipe.dedup.scope == "dump"
        else _kept_by_rule(stage, table, raw_row_groups)
    )
    excluding = {reference.name for reference in stage.recipe.references if reference.action == "exclude"}
    sets = table.column("references").unique().to_pylist()
    excluded = pa.array([one for one in sets if not excluding.isdisjoint(one.split(","))], pa.string())
    reason = np.where((doc_ids == doc_ids[kept]).all(axis=1), "exact_duplicate", "near_duplicate").astype(object)
    reason[kept == np.arange(len(kept))] = "kept"
    reason[np.asarray(pc.is_in(table.column("references"), excluded))] = "reference"
    is_other = (named != doc_ids[kept]).any(axis=1) | (np.asarray(table.column("kept")) != (reason == "kept"))
    is_other |= np.array(table.column("reason").to_pylist(), object) != reason
    other = np.flatnonzero(is_other)
    found = table.take(pa.array(other)).to_pylist()
    return [
        f"{row['doc_id'].hex()[:16]}: expected {wanted} for {doc_ids[one].tobytes().hex()[:16]}, found {row['reason']}"
        f" for {row['kept_doc_id'].hex()[:16]} and kept {row['kept']}"
        for row, wanted, one in zip(found, reason[other].tolist(), kept[other].tolist(), strict=True)
    ]


def _kept_within_clusters(table: pa.Table) -> I64:
    """For each row itself where it is kept, else a kept row of its cluster with the text that it names.

    Where a reference set excludes the cluster no row is kept, so any of that text will do.
    """
    names = ("doc_id", "cluster_id", "kept_doc_id", "kept", "reason")
    doc_ids, clusters, named, is_kept, reasons = (table.column(name).to_pylist() for name in names)
    members = {key: number for number, key in enumerate(zip(clusters, doc_ids, is_kept, strict=True))}
    rows = zip(clusters, named, is_kept, reasons, strict=True)
    return np.array(
        [
            number if kept else members.get((cluster, other, reason != "reference"), number)
            for number, (cluster, other, kept, reason) in enumerate(rows)
        ],
        np.int64,
    )


def _kept_by_rule(stage: Stage, table: pa.Table, raw_row_groups: ArtifactRef) -> I64:
    """For each row the one of its group that comes first by the recipe's rule, a keyed hash, its id, its place."""
    dedup = stage.recipe.dedup
    if dedup.mode == "off":
        return np.arange(table.num_rows)
    source = source_rows(stage, raw_row_groups, [*PLACE, "score"])
    place = place_columns(stage, source)
    scores = source.column("score").to_numpy()
    has_none = np.isnan(scores)
    ids = doc_id_matrix(table.column("doc_id"))
    keys = keyed_hash(ids, derive_seed(stage.recipe.seed, "kept"))
    rule = {
        "pool_priority": place[:1],
        "random": [],
        "longest": [-text_bytes(stage, raw_row_groups)] if dedup.keep == "longest" else [],
        "highest_score": [has_none, np.where(has_none, 0, -scores)],
    }[dedup.keep]
    columns = [*rule, keys, *ids.copy().view(">u8").T, *place]
    group = group_codes(table.column("doc_id" if dedup.mode == "exact" else "cluster_id"))
    order = np.lexsort([*columns[::-1], group])
    first = order[np.unique(group[order], return_index=True)[1]]
    return np.asarray(first[group])


def group_codes(doc_ids: pa.ChunkedArray) -> I64:
    """Numbers of equal doc_ids, ascending with them: binary[n] -> int64[n]."""
    return np.unique(whole(doc_id_matrix(doc_ids)), return_inverse=True)[1].astype(np.int64)


def source_rows(stage: Stage, raw_row_groups: ArtifactRef, columns: Sequence[str]) -> pa.Table:
    """Narrow columns of all rows, unit after unit."""
    return pa.concat_tables([stage.table(unit, ROWS_NAME, columns) for unit in units_in(stage, raw_row_groups)])


def text_bytes(stage: Stage, raw_row_groups: ArtifactRef) -> I64:
    """UTF-8 bytes of all rows' texts, unit after unit: int64[n]."""
    texts = (stage.table(unit, ROWS_NAME, ["text"]).column("text") for unit in units_in(stage, raw_row_groups))
    return np.concatenate([np.asarray(pc.binary_length(some), np.int64) for some in texts])


def place_columns(stage: Stage, source: pa.Table) -> list[I64]:
    """Where rows are in the source, as columns to sort by: pool by priority, file, row group, row."""
    pools = np.asarray(pc.index_in(source.column("pool"), pa.array(pool_names(stage.recipe))), np.int64)
    files = np.unique(np.array(source.column("file").to_pylist(), object), return_inverse=True)[1].astype(np.int64)
    return [pools, files, *(np.asarray(source.column(name), np.int64) for name in ("row_group", "row"))]


def _kept_of(dedup: Dedup, rows: int, is_excluded: bool) -> range:
    """How many of a cluster's rows may be kept."""
    if is_excluded:
        return range(1)
    if dedup.mode == "off":
        return range(rows, rows + 1)
    return range(1, rows + 1) if dedup.scope == "dump" else range(1, 2)


def clusters_are_connected_components(
    stage: Stage, lsh_clusters: ArtifactRef, raw_row_groups: ArtifactRef, minhash_signatures: ArtifactRef
) -> Verdict:
    """Recounted from the whole signatures: rows with 8 equal values in a band, or equal texts, are in one component.

    The route is another one: no band keys and no buckets, but the bands' raw bytes, and scipy's components. Verified
    edges are recounted on a sample, with Python sets of words. A cluster is named after its smallest doc_id and says
    how many rows it has.
    """
    table = decisions(stage, lsh_clusters, raw_row_groups)
    doc_ids = doc_id_matrix(table.column("doc_id"))
    claimed = group_codes(table.column("cluster_id"))
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
        violations += _removed_across_dumps(corpus, table, doc_ids, signatures)
    violations += _misnamed(table, doc_ids, claimed)
    return verdict_of("clusters = components of the bucket graph", violations, f"{claimed.max() + 1:,} clusters")


def _misnamed(table: pa.Table, doc_ids: npt.NDArray[np.uint8], claimed: I64) -> list[str]:
    """Rows whose cluster is not named after its smallest doc_id, or that state another size of it."""
    by_id = np.argsort(whole(doc_ids), kind="stable")
    smallest = by_id[np.unique(claimed[by_id], return_index=True)[1]][claimed]
    sizes, stated = np.bincount(claimed)[claimed], np.asarray(table.column("cluster_size"))
    named = doc_id_matrix(table.column("cluster_id"))
    return [
        f"{doc_ids[row].tobytes().hex()[:16]}: expected cluster {doc_ids[smallest[row]].tobytes().hex()[:16]}"
        f" of {sizes[row]:,} rows, found {named[row].tobytes().hex()[:16]} of {stated[row]:,}"
        for row in np.flatnonzero((named != doc_ids[smallest]).any(axis=1) | (stated != sizes)).tolist()
    ]


def all_signatures(stage: Stage, signed: list[ArtifactRef]) -> npt.NDArray[np.uint32]:
    return np.concatenate([stage.array(unit, SIGNATURES) for unit in signed])


def near_components(
    doc_ids: npt.NDArray[np.uint8],
    signatures: npt.NDArray[np.uint32],
    rows_per_band: int,
    apart: npt.NDArray[np.uint8] | None = None,
) -> npt.NDArray[np.int32]:
    """Components of rows of equal text, or equal in a band; with `apart` (bytes a row), of rows equal in those too."""
    rows = itertools.chain([doc_ids], bands_of(signatures, rows_per_band))
    edges = [_equal_rows(row if apart is None else np.hstack([row, apart])) for row in rows]
    return _components(len(doc_ids), np.concatenate(edges))


def _other_partition(
    doc_ids: npt.NDArray[np.uint8], labels: npt.NDArray[np.int32], claimed: npt.NDArray[np.int64]
) -> list[str]:
    pairs = np.unique(np.column_stack([labels, claimed]), axis=0)
    spread = np.flatnonzero(np.bincount(pairs[:, 0]) > 1)
    joined = np.flatnonzero(np.bincount(pairs[:, 1]) > 1)
    first_of_label, first_of_cluster = (np.unique(one, return_index=True)[1] for one in (labels, claimed))
    violations = [
        f"the component of document {doc_ids[row].tobytes().hex()[:16]} is spread over clusters"
        for row in first_of_label[spread].tolist()
    ]
    return violations + [
        f"the cluster of document {doc_ids[row].tobytes().hex()[:16]} joins components"
        for row in first_of_cluster[joined].tolist()
    ]


def _removed_across_dumps(
    corpus: Corpus, table: pa.Table, doc_ids: npt.NDArray[np.uint8], signatures: npt.NDArray[np.uint32]
) -> list[str]:
    """Removed rows whose component within their own crawl does not hold the text that is kept in their place."""
    crawls = np.unique(corpus.column("dump").fill_null("").to_pylist(), return_inverse=True)[1].astype(np.uint32)
    apart = np.ascontiguousarray(crawls[:, None]).view(np.uint8)
    rows_per_band = minhash_params(corpus.stage.recipe).rows_per_band
    labels = near_components(doc_ids, signatures, rows_per_band, apart).tolist()
    texts = table.column("doc_id").to_pylist()
    held = set(zip(labels, texts, strict=True))
    kept, reasons = table.column("kept_doc_id").to_pylist(), table.column("reason").to_pylist()
    return [
        f"{text.hex()[:16]} was removed for {other.hex()[:16]}, to which nothing of its crawl connects it"
        for label, text, other, reason in zip(labels, texts, kept, reasons, strict=True)
        if reason in DUPLICATES and other != text and (label, other) not in held
    ]


def verified_differently(
    corpus: Corpus, signatures: npt.NDArray[np.uint32], claimed: npt.NDArray[np.int64]
) -> list[str]:
    """A sample of clusters that verified pairs do not connect, and of verified pairs that lie in two clusters."""
    groups = [members for members in _sampled_groups(claimed) if len(members) <= MAX_VERIFIED_CLUSTER]
    torn = _split_neighbours(corpus, signatures, claimed)
    runs = _runs_of(corpus, {*itertools.chain(*groups), *itertools.chain(*torn)})
    names = {number: corpus.doc_ids[number].tobytes().hex()[:16] for number in runs}
    threshold = corpus.stage.recipe.dedup.verify_jaccard
    assert threshold is not None

    def are_joined(first: int, second: int) -> bool:
        if bool((corpus.doc_ids[first] == corpus.doc_ids[second]).all()):
            return True
        return _share_a_band(corpus, signatures, first, second) and are_alike(runs[first], runs[second], threshold)

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


def _share_a_band(corpus: Corpus, signatures: npt.NDArray[np.uint32], first: int, second: int) -> bool:
    """Whether two documents agree in all values of a band; without words they agree in nothing."""
    rows_per_band = minhash_params(corpus.stage.recipe).rows_per_band
    equal = (signatures[first] == signatures[second]) & (signatures[first] != 0xFFFFFFFF)
    return bool(equal.reshape(-1, rows_per_band).all(axis=1).any())


def _split_neighbours(
    corpus: Corpus, signatures: npt.NDArray[np.uint32], claimed: npt.NDArray[np.int64]
) -> list[tuple[int, int]]:
    """Neighbours of two clusters in small groups of equal bands: larger groups are not compared in full."""
    found: set[tuple[int, int]] = set()
    for band in bands_of(signatures, minhash_params(corpus.stage.recipe).rows_per_band):
        pairs = _equal_rows(band)
        labels = _components(len(band), pairs)
        size = np.bincount(labels)[labels]
        pairs = pairs[(size[pairs[:, 0]] <= MAX_COMPARED) & (claimed[pairs[:, 0]] != claimed[pairs[:, 1]])]
        found.update(map(tuple, np.sort(pairs, axis=1).tolist()))
    return sorted(found)[:MAX_VERIFIED_PAIRS]


def bands_of(signatures: npt.NDArray[np.uint32], rows_per_band: int) -> Iterator[npt.NDArray[np.uint8]]:
    """The bytes of each band of the documents that have words; a wordless row differs from all others in each."""
    wordless = np.flatnonzero((signatures == 0xFFFFFFFF).all(axis=1))
    for start in range(0, signatures.shape[1], rows_per_band):
        band = signatures[:, start : start + rows_per_band].astype(np.uint64)
        band[wordless] = 2**40 + wordless[:, None].astype(np.uint64)
        yield np.ascontiguousarray(band).view(np.uint8)


def whole(rows: npt.NDArray[np.uint8]) -> npt.NDArray[np.void]:
    """Each row's bytes as one value: uint8[n, w] -> void[n]."""
    return np.ascontiguousarray(rows).view(f"V{rows.shape[1]}").ravel()


def _equal_rows(rows: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """Edges between rows of equal bytes, neighbours in sorted order: int64[m, 2]."""
    keys = whole(rows)
    order = np.argsort(keys, kind="stable")
    same = np.flatnonzero(keys[order][1:] == keys[order][:-1])
    return np.column_stack([order[same], order[same + 1]])


def _components(num_nodes: int, edges: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    from scipy.sparse import coo_array  # half a second: not with the code location
    from scipy.sparse.csgraph import connected_components

    graph = coo_array((np.ones(len(edges), np.int8), (edges[:, 0], edges[:, 1])), shape=(num_nodes, num_nodes))
    labels: npt.NDArray[np.int32] = connected_components(graph, directed=False)[1]
    return labels


def removal_is_plausible(stage: Stage, lsh_clusters: ArtifactRef, raw_row_groups: ArtifactRef) -> Verdict:
    """No pool loses half of its documents, no cluster holds a twentieth of the corpus, and no document was left out.

    Left out are documents of buckets so large that not all of them were compared, where pairs are verified.
    """
    documents: Counter[str] = Counter()
    removed: Counter[str] = Counter()
    cluster_sizes: Counter[bytes] = Counter()
    for unit in units_in(stage, raw_row_groups):
        table = stage.table(lsh_clusters, slice_name(unit.unit), ["cluster_id", "kept"])
        documents[unit.counts["pool"]] += table.num_rows
        removed[unit.counts["pool"]] += table.column("kept").to_pylist().count(False)
        cluster_sizes.update(table.column("cluster_id").to_pylist())
    shares = {name: removed[name] / count for name, count in documents.items() if count}
    violations = [
        f"pool {name} loses {share:.1%} of its documents" for name, share in shares.items() if share > MAX_REMOVED_SHARE
    ]
    largest, limit = max(cluster_sizes.values()), max(SMALL_CLUSTER, MAX_CLUSTER_SHARE * documents.total())
    if largest > limit:
        violations.append(f"the largest cluster holds {largest:,} of {documents.total():,} documents")
    if left := stage.open(lsh_clusters)[1].counts.get(LEFT, 0):
        violations.append(
            f"expected 0 documents left unverified, found {left:,}, once for each band that they share with too many:"
            " near copies among them may stay; raise dedup.rows_per_band (and dedup.num_bands with it), or take"
            " dedup.verify_jaccard out"
        )
    listed = ", ".join(f"{name} {share:.1%}" for name, share in shares.items())
    return Verdict(
        expected=f"less than {MAX_REMOVED_SHARE:.0%} of each pool removed, no cluster above {limit:,.0f} documents,"
        " none left unverified",
        found=f"removed: {listed}; largest cluster {largest:,}; left unverified {left:,}",
        num_violations=len(violations),
        examples=[{"violation": violation} for violation in violations[:MAX_EXAMPLES]],
        numbers={
            "largest_cluster": largest,
            LEFT: left,
            **{f"removed_share_{name}": share for name, share in shares.items()},
        },
    )


def other_rows(stage: Stage, table: pa.Table, raw_row_groups: ArtifactRef) -> list[str]:
    """A violation where decisions cannot be laid beside the rows: `every_row_has_one_decision` says which are lost."""
    rows = sum(unit.counts["documents"] for unit in units_in(stage, raw_row_groups))
    return [] if table.num_rows == rows else [f"expected {rows:,} decisions, found {table.num_rows:,}"]


def decisions(stage: Stage, lsh_clusters: ArtifactRef, raw_row_groups: ArtifactRef) -> pa.Table:
    """All decisions, unit after unit."""
    return pa.concat_tables(
        [stage.table(lsh_clusters, slice_name(unit.unit)) for unit in units_in(stage, raw_row_groups)]
    )


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
        "source), or leaves documents unverified. Look at the largest clusters and the evidence before you train.",
    ),
]
