"""OLMo-core's packing, best fit decreasing, of segments whose lengths are given; it moves no token."""

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from jobs import answer_jobs, versions_of
from olmo_core.data.utils import InstancePacker


def pack_all(ranges: np.ndarray, capacity: int) -> dict[str, Any]:
    """All segments at once: how many packs, and how long it took, its tree of spaces included."""
    start = time.perf_counter()
    packs, _, _ = InstancePacker(capacity).pack_documents(ranges)
    return {"seconds": time.perf_counter() - start, "num_packs": len(packs)}


def main() -> None:
    """Answer the jobs on the lengths of the folder named on the command line."""
    folder = Path(sys.argv[1])
    lengths, capacity = np.load(folder / "lengths.npy"), int(np.load(folder / "capacity.npy"))
    ends = np.cumsum(lengths, dtype=np.uint64)
    ranges = np.stack([ends - lengths.astype(np.uint64), ends], axis=1)
    answer_jobs({"run": lambda: pack_all(ranges, capacity), "versions": lambda: versions_of("ai2-olmo-core")})


if __name__ == "__main__":
    main()
