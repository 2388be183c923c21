"""Parquet files as a source of row groups.

In: pools, each a local folder and a glob. Out: the files with their footers' facts, a fingerprint of the listing, and
one narrow table a row group. The promise: only the needed columns of the selected row groups are read; a file that is
missing, cut short, corrupt or without a text column is one error that names it. The cost: one footer read a file.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from training_io.errors import SourceError
from training_io.hashing import identity_of

TEXT_COLUMN = "text"
PARQUET_MAGIC = b"PAR1"


@dataclass(frozen=True, kw_only=True)
class RowGroupFacts:
    """What the footer says of one row group."""

    num_rows: int
    text_bytes: int  # uncompressed size of the text column


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """One Parquet file of a pool and what its footer says."""

    pool: str
    file: str  # relative to the pool, with forward slashes
    location: Path
    size_bytes: int
    footer_sha256: str
    columns: tuple[str, ...]
    row_groups: tuple[RowGroupFacts, ...]

    @property
    def provenance(self) -> dict[str, str | int]:
        """What identifies the file's content: its name, size and footer."""
        return {"file": self.file, "bytes": self.size_bytes, "footer_sha256": self.footer_sha256}


@dataclass(frozen=True, kw_only=True)
class PoolFolder:
    """A pool's files in a local folder."""

    name: str
    folder: Path
    glob: str


def list_files(pools: Sequence[PoolFolder]) -> list[SourceFile]:
    """Every file of every pool, pools in the given order, files by name; SourceError when a pool has none."""
    return [_open_footer(pool.name, path, pool.folder) for pool in pools for path in _paths(pool)]


def _paths(pool: PoolFolder) -> list[Path]:
    if not pool.folder.is_dir():
        raise SourceError(
            f"pool {pool.name}: expected a folder of Parquet files at {pool.folder}, found none."
            " Put the files there or mend source.pools in the recipe."
        )
    try:
        # By name, as source coordinates are: paths sort by their parts, which is another order ("a/b" and "a-b").
        found = sorted(pool.folder.glob(pool.glob), key=Path.as_posix)
    except (ValueError, NotImplementedError) as error:
        raise SourceError(
            f"pool {pool.name}: expected a glob relative to {pool.folder}, such as **/*.parquet, found {pool.glob!r}"
            f" ({error}). Mend the glob in the recipe."
        ) from error
    paths = [path for path in found if not path.is_dir()]
    if not paths:
        raise SourceError(
            f"pool {pool.name}: expected at least one file matching {pool.glob!r} in {pool.folder}, found none."
            " Put the files there or mend the glob in the recipe."
        )
    unreadable = [path for path in paths if not path.is_file()]
    links = [path for path in sorted(pool.folder.rglob("*")) if path.is_symlink() and path.is_dir()]
    if unreadable or links:
        raise SourceError(
            f"pool {pool.name}: expected files and plain folders in {pool.folder}, found"
            f" {[*unreadable, *links][0]}, a link to nothing or to a folder, or no file. Its rows would be missing:"
            " put the files there, or make the folder a pool of its own."
        )
    unnamed = [path for path in paths if not _is_utf8(path.relative_to(pool.folder).as_posix())]
    if unnamed:
        raise SourceError(
            f"pool {pool.name}: expected file names in UTF-8 in {pool.folder}, found {unnamed[0].name!a}."
            " Rename the file."
        )
    return paths


def _is_utf8(name: str) -> bool:
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def listing_fingerprint(files: Sequence[SourceFile]) -> str:
    """SHA-256 over pools, names, sizes and footers of all files: the data version of a local source."""
    return identity_of([{"pool": file.pool, **file.provenance} for file in files])


def _open_footer(pool: str, path: Path, folder: Path) -> SourceFile:
    try:
        size = path.stat().st_size
        footer_sha256 = _hash_footer(path, size)
        metadata = pq.read_metadata(path)
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
        pool=pool,
        file=path.relative_to(folder).as_posix(),
        location=path,
        size_bytes=size,
        footer_sha256=footer_sha256,
        columns=columns,
        row_groups=row_groups,
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
    return RowGroupFacts(num_rows=row_group.num_rows, text_bytes=text_bytes)


def _hash_footer(path: Path, size: int) -> str:
    with path.open("rb") as file:
        if size < 12:
            raise _corrupt(path, f"a Parquet file of at least 12 bytes, found {size:,}")
        file.seek(size - 8)
        tail = file.read(8)
        footer_bytes = int.from_bytes(tail[:4], "little")
        if tail[4:] != PARQUET_MAGIC or footer_bytes + 12 > size:
            raise _corrupt(path, f"the Parquet end mark {PARQUET_MAGIC!r}, found {tail[4:]!r}")
        file.seek(size - 8 - footer_bytes)
        return hashlib.sha256(file.read(footer_bytes)).hexdigest()


def _corrupt(path: Path, what: str) -> SourceError:
    return SourceError(
        f"{path}: expected {' '.join(what.split())}."
        " The file was cut short or damaged; fetch it again, or take it out of the folder."
    )


def read_row_groups(
    file: SourceFile, row_groups: Sequence[int], columns: Sequence[str]
) -> Iterator[tuple[int, pa.Table]]:
    """The selected row groups, one table each, with those of `columns` that the file has; SourceError if unreadable.

    A column that the file has twice is none: nothing says which of them is meant.
    """
    wanted = [name for name in columns if file.columns.count(name) == 1]
    try:
        size = file.location.stat().st_size
        if (size, _hash_footer(file.location, size)) != (file.size_bytes, file.footer_sha256):
            raise SourceError(
                f"{file.location}: expected the file of {file.size_bytes:,} bytes that was listed, found one of"
                f" {size:,} bytes or with another footer. It changed during the run; materialize raw_row_groups again."
            )
        with pq.ParquetFile(file.location, memory_map=True, page_checksum_verification=True) as parquet:
            for row_group in row_groups:
                yield row_group, parquet.read_row_group(row_group, columns=wanted)
    except (pa.ArrowException, OSError) as error:
        raise _corrupt(file.location, f"readable row groups, found {error}") from error


def read_reference_table(path: Path) -> pa.Table:
    """The text column of a Parquet file; SourceError when the file is unreadable or has none."""
    file = _open_footer("references", path, path.parent)
    tables = [table for _, table in read_row_groups(file, range(len(file.row_groups)), [TEXT_COLUMN])]
    return pa.concat_tables(tables) if tables else pa.table({TEXT_COLUMN: pa.array([], pa.string())})
