"""source, counted: what was sampled, as tables beside the rows.

In: what was looked at of a unit's usable rows. Out: documents and bytes by crawl, language, score and length; then
those of all units. A unit counts its own rows while it is read; sealing adds the units up. Promise: what is shown was
counted before the filters, in whole numbers and exact sums, whatever the stripes. Cost: a few passes over narrow
columns.
"""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline_assets.conformance import validated
from pipeline_assets.row_filters import FILTERED_NAME, limits_of
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
)
from pipeline_assets.stripes import Stage
from pipeline_assets.transforms.arrays import I64
from pipeline_assets.transforms.filters import FILTERS, Limits, measure_filters
from pipeline_assets.transforms.sampled import (
    COLUMNS,
    LENGTHS,
    NAMED,
    SCORED,
    count_names,
    count_values,
    finite,
    merge_counts,
    summarise,
)
from pipeline_assets.transforms.sampled_tables import (
    Rows,
    column_rows,
    effect_rows,
    file_rows,
    pool_sizes,
    threshold_rows,
)
from pipeline_assets.transforms.sift import LOOKED_AT, SiftedRows
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
    counts = [part.counts for part in parts]
    sizes = pool_sizes(totals)
    limits = {pool: limits_of(stage.recipe, pool) for pool in sizes}
    effects = effect_rows(limits, counts, sizes)
    _write(SampledNames, names, folder / NAMES_NAME)
    _write(SampledValues, values, folder / VALUES_NAME)
    _write_rows(SampledColumns, column_rows(totals, values, sizes), folder / COLUMNS_NAME)
    _write_rows(SampledFiles, file_rows(counts, totals, names), folder / FILES_NAME)
    _write_rows(SampledThresholds, threshold_rows(limits, values, sizes, effects), folder / THRESHOLDS_NAME)
    _write_rows(RowFilterEffects, effects, folder / EFFECTS_NAME)
