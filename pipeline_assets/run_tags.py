"""Tags by which the UI's list of runs is filtered: a run's recipe, and the revision of the source that it is about.

A run that lists the source is about what it lists. Another one is about the revision that the rows below its inputs
were read from: each time rows are sealed, the store keeps which revision they are of.
"""

from collections.abc import Mapping, Sequence

import dagster as dg

from pipeline_assets.parameters import recipe_digest
from pipeline_assets.recipe import Recipe

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


_KNOWN: dict[str, dict[str, str]] = {}
"""What this process has seen on a run or given it, of the last run alone: each step, check and input asks."""


def is_known_to_have(run_id: str, tags: Mapping[str, str]) -> bool:
    """Whether this process has seen these tags on a run: without a look at the instance, which costs about 10 ms."""
    return tags.items() <= _KNOWN.get(run_id, {}).items()


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
    """Give a run these tags; nothing is written where it has them."""
    if is_known_to_have(run_id, tags):
        return
    if not tags.items() <= tags_of(instance, run_id).items():
        instance.add_run_tags(run_id, tags)
    known = {**_KNOWN.get(run_id, {}), **tags}
    _KNOWN.clear()
    _KNOWN[run_id] = known
