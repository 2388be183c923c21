"""The loader: the plan's steps in order, whatever the number of workers, and on from what was consumed."""

import copy
import json
from itertools import islice

import pytest
from test_sampler import same, segments_in
from tiny_artifacts import address_docs, make_plan, make_token_shards
from torch.utils.data import DataLoader

from training_io.errors import FormatError, StateMismatch
from training_io.loader import PlanSteps, state_behind
from training_io.plan import load_plan
from training_io.sampler import Sampler

# More workers than cores are slow, and meant.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
LENGTHS = [6, 4, 3, 2, 20, 1, 0, 9, 12, 7, 5, 5, 11, 2, 16, 8, 30]


@pytest.fixture
def folder(tmp_path):
    shards = make_token_shards(tmp_path, {"train": address_docs(LENGTHS)}, max_shard_tokens=30)
    return make_plan(tmp_path, shards, packs_per_microbatch=1, microbatches_per_step=2)


def steps_of(plan, num, rank=0, world_size=1):
    sampler = Sampler(plan, rank, world_size)
    return [sampler.next_step() for _ in range(num)]


def all_same(found, expected):
    return len(found) == len(expected) and all(
        len(a) == len(b) and all(map(same, a, b)) for a, b in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("num_workers", [0, 1, 2, 3])
def test_workers_give_the_steps_in_order_across_epochs(folder, num_workers):
    plan = load_plan(folder)
    num = 2 * plan.num_steps + 1
    loader = DataLoader(PlanSteps(folder), batch_size=None, num_workers=num_workers)
    assert all_same(list(islice(loader, num)), steps_of(plan, num))


@pytest.mark.parametrize(("before", "after"), [(0, 2), (2, 3), (3, 0)])
def test_what_was_consumed_goes_on_with_other_workers_and_ranks(folder, before, after):
    plan = load_plan(folder)
    expected = steps_of(plan, plan.num_steps + 4)
    for consumed in (1, plan.num_steps - 1, plan.num_steps, plan.num_steps + 1):
        loader = DataLoader(PlanSteps(folder), batch_size=None, num_workers=before)
        *_, last = islice(loader, consumed)
        state = json.loads(json.dumps(state_behind(plan, last)))
        ranks = [
            DataLoader(PlanSteps(folder, rank=rank, world_size=2, state=state), batch_size=None, num_workers=after)
            for rank in range(2)
        ]
        shares = [next(iter(rank)) for rank in ranks]
        assert segments_in([batch for share in shares for batch in share]) == segments_in(expected[consumed])


def test_a_copy_goes_on_where_it_was_saved(folder):
    plan = load_plan(folder)
    expected = steps_of(plan, 6)
    dataset = PlanSteps(folder)
    assert dataset.state_dict() is None
    found = list(islice(dataset, 2))
    again = copy.deepcopy(PlanSteps(folder))
    again.load_state_dict(json.loads(json.dumps(dataset.state_dict())))
    assert again.state_dict() == dataset.state_dict()
    assert all_same(found + list(islice(again, 4)), expected)


def test_the_state_of_another_plan_is_refused(folder):
    state = {"plan": "9" * 64, "epoch": 0, "next_step": 0}
    with pytest.raises(StateMismatch, match=f"plan {'9' * 12}…"):
        next(iter(PlanSteps(folder, state=state)))
    with pytest.raises(FormatError, match="split test"):
        next(iter(PlanSteps(folder, "test")))
