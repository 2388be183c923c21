"""Segments: the ranges of a document's inputs that are trained on their own.

In: document lengths in tokens, EOS included. Out: half-open ranges of inputs; the target of input i is token i + 1,
so a segment looks one token past its end and a document of N tokens has N - 1 inputs. The promise: every input of
every document is in exactly one segment (the overlap, where asked for, is stated). Cost: linear in the segments.
"""

import numpy as np
import numpy.typing as npt

from training_io.errors import RecipeError

I64 = npt.NDArray[np.int64]


def cut_document(num_tokens: int, max_seq_len: int) -> I64:
    """Input ranges of one document of num_tokens tokens (EOS included): int64[s, 2], each at most max_seq_len long.

    >>> cut_document(6, 4).tolist()
    [[0, 4], [4, 5]]
    """
    _refuse_bad_limit(max_seq_len)
    starts = np.arange(0, max(num_tokens - 1, 0), max_seq_len, dtype=np.int64)
    return np.stack([starts, np.minimum(starts + max_seq_len, num_tokens - 1)], axis=1)


def first_segments(lengths: npt.NDArray[np.integer], max_seq_len: int) -> I64:
    """Number of the first segment of each document as running sums: int64[n + 1], from lengths in tokens.

    >>> first_segments(np.array([6, 1, 3]), 4).tolist()
    [0, 2, 2, 3]
    """
    _refuse_bad_limit(max_seq_len)
    firsts = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum((np.maximum(lengths, 1) - 2 + max_seq_len) // max_seq_len, out=firsts[1:])
    return firsts


def locate_segments(
    numbers: npt.NDArray[np.integer], firsts: I64, lengths: npt.NDArray[np.integer], max_seq_len: int
) -> tuple[I64, I64, I64]:
    """Document, start and end of the given rows of the segment table, which need not be built: three int64[k].

    Cost: one binary search among the documents for each segment.
    """
    wanted = np.asarray(numbers, dtype=np.int64)
    doc = np.searchsorted(firsts, wanted, side="right") - 1
    start = (wanted - firsts[doc]) * max_seq_len
    return doc, start, np.minimum(start + max_seq_len, lengths[doc] - 1)


def segment_table(lengths: npt.NDArray[np.integer], max_seq_len: int) -> tuple[I64, I64, I64]:
    """Document, start and end of every segment of every document, in order: three int64[s], from lengths in tokens."""
    firsts = first_segments(lengths, max_seq_len)
    counts = np.diff(firsts)
    doc = np.repeat(np.arange(len(lengths), dtype=np.int64), counts)
    start = (np.arange(firsts[-1], dtype=np.int64) - np.repeat(firsts[:-1], counts)) * max_seq_len
    return doc, start, np.minimum(start + max_seq_len, np.asarray(lengths, dtype=np.int64)[doc] - 1)


def cut_with_overlap(num_inputs: int, max_seq_len: int, overlap: int) -> I64:
    """Windows over num_inputs inputs that repeat the last `overlap` of the window before: int64[s, 3].

    Columns are start, end and how many inputs at the start repeat. num_inputs is the text without its EOS, which is
    only ever a target: a document of N tokens has N - 1. Sum of the lengths = num_inputs + overlap * (s - 1).

    >>> cut_with_overlap(6_000, 4_000, 500).tolist()
    [[0, 4000, 0], [3500, 6000, 500]]
    """
    _refuse_bad_limit(max_seq_len)
    if not 0 <= overlap < max_seq_len:
        raise RecipeError(
            f"overlap: expected 0 <= overlap < max_seq_len ({max_seq_len:,}), found {overlap:,}. Lower the overlap."
        )
    stride = max_seq_len - overlap
    starts = np.arange(0, max(num_inputs - overlap, min(num_inputs, 1)), stride, dtype=np.int64)
    repeated = np.where(starts > 0, overlap, 0)
    return np.stack([starts, np.minimum(starts + max_seq_len, num_inputs), repeated], axis=1)


def _refuse_bad_limit(max_seq_len: int) -> None:
    if max_seq_len < 1:
        raise RecipeError(f"max_seq_len: expected at least 1 input, found {max_seq_len:,}. Raise it.")
