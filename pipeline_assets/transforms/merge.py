"""Sorted runs of documents -> one run: token arrays of several units in, one array out.

Each unit holds its documents in the final order, so every unit is read from front to back. Cost: one copy of the
tokens, and one Python step a document.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]
Tokens = npt.NDArray[np.unsignedinteger]


def merge_documents(runs: Sequence[Tokens], run_of: I64, start: I64, length: I64) -> Tokens:
    """Documents one after another: document i is `length[i]` tokens of `runs[run_of[i]]` from `start[i]` on.

    >>> merge_documents([np.arange(5, dtype=np.uint16)], np.array([0, 0]), np.array([3, 0]), np.array([2, 1])).tolist()
    [3, 4, 0]
    """
    ends = np.cumsum(length)
    merged = np.empty(int(ends[-1]) if len(ends) else 0, dtype=runs[0].dtype)
    for run, first, count, end in zip(run_of.tolist(), start.tolist(), length.tolist(), ends.tolist(), strict=True):
        merged[end - count : end] = runs[run][first : first + count]
    return merged
