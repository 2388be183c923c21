"""What was sampled: rows of a unit in; documents and bytes by name and by value out, and the same of all units.

Values are counted on a grid of four significant decimal digits, so that the counts of any number of rows are small and
those of two units add up to those of both. A quantile is the grid's value below it; a threshold on the grid is counted
exactly; sums are exact. Nothing depends on the order of rows or units. Cost: a sort a column and unit.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from hashlib import sha256
from math import ceil, floor

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline_assets.transforms.arrays import F64, I64
from pipeline_assets.transforms.lookup import printable

NAMED = ("dump", "language")
SCORED = ("language_score", "score", "int_score")
LENGTHS = ("characters", "bytes")
NOT_READ = ("date",)
COLUMNS = (*NAMED, *SCORED, *NOT_READ)
"""What a source may give beside the text; `characters` and `bytes` are the text's own."""

COUNTED = ("documents", "text_bytes")
PERCENTS = (1, 5, 25, 50, 75, 95, 99)
DIGITS = 4
SMALLEST_EXPONENT, LARGEST_EXPONENT = -4, 13  # of the values that are told apart: 0.0001 to below 10^13
MAX_THRESHOLDS = 8
NAME_CHARACTERS = 60


@dataclass(frozen=True, kw_only=True)
class ValueSummary:
    """Values of one column: how many, their exact sum, the smallest and the largest; None where there are none."""

    documents: int
    total: Fraction
    smallest: float | None
    largest: float | None


@dataclass(frozen=True, kw_only=True)
class ThresholdEffect:
    """What documents of at least a value come to; bytes are the texts'."""

    threshold: float
    documents: int
    text_bytes: int


@cache
def grid() -> F64:
    """Every number of four significant digits between the exponents, its negative, and 0: float64[g], rising."""
    digits = np.arange(10 ** (DIGITS - 1), 10**DIGITS, dtype=np.float64)
    powers = [exponent - DIGITS + 1 for exponent in range(SMALLEST_EXPONENT, LARGEST_EXPONENT)]
    # Digits and powers are exact, so that one division or product rounds once: these are the decimals as written.
    decades = [digits / 10.0**-power if power < 0 else digits * 10.0**power for power in powers]
    positive = np.concatenate(decades)
    return np.concatenate([-positive[::-1], [0.0], positive])


def on_grid(values: F64) -> F64:
    """The largest number of the grid that is not above each value, or its smallest one: float64[n] -> float64[n].

    >>> on_grid(np.array([2.90625, 12345, -0.00001])).tolist()
    [2.906, 12340.0, -0.0001]
    """
    places = np.searchsorted(grid(), values, side="right") - 1
    return grid()[np.maximum(places, 0)]


def finite(values: pa.Array) -> tuple[F64, np.ndarray[tuple[int], np.dtype[np.bool_]]]:
    """The finite numbers of an array with nulls, and where they are: -> float64[m], bool[n]."""
    numbers = np.asarray(values.cast(pa.float64()).fill_null(np.nan), np.float64)
    is_finite = np.isfinite(numbers)
    return numbers[is_finite], is_finite


def count_by(keys: Mapping[str, pa.Array], text_bytes: I64) -> pa.Table:
    """Documents and bytes of the rows of each combination of keys, sorted by them."""
    ones = np.ones(len(text_bytes), np.int64)
    return merge_counts([pa.table({**keys, "documents": ones, "text_bytes": text_bytes})])


def merge_counts(tables: Sequence[pa.Table]) -> pa.Table:
    """The counts of several tables added up by all their other columns, sorted by these, nulls last."""
    table = pa.concat_tables(tables)
    keys = [name for name in table.column_names if name not in COUNTED]
    summed = table.group_by(keys).aggregate([(name, "sum") for name in COUNTED])
    renamed = summed.rename_columns({f"{name}_sum": name for name in COUNTED}).select(table.column_names)
    return renamed.sort_by([(key, "ascending") for key in keys]).cast(table.schema)


def count_names(names: pa.Array, text_bytes: I64) -> pa.Table:
    """Documents and bytes by name (null where there is none), as names are shown: string[n], int64[n]."""
    counted = count_by({"name": names}, text_bytes)
    shown = [None if name is None else shown_name(name) for name in counted.column("name").to_pylist()]
    return merge_counts([counted.set_column(0, "name", pa.array(shown, pa.string()))])


def shown_name(name: str) -> str:
    """A source's name on one line of printable characters; one that had to be changed ends with its own hash.

    >>> shown_name("CC-MAIN-2024-10")
    'CC-MAIN-2024-10'
    """
    shown = printable(name[:NAME_CHARACTERS])[:NAME_CHARACTERS]
    return name if shown == name else f"{shown}… #{sha256(name.encode()).hexdigest()[:8]}"


def count_values(values: F64, text_bytes: I64) -> pa.Table:
    """Documents and bytes by value on the grid: float64[n] of finite values, int64[n]."""
    return count_by({"value": pa.array(on_grid(values))}, text_bytes)


def summarise(values: F64) -> ValueSummary:
    """Number, exact sum and range of finite values, float64[n]."""
    return ValueSummary(
        documents=len(values),
        total=exact_sum(values),
        smallest=float(values.min()) if len(values) else None,
        largest=float(values.max()) if len(values) else None,
    )


def merge_summaries(summaries: Sequence[ValueSummary]) -> ValueSummary:
    """The summary of all values together."""
    return ValueSummary(
        documents=sum(summary.documents for summary in summaries),
        total=sum((summary.total for summary in summaries), Fraction()),
        smallest=min((summary.smallest for summary in summaries if summary.smallest is not None), default=None),
        largest=max((summary.largest for summary in summaries if summary.largest is not None), default=None),
    )


def exact_sum(values: F64) -> Fraction:
    """The sum of finite numbers without rounding, so that it does not matter how they are grouped.

    >>> exact_sum(np.full(10, 0.1)) == 10 * Fraction(0.1)
    True
    """
    mantissas, exponents = np.frexp(values)
    whole = np.ldexp(mantissas, 53).astype(np.int64)
    return sum(
        (
            sum(whole[exponents == exponent].tolist()) * Fraction(2) ** (exponent - 53)
            for exponent in np.unique(exponents).tolist()
        ),
        Fraction(),
    )


def percentiles(values: F64, documents: I64) -> list[float]:
    """For each of PERCENTS, the first value that so many of the documents do not exceed: rising values and counts [v].

    >>> percentiles(np.array([1.0, 2.0, 9.0]), np.array([50, 49, 1]))
    [1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0]
    """
    upto = np.cumsum(documents)
    ranks = [max(1, -(-percent * int(upto[-1]) // 100)) for percent in PERCENTS]
    found: list[float] = values[np.searchsorted(upto, ranks)].tolist()
    return found


def measure_thresholds(
    values: F64, documents: I64, text_bytes: I64, *, finest: float = 0.0
) -> Iterator[ThresholdEffect]:
    """What at least each of a few round numbers would keep, from the first percentile up: three columns [v], rising.

    The numbers are multiples of 1, 2 or 5 times a power of ten, of `finest` at least: values of the grid, so exact.

    >>> [effect.threshold for effect in measure_thresholds(np.array([2.51, 5.2]), np.array([1, 1]), np.array([9, 9]))]
    [3.0, 3.5, 4.0, 4.5, 5.0]
    """
    if not len(values):
        return
    for threshold in _round_numbers(percentiles(values, documents)[0], float(values[-1]), finest):
        is_kept = values >= threshold
        yield ThresholdEffect(
            threshold=threshold,
            documents=int(documents[is_kept].sum()),
            text_bytes=int(text_bytes[is_kept].sum()),
        )


def _round_numbers(low: float, high: float, finest: float) -> list[float]:
    """Multiples of the smallest round step of which at most MAX_THRESHOLDS lie from low to high."""
    lowest, highest = Fraction(repr(low)), Fraction(repr(high))  # the decimals, not the binary numbers beside them
    exponent = int(f"{max(abs(low), abs(high)):e}".partition("e")[2])
    for power in range(exponent - DIGITS + 1, LARGEST_EXPONENT + 1):
        for digit in (1, 2, 5):
            step = digit * Fraction(10) ** power
            multiples = range(ceil(lowest / step), floor(highest / step) + 1)
            if step >= finest and len(multiples) <= MAX_THRESHOLDS and _are_on_grid(multiples, step):
                return [float(number * step) for number in multiples]
    return []


def _are_on_grid(multiples: range, step: Fraction) -> bool:
    """Whether none of a step's multiples lies in the gap that the grid has on both sides of 0."""
    return all(number == 0 or abs(number) * step >= Fraction(10) ** SMALLEST_EXPONENT for number in multiples)


def text_lengths(texts: pa.Array | pa.ChunkedArray) -> dict[str, I64]:
    """Characters and UTF-8 bytes of each text: two int64[n]."""
    measures = {"characters": pc.utf8_length(texts), "bytes": pc.binary_length(texts)}
    return {name: np.asarray(lengths).astype(np.int64) for name, lengths in measures.items()}
