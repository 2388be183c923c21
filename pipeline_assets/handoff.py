"""training, handed over: everything that a training team needs in one folder, with hashes and a self-test.

The package holds the tokenizer, the shards and plans as sealed artifacts (hard links, no second copy), and one
description: source versions, splits, sequence rules, quotas and counting rules, sampling and reading state. Promise:
it is complete and verifiable with numpy alone.
"""

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

import dagster as dg
import numpy as np

from pipeline_assets.ops import asset_spec, materialized
from pipeline_assets.report import asset_metadata
from pipeline_assets.sections.packs import Packs
from pipeline_assets.source import pool_names
from pipeline_assets.stripes import Sealed, Stage, units_in
from pipeline_assets.tokenizer import open_tokenizer
from resources.artifact_store import ArtifactRef, link_or_copy
from resources.tables import write_json
from training_io.document_index import read_index
from training_io.handoff import PACKAGE_FORMAT, PACKAGE_NAME, TOKENIZER_NAME
from training_io.ledger import ledger_of
from training_io.plan import load_plan, splits_of
from training_io.sampler import Sampler

HANDOFF_VERSION = 3
LONG_DOCUMENTS = {
    "cut": "cut into segments of max_seq_len inputs, one token of look-ahead for targets",
    "refuse": "none: every document has at most max_seq_len inputs",
    "divert": "in the shards, but in no plan: of more than max_seq_len inputs; no document is cut",
}
TINY_DOCUMENTS = ("def double(x):\n    return 2 * x\n", "Rain is expected, with sun at 5 °C.")


def build_package(
    stage: Stage,
    raw_row_groups: ArtifactRef,
    split_documents: ArtifactRef,
    tokenizer: ArtifactRef,
    token_shards: ArtifactRef,
    packing_plan: ArtifactRef,
) -> Sealed:
    """Link the artifacts into one folder and describe them."""
    refs = (tokenizer, token_shards, packing_plan)

    def write(folder: Path) -> dict[str, Any]:
        for ref in (token_shards, packing_plan):
            _link_artifact(stage, ref, folder)
        link_or_copy(stage.folder(tokenizer) / TOKENIZER_NAME, folder / TOKENIZER_NAME)
        package = _describe(stage, raw_row_groups, split_documents, tokenizer, token_shards, packing_plan)
        write_json(package, folder / PACKAGE_NAME)
        return {"documents": token_shards.counts["documents"], "tokens": token_shards.counts["tokens"]}

    ref = stage.materialize(
        asset="handoff_package",
        inputs={
            "rows": {"identity": raw_row_groups.identity, "digest": raw_row_groups.digest},
            "splits": split_documents.digest,
            **{ref.asset: {"identity": ref.identity, "digest": ref.digest} for ref in refs},
        },
        parameters={"recipe": _portable_recipe(stage)},
        version=HANDOFF_VERSION,
        write=write,
    )
    folder = stage.folder(ref)
    command = shlex.join(["python", "-m", "training_io", "verify", str(folder)])
    return Sealed(ref=ref, metadata=asset_metadata(stage, ref) | {"verify_with": command})


def _link_artifact(stage: Stage, ref: ArtifactRef, package: Path) -> None:
    folder, manifest = stage.open(ref)
    target = package / ref.asset / ref.unit / ref.identity
    for name in (*manifest.files, "manifest.json"):
        link_or_copy(folder / name, target / name)


def _describe(
    stage: Stage,
    raw_row_groups: ArtifactRef,
    split_documents: ArtifactRef,
    tokenizer: ArtifactRef,
    token_shards: ArtifactRef,
    packing_plan: ArtifactRef,
) -> dict[str, Any]:
    recipe, shards = stage.recipe, stage.folder(token_shards)
    plan_folder = stage.folder(packing_plan)
    plans = {split: load_plan(plan_folder, split) for split in splits_of(plan_folder)}
    path = f"{packing_plan.asset}/{packing_plan.unit}/{packing_plan.identity}"
    return {
        "format": PACKAGE_FORMAT,
        "recipe": _portable_recipe(stage),
        "tokenizer": {"file": TOKENIZER_NAME, **tokenizer.counts},
        "data": {
            "sources": _source_files(stage, raw_row_groups),
            "rows_digest": raw_row_groups.digest,
            "documents_read": raw_row_groups.counts["documents"],
            "splits": token_shards.counts["splits"],
            "unused_documents": split_documents.counts["unused_documents"],
            "document_ids": {split: f"{_shards_path(token_shards)}/{split}_index/doc_id.npy" for split in plans},
        },
        "sequence_rules": _sequence_rules(recipe.packs, tokenizer),
        "quotas": {split: _tokens_by_pool(shards, split, pool_names(recipe)) for split in plans},
        "mixture": {
            "stages": [asdict(stage) for stage in plans["train"].stages],
            "ledger": [asdict(row) for row in ledger_of(plans["train"])],
        },
        "counting_rules": "tokens include one EOS a document; targets are a planned document's tokens less one",
        "sampling": {
            "strategy": recipe.packs.strategy,
            "buffer": recipe.packs.buffer,
            "program": "training_io.sampler.Sampler",
        },
        "plans": {split: {"path": path, "identity": plan.identity} for split, plan in plans.items()},
        "reading_state": {split: Sampler(plan).state_dict() for split, plan in plans.items() if plan.num_packs},
        "self_test": {"documents": _tiny_documents(stage, tokenizer)},
    }


def _sequence_rules(packs: Packs, tokenizer: ArtifactRef) -> dict[str, Any]:
    return {
        "token_dtype": tokenizer.counts["token_dtype"],
        "eos_id": tokenizer.counts["eos_id"],
        "end_of_document": "one EOS after each document, as a target only; no target after it",
        "max_seq_len": packs.max_seq_len,
        "long_documents": _long_documents(packs),
        "overlap": packs.overlap,
        "attention": "causal within a segment; never across segments, whether of one document or of two",
        "positions": "restart at 0 in every segment",
        "loss": "summed cross-entropy over a step's targets, divided by their number",
        "padding": "none",
    }


def _long_documents(packs: Packs) -> str:
    """What becomes of them, and what of the inputs that segments have in common."""
    rule = LONG_DOCUMENTS[packs.long_documents]
    if not packs.overlap:
        return rule
    return f"{rule}; all but the first repeat the {packs.overlap:,} inputs before theirs, which are read, not trained"


def _source_files(stage: Stage, raw_row_groups: ArtifactRef) -> list[dict[str, Any]]:
    """The files that rows were read from, with their sizes, footers and rows."""
    files: dict[tuple[str, str], dict[str, Any]] = {}
    for unit in units_in(stage, raw_row_groups):
        inputs = stage.open(unit)[1].inputs
        entry = files.setdefault(
            (inputs["pool"], inputs["file"]),
            {name: inputs[name] for name in ("pool", "file", "bytes", "footer_sha256")} | {"rows": 0},
        )
        entry["rows"] += unit.counts["rows_read"]
    return [files[key] for key in sorted(files)]


def _portable_recipe(stage: Stage) -> dict[str, Any]:
    """The recipe without the paths of this machine."""
    elsewhere = {"source", "tokenizer", "tokenizer_report", "references"}
    return stage.recipe.model_dump(mode="json", exclude=elsewhere)


def _shards_path(token_shards: ArtifactRef) -> str:
    return f"{token_shards.asset}/{token_shards.unit}/{token_shards.identity}"


def _tokens_by_pool(shards: Path, split: str, pools: list[str]) -> dict[str, dict[str, int]]:
    index = read_index(shards / f"{split}_index")
    tokens = np.bincount(index.pools, weights=index.lengths, minlength=len(pools)).astype(np.int64)
    documents = np.bincount(index.pools, minlength=len(pools))
    return {
        name: {"documents": int(documents[number]), "tokens": int(tokens[number])} for number, name in enumerate(pools)
    }


def _tiny_documents(stage: Stage, tokenizer: ArtifactRef) -> list[dict[str, Any]]:
    encoder = open_tokenizer(stage, tokenizer)
    ids = encoder.encode_batch(TINY_DOCUMENTS)
    return [{"text": text, "ids": [*tokens, encoder.eos_id]} for text, tokens in zip(TINY_DOCUMENTS, ids, strict=True)]


@dg.asset(
    **asset_spec(
        "handoff_package",
        HANDOFF_VERSION,
        {"numpy"},
        "What a training team needs: tokenizer, shards, plans, rules, quotas, reading state, and a self-test. "
        "Promise: complete, hashed, and verifiable with numpy alone.",
    )
)
def handoff_package(
    context: dg.AssetExecutionContext,
    raw_row_groups: ArtifactRef,
    split_documents: ArtifactRef,
    tokenizer: ArtifactRef,
    token_shards: ArtifactRef,
    packing_plan: ArtifactRef,
) -> dg.MaterializeResult[ArtifactRef]:
    return materialized(
        context,
        build_package,
        raw_row_groups=raw_row_groups,
        split_documents=split_documents,
        tokenizer=tokenizer,
        token_shards=token_shards,
        packing_plan=packing_plan,
    )
