"""What peers' scripts share: the texts, and one line of JSON for each job asked for. Only numpy is needed."""

import json
import sys
from collections.abc import Callable, Mapping
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


def answer_jobs(jobs: Mapping[str, Callable[[], dict[str, Any]]]) -> None:
    """Do the job that each line of standard input names, until it ends."""
    for line in sys.stdin:
        print(json.dumps(jobs[line.strip()]()), flush=True)
