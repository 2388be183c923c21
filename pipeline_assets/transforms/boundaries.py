"""Boundaries: cutting a long document where its sections end.

In: the token positions at which sections end, and a limit. Out: half-open ranges. The promise: every token once, a
section that fits is never cut, and none is merged with another. Cost: linear in sections and ranges.
"""

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]


def cut_at_boundaries(boundaries: npt.ArrayLike, num_tokens: int, max_len: int) -> I64:
    """Ranges int64[s, 2] over num_tokens tokens: one a section, a section longer than max_len cut every max_len.

    boundaries are ascending section ends in tokens; 0, num_tokens and repetitions may be among them or not.

    >>> cut_at_boundaries([3_000, 6_500], 12_000, 4_000).tolist()
    [[0, 3000], [3000, 6500], [6500, 10500], [10500, 12000]]
    """
    ends = np.asarray(boundaries, dtype=np.int64)
    assert max_len >= 1, max_len
    assert (np.diff(ends) >= 0).all(), "boundaries must ascend"
    assert ((ends >= 0) & (ends <= num_tokens)).all(), (num_tokens, ends)
    edges = np.unique(np.concatenate([[0], ends, [num_tokens]]))
    counts = (np.diff(edges) + max_len - 1) // max_len
    sections = np.repeat(np.arange(len(counts)), counts)
    within = np.arange(len(sections)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = edges[sections] + within * max_len
    return np.stack([starts, np.minimum(starts + max_len, edges[sections + 1])], axis=1)
