"""Measurements: seconds of alternating runs in, medians, rates, ratios and a table out.

A row is one thing measured: an amount of work, our seconds and a peer's for the same work, one number a run. All
runs of a row are made in turns, so that a slow spell of the machine hits both sides.
"""

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from training_io.errors import InvariantBroken


@dataclass(frozen=True, kw_only=True)
class Bar:
    """What a figure of a row must reach: one of the two limits."""

    figure: str
    at_least: float | None = None
    at_most: float | None = None

    def is_met(self, found: float) -> bool:
        """Whether a value of the figure is within the limit."""
        return (self.at_least is None or found >= self.at_least) and (self.at_most is None or found <= self.at_most)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One thing measured: `amount` of `unit` in each run; `extra` holds figures besides the times, `note` a remark."""

    name: str
    amount: float
    unit: str
    ours_seconds: Sequence[float] = ()
    peer: str = ""
    peer_seconds: Sequence[float] = ()
    extra: Mapping[str, float] = field(default_factory=dict)
    bars: Sequence[Bar] = ()
    note: str = ""


def seconds_of(work: Callable[[], object]) -> float:
    """Wall-clock seconds of one call, with garbage collected before it."""
    gc.collect()
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def alternate(runs: int, contenders: Mapping[str, Callable[[], float]]) -> dict[str, tuple[float, ...]]:
    """Let each contender run in turn, `runs` rounds; a contender returns its own seconds.

    >>> alternate(2, {"ours": lambda: 1.0, "peer": lambda: 3.0})
    {'ours': (1.0, 1.0), 'peer': (3.0, 3.0)}
    """
    rounds = [{name: run() for name, run in contenders.items()} for _ in range(runs)]
    return {name: tuple(seconds[name] for seconds in rounds) for name in contenders}


def require_same(what: str, ours: object, peer: object) -> None:
    """InvariantBroken unless both sides computed the same: a comparison of speed means nothing without it."""
    if ours != peer:
        raise InvariantBroken(f"{what}: expected the peer's result, {peer}, found {ours}; nothing was timed")


def figures_of(row: Row) -> dict[str, float]:
    """Medians, rates and ratios of a row, and its extra figures.

    ratio is the peer's median over ours (above 1: we are faster); ratio_min and ratio_max are those of single rounds.
    """
    figures = dict(row.extra)
    if row.ours_seconds:
        figures["seconds"] = median(row.ours_seconds)
        figures["rate"] = row.amount / figures["seconds"]
    if row.peer_seconds:
        ratios = [peer / ours for ours, peer in zip(row.ours_seconds, row.peer_seconds, strict=True)]
        figures["peer_seconds"] = median(row.peer_seconds)
        figures["peer_rate"] = row.amount / figures["peer_seconds"]
        figures["ratio"] = figures["peer_seconds"] / figures["seconds"]
        figures["ratio_min"], figures["ratio_max"] = min(ratios), max(ratios)
    return figures


def report_of(row: Row) -> dict[str, Any]:
    """A row as plain JSON: what was run, every run's seconds, the figures, and each bar with yes or no."""
    figures = figures_of(row)
    return {
        "name": row.name,
        "amount": row.amount,
        "unit": row.unit,
        "peer": row.peer,
        "ours_seconds": list(row.ours_seconds),
        "peer_seconds": list(row.peer_seconds),
        "figures": figures,
        "bars": [
            {
                "figure": bar.figure,
                "at_least": bar.at_least,
                "at_most": bar.at_most,
                "found": figures[bar.figure],
                "met": bar.is_met(figures[bar.figure]),
            }
            for bar in row.bars
        ],
        "note": row.note,
    }


def table_of(rows: Sequence[Row]) -> str:
    """Rows as aligned text, one line each, with notes below."""
    cells = [("entry", "ours", "peer", "ratio", "min–max", "bar", "peer is"), *map(_cells, rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]
    return "\n".join([*lines, *(f"{row.name}: {row.note}" for row in rows if row.note)])


def _cells(row: Row) -> tuple[str, ...]:
    figures = figures_of(row)
    has_peer = "ratio" in figures
    return (
        row.name,
        f"{figures['rate']:,.1f} {row.unit}/s" if "rate" in figures else "–",
        f"{figures['peer_rate']:,.1f} {row.unit}/s" if has_peer else "–",
        f"{figures['ratio']:.2f}" if has_peer else "–",
        f"{figures['ratio_min']:.2f}–{figures['ratio_max']:.2f}" if has_peer else "–",
        ", ".join(_verdict(bar, figures[bar.figure]) for bar in row.bars) or "–",
        row.peer or "–",
    )


def _verdict(bar: Bar, found: float) -> str:
    limit = f"≥ {bar.at_least:g}" if bar.at_least is not None else f"≤ {bar.at_most:g}"
    return f"{bar.figure} {found:.4g} {limit}: {'met' if bar.is_met(found) else 'NOT met'}"
