"""TRL's packing, best fit decreasing, of segments whose lengths are given; the tokens it moves are one byte each."""

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from jobs import answer_jobs, versions_of
from trl.data_utils import _pack_bfd

MAP_BATCH = 1_000  # unless told otherwise


def segments_of(lengths: np.ndarray) -> pa.Table:
    """A column of segments of these lengths."""
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    tokens = pa.array(np.zeros(offsets[-1], dtype=np.int8))
    return pa.table({"input_ids": pa.LargeListArray.from_arrays(offsets, tokens)})


def pack_all(segments: pa.Table, capacity: int) -> dict[str, Any]:
    """All segments at once: how many packs, and how long it took."""
    start = time.perf_counter()
    packed = _pack_bfd(segments, capacity, "split")
    return {"seconds": time.perf_counter() - start, "num_packs": len(packed)}


def pack_batches(lengths: np.ndarray, capacity: int) -> dict[str, Any]:
    """So many at a time as datasets.map hands over: how many packs."""
    parts = [segments_of(lengths[first : first + MAP_BATCH]) for first in range(0, len(lengths), MAP_BATCH)]
    return {"num_packs": sum(len(_pack_bfd(part, capacity, "split")) for part in parts)}


def main() -> None:
    """Answer the jobs on the lengths of the folder named on the command line."""
    folder = Path(sys.argv[1])
    lengths, capacity = np.load(folder / "lengths.npy"), int(np.load(folder / "capacity.npy"))
    segments = segments_of(lengths)
    answer_jobs(
        {
            "run": lambda: pack_all(segments, capacity),
            "batches": lambda: pack_batches(lengths, capacity),
            "versions": lambda: versions_of("trl"),
        }
    )


if __name__ == "__main__":
    main()
