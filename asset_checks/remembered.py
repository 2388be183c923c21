"""Verdicts that need no second count: the same code over the same bytes under the same recipe says the same.

In: what a verdict depends on. Out: what was said before, or nothing. The promise: only a pass is remembered, only for
the very bytes, recipe and code that it was counted with, and only a run that has just verified those bytes by their
hashes asks for it. A check that is executed by itself always counts.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from resources.artifact_store import replace_file


def recall(path: Path, basis: str) -> dict[str, Any] | None:
    """What was remembered on this basis; a missing, damaged or differently based record is none."""
    try:
        record = json.loads(path.read_bytes())
        return dict(record["verdict"]) if record["basis"] == basis else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def remember(path: Path, basis: str, verdict: Mapping[str, Any]) -> None:
    """Record a passed verdict in place of an earlier one."""
    replace_file(path, json.dumps({"basis": basis, "verdict": dict(verdict)}, indent=1))


def forget(path: Path) -> None:
    """Drop what was remembered, if anything was."""
    path.unlink(missing_ok=True)
