"""Headroom: passes over what there is, counted by going round; and the check on either layout."""

from dataclasses import replace
from pathlib import Path

import naive_layouts
import numpy as np
import pytest
import small_corpus
import tiny_artifacts
from hypothesis import given
from hypothesis import strategies as st
from small_corpus import Built

from asset_checks.headroom import headroom_of_packs, headroom_of_windows, tokens_suffice_for_the_training_steps
from pipeline_assets.sections.training import Windows
from pipeline_assets.transforms.headroom import Headroom, pool_headroom
from training_io.errors import RecipeError
from training_io.plan import load_plan
from training_io.sampler import Sampler
from training_io.windows import WindowLoader

LENGTHS = [5, 30, 1, 9, 14, 3, 22, 8, 8, 2, 17, 40, 6]


@given(st.integers(1, 50), st.integers(1, 200))
def test_passes_are_those_of_going_round(available, needed):
    headroom = Headroom(available=available, needed=needed)
    least, most = naive_layouts.passes(available, needed)
    assert least <= headroom.passes <= most
    assert (headroom.num_repeated == 0) == (most == 1)
    assert headroom.num_repeated == needed - min(available, needed)
    assert headroom.ratio == pytest.approx(1 / headroom.passes)


def test_what_a_run_of_seventeen_hours_reads_once():
    run = Headroom(available=2_469_151_566, needed=3_360 * 32 * 16 * 1_024)
    assert run.needed == 1_761_607_680
    assert f"{run.ratio:.2f}" == "1.40"
    assert run.num_repeated == 0
    assert run.available - run.needed == 707_543_886


def test_pools_of_a_mixture_are_passed_over_as_their_plans_say():
    pools = pool_headroom({"chinese": 500, "code": 900, "unread": 7}, {"chinese": 1_400, "code": 900, "teacher": 0})
    assert {name: (pool.passes, pool.num_repeated) for name, pool in pools.items()} == {
        "chinese": (2.8, 900),
        "code": (1.0, 0),
        "teacher": (0.0, 0),
    }
    with pytest.raises(RecipeError, match="pool teacher: expected unique tokens for the 3 that the plan reads"):
        pool_headroom({"chinese": 500}, {"teacher": 3})


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    root = tmp_path_factory.mktemp("artifacts")
    shards = tiny_artifacts.make_token_shards(
        root, {"train": tiny_artifacts.address_docs(LENGTHS)}, max_shard_tokens=64
    )
    return load_plan(tiny_artifacts.make_plan(root, shards))


@pytest.mark.parametrize("steps", range(1, 10))
def test_packs_are_counted_as_the_sampler_serves_them(plan, steps):
    assert plan.num_steps == 3
    assert plan.num_packs % plan.packs_per_step  # the last step of a pass is short
    sampler = Sampler(plan)
    read = sum(next(sampler).num_targets for _ in range(steps))
    headroom = headroom_of_packs(plan, steps)
    assert headroom.available == sum(LENGTHS) == plan.num_targets
    assert (headroom.num_repeated == 0) == (steps <= 3)
    if steps <= 3 or steps % 3 == 0:  # within a later pass, which packs come first is another matter
        assert headroom.needed == read


def test_documents_that_a_plan_diverts_are_no_part_of_a_pass(plan):
    diverting = tiny_artifacts.make_plan(plan.shards.path.parents[2], plan.shards.path, long_documents="divert")
    diverted = load_plan(diverting)
    assert diverted.num_targets < plan.num_targets
    for passes in (1, 3):
        headroom = headroom_of_packs(diverted, passes * diverted.num_steps)
        assert (headroom.available, headroom.passes) == (diverted.num_targets, passes)


@pytest.mark.parametrize(("B", "T", "accumulation"), [(2, 6, 3), (1, 8, 2), (3, 5, 1)])
def test_windows_repeat_when_their_index_wraps(plan, B, T, accumulation):
    loader = WindowLoader([plan.shards.path / name for name in plan.index.shard_files], B, T)
    windows = Windows(length=T, batch_size=B, accumulation=accumulation)
    for steps in range(1, 3 * loader.n_batches // accumulation):
        headroom = headroom_of_windows(plan, windows, steps)
        assert headroom.needed == steps * accumulation * B * T
        assert headroom.num_repeated == max(0, steps * accumulation - loader.n_batches) * B * T


def test_more_steps_than_the_tokens_last_for_are_warned_of(clean: Built, tmp_path: Path) -> None:
    changes = {"training.steps": 40_000, "source.pools": [
        {"name": name, "path": str(clean.recipe.parent / name)} for name in ("alpha", "beta")
    ]}  # fmt: skip
    for layout in ({}, small_corpus.WINDOWS):
        recipe = small_corpus.write_recipe(tmp_path, {**changes, **layout})
        stage = small_corpus.open_stage(recipe, clean.home, is_judging=True)
        verdict = tokens_suffice_for_the_training_steps(stage, clean.refs["packing_plan"])
        assert verdict.numbers["passes"] > 20
        assert verdict.numbers["headroom"] == pytest.approx(1 / verdict.numbers["passes"])
        assert verdict.num_violations > 0
        assert f"{verdict.num_violations:,} tokens are repeats" in verdict.found
        assert verdict.found in str(verdict.examples)


def test_a_plan_without_a_pack_is_no_pass(plan):
    nothing = np.zeros(0, dtype=np.int64)
    index = replace(plan.index, lengths=np.ones(2, dtype=np.int64))  # documents of nothing but their end
    empty = replace(plan, index=index, order=nothing, pack_offsets=np.zeros(1, np.int64), pack_targets=nothing)
    headroom = headroom_of_packs(empty, 3)
    assert (headroom.available, headroom.needed, headroom.num_repeated) == (0, 0, 0)
