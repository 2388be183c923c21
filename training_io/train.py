"""Training on a stream: accumulate, clip, step, evaluate, checkpoint, and go on exactly where a run stopped.

In: a stream specification, a model configuration, a training configuration, a folder for checkpoints. Out: losses,
validation losses, and the last checkpoint. Promises: the loss of a step is its summed cross-entropy over its number of
targets, whatever the microbatches and ranks; validation reads the same packs every time and leaves the training stream
alone; on the CPU a resumed run's losses equal an uninterrupted run's to the bit. The model's weights come from the
run's own generator; nothing global is reseeded or left changed.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed
from torch.nn.utils import clip_grad_norm_

from training_io.attention import choose_backend
from training_io.checkpoint import check_identities, checkpoint_path, load_newest, save_checkpoint
from training_io.errors import RecipeError, StateMismatch
from training_io.hashing import derive_seed
from training_io.loss import sum_cross_entropy
from training_io.model import Model, ModelConfig, check_context, num_parameters
from training_io.staging import DeviceBatch, resolve_device
from training_io.stream import BatchStream, StreamFacts, StreamSpec, WindowSpec, open_stream

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}

Spec = StreamSpec | WindowSpec

_EVERY = ("eval_every", "checkpoint_every", "progress_every")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How to train; only the seed and the dtype bind a checkpoint.

    Learning rates are per step: linear from 0 over `warmup_steps`, then a cosine down to `min_lr_ratio` of the peak at
    `steps`. `bfloat16` computes in it over float32 weights. Evaluation reads the first `eval_steps` steps of the
    validation stream (all of them when it is shorter), every `eval_every` steps and at both ends; checkpoints are
    written every `checkpoint_every` steps and at the end, of which the newest `keep_last` stay.
    """

    steps: int
    learning_rate: float
    min_lr_ratio: float = 0.1
    warmup_steps: int = 0
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    grad_clip: float = 1.0
    seed: int = 0
    eval_every: int = 100
    eval_steps: int = 8
    checkpoint_every: int = 100
    keep_last: int = 2
    progress_every: int = 10
    device: str = "auto"
    dtype: str = "float32"
    attention_backend: str = "auto"
    num_threads: int | None = None  # of PyTorch on the CPU; None leaves its own choice

    def __post_init__(self) -> None:
        """RecipeError for impossible numbers."""
        for name in ("steps", "eval_every", "eval_steps", "checkpoint_every", "keep_last", "progress_every"):
            _check(name, getattr(self, name), getattr(self, name) >= 1, "at least 1")
        _check("warmup_steps", self.warmup_steps, 0 <= self.warmup_steps <= self.steps, f"0 to steps = {self.steps:,}")
        _check("learning_rate", self.learning_rate, self.learning_rate > 0, "above 0")
        _check("min_lr_ratio", self.min_lr_ratio, 0 <= self.min_lr_ratio <= 1, "0 to 1")
        _check("weight_decay", self.weight_decay, self.weight_decay >= 0, "0 or more")
        _check("betas", self.betas, all(0 <= beta < 1 for beta in self.betas), "two numbers from 0, below 1")
        _check("grad_clip", self.grad_clip, self.grad_clip > 0, "above 0")
        _check("dtype", self.dtype, self.dtype in DTYPES, f"one of {', '.join(DTYPES)}")
        _check("num_threads", self.num_threads, self.num_threads is None or self.num_threads >= 1, "at least 1")


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where a run is; losses in nats per target, times in seconds."""

    step: int
    steps: int
    loss: float
    learning_rate: float
    validation_loss: float | None
    tokens: int
    tokens_per_second: float
    eta_seconds: float


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """What a run came to. `losses` and `validation` cover the whole run, also what came before a resume."""

    steps: int
    resumed_from: int  # 0 for a run from the start
    losses: tuple[float, ...]  # one a step
    validation: tuple[tuple[int, float], ...]  # (steps done, loss)
    tokens: int  # targets trained on, over all steps
    seconds: float  # of this call
    num_parameters: int
    device: str
    backend: str
    checkpoint: Path


@dataclass(kw_only=True)
class Run:
    """A run under way: what it was asked for, and what changes with every step."""

    config: TrainConfig
    validation_spec: Spec | None
    rank: int
    identities: Mapping[str, Any]
    checkpoint_dir: Path
    model: Model
    optimizer: torch.optim.AdamW
    generator: torch.Generator
    stream: BatchStream
    losses: list[float] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)
    tokens: int = 0
    checkpoint: Path | None = None

    @property
    def step(self) -> int:
        """Steps done."""
        return len(self.losses)

    @property
    def dtype(self) -> torch.dtype:
        """What the forward pass computes in."""
        return DTYPES[self.config.dtype]


def train(
    spec: Spec,
    model_config: ModelConfig,
    config: TrainConfig,
    checkpoint_dir: Path,
    *,
    validation: Spec | None = None,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> TrainResult:
    """Train to `config.steps`, from the newest checkpoint in the folder if there is one.

    The configuration's device and the model's vocabulary replace the specifications'. With world_size above 1 the
    caller has initialised torch.distributed. StateMismatch for a checkpoint of another run, FormatError for a damaged
    one, RecipeError for a model that does not fit the data and for a loss that stops being finite.
    """
    started = time.perf_counter()
    with _threads(config.num_threads):
        run = _open_run(spec, model_config, config, checkpoint_dir, validation)
        resumed_from = _resume(run)
        _train_steps(run, on_progress)
    assert run.checkpoint is not None
    return TrainResult(
        steps=run.step,
        resumed_from=resumed_from,
        losses=tuple(run.losses),
        validation=tuple(run.validation),
        tokens=run.tokens,
        seconds=time.perf_counter() - started,
        num_parameters=num_parameters(model_config),
        device=str(run.model.tokens.weight.device),
        backend=run.model.backend,
        checkpoint=run.checkpoint,
    )


def learning_rate_at(step: int, config: TrainConfig) -> float:
    """Rate of a step, counted from 0: linear warm-up, then a cosine to min_lr_ratio of the peak (Loshchilov, SGDR).

    >>> config = TrainConfig(steps=100, learning_rate=1.0, warmup_steps=10, min_lr_ratio=0.1)
    >>> [round(learning_rate_at(step, config), 3) for step in (0, 9, 10, 55, 100)]
    [0.1, 1.0, 1.0, 0.55, 0.1]
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    through = (step - config.warmup_steps) / max(config.steps - config.warmup_steps, 1)
    cosine = (1 + math.cos(math.pi * through)) / 2
    return config.learning_rate * (config.min_lr_ratio + (1 - config.min_lr_ratio) * cosine)


def make_optimizer(model: Model, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW; matrices decay, embeddings, norms and biases do not."""
    embeddings = {id(table.weight) for table in (model.tokens, model.positions) if table is not None}
    parameters = list(model.parameters())
    decayed = [p for p in parameters if p.ndim > 1 and id(p) not in embeddings]
    spared = [p for p in parameters if p.ndim == 1 or id(p) in embeddings]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": spared, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas)


def accumulate_gradients(model: Model, microbatches: list[DeviceBatch], dtype: torch.dtype) -> Tensor:
    """Add up the gradients of a step; returns its loss on every rank, a float64 scalar on the device.

    Each microbatch's summed cross-entropy is divided by the targets of the whole step, so neither the number of
    microbatches nor of ranks changes the result.
    """
    loss = torch.zeros((), dtype=torch.float64, device=model.tokens.weight.device)
    for batch in microbatches:
        share = batch_cross_entropy(model, batch, dtype) / batch.step_targets
        share.backward()  # type: ignore[no-untyped-call]  # PyTorch leaves it unannotated
        loss += share.detach()
    sum_over_ranks([loss, *_gradients(model)])
    return loss


def batch_cross_entropy(model: Model, batch: DeviceBatch, dtype: torch.dtype) -> Tensor:
    """Summed cross-entropy of one microbatch in nats, computed in the dtype."""
    with torch.autocast(batch.inputs.device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        logits_TV = model(batch.inputs, batch.position_ids, batch.cu_seqlens, batch.max_seqlen)
    total, _ = sum_cross_entropy(logits_TV, batch.targets)
    return total


def sum_over_ranks(tensors: list[Tensor]) -> None:
    """Replace each tensor by its sum over all ranks; nothing to do without torch.distributed."""
    if _is_distributed():
        for tensor in tensors:
            distributed.all_reduce(tensor)


@torch.no_grad()
def evaluate(model: Model, spec: Spec, eval_steps: int, dtype: torch.dtype) -> float:
    """Cross-entropy per target over the first steps of a stream's first epoch, in nats; opens its own stream."""
    stream = open_stream(replace(spec, sampler_state=None))
    total = torch.zeros(2, dtype=torch.float64, device=model.tokens.weight.device)
    for microbatches in islice(stream, min(eval_steps, stream.facts.num_steps)):
        for batch in microbatches:
            total[0] += batch_cross_entropy(model, batch, dtype)
            total[1] += batch.num_targets
    sum_over_ranks([total])
    return float(total[0] / total[1])


def identities_of(facts: StreamFacts, model_config: ModelConfig, config: TrainConfig) -> dict[str, Any]:
    """What must agree between a checkpoint and the run that resumes from it, by name."""
    return {
        "plan": facts.identity,
        "tokenizer_fingerprint": facts.tokenizer_fingerprint,
        "max_seq_len": facts.max_seq_len,
        "train_seed": config.seed,
        "dtype": config.dtype,
        **{f"model.{name}": value for name, value in asdict(model_config).items()},
    }


def _open_run(
    spec: Spec, model_config: ModelConfig, config: TrainConfig, checkpoint_dir: Path, validation: Spec | None
) -> Run:
    device = resolve_device(config.device)
    _check_world(spec)
    spec = replace(spec, device=str(device), vocab_size=model_config.vocab_size)
    stream = open_stream(spec)
    _check_fit(stream.facts, model_config)
    backend = config.attention_backend
    if backend == "auto":
        backend = choose_backend(device, DTYPES[config.dtype])
    generator = torch.Generator().manual_seed(derive_seed(config.seed, "model"))
    model = Model(model_config, generator, backend=backend)
    model.to(device, torch.float64 if config.dtype == "float64" else torch.float32)
    if validation is not None:
        validation = replace(
            validation,
            device=spec.device,
            vocab_size=spec.vocab_size,
            rank=spec.rank,
            world_size=spec.world_size,
            sampler_state=None,
        )
    return Run(
        config=config,
        validation_spec=validation,
        rank=spec.rank,
        identities=identities_of(stream.facts, model_config, config),
        checkpoint_dir=checkpoint_dir,
        model=model,
        optimizer=make_optimizer(model, config),
        generator=generator,
        stream=stream,
    )


def _resume(run: Run) -> int:
    """Put a run where its newest checkpoint left it; returns that step, 0 without one."""
    stored = load_newest(run.checkpoint_dir)
    if stored is None:
        return 0
    check_identities(stored, run.identities)
    if stored.step > run.config.steps:
        raise StateMismatch(
            f"{stored.path}: expected a checkpoint of at most {run.config.steps:,} steps, found one of"
            f" {stored.step:,}. Ask for more steps, or start a new run."
        )
    run.model.load_state_dict(stored.payload["model"])
    run.optimizer.load_state_dict(stored.payload["optimizer"])
    run.generator.set_state(stored.payload["generator"])
    run.stream.load_state_dict(stored.payload["stream"])
    run.losses = stored.payload["losses"].tolist()
    run.validation = [(int(step), float(loss)) for step, loss in stored.payload["validation"]]
    run.tokens = stored.payload["tokens"]
    run.checkpoint = stored.path
    return stored.step


def _save(run: Run) -> None:
    payload = {
        "model": run.model.state_dict(),
        "optimizer": run.optimizer.state_dict(),
        "generator": run.generator.get_state(),
        "stream": run.stream.state_dict(),
        "losses": torch.tensor(run.losses, dtype=torch.float64),
        "validation": [list(entry) for entry in run.validation],
        "tokens": run.tokens,
    }
    if run.rank == 0:
        save_checkpoint(
            run.checkpoint_dir, run.step, payload, identities=run.identities, keep_last=run.config.keep_last
        )
    if _is_distributed():
        distributed.barrier()
    run.checkpoint = checkpoint_path(run.checkpoint_dir, run.step)


def _train_steps(run: Run, on_progress: Callable[[Progress], None]) -> None:
    config, started, first_step, first_tokens = run.config, time.perf_counter(), run.step, run.tokens
    if run.step == 0:
        _validate(run)
    while run.step < config.steps:
        learning_rate = learning_rate_at(run.step, config)
        _train_step(run, learning_rate)
        is_due = {name: run.step == config.steps or run.step % getattr(config, name) == 0 for name in _EVERY}
        if is_due["eval_every"]:
            _validate(run)
        if is_due["checkpoint_every"]:
            _save(run)
        if is_due["progress_every"]:
            seconds = time.perf_counter() - started
            on_progress(
                Progress(
                    step=run.step,
                    steps=config.steps,
                    loss=run.losses[-1],
                    learning_rate=learning_rate,
                    validation_loss=run.validation[-1][1] if run.validation else None,
                    tokens=run.tokens,
                    tokens_per_second=(run.tokens - first_tokens) / seconds,
                    eta_seconds=seconds / (run.step - first_step) * (config.steps - run.step),
                )
            )


def _train_step(run: Run, learning_rate: float) -> None:
    microbatches = next(run.stream)
    loss = accumulate_gradients(run.model, microbatches, run.dtype).item()
    norm = clip_grad_norm_(run.model.parameters(), run.config.grad_clip).item()
    if not (math.isfinite(loss) and math.isfinite(norm)):
        raise RecipeError(
            f"step {run.step + 1:,}: expected a finite loss and gradient, found {loss} and {norm}. The checkpoints"
            " before it are sound; lower learning_rate, or lengthen warmup_steps."
        )
    for group in run.optimizer.param_groups:
        group["lr"] = learning_rate
    run.optimizer.step()
    run.optimizer.zero_grad()
    run.losses.append(loss)
    run.tokens += microbatches[0].step_targets


def _validate(run: Run) -> None:
    if run.validation_spec is not None:
        loss = evaluate(run.model, run.validation_spec, run.config.eval_steps, run.dtype)
        run.validation.append((run.step, loss))


def _gradients(model: Model) -> list[Tensor]:
    for parameter in model.parameters():
        if parameter.grad is None:  # a rank without packs in this step
            parameter.grad = torch.zeros_like(parameter)
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def _is_distributed() -> bool:
    return distributed.is_available() and distributed.is_initialized()


def _check_world(spec: Spec) -> None:
    found = (distributed.get_rank(), distributed.get_world_size()) if _is_distributed() else (0, 1)
    if found != (spec.rank, spec.world_size):
        raise RecipeError(
            f"ranks: the stream is for rank {spec.rank:,} of {spec.world_size:,}, torch.distributed says {found[0]:,}"
            f" of {found[1]:,}. Initialise torch.distributed with the same ranks, or stream for rank 0 of 1."
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


def _check(name: str, value: object, is_possible: bool, expected: str) -> None:
    if not is_possible:
        raise RecipeError(f"train.{name}: expected {expected}, found {value}.")
