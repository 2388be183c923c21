"""Excerpts: what experiments run on, a few segments of real batches as a step of their own.

In: packed batches on the host. Out: such batches, of parts of their segments. The promise: a target stays with its
input, except where ids are drawn, and the loss denominator is that of the step that a batch is of. Cost: copies of what
is taken.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from training_io.batch import IGNORED, PackedBatch, end_to_end

EXCERPT_TOKENS = 1_024
EXCERPT_SEGMENTS = 8  # padded to the longest they are below three times the excerpt


def excerpt(batch: PackedBatch, max_tokens: int = EXCERPT_TOKENS) -> PackedBatch:
    """The ends of a batch's first segments as a step of its own: at most max_tokens, none over a third of them.

    The ends, since the first targets of a segment may be IGNORED. Of one or two segments it takes several parts, so
    that three tokens are enough for three segments. Where segments are cut they are cut unevenly: of equal ones, rows
    would need no padding.
    """
    taken: list[tuple[int, int]] = []
    num_left = max_tokens
    for start, end in segments_of(batch)[:EXCERPT_SEGMENTS]:
        length = min(end - start, max(max_tokens // 3 - len(taken), 1), num_left)
        if length:
            taken.append((end - length, end))
            num_left -= length
    if len(taken) < 3:
        longest = max((max_tokens - num_left) // 3, 1)
        taken = [(first, min(first + longest, end)) for start, end in taken for first in range(start, end, longest)]
    return _part(batch, taken)


def together(batches: Sequence[PackedBatch]) -> PackedBatch:
    """The segments of several batches as one step of one batch."""
    targets = np.concatenate([batch.targets for batch in batches])
    lengths = np.concatenate([np.diff(batch.cu_seqlens).astype(np.int64) for batch in batches])
    inputs = np.concatenate([batch.inputs for batch in batches])
    return end_to_end(inputs, targets, lengths, int((targets != IGNORED).sum()))


def segments_of(batch: PackedBatch) -> list[tuple[int, int]]:
    """Start and end of each segment."""
    return list(pairwise(batch.cu_seqlens.tolist()))


def segment_alone(batch: PackedBatch, start: int, end: int) -> PackedBatch:
    """One segment as a batch of the same step."""
    return end_to_end(batch.inputs[start:end], batch.targets[start:end], np.array([end - start]), batch.step_targets)


def uneven_parts(batch: PackedBatch) -> list[PackedBatch]:
    """The batch in two microbatches of one step with unlike numbers of targets; none where it has no such parts."""
    segments = segments_of(batch)
    for cut in range(1, len(segments)):
        parts = [_part(batch, segments[:cut]), _part(batch, segments[cut:])]
        few, many = sorted(part.num_targets for part in parts)
        if 0 < few < many:
            return [replace(part, step_targets=batch.step_targets) for part in parts]
    return []


def with_drawn_tokens(batch: PackedBatch, vocab_size: int) -> PackedBatch:
    """Random ids in the same segments, all of them trained: in a text that repeats itself all means are one mean."""
    ids = np.random.default_rng(0).integers(vocab_size, size=(2, len(batch.inputs)))
    return end_to_end(ids[0], ids[1], np.diff(batch.cu_seqlens).astype(np.int64), len(batch.inputs))


def _part(batch: PackedBatch, ranges: Sequence[tuple[int, int]]) -> PackedBatch:
    """Parts of segments, each now a segment, as a step of its own."""
    chosen = np.concatenate([np.arange(start, end) for start, end in ranges] or [np.arange(0)])
    lengths = np.array([end - start for start, end in ranges], dtype=np.int64)
    targets = batch.targets[chosen]
    return end_to_end(batch.inputs[chosen], targets, lengths, int((targets != IGNORED).sum()))
