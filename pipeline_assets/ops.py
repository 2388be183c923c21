"""How stage functions become Dagster's ops and assets: what they are called, what they depend on, what they tell.

In: plain functions of references. Out: definitions that call them with the run's stage. The promise: a user's error is
shown as its message, an asset's data version is its artifact's identity, and no asset mixes two versions of another.
What is long says in the log when it begins and ends.
"""

import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import dagster as dg

from pipeline_assets.event_size import PAGES_FOLDER, within_event
from pipeline_assets.flow import STAGES, UPSTREAM
from pipeline_assets.measures import numbers_metadata
from pipeline_assets.stripes import Item, Sealed, Stage, Task, stage_of, time_in_words
from resources.artifact_store import ArtifactRef
from training_io.errors import CorpusmillError
from training_io.home import home_folder

GROUP = "corpusmill"
STAGE_TAG = "stage"  # by which the graph can be filtered: tag:stage=clusters
OWNERS = ("team:data",)
POOL = "corpusmill"
"""The concurrency pool of all mapped steps, over all runs of an instance."""


def run_stage(context: Any, work: Callable[..., Any], *arguments: Any, **upstream: Any) -> Any:
    """Call a stage function; a user's error becomes a failure that is shown as its message and not retried."""
    try:
        return work(stage_of(context), *arguments, **upstream)
    except CorpusmillError as error:
        raise dg.Failure(description=f"{type(error).__name__}: {error}", allow_retries=False) from error
    except OSError as error:
        raise dg.Failure(
            description=f"{type(error).__name__}: {error}. Check the disk and the permissions of CORPUSMILL_HOME and"
            " of the source, and run again; what is done is reused."
        ) from error


def planning_op(asset: str, plan: Callable[..., list[Task]], after: Sequence[str] = ()) -> dg.OpDefinition:
    """The op that plans an asset's mapped steps; `after` names assets that it follows without reading them."""

    @dg.op(
        name=f"{asset}_plan",
        description=inspect.getdoc(plan),
        ins=_inputs(plan, skip=1) | {name: dg.In(dg.Nothing) for name in after},
        out=dg.DynamicOut(),
        required_resource_keys={"pipeline"},
    )
    def plan_steps(context: dg.OpExecutionContext, **upstream: ArtifactRef) -> Iterator[dg.DynamicOutput[Task]]:
        merged_lineage(upstream)
        tasks = _reported(context, f"{asset} plan", lambda: run_stage(context, plan, **upstream))
        for task in tasks:
            yield dg.DynamicOutput(task, mapping_key=task.key)

    return plan_steps


def mapped_op(asset: str, build: Callable[[Stage, Task], list[ArtifactRef]]) -> dg.OpDefinition:
    """The op that builds the units of one task. A step that dies is tried once more; a user's error is not."""

    @dg.op(
        name=f"{asset}_build",
        description=inspect.getdoc(build),
        required_resource_keys={"pipeline"},
        retry_policy=dg.RetryPolicy(max_retries=1),
        pool=POOL,
    )
    def build_units(context: dg.OpExecutionContext, task: Task) -> list[ArtifactRef]:
        refs: list[ArtifactRef] = run_stage(context, build, task)
        return refs

    return build_units


def sealing_op(asset: str, seal: Callable[..., Sealed]) -> dg.OpDefinition:
    """The op that seals an asset from the parts that its mapped steps built."""

    @dg.op(
        name=f"{asset}_seal",
        description=inspect.getdoc(seal),
        ins=_inputs(seal, skip=1),
        out=dg.Out(io_manager_key="references"),
        required_resource_keys={"pipeline"},
    )
    def seal_parts(context: dg.OpExecutionContext, **inputs: Any) -> ArtifactRef:
        steps = inputs.pop("parts")
        parts = [ref for refs in steps for ref in refs]
        lineage = merged_lineage(inputs)
        sealed: Sealed = _reported(context, f"{asset} seal", lambda: run_stage(context, seal, parts, **inputs))
        steps_and_units = {"mapped_steps": len(steps), "units": len(parts)}
        context.add_output_metadata(_shown(context, sealed) | steps_and_units)
        context.set_data_version(dg.AssetKey(asset), dg.DataVersion(sealed.ref.identity))
        return replace(sealed.ref, lineage=lineage)

    return seal_parts


def _reported(context: Any, name: str, work: Callable[[], Item]) -> Item:
    """What the work returns, with a line in the log when it begins and one when it has ended."""
    started = time.monotonic()
    context.log.info(f"{name}: begun")
    done = work()
    outcome = f"{done.ref.outcome} " if isinstance(done, Sealed) else "done "
    context.log.info(f"{name}: {outcome}in {time_in_words(time.monotonic() - started)}")
    return done


def _shown(context: Any, sealed: Sealed) -> dict[str, Any]:
    """The page's metadata, as much of it as an event may hold; the rest as files below the home folder."""
    home = home_folder(context.resources.pipeline.home)
    return within_event(sealed.metadata, home / PAGES_FOLDER / sealed.ref.asset / sealed.ref.identity)


def merged_lineage(upstream: Mapping[str, Any]) -> dict[str, str]:
    """Content digest of every asset that the given references come from; a failure when two come from different ones.

    So an asset that is materialized alone never mixes an upstream asset with what was made from an earlier one.
    """
    digests: dict[str, tuple[str, str]] = {}
    for name, ref in upstream.items():
        if not hasattr(ref, "lineage"):
            continue  # run-time values, not a reference
        for asset, digest in {**ref.lineage, ref.asset: ref.digest}.items():
            seen, source = digests.setdefault(asset, (digest, name))
            if seen != digest:
                raise dg.Failure(
                    description=f"StateMismatch: {_origin(source, asset, seen)}, {_origin(name, asset, digest)}."
                    f" Materialize what lies between {asset} and here in one run.",
                    allow_retries=False,
                )
    return {asset: digest for asset, (digest, _) in digests.items()}


def _origin(name: str, asset: str, digest: str) -> str:
    return f"{asset} is {digest[:12]}" if name == asset else f"{name} was made from {asset} {digest[:12]}"


def _inputs(work: Callable[..., Any], skip: int) -> dict[str, dg.In]:
    return {name: dg.In() for name in list(inspect.signature(work).parameters)[skip:]}


def graph_spec(
    asset: str, version: int, kinds: set[str], description: str, after: Sequence[str] = ()
) -> dict[str, Any]:
    """Arguments of `dg.graph_asset` that all fanned-out assets share; `after` as in `planning_op`."""
    return {
        "name": asset,
        "ins": {upstream: dg.AssetIn(upstream) for upstream in UPSTREAM[asset]}
        | {upstream: dg.AssetIn(upstream, dagster_type=dg.Nothing) for upstream in after},
        "group_name": GROUP,
        "tags": {STAGE_TAG: STAGES[asset]},
        "owners": list(OWNERS),
        "kinds": kinds,
        "description": description,
        "code_version": str(version),
        "metadata": numbers_metadata(asset),
    }


def asset_spec(asset: str, version: int, kinds: set[str], description: str) -> dict[str, Any]:
    """Arguments of `dg.asset` that all other assets share."""
    return {
        **graph_spec(asset, version, kinds, description),
        "io_manager_key": "references",
        "required_resource_keys": {"pipeline"},
    }


def materialized(
    context: dg.AssetExecutionContext, work: Callable[..., Sealed], **upstream: Any
) -> dg.MaterializeResult[ArtifactRef]:
    """An asset's output from one stage function: reference, metadata, data version = identity."""
    lineage = merged_lineage(upstream)
    asset = context.asset_key.path[-1]
    sealed: Sealed = _reported(context, asset, lambda: run_stage(context, work, **upstream))
    return dg.MaterializeResult(
        value=replace(sealed.ref, lineage=lineage),
        metadata=_shown(context, sealed),
        data_version=dg.DataVersion(sealed.ref.identity),
    )
