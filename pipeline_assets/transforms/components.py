"""Connected components: pairs of nodes in, one label a node out, the smallest member of its component.

Union-find with path halving; the larger root is always hung under the smaller, so a root is the smallest member when
all pairs are in, whatever their order: the fixpoint, with no rounds to stop early. Pairs may come in parts, of which
one is held at a time. Cost: 8 bytes a node, near-linear.
"""

from collections.abc import Iterable

import numpy as np

from pipeline_assets.transforms.arrays import I64


def connected_components(num_nodes: int, pairs: I64) -> I64:
    """Label every node with the smallest node that it is connected to: int64[m, 2] -> int64[num_nodes].

    >>> connected_components(5, np.array([[3, 1], [4, 3]])).tolist()
    [0, 1, 2, 1, 1]
    """
    return components_of_parts(num_nodes, [pairs])


def components_of_parts(num_nodes: int, parts: Iterable[I64]) -> I64:
    """The same for pairs that come in parts, each int64[m, 2], in any order: what one bucket or file has at a time.

    >>> components_of_parts(5, iter([np.array([[4, 3]]), np.array([[3, 1]])])).tolist()
    [0, 1, 2, 1, 1]
    """
    from pipeline_assets.transforms import lsh_kernels  # numba takes a second to import: not with the code location

    parents = np.arange(num_nodes, dtype=np.int64)
    for pairs in parts:
        assert pairs.ndim == 2, pairs.shape
        assert pairs.shape[1] == 2, pairs.shape
        assert not len(pairs) or (pairs.min() >= 0 and pairs.max() < num_nodes), (pairs.min(), pairs.max(), num_nodes)
        lsh_kernels.link(parents, np.ascontiguousarray(pairs, dtype=np.int64))
    lsh_kernels.flatten(parents)
    return parents
