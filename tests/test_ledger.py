"""The ledger of a plan, its quotas recounted, and what a stored mixture refuses."""

import dataclasses
import json
from itertools import islice
from pathlib import Path

import naive_batches as naive
import numpy as np
import pytest
import small_corpus
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_artifacts import address_docs, make_plan, make_token_shards, seal

from asset_checks.ledger import ledger_is_what_the_plan_reads
from pipeline_assets.ledger import build_ledger, relative_shares
from resources.artifact_store import ArtifactRef
from training_io.batch import in_constant_shape
from training_io.errors import FormatError, RecipeError
from training_io.inspection import inspect
from training_io.ledger import cumulative_tokens, ledger_of
from training_io.manifest import load_manifest
from training_io.mixture import MixtureStage
from training_io.plan import load_plan
from training_io.planning import replay
from training_io.quota_invariants import (
    count_packs,
    every_window_keeps_its_quotas,
    largest_quota_errors,
    pools_are_read_in_passes,
)
from training_io.sampler import Sampler

relaxed = settings(deadline=None, max_examples=25)
POOLS = ("english", "chinese", "code")
LENGTHS = [9, 4, 30, 2, 20, 1, 0, 9, 17, 3, 5, 12, 25, 6, 8]
BASE = MixtureStage(name="base", tokens=150, shares={"english": "50", "chinese": "30", "code": "20"})
MORE_CODE = MixtureStage(name="more_code", tokens=120, shares={"english": "30", "chinese": "30", "code": "40"})
AS_BEFORE = dataclasses.replace(BASE, name="as_before", tokens=120)


def mixed_plan(root, stages=(BASE, MORE_CODE), lengths=LENGTHS, **options):
    shards = make_token_shards(root, {"train": address_docs(lengths)}, pool_names=POOLS, max_shard_tokens=60)
    return load_plan(make_plan(root, shards, mixture=tuple(stages), capacity=12, max_seq_len=10, **options))


@pytest.fixture
def plan(tmp_path):
    return mixed_plan(tmp_path)


def test_the_ledger_is_what_the_sampler_hands_out(plan):
    """Counted from the batches of an epoch: segments by their documents, tokens by their targets."""
    sampler, ends = Sampler(plan), [*(stage.first_step for stage in plan.stages[1:]), plan.num_steps]
    segments = []
    for stage, end in zip(plan.stages, ends, strict=True):
        for _ in range(stage.first_step, end):
            batch = next(sampler)
            for number, document in enumerate(batch.segment_doc.tolist()):
                first, last = batch.cu_seqlens[number], batch.cu_seqlens[number + 1]
                inputs, targets = batch.inputs[first:last].tolist(), batch.targets[first:last].tolist()
                segments.append((stage.name, POOLS[document % 3], document, inputs, targets))
    expected = naive.ledger(segments, [length + 1 for length in LENGTHS], POOLS, eos_id=0)
    found = {(row.stage, row.pool): dataclasses.asdict(row) for row in ledger_of(plan)}
    assert found.keys() == expected.keys()
    for key, counts in expected.items():
        assert {name: found[key][name] for name in counts} == counts
    assert max(row.passes_so_far for row in ledger_of(plan)) > 1
    assert all(row.tokens == row.body_tokens + row.eos_tokens + row.overlap_tokens for row in ledger_of(plan))


def test_rows_say_where_a_stage_takes_effect_and_what_its_quotas_were(plan):
    rows = ledger_of(plan)
    assert [(row.stage, row.pool) for row in rows] == [(name, pool) for name in ("base", "more_code") for pool in POOLS]
    for row in rows:
        planned = next(stage for stage in plan.stages if stage.name == row.stage)
        assert (row.first_step, row.first_token) == (planned.first_step, planned.first_token)
        assert row.quota_tokens == planned.quotas[row.pool]
    assert sum(row.tokens for row in rows) == sum(plan.step_targets(0, step) for step in range(plan.num_steps))


def test_inspecting_a_plan_shows_its_ledger(tmp_path):
    plan = mixed_plan(tmp_path)
    (folder,) = (tmp_path / "packing_plan" / "-").iterdir()
    report = inspect(folder, None)["splits"]["train"]
    assert report["scheduled_packs"] == plan.num_scheduled
    for row in ledger_of(plan):
        stage = report["mixture"][row.stage]
        assert (stage["first_step"], stage[row.pool]["tokens"]) == (row.first_step, row.tokens)


def test_a_plan_without_a_mixture_has_one_stage_of_one_pass(tmp_path):
    plan = mixed_plan(tmp_path, stages=())
    rows = ledger_of(plan)
    assert [(row.stage, row.passes, row.quota_tokens) for row in rows] == [
        ("one_pass", 1.0, row.inventory_tokens) for row in rows
    ]
    assert sum(row.tokens for row in rows) == plan.num_targets
    assert every_window_keeps_its_quotas(plan) == pools_are_read_in_passes(plan) == []
    assert largest_quota_errors(plan) == {}


def test_cumulative_tokens_end_with_the_ledgers_sums(plan):
    cumulative = cumulative_tokens(plan)
    for pool in POOLS:
        assert len(cumulative[pool]) == plan.num_steps
        assert cumulative[pool][-1] == sum(row.tokens for row in ledger_of(plan) if row.pool == pool)
    first = sum(int(values[0]) for values in cumulative.values())
    assert first == plan.step_targets(0, 0)


@relaxed
@given(
    st.lists(st.integers(1, 40), min_size=6, max_size=30),
    st.lists(st.tuples(st.integers(100, 400), st.lists(st.integers(1, 9), min_size=3, max_size=3)), max_size=3),
)
def test_any_mixture_keeps_its_laws(tmp_path_factory, lengths, drawn):
    stages = [
        MixtureStage(name=f"stage{number}", tokens=tokens, shares=dict(zip(POOLS, map(str, shares), strict=True)))
        for number, (tokens, shares) in enumerate(drawn)
    ]
    plan = mixed_plan(tmp_path_factory.mktemp("root"), stages=stages, lengths=lengths)
    assert every_window_keeps_its_quotas(plan) == pools_are_read_in_passes(plan) == []
    assert all(error <= plan.capacity for error in largest_quota_errors(plan).values())


def test_a_mixture_comes_back_as_planned_and_is_packed_again_alike(plan):
    stored = [plan.order[a:b].tolist() for a, b in zip(plan.pack_offsets[:-1], plan.pack_offsets[1:], strict=True)]
    assert list(replay(plan, 0)) == stored
    assert list(replay(plan, 3)) == stored[3:]
    assert plan.num_scheduled == len(plan.schedule) != plan.num_packs
    assert plan.step_packs(2, 1).tolist() == plan.step_packs(0, 1).tolist()


def test_branches_of_a_mixture_have_the_steps_before_they_part_in_common(tmp_path):
    one, other = mixed_plan(tmp_path, (BASE, MORE_CODE)), mixed_plan(tmp_path, (BASE, AS_BEFORE))
    parted = one.stages[1].first_step
    batches = (islice(Sampler(plan), one.num_steps) for plan in (one, other))
    assert 0 < parted == other.stages[1].first_step <= naive.steps_alike(*batches) < one.num_steps == other.num_steps


def test_branches_resume_from_the_common_checkpoint_only_under_their_own_plan(tmp_path):
    one, other = mixed_plan(tmp_path, (BASE, MORE_CODE)), mixed_plan(tmp_path, (BASE, AS_BEFORE))
    sampler, branch = Sampler(one), Sampler(other)
    for _ in range(one.stages[1].first_step):
        assert np.array_equal(next(sampler).inputs, next(branch).inputs)
    assert not np.array_equal(next(sampler).inputs, next(branch).inputs)


def test_a_constant_shape_fits_a_microbatch_that_reads_one_pack_twice(tmp_path):
    """A pool of one pack of many segments is read again and again within a step."""
    short = MixtureStage(name="short", tokens=200, shares={"code": "1"})
    plan = mixed_plan(tmp_path, (short,), lengths=[9, 30, 1, 9, 30, 1, 9, 30, 1, 9, 30, 1], packs_per_microbatch=4)
    assert len(set(plan.step_packs(0, 0).tolist())) < len(plan.step_packs(0, 0))
    sampler = Sampler(plan)
    for _ in range(plan.num_steps):
        for batch in sampler.next_step():
            assert len(in_constant_shape(batch, plan.constant_shape).inputs) == plan.constant_shape.num_tokens


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_share_the_steps_of_a_mixture(plan, ranks):
    whole, shares = Sampler(plan), [Sampler(plan, rank, ranks) for rank in range(ranks)]
    for _ in range(plan.num_steps + 2):
        step = next(whole)
        parts = [next(share) for share in shares]
        assert sorted(step.inputs.tolist()) == sorted(t for part in parts for t in part.inputs.tolist())
        assert {part.step_targets for part in parts} == {step.step_targets}


def test_a_pack_read_instead_of_another_breaks_a_quota(plan):
    schedule = plan.schedule.copy()
    english = plan.index.pools[plan.locate(plan.order[plan.pack_offsets[:-1].astype(int)])[0]] == 0
    for place in np.flatnonzero(~english[schedule])[:3]:
        schedule[place] = np.flatnonzero(english)[0]
    found = every_window_keeps_its_quotas(dataclasses.replace(plan, schedule=schedule))
    assert any("stage base" in line and "expected" in line for line in found)


def test_a_pack_read_twice_in_a_pass_is_found(plan):
    schedule = plan.schedule.copy()
    same_pool = np.flatnonzero(
        plan.index.pools[plan.locate(plan.order[plan.pack_offsets[:-1].astype(int)])[0]][schedule] == 0
    )
    schedule[same_pool[1]] = schedule[same_pool[0]]
    (line,) = pools_are_read_in_passes(dataclasses.replace(plan, schedule=schedule))
    assert "pool english, pass 1: expected pack" in line
    assert "found 2 times" in line


def test_a_stage_that_says_another_start_is_found(plan):
    stages = (plan.stages[0], dataclasses.replace(plan.stages[1], first_token=plan.stages[1].first_token + 1))
    (line,) = every_window_keeps_its_quotas(dataclasses.replace(plan, stages=stages))
    assert "stage more_code: expected to start at token" in line


def test_packs_are_counted_once_for_all_laws(plan):
    counted = count_packs(plan)
    misread = dataclasses.replace(plan, schedule=plan.schedule[::-1])
    for law in (every_window_keeps_its_quotas, pools_are_read_in_passes, largest_quota_errors):
        assert law(misread, counted) == law(misread)
    assert every_window_keeps_its_quotas(misread, counted)
    broken = dataclasses.replace(counted, fault="not a pack is left")
    assert every_window_keeps_its_quotas(plan, broken) == ["split train: quotas not recounted: not a pack is left"]
    assert pools_are_read_in_passes(plan, broken) == ["split train: passes not recounted: not a pack is left"]
    assert largest_quota_errors(plan, broken) == {}


def test_a_quota_that_is_not_the_plans_is_found(plan):
    quotas = dict(plan.stages[0].quotas) | {"english": 30, "code": 75}
    stages = (dataclasses.replace(plan.stages[0], quotas=quotas), plan.stages[1])
    assert every_window_keeps_its_quotas(dataclasses.replace(plan, stages=stages))


def stages_changed(plan, **changes):
    return dataclasses.replace(plan, stages=(dataclasses.replace(plan.stages[0], **changes), *plan.stages[1:]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quotas": {}}, "stage base: expected tokens of the pools english, chinese, code, found none"),
        ({"quotas": {"english": 150, "code": 0}}, "found {'code': 0}"),
        ({"quotas": {"english": 75, "chinese": 45, "gamma": 30}}, "found {'gamma': 30}"),
        ({"quotas": {"english": 750, "chinese": 450, "code": 300}}, "stage base: expected to end with the step that"),
        ({"name": "more_code"}, "expected each stage's name once, found more_code, more_code"),
        ({"first_step": 1}, "expected stages to start one after another from step 0"),
    ],
)
def test_stages_that_cannot_be_are_found(plan, changes, message):
    assert any(message in line for line in every_window_keeps_its_quotas(stages_changed(plan, **changes)))


@pytest.mark.parametrize("left_out", [1, 4])
def test_a_schedule_that_ends_early_is_found(plan, left_out):
    found = every_window_keeps_its_quotas(dataclasses.replace(plan, schedule=plan.schedule[:-left_out]))
    wanted = "expected whole steps of 4 packs" if left_out == 1 else "stage more_code: expected to end with the step"
    assert any(wanted in line for line in found)


def reference_to(folder):
    manifest = load_manifest(folder)
    return ArtifactRef(
        asset=manifest.asset,
        unit=manifest.unit,
        identity=manifest.identity,
        digest=manifest.digest,
        counts=manifest.counts,
        outcome="built",
        seconds=0.0,
    )


def test_numbers_of_stages_and_pools_are_told_apart_whatever_their_names(tmp_path):
    """With `_` between them, a and b_c would read as a_b and c."""
    pools = ("b_c", "c", "d")
    stages = tuple(
        MixtureStage(name=name, tokens=tokens, shares={"b_c": "50", "c": one, "d": "20"})
        for name, tokens, one in (("a", 150, "30"), ("a_b", 120, "90"))
    )
    shards = make_token_shards(tmp_path, {"train": address_docs(LENGTHS)}, pool_names=pools, max_shard_tokens=60)
    plan = make_plan(tmp_path, shards, mixture=stages, capacity=12, max_seq_len=10)
    stage = small_corpus.open_stage(Path("sample"), tmp_path)
    ledger = build_ledger(stage, reference_to(shards), reference_to(plan))
    verdict = ledger_is_what_the_plan_reads(stage, ledger.ref, reference_to(plan))
    rows = ledger_of(load_plan(plan))
    assert verdict.num_violations == 0
    assert verdict.numbers == {f"{row.stage}/{row.pool}/tokens": row.tokens for row in rows}
    assert len(verdict.numbers) == len(rows) == 6


def test_of_many_relative_shares_a_few_are_told():
    shares = {f"pool_{number}": "1/3" for number in range(64)}
    percent = {"whole": {"web": "99", "code": "1"}}
    told = relative_shares(percent | {f"stage_{number}": shares for number in range(64)})
    assert told.startswith("Shares are relative, not percent: in stage_0 pool_0 1/3 of 21.3333 (1.6%), pool_1 1/3 of ")
    assert told.endswith("pool_4 1/3 of 21.3333 (1.6%), and 59 more pools; 63 more stages are relative too.")
    assert told.count("pool_") == 5
    few = {name: shares[name] for name in list(shares)[:5]}
    assert relative_shares({"one": few}).endswith("pool_4 1/3 of 1.66667 (20.0%).")


def test_packs_of_several_pools_cannot_be_recounted(plan):
    order = plan.order.copy()
    order[[0, -1]] = order[[-1, 0]]
    broken = dataclasses.replace(plan, order=order)
    assert "a pack holds several pools" in every_window_keeps_its_quotas(broken)[0]
    assert "a pack holds several pools" in pools_are_read_in_passes(broken)[0]


@pytest.mark.parametrize("where", ["above", "below"])
def test_a_schedule_of_packs_that_are_not_there_is_refused(tmp_path, where):
    plan = mixed_plan(tmp_path)
    (folder,) = (tmp_path / "packing_plan" / "-").iterdir()
    schedule = plan.schedule.astype(np.int64)
    schedule[0] = {"above": plan.num_packs, "below": -1}[where]
    np.save(folder / "train" / "schedule.npy", schedule)
    manifest = load_manifest(folder)
    seal(folder, "packing_plan", dict(manifest.inputs), dict(manifest.parameters), dict(manifest.counts))
    with pytest.raises(FormatError, match="expected a schedule of packs below"):
        load_plan(folder)


def test_a_schedule_of_another_length_is_refused(tmp_path):
    mixed_plan(tmp_path)
    (folder,) = (tmp_path / "packing_plan" / "-").iterdir()
    fields = json.loads((folder / "train" / "plan.json").read_text())
    fields["num_scheduled"] += 1
    (folder / "train" / "plan.json").write_text(json.dumps(fields))
    manifest = load_manifest(folder)
    seal(folder, "packing_plan", dict(manifest.inputs), dict(manifest.parameters), dict(manifest.counts))
    with pytest.raises(FormatError, match=r"schedule\.npy"):
        load_plan(folder)


@pytest.mark.parametrize("stages", [5, [{}], [{"name": "base"}], [7]])
def test_stages_that_are_none_are_refused(tmp_path, stages):
    mixed_plan(tmp_path)
    (folder,) = (tmp_path / "packing_plan" / "-").iterdir()
    fields = json.loads((folder / "train" / "plan.json").read_text())
    (folder / "train" / "plan.json").write_text(json.dumps(fields | {"stages": stages}))
    manifest = load_manifest(folder)
    seal(folder, "packing_plan", dict(manifest.inputs), dict(manifest.parameters), dict(manifest.counts))
    with pytest.raises(FormatError, match="expected stages of name, first_step, first_token, quotas"):
        load_plan(folder)


def test_a_mixture_of_a_pool_that_the_split_lacks_is_refused(tmp_path):
    with pytest.raises(RecipeError, match="expected documents in pool code for its 30 tokens, found none in the split"):
        mixed_plan(tmp_path, lengths=[9, 9])
