"""Token quotas: exact sums by largest remainders."""

from fractions import Fraction

import naive_batches as naive
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from training_io.errors import RecipeError
from training_io.mixture import token_quotas

relaxed = settings(deadline=None, max_examples=80)


def test_seven_pools_share_ten_billion_tokens():
    quotas = token_quotas(["61.6", "7.9", "14", "5", "9.9", "1.5", "0.1"], 10_000_000_000)
    assert quotas == [6_160_000_000, 790_000_000, 1_400_000_000, 500_000_000, 990_000_000, 150_000_000, 10_000_000]
    assert sum(quotas) == 10_000_000_000


@relaxed
@given(st.lists(st.fractions(0, 100, max_denominator=40), min_size=1, max_size=8), st.integers(0, 500))
def test_quotas_are_those_of_handing_out_one_by_one(shares, total):
    if sum(shares) == 0:
        with pytest.raises(RecipeError, match="above zero"):
            token_quotas(shares, total)
        return
    quotas = token_quotas(shares, total)
    assert sum(quotas) == total
    assert quotas == naive.largest_remainder(shares, total)
    for share, quota in zip(shares, quotas, strict=True):
        assert abs(quota - total * share / sum(shares)) < 1


def test_ties_go_to_the_earlier_pool():
    assert token_quotas([1, 1, 1], 10) == [4, 3, 3]
    assert token_quotas([1, 1, 1], 11) == [4, 4, 3]


def test_totals_beyond_floats_are_exact():
    assert token_quotas([1, Fraction(1, 3)], 10**30 + 1) == [75 * 10**28 + 1, 25 * 10**28]


@pytest.mark.parametrize(
    ("shares", "total", "message"),
    [
        ([0.616], 10, "found the float 0.616"),
        (["much"], 10, "found 'much'"),
        (["1/0"], 10, "found '1/0'"),
        ([-1, 2], 10, "expected 0 or more, found -1"),
        ([], 10, "at least one above zero"),
        ([0], 10, "at least one above zero"),
        ([1], -1, "found .* and -1"),
    ],
)
def test_what_is_no_share_is_refused(shares, total, message):
    with pytest.raises(RecipeError, match=message):
        token_quotas(shares, total)
