"""Utilisation: what each way of laying documents into rows would waste, cut and cost.

In: document lengths in tokens, EOS included. Out: one frozen row of plain numbers a layout. The promise: layouts are
counted on the same documents and the same rule for EOS. Cost: a few passes over the lengths and one packing a strategy.

The rule for EOS: where documents are kept apart (padded, truncated, packed) only inputs take up room, N - 1 of a
document of N tokens, since its EOS is only ever a target. In the concatenated stream all N tokens do, since the EOS
is an input there as well.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from training_io.packing import pack
from training_io.segments import segment_table

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One way of laying documents into rows of row_len cells.

    causal_pairs is the attention work (query-key pairs) of rows under a plain causal mask, whose cost a document mask
    does not lower unless the kernel skips blocks; isolated_pairs is what documents need and what a varlen kernel
    computes.
    """

    name: str
    row_len: int
    num_rows: int
    num_real: int  # cells that hold a token
    num_dropped: int  # tokens that the layout leaves out
    causal_pairs: int
    isolated_pairs: int

    @property
    def num_cells(self) -> int:
        """Cells of all rows."""
        return self.num_rows * self.row_len

    @property
    def utilisation(self) -> float:
        """Share of cells that hold a token: 0 to 1, and 1 where there are no cells."""
        return self.num_real / self.num_cells if self.num_cells else 1.0

    @property
    def num_excess_rows(self) -> int:
        """Rows beyond ceil(tokens / row_len), which no layout can do without."""
        return self.num_rows - -(-self.num_real // self.row_len)


@dataclass(frozen=True, kw_only=True)
class ConcatenatedLayout(Layout):
    """The stream of all documents cut every row_len tokens, the tail dropped."""

    num_rows_with_boundary: int  # rows with tokens of two documents or more
    documents_per_row: float  # mean number of documents with a token in a row
    num_after_unrelated: int  # tokens in a row after the end of an earlier document
    num_documents_split: int  # documents with tokens on both sides of a cut


def padded(lengths: I64, row_len: int) -> Layout:
    """Rows of one document each, a longer one cut into rows, the last of each filled up."""
    _, start, end = segment_table(lengths, row_len)
    return _kept_apart("padded", end - start, len(start), row_len, 0)


def truncated(lengths: I64, row_len: int) -> Layout:
    """One row a document, what is beyond it dropped: utilisation E[min(l, L)] / L."""
    inputs = _inputs(lengths)
    inputs = inputs[inputs > 0]
    kept = np.minimum(inputs, row_len)
    return _kept_apart("truncated", kept, len(kept), row_len, int((inputs - kept).sum()))


def packed(lengths: I64, max_seq_len: int, capacity: int, strategy: str, buffer: int) -> Layout:
    """Whole segments of at most max_seq_len inputs in packs of a capacity, by a packing strategy."""
    _, start, end = segment_table(lengths, max_seq_len)
    _, pack_offsets = pack(end - start, capacity, strategy, buffer)
    return _kept_apart(strategy, end - start, len(pack_offsets) - 1, capacity, 0)


def concatenated(lengths: I64, row_len: int) -> ConcatenatedLayout:
    """Documents end to end, cut every row_len tokens; the tail that fills no row is dropped."""
    ends = np.cumsum(lengths, dtype=np.int64)
    num_tokens = int(ends[-1]) if len(ends) else 0
    num_rows = num_tokens // row_len
    row_starts = np.arange(num_rows, dtype=np.int64) * row_len
    first = np.searchsorted(ends, row_starts, side="right")
    last = np.searchsorted(ends, row_starts + row_len - 1, side="right")
    after = np.maximum(row_starts + row_len - ends[first], 0)
    starts = ends - lengths
    return ConcatenatedLayout(
        name="concatenated",
        row_len=row_len,
        num_rows=num_rows,
        num_real=num_rows * row_len,
        num_dropped=num_tokens - num_rows * row_len,
        causal_pairs=num_rows * _pairs(row_len),
        isolated_pairs=_isolated_in_rows(starts, ends, num_rows, row_len),
        num_rows_with_boundary=int((last > first).sum()),
        documents_per_row=float((last - first + 1).mean()) if num_rows else 0.0,
        num_after_unrelated=int(after.sum()),
        num_documents_split=int((starts // row_len != (ends - 1) // row_len).sum()),
    )


def compare_layouts(
    lengths: I64, *, max_seq_len: int, capacity: int, strategies: Sequence[str], buffer: int
) -> tuple[Layout, ...]:
    """Padded, truncated and concatenated at max_seq_len, then each strategy at capacity, on the same documents."""
    return (
        padded(lengths, max_seq_len),
        truncated(lengths, max_seq_len),
        concatenated(lengths, max_seq_len),
        *(packed(lengths, max_seq_len, capacity, strategy, buffer) for strategy in strategies),
    )


def _inputs(lengths: I64) -> I64:
    return np.asarray(lengths, dtype=np.int64) - 1


def _pairs(length: int) -> int:
    """Query-key pairs of one causal context: L (L + 1) / 2."""
    return length * (length + 1) // 2


def _kept_apart(name: str, segments: I64, num_rows: int, row_len: int, num_dropped: int) -> Layout:
    return Layout(
        name=name,
        row_len=row_len,
        num_rows=num_rows,
        num_real=int(segments.sum()),
        num_dropped=num_dropped,
        causal_pairs=num_rows * _pairs(row_len),
        isolated_pairs=int((segments * (segments + 1) // 2).sum()),
    )


def _isolated_in_rows(starts: I64, ends: I64, num_rows: int, row_len: int) -> int:
    """Pairs within one document and one row: documents cut at row ends, each part squared."""
    edges = np.union1d(np.concatenate([starts, ends]), np.arange(num_rows + 1, dtype=np.int64) * row_len)
    parts = np.diff(edges[edges <= num_rows * row_len])
    return int((parts * (parts + 1) // 2).sum())
