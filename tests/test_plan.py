"""Plans: every pair once an epoch, the same plan when read, and no plan over shards that are not its own."""

import dataclasses
import json
import shutil
from pathlib import Path

import naive_batches as naive
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_artifacts import address_docs, make_plan, make_token_shards, seal

from training_io import planning
from training_io.document_index import cut_shards, index_of, read_index
from training_io.errors import FormatError, RecipeError, StateMismatch
from training_io.invariants import (
    every_pair_once,
    order_is_permutation,
    pack_sums_are_right,
    packs_within_capacity,
    steps_match_shards,
)
from training_io.manifest import MANIFEST_NAME, QUARANTINE_NAME, load_manifest
from training_io.packing import STRATEGIES, STREAMING, pack_stream
from training_io.plan import ShardsReference, load_plan, write_plan
from training_io.planning import SNAPSHOT_PACKS, plan_packs, replay

relaxed = settings(deadline=None, max_examples=25)
LENGTHS = [6, 4, 3, 2, 20, 1, 0, 9]


@pytest.fixture
def artifacts(tmp_path):
    shards = make_token_shards(
        tmp_path, {"train": address_docs(LENGTHS), "validation": address_docs([3, 5], 50)}, max_shard_tokens=12
    )
    return shards, make_plan(tmp_path, shards, splits=("train", "validation"))


def replanned(plan, **changes):
    names = (
        "max_seq_len",
        "long_documents",
        "overlap",
        "capacity",
        "strategy",
        "buffer",
        "packs_per_microbatch",
        "microbatches_per_step",
        "epoch_seed",
    )
    parameters = {name: getattr(plan, name) for name in names} | changes
    return plan_packs(plan.index, shards=plan.shards, **parameters)


@relaxed
@given(st.lists(st.integers(0, 25), min_size=1, max_size=15), st.integers(2, 9), st.integers(0, 9), st.integers(0, 2))
def test_every_pair_is_planned_once_in_every_epoch(tmp_path_factory, lengths, max_seq_len, more, epoch):
    root = tmp_path_factory.mktemp("root")
    docs = address_docs(lengths)
    shards = make_token_shards(root, {"train": docs}, max_shard_tokens=20)
    plan = load_plan(make_plan(root, shards, max_seq_len=max_seq_len, capacity=max_seq_len + more))
    packs = [pack for step in range(plan.num_steps) for pack in plan.step_packs(epoch, step).tolist()]
    assert sorted(packs) == list(range(plan.num_packs))
    assert sum(plan.step_targets(epoch, step) for step in range(plan.num_steps)) == plan.num_targets
    doc, start, end = plan.locate(plan.segments_of(np.array(packs, dtype=np.int64)))
    closed = [[*tokens, 0] for tokens in docs]
    pairs = [closed[d][a : b + 1] for d, a, b in zip(doc, start, end, strict=True)]
    assert naive.pair_multiset(pairs) == naive.pair_multiset(closed)


def test_a_plan_comes_back_as_planned(artifacts):
    shards, folder = artifacts
    manifest = load_manifest(shards)
    planned = plan_packs(
        read_index(shards / "train_index"),
        shards=ShardsReference(path=shards, identity=manifest.identity, digest=manifest.digest),
        max_seq_len=8,
        capacity=16,
        strategy="oldest_first",
        buffer=16,
        packs_per_microbatch=2,
        microbatches_per_step=2,
        epoch_seed=1,
    )
    read = load_plan(folder)
    assert read.identity == planned.identity
    assert (read.packs_per_step, read.num_packs, read.num_steps, read.num_targets) == (4, 3, 1, sum(LENGTHS))
    for name, column in planned.columns.items():
        assert np.array_equal(column, read.columns[name])
        assert column.dtype == read.columns[name].dtype
        assert not read.columns[name].flags.writeable


def test_the_plan_records_the_streaming_packer(artifacts):
    plan = load_plan(artifacts[1])
    lengths = [end - start for n in (length + 1 for length in LENGTHS) for start, end in naive.segments_of(n, 8)]
    stored = [plan.segments_of(np.array([pack])).tolist() for pack in range(plan.num_packs)]
    assert stored == list(pack_stream(lengths, 16, "oldest_first", 16))
    assert plan.pack_targets.tolist() == [sum(lengths[n] for n in chosen) for chosen in stored]
    assert plan.pack_sum_squares.tolist() == [sum(lengths[n] ** 2 for n in chosen) for chosen in stored]


def test_a_split_is_named_or_pointed_at(artifacts):
    _, folder = artifacts
    assert load_plan(folder, "validation").identity == load_plan(folder / "validation").identity
    assert load_plan(str(folder)).split == "train"
    with pytest.raises(FormatError, match="expected a plan of split test, found train, validation"):
        load_plan(folder, "test")


def test_plan_json_is_as_documented(artifacts):
    shards, folder = artifacts
    fields = json.loads((folder / "train" / "plan.json").read_text())
    assert fields["format"] == "corpusmill-plan/3"
    assert (fields["long_documents"], fields["overlap"]) == ("cut", 0)
    assert fields["shards"]["path"] == f"../../../../token_shards/-/{shards.name}"
    assert fields["shards"]["identity"] == shards.name
    assert (fields["num_documents"], fields["num_segments"], fields["num_packs"]) == (8, 10, 3)
    assert (fields["num_targets"], fields["num_steps"]) == (45, 1)


def test_artifacts_may_move_together(artifacts, tmp_path):
    before = load_plan(artifacts[1]).identity
    for asset in ("token_shards", "packing_plan"):
        shutil.move(tmp_path / asset, tmp_path / "elsewhere" / asset)
    moved = load_plan(tmp_path / "elsewhere" / "packing_plan" / "-" / artifacts[1].name)
    assert moved.identity == before
    assert int(moved.token_shards[0][0]) == 1
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere" / "packing_plan" / "-" / artifacts[1].name)
    assert load_plan(tmp_path / "link").identity == before


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_seq_len", 7),
        ("long_documents", "divert"),
        ("overlap", 1),
        ("capacity", 17),
        ("strategy", "best_fit"),
        ("buffer", 17),
        ("packs_per_microbatch", 3),
        ("microbatches_per_step", 3),
        ("epoch_seed", 2),
    ],
)
def test_identity_covers_every_parameter(artifacts, name, value):
    plan = load_plan(artifacts[1])
    assert replanned(plan).identity == plan.identity
    assert replanned(plan, **{name: value}).identity != plan.identity


def test_identity_covers_columns_and_shards_but_not_their_path(artifacts, tmp_path):
    plan = load_plan(artifacts[1])
    swapped = plan.order.copy()
    swapped[:2] = swapped[1::-1]
    assert dataclasses.replace(plan, order=swapped).identity != plan.identity
    other = dataclasses.replace(plan.shards, digest="0" * 64)
    assert dataclasses.replace(plan, shards=other).identity != plan.identity
    elsewhere = dataclasses.replace(plan.shards, path=tmp_path)
    assert dataclasses.replace(plan, shards=elsewhere).identity == plan.identity


def test_a_segment_takes_four_bytes_and_a_pack_twelve(artifacts):
    plan = load_plan(artifacts[1])
    assert {column.dtype for column in plan.columns.values()} == {np.dtype(np.uint32)}


def test_numbers_that_need_more_than_32_bits_get_them(artifacts):
    plan = load_plan(artifacts[1])
    lengths = np.array([70_001, 5], dtype=np.int64)
    index = index_of(
        split="train",
        doc_ids=np.zeros((2, 32), dtype=np.uint8),
        pools=np.zeros(2, dtype=np.uint16),
        pool_names=("tiny",),
        lengths=lengths,
        cuts=cut_shards(lengths, 100_000),
        eos_id=0,
        token_dtype="uint16",
        tokenizer_fingerprint="",
    )
    wide = replanned(dataclasses.replace(plan, index=index), max_seq_len=70_000, capacity=70_000)
    assert wide.pack_sum_squares.tolist() == [70_000**2, 4**2]
    assert (wide.pack_sum_squares.dtype, wide.pack_targets.dtype) == (np.int64, np.uint32)


def web_index(num_documents):
    """Documents of web-like lengths: median 403 and mean 690 tokens, at least 32."""
    sigma = np.sqrt(2 * np.log(690 / 403))
    drawn = np.random.default_rng(0).lognormal(np.log(403), sigma, num_documents)
    lengths = np.maximum(32, np.rint(drawn)).astype(np.int64)
    return index_of(
        split="train",
        doc_ids=np.zeros((num_documents, 32), dtype=np.uint8),
        pools=np.zeros(num_documents, dtype=np.uint16),
        pool_names=("web",),
        lengths=lengths,
        cuts=cut_shards(lengths, int(lengths.sum())),
        eos_id=0,
        token_dtype="uint16",
        tokenizer_fingerprint="",
    )


def web_plan(strategy, num_documents=30_000):
    return plan_packs(
        web_index(num_documents),
        shards=ShardsReference(path=Path(), identity="", digest=""),
        max_seq_len=4_096,
        capacity=4_096,
        strategy=strategy,
        buffer=256,
        packs_per_microbatch=35,
        microbatches_per_step=1,
        epoch_seed=1,
    )


@pytest.mark.parametrize("strategy", ["oldest_first", "best_fit"])
def test_a_plan_of_ten_billion_tokens_fits_in_110_megabytes(tmp_path, strategy):
    plan = web_plan(strategy)
    write_plan(tmp_path / "packing_plan" / "train", plan, tmp_path)
    num_bytes = sum(path.stat().st_size for path in (tmp_path / "packing_plan").rglob("*") if path.is_file())
    assert num_bytes / plan.num_targets * 10e9 < 110e6


@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
def test_any_stretch_of_the_plan_is_what_the_packer_makes_of_it(monkeypatch, strategy):
    monkeypatch.setattr(planning, "SNAPSHOT_PACKS", 16)
    plan = web_plan(strategy, 400)
    assert len(plan.snapshots) == (plan.num_packs // 16 + 1 if strategy in STREAMING else 0)
    for first in (0, 1, 16, 17, 47, plan.num_packs - 1, plan.num_packs):
        stored = [plan.segments_of(np.array([pack])).tolist() for pack in range(first, plan.num_packs)]
        assert list(replay(plan, first)) == stored


def test_snapshots_make_every_stretch_near():
    plan = web_plan("concat")
    assert len(plan.snapshots) == plan.num_packs // SNAPSHOT_PACKS + 1 > 1
    late = plan.num_packs - 1
    assert next(replay(plan, late)) == plan.segments_of(np.array([late])).tolist()
    assert plan.snapshots[-1]["arrived"] > 0.5 * plan.num_segments


@relaxed
@given(st.lists(st.integers(0, 40), min_size=1, max_size=12), st.integers(2, 9), st.integers(0, 9), st.data())
def test_with_an_overlap_every_pair_is_trained_once_and_what_is_repeated_is_counted(
    tmp_path_factory, lengths, max_seq_len, more, data
):
    overlap = data.draw(st.integers(0, max_seq_len - 1))
    root = tmp_path_factory.mktemp("root")
    shards = make_token_shards(root, {"train": address_docs(lengths)}, max_shard_tokens=20)
    plan = load_plan(make_plan(root, shards, max_seq_len=max_seq_len, capacity=max_seq_len + more, overlap=overlap))
    walked = [row for n in lengths for row in naive.overlapping_segments(n + 1, max_seq_len, overlap)]
    packs = [plan.segments_of(np.array([pack])).tolist() for pack in range(plan.num_packs)]
    inputs = [sum(walked[n][1] - walked[n][0] for n in chosen) for chosen in packs]
    assert plan.pack_inputs(np.arange(plan.num_packs)).tolist() == inputs
    assert max(inputs, default=0) <= plan.capacity
    repeated = [sum(walked[n][2] for n in chosen) for chosen in packs]
    assert plan.pack_targets.tolist() == [num - twice for num, twice in zip(inputs, repeated, strict=True)]
    assert (plan.num_targets, plan.num_repeated) == (sum(lengths), sum(repeated))
    assert plan.num_inputs == sum(inputs)
    assert plan.pack_sum_squares.tolist() == [sum((walked[n][1] - walked[n][0]) ** 2 for n in pack) for pack in packs]
    for law in (order_is_permutation, every_pair_once, packs_within_capacity, pack_sums_are_right, steps_match_shards):
        assert law(plan) == []


def test_six_thousand_inputs_with_an_overlap_of_five_hundred_are_six_thousand_five_hundred_to_read(tmp_path):
    shards = make_token_shards(tmp_path, {"train": address_docs([6_000])})
    plan = load_plan(
        make_plan(tmp_path, shards, max_seq_len=4_000, capacity=4_000, overlap=500, packs_per_microbatch=2)
    )
    doc, start, end = plan.locate(np.arange(plan.num_segments))
    assert (doc.tolist(), start.tolist(), end.tolist()) == ([0, 0], [0, 3_500], [4_000, 6_000])
    assert (plan.num_inputs, plan.num_targets, plan.num_repeated) == (6_500, 6_000, 500)
    assert plan.step_targets(0, 0) == 6_000


def test_long_documents_are_diverted_whole(tmp_path):
    shards = make_token_shards(tmp_path, {"train": address_docs(LENGTHS)}, max_shard_tokens=12)
    plan = load_plan(make_plan(tmp_path, shards, long_documents="divert"))
    assert [LENGTHS[number] for number in plan.diverted] == [20, 9]
    doc, start, end = plan.locate(plan.segments_of(np.arange(plan.num_packs)))
    assert sorted(doc.tolist()) == [number for number, length in enumerate(LENGTHS) if 0 < length <= 8]
    assert [(a, b) for a, b in zip(start.tolist(), end.tolist(), strict=True)] == [(0, LENGTHS[d]) for d in doc]
    assert plan.num_targets == sum(length for length in LENGTHS if length <= 8)
    for law in (order_is_permutation, every_pair_once, packs_within_capacity, pack_sums_are_right, steps_match_shards):
        assert law(plan) == []
    cut = dataclasses.replace(plan, long_documents="cut")
    assert every_pair_once(cut) != []


def test_long_documents_are_refused_by_name(artifacts):
    plan = load_plan(artifacts[1])
    with pytest.raises(
        RecipeError, match=r"document 4: expected at most 8 inputs .*found 20; 2 documents .*longest 20"
    ):
        replanned(plan, long_documents="refuse")
    whole = replanned(plan, long_documents="refuse", max_seq_len=20, capacity=20)
    assert (len(whole.diverted), whole.num_targets) == (0, sum(LENGTHS))
    with pytest.raises(RecipeError, match="expected one of cut, refuse, divert, found 'split'"):
        replanned(plan, long_documents="split")


@pytest.mark.parametrize("which", [0, 1])
def test_an_unsealed_artifact_is_refused(artifacts, which):
    (artifacts[which] / MANIFEST_NAME).unlink()
    with pytest.raises(FormatError, match=r"sealed artifact with manifest\.json, found none"):
        load_plan(artifacts[1])


@pytest.mark.parametrize("which", [0, 1])
def test_a_quarantined_artifact_is_refused_but_checks_may_look(artifacts, which):
    (artifacts[which] / QUARANTINE_NAME).write_text('{"every_pair_once": "3 violations"}')
    with pytest.raises(FormatError, match=r"quarantined .*every_pair_once: 3 violations"):
        load_plan(artifacts[1] / "train")
    assert load_plan(artifacts[1], allow_quarantined=True).num_packs == 3


def test_other_shards_are_refused_naming_both(artifacts, tmp_path):
    shards, folder = artifacts
    manifest = load_manifest(shards)
    (shards / "train_000000.bin").write_bytes(b"other bytes")
    seal(shards, manifest.asset, manifest.inputs, manifest.parameters, manifest.counts)
    resealed = load_manifest(shards)
    with pytest.raises(StateMismatch, match=f"digest {manifest.digest[:12]}.*{resealed.digest[:12]}"):
        load_plan(folder)


def test_another_artifact_in_place_of_the_shards_is_refused(artifacts, tmp_path):
    shards, folder = artifacts
    other = make_token_shards(tmp_path, {"train": address_docs([5])})
    shutil.rmtree(shards)
    other.rename(shards)
    with pytest.raises(StateMismatch, match=f"identity {shards.name[:12]}.*{other.name[:12]}"):
        load_plan(folder)


def test_an_artifact_of_another_asset_is_refused(artifacts):
    shards, _ = artifacts
    with pytest.raises(FormatError, match="expected an artifact of packing_plan, found one of token_shards"):
        load_plan(shards)


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_targets", 44), ("num_steps", 2), ("num_documents", 9), ("eos_id", 5), ("tokenizer_fingerprint", "0")],
)
def test_a_plan_that_contradicts_itself_is_refused(artifacts, field, value):
    path = artifacts[1] / "train" / "plan.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    with pytest.raises(FormatError, match=f"{field}: says {value}"):
        load_plan(artifacts[1])


def test_a_plan_cut_at_another_limit_than_it_says_is_refused(artifacts):
    path = artifacts[1] / "train" / "plan.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_seq_len": 4}))
    with pytest.raises(FormatError, match="segments of its documents"):
        load_plan(artifacts[1])


def test_a_renamed_split_is_refused(artifacts):
    (artifacts[1] / "train").rename(artifacts[1] / "test")
    with pytest.raises(FormatError, match="expected split test, found train"):
        load_plan(artifacts[1], "test")


@pytest.mark.parametrize("name", ["packs_per_microbatch", "microbatches_per_step"])
def test_a_step_without_packs_is_refused(artifacts, name):
    with pytest.raises(RecipeError, match="at least 1 pack"):
        replanned(load_plan(artifacts[1]), **{name: 0})


def test_documents_without_pairs_give_a_plan_without_packs(tmp_path):
    shards = make_token_shards(tmp_path, {"train": [[], []]})
    plan = load_plan(make_plan(tmp_path, shards))
    assert (plan.num_segments, plan.num_packs, plan.num_steps, plan.num_targets) == (0, 0, 0, 0)
