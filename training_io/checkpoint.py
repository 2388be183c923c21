"""Checkpoints: written whole or not at all, verified before they are used.

A checkpoint is a folder `step_000000100/` with `state.pt` (tensors and plain values; loading it runs no code of the
file's) and `checkpoint.json` (step, identities, and the size and SHA-256 of state.pt). It is written in a temporary
sibling, synced and renamed, so what a crash leaves behind has a temporary's name and is no checkpoint. Cost of a save
or load: one pass over the bytes to move them and one to hash them. What a run took lies beside its checkpoint, as
`times_000000100.json`: equal runs have equal checkpoints, and no two take the same time.
"""

import json
import pickle
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from training_io.errors import FormatError, StateMismatch
from training_io.hashing import sha256_file
from training_io.manifest import sync_path

FORMAT = "corpusmill-checkpoint/1"
STATE_NAME = "state.pt"
RECORD_NAME = "checkpoint.json"

# A checkpoint from before these were named has the first four within its plan's identity alone, the others nowhere.
_LATER_NAMES = frozenset(
    {"token_dtype", "eos_id", "capacity", "overlap", "validation", "validation.split", "validation.eval_steps"}
)

_STEP_NAME = re.compile(r"step_(\d{9})")
_TEMPORARY_PREFIX = ".unfinished-"


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A verified checkpoint: what it belongs to and what it holds."""

    path: Path
    step: int
    identities: Mapping[str, Any]
    payload: Mapping[str, Any]
    sha256: str  # of state.pt


def save_checkpoint(
    checkpoint_dir: Path, step: int, payload: Mapping[str, Any], *, identities: Mapping[str, Any], keep_last: int
) -> Path:
    """Write the checkpoint of a step atomically, then drop all but the newest `keep_last`; returns its folder.

    FormatError when that step is there already (another run writes into the folder). One writer a folder: what an
    interrupted save left is removed first.
    """
    assert keep_last >= 1, keep_last
    final = checkpoint_path(checkpoint_dir, step)
    if final.exists():
        raise FormatError(
            f"{final}: expected no checkpoint of step {step:,} yet, found one. Use a folder for each run."
        )
    checkpoint_dir.mkdir(parents=True, exist_ok=True)
    for left in checkpoint_dir.glob(f"{_TEMPORARY_PREFIX}*/"):
        shutil.rmtree(left)
    temporary = checkpoint_dir / f"{_TEMPORARY_PREFIX}{final.name}"
    temporary.mkdir()
    try:
        _write_synced(temporary, step, payload, identities)
        temporary.rename(final)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)  # a full disk would stay full
        raise
    sync_path(checkpoint_dir)
    for old in list_checkpoints(checkpoint_dir)[:-keep_last]:
        _remove(old)
    return final


def checkpoint_path(checkpoint_dir: Path, step: int) -> Path:
    """Folder of a step's checkpoint."""
    return checkpoint_dir / f"step_{step:09d}"


def list_checkpoints(checkpoint_dir: Path) -> list[Path]:
    """Finished checkpoints, oldest step first."""
    if not checkpoint_dir.is_dir():
        return []
    return sorted(path for path in checkpoint_dir.iterdir() if _STEP_NAME.fullmatch(path.name))


def load_newest(checkpoint_dir: Path) -> Checkpoint | None:
    """The newest checkpoint, verified, its tensors on the CPU; None without any, FormatError for a damaged one."""
    checkpoints = list_checkpoints(checkpoint_dir)
    return load_checkpoint(checkpoints[-1]) if checkpoints else None


def load_checkpoint(path: Path) -> Checkpoint:
    """A checkpoint's contents, after its size and SHA-256 were compared; FormatError for a damaged one."""
    remedy = f"Delete {path} to resume from the one before it, or start a new run."
    try:
        record = json.loads((path / RECORD_NAME).read_bytes())
        found_format, expected = record["format"], (record["bytes"], record["sha256"])
        step, identities = int(record["step"]), dict(record["identities"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FormatError(f"{path / RECORD_NAME}: expected a checkpoint record, found {error!r}. {remedy}") from error
    if found_format != FORMAT:
        raise FormatError(f"{path / RECORD_NAME}: expected format {FORMAT}, found {found_format}. {remedy}")
    state = path / STATE_NAME
    found = (state.stat().st_size, sha256_file(state)) if state.is_file() else (0, "no file")
    if found != expected:
        raise FormatError(
            f"{state}: expected {expected[0]:,} bytes with SHA-256 {expected[1][:12]}, found {found[0]:,} bytes with"
            f" {found[1][:12]}. The file was damaged after it was written. {remedy}"
        )
    try:
        payload = torch.load(state, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError) as error:
        raise FormatError(f"{state}: expected tensors and plain values, found {error}. {remedy}") from error
    return Checkpoint(path=path, step=step, identities=identities, payload=payload, sha256=expected[1])


def checkpoint_at(path: Path) -> Checkpoint:
    """The checkpoint whose folder this is, or the newest one in a folder of them; FormatError where there is none."""
    if (path / RECORD_NAME).is_file():
        return load_checkpoint(path)
    newest = load_newest(path)
    if newest is None:
        raise FormatError(f"{path}: expected a checkpoint or a folder of them, found none. Check the path.")
    return newest


def write_times(checkpoint: Path, times: Mapping[str, Any]) -> None:
    """Write beside a checkpoint, which need not be there yet, what its run took so far."""
    checkpoint.parent.mkdir(parents=True, exist_ok=True)
    final = _times_path(checkpoint)
    temporary = final.with_name(f"{_TEMPORARY_PREFIX}{final.name}")
    temporary.write_text(json.dumps(dict(times)) + "\n", encoding="utf-8")
    temporary.replace(final)


def read_times(checkpoint: Path) -> dict[str, Any] | None:
    """What lies beside a checkpoint; None where it was copied alone, FormatError where it is no JSON."""
    path = _times_path(checkpoint)
    if not path.is_file():
        return None
    try:
        return dict(json.loads(path.read_bytes()))
    except ValueError as error:
        raise FormatError(f"{path}: expected JSON, found {error}. Delete it: hours are lost with it.") from error


def check_identities(
    checkpoint: Checkpoint, identities: Mapping[str, Any], may_differ: frozenset[str] = frozenset()
) -> None:
    """StateMismatch naming both values of everything that differs between a checkpoint and this run and may not."""
    unnamed = _LATER_NAMES - checkpoint.identities.keys()
    names = sorted({*checkpoint.identities, *identities} - unnamed - may_differ)
    differing = [
        f"{name}: saved for {checkpoint.identities.get(name)}, this run has {identities.get(name)}"
        for name in names
        if checkpoint.identities.get(name) != identities.get(name)
    ]
    if differing:
        raise StateMismatch(
            f"{checkpoint.path}: expected a checkpoint of this run, found {len(differing):,} difference(s):"
            f" {'; '.join(differing)}. Go on with the same data, tokenizer, model and settings, or start a new run."
        )


def _write_synced(folder: Path, step: int, payload: Mapping[str, Any], identities: Mapping[str, Any]) -> None:
    state = folder / STATE_NAME
    _save_tensors(payload, state)
    record = {
        "format": FORMAT,
        "step": step,
        "identities": dict(identities),
        "bytes": state.stat().st_size,
        "sha256": sha256_file(state),
    }
    (folder / RECORD_NAME).write_text(json.dumps(record, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    for path in (state, folder / RECORD_NAME, folder):
        sync_path(path)


def _save_tensors(payload: Mapping[str, Any], path: Path) -> None:
    with path.open("wb") as file:
        try:
            torch.save(dict(payload), file)
        except RuntimeError as error:  # of PyTorch's writer, which tells positions in the file alone
            if isinstance(error.__context__, OSError):
                raise OSError(f"{path}: the checkpoint was not written, {error.__context__}") from error
            raise


def _times_path(checkpoint: Path) -> Path:
    return checkpoint.with_name(f"times_{checkpoint.name.removeprefix('step_')}.json")


def _remove(checkpoint: Path) -> None:
    # renamed first: a folder that is half deleted must not look like a damaged checkpoint
    doomed = checkpoint.with_name(f"{_TEMPORARY_PREFIX}{checkpoint.name}")
    checkpoint.rename(doomed)
    shutil.rmtree(doomed)
    _times_path(checkpoint).unlink(missing_ok=True)
