"""Token ids with tokenizers: `encode_batch_fast` on batches of texts, on one thread (set by who starts this)."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from jobs import answer_encoding_jobs, digest_of
from tokenizers import Tokenizer

BATCH_CHARACTERS = 8_000_000  # encodings take 20 to 30 times their text in memory


def load(folder: Path) -> Tokenizer:
    """The tokenizer that both sides use, adding and cutting nothing."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


def batches(texts: list[str]) -> Iterator[list[str]]:
    """The texts in order, in lists of about BATCH_CHARACTERS."""
    batch: list[str] = []
    num_characters = 0
    for text in texts:
        batch.append(text)
        num_characters += len(text)
        if num_characters >= BATCH_CHARACTERS:
            yield batch
            batch, num_characters = [], 0
    yield batch


def check(folder: Path, texts: list[str]) -> dict[str, Any]:
    """SHA-256 of all ids as uint32, then of the int64 lengths."""
    tokenizer = load(folder)
    encodings = (
        one for batch in batches(texts) for one in tokenizer.encode_batch_fast(batch, add_special_tokens=False)
    )
    rows = [np.array(one.ids, dtype=np.uint32) for one in encodings]
    return digest_of(rows)


def run(folder: Path, warm_up: list[str], timed: list[str]) -> dict[str, Any]:
    """Seconds in `encode_batch_fast` for the timed texts, of a new tokenizer that has seen the warm-up."""
    tokenizer = load(folder)
    for batch in batches(warm_up):
        tokenizer.encode_batch_fast(batch, add_special_tokens=False)
    seconds = 0.0
    for batch in batches(timed):
        start = time.perf_counter()
        encodings = tokenizer.encode_batch_fast(batch, add_special_tokens=False)
        seconds += time.perf_counter() - start
        del encodings
    return {"seconds": seconds}


if __name__ == "__main__":
    answer_encoding_jobs(check, run, "tokenizers")
