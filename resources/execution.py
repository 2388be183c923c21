"""What runs the steps, chosen by one setting: `CORPUSMILL_PROFILE`.

`local` runs every step in the run's own process, and the kernels use the cores by themselves. `processes` runs each
step in a process of its own, forked from a server that has the code loaded. Of Dagster's own, with no step under way,
the one costs 0.015 s a step, the other 0.94 s (`benchmarks/run.py --only ui`, two cores): hence `local` is the default.
"""

import contextlib
import fcntl
import logging
import os
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import dagster as dg

from resources.artifact_store import locked, replace_file
from training_io.errors import RecipeError

PROFILE_VARIABLE = "CORPUSMILL_PROFILE"
PROFILES = ("local", "processes")


def executor_of_profile() -> dg.ExecutorDefinition:
    """The executor of the profile in force; RecipeError for an unknown name."""
    if profile() == "local":
        return dg.in_process_executor
    start = {"forkserver": {"preload_modules": ["pipeline_assets.definitions"]}}
    return dg.multiprocess_executor.configured({"start_method": start})


def profile() -> str:
    """The profile in force; RecipeError for an unknown name."""
    name = os.environ.get(PROFILE_VARIABLE) or PROFILES[0]
    if name not in PROFILES:
        raise RecipeError(
            f"{PROFILE_VARIABLE}: expected one of {', '.join(PROFILES)}, found {name!r}. Set it to one of them."
        )
    return name


def threads_of_a_step() -> int:
    """All usable cores where steps take turns in one process, one where several run side by side.

    No result depends on it.
    """
    if profile() == "processes":
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


INSTANCE_FOLDER = "dagster"
LOCKS_FOLDER = "processes"
INSTANCE_SETTINGS = """\
# Written by corpusmill; yours to change.
telemetry: {enabled: false}
nux: {enabled: false}
concurrency: {pools: {granularity: op, default_limit: 2}}
# A killed run gives its places in the pool back.
run_monitoring: {enabled: true, free_slots_after_run_end_seconds: 30}
# Crashed runs are started again; failed steps and failed checks are not.
run_retries: {enabled: true, max_retries: 2, retry_on_asset_or_op_failure: false}
"""


def prepare_instance(home: Path) -> Path:
    """Dagster's own home below the artifacts' root, with its settings; an existing file is left as it is."""
    folder = home / INSTANCE_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    settings = folder / "dagster.yaml"
    if not settings.exists():
        replace_file(settings, INSTANCE_SETTINGS)
    return folder


@contextlib.contextmanager
def open_instance(instance_folder: Path) -> Iterator[dg.DagsterInstance]:
    """Dagster's instance of DAGSTER_HOME. On a new home its databases are made by one process at a time."""
    with contextlib.ExitStack() as stack:
        with locked(instance_folder):  # opening makes the first of them, using it the others
            instance = stack.enter_context(dg.DagsterInstance.get())
            instance.get_runs_count()
            instance.event_log_storage.get_concurrency_run_ids()
            instance.all_instigator_state()
        yield instance


PROCESS_TAG = "corpusmill/process"
"""Tag of a run that the command line executes: the name of the lock file that its process holds."""


@contextlib.contextmanager
def process_lock(instance_folder: Path) -> Iterator[str]:
    """Hold a lock file while this process lives, however it ends, and give its name."""
    folder = instance_folder / LOCKS_FOLDER
    folder.mkdir(exist_ok=True)
    path = folder / f"{uuid.uuid4().hex}.lock"
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield path.name
        finally:
            path.unlink()


def close_dead_runs(instance: dg.DagsterInstance, instance_folder: Path) -> None:
    """Report command-line runs whose process is gone as failed, and give back the pool slots of runs that ended.

    A killed process leaves its run as started, with its slots taken: after two of them, every run would wait for ever.
    """
    under_way = dg.RunsFilter(statuses=[dg.DagsterRunStatus.STARTING, dg.DagsterRunStatus.STARTED])
    for run in instance.get_runs(filters=under_way):
        if PROCESS_TAG in run.tags and _is_released(instance_folder / LOCKS_FOLDER / run.tags[PROCESS_TAG]):
            instance.report_run_failed(run, "The process that executed this run is gone.")
    storage = instance.event_log_storage
    if not storage.supports_global_concurrency_limits:
        return
    for run_id in sorted(storage.get_concurrency_run_ids()):
        ended = instance.get_run_by_id(run_id)
        if ended is None or ended.is_finished:
            storage.free_concurrency_slots_for_run(run_id)


def _is_released(path: Path) -> bool:
    """Whether no process holds the lock file; one that nobody holds is removed."""
    try:
        with path.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
    except FileNotFoundError:
        return True
    except BlockingIOError:
        return False
    return True


@dg.logger(config_schema={}, description="Our own progress messages, one short line each.")
def progress_logger(context: dg.InitLoggerContext) -> logging.Logger:
    """Messages that stages write, without Dagster's own events."""
    handler = _Progress(sys.stdout)
    handler.setFormatter(_ShortLines())
    logger = logging.Logger("corpusmill", level=logging.INFO)
    logger.addHandler(handler)
    return logger


class _Progress(logging.StreamHandler):  # type: ignore[type-arg]
    """Lines that nobody can read any more are let go: how the command ends tells it, once."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's own name
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


class _ShortLines(logging.Formatter):
    """`12:30:01 message`, warnings and errors marked."""

    def format(self, record: logging.LogRecord) -> str:
        meta = getattr(record, "dagster_meta", None) or {}
        message = meta.get("orig_message") or record.getMessage()
        mark = "" if record.levelno < logging.WARNING else f"{record.levelname}: "
        return f"{time.strftime('%H:%M:%S', time.localtime(record.created))} {mark}{message}"
