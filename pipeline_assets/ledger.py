"""packs, by pool: a packing plan -> what training reads of each pool, stage by stage.

Promise: the rows add up to what the plan's steps compute. Without a mixture there is one stage: each document once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa

from pipeline_assets.conformance import validated
from pipeline_assets.ops import asset_spec, materialized
from pipeline_assets.pictures import MAX_LINE_POINTS, grouped_bar_picture, line_picture
from pipeline_assets.report import asset_metadata, files_metadata, pictures_metadata, shown_table, table_metadata
from pipeline_assets.schemas import MixtureLedger, arrow_schema
from pipeline_assets.stripes import Sealed, Stage
from resources.artifact_store import ArtifactRef
from resources.tables import write_table
from training_io.ledger import LedgerRow, cumulative_tokens, ledger_of
from training_io.places import spread_places
from training_io.plan import Plan, load_plan
from training_io.quota_invariants import largest_quota_errors

LEDGER_VERSION = 2
LEDGER_NAME = "ledger.parquet"
PICTURES = {
    "cumulative_tokens": "tokens read of each pool up to each step",
    "quotas": "tokens of each pool in each stage, as the quota says and as they are read",
}
PICTURED_QUOTAS = 20  # of a stage and pool, the largest
TOLD_POOLS = 5  # of a stage whose shares are relative


def build_ledger(stage: Stage, token_shards: ArtifactRef, packing_plan: ArtifactRef) -> Sealed:
    """Count what the training plan reads of each pool."""

    def write(folder: Path) -> dict[str, Any]:
        plan = load_plan(stage.folder(packing_plan), "train")
        rows = ledger_of(plan)
        table = pa.Table.from_pylist([asdict(row) for row in rows], schema=arrow_schema(MixtureLedger))
        write_table(validated(MixtureLedger, table), folder / LEDGER_NAME)
        (folder / "cumulative_tokens.png").write_bytes(_tokens_picture(plan))
        (folder / "quotas.png").write_bytes(_quotas_picture(rows))
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
    mixture = stage.recipe.mixture
    if relative := relative_shares({one.name: one.shares for one in mixture.stages} if mixture else {}):
        stage.say(f"mixture_ledger: {relative}")
    metadata = (
        asset_metadata(stage, ref)
        | table_metadata(MixtureLedger, table.num_rows, table)
        | {
            **shown_table("ledger", table.to_pylist()),
            **({"shares": relative} if relative else {}),
            **pictures_metadata(folder, PICTURES),
            **files_metadata(folder / LEDGER_NAME),
        }
    )
    return Sealed(ref=ref, metadata=metadata)


def relative_shares(stages: Mapping[str, Mapping[str, str]]) -> str:
    """How shares are taken that add up to neither 1 nor 100, by the first stage that has such; nothing without one.

    >>> relative_shares({"base": {"web": "50", "code": "100"}, "last": {"web": "80", "code": "20"}})
    'Shares are relative, not percent: in base web 50 of 150 (33.3%), code 100 of 150 (66.7%).'
    """
    wholes = {name: sum(map(Fraction, shares.values())) for name, shares in stages.items()}
    relative = [name for name, whole in wholes.items() if whole not in (1, 100)]
    if not relative:
        return ""
    name, whole, shares = relative[0], wholes[relative[0]], stages[relative[0]]
    told = [
        f"{pool} {one} of {float(whole):g} ({float(Fraction(one) / whole):.1%})"
        for pool, one in islice(shares.items(), TOLD_POOLS)
    ]
    if len(shares) > len(told):
        told.append(f"and {len(shares) - len(told)} more pools")
    more = f"; {len(relative) - 1} more stages are relative too" if len(relative) > 1 else ""
    return f"Shares are relative, not percent: in {name} {', '.join(told)}{more}."


def _tokens_picture(plan: Plan) -> bytes:
    """A line a pool, that of most tokens first; it only rises, so a few hundred steps show it."""
    steps = spread_places(plan.num_steps, MAX_LINE_POINTS)
    by_pool = sorted(cumulative_tokens(plan).items(), key=lambda item: -int(item[1][-1:].sum()))
    series = {pool: ([step + 1 for step in steps], tokens[steps].tolist()) for pool, tokens in by_pool}
    return line_picture("Tokens read of each pool", "step", "tokens up to the step", series)


def _quotas_picture(rows: Sequence[LedgerRow]) -> bytes:
    """Quota and what is read, a stage and pool; those without either are left out."""
    some = sorted((row for row in rows if row.quota_tokens or row.tokens), key=lambda row: -row.quota_tokens)
    kept = {(row.stage, row.pool) for row in some[:PICTURED_QUOTAS]}
    shown = [row for row in rows if (row.stage, row.pool) in kept]
    title = "Quota and what is read, by stage" + (f": the {len(shown)} largest" if len(some) > len(shown) else "")
    series = {"quota": [row.quota_tokens for row in shown], "read": [row.tokens for row in shown]}
    return grouped_bar_picture(title, "tokens", [f"{row.stage}, {row.pool}" for row in shown], series, "stage, pool")


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
