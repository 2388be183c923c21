"""Batches: real tokens only, targets one later, positions that restart, boundaries that a device can trust."""

import dataclasses

import naive_batches as naive
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_artifacts import address_docs, make_plan, make_token_shards

from training_io.batch import PackedBatch, assemble_batch, check_batch, check_cu_seqlens
from training_io.document_index import read_index
from training_io.errors import InvariantBroken
from training_io.plan import load_plan
from training_io.sampler import Sampler
from training_io.shard_format import read_shard

relaxed = settings(deadline=None, max_examples=40)


def assembled(root, docs, segments, **shard_arguments):
    artifact = make_token_shards(root, {"train": docs}, **shard_arguments)
    index = read_index(artifact / "train_index")
    shards = [read_shard(artifact / file) for file in index.shard_files]
    doc, start, end = (np.array([row[at] for row in segments], dtype=np.int64) for at in range(3))
    return index, assemble_batch(index, shards, doc, start, end, step_targets=100, epoch=2, step=7)


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
    ],
)
def test_ill_formed_batches_are_broken_invariants(changes, message):
    check_batch(sound_batch())
    with pytest.raises(InvariantBroken, match=message):
        check_batch(dataclasses.replace(sound_batch(), **changes))


def test_an_empty_cu_seqlens_is_ill_formed():
    with pytest.raises(InvariantBroken, match="found int32"):
        check_cu_seqlens(np.array([], dtype=np.int32), 0, 0)
