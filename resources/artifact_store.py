"""The artifact store: sealed folders by asset, unit and identity under one root.

In: inputs, parameters, a version, and a function that writes files into a folder. Out: a small reference. The
promise: a crash leaves the whole artifact or none; what is there is verified before it is reused; damage is rebuilt;
two writers of one identity are safe (one wins the rename, the other uses its result). The cost: each file's bytes are
hashed once when written and once when reused.
"""

import contextlib
import errno
import fcntl
import json
import os
import shutil
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from resources.shapes import expect_fields
from training_io.errors import FormatError
from training_io.manifest import (
    QUARANTINE_NAME,
    RUN_NAME,
    Manifest,
    artifact_identity,
    damaged_files,
    hash_files,
    load_manifest,
    open_artifact,
    quarantine_reasons,
    seal_folder,
    sync_path,
)

WHOLE = "-"
"""The unit name of an artifact that is not cut into units."""

Outcome = Literal["built", "reused", "rebuilt"]
REFERENCE_KINDS: Mapping[str, type] = {
    "asset": str,
    "unit": str,
    "identity": str,
    "digest": str,
    "counts": dict,
    "outcome": str,
    "seconds": float,
    "warnings": list,
    "lineage": dict,
}
"""The fields of a reference that is written down."""


@dataclass(frozen=True, kw_only=True)
class ArtifactRef:
    """A small reference to a sealed artifact: what steps pass to each other instead of tables."""

    asset: str
    unit: str
    identity: str
    digest: str
    counts: Mapping[str, Any]
    outcome: Outcome
    seconds: float
    warnings: tuple[str, ...] = ()
    lineage: Mapping[str, str] = field(default_factory=dict)  # asset -> content digest of all that it comes from

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {**asdict(self), "warnings": list(self.warnings)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "ArtifactRef":
        """The reference that `to_json` described; FormatError for what it did not."""
        where, remedy = "a recorded reference", "The record is damaged; materialize its asset again."
        fields = expect_fields(value, REFERENCE_KINDS, where, remedy)
        texts = {**{f"warning {number:,}": text for number, text in enumerate(fields["warnings"])}, **fields["lineage"]}
        expect_fields(texts, dict.fromkeys(texts, str), where, remedy)
        known = {name: fields[name] for name in REFERENCE_KINDS}
        return cls(**{**known, "warnings": tuple(known["warnings"])})


@dataclass(frozen=True)
class ArtifactStore:
    """Artifacts below one local root folder."""

    root: Path

    def folder(self, ref: ArtifactRef) -> Path:
        """The folder of a referenced artifact (it may have been deleted since)."""
        return self._folder(ref.asset, ref.unit, ref.identity)

    def _folder(self, asset: str, unit: str, identity: str) -> Path:
        return self.root / asset / unit / identity

    def open(self, ref: ArtifactRef, *, allow_quarantined: bool = False) -> tuple[Path, Manifest]:
        """Folder and manifest of a sealed artifact; FormatError when it is unsealed, quarantined or another one."""
        folder = self.folder(ref)
        manifest = open_artifact(folder, allow_quarantined=allow_quarantined)
        if manifest.digest != ref.digest:
            raise FormatError(
                f"{folder}: expected content digest {ref.digest[:12]}, found {manifest.digest[:12]}."
                f" It was rebuilt with other bytes; materialize what is downstream of {ref.asset} from {ref.asset} on."
            )
        return folder, manifest

    def verified(self, ref: ArtifactRef, name: str) -> Path:
        """One file of an artifact that is open to readers, held against its SHA-256; FormatError when it differs.

        For whoever must not take damage for an answer. Cost: one pass over the file's bytes.
        """
        folder, manifest = self.open(ref)
        if name not in manifest.files:
            raise FormatError(
                f"{folder}: expected a file {name}, found {len(manifest.files):,} others. It was made by another"
                f" version; materialize {ref.asset} again."
            )
        for damage in damaged_files(folder, manifest, [name]):
            raise FormatError(f"{damage}. The file is damaged; materialize {ref.asset} again: it is rebuilt.")
        return folder / name

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
        """Reuse the artifact of this identity when it is whole, else build it.

        `write` puts files into the folder it is given and returns the counts for the manifest. What it puts into
        `run.json`, a JSON object, joins what is said of this run, outside identity and content. An exception in it
        leaves nothing behind. A damaged or quarantined artifact is built again, with a warning that names the reason.
        """
        started = time.monotonic()
        identity = artifact_identity(asset, unit, inputs, parameters, version)
        folder = self._folder(asset, unit, identity)
        _remove_leftovers(folder)
        warnings = tuple(self._reasons_to_rebuild(folder))
        if folder.exists() and not warnings:
            outcome: Outcome = "reused"
            manifest = load_manifest(folder)
        else:
            outcome = "rebuilt" if folder.exists() else "built"
            manifest = self._build(folder, asset, unit, inputs, parameters, version, write)
        return ArtifactRef(
            asset=asset,
            unit=unit,
            identity=identity,
            digest=manifest.digest,
            counts=dict(manifest.counts),
            outcome=outcome,
            seconds=time.monotonic() - started,
            warnings=warnings,
        )

    def _reasons_to_rebuild(self, folder: Path) -> Iterator[str]:
        if not folder.exists():
            return
        try:
            manifest = load_manifest(folder)
        except FormatError as error:
            yield str(error)
            return
        for check, reason in sorted(quarantine_reasons(folder).items()):
            yield f"{folder}: quarantined by {check}: {reason}"
        yield from damaged_files(folder, manifest)

    def _build(
        self,
        folder: Path,
        asset: str,
        unit: str,
        inputs: Mapping[str, Any],
        parameters: Mapping[str, Any],
        version: int,
        write: Callable[[Path], Mapping[str, Any]],
    ) -> Manifest:
        started = time.time()
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = folder.parent / f".tmp-{folder.name}-{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        temporary.mkdir()
        try:
            counts = write(temporary)
            facts = _taken_facts(temporary / RUN_NAME)
            manifest = Manifest(
                asset=asset,
                unit=unit,
                inputs=inputs,
                parameters=parameters,
                version=version,
                counts=counts,
                files=hash_files(temporary),
            )
            run = {**facts, "started": started, "seconds": time.time() - started, "host": socket.gethostname()}
            (temporary / RUN_NAME).write_text(json.dumps(run))
            seal_folder(temporary, manifest)
            return _publish(temporary, folder)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise

    def quarantine(self, ref: ArtifactRef, check: str, reason: str) -> None:
        """Hold an artifact, its units and its plans back: readers refuse them until the check passes or a rebuild."""
        for folder in self._with_units(ref):
            with locked(folder):
                reasons, path = {**quarantine_reasons(folder), check: reason}, folder / QUARANTINE_NAME
                if path.is_dir() and not path.is_symlink():  # it held the artifact back, and no file can replace it
                    shutil.rmtree(path)
                replace_file(path, json.dumps(reasons, indent=1))

    def lift(self, ref: ArtifactRef, check: str) -> None:
        """Take back what one check held against an artifact, its units and its plans."""
        for folder in self._with_units(ref):
            with locked(folder):
                reasons = quarantine_reasons(folder)
                if reasons.pop(check, None) is None:
                    continue
                if reasons:
                    replace_file(folder / QUARANTINE_NAME, json.dumps(reasons, indent=1))
                else:
                    (folder / QUARANTINE_NAME).unlink()

    def _with_units(self, ref: ArtifactRef) -> list[Path]:
        folder = self.folder(ref)
        inputs = load_manifest(folder).inputs
        parts = (*inputs.get("units", []), *inputs.get("plans", []))
        own = [self._folder(ref.asset, part["unit"], part["identity"]) for part in parts]
        return [path for path in (*own, folder) if path.exists()]


def _taken_facts(path: Path) -> dict[str, Any]:
    """What a writer said of its run, taken out of the folder before its files are hashed."""
    if not path.exists():
        return {}
    facts: dict[str, Any] = json.loads(path.read_bytes())
    path.unlink()
    return facts


def unit_inputs(refs: list[ArtifactRef]) -> list[dict[str, str]]:
    """The `units` or `plans` input of a sealing artifact: unit names, identities and digests in order."""
    return [{"unit": ref.unit, "identity": ref.identity, "digest": ref.digest} for ref in refs]


def link_or_copy(source: Path, target: Path) -> None:
    """Put a sealed file under a second name: a hard link where the file system allows it, else a copy."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _publish(temporary: Path, folder: Path) -> Manifest:
    """Rename the finished folder into place; whoever comes second keeps what the first published.

    A damaged artifact in the way is first moved aside, so that readers see the old folder, none, or the new one.
    """
    manifest = load_manifest(temporary)
    with locked(folder.parent):
        while not _is_renamed(temporary, folder):
            if _is_whole(folder):
                shutil.rmtree(temporary)
                return load_manifest(folder)
            aside = folder.parent / f".damaged-{folder.name}-{uuid.uuid4().hex[:8]}"
            with contextlib.suppress(FileNotFoundError):
                folder.rename(aside)
    _remove_leftovers(folder)
    sync_path(folder.parent)
    return manifest


def _is_renamed(temporary: Path, folder: Path) -> bool:
    """Whether the rename went through; False when another artifact is in the way."""
    try:
        temporary.rename(folder)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            raise
        return False
    return True


def _is_whole(folder: Path) -> bool:
    try:
        manifest = load_manifest(folder)
    except FormatError:
        return False
    return not damaged_files(folder, manifest) and not quarantine_reasons(folder)


def _remove_leftovers(folder: Path) -> None:
    """Delete what dead writers of this identity on this host left, and what was moved aside."""
    prefix = f".tmp-{folder.name}-"
    for path in folder.parent.glob(f"{prefix}*"):
        # A host's name may hold dashes and may begin another host's name.
        host, process, _ = path.name.removeprefix(prefix).rsplit("-", 2)
        if host == socket.gethostname() and _process_is_gone(int(process)):
            shutil.rmtree(path, ignore_errors=True)
    for path in folder.parent.glob(f".damaged-{folder.name}-*"):
        shutil.rmtree(path, ignore_errors=True)


def _process_is_gone(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder against other processes: writers of one identity, and checks which fail at once, take turns."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def replace_file(path: Path, text: str) -> None:
    """Write a small file whole or not at all, also through a power cut."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
