"""What each asset stores beside its contracts: columns of arrays and fields of JSON, and where they come from.

In: an artifact's folder and its units. Out: names, types, units and descriptions, the number of rows, and a few rows to
look at. A type is a dtype and a shape, or a JSON type: `uint8[n, 32]` has one entry a row of the asset, other letters
count what the description says. The promise: what is written here is what the files are, and every file is here; tests
compare them. The cost: a few headers and rows; a JSON file is read whole.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipeline_assets.stripes import SAMPLE_ROWS, Stage
from pipeline_assets.transforms.lookup import printable
from resources.artifact_store import ArtifactRef
from resources.tables import read_array, read_json

SHOWN_VALUES = 8  # of a row of an array
TRAIN_FIRST = "train"

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class StoredColumn:
    """One array, JSON field or file of an asset's artifact or units.

    `file` is a pattern below their folder; `key` leads to the field of a JSON file, `[]` from a list to its elements
    and `{}` from an object to its values.
    """

    name: str
    type: str
    description: str
    file: str
    key: str = ""
    unit: str = ""
    is_optional: bool = False


@dataclass(frozen=True, kw_only=True)
class StoredRows:
    """How many rows an asset has, and the first few of them."""

    num_rows: int
    sample: Sequence[Row]


@dataclass(frozen=True, kw_only=True)
class StoredAsset:
    """An asset without a contract: its columns, and how its rows are counted and sampled.

    `rows` takes the stage, the asset's reference and those of its units.
    """

    columns: tuple[StoredColumn, ...]
    rows: Callable[[Stage, ArtifactRef, Sequence[ArtifactRef]], StoredRows]


def rows_of(stage: Stage, ref: ArtifactRef, parts: Sequence[ArtifactRef]) -> StoredRows:
    """The rows of an asset that is in STORED."""
    return STORED[ref.asset].rows(stage, ref, parts)


def _array(name: str, type: str, description: str, file: str = "", unit: str = "") -> StoredColumn:
    return StoredColumn(name=name, type=type, description=description, file=file or f"{name}.npy", unit=unit)


def _fields(file: str, prefix: str, fields: Mapping[str, tuple[str, ...]], parent: str = "") -> list[StoredColumn]:
    """Fields of one JSON file: each a type, a description and, where it has one, a unit."""
    return [
        StoredColumn(
            name=f"{prefix}{key}",
            type=kind,
            description=description,
            file=file,
            key=f"{parent}{key}",
            unit="".join(unit),
        )
        for key, (kind, description, *unit) in fields.items()
    ]


def _shown(values: Any) -> Any:
    """A row's entry as one printable cell: raw bytes, a number, or the first of several numbers."""
    if isinstance(values, np.ndarray) and values.dtype == np.uint8:
        return values.tobytes()
    if isinstance(values, np.ndarray) and values.ndim:
        listed = ", ".join(map(str, values[:SHOWN_VALUES].tolist()))
        return f"{listed}, … ({len(values):,})" if len(values) > SHOWN_VALUES else listed
    return values.item() if isinstance(values, np.generic) else values


def _first_rows(folder: Path, names: Sequence[str]) -> list[Row]:
    """The first rows of arrays of equal length, `<name>.npy` each."""
    arrays = [read_array(folder / f"{name}.npy")[:SAMPLE_ROWS] for name in names]
    return [dict(zip(names, map(_shown, row), strict=True)) for row in zip(*arrays, strict=True)]


def _filled(refs: Sequence[ArtifactRef]) -> ArtifactRef:
    """The first unit that holds a document; an asset without any is never sealed."""
    return next(ref for ref in refs if ref.counts.get("documents"))


def _splits(counts: Mapping[str, Mapping[str, Any]], counted: str) -> Iterator[str]:
    """Splits that hold any of what is counted, training first."""
    return (name for name in sorted(counts, key=lambda name: (name != TRAIN_FIRST, name)) if counts[name][counted])


SIGNATURES = StoredAsset(
    columns=(
        _array("doc_id", "uint8[n, 32]", "SHA-256 of the text's UTF-8 bytes"),
        _array(
            "signatures",
            "uint32[n, num_perm]",
            "MinHash values of the document's shingles, bands × rows a band of them; all bits set where it has no word",
        ),
        _array("text_bytes", "int64[n]", "UTF-8 bytes of the text", unit="bytes"),
        _array("band_keys", "uint64[k]", "Keys of the bands of all documents that have a word, sorted by value"),
        _array("band_rows", "uint32[k]", "The document of each band key, by its place in the unit", unit="rows"),
    ),
    rows=lambda stage, ref, parts: StoredRows(
        num_rows=ref.counts["documents"],
        sample=_first_rows(stage.folder(_filled(parts)), ["doc_id", "signatures", "text_bytes"]),
    ),
)


TOKENS = StoredAsset(
    columns=(
        _array("doc_id", "uint8[n, 32]", "SHA-256 of the text's UTF-8 bytes"),
        _array("tokens", "uint16|uint32[t]", "Token ids, document after document, each with its EOS", unit="tokens"),
        _array("length", "int64[n]", "Tokens of the document, the end-of-document token included", unit="tokens"),
        _array("row", "int64[n]", "Place of the document among its raw unit's rows", unit="rows"),
        _array("place", "int64[n, 2]", "Source coordinate within the file: row group, and row within it"),
    ),
    rows=lambda stage, ref, parts: StoredRows(
        num_rows=ref.counts["documents"], sample=_token_rows(stage.folder(_filled(parts)))
    ),
)


def _token_rows(folder: Path) -> list[Row]:
    rows = _first_rows(folder, ["doc_id", "length", "row", "place"])
    tokens, ends = read_array(folder / "tokens.npy"), np.cumsum([0, *(row["length"] for row in rows)])
    return [
        row | {"tokens": _shown(tokens[end - row["length"] : end])} for row, end in zip(rows, ends[1:], strict=True)
    ]


TOKENIZER_FILE = "tokenizer.json"
TOKENIZER = StoredAsset(
    columns=(
        StoredColumn(
            name="vocabulary",
            type="object|array",
            description="Each token, as the model spells it, with its id; or, in the order of ids, with its score",
            file=TOKENIZER_FILE,
            key="model.vocab",
        ),
        *_fields(
            TOKENIZER_FILE,
            "",
            {
                "version": ("string", "Version of the file's format"),
                "model": ("object", "The model: its type, vocabulary, merges and options"),
                "added_tokens": ("array", "Tokens that are matched as a whole, each with its id and how it is matched"),
                "normalizer": ("object|null", "What is done to a text first"),
                "pre_tokenizer": ("object|null", "How a text is cut before the model sees it"),
                "post_processor": ("object|null", "What is added to the ids of a text"),
                "decoder": ("object|null", "How tokens become a text again"),
                "truncation": ("object|null", "How ids are cut short; it is not used"),
                "padding": ("object|null", "How ids are padded; it is not used"),
            },
        ),
    ),
    rows=lambda stage, ref, parts: vocabulary_rows(stage.folder(ref) / TOKENIZER_FILE),
)


def vocabulary_rows(path: Path) -> StoredRows:
    """The model's own vocabulary in a tokenizer.json, and entries of it from the first id to the last."""
    vocabulary = read_json(path)["model"]["vocab"]
    pairs = vocabulary.items() if isinstance(vocabulary, dict) else ((one[0], at) for at, one in enumerate(vocabulary))
    by_id = sorted((number, token) for token, number in pairs)
    places = np.unique(np.linspace(0, len(by_id) - 1, SAMPLE_ROWS).astype(np.int64)).tolist()
    sample = [{"token": printable(by_id[place][1]), "id": by_id[place][0]} for place in places]
    return StoredRows(num_rows=len(by_id), sample=sample)


TOKENIZER_REPORT_FILE = "report.json"
TOKENIZER_REPORT = StoredAsset(
    columns=(
        *_fields(
            TOKENIZER_REPORT_FILE,
            "",
            {
                "tokenizer": ("string", "The recipe's name of it, `chosen` for the one in use"),
                "vocabulary": ("integer", "Rows of its embedding table: the largest id and one", "tokens"),
                "tokens_estimated": ("integer", "Tokens of all kept documents, estimated from the sample", "tokens"),
                "tokens_to_chosen": ("number", "The same over the chosen tokenizer's"),
                "bytes_a_token": ("number", "UTF-8 bytes of text for each token", "bytes"),
                "round_trip_share": ("number", "Share of sampled documents that decode to their text"),
                "table_parameters": ("integer", "Parameters of the embedding table in the compared model"),
                "table_share_of_model": ("number", "The same over all its parameters"),
                "multiply_adds_a_byte": ("number", "Multiply-adds of the model for each byte of text"),
                "encoder": ("string", "What encodes: `words` is our own, `library` the tokenizers library"),
                "because": ("string", "Why that one"),
                "eos": ("string", "The end-of-document token"),
                "fingerprint": ("string", "SHA-256 of the tokenizer's canonical form"),
            },
            "tokenizers[].",
        ),
        *_fields(
            TOKENIZER_REPORT_FILE,
            "",
            {
                "pools": ("array", "One row a tokenizer and pool: documents, bytes, tokens, round trips, lengths"),
                "inventory": ("array", "One row a pool: documents, bytes and tokens of all that is kept"),
            },
        ),
    ),
    rows=lambda stage, ref, parts: _listed(read_json(stage.folder(ref) / TOKENIZER_REPORT_FILE)["tokenizers"]),
)


def _listed(rows: Sequence[Row]) -> StoredRows:
    return StoredRows(num_rows=len(rows), sample=rows[:SAMPLE_ROWS])


def _index_columns(folder: str) -> tuple[StoredColumn, ...]:
    """The document index of each split, and the shards beside it."""
    index = f"{folder}*_index/"
    return (
        _array("doc_id", "uint8[n, 32]", "SHA-256 of the text's UTF-8 bytes", f"{index}doc_id.npy"),
        _array("pool", "uint16[n]", "Pool of the document, by its place in index.pools", f"{index}pool.npy"),
        _array("shard", "int32[n]", "Shard that holds it, by its place in index.shards", f"{index}shard.npy"),
        _array("offset", "int64[n]", "Its first token, counted from the shard's first", f"{index}offset.npy", "tokens"),
        _array("length", "int64[n]", "Its tokens, the end-of-document token included", f"{index}length.npy", "tokens"),
        _array(
            "tokens",
            "uint16|uint32[t]",
            "Token ids of the shard, behind a header of 256 int32: magic, version, t, and zeros",
            f"{folder}*.bin",
            "tokens",
        ),
        *_fields(
            f"{index}index.json",
            "index.",
            {
                "format": ("string", "Format of the index"),
                "split": ("string", "Split"),
                "pools": ("array", "Names of the pools in order of priority"),
                "num_documents": ("integer", "Documents in the split", "documents"),
                "num_tokens": ("integer", "Tokens in its shards", "tokens"),
                "shards": ("array", "File and tokens of each shard, in order"),
                "eos_id": ("integer", "Id of the end-of-document token"),
                "token_dtype": ("string", "dtype of the shards' tokens"),
                "tokenizer_fingerprint": ("string", "SHA-256 of the canonical form of the tokenizer that made them"),
            },
        ),
    )


SHARDS = StoredAsset(
    columns=_index_columns(""),
    rows=lambda stage, ref, parts: StoredRows(
        num_rows=ref.counts["documents"],
        sample=_index_rows(stage.folder(ref), next(_splits(ref.counts["splits"], "documents"))),
    ),
)


def _index_rows(folder: Path, split: str) -> list[Row]:
    rows = _first_rows(folder / f"{split}_index", ["doc_id", "pool", "shard", "offset", "length"])
    return [{"split": split} | row for row in rows]


PLAN_DTYPE = "uint32|int64"  # the wider one where the narrow one does not do
PLAN = StoredAsset(
    columns=(
        _array(
            "targets",
            f"{PLAN_DTYPE}[n]",
            "Tokens of the pack that are predicted, with a loss",
            "*/pack_targets.npy",
            "tokens",
        ),
        _array(
            "sum_squares",
            f"{PLAN_DTYPE}[n]",
            "Sum of the squared lengths of the pack's segments: the work of attention",
            "*/pack_sum_squares.npy",
        ),
        _array(
            "offsets",
            f"{PLAN_DTYPE}[n + 1]",
            "Where each pack's segments begin in `order`, and where the last one's end",
            "*/pack_offsets.npy",
        ),
        _array("order", f"{PLAN_DTYPE}[s]", "Numbers of all segments, pack after pack", "*/order.npy"),
        StoredColumn(
            name="schedule",
            type=f"{PLAN_DTYPE}[k]",
            description="Packs in the order of reading, where the recipe mixes pools",
            file="*/schedule.npy",
            is_optional=True,
        ),
        *_fields(
            "*/plan.json",
            "plan.",
            {
                "format": ("string", "Format of the plan"),
                "split": ("string", "Split"),
                "shards": ("object", "The token_shards artifact: path, identity and digest"),
                "strategy": ("string", "How segments were put into packs"),
                "buffer": ("integer", "Segments that may wait for a pack, where the strategy packs as they arrive"),
                "capacity": ("integer", "Most tokens of a pack", "tokens"),
                "max_seq_len": ("integer", "Most tokens of a segment that are inputs", "tokens"),
                "long_documents": ("string", "What becomes of documents of more inputs than max_seq_len"),
                "overlap": ("integer", "Inputs that a segment repeats of the one before it, untrained", "tokens"),
                "packs_per_microbatch": ("integer", "Packs of a microbatch", "packs"),
                "microbatches_per_step": ("integer", "Microbatches of a step"),
                "epoch_seed": ("integer", "Seed of the order of packs in an epoch"),
                "stages": ("array", "Stages of the mixture; none without one"),
                "num_documents": ("integer", "Documents in the split", "documents"),
                "num_diverted": ("integer", "Documents in no pack, being too long", "documents"),
                "num_segments": ("integer", "Segments in packs", "segments"),
                "num_packs": ("integer", "Packs", "packs"),
                "num_scheduled": ("integer", "Packs that an epoch reads", "packs"),
                "num_steps": ("integer", "Steps of an epoch", "steps"),
                "num_targets": ("integer", "Tokens with a loss when each pack is read once", "tokens"),
                "eos_id": ("integer", "Id of the end-of-document token"),
                "token_dtype": ("string", "dtype of the shards' tokens"),
                "tokenizer_fingerprint": ("string", "SHA-256 of the canonical form of the tokenizer"),
            },
        ),
        *_fields(
            "*/snapshots.json",
            "snapshots.",
            {
                "format": ("string", "Format of the snapshots"),
                "snapshots": ("array", "The packer's state before every so many packs, from which packing goes on"),
            },
        ),
    ),
    rows=lambda stage, ref, parts: StoredRows(
        num_rows=ref.counts["packs"],
        sample=[
            row
            for split in itertools.islice(_splits(ref.counts["splits"], "packs"), 1)
            for row in _pack_rows(stage.folder(ref) / split)
        ],
    ),
)


def _pack_rows(folder: Path) -> list[Row]:
    offsets, order = read_array(folder / "pack_offsets.npy")[: SAMPLE_ROWS + 1], read_array(folder / "order.npy")
    targets, squares = read_array(folder / "pack_targets.npy"), read_array(folder / "pack_sum_squares.npy")
    return [
        {
            "split": folder.name,
            "pack": pack,
            "segments": _shown(order[start:end]),
            "targets": int(targets[pack]),
            "sum_squares": int(squares[pack]),
        }
        for pack, (start, end) in enumerate(itertools.pairwise(offsets.tolist()))
    ]


STATS_FILE = "stats.json"
STATS = StoredAsset(
    columns=(
        *_fields(
            STATS_FILE,
            "",
            {
                "layout": ("string", "How documents are laid into rows"),
                "row_length": ("integer", "Cells of a row", "tokens"),
                "rows": ("integer", "Rows", "rows"),
                "cells": ("integer", "Cells of all rows", "tokens"),
                "tokens": ("integer", "Cells that hold a token", "tokens"),
                "utilisation": ("number", "Tokens over cells"),
                "rows_above_minimum": ("integer", "Rows beyond the fewest that so many tokens need", "rows"),
                "tokens_left_out": ("integer", "Tokens that are in no row", "tokens"),
                "documents": ("integer", "Documents that are laid out", "documents"),
                "documents_cut": ("integer", "Documents that are in more than one row, or not whole", "documents"),
                "segments": ("integer", "Parts of documents that lie in one row", "segments"),
                "causal_pairs": ("integer", "Query-key pairs when every row is one causal sequence"),
                "varlen_pairs": ("integer", "Query-key pairs when every segment is"),
            },
            "all_layouts[].",
        ),
        *_fields(
            STATS_FILE,
            "",
            {
                "layouts": ("array", "The rows of all_layouts at the plan's own limits"),
                "strategies": ("array", "Packs, waste and displacement by strategy at the plan's own limits"),
                "utilisation_by_row_length": ("array", "Utilisation of each layout by row length"),
                "rows_by_row_length": ("array", "Rows of each layout by row length"),
                "windows": ("array", "What windows over the concatenated documents mix, cut and leave out"),
                "attention_work": ("array", "Query-key pairs a token of padded, masked and varlen batches"),
                "counted_apart": ("array", "Documents, segments, packs, tokens and targets of each split"),
                "lengths": ("array", "Quantiles of the lengths of documents and segments"),
                "choices": ("array", "What speaks for and against each way of making batches"),
            },
        ),
    ),
    rows=lambda stage, ref, parts: _listed(read_json(stage.folder(ref) / STATS_FILE)["all_layouts"]),
)

PACKAGE_FILE = "package.json"
PACKAGE = StoredAsset(
    columns=(
        *_index_columns("token_shards/*/*/"),
        *_fields(
            PACKAGE_FILE,
            "",
            {
                "format": ("string", "Format of the package"),
                "recipe": ("object", "The recipe, without the paths of the machine that made it"),
                "tokenizer": ("object", "Its file, fingerprint, ids and end-of-document token"),
                "data": ("object", "Source files with sizes and footers, splits, where the documents' ids are"),
                "sequence_rules": ("object", "Length, attention, positions, loss and end of document"),
                "quotas": ("object", "Documents and tokens of each pool in each split"),
                "mixture": ("object", "Stages of the mixture and the ledger of what they read"),
                "counting_rules": ("string", "What counts as a token and as a target"),
                "sampling": ("object", "How packs are made and read"),
                "plans": ("object", "Path and identity of each split's plan"),
                "reading_state": ("object", "State of a reader that has read nothing, by split"),
                "self_test": ("object", "Small documents and their token ids"),
            },
        ),
        StoredColumn(name="tokenizer_file", type="file", description="The tokenizer", file=TOKENIZER_FILE),
        StoredColumn(
            name="packing_plan", type="file", description="The plans of all splits", file="packing_plan/*/*/*/*"
        ),
        StoredColumn(
            name="manifests", type="file", description="Manifests of the linked artifacts", file="*/*/*/manifest.json"
        ),
    ),
    rows=lambda stage, ref, parts: StoredRows(
        num_rows=ref.counts["documents"], sample=_package_rows(stage.folder(ref))
    ),
)


def _package_rows(folder: Path) -> list[Row]:
    data = read_json(folder / PACKAGE_FILE)["data"]
    split = next(_splits(data["splits"], "documents"))
    return _index_rows((folder / data["document_ids"][split]).parents[1], split)


CURVES_FILE = "curves.json"
TRAINING = StoredAsset(
    columns=(
        *_fields(
            CURVES_FILE,
            "",
            {
                "train": ("array", "Loss of each step, summed cross-entropy over its targets", "nats"),
                "gradient_norms": ("array", "Norm of each step's gradient, before clipping"),
                "validation": ("array", "Step and loss of each validation", "nats"),
                "validation_by_pool": ("object", "The same by pool", "nats"),
            },
        ),
        *_fields(
            "checkpoint/checkpoint.json",
            "checkpoint.",
            {
                "format": ("string", "Format of the checkpoint"),
                "step": ("integer", "Steps that were trained", "steps"),
                "identities": ("object", "What a run that goes on from it must have in common with this one"),
                "bytes": ("integer", "Size of state.pt", "bytes"),
                "sha256": ("string", "SHA-256 of state.pt"),
            },
        ),
        StoredColumn(
            name="checkpoint.state",
            type="file",
            description="Model, optimizer and reading state, in PyTorch's format; loading it runs no code of its own",
            file="checkpoint/state.pt",
        ),
    ),
    rows=lambda stage, ref, parts: _steps(read_json(stage.folder(ref) / CURVES_FILE)),
)


def _steps(curves: Mapping[str, Any]) -> StoredRows:
    losses, norms, held_out = curves["train"], curves["gradient_norms"], dict(curves["validation"])
    places = np.unique(np.linspace(1, len(losses), SAMPLE_ROWS).astype(np.int64)).tolist()
    sample = [
        {"step": step, "train": losses[step - 1], "gradient_norms": norms[step - 1], "validation": held_out.get(step)}
        for step in places
    ]
    return StoredRows(num_rows=len(losses), sample=sample)


VERDICTS_FILE = "report.json"
QUALITY = StoredAsset(
    columns=(
        StoredColumn(
            name="outcome",
            type="object",
            description="By the name of a check what it last said of the present bytes: passed, warned, failed, or not"
            " counted",
            file=VERDICTS_FILE,
        ),
        StoredColumn(name="page", type="file", description="The page itself, to be opened", file="report.html"),
    ),
    rows=lambda stage, ref, parts: _outcomes(read_json(stage.folder(ref) / VERDICTS_FILE)),
)


def _outcomes(outcomes: Mapping[str, str]) -> StoredRows:
    """What did not pass comes first."""
    ordered = sorted(outcomes.items(), key=lambda entry: entry[1] == "passed")
    return _listed([{"check": check, "outcome": outcome} for check, outcome in ordered])


STORED: Mapping[str, StoredAsset] = {
    "minhash_signatures": SIGNATURES,
    "document_tokens": TOKENS,
    "tokenizer": TOKENIZER,
    "tokenizer_report": TOKENIZER_REPORT,
    "token_shards": SHARDS,
    "packing_plan": PLAN,
    "packing_stats": STATS,
    "handoff_package": PACKAGE,
    "varlen_training_run": TRAINING,
    "quality_report": QUALITY,
}
"""Every asset whose rows are in no table under a contract."""

Source = tuple[str, str]  # an asset upstream, and its column

LINEAGE: Mapping[str, Mapping[str, tuple[Source, ...]]] = {
    "reference_sets": {
        "doc_id": (("raw_row_groups", "doc_id"),),
        "text": (("raw_row_groups", "text"),),
    },
    "minhash_signatures": {"doc_id": (("raw_row_groups", "doc_id"),)},
    "lsh_clusters": {"doc_id": (("minhash_signatures", "doc_id"),)},
    "document_tokens": {
        "doc_id": (("raw_row_groups", "doc_id"),),
        "place": (("raw_row_groups", "row_group"), ("raw_row_groups", "row")),
    },
    "split_documents": {
        "doc_id": (("document_tokens", "doc_id"),),
        "text": (("raw_row_groups", "text"),),
        "num_tokens": (("document_tokens", "length"),),
        "cluster_id": (("lsh_clusters", "cluster_id"),),
        "pool": (("raw_row_groups", "pool"),),
    },
    "token_shards": {
        "doc_id": (("document_tokens", "doc_id"),),
        "length": (("document_tokens", "length"),),
        "tokens": (("document_tokens", "tokens"),),
        "pool": (("split_documents", "pool"),),
    },
    "handoff_package": {
        name: (("token_shards", name),) for name in ("doc_id", "pool", "shard", "offset", "length", "tokens")
    },
}
"""Columns that carry through: a document has the same value in the asset and upstream. One that has several sources
holds their values side by side; a pool is a name or its number among the recipe's.
"""
