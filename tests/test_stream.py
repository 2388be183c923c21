"""Streams: the same batches on any path, no slot rewritten under a copy, and a state that counts what was consumed."""

import pickle
from itertools import accumulate, chain, groupby

import numpy as np
import pytest
import tiny_artifacts
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from training_io.batch import PackedBatch
from training_io.errors import FormatError, RecipeError, StateMismatch
from training_io.plan import load_plan
from training_io.sampler import Sampler
from training_io.staging import ByteLayout, Ring, resolve_device, stage_shared, stage_through
from training_io.stream import StreamSpec, WindowSpec, open_stream, open_windows

FIELDS = ("inputs", "targets", "position_ids", "cu_seqlens")
SCALARS = ("max_seqlen", "num_targets", "step_targets", "epoch", "step")


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory):
    root = tmp_path_factory.mktemp("artifacts")
    docs = {
        "train": tiny_artifacts.address_docs([5, 30, 1, 9, 14, 3, 22, 8, 8, 2, 17, 40, 6]),
        "validation": tiny_artifacts.address_docs([7, 12, 9], base=50),
    }
    shards = tiny_artifacts.make_token_shards(root, docs, max_shard_tokens=64)
    return shards, tiny_artifacts.make_plan(root, shards, splits=("train", "validation"))


def plain(batch):
    """A batch as Python values, from tensors or arrays."""
    return {name: getattr(batch, name).tolist() for name in FIELDS} | {name: getattr(batch, name) for name in SCALARS}


def take(stream, num_steps):
    return [[plain(batch) for batch in next(stream)] for _ in range(num_steps)]


def packed(lengths, first_token=0, step=0):
    num_tokens = sum(lengths)
    tokens = np.arange(first_token, first_token + num_tokens + 1, dtype=np.int64)
    return PackedBatch(
        inputs=tokens[:-1],
        targets=tokens[1:],
        position_ids=np.concatenate([np.arange(length) for length in [0, *lengths]]).astype(np.int64),
        cu_seqlens=np.cumsum([0, *lengths], dtype=np.int32),
        max_seqlen=max(lengths, default=0),
        num_targets=num_tokens,
        segment_doc=np.zeros(len(lengths), dtype=np.int64),
        step_targets=num_tokens,
        epoch=0,
        step=step,
    )


class LateCopy:
    """A transfer that moves no byte until somebody waits for it, so that a slot rewritten too early shows."""

    def __init__(self, host_bytes, log):
        self._host_bytes = host_bytes
        self._moved = None
        self._log = log

    def synchronize(self):
        if self._moved is None:
            self._log.append("waited")
        self.arrived()

    def arrived(self):
        if self._moved is None:
            self._moved = self._host_bytes.clone()
        return self._moved


def late_stage(token_dtype="uint16"):
    log, buffers = [], []

    def allocate(num_bytes):
        buffers.append(num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8)

    return stage_through(Ring(allocate), lambda host: LateCopy(host, log), token_dtype), log, buffers


@given(
    sizes=st.lists(st.lists(st.integers(1, 9), max_size=4), min_size=1, max_size=12),
    token_dtype=st.sampled_from(["uint16", "uint32"]),
    ahead=st.integers(0, 8),
)
@settings(max_examples=40, deadline=None)
def test_every_batch_arrives_whole_however_many_are_in_flight(sizes, token_dtype, ahead):
    stage, log, _ = late_stage(token_dtype)
    largest = np.iinfo(token_dtype).max
    batches = [packed(lengths, first_token=largest - 36 - i) for i, lengths in enumerate(sizes)]
    in_flight, arrived = [], []
    for batch in batches:
        in_flight.append(stage(batch))
        if len(in_flight) > ahead:
            arrived.append(in_flight.pop(0)())
    arrived += [arrival() for arrival in in_flight]
    assert [plain(batch) for batch in arrived] == [plain(batch) for batch in batches]
    assert all(batch.inputs.dtype == torch.int64 and batch.cu_seqlens.dtype == torch.int32 for batch in arrived)
    # a wait happens exactly when the ring comes round to a slot whose copy nobody has waited for
    assert len(log) == (max(0, len(batches) - 3) if ahead >= 3 else 0)


def test_a_slot_is_reused_while_it_is_large_enough():
    stage, _, buffers = late_stage()
    for lengths in ([8], [8], [8], [4], [8], [2, 2], [9], [9]):
        stage(packed(lengths))()
    assert buffers == [0, 0, 0, 72, 72, 72, 80, 80]


def test_a_ring_that_did_not_wait_would_be_caught():
    """The late copy really sees a rewritten slot: this is what the property above would find."""
    layout = ByteLayout(num_tokens=4, num_offsets=2, token_bytes=2)
    buffer = torch.empty(layout.num_bytes, dtype=torch.uint8)
    layout.write(buffer, packed([4], first_token=0))
    copy = LateCopy(buffer, [])
    layout.write(buffer, packed([4], first_token=100))
    assert layout.read(copy.arrived())[2].tolist() == [100, 101, 102, 103]


def test_cpu_tensors_share_the_arrays():
    batch = packed([3, 2])
    staged = stage_shared(batch)()
    assert staged.inputs.data_ptr() == batch.inputs.ctypes.data
    assert plain(staged) == plain(batch)


def test_stream_hands_out_the_samplers_steps_across_epochs(artifacts):
    _, plan_path = artifacts
    plan = load_plan(plan_path)
    sampler = Sampler(plan)
    num_steps = 2 * plan.num_steps + 1
    expected = [[plain(batch) for batch in sampler.next_step()] for _ in range(num_steps)]
    found = take(open_stream(StreamSpec(plan_path=str(plan_path), device="cpu", prefetch_depth=3)), num_steps)
    assert found == expected
    assert max(batch["epoch"] for step in found for batch in step) == 2


@pytest.mark.parametrize("prefetch_depth", [0, 1, 4])
def test_state_counts_consumed_steps_and_resumes_at_each(artifacts, prefetch_depth):
    spec = StreamSpec(plan_path=str(artifacts[1]), device="cpu", prefetch_depth=prefetch_depth)
    stream = open_stream(spec)
    states, steps = [stream.state_dict()], []
    for _ in range(9):
        steps += take(stream, 1)
        states.append(stream.state_dict())
    sampler = Sampler(load_plan(artifacts[1]))
    for k, state in enumerate(states[:-1]):
        assert state == sampler.state_dict()
        sampler.next_step()
        resumed = open_stream(StreamSpec(plan_path=str(artifacts[1]), device="cpu", sampler_state=state))
        assert take(resumed, 9 - k) == steps[k:]


def test_loading_a_state_drops_what_was_staged_ahead(artifacts):
    stream = open_stream(StreamSpec(plan_path=str(artifacts[1]), device="cpu", prefetch_depth=3))
    start, first = stream.state_dict(), take(stream, 2)
    stream.load_state_dict(start)
    assert stream.state_dict() == start
    assert take(stream, 2) == first


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_union_over_ranks_is_the_step(artifacts, world_size):
    streams = [
        open_stream(StreamSpec(plan_path=str(artifacts[1]), device="cpu", rank=rank, world_size=world_size))
        for rank in range(world_size)
    ]
    alone = open_stream(StreamSpec(plan_path=str(artifacts[1]), device="cpu"))
    for _ in range(6):
        expected = sorted(token for batch in next(alone) for token in batch.inputs.tolist())
        shares = [next(stream) for stream in streams]
        assert sorted(token for share in shares for batch in share for token in batch.inputs.tolist()) == expected
        assert {batch.step_targets for share in shares for batch in share} == {len(expected)}


def test_specification_survives_pickling(artifacts):
    spec = StreamSpec(plan_path=str(artifacts[1]), split="validation", device="cpu")
    copy = pickle.loads(pickle.dumps(spec))
    assert copy == spec
    assert take(open_stream(copy), 1) == take(open_stream(spec), 1)


def test_ids_outside_the_vocabulary_are_refused_on_the_host(artifacts):
    largest = 120_000 + 6  # the last token of document 12
    next(open_stream(StreamSpec(plan_path=str(artifacts[1]), device="cpu", vocab_size=200_000)))
    stream = open_stream(StreamSpec(plan_path=str(artifacts[1]), device="cpu", vocab_size=largest))
    with pytest.raises(FormatError, match="below the vocabulary's 120,006, found 120,006"):
        take(stream, 99)


def test_another_plans_state_is_refused(artifacts):
    state = open_stream(StreamSpec(plan_path=str(artifacts[1]), device="cpu")).state_dict()
    with pytest.raises(StateMismatch, match="was saved for plan"):
        open_stream(StreamSpec(plan_path=str(artifacts[1]), split="validation", device="cpu", sampler_state=state))


def test_a_split_folder_of_another_split_is_refused(artifacts):
    with pytest.raises(RecipeError, match="expected split validation, found the folder of train"):
        open_stream(StreamSpec(plan_path=str(artifacts[1] / "train"), split="validation", device="cpu"))


@pytest.mark.parametrize("name", ["gpu", "cuda:x", "cuda:99", "cpu:1"])
def test_devices_that_are_not_here_are_refused(name):
    with pytest.raises(RecipeError, match="device"):
        resolve_device(name)


def window_spec(artifacts, **changes):
    return WindowSpec(
        **(
            {"shards_path": str(artifacts[0]), "batch_size": 2, "max_seq_len": 6, "accumulation": 3, "device": "cpu"}
            | changes
        )
    )


def split_tokens(lengths, base=0):
    return [token for doc in tiny_artifacts.address_docs(lengths, base=base) for token in [*doc, 0]]


def test_windows_are_rows_of_the_token_stream_one_segment_each(artifacts):
    tokens = split_tokens([5, 30, 1, 9, 14, 3, 22, 8, 8, 2, 17, 40, 6])
    stream = open_windows(window_spec(artifacts))
    num_batches = (len(tokens) - 1) // 12
    assert stream.facts.num_steps == num_batches // 3
    for step in range(2 * stream.facts.num_steps + 3):
        for number, batch in enumerate(next(stream)):
            i = step * 3 + number
            start = (i % num_batches) * 12
            assert batch.inputs.tolist() == tokens[start : start + 12]
            assert batch.targets.tolist() == tokens[start + 1 : start + 13]
            assert batch.position_ids.tolist() == [0, 1, 2, 3, 4, 5] * 2
            assert batch.cu_seqlens.tolist() == [0, 6, 12]
            assert (batch.max_seqlen, batch.num_targets, batch.step_targets) == (6, 12, 36)
            assert (batch.epoch, batch.step) == (i // num_batches, step)
    assert batch.epoch >= 1


def test_masked_windows_are_the_same_tokens_with_a_segment_a_document(artifacts):
    lengths = [5, 30, 1, 9, 14, 3, 22, 8, 8, 2, 17, 40, 6]
    owner_of = [doc for doc, length in enumerate(lengths) for _ in range(length + 1)]
    plain_steps = take(open_windows(window_spec(artifacts)), 7)
    steps = take(open_windows(window_spec(artifacts, document_mask=True)), 7)
    num_batches = (len(owner_of) - 1) // 12
    mixed = 0
    batches = zip(chain.from_iterable(steps), chain.from_iterable(plain_steps), strict=True)
    for number, (masked, unmasked) in enumerate(batches):
        for name in ("inputs", "targets", "num_targets", "step_targets", "epoch", "step"):
            assert masked[name] == unmasked[name]
        start = number % num_batches * 12
        rows = [owner_of[start : start + 6], owner_of[start + 6 : start + 12]]
        runs = [len(list(run)) for row in rows for _, run in groupby(row)]
        assert masked["cu_seqlens"] == [0, *accumulate(runs)]
        assert masked["position_ids"] == [at for length in runs for at in range(length)]
        assert masked["max_seqlen"] == max(runs)
        mixed += len(runs) > 2
    assert mixed > 5
    assert number >= num_batches


def test_a_mask_is_part_of_what_a_window_state_binds_to(artifacts):
    state = open_stream(window_spec(artifacts)).state_dict()
    with pytest.raises(StateMismatch, match="accumulation and mask"):
        open_stream(window_spec(artifacts, document_mask=True, sampler_state=state))
    masked = open_stream(window_spec(artifacts, document_mask=True, prefetch_depth=2))
    take(masked, 2)
    state, rest = masked.state_dict(), take(masked, 2)
    assert take(open_stream(window_spec(artifacts, document_mask=True, sampler_state=state)), 2) == rest


def test_window_state_resumes_and_binds_to_its_shape(artifacts):
    stream = open_stream(window_spec(artifacts, prefetch_depth=2))
    take(stream, 2)
    state, rest = stream.state_dict(), take(stream, 3)
    assert state["next_step"] == 2
    assert take(open_stream(window_spec(artifacts, sampler_state=state)), 3) == rest
    with pytest.raises(StateMismatch, match="window state was saved for"):
        open_stream(window_spec(artifacts, sampler_state=state, max_seq_len=4))


def test_ranks_share_a_steps_windows(artifacts):
    alone = take(open_stream(window_spec(artifacts)), 2)
    shares = [take(open_stream(window_spec(artifacts, rank=rank, world_size=2)), 2) for rank in range(2)]
    for step in range(2):
        assert sorted([*shares[0][step], *shares[1][step]], key=lambda b: b["inputs"]) == sorted(
            alone[step], key=lambda b: b["inputs"]
        )
    with pytest.raises(RecipeError, match="Each rank needs a microbatch"):
        open_stream(window_spec(artifacts, world_size=4))


def test_less_than_a_step_of_windows_is_refused(artifacts):
    with pytest.raises(FormatError, match="expected a step of 3 microbatches, found 2"):
        open_stream(window_spec(artifacts, split="validation"))
