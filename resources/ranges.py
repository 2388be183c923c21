"""Which bytes of a Parquet file hold some columns of a row group, and a file that is nothing but those bytes.

In: a footer, a row group, columns. Out: few half-open ranges that cover the columns' chunks, and a table decoded from
their bytes alone. The promise: at most a twentieth more than the chunks is fetched, no byte twice, and a decoder that
asks for any other byte is refused.
"""

import io
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from training_io.errors import SourceError

Range = tuple[int, int]  # half-open, in bytes of the file

MAX_WASTE = 0.05  # bytes between chunks that are fetched to save requests, as a share of the chunks
MAX_RANGE_BYTES = 32_000_000  # what one lost connection costs at most


def chunk_ranges(row_group: pq.RowGroupMetaData, columns: Sequence[str]) -> list[Range]:
    """The ranges of the chunks of top-level columns, by their place in the file."""
    chunks = [row_group.column(number) for number in range(row_group.num_columns)]
    wanted = [chunk for chunk in chunks if chunk.path_in_schema.partition(".")[0] in columns]
    return sorted((_start_of(chunk), _start_of(chunk) + chunk.total_compressed_size) for chunk in wanted)


def _start_of(chunk: pq.ColumnChunkMetaData) -> int:
    dictionary = chunk.dictionary_page_offset  # 0 from writers that mean none
    start: int = min(dictionary, chunk.data_page_offset) if dictionary else chunk.data_page_offset
    return start


def coalesced(ranges: Sequence[Range], max_waste: float = MAX_WASTE) -> list[Range]:
    """Fewer ranges that cover the given ones: the smallest gaps are filled first, within the share that may be wasted.

    >>> coalesced([(0, 100), (104, 200), (240, 300)])
    [(0, 200), (240, 300)]
    """
    ranges = sorted(ranges)
    allowed = max_waste * sum(end - start for start, end in ranges)
    gaps = sorted((ranges[at + 1][0] - ranges[at][1], at) for at in range(len(ranges) - 1))
    filled: set[int] = set()
    for gap, at in gaps:
        allowed -= max(gap, 0)
        if allowed < 0:
            break
        filled.add(at)
    merged: list[Range] = []
    for number, (start, end) in enumerate(ranges):
        if number - 1 in filled:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def cut(ranges: Sequence[Range], max_bytes: int = MAX_RANGE_BYTES) -> list[Range]:
    """The same bytes in ranges of at most so many.

    >>> cut([(0, 5), (7, 8)], max_bytes=2)
    [(0, 2), (2, 4), (4, 5), (7, 8)]
    """
    return [(at, min(at + max_bytes, end)) for start, end in ranges for at in range(start, end, max_bytes)]


def ranges_to_fetch(
    metadata: pq.FileMetaData, row_group: int, columns: Sequence[str], size_bytes: int, what: str
) -> list[Range]:
    """What is fetched of a row group, by place; SourceError where the footer names bytes that the file cannot have."""
    chunks = chunk_ranges(metadata.row_group(row_group), columns)
    data_end = size_bytes - 8 - metadata.serialized_size
    ends = [0, *(end for _, end in chunks)]
    if any(start < before or end < start or end > data_end for (start, end), before in zip(chunks, ends, strict=False)):
        raise SourceError(
            f"{what}: expected the column chunks of row group {row_group:,} one after another within"
            f" {data_end:,} bytes, found {chunks}. The footer is damaged; the file must be written again."
        )
    return cut(coalesced([chunk for chunk in chunks if chunk[0] < chunk[1]]))


class SparseFile(io.RawIOBase):
    """A file of which some ranges are there; reading any other byte is an OSError."""

    def __init__(self, size_bytes: int, fetched: Sequence[tuple[Range, bytes]]) -> None:
        super().__init__()
        self._size = size_bytes
        self._fetched = sorted(fetched, key=lambda part: part[0])
        self._at = 0

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def tell(self) -> int:
        """The place of the next byte."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to a place."""
        self._at = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence] + offset
        return self._at

    def read(self, size: int = -1) -> bytes | memoryview:
        """The next bytes, as many as asked and there are until the file's end; not copied where they are together."""
        start = self._at
        self._at = end = max(start, self._size if size < 0 else min(start + size, self._size))
        parts: list[memoryview] = []
        for (first, last), content in self._fetched:
            if first <= start < last and start < end:
                parts.append(memoryview(content)[start - first : end - first])
                start = min(end, last)
        if start < end:
            raise OSError(f"a decoder that asks for bytes {start:,} to {end:,}, which no chosen column has")
        return parts[0] if len(parts) == 1 else b"".join(parts)


def decoded(metadata: pq.FileMetaData, file: SparseFile, row_group: int, columns: Sequence[str]) -> pa.Table:
    """The columns of one row group; ArrowException or OSError for bytes that are no such columns."""
    source = pa.PythonFile(file, mode="r")
    with pq.ParquetFile(source, metadata=metadata, page_checksum_verification=True, pre_buffer=False) as parquet:
        # One thread: a file in Python has one place, and the interpreter is the same for all.
        return parquet.read_row_group(row_group, columns=list(columns), use_threads=False)
