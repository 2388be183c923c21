"""The one style of all pictures: names and numbers in, PNG bytes out.

A picture is an opaque card, so that it reads the same on a light and on a dark page. Promise: the same input gives the
same bytes, at most MAX_PICTURE_BYTES of them, whatever the names and however many there are: what does not fit is left
out and the title says so. Names are data from the web: they are never read as markup.
"""

import io
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GROUND, INK, GRID = "#ffffff", "#1f2933", "#e4e7eb"
COLOURS = ("#2a7de1", "#c4622a", "#2b8a60", "#b0559e", "#94750f", "#1d7f8c", "#8a6d5a", "#6a6cc8")
MAX_PICTURE_BYTES = 50_000
MAX_LINES, MAX_BARS, MAX_CELLS, MAX_POINTS = 8, 40, 10, 16  # names in one picture, by its kind
MAX_LABEL_CHARACTERS = 34
MAX_LINE_POINTS = 600
WIDTH, HEIGHT, DPI = 7.2, 3.6, 100  # inches, and pixels an inch
PALETTE = 128
DARKEST = 0.75  # of a cell: its value in ink still reads

Line = tuple[Sequence[float], Sequence[float]]


def line_picture(title: str, x_label: str, y_label: str, series: Mapping[str, Line], log_x: bool = False) -> bytes:
    """PNG of named lines (x values, y values); what is not finite is left out."""
    title = _of_all(title, len(series), MAX_LINES)
    figure, axes = _card(title, x_label, y_label, x_scale="log" if log_x else "linear")
    handles = {}
    for colour, (name, (x, y)) in zip(COLOURS, series.items(), strict=False):
        marker = "o" if len(x) <= 30 else None
        (handles[name],) = axes.plot(*thinned(x, y), color=colour, linewidth=1.6, marker=marker, markersize=3.5)
    _mark_ticks(axes, [value for x, _ in series.values() for value in x])
    _legend(axes, handles)
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
    figure, axes = _card(title, x_label, y_label)
    (line,) = axes.plot(curve[1], curve[2], color=COLOURS[0], linewidth=1.6)
    # An interval may lie on one side of its point: a share of 0 or 1 has nothing beyond.
    reach = [
        [max(0.0, value - low) for value, (low, _) in zip(y, intervals, strict=True)],
        [max(0.0, high - value) for value, (_, high) in zip(y, intervals, strict=True)],
    ]
    measured = axes.errorbar(x, y, yerr=reach, color=COLOURS[1], fmt="o", markersize=3.5, capsize=2, linewidth=1)
    _legend(axes, {curve[0]: line, name: measured})
    return png_of(figure)


def bar_picture(
    title: str, x_label: str, y_label: str, names: Sequence[str], values: Sequence[float], log_x: bool = False
) -> bytes:
    """PNG of horizontal bars, one a name, the first on top, with their values written at the end."""
    shown = min(len(names), MAX_BARS // 2)
    title, tall = _of_all(title, len(names), shown), 1.2 + 0.24 * max(shown, 3)
    figure, axes = _card(title, x_label, y_label, tall, x_scale="log" if log_x else "linear")
    axes.margins(x=0.1)
    bars = axes.barh(range(shown), values[:shown], color=COLOURS[0])
    if log_x:
        axes.set_xlim(0.8, 2 * max([*values[:shown], 4]))  # a bar of 1 has a length
    _mark_ticks(axes, values[:shown])
    _name_bars(axes, names[:shown])
    axes.bar_label(bars, labels=[short_number(value) for value in values[:shown]], color=INK, padding=3, fontsize=8)
    return png_of(figure)


def grouped_bar_picture(
    title: str, x_label: str, groups: Sequence[str], series: Mapping[str, Sequence[float]], y_label: str = ""
) -> bytes:
    """PNG of horizontal bars, one a name of the series in each group; taller the more bars there are."""
    num_series = min(len(series), MAX_LINES)
    shown = min(len(groups), MAX_BARS // max(num_series, 1))
    tall = 1.2 + 0.17 * max((num_series + 1) * shown, 6)
    figure, axes = _card(_of_all(title, len(groups), shown), x_label, y_label, tall)
    axes.margins(x=0.1)
    height, handles = 0.8 / max(num_series, 1), {}
    for number, (colour, (name, values)) in enumerate(zip(COLOURS, series.items(), strict=False)):
        places = [group - 0.4 + (number + 0.5) * height for group in range(shown)]
        handles[name] = axes.barh(places, values[:shown], height=0.9 * height, color=colour)
        labels = [short_number(value) for value in values[:shown]]
        axes.bar_label(handles[name], labels=labels, color=INK, padding=3, fontsize=7)
    _name_bars(axes, groups[:shown])
    _legend(axes, handles)
    return png_of(figure)


def histogram_picture(
    title: str,
    x_label: str,
    y_label: str,
    edges: Sequence[float],
    values: Sequence[float],
    marks: Mapping[str, float],
    log_x: bool = True,
) -> bytes:
    """PNG of one bar between each two edges, with named marks on the axis, such as quantiles."""
    figure, axes = _card(title, x_label, y_label, x_scale="log" if log_x else "linear")
    axes.bar(edges[:-1], values, np.diff(edges), align="edge", color=COLOURS[0], edgecolor=GROUND, linewidth=0.5)
    axes.set_xlim(edges[0], edges[-1])
    _mark_ticks(axes, edges)
    if all(float(value).is_integer() for value in values):
        axes.yaxis.get_major_locator().set_params(integer=True)
    axes.set_ylim(0, 1.5 * max([*values, 1e-9]))  # above the bars there is room for the marks
    half_way = math.sqrt(edges[0] * edges[-1]) if log_x else (edges[0] + edges[-1]) / 2
    box = {"facecolor": GROUND, "edgecolor": "none", "pad": 0.5}
    for number, (name, at) in enumerate(marks.items()):
        axes.axvline(at, color=INK, linewidth=1, linestyle=(0, (4, 2)))
        side = "left" if at < half_way else "right"
        text = f" {shown_name(name)}: {short_number(at)} "
        height = 0.96 - 0.065 * number  # each on a line of its own: quantiles may be equal
        style = {"ha": side, "va": "center", "color": INK, "fontsize": 8}
        axes.text(at, height, text, transform=axes.get_xaxis_transform(), bbox=box, **style)
    return png_of(figure)


def scatter_picture(title: str, x_label: str, y_label: str, points: Mapping[str, tuple[float, float]]) -> bytes:
    """PNG of named points (x, y), each joined to its name and values beside the axes.

    The axes are logarithmic, x above 1 and y above 0.1, and straight below: both may be zero.
    """
    figure, axes = _card(_of_all(title, len(points), MAX_POINTS), x_label, y_label)
    shown = sorted([*points.items()][:MAX_POINTS], key=lambda point: (point[1][1], -point[1][0], point[0]))
    axes.set_xscale("symlog", linthresh=1)
    axes.set_yscale("symlog", linthresh=0.1)
    _shorten_ticks(axes)
    axes.set_xlim(-0.2, 3 * max([x for _, (x, _) in shown] + [1.0]))
    axes.set_ylim(-0.02, 2 * max([y for _, (_, y) in shown] + [0.1]))
    for number, (name, (x, y)) in enumerate(shown):
        colour = COLOURS[number % len(COLOURS)]
        axes.plot([x], [y], "o", color=colour, markersize=7)
        axes.annotate(
            f"{shown_name(name)} ({short_number(x)}, {short_number(y)})",
            (x, y),
            (1.03, (number + 0.5) / len(shown)),  # a line each, however close the points are
            textcoords="axes fraction",
            color=INK,
            fontsize=8,
            va="center",
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.8, "relpos": (0, 0.5), "shrinkB": 3},
        )
    return png_of(figure)


def heatmap_picture(
    title: str, x_label: str, y_label: str, rows: Sequence[str], columns: Sequence[str], values: Sequence[Sequence[int]]
) -> bytes:
    """PNG of a table of counts: the darker the cell the larger, by the logarithm, with the value in each but of 0."""
    num_rows, num_columns = min(len(rows), MAX_CELLS), min(len(columns), MAX_CELLS)
    numbers = np.asarray(values, dtype=np.float64)[:num_rows, :num_columns]
    is_turned = num_columns > 3  # their names take height
    tall, wide = 1.6 + 0.3 * max(num_rows, 6 if is_turned else 3), max(WIDTH, 2.6 + 0.52 * num_columns)
    figure, axes = _card(_of_all(title, max(len(rows), len(columns)), MAX_CELLS), x_label, y_label, tall, wide)
    shade = np.log1p(numbers) / max(np.log1p(numbers.max(initial=0)), 1e-9)
    axes.imshow(_shades(DARKEST * shade), aspect="auto")
    axes.grid(visible=False)
    turned = {"rotation": 35, "ha": "right", "rotation_mode": "anchor"} if is_turned else {}
    names = [shown_name(name) for name in columns[:num_columns]]
    axes.set_xticks(range(num_columns), labels=names, fontsize=8, **turned)
    axes.set_yticks(range(num_rows), labels=[shown_name(name) for name in rows[:num_rows]], fontsize=8)
    axes.tick_params(length=0)
    for place in np.argwhere(numbers):
        text = short_number(numbers[*place])
        axes.text(place[1], place[0], text, ha="center", va="center", fontsize=8, color=INK)
    return png_of(figure)


def _shades(shade: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    """From the ground at 0 to the first colour at 1: float64[r, c] -> float64[r, c, 3]."""
    ground, full = (np.array([int(code[at : at + 2], 16) / 255 for at in (1, 3, 5)]) for code in (GROUND, COLOURS[0]))
    return ground + shade[..., None] * (full - ground)


def _card(
    title: str, x_label: str, y_label: str, height: float = HEIGHT, width: float = WIDTH, x_scale: str = "linear"
) -> "tuple[Figure, Axes]":
    """An empty opaque figure of the style with one pair of axes."""
    from matplotlib.figure import Figure  # 0.5 s: kept off the code location's import path

    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained", facecolor=GROUND)
    axes = figure.subplots()
    axes.set_facecolor(GROUND)
    axes.set_title(title, color=INK, fontsize=10.5, loc="left", fontweight="bold")
    axes.set_xlabel(x_label, color=INK, fontsize=9)
    axes.set_ylabel(y_label, color=INK, fontsize=9)
    axes.tick_params(colors=INK, labelsize=8)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("bottom", "left"))
        spine.set_color(INK)
    axes.set_xscale(x_scale)
    _shorten_ticks(axes)
    return figure, axes


def _shorten_ticks(axes: "Axes") -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter

    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: short_number(value)))
        axis.set_minor_formatter(NullFormatter())


def _mark_ticks(axes: "Axes", x: Sequence[float]) -> None:
    """No ticks between whole numbers, such as steps; more than one or two of them over few powers of ten."""
    from matplotlib.ticker import LogLocator, MaxNLocator

    locator, (low, high) = axes.xaxis.get_major_locator(), axes.get_xlim()
    if isinstance(locator, LogLocator):
        locator.set_params(subs=(1, 2, 5) if high < 300 * low else (1,))
    elif isinstance(locator, MaxNLocator) and all(float(value).is_integer() for value in x):
        locator.set_params(integer=True)


def _name_bars(axes: "Axes", names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), labels=[shown_name(name) for name in names], color=INK, fontsize=8)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")


def _legend(axes: "Axes", handles: Mapping[str, Any]) -> None:
    """Names beside the axes, where they hide nothing; none for a single one, which the axis is named after."""
    if len(handles) > 1:
        place = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.02), "borderaxespad": 0.3}
        names = [shown_name(name) for name in handles]
        axes.legend([*handles.values()], names, frameon=False, fontsize=8, labelcolor=INK, **place)


def _of_all(title: str, number: int, most: int) -> str:
    return title if number <= most else f"{title}: {most:,} of {number:,}"


def shown_name(name: str) -> str:
    r"""A name as a picture can be given it: ASCII, cut in the middle, and no dollar that begins a formula.

    >>> shown_name("fineweb/data/CC-MAIN-2013-20/train-00003-of-00014"), shown_name("$x^2$"), shown_name("_web")
    ('fineweb/data/C…rain-00003-of-00014', '\\$x^2\\$', ' _web')
    """
    text = name.encode("unicode_escape").decode()  # matplotlib's font has not every letter
    if len(text) > MAX_LABEL_CHARACTERS:
        text = f"{text[: MAX_LABEL_CHARACTERS - 20]}…{text[-19:]}"  # files differ in how their names end
    if text.startswith("_"):
        text = f" {text}"  # matplotlib takes a name with a leading underscore for none
    return text.replace("$", r"\$")


def short_number(value: float) -> str:
    """A number in three digits and a letter.

    >>> [short_number(value) for value in (0, 0.0123, 950, 12_345, 999_999, -2_500_000)]
    ['0', '0.0123', '950', '12.3k', '1M', '-2.5M']
    """
    number = float(f"{value:.3g}")
    for factor, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if factor <= abs(number) < math.inf:
            return f"{number / factor:.3g}{letter}"
    return f"{number:.3g}"


def thinned(x: Sequence[float], y: Sequence[float], most: int = MAX_LINE_POINTS) -> "tuple[Any, Any]":
    """The finite points of a line, or the lowest and the highest of each stretch of it: no spike is lost.

    >>> [values.tolist() for values in thinned([1, 2, 3, 4, 5, 6], [0, 9, 1, 2, -7, 3], most=4)]
    [[1.0, 2.0, 5.0, 6.0], [0.0, 9.0, -7.0, 3.0]]
    """
    points = np.array([x, y], dtype=np.float64)
    points = points[:, np.isfinite(points).all(axis=0)]
    if points.shape[1] > most:
        parts = np.array_split(points[1], most // 2)
        firsts = np.cumsum([0, *map(len, parts)])
        ends = [(first + part.argmin(), first + part.argmax()) for first, part in zip(firsts, parts, strict=False)]
        points = points[:, np.unique(ends)]
    return points[0], points[1]


def png_of(figure: "Figure") -> bytes:
    """The figure as PNG bytes: of a palette, and of fewer pixels where that is still too much."""
    dpi = DPI
    while len(picture := _encoded(figure, dpi)) > MAX_PICTURE_BYTES:
        dpi = dpi * 3 // 4
    return picture


def _encoded(figure: "Figure", dpi: int) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image

    figure.set_dpi(dpi)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    image = Image.fromarray(np.ascontiguousarray(np.asarray(canvas.buffer_rgba())[..., :3]))
    buffer = io.BytesIO()
    image.quantize(PALETTE, dither=Image.Dither.NONE).save(buffer, format="PNG", optimize=True)
    return buffer.getvalue()
