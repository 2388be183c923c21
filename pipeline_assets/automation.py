"""When runs start by themselves: a sensor and a schedule, both off until someone turns them on.

The sensor compares the source's fingerprint with the one it saw last and asks for one run a change. The run key is
the fingerprint and the number of changes so far: a restart of the daemon repeats nothing, and a source that goes back
to an earlier revision is run again. In a run only units whose content changed do work, then what depends on them. A
source that cannot be read makes the tick fail, with the reason.
"""

import json

import dagster as dg

from pipeline_assets.references import PipelineResource
from pipeline_assets.source import revision_of
from pipeline_assets.stripes import DATA_VERSION_TAG

EVERYTHING = "everything"
REVISION_TAG = "dataset_revision"
SENSOR_SECONDS = 30

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
    revision = revision_of(pipeline.open())
    seen = json.loads(context.cursor) if context.cursor else {"revision": None, "changes": 0}
    if revision == seen["revision"]:
        return dg.SkipReason(f"nothing new since revision {revision[:12]}")
    changes = seen["changes"] + 1
    observation = dg.AssetObservation("dataset_revision", tags={DATA_VERSION_TAG: revision})
    return dg.SensorResult(
        run_requests=[dg.RunRequest(run_key=f"{revision}-{changes}", tags={REVISION_TAG: revision[:12]})],
        cursor=json.dumps({"revision": revision, "changes": changes}),
        asset_events=[observation],
    )


nightly_schedule = dg.ScheduleDefinition(
    name="nightly_schedule",
    job_name=EVERYTHING,
    cron_schedule="0 3 * * *",
    default_status=dg.DefaultScheduleStatus.STOPPED,
    description="Materializes everything at 03:00 UTC; an unchanged source costs seconds.",
)
