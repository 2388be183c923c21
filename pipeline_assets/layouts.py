"""What the page of packing_stats shows: other ways of laying the same documents into rows, in tables and plots.

In: the plans of a token_shards artifact. Out: a file of tables and five pictures, then metadata of them. Promise: what
is compared is counted on the same documents; a row that packs fewer of them says how many. Nothing is decided here.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline_assets.pictures import bar_picture, histogram_picture, line_picture, scatter_picture
from pipeline_assets.report import files_metadata, pictures_metadata, shown_table
from pipeline_assets.stored_batches import TABLES_NAME
from pipeline_assets.transforms.utilisation import (
    ConcatenatedLayout,
    Layout,
    PackedLayout,
    concatenated,
    layout_of_packs,
    packed,
    padded,
    truncated,
)
from resources.tables import read_json, write_json
from training_io.packing import STRATEGIES, STREAMING, pack
from training_io.plan import Plan

PICTURES = {
    "utilisation": "utilisation by layout",
    "waste_and_displacement": "waste against displacement, by strategy",
    "row_lengths": "utilisation by row length",
    "mixed_windows": "windows that hold several documents",
    "document_lengths": "distribution of the lengths of documents, with quantiles",
}
MARKED = (0.1, 0.5, 0.9, 0.99)  # quantiles in the picture of lengths
LENGTH_BINS = 40
ROW_LENGTHS = (1_024, 2_048, 4_096, 8_192)
MAX_PACKED_DOCUMENTS = 250_000  # elsewhere than at the recipe's limits, where the plan itself is shown
ON_ARRIVAL, AHEAD = "oldest_first", "best_fit_decreasing"  # examples where the recipe's strategy is of the other kind
KEYS = ("layout", "strategy", "split", "of", "choice", "row_length", "for", "against", "here")

I64 = npt.NDArray[np.int64]


def compared_strategies(chosen: str) -> list[str]:
    """The recipe's strategy, then the others; padded rows are counted from the lengths alone."""
    return [chosen, *(name for name in STRATEGIES if name not in (chosen, "padded"))]


def write_layouts(folder: Path, plans: Sequence[Plan]) -> dict[str, Any]:
    """Write tables and pictures of the plans, the training split's first; returns the utilisation of each layout."""
    plan = plans[0]
    lengths = np.delete(np.asarray(plan.index.lengths, dtype=np.int64), plan.diverted)  # which are in no layout
    doc, start, end = plan.locate(np.arange(plan.num_segments))
    own = layouts_of_plan(plan, lengths, doc, end - start)
    strategies = compared_strategies(plan.strategy)
    others = [
        layouts_at(lengths, row_len, strategies, plan.buffer) for row_len in ROW_LENGTHS if row_len != plan.max_seq_len
    ]
    by_length = sorted([own, *others], key=lambda layouts: layouts[0].row_len)
    tables = {
        "layouts": [_layout_row(layout) for layout in own],
        "strategies": [_strategy_row(layout) for layout in own if isinstance(layout, PackedLayout)],
        "all_layouts": [_layout_row(layout) for layouts in by_length for layout in layouts],
        "utilisation_by_row_length": [_by_layout(layouts, "utilisation") for layouts in by_length],
        "rows_by_row_length": [_by_layout(layouts, "num_rows") for layouts in by_length],
        "windows": [_windows_row(layouts) for layouts in by_length],
        "attention_work": [_attention_row(layouts, plan.strategy) for layouts in by_length],
        "counted_apart": [_counted_apart(each) for each in plans],
        "lengths": [{"of": "documents", **quantiles(lengths)}, {"of": "segments", **quantiles(end - start)}],
        "choices": _choices(own, plan.strategy),
    }
    write_json(tables, folder / TABLES_NAME)
    names, shares = [layout.name for layout in own], [100 * layout.utilisation for layout in own]
    share = "% of cells that hold a token"
    pictures = {
        "utilisation": bar_picture("Utilisation of rows by layout", share, "layout", names, shares),
        "waste_and_displacement": _waste_picture(tables["strategies"]),
        "row_lengths": _row_lengths_picture(by_length, plan.strategy),
        "mixed_windows": _windows_picture(by_length),
        "document_lengths": _lengths_picture(lengths),
    }
    for name, picture in pictures.items():
        (folder / f"{name}.png").write_bytes(picture)
    return {f"{layout.name}_utilisation": layout.utilisation for layout in own}


def layouts_metadata(folder: Path) -> dict[str, Any]:
    """Tables and pictures for the asset's page."""
    tables = {name: rows for name, rows in read_json(folder / TABLES_NAME).items() if name != "all_layouts"}
    shown: dict[str, Any] = {}
    for name, rows in tables.items():
        shown |= shown_table(name, [_for_reading(row) for row in rows])
    return {
        **shown,
        **pictures_metadata(folder, PICTURES),
        **files_metadata(folder / TABLES_NAME),
        "note": "High utilisation proves nothing about meaning: the checks on pairs, targets and isolation do.",
        "hours_of_padding": "On the page of varlen_training_run, from the tokens a second that it measured.",
    }


def _for_reading(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of a table, which the file has with sorted columns, with what names it in front and six decimals."""
    ordered = {**{name: row[name] for name in KEYS if name in row}, **row}
    return {name: round(value, 6) if isinstance(value, float) else value for name, value in ordered.items()}


def layouts_of_plan(plan: Plan, lengths: I64, doc: I64, sizes: I64) -> tuple[Layout, ...]:
    """The layouts at the plan's own limits: its packs as they are, and what other strategies make of its segments."""
    chosen, *others = compared_strategies(plan.strategy)
    return (
        *unpacked(lengths, plan.max_seq_len),
        layout_of_packs(chosen, doc, sizes, plan.capacity, plan.order, plan.pack_offsets),
        *(
            layout_of_packs(name, doc, sizes, plan.capacity, *pack(sizes, plan.capacity, name, plan.buffer))
            for name in others
        ),
    )


def layouts_at(lengths: I64, row_len: int, strategies: Sequence[str], buffer: int) -> tuple[Layout, ...]:
    """The layouts in rows of another length; of very many documents every n-th is packed."""
    some = lengths[:: max(1, -(-len(lengths) // MAX_PACKED_DOCUMENTS))]
    return (*unpacked(lengths, row_len), *(packed(some, row_len, row_len, name, buffer) for name in strategies))


def unpacked(lengths: I64, row_len: int) -> tuple[Layout, Layout, Layout]:
    """The layouts that take no packing: one document a row, whole or its beginning, and all of them end to end."""
    return padded(lengths, row_len), truncated(lengths, row_len), concatenated(lengths, row_len)


def quantiles(lengths: I64) -> dict[str, float]:
    """Number, mean, quantiles and longest of lengths in tokens; zeros where there are none."""
    values = lengths if len(lengths) else np.zeros(1, dtype=np.int64)
    shares = (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99)
    return {
        "number": len(lengths),
        "mean": float(values.mean()),
        **{f"{share:.0%}": float(np.quantile(values, share)) for share in shares},
        "longest": int(values.max()),
    }


def _packs_of(layouts: Sequence[Layout], strategy: str) -> PackedLayout:
    return next(layout for layout in layouts if isinstance(layout, PackedLayout) and layout.name == strategy)


def _layout_row(layout: Layout) -> dict[str, Any]:
    return {
        "layout": layout.name,
        "row_length": layout.row_len,
        "rows": layout.num_rows,
        "cells": layout.num_cells,
        "tokens": layout.num_real,
        "utilisation": layout.utilisation,
        "rows_above_minimum": layout.num_excess_rows,
        "tokens_left_out": layout.num_dropped,
        "documents": layout.num_documents,
        "documents_cut": layout.num_documents_cut,
        "segments": layout.num_segments,
        "causal_pairs": layout.causal_pairs,
        "varlen_pairs": layout.isolated_pairs,
    }


def _strategy_row(layout: PackedLayout) -> dict[str, Any]:
    """What a strategy leaves empty, against ceil(tokens / capacity) packs, and how far it moves segments."""
    return {
        "strategy": layout.name,
        "packs": layout.num_rows,
        "packs_above_minimum": layout.num_excess_rows,
        "waste": 1 - layout.utilisation,
        "segments_a_pack": _share(layout.num_segments, layout.num_rows),
        "mean_displacement": layout.mean_displacement,
        "max_displacement": layout.max_displacement,
    }


def _by_layout(layouts: Sequence[Layout], figure: str) -> dict[str, Any]:
    """One figure of each layout of one row length, and of how many documents those of strategies are."""
    return {
        "row_length": layouts[0].row_len,
        **{layout.name: getattr(layout, figure) for layout in layouts},
        "documents_packed": layouts[-1].num_documents,
    }


def _concatenated(layouts: Sequence[Layout]) -> ConcatenatedLayout:
    return next(layout for layout in layouts if isinstance(layout, ConcatenatedLayout))


def _windows_row(layouts: Sequence[Layout]) -> dict[str, Any]:
    """What windows over the concatenated documents mix, cut and leave out."""
    windows = _concatenated(layouts)
    return {
        "row_length": windows.row_len,
        "windows": windows.num_rows,
        "share_with_boundary": _share(windows.num_rows_with_boundary, windows.num_rows),
        "documents_a_window": windows.documents_per_row,
        "share_of_tokens_after_unrelated": _share(windows.num_after_unrelated, windows.num_real),
        "documents_cut": windows.num_documents_cut,
        "share_of_documents_cut": _share(windows.num_documents_cut, windows.num_documents),
        "tail_left_out": windows.num_dropped,
    }


def _attention_row(layouts: Sequence[Layout], strategy: str) -> dict[str, Any]:
    """Query-key pairs a token: of padded rows, of packs under a mask that skips no block, of a varlen kernel."""
    rows, packs = layouts[0], _packs_of(layouts, strategy)
    return {
        "row_length": rows.row_len,
        "padded_pairs_a_token": _share(rows.causal_pairs, rows.num_real),
        "masked_pairs_a_token": _share(packs.causal_pairs, packs.num_real),
        "varlen_pairs_a_token": _share(packs.isolated_pairs, packs.num_real),
        "padded_over_varlen": _share(rows.causal_pairs * packs.num_real, rows.num_real * packs.isolated_pairs),
        "masked_over_varlen": _share(packs.causal_pairs, packs.isolated_pairs),
    }


def _counted_apart(plan: Plan) -> dict[str, Any]:
    """Packs, segments and tokens of a split, which are three different numbers."""
    return {
        "split": plan.split,
        "documents": plan.index.num_documents,
        "segments": plan.num_segments,
        "packs": plan.num_packs,
        "tokens": plan.index.num_tokens,
        "targets": plan.num_targets,
        "repeated": plan.num_repeated,
        "free_slots": plan.num_packs * plan.capacity - plan.num_inputs,
        "packs_above_minimum": plan.num_packs - -(-plan.num_inputs // plan.capacity),
        "steps": plan.num_steps,
    }


def _choices(layouts: Sequence[Layout], strategy: str) -> list[dict[str, str]]:
    """What speaks for and against each way of making batches, with what it comes to on these documents."""
    rows, windows = layouts[0], _windows_row(layouts)
    packs = _packs_of(layouts, strategy if strategy in STREAMING else ON_ARRIVAL)
    ahead = _packs_of(layouts, AHEAD if strategy in STREAMING else strategy)
    packs_cut = _share(packs.num_documents_cut, packs.num_documents)
    return [
        {
            "choice": "cut the stream of all documents at a fixed length",
            "for": "every row has one shape and no cell is empty",
            "against": "a row's end cuts documents that would have fitted, and rows mix documents",
            "here": f"{windows['share_of_documents_cut']:.1%} of documents cut, {windows['share_with_boundary']:.1%} of"
            f" rows mix documents, {windows['share_of_tokens_after_unrelated']:.1%} of tokens follow another document",
        },
        {
            "choice": "one document a row, padded",
            "for": "rows and documents are the same thing",
            "against": "empty cells are computed in every layer",
            "here": f"{1 - rows.utilisation:.1%} of cells empty, {rows.num_rows:,} rows for {packs.num_rows:,} packs",
        },
        {
            "choice": f"pack ahead of time, offline ({ahead.name})",
            "for": "the fewest rows, and nothing to combine while training",
            "against": "other limits mean packing again, and the order follows the lengths",
            "here": _moved(ahead),
        },
        {
            "choice": f"pack as documents arrive ({packs.name})",
            "for": "documents that fit stay whole, and one set of shards serves any limit",
            "against": "a buffer to search, and a place in the order to restore",
            "here": f"{packs_cut:.1%} of documents cut, {_moved(packs)}",
        },
    ]


def _moved(layout: PackedLayout) -> str:
    return f"{1 - layout.utilisation:.3%} of slots empty, moved by {layout.mean_displacement:,.1f} packs on average"


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _waste_picture(rows: Sequence[Mapping[str, Any]]) -> bytes:
    return scatter_picture(
        "Waste and displacement by strategy",
        "x: mean displacement, packs (logarithmic above 1)",
        "y: waste, % of slots (logarithmic above 0.1)",
        {row["strategy"]: (row["mean_displacement"], 100 * row["waste"]) for row in rows},
    )


def _row_lengths_picture(by_length: Sequence[Sequence[Layout]], strategy: str) -> bytes:
    row_lengths = [layouts[0].row_len for layouts in by_length]
    lines = [*zip(*(layouts[:3] for layouts in by_length), strict=True)]
    lines.append(tuple(_packs_of(layouts, strategy) for layouts in by_length))
    series = {line[0].name: (row_lengths, [100 * layout.utilisation for layout in line]) for line in lines}
    return line_picture("Utilisation by row length", "tokens a row", "% of cells that hold a token", series)


def _windows_picture(by_length: Sequence[Sequence[Layout]]) -> bytes:
    rows = [_windows_row(layouts) for layouts in by_length]
    lines = {
        "windows with a boundary": "share_with_boundary",
        "tokens after another document": "share_of_tokens_after_unrelated",
        "documents cut": "share_of_documents_cut",
    }
    series = {
        label: ([row["row_length"] for row in rows], [100 * row[name] for row in rows]) for label, name in lines.items()
    }
    return line_picture("Windows over all documents", "tokens a window", "% of windows, tokens, documents", series)


def _lengths_picture(lengths: I64) -> bytes:
    edges, shares, marks = length_histogram(lengths)
    return histogram_picture("Lengths of documents", "tokens (logarithmic)", "% of documents", edges, shares, marks)


def length_histogram(lengths: I64) -> tuple[list[int], list[float], dict[str, float]]:
    """Edges, % of documents from each edge up to the next, and quantiles by name; the last edge is past the longest.

    Edges are whole numbers on a logarithmic scale. A document of no token counts as one of a single token, which a
    logarithmic axis can show.

    >>> length_histogram(np.array([0, 1, 2, 2]))
    ([1, 2, 3], [50.0, 50.0], {'10 %': 1.0, '50 %': 1.5, '90 %': 2.0, '99 %': 2.0})
    """
    values = np.maximum(lengths if len(lengths) else np.zeros(1, np.int64), 1)
    edges = np.unique(np.rint(np.geomspace(values.min(), values.max() + 1, LENGTH_BINS + 1)).astype(np.int64))
    counts, _ = np.histogram(values, edges)
    shares = (100 * counts / max(len(lengths), 1)).tolist() if len(lengths) else [0.0] * len(counts)
    marks = {f"{100 * share:.0f} %": float(np.quantile(values, share)) for share in MARKED}
    return edges.tolist(), shares, marks
