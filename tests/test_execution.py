"""What runs the steps: executors, homes that several processes open, retries, and how many steps run at once."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.synchronize import Barrier
from pathlib import Path

import dagster as dg
import pytest
import small_corpus

from pipeline_assets.ops import mapped_op, planning_op
from pipeline_assets.references import PipelineResource
from pipeline_assets.stripes import Stage, Task, tasks_of
from resources.artifact_store import ArtifactRef
from resources.execution import (
    INSTANCE_SETTINGS,
    PROCESS_TAG,
    PROFILE_VARIABLE,
    PROFILES,
    close_dead_runs,
    executor_of_profile,
    open_instance,
    prepare_instance,
    process_lock,
    threads_of_a_step,
)
from training_io.errors import FormatError, RecipeError, SourceError, StateMismatch


@pytest.mark.parametrize("profile", [None, "", *PROFILES])
def test_every_profile_has_its_executor_and_local_is_the_default(monkeypatch, profile):
    monkeypatch.delenv("CORPUSMILL_PROFILE", raising=False)
    if profile is not None:
        monkeypatch.setenv("CORPUSMILL_PROFILE", profile)
    executor = executor_of_profile()
    assert isinstance(executor, dg.ExecutorDefinition)
    assert executor.name == ("multiprocess" if profile == "processes" else "in_process")


def test_an_unknown_profile_is_refused_with_the_known_ones(monkeypatch):
    monkeypatch.setenv("CORPUSMILL_PROFILE", "cluster")
    with pytest.raises(RecipeError, match=r"CORPUSMILL_PROFILE: expected one of local, processes.*found 'cluster'"):
        executor_of_profile()


def test_a_step_has_all_cores_where_steps_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PROFILE_VARIABLE, "local")
    assert 1 <= threads_of_a_step() <= (os.cpu_count() or 1)
    monkeypatch.setenv(PROFILE_VARIABLE, "processes")
    assert threads_of_a_step() == 1
    monkeypatch.setenv(PROFILE_VARIABLE, "everywhere")
    with pytest.raises(RecipeError, match="expected one of local, processes, found 'everywhere'"):
        threads_of_a_step()


NUM_FIRST = 3
NUM_NEW_HOMES = 3


def open_first(homes: list[Path], starting: Barrier) -> None:
    for home in homes:
        starting.wait(60)
        instance_folder = prepare_instance(home)
        os.environ["DAGSTER_HOME"] = str(instance_folder)
        with open_instance(instance_folder) as instance:
            assert instance.get_runs_count() == 0


def test_processes_that_open_a_new_home_at_once_all_open_it(tmp_path: Path) -> None:
    homes = [tmp_path / str(number) for number in range(NUM_NEW_HOMES)]
    forking = multiprocessing.get_context("fork")
    starting = forking.Barrier(NUM_FIRST)
    processes = [forking.Process(target=open_first, args=(homes, starting)) for _ in range(NUM_FIRST)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0] * NUM_FIRST
    again = forking.Process(target=open_first, args=(homes, forking.Barrier(1)))
    again.start()
    again.join(120)
    assert again.exitcode == 0


TRIES = {OSError: 2, RuntimeError: 2, FormatError: 1, RecipeError: 1, SourceError: 1, StateMismatch: 1}
NUM_RUNS = 3  # at once, of which the pool lets two work
NUM_STEPS = 2  # of each run
SECONDS_FOR_ONE_MORE = 3  # in which it would come in, if it were let
MAX_SECONDS = 240


def fan_out(folder: Path, num_tasks: int, build: Callable[[Stage, Task], list[ArtifactRef]]) -> dg.JobDefinition:
    """A job of our planning step and so many of our mapped steps, on a recipe and a home in the folder."""

    def plan(stage: Stage) -> list[Task]:
        """One task a number."""
        return tasks_of(range(num_tasks), "number", max_tasks=num_tasks)

    plan_numbers, build_numbers = planning_op("numbers", plan), mapped_op("numbers", build)
    resource = PipelineResource(recipe=str(small_corpus.write_recipe(folder)), home=str(folder / "home"))

    @dg.job(resource_defs={"pipeline": resource}, executor_def=dg.in_process_executor)
    def numbers() -> None:
        plan_numbers().map(build_numbers)

    return numbers


def our_instance(folder: Path, monkeypatch: pytest.MonkeyPatch, before: str = "", after: str = "") -> Path:
    """The home of an instance with our settings, or with one of them changed; it is DAGSTER_HOME from now on."""
    home = prepare_instance(folder / "home")
    settings = (home / "dagster.yaml").read_text()
    assert settings == INSTANCE_SETTINGS
    assert not before or settings.count(before) == 1
    (home / "dagster.yaml").write_text(settings.replace(before, after) if before else settings)
    monkeypatch.setenv("DAGSTER_HOME", str(home))
    return home


def kinds_of(result: dg.ExecuteInProcessResult, kind: dg.DagsterEventType) -> int:
    return sum(event.event_type == kind for event in result.all_events)


@pytest.mark.parametrize("error", TRIES)
@pytest.mark.parametrize("num_failures", [1, 9])
def test_a_mapped_step_that_dies_is_tried_once_more_and_a_users_error_is_not(
    error: type[Exception], num_failures: int, tmp_path: Path
) -> None:
    tries = tmp_path / "tries"

    def build(stage: Stage, task: Task) -> list[ArtifactRef]:
        """Fail the first times."""
        with tries.open("a") as file:
            file.write("x")
        if tries.stat().st_size <= num_failures:
            raise error("the disk is gone")
        return []

    with small_corpus.short_instance() as instance:
        result = fan_out(tmp_path, 1, build).execute_in_process(instance=instance, raise_on_error=False)
    assert tries.stat().st_size == TRIES[error]
    assert kinds_of(result, dg.DagsterEventType.STEP_UP_FOR_RETRY) == TRIES[error] - 1
    assert result.success == (num_failures < TRIES[error])
    if not result.success and error is not RuntimeError:  # of what nobody foresaw the log has the traceback
        (described,) = small_corpus.failures(result).values()
        assert described.startswith(f"{error.__name__}: the disk is gone")


def fail(stage: Stage, task: Task) -> list[ArtifactRef]:
    """Fail as a wrong source does."""
    raise SourceError("no such file")


@dg.asset
def rows() -> None:
    """Nothing that a check could like."""


@dg.asset_check(asset=rows, blocking=True)
def rows_are_good() -> dg.AssetCheckResult:
    return dg.AssetCheckResult(passed=False)


def failing_jobs(folder: Path) -> dict[str, dg.JobDefinition]:
    definitions = dg.Definitions(assets=[rows], asset_checks=[rows_are_good])
    return {"step": fan_out(folder, 1, fail), "check": definitions.resolve_implicit_global_asset_job_def()}


@pytest.mark.parametrize("what", ["step", "check"])
@pytest.mark.parametrize("is_retried", [False, True])
def test_a_run_is_not_started_again_for_a_failed_step_or_check(
    what: str, is_retried: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = "retry_on_asset_or_op_failure: "
    changed = (f"{setting}false", f"{setting}true") if is_retried else ("", "")  # so that it is this setting
    home = our_instance(tmp_path, monkeypatch, *changed)
    with open_instance(home) as instance:
        result = failing_jobs(tmp_path)[what].execute_in_process(instance=instance, raise_on_error=False)
        assert not result.success
        run = instance.get_run_by_id(result.run_id)
        assert run is not None
        assert run.tags["dagster/will_retry"] == str(is_retried).lower()


def execute_and_be_killed(folder: Path, home: Path) -> None:
    def build(stage: Stage, task: Task) -> list[ArtifactRef]:
        """Die as a process dies that the kernel ends."""
        os.kill(os.getpid(), signal.SIGKILL)
        return []

    with open_instance(home) as instance, process_lock(home) as process:
        fan_out(folder, 1, build).execute_in_process(instance=instance, tags={PROCESS_TAG: process})


def test_a_run_whose_process_was_killed_is_one_to_start_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = our_instance(tmp_path, monkeypatch)
    process = multiprocessing.get_context("fork").Process(target=execute_and_be_killed, args=(tmp_path, home))
    process.start()
    process.join(MAX_SECONDS)
    assert process.exitcode == -signal.SIGKILL
    with open_instance(home) as instance:
        (run,) = instance.get_runs()
        assert run.status == dg.DagsterRunStatus.STARTED
        close_dead_runs(instance, home)
        (run,) = instance.get_runs()
        assert run.status == dg.DagsterRunStatus.FAILURE
        assert run.tags["dagster/will_retry"] == "true"


def write_line(journal: Path, line: str) -> None:
    with journal.open("a") as file:
        file.write(f"{line}\n")


def most_at_once(journal: Path) -> int:
    """The most steps that were inside at one time, by a journal of who came in and who was about to go out."""
    inside, most = 0, 0
    for line in journal.read_text().split():
        inside += 1 if line == "in" else -1
        most = max(most, inside)
    return most


def run_numbers(folder: Path, home: Path, journal: Path, limit: int) -> None:
    """One run whose steps stay inside until `limit` were, and then for a while, to see whether one more comes in."""

    def build(stage: Stage, task: Task) -> list[ArtifactRef]:
        """Come in, wait for others, go out."""
        write_line(journal, "in")
        started = time.monotonic()
        while most_at_once(journal) < limit:
            assert time.monotonic() - started < MAX_SECONDS
            time.sleep(0.02)
        reached = time.monotonic()
        while most_at_once(journal) < NUM_RUNS and time.monotonic() - reached < SECONDS_FOR_ONE_MORE:
            time.sleep(0.02)
        write_line(journal, "out")
        return []

    with open_instance(home) as instance:
        assert fan_out(folder, NUM_STEPS, build).execute_in_process(instance=instance).success


@pytest.mark.parametrize("limit", [2, 3])
def test_no_more_steps_are_in_the_pool_at_once_than_its_limit_over_all_runs(
    limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = "default_limit: "
    changed = ("", "") if limit == 2 else (f"{setting}2", f"{setting}{limit}")  # so that it is this setting
    home, journal = our_instance(tmp_path, monkeypatch, *changed), tmp_path / "journal"
    journal.touch()
    folders = [tmp_path / str(number) for number in range(NUM_RUNS)]
    forking = multiprocessing.get_context("fork")
    processes = [forking.Process(target=run_numbers, args=(folder, home, journal, limit)) for folder in folders]
    for folder, process in zip(folders, processes, strict=True):
        folder.mkdir()
        process.start()
    for process in processes:
        process.join(2 * MAX_SECONDS)
    assert [process.exitcode for process in processes] == [0] * NUM_RUNS
    assert sorted(journal.read_text().split()) == ["in"] * NUM_RUNS * NUM_STEPS + ["out"] * NUM_RUNS * NUM_STEPS
    assert most_at_once(journal) == limit
