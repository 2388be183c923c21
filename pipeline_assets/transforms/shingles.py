"""Shingles: texts as UTF-8 bytes in, one 32-bit hash for each run of `ngram` consecutive words out.

    word hash    = fmix64(FNV-1a 64 over the word's lower-case code points)
    shingle hash = top 32 bits of fmix64(sum over i of word hash i × B^(n-1-i) + n × C), modulo 2^64, n its words

A text of fewer than `ngram` words has one shingle of all of them, so that short texts can be equal; a text without
words has none. A byte that is not valid UTF-8 separates words. Cost: a few compiled passes over blocks of bytes, no
Python object a word or a document, a number of steps that is linear in the bytes whatever they hold; 4 bytes a shingle
and fixed buffers.
"""

import numpy as np

from pipeline_assets.transforms.arrays import I64, U8, U32
from pipeline_assets.transforms.words import fold_table

BASE = np.uint64(0x9E3779B97F4A7C15)  # of the polynomial over a shingle's words

BLOCK = 4096  # bytes taken through all passes at a time: what is known of them stays in the first-level cache


def shingle_hashes(text: str, ngram: int = 5) -> U32:
    """Hashes of a text's shingles in order, repeats included, as fed to MinHash: uint32[num_shingles].

    >>> len(shingle_hashes("the cat sat on the mat and then slept"))
    5
    """
    data = np.frombuffer(text.encode("utf-8", "replace"), dtype=np.uint8)
    hashes, _, _ = hash_documents(data, np.array([0, len(data)]), ngram)
    return hashes


def unique_shingles(text: str, ngram: int = 5) -> U32:
    """A text as the set that Jaccard similarity compares: its distinct shingle hashes, ascending.

    >>> len(unique_shingles("la la la la la la la"))
    1
    """
    return np.unique(shingle_hashes(text, ngram))


def hash_documents(data: U8, offsets: I64, ngram: int) -> tuple[U32, I64, I64]:
    """Shingles of many texts: bytes and int64[n + 1] offsets into them -> (hashes uint32[total], their offsets
    int64[n + 1], words a text int64[n])."""
    hashes, hash_offsets, num_words, _ = hash_and_count(data, offsets, ngram)
    return hashes, hash_offsets, num_words


def hash_and_count(data: U8, offsets: I64, ngram: int) -> tuple[U32, I64, I64, int]:
    """As `hash_documents`, and the steps taken: bytes looked at and folded, entries cut and hashed."""
    from pipeline_assets.transforms import signature_kernels  # numba takes a second to import

    assert ngram >= 1, ngram
    assert offsets[0] >= 0, offsets[0]
    assert offsets[-1] <= len(data), (offsets[-1], len(data))
    assert (np.diff(offsets) >= 0).all(), "offsets must not fall"
    num_documents = len(offsets) - 1
    # Words of one byte need a separator between them, so a text of n bytes has at most (n + 1) // 2.
    hashes = np.empty((int(offsets[-1] - offsets[0]) + num_documents) // 2 + 1, dtype=np.uint32)
    num_words = np.empty(num_documents, dtype=np.int64)
    lead_power = np.uint64(pow(int(BASE), ngram - 1, 1 << 64))
    num_steps = signature_kernels.hash_documents(data, offsets, fold_table(), ngram, lead_power, hashes, num_words)
    num_shingles = np.minimum(num_words, np.maximum(1, num_words - ngram + 1))
    hash_offsets = np.concatenate([[0], np.cumsum(num_shingles)])
    return hashes[: hash_offsets[-1]], hash_offsets, num_words, num_steps
