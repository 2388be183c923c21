"""What a verdict rests on: the bytes that were judged, the recipe, and the code that judged them.

In: lineage and recipe. Out: one digest. The promise: a verdict that was counted with other bytes, another recipe or
other code has another basis, so that nobody takes it for one on what is there.
"""

import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

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
