"""When runs start by themselves: a sensor and a schedule, both off until someone turns them on.

The sensor compares the source's fingerprint with the one it saw last and asks for one run a new fingerprint: its run
key is the fingerprint, so a restart of the daemon repeats nothing. In that run only units whose content changed do
work, then what depends on them.
"""

import dagster as dg

from pipeline_assets.references import PipelineResource
from pipeline_assets.source import revision_of
from training_io.errors import CorpusmillError

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
    try:
        revision = revision_of(pipeline.open())
    except CorpusmillError as error:
        return dg.SkipReason(f"the source cannot be read: {error}")
    if revision == context.cursor:
        return dg.SkipReason(f"nothing new since revision {revision[:12]}")
    observation = dg.AssetObservation("dataset_revision", tags={"dagster/data_version": revision})
    return dg.SensorResult(
        run_requests=[dg.RunRequest(run_key=revision, tags={REVISION_TAG: revision[:12]})],
        cursor=revision,
        asset_events=[observation],
    )


nightly_schedule = dg.ScheduleDefinition(
    name="nightly_schedule",
    job_name=EVERYTHING,
    cron_schedule="0 3 * * *",
    default_status=dg.DefaultScheduleStatus.STOPPED,
    description="Materializes everything at 03:00 UTC; an unchanged source costs seconds.",
)
