"""Array types of the transforms, and the bytes behind Arrow texts.

In: Arrow arrays of texts. Out: views of their UTF-8 bytes and offsets, in blocks cut by bytes. Nothing is copied but
the texts of dictionary-encoded arrays, a block of them at a time.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

U8 = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]


def utf8_blocks(texts: pa.Array | pa.ChunkedArray, max_bytes: int) -> Iterator[tuple[U8, I64]]:
    """The bytes and int64 offsets behind an Arrow array of texts, in blocks of about `max_bytes`.

    Takes string, large_string and dictionary-encoded arrays, whole or sliced. A block holds whole texts, at least one.
    """
    for chunk in texts.chunks if isinstance(texts, pa.ChunkedArray) else [texts]:
        for array in _plain_arrays(chunk, max_bytes):
            assert array.null_count == 0, f"{array.null_count:,} null texts"
            data, offsets = _utf8_buffers(array)
            for start, end in blocks_of(np.diff(offsets), max_bytes):
                yield data, offsets[start : end + 1]


def _plain_arrays(array: pa.Array, max_bytes: int) -> Iterator[pa.Array]:
    """An array without a dictionary: as it is, or by blocks, since 32-bit offsets may not reach all of its texts."""
    is_encoded = pa.types.is_dictionary(array.type)
    type_ = array.type.value_type if is_encoded else array.type
    assert pa.types.is_string(type_) or pa.types.is_large_string(type_), type_
    if not is_encoded:
        yield array
        return
    sizes = pc.binary_length(array.dictionary).take(array.indices).fill_null(0).to_numpy()
    for start, end in blocks_of(sizes.astype(np.int64), max_bytes):
        yield array.dictionary.take(array.indices[start:end])


def _utf8_buffers(array: pa.Array) -> tuple[U8, I64]:
    _, offset_buffer, data_buffer = array.buffers()
    width = np.int64 if pa.types.is_large_string(array.type) else np.int32
    offsets = np.frombuffer(offset_buffer, dtype=width)[array.offset : array.offset + len(array) + 1]
    data = np.frombuffer(data_buffer or b"", dtype=np.uint8)
    return data, offsets.astype(np.int64)


def positions(counts: I64) -> tuple[I64, I64]:
    """Of so many things in each group, the group of each thing and its place there: int64[g] -> two int64[sum].

    >>> [column.tolist() for column in positions(np.array([2, 0, 1]))]
    [[0, 0, 2], [0, 1, 0]]
    """
    group = np.repeat(np.arange(len(counts)), counts)
    return group, np.arange(len(group)) - np.repeat(np.cumsum(counts) - counts, counts)


def located(firsts: I64, numbers: I64) -> tuple[I64, I64]:
    """Of things numbered through all groups, the group of each and its place there: the way back of `positions`.

    `firsts` int64[g + 1] numbers each group's first thing, and their end.

    >>> [column.tolist() for column in located(np.array([0, 2, 2, 3]), np.array([2, 0, 1]))]
    [[2, 0, 0], [0, 0, 1]]
    """
    group = np.searchsorted(firsts, numbers, side="right") - 1
    return group, numbers - firsts[group]


def is_run_start(*columns: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Whether each row differs from the one before it in some column: the first of each run of equal rows, bool[n].

    >>> is_run_start(np.array([1, 1, 1, 2]), np.array([5, 5, 6, 6])).tolist()
    [True, False, True, True]
    """
    is_start = np.zeros(len(columns[0]), dtype=np.bool_)
    is_start[:1] = True
    for column in columns:
        is_start[1:] |= column[1:] != column[:-1]
    return is_start


def whole_rows(rows: U8) -> npt.NDArray[np.void]:
    """Each row's bytes as one value, to sort, find and tell apart rows by: uint8[n, width] -> void[n].

    >>> np.unique(whole_rows(np.array([[1, 2], [0, 9], [1, 2]], np.uint8)), return_index=True)[1].tolist()
    [1, 0]
    """
    return np.ascontiguousarray(rows).view(np.dtype((np.void, rows.shape[1]))).ravel()


def blocks_of(sizes: I64, most: int) -> Iterator[tuple[int, int]]:
    """Half-open ranges of neighbouring items of at most `most` together, one item at least.

    >>> list(blocks_of(np.array([3, 3, 9, 1]), 6))
    [(0, 2), (2, 3), (3, 4)]
    """
    ends = np.cumsum(sizes)
    start = 0
    while start < len(ends):
        before = int(ends[start - 1]) if start else 0
        end = max(start + 1, int(np.searchsorted(ends, before + most, side="right")))
        yield start, end
        start = end
