"""Locality-sensitive hashing: signatures in, one key a band, and from equal keys the pairs that may be near-duplicates.

A signature's values are cut into bands of a few rows; two documents are candidates where all rows of any band agree.
Each band becomes one 64-bit key with the band's number mixed in, so keys of all bands can lie in one sorted file, cut
into buckets by their top bits. Of each group of equal keys only a star is emitted, its smallest node with each other
one: linear, and connected just as all pairs would be. Results do not depend on row order or bucket count.

In bounded memory: `components_of_parts(num_nodes, (star_edges(keys, nodes) for keys, nodes in buckets))` holds one
bucket's keys at a time and 8 bytes a document. Cost: two passes over a bucket's keys and 8 bytes a key beside them.
"""

import numpy as np
import numpy.typing as npt

from pipeline_assets.transforms.arrays import I64, U32, U64, is_run_start
from pipeline_assets.transforms.minhash import MinHashParams

PART_KEYS = 4096  # in a part, so that its table of twice as many slots stays in the second-level cache
MAX_PART_BITS = 11  # writing to more parts in turn misses the translation buffer at every key

HALF, LOW_HALF = np.uint64(32), np.uint64(0xFFFFFFFF)
NO_KEY = np.uint64(0)  # the keys of a document without words; it equals nothing, not even itself


def band_keys(signatures: U32, params: MinHashParams) -> U64:
    """One key for each band of each document: uint32[n, num_perm] -> uint64[n, num_bands], a band's keys contiguous.

    From h = fmix64(band number + 1), each value v of the band is folded in: h = fmix64(h ^ v). A row of a document
    without words gets NO_KEY in every band.

    >>> band_keys(np.full((1, 112), 2**32 - 1, np.uint32), MinHashParams()).any()
    np.False_
    """
    from pipeline_assets.transforms import lsh_kernels  # numba takes a second to import: not with the code location

    assert signatures.dtype == np.uint32, signatures.dtype
    assert signatures.shape[1] == params.num_perm, (signatures.shape, params.num_perm)
    keys_by_band = np.empty((params.num_bands, len(signatures)), dtype=np.uint64)
    lsh_kernels.band_keys(np.ascontiguousarray(signatures), params.rows_per_band, keys_by_band)
    return keys_by_band.T


def star_edges(keys: U64, nodes: U32 | I64) -> I64:
    """Within each group of equal keys, the smallest node with each other one: uint64[k], k nodes -> int64[m, 2].

    i < j in each row; rows are unique and sorted. Keys may come from several bands and in any order.

    >>> star_edges(np.array([7, 9, 7, 7], np.uint64), np.array([5, 1, 3, 8])).tolist()
    [[3, 5], [3, 8]]
    """
    assert len(keys) == len(nodes), (len(keys), len(nodes))
    first, other = _equal_positions(keys)
    if not len(first):
        return np.empty((0, 2), dtype=np.int64)
    starts = np.flatnonzero(is_run_start(first))
    first_node, other_node = nodes[first].astype(np.int64), nodes[other].astype(np.int64)
    smallest = np.repeat(np.minimum.reduceat(other_node, starts), np.diff(starts, append=len(first)))
    smallest = np.minimum(smallest, first_node)
    other_node = np.where(other_node == smallest, first_node, other_node)
    is_edge = other_node != smallest  # a node that has a key twice is no edge
    return unique_pairs(np.column_stack([smallest, other_node])[is_edge])


def _equal_positions(keys: U64) -> tuple[I64, I64]:
    """For every key that occurred before, its first position and this one, by first position; NO_KEY occurs never.

    Keys are not sorted, since most are alone: they are dealt into parts, each of which goes through a hash table.
    """
    from pipeline_assets.transforms import lsh_kernels  # numba takes a second to import: not with the code location

    assert keys.dtype == np.uint64, keys.dtype
    assert len(keys) < 1 << 32, f"{len(keys):,} keys: use more buckets"
    part_bits = min(MAX_PART_BITS, (len(keys) // PART_KEYS).bit_length())
    pairs = np.empty(len(keys), dtype=np.uint64)
    num = lsh_kernels.pair_equal(np.ascontiguousarray(keys), part_bits, len(keys).bit_length(), pairs)
    return _unpacked(np.sort(pairs[:num]))


def candidate_pairs(band_keys: U64) -> I64:
    """Star edges over all bands, a document's node being its row: uint64[n, num_bands] -> int64[m, 2].

    i < j in each row; rows are unique and sorted. Documents without words are in none.

    >>> candidate_pairs(np.array([[5, 6], [7, 6], [7, 8]], np.uint64)).tolist()
    [[0, 1], [1, 2]]
    """
    nodes = np.arange(len(band_keys), dtype=np.int64)
    stars = [star_edges(band, nodes) for band in band_keys.T]
    return unique_pairs(np.concatenate([np.empty((0, 2), dtype=np.int64), *stars]))


def unique_pairs(pairs: I64) -> I64:
    """Distinct rows in ascending order: int64[m, 2] of nodes below 2^32 -> int64[k, 2]."""
    if not len(pairs):
        return pairs
    assert pairs.min() >= 0, pairs.min()
    assert pairs.max() < 1 << 32, pairs.max()
    packed = np.sort(pairs[:, 0].astype(np.uint64) << HALF | pairs[:, 1].astype(np.uint64))
    packed = packed[is_run_start(packed)]  # np.unique hashes: 60 times slower
    return np.column_stack(_unpacked(packed))


def _unpacked(packed: U64) -> tuple[I64, I64]:
    return (packed >> HALF).astype(np.int64), (packed & LOW_HALF).astype(np.int64)


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


def steepest_similarity(num_bands: int, rows_per_band: int) -> float:
    """The threshold of the S-curve, where it is steepest: (1/b)^(1/r).

    Leskovec, Rajaraman and Ullman, Mining of Massive Datasets, 3.4.2.

    >>> round(steepest_similarity(num_bands=14, rows_per_band=8), 3)
    0.719
    """
    return float((1 / num_bands) ** (1 / rows_per_band))
