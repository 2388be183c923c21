"""Near-duplicate clusters with text-dedup's own functions in its published default configuration.

`python -m text_dedup.minhash` maps the same function over a data set, fills the same tables and unites in the same
structure; left out is what goes through files, so that both sides start from texts in memory.
"""

import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from jobs import answer_jobs, read_plain, versions_of
from text_dedup.minhash import RNG, SIGNATURE_COLUMN, embed_func
from text_dedup.utils import MinHashArgs, UnionFind, optimal_param, sha1_hash

DEFAULTS = MinHashArgs()
NUM_BANDS, ROWS_PER_BAND = optimal_param(DEFAULTS.threshold, DEFAULTS.num_perm)
MAX_HASH, PRIME = np.uint32((1 << 32) - 1), np.uint64((1 << 61) - 1)  # its configuration of 64 hash bits
PERMUTATIONS = (
    RNG.randint(1, PRIME, size=DEFAULTS.num_perm, dtype=np.uint64),
    RNG.randint(0, PRIME, size=DEFAULTS.num_perm, dtype=np.uint64),
)
RANGES = [(band * ROWS_PER_BAND, (band + 1) * ROWS_PER_BAND) for band in range(NUM_BANDS)]


def bands_of(text: str, number: int) -> list[bytes]:
    """The values of each band of one text."""
    embedded = embed_func(
        text,
        number,
        num_perm=DEFAULTS.num_perm,
        ngram_size=DEFAULTS.ngram,
        min_length=DEFAULTS.min_length,
        hashranges=RANGES,
        permutations=PERMUTATIONS,
        hash_func=sha1_hash,
        dtype=np.uint64,
        max_hash=MAX_HASH,
        modulo_prime=PRIME,
    )
    bands: list[bytes] = embedded[SIGNATURE_COLUMN]
    return bands


def unite(bands: list[list[bytes]]) -> UnionFind:
    """Texts that share a value of a band, united."""
    tables: list[dict[bytes, set[int]]] = [defaultdict(set) for _ in RANGES]
    for number, values in enumerate(bands):
        for table, value in zip(tables, values, strict=True):
            table[value].add(number)
    united = UnionFind()
    for table in tables:
        for group in table.values():
            if len(group) > 1:
                first = min(group)
                for other in group:
                    united.union(other, first)
    return united


def run(texts: list[str], pairs: list[list[int]]) -> dict[str, Any]:
    """Seconds from texts to clusters, each text's cluster, which of the pairs share a band, bands and rows."""
    start = time.perf_counter()
    bands = [bands_of(text, number) for number, text in enumerate(texts)]
    united = unite(bands)
    seconds = time.perf_counter() - start
    return {
        "seconds": seconds,
        "labels": [united.find(number) for number in range(len(texts))],
        "shares_band": [any(map(bytes.__eq__, bands[left], bands[right])) for left, right in pairs],
        "num_bands": NUM_BANDS,
        "rows_per_band": ROWS_PER_BAND,
    }


def main() -> None:
    """Answer jobs on the folder named on the command line."""
    folder = Path(sys.argv[1])
    texts, pairs = read_plain(folder, "texts"), np.load(folder / "pairs.npy").tolist()
    answer_jobs({"run": lambda: run(texts, pairs), "versions": lambda: versions_of("text-dedup")})


if __name__ == "__main__":
    main()
