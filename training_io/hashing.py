"""Identities, digests, named seeds and keyed hashes.

In: plain values, bytes, paths, arrays of doc_ids. Out: hex digests and uint64 values that are the same on every
machine and in every process. Cost: one pass over the bytes.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]

DOC_ID_BYTES = 32

# MurmurHash3's 64-bit finalizer (fmix64): a bijection in which every input bit reaches every output bit.
_MIX_1 = np.uint64(0xFF51AFD7ED558CCD)
_MIX_2 = np.uint64(0xC4CEB9FE1A85EC53)
_SHIFT = np.uint64(33)


def canonical_json(value: Any) -> bytes:
    """One byte string for one value: sorted keys, no spaces, UTF-8, no NaN.

    >>> canonical_json({"b": 1, "a": [True, None]})
    b'{"a":[true,null],"b":1}'
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def identity_of(value: Any) -> str:
    """SHA-256 of the canonical JSON of a value, in hex."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


def sha256_file(path: Path) -> str:
    """SHA-256 of a file's bytes, in hex, read in bounded memory."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def derive_seed(seed: int, name: str) -> int:
    """A 64-bit seed for one named purpose, so that adding a purpose reseeds no other.

    First 8 bytes, little-endian, of SHA-256 of the canonical JSON of [seed, name].
    """
    return int.from_bytes(hashlib.sha256(canonical_json([seed, name])).digest()[:8], "little")


def mix64(values: U64) -> U64:
    """MurmurHash3's 64-bit finalizer, element by element (arithmetic modulo 2^64)."""
    mixed = values ^ (values >> _SHIFT)
    mixed = mixed * _MIX_1
    mixed = mixed ^ (mixed >> _SHIFT)
    mixed = mixed * _MIX_2
    finished: U64 = mixed ^ (mixed >> _SHIFT)
    return finished


def keyed_hash(doc_ids: npt.NDArray[np.uint8], key: int) -> U64:
    """A 64-bit value for each doc_id under a key: uint8[n, 32] -> uint64[n].

    The four little-endian 64-bit words of the doc_id are folded in one after another: h = mix64(h ^ word), from
    h = mix64(key). It decides splits, orders and the kept document; it depends on content and key alone.
    """
    assert doc_ids.dtype == np.uint8, doc_ids.dtype
    assert doc_ids.ndim == 2, doc_ids.shape
    assert doc_ids.shape[1] == DOC_ID_BYTES, doc_ids.shape
    words = np.ascontiguousarray(doc_ids).view("<u8").astype(np.uint64, copy=False)
    hashes: U64 = np.repeat(mix64(np.array([key], dtype=np.uint64)), len(words))
    for column in range(words.shape[1]):
        hashes = mix64(hashes ^ words[:, column])
    return hashes
