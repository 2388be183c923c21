"""Signatures with datasketch: Python shingles, xxhash, `update_batch` of a copied MinHash for each document."""

import hashlib
import sys
import time
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from datasketch import MinHash
from jobs import answer_jobs, read_plain, versions_of
from python_shingles import shingles

NUM_PERM, SEED = 112, 1


def encoded_shingles(text: str) -> list[bytes]:
    """A text's shingles as xxhash takes them."""
    return [shingle.encode() for shingle in shingles(text)]


def sign(rows: list[Any], hashfunc: Callable[[Any], int], values_of: Callable[[Any], Iterable[Any]]) -> np.ndarray:
    """uint32[n, 112]: one row for each of the rows."""
    empty = MinHash(num_perm=NUM_PERM, seed=SEED, hashfunc=hashfunc, scheme="affine32")
    signatures = np.empty((len(rows), NUM_PERM), dtype=np.uint32)
    for number, row in enumerate(rows):
        minhash = empty.copy()
        minhash.update_batch(values_of(row))
        signatures[number] = minhash.hashvalues
    return signatures


def check(folder: Path) -> dict[str, Any]:
    """SHA-256 of the signatures of given shingle hashes."""
    hashes, offsets = np.load(folder / "hashes.npy"), np.load(folder / "hash_offsets.npy")
    rows = [hashes[start:end] for start, end in pairwise(offsets.tolist())]
    signatures = sign(rows, int, np.ndarray.tolist)
    return {"digest": hashlib.sha256(signatures.tobytes()).hexdigest()}


def run(texts: list[str]) -> dict[str, Any]:
    """Seconds of signing all texts."""
    start = time.perf_counter()
    sign(texts, xxhash.xxh32_intdigest, encoded_shingles)
    return {"seconds": time.perf_counter() - start}


def main() -> None:
    """Answer jobs on the folder named on the command line."""
    folder = Path(sys.argv[1])
    texts = read_plain(folder, "texts")
    answer_jobs(
        {
            "check": lambda: check(folder),
            "run": lambda: run(texts),
            "versions": lambda: versions_of("datasketch", "xxhash"),
        }
    )


if __name__ == "__main__":
    main()
