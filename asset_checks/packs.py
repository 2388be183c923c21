"""Promise: every planned next-token pair exactly once a pass, no pack over capacity, every batch well formed."""

from collections.abc import Callable

from asset_checks.verdicts import Verdict, law, verdict_of
from pipeline_assets.stripes import Stage
from resources.artifact_store import ArtifactRef
from training_io import invariants
from training_io.plan import Plan, load_plan


def every_pair_comes_exactly_once(stage: Stage, packing_plan: ArtifactRef) -> Verdict:
    """Counted on token positions: each token but a document's last is trained as an input exactly once, and repeated
    only as the plan's overlap says.
    """
    return _recount(
        stage,
        packing_plan,
        "every next-token pair of every document exactly once a pass",
        [invariants.order_is_permutation, invariants.every_pair_once],
        f"{packing_plan.counts['targets']:,} pairs",
    )


def no_pack_is_over_capacity(stage: Stage, packing_plan: ArtifactRef) -> Verdict:
    """The lengths of a pack's segments sum to at most the capacity, their trained inputs to its recorded targets."""
    return _recount(
        stage,
        packing_plan,
        "tokens of a pack at most its capacity, and as recorded",
        [invariants.packs_within_capacity, invariants.pack_sums_are_right],
        f"{packing_plan.counts['packs']:,} packs",
    )


def batches_are_well_formed(stage: Stage, packing_plan: ArtifactRef) -> Verdict:
    """Sampled steps: cu_seqlens rises from 0 to the end, positions restart, targets are the shard's next tokens."""
    return _recount(
        stage,
        packing_plan,
        "cu_seqlens, positions and targets as the shards say",
        [lambda plan: invariants.steps_match_shards(plan) if plan.num_packs else []],
        f"sampled steps of {len(packing_plan.counts['splits'])} splits",
    )


def _recount(
    stage: Stage,
    packing_plan: ArtifactRef,
    expected: str,
    laws: list[Callable[[Plan], list[str]]],
    found: str,
) -> Verdict:
    folder = stage.folder(packing_plan)
    plans = [
        load_plan(folder, split, allow_quarantined=stage.is_judging) for split in sorted(packing_plan.counts["splits"])
    ]
    violations = [f"{plan.split}: {violation}" for plan in plans for recount in laws for violation in recount(plan)]
    return verdict_of(expected, violations, found)


AGAIN = "Materialize packing_plan again; if it fails again, report it."

CHECKS = [
    law(
        every_pair_comes_exactly_once,
        blocking=True,
        description=f"Fails when a training target is lost or repeated: the loss would weigh text wrongly. {AGAIN}",
    ),
    law(
        no_pack_is_over_capacity,
        blocking=True,
        description=f"Fails when a pack is larger than the training step was sized for. {AGAIN}",
    ),
    law(
        batches_are_well_formed,
        blocking=True,
        description=f"Fails when batches would train on wrong targets or let documents see each other. {AGAIN}",
    ),
]
