"""What a unit's filters removed, judged from the stored rows, the removed ones and the recipe alone."""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pipeline_assets.row_filters import FILTERED_NAME
from pipeline_assets.sampled import TOTALS_NAME, VALUES_NAME
from pipeline_assets.schemas import ROWS_NAME
from pipeline_assets.stripes import Stage
from resources.artifact_store import ArtifactRef

LOOKS_AT = {
    "dumps": "dump",
    "languages": "language",
    "min_language_score": "language_score",
    "min_score": "score",
    "min_int_score": "int_score",
}
NOT_STORED = "int_score"  # of the rows that are used


def num_filtered(stage: Stage, unit: ArtifactRef) -> int:
    """Rows of the unit that are stored as removed by a filter."""
    return stage.table(unit, FILTERED_NAME, ["row"]).num_rows if _limits(stage, unit) else 0


def num_excluded(unit: ArtifactRef) -> int:
    """Rows of the unit's row groups that were not read."""
    return sum(group["rows"] for group in unit.counts.get("row_groups_excluded", ()))


def num_looked_at(stage: Stage, unit: ArtifactRef) -> int:
    """Documents that the unit's counts of text lengths come to."""
    values = stage.table(unit, VALUES_NAME, ["column", "documents"])
    return int(
        pc.sum(values.filter(pc.equal(values.column("column"), "bytes")).column("documents"), min_count=0).as_py()
    )


def filter_violations(stage: Stage, unit: ArtifactRef) -> list[str]:
    """A line for each way in which the unit's rows are not those that pass the recipe's filters of its pool."""
    limits = _limits(stage, unit)
    if not limits:
        return []
    stored = [LOOKS_AT[name] for name in limits if LOOKS_AT[name] != NOT_STORED]
    used = stage.table(unit, ROWS_NAME, ["row_group", "row", *stored])
    removed = stage.table(unit, FILTERED_NAME)
    return [
        f"{unit.unit}: {line}"
        for line in (
            *_used_though_failing(used, limits),
            *_wrong_reasons(removed, limits),
            *_wrong_counts(unit, removed, limits),
            *_twice(used, removed),
            *_unproven(stage.open(unit)[1].inputs["row_groups"], unit, used, removed, limits),
            *_int_scores_used_though_failing(stage, unit, removed, limits),
        )
    ]


def _limits(stage: Stage, unit: ArtifactRef) -> Mapping[str, Any]:
    filters = stage.recipe.reading.filters.get(unit.counts["pool"])
    return {} if filters is None else {name: limit for name, limit in filters if limit is not None}


def _fails(values: pa.ChunkedArray, limit: Any) -> npt.NDArray[np.bool_]:
    """bool[n]; a null is no name, and as NaN at least no number."""
    if isinstance(limit, tuple):
        return np.array([name not in limit for name in values.to_pylist()], np.bool_)
    return ~(np.asarray(values.cast(pa.float64()).fill_null(np.nan)) >= limit)


def _used_though_failing(used: pa.Table, limits: Mapping[str, Any]) -> list[str]:
    failing = {
        name: _fails(used.column(LOOKS_AT[name]), limit)
        for name, limit in limits.items()
        if LOOKS_AT[name] in used.column_names
    }
    return [
        f"expected no row that fails {name}, found {rows.sum():,} used" for name, rows in failing.items() if rows.any()
    ]


def _wrong_reasons(removed: pa.Table, limits: Mapping[str, Any]) -> list[str]:
    expected = np.full(removed.num_rows, "nothing", dtype=object)
    for name in reversed(limits):
        expected[_fails(removed.column(LOOKS_AT[name]), limits[name])] = name
    found = np.array(removed.column("filter").to_pylist(), dtype=object)
    wrong = np.flatnonzero(expected != found)
    rows = removed.take(pa.array(wrong)).select(["row_group", "row"]).to_pylist()
    return [
        f"row {row['row']:,} of row group {row['row_group']:,}: expected to fail {expected[at]}, found removed by"
        f" {found[at]}"
        for row, at in zip(rows, wrong.tolist(), strict=True)
    ]


def _wrong_counts(unit: ArtifactRef, removed: pa.Table, limits: Mapping[str, Any]) -> list[str]:
    found = removed.column("filter").to_pylist()
    stated = {name: unit.counts["filters"][name]["removed_documents"] for name in limits}
    return [
        f"expected {stated[name]:,} rows removed by {name}, found {found.count(name):,}"
        for name in limits
        if stated[name] != found.count(name)
    ]


def _twice(used: pa.Table, removed: pa.Table) -> list[str]:
    columns = ["row_group", "row"]
    rows = pa.concat_tables([used.select(columns), removed.select(columns)])
    distinct = rows.group_by(columns).aggregate([]).num_rows
    return [f"expected each row once, found {rows.num_rows - distinct:,} twice"] if distinct != rows.num_rows else []


def _unproven(
    row_groups: Collection[int], unit: ArtifactRef, used: pa.Table, removed: pa.Table, limits: Mapping[str, Any]
) -> list[str]:
    read = {group for table in (used, removed) for group in table.column("row_group").unique().to_pylist()}
    return [
        f"row group {group['row_group']:,}: expected it read, or statistics by which no row passes {group['filter']},"
        f" found {group['smallest']} to {group['largest']}"
        for group in unit.counts["row_groups_excluded"]
        if group["row_group"] not in row_groups
        or group["row_group"] in read
        or _may_hold_a_row(group, limits[group["filter"]])
    ]


def _may_hold_a_row(group: Mapping[str, Any], limit: Any) -> bool:
    if group["smallest"] is None and group["largest"] is None:
        return False
    if isinstance(limit, tuple):
        return any(group["smallest"] <= name <= group["largest"] for name in limit)
    return not float(group["largest"]) < limit


def _int_scores_used_though_failing(
    stage: Stage, unit: ArtifactRef, removed: pa.Table, limits: Mapping[str, Any]
) -> list[str]:
    """Those of used rows are not stored: all rows' counts less those of the removed ones are theirs."""
    if "min_int_score" not in limits:
        return []
    values = stage.table(unit, VALUES_NAME).to_pylist()
    (total,) = [row for row in stage.table(unit, TOTALS_NAME).to_pylist() if row["column"] == NOT_STORED]
    failing = [
        row["documents"]
        for row in values
        if row["column"] == NOT_STORED and not row["value"] >= limits["min_int_score"]
    ]
    read = sum(failing) + num_looked_at(stage, unit) - total["with_value"]
    found = int(_fails(removed.column(NOT_STORED), limits["min_int_score"]).sum())
    return [f"expected {read:,} removed rows that fail min_int_score, found {found:,}"] if read != found else []
