"""What peers' scripts share: the texts, and one line of JSON for each job asked for. Only numpy is needed."""

import hashlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np


def read_plain(folder: Path, name: str) -> list[str]:
    """Texts from `<name>.bin` and `<name>_offsets.npy`."""
    data = (folder / f"{name}.bin").read_bytes()
    return [data[start:end].decode() for start, end in pairwise(np.load(folder / f"{name}_offsets.npy").tolist())]


def versions_of(*names: str) -> dict[str, Any]:
    """Installed versions as one text."""
    return {"versions": " + ".join(f"{name} {metadata.version(name)}" for name in names)}


def digest_of(rows: Sequence[np.ndarray]) -> dict[str, str]:
    """SHA-256 of all ids as uint32, then of the int64 lengths."""
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    return {"digest": hashlib.sha256(b"".join(row.tobytes() for row in rows) + lengths.tobytes()).hexdigest()}


def answer_encoding_jobs(
    check: Callable[[Path, list[str]], dict[str, Any]],
    run: Callable[[Path, list[str], list[str]], dict[str, Any]],
    library: str,
    more: Mapping[str, Callable[[Path], dict[str, Any]]] | None = None,
) -> None:
    """Answer a tokenizer's jobs on the folder named on the command line."""
    folder = Path(sys.argv[1])
    warm_up, timed = read_plain(folder, "warm_up"), read_plain(folder, "timed")
    answer_jobs(
        {
            "check": lambda: check(folder, timed),
            "run": lambda: run(folder, warm_up, timed),
            "cold": lambda: run(folder, [], [*warm_up, *timed]),
            "versions": lambda: versions_of(library),
        }
        | {name: lambda job=job: job(folder) for name, job in (more or {}).items()}
    )


def answer_jobs(jobs: Mapping[str, Callable[[], dict[str, Any]]]) -> None:
    """Do the job that each line of standard input names, until it ends."""
    for line in sys.stdin:
        print(json.dumps(jobs[line.strip()]()), flush=True)
