"""How a law is judged, reported and enforced.

In: a function that recounts one law from sealed bytes and returns a verdict. Out: an asset check with the same four
metadata keys everywhere, in an event that is small whatever the verdict holds. A blocking check that fails or crashes
quarantines the artifact, so that materializing only what is downstream cannot use bad data either; when it passes, it
takes back what it held against the artifact.
A run that found every judged asset unchanged shows the pass that was counted before, and names the run that counted it.
What a check said last is recorded, whatever it was, for `quality_report`.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import dagster as dg

from asset_checks.remembered import forget, recall, remember
from pipeline_assets.basis import basis_of
from pipeline_assets.event_size import PAGES_FOLDER, within_event
from pipeline_assets.ops import merged_lineage
from pipeline_assets.references import run_ids_of, tag_revision
from pipeline_assets.report import rows_metadata
from pipeline_assets.stripes import Stage, number_in_words, stage_of, time_in_words
from pipeline_assets.verdict_records import (
    MAX_EXAMPLES,
    VERDICTS_FOLDER,
    VerdictRecord,
    bounded,
    clipped,
    forget_verdict,
    record_verdict,
)
from resources.artifact_store import ArtifactRef
from training_io.hashing import identity_of
from training_io.manifest import quarantine_reasons


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a law says, what was found, and counter-examples as plain rows; `numbers` become plots over time.

    `is_choice`: the recipe chose not to keep the law, so the check warns and holds nothing back.
    """

    expected: str
    found: str
    num_violations: int
    examples: Sequence[Mapping[str, Any]] = ()
    numbers: Mapping[str, float] = field(default_factory=dict)
    is_choice: bool = False
    counted_in: str = ""  # the run that counted it; set by the check


Judge = Callable[..., Verdict]

HURRIED = {"dagster/priority": "1"}
"""What holds nothing back is not waited for: it runs ahead, so that the report at the end has it."""


def verdict_of(expected: str, violations: Sequence[str], found: str) -> Verdict:
    """A verdict from a list of violations in words: `found` describes what was looked at."""
    return Verdict(
        expected=expected,
        found=f"{number_in_words(len(violations), 'violation')} in {found}",
        num_violations=len(violations),
        examples=[{"violation": violation} for violation in violations[:MAX_EXAMPLES]],
    )


def law(judge: Judge, *, blocking: bool, description: str) -> dg.AssetChecksDefinition:
    """The asset check that a judge stands for: named after it, on the first asset among its arguments.

    A judge is `judge(stage, asset, *others) -> Verdict`; each argument is named after the asset whose reference it
    takes. `description` says what a failure means and what to do.
    """
    assets = list(inspect.signature(judge).parameters)[1:]
    judged = assets[0]

    @dg.asset_check(
        asset=judged,
        name=judge.__name__,
        description=description,
        blocking=blocking,
        additional_deps=assets[1:],
        required_resource_keys={"pipeline"},
        op_tags=None if blocking else HURRIED,
    )
    def check(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        stage = stage_of(context, is_judging=True)
        started = stage.clock()
        run_ids = run_ids_of(context.run)
        refs = {name: stage.pipeline.resolve(name, run_ids) for name in assets}
        lineage = merged_lineage(refs)
        tag_revision(context.instance, context.run.run_id, stage.pipeline, refs[judged])
        basis = basis_of(lineage, stage.recipe.model_dump(mode="json"))
        ref = refs[judged]
        path = stage.store.root / VERDICTS_FOLDER / judged / ref.identity / f"{judge.__name__}.json"
        # Plans and packages name files of assets above them: all of those must be verified too.
        is_verified = all(stage.pipeline.is_made_in(context.run.run_id, name) for name in lineage)
        is_held = judge.__name__ in quarantine_reasons(stage.store.folder(ref))
        if is_verified and not is_held and (remembered := recall(path, basis)) is not None:
            verdict = Verdict(**remembered)
        else:
            forget(path)  # first, so that neither a failure nor a kill leaves a pass standing
            forget_verdict(stage.store, ref, judge.__name__)
            verdict = replace(_counted(judge, stage, refs, basis, blocking), counted_in=context.run.run_id)
            if is_verified and not verdict.num_violations:
                remember(path, basis, asdict(verdict))
        holds_back = blocking and not verdict.is_choice
        if holds_back and verdict.num_violations:
            stage.store.quarantine(ref, judge.__name__, clipped(verdict.found))
        elif blocking:
            stage.store.lift(ref, judge.__name__)
        record = bounded(_record(verdict, refs, basis, holds_back))
        record_verdict(stage.store, ref, judge.__name__, record)
        stage.say(f"{judge.__name__}: {record.found} ({time_in_words(stage.clock() - started)})")
        said = identity_of(asdict(record))  # an earlier event's links stay true
        pages = stage.store.root / PAGES_FOLDER / judged / ref.identity / judge.__name__ / said
        return _result(record, holds_back, verdict.counted_in, pages)

    return check


def _counted(judge: Judge, stage: Stage, refs: Mapping[str, ArtifactRef], basis: str, blocking: bool) -> Verdict:
    judged, *others = refs.values()
    try:
        return judge(stage, judged, *others)
    except Exception as error:
        if blocking:
            stage.store.quarantine(judged, judge.__name__, clipped(f"the check crashed: {error}"))
        record_verdict(stage.store, judged, judge.__name__, _crash(error, refs, basis))
        raise


def _record(verdict: Verdict, refs: Mapping[str, ArtifactRef], basis: str, holds_back: bool) -> VerdictRecord:
    return VerdictRecord(
        basis=basis,
        judged={name: ref.digest for name, ref in refs.items()},
        outcome="passed" if not verdict.num_violations else "failed" if holds_back else "warned",
        expected=verdict.expected,
        found=verdict.found,
        num_violations=verdict.num_violations,
        examples=verdict.examples,
        numbers=verdict.numbers,
    )


def _crash(error: Exception, refs: Mapping[str, ArtifactRef], basis: str) -> VerdictRecord:
    return VerdictRecord(
        basis=basis,
        judged={name: ref.digest for name, ref in refs.items()},
        outcome="crashed",
        expected="a verdict",
        found=f"the check crashed: {type(error).__name__}: {error}",
        num_violations=0,
    )


def _result(record: VerdictRecord, is_error: bool, counted_in: str, pages: Path) -> dg.AssetCheckResult:
    """The event of a bounded record; what of it is still too large together becomes files below `pages`."""
    metadata = {
        "expected": record.expected,
        "found": record.found,
        "num_violations": record.num_violations,
        "examples": rows_metadata(record.examples),
        "counted_in": dg.MetadataValue.dagster_run(counted_in),
        **record.numbers,
    }
    return dg.AssetCheckResult(
        passed=record.num_violations == 0,
        severity=dg.AssetCheckSeverity.ERROR if is_error else dg.AssetCheckSeverity.WARN,
        description=record.found,
        metadata=within_event(metadata, pages),
    )
