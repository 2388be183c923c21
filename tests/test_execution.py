import multiprocessing
import os
from multiprocessing.synchronize import Barrier
from pathlib import Path

import dagster as dg
import pytest

from resources.execution import (
    PROFILE_VARIABLE,
    PROFILES,
    executor_of_profile,
    open_instance,
    prepare_instance,
    threads_of_a_step,
)
from training_io.errors import RecipeError


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
