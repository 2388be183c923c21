"""Byte ranges of column chunks, against what pyarrow itself reads from a file that notes each byte asked of it."""

import io
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resources.ranges import (
    MAX_WASTE,
    SparseFile,
    chunk_ranges,
    coalesced,
    cut,
    decoded,
    ranges_to_fetch,
)
from training_io.errors import SourceError

COLUMNS = ["text", "url", "score"]


@st.composite
def disjoint_ranges(draw: st.DrawFn) -> list[tuple[int, int]]:
    steps = draw(st.lists(st.tuples(st.integers(0, 300), st.integers(1, 2_000)), max_size=20))
    ranges, at = [], 4
    for gap, length in steps:
        ranges.append((at + gap, at + gap + length))
        at += gap + length
    return ranges


def bytes_in(ranges: list[tuple[int, int]]) -> set[int]:
    return {at for start, end in ranges for at in range(start, end)}


@given(disjoint_ranges())
def test_coalesced_ranges_cover_the_chunks_once_and_little_else(ranges: list[tuple[int, int]]) -> None:
    merged = coalesced(ranges)
    wanted, fetched = bytes_in(ranges), bytes_in(merged)
    assert wanted <= fetched
    assert sum(end - start for start, end in merged) == len(fetched)
    assert len(fetched) <= (1 + MAX_WASTE) * len(wanted)
    assert {start for start, _ in merged} <= {start for start, _ in ranges}
    assert {end for _, end in merged} <= {end for _, end in ranges}


@given(disjoint_ranges(), st.floats(0, 1))
def test_no_further_gap_would_fit_into_the_share_that_may_be_wasted(
    ranges: list[tuple[int, int]], max_waste: float
) -> None:
    merged = coalesced(ranges, max_waste)
    wanted, fetched = len(bytes_in(ranges)), len(bytes_in(merged))
    left = [after[0] - before[1] for before, after in pairwise(merged)]
    assert all(fetched + gap > (1 + max_waste) * wanted for gap in left)


@given(disjoint_ranges(), st.integers(1, 500))
def test_cutting_keeps_every_byte_once(ranges: list[tuple[int, int]], max_bytes: int) -> None:
    parts = cut(ranges, max_bytes)
    assert [at for start, end in parts for at in range(start, end)] == sorted(bytes_in(ranges))
    assert all(0 < end - start <= max_bytes for start, end in parts)


@given(st.binary(max_size=60), st.data())
def test_a_whole_sparse_file_reads_as_a_file_in_memory(content: bytes, data: st.DataObject) -> None:
    borders = sorted({0, len(content), *data.draw(st.lists(st.integers(0, len(content)), max_size=4))})
    parts = [((a, b), content[a:b]) for a, b in pairwise(borders)]
    sparse, plain = SparseFile(len(content), parts), io.BytesIO(content)
    for place, size in data.draw(st.lists(st.tuples(st.integers(0, 70), st.integers(-1, 70)), max_size=5)):
        assert sparse.seek(place) == plain.seek(place)
        assert sparse.read(size) == plain.read(size)
        assert sparse.tell() == plain.tell()
    assert sparse.seek(0, io.SEEK_END) == len(content)


def test_a_byte_that_was_not_fetched_is_refused() -> None:
    sparse = SparseFile(100, [((10, 20), b"0123456789"), ((30, 40), b"abcdefghij")])
    sparse.seek(12)
    assert sparse.read(8) == b"23456789"
    for place, size in ((12, 9), (9, 1), (20, 1), (12, 20), (45, 1), (30, -1)):
        sparse.seek(place)
        with pytest.raises(OSError, match="which no chosen column has"):
            sparse.read(size)


class Noting(io.BytesIO):
    """A file that notes which bytes were read."""

    def __init__(self, content: bytes) -> None:
        super().__init__(content)
        self.read_bytes: set[int] = set()

    def read(self, size: int | None = -1) -> bytes:
        start = self.tell()
        content = super().read(size)
        self.read_bytes.update(range(start, start + len(content)))
        return content


def table_of(num_rows: int = 120) -> pa.Table:
    rows = range(num_rows)
    return pa.table(
        {
            "url": [f"https://example/{row}" for row in rows],
            "text": [f"text {row} " * 30 for row in rows],
            "nested": [[{"text": str(row)}] for row in rows],
            "score": [row / 3 for row in rows],
            "dump": [f"crawl-{row % 3}" for row in rows],
        }
    )


@pytest.mark.parametrize("compression", ["none", "snappy", "zstd"])
@pytest.mark.parametrize(
    "options", [{}, {"use_dictionary": False}, {"data_page_version": "2.0"}, {"data_page_size": 64}]
)
def test_the_ranges_are_the_bytes_that_a_reader_takes(
    tmp_path: Path, compression: str, options: dict[str, object]
) -> None:
    table = table_of()
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=50, compression=compression, **options)
    content = (tmp_path / "a.parquet").read_bytes()
    metadata = pq.read_metadata(tmp_path / "a.parquet")
    for row_group in range(3):
        file = Noting(content)
        with pq.ParquetFile(pa.PythonFile(file, mode="r"), metadata=metadata, pre_buffer=False) as parquet:
            parquet.read_row_group(row_group, columns=COLUMNS, use_threads=False)
        assert bytes_in(chunk_ranges(metadata.row_group(row_group), COLUMNS)) == file.read_bytes
        ranges = ranges_to_fetch(metadata, row_group, COLUMNS, len(content), "a.parquet")
        sparse = SparseFile(len(content), [((start, end), content[start:end]) for start, end in ranges])
        found = decoded(metadata, sparse, row_group, COLUMNS)
        assert found.select(COLUMNS).equals(table.slice(50 * row_group, 50).select(COLUMNS))


def test_a_decoder_that_wants_another_column_is_refused(tmp_path: Path) -> None:
    pq.write_table(table_of(), tmp_path / "a.parquet")
    content = (tmp_path / "a.parquet").read_bytes()
    metadata = pq.read_metadata(tmp_path / "a.parquet")
    ranges = ranges_to_fetch(metadata, 0, ["url"], len(content), "a.parquet")
    sparse = SparseFile(len(content), [((start, end), content[start:end]) for start, end in ranges])
    with pytest.raises(OSError, match="which no chosen column has"):
        decoded(metadata, sparse, 0, ["url", "dump"])


def test_a_footer_that_names_bytes_beyond_the_file_is_damaged(tmp_path: Path) -> None:
    pq.write_table(table_of(), tmp_path / "a.parquet")
    metadata = pq.read_metadata(tmp_path / "a.parquet")
    size = (tmp_path / "a.parquet").stat().st_size
    with pytest.raises(SourceError, match=r"a\.parquet: expected the column chunks of row group 0 one after another"):
        ranges_to_fetch(metadata, 0, COLUMNS, size // 2, "a.parquet")
