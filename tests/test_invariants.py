"""Each law holds on sound artifacts and is the one that fails on artifacts poisoned in exactly one place."""

import dataclasses

import numpy as np
import pytest
from tiny_artifacts import address_docs, make_plan, make_token_shards

from training_io import invariants
from training_io.document_index import read_index
from training_io.plan import load_plan
from training_io.sampler import Sampler
from training_io.shard_format import read_shard

LENGTHS = [6, 4, 3, 2, 20, 1, 0, 9]


@pytest.fixture
def shards(tmp_path):
    return make_token_shards(
        tmp_path, {"train": address_docs(LENGTHS), "validation": address_docs([3, 5], 50)}, max_shard_tokens=12
    )


@pytest.fixture
def index(shards):
    return read_index(shards / "train_index")


@pytest.fixture
def plan(tmp_path, shards):
    return load_plan(make_plan(tmp_path, shards, packs_per_microbatch=1, microbatches_per_step=1))


def changed(values, at, value):
    copy = np.array(values)
    copy[at] = value
    return copy


def plan_laws(plan):
    laws = {
        "permutation": invariants.order_is_permutation,
        "pairs": invariants.every_pair_once,
        "capacity": invariants.packs_within_capacity,
        "sums": invariants.pack_sums_are_right,
        "steps": invariants.steps_match_shards,
    }
    return {name for name, law in laws.items() if law(plan)}


def test_sound_artifacts_keep_every_law(shards, index, plan):
    validation = read_index(shards / "validation_index")
    for each in (index, validation):
        assert invariants.shards_match_headers(shards, each) == []
        assert invariants.documents_tile_shards(each) == []
        assert invariants.eos_ends_documents(shards, each) == []
    assert invariants.doc_ids_once([index, validation], repeats_within_split=False) == []
    assert plan_laws(plan) == set()
    assert len(invariants.sampled_steps(plan)) == 4
    assert plan.num_segments > plan.index.num_documents  # a document was cut


@pytest.mark.parametrize(
    ("at", "message"),
    [
        (0, "expected header"),
        (4, "expected header"),
        (8, "expected header"),
        (None, "bytes, found"),
        ("gone", "no file"),
    ],
)
def test_a_poisoned_shard_breaks_its_header_law(shards, index, at, message):
    path = shards / "train_000001.bin"
    raw = bytearray(path.read_bytes())
    if at == "gone":
        path.unlink()
    elif at is None:
        path.write_bytes(raw[:-1])
    else:
        raw[at] ^= 1
        path.write_bytes(raw)
    violations = invariants.shards_match_headers(shards, index)
    assert len(violations) == 1
    assert "train_000001.bin" in violations[0]
    assert message in violations[0]


@pytest.mark.parametrize(
    "poison",
    [
        lambda index: {"offsets": changed(index.offsets, 1, 6)},
        lambda index: {"offsets": changed(index.offsets, 2, 1)},
        lambda index: {"lengths": changed(index.lengths, 7, 9)},
        lambda index: {"shards": changed(index.shards, 0, 1)},
        lambda index: {"shard_tokens": (*index.shard_tokens[:-1], index.shard_tokens[-1] + 1)},
    ],
)
def test_a_poisoned_index_does_not_tile(index, poison):
    assert invariants.documents_tile_shards(dataclasses.replace(index, **poison(index)))


@pytest.mark.parametrize(("token", "value", "message"), [(6, 5, "expected EOS 0"), (2, 0, "expected no EOS inside")])
def test_one_poisoned_token_breaks_the_eos_law(shards, index, token, value, message):
    with (shards / "train_000000.bin").open("r+b") as file:
        file.seek(1024 + 4 * token)
        file.write(int(value).to_bytes(4, "little"))
    violations = invariants.eos_ends_documents(shards, index)
    assert len(violations) == 1
    assert f"token {token:,}: {message}" in violations[0]


def test_a_doc_id_across_splits_is_found_even_where_repeats_are_allowed(shards, index):
    validation = read_index(shards / "validation_index")
    leaked = dataclasses.replace(validation, doc_ids=changed(validation.doc_ids, 1, index.doc_ids[3]))
    for allowed in (True, False):
        violations = invariants.doc_ids_once([index, leaked], repeats_within_split=allowed)
        assert len(violations) == 1
        assert "found in train and again in validation" in violations[0]


def test_a_doc_id_twice_in_a_split_is_a_matter_of_the_mode(index):
    doubled = dataclasses.replace(index, doc_ids=changed(index.doc_ids, 1, index.doc_ids[3]))
    assert invariants.doc_ids_once([doubled], repeats_within_split=True) == []
    assert len(invariants.doc_ids_once([doubled], repeats_within_split=False)) == 1
    assert invariants.doc_ids_once([], repeats_within_split=False) == []


def test_a_doc_id_that_differs_in_its_last_byte_is_another(index):
    near = changed(index.doc_ids, 1, index.doc_ids[3])
    near[1, 31] ^= 1
    assert invariants.doc_ids_once([dataclasses.replace(index, doc_ids=near)], repeats_within_split=False) == []


def test_a_segment_planned_twice(plan):
    _, start, end = plan.locate(plan.order)
    one, other = np.flatnonzero(end - start == plan.max_seq_len)[:2]
    poisoned = dataclasses.replace(plan, order=changed(plan.order, other, plan.order[one]))
    assert plan_laws(poisoned) == {"pairs", "permutation", "steps"}  # the same sizes: no sum can tell


def test_a_segment_that_does_not_exist(plan):
    poisoned = dataclasses.replace(plan, order=changed(plan.order, 0, plan.num_segments))
    assert plan_laws(poisoned) == {"pairs", "permutation", "steps"}
    assert any("found 10" in violation for violation in invariants.order_is_permutation(poisoned))


def test_every_pair_names_the_token(plan):
    first = int(plan.order[0])
    poisoned = dataclasses.replace(plan, order=changed(plan.order, 0, plan.order[1]))
    lost = [violation for violation in invariants.every_pair_once(poisoned) if violation.endswith("found 0")]
    doc, start, _ = (int(column[0]) for column in plan.locate(np.array([first])))
    assert f"token {int(plan.index.offsets[doc]) + start:,}:" in lost[0]


@pytest.fixture
def overlapping(tmp_path, shards):
    packing = {"packs_per_microbatch": 1, "microbatches_per_step": 1, "overlap": 3}
    return load_plan(make_plan(tmp_path, shards, **packing))


def test_a_plan_with_an_overlap_keeps_every_law(overlapping):
    assert overlapping.num_repeated > 0
    assert plan_laws(overlapping) == set()


@pytest.mark.parametrize("overlap", [0, 2, 4])
def test_another_overlap_than_was_planned(overlapping, overlap):
    assert plan_laws(dataclasses.replace(overlapping, overlap=overlap)) >= {"sums"}


def test_a_segment_that_repeats_is_planned_twice(overlapping):
    _, start, end = overlapping.locate(overlapping.order)
    one, other = np.flatnonzero((start > 0) & (end - start == overlapping.max_seq_len))[:2]
    poisoned = dataclasses.replace(overlapping, order=changed(overlapping.order, other, overlapping.order[one]))
    violations = invariants.every_pair_once(poisoned)
    assert plan_laws(poisoned) == {"pairs", "permutation", "steps"}
    assert any("expected 1 planned pairs from it, found 2" in violation for violation in violations)
    for times in (0, 2):
        assert any(f"expected 1 repeats of it, found {times}" in violation for violation in violations)


@pytest.mark.parametrize(
    ("poison", "message"),
    [
        (lambda at, batch: {"targets": changed(batch.targets, at, batch.inputs[at + 1])}, "0 or 3 targets ignored"),
        (lambda at, batch: {"targets": changed(batch.targets, at + 3, -100)}, "0 or 3 targets ignored"),
        (lambda at, batch: {"targets": changed(batch.targets, slice(0, 3), -100)}, "tokens of document"),
        (
            lambda at, batch: {"targets": changed(batch.targets, slice(at, at + 3), batch.inputs[at + 1 : at + 4])},
            "tokens of document",
        ),
        (lambda at, batch: {"inputs": changed(batch.inputs, at, 9)}, "tokens of document"),
    ],
    ids=["one trained again", "one too many", "a first segment", "all trained again", "another token"],
)
def test_a_batch_that_repeats_otherwise_than_planned_is_found(overlapping, poison, message):
    shards = {
        number: read_shard(overlapping.shards.path / file) for number, file in enumerate(overlapping.index.shard_files)
    }
    batch = next(batch for batch in Sampler(overlapping) if -100 in batch.targets[1:] and batch.targets[0] != -100)
    at = int(np.flatnonzero(batch.targets == -100)[0])
    assert invariants.batch_faults(batch, overlapping, shards) == []
    poisoned = dataclasses.replace(batch, **poison(at, batch))
    assert any(message in fault for fault in invariants.batch_faults(poisoned, overlapping, shards))
    num_targets = int((poisoned.targets != -100).sum())
    counted = dataclasses.replace(poisoned, num_targets=num_targets, step_targets=num_targets)
    assert any(message in fault for fault in invariants.batch_faults(counted, overlapping, shards))


def test_a_pack_over_capacity(plan):
    assert plan_laws(dataclasses.replace(plan, capacity=15)) == {"capacity", "steps"}


@pytest.mark.parametrize(("at", "value"), [(0, 1), (-1, 9), (1, 0)])
def test_pack_offsets_that_do_not_rise(plan, at, value):
    assert plan_laws(dataclasses.replace(plan, pack_offsets=changed(plan.pack_offsets, at, value))) >= {"capacity"}


@pytest.mark.parametrize("name", ["pack_targets", "pack_sum_squares"])
def test_a_wrong_sum(plan, name):
    wrong = changed(getattr(plan, name), 1, 7)
    violations = invariants.pack_sums_are_right(dataclasses.replace(plan, **{name: wrong}))
    assert len(violations) == 1
    assert f"{name} of pack 1" in violations[0]


def test_a_wrong_denominator_is_seen_in_the_steps(plan):
    assert plan_laws(dataclasses.replace(plan, pack_targets=changed(plan.pack_targets, 0, 7))) == {"sums", "steps"}


@pytest.mark.parametrize(
    ("poison", "message"),
    [
        (lambda batch: {"cu_seqlens": changed(batch.cu_seqlens, -1, batch.cu_seqlens[-1] - 1)}, "cu_seqlens"),
        (lambda batch: {"cu_seqlens": changed(batch.cu_seqlens, 1, 0)}, "cu_seqlens"),
        (lambda batch: {"max_seqlen": batch.max_seqlen + 1}, "max_seqlen"),
        (lambda batch: {"position_ids": changed(batch.position_ids, 0, 1)}, "positions from 0"),
        (lambda batch: {"targets": changed(batch.targets, 0, 9)}, "target"),
        (lambda batch: {"targets": changed(batch.targets, -1, 9)}, "tokens of document"),
        (lambda batch: {"inputs": changed(batch.inputs, 0, 9)}, "tokens of document"),
        (lambda batch: {"segment_doc": changed(batch.segment_doc, 0, 7)}, "tokens of document 7"),
        (lambda batch: {"step_targets": batch.step_targets + 1}, "denominator"),
    ],
)
def test_a_poisoned_batch_is_found(plan, poison, message):
    shards = {number: read_shard(plan.shards.path / file) for number, file in enumerate(plan.index.shard_files)}
    batch = next(Sampler(plan))
    assert invariants.batch_faults(batch, plan, shards) == []
    faults = invariants.batch_faults(dataclasses.replace(batch, **poison(batch)), plan, shards)
    assert faults
    assert all(message in fault for fault in faults)


def test_what_cannot_be_recounted_is_not_passed_over_in_silence(shards, plan):
    with (shards / "train_000000.bin").open("r+b") as file:
        file.truncate(1030)
    assert invariants.shards_match_headers(shards, plan.index)
    assert invariants.steps_match_shards(plan) == [
        "split train: steps not recounted: shards, order or packs are broken"
    ]
