"""A mixture from the recipe to the trained run, and what its page and its checks say."""

import json

import pytest
import small_corpus
from small_corpus import Built, evaluations, materialized_metadata, write_corpus, write_recipe

from asset_checks.headroom import tokens_suffice_for_the_training_steps
from asset_checks.ledger import every_window_keeps_its_quotas
from pipeline_assets.recipe_file import load_recipe
from training_io.errors import RecipeError
from training_io.plan import load_plan

STAGES = [
    {"name": "base", "tokens": 9_000, "shares": {"alpha": 70, "beta": 30}},
    {"name": "more_beta", "tokens": 6_000, "shares": {"alpha": "1/3", "beta": 0.5}},
]


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixed")
    write_corpus(folder)
    recipe = write_recipe(folder, {"mixture": {"stages": STAGES}})
    result = small_corpus.materialize(recipe, folder / "home")
    refs = small_corpus.recorded(recipe, folder / "home")
    return Built(recipe=recipe, home=folder / "home", refs=refs, result=result)


def test_everything_runs_and_every_check_passes(mixed):
    assert mixed.result.success
    found = evaluations(mixed.result)
    assert found.keys() >= {"every_window_keeps_its_quotas", "ledger_is_what_the_plan_reads"}
    assert {name for name, one in found.items() if not one.passed} <= {
        "validation_loss_falls",
        "tokens_suffice_for_the_training_steps",  # three steps of sixty
    }
    quotas = found["every_window_keeps_its_quotas"].metadata
    plan = load_plan(mixed.folder("packing_plan"))
    assert 0 < quotas["base/largest_error_tokens"].value < plan.capacity
    assert "packs in 2 stages" in quotas["found"].value


def test_the_page_shows_the_ledger(mixed):
    page = materialized_metadata(mixed.result)["mixture_ledger"]
    assert [record.data["stage"] for record in page["ledger"].records] == ["base"] * 2 + ["more_beta"] * 2
    assert "data:image/png" in page["cumulative_tokens"]
    assert page["stages"] == 2
    assert page["tokens"] >= 15_000
    assert page["dagster/row_count"] == 4
    assert page["shares"] == (
        "Shares are relative, not percent: in more_beta alpha 1/3 of 0.833333 (40.0%), beta 0.5 of 0.833333 (60.0%)."
    )


def test_the_plan_trains_on_what_the_mixture_says(mixed):
    plan = load_plan(mixed.folder("packing_plan"))
    base, more = plan.stages
    assert base.quotas == {"alpha": 6_300, "beta": 2_700}
    assert more.first_token >= 9_000
    assert sum(more.quotas.values()) == 15_000 - more.first_token
    assert more.quotas["beta"] == pytest.approx(sum(more.quotas.values()) * 3 / 5, abs=1)
    validation = load_plan(mixed.folder("packing_plan"), "validation")
    assert validation.stages == ()


def test_the_package_says_what_each_stage_reads(mixed):
    package = json.loads((mixed.folder("handoff_package") / "package.json").read_bytes())
    assert [stage["name"] for stage in package["mixture"]["stages"]] == ["base", "more_beta"]
    assert {row["pool"] for row in package["mixture"]["ledger"]} == {"alpha", "beta"}


def test_headroom_of_a_mixture_counts_passes_of_each_pool(mixed):
    verdict = tokens_suffice_for_the_training_steps(mixed.stage, mixed.refs["packing_plan"])
    assert verdict.examples[0] == {"violation": "stage more_beta begins behind the last step of training"}
    assert verdict.num_violations == 1
    assert "alpha 0." in verdict.found
    stage = small_corpus.open_stage(
        write_recipe(mixed.recipe.parent, {"mixture": {"stages": STAGES}, "training.steps": 60}, "whole.yaml"),
        mixed.home,
        is_judging=True,
    )
    verdict = tokens_suffice_for_the_training_steps(stage, mixed.refs["packing_plan"])
    assert verdict.num_violations == 0
    plan = load_plan(mixed.folder("packing_plan"))
    assert {row["pool"] for row in verdict.examples} == set(plan.index.pool_names)


def test_a_plan_of_another_mixture_than_the_recipes_is_found(mixed):
    swapped = [{**STAGES[0], "shares": {"alpha": 30, "beta": 70}}, STAGES[1]]
    for stages, message in [
        ([], "expected the recipe's stages, none, found ['base', 'more_beta']"),
        (swapped, "stage base: expected about 2,700 tokens of alpha, found 6,300"),
        ([{**STAGES[0], "tokens": 9_500}, STAGES[1]], "stage base: expected quotas of 9,500 tokens"),
    ]:
        changes = {"mixture": {"stages": stages}} if stages else {}
        recipe = write_recipe(mixed.recipe.parent, changes, "another.yaml")
        verdict = every_window_keeps_its_quotas(
            small_corpus.open_stage(recipe, mixed.home, is_judging=True), mixed.refs["packing_plan"]
        )
        assert any(example["violation"].startswith(message) for example in verdict.examples)


def test_a_pool_that_is_read_very_often_is_warned_of(mixed):
    stages = [{"name": "often", "tokens": 2_000_000, "shares": {"alpha": 1, "beta": 9}}]
    recipe = write_recipe(mixed.recipe.parent, {"mixture": {"stages": stages}, "training.steps": 7_000}, "often.yaml")
    assert not small_corpus.failures(small_corpus.materialize(recipe, mixed.home, "packing_plan"))
    stage = small_corpus.open_stage(recipe, mixed.home, is_judging=True)
    plan = small_corpus.recorded(recipe, mixed.home)["packing_plan"]
    assert "pool beta is read" in str(tokens_suffice_for_the_training_steps(stage, plan).examples)


def test_headroom_warns_when_training_outruns_the_mixture(mixed, tmp_path):
    recipe = write_recipe(mixed.recipe.parent, {"mixture": {"stages": STAGES}, "training.steps": 999}, "longer.yaml")
    stage = small_corpus.open_stage(recipe, mixed.home, is_judging=True)
    verdict = tokens_suffice_for_the_training_steps(stage, mixed.refs["packing_plan"])
    assert verdict.num_violations > 0
    steps = load_plan(mixed.folder("packing_plan")).num_steps
    assert verdict.found.startswith(f"{steps:,} steps of a mixture for 999 of training")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mixture": {"stages": []}}, "mixture.stages"),
        ({"mixture": {"stages": [STAGES[0], STAGES[0]]}}, "expected each stage's name once"),
        ({"mixture": {"stages": [{**STAGES[0], "tokens": 0}]}}, "mixture.stages.0.tokens"),
        ({"mixture": {"stages": [{**STAGES[0], "shares": {}}]}}, "mixture.stages.0.shares"),
        (
            {"mixture": {"stages": [{**STAGES[0], "shares": {"gamma": 1}}]}},
            "the pools alpha, beta, found some of gamma (in base);",
        ),
        ({"mixture": {"stages": [{**STAGES[0], "shares": {"alpha": "much"}}]}}, "found 'much'"),
        ({"mixture": {"stages": [{**STAGES[0], "shares": {"alpha": -1}}]}}, "expected 0 or more, found -1"),
        ({"mixture": {"stages": [{**STAGES[0], "shares": {"alpha": 0}}]}}, "at least one above zero"),
        ({"mixture": {"stages": [{**STAGES[0], "shares": {"alpha": float("nan")}}]}}, "found 'NaN'"),
        ({"mixture": {"stages": [{**STAGES[0], "shares": {"alpha": True}}]}}, "mixture.stages.0.shares.alpha"),
        ({"mixture": {"stages": [{**STAGES[0], "shares": {"alpha:15": None}}]}}, "such as `web: 80`, found 'alpha:15'"),
        ({"mixture": {"stages": [{**STAGES[0], "shares": {"alpha": 20, 5: None}}]}}, "is written with a point"),
        ({"mixture": {"stages": [STAGES[0]]}, **small_corpus.WINDOWS}, "expected training.layout packs"),
    ],
)
def test_a_mixture_that_cannot_be_is_refused(tmp_path, changes, message):
    path = write_recipe(tmp_path, changes)
    with pytest.raises(RecipeError) as refused:
        load_recipe(str(path))
    assert message in str(refused.value)


def test_a_stage_that_is_over_before_it_begins_is_refused_when_planned(mixed, tmp_path):
    stages = [{**STAGES[0], "tokens": 10}, {**STAGES[1], "tokens": 10}]
    recipe = write_recipe(mixed.recipe.parent, {"mixture": {"stages": stages}}, "short.yaml")
    result = small_corpus.materialize(recipe, mixed.home, "packing_plan")
    (refusal,) = small_corpus.failures(result).values()
    assert "mixture stage more_beta: expected tokens left for it" in refusal
