"""Exports: the documents of token shards, written as other trainers read them.

In: a token_shards artifact, or a hand-off package that holds one. Out: a folder of the format's files, sealed by a
manifest like every artifact's, so that `verify` can check it wherever it goes. The promise: only sealed, unquarantined
and undamaged shards are exported, and all that the manifest lists of a split; the folder is there whole or not at all.
A killed export leaves a hidden sibling `.unfinished-…`, which may be deleted. Cost: shards are hashed and read once,
files written and hashed once.
"""

import errno
import shutil
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from training_io.document_index import read_index
from training_io.errors import FormatError, RecipeError
from training_io.export_datasets import write_datasets
from training_io.export_formats import (
    TokenSplit,
    write_document_cache,
    write_llmc,
    write_mds,
    write_megatron,
    write_nanogpt,
)
from training_io.manifest import (
    MANIFEST_NAME,
    Manifest,
    damaged_files,
    hash_files,
    open_artifact,
    seal_folder,
    sync_path,
)
from training_io.verification import artifacts_at, index_folders

EXPORT_VERSION = 1
FORMATS: dict[str, Callable[[Sequence[TokenSplit], Path], None]] = {
    "document-cache": write_document_cache,
    "nanogpt": write_nanogpt,
    "llm.c": write_llmc,
    "megatron": write_megatron,
    "datasets": write_datasets,
    "mds": write_mds,
}


def export_shards(path: Path, name: str, output: Path, split_names: Sequence[str] = ()) -> Manifest:
    """Write splits of token shards (all of them by default) in a format into a new folder; its manifest.

    A split without documents gets no files. Raises FormatError for shards that may not be read or do not fit the
    format, RecipeError for an unknown format or split, a folder that is not empty or inside an artifact, or nothing to
    export.
    """
    if name not in FORMATS:
        raise RecipeError(f"export: expected a format of {', '.join(FORMATS)}, found {name!r}. Name one of these.")
    output = _free_folder(output)
    artifact, manifest = _open_shards(path)
    splits = _open_splits(artifact, manifest, split_names)
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = output.parent / f".unfinished-{output.name}-{uuid.uuid4().hex[:8]}"
    temporary.mkdir()
    try:
        FORMATS[name]([split for split in splits if split.index.num_documents], temporary)
        exported = _describe(temporary, name, manifest, splits)
        seal_folder(temporary, exported)
        _publish(temporary, output)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return exported


def _free_folder(output: Path) -> Path:
    """Where the export goes, resolved; RecipeError where it cannot go, before anything is written."""
    try:
        output = output.expanduser().resolve()
    except (RuntimeError, ValueError) as error:  # an unknown user, a loop of links, a NUL
        raise RecipeError(f"--output: expected a folder, found {str(output)!r} ({error}). Name another.") from error
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise _occupied(output)
    if output.is_mount():
        raise RecipeError(
            f"--output: expected a folder that can be renamed, found the mount point {output}. Name a folder inside it."
        )
    if sealed := [parent for parent in output.parents if (parent / MANIFEST_NAME).is_file()]:
        raise RecipeError(
            f"--output: expected a folder outside every artifact, found {output} inside the sealed {sealed[0]}."
            " Name another."
        )
    return output


def _open_shards(path: Path) -> tuple[Path, Manifest]:
    """The token_shards artifact that a path is or, as a package, holds."""
    opened = [(artifact, open_artifact(artifact)) for artifact in artifacts_at(path)]
    shards = [(artifact, manifest) for artifact, manifest in opened if manifest.asset == "token_shards"]
    if len(shards) != 1:
        found = ", ".join(manifest.asset for _, manifest in opened)
        raise FormatError(
            f"{path}: expected a token_shards artifact or a package with one, found {found}."
            " Give the folder of token_shards."
        )
    return shards[0]


def _open_splits(artifact: Path, manifest: Manifest, names: Sequence[str]) -> list[TokenSplit]:
    """The splits of these names, or all, after their files have been held against the manifest's hashes."""
    present = [folder.name.removesuffix("_index") for folder in index_folders(artifact, manifest)]
    chosen = [name for name in present if not names or name in names]
    if unknown := sorted(set(names) - set(present)):
        raise RecipeError(
            f"--split: expected splits of {', '.join(present)}, found {', '.join(unknown)}. Name those in {artifact}."
        )
    prefixes = tuple(f"{name}_" for name in chosen)
    own = {name for name in manifest.files if name.startswith(prefixes)}
    if damages := damaged_files(artifact, manifest, own):
        raise FormatError(f"{damages[0]}. The shards are damaged; materialize token_shards again, or copy them again.")
    indexes = [read_index(artifact / f"{name}_index") for name in chosen]
    if unlisted := sorted({file for index in indexes for file in index.files} - own):
        raise FormatError(
            f"{artifact}: expected splits whose files the manifest lists, found {unlisted[0]} unlisted."
            " Materialize token_shards again."
        )
    if not any(index.num_documents for index in indexes):
        raise RecipeError(
            f"{artifact}: expected documents to export, found none in {', '.join(chosen) or 'it'}. Choose other splits."
        )
    return [TokenSplit(artifact=artifact, digest=manifest.digest, index=index) for index in indexes]


def _describe(folder: Path, name: str, shards: Manifest, splits: Sequence[TokenSplit]) -> Manifest:
    indexes = [split.index for split in splits]
    counts: dict[str, Any] = {
        "documents": sum(index.num_documents for index in indexes),
        "tokens": sum(index.num_tokens for index in indexes),
        "splits": {index.split: {"documents": index.num_documents, "tokens": index.num_tokens} for index in indexes},
        "eos_id": indexes[0].eos_id,
        "vocab_size": shards.counts.get("vocab_size"),
    }
    return Manifest(
        asset="export",
        unit=name,
        inputs={
            "token_shards": {"identity": shards.identity, "digest": shards.digest},
            "tokenizer": indexes[0].tokenizer_fingerprint,
        },
        parameters={"splits": [split.name for split in splits]},
        version=EXPORT_VERSION,
        counts=counts,
        files=hash_files(folder),
    )


def _publish(temporary: Path, output: Path) -> None:
    try:
        temporary.rename(output)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            raise
        raise _occupied(output) from error
    sync_path(output.parent)


def _occupied(output: Path) -> RecipeError:
    return RecipeError(
        f"--output: expected a folder that is empty or not there yet, found {output}. Name another, or delete it first."
    )
