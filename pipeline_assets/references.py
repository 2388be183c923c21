"""How assets find each other's artifacts: small references, by run and by the recipe's values that matter.

In: the reference that an asset's last step returns. Out: the same reference, for a consumer in the same run, in a
re-execution of that run, or later. The promise: a consumer gets the artifact of its own run, else the latest one that
was built with the same values of every parameter that matters to it, else a refusal that names both.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dagster as dg
from pydantic import Field, model_validator

from pipeline_assets.parameters import parameters_that_matter
from pipeline_assets.recipe import Recipe
from pipeline_assets.recipe_file import load_recipe
from pipeline_assets.recipes import BUILT_IN, DEFAULT_RECIPE
from pipeline_assets.run_tags import (
    REVISION_TAG,
    has_steps_of,
    is_known_to_have,
    recipe_tags,
    revision_tag,
    tag_run,
    tags_of,
)
from resources.artifact_store import ArtifactRef, ArtifactStore, replace_file
from resources.shapes import shown_value
from training_io.errors import CorpusmillError, FormatError, StateMismatch
from training_io.gpu_io_manager import without_empty
from training_io.hashing import identity_of
from training_io.home import LATEST, REFERENCES_FOLDER, home_folder

ROWS_ASSET = "raw_row_groups"
LISTING_ASSETS = ("dataset_revision", ROWS_ASSET)  # whose steps tag their run with what they list
MAX_DIFFERING, MAX_SHOWN = 8, 80  # of two recipes' values in a refusal
RECIPE_IN_WORDS = (
    f"What to build: the name of a built-in recipe ({', '.join(BUILT_IN)}) or the path of a YAML file. Default: empty,"
    f" which is CORPUSMILL_RECIPE, or {DEFAULT_RECIPE} where that is not set."
)
HOME_IN_WORDS = (
    "The folder where artifacts live; it is made where there is none. Default: empty, which is CORPUSMILL_HOME, or"
    " .corpusmill in the folder that Dagster was started in."
)


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """What every stage works with: one store and one recipe."""

    store: ArtifactStore
    recipe: Recipe

    def record(self, ref: ArtifactRef, run_id: str) -> None:
        """Remember an asset's artifact for its run, and as the latest of its parameters."""
        parameters = self._wanted(ref.asset)
        entry = json.dumps({"ref": ref.to_json(), "parameters": parameters}, sort_keys=True)
        for name in (f"run-{run_id}", f"latest-{identity_of(parameters)[:16]}", LATEST):
            replace_file(self._folder(ref.asset) / f"{name}.json", entry)

    def resolve(self, asset: str, run_ids: tuple[str, ...] = ()) -> ArtifactRef:
        """The artifact of `asset` that a consumer in one of these runs, else under this recipe, is to read."""
        wanted = self._wanted(asset)
        names = [f"run-{run_id}" for run_id in run_ids] + [f"latest-{identity_of(wanted)[:16]}", LATEST]
        for path in (self._folder(asset) / f"{name}.json" for name in names):
            if (entry := _read_entry(path)) is not None:
                ref, parameters = entry
                _refuse_other_parameters(asset, wanted, parameters)
                return ref
        raise StateMismatch(
            f"{asset}: expected an artifact built with recipe {self.recipe.name!r} in {self.store.root}, found none."
            f" Materialize {asset} first."
        )

    def recorded(self, asset: str) -> Iterator[ArtifactRef]:
        """What runs have recorded for `asset` with this recipe's parameters, the latest record first."""
        wanted = self._wanted(asset)
        paths = self._folder(asset).glob("*.json")
        for path in sorted(paths, key=lambda path: path.stat().st_mtime_ns, reverse=True):
            if (entry := _read_entry(path)) is not None and entry[1] == wanted:
                yield entry[0]

    def is_made_in(self, run_id: str, asset: str) -> bool:
        """Whether this very run built the asset's artifact, or verified it by its hashes and reused it."""
        return (self._folder(asset) / f"run-{run_id}.json").exists()

    def record_revision(self, rows: ArtifactRef, revision: str) -> None:
        """Remember which revision of the source the sealed rows are of; of several that gave them, the latest."""
        replace_file(self._revision_path(rows.digest), revision)

    def revision_of(self, ref: ArtifactRef) -> str | None:
        """The revision that the rows of an artifact were read from; None where it was not remembered.

        A report comes from no rows: it shows what is there, and is about the latest.
        """
        digests = {**ref.lineage, ref.asset: ref.digest}
        latest = (rows.digest for rows in self.recorded(ROWS_ASSET))
        path = self._revision_path(digests.get(ROWS_ASSET) or next(latest, "none"))
        return path.read_bytes().decode("utf-8", "backslashreplace") if path.is_file() else None

    def _revision_path(self, rows_digest: str) -> Path:
        return self._folder(REVISION_TAG) / f"{rows_digest}.txt"

    def _wanted(self, asset: str) -> dict[str, Any]:
        """What an artifact's record must say: parameters, and places, which tell apart two sources of equal names."""
        return {**parameters_that_matter(self.recipe, asset), "source_places": self.recipe.source_places}

    def _folder(self, asset: str) -> Path:
        return self.store.root / REFERENCES_FOLDER / asset


def _read_entry(path: Path) -> tuple[ArtifactRef, dict[str, Any]] | None:
    """A recorded reference and its parameters; a missing or damaged record is none: the next run writes it again."""
    try:
        entry = json.loads(path.read_bytes())
        return ArtifactRef.from_json(entry["ref"]), dict(entry["parameters"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError, FormatError):
        return None


def _refuse_other_parameters(asset: str, wanted: dict[str, Any], found: dict[str, Any]) -> None:
    if wanted == found:
        return
    differing = [
        f"{key}: this recipe says {shown_value(here, MAX_SHOWN)}, it was built with {shown_value(there, MAX_SHOWN)}"
        for key, here, there in _differing(wanted, found)
    ]
    more = f"; and {len(differing) - MAX_DIFFERING} more" if len(differing) > MAX_DIFFERING else ""
    raise StateMismatch(
        f"{asset}: expected an artifact of this recipe, found one of another:"
        f" {'; '.join(differing[:MAX_DIFFERING])}{more}. Set CORPUSMILL_RECIPE to the recipe that it was built with, or"
        f" materialize {asset} with this one."
    )


def _differing(wanted: Any, found: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Dotted key and both values of every leaf that is not the same."""
    if isinstance(wanted, dict) and isinstance(found, dict):
        for name in sorted(wanted.keys() | found.keys()):
            yield from _differing(wanted.get(name), found.get(name), f"{key}.{name}" if key else name)
    elif wanted != found:
        yield key, wanted, found


def run_ids_of(run: dg.DagsterRun) -> tuple[str, ...]:
    """A run, and those that it is a re-execution of: whose artifacts it reads first."""
    return tuple(run_id for run_id in (run.run_id, run.parent_run_id, run.root_run_id) if run_id)


def listed_revision(instance: dg.DagsterInstance, run: dg.DagsterRun) -> str | None:
    """The revision that a run found when it listed the source, or that the run found which it is a re-execution of."""
    found = (tags_of(instance, run_id).get(REVISION_TAG) for run_id in run_ids_of(run))
    return next((revision for revision in found if revision is not None), None)


def tag_revision(instance: dg.DagsterInstance, run_id: str, pipeline: Pipeline, ref: ArtifactRef) -> None:
    """Tag a run that does not list the source with the revision that its artifact comes from, where that is known.

    A tag that is there was given by the run itself, or by the run that it is a re-execution of; the latter yields to
    what the rows below the artifact say.
    """
    if (revision := pipeline.revision_of(ref)) is None:
        return
    wanted = revision_tag(revision)
    if is_known_to_have(run_id, wanted):  # as it is for all but a run's first artifact
        return
    found = tags_of(instance, run_id).get(REVISION_TAG)
    is_of_rows = ref.asset == ROWS_ASSET or ROWS_ASSET in ref.lineage
    if found in (None, wanted[REVISION_TAG]) or (is_of_rows and not has_steps_of(instance, run_id, LISTING_ASSETS)):
        tag_run(instance, run_id, wanted)


class PipelineResource(dg.ConfigurableResource):  # type: ignore[type-arg]
    """Which recipe is built and where."""

    recipe: str = Field(default="", description=RECIPE_IN_WORDS)
    home: str = Field(default="", description=HOME_IN_WORDS)
    _empty_is_default = model_validator(mode="before")(without_empty)

    def open(self) -> Pipeline:
        """The store and the recipe in force; RecipeError when the recipe is wrong."""
        return Pipeline(store=ArtifactStore(home_folder(self.home)), recipe=load_recipe(self.recipe or None))


class ReferenceIOManager(dg.ConfigurableIOManager):
    """Stores and finds the assets' references."""

    pipeline: dg.ResourceDependency[PipelineResource]

    def handle_output(self, context: dg.OutputContext, obj: ArtifactRef) -> None:
        """Record the artifact under the run and under the parameters that matter to it."""
        pipeline = self.pipeline.open()
        pipeline.record(obj, context.run_id)
        run, instance = context.step_context.dagster_run, context.step_context.instance
        if obj.asset == ROWS_ASSET and (revision := listed_revision(instance, run)) is not None:
            pipeline.record_revision(obj, revision)
        tag_revision(instance, context.run_id, pipeline, obj)

    def load_input(self, context: dg.InputContext) -> ArtifactRef:
        """The upstream asset's reference for this run; a failure when its artifact is unsealed or quarantined."""
        try:
            pipeline = self.pipeline.open()
            # A run whose input is missing ends here, before a step of it could say what it is of.
            tag_run(context.step_context.instance, context.step_context.run_id, recipe_tags(pipeline.recipe))
            ref = pipeline.resolve(context.asset_key.path[-1], run_ids_of(context.step_context.dagster_run))
            pipeline.store.open(ref)
        except CorpusmillError as error:
            raise dg.Failure(description=f"{type(error).__name__}: {error}", allow_retries=False) from error
        tag_revision(context.step_context.instance, context.step_context.run_id, pipeline, ref)
        return ref

    def find(self, context: dg.InputContext) -> tuple[ArtifactRef, Path]:
        """The upstream asset's reference and its folder; a failure as in `load_input`."""
        ref = self.load_input(context)
        return ref, self.pipeline.open().store.folder(ref)
