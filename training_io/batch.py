"""A batch: one flat vector of whole segments and the sums that separate them.

In: segment ranges and memory-mapped shards. Out: int64 inputs and targets, positions that restart at each segment, and
int32 cu_seqlens. The promise: no padding, no token beyond a segment's look-ahead, boundaries checked on the CPU before
any device sees them. Cost: two copies of the tokens, one NumPy slice a segment.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from training_io.document_index import DocumentIndex
from training_io.errors import InvariantBroken

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedBatch:
    """Segments laid end to end: segment k is [cu_seqlens[k], cu_seqlens[k + 1]) of the flat arrays of T tokens.

    max_seqlen is the longest segment here; num_targets is T; segment_doc holds each segment's document number in the
    index. step_targets is the loss denominator: all targets of the global step, over its microbatches and ranks.
    """

    inputs: I64  # [T]
    targets: I64  # [T]
    position_ids: I64  # [T]
    cu_seqlens: npt.NDArray[np.int32]  # [S + 1]
    max_seqlen: int
    num_targets: int
    segment_doc: I64  # [S]
    step_targets: int
    epoch: int
    step: int


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
) -> PackedBatch:
    """Gather segments, given as documents and half-open input ranges (int64[S] each), into one batch; S may be 0.

    shards are the index's shards in order, as read_shard maps them.
    """
    lengths = end - start
    cu_seqlens = _running_sums(lengths)
    num_targets = int(cu_seqlens[-1])
    begins = (index.offsets[doc] + start).tolist()
    owners = index.shards[doc].tolist()
    spans = list(zip(owners, begins, lengths.tolist(), strict=True))
    ramp = np.arange(int(lengths.max(initial=0)), dtype=np.int64)
    plain = [shard.view(np.ndarray) for shard in shards]  # slicing a memmap subclass costs three times as much
    inputs = _joined([plain[k][first : first + num] for k, first, num in spans], num_targets)
    targets = np.empty_like(inputs)
    targets[:-1] = inputs[1:]
    targets[cu_seqlens[1:] - 1] = [plain[k].item(first + num) for k, first, num in spans]  # the look-ahead
    return PackedBatch(
        inputs=inputs,
        targets=targets,
        position_ids=_joined([ramp[:num] for _, _, num in spans], num_targets),
        cu_seqlens=cu_seqlens,
        max_seqlen=len(ramp),
        num_targets=num_targets,
        segment_doc=np.asarray(doc, dtype=np.int64),
        step_targets=step_targets,
        epoch=epoch,
        step=step,
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
    """Raise InvariantBroken for ill-formed cu_seqlens, arrays of unequal length, or positions that do not restart."""
    for name, values in (("inputs", batch.inputs), ("targets", batch.targets), ("position_ids", batch.position_ids)):
        if values.dtype != np.int64 or values.shape != (batch.num_targets,):
            raise InvariantBroken(
                f"{name}: expected int64[{batch.num_targets:,}], found {values.dtype}{list(values.shape)}"
            )
    check_cu_seqlens(batch.cu_seqlens, batch.num_targets, batch.max_seqlen)
    if batch.segment_doc.shape != (len(batch.cu_seqlens) - 1,):
        raise InvariantBroken(
            f"segment_doc: expected one document for each of {len(batch.cu_seqlens) - 1:,} segments,"
            f" found {len(batch.segment_doc):,}"
        )
    starts = np.repeat(batch.cu_seqlens[:-1], np.diff(batch.cu_seqlens))
    wrong = np.flatnonzero(batch.position_ids != np.arange(batch.num_targets) - starts)
    if len(wrong):
        raise InvariantBroken(
            f"position_ids: expected a restart at each segment, found another at token {int(wrong[0]):,}"
        )


def _running_sums(lengths: I64) -> npt.NDArray[np.int32]:
    sums = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    assert sums[-1] < 2**31, f"a batch of {int(sums[-1]):,} tokens does not fit int32 cu_seqlens"
    return sums.astype(np.int32)


def _joined(parts: Sequence[npt.NDArray[Any]], num_tokens: int) -> I64:
    joined = np.empty(num_tokens, dtype=np.int64)
    if parts:
        np.concatenate(parts, out=joined)
    return joined
