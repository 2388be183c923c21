"""The code location: what is defined, that it is described, and that it loads without torch."""

import subprocess
import sys
from pathlib import Path

import dagster as dg
import pytest
import small_corpus
from dagster._core.definitions.assets.graph.asset_graph import AssetGraph

from pipeline_assets.definitions import CHECKS, build_definitions, definitions
from pipeline_assets.flow import STAGES, UPSTREAM
from pipeline_assets.references import PipelineResource

OBSERVED = "dataset_revision"
BLOCKING = {
    "every_source_row_is_used_or_counted",
    "doc_ids_are_hashes_of_texts",
    "reference_texts_are_as_they_were_read",
    "documents_are_in_the_split_of_the_rule",
    "signatures_are_those_of_the_texts",
    "every_row_has_one_decision",
    "one_document_is_kept_per_cluster",
    "clusters_are_connected_components",
    "every_removal_has_evidence",
    "reference_texts_are_found",
    "every_kept_document_is_tokenized_once",
    "end_of_document_comes_once_at_the_end",
    "tokens_decode_to_the_text",
    "no_document_is_in_two_splits",
    "no_cluster_is_in_two_splits",
    "no_reference_text_is_in_validation",
    "every_kept_document_has_a_split_or_a_reason",
    "shards_match_their_headers_and_hashes",
    "shards_end_every_document_once",
    "shards_hold_every_document_once",
    "every_pair_comes_exactly_once",
    "no_pack_is_over_capacity",
    "batches_are_well_formed",
    "every_window_keeps_its_quotas",
    "ledger_is_what_the_plan_reads",
    "handoff_self_test_passes",
    "no_token_sees_another_document",
    "packed_equals_separate",
    "padding_changes_nothing",
    "positions_restart_with_each_document",
    "loss_knows_no_microbatches",
    "attention_backends_agree",
    "resumed_sampler_gives_the_next_step",
    "report_is_self_contained",
}
WARNING = {
    "s_curve_matches_formula",
    "removal_is_plausible",
    "bytes_a_token_is_in_the_recipe_range",
    "every_pool_is_in_every_split",
    "tokens_suffice_for_the_training_steps",
    "first_loss_is_that_of_guessing",
    "one_pack_can_be_overfitted",
    "validation_loss_falls",
}


@pytest.fixture(scope="module")
def graph() -> AssetGraph:
    return definitions.resolve_asset_graph()


def name_of(key: dg.AssetKey) -> str:
    (name,) = key.path
    return name


def test_definitions_load() -> None:
    dg.Definitions.validate_loadable(definitions)


def test_the_assets_are_those_of_the_stages(graph: AssetGraph) -> None:
    assert {name_of(key) for key in graph.materializable_asset_keys} == set(STAGES)
    assert {name_of(key) for key in graph.get_all_asset_keys()} == {*STAGES, OBSERVED}
    assert graph.get(dg.AssetKey(OBSERVED)).is_observable


@pytest.mark.parametrize("name", [*STAGES, OBSERVED])
def test_every_asset_is_described(name: str, graph: AssetGraph) -> None:
    node = graph.get(dg.AssetKey(name))
    assert node.group_name == "corpusmill"
    assert node.description
    assert node.description.endswith(".")
    assert not node.is_partitioned
    assert node.owners
    assert node.kinds
    assert node.tags["stage"] == ("source" if name == OBSERVED else STAGES[name])
    if name != OBSERVED:
        assert node.code_version
        assert "Promise: " in node.description or name == "packing_stats"


def test_upstream_in_the_recipe_is_the_graph(graph: AssetGraph) -> None:
    parents = {name: {name_of(key) for key in graph.get(dg.AssetKey(name)).parent_keys} for name in STAGES}
    assert parents["raw_row_groups"] == {OBSERVED}
    assert {name: parents[name] - {OBSERVED} for name in STAGES} == {name: set(UPSTREAM[name]) for name in STAGES}


def test_stages_are_in_the_order_of_the_flow() -> None:
    assert set(STAGES) == set(UPSTREAM)
    seen: set[str] = set()
    for name in STAGES:
        assert set(UPSTREAM[name]) <= seen, name
        seen.add(name)


def test_checks_are_described_and_on_assets() -> None:
    for check in CHECKS:
        for spec in check.check_specs:
            assert name_of(spec.asset_key) in STAGES
            assert spec.description
            assert spec.description.startswith(("Fails when ", "Warns when ")), spec.name
            assert spec.description.startswith("Fails") == spec.blocking, spec.name


def test_every_asset_that_holds_data_has_a_check() -> None:
    judged = {name_of(spec.asset_key) for check in CHECKS for spec in check.check_specs}
    assert judged == set(STAGES) - {"tokenizer", "packing_stats"}


def test_what_blocks_is_frozen() -> None:
    specs = [spec for check in CHECKS for spec in check.check_specs]
    assert {spec.name for spec in specs if spec.blocking} == BLOCKING
    assert {spec.name for spec in specs if not spec.blocking} == WARNING
    assert len(specs) == len(BLOCKING) + len(WARNING)


def test_job_sensor_and_schedule() -> None:
    repository = definitions.get_repository_def()
    jobs = {job for job in repository.job_names if not job.startswith("__")}
    assert jobs == {"everything", "dedup_only", "tokens_and_packs", "train", "report_only"}
    (sensor,) = repository.sensor_defs
    (schedule,) = repository.schedule_defs
    assert (sensor.name, schedule.name) == ("new_revision_sensor", "nightly_schedule")
    assert sensor.default_status == dg.DefaultSensorStatus.STOPPED
    assert schedule.default_status == dg.DefaultScheduleStatus.STOPPED
    assert sensor.description
    assert schedule.description


def test_resources_can_be_overridden(tmp_path: Path) -> None:
    recipe = small_corpus.write_recipe(tmp_path)
    resource = PipelineResource(recipe=str(recipe), home=str(tmp_path / "home"))
    overridden = build_definitions(resource)
    assert overridden.resources is not None
    pipeline = overridden.resources["pipeline"].open()
    assert pipeline.recipe.name == "small"
    assert pipeline.store.root == (tmp_path / "home").resolve()


def test_loading_imports_no_torch_and_no_plotting() -> None:
    program = (
        "import sys; import pipeline_assets.definitions;"
        "print(sorted({'torch', 'matplotlib', 'PIL', 'datasketch', 'pandas', 'jinja2'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=small_corpus.ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "[]"
