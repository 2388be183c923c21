"""How runs start: jobs by name, and by themselves a sensor and a schedule, off until someone turns them on.

Every run is tagged with its recipe and the revision that it is about, however it was started. The jobs are the parts
of the flow that a person launches by name.

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

from pipeline_assets.launch import train_config
from pipeline_assets.pools import observe_source
from pipeline_assets.references import PipelineResource
from pipeline_assets.run_tags import SHOWN_DIGITS, revision_tag
from pipeline_assets.stripes import DATA_VERSION_TAG

EVERYTHING = "everything"
SENSOR_SECONDS = 30
_CLUSTERS, _TRAINING, _REPORT = (
    dg.AssetSelection.assets(name) for name in ("lsh_clusters", "varlen_training_run", "quality_report")
)
WARN_WINDOW = timedelta(hours=36)  # a night was missed
FAIL_WINDOW = timedelta(days=8)  # and a week

everything = dg.define_asset_job(
    EVERYTHING,
    selection=dg.AssetSelection.all(),
    description="From the source to the trained model and the report, with every check. What is there and unchanged is"
    " verified and reused, so a run after a small change costs that change. When in doubt, launch this one.",
)
dedup_only = dg.define_asset_job(
    "dedup_only",
    selection=_CLUSTERS.upstream(),
    description="Reads the source, finds duplicates, and stops there: to see what deduplication would remove, and tune"
    " the recipe, before anything is tokenized. Then launch tokens_and_packs.",
)
tokens_and_packs = dg.define_asset_job(
    "tokens_and_packs",
    selection=dg.AssetSelection.assets("tokenizer").downstream() - _TRAINING - _REPORT,
    description="From the deduplicated rows to token shards, the packing plan and the hand-off package: all that a"
    " training box needs. Needs what dedup_only makes, and reads no source.",
)
train = dg.define_asset_job(
    "train",
    selection=_TRAINING,
    config=train_config,
    description="Trains on the latest plan, and runs the training's checks. The launchpad sets steps, learning rate,"
    " device, dtype and how far to read ahead for this run alone; a value that cannot be is refused before the run"
    " starts. Needs what tokens_and_packs makes.",
)
quality_report = dg.define_asset_job(
    "report_only",  # no job may be named as an asset is
    selection=_REPORT,
    description="Writes the report anew from what is there and from what each check said last, failures included: it"
    " also works after a run that failed, and computes no data.",
)
JOBS = (everything, dedup_only, tokens_and_packs, train, quality_report)


@dg.sensor(
    job_name=EVERYTHING,
    minimum_interval_seconds=SENSOR_SECONDS,
    default_status=dg.DefaultSensorStatus.STOPPED,
    description=f"Looks at the source every {SENSOR_SECONDS} seconds, and starts one run of everything when files were"
    " added, removed or changed; the run redoes only what they touch. A look that finds nothing new starts nothing and"
    " says so in its tick. Off until you turn the switch on; needs the daemon, which make ui starts.",
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
    request = dg.RunRequest(run_key=f"{revision}-{changes}", tags=revision_tag(revision))
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
    description="Starts one run of everything each night at 03:00 UTC, whether the source changed or not: all is"
    " verified again, which costs seconds where nothing changed, and the assets' freshness stays green. Without a run"
    f" an asset's badge warns after {WARN_WINDOW // timedelta(hours=1)} hours and fails after {FAIL_WINDOW.days} days."
    " Off until you turn the switch on; needs the daemon, which make ui starts.",
)


def with_freshness(assets: Sequence[dg.AssetsDefinition]) -> list[dg.AssetsDefinition]:
    """The assets with a badge that warns, and then fails, when nothing has materialized them for a while."""
    policy = dg.FreshnessPolicy.time_window(warn_window=WARN_WINDOW, fail_window=FAIL_WINDOW)
    return list(dg.map_asset_specs(lambda spec: spec.replace_attributes(freshness_policy=policy), assets))
