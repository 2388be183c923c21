"""Stored columns from packs to training: plans, their statistics, the package, a run's curves, the report.

In: artifacts of those assets. Out: a `StoredAsset` each. The promise: what is written here is what the files are, and
every file is here; tests compare them.
"""

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline_assets.measures import SHARE
from pipeline_assets.stored import (
    Row,
    StoredAsset,
    StoredColumn,
    StoredRows,
    describe_array,
    describe_fields,
    find_splits,
    sample_rows,
    show_values,
)
from pipeline_assets.stored_documents import describe_index, read_index_rows
from pipeline_assets.stripes import SAMPLE_ROWS
from resources.tables import read_array, read_json
from training_io.handoff import PACKAGE_NAME, TOKENIZER_NAME
from training_io.places import spread_places

PLAN_DTYPE = "uint32|int64"  # the wider one where the narrow one does not do
PLAN = StoredAsset(
    columns=(
        describe_array(
            "targets",
            f"{PLAN_DTYPE}[n]",
            "Tokens of the pack that are predicted, with a loss",
            "*/pack_targets.npy",
            "tokens",
        ),
        describe_array(
            "sum_squares",
            f"{PLAN_DTYPE}[n]",
            "Sum of the squared lengths of the pack's segments: the work of attention",
            "*/pack_sum_squares.npy",
            "squared tokens",
        ),
        describe_array(
            "offsets",
            f"{PLAN_DTYPE}[n + 1]",
            "Where each pack's segments begin in `order`, and where the last one's end",
            "*/pack_offsets.npy",
        ),
        describe_array("order", f"{PLAN_DTYPE}[s]", "Numbers of all segments, pack after pack", "*/order.npy"),
        StoredColumn(
            name="schedule",
            type=f"{PLAN_DTYPE}[k]",
            description="Packs in the order of reading, where the recipe mixes pools",
            file="*/schedule.npy",
            is_optional=True,
        ),
        *describe_fields(
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
        *describe_fields(
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
            for split in find_splits(ref.counts["splits"], "packs")[:1]
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
            "segments": show_values(order[start:end]),
            "targets": int(targets[pack]),
            "sum_squares": int(squares[pack]),
        }
        for pack, (start, end) in enumerate(itertools.pairwise(offsets.tolist()))
    ]


TABLES_NAME = "stats.json"
STATS = StoredAsset(
    columns=(
        *describe_fields(
            TABLES_NAME,
            "",
            {
                "layout": ("string", "How documents are laid into rows"),
                "row_length": ("integer", "Cells of a row", "tokens"),
                "rows": ("integer", "Rows", "rows"),
                "cells": ("integer", "Cells of all rows", "tokens"),
                "tokens": ("integer", "Cells that hold a token", "tokens"),
                "utilisation": ("number", "Tokens over cells", SHARE),
                "rows_above_minimum": ("integer", "Rows beyond the fewest that so many tokens need", "rows"),
                "tokens_left_out": ("integer", "Tokens that are in no row", "tokens"),
                "documents": ("integer", "Documents that are laid out", "documents"),
                "documents_cut": ("integer", "Documents that are in more than one row, or not whole", "documents"),
                "segments": ("integer", "Parts of documents that lie in one row", "segments"),
                "causal_pairs": ("integer", "Query-key pairs when every row is one causal sequence", "pairs"),
                "varlen_pairs": ("integer", "Query-key pairs when every segment is", "pairs"),
            },
            "all_layouts[].",
        ),
        *describe_fields(
            TABLES_NAME,
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
    rows=lambda stage, ref, parts: sample_rows(read_json(stage.folder(ref) / TABLES_NAME)["all_layouts"]),
)

PACKAGE = StoredAsset(
    columns=(
        *describe_index("token_shards/*/*/"),
        *describe_fields(
            PACKAGE_NAME,
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
        StoredColumn(name="tokenizer_file", type="file", description="The tokenizer", file=TOKENIZER_NAME),
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
    data = read_json(folder / PACKAGE_NAME)["data"]
    split = find_splits(data["splits"], "documents")[0]
    return read_index_rows((folder / data["document_ids"][split]).parents[1], split)


CURVES_NAME = "curves.json"
TRAINING = StoredAsset(
    columns=(
        *describe_fields(
            CURVES_NAME,
            "",
            {
                "train": ("array", "Loss of each step, summed cross-entropy over its targets", "nats"),
                "gradient_norms": ("array", "Norm of each step's gradient, before clipping", "L2 norm"),
                "validation": ("array", "Step and loss of each validation", "nats"),
                "validation_by_pool": ("object", "The same by pool", "nats"),
            },
        ),
        *describe_fields(
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
    rows=lambda stage, ref, parts: _steps(read_json(stage.folder(ref) / CURVES_NAME)),
)


def _steps(curves: Mapping[str, Any]) -> StoredRows:
    losses, norms, held_out = curves["train"], curves["gradient_norms"], dict(curves["validation"])
    sample = [
        {"step": at + 1, "train": losses[at], "gradient_norms": norms[at], "validation": held_out.get(at + 1)}
        for at in spread_places(len(losses), SAMPLE_ROWS)
    ]
    return StoredRows(num_rows=len(losses), sample=sample)


PAGE_NAME, FACTS_NAME = "report.html", "report.json"
QUALITY = StoredAsset(
    columns=(
        StoredColumn(
            name="outcome",
            type="object",
            description="By the name of a check what it last said of the present bytes: passed, warned, failed, or not"
            " counted",
            file=FACTS_NAME,
        ),
        StoredColumn(name="page", type="file", description="The page itself, to be opened", file=PAGE_NAME),
    ),
    rows=lambda stage, ref, parts: _outcomes(read_json(stage.folder(ref) / FACTS_NAME)),
)


def _outcomes(outcomes: Mapping[str, str]) -> StoredRows:
    """What did not pass comes first."""
    ordered = sorted(outcomes.items(), key=lambda entry: entry[1] == "passed")
    return sample_rows([{"check": check, "outcome": outcome} for check, outcome in ordered])
