"""Mixtures: exact quotas, every window within one pack of them, stages that leave what was spent alone."""

from collections import Counter
from fractions import Fraction

import naive_batches as naive
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from training_io import mixture
from training_io.errors import RecipeError
from training_io.mixture import MixtureStage, next_pool, schedule_packs, token_quotas

relaxed = settings(deadline=None, max_examples=80)
POOLS = ("english", "chinese", "code")


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


@st.composite
def pools_and_quotas(draw):
    """Quotas of up to nine pools, and the size of each read in turn, of at most a unit."""
    quotas = draw(st.lists(st.integers(1, 1000), min_size=1, max_size=9))
    unit = draw(st.sampled_from([1, 2, 7, 100]))
    sizes = draw(st.lists(st.sampled_from([unit, 1]) | st.integers(1, unit), min_size=1, max_size=150))
    return {f"pool{number}": quota for number, quota in enumerate(quotas)}, unit, sizes


@settings(deadline=None, max_examples=400)
@given(pools_and_quotas())
def test_after_every_pack_every_pool_is_within_a_unit_of_its_share(drawn):
    quotas, unit, sizes = drawn
    used = dict.fromkeys(quotas, 0)
    for size in sizes:
        used[next_pool(quotas, used, unit)] += size
        assert naive.furthest_from_quota(quotas, used) < unit


def test_to_read_what_is_furthest_below_its_quota_would_not_do():
    """Why next_pool looks at deadlines: with many small pools the simpler rule is off by more than a unit."""
    quotas = {"large": 1000} | {f"small{number}": number + 1 for number in range(15)}
    used, furthest, by_deadline, furthest_by_deadline = dict.fromkeys(quotas, 0), 0, dict.fromkeys(quotas, 0), 0
    for _ in range(1500):
        behind = {pool: quotas[pool] * sum(used.values()) - used[pool] * sum(quotas.values()) for pool in quotas}
        used[max(behind, key=behind.get)] += 100
        furthest = max(furthest, naive.furthest_from_quota(quotas, used))
        by_deadline[next_pool(quotas, by_deadline, 100)] += 100
        furthest_by_deadline = max(furthest_by_deadline, naive.furthest_from_quota(quotas, by_deadline))
    assert furthest > 100
    assert furthest_by_deadline < 100


def stage(name, tokens, *shares):
    return MixtureStage(name=name, tokens=tokens, shares=dict(zip(POOLS, shares, strict=True)))


PACKS = {"english": range(0, 40), "chinese": range(40, 43), "code": range(43, 60)}
TOKENS = np.array([100 - number % 7 for number in range(60)])


def test_a_stage_takes_effect_at_a_step_and_divides_what_is_left():
    stages = [stage("base", 3_000, "60", "30", "10"), stage("code", 2_000, "40", "30", "30")]
    schedule, (base, code) = schedule_packs(PACKS, TOKENS, stages, packs_per_step=4, seed=1)
    assert base.quotas == {"english": 1_800, "chinese": 900, "code": 300}
    assert (base.first_step, base.first_token) == (0, 0)
    spent = np.cumsum(TOKENS[schedule])
    assert spent[code.first_step * 4 - 1] == code.first_token >= 3_000 > spent[code.first_step * 4 - 5]
    assert sum(code.quotas.values()) == 5_000 - code.first_token
    assert list(code.quotas.values()) == token_quotas(["40", "30", "30"], 5_000 - code.first_token)
    assert len(schedule) % 4 == 0
    assert spent[-1] >= 5_000 > spent[-5]


def test_each_pass_reads_every_pack_of_a_pool_once_and_each_in_another_order():
    schedule, _ = schedule_packs(PACKS, TOKENS, [stage("base", 40_000, "60", "30", "10")], packs_per_step=1, seed=1)
    for packs in PACKS.values():
        read = [pack for pack in schedule.tolist() if pack in packs]
        assert len(read) > len(packs)
        passes = [read[first : first + len(packs)] for first in range(0, len(read), len(packs))]
        assert passes[0] != list(packs)
        assert all(sorted(one) == list(packs) for one in passes[:-1])
        assert max(Counter(read).values()) - min(Counter(read)[pack] for pack in packs) <= 1
    english = [pack for pack in schedule.tolist() if pack in PACKS["english"]]
    assert english[40:80] != english[:40]


def test_branches_share_everything_before_the_step_where_they_part():
    base = stage("base", 3_000, "60", "30", "10")
    one, _ = schedule_packs(PACKS, TOKENS, [base, stage("a", 2_000, "60", "30", "10")], packs_per_step=4, seed=1)
    other, stages = schedule_packs(PACKS, TOKENS, [base, stage("b", 2_000, "40", "30", "30")], packs_per_step=4, seed=1)
    parted = stages[1].first_step * 4
    assert np.array_equal(one[:parted], other[:parted])
    assert not np.array_equal(one[parted:], other[parted:])


def test_a_pool_without_a_share_is_not_read_and_one_without_packs_is_refused():
    schedule, (base,) = schedule_packs(PACKS, TOKENS, [stage("base", 900, "1", "0", "2")], packs_per_step=2, seed=1)
    assert base.quotas == {"english": 300, "code": 600}
    assert not set(schedule.tolist()) & set(PACKS["chinese"])
    with pytest.raises(
        RecipeError, match=r"stage base: expected documents in pool code for its 600 tokens, found none"
    ):
        schedule_packs(
            {**PACKS, "code": range(60, 60)}, TOKENS, [stage("base", 900, "1", "0", "2")], packs_per_step=2, seed=1
        )


def test_a_stage_that_was_spent_before_it_began_is_refused():
    stages = [stage("base", 10, "60", "30", "10"), stage("late", 20, "40", "30", "30")]
    with pytest.raises(RecipeError, match=r"stage late: expected tokens left for it, found .* spent \d+ more than"):
        schedule_packs(PACKS, TOKENS, stages, packs_per_step=4, seed=1)


def test_more_packs_than_can_be_scheduled_are_refused_before_any_is():
    with pytest.raises(
        RecipeError, match=r"stage base: expected a schedule of at most 134,217,728 packs, found [\d,]+ or more"
    ):
        schedule_packs(PACKS, TOKENS, [stage("base", 10**18, "1", "1", "1")], packs_per_step=1, seed=1)


def test_nearly_empty_packs_are_refused_when_they_are_too_many(monkeypatch):
    monkeypatch.setattr(mixture, "MAX_SCHEDULED_PACKS", 1_000)
    packs, tokens = {"english": range(0, 40), "chinese": range(40, 41)}, np.array([100] * 40 + [1])
    wanted = MixtureStage(name="base", tokens=20_000, shares={"english": "1", "chinese": "1"})
    with pytest.raises(RecipeError, match=r"stage base: expected a schedule of at most 1,000 packs.* nearly empty"):
        schedule_packs(packs, tokens, [wanted], packs_per_step=1, seed=1)


def test_a_share_that_comes_to_no_token_is_refused():
    with pytest.raises(RecipeError, match="expected a token or more for pool code, found none of 900 for its share"):
        schedule_packs(PACKS, TOKENS, [stage("base", 900, "1", "1", "0.0000001")], packs_per_step=2, seed=1)


@pytest.mark.parametrize("share", ["1e9999999", "1E2", "9" * 41])
def test_a_share_that_would_take_for_ever_to_read_is_refused(share):
    with pytest.raises(RecipeError, match="at most 40 characters, without an exponent"):
        token_quotas([share], 10)
