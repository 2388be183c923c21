"""A row group sifted: a table as read in; the rows that are used, what was looked at, and the rows that failed out.

Promise: every usable row is in what was looked at, and either used or filtered, by the first filter that it fails.
Cost: what cleaning costs (a SHA-256 a text), and a few passes over narrow columns.
"""

from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from pipeline_assets.transforms.arrays import I64
from pipeline_assets.transforms.filters import FILTERS, PASSED, Limits, first_failures
from pipeline_assets.transforms.rows import MEASURED_COLUMNS, OPTIONAL_COLUMNS, RowStats, clean_rows, measured_columns
from pipeline_assets.transforms.sampled import LENGTHS, text_lengths

LOOKED_AT = pa.schema(
    [(name, kind) for name, kind in (OPTIONAL_COLUMNS | MEASURED_COLUMNS).items() if name in FILTERS.values()]
    + [(name, pa.int64()) for name in LENGTHS]
)
"""What filters and counts look at of a usable row."""


@dataclass(frozen=True, kw_only=True)
class SiftedRows:
    """One row group: the rows that pass, what was looked at of each usable row, the rows that a filter removed."""

    rows: pa.Table
    stats: RowStats
    looked_at: pa.Table
    filtered: pa.Table


def sift_rows(
    table: pa.Table, limits: Limits, removed: pa.Schema, *, pool: str, file: str, row_group: int
) -> SiftedRows:
    """Clean a table as read, look at it, and filter it; `stats` counts the rows and texts that pass as used.

    `removed` is the schema of `filtered`: row_group, row, filter, text_bytes, and what filters look at, in any order.
    """
    rows, stats = clean_rows(table, pool=pool, file=file, row_group=row_group)
    measured = measured_columns(table, np.asarray(rows.column("row"), np.int64))
    given = {name: rows.column(name).combine_chunks() for name in LOOKED_AT.names if name in OPTIONAL_COLUMNS}
    columns = {**given, **measured, **text_lengths(rows.column("text"))}
    looked_at = pa.table({name: columns[name] for name in LOOKED_AT.names}, schema=LOOKED_AT)
    if not limits:
        return SiftedRows(rows=rows, stats=stats, looked_at=looked_at, filtered=removed.empty_table())
    failures = first_failures(columns, limits)
    is_used = failures == PASSED
    used_bytes = int(np.asarray(looked_at.column("bytes"))[is_used].sum())
    return SiftedRows(
        rows=rows.filter(pa.array(is_used)),
        stats=replace(stats, rows_used=int(is_used.sum()), text_bytes=used_bytes),
        looked_at=looked_at,
        filtered=_filtered(rows, looked_at, failures, removed),
    )


def _filtered(rows: pa.Table, looked_at: pa.Table, failures: I64, schema: pa.Schema) -> pa.Table:
    columns = {
        **{name: rows.column(name) for name in ("row_group", "row")},
        "filter": pa.array(list(FILTERS)).take(pa.array(np.maximum(failures, 0))),
        "text_bytes": looked_at.column("bytes"),
        **{name: looked_at.column(name) for name in FILTERS.values()},
    }
    return pa.table(columns).select(schema.names).filter(pa.array(failures != PASSED)).cast(schema)
