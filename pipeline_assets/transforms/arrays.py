"""Array types of the transforms, and the bytes behind Arrow texts.

In: Arrow arrays of texts. Out: views of their UTF-8 bytes and offsets, in blocks cut by bytes. Nothing is copied.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa

U8 = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]


def utf8_blocks(texts: pa.Array | pa.ChunkedArray, max_bytes: int) -> Iterator[tuple[U8, I64]]:
    """The bytes and int64 offsets behind an Arrow array of texts, without a copy, in blocks of about `max_bytes`.

    Takes string, large_string and dictionary-encoded arrays, whole or sliced. A block holds whole texts, at least one.
    """
    for chunk in texts.chunks if isinstance(texts, pa.ChunkedArray) else [texts]:
        array = chunk.dictionary_decode() if pa.types.is_dictionary(chunk.type) else chunk
        assert pa.types.is_string(array.type) or pa.types.is_large_string(array.type), array.type
        assert array.null_count == 0, f"{array.null_count:,} null texts"
        if len(array):
            data, offsets = _utf8_buffers(array)
            yield from _cut_by_bytes(data, offsets, max_bytes)


def _utf8_buffers(array: pa.Array) -> tuple[U8, I64]:
    _, offset_buffer, data_buffer = array.buffers()
    width = np.int64 if pa.types.is_large_string(array.type) else np.int32
    offsets = np.frombuffer(offset_buffer, dtype=width)[array.offset : array.offset + len(array) + 1]
    data = np.frombuffer(data_buffer or b"", dtype=np.uint8)
    return data, offsets.astype(np.int64)


def _cut_by_bytes(data: U8, offsets: I64, max_bytes: int) -> Iterator[tuple[U8, I64]]:
    start, num_documents = 0, len(offsets) - 1
    while start < num_documents:
        end = int(np.searchsorted(offsets, offsets[start] + max_bytes, side="right")) - 1
        end = min(max(end, start + 1), num_documents)
        yield data, offsets[start : end + 1]
        start = end


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
