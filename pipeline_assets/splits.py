"""splits: kept documents -> train / validation / test tables, each document with its reason, by stripe.

One planning step sees every document's length, order and cluster and decides; each unit then writes its own rows and
depends on its own slice of the plan only. Promise: no document, cluster or reference text is in two splits, and what
is unused is counted with a reason.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dagster as dg
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pipeline_assets.clusters import slice_name
from pipeline_assets.conformance import validated
from pipeline_assets.floors import floors_metadata, scores_of, write_floors
from pipeline_assets.ops import graph_spec, mapped_op, planning_op, sealing_op
from pipeline_assets.policy import policy_of
from pipeline_assets.report import asset_metadata, shown_table, table_metadata
from pipeline_assets.schemas import SplitDocuments, arrow_schema
from pipeline_assets.source import ROWS_NAME, pool_names
from pipeline_assets.stripes import Sealed, Stage, Task, build_each, seal_units, tasks_of, units_in
from pipeline_assets.tokens import DOC_IDS, LENGTHS, ROWS, ordered_documents
from pipeline_assets.transforms.rows import doc_id_array, doc_id_matrix
from pipeline_assets.transforms.split import REASONS, SPLITS, UNUSED, USED, SplitInputs, plan_splits
from resources.artifact_store import ArtifactRef, unit_inputs
from resources.tables import write_array, write_table
from training_io.errors import RecipeError

SPLITS_VERSION = 3
PLAN_UNIT = "plan"
TABLE_NAME = "documents.parquet"


def plan_name(unit: str) -> str:
    """File of the split plan's slice for one unit: uint8[n, 2] of split and reason codes."""
    return f"{unit}.npy"


def plan_split_documents(
    stage: Stage, raw_row_groups: ArtifactRef, lsh_clusters: ArtifactRef, document_tokens: ArtifactRef
) -> list[Task]:
    """Decide every document's split in one step, then hand each unit its slice."""
    plan = split_plan(stage, raw_row_groups, lsh_clusters, document_tokens)
    stage.say(f"split_documents: {_listed(plan.counts['num_documents'])}; unused: {_listed(plan.counts['num_unused'])}")
    pairs = zip(units_in(stage, raw_row_groups), units_in(stage, document_tokens), strict=True)
    return tasks_of(
        [(plan, rows, tokens, lsh_clusters) for rows, tokens in pairs], "units", stage.recipe.reading.stripes_read
    )


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{number:,} {name}" for name, number in counts.items())


def split_plan(
    stage: Stage, raw_row_groups: ArtifactRef, lsh_clusters: ArtifactRef, document_tokens: ArtifactRef
) -> ArtifactRef:
    """Every document's split, as an artifact: the planning step writes it, the sealing step finds it."""
    return stage.materialize(
        asset="split_documents",
        unit=PLAN_UNIT,
        inputs={"tokens": document_tokens.digest, "clusters": lsh_clusters.digest, "rows": raw_row_groups.digest},
        parameters={
            "splits": stage.recipe.splits.model_dump(mode="json"),
            "by_cluster": stage.recipe.dedup.splits_by_cluster,
            "seed": stage.recipe.seed,
            "pools": pool_names(stage.recipe),
        },
        version=SPLITS_VERSION,
        write=lambda folder: _write_plan(stage, folder, raw_row_groups, lsh_clusters, document_tokens),
    )


def _write_plan(
    stage: Stage,
    folder: Path,
    raw_row_groups: ArtifactRef,
    lsh_clusters: ArtifactRef,
    document_tokens: ArtifactRef,
) -> dict[str, Any]:
    raw_units, units = units_in(stage, raw_row_groups), units_in(stage, document_tokens)
    splits, order = stage.recipe.splits, ordered_documents(stage, units)
    columns, places = _planned_columns(stage, raw_units, units, lsh_clusters)
    scores = columns.pop("scores")[order]
    in_order = SplitInputs(**{name: column[order] for name, column in columns.items()})
    plan, stats = plan_splits(in_order, policy_of(splits), min_tokens=splits.min_tokens, budgets=dict(splits.budgets))
    codes = np.empty((len(order), 2), np.uint8)
    codes[order] = np.column_stack([plan.split, plan.reason])
    ends = np.cumsum([len(rows) for _, rows in places])
    for unit, part in zip(units, np.split(codes, ends[:-1]), strict=True):
        write_array(part, folder / plan_name(unit.unit))
    if not stats.num_documents["train"]:
        raise RecipeError(
            f"split_documents: expected at least one training document, found none of {len(order):,} kept documents"
            f" ({stats.num_unused['below_min_tokens']:,} have fewer than {splits.min_tokens:,} tokens)."
            " Lower splits.min_tokens or the validation share, or read more."
        )
    write_floors(stage, folder, in_order.num_tokens, scores, places, order, codes[order])
    return {
        "documents": len(order),
        "num_documents": dict(stats.num_documents),
        "num_tokens": dict(stats.num_tokens),
        "num_unused": dict(stats.num_unused),
        "num_unused_tokens": dict(stats.num_unused_tokens),
        "num_barred": stats.num_barred,
        "budgets_filled": dict(stats.filled),
    }


def _planned_columns(
    stage: Stage, raw_units: list[ArtifactRef], units: list[ArtifactRef], lsh_clusters: ArtifactRef
) -> tuple[dict[str, npt.NDArray[Any]], list[tuple[ArtifactRef, npt.NDArray[np.int64]]]]:
    """What splits and floors are decided by, of all kept documents in unit order; each raw unit and its rows."""
    ids = "cluster_ids" if stage.recipe.dedup.splits_by_cluster else "doc_ids"
    parts, places = [], []
    for raw, tokens in zip(raw_units, units, strict=True):
        documents = _documents_of(stage, raw, tokens, lsh_clusters)
        scores = scores_of(stage, raw, documents.rows)
        parts.append((getattr(documents, ids), documents.lengths, documents.barred, scores))
        places.append((raw, documents.rows))
    names = ("assignment_ids", "num_tokens", "barred", "scores")
    return {name: np.concatenate(column) for name, column in zip(names, zip(*parts, strict=True), strict=True)}, places


@dataclass(frozen=True, kw_only=True)
class KeptDocuments:
    """Kept documents of a unit in its final order: uint8[n, 32] ids, int64[n] lengths and rows, bool[n] barred."""

    doc_ids: npt.NDArray[np.uint8]
    cluster_ids: npt.NDArray[np.uint8]
    lengths: npt.NDArray[np.int64]
    barred: npt.NDArray[np.bool_]
    rows: npt.NDArray[np.int64]

    @property
    def content(self) -> str:
        """SHA-256 of clusters and barred documents: the unit's own slice of the global decisions."""
        return hashlib.sha256(self.cluster_ids.tobytes() + self.barred.tobytes()).hexdigest()


def _documents_of(stage: Stage, raw: ArtifactRef, tokens: ArtifactRef, lsh_clusters: ArtifactRef) -> KeptDocuments:
    rows = stage.array(tokens, ROWS)
    slices = stage.table(lsh_clusters, slice_name(raw.unit), ["cluster_id", "barred"]).take(pa.array(rows))
    return KeptDocuments(
        doc_ids=stage.array(tokens, DOC_IDS),
        cluster_ids=doc_id_matrix(slices.column("cluster_id")),
        lengths=stage.array(tokens, LENGTHS),
        barred=np.asarray(slices.column("barred"), dtype=np.bool_),
        rows=rows,
    )


def build_split_documents(stage: Stage, task: Task) -> list[ArtifactRef]:
    """Write the split tables of the task's units."""
    return build_each(stage, task, lambda unit: _split_unit(stage, *unit))


def _split_unit(
    stage: Stage, plan: ArtifactRef, raw: ArtifactRef, tokens: ArtifactRef, lsh_clusters: ArtifactRef
) -> ArtifactRef:
    plan_manifest = stage.open(plan)[1]
    documents = _documents_of(stage, raw, tokens, lsh_clusters)

    def write(folder: Path) -> dict[str, Any]:
        codes = stage.array(plan, plan_name(raw.unit))
        source = stage.table(raw, ROWS_NAME, ["text", "pool"]).take(pa.array(documents.rows))
        table = _split_table(documents, source, codes)
        write_table(validated(SplitDocuments, table), folder / TABLE_NAME)
        text_bytes = np.asarray(pc.binary_length(source.column("text")), np.int64)
        return {
            "documents": len(codes),
            "tokens": int(documents.lengths.sum()),
            "text_bytes": tokens.counts["text_bytes"],
            **_counts_by_split(codes, documents.lengths, text_bytes),
        }

    return stage.materialize(
        asset="split_documents",
        unit=raw.unit,
        inputs={
            "rows": raw.digest,
            "tokens": tokens.digest,
            "clusters": documents.content,
            "plan": plan_manifest.files[plan_name(raw.unit)]["sha256"],
        },
        parameters={},
        version=SPLITS_VERSION,
        write=write,
    )


def _split_table(documents: KeptDocuments, source: pa.Table, codes: npt.NDArray[np.uint8]) -> pa.Table:
    return pa.table(
        {
            "doc_id": doc_id_array(documents.doc_ids),
            "text": source.column("text"),
            "num_tokens": pa.array(documents.lengths),
            "cluster_id": doc_id_array(documents.cluster_ids),
            "pool": source.column("pool"),
            "split": _named(np.minimum(codes[:, 0], len(SPLITS)), [*SPLITS, "unused"]),
            "reason": _named(codes[:, 1], REASONS),
        },
        schema=arrow_schema(SplitDocuments),
    )


def _counts_by_split(
    codes: npt.NDArray[np.uint8], lengths: npt.NDArray[np.int64], text_bytes: npt.NDArray[np.int64]
) -> dict[str, int]:
    """Documents and tokens of each split and of the unused, and of those by reason with their bytes."""
    unused = {name: codes[:, 1] == code for code, name in enumerate(REASONS) if code != USED}
    return {
        **{f"{name}_documents": int((codes[:, 0] == code).sum()) for code, name in enumerate(SPLITS)},
        **{f"{name}_tokens": int(lengths[codes[:, 0] == code].sum()) for code, name in enumerate(SPLITS)},
        "unused_documents": int((codes[:, 0] == UNUSED).sum()),
        "unused_tokens": int(lengths[codes[:, 0] == UNUSED].sum()),
        **{f"unused_{name}": int(rows.sum()) for name, rows in unused.items()},
        **{f"unused_{name}_tokens": int(lengths[rows].sum()) for name, rows in unused.items()},
        **{f"unused_{name}_bytes": int(text_bytes[rows].sum()) for name, rows in unused.items()},
    }


def _named(codes: npt.NDArray[np.uint8], names: Sequence[str]) -> pa.Array:
    return pa.array(names, pa.string()).take(pa.array(codes))


def seal_split_documents(
    stage: Stage,
    parts: list[ArtifactRef],
    raw_row_groups: ArtifactRef,
    lsh_clusters: ArtifactRef,
    document_tokens: ArtifactRef,
) -> Sealed:
    """Seal the split tables as one asset and count each split."""
    names = list(parts[0].counts)
    counts = {name: sum(part.counts[name] for part in parts) for name in names}
    plan = split_plan(stage, raw_row_groups, lsh_clusters, document_tokens)
    ref = seal_units(stage, "split_documents", parts, counts, SPLITS_VERSION, plans=unit_inputs([plan]))
    by_split = [
        {"split": name, "documents": counts[f"{name}_documents"], "tokens": counts[f"{name}_tokens"]} for name in SPLITS
    ]
    metadata = asset_metadata(stage, ref, parts) | {
        **table_metadata(SplitDocuments, counts["documents"], stage.sample(parts[0], TABLE_NAME)),
        **shown_table("splits", by_split),
        **shown_table(
            "unused",
            [
                {
                    "reason": name,
                    "documents": counts[f"unused_{name}"],
                    "tokens": counts[f"unused_{name}_tokens"],
                    "bytes": counts[f"unused_{name}_bytes"],
                }
                for name in REASONS[1:]
            ],
        ),
        **floors_metadata(stage, plan),
    }
    return Sealed(ref=ref, metadata=metadata)


plan_op = planning_op("split_documents", plan_split_documents)
build_op = mapped_op("split_documents", build_split_documents)
seal_op = sealing_op("split_documents", seal_split_documents)


@dg.graph_asset(
    **graph_spec(
        "split_documents",
        SPLITS_VERSION,
        {"parquet"},
        "The deduplicated split tables: each kept document with its text, tokens, cluster, pool, split and reason. "
        "Promise: no document, cluster or reference text in two splits.",
    )
)
def split_documents(raw_row_groups, lsh_clusters, document_tokens):  # type: ignore[no-untyped-def]
    inputs = {"raw_row_groups": raw_row_groups, "lsh_clusters": lsh_clusters, "document_tokens": document_tokens}
    return seal_op(parts=plan_op(**inputs).map(build_op).collect(), **inputs)
