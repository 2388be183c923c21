from pathlib import Path

import pytest
import yaml

from pipeline_assets.flow import UPSTREAM
from pipeline_assets.recipe_file import load_recipe, parse_recipe
from pipeline_assets.references import Pipeline
from resources.artifact_store import ArtifactStore
from training_io.errors import StateMismatch


def pipeline(root, **sections):
    values = load_recipe("sample").model_dump(mode="json")
    for name, value in sections.items():
        replaces = not isinstance(value, dict) or "kind" in value
        values[name] = value if replaces else {**values[name], **value}
    recipe = parse_recipe(yaml.safe_dump(values), where="test", folder=Path("/"))
    return Pipeline(store=ArtifactStore(root), recipe=recipe)


def artifact(mill, asset="packing_plan", number=0):
    return mill.store.materialize(
        asset=asset, inputs={"number": number}, parameters={}, version=1, write=lambda folder: {"number": number}
    )


def test_what_is_recorded_is_resolved(tmp_path):
    mill = pipeline(tmp_path)
    for number, asset in enumerate(UPSTREAM):
        ref = artifact(mill, asset, number)
        mill.record(ref, "run-a")
        assert mill.resolve(asset, ("run-a",)) == ref
        assert mill.resolve(asset) == ref
        assert pipeline(tmp_path).resolve(asset) == ref


def test_a_consumer_reads_its_own_runs_artifact_then_the_parents_then_the_latest(tmp_path):
    mill = pipeline(tmp_path)
    first, second, third = [artifact(mill, number=number) for number in range(3)]
    mill.record(first, "a")
    mill.record(second, "b")
    mill.record(third, "c")
    assert mill.resolve("packing_plan", ("a",)) == first
    assert mill.resolve("packing_plan", ("retry", "b")) == second
    assert mill.resolve("packing_plan", ("a", "b")) == first
    assert mill.resolve("packing_plan", ("elsewhere",)) == third
    assert mill.resolve("packing_plan") == third


def test_the_latest_is_the_latest_of_the_same_parameters(tmp_path):
    small, large = pipeline(tmp_path), pipeline(tmp_path, packs={"capacity": 1024})
    of_small, of_large = artifact(small, number=1), artifact(large, number=2)
    small.record(of_small, "a")
    large.record(of_large, "b")
    assert small.resolve("packing_plan") == of_small
    assert large.resolve("packing_plan") == of_large


def test_values_that_do_not_matter_to_an_asset_do_not_part_recipes(tmp_path):
    mill = pipeline(tmp_path)
    ref = artifact(mill, "token_shards")
    mill.record(ref, "a")
    other = pipeline(tmp_path, name="other", packs={"capacity": 1024, "batch_size": 2}, training={"steps": 11})
    assert other.resolve("token_shards") == ref


@pytest.mark.parametrize("run_ids", [(), ("a",)])
def test_another_recipes_artifact_is_refused_with_both_values(tmp_path, run_ids):
    mill = pipeline(tmp_path)
    mill.record(artifact(mill), "a")
    other = pipeline(tmp_path, dedup={"num_bands": 7, "rows_per_band": 16}, seed=1)
    with pytest.raises(StateMismatch) as caught:
        other.resolve("packing_plan", run_ids)
    message = str(caught.value)
    assert message.startswith("packing_plan: expected an artifact of this recipe, found one of another: ")
    for key in ("lsh_clusters.dedup.num_bands", "minhash_signatures.dedup.num_bands"):
        assert f"{key}: this recipe says 7, it was built with 14" in message
    for key in ("lsh_clusters.seed", "packing_plan.seed"):
        assert f"{key}: this recipe says 1, it was built with 1337" in message
    assert "rows_per_band" in message
    assert "ngram" not in message, "a value that is the same is not told"
    assert "training" not in message
    assert message.endswith(
        "Set CORPUSMILL_RECIPE to the recipe that it was built with, or materialize packing_plan with this one."
    )


def test_sources_of_equal_pools_in_other_folders_do_not_stand_for_each_other(tmp_path):
    here, there = (
        pipeline(tmp_path, source={"kind": "local", "pools": [{"name": "web", "path": path}]}, mixture=None)
        for path in ("/here", "/there")
    )
    of_here = artifact(here)
    here.record(of_here, "a")
    with pytest.raises(
        StateMismatch, match=r"source_places\.web: this recipe says '/there', it was built with '/here'"
    ):
        there.resolve("packing_plan")
    there.record(artifact(there, number=1), "b")
    assert here.resolve("packing_plan") == of_here
    assert list(there.recorded("packing_plan")) != list(here.recorded("packing_plan"))


S3 = {"kind": "s3", "bucket": "data", "prefix": "set", "endpoint": "https://s3.example"}
HUB = {"kind": "hub", "repository": "a/b", "path": "c", "revision": "0" * 40}
HTTPS = {"kind": "https", "urls": ["https://host/a.parquet"]}


@pytest.mark.parametrize(
    ("source", "change"),
    [
        (S3, {"endpoint": "https://elsewhere.example"}),
        (S3, {"bucket": "other"}),
        (S3, {"prefix": "other"}),
        (HUB, {"repository": "a/other"}),
        (HUB, {"path": "other"}),
        (HUB, {"local_path": "/copy"}),
        (HTTPS, {"urls": ["https://elsewhere/a.parquet"]}),
    ],
)
def test_sources_of_equal_pools_elsewhere_do_not_stand_for_each_other(tmp_path, source, change):
    here, there = (pipeline(tmp_path, source={**one, "pool": "web"}) for one in (source, {**source, **change}))
    of_here = artifact(here)
    here.record(of_here, "a")
    with pytest.raises(StateMismatch, match=r"source_places\.web: this recipe says '.*', it was built with '.*'"):
        there.resolve("packing_plan")
    assert list(there.recorded("packing_plan")) == []
    assert here.resolve("packing_plan") == of_here


def test_a_partial_copy_of_the_hubs_files_stands_for_the_hub(tmp_path):
    partial = {"local_path": "/copy", "local_copy": "partial"}
    here, there = (pipeline(tmp_path, source={**one, "pool": "web"}) for one in (HUB, {**HUB, **partial}))
    of_here = artifact(here)
    here.record(of_here, "a")
    assert there.resolve("packing_plan") == of_here


def test_without_any_artifact_it_says_what_to_materialize(tmp_path):
    mill = pipeline(tmp_path)
    mill.record(artifact(mill), "a")
    with pytest.raises(
        StateMismatch, match=r"token_shards: .*recipe 'sample' in .*found none\. Materialize token_shards first"
    ):
        mill.resolve("token_shards", ("a",))


def test_recording_leaves_no_temporary_files(tmp_path):
    mill = pipeline(tmp_path)
    for run in ("a", "b"):
        mill.record(artifact(mill), run)
    names = sorted(path.name for path in (tmp_path / "_references" / "packing_plan").iterdir())
    assert [name.split("-")[0].split(".")[0] for name in names] == ["latest", "latest", "run", "run"]
