"""Slow, independent oracles for layouts: rows as lists of owners, counted cell by cell. Imports nothing of the project."""

from fractions import Fraction
from math import floor


def num_runs(rows):
    """Runs of one owner in one row; None owns nothing."""
    return sum(owner is not None and (at == 0 or row[at - 1] != owner) for row in rows for at, owner in enumerate(row))


def owners_in_several_rows(rows):
    """Owners with cells in two rows or more."""
    return sum(sum(owner in row for row in rows) > 1 for owner in {owner for row in rows for owner in row} - {None})


def displacements(packs, lengths):
    """Packs between each segment's pack and the one where it would begin if all packs had their even share of the
    tokens in arrival order.
    """
    share = Fraction(sum(lengths), max(len(packs), 1))
    moved = []
    for number in range(len(lengths)):
        (pack,) = [at for at, numbers in enumerate(packs) if number in numbers]
        moved.append(abs(pack - floor(sum(lengths[:number]) / share)))
    return moved


def passes(available, needed):
    """How often each of the available tokens is read when reading goes round and round, least and most."""
    reads = [0] * available
    for at in range(needed):
        reads[at % available] += 1
    return min(reads), max(reads)
