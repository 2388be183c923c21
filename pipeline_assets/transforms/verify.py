"""Candidate edges verified: equal band keys in, edges between documents that really are alike out.

Sharing a bucket is a hint. Where the recipe asks for it, the exact similarity of candidates decides, and components are
made of verified edges only, so that no chain of near misses joins unrelated texts. Groups of up to `MAX_COMPARED`
documents are compared in full. A larger one is explored: one document is compared with all that are not yet reached;
those that are alike are reached, and are compared with the rest in their turn. That finds the group's components; a
group of copies takes one round. After `MAX_ROUNDS` rounds the rest is left as it is, and counted: linear, not
quadratic. Documents are taken in the order of their numbers. Cost: a sort of the keys, one similarity a compared pair.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipeline_assets.transforms.arrays import F64, I64, U64, is_run_start
from pipeline_assets.transforms.lsh import NO_KEY, unique_pairs

Similarity = Callable[[I64], F64]  # unique sorted pairs int64[m, 2] -> float64[m]

MAX_COMPARED = 16
MAX_ROUNDS = 64

REACHED, UNREACHED, EXPLORED = range(3)  # whose turn comes first


@dataclass(frozen=True, kw_only=True)
class VerifyStats:
    """Candidate pairs compared, those that were alike, and documents that no round was left to reach."""

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
    group, members = large
    state = np.full(len(members), UNREACHED)
    for _ in range(MAX_ROUNDS):
        group, members, state = _with_unreached(group, members, state)
        if not len(members):
            break
        centre = _centres(group, state)
        state[centre] = EXPLORED
        is_candidate = state == UNREACHED
        pairs = np.sort(np.column_stack([members[centre][group], members])[is_candidate], axis=1)
        alike = compared.alike(unique_pairs(pairs))
        found.append(alike)
        state[is_candidate] = np.where(_contains(alike, pairs), REACHED, UNREACHED)
    edges = unique_pairs(np.concatenate(found))
    num_left = int((state == UNREACHED).sum())
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
    group = np.cumsum(is_run_start(keys)) - 1
    size = np.bincount(group)[group] if len(group) else group
    is_small, is_large = (size > 1) & (size <= MAX_COMPARED), size > MAX_COMPARED
    return (group[is_small], nodes[is_small]), (group[is_large], nodes[is_large])


def _with_unreached(group: I64, members: I64, state: npt.NDArray[np.int64]) -> tuple[I64, I64, npt.NDArray[np.int64]]:
    """Groups in which something is not reached and something is left to compare it with, numbered anew from 0."""
    if not len(group):
        return group, members, state
    num_groups = int(group.max()) + 1
    unreached = np.bincount(group[state == UNREACHED], minlength=num_groups)
    unexplored = np.bincount(group[state != EXPLORED], minlength=num_groups)
    is_open = ((unreached > 0) & (unexplored > 1))[group]
    return np.unique(group[is_open], return_inverse=True)[1], members[is_open], state[is_open]


def _centres(group: I64, state: npt.NDArray[np.int64]) -> I64:
    """In each group, the first reached document that is not explored, else the first one that is not reached."""
    order = np.lexsort((state, group))  # stable: members of a group ascend
    return order[np.flatnonzero(np.append(True, np.diff(group[order]) > 0))]


def _all_pairs(group: I64, members: I64) -> Iterator[I64]:
    size = np.bincount(group)[group] if len(group) else group
    for number in np.unique(size).tolist():
        rows = members[size == number].reshape(-1, number)
        first, second = np.triu_indices(number, 1)
        yield np.column_stack([rows[:, first].ravel(), rows[:, second].ravel()])


def _contains(pairs: I64, wanted: I64) -> npt.NDArray[np.bool_]:
    """Which of the wanted rows are among unique sorted pairs."""
    packed = [rows[:, 0].astype(np.uint64) << np.uint64(32) | rows[:, 1].astype(np.uint64) for rows in (pairs, wanted)]
    return np.isin(packed[1], packed[0])
