"""Slow and plain counts of what was sampled, and filters row by row; they import nothing of the project.

A row is a mapping; one without a text is not usable. What a source does not give is a key that is not there, or None.
"""

from collections import defaultdict
from decimal import ROUND_FLOOR, Decimal
from fractions import Fraction
from math import ceil, isfinite

COLUMN_OF = {
    "dumps": "dump",
    "languages": "language",
    "min_language_score": "language_score",
    "min_score": "score",
    "min_int_score": "int_score",
}


def usable(rows):
    return [row for row in rows if row["text"]]


def size(row):
    return len(row["text"].encode())


def number(row, column):
    """The finite value of a column, or None; characters and bytes are the text's."""
    if column in ("characters", "bytes"):
        return len(row["text"]) if column == "characters" else size(row)
    value = row.get(column)
    return value if value is not None and isfinite(value) else None


def four_digits(value):
    """The largest decimal of four significant digits, or of 0.0001 at least, that is not above a number."""
    decimal = Decimal(repr(float(value)))
    if abs(decimal) < Decimal("0.0001"):
        return 0.0 if decimal >= 0 else -0.0001
    unit = Decimal(1).scaleb(decimal.adjusted() - 3)
    return float((decimal / unit).to_integral_value(ROUND_FLOOR) * unit)


def tally(rows, key):
    """{key: (documents, bytes)} of usable rows; rows whose key is MISSING are left out."""
    found = defaultdict(lambda: [0, 0])
    for row in usable(rows):
        at = key(row)
        if at is not MISSING:
            found[at][0] += 1
            found[at][1] += size(row)
    return {at: tuple(counts) for at, counts in found.items()}


MISSING = object()


def values_of(rows, column):
    """{value to four digits: (documents, bytes)}."""

    def key(row):
        value = number(row, column)
        return MISSING if value is None else four_digits(value)

    return tally(rows, key)


def mean_of(rows, column):
    known = [Fraction(value) for row in usable(rows) if (value := number(row, column)) is not None]
    return float(sum(known) / len(known)) if known else None


def percentile(rows, column, percent):
    known = sorted(value for row in usable(rows) if (value := number(row, column)) is not None)
    return four_digits(known[max(1, ceil(Fraction(percent, 100) * len(known))) - 1])


def kept_at(rows, column, threshold):
    """(documents, bytes) of at least a value."""
    kept = [row for row in usable(rows) if row.get(column) is not None and row[column] >= threshold]
    return len(kept), sum(size(row) for row in kept)


def fails(row, name, limit):
    value = row.get(COLUMN_OF[name])
    if value is None:
        return True
    return value not in limit if isinstance(limit, (tuple, list)) else not value >= limit


def first_failure(row, filters):
    """The first filter, in the order of COLUMN_OF, that a row fails, or None."""
    return next((name for name in COLUMN_OF if name in filters and fails(row, name, filters[name])), None)
