"""Event files: a run's numbers as TensorBoard reads them, while it runs.

In: progress, step by step, of rank 0. Out: files below a folder for `tensorboard --logdir`. The promise: the files of a
folder hold each step once, and each evaluation at its own step; what an earlier try wrote of steps that are trained
again is dropped. They hold times, so they are no part of a sealed artifact. Cost: a few hundred bytes a step.
tensorboard is imported when they are asked for.
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training_io.errors import RecipeError

if TYPE_CHECKING:
    from training_io.progress import Evaluated, Progress

Key = tuple[int, bool]  # a step, and whether it is of its evaluation
_VALIDATION = "validation"


class EventFiles:
    """Appends to a folder's event files; nothing is read or written before the first step comes.

    RecipeError where tensorboard is not installed: before a run has trained what it cannot write.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ModuleNotFoundError as error:
            raise RecipeError(
                f"event files: expected tensorboard beside torch, found {error}. `pip install tensorboard` (the extra"
                " `train` has it), or give no --events and no folder for event files."
            ) from error
        self._folder = folder
        self._open_writer = EventFileWriter
        self._writer: Any = None

    def write(self, progress: "Progress") -> None:
        """Add the numbers of a step and of the evaluations since the last one, and make them visible."""
        events = events_of(progress, time.time())
        if self._writer is None:
            self._writer = _continued(self._folder, self._open_writer, progress.step, {_key(event) for event in events})
        for event in events:
            self._writer.add_event(event)
        self._writer.flush()

    def close(self) -> None:
        """Close the file, if one was opened."""
        if self._writer is not None:
            self._writer.close()


def events_of(progress: "Progress", wall_time: float) -> list[Any]:
    """An event for each evaluation since the last progress, at its own step, and one for the step itself."""
    evaluations = [_event(evaluated.step, wall_time, losses_of(evaluated)) for evaluated in progress.evaluations]
    return [*evaluations, _event(progress.step, wall_time, scalars_of(progress))]


def losses_of(evaluated: "Evaluated") -> dict[str, float]:
    """What is written of an evaluation, by tag."""
    by_pool = {f"{_VALIDATION}/loss_of_{pool}": loss for pool, loss in evaluated.by_pool.items()}
    return {f"{_VALIDATION}/loss": evaluated.loss, **by_pool}


def scalars_of(progress: "Progress") -> dict[str, float]:
    """What is written of a step, by tag; what is not known is left out."""
    found = {
        "loss": progress.loss,
        "gradient_norm": progress.gradient_norm,
        "learning_rate": progress.learning_rate,
        "tokens_per_second": progress.tokens_per_second,
        "mfu": progress.mfu,
    }
    return {tag: value for tag, value in found.items() if value is not None}


def _continued(folder: Path, open_writer: Callable[[str], Any], first_step: int, rewritten: set[Key]) -> Any:
    """A writer of a new file that takes over what the folder's files hold of the steps before the first one, except
    what is written again: a run that goes on behind an evaluation may tell of it only now.
    """
    earlier = _event_files(folder)
    kept = {_key(event): event for event in _events(folder) if event.step < first_step and _key(event) not in rewritten}
    writer = open_writer(str(folder))
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


def _key(event: Any) -> Key:
    """What an event is about."""
    return event.step, all(value.tag.startswith(_VALIDATION) for value in event.summary.value)


def _events(folder: Path) -> Iterator[Any]:
    """The steps in a folder's files; a file whose end was lost counts as far as it goes."""
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    for path in _event_files(folder):
        yield from (event for event in LegacyEventFileLoader(str(path)).Load() if event.HasField("summary"))


def _event_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("events.out.tfevents.*"))
