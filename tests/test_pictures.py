"""The style of pictures: that it reads on any page, that names are data, and that no data makes a picture too large."""

import io
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.cbook import is_math_text
from matplotlib.figure import Figure
from PIL import Image

from pipeline_assets import pictures
from pipeline_assets.pictures import (
    COLOURS,
    GROUND,
    INK,
    MAX_BARS,
    MAX_CELLS,
    MAX_LABEL_CHARACTERS,
    MAX_LINES,
    MAX_PICTURE_BYTES,
    MAX_POINTS,
    bar_picture,
    grouped_bar_picture,
    heatmap_picture,
    histogram_picture,
    interval_picture,
    line_picture,
    png_of,
    scatter_picture,
    shown_name,
    thinned,
)

HOSTILE = [
    "$x^{2",
    r"$\frac{1}{0}$",
    "cost $5 and $6",
    "_hidden",
    "",
    "two\nlines\0and\ta bell\a",
    "☃漢字🦄" * 90,
    "\u202eright to left",
    "\ud800",
    "\\",
    "\\$\\$",
    "<script>alert(1)</script>",
    "a" * 10_000,
]
NUMBERS = random.Random(7)
MANY = [f"{name}{number}" for number in range(6) for name in HOSTILE]


def many_values(number):
    return [NUMBERS.uniform(0, 1e6) for _ in range(number)]


def noisy_line(length=3_000):
    return range(length), [NUMBERS.gauss(0, 1) for _ in range(length)]


def drawn(names):
    """A picture of each kind whose names are these."""
    values = [[NUMBERS.randrange(10**9) for _ in names] for _ in names]
    reach = (names[0], [0.1, 0.5], [0.0, 1.0], [(0.0, 0.1), (0.9, 1.0)])
    return {
        "line": line_picture("Title", "x", "y", {name: noisy_line() for name in names}),
        "interval": interval_picture("Title", "x", "y", (names[0], [0, 1], [0, 1]), reach),
        "bar": bar_picture("Title", "x", "y", names, many_values(len(names))),
        "logarithmic bar": bar_picture("Title", "x", "y", names, many_values(len(names)), log_x=True),
        "grouped": grouped_bar_picture("Title", "x", names, {name: many_values(len(names)) for name in names}),
        "histogram": histogram_picture("Title", "x", "y", [1, 2, 4], [1, 2], dict.fromkeys(names[:8], 2.0)),
        "scatter": scatter_picture("Title", "x", "y", {name: (NUMBERS.random(), 0.0) for name in names}),
        "heatmap": heatmap_picture("Title", "x", "y", names, names, values),
    }


def pixels(picture):
    image = Image.open(io.BytesIO(picture))
    assert "transparency" not in image.info
    return np.asarray(image.convert("RGB")).reshape(-1, 3)


def colour(code):
    return tuple(int(code[at : at + 2], 16) for at in (1, 3, 5))


def contrast(one, other):
    """WCAG 2.2, contrast ratio: (L1 + 0.05) / (L2 + 0.05) of relative luminances."""

    def luminance(rgb):
        linear = [
            v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in (channel / 255 for channel in rgb)
        ]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted([luminance(one), luminance(other)])
    return (high + 0.05) / (low + 0.05)


def test_the_formula_of_contrast_is_the_standards():
    assert contrast((0, 0, 0), (255, 255, 255)) == pytest.approx(21)
    assert contrast((119, 119, 119), (255, 255, 255)) == pytest.approx(4.48, abs=0.01)


def test_ink_and_lines_read_on_the_card():
    assert contrast(colour(INK), colour(GROUND)) >= 7  # text, at level AAA
    for code in COLOURS:
        assert contrast(colour(code), colour(GROUND)) >= 4  # what is drawn: 3 at level AA
    assert len(set(COLOURS)) == MAX_LINES


def test_values_read_on_the_darkest_cell():
    counted = Counter(map(tuple, pixels(heatmap_picture("Title", "x", "y", ["a"], ["b"], [[10**6]])).tolist()))
    darkest = next(rgb for rgb, _ in counted.most_common() if rgb != colour(GROUND))
    assert contrast(colour(INK), darkest) >= 4.5


def card(picture):
    return np.asarray(Image.open(io.BytesIO(picture)).convert("RGB"))


def test_a_heatmap_leaves_a_count_of_0_blank():
    def middle(value):
        found = card(heatmap_picture("Title", "x", "y", ["a"], ["b"], [[value]]))
        row, column = found.shape[0] // 2, found.shape[1] // 2
        return found[row - 40 : row + 40, column - 40 : column + 40]

    assert (middle(0) == colour(GROUND)).all()
    assert middle(7).min() < 60  # the ink of its number


@pytest.mark.parametrize("number", [4, 5, 6, 13])
def test_a_label_beside_few_rows_is_not_cut_off_by_long_names_below(number):
    names = [f"{number} grpcio-health-checking-1.81.1" for number in range(number)]
    counts = [[1] * number] * number
    found = card(heatmap_picture("Duplicates", "of the one kept", "crawl of the one removed", names, names, counts))
    strip = found[:, :24]  # the label, and nothing else
    inked = np.flatnonzero((strip != colour(GROUND)).any(axis=(1, 2)))
    assert len(range(inked[0], inked[-1])) > 150
    assert inked[0] > 2


def test_a_card_is_opaque_and_has_the_colours_of_the_style():
    picture = line_picture("Title", "x", "y", {str(number): ([0, 1], [number, number]) for number in range(MAX_LINES)})
    found = pixels(picture).astype(int)
    assert Counter(map(tuple, found.tolist())).most_common(1)[0][0] == colour(GROUND)
    for code in (INK, *COLOURS):
        assert np.abs(found - colour(code)).max(axis=1).min() <= 8, code


def test_no_name_and_no_number_of_names_makes_a_picture_too_large():
    assert len(MANY) > max(MAX_BARS, MAX_CELLS, MAX_POINTS, MAX_LINES)
    for kind, picture in drawn(MANY).items():
        assert picture.startswith(b"\x89PNG"), kind
        assert len(picture) <= MAX_PICTURE_BYTES, kind


@pytest.mark.parametrize("first", range(0, len(HOSTILE), MAX_LINES - 1))
def test_every_kind_draws_any_name(first):
    """A warning, such as that of a letter that the font lacks, fails a test."""
    for kind, picture in drawn(HOSTILE[first : first + MAX_LINES - 1]).items():
        assert pixels(picture).min() < 255, kind


@given(st.text(st.characters(exclude_categories=())))
def test_a_name_is_text_and_no_markup(name):
    shown = shown_name(name)
    assert not is_math_text(shown)
    assert not shown.startswith("_")
    assert all(letter == "…" or " " <= letter <= "~" for letter in shown)
    text = shown.replace(r"\$", "$")
    assert len(text) <= MAX_LABEL_CHARACTERS + 1
    if "…" not in text:
        expected = f" {name}" if name.startswith("_") else name
        assert text.encode().decode("unicode_escape") == expected


def test_what_is_left_out_is_said():
    names = [f"n{number}" for number in range(30)]
    values = many_values(30)
    assert bar_picture("Bars", "x", "y", names, values) == bar_picture(
        "Bars: 20 of 30", "x", "y", names[:20], values[:20]
    )
    lines = {name: ([0, 1], [0, value]) for name, value in zip(names, values, strict=True)}
    some = dict(list(lines.items())[:MAX_LINES])
    assert line_picture("Lines", "x", "y", lines) == line_picture("Lines: 8 of 30", "x", "y", some)


def test_the_same_input_gives_the_same_bytes():
    def picture(last):
        return bar_picture("Bars", "x", "y", ["a", "b"], [1, last])

    assert picture(2) == picture(2) != picture(3)


def test_a_picture_that_compresses_badly_gets_fewer_pixels():
    figure = Figure(figsize=(7, 7), dpi=pictures.DPI)
    figure.figimage(np.random.default_rng(3).integers(0, 255, (700, 700, 3), dtype=np.uint8))
    assert len(pictures._encoded(figure, pictures.DPI)) > 4 * MAX_PICTURE_BYTES
    assert 0 < len(png_of(figure)) <= MAX_PICTURE_BYTES


@pytest.mark.parametrize("values", [[], [float("nan")], [float("inf"), 1.0, float("-inf")], [1.0, float("nan"), 3.0]])
def test_a_loss_that_is_no_number_is_left_out(values):
    steps = range(1, len(values) + 1)
    finite = [(step, value) for step, value in zip(steps, values, strict=True) if abs(value) < float("inf")]
    x, y = zip(*finite, strict=True) if finite else ((), ())
    assert line_picture("Loss", "step", "nats", {"a": (steps, values)}) == line_picture(
        "Loss", "step", "nats", {"a": (x, y)}
    )


@settings(max_examples=50)
@given(st.lists(st.floats(allow_nan=True, allow_infinity=True, width=32), max_size=60), st.integers(2, 20))
def test_a_thinned_line_keeps_its_extremes(values, most):
    points = [(x, y) for x, y in enumerate(values) if abs(y) < float("inf")]
    x, y = thinned(range(len(values)), values, most)
    found = list(zip(x.tolist(), y.tolist(), strict=True))
    assert found == sorted(found)
    assert set(found) <= set(points)
    assert len(found) <= max(most, 0) or len(points) <= most
    if points:
        assert {min(y for _, y in points), max(y for _, y in points)} <= set(y.tolist())
    if len(points) <= most:
        assert found == points
