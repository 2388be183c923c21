"""The sampler: ranks share a step, microbatches share a denominator, and a state resumes at every step."""

import dataclasses
import json
from collections import Counter
from itertools import islice, pairwise

import naive_batches as naive
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_artifacts import FINGERPRINT, address_docs, make_plan, make_token_shards

from training_io.batch import check_batch
from training_io.errors import RecipeError, StateMismatch
from training_io.plan import load_plan
from training_io.sampler import Sampler

relaxed = settings(deadline=None, max_examples=25)
LENGTHS = [6, 4, 3, 2, 20, 1, 0, 9, 12, 7, 5, 5, 11, 2, 16]
OF_OLD = ("plan", "epoch", "next_step")  # what a state held before it said what it is of


@pytest.fixture(params=[0, 3], ids=["apart", "overlapping"])
def plan(tmp_path, request):
    shards = make_token_shards(tmp_path, {"train": address_docs(LENGTHS)}, max_shard_tokens=30)
    packing = {"packs_per_microbatch": 1, "microbatches_per_step": 2, "overlap": request.param}
    return load_plan(make_plan(tmp_path, shards, **packing))


def same(a, b):
    return all(np.array_equal(getattr(a, field.name), getattr(b, field.name)) for field in dataclasses.fields(a))


def joined(batches):
    """Inputs, targets, positions and segment lengths of several batches, one after another."""
    return tuple(
        [value for batch in batches for value in part(batch)]
        for part in (
            lambda b: b.inputs.tolist(),
            lambda b: b.targets.tolist(),
            lambda b: b.position_ids.tolist(),
            lambda b: np.diff(b.cu_seqlens).tolist(),
            lambda b: b.segment_doc.tolist(),
        )
    )


def segments_in(batches):
    """Each segment of several batches with its tokens, targets and positions, in no order."""
    parts = []
    for batch in batches:
        bounds = batch.cu_seqlens.tolist()
        for document, (a, b) in zip(batch.segment_doc.tolist(), pairwise(bounds), strict=True):
            columns = (batch.inputs, batch.targets, batch.position_ids)
            parts.append((document, *(column[a:b].tolist() for column in columns)))
    return sorted(parts)


def test_an_epoch_is_every_pair_once_and_the_next_epoch_as_well(plan):
    assert plan.num_steps > 2
    everything = naive.pair_multiset([[*doc, 0] for doc in address_docs(LENGTHS)])
    orders = []
    sampler = Sampler(plan)
    for epoch in range(3):
        batches = list(islice(sampler, plan.num_steps))
        assert [(batch.epoch, batch.step) for batch in batches] == [(epoch, step) for step in range(plan.num_steps)]
        assert sum((naive.batch_pairs(batch) for batch in batches), Counter()) == everything
        orders.append(joined(batches)[0])
    assert orders[0] != orders[1] != orders[2]


def test_the_last_step_may_be_short(plan):
    assert plan.num_packs % plan.packs_per_step  # the situation occurs
    batches = list(islice(Sampler(plan), plan.num_steps))
    assert batches[-1].num_targets < min(batch.num_targets for batch in batches[:-1])


@relaxed
@given(
    st.lists(st.integers(0, 25), min_size=1, max_size=12).filter(any),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 9),
    st.integers(0, 7),
)
def test_the_union_over_ranks_is_the_step(tmp_path_factory, lengths, per_microbatch, microbatches, world_size, overlap):
    root = tmp_path_factory.mktemp("root")
    shards = make_token_shards(root, {"train": address_docs(lengths)}, max_shard_tokens=40)
    packing = {"packs_per_microbatch": per_microbatch, "microbatches_per_step": microbatches, "overlap": overlap}
    plan = load_plan(make_plan(root, shards, **packing))
    alone = Sampler(plan)
    ranks = [Sampler(plan, rank, world_size) for rank in range(world_size)]
    for _ in range(2 * plan.num_steps):
        step = next(alone)
        shares = [next(rank) for rank in ranks]
        assert segments_in(shares) == segments_in([step])
        assert sum(share.num_targets for share in shares) == step.num_targets
        for share in shares:
            check_batch(share)
            assert (share.step_targets, share.epoch, share.step) == (step.num_targets, step.epoch, step.step)
        assert all(rank.state_dict() == alone.state_dict() for rank in ranks)


def test_more_ranks_than_packs_leave_some_empty(plan):
    shares = [next(Sampler(plan, rank, 5)) for rank in range(5)]
    assert sum(share.num_targets == 0 for share in shares) == 3
    assert all(share.step_targets == plan.step_targets(0, 0) for share in shares)
    idle = next(rank for rank, share in enumerate(shares) if share.num_targets == 0)
    assert [batch.num_targets for batch in Sampler(plan, idle, 5).next_step()] == [0]


def test_packs_are_shared_evenly(tmp_path):
    shards = make_token_shards(tmp_path, {"train": address_docs([8] * 11)})
    plan = load_plan(make_plan(tmp_path, shards, capacity=8, packs_per_microbatch=11, microbatches_per_step=1))
    sizes = [len(next(Sampler(plan, rank, 4)).segment_doc) for rank in range(4)]
    assert sum(sizes) == 11
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_microbatches_are_the_step_with_one_denominator(plan, world_size):
    for rank in range(world_size):
        whole, parts = Sampler(plan, rank, world_size), Sampler(plan, rank, world_size)
        for _ in range(2 * plan.num_steps):
            batch, microbatches = next(whole), parts.next_step()
            assert joined(microbatches) == joined([batch])
            assert all(part.step_targets == batch.step_targets for part in microbatches)
            assert all(part.num_targets <= plan.packs_per_microbatch * plan.capacity for part in microbatches)
            assert whole.state_dict() == parts.state_dict()


def test_a_state_resumes_at_every_step(plan):
    sampler = Sampler(plan)
    states, batches = [sampler.state_dict()], []
    for _ in range(2 * plan.num_steps + 1):
        batches.append(next(sampler))
        states.append(sampler.state_dict())
    for at, state in enumerate(states[:-1]):
        resumed = Sampler(plan)
        resumed.load_state_dict(json.loads(json.dumps(state)))
        assert resumed.state_dict() == state
        assert all(same(a, b) for a, b in zip(islice(resumed, len(batches) - at), batches[at:], strict=True))


def test_a_state_is_for_any_number_of_ranks(plan):
    alone = Sampler(plan)
    next(alone)
    state = alone.state_dict()
    ranks = [Sampler(plan, rank, 3) for rank in range(3)]
    for rank in ranks:
        rank.load_state_dict(state)
    assert segments_in([next(rank) for rank in ranks]) == segments_in([next(alone)])


def test_resuming_twice_goes_on_from_the_second_state(plan):
    sampler = Sampler(plan)
    expected = [next(sampler) for _ in range(3)]
    first = Sampler(plan)
    next(first)
    second = Sampler(plan)
    second.load_state_dict(first.state_dict())
    next(second)
    third = Sampler(plan)
    third.load_state_dict(second.state_dict())
    assert same(next(third), expected[2])


def test_a_hundred_kills_with_any_number_of_ranks_consume_exactly_the_plan(tmp_path):
    rng = np.random.default_rng(5)
    docs = address_docs(rng.integers(0, 40, 300).tolist())
    shards = make_token_shards(tmp_path, {"train": docs}, max_shard_tokens=900)
    plan = load_plan(make_plan(tmp_path, shards, packs_per_microbatch=1, microbatches_per_step=3))
    state, consumed, kills = Sampler(plan).state_dict(), [], 0
    while kills < 100:
        ranks = [
            Sampler(plan, rank, world_size) for world_size in [int(rng.integers(1, 9))] for rank in range(world_size)
        ]
        for rank in ranks:
            rank.load_state_dict(json.loads(json.dumps(state)))
        for _ in range(int(rng.integers(0, 7))):
            consumed.append([next(rank) for rank in ranks])
            (state,) = {json.dumps(rank.state_dict()): rank.state_dict() for rank in ranks}.values()
        for rank in ranks[: int(rng.integers(0, len(ranks) + 1))]:
            next(rank)  # a step that was begun when the run was killed, and whose state was never saved
        kills += 1
    alone = list(islice(Sampler(plan), len(consumed)))
    assert len(consumed) > 2 * plan.num_steps
    assert [segments_in(shares) for shares in consumed] == [segments_in([step]) for step in alone]
    first_epoch = [share for shares in consumed[: plan.num_steps] for share in shares]
    assert sum((naive.batch_pairs(batch) for batch in first_epoch), Counter()) == naive.pair_multiset(
        [[*doc, 0] for doc in docs]
    )


def test_the_end_of_an_epoch_is_the_start_of_the_next(plan):
    sampler = Sampler(plan)
    for _ in range(plan.num_steps):
        next(sampler)
    assert sampler.state_dict().items() >= {"plan": plan.identity, "epoch": 1, "next_step": 0}.items()
    unnormalised = Sampler(plan)
    unnormalised.load_state_dict({"plan": plan.identity, "epoch": 0, "next_step": plan.num_steps})
    assert unnormalised.state_dict() == sampler.state_dict()


def test_a_state_is_small_json(plan):
    sampler = Sampler(plan)
    sampler.load_state_dict({"plan": plan.identity, "epoch": 10**9, "next_step": 1})
    state = sampler.state_dict()
    assert len(json.dumps(state)) < 200
    assert len(json.dumps(state | {"next_step": 10**9, "capacity": 10**6})) < 200


def test_a_state_of_another_plan_is_refused_naming_both(plan):
    sampler = Sampler(plan)
    with pytest.raises(StateMismatch, match=f"plan {'9' * 12}….*{plan.identity[:12]}…"):
        sampler.load_state_dict({"plan": "9" * 64, "epoch": 0, "next_step": 0})
    assert sampler.state_dict()["next_step"] == 0


@pytest.mark.parametrize(
    ("shards_options", "plan_options", "message"),
    [
        ({"fingerprint": "f" * 64}, {}, f"….*; tokenizer: saved for ffff+, this run has {FINGERPRINT[:12]}[.] Resume"),
        ({"token_dtype": "uint16"}, {}, "….*; dtype: saved for uint16, this run has uint32[.] Resume"),
        ({}, {"capacity": 24}, "….*; capacity: saved for 24, this run has 16[.] Resume"),
        ({}, {"epoch_seed": 9}, "…[.] Resume"),
    ],
)
def test_a_refusal_names_what_differs_with_both_values(tmp_path, shards_options, plan_options, message):
    docs = {"train": [[1, 2, 3], [4, 5], [6, 7, 8, 9]]}
    plan, other = (
        load_plan(make_plan(tmp_path, make_token_shards(tmp_path / name, docs, **options), **packing))
        for name, options, packing in (("this", {}, {}), ("other", shards_options, plan_options))
    )
    state = Sampler(other).state_dict()
    found = rf"plan {other.identity[:12]}…, this run has {plan.identity[:12]}"
    with pytest.raises(StateMismatch, match=found + message):
        Sampler(plan).load_state_dict(state)
    with pytest.raises(StateMismatch, match=found + "…[.] Resume"):  # a state of old says no more than its plan
        Sampler(plan).load_state_dict({name: state[name] for name in OF_OLD})


def test_a_state_of_old_still_loads(plan):
    sampler = Sampler(plan)
    next(sampler)
    again = Sampler(plan)
    again.load_state_dict({name: sampler.state_dict()[name] for name in OF_OLD})
    assert same(next(again), next(sampler))


@pytest.mark.parametrize(
    "change", [{"next_step": -1}, {"next_step": 10_000}, {"epoch": -1}, {"epoch": None}, {"plan": None}]
)
def test_an_impossible_state_is_refused(plan, change):
    with pytest.raises(StateMismatch):
        Sampler(plan).load_state_dict(Sampler(plan).state_dict() | change)
    with pytest.raises(StateMismatch, match="epoch"):
        Sampler(plan).load_state_dict({"plan": plan.identity})


@pytest.mark.parametrize(("rank", "world_size"), [(-1, 1), (1, 1), (0, 0)])
def test_a_rank_outside_the_world_is_refused(plan, rank, world_size):
    with pytest.raises(RecipeError, match="rank"):
        Sampler(plan, rank, world_size)


def test_a_plan_without_packs_is_refused(tmp_path):
    shards = make_token_shards(tmp_path, {"train": [[], []]})
    with pytest.raises(RecipeError, match="at least 1 pack"):
        Sampler(load_plan(make_plan(tmp_path, shards)))
