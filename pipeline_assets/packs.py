"""packs: token shards -> a packing plan for each split, and what other layouts would have cost.

Planning reads lengths only. Promise: every planned next-token pair exactly once a pass, no pack over capacity, and the
loss denominator of each step known before it runs.
"""

from pathlib import Path
from typing import Any

import dagster as dg
import numpy as np
import numpy.typing as npt

from pipeline_assets.report import asset_metadata, bar_picture, line_picture, picture_metadata, rows_metadata
from pipeline_assets.stripes import Sealed, Stage, asset_spec, materialized
from pipeline_assets.transforms.utilisation import ConcatenatedLayout, Layout, compare_layouts
from resources.artifact_store import ArtifactRef
from resources.tables import read_json, write_json
from training_io.document_index import read_index
from training_io.hashing import derive_seed
from training_io.plan import Plan, ShardsReference, plan_packs, write_plan

PLAN_VERSION = 1
STATS_VERSION = 1
STATS_NAME, UTILISATION_NAME, LENGTHS_NAME = "stats.json", "utilisation.png", "lengths.png"
COMPARED_STRATEGIES = ("oldest_first", "best_fit", "best_fit_decreasing")


def build_plan(stage: Stage, token_shards: ArtifactRef) -> Sealed:
    """Plan the packs of every split that has documents."""
    shards = stage.folder(token_shards)

    def write(folder: Path) -> dict[str, Any]:
        plans = [plan_split(stage, token_shards, name) for name in sorted(token_shards.counts["splits"])]
        for plan in plans:
            write_plan(folder / plan.split, plan, shards)
        return {
            "packs": sum(plan.num_packs for plan in plans),
            "segments": sum(plan.num_segments for plan in plans),
            "targets": sum(plan.num_targets for plan in plans),
            "splits": {plan.split: _counts(plan) for plan in plans},
        }

    packs = stage.recipe.packs
    ref = stage.materialize(
        asset="packing_plan",
        inputs={"token_shards": {"identity": token_shards.identity, "digest": token_shards.digest}},
        parameters={"packs": packs.model_dump(mode="json"), "seed": stage.recipe.seed},
        version=PLAN_VERSION,
        write=write,
    )
    splits = ref.counts["splits"]
    metadata = asset_metadata(stage, ref) | {
        "splits": rows_metadata([{"split": name, **counts} for name, counts in splits.items()]),
        "train_utilisation": splits["train"]["utilisation"],
        "steps_a_pass": splits["train"]["steps"],
    }
    return Sealed(ref=ref, metadata=metadata)


def plan_split(stage: Stage, token_shards: ArtifactRef, split: str) -> Plan:
    """The plan of one split: training steps accumulate, evaluation steps are one microbatch."""
    packs = stage.recipe.packs
    folder = stage.folder(token_shards)
    return plan_packs(
        read_index(folder / f"{split}_index"),
        shards=ShardsReference(path=folder, identity=token_shards.identity, digest=token_shards.digest),
        max_seq_len=packs.max_seq_len,
        capacity=packs.capacity,
        strategy=packs.strategy,
        buffer=packs.buffer,
        packs_per_microbatch=packs.packs_per_microbatch(split),
        microbatches_per_step=packs.accumulation if split == "train" else 1,
        epoch_seed=derive_seed(stage.recipe.seed, "epochs"),
    )


def _counts(plan: Plan) -> dict[str, Any]:
    slots = plan.num_packs * plan.capacity
    return {
        "documents": plan.index.num_documents,
        "segments": plan.num_segments,
        "packs": plan.num_packs,
        "targets": plan.num_targets,
        "steps": plan.num_steps,
        "utilisation": plan.num_targets / slots if slots else 1.0,
    }


def build_stats(stage: Stage, token_shards: ArtifactRef, packing_plan: ArtifactRef) -> Sealed:
    """Compare padding, concatenating and packing on the training split's very documents."""
    packs = stage.recipe.packs
    lengths = read_index(stage.folder(token_shards) / "train_index").lengths
    strategies = list(dict.fromkeys([packs.strategy, *COMPARED_STRATEGIES]))

    def write(folder: Path) -> dict[str, Any]:
        layouts = compare_layouts(
            lengths,
            max_seq_len=packs.max_seq_len,
            capacity=packs.capacity,
            strategies=strategies,
            buffer=packs.buffer,
        )
        rows = [_layout_row(layout) for layout in layouts]
        write_json({"layouts": rows, "lengths": length_quantiles(lengths)}, folder / STATS_NAME)
        names, shares = [row["layout"] for row in rows], [100 * row["utilisation"] for row in rows]
        (folder / UTILISATION_NAME).write_bytes(
            bar_picture("Utilisation of rows by layout", "% of cells that hold a token", names, shares)
        )
        (folder / LENGTHS_NAME).write_bytes(_length_picture(lengths))
        return {f"{row['layout']}_utilisation": row["utilisation"] for row in rows}

    ref = stage.materialize(
        asset="packing_stats",
        inputs={"token_shards": token_shards.digest, "packing_plan": packing_plan.digest},
        parameters={"packs": packs.model_dump(mode="json"), "strategies": strategies},
        version=STATS_VERSION,
        write=write,
    )
    folder = stage.folder(ref)
    stats = read_json(folder / STATS_NAME)
    metadata = asset_metadata(stage, ref) | {
        "layouts": rows_metadata(stats["layouts"]),
        "length_quantiles": rows_metadata([stats["lengths"]]),
        "utilisation": picture_metadata((folder / UTILISATION_NAME).read_bytes(), "utilisation by layout"),
        "lengths": picture_metadata((folder / LENGTHS_NAME).read_bytes(), "document lengths"),
        "note": "High utilisation proves nothing about meaning: the checks on pairs, targets and isolation do.",
    }
    return Sealed(ref=ref, metadata=metadata)


def _layout_row(layout: Layout) -> dict[str, Any]:
    row = {
        "layout": layout.name,
        "rows": layout.num_rows,
        "cells": layout.num_cells,
        "tokens": layout.num_real,
        "utilisation": layout.utilisation,
        "tokens_left_out": layout.num_dropped,
        "rows_above_minimum": layout.num_excess_rows,
        "causal_pairs": layout.causal_pairs,
        "varlen_pairs": layout.isolated_pairs,
        "rows_with_boundary": 0,
        "documents_a_row": 0.0,
        "tokens_after_unrelated": 0,
    }
    if isinstance(layout, ConcatenatedLayout):
        row |= {
            "rows_with_boundary": layout.num_rows_with_boundary,
            "documents_a_row": layout.documents_per_row,
            "tokens_after_unrelated": layout.num_after_unrelated,
        }
    return row


def length_quantiles(lengths: npt.NDArray[np.int64]) -> dict[str, float]:
    """Document lengths in tokens, EOS included: number, mean, quantiles, longest."""
    shares = (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99)
    quantiles = {f"{share:.0%}": float(np.quantile(lengths, share)) for share in shares}
    return {
        "documents": len(lengths),
        "mean": float(lengths.mean()),
        **quantiles,
        "longest": int(lengths.max()),
    }


def _length_picture(lengths: npt.NDArray[np.int64]) -> bytes:
    ordered = np.sort(lengths)
    at = np.unique(np.linspace(0, len(ordered) - 1, 200).astype(np.int64))
    shares = (at + 1) / len(ordered) * 100
    series = {"documents of at most this length": (ordered[at].tolist(), shares.tolist())}
    return line_picture("Document lengths", "tokens (logarithmic)", "% of documents", series, log_x=True)


@dg.asset(
    **asset_spec(
        "packing_plan",
        PLAN_VERSION,
        {"numpy"},
        "Which segments share which pack, and which packs a step trains on, for each split. "
        "Promise: every planned next-token pair exactly once a pass; no pack over capacity.",
    )
)
def packing_plan(context: dg.AssetExecutionContext, token_shards: ArtifactRef) -> dg.MaterializeResult[ArtifactRef]:
    return materialized(context, build_plan, token_shards=token_shards)


@dg.asset(
    **asset_spec(
        "packing_stats",
        STATS_VERSION,
        {"numpy"},
        "Padding, concatenate-and-cut and bin packing compared on these very documents. "
        "Promise: counted on the same lengths by the same rule for the end-of-document token.",
    )
)
def packing_stats(
    context: dg.AssetExecutionContext, token_shards: ArtifactRef, packing_plan: ArtifactRef
) -> dg.MaterializeResult[ArtifactRef]:
    return materialized(context, build_stats, token_shards=token_shards, packing_plan=packing_plan)
