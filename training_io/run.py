"""A run under way: what it consists of, what its checkpoints bind and hold, and how it goes on from one.

In: a run that was just opened. Out: the same run where its newest checkpoint left it, or another run's that it branches
from; and the checkpoints themselves. Promise: nothing that would change an update beyond rounding, nor what is
evaluated, differs from what a checkpoint was saved for, and a run that goes on has everything that the uninterrupted
one would have there. Device, attention backend, threads and ranks are not bound: they change how a sum is rounded.
"""

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from training_io.branching import check_branch, position_at
from training_io.checkpoint import (
    Checkpoint,
    check_identities,
    checkpoint_at,
    checkpoint_path,
    load_newest,
    read_times,
    save_checkpoint,
    write_times,
)
from training_io.errors import StateMismatch
from training_io.evaluation import open_evaluation
from training_io.model import Model, ModelConfig
from training_io.progress import Pace, Past, Positions, Times
from training_io.ranks import wait_for_ranks
from training_io.stream import BatchStream, StreamFacts, StreamSpec, WindowSpec
from training_io.train_config import DTYPES, TrainConfig, update_settings

Spec = StreamSpec | WindowSpec


@dataclass(kw_only=True)
class Run:
    """A run under way: what it was asked for, and what changes with every step."""

    config: TrainConfig
    validation_spec: Spec | None
    rank: int
    world_size: int
    identities: Mapping[str, Any]
    checkpoint_dir: Path
    model: Model
    module: nn.Module  # the model as the steps call it: compiled, and with summed gradients
    optimizer: torch.optim.AdamW
    generator: torch.Generator
    stream: BatchStream
    started: float
    past: Past = field(default_factory=Past)
    before: Times = field(default_factory=Times)
    pace: Pace = field(default_factory=Pace)
    tokens_per_second: list[tuple[int, float]] = field(default_factory=list)
    checkpoint: Path | None = None
    told_step: int = -1  # of the last progress; -1 before the first, since step 0 is evaluated too

    @property
    def step(self) -> int:
        """Steps done."""
        return self.past.step

    @property
    def dtype(self) -> torch.dtype:
        """What the forward pass computes in."""
        return DTYPES[self.config.dtype]

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.model.tokens.weight.device

    @property
    def times(self) -> Times:
        """All calls' times, this one's until now."""
        seconds = time.perf_counter() - self.started
        device_seconds = dict(self.before.device_seconds)
        kind = self.device.type
        device_seconds[kind] = device_seconds.get(kind, 0.0) + seconds * self.world_size
        return Times(
            seconds=self.before.seconds + seconds,
            device_seconds=device_seconds,
            tokens_per_second=self.before.tokens_per_second + self.tokens_per_second,
        )


def identities_of(
    facts: StreamFacts,
    model_config: ModelConfig,
    config: TrainConfig,
    validation: Spec | None = None,
    recipe_identity: str = "",
) -> dict[str, Any]:
    """What must agree between a checkpoint and the run that resumes from it, by name."""
    return {
        "plan": facts.identity,
        "tokenizer_fingerprint": facts.tokenizer_fingerprint,
        "token_dtype": facts.token_dtype,
        "eos_id": facts.eos_id,
        "max_seq_len": facts.max_seq_len,
        "capacity": facts.capacity,
        "overlap": facts.overlap,
        **update_settings(config),
        **_evaluated_set(validation, config),
        **{f"model.{name}": value for name, value in asdict(model_config).items()},
        **({"recipe": recipe_identity} if recipe_identity else {}),
    }


def _evaluated_set(validation: Spec | None, config: TrainConfig) -> dict[str, Any]:
    """What an evaluation reads; losses on two sets are not points of one curve."""
    if validation is None:
        return {"validation": None, "validation.split": None, "validation.eval_steps": None}
    return {
        "validation": open_evaluation(validation).facts.identity,
        "validation.split": validation.split,
        "validation.eval_steps": config.eval_steps,
    }


def resume(run: Run, branch_from: Path | None) -> int:
    """Put a run where its newest checkpoint left it, or the one it branches from; returns that step, 0 without one."""
    origin = None if branch_from is None else checkpoint_at(branch_from)
    stored = load_newest(run.checkpoint_dir)
    if stored is not None:
        _refuse_longer(stored, run.config)
        check_identities(stored, run.identities)
        _load(run, stored)
        run.stream.load_state_dict(stored.payload["stream"])
        run.checkpoint = stored.path
        if origin is not None and (run.past.branched_from or {}).get("sha256") != origin.sha256:
            raise StateMismatch(
                f"{stored.path}: expected a run that was branched from {origin.path}, found one from"
                f" {run.past.branched_from}. Resume without branching, or start in an empty folder."
            )
        return stored.step
    if origin is None:
        return 0
    _refuse_longer(origin, run.config)
    check_branch(origin, run.identities, run.stream.facts)
    _load(run, origin)
    run.stream.load_state_dict(position_at(run.stream, origin.step))
    run.past.branched_from = {"plan": origin.identities["plan"], "step": origin.step, "sha256": origin.sha256}
    return origin.step


def save(run: Run) -> None:
    """Write the checkpoint of the run's step, by rank 0; returns when every rank may read it."""
    past = asdict(run.past)
    payload = {
        "model": run.model.state_dict(),
        "optimizer": run.optimizer.state_dict(),
        "generator": run.generator.get_state(),
        "stream": run.stream.state_dict(),
        "past": past | {name: torch.tensor(past[name], dtype=torch.float64) for name in ("losses", "gradient_norms")},
    }
    path = checkpoint_path(run.checkpoint_dir, run.step)
    if run.rank == 0:
        save_checkpoint(
            run.checkpoint_dir, run.step, payload, identities=run.identities, keep_last=run.config.keep_last
        )
        write_times(path, asdict(run.times))  # last: a refused checkpoint's times would replace another run's
    wait_for_ranks()
    run.checkpoint = path


def _load(run: Run, stored: Checkpoint) -> None:
    """Weights, optimizer, generator, past and times; where the stream goes on is not a matter of the past alone."""
    run.model.load_state_dict(stored.payload["model"])
    run.optimizer.load_state_dict(stored.payload["optimizer"])
    run.generator.set_state(stored.payload["generator"])
    past = dict(stored.payload["past"])
    run.past = Past(
        **past
        | {
            "losses": past["losses"].tolist(),
            "gradient_norms": past["gradient_norms"].tolist(),
            "validation": _points(past["validation"]),
            "validation_by_pool": {pool: _points(points) for pool, points in past["validation_by_pool"].items()},
            "positions": Positions(**past["positions"]),
        }
    )
    times = read_times(stored.path)
    run.before = Times(**times | {"tokens_per_second": _points(times["tokens_per_second"])}) if times else Times()


def _refuse_longer(stored: Checkpoint, config: TrainConfig) -> None:
    if stored.step > config.steps:
        raise StateMismatch(
            f"{stored.path}: expected a checkpoint of at most {config.steps:,} steps, found one of"
            f" {stored.step:,}. Give the steps of its own run, or start a new run."
        )


def _points(points: list[list[float]]) -> list[tuple[int, float]]:
    return [(int(step), float(value)) for step, value in points]
