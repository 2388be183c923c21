"""What was sampled, as rows of tables: counts of units in; what columns, files, filters and thresholds come to out.

In: rows of totals (a row a unit and column), counts by name and by value, and what the units' manifests count. Out: one
row a pool and column, file, filter or threshold, by name. Nothing depends on the order or the size of units: sums are
whole numbers or exact fractions. Cost: a pass over a few hundred rows.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline_assets.transforms.arrays import F64, I64
from pipeline_assets.transforms.filters import Limits
from pipeline_assets.transforms.sampled import (
    COLUMNS,
    COUNTED,
    LENGTHS,
    NAMED,
    PERCENTS,
    SCORED,
    ValueSummary,
    measure_thresholds,
    merge_summaries,
    percentiles,
    shown_name,
)

Row = Mapping[str, Any]
Rows = Sequence[Row]
PoolSizes = Mapping[str, tuple[int, int]]  # usable documents and bytes of their texts, by pool


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


def pool_sizes(totals: Rows) -> PoolSizes:
    """Usable documents and bytes of their texts of each pool, of rows of totals."""
    return {pool: _sizes_of(rows) for pool, rows in _grouped(totals, lambda row: row["pool"]).items()}


def column_rows(totals: Rows, values: pa.Table, sizes: PoolSizes) -> list[Row]:
    """What each pool's files hold in each column."""
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


def file_rows(counts: Rows, totals: Rows, names: pa.Table) -> list[Row]:
    """What was read of each file; `counts` are those of the units."""
    counted = names.filter(pc.and_(pc.equal(names.column("column"), "dump"), pc.is_valid(names.column("name"))))
    dumps = Counter((row["pool"], row["file"]) for row in counted.select(["pool", "file"]).to_pylist())
    totals_of = _grouped(totals, lambda row: (row["pool"], row["file"]))
    counts_of = _grouped(counts, lambda unit: (unit["pool"], unit["file"]))
    return [
        _file_row(pool, file, units, totals_of[pool, file], dumps[pool, file])
        for (pool, file), units in counts_of.items()
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


def effect_rows(limits_of: Mapping[str, Limits], counts: Rows, sizes: PoolSizes) -> list[Row]:
    """What each filter did to its pool; `limits_of` has the filters of every pool."""
    counts_of = _grouped(counts, lambda unit: unit["pool"])
    return [
        _effect_row(pool, name, limit, counts_of[pool], sizes[pool])
        for pool in sizes
        for name, limit in limits_of[pool].items()
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


def threshold_rows(limits_of: Mapping[str, Limits], values: pa.Table, sizes: PoolSizes, effects: Rows) -> list[Row]:
    """What round thresholds, and the chosen one, keep of each pool; `effects` are rows of what its filters did."""
    failing = {(row["pool"], row["filter"]): (row["failing_documents"], row["failing_bytes"]) for row in effects}
    rows = []
    for pool, size in sizes.items():
        for column in SCORED:
            finest = float(column == "int_score")  # it has no values between
            measured = measure_thresholds(*columns_of(values, pool, column), finest=finest)
            kept = {effect.threshold: (effect.documents, effect.text_bytes) for effect in measured}
            chosen = limits_of[pool].get(f"min_{column}")
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
