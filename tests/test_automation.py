"""How runs start: jobs by name, and by themselves one run a new listing, which redoes only what changed.

However a run was started, its tags say its recipe and the revision that it is about.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import dagster as dg
import pytest
import small_corpus
from small_corpus import Built

from pipeline_assets.automation import EVERYTHING, JOBS, everything, new_revision_sensor, nightly_schedule
from pipeline_assets.definitions import CHECKS, build_definitions, definitions
from pipeline_assets.pools import revision_of
from pipeline_assets.recipe_file import load_recipe
from pipeline_assets.references import PipelineResource
from pipeline_assets.stripes import units_in
from training_io.errors import SourceError

CHANGED_FILE = Path("beta") / "b_000.parquet"
CHANGED_ROW = 20  # neither it nor what replaces it is in the tokenizer sample
FLOW = ("raw_row_groups", "reference_sets", "minhash_signatures", "lsh_clusters", "tokenizer", "document_tokens")
FLOW += ("tokenizer_report", "split_documents", "token_shards", "packing_plan")

DEDUPLICATION = {"raw_row_groups", "reference_sets", "minhash_signatures", "lsh_clusters"}
PREPARATION = {"tokenizer", "document_tokens", "tokenizer_report", "split_documents", "token_shards", "packing_plan"}
PREPARATION |= {"packing_stats", "mixture_ledger", "handoff_package"}
JOB_ASSETS = {
    "everything": DEDUPLICATION | PREPARATION | {"varlen_training_run", "quality_report"},
    "dedup_only": DEDUPLICATION,
    "tokens_and_packs": PREPARATION,
    "train": {"varlen_training_run"},
    "report_only": {"quality_report"},
}
TAGS = ("corpusmill/recipe", "corpusmill/recipe_digest", "dataset_revision")


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A recipe over a corpus of its own, free to be changed."""
    small_corpus.write_corpus(tmp_path)
    return small_corpus.write_recipe(tmp_path)


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with small_corpus.short_instance() as instance:
        yield instance


def resource_over(recipe: Path) -> PipelineResource:
    return PipelineResource(recipe=str(recipe), home=str(recipe.parent / "home"))


def tick(recipe: Path, cursor: str | None) -> dg.SensorResult | dg.SkipReason:
    context = dg.build_sensor_context(cursor=cursor, resources={"pipeline": resource_over(recipe)})
    answer = new_revision_sensor(context)
    assert isinstance(answer, dg.SensorResult | dg.SkipReason)
    return answer


def change_one_file(recipe: Path) -> None:
    """Replace one document of one file by another."""
    rows = small_corpus.corpus_rows()["beta"]["b_000"]
    rows[CHANGED_ROW]["text"] = small_corpus.sentences(5_001)
    small_corpus.write_rows(recipe.parent / CHANGED_FILE, rows)


def revision(recipe: Path) -> str:
    return revision_of(resource_over(recipe).open())


def test_observing_gives_the_fingerprint_of_the_listing(corpus: Path, instance: dg.DagsterInstance) -> None:
    job = build_definitions(resource_over(corpus)).resolve_job_def(EVERYTHING)
    assert small_corpus.execute(job, instance, ["dataset_revision"]).success
    record = instance.get_latest_data_version_record(dg.AssetKey("dataset_revision"))
    assert record is not None
    assert record.asset_observation is not None
    assert record.asset_observation.tags["dagster/data_version"] == revision(corpus)
    before = revision(corpus)
    change_one_file(corpus)
    assert revision(corpus) != before


def test_a_new_revision_asks_for_one_run_and_a_seen_one_for_none(corpus: Path) -> None:
    first = tick(corpus, cursor=None)
    assert isinstance(first, dg.SensorResult)
    (request,) = first.run_requests or []
    assert request.run_key is not None
    assert revision(corpus) in request.run_key
    (observation,) = first.asset_events
    assert isinstance(observation, dg.AssetObservation)
    assert observation.asset_key == dg.AssetKey("dataset_revision")
    assert observation.tags["dagster/data_version"] == revision(corpus)
    second = tick(corpus, cursor=first.cursor)
    assert isinstance(second, dg.SkipReason)
    assert revision(corpus)[:12] in str(second.skip_message)


def test_a_listing_that_comes_back_asks_again(corpus: Path) -> None:
    path = corpus.parent / CHANGED_FILE
    before = path.read_bytes()
    cursor, keys, revisions = None, [], []
    for content in (before, None, before):
        if content is None:
            change_one_file(corpus)
        else:
            path.write_bytes(content)
        answer = tick(corpus, cursor)
        assert isinstance(answer, dg.SensorResult)
        cursor = answer.cursor
        keys += [request.run_key for request in answer.run_requests or []]
        revisions.append(revision(corpus))
    assert revisions[0] == revisions[2] != revisions[1]
    assert len(set(keys)) == 3  # Dagster starts no second run of one key


def test_a_new_time_stamp_alone_asks_for_nothing(corpus: Path) -> None:
    first = tick(corpus, cursor=None)
    assert isinstance(first, dg.SensorResult)
    path = corpus.parent / CHANGED_FILE
    stamp = path.stat().st_mtime_ns
    os.utime(path, ns=(stamp + 10**10, stamp + 10**10))
    assert path.stat().st_mtime_ns != stamp
    assert isinstance(tick(corpus, cursor=first.cursor), dg.SkipReason)


def test_a_source_that_cannot_be_read_fails_the_tick_with_the_reason(corpus: Path) -> None:
    path = corpus.parent / CHANGED_FILE
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(SourceError, match=r"b_000\.parquet: expected .* fetch it again"):
        tick(corpus, cursor=None)
    path.unlink()
    with pytest.raises(SourceError, match="pool beta: expected at least one file"):
        tick(corpus, cursor=None)


def test_the_requested_run_redoes_the_changed_file_alone(
    tmp_path_factory: pytest.TempPathFactory, corpus: Path, instance: dg.DagsterInstance
) -> None:
    built: Built = small_corpus.clean(tmp_path_factory.getbasetemp())
    home = small_corpus.copy_home(built, corpus.parent / "home").home
    seen = tick(corpus, cursor=None)
    assert isinstance(seen, dg.SensorResult)
    stage = small_corpus.open_stage(corpus, home)
    before = {unit.unit: unit for unit in units_in(stage, built.refs["raw_row_groups"])}
    change_one_file(corpus)
    answer = tick(corpus, cursor=seen.cursor)
    assert isinstance(answer, dg.SensorResult)
    (request,) = answer.run_requests or []
    assert isinstance(tick(corpus, cursor=answer.cursor), dg.SkipReason)

    job = build_definitions(resource_over(corpus)).resolve_job_def(EVERYTHING)
    assert new_revision_sensor.job_name == job.name
    result = small_corpus.execute(job, instance, FLOW, **request.tags)
    assert result.success, small_corpus.failures(result)

    refs = small_corpus.recorded(corpus, home)
    assert refs["reference_sets"].digest == built.refs["reference_sets"].digest  # or the tokenizer would be another
    changed = {name for name in before if name.startswith("beta")}
    for asset in ("raw_row_groups", "minhash_signatures", "document_tokens", "split_documents"):
        metadata = small_corpus.materialized_metadata(result)[asset]
        assert metadata["artifacts_built"] >= 1
        assert metadata["artifacts_reused"] >= len(before) - len(changed), asset
    after = {unit.unit: unit for unit in units_in(stage, refs["raw_row_groups"])}
    assert {name for name in before if after[name].identity != before[name].identity} == changed
    assert {name for name in before if after[name].digest != before[name].digest} < changed

    fresh = small_corpus.build(corpus, corpus.parent / "fresh", upto="packing_plan")
    assert {name: refs[name].identity for name in FLOW} == {name: fresh.refs[name].identity for name in FLOW}
    expected = small_corpus.artifact_files(fresh.home)
    found = small_corpus.artifact_files(home)
    assert {path: found.get(path) for path in expected} == expected


def test_nothing_starts_by_itself_until_it_is_turned_on() -> None:
    assert new_revision_sensor.default_status == dg.DefaultSensorStatus.STOPPED
    assert nightly_schedule.default_status == dg.DefaultScheduleStatus.STOPPED
    assert nightly_schedule.job_name == new_revision_sensor.job_name == everything.name == EVERYTHING


def test_every_asset_that_is_materialized_warns_of_a_missed_night_and_fails_after_a_week() -> None:
    graph = definitions.resolve_asset_graph()
    policies = {key.path[-1]: graph.get(key).freshness_policy for key in graph.get_all_asset_keys()}
    assert policies.pop("dataset_revision") is None
    assert policies.keys() == set(small_corpus.STAGES)
    assert set(policies.values()) == {
        dg.FreshnessPolicy.time_window(warn_window=timedelta(hours=36), fail_window=timedelta(days=8))
    }


@pytest.mark.parametrize("name", JOB_ASSETS)
def test_a_job_is_its_assets_with_all_of_their_checks(name: str) -> None:
    job = definitions.resolve_job_def(name)
    assert {key.path[-1] for key in job.asset_layer.executable_asset_keys} == JOB_ASSETS[name]
    keys = [key for check in CHECKS for key in check.check_keys]
    assert job.asset_layer.asset_graph.asset_check_keys == {
        key for key in keys if key.asset_key.path[-1] in JOB_ASSETS[name]
    }


def test_the_jobs_are_described_and_cover_the_flow() -> None:
    assert [job.name for job in JOBS] == list(JOB_ASSETS)
    assert JOB_ASSETS[EVERYTHING] == set(small_corpus.STAGES)
    for job in JOBS:
        assert job.description
        assert job.description.endswith(".")


def test_the_jobs_one_after_another_give_the_bytes_of_everything(clean: Built, tmp_path: Path) -> None:
    home = tmp_path / "home"
    resolved = build_definitions(PipelineResource(recipe=str(clean.recipe), home=str(home)))
    done: set[str] = set()
    with small_corpus.short_instance() as instance:
        for name in ("dedup_only", "tokens_and_packs", "train", "report_only"):
            job = resolved.resolve_job_def(name)
            result = job.execute_in_process(instance=instance, raise_on_error=False)
            assert result.success, small_corpus.failures(result)
            assert all(evaluation.passed for evaluation in small_corpus.evaluations(result).values())
            done |= JOB_ASSETS[name]
            others = JOB_ASSETS[EVERYTHING] - done
            assert small_corpus.artifact_files(home) == small_corpus.artifact_files(clean.home, leave_out=[*others])
    assert done == JOB_ASSETS[EVERYTHING]


def expected_tags(recipe: Path, revision: str) -> dict[str, str]:
    """What a run's tags are to say, the digest by the standard library alone."""
    values = load_recipe(str(recipe)).model_dump(mode="json")
    text = json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return dict(zip(TAGS, ("small", hashlib.sha256(text.encode()).hexdigest()[:12], revision[:12]), strict=True))


def tags_of(instance: dg.DagsterInstance, result: dg.ExecuteInProcessResult) -> dict[str, str]:
    assert result.success, small_corpus.failures(result)
    run = instance.get_run_by_id(result.run_id)
    assert run is not None
    return {name: value for name, value in run.tags.items() if name in TAGS}


def one_asset(name: str) -> Callable[[Built, dg.DagsterInstance], dg.ExecuteInProcessResult]:
    return lambda built, instance: small_corpus.materialize(built.recipe, built.home, name, instance=instance)


def one_check(built: Built, instance: dg.DagsterInstance) -> dg.ExecuteInProcessResult:
    return small_corpus.run_checks(built.recipe, built.home, "shards_end_every_document_once", instance=instance)


def run_of_the_schedule(built: Built, instance: dg.DagsterInstance) -> dg.ExecuteInProcessResult:
    context = dg.build_schedule_context(instance, scheduled_execution_time=datetime(2030, 1, 1, 3, tzinfo=UTC))
    (request,) = nightly_schedule.evaluate_tick(context).run_requests or []
    resource = PipelineResource(recipe=str(built.recipe), home=str(built.home))
    job = build_definitions(resource).resolve_job_def(nightly_schedule.job_name)
    return small_corpus.execute(job, instance, ["dataset_revision", *FLOW], **request.tags)


STARTS = {
    "the source alone": one_asset("dataset_revision"),
    "the rows alone": one_asset("raw_row_groups"),
    "a mapped asset alone": one_asset("token_shards"),
    "the report alone": one_asset("quality_report"),
    "a check alone": one_check,
    "the schedule": run_of_the_schedule,
}


@pytest.mark.parametrize("start", STARTS)
def test_a_run_is_tagged_with_recipe_and_revision_however_it_was_started(
    start: str, copy: Built, instance: dg.DagsterInstance
) -> None:
    revision = revision_of(PipelineResource(recipe=str(copy.recipe), home=str(copy.home)).open())
    assert tags_of(instance, STARTS[start](copy, instance)) == expected_tags(copy.recipe, revision)


def test_a_run_that_does_not_read_the_source_is_about_the_revision_of_its_inputs(
    corpus: Path, instance: dg.DagsterInstance
) -> None:
    home, before = corpus.parent / "home", revision(corpus)

    def run(*assets: str) -> dict[str, str]:
        return tags_of(instance, small_corpus.materialize(corpus, home, *assets, instance=instance))

    assert run("raw_row_groups", "reference_sets") == expected_tags(corpus, before)
    change_one_file(corpus)
    after = revision(corpus)
    assert after[:12] != before[:12]
    assert run("dataset_revision") == expected_tags(corpus, after)
    assert run("minhash_signatures") == expected_tags(corpus, before)
    assert run("raw_row_groups", "reference_sets") == expected_tags(corpus, after)
    assert run("minhash_signatures") == expected_tags(corpus, after)


def test_a_revision_that_a_run_was_given_yields_to_that_of_its_inputs(
    corpus: Path, instance: dg.DagsterInstance
) -> None:
    """A re-execution is given its parent's tags, and may read rows that were sealed since."""
    home = corpus.parent / "home"
    assert small_corpus.materialize(corpus, home, "raw_row_groups", "reference_sets", instance=instance).success
    job = build_definitions(resource_over(corpus)).resolve_job_def(EVERYTHING)
    given, expected = expected_tags(corpus, "0" * 64), expected_tags(corpus, revision(corpus))
    assert given != expected
    assert tags_of(instance, small_corpus.execute(job, instance, ["minhash_signatures"], **given)) == expected
    change_one_file(corpus)
    listed = expected_tags(corpus, revision(corpus))
    assert listed != expected
    assets = ["dataset_revision", "minhash_signatures"]  # over rows of the listing before
    assert tags_of(instance, small_corpus.execute(job, instance, assets, **given)) == listed


@pytest.mark.parametrize("name", ["train", "tokens_and_packs"])
def test_a_run_that_finds_no_input_says_which_recipe_it_was_of(
    name: str, corpus: Path, instance: dg.DagsterInstance
) -> None:
    job = build_definitions(resource_over(corpus)).resolve_job_def(name)
    result = job.execute_in_process(instance=instance, raise_on_error=False)
    assert not result.success
    run = instance.get_run_by_id(result.run_id)
    assert run is not None
    expected = expected_tags(corpus, "")
    assert {key: run.tags.get(key, "") for key in TAGS} == expected


def test_tags_that_a_run_was_given_yield_to_what_it_does(corpus: Path, instance: dg.DagsterInstance) -> None:
    """A re-execution is given its parent's tags, and may be of another recipe by then."""
    job = build_definitions(resource_over(corpus)).resolve_job_def(EVERYTHING)
    given = expected_tags(corpus, "0" * 64)
    small_corpus.write_recipe(corpus.parent, {"training.steps": 2, "training.warmup_steps": 0})
    expected = expected_tags(corpus, revision(corpus))
    assert [given[name] == expected[name] for name in TAGS] == [True, False, False]
    assert tags_of(instance, small_corpus.execute(job, instance, ["raw_row_groups"], **given)) == expected
