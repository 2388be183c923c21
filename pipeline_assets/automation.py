"""When runs start by themselves: a sensor and a schedule, both off until someone turns them on.

Every run is tagged with the revision that it read, however it was started.

The sensor compares the source's fingerprint with the one it saw last and asks for one run a change. The run key is
the fingerprint and the number of changes so far: a restart of the daemon repeats nothing, and a source that goes back
to an earlier revision is run again. In a run only units whose content changed do work, then what depends on them. A
source that is pinned to a commit has no other revision: what its branch has come to since is told, and starts nothing.
A source that cannot be read makes the tick fail, with the reason.
"""

import json
from collections.abc import Sequence
from datetime import timedelta

import dagster as dg

from pipeline_assets.pools import observe_source
from pipeline_assets.references import PipelineResource
from pipeline_assets.stripes import DATA_VERSION_TAG, SHOWN_DIGITS

EVERYTHING = "everything"
REVISION_TAG = "dataset_revision"
SENSOR_SECONDS = 30
WARN_WINDOW = timedelta(hours=36)  # a night was missed
FAIL_WINDOW = timedelta(days=8)  # and a week

everything = dg.define_asset_job(
    EVERYTHING,
    selection=dg.AssetSelection.all(),
    description="Every asset and every check, once: what is there and unchanged is reused.",
)


@dg.sensor(
    job_name=EVERYTHING,
    minimum_interval_seconds=SENSOR_SECONDS,
    default_status=dg.DefaultSensorStatus.STOPPED,
    description="Starts one run when the source's files change.",
)
def new_revision_sensor(
    context: dg.SensorEvaluationContext, pipeline: PipelineResource
) -> dg.SensorResult | dg.SkipReason:
    observed = observe_source(pipeline.open())
    revision, newer = observed.revision, list(observed.newer)
    seen = json.loads(context.cursor) if context.cursor else {"revision": None, "changes": 0}
    reason = dg.SkipReason("; ".join([f"nothing new since revision {revision[:SHOWN_DIGITS]}", *newer]))
    is_new = revision != seen["revision"]
    if not is_new and newer == seen.get("newer", []):
        return reason
    changes = seen["changes"] + is_new
    request = dg.RunRequest(run_key=f"{revision}-{changes}", tags={REVISION_TAG: revision[:SHOWN_DIGITS]})
    return dg.SensorResult(
        run_requests=[request] if is_new else [],
        skip_reason=None if is_new else reason,
        cursor=json.dumps({"revision": revision, "changes": changes, "newer": newer}),
        asset_events=[
            dg.AssetObservation("dataset_revision", metadata=observed.metadata, tags={DATA_VERSION_TAG: revision})
        ],
    )


nightly_schedule = dg.ScheduleDefinition(
    name="nightly_schedule",
    job_name=EVERYTHING,
    cron_schedule="0 3 * * *",
    default_status=dg.DefaultScheduleStatus.STOPPED,
    description="Materializes everything at 03:00 UTC; an unchanged source costs seconds.",
)


def with_freshness(assets: Sequence[dg.AssetsDefinition]) -> list[dg.AssetsDefinition]:
    """The assets with a badge that warns, and then fails, when nothing has materialized them for a while."""
    policy = dg.FreshnessPolicy.time_window(warn_window=WARN_WINDOW, fail_window=FAIL_WINDOW)
    return list(dg.map_asset_specs(lambda spec: spec.replace_attributes(freshness_policy=policy), assets))
