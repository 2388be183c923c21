"""The kept document of each cluster: labels and preferences in, one node number a node out.

Which document of a cluster is used is a rule of the recipe. Each rule ends with a keyed hash of the doc_id, so that the
choice among equals is random but depends on content alone; nodes are numbered by (doc_id, source coordinate), so the
last tie is settled too. Cost: one sort.
"""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from pipeline_assets.transforms.arrays import F64, I64, U64, is_run_start

KeepRule = Literal["pool_priority", "random", "longest", "highest_score"]
Preferences = tuple[npt.NDArray[Any], ...]


def preferences(rule: KeepRule, *, pools: I64, text_bytes: I64, scores: F64, keys: U64) -> Preferences:
    """What a rule looks at, most important first, lowest value first; a document without a score (NaN) comes last.

    >>> [column.tolist() for column in preferences("longest", pools=np.array([0]), text_bytes=np.array([9]),
    ...     scores=np.array([0.5]), keys=np.array([3], np.uint64))]
    [[-9], [3]]
    """
    rules: dict[KeepRule, Preferences] = {
        "pool_priority": (pools, keys),
        "random": (keys,),
        "longest": (-text_bytes, keys),
        "highest_score": (-scores, keys),
    }
    return rules[rule]


def choose_kept(labels: I64, preferred: Sequence[npt.NDArray[Any]]) -> I64:
    """For every node, the kept node of its cluster: labels int64[n], preferences of n values each -> int64[n].

    Kept is the first by the preferences in their order, then by node number.

    >>> pools, keys = np.array([1, 0, 0, 0]), np.array([3, 5, 9, 4], np.uint64)
    >>> choose_kept(np.array([0, 1, 0, 0]), (pools, keys)).tolist()
    [3, 1, 3, 3]
    """
    assert all(len(column) == len(labels) for column in preferred), (len(labels), [len(one) for one in preferred])
    order = np.lexsort((*reversed(preferred), labels))
    is_first = is_run_start(labels[order])
    kept = np.empty(len(labels), dtype=np.int64)
    kept[order] = order[is_first][np.cumsum(is_first) - 1]
    return kept
