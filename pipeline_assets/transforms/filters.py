"""Which rows a pool's filters let through: columns and limits in, the first filter that each row fails out.

A filter is a list of names or a smallest number. A row whose value is missing, unreadable or no number fails: nothing
shows that it passes. The statistics of a row group are proof where no value between them can pass. Cost: a few passes
a filter.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pipeline_assets.transforms.arrays import I64

FILTERS: Mapping[str, str] = {
    "dumps": "dump",
    "languages": "language",
    "min_language_score": "language_score",
    "min_score": "score",
    "min_int_score": "int_score",
}
"""Each filter and the column that it looks at, in the order in which a row's first failure is found."""

PASSED = -1

Limit = tuple[str, ...] | float
Limits = Mapping[str, Limit]
"""The filters of one pool, by name."""
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class FilterEffect:
    """What one filter does to the rows that were read. `removed` is of those that no earlier filter removes."""

    removed_documents: int
    removed_bytes: int
    failing_documents: int  # whatever the other filters say
    failing_bytes: int
    failing_without_value: int  # a missing value, or NaN


def passes(values: pa.Array, limit: Limit) -> Bools:
    """Whether each value is one of the names, or is at least the number: [n] -> bool[n].

    >>> passes(pa.array([2.5, 3.0, None, float("nan")]), 3.0).tolist()
    [False, True, False, False]
    """
    is_names = isinstance(limit, tuple)
    mask = pc.is_in(values, pa.array(limit, pa.string())) if is_names else pc.greater_equal(values, limit)
    return np.asarray(mask.fill_null(False), dtype=np.bool_)


def first_failures(columns: Mapping[str, pa.Array], limits: Limits) -> I64:
    """Place in FILTERS of the first filter that each row fails, PASSED where it fails none: int64[n].

    `columns` has the arrays of n rows that the limits, by filter, look at.
    """
    (num_rows,) = {len(values) for values in columns.values()}
    failures = np.full(num_rows, PASSED, np.int64)
    for place, (name, column) in enumerate(FILTERS.items()):
        if name in limits:
            failures[(failures == PASSED) & ~passes(columns[column], limits[name])] = place
    return failures


def measure_filters(columns: Mapping[str, pa.Array], text_bytes: I64, limits: Limits) -> dict[str, FilterEffect]:
    """The effect of each filter on rows with texts of so many bytes, int64[n], in the order of FILTERS."""
    failures = first_failures(columns, limits)
    return {
        name: _effect(failures == place, ~passes(columns[column], limits[name]), columns[column], text_bytes)
        for place, (name, column) in enumerate(FILTERS.items())
        if name in limits
    }


def _effect(is_removed: Bools, is_failing: Bools, values: pa.Array, text_bytes: I64) -> FilterEffect:
    return FilterEffect(
        removed_documents=int(is_removed.sum()),
        removed_bytes=int(text_bytes[is_removed].sum()),
        failing_documents=int(is_failing.sum()),
        failing_bytes=int(text_bytes[is_failing].sum()),
        failing_without_value=int(np.asarray(pc.is_null(values, nan_is_null=True)).sum()),
    )


def filter_that_excludes(bounds: Mapping[str, tuple[Any, Any]], limits: Limits) -> str | None:
    """The first filter that no row can pass whose values lie between the column's (smallest, largest), or None.

    (None, None) says that all values of the column are null; a column without bounds proves nothing.

    >>> filter_that_excludes({"dump": ("CC-MAIN-2013-20", "CC-MAIN-2014-10")}, {"dumps": ("CC-MAIN-2024-10",)})
    'dumps'
    """
    for name, column in FILTERS.items():
        if name in limits and column in bounds and _nothing_passes(*bounds[column], limits[name]):
            return name
    return None


def _nothing_passes(smallest: Any, largest: Any, limit: Limit) -> bool:
    """Bounds of another kind than the limit prove nothing: what they bound is read as ours first. Nor does NaN."""
    if smallest is None and largest is None:
        return True
    if isinstance(limit, tuple):
        is_text = isinstance(smallest, str) and isinstance(largest, str)
        return is_text and not any(smallest <= name <= largest for name in limit)
    return type(largest) in (int, float) and largest < limit
