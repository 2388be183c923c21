"""The code location: every asset, check, job, sensor and schedule, with resources that tests replace."""

import dagster as dg

from asset_checks import clusters as cluster_checks
from asset_checks import handoff as handoff_checks
from asset_checks import headroom as headroom_checks
from asset_checks import hits as hit_checks
from asset_checks import kept as kept_checks
from asset_checks import leaks as leak_checks
from asset_checks import ledger as ledger_checks
from asset_checks import packs as pack_checks
from asset_checks import quality_report as quality_report_checks
from asset_checks import references as reference_checks
from asset_checks import removals as removal_checks
from asset_checks import shards as shard_checks
from asset_checks import signatures as signature_checks
from asset_checks import source as source_checks
from asset_checks import splits as split_checks
from asset_checks import tokenizer_report as tokenizer_report_checks
from asset_checks import tokens as token_checks
from asset_checks import training as training_checks
from pipeline_assets.automation import JOBS, new_revision_sensor, nightly_schedule, with_freshness
from pipeline_assets.clusters import lsh_clusters
from pipeline_assets.handoff import handoff_package
from pipeline_assets.ledger import mixture_ledger
from pipeline_assets.packs import packing_plan, packing_stats
from pipeline_assets.quality_report import quality_report_over
from pipeline_assets.reference_sets import reference_sets
from pipeline_assets.references import PipelineResource, ReferenceIOManager
from pipeline_assets.shards import token_shards
from pipeline_assets.signatures import minhash_signatures
from pipeline_assets.source import dataset_revision, raw_row_groups
from pipeline_assets.splits import split_documents
from pipeline_assets.tokenizer import tokenizer
from pipeline_assets.tokenizer_report import tokenizer_report
from pipeline_assets.tokens import document_tokens
from pipeline_assets.training import varlen_training_run
from resources.execution import executor_of_profile, progress_logger
from training_io.gpu_io_manager import GpuIOManager

MATERIALIZED = (
    raw_row_groups,
    reference_sets,
    minhash_signatures,
    lsh_clusters,
    tokenizer,
    document_tokens,
    tokenizer_report,
    split_documents,
    token_shards,
    packing_plan,
    packing_stats,
    mixture_ledger,
    handoff_package,
    varlen_training_run,
)

CHECKS_OF_DATA = (
    *source_checks.CHECKS,
    *reference_checks.CHECKS,
    *signature_checks.CHECKS,
    *kept_checks.CHECKS,
    *cluster_checks.CHECKS,
    *removal_checks.CHECKS,
    *hit_checks.CHECKS,
    *token_checks.CHECKS,
    *tokenizer_report_checks.CHECKS,
    *leak_checks.CHECKS,
    *split_checks.CHECKS,
    *shard_checks.CHECKS,
    *pack_checks.CHECKS,
    *ledger_checks.CHECKS,
    *headroom_checks.CHECKS,
    *handoff_checks.CHECKS,
    *training_checks.CHECKS,
)

quality_report = quality_report_over(CHECKS_OF_DATA)
ASSETS = (dataset_revision, *with_freshness((*MATERIALIZED, quality_report)))
CHECKS = (*CHECKS_OF_DATA, *quality_report_checks.CHECKS)


def build_definitions(pipeline: PipelineResource | None = None) -> dg.Definitions:
    """All definitions over one pipeline resource: the environment's recipe and home unless another one is given."""
    pipeline = pipeline or PipelineResource()
    references = ReferenceIOManager(pipeline=pipeline)
    return dg.Definitions(
        assets=ASSETS,
        asset_checks=CHECKS,
        jobs=JOBS,
        sensors=[new_revision_sensor],
        schedules=[nightly_schedule],
        resources={
            "pipeline": pipeline,
            "references": references,
            "gpu_io_manager": GpuIOManager(references=references),
        },
        executor=executor_of_profile(),
        loggers={"progress": progress_logger},
    )


definitions = build_definitions()
