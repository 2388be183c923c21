"""The kept document of each cluster: labels, pool priorities and keys in, one node number a node out.

Kept is the first by (pool priority, key, node number). The key is a keyed hash of the doc_id, so the choice is random
but depends on content alone; nodes are numbered by (doc_id, source coordinate), so the last tie is settled too.
Cost: one sort.
"""

import numpy as np
import numpy.typing as npt

from pipeline_assets.transforms.arrays import I64, U64


def choose_kept(labels: I64, pool_priorities: npt.NDArray[np.integer], keys: U64) -> I64:
    """For every node, the kept node of its cluster: int64[n], integers[n] (lowest first), uint64[n] -> int64[n].

    >>> choose_kept(np.array([0, 1, 0, 0]), np.array([1, 0, 0, 0]), np.array([3, 5, 9, 4], np.uint64)).tolist()
    [3, 1, 3, 3]
    """
    assert len(labels) == len(pool_priorities) == len(keys), (len(labels), len(pool_priorities), len(keys))
    order = np.lexsort((keys, pool_priorities, labels))
    sorted_labels = labels[order]
    is_first = np.concatenate([[True], sorted_labels[1:] != sorted_labels[:-1]])[: len(labels)]
    kept = np.empty(len(labels), dtype=np.int64)
    kept[order] = order[is_first][np.cumsum(is_first) - 1]
    return kept
