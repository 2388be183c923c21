"""Cutting at section ends: sections that fit stay whole, nothing is lost."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline_assets.transforms.boundaries import cut_at_boundaries

relaxed = settings(deadline=None, max_examples=80)


def test_four_chapters_stay_four_bodies():
    ranges = cut_at_boundaries([3_000, 6_500, 9_500, 12_000], 12_000, 4_000)
    assert np.diff(ranges, axis=1).ravel().tolist() == [3_000, 3_500, 3_000, 2_500]


def test_without_sections_cuts_are_fixed():
    assert cut_at_boundaries([], 12_000, 4_000).tolist() == [[0, 4_000], [4_000, 8_000], [8_000, 12_000]]


def test_small_sections_are_not_merged_and_empty_ones_vanish():
    assert cut_at_boundaries([0, 1, 2, 2, 3], 3, 100).tolist() == [[0, 1], [1, 2], [2, 3]]


def test_no_tokens_give_no_range():
    assert cut_at_boundaries([], 0, 5).shape == (0, 2)


@relaxed
@given(st.lists(st.integers(0, 60)), st.integers(0, 20), st.integers(1, 15))
def test_every_token_once_and_only_long_sections_are_cut(ends, tail, max_len):
    ends = sorted(ends)
    num_tokens = (ends[-1] if ends else 0) + tail
    ranges = cut_at_boundaries(ends, num_tokens, max_len).tolist()
    assert [position for start, end in ranges for position in range(start, end)] == list(range(num_tokens))
    assert all(0 < end - start <= max_len for start, end in ranges)
    cuts = {end for _, end in ranges}
    assert cuts >= {end for end in ends if end > 0}
    sections = [0, *sorted({*ends, num_tokens} - {0})]
    for start, end in itertools.pairwise(sections):
        if end - start <= max_len:
            assert [start, end] in ranges


@pytest.mark.parametrize("ends", [[5, 3], [11], [-1]])
def test_ends_that_do_not_ascend_inside_the_text_are_a_mistake(ends):
    with pytest.raises(AssertionError):
        cut_at_boundaries(ends, 10, 4)
