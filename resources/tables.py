"""Tables, arrays and JSON inside an artifact's folder, written the same way everywhere.

The same values give the same bytes: sorted JSON keys, fixed row groups, fixed compression.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

ROWS_PER_GROUP = 1_000
MAPPED_FROM_BYTES = 1 << 20


def write_table(table: pa.Table, path: Path) -> None:
    """Write a table as Parquet in row groups of 1,000 rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, row_group_size=ROWS_PER_GROUP, compression="zstd", compression_level=1)


def read_table(path: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """Read a Parquet table, or some of its columns."""
    with pq.ParquetFile(path, memory_map=True) as parquet:
        return parquet.read(columns=list(columns) if columns is not None else None)


def read_rows(path: Path, rows: np.ndarray[Any, Any], columns: Sequence[str]) -> pa.Table:
    """Some rows of a Parquet table, int64[n], in the order given; only the row groups that hold them are read."""
    with pq.ParquetFile(path, memory_map=True) as parquet:
        metadata = parquet.metadata
        lengths = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
        firsts = np.cumsum([0, *lengths])
        groups, group_of = np.unique(np.searchsorted(firsts, rows, side="right") - 1, return_inverse=True)
        read_firsts = np.cumsum([0, *(lengths[group] for group in groups)])
        table = parquet.read_row_groups(groups.tolist(), columns=list(columns))
    return table.take(pa.array(rows - firsts[groups][group_of] + read_firsts[group_of]))


def write_array(array: np.ndarray[Any, Any], path: Path) -> None:
    """Write an array as `.npy`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    np.save(path, array, allow_pickle=False)


def read_array(path: Path) -> np.ndarray[Any, Any]:
    """A `.npy` array, memory-mapped from 1 MiB on."""
    mode: Any = "r" if path.stat().st_size > MAPPED_FROM_BYTES else None  # an empty file cannot be mapped
    array: np.ndarray[Any, Any] = np.load(path, mmap_mode=mode, allow_pickle=False)
    return array


def write_json(value: Any, path: Path) -> None:
    """Write plain values as JSON with sorted keys."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def read_json(path: Path) -> Any:
    """The plain values of a JSON file."""
    return json.loads(path.read_bytes())
