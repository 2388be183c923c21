"""Sorted runs of documents -> one run: token arrays of several units in, blocks of one array out.

Each unit holds its documents in the final order, so every unit is read from front to back. Cost: one copy of the
tokens, and one block of them in memory; a unit is looked up once a block and let go of.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline_assets.transforms.arrays import I64
from training_io.errors import InvariantBroken

Tokens = npt.NDArray[np.unsignedinteger]

BLOCK_TOKENS = 4 << 20  # 8 or 16 MB


def merged_blocks(
    runs: Sequence[Tokens],
    run_of: I64,
    start: I64,
    length: I64,
    dtype: npt.DTypeLike,
    block_tokens: int = BLOCK_TOKENS,
) -> Iterator[Tokens]:
    """Documents one after another, cut into blocks of so many tokens, the last one of the rest.

    Document i is `length[i]` tokens of `runs[run_of[i]]` from `start[i]` on. InvariantBroken where a run is of another
    dtype or ends before one of its documents.

    >>> run = np.arange(5, dtype=np.uint16)
    >>> blocks = merged_blocks([run], np.array([0, 0]), np.array([3, 0]), np.array([2, 1]), np.uint16, block_tokens=2)
    >>> [block.tolist() for block in blocks]
    [[3, 4], [0]]
    """
    ends = np.cumsum(length, dtype=np.int64)
    num_tokens = int(ends[-1]) if len(ends) else 0
    for first in range(0, num_tokens, block_tokens):
        last = min(first + block_tokens, num_tokens)
        here = slice(np.searchsorted(ends, first, side="right"), np.searchsorted(ends, last) + 1)
        begins = ends[here] - length[here]
        # A border of the block may cut a document: what lies beyond is another block's.
        starts, stops = np.maximum(begins, first), np.minimum(ends[here], last)
        block = np.empty(last - first, dtype)
        _fill(block, runs, run_of[here], start[here] + starts - begins, stops - starts)
        yield block


def merge_documents(runs: Sequence[Tokens], run_of: I64, start: I64, length: I64, dtype: npt.DTypeLike) -> Tokens:
    """The same as one array."""
    num_tokens = int(np.sum(length, dtype=np.int64))
    blocks = merged_blocks(runs, run_of, start, length, dtype, block_tokens=max(num_tokens, 1))
    return next(blocks, np.empty(0, dtype))


def gather_rows(parts: Sequence[npt.NDArray[Any]], part_of: I64, row_of: I64) -> npt.NDArray[Any]:
    """Rows of several arrays in any order: row i is `parts[part_of[i]][row_of[i]]`; each part is looked up once."""
    places_by_part, template = _places_by_run(part_of), parts[0]
    found = np.empty((len(part_of), *template.shape[1:]), template.dtype)
    for number, places in places_by_part:
        found[places] = parts[number][row_of[places]]
    return found


def _places_by_run(run_of: I64) -> list[tuple[int, I64]]:
    """The runs that occur, ascending, each with the places where it does."""
    by_run = np.argsort(run_of, kind="stable")
    firsts = np.flatnonzero(np.diff(run_of[by_run], prepend=-1))
    places = np.split(by_run, firsts)[1:]
    return list(zip(run_of[by_run[firsts]].tolist(), places, strict=True))


def _fill(block: Tokens, runs: Sequence[Tokens], run_of: I64, start: I64, length: I64) -> None:
    """Copy documents to their places in a block, a run at a time, each from front to back."""
    from pipeline_assets.transforms import kernels  # numba takes a second to import: not with the code location

    place = np.cumsum(length) - length
    for number, rows in _places_by_run(run_of):
        run = np.asarray(runs[number])
        reached = int((start[rows] + length[rows]).max())
        if run.dtype != block.dtype or reached > len(run) or int(start[rows].min()) < 0:
            raise InvariantBroken(
                f"token run {number:,}: expected {block.dtype} tokens up to {reached:,}, found {len(run):,} of"
                f" {run.dtype}. The plan of the shards is not of these tokens; materialize document_tokens again."
            )
        kernels.copy_ranges(run, start[rows], length[rows], block, place[rows])
