import os

import dagster as dg
import pytest

from resources.execution import PROFILE_VARIABLE, PROFILES, executor_of_profile, threads_of_a_step
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
