"""What deduplication removed, counted and shown: decisions as arrays in, tables of counts and chosen examples out.

Promise: examples are chosen by content, whatever the order of documents. Cost: a few passes over what was removed.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pipeline_assets.transforms.arrays import F64, I64, U64, is_run_start, positions

SIMILARITY_EDGES = (0.0, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)


def pair_table(removed: I64, kept: I64, num_bytes: I64, names: Sequence[str]) -> list[tuple[str, str, int, int]]:
    """Documents and bytes removed, by the names of both sides, most documents first: int64[m] each.

    >>> pair_table(np.array([0, 1, 0]), np.array([1, 1, 1]), np.array([5, 6, 7]), ["web", "wiki"])
    [('web', 'wiki', 2, 12), ('wiki', 'wiki', 1, 6)]
    """
    codes, inverse, counts = np.unique(removed * len(names) + kept, return_inverse=True, return_counts=True)
    sums = np.zeros(len(codes), np.int64)
    np.add.at(sums, inverse, num_bytes)
    rows = [
        (names[code // len(names)], names[code % len(names)], count, size)
        for code, count, size in zip(codes.tolist(), counts.tolist(), sums.tolist(), strict=True)
    ]
    return sorted(rows, key=lambda row: (-row[2], row[:2]))


def cross_table(counted: Sequence[tuple[str, str, int]], most: int) -> tuple[list[str], I64]:
    """Counts by (removed, kept) as a square of at most so many names: names in order, int64[k, k].

    Where there are more names, those of fewest documents on either side share the last place, called "others".

    >>> names, table = cross_table([("b", "a", 5), ("c", "a", 1), ("d", "d", 2)], most=3)
    >>> names, table.tolist()
    (['a', 'b', 'others'], [[0, 0, 0], [5, 0, 0], [1, 0, 2]])
    """
    totals: dict[str, int] = {}
    for removed, kept, documents in counted:
        for name in (removed, kept):
            totals[name] = totals.get(name, 0) + documents
    largest = sorted(totals, key=lambda name: (-totals[name], name))
    listed = sorted(largest if len(largest) <= most else largest[: most - 1])
    place = {name: number for number, name in enumerate(listed)}
    names = listed if len(largest) <= most else [*listed, "others"]
    table = np.zeros((len(names), len(names)), np.int64)
    for removed, kept, documents in counted:
        table[place.get(removed, len(listed)), place.get(kept, len(listed))] += documents
    return names, table


def clusters_by_spread(clusters: I64, groups: I64) -> tuple[int, int]:
    """How many clusters of two documents or more lie within one group, and over several: labels int64[n], int64[n].

    >>> clusters_by_spread(np.array([0, 0, 2, 2, 4]), np.array([7, 7, 7, 8, 9]))
    (1, 1)
    """
    members = np.unique(np.column_stack([clusters, groups]), axis=0)[:, 0]
    shared, documents = np.unique(clusters, return_counts=True)
    _, spread = np.unique(members, return_counts=True)
    is_duplicate = documents > 1
    assert len(shared) == len(spread)
    return int((is_duplicate & (spread == 1)).sum()), int((is_duplicate & (spread > 1)).sum())


def example_pairs(similarities: F64, keys: U64, per_range: int) -> I64:
    """Some pairs of each range of similarity, those with the smallest keys, most alike first: numbers int64[k].

    A key is that of the removed text: of several pairs with one, the first is looked at. The ranges are half-open
    between SIMILARITY_EDGES; a similarity of 1 is a range of its own.
    """
    range_of = np.searchsorted(SIMILARITY_EDGES, similarities, side="right")
    distinct = np.unique(keys, return_index=True)[1]
    order = distinct[np.lexsort((keys[distinct], -range_of[distinct]))]
    ranges = range_of[order]
    starts = np.flatnonzero(is_run_start(ranges))
    _, place = positions(np.diff(starts, append=len(order)))
    chosen = order[place < per_range]
    return chosen[np.lexsort((keys[chosen], -similarities[chosen]))]


def largest_clusters(clusters: I64, sizes: I64, keys: U64, num_clusters: int) -> I64:
    """The clusters of most documents, at least two, by size and then by the label's key: int64[k] of labels."""
    roots = np.flatnonzero((clusters == np.arange(len(clusters))) & (sizes > 1))
    order = np.lexsort((keys[roots], -sizes[roots]))
    return roots[order[:num_clusters]]


def members_by_cluster(clusters: I64, wanted: I64, keys: U64, max_members: int) -> list[I64]:
    """For each wanted cluster, those members with the smallest keys: int64 arrays of document numbers, ascending."""
    order = np.argsort(clusters, kind="stable")
    ordered = clusters[order]
    found = []
    for start, end in zip(np.searchsorted(ordered, wanted), np.searchsorted(ordered, wanted, "right"), strict=True):
        members = order[start:end]
        found.append(np.sort(members[np.argsort(keys[members], kind="stable")[:max_members]]))
    return found


def all_pairs(members: I64) -> I64:
    """Every two of some documents: int64[k] -> int64[k * (k - 1) / 2, 2]."""
    first, second = np.triu_indices(len(members), 1)
    return np.column_stack([members[first], members[second]])


def keys_within(keys: U64, groups: npt.NDArray[np.integer], no_key: np.uint64) -> U64:
    """Keys that are equal where the key and the group are: uint64[k], integers[k] -> uint64[k]; `no_key` stays.

    >>> keys_within(np.array([9, 9, 9, 0], np.uint64), np.array([1, 0, 1, 1]), np.uint64(0)).tolist()
    [4, 3, 4, 0]
    """
    if not len(keys):
        return keys
    _, rank = np.unique(keys, return_inverse=True)
    composite = (rank * (int(groups.max()) + 1) + groups + 1).astype(np.uint64)
    composite[keys == no_key] = no_key
    return composite
