"""Batches: real tokens only, targets one later, positions that restart, boundaries that a device can trust."""

import dataclasses

import naive_batches as naive
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_artifacts import address_docs, make_plan, make_token_shards

from training_io.batch import (
    IGNORED,
    ConstantShape,
    PackedBatch,
    assemble_batch,
    check_batch,
    check_cu_seqlens,
    end_to_end,
    in_constant_shape,
    in_padded_rows,
)
from training_io.document_index import read_index
from training_io.errors import InvariantBroken, RecipeError
from training_io.plan import load_plan
from training_io.sampler import Sampler
from training_io.shard_format import read_shard

relaxed = settings(deadline=None, max_examples=40)


def assembled(root, docs, segments, overlap=0, **shard_arguments):
    artifact = make_token_shards(root, {"train": docs}, **shard_arguments)
    index = read_index(artifact / "train_index")
    shards = [read_shard(artifact / file) for file in index.shard_files]
    doc, start, end = (np.array([row[at] for row in segments], dtype=np.int64) for at in range(3))
    return index, assemble_batch(index, shards, doc, start, end, step_targets=100, epoch=2, step=7, overlap=overlap)


def test_four_documents_make_one_flat_vector(tmp_path):
    shards = make_token_shards(tmp_path, {"train": address_docs([6, 4, 3, 2])})
    folder = make_plan(
        tmp_path, shards, max_seq_len=8, capacity=8, strategy="best_fit", buffer=64, microbatches_per_step=1
    )
    batch = next(Sampler(load_plan(folder)))
    assert batch.segment_doc.tolist() == [0, 3, 1, 2]
    assert batch.cu_seqlens.tolist() == [0, 6, 8, 12, 15]
    assert batch.num_targets == batch.step_targets == 15
    assert batch.max_seqlen == 6
    assert np.diff(batch.cu_seqlens[[0, 2, 4]]).tolist() == [8, 7]


def test_a_cut_document_predicts_across_the_cut(tmp_path):
    docs = [[11, 12, 13, 14, 15]]
    _, batch = assembled(tmp_path, docs, [(0, 0, 4), (0, 4, 5)], eos_id=99)
    assert batch.inputs.tolist() == [11, 12, 13, 14, 15]
    assert batch.targets.tolist() == [12, 13, 14, 15, 99]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 0]


def test_what_a_segment_repeats_is_read_and_not_trained(tmp_path):
    docs = [[11, 12, 13, 14, 15, 16]]
    _, batch = assembled(tmp_path, docs, [(0, 2, 6), (0, 0, 4)], overlap=2, eos_id=99)
    assert batch.inputs.tolist() == [13, 14, 15, 16, 11, 12, 13, 14]
    assert batch.targets.tolist() == [IGNORED, IGNORED, 16, 99, 12, 13, 14, 15]
    assert batch.position_ids.tolist() == [0, 1, 2, 3] * 2
    assert batch.num_targets == 6
    check_batch(batch)


@relaxed
@given(st.lists(st.integers(1, 12), min_size=1, max_size=8), st.integers(1, 30), st.data())
def test_a_batch_is_its_segments_laid_end_to_end(tmp_path_factory, lengths, max_shard_tokens, data):
    docs = address_docs(lengths)
    closed = [[*doc, 0] for doc in docs]
    choices = [(d, a, b) for d, n in enumerate(lengths) for a in range(n) for b in range(a + 1, n + 1)]
    segments = data.draw(st.lists(st.sampled_from(choices), max_size=6))
    root = tmp_path_factory.mktemp("root")
    _, batch = assembled(root, docs, segments, max_shard_tokens=max_shard_tokens)
    check_batch(batch)
    assert batch.inputs.tolist() == [token for d, a, b in segments for token in closed[d][a:b]]
    assert batch.targets.tolist() == [token for d, a, b in segments for token in closed[d][a + 1 : b + 1]]
    assert batch.position_ids.tolist() == [position for _, a, b in segments for position in range(b - a)]
    assert batch.cu_seqlens.tolist() == [sum(b - a for _, a, b in segments[:k]) for k in range(len(segments) + 1)]
    assert batch.segment_doc.tolist() == [d for d, _, _ in segments]
    assert naive.batch_pairs(batch) == naive.pair_multiset([closed[d][a : b + 1] for d, a, b in segments])
    for values in (batch.inputs, batch.targets, batch.position_ids, batch.segment_doc):
        assert values.dtype == np.int64
    assert batch.cu_seqlens.dtype == np.int32
    assert (batch.step_targets, batch.epoch, batch.step) == (100, 2, 7)


def test_an_empty_batch_is_legal(tmp_path):
    _, batch = assembled(tmp_path, address_docs([3]), [])
    check_batch(batch)
    assert (batch.cu_seqlens.tolist(), batch.max_seqlen, batch.num_targets) == ([0], 0, 0)
    assert batch.inputs.shape == batch.targets.shape == batch.position_ids.shape == (0,)


def test_ids_above_uint16_survive(tmp_path):
    _, batch = assembled(tmp_path, [[151_643, 70_000]], [(0, 0, 2)], eos_id=151_668)
    assert (batch.inputs.tolist(), batch.targets.tolist()) == ([151_643, 70_000], [70_000, 151_668])


def test_uint16_shards_give_int64_batches(tmp_path):
    _, batch = assembled(tmp_path, [[65_535, 1]], [(0, 0, 2)], token_dtype="uint16")
    assert batch.inputs.tolist() == [65_535, 1]
    assert batch.inputs.dtype == np.int64


def test_unused_slots_become_no_tokens(tmp_path):
    lengths = [2_000, 1_100, 700, 255]
    shards = make_token_shards(tmp_path, {"train": address_docs(lengths)})
    plan = load_plan(
        make_plan(tmp_path, shards, max_seq_len=4_096, capacity=4_096, packs_per_microbatch=1, microbatches_per_step=1)
    )
    assert (plan.num_packs, plan.num_targets, plan.capacity - plan.num_targets) == (1, 4_055, 41)
    (batch,) = Sampler(plan).next_step()
    check_batch(batch)
    assert len(batch.inputs) == len(batch.targets) == batch.num_targets == batch.step_targets == 4_055
    (filled,) = [in_constant_shape(part, plan.constant_shape) for part in Sampler(plan).next_step()]
    assert (len(filled.inputs), filled.num_targets, filled.step_targets) == (4_096, 4_055, 4_055)
    assert filled.targets[4_055:].tolist() == [IGNORED] * 41
    assert filled.cu_seqlens[[4, 5]].tolist() == [4_055, 4_096]


@relaxed
@given(
    st.lists(st.integers(0, 25), min_size=1, max_size=12).filter(any),
    st.integers(1, 4),
    st.integers(0, 9),
    st.integers(1, 3),
    st.integers(0, 7),
)
def test_all_microbatches_of_a_plan_have_its_constant_shape(
    tmp_path_factory, lengths, packs, more, world_size, overlap
):
    root = tmp_path_factory.mktemp("root")
    shards = make_token_shards(root, {"train": address_docs(lengths)}, max_shard_tokens=40)
    packing = {"max_seq_len": 8, "capacity": 8 + more, "packs_per_microbatch": packs, "overlap": overlap}
    plan = load_plan(make_plan(root, shards, **packing))
    shape = plan.constant_shape
    for rank in range(world_size):
        sampler = Sampler(plan, rank, world_size)
        for _ in range(2 * plan.num_steps):
            for batch in sampler.next_step():
                filled = in_constant_shape(batch, shape)
                arrays = (filled.inputs, filled.targets, filled.position_ids, filled.cu_seqlens, filled.segment_doc)
                assert [len(array) for array in arrays] == [shape.num_tokens] * 3 + [
                    shape.num_segments + 1,
                    shape.num_segments,
                ]
                assert [array.dtype for array in arrays] == [
                    np.dtype(name) for name in ("int64", "int64", "int64", "int32", "int64")
                ]
                assert filled.max_seqlen == shape.max_seqlen
                assert_slack_is_last(batch, filled)


def assert_slack_is_last(batch, filled):
    """The real part is untouched; then come slack segments of at most max_seqlen, then empty ones."""
    num, num_segments = len(batch.inputs), len(batch.segment_doc)
    for name in ("inputs", "targets", "position_ids"):
        assert np.array_equal(getattr(filled, name)[:num], getattr(batch, name))
    assert np.array_equal(filled.cu_seqlens[: num_segments + 1], batch.cu_seqlens)
    assert filled.num_targets == batch.num_targets == np.count_nonzero(filled.targets != IGNORED)
    assert (filled.step_targets, filled.step) == (batch.step_targets, batch.step)
    assert (filled.targets[num:] == IGNORED).all()
    assert (filled.segment_doc[num_segments:] == -1).all()
    slack = np.diff(filled.cu_seqlens[num_segments:])
    assert slack.max(initial=0) <= filled.max_seqlen
    assert slack.tolist() == sorted(slack.tolist(), reverse=True)
    assert filled.position_ids[num:].tolist() == [at for length in slack for at in range(length)]


@pytest.mark.parametrize(
    "changes", [{"num_tokens": 4}, {"num_segments": 2}, {"max_seqlen": 2}], ids=["tokens", "segments", "length"]
)
def test_a_batch_that_does_not_fit_its_shape_is_refused(changes):
    shape = ConstantShape(num_tokens=6, num_segments=3, max_seqlen=3)
    assert in_constant_shape(sound_batch(), shape).cu_seqlens.tolist() == [0, 3, 5, 6]
    with pytest.raises(RecipeError, match="Take the shape from the plan"):
        in_constant_shape(sound_batch(), dataclasses.replace(shape, **changes))


def test_slack_is_no_part_of_the_loss():
    torch = pytest.importorskip("torch")
    from training_io.loss import sum_cross_entropy

    batch = sound_batch()
    filled = in_constant_shape(batch, ConstantShape(num_tokens=9, num_segments=6, max_seqlen=3))
    logits = torch.randn(9, 7, generator=torch.Generator().manual_seed(1))
    alone, _ = sum_cross_entropy(logits[:5], torch.from_numpy(batch.targets))
    with_slack, _ = sum_cross_entropy(logits, torch.from_numpy(filled.targets))
    assert torch.allclose(alone, with_slack)


def test_in_padded_rows_every_segment_has_a_row_and_padding_trains_nothing():
    flat = end_to_end(np.arange(10, 16), np.arange(20, 26), np.array([3, 1, 2]), step_targets=9)
    check_batch(flat)
    assert (flat.position_ids.tolist(), flat.cu_seqlens.tolist()) == ([0, 1, 2, 0, 0, 1], [0, 3, 4, 6])
    rows = in_padded_rows(flat, 4)
    check_batch(rows)
    assert rows.inputs.tolist() == [10, 11, 12, 0, 13, 0, 0, 0, 14, 15, 0, 0]
    assert rows.targets.tolist() == [20, 21, 22, IGNORED, 23, *[IGNORED] * 3, 24, 25, *[IGNORED] * 2]
    assert (rows.cu_seqlens.tolist(), rows.max_seqlen) == ([0, 4, 8, 12], 4)
    assert (rows.num_targets, rows.step_targets) == (6, 9)


def sound_batch():
    return PackedBatch(
        inputs=np.arange(5),
        targets=np.arange(1, 6),
        position_ids=np.array([0, 1, 2, 0, 1]),
        cu_seqlens=np.array([0, 3, 5], dtype=np.int32),
        max_seqlen=3,
        num_targets=5,
        segment_doc=np.array([4, 2]),
        step_targets=5,
        epoch=0,
        step=0,
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cu_seqlens": np.array([0, 3, 5])}, r"expected int32\[S \+ 1\], found int64\[3\]"),
        ({"cu_seqlens": np.array([1, 3, 5], np.int32)}, "expected 0 … 5, found 1 … 5"),
        ({"cu_seqlens": np.array([0, 3, 4], np.int32)}, "expected 0 … 5, found 0 … 4"),
        ({"cu_seqlens": np.array([0, 3, 3, 5], np.int32)}, "found 0 tokens in segment 1"),
        ({"cu_seqlens": np.array([0, 4, 3, 5], np.int32)}, "found -1 tokens in segment 1"),
        ({"max_seqlen": 4}, "expected the Python int 3, found 4"),
        ({"max_seqlen": np.int64(3)}, "expected the Python int 3"),
        ({"targets": np.arange(4)}, r"targets: expected int64\[5\], found int64\[4\]"),
        ({"inputs": np.arange(5, dtype=np.int32)}, r"inputs: expected int64\[5\], found int32\[5\]"),
        ({"position_ids": np.arange(5)}, "expected a restart at each segment, found another at token 3"),
        ({"segment_doc": np.array([4])}, "one document for each of 2 segments, found 1"),
        ({"num_targets": 4}, "num_targets: expected 5, found 4"),
        ({"targets": np.array([IGNORED, 2, 3, 4, 5])}, "num_targets: expected 4, found 5"),
    ],
)
def test_ill_formed_batches_are_broken_invariants(changes, message):
    check_batch(sound_batch())
    with pytest.raises(InvariantBroken, match=message):
        check_batch(dataclasses.replace(sound_batch(), **changes))


def test_an_empty_cu_seqlens_is_ill_formed():
    with pytest.raises(InvariantBroken, match="found int32"):
        check_cu_seqlens(np.array([], dtype=np.int32), 0, 0)
