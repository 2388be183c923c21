"""Streams: the same batches on any path, no slot rewritten under a copy, and a state that counts what was consumed."""

import pickle
from dataclasses import replace
from itertools import accumulate, chain, groupby, pairwise

import numpy as np
import pytest
import tiny_artifacts
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from training_io.batch import IGNORED, PackedBatch, in_constant_shape
from training_io.errors import FormatError, RecipeError, StateMismatch
from training_io.plan import load_plan
from training_io.sampler import Sampler
from training_io.staging import ByteLayout, HostBatch, Ring, resolve_device, stage_shared, stage_through
from training_io.stream import BatchStream, StreamSpec, WindowSpec, open_stream, open_windows

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


def host(batch, pools=None):
    return HostBatch(packed=batch, num_inputs=4, num_eos=2, sum_squares=3, pools=pools)


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
        in_flight.append(stage(host(batch)))
        if len(in_flight) > ahead:
            arrived.append(in_flight.pop(0)())
    arrived += [arrival() for arrival in in_flight]
    assert [plain(batch) for batch in arrived] == [plain(batch) for batch in batches]
    assert all(batch.inputs.dtype == torch.int64 and batch.cu_seqlens.dtype == torch.int32 for batch in arrived)
    # a wait happens exactly when the ring comes round to a slot whose copy nobody has waited for
    assert len(log) == (max(0, len(batches) - 3) if ahead >= 3 else 0)


@given(
    masks=st.lists(st.lists(st.booleans(), min_size=1, max_size=20), min_size=1, max_size=6),
    token_dtype=st.sampled_from(["uint16", "uint32"]),
    data=st.data(),
)
@settings(max_examples=40, deadline=None)
def test_ignored_targets_arrive_beside_every_id(masks, token_dtype, data):
    stage, _, _ = late_stage(token_dtype)
    largest = np.iinfo(token_dtype).max
    batches = []
    for mask in masks:
        ids = st.sampled_from([0, 1, largest + 1 + IGNORED, largest - 1, largest])
        targets = data.draw(st.lists(ids, min_size=len(mask), max_size=len(mask)))
        batch = packed([len(mask)], first_token=largest - len(mask))
        batches.append(replace(batch, targets=np.where(mask, IGNORED, targets), num_targets=len(mask) - sum(mask)))
    arrived = [arrival() for arrival in [stage(host(batch)) for batch in batches]]
    assert [plain(batch) for batch in arrived] == [plain(batch) for batch in batches]
    assert all(batch.targets.dtype == batch.position_ids.dtype == torch.int64 for batch in arrived)


@pytest.mark.parametrize("token_dtype", ["uint16", "uint32"])
def test_pools_and_counts_go_through_the_ring(token_dtype):
    stage, _, buffers = late_stage(token_dtype)
    pools = np.array([0, 65_535, 3, 32_768, 1], dtype=np.uint16)
    arrived = stage(host(packed([3, 2]), pools))()
    assert plain(arrived) == plain(packed([3, 2]))
    assert arrived.pools.tolist() == pools.tolist()
    assert (arrived.num_eos, arrived.sum_squares) == (2, 3)
    assert arrived.pools.dtype == torch.int64
    assert stage(host(packed([3, 2])))().pools is None
    assert buffers[-2] - buffers[-1] == 10


def test_a_slot_is_reused_while_it_is_large_enough():
    stage, _, buffers = late_stage()
    for lengths in ([8], [8], [8], [4], [8], [2, 2], [9], [9]):
        stage(host(packed(lengths)))()
    assert buffers == [0, 0, 0, 72, 72, 72, 80, 80]


def test_a_ring_that_did_not_wait_would_be_caught():
    """The late copy really sees a rewritten slot: this is what the property above would find."""
    layout = ByteLayout(num_tokens=4, num_offsets=2, token_bytes=2, has_ignored=False)
    buffer = torch.empty(layout.num_bytes, dtype=torch.uint8)
    layout.write(buffer, host(packed([4], first_token=0)))
    copy = LateCopy(buffer, [])
    layout.write(buffer, host(packed([4], first_token=100)))
    assert layout.read(copy.arrived())[2].tolist() == [100, 101, 102, 103]


def test_cpu_tensors_share_the_arrays():
    batch = packed([3, 2])
    staged = stage_shared(host(batch))()
    assert staged.inputs.data_ptr() == batch.inputs.ctypes.data
    assert plain(staged) == plain(batch)
    assert (staged.num_eos, staged.sum_squares, staged.pools) == (2, 3, None)


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
        stream.stage_ahead()
        states.append(stream.state_dict())
    sampler = Sampler(load_plan(artifacts[1]))
    for k, state in enumerate(states[:-1]):
        assert state == sampler.state_dict()
        sampler.next_step()
        resumed = open_stream(StreamSpec(plan_path=str(artifacts[1]), device="cpu", sampler_state=state))
        assert take(resumed, 9 - k) == steps[k:]


class CountingSource:
    """Steps of one batch each, and how many of them were asked for."""

    def __init__(self):
        self.num_asked = 0

    def next_step(self):
        self.num_asked += 1
        return [packed([2], first_token=self.num_asked, step=self.num_asked - 1)]

    def state_dict(self):
        return {"next_step": self.num_asked}


@pytest.mark.parametrize("prefetch_depth", [0, 1, 3])
def test_what_is_ready_is_handed_out_before_anything_more_is_assembled(artifacts, prefetch_depth):
    source, facts = CountingSource(), open_stream(window_spec(artifacts)).facts
    stream = BatchStream(source, facts, stage_shared, prefetch_depth=prefetch_depth, vocab_size=None)
    for step in range(5):
        num_asked = source.num_asked
        (batch,) = next(stream)
        assert batch.step == step
        assert stream.state_dict() == {"next_step": step + 1}
        assert source.num_asked == max(num_asked, step + 1)  # staged only what nobody had staged
        stream.stage_ahead()
        assert source.num_asked == step + 1 + prefetch_depth


def test_loading_a_state_drops_what_was_staged_ahead(artifacts):
    stream = open_stream(StreamSpec(plan_path=str(artifacts[1]), device="cpu", prefetch_depth=3))
    start, first = stream.state_dict(), take(stream, 2)
    stream.stage_ahead()
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


LENGTHS = [5, 30, 1, 9, 14, 3, 22, 8, 8, 2, 17, 40, 6]


@pytest.fixture(scope="module")
def two_pools(tmp_path_factory):
    root = tmp_path_factory.mktemp("pools")
    shards = tiny_artifacts.make_token_shards(
        root, {"train": tiny_artifacts.address_docs(LENGTHS)}, max_shard_tokens=64, pool_names=("even", "odd")
    )
    return shards, tiny_artifacts.make_plan(root, shards, overlap=2)


@pytest.mark.parametrize("constant_shape", [False, True])
@pytest.mark.parametrize("world_size", [1, 3])
def test_packs_count_eos_squares_slots_and_name_each_tokens_pool(two_pools, world_size, constant_shape):
    streams = [
        open_stream(
            StreamSpec(
                plan_path=str(two_pools[1]),
                device="cpu",
                rank=rank,
                world_size=world_size,
                constant_shape=constant_shape,
                with_pools=True,
            )
        )
        for rank in range(world_size)
    ]
    facts = streams[0].facts
    assert facts.pool_names == ("even", "odd")
    num_ends = num_slots = 0
    for step in range(facts.num_steps):
        for batch in chain.from_iterable(map(next, streams)):
            bounds = batch.cu_seqlens.tolist()
            segments = list(pairwise(bounds))
            inputs, targets = batch.inputs.tolist(), batch.targets.tolist()
            real = [(start, end) for start, end in segments if inputs[start:end] != [0] * (end - start)]
            assert batch.num_eos == targets.count(0)
            assert batch.sum_squares == sum((end - start) ** 2 for start, end in real)
            assert batch.pools.dtype == torch.int64
            owners = [(token - 1) // 10_000 % 2 if token else 0 for token in inputs]  # no input is EOS: it is a target
            assert batch.pools.tolist() == owners
            num_ends += batch.num_eos
        num_slots += facts.slots_of(step)
    assert num_ends == len(LENGTHS)  # every document ends once
    assert num_slots == 16 * load_plan(two_pools[1]).num_packs
    assert facts.slots_of(facts.num_steps) == facts.slots_of(0) > facts.slots_of(facts.num_steps - 1)


@pytest.mark.parametrize("document_mask", [False, True])
@pytest.mark.parametrize("world_size", [1, 2])
def test_windows_count_eos_squares_slots_and_name_each_tokens_pool(two_pools, world_size, document_mask):
    specs = [
        window_spec(two_pools, rank=rank, world_size=world_size, document_mask=document_mask, with_pools=True)
        for rank in range(world_size)
    ]
    streams = [open_stream(spec) for spec in specs]
    tokens = split_tokens(LENGTHS)
    pool_of = [doc % 2 for doc, length in enumerate(LENGTHS) for _ in range(length + 1)]
    num_batches = (len(tokens) - 1) // 12
    for step in range(2 * streams[0].facts.num_steps):
        for rank, share in enumerate(map(next, streams)):
            for number, batch in enumerate(share):
                start = (3 * step + rank + number * world_size) % num_batches * 12
                assert batch.inputs.tolist() == tokens[start : start + 12]
                assert batch.pools.tolist() == pool_of[start : start + 12]
                assert batch.num_eos == tokens[start + 1 : start + 13].count(0)
                bounds = batch.cu_seqlens.tolist()
                assert batch.sum_squares == sum((b - a) ** 2 for a, b in pairwise(bounds))
                assert document_mask or batch.sum_squares == 72
        assert streams[0].facts.slots_of(step) == 36


def test_nobody_asked_for_pools(artifacts):
    assert next(open_stream(StreamSpec(plan_path=str(artifacts[1]), device="cpu")))[0].pools is None


@pytest.fixture(scope="module")
def overlapping(artifacts):
    return tiny_artifacts.make_plan(artifacts[0].parents[2], artifacts[0], overlap=3)


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_in_constant_shape_every_microbatch_of_every_rank_has_one_shape(overlapping, world_size):
    shapes, num_empty, num_repeating = set(), 0, 0
    for rank in range(world_size):
        spec = StreamSpec(plan_path=str(overlapping), device="cpu", rank=rank, world_size=world_size)
        stream, shaped = open_stream(spec), open_stream(replace(spec, constant_shape=True))
        for _ in range(2 * stream.facts.num_steps + 1):
            for expected, found in zip(next(stream), next(shaped), strict=True):
                shapes.add((*(getattr(found, name).shape for name in FIELDS), found.max_seqlen))
                num, num_offsets = len(expected.inputs), len(expected.cu_seqlens)
                for name in ("inputs", "targets", "position_ids"):
                    assert torch.equal(getattr(found, name)[:num], getattr(expected, name))
                assert torch.equal(found.cu_seqlens[:num_offsets], expected.cu_seqlens)
                assert (found.targets[num:] == IGNORED).all()
                for name in ("num_targets", "step_targets", "epoch", "step"):
                    assert getattr(found, name) == getattr(expected, name)
                num_empty += num == 0
                num_repeating += expected.num_targets < num
            assert stream.state_dict() == shaped.state_dict()
    assert len(shapes) == 1
    assert num_repeating
    assert (num_empty > 0) == (world_size == 5)


def test_a_constant_shape_goes_through_the_ring_as_it_is(overlapping):
    sampler, shape = Sampler(load_plan(overlapping)), load_plan(overlapping).constant_shape
    stage, _, buffers = late_stage("uint32")
    for _ in range(sampler.plan.num_steps):
        for batch in sampler.next_step():
            filled = in_constant_shape(batch, shape)
            assert plain(stage(host(filled))()) == plain(filled)
    assert len(set(buffers)) == 2  # nothing, then the one size


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
