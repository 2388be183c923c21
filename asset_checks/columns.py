"""Documents as columns: doc_ids as rows of bytes, told apart and found again by sorting them; names as numbers.

A law that looks at a whole corpus holds 32 bytes a document for an id, and 8 for an order of the documents; a Python
object for each would be hundreds. Ids are compared whole, so nothing rests on their being hashes.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]
Flags = npt.NDArray[np.bool_]
Numbers = npt.NDArray[np.int32]

AT_ONCE = 1 << 18  # rows whose bytes are gathered at once


def whole(rows: U8) -> npt.NDArray[np.void]:
    """Each row's bytes as one value: uint8[n, w] -> void[n]."""
    return np.ascontiguousarray(rows).view(f"V{rows.shape[1]}").ravel()


def joined(parts: Iterable[U8], width: int = 32) -> U8:
    """Rows one after another, none where there are no parts: uint8[n, width]."""
    return np.concatenate([np.empty((0, width), np.uint8), *parts])


def id_rows(doc_ids: Iterable[bytes]) -> U8:
    """Some doc_ids of 32 bytes each as rows: uint8[n, 32]."""
    return np.frombuffer(b"".join(doc_ids), np.uint8).reshape(-1, 32)


def sorted_rows(rows: U8) -> I64:
    """The numbers of rows by their bytes, of equal rows ascending: uint8[n, w] -> int64[n]."""
    return np.argsort(whole(rows), kind="stable")


def run_starts(rows: U8, by_bytes: I64) -> Flags:
    """Of rows in their `sorted_rows` order, whether each differs from the one before it: bool[n]."""
    values = whole(rows)
    is_start = np.ones(len(rows), np.bool_)
    for start in range(1, len(rows), AT_ONCE):
        some = values[by_bytes[start - 1 : start + AT_ONCE]]
        is_start[start : start + AT_ONCE] = some[1:] != some[:-1]
    return is_start


def group_numbers(rows: U8) -> I64:
    """Numbers of equal rows, ascending with their bytes: uint8[n, w] -> int64[n].

    >>> group_numbers(np.array([[7, 0], [2, 9], [7, 0]], np.uint8)).tolist()
    [1, 0, 1]
    """
    by_bytes = sorted_rows(rows)
    numbers = np.empty(len(rows), np.int64)
    numbers[by_bytes] = np.cumsum(run_starts(rows, by_bytes)) - 1
    return numbers


def find_rows(rows: U8, by_bytes: I64, wanted: U8) -> I64:
    """The last row of each wanted value, -1 where there is none: uint8[n, w] and their order, uint8[m, w] -> int64[m].

    >>> rows = np.array([[7, 0], [2, 9], [7, 0]], np.uint8)
    >>> find_rows(rows, sorted_rows(rows), np.array([[7, 0], [7, 1]], np.uint8)).tolist()
    [2, -1]
    """
    values = whole(rows)
    found = np.full(len(wanted), -1, np.int64)
    for start in range(0, len(wanted) if len(rows) else 0, AT_ONCE):
        names = whole(wanted[start : start + AT_ONCE])
        in_order = np.argsort(names)  # neighbours are found near each other
        places = np.searchsorted(values, names[in_order], side="right", sorter=by_bytes) - 1
        last = by_bytes[np.maximum(places, 0)]
        found[start + in_order] = np.where(values[last] == names[in_order], last, -1)
    return found


def count_rows(rows: U8, by_bytes: I64, wanted: U8) -> I64:
    """How often each wanted value is a row: uint8[n, w] and their order, uint8[m, w] -> int64[m]."""
    ends = (np.searchsorted(whole(rows), whole(wanted), side=side, sorter=by_bytes) for side in ("right", "left"))
    return np.subtract(*ends)


def named(columns: Iterable[pa.ChunkedArray], missing: str = "") -> tuple[Numbers, list[str]]:
    """Columns of names, one after another, as numbers into the sorted names: int32[n]."""
    chunks = [
        chunk for column in columns for chunk in column.fill_null(missing).dictionary_encode().chunks if len(chunk)
    ]
    names = sorted({name for chunk in chunks for name in chunk.dictionary.to_pylist()})
    numbers = [places_in(names, chunk.dictionary)[np.asarray(chunk.indices)] for chunk in chunks]
    return np.concatenate([np.empty(0, np.int32), *numbers]), names


def places_in(names: Sequence[str], column: pa.Array | pa.ChunkedArray) -> Numbers:
    """Where each name of a column is in a list, -1 where it is not there: int32[n]."""
    return np.asarray(pc.fill_null(pc.index_in(column, pa.array(names, pa.string())), -1), np.int32)
