"""Utilisation: what each way of laying documents into rows would waste, cut and cost.

In: document lengths in tokens, EOS included. Out: one frozen row of plain numbers a layout. The promise: layouts are
counted on the same documents and the same rule for EOS, unless a row states fewer documents. Cost: a few passes over
the lengths and one packing a strategy.

The rule for EOS: where documents are kept apart (padded, truncated, packed) only inputs take up room, N - 1 of a
document of N tokens, since its EOS is only ever a target. In the concatenated stream all N tokens do, since the EOS
is an input there as well.
"""

from dataclasses import dataclass, replace
from typing import Any

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
    num_documents: int  # documents with something to lay out
    num_segments: int  # runs of one document in one row, each a context of its own where documents are kept apart
    num_documents_cut: int  # documents that are not whole in one row
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


@dataclass(frozen=True, kw_only=True)
class PackedLayout(Layout):
    """Segments in packs; displacement is in packs, see displacements()."""

    mean_displacement: float
    max_displacement: int


def padded(lengths: I64, row_len: int) -> Layout:
    """Rows of one document each, a longer one cut into rows, the last of each filled up."""
    doc, start, end = segment_table(lengths, row_len)
    return _kept_apart("padded", doc, end - start, len(start), row_len)


def truncated(lengths: I64, row_len: int) -> Layout:
    """One row a document, what is beyond it dropped: utilisation E[min(l, L)] / L."""
    inputs = _inputs(lengths)
    inputs = inputs[inputs > 0]
    kept = np.minimum(inputs, row_len)
    whole = _kept_apart("truncated", np.arange(len(kept)), kept, len(kept), row_len)
    return replace(whole, num_documents_cut=int((inputs > row_len).sum()), num_dropped=int((inputs - kept).sum()))


def packed(lengths: I64, max_seq_len: int, capacity: int, strategy: str, buffer: int) -> PackedLayout:
    """Whole segments of at most max_seq_len inputs in packs of a capacity, by a packing strategy."""
    doc, start, end = segment_table(lengths, max_seq_len)
    order, pack_offsets = pack(end - start, capacity, strategy, buffer)
    return layout_of_packs(strategy, doc, end - start, capacity, order, pack_offsets)


def layout_of_packs(
    name: str, doc: I64, sizes: I64, capacity: int, order: npt.NDArray[np.integer[Any]], pack_offsets: I64
) -> PackedLayout:
    """The layout of packs that are there already: document and size of each segment as it arrived, then the packs as
    pack() gives them.
    """
    moved = displacements(sizes, order, pack_offsets)
    return PackedLayout(
        **vars(_kept_apart(name, doc, sizes, len(pack_offsets) - 1, capacity)),
        mean_displacement=float(moved.mean()) if len(moved) else 0.0,
        max_displacement=int(moved.max(initial=0)),
    )


def displacements(sizes: I64, order: npt.NDArray[np.integer[Any]], pack_offsets: I64) -> I64:
    """How far each segment is from its place in arrival order, in packs: int64[s], in arrival order.

    Its place is where it would begin if the packs shared all tokens evenly and nothing were moved: the share of the
    tokens that arrived before it, times the number of packs.

    >>> displacements(np.array([6, 4, 3, 2]), np.array([0, 3, 1, 2]), np.array([0, 2, 4])).tolist()
    [0, 1, 0, 1]
    """
    num_packs = len(pack_offsets) - 1
    pack_of = np.empty(len(sizes), dtype=np.int64)
    pack_of[order] = np.repeat(np.arange(num_packs, dtype=np.int64), np.diff(pack_offsets))
    ends = np.cumsum(sizes, dtype=np.int64)
    place = (ends - sizes) * num_packs // max(int(sizes.sum()), 1)
    return np.abs(pack_of - place)


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
    parts = _parts_in_rows(starts, ends, num_rows, row_len)
    return ConcatenatedLayout(
        name="concatenated",
        row_len=row_len,
        num_documents=int((starts < ends).sum()),
        num_segments=len(parts),
        num_documents_cut=int((starts // row_len != (ends - 1) // row_len).sum()),
        num_rows=num_rows,
        num_real=num_rows * row_len,
        num_dropped=num_tokens - num_rows * row_len,
        causal_pairs=num_rows * _pairs(row_len),
        isolated_pairs=int((parts * (parts + 1) // 2).sum()),
        num_rows_with_boundary=int((last > first).sum()),
        documents_per_row=float((last - first + 1).mean()) if num_rows else 0.0,
        num_after_unrelated=int(after.sum()),
    )


def padding_hours(num_tokens: int, tokens_per_second: float, utilisation: float) -> float:
    """Hours by which a run over num_tokens tokens gets longer when empty cells are processed as well.

    num_tokens / tokens_per_second x (1 / utilisation - 1), where the rate is of real tokens and padded rows have the
    given utilisation.

    >>> round(padding_hours(3_600_000, 1_000, utilisation=0.5), 1)
    1.0
    """
    return num_tokens / tokens_per_second / 3_600 * (1 / utilisation - 1)


def _inputs(lengths: I64) -> I64:
    return np.asarray(lengths, dtype=np.int64) - 1


def _pairs(length: int) -> int:
    """Query-key pairs of one causal context: L (L + 1) / 2."""
    return length * (length + 1) // 2


def _kept_apart(name: str, doc: I64, segments: I64, num_rows: int, row_len: int) -> Layout:
    """The layout whose contexts are these segments, given with the documents that they are of, in order."""
    segments_a_document = np.diff(np.flatnonzero(np.diff(doc, prepend=-1)), append=len(doc))
    return Layout(
        name=name,
        row_len=row_len,
        num_documents=len(segments_a_document),
        num_segments=len(segments),
        num_documents_cut=int((segments_a_document > 1).sum()),
        num_rows=num_rows,
        num_real=int(segments.sum()),
        num_dropped=0,
        causal_pairs=num_rows * _pairs(row_len),
        isolated_pairs=int((segments * (segments + 1) // 2).sum()),
    )


def _parts_in_rows(starts: I64, ends: I64, num_rows: int, row_len: int) -> I64:
    """Lengths of what lies within one document and one row: documents cut at row ends."""
    edges = np.union1d(np.concatenate([starts, ends]), np.arange(num_rows + 1, dtype=np.int64) * row_len)
    return np.diff(edges[edges <= num_rows * row_len])
