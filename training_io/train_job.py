"""One training run, wherever it is started from: the training command, torchrun's ranks, an asset.

In: a picklable description of the run. Out: what it came to; progress on the way, of rank 0. Promise: the same code
path on one rank, on torchrun's and on those that are started here; the error of a rank and a signal reach the caller;
no process is left behind. Cost: a process a rank, and the seconds that each takes to import torch.
"""

import os
import tempfile
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from multiprocessing import connection, get_context
from multiprocessing.process import BaseProcess
from pathlib import Path

from training_io.checkpoint import list_checkpoints
from training_io.errors import CorpusmillError
from training_io.event_files import EventFiles
from training_io.model import ModelConfig
from training_io.preflight import check_before_training
from training_io.progress import Progress, TrainResult
from training_io.ranks import Ranks, current_ranks, joined
from training_io.run import Spec
from training_io.stopping import Noted, deliver_again, noted_signals
from training_io.train import train
from training_io.train_config import TrainConfig

_SECONDS_BETWEEN_LOOKS = 0.2

OnProgress = Callable[[Progress], None]


@dataclass(frozen=True, kw_only=True)
class TrainJob:
    """One training run, as every process of it gets it; picklable."""

    spec: Spec
    validation: Spec | None
    model_config: ModelConfig
    config: TrainConfig
    checkpoint_dir: Path
    events_dir: Path | None = None  # where TensorBoard is to find event files
    branch_from: Path | None = None
    recipe_identity: str = ""


def run_job(job: TrainJob, on_progress: OnProgress = lambda progress: None) -> TrainResult:
    """Train as this rank of the process group, or alone without one; rank 0 tells of its progress.

    Before a run's first step rank 0 checks the laws of check_before_training, whose errors these are too.
    """
    rank, world_size = current_ranks()
    if rank == 0 and job.branch_from is None and not list_checkpoints(job.checkpoint_dir):
        check_before_training(job.spec, job.model_config)  # others wait in their first collective, and end with it
    events = None
    if rank == 0 and job.events_dir is not None:
        events = EventFiles(job.events_dir)

    def tell(progress: Progress) -> None:
        if rank == 0:
            on_progress(progress)
        if events is not None:
            events.write(progress)

    try:
        return train(
            replace(job.spec, rank=rank, world_size=world_size),
            job.model_config,
            job.config,
            job.checkpoint_dir,
            validation=job.validation,
            branch_from=job.branch_from,
            recipe_identity=job.recipe_identity,
            on_progress=tell,
        )
    finally:
        if events is not None:
            events.close()


def train_on_ranks(job: TrainJob, num_ranks: int, on_progress: OnProgress = lambda progress: None) -> TrainResult:
    """Train on so many ranks of this machine: in this process for one, else in a process each.

    A SIGTERM or SIGINT that came meanwhile is delivered again once its step is saved, so that it still does what the
    caller's process has it do. The error of a rank is raised here.
    """
    if num_ranks == 1:
        result = run_job(job, on_progress)
        if result.signal is not None:
            deliver_again(result.signal)
        return result
    with noted_signals() as noted:
        outcome = _run_processes(job, num_ranks, on_progress, noted)
    if noted.signal is not None:
        deliver_again(noted.signal)
    if isinstance(outcome, Exception):
        raise outcome
    return replace(outcome, signal=noted.signal)


def _run_processes(job: TrainJob, num_ranks: int, on_progress: OnProgress, noted: Noted) -> TrainResult | Exception:
    """What a process a rank came to, or the first error among them; whoever is left then is killed."""
    context = get_context("spawn")  # a fork would copy a CUDA context, which cannot be used
    readers: dict[connection.Connection, BaseProcess] = {}
    outcome: TrainResult | Exception | None = None
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(num_ranks):
                reader, writer = context.Pipe(duplex=False)
                ranks = Ranks(rank=rank, world_size=num_ranks, local_rank=rank)
                arguments = (job, ranks, (Path(folder) / "meeting").as_uri(), writer)
                process = context.Process(target=_run_rank, args=arguments, daemon=True)
                process.start()
                readers[reader] = process
                writer.close()  # the rank's own end is the last one: when it closes, the rank is gone
            outcome = _listen(readers, on_progress, noted)
        finally:
            for started in readers.values():
                if not isinstance(outcome, TrainResult):
                    started.kill()  # it may wait for a failed rank for ever
                started.join()
    return outcome


def _listen(
    readers: Mapping[connection.Connection, BaseProcess], on_progress: OnProgress, noted: Noted
) -> TrainResult | Exception:
    """Pass on progress and signals until every rank is gone; returns rank 0's result, or what went wrong first."""
    result: TrainResult | None = None
    told = None
    open_readers = dict(readers)
    while open_readers:
        if told is None and noted.signal is not None:
            told = noted.signal
            for process in readers.values():
                if process.is_alive() and process.pid is not None:
                    os.kill(process.pid, told)
        for reader in connection.wait(list(open_readers), timeout=_SECONDS_BETWEEN_LOOKS):
            assert isinstance(reader, connection.Connection)
            try:
                message = reader.recv()
            except EOFError:
                process = open_readers.pop(reader)
                process.join()
                if process.exitcode:
                    return RuntimeError(
                        f"ranks: expected every rank to end by itself, found that one ended with {process.exitcode}"
                        " and no word. Look for what ended it: the system's log, or its memory limit."
                    )
                continue
            if isinstance(message, Exception):
                return message
            if isinstance(message, Progress):
                on_progress(message)
            else:
                result = message
    assert result is not None
    return result


def _run_rank(job: TrainJob, ranks: Ranks, meeting: str, writer: connection.Connection) -> None:
    """One rank in a process of its own: sends progress, then its result (rank 0), or an error."""
    try:
        with joined(ranks, job.config.device, meeting) as device:
            own = replace(job, config=replace(job.config, device=device))
            try:
                result = run_job(own, writer.send)
            except Exception as error:  # noqa: BLE001 - it is raised where the ranks were started
                writer.send(_as_sent(error, ranks))  # before the others notice that this rank has left the group
                return
        if ranks.rank == 0:
            writer.send(result)
    except Exception as error:  # noqa: BLE001 - likewise
        writer.send(_as_sent(error, ranks))


def _as_sent(error: Exception, ranks: Ranks) -> Exception:
    """Our own errors as they are; others, which may not survive pickling, as text."""
    if isinstance(error, CorpusmillError):
        return error
    return RuntimeError(f"rank {ranks.rank:,} of {ranks.world_size:,}: {''.join(traceback.format_exception(error))}")
