import dagster as dg
import pytest

from resources.execution import PROFILES, executor_of_profile
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
