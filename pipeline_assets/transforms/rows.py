"""Rows of a source table -> rows of ours, under stated rules.

In: one Arrow table as read, and where it was read from. Out: the rows that are used, and counts of everything that was
not, or that is worth knowing. A row is left out when its text is null, empty, or not valid UTF-8; the text of every
other row is kept byte for byte: NUL bytes, byte-order marks and CR LF line ends stay and are counted. Other columns
stop no run: a value of theirs that cannot be read as ours, or is not valid UTF-8, becomes null and is counted.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

OPTIONAL_COLUMNS = {
    "id": pa.string(),
    "dump": pa.string(),
    "url": pa.string(),
    "language": pa.string(),
    "language_score": pa.float64(),
    "score": pa.float64(),
}
MEASURED_COLUMNS = {"int_score": pa.int32()}  # looked at while rows are read, and not kept
UNREADABLE = (pa.ArrowInvalid, pa.ArrowNotImplementedError)  # of a cast: for this value, for this type


@dataclass(frozen=True, kw_only=True)
class RowStats:
    """What happened to the rows of one read."""

    rows_read: int
    rows_used: int
    null_text: int
    empty_text: int
    invalid_utf8: int
    with_nul: int
    with_byte_order_mark: int
    with_crlf: int
    text_bytes: int
    invalid_values: int  # in other columns than the text, of the rows used


def text_doc_ids(texts: pa.Array) -> pa.Array:
    """SHA-256 of each text's UTF-8 bytes: binary[n], 32 bytes each."""
    digests = [hashlib.sha256(text.as_buffer()).digest() for text in texts.cast(pa.large_binary())]
    return pa.array(digests, pa.binary())


def doc_id_matrix(doc_ids: pa.Array | pa.ChunkedArray) -> npt.NDArray[np.uint8]:
    """binary[n] of 32 bytes each -> uint8[n, 32]."""
    fixed = doc_ids.cast(pa.binary(32))
    chunks = fixed.chunks if isinstance(fixed, pa.ChunkedArray) else [fixed]
    parts = [np.frombuffer(chunk.buffers()[1], "V32", len(chunk), 32 * chunk.offset) for chunk in chunks if len(chunk)]
    return np.concatenate([np.empty(0, "V32"), *parts]).view(np.uint8).reshape(-1, 32)


def doc_id_array(matrix: npt.NDArray[np.uint8]) -> pa.Array:
    """uint8[n, 32] -> binary[n]."""
    fixed = pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(32), len(matrix), [None, pa.py_buffer(np.ascontiguousarray(matrix))]
    )
    return fixed.cast(pa.binary())


def clean_rows(table: pa.Table, *, pool: str, file: str, row_group: int) -> tuple[pa.Table, RowStats]:
    """The usable rows of one row group with their coordinate, and what was counted.

    `table` has a text column of any string-like or null type, and any of OPTIONAL_COLUMNS; absent ones become null.
    """
    as_bytes = _one_array(table.column("text"), pa.large_binary())
    is_null = np.asarray(as_bytes.is_null())
    lengths = np.asarray(pc.fill_null(pc.binary_length(as_bytes), 0))
    is_empty = ~is_null & (lengths == 0)
    is_invalid = _invalid_utf8(as_bytes)
    used = ~(is_null | is_empty | is_invalid)
    rows = np.flatnonzero(used)
    texts = as_bytes.take(pa.array(rows)).cast(pa.large_string())
    columns: dict[str, pa.Array] = {
        "doc_id": text_doc_ids(texts),
        "text": texts,
        "pool": pa.array([pool] * len(rows), pa.string()),
        "file": pa.array([file] * len(rows), pa.string()),
        "row_group": pa.array(np.full(len(rows), row_group, np.int32)),
        "row": pa.array(rows.astype(np.int32)),
    }
    invalid_values = 0
    for name, kind in OPTIONAL_COLUMNS.items():
        values, is_lost = _optional(_column_of(table, name), kind)
        columns[name] = values.take(pa.array(rows))
        invalid_values += int(is_lost[rows].sum())
    stats = RowStats(
        rows_read=table.num_rows,
        rows_used=len(rows),
        null_text=int(is_null.sum()),
        empty_text=int(is_empty.sum()),
        invalid_utf8=int(is_invalid.sum()),
        with_nul=_count_containing(texts, "\0"),
        with_byte_order_mark=int(pc.sum(pc.starts_with(texts, "\ufeff"), min_count=0).as_py()),
        with_crlf=_count_containing(texts, "\r\n"),
        text_bytes=int(lengths[rows].sum()),
        invalid_values=invalid_values,
    )
    return pa.table(columns), stats


def measured_columns(table: pa.Table, rows: npt.NDArray[np.int64]) -> dict[str, pa.Array]:
    """Some rows' values of MEASURED_COLUMNS in a table as read; absent ones and those that cannot be read are null."""
    return {
        name: _optional(_column_of(table, name), kind)[0].take(pa.array(rows))
        for name, kind in MEASURED_COLUMNS.items()
    }


def _column_of(table: pa.Table, name: str) -> pa.ChunkedArray:
    return table.column(name) if name in table.column_names else pa.chunked_array([pa.nulls(table.num_rows)])


def _optional(column: pa.ChunkedArray, kind: pa.DataType) -> tuple[pa.Array, npt.NDArray[np.bool_]]:
    """The column as ours, and which values became null because they cannot be read so."""
    column = _decoded(column)
    try:
        values = _one_array(column, kind)
    except UNREADABLE:
        values = pa.array([_readable(value, kind) for value in column], kind)
    if pa.types.is_string(kind):
        is_invalid = _invalid_utf8(values.cast(pa.binary()).cast(pa.large_binary()))
        values = pc.if_else(pa.array(is_invalid), None, values)
    return values, np.asarray(column.is_valid()) & np.asarray(values.is_null())


def _readable(value: pa.Scalar, kind: pa.DataType) -> pa.Scalar | None:
    try:
        return value.cast(kind)
    except UNREADABLE:
        return None


def _decoded(column: pa.ChunkedArray) -> pa.ChunkedArray:
    return column.cast(column.type.value_type) if pa.types.is_dictionary(column.type) else column


def _one_array(column: pa.ChunkedArray, kind: pa.DataType) -> pa.Array:
    column = _decoded(column)
    if pa.types.is_string(column.type) and kind == pa.large_binary():
        # string -> large_binary has no direct cast; neither step checks or changes the bytes
        column = column.cast(pa.binary())
    cast = column.cast(kind)
    return cast.combine_chunks() if cast.num_chunks != 1 else cast.chunk(0)


def _invalid_utf8(texts: pa.Array) -> npt.NDArray[np.bool_]:
    invalid = np.zeros(len(texts), dtype=np.bool_)
    try:
        texts.cast(pa.large_string())
    except pa.ArrowInvalid:
        for row, text in enumerate(texts):
            invalid[row] = text.is_valid and not _is_utf8(bytes(text.as_buffer()))
    return invalid


def _is_utf8(value: bytes) -> bool:
    try:
        value.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _count_containing(texts: pa.Array, pattern: str) -> int:
    """Texts that contain the pattern; its first character is rare, and found faster where texts have no borders."""
    if not len(texts) or not (np.frombuffer(texts.buffers()[2], np.uint8) == ord(pattern[0])).any():
        return 0
    return int(pc.sum(pc.match_substring(texts, pattern), min_count=0).as_py())


def first_of_each(
    order: npt.NDArray[np.int64], doc_ids: npt.NDArray[np.uint8], groups: Sequence[str | None], limit: int
) -> list[int]:
    """The first `limit` distinct documents of each group, as row numbers, when rows are taken in `order`."""
    seen: set[bytes] = set()
    taken: dict[str | None, int] = {}
    chosen = []
    for row in order.tolist():
        doc_id, group = doc_ids[row].tobytes(), groups[row]
        if doc_id not in seen and taken.get(group, 0) < limit:
            seen.add(doc_id)
            taken[group] = taken.get(group, 0) + 1
            chosen.append(row)
    return chosen
