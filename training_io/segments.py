"""Segments: the ranges of a document's inputs that are trained on their own.

In: document lengths in tokens, EOS included. Out: half-open ranges of inputs; the target of input i is token i + 1,
so a segment looks one token past its end and a document of N tokens has N - 1 inputs. The promise: every input of
every document is trained in exactly one segment; where an overlap is asked for, the first inputs of every segment but
a document's first repeat those before it, untrained. Cost: linear in the segments.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from training_io.errors import RecipeError

I64 = npt.NDArray[np.int64]

LONG_DOCUMENTS = ("cut", "refuse", "divert")
READ_AHEAD = 8192


def cut_document(num_tokens: int, max_seq_len: int) -> I64:
    """Input ranges of one document of num_tokens tokens (EOS included): int64[s, 2], each at most max_seq_len long.

    >>> cut_document(6, 4).tolist()
    [[0, 4], [4, 5]]
    """
    _refuse_bad_limit(max_seq_len)
    starts = np.arange(0, max(num_tokens - 1, 0), max_seq_len, dtype=np.int64)
    return np.stack([starts, np.minimum(starts + max_seq_len, num_tokens - 1)], axis=1)


def offsets_of(lengths: npt.NDArray[np.integer]) -> I64:
    """Where each thing starts, and where the last one ends: running sums, int64[n + 1].

    >>> offsets_of(np.array([4, 9])).tolist()
    [0, 4, 13]
    """
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def first_segments(lengths: npt.NDArray[np.integer], max_seq_len: int, overlap: int = 0) -> I64:
    """Number of the first segment of each document as running sums: int64[n + 1], from lengths in tokens.

    A document has a segment for each stride of max_seq_len - overlap inputs that begins before its last `overlap`
    inputs, at least one if it has inputs.

    >>> first_segments(np.array([6, 1, 3]), 4).tolist()
    [0, 2, 2, 3]
    """
    _refuse_bad_limit(max_seq_len)
    _refuse_bad_overlap(max_seq_len, overlap)
    stride = max_seq_len - overlap
    strided = np.maximum(np.asarray(lengths, dtype=np.int64) - (1 + overlap), lengths > 1)
    return offsets_of((strided + (stride - 1)) // stride)


def locate_segments(
    numbers: npt.NDArray[np.integer],
    firsts: I64,
    lengths: npt.NDArray[np.integer],
    max_seq_len: int,
    overlap: int = 0,
) -> tuple[I64, I64, I64]:
    """Document, start and end of the given rows of the segment table, which need not be built: three int64[k].

    Cost: one binary search among the documents for each segment.
    """
    wanted = np.asarray(numbers, dtype=np.int64)
    doc = np.searchsorted(firsts, wanted, side="right") - 1
    start = (wanted - firsts[doc]) * (max_seq_len - overlap)
    return doc, start, np.minimum(start + max_seq_len, lengths[doc] - 1)


def repeated_inputs(start: I64, overlap: int) -> I64:
    """How many inputs at the start of each segment repeat those before it, untrained: int64[k], from where it starts.

    >>> repeated_inputs(np.array([0, 3_500]), 500).tolist()
    [0, 500]
    """
    return np.where(start > 0, np.int64(overlap), np.int64(0))


def segment_table(lengths: npt.NDArray[np.integer], max_seq_len: int, overlap: int = 0) -> tuple[I64, I64, I64]:
    """Document, start and end of every segment of every document, in order: three int64[s], from lengths in tokens."""
    firsts = first_segments(lengths, max_seq_len, overlap)
    counts = np.diff(firsts)
    doc = np.repeat(np.arange(len(lengths), dtype=np.int64), counts)
    start = (np.arange(firsts[-1], dtype=np.int64) - np.repeat(firsts[:-1], counts)) * (max_seq_len - overlap)
    return doc, start, np.minimum(start + max_seq_len, np.asarray(lengths, dtype=np.int64)[doc] - 1)


class Segments:
    """The rows of the segment table by number, for documents of the given lengths in tokens; the table is not built.

    Cost: 8 bytes a document; one binary search among the documents for each segment asked for.
    """

    def __init__(self, lengths: npt.NDArray[np.integer], max_seq_len: int, overlap: int = 0) -> None:
        self._lengths = lengths
        self._max_seq_len = max_seq_len
        self._overlap = overlap
        self._firsts = first_segments(lengths, max_seq_len, overlap)

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def numbers_of(self, documents: I64) -> I64:
        """Numbers of the segments of the given documents, one document after another."""
        firsts, counts = self._firsts[documents], np.diff(self._firsts)[documents]
        within = np.arange(int(counts.sum()), dtype=np.int64) - np.repeat(offsets_of(counts)[:-1], counts)
        return np.repeat(firsts, counts) + within

    def locate(self, numbers: npt.NDArray[np.integer]) -> tuple[I64, I64, I64]:
        """Document, start and end of each: three int64[k]."""
        return locate_segments(numbers, self._firsts, self._lengths, self._max_seq_len, self._overlap)

    def length_of(self, number: int) -> int:
        """Inputs of one segment."""
        _, start, end = self.locate(np.array([number]))
        return int(end[0] - start[0])

    def lengths_from(self, number: int) -> Iterator[int]:
        """Inputs of each segment from this number on, looked up a few thousand at a time."""
        for first in range(number, len(self), READ_AHEAD):
            _, start, end = self.locate(np.arange(first, min(first + READ_AHEAD, len(self))))
            yield from (end - start).tolist()


def keep_whole(lengths: npt.NDArray[np.integer], max_seq_len: int, long_documents: str) -> npt.NDArray[np.integer]:
    """Lengths of the documents to plan, in tokens, when documents of more than max_seq_len inputs are `long_documents`.

    cut: as they are, to be cut into segments. divert: a longer document counts as empty and has no segment; whoever
    plans lists it. refuse: RecipeError for the first longer one. The latter two never cut a document.

    >>> keep_whole(np.array([3, 9, 5]), 4, "divert").tolist()
    [3, 1, 5]
    """
    if long_documents not in LONG_DOCUMENTS:
        raise RecipeError(
            f"long_documents: expected one of {', '.join(LONG_DOCUMENTS)}, found {long_documents!r}."
            " Choose what becomes of documents that are longer than max_seq_len."
        )
    is_long = lengths - 1 > max_seq_len
    if long_documents == "cut" or not bool(is_long.any()):
        return lengths
    if long_documents == "refuse":
        document = int(is_long.argmax())
        raise RecipeError(
            f"document {document:,}: expected at most {max_seq_len:,} inputs (max_seq_len), since long documents are"
            f" refused, found {int(lengths[document]) - 1:,}; {int(is_long.sum()):,} documents are longer, the longest"
            f" {int(lengths.max()) - 1:,}. Raise max_seq_len, divert them, or let them be cut."
        )
    return np.where(is_long, 1, lengths)


def cut_with_overlap(num_inputs: int, max_seq_len: int, overlap: int) -> I64:
    """Windows over num_inputs inputs that repeat the last `overlap` of the window before: int64[s, 3].

    Columns are start, end and how many inputs at the start repeat. num_inputs is the text without its EOS, which is
    only ever a target: a document of N tokens has N - 1. Sum of the lengths = num_inputs + overlap * (s - 1).

    >>> cut_with_overlap(6_000, 4_000, 500).tolist()
    [[0, 4000, 0], [3500, 6000, 500]]
    """
    _refuse_bad_limit(max_seq_len)
    _refuse_bad_overlap(max_seq_len, overlap)
    stride = max_seq_len - overlap
    starts = np.arange(0, max(num_inputs - overlap, min(num_inputs, 1)), stride, dtype=np.int64)
    repeated = np.where(starts > 0, overlap, 0)
    return np.stack([starts, np.minimum(starts + max_seq_len, num_inputs), repeated], axis=1)


def _refuse_bad_limit(max_seq_len: int) -> None:
    if max_seq_len < 1:
        raise RecipeError(f"max_seq_len: expected at least 1 input, found {max_seq_len:,}. Raise it.")


def _refuse_bad_overlap(max_seq_len: int, overlap: int) -> None:
    if not 0 <= overlap < max_seq_len:
        raise RecipeError(
            f"overlap: expected 0 <= overlap < max_seq_len ({max_seq_len:,}), found {overlap:,}. Lower the overlap."
        )
