"""The launchpad: every setting says what it is, within which limits, and what holds without it; a bad one is refused."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import small_corpus
from dagster._config import ConfigType, ConfigTypeKind, Field
from dagster._core.execution.api import create_execution_plan
from small_corpus import TRAINING, Built

from pipeline_assets.automation import JOBS
from pipeline_assets.definitions import build_definitions, definitions
from pipeline_assets.references import PipelineResource
from training_io import gpu_io_manager
from training_io.manifest import load_manifest

ALL_ASSETS = "__ASSET_JOB"  # what the button *Materialize all* launches
OURS = ("pipeline", "gpu_io_manager", TRAINING)  # the configurable things; all other settings are Dagster's own

# Each setting's default, and limits that its description must name.
SETTINGS = {
    "recipe": ("", ["sample", "fineweb-lab", "fineweb-edu", "mixture", "YAML", "CORPUSMILL_RECIPE"]),
    "home": ("", ["folder", "CORPUSMILL_HOME", ".corpusmill"]),
    "steps": (0, ["1 to 999,999,999", "training.steps"]),
    "learning_rate": (0.0, ["above 0", "below 1", "training.learning_rate"]),
    "device": ("auto", ["auto", "cpu", "cuda", "cuda:<number>"]),
    "dtype": ("auto", ["auto", "float32", "bfloat16"]),
    "prefetch_depth": (3, ["1 to 16"]),
}
OF_TRAINING = {"steps", "learning_rate", "device", "dtype", "prefetch_depth"}
IN_DESCRIPTION = {"": "Default: empty,", 0: "Default: 0,", 3: "Default: 3.", "auto": "Default: auto."}

REFUSED = [
    ("steps", -3, "steps: expected 1 to 999,999,999, or 0 for the recipe's, found -3. Correct steps"),
    ("steps", 10**9, "steps: expected 1 to 999,999,999, or 0 for the recipe's, found 1,000,000,000. Correct steps"),
    (
        "learning_rate",
        -0.5,
        "learning_rate: expected above 0 and below 1, or 0 for the recipe's, found -0.5. Correct",
    ),
    ("learning_rate", 1.5, "learning_rate: expected above 0 and below 1, or 0 for the recipe's, found 1.5. Correct"),
    ("learning_rate", float("nan"), "learning_rate: expected above 0 and below 1, or 0 for the recipe's, found nan."),
    (
        "learning_rate",
        1.0,
        "learning_rate: expected above 0 and below 1, or 0 for the recipe's, found 1.0.",
    ),
    (
        "learning_rate",
        True,
        "learning_rate: expected above 0 and below 1, or 0 for the recipe's, found 1.0. Correct",
    ),
    ("device", "gpu", "device: expected auto, cpu, cuda or cuda:<number>, found 'gpu'. Correct device"),
    (
        "dtype",
        "float16",
        "dtype: expected one of auto, float32, bfloat16, found 'float16'. Correct dtype",
    ),
    ("prefetch_depth", 17, "prefetch_depth: expected 1 to 16 steps, found 17. Correct prefetch_depth"),
]


def fields_below(config_type: ConfigType, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Field]]:
    """Every field of a configuration's schema with its path, through what is optional or a list."""
    if config_type.kind in (ConfigTypeKind.STRICT_SHAPE, ConfigTypeKind.PERMISSIVE_SHAPE, ConfigTypeKind.SELECTOR):
        for name, field in config_type.fields.items():  # type: ignore[attr-defined]
            yield (*path, name), field
            yield from fields_below(field.config_type, (*path, name))
    elif config_type.kind in (ConfigTypeKind.NONEABLE, ConfigTypeKind.ARRAY):
        yield from fields_below(config_type.inner_type, path)  # type: ignore[attr-defined]


def settings_of(name: str) -> dict[str, Field]:
    """A job's settings that are ours, by name: all of them where the job maps its configuration, as `train` does."""
    config_type = definitions.get_repository_def().get_job(name).run_config_schema.config_type
    found = list(fields_below(config_type))
    if not any(path == ("ops",) for path, _ in found):
        return {path[-1]: field for path, field in found}
    return {path[-1]: field for path, field in found if path[-2:-1] == ("config",) and path[-3] in OURS}


@pytest.mark.parametrize("job", [ALL_ASSETS, *(job.name for job in JOBS)])
def test_every_setting_says_what_it_is_with_limits_and_default(job: str) -> None:
    found = settings_of(job)
    expected = set(SETTINGS)
    if job == "train":
        expected -= {"recipe", "home"}  # it says what it trains with, and trains what the environment names
    elif job not in (ALL_ASSETS, "everything"):
        expected -= {"steps", "learning_rate"}
    assert found.keys() == expected
    for name, field in found.items():
        default, limits = SETTINGS[name]
        assert not field.is_required
        assert (type(field.default_value), field.default_value) == (type(default), default), name
        assert field.description, name
        assert [limit for limit in limits if limit not in field.description] == [], name
        assert IN_DESCRIPTION[default] in field.description, name


def over(built: Built) -> dg.Definitions:
    return build_definitions(PipelineResource(recipe=str(built.recipe), home=str(built.home)))


def in_words(name: str, value: Any) -> str:
    (words,) = [words for refused, other, words in REFUSED if refused == name and repr(other) == repr(value)]
    return words


@pytest.mark.parametrize(("name", "value", "words"), REFUSED)
def test_train_refuses_a_bad_value_before_there_is_a_run(name: str, value: Any, words: str, clean: Built) -> None:
    job = over(clean).resolve_job_def("train")
    with pytest.raises(dg.DagsterInvalidDefinitionError) as planned:
        create_execution_plan(job, run_config={name: value})
    with small_corpus.short_instance() as instance:
        with pytest.raises(dg.DagsterInvalidDefinitionError) as launched:
            job.execute_in_process(run_config={name: value}, instance=instance)
        assert instance.get_runs_count() == 0
    for refusal in (planned, launched):
        assert str(refusal.value).startswith(words)
        assert str(refusal.value).endswith("in the run's configuration.")
        assert "\n" not in str(refusal.value)
        assert refusal.value.__suppress_context__  # or Dagster shows the same sentence twice


def test_train_refuses_a_gpu_that_is_not_here_before_there_is_a_run(
    clean: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "0000:01:00.0").mkdir()
    monkeypatch.setattr(gpu_io_manager.ctypes, "CDLL", lambda name: None)  # a driver's library is found
    monkeypatch.setattr(gpu_io_manager, "GPUS_OF_THE_DRIVER", tmp_path)
    job = over(clean).resolve_job_def("train")
    with pytest.raises(dg.DagsterInvalidDefinitionError) as refused:
        create_execution_plan(job, run_config={"device": "cuda:7"})
    assert str(refused.value) == (
        "device: expected auto, cpu or a GPU of this machine, which has 1, counted from cuda:0, found 'cuda:7'."
        " Correct device in the run's configuration."
    )
    for device in ("cuda:0", "cuda", "auto", "cpu"):
        assert create_execution_plan(job, run_config={"device": device})


@pytest.mark.parametrize("name", ["steps", "prefetch_depth"])
def test_dagster_refuses_a_truth_value_for_a_count(name: str, clean: Built) -> None:
    with pytest.raises(dg.DagsterInvalidConfigError, match=f'path root:{name}. Value "True"'):
        create_execution_plan(over(clean).resolve_job_def("train"), run_config={name: True})


def test_all_bad_values_of_a_launch_are_named_at_once(clean: Built) -> None:
    with pytest.raises(dg.DagsterInvalidDefinitionError) as refused:
        create_execution_plan(
            over(clean).resolve_job_def("train"), {"steps": -5, "learning_rate": True, "dtype": "int8"}
        )
    words = ("steps: expected", "learning_rate: expected", "dtype: expected")
    assert [word for word in words if word not in str(refused.value)] == []


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, value, _ in REFUSED if name in ("steps", "device") or value is True]
)
def test_the_assets_own_configuration_fails_once_and_names_the_path_that_was_written(
    name: str, value: Any, copy: Built
) -> None:
    path = ("ops", TRAINING) if name in ("steps", "learning_rate") else ("resources", "gpu_io_manager")
    config: dict[str, Any] = {path[0]: {path[1]: {"config": {name: value}}}}
    job = over(copy).resolve_implicit_global_asset_job_def()
    with small_corpus.short_instance() as instance:
        result = job.execute_in_process(
            run_config=config, asset_selection=[dg.AssetKey(TRAINING)], instance=instance, raise_on_error=False
        )
    assert not result.success
    kinds = [event.event_type for event in result.all_events if event.step_key == TRAINING]
    assert kinds.count(dg.DagsterEventType.STEP_FAILURE) == 1
    assert dg.DagsterEventType.STEP_UP_FOR_RETRY not in kinds
    assert small_corpus.failures(result)[TRAINING].startswith(
        f"RecipeError: {'.'.join(path)}.config.{in_words(name, value)}"
    )


class TestTrain:
    def test_what_is_left_out_or_empty_is_the_recipes(self, clean: Built, copy: Built) -> None:
        job = over(copy).resolve_job_def("train")
        with small_corpus.short_instance() as instance:
            for choices in ({}, dict.fromkeys(OF_TRAINING)):
                result = job.execute_in_process(run_config=choices, instance=instance)
                metadata = small_corpus.materialized_metadata(result)[TRAINING]
                assert metadata["artifacts_reused"] == 1
                assert metadata["identity"] == clean.refs[TRAINING].identity

    def test_what_is_set_holds_for_this_run_alone(self, clean: Built, copy: Built) -> None:
        job = over(copy).resolve_job_def("train")
        choices = {"steps": 2, "learning_rate": 0.25, "device": "cpu", "dtype": "bfloat16", "prefetch_depth": 1}
        with small_corpus.short_instance() as instance:
            result = job.execute_in_process(run_config=choices, instance=instance, raise_on_error=False)
            folder = small_corpus.materialized_metadata(result)[TRAINING]["folder"]
            again = job.execute_in_process(run_config={}, instance=instance, raise_on_error=False)
        manifest = load_manifest(Path(folder))
        expected = {name: choices[name] for name in ("steps", "learning_rate", "device", "dtype")}
        assert {name: manifest.parameters[name] for name in expected} == expected
        assert manifest.counts["steps"] == 2
        assert manifest.identity != clean.refs[TRAINING].identity
        assert small_corpus.materialized_metadata(again)[TRAINING]["identity"] == clean.refs[TRAINING].identity
