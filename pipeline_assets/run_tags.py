"""Tags by which the UI's list of runs is filtered: a run's recipe, and the revision of the source that it is about.

A run that lists the source is about what it lists. Another one is about the revision that the rows below its inputs
were read from: each time rows are sealed, the store keeps which revision they are of.
"""

from collections.abc import Mapping, Sequence

import dagster as dg

from pipeline_assets.recipe import Recipe, recipe_digest

RECIPE_TAG = "corpusmill/recipe"
RECIPE_DIGEST_TAG = "corpusmill/recipe_digest"
REVISION_TAG = "dataset_revision"
SHOWN_DIGITS = 12  # of a digest or a data version, where a person compares two


def recipe_tags(recipe: Recipe) -> dict[str, str]:
    """The recipe's name, and the first digits of its SHA-256: two recipes of one name differ in them."""
    return {RECIPE_TAG: recipe.name, RECIPE_DIGEST_TAG: recipe_digest(recipe)[:SHOWN_DIGITS]}


def revision_tag(revision: str) -> dict[str, str]:
    """The source's data version, shortened to what a person compares."""
    return {REVISION_TAG: revision[:SHOWN_DIGITS]}


def tags_of(instance: dg.DagsterInstance, run_id: str) -> Mapping[str, str]:
    """A run's tags as they are now, not as they were when it started."""
    run = instance.get_run_by_id(run_id)
    return run.tags if run is not None else {}


def has_steps_of(instance: dg.DagsterInstance, run_id: str, assets: Sequence[str]) -> bool:
    """Whether a run executes a step of one of these assets; a re-execution from failure leaves out what was done."""
    run = instance.get_run_by_id(run_id)
    if run is None or run.execution_plan_snapshot_id is None:
        return False
    steps = instance.get_execution_plan_snapshot(run.execution_plan_snapshot_id).step_keys_to_execute
    return any(step.partition(".")[0] in assets for step in steps)


def tag_run(instance: dg.DagsterInstance, run_id: str, tags: Mapping[str, str]) -> None:
    """Give a run these tags; nothing is written where it has them. Cost: one look at the run, about 2 ms."""
    if not tags.items() <= tags_of(instance, run_id).items():
        instance.add_run_tags(run_id, tags)
