"""Segments: every input once, each at most the limit, with the token after it as its target."""

import naive_batches as naive
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from training_io.errors import RecipeError
from training_io.segments import (
    Segments,
    cut_document,
    cut_with_overlap,
    first_segments,
    locate_segments,
    repeated_inputs,
    segment_table,
)

relaxed = settings(deadline=None, max_examples=80)
limits = st.integers(1, 9)


def test_the_next_token_of_a_cut_is_the_target_of_the_segment_before():
    tokens = np.array([11, 12, 13, 14, 15, 99])
    segments = cut_document(len(tokens), 4).tolist()
    assert [tokens[a:b].tolist() for a, b in segments] == [[11, 12, 13, 14], [15]]
    assert [tokens[a + 1 : b + 1].tolist() for a, b in segments] == [[12, 13, 14, 15], [99]]


@pytest.mark.parametrize(("num_tokens", "lengths"), [(9_001, [4_096, 4_096, 808]), (8_991, [4_096, 4_096, 798])])
def test_long_documents_keep_every_pair(num_tokens, lengths):
    assert np.diff(cut_document(num_tokens, 4_096), axis=1).ravel().tolist() == lengths


@relaxed
@given(st.integers(0, 40), limits)
def test_one_document_is_cut_as_a_walk_would(num_tokens, max_seq_len):
    cut = cut_document(num_tokens, max_seq_len)
    assert (cut.dtype, cut.shape[1]) == (np.int64, 2)
    assert [tuple(row) for row in cut.tolist()] == naive.segments_of(num_tokens, max_seq_len)


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_a_document_of_its_eos_alone_has_no_segment(num_tokens):
    assert cut_document(num_tokens, 4).shape == (0, 2)


@relaxed
@given(st.lists(st.integers(1, 40), max_size=12), limits)
def test_the_table_is_the_documents_one_after_another(lengths, max_seq_len):
    array = np.array(lengths, dtype=np.int64)
    expected = [(d, a, b) for d, n in enumerate(lengths) for a, b in naive.segments_of(n, max_seq_len)]
    table = segment_table(array, max_seq_len)
    assert all(column.dtype == np.int64 for column in table)
    assert list(zip(*(column.tolist() for column in table), strict=True)) == expected
    firsts = first_segments(array, max_seq_len)
    assert firsts.tolist() == [sum(d < n for d, _, _ in expected) for n in range(len(lengths) + 1)]
    numbers = np.arange(len(expected))[::-1]
    located = locate_segments(numbers, firsts, array, max_seq_len)
    assert list(zip(*(column.tolist() for column in located), strict=True)) == expected[::-1]


def test_an_overlapping_window_begins_before_the_cut():
    segments = cut_with_overlap(6_000, 4_000, 500)
    assert segments.tolist() == [[0, 4_000, 0], [3_500, 6_000, 500]]
    processed = int((segments[:, 1] - segments[:, 0]).sum())
    assert processed == 6_500
    assert round(100 * (processed - 6_000) / 6_000, 1) == 8.3


@relaxed
@given(st.integers(0, 60), limits, st.data())
def test_what_is_new_in_each_window_covers_every_input_once(num_inputs, max_seq_len, data):
    overlap = data.draw(st.integers(0, max_seq_len - 1))
    segments = cut_with_overlap(num_inputs, max_seq_len, overlap).tolist()
    fresh = [position for start, end, repeated in segments for position in range(start + repeated, end)]
    assert fresh == list(range(num_inputs))
    assert all(0 < end - start <= max_seq_len and end - start > repeated for start, end, repeated in segments)
    assert [repeated for _, _, repeated in segments] == [0, *[overlap] * (len(segments) - 1)][: len(segments)]


@relaxed
@given(st.lists(st.integers(1, 60), max_size=12), limits, st.data())
def test_overlapping_segments_are_located_as_a_walk_would_cut_them(lengths, max_seq_len, data):
    overlap = data.draw(st.integers(0, max_seq_len - 1))
    walked = [(d, *row) for d, n in enumerate(lengths) for row in naive.overlapping_segments(n, max_seq_len, overlap)]
    array = np.array(lengths, dtype=np.int64)
    doc, start, end = segment_table(array, max_seq_len, overlap)
    columns = (doc, start, end, repeated_inputs(start, overlap))
    assert all(column.dtype == np.int64 for column in columns)
    assert list(zip(*(column.tolist() for column in columns), strict=True)) == walked
    segments = Segments(array, max_seq_len, overlap)
    assert len(segments) == len(walked)
    located = segments.locate(np.arange(len(walked))[::-1])
    assert list(zip(*(column.tolist() for column in located), strict=True)) == [row[:3] for row in walked[::-1]]
    assert list(segments.lengths_from(0)) == [end - start for _, start, end, _ in walked]
    for num_tokens in lengths:
        rows = [tuple(row) for row in cut_with_overlap(num_tokens - 1, max_seq_len, overlap).tolist()]
        assert rows == naive.overlapping_segments(num_tokens, max_seq_len, overlap)


@pytest.mark.parametrize("overlap", [-1, 4, 5])
def test_an_overlap_that_makes_no_progress_is_refused(overlap):
    with pytest.raises(RecipeError, match=f"found {overlap}"):
        cut_with_overlap(10, 4, overlap)
    with pytest.raises(RecipeError, match=f"found {overlap}"):
        Segments(np.array([11]), 4, overlap)


@pytest.mark.parametrize("cut", [cut_document, lambda n, limit: segment_table(np.array([n]), limit)])
def test_a_limit_below_one_is_refused(cut):
    with pytest.raises(RecipeError, match="max_seq_len"):
        cut(10, 0)
