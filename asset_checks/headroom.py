"""Promise: it is known before training whether its steps read any token twice."""

from asset_checks.verdicts import Verdict, law
from pipeline_assets.recipe import Windows
from pipeline_assets.stripes import Stage
from pipeline_assets.transforms.headroom import Headroom
from resources.artifact_store import ArtifactRef
from training_io.plan import Plan, load_plan


def tokens_suffice_for_the_training_steps(stage: Stage, packing_plan: ArtifactRef) -> Verdict:
    """One pass over the training split has at least the tokens that the recipe's steps read, packs or windows."""
    training = stage.recipe.training
    plan = load_plan(stage.folder(packing_plan), "train", allow_quarantined=stage.is_judging)
    expected = f"tokens for {training.steps:,} steps without reading one twice"
    headroom = (
        headroom_of_packs(plan, training.steps)
        if training.windows is None
        else headroom_of_windows(plan, training.windows, training.steps)
    )
    if not headroom.available:
        return Verdict(expected=expected, found="a pass over the training split has nothing to read", num_violations=1)
    repeats = f"{headroom.num_repeated:,} tokens are repeats" if headroom.num_repeated else "nothing repeats"
    found = (
        f"{headroom.ratio:.2f} × what {training.steps:,} steps of {training.layout} read: a pass has"
        f" {headroom.available:,} tokens, the steps read {headroom.needed:,}, {headroom.passes:.2f} passes; {repeats}"
    )
    return Verdict(
        expected=expected,
        found=found,
        num_violations=headroom.num_repeated,
        examples=[{"violation": found}] if headroom.num_repeated else [],
        numbers={"headroom": headroom.ratio, "passes": headroom.passes},
    )


def headroom_of_packs(plan: Plan, steps: int) -> Headroom:
    """Targets of a pass against those of the steps; a pass that is not finished reads as much as the first so far."""
    available = int((plan.planned_lengths - 1).sum())
    steps_a_pass = -(-len(plan.pack_targets) // plan.packs_per_step)  # the last of a pass may be short
    whole, rest = divmod(steps, max(steps_a_pass, 1))
    return Headroom(
        available=available, needed=whole * available + int(plan.pack_targets[: rest * plan.packs_per_step].sum())
    )


def headroom_of_windows(plan: Plan, windows: Windows, steps: int) -> Headroom:
    """Tokens in the batches of a pass over the shards, counted in the files, against those in the steps' batches."""
    batch = windows.batch_size * windows.length
    tokens = sum(len(shard) for shard in plan.token_shards)
    return Headroom(available=max(0, tokens - 1) // batch * batch, needed=steps * windows.accumulation * batch)


CHECKS = [
    law(
        tokens_suffice_for_the_training_steps,
        blocking=False,
        description="Warns when the recipe's steps read more tokens than the training split has, so that some are "
        "trained on again: lower training.steps or read more of the source, unless repeats are wanted.",
    ),
]
