"""clusters: edges of all buckets -> connected components, one kept document each, references matched.

Sealing unites the buckets' edges to the fixpoint. Promise: labels and choices depend on content alone, whatever the
order of rows, the stripes, the buckets and the workers. Each raw unit gets its own slice of the result, so one new
document does not redo a thousand units downstream.
"""

from pathlib import Path
from typing import Any

import dagster as dg
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pipeline_assets.buckets import (
    BUCKET_PREFIX,
    CLUSTERS_VERSION,
    DUMP_EDGES,
    EDGES,
    HITS,
    LEFT,
    VERIFIED,
    build_buckets,
    plan_buckets,
)
from pipeline_assets.conformance import validated
from pipeline_assets.corpus import Corpus
from pipeline_assets.duplicates import (
    BY_PAIR_NAME,
    DUPLICATES_PICTURES,
    EVIDENCE_NAME,
    EXAMPLES_NAME,
    LARGEST_NAME,
    shown_examples,
    write_duplicates,
)
from pipeline_assets.ops import graph_spec, mapped_op, planning_op, sealing_op
from pipeline_assets.pictures import bar_picture
from pipeline_assets.reference_hits import (
    BOILERPLATE_NAME,
    HITS_NAME,
    all_hits,
    hit_table,
    reference_counts,
    some_of_each_set,
)
from pipeline_assets.report import (
    asset_metadata,
    files_metadata,
    pictures_metadata,
    rounded,
    shown_table,
    table_metadata,
)
from pipeline_assets.schemas import Clusters, ReferenceHits, arrow_schema
from pipeline_assets.sections.references import ReferenceFile, TokenizerSample
from pipeline_assets.signatures import split_units
from pipeline_assets.source import document_coordinates, pool_names
from pipeline_assets.stripes import Sealed, Stage, units_in
from pipeline_assets.transforms.clusters import (
    KEPT,
    REASONS,
    Decisions,
    Documents,
    DumpScope,
    decide,
    names_of_bits,
    size_table,
)
from pipeline_assets.transforms.keep import Preferences, preferences
from pipeline_assets.transforms.rows import doc_id_array
from resources.artifact_store import ArtifactRef, unit_inputs
from resources.tables import write_table
from training_io.hashing import derive_seed, keyed_hash

SHOWN_ROWS = 10
PICTURE_NAME = "cluster_sizes.png"
TABLES = (EVIDENCE_NAME, EXAMPLES_NAME, LARGEST_NAME, BY_PAIR_NAME, HITS_NAME, BOILERPLATE_NAME)

I64 = npt.NDArray[np.int64]


def slice_name(unit: str) -> str:
    """File of the decisions about one raw unit's rows."""
    return f"clusters/{unit}.parquet"


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
        inputs={
            "units": unit_inputs(parts),
            "rows": raw_row_groups.digest,
            "signatures": minhash_signatures.digest,
            "references": reference_sets.digest,
        },
        parameters={
            "mode": recipe.dedup.mode,
            "scope": recipe.dedup.scope,
            "keep": recipe.dedup.keep,
            "seed": recipe.seed,
            "pools": pool_names(recipe),
            "references": [_reference_parameters(reference) for reference in recipe.references],
        },
        version=CLUSTERS_VERSION,
        write=lambda folder: _write_clusters(stage, folder, parts, raw_row_groups, reference_sets, minhash_signatures),
    )
    if left := ref.counts.get(LEFT):  # counted in the manifest: what is reused says it too
        stage.warn(
            f"lsh_clusters: {left:,} documents, counted once a band, share a band with more than they were compared"
            " with, so near copies of them may stay: raise dedup.rows_per_band, which makes such groups smaller (and"
            " dedup.num_bands with it, to find as much), or take dedup.verify_jaccard out"
        )
    return Sealed(ref=ref, metadata=_metadata(stage, ref, parts, units_in(stage, raw_row_groups)))


def _reference_parameters(reference: TokenizerSample | ReferenceFile) -> list[Any]:
    universe = reference.universe_documents if isinstance(reference, ReferenceFile) else None
    return [reference.name, reference.action, universe]


def _metadata(stage: Stage, ref: ArtifactRef, parts: list[ArtifactRef], units: list[ArtifactRef]) -> dict[str, Any]:
    folder = stage.folder(ref)
    counts = ref.counts
    removed = counts["exact_duplicate"] + counts["near_duplicate"]
    by_pair, hits = stage.table(ref, BY_PAIR_NAME).to_pylist(), stage.table(ref, HITS_NAME)
    examples = stage.table(ref, EXAMPLES_NAME)
    by = {name: [row for row in by_pair if row["by"] == name] for name in ("pool", "dump")}
    return asset_metadata(stage, ref, parts) | {
        **table_metadata(Clusters, counts["documents"], stage.sample(ref, slice_name(units[0].unit))),
        "removed": counts["documents"] - counts["kept"],
        "removed_share_of_documents": rounded(removed / max(1, counts["documents"])),
        "removed_share_of_bytes": rounded(counts["removed_bytes"] / max(1, counts["text_bytes"])),
        **pictures_metadata(folder, {"cluster_sizes": "clusters by number of documents", **DUPLICATES_PICTURES}),
        **shown_table("removed_by_pool", [{"pool": name, **row} for name, row in counts["removed_by_pool"].items()]),
        **shown_table("removed_by_pool_and_kept_pool", by["pool"], most=SHOWN_ROWS),
        **shown_table("removed_by_dump_and_kept_dump", by["dump"], most=SHOWN_ROWS),
        **shown_table("largest_clusters", stage.table(ref, LARGEST_NAME).to_pylist(), most=SHOWN_ROWS),
        **shown_table("example_pairs", shown_examples(examples, SHOWN_ROWS), total=examples.num_rows),
        **shown_table("reference_hits_by_set", [{"set": name, **row} for name, row in counts["references"].items()]),
        **shown_table("reference_hits", some_of_each_set(hits, 5), total=hits.num_rows),
        **shown_table("boilerplate_ngrams", stage.table(ref, BOILERPLATE_NAME).to_pylist(), most=SHOWN_ROWS),
        **files_metadata(*(folder / name for name in TABLES)),
    }


def _write_clusters(
    stage: Stage,
    folder: Path,
    parts: list[ArtifactRef],
    raw_row_groups: ArtifactRef,
    reference_sets: ArtifactRef,
    minhash_signatures: ArtifactRef,
) -> dict[str, Any]:
    recipe = stage.recipe
    signed, signed_sets = split_units(units_in(stage, minhash_signatures))
    corpus = Corpus(stage, units_in(stage, raw_row_groups), signed)
    buckets = [part for part in parts if part.unit.startswith(BUCKET_PREFIX)]
    by_bands = np.concatenate([stage.array(part, HITS) for part in buckets])
    searches = {part.unit: part for part in parts if not part.unit.startswith(BUCKET_PREFIX)}
    hits = all_hits(corpus, by_bands, searches, reference_sets, signed_sets, folder)
    excluding = [number for number, reference in enumerate(recipe.references) if reference.action == "exclude"]
    coordinates = document_coordinates(stage, list(corpus.units))
    decisions = decide(
        Documents(doc_ids=corpus.doc_ids, coordinates=coordinates),
        np.concatenate([stage.array(part, EDGES) for part in buckets]),
        hits.of_sets,
        mode=recipe.dedup.mode,
        excluding_sets=frozenset(excluding),
        preferred=_preferences(corpus, coordinates[:, 0]),
        within=_dump_scope(corpus, buckets),
    )
    names, pools = [reference.name for reference in recipe.references], pool_names(recipe)
    for unit, first, end in zip(corpus.units, corpus.firsts[:-1], corpus.firsts[1:], strict=True):
        table = _decision_table(decisions, corpus.doc_ids, slice(first, end), names, pools)
        write_table(validated(Clusters, table), folder / slice_name(unit.unit))
    write_table(validated(ReferenceHits, hit_table(corpus, hits, reference_sets)), folder / HITS_NAME)
    counts = {
        **_counts(decisions),
        **write_duplicates(corpus, decisions, coordinates[:, 0], pools, folder),
        "references": reference_counts(corpus, decisions, hits),
        **{name: sum(part.counts[name] for part in buckets) for name in VERIFIED if name in buckets[0].counts},
    }
    labels, numbers = zip(*counts["cluster_sizes"], strict=True)
    title, of = "Clusters by number of documents", "clusters of this size (logarithmic)"
    picture = bar_picture(title, of, "documents in a cluster", labels, numbers, log_x=True)
    (folder / PICTURE_NAME).write_bytes(picture)
    return counts


def _preferences(corpus: Corpus, pools: I64) -> Preferences:
    recipe = corpus.stage.recipe
    scores = np.full(len(pools), np.nan)
    if recipe.dedup.keep == "highest_score":
        scores = corpus.column("score").fill_null(np.nan).to_numpy()
        if np.isnan(scores).all():
            corpus.stage.warn("lsh_clusters: dedup.keep is highest_score, and no row has a value in a column `score`")
    return preferences(
        recipe.dedup.keep,
        pools=pools,
        text_bytes=corpus.text_bytes,
        scores=scores,
        keys=keyed_hash(corpus.doc_ids, derive_seed(recipe.seed, "kept")),
    )


def _dump_scope(corpus: Corpus, parts: list[ArtifactRef]) -> DumpScope | None:
    stage = corpus.stage
    if stage.recipe.dedup.scope == "global":
        return None
    edges = np.concatenate([stage.array(part, DUMP_EDGES) for part in parts])
    dumps, names = corpus.codes("dump")
    if names == [""]:
        stage.warn("lsh_clusters: dedup.scope is dump, and no row has a value in a column `dump`: all are one crawl")
    return DumpScope(dumps=dumps, edges=edges)


def _decision_table(
    decisions: Decisions, doc_ids: npt.NDArray[np.uint8], rows: slice, names: list[str], pools: list[str]
) -> pa.Table:
    reasons = pa.array(REASONS, pa.string())
    return pa.table(
        {
            "doc_id": doc_id_array(doc_ids[rows]),
            "cluster_id": doc_id_array(doc_ids[decisions.cluster[rows]]),
            "cluster_size": pa.array(decisions.cluster_size[rows].astype(np.int64)),
            "kept": pa.array(decisions.reason[rows] == KEPT),
            "kept_doc_id": doc_id_array(doc_ids[decisions.kept[rows]]),
            "reason": reasons.take(pa.array(decisions.reason[rows])),
            "barred": pa.array(decisions.barred[rows]),
            "references": names_of_bits(decisions.matched_sets[rows], names),
            "pools": names_of_bits(decisions.pool_tags[rows], pools),
        },
        schema=arrow_schema(Clusters),
    )


def _counts(decisions: Decisions) -> dict[str, Any]:
    reasons = np.bincount(decisions.reason, minlength=len(REASONS))
    roots = np.flatnonzero(decisions.cluster == np.arange(len(decisions.cluster)))
    sizes = decisions.cluster_size[roots]
    by_size, counts = np.unique(sizes, return_counts=True)
    return {
        "documents": len(decisions.cluster),
        "clusters": len(roots),
        "largest_cluster": int(sizes.max(initial=0)),
        "duplicate_clusters": int((sizes > 1).sum()),
        **{reason: int(count) for reason, count in zip(REASONS, reasons, strict=True)},
        "barred": int((decisions.barred & (decisions.reason == KEPT)).sum()),
        "cluster_sizes": list(size_table(by_size, counts).items()),
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
    tasks = plan_buckets_op(
        raw_row_groups=raw_row_groups, reference_sets=reference_sets, minhash_signatures=minhash_signatures
    )
    return seal_clusters_op(
        parts=tasks.map(build_buckets_op).collect(),
        raw_row_groups=raw_row_groups,
        reference_sets=reference_sets,
        minhash_signatures=minhash_signatures,
    )
