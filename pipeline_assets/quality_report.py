"""training, the whole flow looked at: one page with every check, table and picture, and the most suspicious examples.

It is wanted most when something failed: assets that are not built and checks that have not counted are said to be so,
what is held back is shown, and nothing is loaded from upstream. In a run it comes last; after a run that failed it is
materialized alone. Promise: the page opens from disk without a network, runs nothing that the web wrote, and is the
same for the same bytes and verdicts.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import dagster as dg

from pipeline_assets.findings import KnownCheck, find_asset, find_verdict, tally
from pipeline_assets.quality_page import render_within
from pipeline_assets.quality_sections import page_of
from pipeline_assets.recipe import STAGES, UPSTREAM, own_parameters
from pipeline_assets.references import run_ids_of
from pipeline_assets.report import asset_metadata
from pipeline_assets.stripes import Sealed, Stage, asset_spec, materialized
from resources.artifact_store import ArtifactRef
from resources.tables import write_json
from training_io.hashing import identity_of

REPORT = "quality_report"
REPORT_VERSION = 1
PAGE_NAME, FACTS_NAME = "report.html", "report.json"
LAST = {"dagster/priority": "-1"}  # behind the checks that are ready when it is


def build_report(stage: Stage, checks: Sequence[KnownCheck], run_ids: tuple[str, ...] = ()) -> Sealed:
    """Draw what is there under the recipe, whatever state it is in; `stage` may read what is held back."""
    assets = {asset: find_asset(stage, asset, run_ids) for asset in STAGES if asset != REPORT}
    verdicts = [find_verdict(stage, check, assets) for check in checks]

    def write(folder: Path) -> dict[str, Any]:
        html = render_within(page_of(stage, assets, verdicts))
        (folder / PAGE_NAME).write_text(html, encoding="utf-8")
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
        },
        parameters=own_parameters(stage.recipe, REPORT),
        version=REPORT_VERSION,
        write=write,
    )
    path = stage.folder(ref) / PAGE_NAME
    stage.say(f"{REPORT}: open {path} in a browser")
    return Sealed(ref=ref, metadata={"report": dg.MetadataValue.path(str(path)), **asset_metadata(stage, ref)})


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
