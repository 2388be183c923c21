"""packs: token shards -> a packing plan for each split, and what other layouts would have cost.

Planning reads lengths only. Promise: every planned next-token pair exactly once a pass, no pack over capacity, and the
loss denominator of each step known before it runs.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import dagster as dg

from pipeline_assets.layouts import ROW_LENGTHS, compared_strategies, layouts_metadata, write_layouts
from pipeline_assets.ops import asset_spec, materialized
from pipeline_assets.parameters import own_parameters
from pipeline_assets.recipe import Recipe
from pipeline_assets.report import asset_metadata, in_per_cent, rounded, shown_table
from pipeline_assets.stripes import Sealed, Stage
from resources.artifact_store import ArtifactRef
from training_io.balance import mean_overheads
from training_io.document_index import read_index
from training_io.hashing import derive_seed
from training_io.mixture import MixtureStage
from training_io.plan import Plan, ShardsReference, load_plan, write_plan
from training_io.planning import plan_packs

PLAN_VERSION = 4
STATS_VERSION = 4
BALANCED_RANKS = (2, 4, 8)  # shown for so many ranks


def build_plan(stage: Stage, token_shards: ArtifactRef) -> Sealed:
    """Plan the packs of every split that has documents."""
    shards = stage.folder(token_shards)

    def write(folder: Path) -> dict[str, Any]:
        plans = [
            plan_split(stage, token_shards, name, mixture_stages(stage.recipe) if name == "train" else ())
            for name in sorted(token_shards.counts["splits"])
        ]
        for plan in plans:
            write_plan(folder / plan.split, plan, shards)
        return {
            "packs": sum(plan.num_packs for plan in plans),
            "segments": sum(plan.num_segments for plan in plans),
            "targets": sum(plan.num_targets for plan in plans),
            "splits": {plan.split: _counts(plan) for plan in plans},
            "balance": [
                {"ranks": ranks, **mean_overheads(plan, ranks)}
                for plan in plans
                if plan.split == "train"
                for ranks in BALANCED_RANKS
            ],
        }

    ref = stage.materialize(
        asset="packing_plan",
        inputs={"token_shards": {"identity": token_shards.identity, "digest": token_shards.digest}},
        parameters=own_parameters(stage.recipe, "packing_plan"),
        version=PLAN_VERSION,
        write=write,
    )
    splits = ref.counts["splits"]
    metadata = asset_metadata(stage, ref) | {
        **shown_table("splits", [{"split": name, **counts} for name, counts in splits.items()]),
        **shown_table("balance", list(map(in_per_cent, ref.counts["balance"]))),
        "train_utilisation": rounded(splits["train"]["utilisation"]),
        "train_waste": rounded(1 - splits["train"]["utilisation"]),
        "steps_a_pass": splits["train"]["steps"],
    }
    return Sealed(ref=ref, metadata=metadata)


def plan_split(stage: Stage, token_shards: ArtifactRef, split: str, mixture: Sequence[MixtureStage] = ()) -> Plan:
    """The plan of one split: training steps accumulate and may mix pools, evaluation steps are one microbatch."""
    packs = stage.recipe.packs
    folder = stage.folder(token_shards)
    return plan_packs(
        read_index(folder / f"{split}_index"),
        shards=ShardsReference(path=folder, identity=token_shards.identity, digest=token_shards.digest),
        max_seq_len=packs.max_seq_len,
        long_documents=packs.long_documents,
        overlap=packs.overlap,
        capacity=packs.capacity,
        strategy=packs.strategy,
        buffer=packs.buffer,
        packs_per_microbatch=packs.packs_per_microbatch(split),
        microbatches_per_step=packs.accumulation if split == "train" else 1,
        epoch_seed=derive_seed(stage.recipe.seed, "epochs"),
        mixture=mixture,
    )


def mixture_stages(recipe: Recipe) -> tuple[MixtureStage, ...]:
    """The stages of the recipe's mixture; none without one."""
    stages = recipe.mixture.stages if recipe.mixture else ()
    return tuple(MixtureStage(name=stage.name, tokens=stage.tokens, shares=stage.shares) for stage in stages)


def _counts(plan: Plan) -> dict[str, Any]:
    slots = plan.num_packs * plan.capacity
    return {
        "documents": plan.index.num_documents,
        "diverted": len(plan.diverted),
        "segments": plan.num_segments,
        "packs": plan.num_packs,
        "targets": plan.num_targets,
        "repeated": plan.num_repeated,
        "steps": plan.num_steps,
        "utilisation": plan.num_inputs / slots if slots else 1.0,
    }


def build_stats(stage: Stage, token_shards: ArtifactRef, packing_plan: ArtifactRef) -> Sealed:
    """Compare padding, concatenating and packing on the training split's very documents."""

    def write(folder: Path) -> dict[str, Any]:
        artifact = stage.folder(packing_plan)
        names = sorted(packing_plan.counts["splits"], key=lambda name: (name != "train", name))
        return write_layouts(folder, [load_plan(artifact, name) for name in names])

    ref = stage.materialize(
        asset="packing_stats",
        inputs={"token_shards": token_shards.digest, "packing_plan": packing_plan.digest},
        parameters={
            "packs": stage.recipe.packs.model_dump(mode="json"),
            "strategies": compared_strategies(stage.recipe.packs.strategy),
            "row_lengths": ROW_LENGTHS,
        },
        version=STATS_VERSION,
        write=write,
    )
    return Sealed(ref=ref, metadata=asset_metadata(stage, ref) | layouts_metadata(stage.folder(ref)))


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
