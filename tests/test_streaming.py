"""Streaming: without a stored plan, the batches of the plan; a state that holds the packer."""

import json
from itertools import islice

import numpy as np
import pytest
from test_sampler import same, segments_in
from tiny_artifacts import FINGERPRINT, address_docs, make_plan, make_token_shards

from training_io.document_index import read_index
from training_io.errors import RecipeError, StateMismatch
from training_io.packing import STREAMING
from training_io.plan import load_plan
from training_io.sampler import Sampler
from training_io.streaming import StreamingSampler, Unplanned

LENGTHS = np.random.default_rng(2).integers(0, 30, 90).tolist()
PACKING = {
    "max_seq_len": 8,
    "capacity": 16,
    "strategy": "oldest_first",
    "buffer": 5,
    "packs_per_microbatch": 2,
    "microbatches_per_step": 2,
    "epoch_seed": 1,
}
streaming = pytest.mark.parametrize("strategy", sorted(STREAMING))
overlapping = pytest.mark.parametrize("overlap", [0, 3])


@pytest.fixture
def shards(tmp_path):
    return make_token_shards(tmp_path, {"train": address_docs(LENGTHS)}, max_shard_tokens=200)


def planned_and_not(tmp_path, shards, **changes):
    """A stored plan, and what it was made from."""
    parameters = PACKING | changes
    plan = load_plan(make_plan(tmp_path, shards, **parameters))
    return plan, Unplanned(index=read_index(shards / "train_index"), shards=plan.shards, **parameters)


@streaming
@overlapping
@pytest.mark.parametrize("world_size", [1, 3])
def test_batches_are_those_of_the_stored_plan_in_every_epoch(tmp_path, shards, strategy, world_size, overlap):
    plan, source = planned_and_not(tmp_path, shards, strategy=strategy, overlap=overlap)
    assert (plan.num_repeated > 0) == (overlap > 0)
    for rank in range(world_size):
        stored, stream = Sampler(plan, rank, world_size), StreamingSampler(source, rank, world_size)
        for _ in range(2 * plan.num_steps + 3):
            assert (stream.epoch, stream.step) == (stored.epoch, stored.step)
            assert same(next(stream), next(stored))
        stored, stream = Sampler(plan, rank, world_size), StreamingSampler(source, rank, world_size)
        for _ in range(plan.num_steps + 3):
            expected, found = stored.next_step(), stream.next_step()
            assert len(expected) == len(found)
            assert all(same(a, b) for a, b in zip(expected, found, strict=True))


@streaming
@overlapping
def test_a_state_resumes_at_every_step_twice_and_at_the_edge_of_the_epoch(tmp_path, shards, strategy, overlap):
    plan, source = planned_and_not(tmp_path, shards, strategy=strategy, overlap=overlap)
    batches = list(islice(Sampler(plan), plan.num_steps + 3))
    sampler = StreamingSampler(source)
    for at in range(plan.num_steps + 2):
        state = json.loads(json.dumps(sampler.state_dict()))
        first = StreamingSampler(source)
        first.load_state_dict(state)
        assert first.state_dict() == state
        assert same(next(first), batches[at])
        second = StreamingSampler(source)
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert same(next(second), batches[at + 1])
        next(sampler)


def test_a_state_is_for_any_number_of_ranks(tmp_path, shards):
    plan, source = planned_and_not(tmp_path, shards)
    before = [StreamingSampler(source, rank, 2) for rank in range(2)]
    for rank in before:
        next(rank)
    (state,) = {json.dumps(rank.state_dict()) for rank in before}
    after = [StreamingSampler(source, rank, 5) for rank in range(5)]
    for rank in after:
        rank.load_state_dict(json.loads(state))
    expected = list(islice(Sampler(plan), 2))[1]
    assert segments_in([next(rank) for rank in after]) == segments_in([expected])


def test_the_state_holds_the_buffer_and_no_more(tmp_path, shards):
    _, source = planned_and_not(tmp_path, shards, buffer=64)
    sampler = StreamingSampler(source)
    next(sampler)
    carry = sampler.state_dict()["carry"]
    assert len(carry["waiting"]) <= 64
    assert carry["arrived"] < len(source.segments) / 2  # it does not read ahead to the end


def test_long_documents_are_diverted_as_in_the_plan(tmp_path, shards):
    plan, source = planned_and_not(tmp_path, shards, long_documents="divert")
    assert len(plan.diverted)
    assert all(same(a, b) for a, b in zip(islice(StreamingSampler(source), 9), Sampler(plan), strict=False))


@pytest.mark.parametrize(
    "changes",
    [{"capacity": 17}, {"max_seq_len": 7}, {"overlap": 1}, {"strategy": "best_fit"}, {"buffer": 6}, {"epoch_seed": 2}],
    ids=lambda changes: next(iter(changes)),
)
def test_a_state_of_another_stream_is_refused_naming_both(tmp_path, shards, changes):
    _, source = planned_and_not(tmp_path, shards)
    _, other = planned_and_not(tmp_path, shards, **changes)
    sampler = StreamingSampler(source)
    ((name, value),) = changes.items()
    named = f"; {name}: saved for {value}, this run has {getattr(source, name)}"
    state = StreamingSampler(other).state_dict()
    with pytest.raises(StateMismatch, match=f"{other.identity[:12]}….*{source.identity[:12]}…{named}[.] Resume"):
        sampler.load_state_dict(state)
    bare = {name: state[name] for name in ("stream", "epoch", "next_step", "carry")}
    with pytest.raises(StateMismatch, match=f"{other.identity[:12]}….*{source.identity[:12]}…[.] Resume"):
        sampler.load_state_dict(bare)


def test_a_state_of_other_tokens_is_refused_naming_both(tmp_path, shards):
    _, source = planned_and_not(tmp_path, shards)
    docs = {"train": [[1, 2, 3, 4]]}
    others = make_token_shards(tmp_path / "other", docs, token_dtype="uint16", fingerprint="e" * 64)
    _, other = planned_and_not(tmp_path / "other", others)
    tokenizer = f"; tokenizer: saved for {'e' * 12}, this run has {FINGERPRINT[:12]}"
    with pytest.raises(StateMismatch, match=f"{tokenizer}; dtype: saved for uint16, this run has uint32[.] Resume"):
        StreamingSampler(source).load_state_dict(StreamingSampler(other).state_dict())


def test_a_state_of_old_still_loads(tmp_path, shards):
    _, source = planned_and_not(tmp_path, shards)
    sampler, again = StreamingSampler(source), StreamingSampler(source)
    next(sampler)
    again.load_state_dict({name: sampler.state_dict()[name] for name in ("stream", "epoch", "next_step", "carry")})
    assert same(next(again), next(sampler))


@pytest.mark.parametrize(
    "change", [{"carry": None}, {"carry": {}}, {"epoch": "x"}, {"epoch": 1, "next_step": -1}, {"stream": None}]
)
def test_an_impossible_state_is_refused(tmp_path, shards, change):
    _, source = planned_and_not(tmp_path, shards)
    with pytest.raises(StateMismatch):
        StreamingSampler(source).load_state_dict(StreamingSampler(source).state_dict() | change)


def test_what_cannot_stream_is_refused(tmp_path, shards):
    _, source = planned_and_not(tmp_path, shards, strategy="histogram")
    with pytest.raises(RecipeError, match=r"packs as it reads, best_fit, .*found 'histogram'"):
        StreamingSampler(source)
    empty = make_token_shards(tmp_path, {"train": [[], []]})
    _, source = planned_and_not(tmp_path, empty)
    with pytest.raises(RecipeError, match="at least 1 segment"):
        StreamingSampler(source)
    with pytest.raises(RecipeError, match="rank"):
        StreamingSampler(source, 1, 1)
