"""Promise: clusters are the components of documents that share a bucket, and nothing is removed without evidence."""

import itertools
from collections import Counter
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from asset_checks.similarity import (
    Runs,
    are_alike,
    documents_with_run,
    items_in,
    searched_runs,
    texts_of,
    word_runs,
)
from asset_checks.verdicts import MAX_EXAMPLES, Verdict, law, verdict_of
from pipeline_assets.clusters import slice_name, split_units
from pipeline_assets.corpus import Corpus
from pipeline_assets.duplicates import EVIDENCE_NAME
from pipeline_assets.recipe import Dedup, TokenizerSample
from pipeline_assets.reference_hits import BOILERPLATE_NAME, HITS_NAME, overlaps_of
from pipeline_assets.signatures import SIGNATURES, minhash_params
from pipeline_assets.source import ROWS_NAME
from pipeline_assets.stripes import Stage, units_in
from pipeline_assets.transforms.rows import doc_id_matrix
from pipeline_assets.transforms.verify import MAX_COMPARED
from resources.artifact_store import ArtifactRef

MAX_REMOVED_SHARE = 0.5
MAX_CLUSTER_SHARE = 0.05
SMALL_CLUSTER = 100
DUPLICATES = ("exact_duplicate", "near_duplicate")
MAX_VERIFIED_CLUSTERS = 100  # recounted with Python sets, and of so many members at most
MAX_VERIFIED_CLUSTER = 64
MAX_VERIFIED_PAIRS = 200
MAX_BOILERPLATE = 5  # runs of words whose documents are counted again
MAX_SEARCHED = 300  # documents whose runs of words are recounted


def every_row_has_one_decision(stage: Stage, lsh_clusters: ArtifactRef, raw_row_groups: ArtifactRef) -> Verdict:
    """Each raw unit's slice holds the unit's documents, one decision a row, in the unit's order."""
    violations, rows = [], 0
    for unit in units_in(stage, raw_row_groups):
        read = stage.table(unit, ROWS_NAME, ["doc_id"]).column("doc_id").to_pylist()
        decided = stage.table(lsh_clusters, slice_name(unit.unit), ["doc_id"]).column("doc_id").to_pylist()
        rows += len(read)
        if read != decided:
            at = next((row for row, pair in enumerate(zip(read, decided, strict=False)) if pair[0] != pair[1]), None)
            violations.append(f"{unit.unit}: {len(read):,} rows, {len(decided):,} decisions, first difference at {at}")
    return verdict_of("one decision for every raw row, in order", violations, f"{rows:,} rows")


def one_document_is_kept_per_cluster(stage: Stage, lsh_clusters: ArtifactRef, raw_row_groups: ArtifactRef) -> Verdict:
    """In each cluster exactly one row is kept (none where a reference set excludes it; every row in mode off).

    Where near-copies are removed within a crawl only, at least one is, and no text twice.
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
    return verdict_of("one kept document a cluster", violations, f"{len(size):,} clusters")


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
    edges are recounted on a sample, with Python sets of words.
    """
    table = decisions(stage, lsh_clusters, raw_row_groups)
    doc_ids = doc_id_matrix(table.column("doc_id"))
    claimed = np.unique(doc_id_matrix(table.column("cluster_id")), axis=0, return_inverse=True)[1].ravel()
    dedup = stage.recipe.dedup
    signed, _ = split_units(units_in(stage, minhash_signatures))
    corpus = Corpus(stage, units_in(stage, raw_row_groups), signed)
    signatures = _all_signatures(stage, signed)
    rows_per_band = minhash_params(stage.recipe).rows_per_band
    if dedup.verify_jaccard is not None:
        violations = verified_differently(corpus, signatures, claimed)
    elif dedup.mode == "exact":
        violations = _other_partition(doc_ids, _components(len(doc_ids), _equal_rows(doc_ids)), claimed)
    else:
        violations = _other_partition(doc_ids, _near_components(doc_ids, signatures, rows_per_band), claimed)
    if dedup.scope == "dump":
        violations += _removed_across_dumps(corpus, table, doc_ids, signatures)
    return verdict_of("clusters = components of the bucket graph", violations, f"{claimed.max() + 1:,} clusters")


def _all_signatures(stage: Stage, signed: list[ArtifactRef]) -> npt.NDArray[np.uint32]:
    return np.concatenate([stage.array(unit, SIGNATURES) for unit in signed])


def _near_components(
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
    violations = [
        f"the component of document {doc_ids[np.argmax(labels == label)].tobytes().hex()[:16]} is spread over clusters"
        for label in spread
    ]
    return violations + [
        f"the cluster of document {doc_ids[np.argmax(claimed == cluster)].tobytes().hex()[:16]} joins components"
        for cluster in joined
    ]


def _removed_across_dumps(
    corpus: Corpus, table: pa.Table, doc_ids: npt.NDArray[np.uint8], signatures: npt.NDArray[np.uint32]
) -> list[str]:
    """Removed rows whose component within their own crawl does not hold the text that is kept in their place."""
    crawls = np.unique(corpus.column("dump").fill_null("").to_pylist(), return_inverse=True)[1].astype(np.uint32)
    apart = np.ascontiguousarray(crawls[:, None]).view(np.uint8)
    rows_per_band = minhash_params(corpus.stage.recipe).rows_per_band
    labels = _near_components(doc_ids, signatures, rows_per_band, apart).tolist()
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


def _equal_rows(rows: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """Edges between rows of equal bytes, neighbours in sorted order: int64[m, 2]."""
    keys = np.ascontiguousarray(rows).view(f"V{rows.shape[1]}").ravel()
    order = np.argsort(keys, kind="stable")
    same = np.flatnonzero(keys[order][1:] == keys[order][:-1])
    return np.column_stack([order[same], order[same + 1]])


def _components(num_nodes: int, edges: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    from scipy.sparse import coo_array  # half a second: not with the code location
    from scipy.sparse.csgraph import connected_components

    graph = coo_array((np.ones(len(edges), np.int8), (edges[:, 0], edges[:, 1])), shape=(num_nodes, num_nodes))
    labels: npt.NDArray[np.int32] = connected_components(graph, directed=False)[1]
    return labels


def every_removal_has_evidence(
    stage: Stage, lsh_clusters: ArtifactRef, raw_row_groups: ArtifactRef, minhash_signatures: ArtifactRef
) -> Verdict:
    """The evidence names each removed row once, with the document kept in its place; exclusions have a hit."""
    table = decisions(stage, lsh_clusters, raw_row_groups)
    columns = [table.column(name).to_pylist() for name in ("doc_id", "kept_doc_id", "reason")]
    removed = Counter((doc_id, kept) for doc_id, kept, reason in zip(*columns, strict=True) if reason in DUPLICATES)
    rows = stage.table(lsh_clusters, EVIDENCE_NAME, ["removed_doc_id", "kept_doc_id"])
    evidence = Counter(
        zip(rows.column("removed_doc_id").to_pylist(), rows.column("kept_doc_id").to_pylist(), strict=True)
    )
    differing = (removed - evidence) | (evidence - removed)
    violations = [
        f"{doc_id.hex()[:16]} removed for {kept.hex()[:16]}: {removed[doc_id, kept]} decisions,"
        f" {evidence[doc_id, kept]} evidence rows"
        for doc_id, kept in differing
    ]
    violations += _excluded_without_a_hit(stage, lsh_clusters, table, minhash_signatures)
    return verdict_of("one row of evidence a removal", violations, f"{removed.total():,} removals")


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
        signatures, rows_per_band = _all_signatures(stage, signed), minhash_params(stage.recipe).rows_per_band
        groups = _near_components(doc_id_matrix(table.column("doc_id")), signatures, rows_per_band).tolist()
    rows = list(zip(doc_ids, groups, reasons, strict=True))
    proven = {group for doc_id, group, _ in rows if doc_id in hit}
    return [
        f"{doc_id.hex()[:16]} was removed for a reference, but no document of its cluster is a hit"
        for doc_id, group, reason in rows
        if reason == "reference" and group not in proven
    ]


def reference_texts_are_found(
    stage: Stage, lsh_clusters: ArtifactRef, reference_sets: ArtifactRef, raw_row_groups: ArtifactRef
) -> Verdict:
    """Known positives: every reference text that is also in the corpus is an exact hit, and its cluster is barred."""
    table = decisions(stage, lsh_clusters, raw_row_groups)
    barred = dict(zip(table.column("doc_id").to_pylist(), table.column("barred").to_pylist(), strict=True))
    hits = stage.table(lsh_clusters, HITS_NAME)
    exact = {
        (name, text)
        for name, text, kind in zip(
            *(hits.column(name).to_pylist() for name in ("reference_set", "reference_doc_id", "kind")), strict=True
        )
        if kind == "exact"
    }
    violations, known = [], 0
    for reference in stage.recipe.references:
        texts = stage.table(reference_sets, f"{reference.name}.parquet", ["doc_id"]).column("doc_id").to_pylist()
        inside = [text for text in texts if text in barred]
        known += len(inside)
        violations += [
            f"{reference.name}: {text.hex()[:16]} is in the corpus, but not an exact hit"
            for text in inside
            if (reference.name, text) not in exact
        ]
        violations += [
            f"{reference.name}: the cluster of {text.hex()[:16]} is not barred" for text in inside if not barred[text]
        ]
        if isinstance(reference, TokenizerSample) and len(inside) != len(texts):
            violations.append(f"{reference.name}: {len(texts) - len(inside):,} of its texts are not in the corpus")
    violations += _overlaps_found_otherwise(stage, lsh_clusters, reference_sets, raw_row_groups, sorted(barred))
    violations += _rare_boilerplate(stage, lsh_clusters, raw_row_groups)
    return verdict_of("every reference text of the corpus is found and barred", violations, f"{known:,} known texts")


def _overlaps_found_otherwise(
    stage: Stage,
    lsh_clusters: ArtifactRef,
    reference_sets: ArtifactRef,
    raw_row_groups: ArtifactRef,
    doc_ids: list[bytes],
) -> list[str]:
    """Hits by runs of words, recounted with Python sets on a sample of the hits and of all documents."""
    violations: list[str] = []
    recorded = stage.table(lsh_clusters, HITS_NAME).to_pylist()
    for name, runs in searched_runs(stage, lsh_clusters, reference_sets).items():
        hits: dict[bytes, dict[bytes, int]] = {}
        for row in recorded:
            if row["reference_set"] == name and row["kind"] == "overlap":
                hits.setdefault(row["doc_id"], {})[row["reference_doc_id"]] = row["num_ngrams"]
        sample = {*doc_ids[:MAX_SEARCHED], *sorted(hits)[:MAX_SEARCHED]}
        for document, text in sorted(texts_of(stage, raw_row_groups, sample).items()):
            expected = {item: len(found) for item, found in items_in(text, runs).items()}
            if expected != (found := hits.get(document, {})):
                violations.append(
                    f"{name}: {document.hex()[:16]} holds runs of words of {len(expected):,} texts,"
                    f" the hits name {len(found):,}, or other numbers of runs"
                )
    return violations


def _rare_boilerplate(stage: Stage, lsh_clusters: ArtifactRef, raw_row_groups: ArtifactRef) -> list[str]:
    """Runs of words that are called boilerplate, and that no more documents hold than the recipe allows: a sample."""
    limits = {name: overlap.max_documents for name, overlap in overlaps_of(stage.recipe).items()}
    rows = stage.table(lsh_clusters, BOILERPLATE_NAME).to_pylist()
    return [
        f"{row['reference_set']}: {row['ngram'][:60]!r} is called boilerplate, and {holders:,} documents hold it"
        for row in sorted(rows, key=lambda row: (row["num_documents"], row["ngram"]))[:MAX_BOILERPLATE]
        if (holders := documents_with_run(stage, raw_row_groups, row["ngram"], limits[row["reference_set"]] + 1))
        <= limits[row["reference_set"]]
    ]


def removal_is_plausible(stage: Stage, lsh_clusters: ArtifactRef, raw_row_groups: ArtifactRef) -> Verdict:
    """No pool loses half of its documents, and no cluster holds a twentieth of the corpus."""
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
    listed = ", ".join(f"{name} {share:.1%}" for name, share in shares.items())
    return Verdict(
        expected=f"less than {MAX_REMOVED_SHARE:.0%} of each pool removed, no cluster above {limit:,.0f} documents",
        found=f"removed: {listed}; largest cluster {largest:,}",
        num_violations=len(violations),
        examples=[{"violation": violation} for violation in violations[:MAX_EXAMPLES]],
        numbers={"largest_cluster": largest, **{f"removed_share_{name}": share for name, share in shares.items()}},
    )


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
        description=f"Fails when a document was lost or decided twice between reading and clustering. {AGAIN}",
    ),
    law(
        one_document_is_kept_per_cluster,
        blocking=True,
        description=f"Fails when duplicates stay in, or all copies of a text are removed. {AGAIN}",
    ),
    law(
        clusters_are_connected_components,
        blocking=True,
        description=f"Fails when near-copies are in two clusters, or unrelated texts in one. {AGAIN}",
    ),
    law(
        every_removal_has_evidence,
        blocking=True,
        description=f"Fails when a document was removed without a row that says why. {AGAIN}",
    ),
    law(
        reference_texts_are_found,
        blocking=True,
        description=f"Fails when a text that must stay out of validation was not recognised in the corpus. {AGAIN}",
    ),
    law(
        removal_is_plausible,
        blocking=False,
        description="Warns when deduplication removes an unlikely share: a template, a wrong word rule or a broken "
        "source. Look at the largest clusters and the evidence before you train.",
    ),
]
