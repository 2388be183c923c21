"""Revisions of a data set on the Hub: a pin stays, a branch moves, and what did not change is not done again."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow.parquet as pq
import pytest
import small_corpus
from file_server import COMMIT, REPOSITORY, FileServer, serving_files

from pipeline_assets.automation import EVERYTHING, new_revision_sensor
from pipeline_assets.definitions import build_definitions
from pipeline_assets.pools import revision_of
from pipeline_assets.references import PipelineResource
from pipeline_assets.stripes import units_in
from resources.artifact_store import ArtifactRef
from resources.row_group_source import FIRST_GUESS_BYTES

NEXT = "f" * 40
NEWER = f"a newer revision exists: {REPOSITORY} is pinned at {COMMIT}, and main is at {NEXT}"
SIGNED = ("raw_row_groups", "reference_sets", "minhash_signatures")
CHANGED_FILE = Path("beta") / "b_000.parquet"
CHANGED_ROW = 20  # neither it nor what replaces it is in the tokenizer sample
NUM_FILES = 14


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """The pools of the small corpus, to be served."""
    return small_corpus.write_corpus(tmp_path / "corpus")


@pytest.fixture
def server(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    with serving_files(corpus) as one:
        monkeypatch.setenv("HF_ENDPOINT", one.url)
        yield one


def recipe_at(corpus: Path, revision: str, **more: str) -> Path:
    """The small recipe with both pools in one data set at a revision."""
    pools = [
        {"kind": "hub", "repository": REPOSITORY, "revision": revision, "path": pool, "pool": pool, **more}
        for pool in ("alpha", "beta")
    ]
    return small_corpus.write_recipe(corpus, {"source": {"kind": "pools", "pools": pools}})


def resource_over(recipe: Path) -> PipelineResource:
    return PipelineResource(recipe=str(recipe), home=str(recipe.parent / "home"))


def tick(recipe: Path, cursor: str | None = None) -> dg.SensorResult | dg.SkipReason:
    answer = new_revision_sensor(
        dg.build_sensor_context(cursor=cursor, resources={"pipeline": resource_over(recipe)})  # type: ignore[arg-type]
    )
    assert isinstance(answer, dg.SensorResult | dg.SkipReason)
    return answer


def requested(answer: dg.SensorResult | dg.SkipReason) -> dg.SensorResult:
    """An answer that asks for exactly one run."""
    assert isinstance(answer, dg.SensorResult)
    assert len(answer.run_requests or []) == 1
    return answer


def told(answer: dg.SensorResult) -> dict[str, Any]:
    """What an answer's one observation says of commits."""
    values = observed(answer)
    return {name: values[name] for name in ("commits", "newer_revision")}


def observed(answer: dg.SensorResult) -> dict[str, Any]:
    """All that an answer's one observation of the source says."""
    (observation,) = answer.asset_events
    assert isinstance(observation, dg.AssetObservation)
    assert observation.asset_key == dg.AssetKey("dataset_revision")
    return {name: value.value for name, value in observation.metadata.items()}


def change_one_file(corpus: Path) -> None:
    rows = small_corpus.corpus_rows()["beta"]["b_000"]
    rows[CHANGED_ROW]["text"] = small_corpus.sentences(5_001)
    small_corpus.write_rows(corpus / CHANGED_FILE, rows)


def add_files(corpus: Path) -> None:
    """More files of other texts in the pool of the file that changes, NUM_FILES in all."""
    for number in range(NUM_FILES - len(files_of(corpus))):
        texts = [small_corpus.sentences(6_000 + 20 * number + row) for row in range(20)]
        rows = [{"text": text, "id": f"more-{number}-{row}"} for row, text in enumerate(texts)]
        small_corpus.write_rows(corpus / "beta" / f"more_{number:03d}.parquet", rows)


def files_of(corpus: Path) -> list[Path]:
    return [path for pool in ("alpha", "beta") for path in (corpus / pool).rglob("*.parquet")]


def bytes_of(corpus: Path) -> int:
    return sum(path.stat().st_size for path in files_of(corpus))


def units(built: small_corpus.Built, asset: str) -> dict[str, ArtifactRef]:
    return {unit.unit: unit for unit in units_in(built.stage, built.refs[asset])}


def test_a_pinned_source_tells_of_a_newer_revision_and_starts_nothing(server: FileServer, corpus: Path) -> None:
    recipe = recipe_at(corpus, COMMIT)
    first = requested(tick(recipe))
    assert told(first) == {"commits": f"alpha at {COMMIT[:12]}, beta at {COMMIT[:12]}", "newer_revision": "none"}
    unmoved = tick(recipe, first.cursor)
    assert isinstance(unmoved, dg.SkipReason)
    assert "newer" not in str(unmoved.skip_message)

    server.commits = {"main": NEXT, "kept": COMMIT}
    server.log.clear()
    moved = tick(recipe, first.cursor)
    assert isinstance(moved, dg.SensorResult)
    assert not moved.run_requests
    assert moved.skip_reason is not None
    assert NEWER in str(moved.skip_reason.skip_message)
    assert told(moved)["newer_revision"] == NEWER
    again = tick(recipe, moved.cursor)
    assert isinstance(again, dg.SkipReason)  # it was told once, and is the tick's reason from now on
    assert NEWER in str(again.skip_message)
    assert not [one for one in server.log if f"/tree/{NEXT}" in one.path or one.range]  # nothing of it is read


def test_what_listing_cost_is_told_apart_from_the_footers(server: FileServer, corpus: Path) -> None:
    recipe = recipe_at(corpus, "main")
    first = observed(requested(tick(recipe)))
    footers = [one for one in server.log if one.range or "/resolve/" in one.path]
    names = [one for one in server.log if one not in footers]
    assert len(footers) == 2 * 3  # each is sent on to the store
    assert [first[f"footer_{what}"] for what in ("requests", "bytes")] == [6, sum(one.sent for one in footers)]
    assert [first[f"listing_{what}"] for what in ("requests", "bytes")] == [len(names), sum(one.sent for one in names)]
    again = observed(requested(tick(recipe)))
    assert (again["listing_requests"], again["footer_requests"]) == (len(names), 0)  # which are known


def test_a_pin_whose_branch_cannot_be_looked_up_is_read_all_the_same(server: FileServer, corpus: Path) -> None:
    server.commits = {"kept": COMMIT}
    first = requested(tick(recipe_at(corpus, COMMIT, branch="gone")))
    sentence = told(first)["newer_revision"]
    assert sentence.startswith(f"whether {REPOSITORY} has a newer revision than {COMMIT} is not known: ")
    assert "gone" in sentence


def test_the_page_of_the_source_tells_of_a_newer_revision_when_the_run_has_read_it(
    server: FileServer, corpus: Path
) -> None:
    recipe = recipe_at(corpus, COMMIT)
    server.commits = {"main": NEXT, "kept": COMMIT}
    job = build_definitions(resource_over(recipe)).resolve_job_def(EVERYTHING)
    with small_corpus.short_instance() as instance:
        result = small_corpus.execute(job, instance, ["dataset_revision", "raw_row_groups"])
        assert result.success, small_corpus.failures(result)
        (record,) = instance.fetch_observations(dg.AssetKey("dataset_revision"), limit=1).records
        everything_observed = instance.fetch_observations(dg.AssetKey("dataset_revision"), limit=10).records
        size_before = bytes_of(corpus)
        change_one_file(corpus)
        again = small_corpus.execute(job, instance, ["raw_row_groups"])
        assert again.success, small_corpus.failures(again)
        runs = [instance.get_run_by_id(one.run_id) for one in (result, again)]
        (later,) = instance.fetch_observations(dg.AssetKey("dataset_revision"), limit=1).records
    assert record.asset_observation is not None
    assert record.asset_observation.metadata["newer_revision"].value == NEWER
    assert len(everything_observed) == 1
    assert later.asset_observation is not None  # a run that finds another source says so itself
    tag = "dagster/data_version"
    assert later.asset_observation.tags[tag] == revision_of(resource_over(recipe).open())
    assert later.asset_observation.tags[tag] != record.asset_observation.tags[tag]
    tables = [pq.ParquetFile(path).metadata for path in files_of(corpus)]
    counted = {
        "pools": "alpha, beta",
        "files": len(tables),
        "row_groups": sum(table.num_row_groups for table in tables),
        "rows": sum(table.num_rows for table in tables),
        "commits": f"alpha at {COMMIT[:12]}, beta at {COMMIT[:12]}",
    }
    sizes = [bytes_of(corpus), size_before]
    assert sizes[0] != sizes[1]
    for seen, size in zip((later.asset_observation, record.asset_observation), sizes, strict=True):
        said = {name: value.value for name, value in seen.metadata.items()}
        assert {name: said[name] for name in counted} == counted
        assert (said["fingerprint"], said["bytes"]) == (seen.tags[tag], size)
        assert said["listing_requests"] > 0
    costs = [seen.asset_observation.metadata["footer_requests"].value for seen in (record, later)]
    assert costs == [6, 2]  # of three files, and of the one that changed: each is sent on to the store
    assert later.asset_observation.metadata["newer_revision"].value == "not looked for by a run that reads rows"
    assert [run.tags["dataset_revision"] for run in runs if run] == [
        observation.tags[tag][:12] for observation in (record.asset_observation, later.asset_observation)
    ]


def test_a_pin_is_held_against_the_branch_that_it_came_from(server: FileServer, corpus: Path) -> None:
    server.commits = {"main": NEXT, "dev": COMMIT}
    assert told(requested(tick(recipe_at(corpus, COMMIT, branch="dev"))))["newer_revision"] == "none"
    assert told(requested(tick(recipe_at(corpus, COMMIT))))["newer_revision"] == NEWER


@pytest.mark.parametrize("name", ["main", "v1.0"])
def test_a_branch_or_a_tag_starts_one_run_a_commit_with_other_content(
    name: str, server: FileServer, corpus: Path
) -> None:
    recipe = recipe_at(corpus, name)
    server.commits = {name: COMMIT}
    first = requested(tick(recipe))
    assert told(first)["commits"] == f"alpha at {COMMIT[:12]}, beta at {COMMIT[:12]}"
    server.commits = {name: NEXT}
    assert isinstance(tick(recipe, first.cursor), dg.SkipReason)  # another commit with the same content
    change_one_file(corpus)
    server.commits = {name: "e" * 40}
    second = requested(tick(recipe, first.cursor))
    assert told(second) == {"commits": "alpha at eeeeeeeeeeee, beta at eeeeeeeeeeee", "newer_revision": "none"}
    runs = [request for answer in (first, second) for request in answer.run_requests or []]
    assert (
        len({request.run_key for request in runs}) == len({request.tags["dataset_revision"] for request in runs}) == 2
    )
    assert isinstance(tick(recipe, second.cursor), dg.SkipReason)


def test_a_renamed_revision_with_the_same_bytes_redoes_nothing(
    server: FileServer, corpus: Path, tmp_path: Path
) -> None:
    recipe, home = recipe_at(corpus, "main"), tmp_path / "home"
    small_corpus.build(recipe, home)
    before = small_corpus.artifact_files(home)
    server.commits = {"main": NEXT, "v2": NEXT}
    server.log.clear()
    renamed = recipe_at(corpus, "v2")
    after = small_corpus.build(renamed, home)
    assert not server.data()
    assert {ref.outcome for ref in after.refs.values()} == {"reused"}
    assert small_corpus.artifact_files(home) == before
    fresh = small_corpus.build(renamed, tmp_path / "fresh")
    assert {name: ref.digest for name, ref in after.refs.items()} == {
        name: ref.digest for name, ref in fresh.refs.items()
    }
    assert small_corpus.artifact_files(fresh.home) == before


def test_one_changed_file_of_fourteen_is_read_and_signed_again_alone(
    server: FileServer, corpus: Path, tmp_path: Path
) -> None:
    add_files(corpus)
    assert len(files_of(corpus)) == NUM_FILES
    recipe, home = recipe_at(corpus, "main"), tmp_path / "home"
    before = small_corpus.build(recipe, home)
    artifacts_before = set(home.glob("*/*/*"))
    change_one_file(corpus)
    server.commits = {"main": NEXT}
    server.log.clear()
    result = small_corpus.materialize(recipe, home, *SIGNED)
    assert result.success, small_corpus.failures(result)
    signed = small_corpus.Built(recipe=recipe, home=home, refs=small_corpus.recorded(recipe, home))
    rows, signatures = units(signed, "raw_row_groups"), units(signed, "minhash_signatures")
    of_file = {name for name, unit in rows.items() if Path(unit.counts["file"]).name == CHANGED_FILE.name}
    assert 0 < len(of_file) < len(rows)

    facts = [json.loads((signed.stage.store.folder(rows[name]) / "run.json").read_text()) for name in sorted(of_file)]
    ranges = [ends for fact in facts for group in fact["source"]["row_groups"] for ends in group["ranges"]]
    footer_bytes = min((corpus / CHANGED_FILE).stat().st_size, FIRST_GUESS_BYTES)
    assert {one.path.partition("?")[0].rpartition("/")[2] for one in server.data()} == {CHANGED_FILE.name}
    assert len(server.data()) == 2 * (1 + len(ranges))  # a footer and each range, each sent on to the store
    assert sum(one.sent for one in server.data()) == footer_bytes + sum(end - start for start, end in ranges)

    metadata = small_corpus.materialized_metadata(result)
    for asset, found in (("raw_row_groups", rows), ("minhash_signatures", signatures)):
        redone = {name for name, unit in found.items() if unit.identity != units(before, asset)[name].identity}
        assert redone == of_file if asset == "raw_row_groups" else set() < redone < of_file, asset
        written = {path.parent.name for path in set(home.glob(f"{asset}/*/*")) - artifacts_before}
        assert written - {"-", "scurve"} == redone, asset  # and what is of the asset as a whole
        assert metadata[asset]["artifacts_reused"] == len(found) - len(redone), asset

    after = small_corpus.build(recipe, home)
    fresh = small_corpus.build(recipe, tmp_path / "fresh")
    assert {name: ref.digest for name, ref in after.refs.items()} == {
        name: ref.digest for name, ref in fresh.refs.items()
    }
    assert after.refs["packing_plan"].digest != before.refs["packing_plan"].digest
    expected, found_files = small_corpus.artifact_files(fresh.home), small_corpus.artifact_files(home)
    assert {path: found_files.get(path) for path in expected} == expected
