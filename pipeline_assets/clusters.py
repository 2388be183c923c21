"""clusters: sorted band keys -> connected components, one kept document each, references matched, by bucket.

A bucket is a range of band keys by their top bits; its step sorts it alone, in bounded memory. Sealing unites the
buckets' edges to the fixpoint. Promise: labels and choices depend on content alone, whatever the order of rows, the
stripes, the buckets and the workers. Each raw unit gets its own slice of the result, so one new document does not redo
a thousand units downstream.
"""

from pathlib import Path
from typing import Any

import dagster as dg
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pipeline_assets.report import asset_metadata, bar_picture, picture_metadata, rows_metadata, table_metadata
from pipeline_assets.schemas import Clusters, Evidence, ReferenceHits, arrow_schema, validated
from pipeline_assets.signatures import DOC_IDS, KEY_ROWS, KEYS, REFERENCE_PREFIX, SIGNATURES, minhash_params
from pipeline_assets.source import ROWS_NAME, document_coordinates, pool_names
from pipeline_assets.stripes import (
    Sealed,
    Stage,
    Task,
    graph_spec,
    mapped_op,
    planning_op,
    sealing_op,
    tasks_of,
    units_in,
)
from pipeline_assets.transforms.clusters import (
    REASONS,
    Decisions,
    Documents,
    decide,
    match_references,
    names_of_bits,
    size_table,
)
from pipeline_assets.transforms.jaccard import jaccard_of_pairs
from pipeline_assets.transforms.lsh import bucket_bounds, shared_bands, star_edges
from pipeline_assets.transforms.rows import doc_id_array
from resources.artifact_store import ArtifactRef, unit_inputs
from resources.tables import write_array, write_table
from training_io.hashing import derive_seed

CLUSTERS_VERSION = 1
EDGES, HITS = "edges.npy", "reference_hits.npy"
EVIDENCE_NAME, HITS_NAME = "evidence.parquet", "reference_hits.parquet"
PICTURE_NAME = "cluster_sizes.png"


def slice_name(unit: str) -> str:
    """File of the decisions about one raw unit's rows."""
    return f"clusters/{unit}.parquet"


def plan_buckets(stage: Stage, minhash_signatures: ArtifactRef) -> list[Task]:
    """One unit a bucket; a small corpus has one bucket."""
    buckets = [(minhash_signatures, bucket) for bucket in range(stage.recipe.dedup.num_buckets)]
    return tasks_of(buckets, "buckets")


def build_buckets(stage: Stage, task: Task) -> list[ArtifactRef]:
    """Sort each bucket and write its star edges and reference hits."""
    return [_build_bucket(stage, signatures, bucket) for signatures, bucket in task.units]


def _build_bucket(stage: Stage, signatures: ArtifactRef, bucket: int) -> ArtifactRef:
    num_buckets = stage.recipe.dedup.num_buckets

    def write(folder: Path) -> dict[str, Any]:
        corpus, references = split_units(units_in(stage, signatures))
        keys, nodes = _bucket_of(stage, corpus, bucket)
        edges = star_edges(keys, nodes)
        hits = match_references(keys, nodes, *_bucket_of(stage, references, bucket))
        write_array(edges, folder / EDGES)
        write_array(hits, folder / HITS)
        return {"band_keys": len(keys), "edges": len(edges), "reference_hits": len(hits)}

    return stage.materialize(
        asset="lsh_clusters",
        unit=f"bucket-{bucket:05d}-of-{num_buckets:05d}",
        inputs={"signatures": signatures.digest},
        parameters={"bucket": bucket, "num_buckets": num_buckets},
        version=CLUSTERS_VERSION,
        write=write,
    )


def split_units(units: list[ArtifactRef]) -> tuple[list[ArtifactRef], list[ArtifactRef]]:
    """Signature units of the corpus, and those of reference sets."""
    corpus = [unit for unit in units if not unit.unit.startswith(REFERENCE_PREFIX)]
    return corpus, [unit for unit in units if unit.unit.startswith(REFERENCE_PREFIX)]


def _bucket_of(
    stage: Stage, units: list[ArtifactRef], bucket: int
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
    """The bucket's band keys over all units, and for each the number of its text in unit order."""
    keys: list[npt.NDArray[np.uint64]] = [np.empty(0, np.uint64)]
    nodes: list[npt.NDArray[np.int64]] = [np.empty(0, np.int64)]
    first = 0
    for unit in units:
        unit_keys = stage.array(unit, KEYS)
        start, end = bucket_bounds(unit_keys, stage.recipe.dedup.num_buckets)[bucket : bucket + 2]
        keys.append(unit_keys[start:end])
        nodes.append(stage.array(unit, KEY_ROWS)[start:end].astype(np.int64) + first)
        first += unit.counts["documents"]
    return np.concatenate(keys), np.concatenate(nodes)


def seal_clusters(
    stage: Stage,
    parts: list[ArtifactRef],
    raw_row_groups: ArtifactRef,
    reference_sets: ArtifactRef,
    minhash_signatures: ArtifactRef,
) -> Sealed:
    """Unite the buckets' edges, choose the kept documents, and write each raw unit's slice and the evidence."""
    recipe = stage.recipe
    ref = stage.materialize(
        asset="lsh_clusters",
        inputs={"units": unit_inputs(parts), "rows": raw_row_groups.digest, "signatures": minhash_signatures.digest},
        parameters={
            "mode": recipe.dedup.mode,
            "seed": recipe.seed,
            "pools": pool_names(recipe),
            "references": [[reference.name, reference.action] for reference in recipe.references],
        },
        version=CLUSTERS_VERSION,
        write=lambda folder: _write_clusters(stage, folder, parts, raw_row_groups, minhash_signatures),
    )
    folder = stage.folder(ref)
    units = units_in(stage, raw_row_groups)
    metadata = asset_metadata(stage, ref, parts) | {
        **table_metadata(Clusters, ref.counts["documents"], stage.table(ref, slice_name(units[0].unit))),
        "cluster_sizes": picture_metadata((folder / PICTURE_NAME).read_bytes(), "clusters by number of documents"),
        "evidence": rows_metadata(stage.table(ref, EVIDENCE_NAME).slice(0, 20).to_pylist()),
        "reference_hits_by_set": rows_metadata(
            [{"set": name, **counts} for name, counts in ref.counts["references"].items()]
        ),
        "evidence_file": dg.MetadataValue.path(str(folder / EVIDENCE_NAME)),
    }
    return Sealed(ref=ref, metadata=metadata)


def _write_clusters(
    stage: Stage, folder: Path, parts: list[ArtifactRef], raw_row_groups: ArtifactRef, minhash_signatures: ArtifactRef
) -> dict[str, Any]:
    units = units_in(stage, raw_row_groups)
    corpus, references = split_units(units_in(stage, minhash_signatures))
    doc_ids = np.concatenate([stage.array(unit, DOC_IDS) for unit in corpus])
    reference_ids = [stage.array(unit, DOC_IDS) for unit in references]
    documents = Documents(doc_ids=doc_ids, coordinates=document_coordinates(stage, units))
    edges = np.concatenate([stage.array(part, EDGES) for part in parts])
    hits = _all_reference_hits(stage, parts, doc_ids, reference_ids)
    set_of = np.repeat(np.arange(len(references)), [len(ids) for ids in reference_ids])
    actions = [reference.action for reference in stage.recipe.references]
    decisions = decide(
        documents,
        edges,
        np.column_stack([set_of[hits[:, 0]], hits[:, 1]]).astype(np.int64),
        mode=stage.recipe.dedup.mode,
        excluding_sets=frozenset(number for number, action in enumerate(actions) if action == "exclude"),
        keep_seed=derive_seed(stage.recipe.seed, "kept"),
    )
    names = [reference.name for reference in stage.recipe.references]
    pools = pool_names(stage.recipe)
    table = _decision_table(decisions, doc_ids, names, pools)
    first = 0
    for unit in units:
        part = table.slice(first, unit.counts["documents"])
        write_table(validated(Clusters, part), folder / slice_name(unit.unit))
        first += unit.counts["documents"]
    evidence = _evidence(stage, decisions, documents, units, corpus, pools)
    write_table(validated(Evidence, evidence), folder / EVIDENCE_NAME)
    hit_table = _hit_table(hits, set_of, names, reference_ids, doc_ids)
    write_table(validated(ReferenceHits, hit_table), folder / HITS_NAME)
    counts = _counts(decisions, hit_table, names, pools, documents)
    labels, numbers = zip(*counts["cluster_sizes"], strict=True)
    picture = bar_picture("Clusters by number of documents", "clusters of this size", labels, numbers)
    (folder / PICTURE_NAME).write_bytes(picture)
    return counts


def _all_reference_hits(
    stage: Stage, parts: list[ArtifactRef], doc_ids: npt.NDArray[np.uint8], reference_ids: list[npt.NDArray[np.uint8]]
) -> npt.NDArray[np.int64]:
    """Hits by bands from the buckets and hits by identical text: int64[h, 2] of (reference text, document)."""
    by_bands = [stage.array(part, HITS) for part in parts]
    if not reference_ids:
        return np.empty((0, 2), np.int64)
    texts = np.ascontiguousarray(np.concatenate(reference_ids)).view("V32").ravel()
    corpus = np.ascontiguousarray(doc_ids).view("V32").ravel()
    order = np.argsort(corpus, kind="stable")
    at = np.minimum(np.searchsorted(corpus, texts, sorter=order), len(corpus) - 1)
    exact = np.flatnonzero(corpus[order[at]] == texts)
    by_text = np.column_stack([exact, order[at[exact]]]).astype(np.int64)
    return np.unique(np.concatenate([*by_bands, by_text]), axis=0)


def _decision_table(
    decisions: Decisions, doc_ids: npt.NDArray[np.uint8], names: list[str], pools: list[str]
) -> pa.Table:
    return pa.table(
        {
            "doc_id": doc_id_array(doc_ids),
            "cluster_id": doc_id_array(doc_ids[decisions.cluster]),
            "cluster_size": pa.array(decisions.cluster_size.astype(np.int64)),
            "kept": pa.array(decisions.reason == REASONS.index("kept")),
            "kept_doc_id": doc_id_array(doc_ids[decisions.kept]),
            "reason": pa.array([REASONS[reason] for reason in decisions.reason.tolist()], pa.string()),
            "barred": pa.array(decisions.barred),
            "references": names_of_bits(decisions.matched_sets, names),
            "pools": names_of_bits(decisions.pool_tags, pools),
        },
        schema=arrow_schema(Clusters),
    )


def _evidence(
    stage: Stage,
    decisions: Decisions,
    documents: Documents,
    units: list[ArtifactRef],
    corpus: list[ArtifactRef],
    pools: list[str],
) -> pa.Table:
    """A row for each document removed in favour of another: bands shared and exact Jaccard."""
    removed = np.flatnonzero(
        np.isin(decisions.reason, [REASONS.index("exact_duplicate"), REASONS.index("near_duplicate")])
    )
    kept = decisions.kept[removed]
    texts, positions = _gather_texts(stage, units, np.union1d(removed, kept))
    signatures = _gather_rows(stage, corpus, SIGNATURES, np.union1d(removed, kept))
    pairs = np.column_stack([positions[removed], positions[kept]]).astype(np.int64)
    params = minhash_params(stage.recipe)
    pool_names = pa.array(pools, pa.string())
    return pa.table(
        {
            "removed_doc_id": doc_id_array(documents.doc_ids[removed]),
            "kept_doc_id": doc_id_array(documents.doc_ids[kept]),
            "removed_pool": pool_names.take(pa.array(documents.coordinates[removed, 0])),
            "kept_pool": pool_names.take(pa.array(documents.coordinates[kept, 0])),
            "shared_bands": pa.array(shared_bands(signatures[pairs[:, 0]], signatures[pairs[:, 1]], params)),
            "jaccard": pa.array(jaccard_of_pairs(texts, pairs, params.ngram)),
        },
        schema=arrow_schema(Evidence),
    )


def _gather_texts(
    stage: Stage, units: list[ArtifactRef], wanted: npt.NDArray[np.int64]
) -> tuple[pa.ChunkedArray, npt.NDArray[np.int64]]:
    """Texts of the wanted documents (sorted numbers in unit order), and each document's place among them."""
    chunks, first = [pa.array([], pa.large_string())], 0
    for unit in units:
        end = first + unit.counts["documents"]
        rows = wanted[np.searchsorted(wanted, first) : np.searchsorted(wanted, end)] - first
        if len(rows):
            chunks.append(pc.take(stage.table(unit, ROWS_NAME, ["text"]).column("text"), pa.array(rows)))
        first = end
    positions = np.full(first, -1, np.int64)
    positions[wanted] = np.arange(len(wanted))
    return pa.chunked_array([chunk for part in chunks for chunk in getattr(part, "chunks", [part])]), positions


def _gather_rows(
    stage: Stage, units: list[ArtifactRef], name: str, wanted: npt.NDArray[np.int64]
) -> npt.NDArray[np.uint32]:
    parts, first = [np.empty((0, minhash_params(stage.recipe).num_perm), np.uint32)], 0
    for unit in units:
        end = first + unit.counts["documents"]
        rows = wanted[np.searchsorted(wanted, first) : np.searchsorted(wanted, end)] - first
        parts.append(stage.array(unit, name)[rows])
        first = end
    return np.concatenate(parts)


def _hit_table(
    hits: npt.NDArray[np.int64],
    set_of: npt.NDArray[np.int64],
    names: list[str],
    reference_ids: list[npt.NDArray[np.uint8]],
    doc_ids: npt.NDArray[np.uint8],
) -> pa.Table:
    all_references = np.concatenate([np.empty((0, 32), np.uint8), *reference_ids])
    texts, matched = all_references[hits[:, 0]], doc_ids[hits[:, 1]]
    return pa.table(
        {
            "reference_set": pa.array([names[number] for number in set_of[hits[:, 0]].tolist()], pa.string()),
            "reference_doc_id": doc_id_array(texts),
            "doc_id": doc_id_array(matched),
            "exact": pa.array((texts == matched).all(axis=1)),
        },
        schema=arrow_schema(ReferenceHits),
    )


def _counts(
    decisions: Decisions, hits: pa.Table, names: list[str], pools: list[str], documents: Documents
) -> dict[str, Any]:
    reasons = np.bincount(decisions.reason, minlength=len(REASONS))
    roots = np.flatnonzero(decisions.cluster == np.arange(len(decisions.cluster)))
    sizes = decisions.cluster_size[roots]
    by_size, counts = np.unique(sizes, return_counts=True)
    pool_of = documents.coordinates[:, 0]
    used = decisions.reason == REASONS.index("kept")
    return {
        "documents": len(decisions.cluster),
        "clusters": len(roots),
        "largest_cluster": int(sizes.max(initial=0)),
        "duplicate_clusters": int((sizes > 1).sum()),
        **{reason: int(count) for reason, count in zip(REASONS, reasons, strict=True)},
        "barred": int((decisions.barred & used).sum()),
        "cluster_sizes": list(size_table(by_size, counts).items()),
        "removed_by_pool": {
            name: {"documents": int((pool_of == number).sum()), "removed": int(((pool_of == number) & ~used).sum())}
            for number, name in enumerate(pools)
        },
        "references": {
            name: {
                "hits": int(pc.sum(pc.equal(hits.column("reference_set"), name), min_count=0).as_py()),
                "exact_hits": int(
                    pc.sum(
                        pc.and_(pc.equal(hits.column("reference_set"), name), hits.column("exact")), min_count=0
                    ).as_py()
                ),
            }
            for name in names
        },
    }


plan_buckets_op = planning_op("lsh_clusters", plan_buckets)
build_buckets_op = mapped_op("lsh_clusters", build_buckets)
seal_clusters_op = sealing_op("lsh_clusters", seal_clusters)


@dg.graph_asset(
    **graph_spec(
        "lsh_clusters",
        CLUSTERS_VERSION,
        {"numpy", "parquet"},
        "Connected components of documents that share a band bucket, one document kept of each, and what the "
        "reference sets bar. Promise: nothing is removed without evidence; choices depend on content alone.",
    )
)
def lsh_clusters(raw_row_groups, reference_sets, minhash_signatures):  # type: ignore[no-untyped-def]
    parts = plan_buckets_op(minhash_signatures=minhash_signatures).map(build_buckets_op).collect()
    return seal_clusters_op(
        parts=parts,
        raw_row_groups=raw_row_groups,
        reference_sets=reference_sets,
        minhash_signatures=minhash_signatures,
    )
