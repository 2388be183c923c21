"""training, the whole flow looked at: one page with every check, table and picture, and the most suspicious examples.

It is wanted most when something failed: assets that are not built and checks that have not counted are said to be so,
what is held back is shown, and nothing is loaded from upstream. In a run it comes last; after a run that failed it is
materialized alone. Promise: the page opens from disk without a network, runs nothing that the web wrote, and is the
same for the same bytes and verdicts. It is drawn each time, and stored when it says something new: what could not be
read is part of its identity, so that no page outlives a damage that was mended.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import dagster as dg

from pipeline_assets.findings import FoundAsset, KnownCheck, find_asset, find_verdict, tally
from pipeline_assets.flow import STAGES, UPSTREAM
from pipeline_assets.ops import asset_spec, materialized
from pipeline_assets.parameters import own_parameters, recipe_digest
from pipeline_assets.quality_page import render_within
from pipeline_assets.quality_sections import page_of
from pipeline_assets.references import ROWS_ASSET, run_ids_of
from pipeline_assets.report import asset_metadata
from pipeline_assets.stored_batches import FACTS_NAME, PAGE_NAME
from pipeline_assets.stripes import Sealed, Stage
from resources.artifact_store import ArtifactRef
from resources.tables import write_json
from training_io.hashing import identity_of

REPORT = "quality_report"
REPORT_VERSION = 6
LAST = {"dagster/priority": "-1"}  # behind the checks that are ready when it is


def build_report(stage: Stage, checks: Sequence[KnownCheck], run_ids: tuple[str, ...] = ()) -> Sealed:
    """Draw what is there under the recipe, whatever state it is in; `stage` may read what is held back."""
    assets = {asset: find_asset(stage, asset, run_ids) for asset in STAGES if asset != REPORT}
    verdicts = [find_verdict(stage, check, assets) for check in checks]
    recipe, revision = recipe_digest(stage.recipe), _revision(stage, assets)
    page = page_of(stage, assets, verdicts, recipe, revision)

    def write(folder: Path) -> dict[str, Any]:
        (folder / PAGE_NAME).write_text(render_within(page), encoding="utf-8")
        write_json({verdict.check.name: verdict.outcome for verdict in verdicts}, folder / FACTS_NAME)
        return {
            **{f"checks_{outcome.replace(' ', '_')}": number for outcome, number in tally(verdicts).items()},
            "assets_shown": sum(found.ref is not None for found in assets.values()),
        }

    ref = stage.materialize(
        asset=REPORT,
        inputs={
            "assets": {name: found.inputs() for name, found in assets.items()},
            "verdicts": identity_of([verdict.inputs() for verdict in verdicts]),
            "unread": page.unread,
            "recipe": recipe,
            "revision": revision,
        },
        parameters=own_parameters(stage.recipe, REPORT),
        version=REPORT_VERSION,
        write=write,
    )
    path = stage.folder(ref) / PAGE_NAME
    stage.say(f"{REPORT}: open {path} in a browser")
    return Sealed(ref=ref, metadata={"report": dg.MetadataValue.path(str(path)), **asset_metadata(stage, ref)})


def _revision(stage: Stage, assets: Mapping[str, FoundAsset]) -> str:
    """The revision of the source that the rows are of, as far as it is known."""
    rows = assets[ROWS_ASSET].ref
    return (stage.pipeline.revision_of(rows) if rows else None) or "not known"


def quality_report_over(checks: Iterable[dg.AssetChecksDefinition]) -> dg.AssetsDefinition:
    """The asset that draws what these checks said, and all other assets."""
    known = tuple(
        KnownCheck(
            asset=spec.asset_key.path[-1],
            name=spec.name,
            description=spec.description or "",
            is_blocking=spec.blocking,
        )
        for check in checks
        for spec in check.check_specs
    )
    spec = asset_spec(
        REPORT,
        REPORT_VERSION,
        {"html"},
        "One page of HTML with every check, table and picture, and the most suspicious examples, to read or to print. "
        "After a run that failed, materialize it alone. Promise: it needs no network, runs nothing that a text says, "
        "and fits 3 MB.",
    )
    after = {name: dg.AssetIn(name, dagster_type=dg.Nothing) for name in UPSTREAM[REPORT]}

    @dg.asset(**{**spec, "ins": after, "op_tags": LAST})
    def quality_report(context: dg.AssetExecutionContext) -> dg.MaterializeResult[ArtifactRef]:
        def build(stage: Stage) -> Sealed:
            return build_report(replace(stage, is_judging=True), known, run_ids_of(context.run))

        return materialized(context, build)

    return quality_report
