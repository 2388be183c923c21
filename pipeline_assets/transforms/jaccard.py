"""Exact Jaccard similarity: texts and pairs of them in, |A ∩ B| / |A ∪ B| of their shingle sets out.

This is what signatures estimate. It is the evidence beside every removal and the ruler of the measured S-curve.
Cost: one hashing pass, a sort a text, a merge a pair.
"""

from itertools import pairwise

import numpy as np
import pyarrow as pa

from pipeline_assets.transforms.arrays import F64, I64, U32, is_run_start, utf8_blocks
from pipeline_assets.transforms.shingles import hash_documents

BLOCK_BYTES = 1 << 24


def shingle_sets(texts: pa.Array | pa.ChunkedArray, ngram: int = 5) -> tuple[U32, I64]:
    """Each text's distinct shingle hashes, ascending: (hashes uint32[total], their offsets int64[n + 1])."""
    sets, lengths = [np.empty(0, dtype=np.uint32)], [np.zeros(1, dtype=np.int64)]
    for data, offsets in utf8_blocks(texts, BLOCK_BYTES):
        hashes, hash_offsets, _ = hash_documents(data, offsets, ngram)
        for start, end in pairwise(hash_offsets.tolist()):
            hashes[start:end].sort()
        is_first = is_run_start(hashes)  # of equal hashes of a text
        is_first[hash_offsets[:-1][np.diff(hash_offsets) > 0]] = True
        sets.append(hashes[is_first])
        lengths.append(np.diff(np.concatenate([[0], np.cumsum(is_first)])[hash_offsets]))
    return np.concatenate(sets), np.cumsum(np.concatenate(lengths))


def jaccard_of_sets(hashes: U32, offsets: I64, pairs: I64) -> F64:
    """Similarity of each pair of sets as `shingle_sets` gives them: int64[m, 2] -> float64[m]; two empty sets: 0."""
    from pipeline_assets.transforms import kernels  # numba takes a second to import: not with the code location

    assert not len(pairs) or (pairs.min() >= 0 and pairs.max() < len(offsets) - 1), (pairs.min(), pairs.max())
    similarities = np.zeros(len(pairs), dtype=np.float64)
    kernels.jaccard(hashes, offsets, np.ascontiguousarray(pairs, dtype=np.int64), similarities)
    return similarities


def jaccard_of_pairs(texts: pa.Array | pa.ChunkedArray, pairs: I64, ngram: int = 5) -> F64:
    """Exact similarity of pairs of texts, given by their rows: int64[m, 2] -> float64[m]. Only texts in pairs are read.

    >>> texts = pa.array(["a b c d e f g h i", "a b c d e f g h z"])
    >>> jaccard_of_pairs(texts, np.array([[0, 1]])).round(4).tolist()
    [0.6667]
    """
    rows, positions = np.unique(pairs, return_inverse=True)
    if pa.types.is_string(texts.type):
        texts = texts.cast(pa.large_string())  # what is taken may exceed the 2 GiB of 32-bit offsets
    hashes, offsets = shingle_sets(texts.take(pa.array(rows)), ngram)
    return jaccard_of_sets(hashes, offsets, positions.reshape(pairs.shape))
