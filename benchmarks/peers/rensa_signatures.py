"""Signatures with rensa: Python shingles, RMinHash's digests of many sets at once.

RMinHash is the faster of its two classes by far (CMinHash took ten times as long a shingle), and the call that takes
many sets is faster than one object a document. Its `rho` calls are left out: they look at a sample of the shingles.
"""

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from jobs import answer_jobs, read_plain, versions_of
from python_shingles import shingles
from rensa import RMinHash

NUM_PERM, SEED = 112, 1
DOCUMENTS_AT_ONCE = 64  # their shingles are alive together


def sign(texts: list[str]) -> Iterator[list[list[int]]]:
    """The values of each text, many texts at a time."""
    for start in range(0, len(texts), DOCUMENTS_AT_ONCE):
        sets = [shingles(text) for text in texts[start : start + DOCUMENTS_AT_ONCE]]
        yield RMinHash.digests_from_token_sets(sets, NUM_PERM, SEED)


def run(texts: list[str]) -> dict[str, Any]:
    """Seconds of signing all texts into one matrix, and its shape."""
    start = time.perf_counter()
    signatures = np.empty((len(texts), NUM_PERM), dtype=np.uint32)
    row = 0
    for values in sign(texts):
        signatures[row : row + len(values)] = values
        row += len(values)
    return {"seconds": time.perf_counter() - start, "shape": [row, signatures.shape[1]]}


def main() -> None:
    """Answer jobs on the folder named on the command line."""
    texts = read_plain(Path(sys.argv[1]), "texts")
    answer_jobs({"run": lambda: run(texts), "versions": lambda: versions_of("rensa")})


if __name__ == "__main__":
    main()
