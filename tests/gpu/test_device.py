"""On a CUDA device: the stream's bytes, the ring under load, both kernels in bfloat16, and one compiled graph.

All of it skips where there is no such device; what does not need one is tested without: see test_stream,
test_attention, test_model. Oracles are the CPU's stream, plain attention in float64, and the CPU's run.
"""

import itertools
from dataclasses import replace

import naive_training
import numpy as np
import pytest
import tiny_artifacts
import torch

from training_io.attention import attend, choose_backend
from training_io.batch import PackedBatch
from training_io.checkpoint import checkpoint_path
from training_io.loss import summed_cross_entropy
from training_io.model import Model, ModelConfig
from training_io.plan import load_plan
from training_io.staging import HostBatch, Ring, SideStreamCopy, resolve_device, stage_for, stage_through
from training_io.stopping import Noted
from training_io.stream import StreamSpec, WindowSpec, open_stream
from training_io.train import make_optimizer, queue_update, train
from training_io.train_config import TrainConfig

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device"),
    # torch.compile's own: a deprecated import, and a hint at a setting that would round float32
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
]

TENSORS = ("inputs", "targets", "position_ids", "cu_seqlens", "pools")
NUMBERS = ("max_seqlen", "num_inputs", "num_targets", "num_eos", "sum_squares", "step_targets", "epoch", "step")

# Of the largest magnitude in the float64 reference on the same rounded inputs. bfloat16 rounds by 2^-9; the forward
# pass rounds weights and outputs, the backward pass also the weights' gradients.
OUTPUT_TOLERANCE = 2.0**-6
GRADIENT_TOLERANCE = 2.0**-5

VOCAB = 64
MODEL = ModelConfig(
    vocab_size=VOCAB, d_model=128, num_layers=2, num_heads=2, num_kv_heads=1, d_ff=128, max_positions=256
)


@pytest.fixture(autouse=True)
def _compiled_anew():
    """Each test has the compiler's whole allowance of graphs for one function."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


@pytest.fixture(scope="module", params=["uint16", "uint32"])
def artifacts(request, tmp_path_factory):
    """Shards in both widths and a plan with overlap over them, ids up to the width's largest."""
    root = tmp_path_factory.mktemp(request.param)
    largest = np.iinfo(request.param).max
    lengths = [5, 30, 1, 9, 14, 3, 22, 8, 8, 2, 17, 40, 6]
    docs = [[largest - doc - 13 * position for position in range(length)] for doc, length in enumerate(lengths)]
    shards = tiny_artifacts.make_token_shards(
        root, {"train": docs}, token_dtype=request.param, max_shard_tokens=64, pool_names=("even", "odd")
    )
    return shards, tiny_artifacts.make_plan(root, shards, overlap=3)


def specs_of(artifacts):
    packs = StreamSpec(plan_path=str(artifacts[1]), device="cpu", with_pools=True)
    windows = WindowSpec(
        shards_path=str(artifacts[0]), batch_size=2, max_seq_len=6, accumulation=3, device="cpu", with_pools=True
    )
    return {
        "packs": packs,
        "packs without pools": replace(packs, with_pools=False),
        "packs in constant shapes": replace(packs, constant_shape=True),
        "windows": windows,
        "masked windows": replace(windows, document_mask=True),
    }


def same(found, expected):
    assert all(getattr(found, name) == getattr(expected, name) for name in NUMBERS)
    for name in TENSORS:
        ours, theirs = getattr(found, name), getattr(expected, name)
        if theirs is None:
            assert ours is None
            continue
        assert (ours.device.type, ours.dtype) == ("cuda", theirs.dtype)
        assert torch.equal(ours.cpu(), theirs)


@pytest.mark.parametrize("prefetch_depth", [0, 1, 5])
@pytest.mark.parametrize(
    "kind", ["packs", "packs without pools", "packs in constant shapes", "windows", "masked windows"]
)
def test_the_stream_on_the_device_is_the_cpus_bit_for_bit(artifacts, kind, prefetch_depth):
    spec = specs_of(artifacts)[kind]
    there = open_stream(replace(spec, device="cuda:0", prefetch_depth=prefetch_depth))
    here = open_stream(spec)
    for _ in range(2 * here.facts.num_steps + 1):
        for found, expected in zip(next(there), next(here), strict=True):
            same(found, expected)
        there.stage_ahead()
        assert there.state_dict() == here.state_dict()


def host_batches(num, num_tokens):
    """Batches whose every id says which batch it is of."""
    for number in range(num):
        tokens = np.full(num_tokens + 1, number, dtype=np.int64)
        packed = PackedBatch(
            inputs=tokens[:-1],
            targets=tokens[1:],
            position_ids=np.arange(num_tokens, dtype=np.int64),
            cu_seqlens=np.array([0, num_tokens], dtype=np.int32),
            max_seqlen=num_tokens,
            num_targets=num_tokens,
            segment_doc=np.zeros(1, dtype=np.int64),
            step_targets=num_tokens,
            epoch=0,
            step=number,
        )
        yield HostBatch(packed=packed, num_inputs=num_tokens, num_eos=0, sum_squares=num_tokens**2)


def is_number(batch, number):
    """On the device, without waiting: does every tensor of ids hold the number?"""
    return (batch.inputs == number).all() & (batch.targets == number).all()


def test_a_busy_device_gets_every_batch_whole():
    """The consumer is behind by many batches, so that slots come round while the device still works."""
    device = torch.device("cuda:0")
    stage = stage_for(device, "uint16")
    busy = torch.randn(4_096, 4_096, device=device)
    verdicts, arrivals = [], []
    for number, batch in enumerate(host_batches(60, 200_000)):
        arrivals.append((number, stage(batch)))
        if len(arrivals) > 7:
            busy = (busy @ busy).tanh()
            first, arrive = arrivals.pop(0)
            verdicts.append(is_number(arrive(), first))
    verdicts += [is_number(arrive(), number) for number, arrive in arrivals]
    assert len(verdicts) == 60
    assert torch.stack(verdicts).all()


def slow_copies(device, num_cycles):
    """Transfers that the side stream begins late, so that a slot is asked for again while its copy is in flight."""
    side, was_in_flight = torch.cuda.Stream(device), []

    class Watched(SideStreamCopy):
        def synchronize(self):
            was_in_flight.append(not self.event.query())
            super().synchronize()

    def start_copy(host_bytes):
        with torch.cuda.stream(side):
            torch.cuda._sleep(num_cycles)
            on_device = host_bytes.to(device, non_blocking=True)
            event = torch.cuda.Event()
            event.record(side)
        return Watched(on_device=on_device, event=event)

    return start_copy, was_in_flight


def test_no_slot_is_rewritten_while_its_copy_is_in_flight():
    device = torch.device("cuda:0")
    start_copy, was_in_flight = slow_copies(device, num_cycles=5_000_000)
    ring = Ring(lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True))
    stage = stage_through(ring, start_copy, "uint16")
    arrivals = [stage(batch) for batch in host_batches(12, 50_000)]
    assert torch.stack([is_number(arrive(), number) for number, arrive in enumerate(arrivals)]).all()
    assert len(was_in_flight) == 9  # all but the first three slots were used before
    assert any(was_in_flight)


def test_devices_are_resolved_and_the_next_one_is_refused():
    assert resolve_device("auto").type == resolve_device("cuda").type == "cuda"
    assert resolve_device("cuda:0") == torch.device("cuda", 0)
    with pytest.raises(Exception, match="expected a CUDA device"):
        resolve_device(f"cuda:{torch.cuda.device_count()}")


def offsets_of(lengths):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device="cuda")


def heads(lengths, num_kv_heads, requires_grad=True, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randn(sum(lengths), num, 64, generator=generator).to("cuda", dtype).requires_grad_(requires_grad)
        for num in (4, num_kv_heads, num_kv_heads)
    ]


def outputs_and_gradients(function, tensors):
    out = function(*tensors)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(5)).to("cuda", torch.bfloat16)
    return [out.detach(), *torch.autograd.grad(out, tensors, weights.to(out.dtype))]


@pytest.mark.parametrize("backend", ["varlen", "flex"])
@pytest.mark.parametrize("num_kv_heads", [1, 4])
@pytest.mark.parametrize("lengths", [[1, 300, 1, 129, 128, 64, 1], [512], [127, 1, 1, 1, 255]])
def test_kernels_in_bfloat16_equal_plain_attention_in_float64(backend, num_kv_heads, lengths):
    tensors = heads(lengths, num_kv_heads)
    bounds = offsets_of(lengths)
    found = outputs_and_gradients(lambda q, k, v: attend(q, k, v, bounds, max(lengths), backend), tensors)
    wide = [tensor.detach().double().cpu().requires_grad_() for tensor in tensors]
    out = naive_training.dense_attention(*wide, lengths)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(5)).to(torch.bfloat16).double()
    expected = [out.detach(), *torch.autograd.grad(out, wide, weights)]
    tolerances = [OUTPUT_TOLERANCE, *[GRADIENT_TOLERANCE] * 3]
    for ours, reference, tolerance in zip(found, expected, tolerances, strict=True):
        assert ours.dtype == torch.bfloat16
        difference = (ours.double().cpu() - reference).abs().max() / reference.abs().max()
        assert difference <= tolerance


@pytest.mark.parametrize("backend", ["varlen", "flex", "sdpa"])
@pytest.mark.parametrize("lengths", [[1], [1] * 200, [1, 1, 130, 1]])
def test_segments_of_one_token_are_finite_and_their_own_value(backend, lengths):
    tensors = heads(lengths, 2)
    found = outputs_and_gradients(lambda q, k, v: attend(q, k, v, offsets_of(lengths), max(lengths), backend), tensors)
    assert all(tensor.isfinite().all() for tensor in found)
    alone = [start for start, length in zip(itertools.accumulate([0, *lengths]), lengths, strict=False) if length == 1]
    values = tensors[2].detach().repeat_interleave(2, dim=1)
    torch.testing.assert_close(found[0][alone], values[alone], rtol=2.0**-7, atol=0)


@pytest.mark.parametrize("backend", ["varlen", "flex", "sdpa"])
def test_poking_one_segment_changes_no_other_bit(backend):
    lengths = [200, 1, 333, 90]
    tensors = heads(lengths, 2, requires_grad=False)
    before = attend(*tensors, offsets_of(lengths), 333, backend)
    start, end = 201, 534
    for tensor in tensors:
        tensor[start:end] += 1.0
    is_same = (attend(*tensors, offsets_of(lengths), 333, backend) == before).flatten(1).all(dim=1)
    assert is_same[:start].all()
    assert is_same[end:].all()
    assert not is_same[start:end].all()


@pytest.mark.parametrize("backend", ["varlen", "flex"])
def test_repeated_ends_and_a_longer_limit_change_nothing(backend):
    lengths = [200, 1, 333, 90]
    tensors = heads(lengths, 2, requires_grad=False)
    expected = attend(*tensors, offsets_of(lengths), 333, backend)
    assert torch.equal(attend(*tensors, offsets_of([*lengths, 0, 0, 0]), 400, backend), expected)


def loss_of(module, batch):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        logits = module(batch.inputs, batch.position_ids, batch.cu_seqlens, batch.max_seqlen)
    return summed_cross_entropy(logits, batch.targets) / batch.step_targets


@pytest.fixture(scope="module")
def long_plan(tmp_path_factory):
    root, rng = tmp_path_factory.mktemp("long"), np.random.default_rng(1)
    docs = [rng.integers(1, VOCAB, size=rng.integers(1, 400)).tolist() for _ in range(40)]
    shards = tiny_artifacts.make_token_shards(root, {"train": docs, "validation": docs[:9]}, token_dtype="uint16")
    shape = {"max_seq_len": 256, "capacity": 512, "packs_per_microbatch": 2, "microbatches_per_step": 2}
    return tiny_artifacts.make_plan(root, shards, splits=("train", "validation"), **shape)


@pytest.mark.parametrize("backend", ["varlen", "flex"])
def test_constant_shapes_compile_to_one_graph_with_the_losses_of_ragged_ones(long_plan, backend):
    model = Model(MODEL, torch.Generator().manual_seed(0), backend=backend).cuda()
    compiled = torch.compile(model, fullgraph=True, dynamic=False)
    plain = Model(MODEL, torch.Generator().manual_seed(0), backend="sdpa").cuda()
    spec = StreamSpec(plan_path=str(long_plan), device="cuda")
    ragged, shaped = open_stream(spec), open_stream(replace(spec, constant_shape=True))
    sizes = set()
    for _ in range(load_plan(long_plan).num_steps):
        for batch, filled in zip(next(ragged), next(shaped), strict=True):
            sizes.add(len(batch.inputs))
            loss = loss_of(compiled, filled)
            loss.backward()
            torch.testing.assert_close(loss, loss_of(plain, batch), rtol=2e-3, atol=0)
    assert len(sizes) > 1
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


CONFIG = TrainConfig(
    steps=6, learning_rate=0.003, warmup_steps=2, eval_every=3, eval_steps=2, checkpoint_every=6, num_threads=1
)


def run(plan, folder, **changes):
    spec = StreamSpec(plan_path=str(plan), prefetch_depth=3, constant_shape=changes.get("compile", False))
    validation = StreamSpec(plan_path=str(plan), split="validation")
    return train(spec, MODEL, replace(CONFIG, **changes), folder, validation=validation)


def test_a_run_on_the_device_has_the_cpus_losses(long_plan, tmp_path):
    expected = run(long_plan, tmp_path / "cpu", device="cpu", dtype="float64")
    wide = run(long_plan, tmp_path / "wide", device="cuda", dtype="float64")
    half = run(long_plan, tmp_path / "half", device="cuda:0", dtype="bfloat16")
    assert (expected.backend, wide.backend, half.backend) == ("sdpa", "sdpa", "varlen")
    assert choose_backend(torch.device("cuda"), torch.bfloat16) == "varlen"
    np.testing.assert_allclose(wide.losses, expected.losses, rtol=1e-8)
    np.testing.assert_allclose(half.losses, expected.losses, rtol=5e-3)
    assert half.losses != wide.losses
    assert wide.positions == half.positions == expected.positions


def test_the_host_queues_an_update_and_waits_for_none_of_it(long_plan):
    """CUDA itself refuses what would block; the second update, since the first one also makes what is made once."""
    stream = open_stream(StreamSpec(plan_path=str(long_plan), device="cuda"))
    model = Model(MODEL, torch.Generator().manual_seed(0), backend="varlen").to("cuda")
    optimizer = make_optimizer(model, CONFIG)
    queue_update(model, optimizer, next(stream), torch.bfloat16, 1.0, Noted())
    microbatches = next(stream)
    torch.cuda.set_sync_debug_mode("error")
    try:
        queued = queue_update(model, optimizer, microbatches, torch.bfloat16, 1.0, Noted())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert queued[3].item() == sum(batch.num_targets for batch in microbatches)


@pytest.mark.parametrize("backend", ["varlen", "flex"])
def test_a_compiled_run_has_the_losses_of_a_plain_one(long_plan, tmp_path, backend):
    plain = run(long_plan, tmp_path / "plain", device="cuda", dtype="bfloat16")
    changes = {"device": "cuda", "dtype": "bfloat16", "attention_backend": backend, "compile": True}
    compiled = run(long_plan, tmp_path / "compiled", **changes)
    np.testing.assert_allclose(compiled.losses, plain.losses, rtol=5e-3)


def test_a_resumed_run_on_the_device_goes_on_where_it_was(long_plan, tmp_path):
    whole = run(long_plan, tmp_path / "whole", device="cuda", dtype="float64")
    run(long_plan, tmp_path / "parts", device="cuda", dtype="float64", checkpoint_every=3)
    checkpoint_path(tmp_path / "parts", 6).rename(tmp_path / "away")
    resumed = run(long_plan, tmp_path / "parts", device="cuda", dtype="float64", checkpoint_every=3)
    assert resumed.resumed_from == 3
    np.testing.assert_allclose(resumed.losses, whole.losses, rtol=1e-9)
