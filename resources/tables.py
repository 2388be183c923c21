"""Tables, arrays and JSON inside an artifact's folder, written the same way everywhere.

The same values give the same bytes: sorted JSON keys, fixed row groups, fixed compression. A file that is missing, cut
short or not of its format is a FormatError that names it.
"""

import contextlib
import itertools
import json
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from resources.shapes import expect_fields, expect_rows
from training_io.errors import FormatError

ROWS_PER_GROUP = 256  # a row group is decoded whole for one row of it
MAPPED_FROM_BYTES = 1 << 20
# What the libraries raise for bytes that are not theirs; numpy reads a header with Python's own tokenizer.
DAMAGE = (ValueError, EOFError, IndexError, NotImplementedError, tokenize.TokenError, OSError, RecursionError)


@contextlib.contextmanager
def _reading(path: Path, what: str) -> Iterator[None]:
    """Tell damage from a disk that fails: what the system says of a file that is there stays an OSError."""
    try:
        yield
    except DAMAGE as error:
        is_there = not isinstance(error, FileNotFoundError)
        if is_there and isinstance(error, OSError) and error.errno is not None:
            raise
        found = f"{type(error).__name__}: {' '.join(str(error).split())}" if is_there else "no file"
        raise FormatError(
            f"{path}: expected {what}, found {found}. The file is damaged; materialize its asset again: it is rebuilt."
        ) from error


def write_table(table: pa.Table, path: Path) -> None:
    """Write a table as Parquet in row groups of 256 rows.

    Texts get no dictionary, which would be thrown away, and no statistics, which would be whole texts.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    short = [field.name for field in table.schema if not pa.types.is_large_string(field.type)]
    pq.write_table(
        table,
        path,
        row_group_size=ROWS_PER_GROUP,
        compression="zstd",
        compression_level=1,
        use_dictionary=short,
        write_statistics=short,
    )


def read_table(path: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """Read a Parquet table, or some of its columns."""
    with _reading(path, "a Parquet table"), pq.ParquetFile(path, memory_map=True) as parquet:
        return parquet.read(columns=list(columns) if columns is not None else None)


def read_first_rows(path: Path, num_rows: int) -> pa.Table:
    """At most so many rows from the beginning of a Parquet table."""
    with _reading(path, "a Parquet table"), pq.ParquetFile(path, memory_map=True) as parquet:
        batches = itertools.islice(parquet.iter_batches(batch_size=num_rows), 1)
        return pa.Table.from_batches(batches, parquet.schema_arrow)


def count_rows(path: Path) -> int:
    """Rows of a Parquet table, by its footer."""
    with _reading(path, "a Parquet table"), pq.ParquetFile(path, memory_map=True) as parquet:
        return int(parquet.metadata.num_rows)


def read_rows(path: Path, rows: np.ndarray[Any, Any], columns: Sequence[str]) -> pa.Table:
    """Some rows of a Parquet table, int64[n], in the order given; only the row groups that hold them are read."""
    with _reading(path, "a Parquet table that holds these rows"), pq.ParquetFile(path, memory_map=True) as parquet:
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
    with _reading(path, "an array"):
        mode: Any = "r" if path.stat().st_size > MAPPED_FROM_BYTES else None  # an empty file cannot be mapped
        array: np.ndarray[Any, Any] = np.load(path, mmap_mode=mode, allow_pickle=False)
        return array


class MappedArrays(Sequence[np.ndarray[Any, Any]]):
    """`.npy` arrays in files, mapped when they are asked for: none is held, so that memory, open files and mappings do
    not follow their number. A header is read once.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self._places: dict[int, tuple[np.dtype[Any], int, tuple[int, ...]]] = {}

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, number: Any) -> np.ndarray[Any, Any]:
        path = self._paths[number]
        if number not in self._places:
            with _reading(path, "an array"):
                found = np.load(path, mmap_mode="r", allow_pickle=False)
            self._places[number] = (found.dtype, found.offset, found.shape)
        dtype, offset, shape = self._places[number]
        return np.memmap(path, dtype, mode="r", offset=offset, shape=shape)


def write_json(value: Any, path: Path) -> None:
    """Write plain values as JSON with sorted keys."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def read_json(path: Path) -> Any:
    """The plain values of a JSON file."""
    with _reading(path, "JSON"):
        return json.loads(path.read_bytes())


def read_json_rows(path: Path, kinds: Mapping[str, type]) -> list[dict[str, Any]]:
    """The rows of a JSON file that is a list of objects, each with fields of these kinds."""
    return expect_rows(read_json(path), kinds, str(path))


def read_json_tables(path: Path, names: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """The tables of these names in a JSON file that is an object of lists of objects."""
    tables = expect_fields(read_json(path), dict.fromkeys(names, list), str(path))
    return {name: expect_rows(tables[name], {}, f"{path}, {name}") for name in names}
