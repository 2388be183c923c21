"""Promise: it is known before training whether its steps read any token twice."""

import numpy as np

from asset_checks.verdicts import Verdict, law
from pipeline_assets.sections.training import Windows
from pipeline_assets.stripes import Stage
from pipeline_assets.transforms.headroom import Headroom, pool_headroom
from resources.artifact_store import ArtifactRef
from training_io.ledger import cumulative_tokens
from training_io.plan import Plan, load_plan

MAX_PASSES = 16  # of a mixture over a pool, without a warning


def tokens_suffice_for_the_training_steps(stage: Stage, packing_plan: ArtifactRef) -> Verdict:
    """One pass over the training split has at least the tokens that the recipe's steps read, packs or windows."""
    training = stage.recipe.training
    plan = load_plan(stage.folder(packing_plan), "train", allow_quarantined=stage.is_judging)
    expected = f"tokens for {training.steps:,} steps without reading one twice"
    if plan.stages:
        return _mixture_suffices(plan, training.steps)
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


def _mixture_suffices(plan: Plan, steps: int) -> Verdict:
    """The mixture's own tokens against the steps', and how often the steps read each pool."""
    step_targets = np.asarray(plan.pack_targets, dtype=np.int64)[plan.schedule]
    whole, rest = divmod(steps, plan.num_steps)
    headroom = Headroom(
        available=int(step_targets.sum()),
        needed=whole * int(step_targets.sum()) + int(step_targets[: rest * plan.packs_per_step].sum()),
    )
    pools = pools_of_mixture(plan, steps)
    passes = ", ".join(f"{pool} {one.passes:.2f}" for pool, one in pools.items())
    often = [pool for pool, one in pools.items() if one.passes > MAX_PASSES]
    unreached = [stage.name for stage in plan.stages if stage.first_step >= steps]
    return Verdict(
        expected=f"a mixture of {steps:,} steps or more, every stage reached, no pool read over {MAX_PASSES} times",
        found=f"{plan.num_steps:,} steps of a mixture for {steps:,} of training, which read pools this often: {passes}",
        num_violations=headroom.num_repeated + len(often) + len(unreached),
        examples=[
            *({"violation": f"stage {name} begins behind the last step of training"} for name in unreached),
            *({"violation": f"pool {pool} is read {pools[pool].passes:,.1f} times"} for pool in often),
        ]
        or [
            {"pool": pool, "unique tokens": one.available, "tokens to read": one.needed, "passes": one.passes}
            for pool, one in pools.items()
        ],
        numbers={"headroom": headroom.ratio, **{f"{pool}_passes": one.passes for pool, one in pools.items()}},
    )


def pools_of_mixture(plan: Plan, steps: int) -> dict[str, Headroom]:
    """Each pool's tokens against what that many steps of the mixture read of it, over and over if need be."""
    doc, start, end = plan.locate(plan.order)
    inventory = np.bincount(plan.index.pools[doc], end - start, len(plan.index.pool_names)).astype(np.int64)
    whole, rest = divmod(steps, plan.num_steps)
    planned = {
        pool: whole * int(tokens[-1]) + (int(tokens[rest - 1]) if rest else 0)
        for pool, tokens in cumulative_tokens(plan).items()
    }
    return pool_headroom(dict(zip(plan.index.pool_names, inventory.tolist(), strict=True)), planned)


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
        "trained on again: lower training.steps or read more of the source, unless repeats are wanted. With a mixture, "
        "warns when training has more steps than it, or ends before one of its stages, or when a pool is read very "
        "often: change its shares, its tokens or training.steps.",
    ),
]
