"""Balance: each pack of a step on one rank, ranks even in packs, tokens and attention work."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_artifacts import address_docs, make_plan, make_token_shards

from training_io.balance import deal_in_turn, mean_overheads, overhead_of, share_packs
from training_io.plan import load_plan

relaxed = settings(deadline=None, max_examples=80)
packs_and_ranks = st.tuples(
    st.lists(st.tuples(st.integers(1, 4_096), st.integers(1, 4_096**2)), max_size=60), st.integers(1, 9)
)


@relaxed
@given(packs_and_ranks)
def test_every_pack_goes_to_one_rank_and_ranks_differ_by_at_most_one(drawn):
    packs, num_ranks = drawn
    inputs, squares = (np.array([pack[at] for pack in packs], dtype=np.uint32) for at in range(2))
    shares = share_packs(inputs, squares, num_ranks)
    assert len(shares) == num_ranks
    assert sorted(position for share in shares for position in share.tolist()) == list(range(len(packs)))
    assert all(share.tolist() == sorted(share.tolist()) for share in shares)
    counts = [len(share) for share in shares]
    assert max(counts) - min(counts) <= 1


@relaxed
@given(st.lists(st.integers(1, 1_000), min_size=1, max_size=60), st.integers(1, 9))
def test_no_rank_has_more_than_another_by_the_costliest_pack(costs, num_ranks):
    """Each round adds at most the difference within the round, which rounds share: dealing in rounds keeps loads near."""
    values = np.array(costs, dtype=np.int64)
    loads = [int(values[share].sum()) for share in share_packs(values, values, num_ranks)]
    assert max(loads) - min(loads) <= max(costs)


def test_heavy_packs_are_spread_where_dealing_in_turn_piles_them_up():
    inputs = np.full(16, 4_096)
    squares = np.array([4_096**2, 64 * 4_096] * 8)  # every second pack is one long segment
    balanced = overhead_of(share_packs(inputs, squares, 2), inputs, squares)
    in_turn = overhead_of(deal_in_turn(16, 2), inputs, squares)
    assert (balanced.inputs, balanced.sum_squares) == (0, 0)
    assert in_turn.sum_squares > 0.9


def test_an_empty_step_has_no_overhead():
    nothing = np.zeros(0, dtype=np.int64)
    assert overhead_of(share_packs(nothing, nothing, 3), nothing, nothing).inputs == 0


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_a_plan_is_more_even_than_dealing_in_turn(tmp_path, num_ranks):
    lengths = np.minimum(np.random.default_rng(0).pareto(1.2, 900) * 4 + 1, 90).astype(int).tolist()
    shards = make_token_shards(tmp_path, {"train": address_docs(lengths)})
    plan = load_plan(
        make_plan(tmp_path, shards, max_seq_len=64, capacity=64, packs_per_microbatch=8, microbatches_per_step=4)
    )
    found = mean_overheads(plan, num_ranks)
    assert 0 <= found["squares"] < 0.5 * found["squares_in_turn"]
    assert 0 <= found["inputs"] < 0.02 + found["inputs_in_turn"]
