"""Token ids with tiktoken: `encode_ordinary` of each text, on one thread.

The ranks are those of the tokenizer.json that both sides use: its vocabulary in bytes, merged in order of id. That is
the same BPE wherever ids rise with the ranks of merges, which the comparison of ids before timing shows.
"""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from jobs import answer_encoding_jobs, digest_of
from tiktoken import Encoding

# tiktoken's own spelling of GPT-2's pattern.
GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""


def load(folder: Path) -> Encoding:
    """The tokenizer that both sides use."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    byte_of = {chr(byte) if byte in printable else chr(next(others)): byte for byte in range(256)}
    form = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    special = {token["content"]: token["id"] for token in form["added_tokens"]}
    ranks = {
        bytes(byte_of[character] for character in word): number
        for word, number in form["model"]["vocab"].items()
        if word not in special
    }
    return Encoding("same", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens=special)


def check(folder: Path, texts: list[str]) -> dict[str, Any]:
    """SHA-256 of all ids as uint32, then of the int64 lengths."""
    encoding = load(folder)
    rows = [np.array(encoding.encode_ordinary(text), dtype=np.uint32) for text in texts]
    return digest_of(rows)


def run(folder: Path, warm_up: list[str], timed: list[str]) -> dict[str, Any]:
    """Seconds in `encode_ordinary` for the timed texts, of a new tokenizer that has seen the warm-up."""
    encoding = load(folder)
    for text in warm_up:
        encoding.encode_ordinary(text)
    start = time.perf_counter()
    for text in timed:
        encoding.encode_ordinary(text)
    return {"seconds": time.perf_counter() - start}


if __name__ == "__main__":
    answer_encoding_jobs(check, run, "tiktoken")
