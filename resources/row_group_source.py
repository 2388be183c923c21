"""Parquet files as a source of row groups.

In: pools of files, wherever they are. Out: the files with their footers' facts, a fingerprint of the listing, and one
narrow table a row group. The promise: only the needed columns of the selected row groups are read, or fetched where
the file is elsewhere; a file that is missing, cut short, corrupt, changed or without a text column is one error that
names it. The cost: one footer read a file, kept in the store where it came over the network.
"""

import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from resources.listings import Listed, Pool, files_of
from resources.ranges import Range, SparseFile, decoded, ranges_to_fetch
from resources.readers import Network, RemoteFile, apart, open_reader, until
from resources.row_group_statistics import Bounds, column_bounds
from resources.web import Traffic
from training_io.errors import SourceError
from training_io.hashing import identity_of
from training_io.manifest import RUN_NAME

TEXT_COLUMN = "text"
BOUNDED_COLUMNS = ("dump", "language", "language_score", "score", "int_score")
PARQUET_MAGIC = b"PAR1"
FOOTER_VERSION = 1
FOOTER_NAME = "footer.bin"
FIRST_GUESS_BYTES = 65_536  # of a file's end: most footers are smaller
MAX_CONNECTIONS = 4  # to one file, and listings at once
MAX_BYTES_AHEAD = 64_000_000  # fetched and not yet decoded, where a row group is not larger by itself


@dataclass(frozen=True, kw_only=True)
class RowGroupFacts:
    """What the footer says of one row group."""

    num_rows: int
    text_bytes: int  # uncompressed size of the text column
    bounds: Bounds = field(default_factory=dict)  # of BOUNDED_COLUMNS


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """One Parquet file of a pool and what its footer says."""

    pool: str
    file: str  # relative to the pool, with forward slashes
    location: Path | RemoteFile
    size_bytes: int
    footer_sha256: str
    columns: tuple[str, ...]
    row_groups: tuple[RowGroupFacts, ...]
    content: str = ""  # what the listing calls its bytes; nothing for a local folder's
    commit: str = ""  # of the Hub's files: where they were found, not what they are

    @property
    def provenance(self) -> dict[str, str | int]:
        """What identifies the file's content: its name, size and footer, and its hash or ETag where one is listed."""
        known = {"content": self.content} if self.content else {}
        return {"file": self.file, "bytes": self.size_bytes, "footer_sha256": self.footer_sha256, **known}


def list_files(pools: Sequence[Pool], network: Network) -> list[SourceFile]:
    """Every file of every pool, pools in the given order, files by name; SourceError when a pool has none."""
    return list_with_cost(pools, network)[0]


@dataclass(frozen=True, kw_only=True)
class ListingCost:
    """What listing asked of the network: for names, sizes and content hashes, and for footers that were not known."""

    names: Traffic
    footers: Traffic


def list_with_cost(pools: Sequence[Pool], network: Network) -> tuple[list[SourceFile], ListingCost]:
    """What `list_files` gives, and what it cost."""
    for_names, for_footers = apart(network), apart(network)
    listed = [file for pool in pools for file in files_of(pool, for_names)]
    with ThreadPoolExecutor(MAX_CONNECTIONS) as connections:
        files = list(connections.map(lambda file: _described(file, for_footers), listed))
    return files, ListingCost(names=for_names.traffic, footers=for_footers.traffic)


def listing_fingerprint(files: Sequence[SourceFile]) -> str:
    """SHA-256 over pools, names, sizes and footers of all files: the data version of a local source."""
    return identity_of([{"pool": file.pool, **file.provenance} for file in files])


def _described(listed: Listed, network: Network) -> SourceFile:
    """The file with what its footer says."""
    if isinstance(listed.location, Path):
        return _described_locally(listed)
    file = listed.location
    return _with_footer(listed, lambda: (file.size_bytes, _kept_footer(file, network)))


def _described_locally(listed: Listed) -> SourceFile:
    path = listed.location
    assert isinstance(path, Path)
    return _with_footer(listed, lambda: (path.stat().st_size, _local_footer(path)))


def _with_footer(listed: Listed, read: Callable[[], tuple[int, bytes]]) -> SourceFile:
    path = listed.location
    try:
        size, footer = read()
        metadata = pq.read_metadata(pa.BufferReader(footer))
        schema = metadata.schema.to_arrow_schema()
        row_groups = tuple(_facts(metadata.row_group(number)) for number in range(metadata.num_row_groups))
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise _corrupt(path, f"a readable Parquet footer, found {error}") from error
    columns = tuple(schema.names)
    if columns.count(TEXT_COLUMN) != 1:
        raise SourceError(
            f"{path}: expected one column {TEXT_COLUMN!r}, found {', '.join(columns) or 'no columns'}."
            " Rename the column that holds the text, or leave the file out with the glob of its pool."
        )
    if not _holds_text(schema.field(TEXT_COLUMN).type):
        raise SourceError(
            f"{path}: expected strings in the column {TEXT_COLUMN!r}, found {schema.field(TEXT_COLUMN).type}."
            " Write the texts as strings, or leave the file out with the glob of its pool."
        )
    return SourceFile(
        pool=listed.pool,
        file=listed.file,
        location=path,
        size_bytes=size,
        footer_sha256=_footer_sha256(footer),
        columns=columns,
        row_groups=row_groups,
        content=listed.content,
        commit=listed.commit,
    )


def _holds_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    tests = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, pa.types.is_null)
    raw = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view)
    return any(test(kind) for test in (*tests, *raw))


def _facts(row_group: pq.RowGroupMetaData) -> RowGroupFacts:
    text_bytes = sum(
        column.total_uncompressed_size
        for column in (row_group.column(number) for number in range(row_group.num_columns))
        if column.path_in_schema == TEXT_COLUMN
    )
    return RowGroupFacts(
        num_rows=row_group.num_rows, text_bytes=text_bytes, bounds=column_bounds(row_group, BOUNDED_COLUMNS)
    )


def _local_footer(path: Path) -> bytes:
    with path.open("rb") as file:

        def read(start: int, end: int) -> bytes:
            file.seek(start)
            return file.read(end - start)

        return _read_footer(path, path.stat().st_size, read)


def _kept_footer(file: RemoteFile, network: Network) -> bytes:
    """The footer of a file that is elsewhere, from the store where it was read before; there is what it cost."""

    def write(folder: Path) -> dict[str, Any]:
        own = apart(network)
        (folder / FOOTER_NAME).write_bytes(_read_footer(file, file.size_bytes, open_reader(file, own).read))
        facts = {"place": file.place, "content": file.content, **cost_of(own.traffic)}
        (folder / RUN_NAME).write_text(json.dumps({"source": facts}))
        return {}

    ref = network.store.materialize(
        asset="source_footers",
        unit=identity_of(file.place)[:16],
        inputs={"file": file.place, "content": file.content, "bytes": file.size_bytes},
        parameters={},
        version=FOOTER_VERSION,
        write=write,
    )
    return (network.store.folder(ref) / FOOTER_NAME).read_bytes()


def _read_footer(what: Path | RemoteFile, size: int, read: Callable[[int, int], bytes]) -> bytes:
    """The footer with its length and the end mark after it."""
    if size < 12:
        raise _corrupt(what, f"a Parquet file of at least 12 bytes, found {size:,}")
    first = max(0, size - FIRST_GUESS_BYTES)
    end = read(first, size)
    footer_bytes = int.from_bytes(end[-8:-4], "little")
    if end[-4:] != PARQUET_MAGIC or footer_bytes + 12 > size:
        raise _corrupt(what, f"the Parquet end mark {PARQUET_MAGIC!r}, found {end[-4:]!r}")
    start = size - 8 - footer_bytes
    return end[start - first :] if start >= first else read(start, first) + end


def _footer_sha256(footer: bytes) -> str:
    return hashlib.sha256(footer[:-8]).hexdigest()


def _corrupt(what: Path | RemoteFile, expected: str) -> SourceError:
    return SourceError(
        f"{what}: expected {' '.join(expected.split())}."
        " The file was cut short or damaged; fetch it again, or take it out of the folder."
    )


def cost_of(traffic: Traffic) -> dict[str, int]:
    """What was asked for and came, as records say it."""
    return {"tries": traffic.num_tries, "requests": traffic.num_requests, "bytes_fetched": traffic.num_bytes}


@dataclass(frozen=True, kw_only=True)
class Fetched:
    """What came of one row group over the network: nothing for a local file.

    The ranges follow from the file alone, and each takes one try; what they took this time is the traffic.
    """

    row_group: int
    ranges: tuple[Range, ...] = ()
    traffic: Traffic = field(default_factory=Traffic)


def read_row_groups(
    file: SourceFile, row_groups: Sequence[int], columns: Sequence[str], network: Network
) -> Iterator[tuple[Fetched, pa.Table]]:
    """The selected row groups, one table each, with those of `columns` that the file has; SourceError if unreadable.

    A column that the file has twice is none: nothing says which of them is meant.
    """
    wanted = [name for name in columns if file.columns.count(name) == 1]
    if isinstance(file.location, Path):
        tables = _local_row_groups(file, row_groups, wanted)
    else:
        tables = _remote_row_groups(file, row_groups, wanted, network)
    try:
        yield from tables
    except (pa.ArrowException, OSError) as error:
        raise _corrupt(file.location, f"readable row groups, found {error}") from error


def _local_row_groups(
    file: SourceFile, row_groups: Sequence[int], columns: Sequence[str]
) -> Iterator[tuple[Fetched, pa.Table]]:
    assert isinstance(file.location, Path)
    size = file.location.stat().st_size
    if (size, _footer_sha256(_local_footer(file.location))) != (file.size_bytes, file.footer_sha256):
        raise SourceError(
            f"{file.location}: expected the file of {file.size_bytes:,} bytes that was listed, found one of"
            f" {size:,} bytes or with another footer. It changed during the run; materialize raw_row_groups again."
        )
    with pq.ParquetFile(file.location, memory_map=True, page_checksum_verification=True) as parquet:
        for row_group in row_groups:
            yield Fetched(row_group=row_group), parquet.read_row_group(row_group, columns=list(columns))


def _remote_row_groups(
    file: SourceFile, row_groups: Sequence[int], columns: Sequence[str], network: Network
) -> Iterator[tuple[Fetched, pa.Table]]:
    """Row groups ahead of the one that is decoded are fetched meanwhile, over a few connections."""
    assert not isinstance(file.location, Path)
    metadata = pq.read_metadata(pa.BufferReader(_kept_footer(file.location, network)))
    is_over = network.patience.is_over.part()
    wanted = [
        (row_group, tuple(ranges_to_fetch(metadata, row_group, columns, file.size_bytes, str(file.location))))
        for row_group in row_groups
    ]
    for fetched, parts in _fetched_ahead(file.location, wanted, until(network, is_over)):
        sparse = SparseFile(file.size_bytes, parts)
        yield fetched, decoded(metadata, sparse, fetched.row_group, columns)


Parts = list[tuple[Range, bytes]]
T = TypeVar("T")


def _fetched_ahead(
    file: RemoteFile, wanted: Sequence[tuple[int, tuple[Range, ...]]], network: Network
) -> Iterator[tuple[Fetched, Parts]]:
    """The ranges of each row group, in order: as many ahead as there are connections and memory for.

    When one has failed, or nobody wants more, the others' waits for their next try are over.
    """
    with ThreadPoolExecutor(MAX_CONNECTIONS) as connections:
        waiting: deque[tuple[int, Future[tuple[Fetched, Parts]]]] = deque()

        def the_first() -> tuple[Fetched, Parts]:
            _first_done([future for _, future in waiting])
            return waiting.popleft()[1].result()

        try:
            for row_group, ranges in wanted:
                num_bytes = sum(end - start for start, end in ranges)
                while waiting and (
                    len(waiting) >= MAX_CONNECTIONS or num_bytes + sum(size for size, _ in waiting) > MAX_BYTES_AHEAD
                ):
                    yield the_first()
                waiting.append((num_bytes, connections.submit(_fetch, file, row_group, ranges, apart(network))))
            while waiting:
                yield the_first()
        finally:
            network.patience.is_over.set()
            for _, future in waiting:
                future.cancel()


def _first_done(futures: Sequence[Future[T]]) -> None:
    """Wait for the first one; another's error is raised as soon as it is there."""
    while not futures[0].done():
        for future in futures:
            if future.done():
                future.result()
        wait([future for future in futures if not future.done()], return_when=FIRST_COMPLETED)


def _fetch(file: RemoteFile, row_group: int, ranges: tuple[Range, ...], network: Network) -> tuple[Fetched, Parts]:
    reader = open_reader(file, network)
    parts = [((start, end), reader.read(start, end)) for start, end in ranges]
    return Fetched(row_group=row_group, ranges=ranges, traffic=network.traffic), parts


def read_reference_table(path: Path) -> pa.Table:
    """The text column of a local Parquet file; SourceError when the file is unreadable or has none."""
    file = _described_locally(Listed(pool="references", file=path.name, location=path))
    try:
        parts = _local_row_groups(file, range(len(file.row_groups)), [TEXT_COLUMN])
        tables = [table for _, table in parts]
    except (pa.ArrowException, OSError) as error:
        raise _corrupt(path, f"readable row groups, found {error}") from error
    return pa.concat_tables(tables) if tables else pa.table({TEXT_COLUMN: pa.array([], pa.string())})
