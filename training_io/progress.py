"""What a run came to: while it is under way, when it ends, and what its checkpoints keep of it.

Plain numbers. Losses are in nats per target, times in seconds; whatever depends on how fast a machine is is kept apart
from what follows from data and settings.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Positions:
    """What the steps' positions were, summed over microbatches and ranks.

    The loss is over body + eos. What the model computed is body + eos + overlap + padding; slack is the packs' room
    that no segment fills, which nobody computes unless a constant shape asks for it: then it is counted as padding too.
    """

    body: int = 0  # targets that are not EOS
    eos: int = 0  # targets that are
    overlap: int = 0  # inputs that repeat the segment before theirs, untrained
    slack: int = 0
    padding: int = 0  # computed positions without a token of a document

    def __add__(self, other: "Positions") -> "Positions":
        return Positions(**{name: value + getattr(other, name) for name, value in asdict(self).items()})


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """One evaluation behind a step: its loss, and that of each pool that has a target in the set."""

    step: int
    loss: float
    by_pool: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where a run is; losses in nats per target, times in seconds.

    tokens_per_second and mfu are of the steps since the progress before, without evaluation and checkpoints.
    """

    step: int
    steps: int
    loss: float
    gradient_norm: float  # before clipping
    learning_rate: float
    validation_loss: float | None  # of the last evaluation, however long ago
    evaluations: tuple[Evaluated, ...]  # since the progress before, oldest first
    tokens: int
    positions: Positions  # of the whole run so far
    tokens_per_second: float
    mfu: float | None  # share of the device's peak arithmetic; None where that is not known
    eta_seconds: float | None  # None behind the first step of a call, which also compiles


def progress_line(progress: Progress) -> str:
    """Where a run is, as its log says it; positions are those of all steps so far."""
    positions = progress.positions
    utilisation = "" if progress.mfu is None else f", MFU {progress.mfu:.1%}"
    left = "" if progress.eta_seconds is None else f", {progress.eta_seconds:.0f} s left"
    validation = "" if progress.validation_loss is None else f", validation {progress.validation_loss:.3f}"
    return (
        f"step {progress.step:,} of {progress.steps:,}: loss {progress.loss:.3f}{validation},"
        f" gradient {progress.gradient_norm:.2f}, {progress.tokens_per_second:,.0f} tokens/s{utilisation}"
        f"{left}; loss over {positions.body + positions.eos:,} ="
        f" {positions.body:,} body + {positions.eos:,} EOS, overlap {positions.overlap:,}, slack"
        f" {positions.slack:,}, padding {positions.padding:,}"
    )


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """What a run came to.

    All but `seconds` covers the whole run: also what came before a resume, and before a branch.
    """

    steps: int  # done
    resumed_from: int  # the step of the checkpoint it went on from, also of another run's; 0 without one
    losses: tuple[float, ...]  # one a step
    gradient_norms: tuple[float, ...]  # one a step, before clipping
    validation: tuple[tuple[int, float], ...]  # (steps done, loss)
    validation_by_pool: Mapping[str, tuple[tuple[int, float], ...]]  # likewise, by pool
    tokens_per_second: tuple[tuple[int, float], ...]  # (steps done, tokens a second), one a progress
    tokens: int  # targets trained on, over all steps
    positions: Positions
    seconds: float  # of this call
    seconds_in_all: float
    device_hours: Mapping[str, float]  # by kind of device (cpu, cuda), of all ranks together
    num_parameters: int
    device: str
    backend: str
    checkpoint: Path
    is_stopped: bool  # by a signal, before its last step
    signal: int | None  # SIGTERM or SIGINT that came meanwhile and that nobody else has heard of
    branched_from: Mapping[str, Any] | None  # plan, step and sha256 of the checkpoint it began from


@dataclass(kw_only=True)
class Past:
    """What the steps so far came to. All of it is a checkpoint's, and follows from data and settings."""

    losses: list[float] = field(default_factory=list)
    gradient_norms: list[float] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)
    validation_by_pool: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    tokens: int = 0
    positions: Positions = Positions()
    digest: str = ""  # of what the steps read, see training_io.branching
    branched_from: Mapping[str, Any] | None = None

    @property
    def step(self) -> int:
        """Steps done."""
        return len(self.losses)


def evaluations_behind(past: Past, step: int) -> tuple[Evaluated, ...]:
    """The evaluations of later steps than this one, oldest first."""
    by_pool = {pool: dict(points) for pool, points in past.validation_by_pool.items()}
    return tuple(
        Evaluated(step=at, loss=loss, by_pool={pool: found[at] for pool, found in by_pool.items() if at in found})
        for at, loss in past.validation
        if at > step
    )


@dataclass(kw_only=True)
class Times:
    """What the steps so far took. It differs from run to run, so it lies beside the checkpoints and not in them."""

    seconds: float = 0.0
    device_seconds: dict[str, float] = field(default_factory=dict)  # by kind of device, of all ranks together
    tokens_per_second: list[tuple[int, float]] = field(default_factory=list)


@dataclass(kw_only=True)
class Pace:
    """Work since the last progress."""

    tokens: int = 0
    flops: int = 0
    seconds: float = 0.0

    def mfu(self, peak: float | None, world_size: int) -> float | None:
        """Share of what the ranks' devices could have done; their peak is in operations a second, None if unknown."""
        return None if peak is None else self.flops / (self.seconds * peak * world_size)
