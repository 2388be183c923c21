"""Event files: a run's numbers as TensorBoard reads them, while it runs.

In: progress, step by step, of rank 0. Out: files below a folder for `tensorboard --logdir`. The promise: the files of a
folder hold each step once; what an earlier try wrote of steps that are trained again is dropped. They hold times, so
they are no part of a sealed artifact. Cost: a few hundred bytes a step. tensorboard is imported when a file is written.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training_io.errors import RecipeError

if TYPE_CHECKING:
    from training_io.progress import Progress


class EventFiles:
    """Appends to a folder's event files; nothing is read or written before the first step comes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: Any = None
        self._validation: float | None = None

    def write(self, progress: "Progress") -> None:
        """Add a step's numbers, and make them visible; RecipeError where tensorboard is not installed."""
        scalars = scalars_of(progress)
        if progress.validation_loss == self._validation:  # no evaluation since the last step that was written
            scalars = {tag: value for tag, value in scalars.items() if not tag.startswith("validation")}
        self._validation = progress.validation_loss
        if self._writer is None:
            self._writer = _continued(self._folder, progress.step)
        self._writer.add_event(_event(progress.step, time.time(), scalars))
        self._writer.flush()

    def close(self) -> None:
        """Close the file, if one was opened."""
        if self._writer is not None:
            self._writer.close()


def scalars_of(progress: "Progress") -> dict[str, float]:
    """What is written of a step, by tag; what is not known is left out."""
    found = {
        "loss": progress.loss,
        "gradient_norm": progress.gradient_norm,
        "learning_rate": progress.learning_rate,
        "tokens_per_second": progress.tokens_per_second,
        "mfu": progress.mfu,
        "validation/loss": progress.validation_loss,
        **{f"validation/loss_of_{pool}": loss for pool, loss in progress.validation_by_pool.items()},
    }
    return {tag: value for tag, value in found.items() if value is not None}


def _continued(folder: Path, first_step: int) -> Any:
    """A writer of a new file that takes over what the folder's files hold of the steps before the first one."""
    try:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    except ModuleNotFoundError as error:
        raise RecipeError(
            f"event files: expected tensorboard beside torch, found {error}. Install the extra `train`, or give no"
            " folder for event files."
        ) from error
    earlier = _event_files(folder)
    kept = {event.step: event for event in _events(folder) if event.step < first_step}
    writer = EventFileWriter(str(folder))
    for _, event in sorted(kept.items()):
        writer.add_event(event)
    writer.flush()
    for path in earlier:
        path.unlink()
    return writer


def _event(step: int, wall_time: float, scalars: dict[str, float]) -> Any:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
    return Event(wall_time=wall_time, step=step, summary=Summary(value=values))


def _events(folder: Path) -> Iterator[Any]:
    """The steps in a folder's files; a file whose end was lost counts as far as it goes."""
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    for path in _event_files(folder):
        yield from (event for event in LegacyEventFileLoader(str(path)).Load() if event.HasField("summary"))


def _event_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("events.out.tfevents.*"))
