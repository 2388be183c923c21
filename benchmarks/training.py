"""training: padding-free batches against rows padded to the batch's longest, real tokens a second.

The same model (the tiny preset, float32) takes the same optimizer steps on the same documents either way: 8 documents a
batch in order, not packed, of web-like lengths cut to 1,024. Ours lays them end to end and attends to one segment after
another. The peer is the usual batch: a rectangle of rows as long as the longest document, one causal attention call for
all rows, targets IGNORED in the padding, which the model computes like the rest. Both divide the summed loss by the
real targets. That loss and gradients are equal, in float64 on every batch, is asserted first. Only real tokens count
for the rate. A step is forward and backward pass and AdamW's update; making the batches is not timed.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from bench import Bench
from measure import Bar, Row, alternate, seconds_of
from packing import web_lengths
from torch import Tensor

from training_io.batch import PackedBatch, end_to_end, in_padded_rows
from training_io.errors import InvariantBroken
from training_io.loss import summed_cross_entropy
from training_io.model import Model, preset

NUM_BATCHES, DOCUMENTS_PER_BATCH, MAX_SEQ_LEN = 3, 8, 1_024
VOCAB_SIZE = 8_192
TOLERANCE = 1e-10  # float64, relative to the largest
BAR = Bar(figure="ratio", at_least=1.4)

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What the model is called with, and how many of the targets are real."""

    inputs: Tensor  # int64[T]
    targets: Tensor  # int64[T]
    position_ids: Tensor  # int64[T]
    cu_seqlens: Tensor  # int32[S + 1]
    max_seqlen: int
    num_targets: int


def measure(bench: Bench) -> list[Row]:
    """One row: real tokens a second."""
    torch.set_num_threads(1)
    documents = make_documents(NUM_BATCHES * DOCUMENTS_PER_BATCH, MAX_SEQ_LEN)
    groups = [documents[first : first + DOCUMENTS_PER_BATCH] for first in range(0, len(documents), DOCUMENTS_PER_BATCH)]
    flat, padded = [flat_batch(group) for group in groups], [padded_batch(group) for group in groups]
    for number, (ours, peer) in enumerate(zip(flat, padded, strict=True)):
        require_same_step(number, ours, peer)
    contenders = {"ours": lambda: seconds_of_steps(flat), "peer": lambda: seconds_of_steps(padded)}
    for warm_up in contenders.values():
        warm_up()
    return [row_of(flat, padded, alternate(bench.runs, contenders))]


def row_of(flat: Sequence[Batch], padded: Sequence[Batch], seconds: dict[str, tuple[float, ...]]) -> Row:
    """Ours beside the peer, with the share of the peer's rows that is padding."""
    num_tokens = sum(batch.num_targets for batch in flat)
    num_slots = sum(len(batch.inputs) for batch in padded)
    return Row(
        name="training, padding-free",
        amount=num_tokens,
        unit="real tokens",
        ours_seconds=seconds["ours"],
        peer=f"rows padded to the longest, torch {torch.__version__}",
        peer_seconds=seconds["peer"],
        extra={"peer_padding_percent": 100 * (1 - num_tokens / num_slots)},
        bars=[BAR],
    )


def make_documents(num: int, max_tokens: int) -> list[I64]:
    """Documents of random tokens, always the same ones; one more token than they have inputs."""
    generator = np.random.default_rng(0)
    return [generator.integers(VOCAB_SIZE, size=min(length, max_tokens) + 1) for length in web_lengths(num).tolist()]


def flat_batch(documents: Sequence[I64]) -> Batch:
    """Documents end to end, one segment each."""
    return _as_tensors(_packed(documents))


def padded_batch(documents: Sequence[I64]) -> Batch:
    """Documents in rows as long as the longest, padded on the right with inputs 0 and targets IGNORED."""
    packed = _packed(documents)
    return _as_tensors(in_padded_rows(packed, packed.max_seqlen))


def require_same_step(number: int, ours: Batch, peer: Batch) -> None:
    """Refuse to time batches whose loss or gradients differ in float64."""
    results = [loss_and_gradients(make_model().double(), batch) for batch in (ours, peer)]
    names = ["loss", *(name for name, _ in make_model().named_parameters())]
    for name, found, expected in zip(names, *results, strict=True):
        difference = float((found - expected).abs().max() / expected.abs().max())
        if not difference <= TOLERANCE:
            raise InvariantBroken(
                f"training: batch {number:,}, {name}: expected the padded rows' value within {TOLERANCE:g}, found a"
                f" difference of {difference:g}; nothing was timed"
            )


def make_model() -> Model:
    """The tiny preset with the weights of seed 0."""
    config = preset("tiny", VOCAB_SIZE, MAX_SEQ_LEN)
    return Model(config, torch.Generator().manual_seed(0), backend="sdpa")


def loss_and_gradients(model: Model, batch: Batch) -> list[Tensor]:
    """Loss of a batch a real target, and the gradient of every weight."""
    logits_TV = model(batch.inputs, batch.position_ids, batch.cu_seqlens, batch.max_seqlen)
    loss = summed_cross_entropy(logits_TV, batch.targets) / batch.num_targets
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


def seconds_of_steps(batches: Iterable[Batch]) -> float:
    """Seconds of one optimizer step a batch, with a new model and optimizer made before the clock starts."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def steps() -> None:
        for batch in batches:
            logits_TV = model(batch.inputs, batch.position_ids, batch.cu_seqlens, batch.max_seqlen)
            (summed_cross_entropy(logits_TV, batch.targets) / batch.num_targets).backward()
            optimizer.step()
            optimizer.zero_grad()

    return seconds_of(steps)


def _packed(documents: Sequence[I64]) -> PackedBatch:
    inputs = np.concatenate([document[:-1] for document in documents])
    targets = np.concatenate([document[1:] for document in documents])
    lengths = np.array([len(document) - 1 for document in documents])
    return end_to_end(inputs, targets, lengths, step_targets=len(targets))


def _as_tensors(packed: PackedBatch) -> Batch:
    return Batch(
        inputs=torch.from_numpy(packed.inputs),
        targets=torch.from_numpy(packed.targets),
        position_ids=torch.from_numpy(packed.position_ids),
        cu_seqlens=torch.from_numpy(packed.cu_seqlens),
        max_seqlen=packed.max_seqlen,
        num_targets=packed.num_targets,
    )
