"""shards: token units and split tables -> token files and a document index for each split, by shard.

A planning step puts the documents of each split into their final order and cuts them into shards by running length; a
shard's step merges the units' sorted runs. A shard's identity is its documents, lengths and tokenizer, so cutting the
work into other stripes changes nothing. Promise: a split's shards, one after another, are its documents in order.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import dagster as dg
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pipeline_assets.ops import graph_spec, mapped_op, planning_op, sealing_op
from pipeline_assets.report import asset_metadata, shown_table
from pipeline_assets.source import pool_names
from pipeline_assets.splits import TABLE_NAME
from pipeline_assets.stripes import Sealed, Stage, Task, build_each, tasks_of, units_in
from pipeline_assets.tokens import DOC_IDS, LENGTHS, TOKENS, TOKENS_VERSION, ordered_documents, stored_arrays
from pipeline_assets.transforms.arrays import located
from pipeline_assets.transforms.merge import gather_rows, merged_blocks
from resources.artifact_store import ArtifactRef, link_or_copy, unit_inputs
from resources.tables import read_array, write_array
from training_io.document_index import cut_shards, index_of, write_index
from training_io.shard_format import write_blocks

SHARDS_VERSION = 1
PLAN_UNIT = "plan"
SHARD_NAME = "tokens.bin"


def plan_shards(
    stage: Stage, document_tokens: ArtifactRef, split_documents: ArtifactRef, tokenizer: ArtifactRef
) -> list[Task]:
    """Order each split's documents and cut them into shards; one unit a shard."""
    plan = shard_plan(stage, document_tokens, split_documents)
    shards = [
        (plan, document_tokens, tokenizer, name, shard)
        for name in stage.recipe.splits.names
        for shard in range(plan.counts["shards"][name])
    ]
    return tasks_of(shards, "shards")


def shard_plan(stage: Stage, document_tokens: ArtifactRef, split_documents: ArtifactRef) -> ArtifactRef:
    """Which documents are in which shard, as an artifact: the planning step writes it, the sealing step finds it."""
    return stage.materialize(
        asset="token_shards",
        unit=PLAN_UNIT,
        inputs={"tokens": document_tokens.digest, "splits": split_documents.digest},
        parameters={
            "max_shard_tokens": stage.recipe.shards.max_shard_tokens,
            "splits": list(stage.recipe.splits.names),
            "pools": pool_names(stage.recipe),
            "order": stage.recipe.splits.order,
            "seed": stage.recipe.seed,
        },
        version=SHARDS_VERSION,
        write=lambda folder: _write_plan(stage, folder, document_tokens, split_documents),
    )


def _write_plan(
    stage: Stage, folder: Path, document_tokens: ArtifactRef, split_documents: ArtifactRef
) -> dict[str, Any]:
    units, tables = units_in(stage, document_tokens), units_in(stage, split_documents)
    order = ordered_documents(stage, units)
    doc_ids = stored_arrays(stage, units, DOC_IDS)
    firsts = np.cumsum([0, *(unit.counts["documents"] for unit in units)])
    lengths = np.concatenate([stage.array(unit, LENGTHS) for unit in units])
    ends = np.cumsum(lengths)
    unit_starts = np.concatenate([[0], ends])[firsts[:-1]]
    split_of, pool_of = _split_and_pool(stage, tables)
    shards, documents = {}, {}
    for code, name in enumerate(stage.recipe.splits.names):
        rows = order[split_of[order] == code]
        unit_of, row_of = located(firsts, rows)
        cuts = cut_shards(lengths[rows], stage.recipe.shards.max_shard_tokens)
        write_array(unit_of, folder / f"{name}_unit.npy")
        write_array(ends[rows] - lengths[rows] - unit_starts[unit_of], folder / f"{name}_start.npy")
        write_array(lengths[rows], folder / f"{name}_length.npy")
        write_array(gather_rows(doc_ids, unit_of, row_of), folder / f"{name}_doc_id.npy")
        write_array(pool_of[rows], folder / f"{name}_pool.npy")
        write_array(cuts, folder / f"{name}_cuts.npy")
        shards[name], documents[name] = len(cuts) - 1, len(rows)
    return {"shards": shards, "documents_by_split": documents}


def _split_and_pool(stage: Stage, tables: list[ArtifactRef]) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.uint16]]:
    """Split and pool of every document, in unit order, as numbers among the recipe's; split -1 where it is unused."""
    splits, pools = [np.empty(0, np.int8)], [np.empty(0, np.uint16)]
    for unit in tables:
        table = stage.table(unit, TABLE_NAME, ["split", "pool"])
        splits.append(_numbers_of(table.column("split"), stage.recipe.splits.names).astype(np.int8))
        pools.append(_numbers_of(table.column("pool"), pool_names(stage.recipe)).astype(np.uint16))
    return np.concatenate(splits), np.concatenate(pools)


def _numbers_of(column: pa.ChunkedArray, names: Sequence[str]) -> npt.NDArray[np.int32]:
    """Each value's position among the names, -1 for another one."""
    return np.asarray(pc.index_in(column, value_set=pa.array(names, pa.string())).fill_null(-1))


def build_shards(stage: Stage, task: Task) -> list[ArtifactRef]:
    """Merge the documents of each shard and write it."""
    return build_each(stage, task, lambda unit: _build_shard(stage, *unit))


def _build_shard(
    stage: Stage, plan: ArtifactRef, document_tokens: ArtifactRef, tokenizer: ArtifactRef, name: str, shard: int
) -> ArtifactRef:
    folder = stage.folder(plan)
    start, end = read_array(folder / f"{name}_cuts.npy")[shard : shard + 2]
    columns = {
        column: np.asarray(read_array(folder / f"{name}_{column}.npy")[start:end])
        for column in ("unit", "start", "length", "doc_id")
    }

    def write(target: Path) -> dict[str, Any]:
        runs = stored_arrays(stage, units_in(stage, document_tokens), TOKENS)
        num_tokens, dtype = int(columns["length"].sum()), tokenizer.counts["token_dtype"]
        blocks = merged_blocks(runs, columns["unit"], columns["start"], columns["length"], dtype)
        write_blocks(target / SHARD_NAME, dtype, num_tokens, blocks)
        return {"documents": int(end - start), "tokens": num_tokens, "split": name}

    content = hashlib.sha256(columns["doc_id"])
    content.update(columns["length"].astype("<i8", copy=False))
    return stage.materialize(
        asset="token_shards",
        unit=f"{name}-{shard:06d}",
        inputs={"documents": content.hexdigest(), "tokenizer": tokenizer.counts["fingerprint"]},
        parameters={"eos": stage.recipe.tokenizer.eos, "tokens_version": TOKENS_VERSION},
        version=SHARDS_VERSION,
        write=write,
    )


def seal_shards(
    stage: Stage,
    parts: list[ArtifactRef],
    document_tokens: ArtifactRef,
    split_documents: ArtifactRef,
    tokenizer: ArtifactRef,
) -> Sealed:
    """Put all shards under one folder with the document index of each split."""
    plan = shard_plan(stage, document_tokens, split_documents)
    ref = stage.materialize(
        asset="token_shards",
        inputs={
            "units": unit_inputs(parts),
            "plans": unit_inputs([plan]),
            "tokenizer": tokenizer.counts["fingerprint"],
        },
        parameters={
            "max_shard_tokens": stage.recipe.shards.max_shard_tokens,
            "pools": pool_names(stage.recipe),
            "repeats_within_split": stage.recipe.dedup.mode == "off",
        },
        version=SHARDS_VERSION,
        write=lambda folder: _write_index_and_shards(stage, folder, parts, plan, tokenizer),
    )
    metadata = asset_metadata(stage, ref, parts) | shown_table(
        "splits", [{"split": name, **counts} for name, counts in ref.counts["splits"].items()]
    )
    return Sealed(ref=ref, metadata=metadata)


def _write_index_and_shards(
    stage: Stage, folder: Path, parts: list[ArtifactRef], plan: ArtifactRef, tokenizer: ArtifactRef
) -> dict[str, Any]:
    planned = stage.folder(plan)
    counts: dict[str, Any] = {}
    for name in stage.recipe.splits.names:
        index = index_of(
            split=name,
            doc_ids=read_array(planned / f"{name}_doc_id.npy"),
            pools=read_array(planned / f"{name}_pool.npy"),
            pool_names=pool_names(stage.recipe),
            lengths=read_array(planned / f"{name}_length.npy"),
            cuts=read_array(planned / f"{name}_cuts.npy"),
            eos_id=tokenizer.counts["eos_id"],
            token_dtype=tokenizer.counts["token_dtype"],
            tokenizer_fingerprint=tokenizer.counts["fingerprint"],
        )
        write_index(folder / f"{name}_index", index)
        own = [part for part in parts if part.counts["split"] == name]
        for part, file in zip(own, index.shard_files, strict=True):
            link_or_copy(stage.folder(part) / SHARD_NAME, folder / file)
        counts[name] = {"documents": index.num_documents, "tokens": index.num_tokens, "shards": len(own)}
    return {
        "documents": sum(split["documents"] for split in counts.values()),
        "tokens": sum(split["tokens"] for split in counts.values()),
        "shards": len(parts),
        "vocab_size": tokenizer.counts["max_id"] + 1,
        "splits": counts,
    }


plan_shards_op = planning_op("token_shards", plan_shards)
build_shards_op = mapped_op("token_shards", build_shards)
seal_shards_op = sealing_op("token_shards", seal_shards)


@dg.graph_asset(
    **graph_spec(
        "token_shards",
        SHARDS_VERSION,
        {"numpy"},
        "Token files in llm.c's layout, at most 100M tokens each, ending at document ends, and a document index. "
        "Promise: a split's shards, one after another, are its documents in order, nothing lost.",
    )
)
def token_shards(document_tokens, split_documents, tokenizer):  # type: ignore[no-untyped-def]
    inputs = {"document_tokens": document_tokens, "split_documents": split_documents, "tokenizer": tokenizer}
    return seal_shards_op(parts=plan_shards_op(**inputs).map(build_shards_op).collect(), **inputs)
