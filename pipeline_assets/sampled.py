"""source, counted: what was sampled, as tables beside the rows.

In: what was looked at of a unit's usable rows. Out: documents and bytes by crawl, language, score and length; then
those of all units. A unit counts its own rows while it is read; sealing adds the units up. Promise: what is shown was
counted before the filters, in whole numbers and exact sums, whatever the stripes. Cost: a few passes over narrow
columns.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline_assets.recipe import Recipe
from pipeline_assets.row_filters import FILTERED_NAME, LOOKED_AT, Limits, SiftedRows, limits_of
from pipeline_assets.schemas import (
    Contract,
    FilteredRows,
    RowFilterEffects,
    SampledColumns,
    SampledFiles,
    SampledNames,
    SampledThresholds,
    SampledTotals,
    SampledValues,
    arrow_schema,
    validated,
)
from pipeline_assets.stripes import Stage
from pipeline_assets.transforms.arrays import F64, I64
from pipeline_assets.transforms.filters import FILTERS, measure_filters
from pipeline_assets.transforms.sampled import (
    COLUMNS,
    COUNTED,
    LENGTHS,
    NAMED,
    PERCENTS,
    SCORED,
    ValueSummary,
    count_names,
    count_values,
    finite,
    measure_thresholds,
    merge_counts,
    merge_summaries,
    percentiles,
    shown_name,
    summarise,
)
from resources.artifact_store import ArtifactRef
from resources.row_group_source import SourceFile
from resources.tables import write_table

NAMES_NAME = "sampled_names.parquet"
VALUES_NAME = "sampled_values.parquet"
TOTALS_NAME = "sampled_totals.parquet"
COLUMNS_NAME = "sampled_columns.parquet"
FILES_NAME = "sampled_files.parquet"
THRESHOLDS_NAME = "sampled_thresholds.parquet"
EFFECTS_NAME = "filter_effects.parquet"

Row = Mapping[str, Any]
Rows = Sequence[Row]
PoolSizes = Mapping[str, tuple[int, int]]  # usable documents and bytes of their texts, by pool


def write_sample(
    folder: Path, file: SourceFile, parts: Sequence[SiftedRows], limits: Limits, excluded: list[dict[str, Any]]
) -> dict[str, Any]:
    """Write what one unit's rows hold, and which of them failed a filter; the counts for its manifest.

    `excluded` are the unit's row groups that were not read, with the proof that none of their rows passes.
    """
    looked_at = pa.concat_tables([LOOKED_AT.empty_table(), *(part.looked_at for part in parts)]).combine_chunks()
    text_bytes = np.asarray(looked_at.column("bytes"))
    _write(SampledNames, _names_of(file, looked_at, text_bytes), folder / NAMES_NAME)
    _write(SampledValues, _values_of(file, looked_at, text_bytes), folder / VALUES_NAME)
    totals = [_totals_of(file, name, looked_at) for name in (*COLUMNS, *LENGTHS)]
    _write_rows(SampledTotals, totals, folder / TOTALS_NAME)
    counts: dict[str, Any] = {"row_groups_read": len(parts)}
    if not limits:
        return counts
    empty = arrow_schema(FilteredRows).empty_table()
    _write(FilteredRows, pa.concat_tables([empty, *(part.filtered for part in parts)]), folder / FILTERED_NAME)
    columns = {name: looked_at.column(name).combine_chunks() for name in FILTERS.values()}
    effects = measure_filters(columns, text_bytes, limits)
    return {
        **counts,
        "row_groups_excluded": excluded,
        "filters": {name: asdict(effect) for name, effect in effects.items()},
    }


def _names_of(file: SourceFile, looked_at: pa.Table, text_bytes: I64) -> pa.Table:
    counted = [
        _with(count_names(looked_at.column(name).combine_chunks(), text_bytes), SampledNames, file, name)
        for name in NAMED
        if file.columns.count(name) == 1
    ]
    return pa.concat_tables([arrow_schema(SampledNames).empty_table(), *counted])


def _values_of(file: SourceFile, looked_at: pa.Table, text_bytes: I64) -> pa.Table:
    counted = []
    for name in (*SCORED, *LENGTHS):
        values, is_finite = finite(looked_at.column(name).combine_chunks())
        counted.append(_with(count_values(values, text_bytes[is_finite]), SampledValues, file, name))
    return pa.concat_tables([arrow_schema(SampledValues).empty_table(), *counted])


def _with(counted: pa.Table, contract: type[Contract], file: SourceFile, column: str) -> pa.Table:
    """Counts as rows of a contract: with the columns that are the same in all of them."""
    same = {"pool": file.pool, "file": file.file, "column": column}
    columns = {name: counted.column(name) for name in counted.column_names}
    columns |= {name: pa.array([value] * counted.num_rows, pa.string()) for name, value in same.items()}
    schema = arrow_schema(contract)
    return pa.table({name: columns[name] for name in schema.names}, schema=schema)


def _totals_of(file: SourceFile, name: str, looked_at: pa.Table) -> dict[str, Any]:
    own = {"pool": file.pool, "file": file.file, "column": name}
    is_there = name in LENGTHS or file.columns.count(name) == 1
    if not is_there or name not in looked_at.column_names:
        return {**own, "is_in_file": is_there}
    column = looked_at.column(name).combine_chunks()
    if name in NAMED:
        return {**own, "is_in_file": True, "with_value": len(column) - column.null_count}
    summary = summarise(finite(column)[0])
    return {
        **own,
        "is_in_file": True,
        "with_value": summary.documents,
        "total": str(summary.total),
        "smallest": summary.smallest,
        "largest": summary.largest,
    }


def _write(contract: type[Contract], table: pa.Table, path: Path) -> None:
    write_table(validated(contract, table), path)


def _write_rows(contract: type[Contract], rows: Rows, path: Path) -> None:
    _write(contract, pa.Table.from_pylist(list(rows), schema=arrow_schema(contract)), path)


def write_sampled(stage: Stage, parts: Sequence[ArtifactRef], folder: Path) -> None:
    """Write the counts of all units together below a folder."""
    names = merge_counts([stage.table(part, NAMES_NAME) for part in parts])
    values = merge_counts([stage.table(part, VALUES_NAME) for part in parts])
    totals = [row for part in parts for row in stage.table(part, TOTALS_NAME).to_pylist()]
    sizes = _pool_sizes(totals)
    effects = _effect_rows(stage.recipe, parts, sizes)
    _write(SampledNames, names, folder / NAMES_NAME)
    _write(SampledValues, values, folder / VALUES_NAME)
    _write_rows(SampledColumns, _column_rows(totals, values, sizes), folder / COLUMNS_NAME)
    _write_rows(SampledFiles, _file_rows(parts, totals, names), folder / FILES_NAME)
    _write_rows(SampledThresholds, _threshold_rows(stage.recipe, values, sizes, effects), folder / THRESHOLDS_NAME)
    _write_rows(RowFilterEffects, effects, folder / EFFECTS_NAME)


def columns_of(values: pa.Table, pool: str, column: str) -> tuple[F64, I64, I64]:
    """Value, documents and bytes of one column of one pool in SampledValues: float64[v] rising, two int64[v]."""
    is_its = pc.and_(pc.equal(values.column("pool"), pool), pc.equal(values.column("column"), column))
    table = values.filter(is_its)
    value, documents, text_bytes = (np.asarray(table.column(name)) for name in ("value", *COUNTED))
    return value, documents, text_bytes


def _grouped(items: Sequence[Any], key: Callable[[Any], Any]) -> dict[Any, list[Any]]:
    """Items by a key, keys in their own order."""
    groups = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return dict(sorted(groups.items()))


def _sizes_of(totals: Rows) -> tuple[int, int]:
    """Documents, and bytes of their texts, in rows of SampledTotals."""
    lengths = [row for row in totals if row["column"] == "bytes"]
    return sum(row["with_value"] for row in lengths), int(sum(Fraction(row["total"]) for row in lengths))


def _pool_sizes(totals: Rows) -> PoolSizes:
    return {pool: _sizes_of(rows) for pool, rows in _grouped(totals, lambda row: row["pool"]).items()}


def _column_rows(totals: Rows, values: pa.Table, sizes: PoolSizes) -> list[Row]:
    groups = _grouped(totals, lambda row: (row["pool"], row["column"]))
    return [
        _column_row(pool, name, groups[pool, name], values, sizes[pool][0])
        for pool in sizes
        for name in (*COLUMNS, *LENGTHS)
    ]


def _column_row(pool: str, name: str, totals: Rows, values: pa.Table, documents: int) -> Row:
    """What a pool's files hold in one column; `totals` has a row of it a unit."""
    with_it = {row["file"] for row in totals if row["is_in_file"]}
    without_it = {row["file"] for row in totals} - with_it
    row = {"pool": pool, "column": name, "files": len(with_it), "files_without": len(without_it)}
    counted = [one for one in totals if one["with_value"] is not None]
    if not counted:
        return row
    with_value = sum(one["with_value"] for one in counted)
    row |= {"with_value": with_value, "without_value": documents - with_value}
    if name in NAMED or not with_value:
        return row
    summary = merge_summaries([_summary_of(one) for one in counted])
    quantiles = percentiles(*columns_of(values, pool, name)[:2])
    return {
        **row,
        "mean": float(summary.total / summary.documents),
        "smallest": summary.smallest,
        "largest": summary.largest,
        **{f"p{percent}": quantile for percent, quantile in zip(PERCENTS, quantiles, strict=True)},
    }


def _summary_of(row: Row) -> ValueSummary:
    return ValueSummary(
        documents=row["with_value"], total=Fraction(row["total"]), smallest=row["smallest"], largest=row["largest"]
    )


def _file_rows(parts: Sequence[ArtifactRef], totals: Rows, names: pa.Table) -> list[Row]:
    counted = names.filter(pc.and_(pc.equal(names.column("column"), "dump"), pc.is_valid(names.column("name"))))
    dumps = Counter((row["pool"], row["file"]) for row in counted.select(["pool", "file"]).to_pylist())
    totals_of = _grouped(totals, lambda row: (row["pool"], row["file"]))
    counts_of = _grouped([part.counts for part in parts], lambda counts: (counts["pool"], counts["file"]))
    return [
        _file_row(pool, file, counts, totals_of[pool, file], dumps[pool, file])
        for (pool, file), counts in counts_of.items()
    ]


def _file_row(pool: str, file: str, counts: Rows, totals: Rows, num_dumps: int) -> Row:
    """What was read of one file; `counts` are those of its units."""
    documents, text_bytes = _sizes_of(totals)
    return {
        "pool": pool,
        "file": file,
        "row_groups": counts[0]["row_groups_in_file"],
        "row_groups_read": sum(unit["row_groups_read"] for unit in counts),
        "row_groups_excluded": sum(len(unit.get("row_groups_excluded", ())) for unit in counts),
        "documents": documents,
        "text_bytes": text_bytes,
        "num_dumps": num_dumps if any(row["is_in_file"] for row in totals if row["column"] == "dump") else None,
    }


def _effect_rows(recipe: Recipe, parts: Sequence[ArtifactRef], sizes: PoolSizes) -> list[Row]:
    counts_of = _grouped([part.counts for part in parts], lambda counts: counts["pool"])
    return [
        _effect_row(pool, name, limit, counts_of[pool], sizes[pool])
        for pool in sizes
        for name, limit in limits_of(recipe, pool).items()
    ]


def _effect_row(pool: str, name: str, limit: Any, counts: Rows, size: tuple[int, int]) -> Row:
    """What one filter did to a pool; `counts` are those of its units."""
    excluded = [group for unit in counts for group in unit["row_groups_excluded"] if group["filter"] == name]
    effects = [unit["filters"][name] for unit in counts]
    return {
        "pool": pool,
        "filter": name,
        "limit": ", ".join(map(shown_name, limit)) if isinstance(limit, tuple) else repr(limit),
        **dict(zip(COUNTED, size, strict=True)),
        **{key: sum(effect[key] for effect in effects) for key in effects[0]},
        "row_groups_excluded": len(excluded),
        "rows_excluded": sum(group["rows"] for group in excluded),
    }


def _threshold_rows(recipe: Recipe, values: pa.Table, sizes: PoolSizes, effects: Rows) -> list[Row]:
    failing = {(row["pool"], row["filter"]): (row["failing_documents"], row["failing_bytes"]) for row in effects}
    rows = []
    for pool, size in sizes.items():
        for column in SCORED:
            finest = float(column == "int_score")  # it has no values between
            measured = measure_thresholds(*columns_of(values, pool, column), finest=finest)
            kept = {effect.threshold: (effect.documents, effect.text_bytes) for effect in measured}
            chosen = limits_of(recipe, pool).get(f"min_{column}")
            if isinstance(chosen, int | float):
                documents, text_bytes = failing[pool, f"min_{column}"]
                kept[float(chosen)] = size[0] - documents, size[1] - text_bytes
            rows += [_threshold_row(pool, column, at, at == chosen, kept[at], size) for at in sorted(kept)]
    return rows


def _threshold_row(
    pool: str, column: str, threshold: float, is_chosen: bool, kept: tuple[int, int], size: tuple[int, int]
) -> Row:
    return {
        "pool": pool,
        "column": column,
        "threshold": threshold,
        "is_chosen": is_chosen,
        **dict(zip(COUNTED, kept, strict=True)),
        "share_of_documents": kept[0] / max(size[0], 1),
        "share_of_bytes": kept[1] / max(size[1], 1),
    }
