"""source, filtered: which rows of a pool are used, by what the source says of them.

In: tables as read, and the recipe's filters by pool. Out: the rows that pass, what was looked at of each usable row,
and each row that failed with the filter that it failed. Promise: nothing is left out uncounted: a row that fails is
stored with what it failed by, and a row group that is not read with the statistics that prove that no row would pass.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline_assets.recipe import Recipe
from pipeline_assets.schemas import FilteredRows, arrow_schema
from pipeline_assets.transforms.arrays import I64
from pipeline_assets.transforms.filters import FILTERS, PASSED, Limit, filter_that_excludes, first_failures
from pipeline_assets.transforms.rows import MEASURED_COLUMNS, OPTIONAL_COLUMNS, RowStats, clean_rows, measured_columns
from pipeline_assets.transforms.sampled import LENGTHS, text_lengths
from resources.artifact_store import ArtifactRef
from resources.row_group_source import TEXT_COLUMN, SourceFile
from training_io.errors import SourceError

READ_COLUMNS = (TEXT_COLUMN, *OPTIONAL_COLUMNS, *MEASURED_COLUMNS)
FILTERED_NAME = "filtered_rows.parquet"
LOOKED_AT = pa.schema(
    [(name, kind) for name, kind in (OPTIONAL_COLUMNS | MEASURED_COLUMNS).items() if name in FILTERS.values()]
    + [(name, pa.int64()) for name in LENGTHS]
)
"""What filters and counts look at of a usable row."""

Limits = Mapping[str, Limit]


def limits_of(recipe: Recipe, pool: str) -> Limits:
    """The filters of a pool, by name; none where the recipe has none for it."""
    return recipe.reading.filters[pool].limits if pool in recipe.reading.filters else {}


def check_filtered_columns(files: Sequence[SourceFile], recipe: Recipe) -> None:
    """SourceError for the first file that lacks a column which a filter of its pool looks at."""
    for file in files:
        wanted = [FILTERS[name] for name in limits_of(recipe, file.pool)]
        missing = [name for name in wanted if file.columns.count(name) != 1]
        if missing:
            raise SourceError(
                f"reading.filters.{file.pool}: expected one column each of {', '.join(wanted)} in every file, found"
                f" {', '.join(missing)} missing or twice in {file.file}, whose columns are {', '.join(file.columns)}."
                " Take the filter out of the recipe, or leave the file out with the glob of its pool."
            )


@dataclass(frozen=True, kw_only=True)
class SiftedRows:
    """One row group: the rows that pass, what was looked at of each usable row, the rows that a filter removed."""

    rows: pa.Table
    stats: RowStats
    looked_at: pa.Table
    filtered: pa.Table


def sift_rows(table: pa.Table, limits: Limits, *, pool: str, file: str, row_group: int) -> SiftedRows:
    """Clean a table as read, look at it, and filter it; `stats` counts the rows and texts that pass as used."""
    rows, stats = clean_rows(table, pool=pool, file=file, row_group=row_group)
    measured = measured_columns(table, np.asarray(rows.column("row"), np.int64))
    given = {name: rows.column(name).combine_chunks() for name in LOOKED_AT.names if name in OPTIONAL_COLUMNS}
    columns = {**given, **measured, **text_lengths(rows.column("text"))}
    looked_at = pa.table({name: columns[name] for name in LOOKED_AT.names}, schema=LOOKED_AT)
    if not limits:
        empty = arrow_schema(FilteredRows).empty_table()
        return SiftedRows(rows=rows, stats=stats, looked_at=looked_at, filtered=empty)
    failures = first_failures(columns, limits)
    is_used = failures == PASSED
    used_bytes = int(np.asarray(looked_at.column("bytes"))[is_used].sum())
    return SiftedRows(
        rows=rows.filter(pa.array(is_used)),
        stats=replace(stats, rows_used=int(is_used.sum()), text_bytes=used_bytes),
        looked_at=looked_at,
        filtered=_filtered(rows, looked_at, failures),
    )


def _filtered(rows: pa.Table, looked_at: pa.Table, failures: I64) -> pa.Table:
    columns = {
        **{name: rows.column(name) for name in ("row_group", "row")},
        "filter": pa.array(list(FILTERS)).take(pa.array(np.maximum(failures, 0))),
        "text_bytes": looked_at.column("bytes"),
        **{name: looked_at.column(name) for name in FILTERS.values()},
    }
    table = pa.table(columns).select(arrow_schema(FilteredRows).names)
    return table.filter(pa.array(failures != PASSED)).cast(arrow_schema(FilteredRows))


def split_row_groups(
    file: SourceFile, row_groups: Sequence[int], limits: Limits
) -> tuple[list[int], list[dict[str, Any]]]:
    """The row groups to read, and those of which the footer's statistics prove that no row passes, with the proof."""
    wanted, excluded = [], []
    for number in row_groups:
        facts = file.row_groups[number]
        name = filter_that_excludes(facts.bounds, limits)
        if name is None:
            wanted.append(number)
        else:
            smallest, largest = facts.bounds[FILTERS[name]]
            proof = {"smallest": _written(smallest), "largest": _written(largest)}
            excluded.append({"row_group": number, "rows": facts.num_rows, "filter": name, **proof})
    return wanted, excluded


def _written(bound: Any) -> str | None:
    """A bound as JSON can hold it, which has no infinity."""
    return None if bound is None else str(bound)


def rows_left_out_by_filters(parts: Sequence[ArtifactRef]) -> dict[str, int]:
    """Rows that failed a filter, and rows of row groups that no filter let be read, of some units."""
    filtered = [effect["removed_documents"] for part in parts for effect in part.counts.get("filters", {}).values()]
    excluded = [group["rows"] for part in parts for group in part.counts.get("row_groups_excluded", ())]
    return {"rows_filtered": sum(filtered), "rows_excluded": sum(excluded)}
