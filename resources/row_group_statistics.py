"""What a Parquet footer says of the values of a row group's columns, where the writer stated it.

In: the metadata of one row group. Out: the smallest and the largest value of each of some flat columns; (None, None)
where all values are null. A column that is nested, there twice or without statistics is left out: nothing is known.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow.parquet as pq

Bounds = Mapping[str, tuple[Any, Any]]


def column_bounds(row_group: pq.RowGroupMetaData, names: Sequence[str]) -> Bounds:
    """Bounds by column name, as Python values of the column's own type."""
    columns = [row_group.column(number) for number in range(row_group.num_columns)]
    paths = [column.path_in_schema for column in columns]
    found = {name: _bounds(columns[paths.index(name)], row_group.num_rows) for name in names if paths.count(name) == 1}
    return {name: bounds for name, bounds in found.items() if bounds is not None}


def _bounds(column: pq.ColumnChunkMetaData, num_rows: int) -> tuple[Any, Any] | None:
    statistics = column.statistics if column.is_stats_set else None
    if statistics is None:
        return None
    if statistics.has_null_count and statistics.null_count == num_rows:
        return None, None
    try:
        return (statistics.min, statistics.max) if statistics.has_min_max else None
    except UnicodeDecodeError:  # a bound that is no text is no bound of texts
        return None
