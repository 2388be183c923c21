"""Verdicts that need no second count: the same code over the same bytes under the same recipe says the same.

In: what a verdict depends on. Out: what was said before, or nothing. The promise: only a pass is remembered, only for
the very bytes, recipe and code that it was counted with, and only a run that has just verified those bytes by their
hashes asks for it. A check that is executed by itself always counts.
"""

import json
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from resources.artifact_store import replace_file
from training_io.gpu_io_manager import may_have_gpu
from training_io.hashing import identity_of, sha256_file

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("asset_checks", "pipeline_assets", "resources", "training_io")
LIBRARIES = ("numba", "numpy", "pyarrow", "scipy", "tokenizers")
TRAINED = "varlen_training_run"  # what alone needs torch


def basis_of(lineage: Mapping[str, str], recipe: Mapping[str, Any]) -> str:
    """What a verdict rests on: digests of all it judged and what that came from, recipe, code; torch, where used."""
    basis = {"lineage": dict(lineage), "recipe": dict(recipe), "code": CODE}
    if TRAINED in lineage:
        basis |= {"torch": _version("torch"), "has_gpu": may_have_gpu()}
    return identity_of(basis)


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


def code_digest(root: Path) -> str:
    """SHA-256 over our source files below a root, Python's version and those of the libraries that compute."""
    sources = {
        path.relative_to(root).as_posix(): sha256_file(path)
        for package in PACKAGES
        for path in sorted((root / package).rglob("*.py"))
    }
    libraries = {name: _version(name) for name in LIBRARIES}
    return identity_of({"sources": sources, "python": sys.version, "libraries": libraries})


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return "not installed"  # torch, where nobody trains


CODE = code_digest(ROOT)
"""Of the code that was imported, not of what is edited under it later."""
