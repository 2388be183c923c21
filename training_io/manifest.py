"""The manifest that seals an artifact: written last into its folder, and checked by every reader.

An artifact is a folder with data files and `manifest.json`. The manifest is written last, so a folder without one is
not an artifact. `run.json` beside it holds what differs from run to run and takes no part in identity or equality.
`quarantine.json` beside it is put there by a failed blocking check; readers refuse the artifact while it is there,
and also while something else is in its place: damage lets no artifact go.
Only the standard library is needed, so a training box can verify what it was handed.
"""

import json
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training_io.errors import FormatError
from training_io.hashing import canonical_json, identity_of, sha256_file

MANIFEST_NAME = "manifest.json"
RUN_NAME = "run.json"
QUARANTINE_NAME = "quarantine.json"
FORMAT = "corpusmill/1"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What an artifact is made of, counted and hashed by its writer.

    `inputs`, `parameters` and `version` fix the identity before the work; `counts` and `files` describe the result.
    """

    asset: str
    unit: str
    inputs: Mapping[str, Any]
    parameters: Mapping[str, Any]
    version: int
    counts: Mapping[str, Any]
    files: Mapping[str, Mapping[str, Any]]  # relative path -> {"bytes": int, "sha256": hex}

    @property
    def identity(self) -> str:
        """SHA-256 of asset, unit, inputs, parameters and version: known before the work."""
        return artifact_identity(self.asset, self.unit, self.inputs, self.parameters, self.version)

    @property
    def digest(self) -> str:
        """SHA-256 of the files' names and hashes: what downstream takes as its input."""
        return identity_of({name: entry["sha256"] for name, entry in self.files.items()})

    def to_json(self) -> dict[str, Any]:
        """The JSON object stored in `manifest.json`; `seal` is the SHA-256 of all the rest."""
        body = {
            "format": FORMAT,
            "asset": self.asset,
            "unit": self.unit,
            "identity": self.identity,
            "digest": self.digest,
            "inputs": dict(self.inputs),
            "parameters": dict(self.parameters),
            "version": self.version,
            "counts": dict(self.counts),
            "files": {name: dict(entry) for name, entry in self.files.items()},
        }
        return {**body, "seal": identity_of(json.loads(canonical_json(body)))}


def artifact_identity(
    asset: str, unit: str, inputs: Mapping[str, Any], parameters: Mapping[str, Any], version: int
) -> str:
    """Identity of an artifact from what goes into it (hex SHA-256)."""
    return identity_of(
        {"asset": asset, "unit": unit, "inputs": dict(inputs), "parameters": dict(parameters), "version": version}
    )


def hash_files(folder: Path) -> dict[str, dict[str, Any]]:
    """Size and SHA-256 of every file below a folder, for its manifest."""
    return {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def seal_folder(folder: Path, manifest: Manifest) -> None:
    """Write the manifest of a finished folder and force all of it to the disk."""
    text = json.dumps(manifest.to_json(), indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False)
    (folder / MANIFEST_NAME).write_text(text + "\n", encoding="utf-8")
    for path in (*sorted(folder.rglob("*")), folder):
        sync_path(path)


def sync_path(path: Path) -> None:
    """Force a file's bytes, or a folder's names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def load_manifest(artifact: Path) -> Manifest:
    """Read an artifact's manifest; FormatError when it is missing, malformed, or contradicts its own hashes."""
    path = artifact / MANIFEST_NAME
    if not artifact.is_dir():
        raise FormatError(
            f"{artifact}: expected a sealed artifact with {MANIFEST_NAME}, found none, nor such a folder."
            " Check the path: an artifact is the folder <asset>/<unit>/<identity>."
        )
    if not path.is_file():
        if below := sorted(artifact.glob(f"*/{MANIFEST_NAME}")) or sorted(artifact.glob(f"*/*/{MANIFEST_NAME}")):
            raise FormatError(
                f"{artifact}: expected a sealed artifact with {MANIFEST_NAME}, found a folder of {len(below):,}"
                f" artifacts. Name one of them, such as {max(below, key=lambda one: one.stat().st_mtime).parent}."
            )
        raise FormatError(
            f"{artifact}: expected a sealed artifact with {MANIFEST_NAME}, found none."
            " The write was interrupted or the folder is not an artifact; materialize the asset again."
        )
    try:
        value = json.loads(path.read_bytes())
        manifest = Manifest(**{field: value[field] for field in Manifest.__dataclass_fields__})
        recorded_format, expected = value["format"], manifest.to_json()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, FileNotFoundError) as error:
        raise FormatError(
            f"{path}: expected a manifest of format {FORMAT}, found {error!r}. Materialize the asset again."
        ) from error
    if recorded_format != FORMAT:
        raise FormatError(f"{path}: expected format {FORMAT}, found {recorded_format}. Materialize the asset again.")
    if value != expected:
        differing = sorted(key for key in value.keys() | expected.keys() if value.get(key) != expected.get(key))
        raise FormatError(
            f"{path}: expected contents that agree with its own hashes, found another {', '.join(differing)}."
            " The manifest was edited or damaged; materialize the asset again."
        )
    return manifest


def open_artifact(artifact: Path, *, allow_quarantined: bool = False) -> Manifest:
    """Manifest of a sealed artifact that may be read; FormatError for an unsealed or quarantined one."""
    manifest = load_manifest(artifact)
    reasons = quarantine_reasons(artifact)
    if reasons and not allow_quarantined:
        listed = "; ".join(f"{check}: {reason}" for check, reason in sorted(reasons.items()))
        raise FormatError(
            f"{artifact}: quarantined by a failed blocking check ({listed})."
            f" Materialize {manifest.asset} again; it is rebuilt from scratch."
        )
    return manifest


def quarantine_reasons(artifact: Path) -> dict[str, str]:
    """Failed blocking checks of an artifact and their reasons; empty when none holds it back.

    Whatever is in the file's place holds the artifact back; where it is not what a check wrote, the reason says so.
    """
    path = artifact / QUARANTINE_NAME
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ValueError("not a file")
        return _named_reasons(json.loads(path.read_bytes()))
    except (FileNotFoundError, NotADirectoryError):
        return {QUARANTINE_NAME: "unreadable, a link to nothing"} if path.is_symlink() else {}
    except (OSError, ValueError, RecursionError) as error:
        return {QUARANTINE_NAME: f"unreadable, {error}"}


def _named_reasons(value: Any) -> dict[str, str]:
    if not isinstance(value, dict) or not value:
        raise ValueError("not an object of checks and reasons")
    reasons = {
        check: reason if isinstance(reason, str) else f"unreadable, a reason of kind {type(reason).__name__}"
        for check, reason in value.items()
    }
    return {_printable(check): _printable(reason) for check, reason in reasons.items()}


def _printable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()  # JSON may hold lone surrogates, which no file may


def damaged_files(artifact: Path, manifest: Manifest, names: Iterable[str] | None = None) -> list[str]:
    """One line for each file, of these or all, that is missing or whose size or SHA-256 differs from the manifest."""
    chosen = sorted(manifest.files if names is None else names)
    damages = ((artifact / name, _damage(artifact / name, manifest.files[name])) for name in chosen)
    return [f"{path}: {damage}" for path, damage in damages if damage]


def _damage(path: Path, entry: Mapping[str, Any]) -> str:
    try:
        if (size := path.stat().st_size) != entry["bytes"]:
            return f"expected {entry['bytes']:,} bytes, found {size:,}"
        if (found := sha256_file(path)) != entry["sha256"]:
            return f"expected SHA-256 {entry['sha256'][:12]}…, found {found[:12]}…"
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):  # also when a writer moves the folder aside
        return f"expected {entry['bytes']:,} bytes, found no file"
    return ""
