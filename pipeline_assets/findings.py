"""What there is of each asset, and what each check said last of the bytes that are there.

In: the store, the recipe and the checks' names. Out: a finding for each, whatever state it is in: what is missing,
damaged, held back or not counted is a finding like any other. No message in them names this machine's folders.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import dagster as dg

from pipeline_assets.basis import basis_of
from pipeline_assets.ops import merged_lineage
from pipeline_assets.stripes import Stage
from pipeline_assets.verdict_records import VerdictRecord, clipped, read_verdict
from resources.artifact_store import ArtifactRef
from training_io.errors import FormatError, StateMismatch
from training_io.hashing import identity_of
from training_io.manifest import quarantine_reasons

NOT_COUNTED = "not counted"
OUTCOMES = ("failed", "warned", NOT_COUNTED, "passed")


@dataclass(frozen=True, kw_only=True)
class KnownCheck:
    """A check as the code location defines it."""

    asset: str
    name: str
    description: str
    is_blocking: bool


@dataclass(frozen=True, kw_only=True)
class FoundAsset:
    """What there is of an asset: its reference, or why there is none; the checks that hold it back, and why."""

    asset: str
    state: str
    ref: ArtifactRef | None = None
    held_back_by: Mapping[str, str] = field(default_factory=dict)

    @property
    def digest(self) -> str | None:
        """The digest of its content, where it has any."""
        return self.ref.digest if self.ref else None

    def inputs(self) -> dict[str, Any]:
        """What a page that shows it depends on."""
        identity = self.ref.identity if self.ref else None
        return {
            "state": self.state,
            "identity": identity,
            "digest": self.digest,
            "held_back_by": identity_of(self.held_back_by),  # there may be thousands
        }


@dataclass(frozen=True, kw_only=True)
class FoundVerdict:
    """What a check said last of the asset's present bytes; nothing, where `record` is None, and why."""

    check: KnownCheck
    record: VerdictRecord | None
    reason: str = ""

    @property
    def outcome(self) -> str:
        """One of OUTCOMES: a check that crashed has failed."""
        if self.record is None:
            return NOT_COUNTED
        return "failed" if self.record.outcome == "crashed" else self.record.outcome

    @property
    def found(self) -> str:
        """What was found, or why nothing was."""
        return self.record.found if self.record else self.reason

    def inputs(self) -> dict[str, Any]:
        """What a page that shows it depends on."""
        record = asdict(self.record) | {"basis": ""} if self.record else None  # no page shows it
        return {"check": asdict(self.check), "record": record, "reason": self.reason}


def find_asset(stage: Stage, asset: str, run_ids: tuple[str, ...] = ()) -> FoundAsset:
    """The asset's artifact of these runs, else the latest of the recipe, and what state it is in."""
    try:
        ref = stage.pipeline.resolve(asset, run_ids)
    except StateMismatch:  # none, or one of other parameters
        return FoundAsset(asset=asset, state="not built with this recipe")
    try:
        _, manifest = stage.open(ref)
    except FormatError:
        return FoundAsset(asset=asset, state="no longer whole: materialize it again")
    reasons = quarantine_reasons(stage.store.folder(ref))
    return FoundAsset(
        asset=asset,
        state="held back by its checks" if reasons else "built",
        ref=replace(ref, counts=manifest.counts),  # not those of a record that nobody sealed
        held_back_by={clipped(check): clipped(without_home(stage, reason)) for check, reason in reasons.items()},
    )


def find_verdict(stage: Stage, check: KnownCheck, assets: Mapping[str, FoundAsset]) -> FoundVerdict:
    """The check's last verdict, if it is of the bytes that the assets now have."""
    judged = assets[check.asset]
    if judged.ref is None:
        return FoundVerdict(check=check, record=None, reason=f"{check.asset} is {judged.state}.")
    try:
        record = read_verdict(stage.store, judged.ref, check.name)
    except FormatError as error:
        return FoundVerdict(check=check, record=None, reason=without_home(stage, str(error)))
    if record is None:
        return FoundVerdict(check=check, record=None, reason="Not counted yet on what is there: execute it.")
    if any(asset not in assets or assets[asset].digest != digest for asset, digest in record.judged.items()):
        return FoundVerdict(check=check, record=None, reason="It was counted on other bytes: execute it again.")
    if record.basis != _basis(stage, [assets[asset] for asset in record.judged]):
        return FoundVerdict(
            check=check, record=None, reason="It was counted with another recipe or code: execute it again."
        )
    return FoundVerdict(check=check, record=_without_home(stage, record))


def _basis(stage: Stage, judged: Sequence[FoundAsset]) -> str | None:
    """What a verdict on these bytes would rest on now; nothing where they were made from different ones."""
    try:
        lineage = merged_lineage({found.asset: found.ref for found in judged})
    except dg.Failure:
        return None
    return basis_of(lineage, stage.recipe.model_dump(mode="json"))


def tally(verdicts: Sequence[FoundVerdict]) -> dict[str, int]:
    """How many checks came to each outcome."""
    return {outcome: sum(verdict.outcome == outcome for verdict in verdicts) for outcome in OUTCOMES}


def without_home(stage: Stage, said: str) -> str:
    """A message without the folder that this machine keeps artifacts in."""
    return said.replace(str(stage.store.root), "CORPUSMILL_HOME")


def _without_home(stage: Stage, record: VerdictRecord) -> VerdictRecord:
    examples = [
        {key: without_home(stage, value) if isinstance(value, str) else value for key, value in row.items()}
        for row in record.examples
    ]
    return replace(record, found=without_home(stage, record.found), examples=examples)
