"""tokens: kept documents -> token ids and one end-of-document id each, by stripe.

The tokenizer's fingerprint goes wherever ids go. A unit's documents are stored in the final order, so that shards are a
merge of sorted runs. Promise: decoding gives the text back, and the end-of-document id is there exactly once, at each
document's real end.
"""

import hashlib
from pathlib import Path
from typing import Any

import dagster as dg
import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from pipeline_assets.clusters import slice_name
from pipeline_assets.ops import graph_spec, mapped_op, planning_op, sealing_op
from pipeline_assets.report import asset_metadata
from pipeline_assets.source import ROWS_NAME, document_coordinates, pool_names
from pipeline_assets.stripes import Sealed, Stage, Task, build_each, seal_units, tasks_of, units_in
from pipeline_assets.tokenizer import open_tokenizer
from pipeline_assets.transforms.arrays import located
from pipeline_assets.transforms.encode import encode_documents, way_of_encoding
from pipeline_assets.transforms.merge import gather_rows, merge_documents
from pipeline_assets.transforms.rows import doc_id_matrix
from pipeline_assets.transforms.shuffle import order_by_keys, order_documents, order_keys
from resources.artifact_store import ArtifactRef
from resources.tables import MappedArrays, write_array
from resources.tokenizer import Tokenizer
from training_io.errors import RecipeError

TOKENS_VERSION = 3
TOKENS, LENGTHS, DOC_IDS, ROWS = "tokens.npy", "length.npy", "doc_id.npy", "row.npy"
PLACES = "place.npy"  # int64[n, 2]: row group and row; pool and file are the unit's


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
    return build_each(stage, task, lambda unit: _encode_unit(stage, encoder, *unit[:2]))


def _encode_unit(stage: Stage, encoder: Tokenizer, unit: ArtifactRef, clusters: ArtifactRef) -> ArtifactRef:
    kept = np.asarray(stage.table(clusters, slice_name(unit.unit), ["kept"]).column("kept"), np.bool_)
    return stage.materialize(
        asset="document_tokens",
        unit=unit.unit,
        inputs={
            "rows": unit.digest,
            "kept": hashlib.sha256(kept.tobytes()).hexdigest(),
            "tokenizer": encoder.fingerprint,
        },
        parameters={"order": stage.recipe.splits.order, "seed": stage.recipe.seed, "eos": encoder.eos},
        version=TOKENS_VERSION,
        write=lambda folder: _write_tokens(stage, folder, encoder, unit, kept),
    )


def _write_tokens(
    stage: Stage, folder: Path, encoder: Tokenizer, unit: ArtifactRef, kept: npt.NDArray[np.bool_]
) -> dict[str, Any]:
    """Tokens and columns of the kept documents, in the order of the splits; returns the counts."""
    doc_ids = doc_id_matrix(stage.table(unit, ROWS_NAME, ["doc_id"]).column("doc_id"))
    coordinates = document_coordinates(stage, [unit])
    rows = np.flatnonzero(kept)
    rows = rows[order_documents(doc_ids[rows], coordinates[rows], stage.recipe.splits.order, stage.recipe.seed)]
    # Removed texts are encoded too, which is the price of counting what deduplication saved. All are encoded as
    # they lie, and the tokens put in order: they take a fourth of what the texts do.
    texts = stage.table(unit, ROWS_NAME, ["text"]).column("text")
    ids, offsets = encode_documents(encoder, texts)
    lengths = np.diff(offsets)
    ranked = merge_documents([ids], np.zeros_like(rows), offsets[rows], lengths[rows], ids.dtype)
    write_array(ranked, folder / TOKENS)
    write_array(lengths[rows], folder / LENGTHS)
    write_array(doc_ids[rows], folder / DOC_IDS)
    write_array(rows, folder / ROWS)
    write_array(coordinates[rows, 2:], folder / PLACES)
    return {
        "pool": unit.counts["pool"],
        "file": unit.counts["file"],
        "documents": len(rows),
        "tokens": len(ranked),
        "text_bytes": int(np.asarray(pc.binary_length(texts), np.int64)[kept].sum()),
        "removed_tokens": len(ids) - len(ranked),
        "encoded_by": way_of_encoding(encoder),
    }


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
        "encoded_by": "; ".join(sorted({part.counts["encoded_by"] for part in parts})),
        "bytes_a_token": counts["text_bytes"] / counts["tokens"],
        "tokens_a_document": counts["tokens"] / counts["documents"],
        "removed_share_of_tokens": counts["removed_tokens"] / (counts["tokens"] + counts["removed_tokens"]),
    }
    return Sealed(ref=ref, metadata=metadata)


def stored_arrays(stage: Stage, units: list[ArtifactRef], name: str) -> MappedArrays:
    """The units' arrays of one name; none is in memory before it is asked for, or after."""
    return MappedArrays([stage.folder(unit) / name for unit in units])


def ordered_documents(stage: Stage, units: list[ArtifactRef]) -> npt.NDArray[np.int64]:
    """All documents of token units in their final order, int64[n]: each one's number, counted through the units."""
    priority = {name: number for number, name in enumerate(pool_names(stage.recipe))}
    files = [(priority[unit.counts["pool"]], unit.counts["file"]) for unit in units]
    numbers = {file: number for number, file in enumerate(sorted(set(files)))}
    unit_coordinates = np.array([[file[0], numbers[file]] for file in files], np.int64)
    doc_ids, places = stored_arrays(stage, units, DOC_IDS), stored_arrays(stage, units, PLACES)
    firsts = np.cumsum([0, *(unit.counts["documents"] for unit in units)])

    def keys(doc_ids: npt.NDArray[np.uint8], unit: Any, places: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
        files = np.broadcast_to(unit_coordinates[unit], (len(places), 2))
        return order_keys(doc_ids, np.column_stack([files, places]), stage.recipe.splits.order, stage.recipe.seed)

    def keys_of(rows: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
        unit_of, row_of = located(firsts, rows)
        return keys(gather_rows(doc_ids, unit_of, row_of), unit_of, gather_rows(places, unit_of, row_of))

    first = [keys(*unit)[:, 0].copy() for unit in zip(doc_ids, range(len(units)), places, strict=True)]
    return order_by_keys(np.concatenate(first), keys_of)


plan_tokens_op = planning_op("document_tokens", plan_tokens)
build_tokens_op = mapped_op("document_tokens", build_tokens)
seal_tokens_op = sealing_op("document_tokens", seal_tokens)


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
