"""Training on a stream: accumulate, clip, step, evaluate, checkpoint, and go on exactly where a run stopped.

In: a stream specification, a model configuration, a training configuration, a folder for checkpoints. Out: losses,
validation losses, and the last checkpoint. Promises: the loss of a step is its summed cross-entropy over its number of
targets, whatever the microbatches and ranks; validation reads the same packs every time and leaves the training stream
alone; on the CPU a resumed run's losses equal an uninterrupted run's to the bit; SIGTERM ends a run behind a step that
is saved. The model's weights come from the run's own generator; nothing global is reseeded or left changed. Cost: the
host waits for the device once a step.
"""

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from training_io.attention import check_backend, check_device, choose_backend
from training_io.branching import digest_with
from training_io.errors import InvariantBroken, RecipeError, StateMismatch
from training_io.evaluation import check_fills_one, evaluate, logits_of
from training_io.flops import peak_flops, step_flops
from training_io.hashing import derive_seed
from training_io.loss import summed_cross_entropy
from training_io.model import Model, ModelConfig, check_context, num_parameters
from training_io.progress import Pace, Positions, Progress, TrainResult, evaluations_behind
from training_io.ranks import current_ranks, not_yet_summing, sum_over_ranks, summing_gradients
from training_io.run import Run, Spec, identities_of, resume, save
from training_io.staging import DeviceBatch, resolve_device
from training_io.stopping import Noted, noted_signals
from training_io.stream import StreamFacts, StreamSpec, open_stream
from training_io.train_config import DTYPES, TrainConfig, learning_rate_at

_EVERY = ("eval_every", "checkpoint_every", "progress_every")


def train(
    spec: Spec,
    model_config: ModelConfig,
    config: TrainConfig,
    checkpoint_dir: Path,
    *,
    validation: Spec | None = None,
    branch_from: Path | None = None,
    recipe_identity: str = "",
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> TrainResult:
    """Train to `config.steps`, from the newest checkpoint in the folder if there is one, else from `branch_from`'s.

    The configuration's device and the model's vocabulary replace the specifications'. With world_size above 1 the
    caller has joined the ranks. SIGTERM and SIGINT end the run behind the step that they come in, saved; the result
    names them, and what they mean is the caller's to say. StateMismatch for a checkpoint of another run, FormatError
    for a damaged one, RecipeError for a model that does not fit the data and for a loss that stops being finite.
    """
    with _threads(config.num_threads), noted_signals() as noted:
        run = _open_run(spec, model_config, config, checkpoint_dir, validation, recipe_identity)
        resumed_from = resume(run, branch_from)
        _check_same_start(run)
        _train_steps(run, on_progress, noted)
    assert run.checkpoint is not None
    past, times = run.past, run.times
    return TrainResult(
        steps=run.step,
        resumed_from=resumed_from,
        losses=tuple(past.losses),
        gradient_norms=tuple(past.gradient_norms),
        validation=tuple(past.validation),
        validation_by_pool={pool: tuple(points) for pool, points in past.validation_by_pool.items()},
        tokens_per_second=tuple(times.tokens_per_second),
        tokens=past.tokens,
        positions=past.positions,
        seconds=times.seconds - run.before.seconds,
        seconds_in_all=times.seconds,
        device_hours={kind: seconds / 3600 for kind, seconds in times.device_seconds.items()},
        num_parameters=num_parameters(model_config),
        device=str(run.device),
        backend=run.model.backend,
        checkpoint=run.checkpoint,
        is_stopped=run.step < config.steps,
        signal=noted.signal,
        branched_from=past.branched_from,
    )


def make_optimizer(model: Model, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW; matrices decay, embeddings, norms and biases do not."""
    embeddings = {id(table.weight) for table in (model.tokens, model.positions) if table is not None}
    parameters = list(model.parameters())
    decayed = [p for p in parameters if p.ndim > 1 and id(p) not in embeddings]
    spared = [p for p in parameters if p.ndim == 1 or id(p) in embeddings]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": spared, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas)


def accumulate_gradients(module: nn.Module, microbatches: list[DeviceBatch], dtype: torch.dtype) -> Tensor:
    """Add up the gradients of a step; returns this rank's share of its loss, a float64 scalar on the device.

    Each microbatch's summed cross-entropy is divided by the targets of the whole step, so neither the number of
    microbatches nor of ranks changes the result. Ranks sum their gradients during the last backward pass.
    """
    loss = torch.zeros((), dtype=torch.float64, device=microbatches[0].inputs.device)
    for batch in microbatches[:-1]:
        with not_yet_summing(module):
            loss += _backward(module, batch, dtype)
    return loss + _backward(module, microbatches[-1], dtype)


def queue_update(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    microbatches: list[DeviceBatch],
    dtype: torch.dtype,
    grad_clip: float,
    noted: Noted,
) -> Tensor:
    """Queue a step's gradients, clipping and update on the device, and wait for none of it.

    Returns, on the device, float64[8]: the loss, the five counts of `_counts` and how many ranks noted a signal, summed
    over ranks; then the gradient's norm before clipping.
    """
    share = accumulate_gradients(module, microbatches, dtype)
    counts = torch.tensor([*_counts(microbatches), noted.signal is not None], dtype=torch.float64)
    if share.is_cuda:  # out of memory that is not pinned, even a copy that need not block does
        counts = counts.pin_memory().to(share.device, non_blocking=True)
    shared = torch.cat([share[None], counts])
    sum_over_ranks(shared)
    norm = clip_grad_norm_(module.parameters(), grad_clip)
    optimizer.step()
    optimizer.zero_grad()
    return torch.cat([shared, norm.double()[None]])


def batch_cross_entropy(module: nn.Module, batch: DeviceBatch, dtype: torch.dtype) -> Tensor:
    """Summed cross-entropy of one microbatch in nats, computed in the dtype."""
    return summed_cross_entropy(logits_of(module, batch, dtype), batch.targets)


def _backward(module: nn.Module, batch: DeviceBatch, dtype: torch.dtype) -> Tensor:
    share = batch_cross_entropy(module, batch, dtype) / batch.step_targets
    share.backward()  # type: ignore[no-untyped-call]  # PyTorch leaves it unannotated
    return share.detach()


def _open_run(
    spec: Spec,
    model_config: ModelConfig,
    config: TrainConfig,
    checkpoint_dir: Path,
    validation: Spec | None,
    recipe_identity: str,
) -> Run:
    started = time.perf_counter()
    device = resolve_device(config.device)
    _check_world(spec)
    spec = replace(spec, device=str(device), vocab_size=model_config.vocab_size)
    stream = open_stream(spec)
    _check_fit(stream.facts, model_config)
    backend = config.attention_backend
    if backend == "auto":
        backend = "sdpa" if config.exact_attention else choose_backend(device, DTYPES[config.dtype])
    check_backend(backend)
    if not config.exact_attention:  # which goes with sdpa alone
        check_device(backend, device)
    generator = torch.Generator().manual_seed(derive_seed(config.seed, "model"))
    model = Model(model_config, generator, backend=backend, exact=config.exact_attention)
    model.to(device, torch.float64 if config.dtype == "float64" else torch.float32)
    if config.compile:
        _check_compilable(spec, backend)
    # compiled before it is wrapped: a graph would break at each bucket of gradients
    compiled: nn.Module = torch.compile(model, fullgraph=True, dynamic=False) if config.compile else model  # type: ignore[assignment]
    if validation is not None:
        validation = replace(validation, device=spec.device, vocab_size=spec.vocab_size)
        check_fills_one(validation)
    return Run(
        config=config,
        validation_spec=validation,
        rank=spec.rank,
        world_size=spec.world_size,
        identities=identities_of(stream.facts, model_config, config, validation, recipe_identity),
        checkpoint_dir=checkpoint_dir,
        model=model,
        module=summing_gradients(compiled),
        optimizer=make_optimizer(model, config),
        generator=generator,
        stream=stream,
        started=started,
    )


def _train_steps(run: Run, on_progress: Callable[[Progress], None], noted: Noted) -> None:
    config, first_step = run.config, run.step
    run.told_step = first_step // config.progress_every * config.progress_every or run.told_step
    peak = peak_flops(_device_name(run.device), config.dtype)
    if run.step == 0:
        _validate(run)
    behind_first = time.perf_counter()
    is_stopping = False
    while run.step < config.steps and not is_stopping:
        learning_rate = learning_rate_at(run.step, config)
        is_stopping = _train_step(run, learning_rate, noted)
        if run.step == first_step + 1:
            behind_first = time.perf_counter()
        is_due = {name: run.step == config.steps or run.step % getattr(config, name) == 0 for name in _EVERY}
        if is_due["eval_every"]:
            _validate(run)
        if is_due["progress_every"]:
            on_progress(_progress(run, learning_rate, peak, _seconds_left(run, first_step, behind_first)))
        if is_due["checkpoint_every"] or is_stopping:
            save(run)
    if run.checkpoint is None:  # a branch that has no step left
        save(run)


def _seconds_left(run: Run, first_step: int, behind_first: float) -> float | None:
    """At the pace of this call's steps but the first, in which kernels are compiled; None where there are no others."""
    left, timed = run.config.steps - run.step, run.step - first_step - 1
    if not left:
        return 0.0
    return (time.perf_counter() - behind_first) / timed * left if timed else None


def _train_step(run: Run, learning_rate: float, noted: Noted) -> bool:
    """One update; returns whether any rank was told to stop."""
    began = time.perf_counter()
    microbatches = next(run.stream)
    for group in run.optimizer.param_groups:
        group["lr"] = learning_rate
    queued = queue_update(run.module, run.optimizer, microbatches, run.dtype, run.config.grad_clip, noted)
    run.stream.stage_ahead()
    run.past.digest = digest_with(run.past.digest, run.stream.facts, run.step)
    loss, *counts, num_stopping, gradient_norm = queued.tolist()  # the one wait
    _check_finite(run.step, loss, gradient_norm)
    _note_step(run, loss, gradient_norm, [int(count) for count in counts], microbatches[0].step_targets)
    run.pace.seconds += time.perf_counter() - began
    return bool(num_stopping > 0)


def _note_step(run: Run, loss: float, gradient_norm: float, counts: list[int], step_targets: int) -> None:
    """Add a step, of which `_counts` over all ranks are known, to the run's past; what it was divided by must fit."""
    past, step = run.past, run.step
    computed, inputs, targets, eos, sum_squares = counts
    if targets != step_targets:
        raise InvariantBroken(
            f"step {step + 1:,}: expected the {step_targets:,} targets that its loss is divided by,"
            f" found {targets:,} over all microbatches and ranks"
        )
    past.losses.append(loss)
    past.gradient_norms.append(gradient_norm)
    past.tokens += targets
    past.positions += Positions(
        body=targets - eos,
        eos=eos,
        overlap=inputs - targets,
        slack=run.stream.facts.slots_of(step) - inputs,
        padding=computed - inputs,
    )
    run.pace.tokens += targets
    run.pace.flops += step_flops(run.model.config, inputs, sum_squares)


def _counts(microbatches: list[DeviceBatch]) -> list[int]:
    """Positions computed, inputs, targets, EOS among them, and summed squares of a rank's microbatches."""
    rows = [(len(b.inputs), b.num_inputs, b.num_targets, b.num_eos, b.sum_squares) for b in microbatches]
    return [sum(column) for column in zip(*rows, strict=True)]


def _validate(run: Run) -> None:
    if run.validation_spec is None:
        return
    # the model itself, not the module: evaluation's shapes would compile a second graph
    evaluation = evaluate(run.model, run.validation_spec, run.config.eval_steps, run.dtype)
    run.past.validation.append((run.step, evaluation.loss))
    for pool, loss in evaluation.by_pool.items():
        run.past.validation_by_pool.setdefault(pool, []).append((run.step, loss))


def _progress(run: Run, learning_rate: float, peak: float | None, eta_seconds: float | None) -> Progress:
    """Where the run is; begins a new pace."""
    past, pace, run.pace = run.past, run.pace, Pace()
    evaluations, run.told_step = evaluations_behind(past, run.told_step), run.step
    tokens_per_second = pace.tokens / pace.seconds
    run.tokens_per_second.append((run.step, tokens_per_second))
    return Progress(
        step=run.step,
        steps=run.config.steps,
        loss=past.losses[-1],
        gradient_norm=past.gradient_norms[-1],
        learning_rate=learning_rate,
        validation_loss=past.validation[-1][1] if past.validation else None,
        evaluations=evaluations,
        tokens=past.tokens,
        positions=past.positions,
        tokens_per_second=tokens_per_second,
        mfu=pace.mfu(peak, run.world_size),
        eta_seconds=eta_seconds,
    )


def _check_finite(step: int, loss: float, gradient_norm: float) -> None:
    if not (math.isfinite(loss) and math.isfinite(gradient_norm)):
        raise RecipeError(
            f"step {step + 1:,}: expected a finite loss and gradient, found {loss} and {gradient_norm}. The checkpoints"
            " before it are sound; lower learning_rate, or lengthen warmup_steps."
        )


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _check_world(spec: Spec) -> None:
    rank, world_size = current_ranks()
    if (rank, world_size) != (spec.rank, spec.world_size):
        raise RecipeError(
            f"ranks: the stream is for rank {spec.rank:,} of {spec.world_size:,}, torch.distributed says {rank:,}"
            f" of {world_size:,}. Initialise torch.distributed with the same ranks, or stream for rank 0 of 1."
        )


def _check_same_start(run: Run) -> None:
    """StateMismatch unless every rank found the same checkpoint."""
    total = torch.tensor(run.step, device=run.device)
    sum_over_ranks(total)
    if int(total) != run.step * run.world_size:
        raise StateMismatch(
            f"{run.checkpoint_dir}: expected every rank to go on from the same step, found step {run.step:,} here and"
            f" {int(total):,} added up over {run.world_size:,} ranks. Keep checkpoints where all ranks see them."
        )


def _check_compilable(spec: Spec, backend: str) -> None:
    """RecipeError unless one graph can serve every step."""
    if backend not in ("varlen", "flex"):
        raise RecipeError(
            f"compile: expected attention by varlen or flex, found {backend}, whose segments a graph cannot know."
            " Choose either, or do not compile."
        )
    has_one_shape = spec.constant_shape if isinstance(spec, StreamSpec) else not spec.document_mask
    if not has_one_shape:
        raise RecipeError(
            "compile: expected microbatches of one shape, found ragged ones, each of which would compile anew."
            " Stream packs with constant_shape or windows without a document mask, or do not compile."
        )


def _check_fit(facts: StreamFacts, model_config: ModelConfig) -> None:
    check_context(model_config, facts.max_seq_len)
    if facts.eos_id >= model_config.vocab_size:
        raise RecipeError(
            f"model.vocab_size: expected more than the shards' EOS id {facts.eos_id:,}, found"
            f" {model_config.vocab_size:,}. Use the tokenizer's size."
        )


@contextmanager
def _threads(num_threads: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(before if num_threads is None else num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


if __name__ == "__main__":
    from training_io.train_command import main  # the classes above then have their own module's name, not __main__'s

    sys.exit(main())
