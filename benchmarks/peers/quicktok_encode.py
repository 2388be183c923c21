"""Token ids with quicktok: `encode_batch` on one thread, which gives flat ids and offsets as ours does.

The folder's `encoding.txt` names one of the encodings that quicktok ships. Its ranks are in the wheel; the job `ranks`
writes them as `ranks.json`, bytes as Latin-1, so that the same tokenizer can be made for the other sides.
"""

import hashlib
import json
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import quicktok
from jobs import answer_encoding_jobs


def load(folder: Path) -> Any:
    """The encoding, loaded anew."""
    quicktok._CACHE.clear()
    return quicktok.get_encoding((folder / "encoding.txt").read_text(encoding="utf-8"))


def check(folder: Path, texts: list[str]) -> dict[str, Any]:
    """SHA-256 of all ids as uint32, then of the int64 lengths."""
    ids, offsets = load(folder).encode_batch(texts, 1)
    lengths = np.diff(offsets).astype(np.int64)
    return {"digest": hashlib.sha256(ids.astype(np.uint32).tobytes() + lengths.tobytes()).hexdigest()}


def run(folder: Path, warm_up: list[str], timed: list[str]) -> dict[str, Any]:
    """Seconds in `encode_batch` for the timed texts, of a new encoding that has seen the warm-up."""
    encoding = load(folder)
    encoding.encode_batch(warm_up, 1)
    start = time.perf_counter()
    encoding.encode_batch(timed, 1)
    return {"seconds": time.perf_counter() - start}


def write_ranks(folder: Path) -> dict[str, Any]:
    """The ranks of the encoding: a count, then for each token its length, its bytes, its rank."""
    name = (folder / "encoding.txt").read_text(encoding="utf-8").removesuffix("_base")
    data = (Path(quicktok.__file__).parent / "data" / f"{name}.vocab").read_bytes()
    ranks, at = {}, 4
    while at < len(data):
        (size,) = struct.unpack_from("<H", data, at)
        (rank,) = struct.unpack_from("<I", data, at + 2 + size)
        ranks[data[at + 2 : at + 2 + size].decode("latin-1")] = rank
        at += 6 + size
    assert len(ranks) == struct.unpack_from("<I", data)[0], (len(ranks), data[:4])
    (folder / "ranks.json").write_text(json.dumps(ranks), encoding="utf-8")
    return {"num_ranks": len(ranks)}


if __name__ == "__main__":
    answer_encoding_jobs(check, run, "quicktok-v1", {"ranks": write_ranks})
