"""Promise: no token sees another document, packed is what separate would be, resume is exact, and the model learns.

The experiments of `training_io.preflight`, on the run's own model and the first batches of its own shards.
"""

import math
from dataclasses import replace

import numpy as np

from asset_checks.trained_run import (
    MAX_TOKENS,
    checkpoint_of,
    experiment,
    first_batch,
    inputs_of_step,
    plan_of,
    step_source,
    stream_identity,
    trained_model,
)
from asset_checks.verdicts import Verdict, law, verdict_of
from pipeline_assets.stripes import Stage
from pipeline_assets.training import CURVES_NAME
from resources.artifact_store import ArtifactRef
from resources.tables import read_json
from training_io.batch import PackedBatch

MAX_POKED_SEGMENTS = 4
MAX_POKED_TOKENS = 1_024


def no_token_sees_another_document(
    stage: Stage, varlen_training_run: ArtifactRef, packing_plan: ArtifactRef
) -> Verdict:
    """On a real microbatch, changing one segment's inputs changes that segment's logits and no other's."""
    if (chosen := _chosen_without_mask(stage, "no token sees another document")) is not None:
        return chosen
    from training_io import preflight

    model = trained_model(stage, varlen_training_run, packing_plan)
    batch = _first_segments(first_batch(stage, packing_plan))
    violations = preflight.no_token_sees_another(model, batch)
    num_poked = int((np.diff(batch.cu_seqlens) > 1).sum())
    return Verdict(
        expected="changing one segment changes its own logits only",
        found=f"{len(violations):,} of {num_poked:,} poked segments changed others, or not all of themselves"
        f" ({model.backend} on {model.tokens.weight.device.type})",
        num_violations=len(violations),
        examples=[{"violation": violation} for violation in violations],
    )


def packed_equals_separate(stage: Stage, varlen_training_run: ArtifactRef, packing_plan: ArtifactRef) -> Verdict:
    """Real segments in one flat batch give the logits, loss and gradients that each gives by itself, in float64."""
    from training_io import preflight

    expected = f"logits, loss and gradients of packed and separate segments equal to {preflight.TOLERANCE:g}"
    with experiment(stage, varlen_training_run, packing_plan) as (model, batch):
        return verdict_of(expected, preflight.packed_equals_separate(model, batch), _described(batch))


def padding_changes_nothing(stage: Stage, varlen_training_run: ArtifactRef, packing_plan: ArtifactRef) -> Verdict:
    """Rows padded with IGNORED targets give the packed loss and gradients, and counting the padding would show."""
    from training_io import preflight

    expected = f"loss and gradients of padded and packed segments equal to {preflight.TOLERANCE:g}"
    with experiment(stage, varlen_training_run, packing_plan) as (model, batch):
        return verdict_of(expected, preflight.padded_equals_packed(model, batch), _described(batch))


def positions_restart_with_each_document(
    stage: Stage, varlen_training_run: ArtifactRef, packing_plan: ArtifactRef
) -> Verdict:
    """Positions restart in the first batch, are relative under rotary ones, and leaving the mask out would show."""
    expected = "positions that restart with each segment; leaving out the mask changes logits, running on does not"
    if (chosen := _chosen_without_mask(stage, expected)) is not None:
        return chosen
    from training_io import preflight

    plan, whole = plan_of(stage, packing_plan), first_batch(stage, packing_plan)
    violations = preflight.positions_restart(whole, plan.index.eos_id)
    with experiment(stage, varlen_training_run, packing_plan) as (model, batch):
        violations += preflight.positions_are_relative(model, batch)
    return verdict_of(expected, violations, f"{len(whole.inputs):,} positions, and {_described(batch)}")


def loss_knows_no_microbatches(stage: Stage, varlen_training_run: ArtifactRef, packing_plan: ArtifactRef) -> Verdict:
    """The training loop's loss and gradients are the same in one microbatch and in two; a mean of means would show."""
    from training_io import preflight

    expected = f"loss and gradients of one and of two microbatches equal to {preflight.TOLERANCE:g}"
    with experiment(stage, varlen_training_run, packing_plan) as (model, batch):
        return verdict_of(expected, preflight.loss_knows_no_microbatches(model, batch), _described(batch))


def attention_backends_agree(stage: Stage, varlen_training_run: ArtifactRef, packing_plan: ArtifactRef) -> Verdict:
    """The attention backends that run on this machine give the reference's logits and gradients."""
    import torch

    from training_io import preflight
    from training_io.attention import BACKENDS

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    backends, trained = preflight.backends_on(device), preflight.backends_with_gradients(device)
    with experiment(stage, varlen_training_run, packing_plan) as (model, batch):
        violations = preflight.backends_agree(model, batch, device, backends)
    missing = ", ".join(sorted(set(BACKENDS) - set(backends)))
    untrained = ", ".join(f"{name}'s gradients" for name in backends if name not in trained)
    not_run = (
        f"; not compared, for want of a GPU: {missing}, {untrained}, bfloat16, segments of one token" if missing else ""
    )
    found = f"{_described(batch)} with {', '.join(backends)} on {device.type}{not_run}"
    return verdict_of("logits and gradients of every backend as the reference has them", violations, found)


def resumed_sampler_gives_the_next_step(
    stage: Stage, varlen_training_run: ArtifactRef, packing_plan: ArtifactRef
) -> Verdict:
    """The state in the run's checkpoint goes on with the step behind its last one, token by token."""
    stored, plan = checkpoint_of(stage, varlen_training_run), plan_of(stage, packing_plan)
    state, identity = stored.payload["stream"], stream_identity(stage, plan)
    what = "the step behind the checkpoint's, as the plan has it"
    if state["plan"] != identity:
        violation = f"expected a state of {identity[:12]}…, what the recipe reads, found one of {state['plan'][:12]}…"
        return verdict_of(what, [violation], f"the checkpoint of step {stored.step:,}")
    source = step_source(stage, plan, identity)
    source.load_state_dict(state)
    batches = source.next_step()
    found = np.concatenate([batch.inputs for batch in batches])
    expected = inputs_of_step(stage, plan, stored.step)
    differs = len(found) != len(expected) or bool((found != expected).any())
    violations = [f"step {stored.step + 1:,}: other inputs than its packs or windows hold"] * differs
    if source.state_dict() == state:
        violations.append("the state stayed where it was when a step was taken")
    return verdict_of(
        what,
        violations,
        f"{len(found):,} inputs after step {stored.step:,}",
    )


def first_loss_is_that_of_guessing(
    stage: Stage, varlen_training_run: ArtifactRef, packing_plan: ArtifactRef
) -> Verdict:
    """A fresh model on random tokens, and the run before its first update, have the loss of guessing."""
    from training_io import preflight

    recorded = read_json(stage.folder(varlen_training_run) / CURVES_NAME)["train"][0]
    with experiment(stage, varlen_training_run, packing_plan) as (model, _):
        violations = preflight.first_loss_is_uniform(model, MAX_TOKENS)
    violations += preflight.off_uniform("step 1", recorded, model.config)
    guessing = preflight.first_loss_of(model.config)
    found = f"a fresh model of {MAX_TOKENS:,} random tokens, and step 1 of the run, {recorded:.3f} nats"
    return verdict_of(f"first losses of {guessing:.2f} ± {preflight.UNIFORM_TOLERANCE} nats", violations, found)


def one_pack_can_be_overfitted(stage: Stage, varlen_training_run: ArtifactRef, packing_plan: ArtifactRef) -> Verdict:
    """A copy of the model learns a few tokens of the first pack by heart."""
    from training_io import preflight

    with experiment(stage, varlen_training_run, packing_plan) as (model, batch):
        violations = preflight.one_pack_is_overfitted(model, batch)
    expected = f"half of the loss on {preflight.OVERFIT_TOKENS} tokens after {preflight.OVERFIT_STEPS} steps on them"
    return verdict_of(expected, violations, "a copy of the model, trained on the first pack alone")


def _chosen_without_mask(stage: Stage, expected: str) -> Verdict | None:
    """The verdict for a recipe that chose to let tokens see the documents before theirs."""
    windows = stage.recipe.training.windows
    if windows is None or windows.document_mask:
        return None
    return Verdict(
        expected=expected,
        found=f"the recipe chose windows of {windows.length:,} tokens without a document mask:"
        " tokens may see the documents before theirs",
        num_violations=1,
        is_choice=True,
    )


def _described(batch: PackedBatch) -> str:
    return f"{len(batch.inputs):,} tokens in {len(batch.segment_doc):,} segments of the first batches, in float64"


def _first_segments(batch: PackedBatch) -> PackedBatch:
    """The first few segments of a batch: two at least, then as many as fit into a thousand tokens."""
    fitting = int((batch.cu_seqlens <= MAX_POKED_TOKENS).sum())
    cu_seqlens = batch.cu_seqlens[: min(max(fitting, 3), MAX_POKED_SEGMENTS + 1)]
    end = int(cu_seqlens[-1])
    return replace(
        batch,
        inputs=batch.inputs[:end],
        targets=batch.targets[:end],
        position_ids=batch.position_ids[:end],
        cu_seqlens=cu_seqlens,
        max_seqlen=int(np.diff(cu_seqlens).max()),
        segment_doc=batch.segment_doc[: len(cu_seqlens) - 1],
    )


def validation_loss_falls(stage: Stage, varlen_training_run: ArtifactRef) -> Verdict:
    """The loss on held-out packs is lower at the end than before the first step."""
    validation = read_json(stage.folder(varlen_training_run) / CURVES_NAME)["validation"]
    if not validation:
        return Verdict(expected="a lower validation loss", found="no validation documents", num_violations=1)
    first, last = validation[0][1], validation[-1][1]
    under_guessing = math.log(varlen_training_run.counts["vocab_size"]) - last
    return Verdict(
        expected=f"a validation loss below the first one, {first:.3f}",
        found=f"{last:.3f} nats a token after step {validation[-1][0]:,}: {first - last:.3f} lower, and"
        f" {under_guessing:.3f} under guessing among {varlen_training_run.counts['vocab_size']:,} tokens",
        num_violations=int(not last < first),
        examples=[{"step": step, "validation loss": loss} for step, loss in validation],
        numbers={
            "first_validation_loss": first,
            "last_validation_loss": last,
            "nats_under_guessing": under_guessing,
        },
    )


CHECKS = [
    law(
        no_token_sees_another_document,
        blocking=True,
        description="Fails when a token's output depends on another document: attention or positions are wrong. Warns "
        "when the recipe chose windows without a document mask.",
    ),
    law(
        packed_equals_separate,
        blocking=True,
        description="Fails when packing changes what a segment computes or is trained by: attention, positions or "
        "the loss are wrong.",
    ),
    law(
        padding_changes_nothing,
        blocking=True,
        description="Fails when ignored padding changes the loss or a gradient: the loss counts what it must leave "
        "out, or the model reads padding.",
    ),
    law(
        positions_restart_with_each_document,
        blocking=True,
        description="Fails when positions run on from one document to the next, or attention does not depend on its "
        "mask. Warns when the recipe chose windows without a document mask.",
    ),
    law(
        loss_knows_no_microbatches,
        blocking=True,
        description="Fails when the loss or a gradient depends on how a step is divided: it is not a sum over real "
        "targets divided once by their number.",
    ),
    law(
        attention_backends_agree,
        blocking=True,
        description="Fails when an attention backend of this machine computes something else than the reference: "
        "choose another in training.attention.",
    ),
    law(
        resumed_sampler_gives_the_next_step,
        blocking=True,
        description="Fails when the checkpoint's state goes on with another step than the next one: a resumed run "
        "would repeat or skip data. Train again from the start.",
    ),
    law(
        first_loss_is_that_of_guessing,
        blocking=False,
        description="Warns when a fresh model is surer than a guess, or the run's first loss was: look at the weights' "
        "initial widths, and whether targets leak into inputs.",
    ),
    law(
        one_pack_can_be_overfitted,
        blocking=False,
        description="Warns when a few steps on a few tokens do not halve their loss: gradients do not reach the "
        "weights, or the model reads something else than its inputs.",
    ),
    law(
        validation_loss_falls,
        blocking=False,
        description="Warns when training did not lower the loss on held-out text: look at the learning rate, the "
        "steps and the validation split.",
    ),
]
