"""A batch: one flat vector of whole segments and the sums that separate them.

In: segment ranges and memory-mapped shards. Out: int64 inputs and targets, positions that restart at each segment, and
int32 cu_seqlens. The promise: no padding unless a constant shape is asked for, no token beyond a segment's look-ahead,
boundaries checked on the CPU before any device sees them. Cost: one pass over each output, and a few hundred
nanoseconds a segment.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from training_io.document_index import DocumentIndex
from training_io.errors import InvariantBroken, RecipeError
from training_io.segments import offsets_of, repeated_inputs

I64 = npt.NDArray[np.int64]

IGNORED = -100  # a target that torch's cross-entropy leaves out


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedBatch:
    """Segments laid end to end: segment k is [cu_seqlens[k], cu_seqlens[k + 1]) of the flat arrays of T tokens.

    max_seqlen is the longest segment here; num_targets counts the targets that are not IGNORED: T, less what an overlap
    repeats and the slack of a constant shape; segment_doc holds each segment's document number in the index.
    step_targets is the loss denominator: all targets of the global step, over its microbatches and ranks.
    """

    inputs: I64  # [T]
    targets: I64  # [T], IGNORED where nothing is trained
    position_ids: I64  # [T]
    cu_seqlens: npt.NDArray[np.int32]  # [S + 1]
    max_seqlen: int
    num_targets: int
    segment_doc: I64  # [S]
    step_targets: int
    epoch: int
    step: int


@dataclass(frozen=True, kw_only=True)
class ConstantShape:
    """Sizes that every microbatch of a plan fits, so that one compiled graph serves all."""

    num_tokens: int  # T
    num_segments: int  # S
    max_seqlen: int


def assemble_batch(
    index: DocumentIndex,
    shards: Sequence[npt.NDArray[Any]],
    doc: I64,
    start: I64,
    end: I64,
    *,
    step_targets: int,
    epoch: int,
    step: int,
    overlap: int = 0,
) -> PackedBatch:
    """Gather segments, given as documents and half-open input ranges (int64[S] each), into one batch; S may be 0.

    shards are the index's shards in order, as read_shard maps them. The first `overlap` targets of a segment that does
    not begin its document are IGNORED: the segment before it trains them.
    """
    lengths = end - start
    cu_seqlens = _running_sums(lengths)
    first = index.offsets[doc] + start
    owners = index.shards[doc].tolist()
    views = {shard: shards[shard].data for shard in set(owners)}
    spans = list(zip(owners, first.tolist(), (first + lengths).tolist(), strict=True))
    tokens = joined([views[shard][first:last] for shard, first, last in spans], index.token_dtype)
    inputs = tokens.astype(np.int64)
    targets = np.empty_like(inputs)
    targets[:-1] = tokens[1:]
    targets[cu_seqlens[1:] - 1] = [views[shard][last] for shard, _, last in spans]  # the look-ahead
    num_repeated = 0
    if overlap:  # most plans have none, and small arrays cost as much as the tokens
        num_repeated = int(repeated_inputs(start, overlap).sum())
        for at in cu_seqlens[:-1][start > 0].tolist():
            targets[at : at + overlap] = IGNORED
    max_seqlen = int(lengths.max(initial=0))
    ramp = np.arange(max_seqlen, dtype=np.int64).data
    return PackedBatch(
        inputs=inputs,
        targets=targets,
        position_ids=joined([ramp[:length] for length in lengths.tolist()], "int64"),
        cu_seqlens=cu_seqlens,
        max_seqlen=max_seqlen,
        num_targets=len(inputs) - num_repeated,
        segment_doc=np.asarray(doc, dtype=np.int64),
        step_targets=step_targets,
        epoch=epoch,
        step=step,
    )


def joined(parts: Sequence[memoryview], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Contiguous parts one after another, as a writable array: slicing and joining memoryviews costs a third of doing
    so with arrays.
    """
    return np.frombuffer(bytearray().join(parts), dtype=dtype)


def in_constant_shape(batch: PackedBatch, shape: ConstantShape) -> PackedBatch:
    """The batch with its slack made explicit: shape.num_tokens tokens, shape.num_segments + 1 cu_seqlens.

    The slack follows the batch as a segment of its own (more than one where it is longer than max_seqlen): inputs 0,
    targets IGNORED, document -1. What is left of cu_seqlens repeats its end. num_targets still counts real targets
    only. RecipeError for a batch that does not fit.
    """
    slack = shape.num_tokens - len(batch.inputs)
    slack_lengths = [min(shape.max_seqlen, slack - first) for first in range(0, slack, shape.max_seqlen)]
    num_segments = len(batch.segment_doc) + len(slack_lengths)
    if slack < 0 or num_segments > shape.num_segments or batch.max_seqlen > shape.max_seqlen:
        raise RecipeError(
            f"step {batch.step:,}: expected at most {shape.num_tokens:,} tokens in {shape.num_segments:,} segments of"
            f" {shape.max_seqlen:,} with the slack, found {len(batch.inputs):,} in {num_segments:,} of"
            f" {batch.max_seqlen:,}. Take the shape from the plan of the batch."
        )
    lengths = [*np.diff(batch.cu_seqlens).tolist(), *slack_lengths, *[0] * (shape.num_segments - num_segments)]
    return replace(
        batch,
        inputs=_filled(batch.inputs, shape.num_tokens, 0),
        targets=_filled(batch.targets, shape.num_tokens, IGNORED),
        position_ids=np.concatenate([batch.position_ids, *(np.arange(length) for length in slack_lengths)]),
        cu_seqlens=_running_sums(np.array(lengths, dtype=np.int64)),
        max_seqlen=shape.max_seqlen,
        segment_doc=_filled(batch.segment_doc, shape.num_segments, -1),
    )


def end_to_end(inputs: I64, targets: I64, lengths: I64, step_targets: int) -> PackedBatch:
    """Segments of the given lengths, end to end and of no document, as a batch of step 0."""
    return PackedBatch(
        inputs=inputs,
        targets=targets,
        position_ids=np.concatenate([np.arange(length) for length in [0, *lengths.tolist()]]),
        cu_seqlens=_running_sums(lengths),
        max_seqlen=int(lengths.max(initial=0)),
        num_targets=int(np.count_nonzero(targets != IGNORED)),
        segment_doc=np.full(len(lengths), -1, dtype=np.int64),
        step_targets=step_targets,
        epoch=0,
        step=0,
    )


def in_padded_rows(batch: PackedBatch, row_len: int) -> PackedBatch:
    """Each segment on the left of a row of its own, which is then the segment: what padding does, to compare with.

    Padding has input 0 and an IGNORED target. No segment may be longer than row_len.
    """
    num_rows = len(batch.segment_doc)
    inputs = np.zeros((num_rows, row_len), dtype=np.int64)
    targets = np.full((num_rows, row_len), IGNORED, dtype=np.int64)
    is_real = np.arange(row_len) < np.diff(batch.cu_seqlens)[:, None]
    inputs[is_real], targets[is_real] = batch.inputs, batch.targets
    return replace(
        batch,
        inputs=inputs.reshape(-1),
        targets=targets.reshape(-1),
        position_ids=np.tile(np.arange(row_len, dtype=np.int64), num_rows),
        cu_seqlens=_running_sums(np.full(num_rows, row_len)),
        max_seqlen=row_len,
    )


def check_cu_seqlens(cu_seqlens: npt.NDArray[np.int32], num_tokens: int, max_seqlen: int) -> None:
    """Raise InvariantBroken unless cu_seqlens starts at 0, rises strictly and ends at num_tokens; max_seqlen is its
    longest.

    A zero-length segment or a token beyond the last offset turns into NaN gradients on the device.
    """
    lengths = np.diff(cu_seqlens)
    longest = int(lengths.max(initial=0))
    if cu_seqlens.dtype != np.int32 or cu_seqlens.ndim != 1 or len(cu_seqlens) < 1:
        raise InvariantBroken(f"cu_seqlens: expected int32[S + 1], found {cu_seqlens.dtype}{list(cu_seqlens.shape)}")
    if cu_seqlens[0] != 0 or cu_seqlens[-1] != num_tokens:
        raise InvariantBroken(
            f"cu_seqlens: expected 0 … {num_tokens:,}, found {int(cu_seqlens[0]):,} … {int(cu_seqlens[-1]):,}"
        )
    if bool((lengths < 1).any()):
        raise InvariantBroken(
            f"cu_seqlens: expected strictly rising sums, found {int(lengths.min()):,} tokens in segment"
            f" {int(lengths.argmin()):,}"
        )
    if type(max_seqlen) is not int or max_seqlen != longest:
        raise InvariantBroken(f"max_seqlen: expected the Python int {longest:,}, found {max_seqlen!r}")


def check_batch(batch: PackedBatch) -> None:
    """Raise InvariantBroken for ill-formed cu_seqlens, arrays of unequal length, positions that do not restart, or
    another number of targets than are not IGNORED.
    """
    num_tokens = len(batch.inputs)
    for name, values in (("inputs", batch.inputs), ("targets", batch.targets), ("position_ids", batch.position_ids)):
        if values.dtype != np.int64 or values.shape != (num_tokens,):
            raise InvariantBroken(f"{name}: expected int64[{num_tokens:,}], found {values.dtype}{list(values.shape)}")
    if (num_targets := int(np.count_nonzero(batch.targets != IGNORED))) != batch.num_targets:
        raise InvariantBroken(f"num_targets: expected {num_targets:,}, found {batch.num_targets:,}")
    check_cu_seqlens(batch.cu_seqlens, num_tokens, batch.max_seqlen)
    if batch.segment_doc.shape != (len(batch.cu_seqlens) - 1,):
        raise InvariantBroken(
            f"segment_doc: expected one document for each of {len(batch.cu_seqlens) - 1:,} segments,"
            f" found {len(batch.segment_doc):,}"
        )
    starts = np.repeat(batch.cu_seqlens[:-1], np.diff(batch.cu_seqlens))
    wrong = np.flatnonzero(batch.position_ids != np.arange(num_tokens) - starts)
    if len(wrong):
        raise InvariantBroken(
            f"position_ids: expected a restart at each segment, found another at token {int(wrong[0]):,}"
        )


def _running_sums(lengths: I64) -> npt.NDArray[np.int32]:
    sums = offsets_of(lengths)
    assert sums[-1] < 2**31, f"a batch of {int(sums[-1]):,} tokens does not fit int32 cu_seqlens"
    return sums.astype(np.int32)


def _filled(values: I64, num: int, value: int) -> I64:
    return np.concatenate([values, np.full(num - len(values), value, dtype=np.int64)])
