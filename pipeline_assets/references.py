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

from pipeline_assets.recipe import Recipe, load_recipe, parameters_that_matter
from resources.artifact_store import ArtifactRef, ArtifactStore, home_folder, replace_file
from training_io.errors import CorpusmillError, StateMismatch
from training_io.hashing import identity_of

REFERENCES_FOLDER = "_references"
MAX_DIFFERING, MAX_SHOWN = 8, 80  # of two recipes' values in a refusal


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """What every stage works with: one store and one recipe."""

    store: ArtifactStore
    recipe: Recipe

    def record(self, ref: ArtifactRef, run_id: str) -> None:
        """Remember an asset's artifact for its run, and as the latest of its parameters."""
        parameters = self._wanted(ref.asset)
        entry = json.dumps({"ref": ref.to_json(), "parameters": parameters}, sort_keys=True)
        for name in (f"run-{run_id}", f"latest-{identity_of(parameters)[:16]}", "latest"):
            replace_file(self._folder(ref.asset) / f"{name}.json", entry)

    def resolve(self, asset: str, run_ids: tuple[str, ...] = ()) -> ArtifactRef:
        """The artifact of `asset` that a consumer in one of these runs, else under this recipe, is to read."""
        wanted = self._wanted(asset)
        names = [f"run-{run_id}" for run_id in run_ids] + [f"latest-{identity_of(wanted)[:16]}", "latest"]
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
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _refuse_other_parameters(asset: str, wanted: dict[str, Any], found: dict[str, Any]) -> None:
    if wanted == found:
        return
    differing = [
        f"{key}: this recipe says {_short(here)}, it was built with {_short(there)}"
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


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= MAX_SHOWN else shown[:MAX_SHOWN] + "…"


def run_ids_of(run: dg.DagsterRun) -> tuple[str, ...]:
    """A run, and those that it is a re-execution of: whose artifacts it reads first."""
    return tuple(run_id for run_id in (run.run_id, run.parent_run_id, run.root_run_id) if run_id)


class PipelineResource(dg.ConfigurableResource):  # type: ignore[type-arg]
    """Which recipe is built and where: empty values mean CORPUSMILL_RECIPE and CORPUSMILL_HOME."""

    recipe: str = ""
    home: str = ""

    def open(self) -> Pipeline:
        """The store and the recipe in force; RecipeError when the recipe is wrong."""
        return Pipeline(store=ArtifactStore(home_folder(self.home)), recipe=load_recipe(self.recipe or None))


class ReferenceIOManager(dg.ConfigurableIOManager):
    """Stores and finds the assets' references."""

    pipeline: dg.ResourceDependency[PipelineResource]

    def handle_output(self, context: dg.OutputContext, obj: ArtifactRef) -> None:
        """Record the artifact under the run and under the parameters that matter to it."""
        self.pipeline.open().record(obj, context.run_id)

    def load_input(self, context: dg.InputContext) -> ArtifactRef:
        """The upstream asset's reference for this run; a failure when its artifact is unsealed or quarantined."""
        try:
            pipeline = self.pipeline.open()
            ref = pipeline.resolve(context.asset_key.path[-1], run_ids_of(context.step_context.dagster_run))
            pipeline.store.open(ref)
        except CorpusmillError as error:
            raise dg.Failure(description=f"{type(error).__name__}: {error}", allow_retries=False) from error
        return ref

    def find(self, context: dg.InputContext) -> tuple[ArtifactRef, Path]:
        """The upstream asset's reference and its folder; a failure as in `load_input`."""
        ref = self.load_input(context)
        return ref, self.pipeline.open().store.folder(ref)
