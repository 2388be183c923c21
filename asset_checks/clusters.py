"""Promise: clusters are the components of documents that share a bucket, and nothing is removed without evidence."""

from collections import Counter
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from asset_checks.verdicts import MAX_EXAMPLES, Verdict, law, verdict_of
from pipeline_assets.clusters import EVIDENCE_NAME, HITS_NAME, slice_name, split_units
from pipeline_assets.recipe import TokenizerSample
from pipeline_assets.signatures import SIGNATURES, minhash_params
from pipeline_assets.source import ROWS_NAME
from pipeline_assets.stripes import Stage, units_in
from pipeline_assets.transforms.minhash import MinHashParams, sign_documents
from pipeline_assets.transforms.rows import doc_id_matrix
from pipeline_assets.transforms.scurve import measure_scurve, plant_pairs
from pipeline_assets.transforms.words import words
from resources.artifact_store import ArtifactRef
from training_io.hashing import derive_seed

MAX_REMOVED_SHARE = 0.5
MAX_CLUSTER_SHARE = 0.05
SMALL_CLUSTER = 100
SCURVE_TEXTS = 200
SCURVE_COPIES = 20
SCURVE_MAX_WORDS = 200


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
    """In each cluster exactly one row is kept (none where a reference set excludes it; every row in mode off)."""
    table = decisions(stage, lsh_clusters, raw_row_groups)
    clusters = table.column("cluster_id").to_pylist()
    kept = Counter(cluster for cluster, used in zip(clusters, table.column("kept").to_pylist(), strict=True) if used)
    size = Counter(clusters)
    reasons = table.column("reason").to_pylist()
    excluded = {cluster for cluster, reason in zip(clusters, reasons, strict=True) if reason == "reference"}
    is_off = stage.recipe.dedup.mode == "off"
    violations = [
        f"cluster {cluster.hex()[:16]} of {size[cluster]:,} rows: expected {expected:,} kept, found {kept[cluster]:,}"
        for cluster in size
        if kept[cluster] != (expected := 0 if cluster in excluded else size[cluster] if is_off else 1)
    ]
    return verdict_of("one kept document a cluster", violations, f"{len(size):,} clusters")


def clusters_are_connected_components(
    stage: Stage, lsh_clusters: ArtifactRef, raw_row_groups: ArtifactRef, minhash_signatures: ArtifactRef
) -> Verdict:
    """Recounted from the whole signatures: rows with 8 equal values in a band, or equal texts, are in one component.

    The route is another one: no band keys and no buckets, but the bands' raw bytes, and scipy's components.
    """
    table = decisions(stage, lsh_clusters, raw_row_groups)
    doc_ids = doc_id_matrix(table.column("doc_id"))
    edges = [_equal_rows(doc_ids)]
    if stage.recipe.dedup.mode != "exact":
        corpus, _ = split_units(units_in(stage, minhash_signatures))
        signatures = np.concatenate([stage.array(unit, SIGNATURES) for unit in corpus])
        edges += [_equal_rows(band) for band in bands_of(signatures, minhash_params(stage.recipe).rows_per_band)]
    labels = _components(len(doc_ids), np.concatenate(edges))
    claimed = np.unique(doc_id_matrix(table.column("cluster_id")), axis=0, return_inverse=True)[1].ravel()
    pairs = np.unique(np.column_stack([labels, claimed]), axis=0)
    spread = np.flatnonzero(np.bincount(pairs[:, 0]) > 1)
    joined = np.flatnonzero(np.bincount(pairs[:, 1]) > 1)
    violations = [
        f"the component of document {doc_ids[np.argmax(labels == label)].tobytes().hex()[:16]} is spread over clusters"
        for label in spread
    ]
    violations += [
        f"the cluster of document {doc_ids[np.argmax(claimed == cluster)].tobytes().hex()[:16]} joins components"
        for cluster in joined
    ]
    return verdict_of("clusters = components of the bucket graph", violations, f"{claimed.max() + 1:,} clusters")


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


def every_removal_has_evidence(stage: Stage, lsh_clusters: ArtifactRef, raw_row_groups: ArtifactRef) -> Verdict:
    """The evidence names each removed row once, with the document kept in its place."""
    table = decisions(stage, lsh_clusters, raw_row_groups)
    columns = [table.column(name).to_pylist() for name in ("doc_id", "kept_doc_id", "reason")]
    removed = Counter(
        (doc_id, kept)
        for doc_id, kept, reason in zip(*columns, strict=True)
        if reason in ("exact_duplicate", "near_duplicate")
    )
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
    return verdict_of("one row of evidence a removal", violations, f"{removed.total():,} removals")


def reference_texts_are_found(
    stage: Stage, lsh_clusters: ArtifactRef, reference_sets: ArtifactRef, raw_row_groups: ArtifactRef
) -> Verdict:
    """Known positives: every reference text that is also in the corpus is an exact hit, and its cluster is barred."""
    table = decisions(stage, lsh_clusters, raw_row_groups)
    barred = dict(zip(table.column("doc_id").to_pylist(), table.column("barred").to_pylist(), strict=True))
    hits = stage.table(lsh_clusters, HITS_NAME)
    exact = {
        (name, text)
        for name, text, is_exact in zip(
            *(hits.column(name).to_pylist() for name in ("reference_set", "reference_doc_id", "exact")), strict=True
        )
        if is_exact
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
    return verdict_of("every reference text of the corpus is found and barred", violations, f"{known:,} known texts")


def s_curve_matches_formula(stage: Stage, minhash_signatures: ArtifactRef, raw_row_groups: ArtifactRef) -> Verdict:
    """Planted pairs are flagged as often as 1 - (1 - s^rows)^bands says, and signatures err as much as they should."""
    params = minhash_params(stage.recipe)
    seed = derive_seed(stage.recipe.seed, "scurve")
    expected = f"share flagged = 1 - (1 - s^{params.rows_per_band})^{params.num_bands} at every similarity s"
    texts = _some_texts(stage, raw_row_groups)
    if not texts:
        return Verdict(expected=expected, found="no text has a word: nothing can be measured", num_violations=1)
    differing = _signed_differently(stage, minhash_signatures, raw_row_groups, params)
    planted = plant_pairs(texts, copies_per_text=SCURVE_COPIES, max_replaced_share=0.12, seed=seed)
    measured = measure_scurve(planted.texts, planted.pairs, params)
    bins = [
        {
            "similarity": round(part.centre, 3),
            "pairs": part.num_pairs,
            "flagged": round(part.flagged, 4),
            "predicted": round(part.predicted, 4),
            "low": round(part.low, 4),
            "high": round(part.high, 4),
        }
        for part in measured.bins
    ]
    return Verdict(
        expected=f"{expected}, and stored signatures of that family",
        found=f"largest deviation {measured.max_abs_z:.1f} standard errors, signature error"
        f" {measured.error_ratio:.2f} times the expected one, over {measured.num_pairs:,} planted pairs;"
        f" {len(differing):,} stored signatures are others",
        num_violations=int(not measured.agrees) + len(differing),
        examples=[{"violation": violation} for violation in differing] or bins,
        numbers={"max_abs_z": measured.max_abs_z, "signature_error_ratio": measured.error_ratio},
    )


def _some_texts(stage: Stage, raw_row_groups: ArtifactRef) -> list[str]:
    """The units' first texts that have words, cut to a few hundred: enough for a curve, whatever the corpus's size."""
    texts: list[str] = []
    for unit in units_in(stage, raw_row_groups):
        for batch in stage.table(unit, ROWS_NAME, ["text"]).to_batches():
            for text in batch.column("text").to_pylist():
                cut = " ".join(text.split()[:SCURVE_MAX_WORDS])
                if not words(cut):
                    continue  # two texts without words have no similarity, and are never compared
                texts.append(cut)
                if len(texts) == SCURVE_TEXTS:
                    return texts
    return texts


def _signed_differently(
    stage: Stage, minhash_signatures: ArtifactRef, raw_row_groups: ArtifactRef, params: MinHashParams
) -> list[str]:
    """The units' first rows whose stored signature is not what the text gives when it is signed again by itself."""
    violations, left = [], SCURVE_TEXTS
    stored = {unit.unit: unit for unit in units_in(stage, minhash_signatures)}
    for unit in units_in(stage, raw_row_groups):
        rows = stage.table(unit, ROWS_NAME, ["doc_id", "text"]).slice(0, left)
        again, _ = sign_documents(rows.column("text"), params)
        differing = np.flatnonzero((stage.array(stored[unit.unit], SIGNATURES)[: rows.num_rows] != again).any(axis=1))
        violations += [
            f"{unit.unit}: the stored signature of {rows.column('doc_id')[row].as_py().hex()[:16]} is another"
            for row in differing.tolist()
        ]
        left -= rows.num_rows
        if not left:
            break
    return violations


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
        s_curve_matches_formula,
        blocking=False,
        description="Warns when near-duplicates are found more or less often than the bands promise: the hash family "
        "or the parameters are wrong, and removal cannot be trusted. Compare the table with the formula.",
    ),
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
