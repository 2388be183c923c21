"""Locality-sensitive hashing: signatures in, one key a band, and from equal keys the pairs that may be near-duplicates.

A signature's values are cut into bands of a few rows; two documents are candidates where all rows of any band agree.
Each band becomes one 64-bit key with the band's number mixed in, so keys of all bands can lie in one sorted file, cut
into buckets by their top bits. Of each group of equal keys only a star is emitted, its smallest node with each other
one: linear, and connected just as all pairs would be. Results do not depend on row order or bucket count.
Cost: 8 bytes a key and an argsort.
"""

import numpy as np
import numpy.typing as npt

from pipeline_assets.transforms.arrays import I64, U32, U64
from pipeline_assets.transforms.minhash import MinHashParams

NO_KEY = np.uint64(0)  # the keys of a document without words; it equals nothing, not even itself


def band_keys(signatures: U32, params: MinHashParams) -> U64:
    """One key for each band of each document: uint32[n, num_perm] -> uint64[n, num_bands].

    From h = fmix64(band number + 1), each value v of the band is folded in: h = fmix64(h ^ v). A row of a document
    without words gets NO_KEY in every band.

    >>> band_keys(np.full((1, 112), 2**32 - 1, np.uint32), MinHashParams()).any()
    np.False_
    """
    from pipeline_assets.transforms import kernels  # numba takes a second to import: not with the code location

    assert signatures.dtype == np.uint32, signatures.dtype
    assert signatures.shape[1] == params.num_perm, (signatures.shape, params.num_perm)
    keys = np.empty((len(signatures), params.num_bands), dtype=np.uint64)
    kernels.band_keys(np.ascontiguousarray(signatures), params.rows_per_band, keys)
    return keys


def star_edges(keys: U64, nodes: I64) -> I64:
    """Within each group of equal keys, the smallest node with each other one: uint64[k], int64[k] -> int64[m, 2].

    i < j in each row; rows are unique and sorted. Keys may come from several bands and in any order.

    >>> star_edges(np.array([7, 9, 7, 7], np.uint64), np.array([5, 1, 3, 8])).tolist()
    [[3, 5], [3, 8]]
    """
    assert len(keys) == len(nodes), (len(keys), len(nodes))
    order = np.argsort(keys)
    order = order[_is_repeated(keys[order])]
    order = order[keys[order] != NO_KEY]
    if not len(order):
        return np.empty((0, 2), dtype=np.int64)
    keys, nodes = keys[order], nodes[order]
    starts = np.flatnonzero(np.append(True, keys[1:] != keys[:-1]))
    smallest = np.repeat(np.minimum.reduceat(nodes, starts), np.diff(starts, append=len(keys)))
    other = nodes != smallest
    return unique_pairs(np.column_stack([smallest[other], nodes[other]]))


def _is_repeated(ascending: U64) -> npt.NDArray[np.bool_]:
    """Which of ascending keys equal a neighbour: most documents are alone in most buckets."""
    is_repeated = np.zeros(len(ascending), dtype=np.bool_)
    is_repeated[1:] = ascending[1:] == ascending[:-1]
    is_repeated[:-1] |= is_repeated[1:]
    return is_repeated


def candidate_pairs(band_keys: U64) -> I64:
    """Star edges over all bands, a document's node being its row: uint64[n, num_bands] -> int64[m, 2].

    i < j in each row; rows are unique and sorted. Documents without words are in none.

    >>> candidate_pairs(np.array([[5, 6], [7, 6], [7, 8]], np.uint64)).tolist()
    [[0, 1], [1, 2]]
    """
    nodes = np.arange(len(band_keys), dtype=np.int64)
    stars = [star_edges(band, nodes) for band in np.ascontiguousarray(band_keys.T)]
    return unique_pairs(np.concatenate([np.empty((0, 2), dtype=np.int64), *stars]))


def unique_pairs(pairs: I64) -> I64:
    """Distinct rows in ascending order: int64[m, 2] of nodes below 2^32 -> int64[k, 2]."""
    if not len(pairs):
        return pairs
    assert pairs.min() >= 0, pairs.min()
    assert pairs.max() < 1 << 32, pairs.max()
    packed = np.unique(pairs[:, 0].astype(np.uint64) << np.uint64(32) | pairs[:, 1].astype(np.uint64))
    return np.column_stack([packed >> np.uint64(32), packed & np.uint64(0xFFFFFFFF)]).astype(np.int64)


def bucket_bounds(sorted_keys: U64, num_buckets: int) -> I64:
    """Where each bucket of ascending keys begins: int64[num_buckets + 1]; a key's bucket is its top bits.

    >>> bucket_bounds(np.array([1, 2, 1 << 63], np.uint64), 2).tolist()
    [0, 2, 3]
    """
    assert num_buckets >= 1, num_buckets
    assert num_buckets & (num_buckets - 1) == 0, f"{num_buckets:,} buckets: expected a power of two"
    firsts = np.array([(bucket << 64) // num_buckets for bucket in range(num_buckets)], dtype=np.uint64)
    return np.append(np.searchsorted(sorted_keys, firsts), len(sorted_keys)).astype(np.int64)


def shared_bands(signatures_a: U32, signatures_b: U32, params: MinHashParams) -> I64:
    """In how many bands each pair agrees in all rows: two uint32[m, num_perm] -> int64[m]."""
    assert signatures_a.shape == signatures_b.shape, (signatures_a.shape, signatures_b.shape)
    equal = (signatures_a == signatures_b).reshape(-1, params.num_bands, params.rows_per_band)
    num_shared: I64 = equal.all(axis=2).sum(axis=1, dtype=np.int64)
    return num_shared


def collision_probability(
    similarity: npt.NDArray[np.float64] | float, num_bands: int, rows_per_band: int
) -> npt.NDArray[np.float64] | float:
    """Chance that two documents of Jaccard similarity s share a band: 1 - (1 - s^r)^b.

    Leskovec, Rajaraman and Ullman, Mining of Massive Datasets, 3.4.2.

    >>> round(collision_probability(0.8, num_bands=14, rows_per_band=8), 3)
    0.924
    """
    return 1 - (1 - similarity**rows_per_band) ** num_bands
