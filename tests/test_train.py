"""Training: the update is the formula's, nothing depends on how a step is divided, and a resume is exact."""

import math
import pickle
import shutil
from dataclasses import asdict, replace

import naive_training
import numpy as np
import pytest
import tiny_artifacts
import torch
from torch import distributed, multiprocessing

from training_io.checkpoint import list_checkpoints, load_newest
from training_io.errors import RecipeError, StateMismatch
from training_io.hashing import derive_seed
from training_io.model import Model, ModelConfig
from training_io.stream import StreamSpec, WindowSpec, open_stream
from training_io.train import (
    TrainConfig,
    accumulate_gradients,
    evaluate,
    learning_rate_at,
    make_optimizer,
    train,
)

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
        final, expected = (load_newest(tmp_path / name).payload["model"] for name in (f"from_{k}", "whole"))
        assert all(torch.equal(final[name], expected[name]) for name in expected)


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
    ],
)
def test_resume_of_another_run_is_refused(plan, tmp_path, changes, message):
    run(plan, tmp_path)
    with pytest.raises(StateMismatch, match=message):
        run(plan, tmp_path, **changes)


def test_resume_on_another_plan_or_tokenizer_is_refused(shards, plan, tmp_path):
    run(plan, tmp_path / "run")
    replanned = tiny_artifacts.make_plan(tmp_path, shards, **(PLAN | {"epoch_seed": 2}))
    with pytest.raises(StateMismatch, match=r"plan: saved for [0-9a-f]{64}, this run has [0-9a-f]{64}"):
        run(replanned, tmp_path / "run")
    renamed = tiny_artifacts.make_token_shards(tmp_path, DOCS, token_dtype="uint16", fingerprint="f" * 64)
    with pytest.raises(StateMismatch, match=r"tokenizer_fingerprint: saved for .*, this run has f{64}"):
        run(tiny_artifacts.make_plan(tmp_path, renamed, **PLAN), tmp_path / "run")


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
        found = evaluate(model, spec_of(plan, "validation"), eval_steps, torch.float64)
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
    again = [evaluate(model, spec_of(plan, "validation"), CONFIG.eval_steps, torch.float32) for _ in range(2)]
    assert again == [with_validation.validation[-1][1]] * 2


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
    assert all(math.isfinite(loss) for loss in saved.payload["losses"].tolist())


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
        ({"steps": 0}, "train.steps: expected at least 1, found 0"),
        ({"warmup_steps": 8}, "train.warmup_steps: expected 0 to steps = 7, found 8"),
        ({"learning_rate": 0.0}, "train.learning_rate: expected above 0, found 0.0"),
        ({"min_lr_ratio": 1.5}, "train.min_lr_ratio: expected 0 to 1, found 1.5"),
        ({"betas": (0.9, 1.0)}, "train.betas: expected two numbers from 0, below 1"),
        ({"dtype": "float16"}, "train.dtype: expected one of float32, bfloat16, float64, found float16"),
        ({"num_threads": 0}, "train.num_threads: expected at least 1, found 0"),
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
