"""What every check said last, pass or fail, kept beside the artifacts for whoever draws them together.

In: a check's verdict and the references that it read. Out: one small JSON file a judged artifact and check. Promise: a
record is of the very bytes that it names, and a check that is counting, or was killed, leaves none standing.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from pipeline_assets.report import plain_cell
from resources.artifact_store import ArtifactRef, ArtifactStore, replace_file
from training_io.errors import FormatError

VERDICTS_FOLDER = "_verdicts"
MAX_EXAMPLES = 20

Outcome = Literal["passed", "failed", "warned", "crashed"]


@dataclass(frozen=True, kw_only=True)
class VerdictRecord:
    """What a check said of the bytes that `judged` names: digests by asset, of all that it read."""

    judged: Mapping[str, str]
    outcome: Outcome
    expected: str
    found: str
    num_violations: int
    examples: Sequence[Mapping[str, Any]] = ()
    numbers: Mapping[str, float] = field(default_factory=dict)


def record_verdict(store: ArtifactStore, ref: ArtifactRef, check: str, record: VerdictRecord) -> None:
    """Put a check's verdict on an artifact in the place of an earlier one."""
    examples = [{str(key): plain_cell(value) for key, value in row.items()} for row in record.examples[:MAX_EXAMPLES]]
    replace_file(_path(store, ref, check), json.dumps({**asdict(record), "examples": examples}, indent=1))


def forget_verdict(store: ArtifactStore, ref: ArtifactRef, check: str) -> None:
    """Drop what a check said of an artifact, if it said anything."""
    _path(store, ref, check).unlink(missing_ok=True)


def read_verdict(store: ArtifactStore, ref: ArtifactRef, check: str) -> VerdictRecord | None:
    """What a check said last of an artifact, None where it has said nothing; FormatError for a damaged record."""
    path = _path(store, ref, check)
    try:
        return VerdictRecord(**json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise FormatError(f"{path}: expected a check's verdict, found {error}. Execute {check} again.") from error


def _path(store: ArtifactStore, ref: ArtifactRef, check: str) -> Path:
    return store.root / VERDICTS_FOLDER / ref.asset / ref.identity / f"{check}.latest.json"
