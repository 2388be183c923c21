"""Candidate edges verified: equal band keys in, edges between documents that really are alike out.

Sharing a bucket is a hint. Where the recipe asks for it, the exact similarity of candidates decides, and components are
made of verified edges only, so that no chain of near misses joins unrelated texts. Groups of up to `MAX_COMPARED`
documents are compared in full. In a larger one the smallest is compared with each other one, then the smallest of
those that were not like it with the rest, and so on for at most `MAX_ROUNDS` rounds: linear, not quadratic. What is
left then is counted. Cost: a sort of the keys, and one similarity a candidate pair.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from pipeline_assets.transforms.arrays import F64, I64, U64
from pipeline_assets.transforms.lsh import NO_KEY, unique_pairs

Similarity = Callable[[I64], F64]  # unique sorted pairs int64[m, 2] -> float64[m]

MAX_COMPARED = 16
MAX_ROUNDS = 64


@dataclass(frozen=True, kw_only=True)
class VerifyStats:
    """Candidate pairs compared, those that were alike, and documents of large groups that stayed without a partner."""

    num_compared: int
    num_verified: int
    num_left: int


def verified_edges(keys: U64, nodes: I64, similarity: Similarity, threshold: float) -> tuple[I64, VerifyStats]:
    """Edges between nodes that share a key and are at least `threshold` alike: uint64[k], int64[k] -> int64[m, 2].

    i < j in each row; rows are unique and sorted.

    >>> keys, nodes = np.array([7, 7, 7], np.uint64), np.array([2, 0, 1])
    >>> verified_edges(keys, nodes, lambda pairs: (pairs.sum(axis=1) == 2) * 1.0, 0.5)[0].tolist()
    [[0, 2]]
    """
    compared = _Compared(similarity, threshold)
    small, large = _groups(keys, nodes)
    found = [compared.alike(unique_pairs(np.concatenate([np.empty((0, 2), np.int64), *_all_pairs(*small)])))]
    num_left = 0
    for _ in range(MAX_ROUNDS):
        group, members = large
        if not len(members):
            break
        is_centre = np.append(True, group[1:] != group[:-1])
        centres = members[is_centre][np.cumsum(is_centre) - 1]
        pairs = np.column_stack([centres, members])[~is_centre]
        alike = compared.alike(unique_pairs(pairs))
        found.append(alike)
        is_left = ~is_centre
        is_left[is_left] = ~_contains(alike, pairs)
        large = _with_partners(group[is_left], members[is_left])
    else:
        num_left = len(large[1])
    edges = unique_pairs(np.concatenate(found))
    return edges, VerifyStats(num_compared=compared.num_compared, num_verified=len(edges), num_left=num_left)


@dataclass
class _Compared:
    similarity: Similarity
    threshold: float
    num_compared: int = 0

    def alike(self, pairs: I64) -> I64:
        self.num_compared += len(pairs)
        return pairs[self.similarity(pairs) >= self.threshold] if len(pairs) else pairs


def _groups(keys: U64, nodes: I64) -> tuple[tuple[I64, I64], tuple[I64, I64]]:
    """Group numbers and nodes in order, of small groups and of large ones; those alone with their key are left out."""
    order = np.lexsort((nodes, keys))
    order = order[keys[order] != NO_KEY]
    keys, nodes = keys[order], nodes[order]
    group = np.cumsum(np.append(True, keys[1:] != keys[:-1])[: len(keys)]) - 1
    size = np.bincount(group)[group] if len(group) else group
    is_small, is_large = (size > 1) & (size <= MAX_COMPARED), size > MAX_COMPARED
    return (group[is_small], nodes[is_small]), (group[is_large], nodes[is_large])


def _with_partners(group: I64, members: I64) -> tuple[I64, I64]:
    is_shared = np.bincount(group)[group] > 1 if len(group) else np.empty(0, np.bool_)
    return group[is_shared], members[is_shared]


def _all_pairs(group: I64, members: I64) -> Iterator[I64]:
    size = np.bincount(group)[group] if len(group) else group
    for number in np.unique(size).tolist():
        rows = members[size == number].reshape(-1, number)
        first, second = np.triu_indices(number, 1)
        yield np.column_stack([rows[:, first].ravel(), rows[:, second].ravel()])


def _contains(pairs: I64, wanted: I64) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Which of the wanted rows are among unique sorted pairs."""
    packed = [rows[:, 0].astype(np.uint64) << np.uint64(32) | rows[:, 1].astype(np.uint64) for rows in (pairs, wanted)]
    return np.isin(packed[1], packed[0])
