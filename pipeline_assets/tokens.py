"""tokens: kept documents -> token ids and one end-of-document id each, by stripe.

The tokenizer is given as a file or trained on a reference set; its canonical fingerprint goes wherever ids go. A
unit's documents are stored in the final order, so that shards are a merge of sorted runs. Promise: decoding gives the
text back, and the end-of-document id is there exactly once, at each document's real end.
"""

import hashlib
from functools import lru_cache
from pathlib import Path
from typing import Any

import dagster as dg
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pipeline_assets.clusters import slice_name
from pipeline_assets.recipe import TrainedTokenizer
from pipeline_assets.report import asset_metadata
from pipeline_assets.source import ROWS_NAME, document_coordinates, pool_names
from pipeline_assets.stripes import (
    Sealed,
    Stage,
    Task,
    asset_spec,
    graph_spec,
    mapped_op,
    materialized,
    planning_op,
    seal_units,
    sealing_op,
    tasks_of,
    units_in,
)
from pipeline_assets.transforms.encode import encode_documents
from pipeline_assets.transforms.rows import doc_id_matrix
from pipeline_assets.transforms.shuffle import order_documents
from resources.artifact_store import ArtifactRef
from resources.tables import read_table, write_array
from resources.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from training_io.errors import RecipeError, SourceError, StateMismatch
from training_io.handoff import TOKENIZER_NAME
from training_io.hashing import sha256_file

TOKENIZER_VERSION = 1
TOKENS_VERSION = 2
TOKENS, LENGTHS, DOC_IDS, ROWS = "tokens.npy", "length.npy", "doc_id.npy", "row.npy"
PLACES = "place.npy"  # int64[n, 2]: row group and row; pool and file are the unit's


def build_tokenizer(stage: Stage, reference_sets: ArtifactRef) -> Sealed:
    """Train the recipe's tokenizer on its sample, or take the given file; either must hold the named EOS."""
    recipe = stage.recipe.tokenizer
    if isinstance(recipe, TrainedTokenizer):
        sample = f"{recipe.sample}.parquet"
        folder, manifest = stage.store.open(reference_sets)
        inputs = {"sample": manifest.files[sample]["sha256"]}
        write = _train(folder / sample, recipe)
    else:
        path = _tokenizer_path(recipe.path, recipe.repository)
        tokenizer = load_tokenizer(path, recipe.eos)
        if recipe.fingerprint is not None and tokenizer.fingerprint != recipe.fingerprint:
            raise StateMismatch(
                f"{path}: expected the tokenizer with fingerprint {recipe.fingerprint[:12]}, found"
                f" {tokenizer.fingerprint[:12]}. Name the right file or mend tokenizer.fingerprint in the recipe."
            )
        inputs = {"file": sha256_file(path)}
        write = _take(tokenizer)
    parameters = recipe.model_dump(mode="json", exclude={"path", "fingerprint"})
    ref = stage.materialize(
        asset="tokenizer", inputs=inputs, parameters=parameters, version=TOKENIZER_VERSION, write=write
    )
    if isinstance(recipe, TrainedTokenizer) and ref.counts["vocab_size"] < recipe.vocab_size:
        stage.warn(
            f"tokenizer: expected {recipe.vocab_size:,} ids, the sample has merges for {ref.counts['vocab_size']:,};"
            " enlarge the sample or lower tokenizer.vocab_size"
        )
    return Sealed(ref=ref, metadata=asset_metadata(stage, ref) | {"fingerprint": ref.counts["fingerprint"]})


def _train(sample: Path, recipe: TrainedTokenizer) -> Any:
    def write(folder: Path) -> dict[str, Any]:
        texts = read_table(sample, ["text"]).column("text").to_pylist()
        (folder / TOKENIZER_NAME).write_bytes(train_tokenizer(texts, recipe.vocab_size, recipe.eos))
        return _tokenizer_counts(load_tokenizer(folder / TOKENIZER_NAME, recipe.eos))

    return write


def _take(tokenizer: Tokenizer) -> Any:
    def write(folder: Path) -> dict[str, Any]:
        (folder / TOKENIZER_NAME).write_text(tokenizer.library.to_str(pretty=False), encoding="utf-8")
        return _tokenizer_counts(tokenizer)

    return write


def _tokenizer_path(path: str | None, repository: str | None) -> Path:
    if path is None:
        raise SourceError(
            f"tokenizer: expected a local copy of {repository}'s tokenizer.json, found no tokenizer.path in the recipe."
            " Fetch the file and name it there."
        )
    if not Path(path).is_file():
        raise SourceError(f"tokenizer: expected a file at {path}, found none. Mend tokenizer.path in the recipe.")
    return Path(path)


def _tokenizer_counts(tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "vocab_size": tokenizer.vocab_size,
        "max_id": tokenizer.max_id,
        "eos_id": tokenizer.eos_id,
        "eos": tokenizer.eos,
        "token_dtype": np.dtype(tokenizer.token_dtype).name,
        "fingerprint": tokenizer.fingerprint,
    }


def open_tokenizer(stage: Stage, tokenizer: ArtifactRef) -> Tokenizer:
    """The materialized tokenizer, ready to encode."""
    return _opened(stage.folder(tokenizer) / TOKENIZER_NAME, tokenizer.digest, stage.recipe.tokenizer.eos)


@lru_cache(maxsize=2)  # GPT-2's takes 0.7 s to load, and every step of a process asks for it
def _opened(path: Path, digest: str, eos: str) -> Tokenizer:
    return load_tokenizer(path, eos)


def plan_tokens(
    stage: Stage, raw_row_groups: ArtifactRef, lsh_clusters: ArtifactRef, tokenizer: ArtifactRef
) -> list[Task]:
    """Each raw unit with its slice of the clusters."""
    return tasks_of(
        [(unit, lsh_clusters, tokenizer) for unit in units_in(stage, raw_row_groups)],
        "units",
        stage.recipe.reading.stripes_read,
    )


def build_tokens(stage: Stage, task: Task) -> list[ArtifactRef]:
    """Encode the kept documents of the task's units."""
    encoder = open_tokenizer(stage, task.units[0][2])
    return [_encode_unit(stage, encoder, unit, clusters) for unit, clusters, _ in task.units]


def _encode_unit(stage: Stage, encoder: Tokenizer, unit: ArtifactRef, clusters: ArtifactRef) -> ArtifactRef:
    order, seed = stage.recipe.splits.order, stage.recipe.seed
    kept = np.asarray(stage.table(clusters, slice_name(unit.unit), ["kept"]).column("kept"))

    def write(folder: Path) -> dict[str, Any]:
        rows = np.flatnonzero(kept)
        read = stage.table(unit, ROWS_NAME, ["doc_id", "text"])
        table = read.take(pa.array(rows))
        doc_ids = doc_id_matrix(table.column("doc_id"))
        coordinates = document_coordinates(stage, [unit])[rows]
        ranked = order_documents(doc_ids, coordinates, order, seed)
        texts = table.column("text").take(pa.array(ranked)).combine_chunks()
        ids, offsets = encode_documents(encoder, texts)
        write_array(ids, folder / TOKENS)
        write_array(np.diff(offsets), folder / LENGTHS)
        write_array(doc_ids[ranked], folder / DOC_IDS)
        write_array(rows[ranked].astype(np.int64), folder / ROWS)
        write_array(coordinates[ranked, 2:], folder / PLACES)
        return {
            "pool": unit.counts["pool"],
            "file": unit.counts["file"],
            "documents": len(rows),
            "tokens": len(ids),
            "text_bytes": int(pc.sum(pc.binary_length(texts), min_count=0).as_py()),
            "removed_tokens": _num_tokens(encoder, read.column("text").filter(pa.array(~kept))),
        }

    return stage.materialize(
        asset="document_tokens",
        unit=unit.unit,
        inputs={
            "rows": unit.digest,
            "kept": hashlib.sha256(kept.tobytes()).hexdigest(),
            "tokenizer": encoder.fingerprint,
        },
        parameters={"order": order, "seed": seed, "eos": encoder.eos},
        version=TOKENS_VERSION,
        write=write,
    )


def _num_tokens(encoder: Tokenizer, removed: pa.ChunkedArray) -> int:
    """What deduplication saved, counted and not stored. The price of the exact number is to tokenize it too."""
    return int(encode_documents(encoder, removed)[1][-1])


def seal_tokens(stage: Stage, parts: list[ArtifactRef], tokenizer: ArtifactRef) -> Sealed:
    """Seal the token units as one asset."""
    counts = {
        name: sum(part.counts[name] for part in parts)
        for name in ("documents", "tokens", "text_bytes", "removed_tokens")
    }
    if not counts["documents"]:
        raise RecipeError(
            "document_tokens: expected at least one kept document, found none."
            " A reference set with action exclude removed all of them; mend references in the recipe."
        )
    ref = seal_units(stage, "document_tokens", parts, counts, TOKENS_VERSION, tokenizer=tokenizer.digest)
    metadata = asset_metadata(stage, ref, parts) | {
        "dagster/row_count": counts["documents"],
        "bytes_a_token": counts["text_bytes"] / counts["tokens"],
        "tokens_a_document": counts["tokens"] / counts["documents"],
        "removed_share_of_tokens": counts["removed_tokens"] / (counts["tokens"] + counts["removed_tokens"]),
    }
    return Sealed(ref=ref, metadata=metadata)


def ordered_documents(stage: Stage, units: list[ArtifactRef]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """All documents of token units in their final order: unit number and row in that unit, two int64[n]."""
    counts = [unit.counts["documents"] for unit in units]
    priority = {name: number for number, name in enumerate(pool_names(stage.recipe))}
    files = [(priority[unit.counts["pool"]], unit.counts["file"]) for unit in units]
    numbers = {file: number for number, file in enumerate(sorted(set(files)))}
    unit_coordinates = np.array([[file[0], numbers[file]] for file in files], np.int64)
    places = np.concatenate([stage.array(unit, PLACES) for unit in units])
    coordinates = np.column_stack([np.repeat(unit_coordinates, counts, axis=0), places])
    doc_ids = np.concatenate([stage.array(unit, DOC_IDS) for unit in units])
    order = order_documents(doc_ids, coordinates, stage.recipe.splits.order, stage.recipe.seed)
    unit_of = np.repeat(np.arange(len(units)), counts)
    row_of = np.concatenate([np.arange(count) for count in counts])
    return unit_of[order], row_of[order]


plan_tokens_op = planning_op("document_tokens", plan_tokens)
build_tokens_op = mapped_op("document_tokens", build_tokens)
seal_tokens_op = sealing_op("document_tokens", seal_tokens)


@dg.asset(
    **asset_spec(
        "tokenizer",
        TOKENIZER_VERSION,
        {"tokenizers"},
        "One pinned tokenizer.json and its canonical fingerprint, given or trained on the tokenizer sample. "
        "Promise: the named end-of-document token is in it.",
    )
)
def tokenizer(context: dg.AssetExecutionContext, reference_sets: ArtifactRef) -> dg.MaterializeResult[ArtifactRef]:
    return materialized(context, build_tokenizer, reference_sets=reference_sets)


@dg.graph_asset(
    **graph_spec(
        "document_tokens",
        TOKENS_VERSION,
        {"numpy", "tokenizers"},
        "Token ids of every kept document, one end-of-document id after each, never truncated. "
        "Promise: decoding gives the text back.",
    )
)
def document_tokens(raw_row_groups, lsh_clusters, tokenizer):  # type: ignore[no-untyped-def]
    tasks = plan_tokens_op(raw_row_groups=raw_row_groups, lsh_clusters=lsh_clusters, tokenizer=tokenizer)
    return seal_tokens_op(parts=tasks.map(build_tokens_op).collect(), tokenizer=tokenizer)
