"""Preflight: laws of a model and a real batch, each a small experiment that must come out in one way.

In: a model in float64 on the CPU, and an excerpt of a batch that it is to train on. Out: for each law, in words, how it
is broken; an empty list is a pass. The promise: neither the model's weights nor any generator changes. Cost: two to
four passes over the excerpt for each law.

A law is an equality of two ways to compute one thing, within rounding. With it comes what a mistake would do, which
must show: an experiment that cannot fail proves nothing.

`check_before_training` runs the cheap ones before a run's first step, on a fresh model and the run's own batches.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from training_io.batch import IGNORED, PackedBatch, end_to_end, in_padded_rows
from training_io.errors import FormatError, InvariantBroken
from training_io.excerpt import (
    EXCERPT_TOKENS,
    excerpt,
    segment_alone,
    segments_of,
    together,
    uneven_parts,
    with_drawn_tokens,
)
from training_io.experiment import (
    Accumulate,
    Pass,
    accumulate_step,
    compute_step,
    eager_logits,
    logits_of,
    loss_of,
    on_device,
    on_host,
    with_backend,
)
from training_io.model import INIT_STD, Model, ModelConfig, num_parameters
from training_io.run import Spec
from training_io.staging import DeviceBatch
from training_io.stream import StreamSpec, open_stream
from training_io.train import accumulate_gradients

I64 = npt.NDArray[np.int64]


# Of the largest magnitude compared. A float64 sum of a thousand terms is off by some 1e-13 of it, and a dozen layers of
# them by 1e-12; a token that sees another segment moves its logits by a thousandth and more.
TOLERANCE = 1e-9
CAUGHT = 1e-6  # what a mistake must change at least: a thousand tolerances

UNIFORM_TOLERANCE = 0.1  # nats between a first loss and that of guessing

OVERFIT_TOKENS = 32
OVERFIT_STEPS = 30

SMALL_PARAMETERS = 20_000_000  # below it an experiment in float64 takes seconds and less than a gigabyte
START_TOKENS = 192  # of an experiment before training: segments enough for every law, in a fraction of a second
# With fewer ids than a byte has, an input's own logit, which tied tables raise, weighs in a mean over all of them.
MIN_GUESSED_VOCABULARY = 256

_REMAKE = "Materialize token_shards and packing_plan again."
_DEFECT = "This is a defect of corpusmill, not of the input; nothing was trained."


def check_before_training(spec: Spec, config: ModelConfig, kind: type[Model] = Model) -> None:
    """Run the cheap laws on the first batches of a run's stream and a fresh model of its shape, in float64 on the CPU.

    FormatError for positions that do not restart with each document, InvariantBroken for a law of the model; either
    names the law. The stream is another than the run's: all ranks' microbatches, nothing staged ahead, nothing padded.
    Windows without a document mask chose not to restart positions. Of a model of SMALL_PARAMETERS or more the batches
    alone are looked at, of one below MIN_GUESSED_VOCABULARY ids not the first loss. Attention is sdpa's, whatever the
    run's own.
    """
    batches, eos_id = _first_batches(spec, config, START_TOKENS)
    if isinstance(spec, StreamSpec) or spec.document_mask:
        for batch in batches:
            _refuse(FormatError, "positions restart", positions_restart(batch, eos_id), _REMAKE)
    if num_parameters(config) >= SMALL_PARAMETERS:
        return
    model = kind(config, torch.Generator().manual_seed(0), backend="sdpa")
    few = excerpt(together(batches), START_TOKENS)
    with on_one_thread():
        if config.vocab_size >= MIN_GUESSED_VOCABULARY:
            _refuse(InvariantBroken, "the first loss is that of guessing", first_loss_is_uniform(model), _DEFECT)
        model.double()
        _refuse(InvariantBroken, "packed equals separate", packed_equals_separate(model, few), _DEFECT)
        violations = loss_knows_no_microbatches(model, with_drawn_tokens(few, config.vocab_size))
        _refuse(InvariantBroken, "the loss knows no microbatches", violations, _DEFECT)


@contextmanager
def on_one_thread() -> Iterator[None]:
    """PyTorch on one thread meanwhile: so little work is done sooner by one than shared, above all beside others."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def no_token_sees_another(model: Model, batch: PackedBatch) -> list[str]:
    """Another id in every place of a segment changes all of that segment's logits, and no other's by a single bit.

    In whatever dtype and on whatever device the model is. Segments of one token are left as they are.
    """
    inputs = on_device(batch, model).inputs
    violations: list[str] = []
    with torch.no_grad():
        before_TV = logits_of(model, batch)
        for start, end in segments_of(batch):
            if end - start == 1:
                continue
            poked = inputs.clone()
            poked[start:end] = (poked[start:end] + 1) % model.config.vocab_size
            changed = (logits_of(model, replace(batch, inputs=poked.cpu().numpy())) != before_TV).any(dim=1)
            inside, outside = int(changed[start:end].sum()), int(changed[:start].sum() + changed[end:].sum())
            if outside or inside < end - start:
                violations.append(
                    f"segment [{start:,}, {end:,}): expected its {end - start:,} tokens alone to change with it, found"
                    f" {inside:,} of them and {outside:,} of others"
                )
    return violations


def packed_equals_separate(model: Model, batch: PackedBatch) -> list[str]:
    """In one flat batch the segments have the logits, loss and gradients that each has by itself."""
    packed = compute_step(model, [batch])
    separate = compute_step(model, [segment_alone(batch, start, end) for start, end in segments_of(batch)])
    return [
        *_unequal("logits", [packed.logits], [separate.logits]),
        *_unequal("loss", [packed.loss], [separate.loss]),
        *_unequal("gradients", packed.gradients, separate.gradients),
    ]


def padded_equals_packed(model: Model, batch: PackedBatch) -> list[str]:
    """As rows padded to the longest, padding IGNORED, the segments have the loss and gradients of the flat batch.

    A loss that counts the padding must be another.
    """
    packed, rows = compute_step(model, [batch]), in_padded_rows(batch, batch.max_seqlen)
    ignored = compute_step(model, [rows])
    violations = [
        *_unequal("loss", [ignored.loss], [packed.loss]),
        *_unequal("gradients", ignored.gradients, packed.gradients),
    ]
    if len(rows.inputs) > len(batch.inputs):
        is_ignored = rows.targets == IGNORED
        counted = replace(rows, targets=np.where(is_ignored, 0, rows.targets))
        violations += _not_caught("a loss that counts padding", [compute_step(model, [counted]).loss], [packed.loss])
    return violations


def positions_restart(batch: PackedBatch, eos_id: int) -> list[str]:
    """Positions are 0 where a segment begins, and one more at each token after it; behind an EOS one begins."""
    begins = np.zeros(len(batch.inputs), dtype=np.bool_)
    begins[batch.cu_seqlens[:-1]] = True
    expected = np.where(begins, 0, np.concatenate([[0], batch.position_ids[:-1] + 1]))
    wrong = np.flatnonzero(batch.position_ids != expected).tolist()
    joined = (np.flatnonzero((batch.inputs[:-1] == eos_id) & ~begins[1:]) + 1).tolist()
    return [
        *(f"token {at:,}: expected position {expected[at]:,}, found {batch.position_ids[at]:,}" for at in wrong),
        *(f"token {at:,}: expected a new segment behind an EOS, found the same one" for at in joined),
    ]


def positions_are_relative(model: Model, batch: PackedBatch) -> list[str]:
    """Under rotary positions and the mask, positions that run on from segment to segment change no logit.

    Without the mask logits must change, or the mask did nothing.
    """
    num_tokens, config = len(batch.inputs), model.config
    running = replace(batch, position_ids=np.arange(num_tokens))
    unmasked = replace(running, cu_seqlens=np.array([0, num_tokens], dtype=np.int32), max_seqlen=num_tokens)
    violations: list[str] = []
    with torch.no_grad():
        restarted_TV = logits_of(model, batch)
        if config.positions == "rotary":
            violations += _unequal("logits at running positions", [logits_of(model, running)], [restarted_TV])
        if config.positions == "rotary" or num_tokens <= config.max_positions:
            violations += _not_caught("attention without the mask", [logits_of(model, unmasked)], [restarted_TV])
    return violations


def loss_knows_no_microbatches(model: Model, batch: PackedBatch, accumulate: Accumulate | None = None) -> list[str]:
    """One microbatch or two have the same loss and gradients; the mean of the two means must not.

    `accumulate` adds up the gradients of a step and returns its loss; without one it is the training loop's.
    """
    parts = uneven_parts(batch)
    if not parts:
        return [f"expected segments that divide unevenly, found {len(batch.segment_doc):,}"]
    means = [replace(part, step_targets=len(parts) * part.num_targets) for part in parts]
    whole, divided, averaged = (
        accumulate_step(model, step, accumulate or _loops_own) for step in ([batch], parts, means)
    )
    return [
        *_unequal("loss", [divided.loss], [whole.loss]),
        *_unequal("gradients", divided.gradients, whole.gradients),
        *_not_caught("a mean of means", averaged.gradients, whole.gradients),
    ]


def backends_on(device: torch.device) -> tuple[str, ...]:
    """The attention backends that a device has kernels for."""
    return ("sdpa", "flex", "varlen") if device.type == "cuda" else ("sdpa", "flex")


def backends_with_gradients(device: torch.device) -> tuple[str, ...]:
    """Those of them that can train there: flex has no backward pass on the CPU."""
    return backends_on(device) if device.type == "cuda" else ("sdpa",)


def backends_agree(model: Model, batch: PackedBatch, device: torch.device, backends: Sequence[str]) -> list[str]:
    """Every backend has the logits and gradients of the reference: exact sdpa, in float64 on the CPU.

    On the CPU within rounding, gradients of those in backends_with_gradients. On CUDA in bfloat16 they are at most
    twice as far from it as sdpa is in bfloat16, and segments of one token have finite logits and gradients.
    """
    exact = compute_step(with_backend(model, "sdpa", torch.device("cpu"), torch.float64, exact=True), [batch])
    if device.type == "cuda":
        return _halves_agree(model, batch, device, backends, exact)
    violations: list[str] = []
    for backend in backends:
        copy = with_backend(model, backend, device, torch.float64)
        violations += _unequal(f"{backend}: logits", [eager_logits(copy, batch)], [exact.logits])
        if backend in backends_with_gradients(device):
            violations += _unequal(f"{backend}: gradients", compute_step(copy, [batch]).gradients, exact.gradients)
    return violations


def first_loss_of(config: ModelConfig) -> float:
    """Expected cross-entropy of fresh weights in nats: ln V, and half the variance of a logit.

    The last norm makes tokens of length sqrt(D), on which rows of the head, INIT_STD wide, have logits of variance
    INIT_STD^2 D; the mean of exp over such logits is exp(variance / 2).
    """
    return math.log(config.vocab_size) + INIT_STD**2 * config.d_model / 2


def first_loss_is_uniform(model: Model, num_tokens: int = EXCERPT_TOKENS) -> list[str]:
    """On random tokens a fresh model of this kind and shape has the loss of guessing."""
    config = model.config
    ids = np.random.default_rng(0).integers(config.vocab_size, size=num_tokens + 1)
    longest = min(num_tokens, config.max_positions)
    lengths = np.diff([*range(0, num_tokens, longest), num_tokens])
    batch = end_to_end(ids[:-1], ids[1:], lengths, num_tokens)
    fresh = type(model)(config, torch.Generator().manual_seed(0), backend="sdpa")
    with torch.no_grad():
        loss = loss_of(fresh, batch).item()
    return off_uniform("random tokens", loss, config)


def off_uniform(what: str, loss: float, config: ModelConfig) -> list[str]:
    """A violation unless a first loss, in nats a target, is that of guessing."""
    expected = first_loss_of(config)
    if abs(loss - expected) <= UNIFORM_TOLERANCE:
        return []
    return [f"{what}: expected a first loss of {expected:.2f} ± {UNIFORM_TOLERANCE} nats, found {loss:.2f}"]


def overfitted(model: Model, batch: PackedBatch, num_steps: int = OVERFIT_STEPS) -> tuple[float, float]:
    """Losses of a copy of the model before and after some steps of AdamW on one batch, in nats a target."""
    copy = deepcopy(model).float()
    optimizer = torch.optim.AdamW(
        copy.parameters(), lr=min(0.02, 1 / copy.config.d_model), betas=(0.9, 0.95), weight_decay=0.0
    )
    losses = []
    for _ in range(num_steps + 1):
        loss = loss_of(copy, batch)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # PyTorch leaves it unannotated
        optimizer.step()
    return losses[0], losses[-1]


def one_pack_is_overfitted(model: Model, batch: PackedBatch) -> list[str]:
    """A copy of the model learns a few real tokens by heart: its loss on them falls below a half."""
    before, after = overfitted(model, excerpt(batch, OVERFIT_TOKENS))
    if after < before / 2:
        return []
    return [f"expected a loss below half of {before:.3f} after {OVERFIT_STEPS} steps on one pack, found {after:.3f}"]


def _loops_own(model: Model, microbatches: list[DeviceBatch]) -> Tensor:
    return accumulate_gradients(model, microbatches, torch.float64)


def _halves_agree(
    model: Model, batch: PackedBatch, device: torch.device, backends: Sequence[str], exact: Pass
) -> list[str]:
    models = {name: with_backend(model, name, device, torch.bfloat16) for name in ("sdpa", *backends)}
    found = {name: compute_step(copy, [batch]) for name, copy in models.items()}
    errors = {
        "logits": {name: _rms_difference([own.logits], [exact.logits]) for name, own in found.items()},
        "gradients": {name: _rms_difference(own.gradients, exact.gradients) for name, own in found.items()},
    }
    ones = replace(batch, position_ids=np.zeros_like(batch.position_ids), max_seqlen=1)
    ones = replace(ones, cu_seqlens=np.arange(len(batch.inputs) + 1, dtype=np.int32))
    alone = {name: compute_step(copy, [ones]) for name, copy in models.items()}
    return [
        *(
            f"{name}: expected bfloat16 {what} within {2 * of['sdpa']:.3g} of the reference, found {error:.3g}"
            for what, of in errors.items()
            for name, error in of.items()
            if not error <= 2 * of["sdpa"]
        ),
        *(
            f"{name}: expected finite logits and gradients of segments of one token, found others"
            for name, one in alone.items()
            if not all(bool(values.isfinite().all()) for values in (one.logits, *one.gradients))
        ),
    ]


def _first_batches(spec: Spec, config: ModelConfig, min_tokens: int) -> tuple[list[PackedBatch], int]:
    """The microbatches of as many first steps as have so many tokens, on the host, and the id that ends a document."""
    spec = replace(spec, device="cpu", prefetch_depth=0, rank=0, world_size=1, vocab_size=config.vocab_size)
    stream = open_stream(replace(spec, constant_shape=False) if isinstance(spec, StreamSpec) else spec)
    batches: list[PackedBatch] = []
    while sum(len(batch.inputs) for batch in batches) < min_tokens:  # a step of a short context may have two
        batches += [on_host(batch) for batch in next(stream)]
    return batches, stream.facts.eos_id


def _refuse(kind: type[FormatError | InvariantBroken], law: str, violations: Sequence[str], what_to_do: str) -> None:
    if violations:
        more = f" (and {len(violations) - 1:,} more)" if violations[1:] else ""
        raise kind(f"before training, the law that {law}: {violations[0]}{more}. {what_to_do}")


def _unequal(what: str, found: Sequence[Tensor], expected: Sequence[Tensor]) -> list[str]:
    """A violation unless the tensors are equal within TOLERANCE of the largest; NaN equals nothing."""
    off = _relative_difference(found, expected)
    if off <= TOLERANCE:
        return []
    return [f"{what}: expected equal within {TOLERANCE:g} of the largest, found {off:.3g} of it between them"]


def _not_caught(what: str, found: Sequence[Tensor], expected: Sequence[Tensor]) -> list[str]:
    """A violation unless the tensors differ by CAUGHT of the largest or more."""
    off = _relative_difference(found, expected)
    if off >= CAUGHT:
        return []
    return [f"{what}: expected another result by {CAUGHT:g} of the largest, found {off:.3g} of it between them"]


def _rms_difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Root of the mean squared difference of all elements, taken in float64 on the CPU."""
    differences = [(a.cpu().double() - b).flatten() for a, b in zip(found, expected, strict=True)]
    return torch.cat(differences).square().mean().sqrt().item()


def _relative_difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Largest difference of corresponding elements over the largest magnitude expected; NaN where one is."""
    largest = torch.stack([values.abs().max() for values in expected]).max()
    return float(torch.stack([(a - b).abs().max() for a, b in zip(found, expected, strict=True)]).max() / largest)
