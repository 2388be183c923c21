"""How to train: the numbers of a run, and the learning rate that follows from them.

In: a recipe's or a command line's numbers. Out: a frozen, picklable configuration. Promise: impossible numbers are
refused by name before anything is opened.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch

from training_io.errors import RecipeError
from training_io.limits import MAX_STEPS, MAX_THREADS

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How to train; what changes an update beyond rounding binds a checkpoint (see update_settings).

    Device, attention backend, compilation and threads round sums otherwise and bind none.

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
    exact_attention: bool = False  # sdpa by plain arithmetic, without fused kernels
    compile: bool = False  # one graph for all microbatches, which need one shape
    num_threads: int | None = None  # of PyTorch on the CPU; None leaves its own choice

    def __post_init__(self) -> None:
        """RecipeError for impossible numbers."""
        for name in ("steps", "eval_every", "eval_steps", "checkpoint_every", "keep_last", "progress_every"):
            _check(name, getattr(self, name), 1 <= getattr(self, name) <= MAX_STEPS, f"1 to {MAX_STEPS:,}")
        _check("warmup_steps", self.warmup_steps, 0 <= self.warmup_steps <= self.steps, f"0 to steps = {self.steps:,}")
        _check("learning_rate", self.learning_rate, 0 < self.learning_rate < math.inf, "above 0 and finite")
        _check("min_lr_ratio", self.min_lr_ratio, 0 <= self.min_lr_ratio <= 1, "0 to 1")
        _check("weight_decay", self.weight_decay, self.weight_decay >= 0, "0 or more")
        _check("betas", self.betas, all(0 <= beta < 1 for beta in self.betas), "two numbers from 0, below 1")
        _check("grad_clip", self.grad_clip, self.grad_clip > 0, "above 0")
        _check("dtype", self.dtype, self.dtype in DTYPES, f"one of {', '.join(DTYPES)}")
        _check(
            "num_threads",
            self.num_threads,
            self.num_threads is None or 1 <= self.num_threads <= MAX_THREADS,
            f"1 to {MAX_THREADS:,}",
        )


def update_settings(config: TrainConfig) -> dict[str, Any]:
    """What decides the updates besides data and model, by name, as JSON has it: a resume needs all of it to agree."""
    names = ("steps", "learning_rate", "min_lr_ratio", "warmup_steps", "weight_decay", "grad_clip")
    return {
        "train_seed": config.seed,
        "dtype": config.dtype,
        **{f"train.{name}": getattr(config, name) for name in names},
        "train.betas": list(config.betas),
    }


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


def _check(name: str, value: object, is_possible: bool, expected: str) -> None:
    if not is_possible:
        raise RecipeError(f"train.{name}: expected {expected}, found {value}.")
