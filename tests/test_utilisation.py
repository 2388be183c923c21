"""Layouts compared: each number recounted on a grid of cells."""

from itertools import pairwise

import naive_batches as naive
import naive_layouts
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline_assets.transforms.utilisation import (
    concatenated,
    displacements,
    packed,
    padded,
    padding_hours,
    truncated,
)
from training_io.packing import STRATEGIES, pack

relaxed = settings(deadline=None, max_examples=60)
NINE = np.array([3, 8, 2, 5, 1, 6, 4, 7, 3]) + 1  # with their EOS
lengths_with_eos = st.lists(st.integers(1, 20), max_size=15)
row_lens = st.integers(1, 9)


def grid_numbers(rows, row_len):
    return (
        len(rows),
        sum(cell is not None for row in rows for cell in row),
        len(rows) * row_len * (row_len + 1) // 2,
        sum(naive.causal_pairs(row) for row in rows),
        naive_layouts.num_runs(rows),
    )


def numbers_of(layout):
    return layout.num_rows, layout.num_real, layout.causal_pairs, layout.isolated_pairs, layout.num_segments


def test_nine_documents_padded_to_eight():
    layout = padded(NINE, 8)
    assert (layout.num_rows, layout.num_cells, layout.num_real) == (9, 72, 39)
    assert round(100 * (1 - layout.utilisation)) == 46
    assert truncated(NINE, 8).utilisation == layout.utilisation


def test_nine_documents_concatenated():
    layout = concatenated(NINE, 8)
    assert (layout.num_rows, layout.num_cells, layout.num_real, layout.num_dropped) == (6, 48, 48, 0)
    assert layout.utilisation == 1
    assert layout.num_rows_with_boundary == 6
    assert layout.documents_per_row == 2
    assert (layout.num_documents, layout.num_documents_cut, layout.num_segments) == (9, 3, 12)
    assert layout.num_after_unrelated == 4 + 3 + 2 + 1 + 4 + 4
    half = concatenated(NINE, 4)
    assert (half.num_rows, half.num_documents_cut, half.num_rows_with_boundary) == (12, 5, 3)


def test_two_short_documents_share_eight_slots():
    layout = concatenated(np.array([4, 3]), 7)
    assert (layout.num_real, 8 - layout.num_real) == (7, 1)
    assert padded(np.array([5, 4]), 8).num_cells == 16  # 3 and 2 body tokens, each with its end marker as input


@relaxed
@given(lengths_with_eos, row_lens)
def test_padded_rows_are_a_grid(lengths, row_len):
    rows = naive.padded_grid([[number] * (length - 1) for number, length in enumerate(lengths)], row_len)
    layout = padded(np.array(lengths, dtype=np.int64), row_len)
    assert numbers_of(layout) == grid_numbers(rows, row_len)
    assert layout.num_documents == sum(length > 1 for length in lengths)
    assert layout.num_documents_cut == naive_layouts.owners_in_several_rows(rows)


@relaxed
@given(lengths_with_eos, row_lens)
def test_truncated_rows_keep_what_fits(lengths, row_len):
    docs = [[number] * (length - 1) for number, length in enumerate(lengths) if length > 1]
    rows = naive.padded_grid([doc[:row_len] for doc in docs], row_len)
    layout = truncated(np.array(lengths, dtype=np.int64), row_len)
    assert numbers_of(layout) == grid_numbers(rows, row_len)
    assert layout.num_dropped + layout.num_real == sum(lengths) - len(lengths)
    assert (layout.num_documents, layout.num_documents_cut) == (len(docs), sum(len(doc) > row_len for doc in docs))
    if docs:
        expected = sum(min(len(doc), row_len) for doc in docs) / len(docs) / row_len
        assert layout.utilisation == pytest.approx(expected)


@relaxed
@given(lengths_with_eos, row_lens)
def test_concatenated_rows_are_a_walk_over_the_stream(lengths, row_len):
    docs = [[number] * length for number, length in enumerate(lengths)]
    rows = naive.concatenated_rows(docs, row_len)
    layout = concatenated(np.array(lengths, dtype=np.int64), row_len)
    assert numbers_of(layout) == grid_numbers(rows, row_len)
    assert layout.num_dropped == sum(lengths) - layout.num_real
    assert layout.num_rows_with_boundary == sum(len(set(row)) > 1 for row in rows)
    assert layout.num_after_unrelated == sum(owner != row[0] for row in rows for owner in row)
    if rows:
        assert layout.documents_per_row == pytest.approx(sum(len(set(row)) for row in rows) / len(rows))
    stream = [number for doc in docs for number in doc]
    cut = {stream[at] for at in range(row_len, len(stream), row_len) if stream[at] == stream[at - 1]}
    assert layout.num_documents_cut == len(cut)
    assert layout.num_documents == len(lengths)


@relaxed
@given(lengths_with_eos, row_lens, st.integers(0, 10), st.sampled_from(sorted(STRATEGIES)))
def test_packs_hold_every_pair_and_varlen_pays_for_them_only(lengths, max_seq_len, more, strategy):
    capacity = max_seq_len + more
    layout = packed(np.array(lengths, dtype=np.int64), max_seq_len, capacity, strategy, 8)
    assert layout.num_real == sum(lengths) - len(lengths)
    segments = [end - start for length in lengths for start, end in naive.segments_of(length, max_seq_len)]
    assert layout.isolated_pairs == sum(naive.causal_pairs([0] * segment) for segment in segments)
    assert layout.isolated_pairs <= layout.causal_pairs
    assert layout.num_excess_rows >= 0
    assert 0 < layout.utilisation <= 1
    assert layout.num_segments == len(segments)
    assert layout.num_documents == sum(length > 1 for length in lengths)
    assert layout.num_documents_cut == sum(length - 1 > max_seq_len for length in lengths)


@relaxed
@given(st.lists(st.integers(1, 9), max_size=20), st.integers(0, 9), st.sampled_from(sorted(STRATEGIES)))
def test_displacement_is_counted_from_the_place_in_arrival_order(sizes, more, strategy):
    capacity = 9 + more
    order, offsets = pack(sizes, capacity, strategy, 5)
    packs = [order[start:end].tolist() for start, end in pairwise(offsets)]
    moved = displacements(np.array(sizes, dtype=np.int64), order, offsets)
    assert moved.tolist() == naive_layouts.displacements(packs, sizes)
    layout = packed(np.array(sizes, dtype=np.int64) + 1, 9, capacity, strategy, 5)
    assert layout.max_displacement == max(moved.tolist(), default=0)
    assert layout.mean_displacement == pytest.approx(moved.mean() if len(moved) else 0)


def test_nine_documents_packed():
    layout = packed(NINE, 8, 8, "oldest_first", 64)
    assert (layout.num_rows, layout.num_excess_rows, layout.num_documents_cut) == (5, 0, 0)
    assert layout.isolated_pairs == 6 + 36 + 3 + 15 + 1 + 21 + 10 + 28 + 6
    assert (padded(NINE, 8).causal_pairs, layout.causal_pairs) == (9 * 36, 5 * 36)


def test_a_third_of_padding_is_nine_more_hours_of_seventeen():
    hours = 1_761_607_680 / 28_296 / 3_600
    assert hours == pytest.approx(17.3, abs=0.05)
    assert hours + padding_hours(1_761_607_680, 28_296, 1 - 0.347) == pytest.approx(26.5, abs=0.05)
    assert padding_hours(10, 1, utilisation=1.0) == 0


def test_no_documents_are_no_rows():
    nothing = np.array([], dtype=np.int64)
    for layout in (
        padded(nothing, 4),
        truncated(nothing, 4),
        concatenated(nothing, 4),
        packed(nothing, 4, 4, "best_fit", 2),
    ):
        assert (layout.num_documents, layout.num_rows, layout.num_real, layout.utilisation) == (0, 0, 0, 1)
