"""Training: the update is the formula's, nothing depends on how a step is divided, and a resume is exact."""

import json
import math
import os
import pickle
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from itertools import chain, count, islice
from types import SimpleNamespace

import naive_batches
import naive_training
import numpy as np
import pytest
import tiny_artifacts
import torch
from torch import distributed, multiprocessing

from training_io.checkpoint import checkpoint_at, list_checkpoints, load_newest
from training_io.errors import FormatError, RecipeError, StateMismatch
from training_io.evaluation import evaluate
from training_io.hashing import derive_seed
from training_io.mixture import MixtureStage
from training_io.model import Model, ModelConfig
from training_io.plan import load_plan
from training_io.progress import Pace, Positions, progress_line
from training_io.sampler import Sampler
from training_io.stream import StreamSpec, WindowSpec, open_stream
from training_io.train import accumulate_gradients, make_optimizer, train
from training_io.train_config import TrainConfig, learning_rate_at, update_settings

VOCAB = 40
MODEL = ModelConfig(vocab_size=VOCAB, d_model=16, num_layers=1, num_heads=2, num_kv_heads=1, d_ff=24, max_positions=16)
CONFIG = TrainConfig(
    steps=7,
    learning_rate=0.02,
    warmup_steps=2,
    eval_every=3,
    eval_steps=2,
    checkpoint_every=1,
    keep_last=99,
    progress_every=2,
    device="cpu",
    num_threads=1,
)


def documents(num_documents, seed):
    rng = np.random.default_rng(seed)
    return [rng.integers(1, VOCAB, size=rng.integers(1, 25)).tolist() for _ in range(num_documents)]


DOCS = {"train": documents(16, seed=1), "validation": documents(7, seed=2)}
PLAN = {"splits": ("train", "validation"), "packs_per_microbatch": 1, "microbatches_per_step": 3}


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return tiny_artifacts.make_token_shards(tmp_path_factory.mktemp("artifacts"), DOCS, token_dtype="uint16")


@pytest.fixture(scope="module")
def plan(shards):
    return tiny_artifacts.make_plan(shards.parents[2], shards, **PLAN)


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def spec_of(plan, split="train", **changes):
    return StreamSpec(plan_path=str(plan), split=split, device="cpu", **changes)


def run(plan, folder, *, model=MODEL, **changes):
    validation = spec_of(plan, "validation")
    return train(spec_of(plan), model, replace(CONFIG, **changes), folder, validation=validation)


def segments_of(docs, max_seq_len=8):
    """(inputs, targets) of each document's segments, by hand."""
    closed = [[*doc, 0] for doc in docs]
    return [
        (
            doc[start : min(start + max_seq_len, len(doc) - 1)],
            doc[start + 1 : min(start + max_seq_len, len(doc) - 1) + 1],
        )
        for doc in closed
        for start in range(0, len(doc) - 1, max_seq_len)
    ]


def fresh_model(seed=CONFIG.seed, dtype=torch.float64, config=MODEL):
    return Model(config, torch.Generator().manual_seed(derive_seed(seed, "model"))).to(dtype)


def alone(model, inputs):
    """Logits of one segment in a batch of its own."""
    length = len(inputs)
    cu_seqlens = torch.tensor([0, length], dtype=torch.int32)
    return model(torch.tensor(inputs), torch.arange(length), cu_seqlens, length)


def segments_in(step):
    """(inputs, targets) of a step's segments, from its batches."""
    return [
        (batch.inputs[start:end].tolist(), batch.targets[start:end].tolist())
        for batch in step
        for start, end in zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True)
    ]


def test_first_update_equals_adamw_on_the_mean_over_all_tokens_of_the_step(plan, tmp_path):
    """The oracle sees single segments, one mean over the step's tokens, and the published update rule."""
    result = run(plan, tmp_path, steps=1, warmup_steps=0, dtype="float64", grad_clip=0.05)
    model = fresh_model()
    segments = segments_in(next(open_stream(spec_of(plan))))
    losses = [
        torch.nn.functional.cross_entropy(alone(model, inputs), torch.tensor(targets), reduction="none")
        for inputs, targets in segments
    ]
    mean = torch.cat(losses).mean()
    mean.backward()
    assert result.losses[0] == pytest.approx(mean.item(), rel=1e-12)
    norm = math.sqrt(sum(float((parameter.grad**2).sum()) for parameter in model.parameters()))
    assert norm > 0.05
    assert result.gradient_norms[0] == pytest.approx(norm, rel=1e-9)
    updated = load_newest(tmp_path).payload["model"]
    for name, parameter in model.named_parameters():
        decay = 0.1 if parameter.ndim == 2 and name != "tokens.weight" else 0.0
        expected, _, _ = naive_training.adamw_update(
            parameter.detach(), parameter.grad * 0.05 / norm, 0, 0, step=1, rate=0.02, betas=(0.9, 0.95), decay=decay
        )
        torch.testing.assert_close(updated[name], expected, rtol=1e-4, atol=1e-8)


def test_accumulation_does_not_change_the_run(shards, plan, tmp_path):
    one = tiny_artifacts.make_plan(tmp_path, shards, **(PLAN | {"packs_per_microbatch": 3, "microbatches_per_step": 1}))
    divided = run(plan, tmp_path / "divided", dtype="float64")
    whole = run(one, tmp_path / "whole", dtype="float64")
    assert len(next(open_stream(spec_of(plan)))) == 3
    assert len(next(open_stream(spec_of(one)))) == 1
    assert whole.losses == pytest.approx(divided.losses, rel=1e-9)
    assert whole.tokens == divided.tokens


def loss_and_gradients(plan, step_number, **changes):
    """Loss of one step of the first epoch, and the gradients, in float64."""
    model, stream = fresh_model(), open_stream(spec_of(plan, **changes))
    for _ in range(step_number):
        next(stream)
    loss = accumulate_gradients(model, next(stream), torch.float64)
    return [loss, *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize("overlap", [1, 5])
def test_with_an_overlap_a_step_is_the_mean_over_what_is_new_in_its_segments(shards, tmp_path, overlap):
    """The oracle reads each segment alone and counts each document's targets once."""
    overlapping = tiny_artifacts.make_plan(tmp_path, shards, **PLAN, overlap=overlap)
    closed = [[*doc, 0] for doc in DOCS["train"]]
    walked = [(doc, *row) for doc in closed for row in naive_batches.overlapping_segments(len(doc), 8, overlap)]
    stream = open_stream(spec_of(overlapping))
    epoch = [next(stream) for _ in range(stream.facts.num_steps)]
    read = sorted(inputs for step in epoch for inputs, _ in segments_in(step))
    assert read == sorted(doc[start:end] for doc, start, end, _ in walked)
    assert sum(step[0].step_targets for step in epoch) == sum(len(doc) - 1 for doc in closed)
    new = {tuple(doc[start : end + 1]): doc[start + repeated + 1 : end + 1] for doc, start, end, repeated in walked}
    for number, step in enumerate(epoch):
        model = fresh_model()
        losses = []
        for inputs, targets in segments_in(step):
            fresh = new[(*inputs, targets[-1])]
            rows = alone(model, inputs)[-len(fresh) :]
            losses.append(torch.nn.functional.cross_entropy(rows, torch.tensor(fresh), reduction="none"))
        mean = torch.cat(losses).mean()
        mean.backward()
        expected = [mean, *(parameter.grad for parameter in model.parameters())]
        for found, wanted in zip(loss_and_gradients(overlapping, number), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("overlap", [0, 5])
def test_a_constant_shape_changes_no_loss_and_no_gradient(shards, tmp_path, overlap):
    plan = tiny_artifacts.make_plan(tmp_path, shards, **PLAN, overlap=overlap)
    for number in range(open_stream(spec_of(plan)).facts.num_steps):
        exact = loss_and_gradients(plan, number)
        shaped = loss_and_gradients(plan, number, constant_shape=True)
        for found, expected in zip(shaped, exact, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    model, validation = fresh_model(), spec_of(plan, "validation")
    losses = [
        evaluate(model, replace(validation, constant_shape=shape), 99, torch.float64).loss for shape in (False, True)
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-12)


def test_a_rank_without_packs_trains_on_slack_alone(plan):
    idle = {"constant_shape": True, "rank": 4, "world_size": 5}
    (batch,) = next(open_stream(spec_of(plan, **idle)))
    assert (batch.num_targets, len(batch.inputs)) == (0, 16)
    loss, *gradients = loss_and_gradients(plan, 0, **idle)
    assert loss == 0
    assert not any(gradient.any() for gradient in gradients)


def test_microbatches_differ_in_size_so_that_a_mean_of_means_would_show(plan):
    stream = open_stream(spec_of(plan))
    steps = [next(stream) for _ in range(stream.facts.num_steps)]
    assert any(len({batch.num_targets for batch in step}) > 1 for step in steps)
    for step in steps:
        assert {batch.step_targets for batch in step} == {sum(batch.num_targets for batch in step)}


def test_one_pack_is_overfitted(tmp_path):
    docs = {"train": documents(2, seed=3)}
    shards = tiny_artifacts.make_token_shards(tmp_path, docs, token_dtype="uint16")
    one_pack = tiny_artifacts.make_plan(tmp_path, shards, max_seq_len=32, capacity=64)
    result = train(
        spec_of(one_pack), MODEL, replace(CONFIG, steps=120, checkpoint_every=120, weight_decay=0.0), tmp_path / "run"
    )
    assert result.losses[0] == pytest.approx(math.log(VOCAB), abs=0.2)
    assert result.losses[-1] < 0.2


def test_resume_at_every_step_gives_the_identical_rest(plan, tmp_path):
    whole = run(plan, tmp_path / "whole")
    num_steps = open_stream(spec_of(plan)).facts.num_steps
    assert CONFIG.steps > num_steps  # an epoch ends on the way
    checkpoints = list_checkpoints(tmp_path / "whole")
    for k, checkpoint in enumerate(checkpoints[:-1], start=1):
        shutil.copytree(checkpoint, tmp_path / f"from_{k}" / checkpoint.name)
        resumed = run(plan, tmp_path / f"from_{k}")
        assert resumed.resumed_from == k
        assert (resumed.losses, resumed.validation, resumed.tokens) == (whole.losses, whole.validation, whole.tokens)
        assert (resumed.gradient_norms, resumed.positions) == (whole.gradient_norms, whole.positions)
        assert resumed.validation_by_pool == whole.validation_by_pool
        final, expected = (load_newest(tmp_path / name).payload["model"] for name in (f"from_{k}", "whole"))
        assert all(torch.equal(final[name], expected[name]) for name in expected)
        assert (resumed.checkpoint / "state.pt").read_bytes() == (whole.checkpoint / "state.pt").read_bytes()


def test_resuming_again_and_again_is_still_the_same_run(plan, tmp_path):
    """The schedule knows the final step, so each stop is a kill: a checkpoint folder cut back to its first k."""
    whole = run(plan, tmp_path / "whole")
    for k in (2, 4, 5):
        run(plan, tmp_path / "again")
        for checkpoint in list_checkpoints(tmp_path / "again")[k:]:
            shutil.rmtree(checkpoint)
    assert run(plan, tmp_path / "again").losses == whole.losses


def test_a_finished_run_is_not_trained_again(plan, tmp_path):
    first, again = run(plan, tmp_path), run(plan, tmp_path)
    assert again.resumed_from == CONFIG.steps
    assert again.losses == first.losses
    assert again.checkpoint == first.checkpoint
    assert again.checkpoint.is_dir()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": replace(MODEL, vocab_size=41)}, r"model.vocab_size: saved for 40, this run has 41"),
        ({"model": replace(MODEL, d_ff=32)}, r"model.d_ff: saved for 24, this run has 32"),
        ({"model": replace(MODEL, positions="learned")}, r"model.positions: saved for rotary, this run has learned"),
        ({"model": replace(MODEL, max_positions=32)}, r"model.max_positions: saved for 16, this run has 32"),
        ({"seed": 1}, r"train_seed: saved for 0, this run has 1"),
        ({"dtype": "float64"}, r"dtype: saved for float32, this run has float64"),
        ({"steps": 3, "warmup_steps": 0}, r"at most 3 steps, found one of 7"),
        ({"steps": 9}, r"train.steps: saved for 7, this run has 9"),
        ({"learning_rate": 0.01}, r"train.learning_rate: saved for 0.02, this run has 0.01"),
        ({"min_lr_ratio": 0.2}, r"train.min_lr_ratio: saved for 0.1, this run has 0.2"),
        ({"warmup_steps": 1}, r"train.warmup_steps: saved for 2, this run has 1"),
        ({"weight_decay": 0.2}, r"train.weight_decay: saved for 0.1, this run has 0.2"),
        ({"betas": (0.9, 0.99)}, r"train.betas: saved for \[0.9, 0.95\], this run has \[0.9, 0.99\]"),
        ({"grad_clip": 2.0}, r"train.grad_clip: saved for 1.0, this run has 2.0"),
        ({"eval_steps": 1}, r"validation.eval_steps: saved for 2, this run has 1"),
    ],
)
def test_resume_of_another_run_is_refused(plan, tmp_path, changes, message):
    run(plan, tmp_path)
    with pytest.raises(StateMismatch, match=message):
        run(plan, tmp_path, **changes)


def test_resume_under_another_recipe_is_refused(plan, tmp_path):
    train(spec_of(plan), MODEL, CONFIG, tmp_path, recipe_identity="aa11")
    assert train(spec_of(plan), MODEL, CONFIG, tmp_path, recipe_identity="aa11").resumed_from == CONFIG.steps
    with pytest.raises(StateMismatch, match="recipe: saved for aa11, this run has bb22"):
        train(spec_of(plan), MODEL, CONFIG, tmp_path, recipe_identity="bb22")
    with pytest.raises(StateMismatch, match="recipe: saved for aa11, this run has None"):
        train(spec_of(plan), MODEL, CONFIG, tmp_path)


def test_every_setting_either_binds_a_checkpoint_or_changes_no_update():
    looks = {"eval_every", "checkpoint_every", "keep_last", "progress_every"}
    evaluated = {"eval_steps"}  # it binds by run.identities_of, with the set that it is a part of
    ways_to_compute = {"device", "attention_backend", "exact_attention", "compile", "num_threads"}
    bound = {name.removeprefix("train.").removeprefix("train_") for name in update_settings(CONFIG)}
    assert sorted([*bound, *looks, *evaluated, *ways_to_compute]) == sorted(asdict(CONFIG))


def test_resume_on_another_plan_or_tokenizer_is_refused(shards, plan, tmp_path):
    run(plan, tmp_path / "run")
    replanned = tiny_artifacts.make_plan(tmp_path, shards, **(PLAN | {"epoch_seed": 2}))
    with pytest.raises(StateMismatch, match=r"plan: saved for [0-9a-f]{64}, this run has [0-9a-f]{64}"):
        run(replanned, tmp_path / "run")
    renamed = tiny_artifacts.make_token_shards(tmp_path, DOCS, token_dtype="uint16", fingerprint="f" * 64)
    with pytest.raises(StateMismatch, match=r"tokenizer_fingerprint: saved for .*, this run has f{64}"):
        run(tiny_artifacts.make_plan(tmp_path, renamed, **PLAN), tmp_path / "run")


@pytest.mark.parametrize(
    ("token_dtype", "eos_id", "packing", "message"),
    [
        ("uint32", 0, {}, "token_dtype: saved for uint16, this run has uint32"),
        ("uint16", VOCAB - 1, {}, f"eos_id: saved for 0, this run has {VOCAB - 1}"),
        ("uint16", 0, {"capacity": 20}, "capacity: saved for 16, this run has 20"),
        ("uint16", 0, {"max_seq_len": 7}, "max_seq_len: saved for 8, this run has 7"),
        ("uint16", 0, {"overlap": 2}, "overlap: saved for 0, this run has 2"),
    ],
)
def test_resume_on_other_tokens_or_packs_names_both_values(plan, tmp_path, token_dtype, eos_id, packing, message):
    run(plan, tmp_path / "run")
    docs = {split: [[token % (VOCAB - 2) + 1 for token in doc] for doc in docs] for split, docs in DOCS.items()}
    shards = tiny_artifacts.make_token_shards(tmp_path, docs, eos_id, token_dtype=token_dtype)
    with pytest.raises(StateMismatch, match=rf"; {message}|: {message}"):
        run(tiny_artifacts.make_plan(tmp_path, shards, **(PLAN | packing)), tmp_path / "run")


def test_validation_is_token_weighted_over_the_first_packs(plan):
    model = fresh_model()
    stream = open_stream(spec_of(plan, "validation"))
    assert stream.facts.num_steps >= 2
    for eval_steps in (1, 2, 1_000):
        segments = segments_of(DOCS["validation"])
        if eval_steps < stream.facts.num_steps:
            stream = open_stream(spec_of(plan, "validation"))
            segments = [segment for _ in range(eval_steps) for segment in segments_in(next(stream))]
        losses = [
            naive_training.cross_entropy_of(row, target)
            for inputs, targets in segments
            for row, target in zip(alone(model, inputs).tolist(), targets, strict=True)
        ]
        found = evaluate(model, spec_of(plan, "validation"), eval_steps, torch.float64).loss
        assert found == pytest.approx(sum(losses) / len(losses), rel=1e-12)


def test_validation_reads_the_same_packs_each_time_and_leaves_training_alone(plan, tmp_path):
    with_validation = run(plan, tmp_path / "with")
    without = train(spec_of(plan), MODEL, CONFIG, tmp_path / "without")
    assert with_validation.losses == without.losses
    assert without.validation == ()
    assert [step for step, _ in with_validation.validation] == [0, 3, 6, 7]
    last = load_newest(tmp_path / "with")
    model = fresh_model(dtype=torch.float32)
    model.load_state_dict(last.payload["model"])
    again = [evaluate(model, spec_of(plan, "validation"), CONFIG.eval_steps, torch.float32).loss for _ in range(2)]
    assert again == [with_validation.validation[-1][1]] * 2


def test_validation_of_each_pool_is_the_mean_over_its_own_tokens(tmp_path):
    """Document i is in pool i modulo 3; the third pool has no validation document of more than its EOS."""
    docs = {"train": DOCS["train"], "validation": [[3, 4, 5], [6] * 20, [], [7, 8], [9], []]}
    shards = tiny_artifacts.make_token_shards(tmp_path, docs, token_dtype="uint16", pool_names=("web", "code", "none"))
    plan = tiny_artifacts.make_plan(tmp_path, shards, **PLAN)
    windows = WindowSpec(shards_path=str(shards), split="validation", batch_size=1, max_seq_len=4, accumulation=1)
    model = fresh_model()
    losses = {"web": [], "code": [], "none": []}
    for pool, doc in zip(("web", "code", "none") * 2, docs["validation"], strict=True):
        for inputs, targets in segments_of([doc]):
            rows = alone(model, inputs).tolist()
            losses[pool] += [naive_training.cross_entropy_of(*pair) for pair in zip(rows, targets, strict=True)]
    by_pool = {pool: sum(values) / len(values) for pool, values in losses.items() if values}
    assert set(by_pool) == {"web", "code"}
    for shape in (False, True):
        found = evaluate(model, spec_of(plan, "validation", constant_shape=shape), 99, torch.float64)
        assert found.by_pool == pytest.approx(by_pool, rel=1e-12)
        everything = losses["web"] + losses["code"]
        assert found.loss == pytest.approx(sum(everything) / len(everything), rel=1e-12)
    pooled = zip(("web", "code", "none") * 2, docs["validation"], strict=True)
    stream = [(token, pool) for pool, doc in pooled for token in [*doc, 0]]
    losses = {"web": [], "code": [], "none": []}
    for start in range(0, (len(stream) - 1) // 4 * 4, 4):
        window, following = stream[start : start + 4], stream[start + 1 : start + 5]
        rows = alone(model, [token for token, _ in window]).tolist()
        for row, (_, pool), (target, _) in zip(rows, window, following, strict=True):
            losses[pool].append(naive_training.cross_entropy_of(row, target))
    by_pool = {pool: sum(values) / len(values) for pool, values in losses.items() if values}
    assert evaluate(model, windows, 99, torch.float64).by_pool == pytest.approx(by_pool, rel=1e-12)


@pytest.mark.parametrize("overlap", [0, 5])
@pytest.mark.parametrize("shape", [False, True])
def test_positions_are_counted_in_the_documents(shards, tmp_path, overlap, shape):
    """Over one epoch: a document of n tokens has n - 1 targets, the last of them its EOS."""
    plan = tiny_artifacts.make_plan(tmp_path, shards, **PLAN, overlap=overlap)
    num_steps = open_stream(spec_of(plan)).facts.num_steps
    config = replace(CONFIG, steps=num_steps, checkpoint_every=num_steps)
    found = train(spec_of(plan, constant_shape=shape), MODEL, config, tmp_path / "run").positions
    closed = [len(doc) + 1 for doc in DOCS["train"]]
    num_inputs = sum(
        end - start for num in closed for start, end, _ in naive_batches.overlapping_segments(num, 8, overlap)
    )
    num_targets = sum(num - 1 for num in closed)
    num_packs = load_plan(plan).num_packs
    assert found.body == sum(len(doc) - 1 for doc in DOCS["train"])
    assert found.eos == len(closed)
    assert found.overlap == num_inputs - num_targets
    assert (found.overlap > 0) == (overlap > 0)
    assert found.slack == num_packs * 16 - num_inputs > 0
    assert found.padding == (found.slack if shape else 0)


def test_windows_have_no_slack_and_no_overlap(shards, tmp_path):
    windows = WindowSpec(shards_path=str(shards), batch_size=2, max_seq_len=8, accumulation=2, device="cpu")
    found = train(windows, MODEL, replace(CONFIG, steps=3), tmp_path).positions
    stream = [token for doc in DOCS["train"] for token in [*doc, 0]]
    num_eos = stream[1 : 3 * 2 * 2 * 8 + 1].count(0)
    assert found == Positions(body=96 - num_eos, eos=num_eos)


def test_utilisation_is_work_over_what_the_ranks_could_do():
    pace = Pace(tokens=10, flops=3_000, seconds=2.0)
    assert pace.mfu(peak=1_000.0, world_size=3) == 0.5
    assert pace.mfu(peak=None, world_size=3) is None


def test_exact_attention_is_sdpa_without_fused_kernels(plan, tmp_path):
    exact = run(plan, tmp_path / "exact", dtype="float64", exact_attention=True)
    assert exact.backend == "sdpa"
    assert exact.losses == pytest.approx(run(plan, tmp_path / "fused", dtype="float64").losses, rel=0, abs=1e-10)
    with pytest.raises(RecipeError, match="exact attention: expected backend sdpa"):
        run(plan, tmp_path / "varlen", exact_attention=True, attention_backend="varlen")


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.usefixtures("varlen_on_cpu")
def test_all_steps_share_one_compiled_graph(shards, tmp_path):
    """Ragged packs, an overlap, a short last step, and evaluation in other shapes: one graph, the eager losses."""
    plan = tiny_artifacts.make_plan(tmp_path, shards, **PLAN, overlap=3)
    epoch = open_stream(spec_of(plan))
    assert len({len(batch.inputs) for _ in range(epoch.facts.num_steps) for batch in next(epoch)}) > 1
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    wanted = replace(CONFIG, dtype="float64")
    compiled = train(
        spec_of(plan, constant_shape=True),
        MODEL,
        replace(wanted, compile=True, attention_backend="varlen"),
        tmp_path / "compiled",
        validation=spec_of(plan, "validation"),
    )
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    eager = train(spec_of(plan), MODEL, wanted, tmp_path / "eager", validation=spec_of(plan, "validation"))
    assert compiled.losses == pytest.approx(eager.losses, rel=0, abs=1e-10)
    for (_, found), (_, expected) in zip(compiled.validation, eager.validation, strict=True):
        assert found == pytest.approx(expected, rel=0, abs=1e-10)


@pytest.mark.parametrize(
    ("backend", "spec", "message"),
    [
        ("auto", {"constant_shape": True}, "compile: expected attention by varlen or flex, found sdpa"),
        ("varlen", {}, "compile: expected microbatches of one shape"),
    ],
)
def test_what_one_graph_cannot_serve_is_not_compiled(plan, tmp_path, backend, spec, message):
    config = replace(CONFIG, compile=True, attention_backend=backend)
    with pytest.raises(RecipeError, match=message):
        train(spec_of(plan, **spec), MODEL, config, tmp_path)


def test_masked_windows_are_not_compiled(shards, tmp_path):
    windows = WindowSpec(
        shards_path=str(shards), batch_size=2, max_seq_len=8, accumulation=2, device="cpu", document_mask=True
    )
    with pytest.raises(RecipeError, match="compile: expected microbatches of one shape"):
        train(windows, MODEL, replace(CONFIG, compile=True, attention_backend="varlen"), tmp_path)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_run_behind_a_saved_step_and_the_resumed_run_is_the_same(plan, tmp_path, number):
    whole = run(plan, tmp_path / "whole", checkpoint_every=99)
    handlers = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)]

    def interrupt(progress):
        if progress.step == 2:
            os.kill(os.getpid(), number)

    stopped = train(
        spec_of(plan),
        MODEL,
        replace(CONFIG, checkpoint_every=99),
        tmp_path / "run",
        validation=spec_of(plan, "validation"),
        on_progress=interrupt,
    )
    assert (stopped.is_stopped, stopped.signal, stopped.steps) == (True, number, 3)  # it is heard in the step after
    assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)] == handlers
    assert list_checkpoints(tmp_path / "run") == [stopped.checkpoint]
    resumed = run(plan, tmp_path / "run", checkpoint_every=99)
    assert (resumed.resumed_from, resumed.is_stopped, resumed.signal) == (3, False, None)
    assert (resumed.losses, resumed.validation) == (whole.losses, whole.validation)
    assert resumed.seconds_in_all > resumed.seconds + stopped.seconds * 0.5
    assert resumed.device_hours == {"cpu": resumed.seconds_in_all / 3600}


def test_elsewhere_than_in_the_main_thread_signals_stay_as_they_were(plan, tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    seen = []
    config = replace(CONFIG, steps=2)
    arguments = {"on_progress": lambda progress: seen.append(signal.getsignal(signal.SIGTERM))}
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(train, spec_of(plan), MODEL, config, tmp_path, **arguments).result()
    assert (result.steps, seen) == (2, [before])


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory):
    """Three plans of two pools over the same shards: the first two part at their second stage, the third at once."""
    root = tmp_path_factory.mktemp("mixtures")
    shards = tiny_artifacts.make_token_shards(
        root, {"train": documents(60, seed=5)}, token_dtype="uint16", pool_names=("a", "b")
    )
    stages = [("50", "50"), ("90", "10")], [("50", "50"), ("10", "90")], [("90", "10"), ("50", "50")]
    return [
        tiny_artifacts.make_plan(
            root,
            shards,
            **(PLAN | {"splits": ("train",)}),
            mixture=tuple(
                MixtureStage(name=f"stage {i}", tokens=150, shares={"a": a, "b": b}) for i, (a, b) in enumerate(shares)
            ),
        )
        for shares in stages
    ]


@pytest.fixture
def parting(mixtures, tmp_path):
    """The first plan's finished run, checkpoints of every step, and how many steps the second plan reads alike."""
    one, other = (islice(Sampler(load_plan(folder)), CONFIG.steps) for folder in mixtures[:2])
    num_common = naive_batches.steps_alike(one, other)
    assert 0 < num_common < CONFIG.steps <= load_plan(mixtures[0]).num_steps
    return train(spec_of(mixtures[0]), MODEL, CONFIG, tmp_path / "first"), num_common


def test_a_branch_is_the_run_that_the_second_plan_would_have_had(mixtures, parting, tmp_path):
    first, num_common = parting
    whole = train(spec_of(mixtures[1]), MODEL, CONFIG, tmp_path / "whole")
    assert whole.losses[:num_common] == first.losses[:num_common]
    assert whole.losses != first.losses
    for k in range(1, num_common + 1):
        origin = list_checkpoints(tmp_path / "first")[k - 1]
        branch = train(spec_of(mixtures[1]), MODEL, CONFIG, tmp_path / f"from_{k}", branch_from=origin)
        assert (branch.resumed_from, branch.losses, branch.tokens) == (k, whole.losses, whole.tokens)
        assert (branch.gradient_norms, branch.positions) == (whole.gradient_norms, whole.positions)
        final, expected = (load_newest(tmp_path / name).payload["model"] for name in (f"from_{k}", "whole"))
        assert all(torch.equal(final[name], expected[name]) for name in expected)
        assert branch.branched_from == {
            "plan": load_plan(mixtures[0]).identity,
            "step": k,
            "sha256": checkpoint_at(origin).sha256,
        }
        assert branch.seconds_in_all > branch.seconds > 0


def test_a_branch_from_the_last_step_is_done(plan, tmp_path):
    whole = run(plan, tmp_path / "whole")
    evaluated = {"validation": spec_of(plan, "validation")}
    branch = train(spec_of(plan), MODEL, CONFIG, tmp_path / "branch", branch_from=tmp_path / "whole", **evaluated)
    assert (branch.resumed_from, branch.losses, branch.is_stopped) == (CONFIG.steps, whole.losses, False)
    assert load_newest(tmp_path / "branch").step == CONFIG.steps


def test_a_branch_on_the_same_plan_is_a_resume_even_past_its_first_epoch(plan, tmp_path):
    whole = run(plan, tmp_path / "whole")
    assert open_stream(spec_of(plan)).facts.num_steps < 6
    origin = list_checkpoints(tmp_path / "whole")[5]
    evaluated = {"validation": spec_of(plan, "validation")}
    branch = train(spec_of(plan), MODEL, CONFIG, tmp_path / "branch", branch_from=origin, **evaluated)
    assert (branch.resumed_from, branch.losses) == (6, whole.losses)


def test_a_branch_is_evaluated_on_the_same_set_or_refused(tmp_path):
    """Two mixtures of one split share its validation; a plan of another seed goes through it otherwise."""
    docs = {"train": documents(60, seed=5), "validation": DOCS["validation"]}
    shards = tiny_artifacts.make_token_shards(tmp_path, docs, token_dtype="uint16", pool_names=("a", "b"))

    def mixed(second, folder, **changes):
        shares = ({"a": "50", "b": "50"}, second)
        stages = tuple(MixtureStage(name=f"stage {i}", tokens=150, shares=each) for i, each in enumerate(shares))
        return tiny_artifacts.make_plan(tmp_path / folder, shards, **(PLAN | changes), mixture=stages)

    first, second = mixed({"a": "90", "b": "10"}, "first"), mixed({"a": "10", "b": "90"}, "second")
    config = replace(CONFIG, steps=4)
    train(spec_of(first), MODEL, config, tmp_path / "origin", validation=spec_of(first, "validation"))
    origin = list_checkpoints(tmp_path / "origin")[0]
    branch = {"branch_from": origin, "validation": spec_of(second, "validation")}
    found = train(spec_of(second), MODEL, config, tmp_path / "branch", **branch)
    assert (found.resumed_from, [step for step, _ in found.validation]) == (1, [0, 3, 4])
    other = tiny_artifacts.make_plan(tmp_path / "other", shards, **(PLAN | {"epoch_seed": 5}))
    hashes = "saved for [0-9a-f]{64}, this run has [0-9a-f]{64}"
    elsewhere = branch | {"validation": spec_of(other, "validation")}
    with pytest.raises(StateMismatch, match=f"validation: {hashes}"):
        train(spec_of(second), MODEL, config, tmp_path / "refused", **elsewhere)
    with pytest.raises(StateMismatch, match=r"validation\.split: saved for validation, this run has None"):
        train(spec_of(second), MODEL, config, tmp_path / "refused", branch_from=origin)


def test_a_checkpoint_that_does_not_say_what_was_evaluated_still_goes_on(plan, tmp_path):
    whole = run(plan, tmp_path)
    for checkpoint in list_checkpoints(tmp_path)[3:]:
        shutil.rmtree(checkpoint)
    path = list_checkpoints(tmp_path)[-1] / "checkpoint.json"
    record = json.loads(path.read_text())
    kept = {name: value for name, value in record["identities"].items() if not name.startswith("validation")}
    assert len(kept) == len(record["identities"]) - 3
    path.write_text(json.dumps(record | {"identities": kept}))
    assert run(plan, tmp_path).validation == whole.validation


def test_a_refused_checkpoint_leaves_the_times_of_the_one_that_is_there(plan, tmp_path):
    run(plan, tmp_path / "other")
    names = ("step_000000002", "times_000000002.json")

    def interfere(progress):
        if progress.step == 2:
            shutil.copytree(tmp_path / "other" / names[0], tmp_path / "run" / names[0])
            shutil.copy(tmp_path / "other" / names[1], tmp_path / "run")

    with pytest.raises(FormatError, match="expected no checkpoint of step 2 yet, found one"):
        train(spec_of(plan), MODEL, CONFIG, tmp_path / "run", on_progress=interfere)
    assert (tmp_path / "run" / names[1]).read_bytes() == (tmp_path / "other" / names[1]).read_bytes()


def test_plans_that_part_before_the_checkpoint_are_not_branched(mixtures, parting, tmp_path):
    _, num_common = parting
    checkpoints = list_checkpoints(tmp_path / "first")
    for plan, origin in ((mixtures[1], checkpoints[num_common]), (mixtures[2], checkpoints[0])):
        with pytest.raises(StateMismatch, match=r"first [0-9]+ steps in common, found that plan [0-9a-f]{12}… reads"):
            train(spec_of(plan), MODEL, CONFIG, tmp_path / "branch", branch_from=origin)
    assert load_newest(tmp_path / "branch") is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": replace(MODEL, d_ff=32)}, "model.d_ff: saved for 24, this run has 32"),
        ({"learning_rate": 0.01}, "train.learning_rate: saved for 0.02, this run has 0.01"),
        ({"seed": 1}, "train_seed: saved for 0, this run has 1"),
        ({"dtype": "float64"}, "dtype: saved for float32, this run has float64"),
    ],
)
def test_a_branch_under_other_settings_is_refused(mixtures, parting, tmp_path, changes, message):
    model = changes.get("model", MODEL)
    config = replace(CONFIG, **{name: value for name, value in changes.items() if name != "model"})
    origin = list_checkpoints(tmp_path / "first")[0]
    with pytest.raises(StateMismatch, match=message):
        train(spec_of(mixtures[1]), model, config, tmp_path / "branch", branch_from=origin)


def test_a_branch_resumes_as_itself_and_keeps_its_origin(mixtures, parting, tmp_path):
    first, other = list_checkpoints(tmp_path / "first")[:2]
    branch = train(spec_of(mixtures[1]), MODEL, CONFIG, tmp_path / "branch", branch_from=first)
    for checkpoint in list_checkpoints(tmp_path / "branch")[3:]:
        shutil.rmtree(checkpoint)
    for origin in (first, None):
        resumed = train(spec_of(mixtures[1]), MODEL, CONFIG, tmp_path / "branch", branch_from=origin)
        assert (resumed.losses, resumed.branched_from) == (branch.losses, branch.branched_from)
    with pytest.raises(StateMismatch, match=r"expected a run that was branched from .*step_000000002, found one from"):
        train(spec_of(mixtures[1]), MODEL, CONFIG, tmp_path / "branch", branch_from=other)
    with pytest.raises(StateMismatch, match="plan: saved for"):
        train(spec_of(mixtures[0]), MODEL, CONFIG, tmp_path / "branch")


def test_windows_train_and_resume_too(shards, tmp_path):
    windows = WindowSpec(shards_path=str(shards), batch_size=2, max_seq_len=8, accumulation=2, device="cpu")
    whole = train(windows, MODEL, CONFIG, tmp_path / "whole")
    assert whole.tokens == CONFIG.steps * 2 * 8 * 2
    checkpoint = list_checkpoints(tmp_path / "whole")[3]
    shutil.copytree(checkpoint, tmp_path / "resumed" / checkpoint.name)
    assert train(windows, MODEL, CONFIG, tmp_path / "resumed").losses == whole.losses
    with pytest.raises(StateMismatch, match="max_seq_len: saved for 8, this run has 4"):
        train(replace(windows, max_seq_len=4), MODEL, CONFIG, tmp_path / "resumed")


def test_progress_says_where_the_run_is(plan, tmp_path):
    seen = []
    result = train(
        spec_of(plan), MODEL, CONFIG, tmp_path, validation=spec_of(plan, "validation"), on_progress=seen.append
    )
    assert [progress.step for progress in seen] == [2, 4, 6, 7]
    assert [progress.loss for progress in seen] == [result.losses[step - 1] for step in (2, 4, 6, 7)]
    assert [progress.learning_rate for progress in seen] == [learning_rate_at(step, CONFIG) for step in (1, 3, 5, 6)]
    assert (seen[-1].tokens, seen[-1].eta_seconds) == (result.tokens, 0.0)
    assert all(progress.tokens_per_second > 0 and progress.validation_loss is not None for progress in seen)
    told = [[(each.step, each.loss) for each in progress.evaluations] for progress in seen]
    assert [[step for step, _ in points] for points in told] == [[0], [3], [6], [7]]
    assert tuple(point for points in told for point in points) == result.validation
    by_pool = {pool: dict(points) for pool, points in result.validation_by_pool.items()}
    for each in (each for progress in seen for each in progress.evaluations):
        assert each.by_pool == {pool: found[each.step] for pool, found in by_pool.items()}


def test_what_is_left_is_told_at_the_pace_of_the_steps_behind_the_first(plan, tmp_path, monkeypatch):
    """By a clock that goes on by 1 when it is looked at, and by 1,000 within the first step, as a compiler does."""
    first = [0, 1, 2, 1_000]  # opened, begun, the first step's begin and end
    clock = chain(first, count(1_001))
    monkeypatch.setattr("training_io.train.time", SimpleNamespace(perf_counter=lambda: next(clock)))
    seen = []
    train(spec_of(plan), MODEL, replace(CONFIG, progress_every=1), tmp_path, on_progress=seen.append)
    assert [progress.step for progress in seen] == [1, 2, 3, 4, 5, 6, 7]
    assert seen[0].eta_seconds is None
    assert " left" not in progress_line(seen[0])
    a_step = seen[1].eta_seconds / 5
    assert 0 < a_step < 10
    assert [progress.eta_seconds for progress in seen[2:]] == pytest.approx(
        [4 * a_step, 3 * a_step, 2 * a_step, a_step, 0]
    )


@pytest.mark.parametrize("checkpoint", range(1, CONFIG.steps))
def test_a_resumed_run_tells_each_evaluation_that_no_progress_before_it_told(plan, tmp_path, checkpoint):
    """Evaluated behind 0, 3, 6, 7; progress behind 4 and 7: a stop between the two has told of neither."""
    config = replace(CONFIG, progress_every=4)
    evaluated = {"validation": spec_of(plan, "validation")}
    whole = train(spec_of(plan), MODEL, config, tmp_path, **evaluated)
    for later in list_checkpoints(tmp_path)[checkpoint:]:
        shutil.rmtree(later)
    seen = []
    train(spec_of(plan), MODEL, config, tmp_path, on_progress=seen.append, **evaluated)
    told = tuple((each.step, each.loss) for progress in seen for each in progress.evaluations)
    assert told == tuple(point for point in whole.validation if point[0] > (4 if checkpoint >= 4 else -1))


def test_training_leaves_global_settings_and_generators_alone(plan, tmp_path):
    before = (torch.get_rng_state(), torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled())
    run(plan, tmp_path, num_threads=2, dtype="bfloat16")
    after = (torch.get_rng_state(), torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled())
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]


def test_bfloat16_trains_over_float32_weights(plan, tmp_path):
    result = run(plan, tmp_path, dtype="bfloat16")
    assert result.losses == pytest.approx(run(plan, tmp_path / "float32").losses, rel=0.02)
    assert result.losses != run(plan, tmp_path / "float32").losses
    assert {weight.dtype for weight in load_newest(tmp_path).payload["model"].values()} == {torch.float32}


def test_a_loss_that_is_not_finite_stops_the_run_before_it_is_saved(plan, tmp_path):
    with pytest.raises(RecipeError, match=r"step [0-9]+: expected a finite loss and gradient, found"):
        run(plan, tmp_path, learning_rate=1e30, warmup_steps=0)
    saved = load_newest(tmp_path)
    assert all(math.isfinite(loss) for loss in saved.payload["past"]["losses"].tolist())


def test_a_model_that_does_not_fit_the_data_is_refused(plan, tmp_path):
    with pytest.raises(RecipeError, match=r"at most 4 tokens .* found 8"):
        run(plan, tmp_path, model=replace(MODEL, positions="learned", max_positions=4))
    with pytest.raises(RecipeError, match="expected one of auto, varlen, flex, sdpa"):
        run(plan, tmp_path, attention_backend="flash")


def test_eos_outside_the_vocabulary_is_refused(tmp_path):
    shards = tiny_artifacts.make_token_shards(tmp_path, DOCS, eos_id=999, token_dtype="uint16")
    with pytest.raises(RecipeError, match="more than the shards' EOS id 999, found 40"):
        run(tiny_artifacts.make_plan(tmp_path, shards, **PLAN), tmp_path / "run")


def test_a_rank_without_torch_distributed_is_refused(plan, tmp_path):
    with pytest.raises(RecipeError, match=r"rank 1 of 2, torch.distributed says 0 of 1"):
        train(spec_of(plan, rank=1, world_size=2), MODEL, CONFIG, tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "train.steps: expected 1 to 999,999,999, found 0"),
        ({"warmup_steps": 8}, "train.warmup_steps: expected 0 to steps = 7, found 8"),
        ({"learning_rate": 0.0}, "train.learning_rate: expected above 0 and finite, found 0.0"),
        ({"min_lr_ratio": 1.5}, "train.min_lr_ratio: expected 0 to 1, found 1.5"),
        ({"betas": (0.9, 1.0)}, "train.betas: expected two numbers from 0, below 1"),
        ({"dtype": "float16"}, "train.dtype: expected one of float32, bfloat16, float64, found float16"),
        ({"num_threads": 0}, "train.num_threads: expected 1 to 1,024, found 0"),
    ],
)
def test_impossible_numbers_are_refused(changes, message):
    with pytest.raises(RecipeError, match=message):
        replace(CONFIG, **changes)


def test_configurations_are_plain_values():
    assert pickle.loads(pickle.dumps(CONFIG)) == CONFIG
    assert TrainConfig(**asdict(CONFIG)) == CONFIG


def test_learning_rate_rises_then_falls_to_its_floor():
    config = TrainConfig(steps=50, learning_rate=2.0, warmup_steps=5, min_lr_ratio=0.25)
    rates = [learning_rate_at(step, config) for step in range(50)]
    assert rates[:5] == pytest.approx([0.4, 0.8, 1.2, 1.6, 2.0])
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert learning_rate_at(50, config) == pytest.approx(0.5)
    constant = TrainConfig(steps=9, learning_rate=2.0, min_lr_ratio=1.0)
    assert {learning_rate_at(step, constant) for step in range(9)} == {2.0}


def test_embeddings_norms_and_biases_do_not_decay():
    model = fresh_model(config=replace(MODEL, positions="learned", norm="layernorm", tied_embeddings=False))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decayed, spared = (
        {names[id(parameter)] for parameter in group["params"]} for group in make_optimizer(model, CONFIG).param_groups
    )
    assert {"tokens.weight", "positions.weight", "norm.weight", "norm.bias"} <= spared
    assert {"head.weight", "blocks.0.attention.query.weight", "blocks.0.feed_forward.down.weight"} <= decayed
    assert decayed | spared == set(names.values())


def train_rank(rank, world_size, plan, folder):
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world_size)
    result = train(
        spec_of(plan, rank=rank, world_size=world_size),
        MODEL,
        replace(CONFIG, steps=4, dtype="float64"),
        folder / "run",
        validation=spec_of(plan, "validation"),
    )
    (folder / f"rank_{rank}").write_bytes(pickle.dumps(result))
    distributed.destroy_process_group()


def test_two_ranks_are_the_same_run_as_one(plan, tmp_path):
    one = run(plan, tmp_path / "one", steps=4, dtype="float64")
    multiprocessing.spawn(train_rank, (2, plan, tmp_path), nprocs=2)
    two = [pickle.loads((tmp_path / f"rank_{rank}").read_bytes()) for rank in range(2)]
    assert two[0].losses == two[1].losses
    assert two[0].losses == pytest.approx(one.losses, rel=1e-9)
    assert [loss for _, loss in two[0].validation] == pytest.approx([loss for _, loss in one.validation], rel=1e-9)
    assert two[0].tokens == one.tokens


def test_a_rank_without_packs_adds_nothing(plan):
    """Three packs over five ranks: the gradients of the shares add up to the step's."""
    whole, total = fresh_model(), [torch.zeros_like(parameter) for parameter in fresh_model().parameters()]
    loss = accumulate_gradients(whole, next(open_stream(spec_of(plan))), torch.float64)
    shares = []
    for rank in range(5):
        model = fresh_model()
        batches = next(open_stream(spec_of(plan, rank=rank, world_size=5)))
        shares.append(
            (sum(batch.num_targets for batch in batches), accumulate_gradients(model, batches, torch.float64))
        )
        total = [sum_so_far + parameter.grad for sum_so_far, parameter in zip(total, model.parameters(), strict=True)]
    assert 0 in {num_targets for num_targets, _ in shares}
    assert sum(share.item() for _, share in shares) == pytest.approx(loss.item(), rel=1e-12)
    for found, parameter in zip(total, whole.parameters(), strict=True):
        torch.testing.assert_close(found, parameter.grad, rtol=1e-9, atol=1e-12)
