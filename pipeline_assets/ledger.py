"""packs, by pool: a packing plan -> what training reads of each pool, stage by stage.

Promise: the rows add up to what the plan's steps compute. Without a mixture there is one stage: each document once.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import dagster as dg
import numpy as np
import pyarrow as pa

from pipeline_assets.report import asset_metadata, line_picture, picture_metadata, rows_metadata, table_metadata
from pipeline_assets.schemas import MixtureLedger, arrow_schema, validated
from pipeline_assets.stripes import Sealed, Stage, asset_spec, materialized
from resources.artifact_store import ArtifactRef
from resources.tables import write_table
from training_io.ledger import cumulative_tokens, ledger_of
from training_io.plan import Plan, load_plan
from training_io.quota_invariants import largest_quota_errors

LEDGER_VERSION = 1
LEDGER_NAME, PICTURE_NAME = "ledger.parquet", "cumulative_tokens.png"
PICTURED_POOLS, PICTURED_STEPS = 8, 200  # more make too large a picture


def build_ledger(stage: Stage, token_shards: ArtifactRef, packing_plan: ArtifactRef) -> Sealed:
    """Count what the training plan reads of each pool."""

    def write(folder: Path) -> dict[str, Any]:
        plan = load_plan(stage.folder(packing_plan), "train")
        rows = ledger_of(plan)
        table = pa.Table.from_pylist([asdict(row) for row in rows], schema=arrow_schema(MixtureLedger))
        write_table(validated(MixtureLedger, table), folder / LEDGER_NAME)
        (folder / PICTURE_NAME).write_bytes(_picture(plan))
        return {
            "stages": len(dict.fromkeys(row.stage for row in rows)),
            "tokens": sum(row.tokens for row in rows),
            "loss_tokens": sum(row.loss_tokens for row in rows),
            "most_passes": max((row.passes_so_far for row in rows), default=0.0),
            "largest_quota_error_tokens": max(largest_quota_errors(plan).values(), default=0.0),
        }

    ref = stage.materialize(
        asset="mixture_ledger",
        inputs={"token_shards": token_shards.digest, "packing_plan": packing_plan.digest},
        parameters={},
        version=LEDGER_VERSION,
        write=write,
    )
    folder, table = stage.folder(ref), stage.table(ref, LEDGER_NAME)
    metadata = (
        asset_metadata(stage, ref)
        | table_metadata(MixtureLedger, table.num_rows, table)
        | {
            "ledger": rows_metadata(table.to_pylist()),
            "cumulative_tokens": picture_metadata((folder / PICTURE_NAME).read_bytes(), "cumulative tokens by pool"),
        }
    )
    return Sealed(ref=ref, metadata=metadata)


def _picture(plan: Plan) -> bytes:
    steps = np.unique(np.linspace(0, max(plan.num_steps - 1, 0), min(plan.num_steps, PICTURED_STEPS)).astype(np.int64))
    by_pool = sorted(cumulative_tokens(plan).items(), key=lambda item: -int(item[1][-1:].sum()))
    series = {pool: ((steps + 1).tolist(), (tokens[steps] / 1e6).tolist()) for pool, tokens in by_pool[:PICTURED_POOLS]}
    return line_picture("Cumulative tokens by pool", "step", "million tokens", series)


@dg.asset(
    **asset_spec(
        "mixture_ledger",
        LEDGER_VERSION,
        {"numpy", "parquet"},
        "What training reads of each pool, stage by stage: quota, body, end-of-document, overlap and loss tokens, "
        "documents, passes. Promise: the rows add up to what the plan's steps compute.",
    )
)
def mixture_ledger(
    context: dg.AssetExecutionContext, token_shards: ArtifactRef, packing_plan: ArtifactRef
) -> dg.MaterializeResult[ArtifactRef]:
    return materialized(context, build_ledger, token_shards=token_shards, packing_plan=packing_plan)
