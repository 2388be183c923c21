"""How a stage fans out: a planning step, mapped steps, a sealing step.

    plan(stage, **upstream) -> tasks ;  build(stage, task) -> references ;  seal(stage, parts, **upstream) -> Sealed

A stage writes these three as plain functions of references and wires them in a `graph_asset`; `ops` makes them ops. A
mapped step holds several units, so a fan-out has at most 128 steps however many units there are. What is long says in
the log how far it is: `build_each` after units, the ops when a step's work begins and ends.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import dagster as dg
import numpy as np
import pyarrow as pa

from pipeline_assets.recipe import Recipe
from pipeline_assets.references import Pipeline
from pipeline_assets.run_tags import recipe_tags, revision_tag, tag_run
from pipeline_assets.sections.reading import MAX_STEPS_PER_FAN_OUT
from resources.artifact_store import WHOLE, ArtifactRef, ArtifactStore, unit_inputs
from resources.tables import read_array, read_first_rows, read_json_rows, read_table, write_json
from training_io.errors import FormatError
from training_io.manifest import Manifest

UNITS_NAME = "units.json"
UNIT_KINDS = {"unit": str, "digest": str, "counts": dict}  # of its rows
DATA_VERSION_TAG = "dagster/data_version"
SAMPLE_ROWS = 5
SECONDS_BETWEEN_LINES = 5.0  # of progress in the log

Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What a stage function is given: the pipeline and a way to say what it does."""

    pipeline: Pipeline
    say: Callable[[str], None]
    warn: Callable[[str], None]
    observe: Callable[[str, str, Mapping[str, Any]], None]  # an external asset, its data version and page in this run
    is_judging: bool = False  # checks may read what they themselves hold back
    clock: Callable[[], float] = time.monotonic  # seconds, for what the log says only

    @property
    def store(self) -> ArtifactStore:
        """Where artifacts live."""
        return self.pipeline.store

    @property
    def recipe(self) -> Recipe:
        """What is built."""
        return self.pipeline.recipe

    def materialize(
        self,
        *,
        asset: str,
        unit: str = WHOLE,
        inputs: Mapping[str, Any],
        parameters: Mapping[str, Any],
        version: int,
        write: Callable[[Path], Mapping[str, Any]],
    ) -> ArtifactRef:
        """`ArtifactStore.materialize`, with a warning in the log for what was damaged and built again."""
        ref = self.store.materialize(
            asset=asset, unit=unit, inputs=inputs, parameters=parameters, version=version, write=write
        )
        for warning in ref.warnings:
            self.warn(f"rebuilt: {warning}")
        return ref

    def open(self, ref: ArtifactRef) -> tuple[Path, Manifest]:
        """Folder and manifest of an artifact; FormatError for an unsealed one, and a quarantined one outside checks."""
        return self.store.open(ref, allow_quarantined=self.is_judging)

    def folder(self, ref: ArtifactRef) -> Path:
        """Folder of an artifact, as `open` gives it."""
        return self.open(ref)[0]

    def table(self, ref: ArtifactRef, name: str, columns: Sequence[str] | None = None) -> pa.Table:
        """A table of an artifact, or some of its columns."""
        return read_table(self.folder(ref) / name, columns)

    def sample(self, ref: ArtifactRef, name: str) -> pa.Table:
        """The first few rows of a table of an artifact, for its page."""
        return read_first_rows(self.folder(ref) / name, SAMPLE_ROWS)

    def array(self, ref: ArtifactRef, name: str) -> np.ndarray[Any, Any]:
        """An array of an artifact, memory-mapped when large."""
        return read_array(self.folder(ref) / name)


@dataclass(frozen=True, kw_only=True)
class Task:
    """The work of one mapped step: a name for the UI and what its units need."""

    key: str  # letters, digits and underscores
    units: tuple[Any, ...]


@dataclass(frozen=True, kw_only=True)
class Sealed:
    """A finished asset: its reference, and metadata for its page."""

    ref: ArtifactRef
    metadata: Mapping[str, Any] = field(default_factory=dict)


def tasks_of(items: Sequence[Item], name: str, max_tasks: int = MAX_STEPS_PER_FAN_OUT) -> list[Task]:
    """Items in at most so many tasks of neighbouring items, in order."""
    per_task = max(1, -(-len(items) // max_tasks))
    groups = [tuple(items[start : start + per_task]) for start in range(0, len(items), per_task)]
    return [Task(key=f"{name}_{number:03d}_of_{len(groups):03d}", units=group) for number, group in enumerate(groups)]


def build_each(
    stage: Stage,
    task: Task,
    build_unit: Callable[[Any], ArtifactRef],
    at_once: int = 1,
    end_waits: Callable[[], None] = lambda: None,
) -> list[ArtifactRef]:
    """Build a task's units in order, saying in the log how far it is; so many at once, in threads, where one waits.

    After an error or an interrupt no unit is begun, `end_waits` is called, and the first error is raised when the units
    that are under way have ended; what is done stays.
    """
    if at_once == 1:
        return list(reported(stage, task.key, map(build_unit, task.units), len(task.units)))
    errors: list[Exception] = []

    def build_unless_failed(unit: Any) -> ArtifactRef:
        if errors:
            raise CancelledError
        try:
            return build_unit(unit)
        except Exception as error:
            errors.append(error)
            end_waits()
            if error is not errors[0]:  # its wait was ended
                raise CancelledError from error
            raise

    threads = ThreadPoolExecutor(at_once)
    try:
        return list(reported(stage, task.key, threads.map(build_unless_failed, task.units), len(task.units)))
    except CancelledError:
        raise errors[0] from None
    finally:
        end_waits()
        threads.shutdown(cancel_futures=True)  # an interrupt, too, waits for no unit that is not begun


def reported(stage: Stage, name: str, built: Iterable[ArtifactRef], total: int) -> Iterator[ArtifactRef]:
    """The same units as they are built, with a line in the log after the first, after the last of all, and in between
    at most every five seconds. `total` is how many there will be, at most.
    """
    done: list[ArtifactRef] = []
    started = said = stage.clock()
    for ref in built:
        done.append(ref)
        now = stage.clock()
        if len(done) in (1, total) or now - said >= SECONDS_BETWEEN_LINES:
            stage.say(f"{ref.asset} {name}: {progress_of(done, total, now - started)}")
            said = now
        yield ref


def progress_of(done: Sequence[ArtifactRef], total: int, seconds: float) -> str:
    """How far a step is after `seconds`, with `done` of `total` units: what they hold, how fast, and the time left.

    Speed and time left are those of the units that took work, where there are any: a step that was interrupted finds
    its first units in a moment, and the rest will not go as fast. Units that are built at once share their seconds.
    """
    outcomes = ", ".join(
        f"{count:,} {outcome}"
        for outcome in ("built", "reused", "rebuilt")
        if (count := sum(ref.outcome == outcome for ref in done))
    )
    counted = next((name for name in ("documents", "band_keys") if any(name in ref.counts for ref in done)), None)
    held = f"{sum(ref.counts.get(counted, 0) for ref in done):,} {counted.replace('_', ' ')} in " if counted else ""
    built = [ref for ref in done if ref.outcome != "reused"]
    worked = built or done
    working = min(seconds, sum(ref.seconds for ref in worked))
    text_bytes = sum(ref.counts.get("text_bytes", 0) for ref in built)
    rate = f", {text_bytes / 1e6 / working:,.1f} MB/s" if text_bytes and working > 0 else ""
    remaining = (total - len(done)) * working / len(worked)
    left = f", about {time_in_words(remaining)} left" if len(done) < total else ""
    return f"{len(done):,} of {total:,} units ({outcomes}), {held}{time_in_words(seconds)}{rate}{left}"


def number_in_words(number: int, noun: str) -> str:
    """A number of things, of which there may be one.

    >>> number_in_words(0, "violation"), number_in_words(1, "violation"), number_in_words(1_200, "violation")
    ('0 violations', '1 violation', '1,200 violations')
    """
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def time_in_words(seconds: float) -> str:
    """A time as a person says it.

    >>> [time_in_words(seconds) for seconds in (0.04, 9.96, 99.4, 5_970, 7_290)]
    ['0.0 s', '10.0 s', '99 s', '100 min', '2 h 2 min']
    """
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes:,} min" if minutes <= 100 else f"{minutes // 60:,} h {minutes % 60} min"


def seal_units(
    stage: Stage,
    asset: str,
    parts: list[ArtifactRef],
    counts: dict[str, Any],
    version: int,
    write_beside: Callable[[Path], None] = lambda folder: None,
    **inputs: Any,
) -> ArtifactRef:
    """The asset-level artifact: its units in order, their digests as its content, their sums as its counts.

    `write_beside` writes what else its folder holds: what follows from the units alone.
    """

    def write(folder: Path) -> dict[str, Any]:
        listed = [{"unit": part.unit, "digest": part.digest, "counts": dict(part.counts)} for part in parts]
        write_json(listed, folder / UNITS_NAME)
        write_beside(folder)
        return counts

    return stage.materialize(
        asset=asset,
        inputs={"units": unit_inputs(parts), **inputs},
        parameters={},
        version=version,
        write=write,
    )


def units_in(stage: Stage, ref: ArtifactRef) -> list[ArtifactRef]:
    """References of a sealed asset's units, in order."""
    folder, manifest = stage.open(ref)
    units = manifest.inputs["units"]
    listed = read_json_rows(folder / UNITS_NAME, UNIT_KINDS)
    if len(listed) != len(units):
        raise FormatError(
            f"{folder / UNITS_NAME}: expected {len(units):,} units, as the manifest lists, found {len(listed):,}."
            f" The file is damaged; materialize {ref.asset} again: it is rebuilt."
        )
    return [
        ArtifactRef(
            asset=ref.asset,
            unit=entry["unit"],
            identity=unit["identity"],
            digest=entry["digest"],
            counts=entry["counts"],
            outcome="reused",
            seconds=0.0,
        )
        for entry, unit in zip(listed, units, strict=True)
    ]


def stage_of(context: Any, *, is_judging: bool = False) -> Stage:
    """The stage of a running step or check: its recipe, its store, its log."""
    pipeline: Pipeline = context.resources.pipeline.open()
    tag_run(context.instance, context.run.run_id, recipe_tags(pipeline.recipe))

    def observe(asset: str, data_version: str, metadata: Mapping[str, Any]) -> None:
        tag_run(context.instance, context.run_id, revision_tag(data_version))
        records = context.instance.fetch_observations(dg.AssetKey(asset), limit=1).records
        last = [record.asset_observation for record in records]
        if any(seen is not None and seen.tags.get(DATA_VERSION_TAG) == data_version for seen in last):
            return  # it stands, with all that was said of it
        context.log_event(dg.AssetObservation(asset, metadata=metadata, tags={DATA_VERSION_TAG: data_version}))

    return Stage(
        pipeline=pipeline,
        say=context.log.info,
        warn=context.log.warning,
        observe=observe,
        is_judging=is_judging,
    )
