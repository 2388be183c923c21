"""What an asset's page shows: metadata, table schemas, sample rows, pictures.

In: references, counts, tables and series. Out: Dagster metadata values, small enough to stay in the event log for
ever. Pictures are PNG of one style, under 50 kB, saved beside the artifact and embedded in its page.
"""

import base64
import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import dagster as dg
import pyarrow as pa

from pipeline_assets.recipe import own_parameters
from pipeline_assets.schemas import Contract
from pipeline_assets.stripes import Stage
from resources.artifact_store import ArtifactRef

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_PICTURE_BYTES = 50_000
MAX_CELL_CHARACTERS = 160
INK = "#5f6b7a"  # readable on light and dark pages
COLOURS = ("#2a7de1", "#e07b39", "#3aa676", "#b0559e", "#c9a227", "#2aa8b8", "#8a6d5a", "#7d7fd6")


def asset_metadata(stage: Stage, ref: ArtifactRef, parts: Sequence[ArtifactRef] = ()) -> dict[str, Any]:
    """What every asset's page says: folder, identity, counts, sizes, work done, parameters in force."""
    folder, _ = stage.open(ref)
    files = [entry for item in (ref, *parts) for entry in stage.open(item)[1].files.values()]
    stored = {entry["sha256"]: entry["bytes"] for entry in files}  # a shard is linked, not stored twice
    done = [*parts, ref]
    numbers = {key: value for key, value in ref.counts.items() if isinstance(value, int | float)}
    return {
        **numbers,
        "folder": dg.MetadataValue.path(str(folder)),
        "identity": ref.identity,
        "bytes": sum(stored.values()),
        "seconds": round(sum(item.seconds for item in done), 3),
        **{f"artifacts_{outcome}": sum(item.outcome == outcome for item in done) for outcome in _OUTCOMES},
        "parameters": dg.MetadataValue.json(own_parameters(stage.pipeline.recipe, ref.asset)),
    }


_OUTCOMES = ("built", "reused", "rebuilt")


def table_metadata(contract: type[Contract], num_rows: int, sample: pa.Table) -> dict[str, Any]:
    """Row count, column schema with descriptions, and a few sample rows."""
    columns = contract.to_schema().columns
    schema = dg.TableSchema(
        columns=[
            dg.TableColumn(name, str(contract.__annotations__[name]), description=column.description)
            for name, column in columns.items()
        ]
    )
    return {
        "dagster/row_count": num_rows,
        "dagster/column_schema": schema,
        "sample_rows": rows_metadata(sample.slice(0, 5).to_pylist()),
    }


def rows_metadata(rows: Sequence[Mapping[str, Any]]) -> dg.MetadataValue[Any]:
    """A table of plain values: bytes as hex, long texts cut, at most 50 rows."""
    records = [dg.TableRecord({key: _cell(value) for key, value in row.items()}) for row in rows[:50]]
    if not records:
        return dg.MetadataValue.text("no rows")
    return dg.MetadataValue.table(records)


def _cell(value: Any) -> str | int | float | bool:
    if isinstance(value, bytes):
        return value.hex()[:16]
    if isinstance(value, str):
        return value if len(value) <= MAX_CELL_CHARACTERS else value[:MAX_CELL_CHARACTERS] + "…"
    if value is None:
        return ""
    if isinstance(value, int | float | bool):
        return value
    return str(value)


def new_figure(title: str, x_label: str, y_label: str) -> "Figure":
    """An empty figure of our style with one pair of axes, readable on light and dark pages."""
    from matplotlib.figure import Figure  # 0.5 s: kept off the code location's import path

    figure = Figure(figsize=(6.4, 3.4), dpi=90, layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, color=INK, fontsize=10)
    axes.set_xlabel(x_label, color=INK)
    axes.set_ylabel(y_label, color=INK)
    axes.tick_params(colors=INK)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("bottom", "left"):
        axes.spines[side].set_color(INK)
    figure.patch.set_alpha(0)
    axes.patch.set_alpha(0)
    return figure


def line_picture(
    title: str,
    x_label: str,
    y_label: str,
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    log_x: bool = False,
) -> bytes:
    """PNG of one or more named lines (x values, y values)."""
    figure = new_figure(title, x_label, y_label)
    axes = figure.axes[0]
    axes.set_xscale("log" if log_x else "linear")
    for colour, (name, (x, y)) in zip(COLOURS, series.items(), strict=False):
        axes.plot(x, y, color=colour, label=name, linewidth=1.4, marker="o" if len(x) <= 30 else None, markersize=3)
    _legend(axes)
    return png_of(figure)


def interval_picture(
    title: str,
    x_label: str,
    y_label: str,
    curve: tuple[str, Sequence[float], Sequence[float]],
    points: tuple[str, Sequence[float], Sequence[float], Sequence[tuple[float, float]]],
) -> bytes:
    """PNG of a named curve (x values, y values) and of named measured points over it, each with its (low, high)."""
    name, x, y, intervals = points
    figure = new_figure(title, x_label, y_label)
    axes = figure.axes[0]
    axes.plot(curve[1], curve[2], color=COLOURS[0], label=curve[0], linewidth=1.4)
    # An interval may lie on one side of its point: a share of 0 or 1 has nothing beyond.
    reach = [
        [max(0.0, value - low) for value, (low, _) in zip(y, intervals, strict=True)],
        [max(0.0, high - value) for value, (_, high) in zip(y, intervals, strict=True)],
    ]
    style = {"fmt": "o", "markersize": 3, "capsize": 2, "linewidth": 1}
    axes.errorbar(x, y, yerr=reach, color=COLOURS[1], label=name, **style)
    _legend(axes)
    return png_of(figure)


def bar_picture(title: str, x_label: str, names: Sequence[str], values: Sequence[float]) -> bytes:
    """PNG of horizontal bars, one a name, with their values written at the end."""
    figure = new_figure(title, x_label, "")
    axes = figure.axes[0]
    bars = axes.barh(range(len(names)), values, color=COLOURS[0])
    axes.set_yticks(range(len(names)), labels=list(names), color=INK)
    axes.invert_yaxis()
    axes.bar_label(bars, labels=[f"{value:,.3g}" for value in values], color=INK, padding=3, fontsize=8)
    return png_of(figure)


def grouped_bar_picture(
    title: str, x_label: str, groups: Sequence[str], series: Mapping[str, Sequence[float]]
) -> bytes:
    """PNG of horizontal bars, one a name of the series in each group; taller the more bars there are."""
    figure = new_figure(title, x_label, "")
    axes, height = figure.axes[0], 0.8 / len(series)
    figure.set_figheight(max(3.4, 1.2 + 0.17 * (len(series) + 1) * len(groups) + 0.1 * len(series)))
    for number, (colour, (name, values)) in enumerate(zip(COLOURS, series.items(), strict=False)):
        places = [group - 0.4 + (number + 0.5) * height for group in range(len(groups))]
        bars = axes.barh(places, values, height=0.9 * height, color=colour, label=name)
        axes.bar_label(bars, labels=[f"{value:,.3g}" for value in values], color=INK, padding=3, fontsize=7)
    axes.set_yticks(range(len(groups)), labels=list(groups), color=INK, fontsize=8)
    axes.invert_yaxis()
    _in_ink(figure.legend(loc="outside lower left", ncols=2, frameon=False, fontsize=8))
    return png_of(figure)


def _legend(axes: Any) -> None:
    _in_ink(axes.legend(frameon=False, fontsize=8))


def _in_ink(legend: Any) -> None:
    for text in legend.get_texts():
        text.set_color(INK)


def png_of(figure: "Figure") -> bytes:
    """The figure as PNG bytes, the same for the same figure."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    picture = buffer.getvalue()
    assert len(picture) <= MAX_PICTURE_BYTES, f"picture of {len(picture):,} bytes"
    return picture


def picture_metadata(picture: bytes, alternative: str) -> dg.MetadataValue[Any]:
    """A picture that shows on the asset's page."""
    return dg.MetadataValue.md(f"![{alternative}](data:image/png;base64,{base64.b64encode(picture).decode()})")
