"""What runs the steps, chosen by one setting: `CORPUSMILL_PROFILE`.

`local` runs every step in the run's own process: 0.1 s a step, and the kernels use the cores by themselves.
`processes` runs each step in a process of its own, forked from a server that has the code loaded (0.75 s a step).
"""

import logging
import os
import sys
import time
from pathlib import Path

import dagster as dg

from training_io.errors import RecipeError

PROFILE_VARIABLE = "CORPUSMILL_PROFILE"
PROFILES = ("local", "processes")


def executor_of_profile() -> dg.ExecutorDefinition:
    """The executor of the profile in force; RecipeError for an unknown name."""
    profile = os.environ.get(PROFILE_VARIABLE) or PROFILES[0]
    if profile == "local":
        return dg.in_process_executor
    if profile == "processes":
        start = {"forkserver": {"preload_modules": ["pipeline_assets.definitions"]}}
        return dg.multiprocess_executor.configured({"start_method": start})
    raise RecipeError(
        f"{PROFILE_VARIABLE}: expected one of {', '.join(PROFILES)}, found {profile!r}. Set it to one of them."
    )


INSTANCE_FOLDER = "dagster"
INSTANCE_SETTINGS = """\
# Written by corpusmill; yours to change.
telemetry: {enabled: false}
nux: {enabled: false}
concurrency: {pools: {granularity: op, default_limit: 2}}
# Crashed runs are started again; failed steps and failed checks are not.
run_retries: {enabled: true, max_retries: 2, retry_on_asset_or_op_failure: false}
"""


def prepare_instance(home: Path) -> Path:
    """Dagster's own home below the artifacts' root, with its settings; an existing file is left as it is."""
    folder = home / INSTANCE_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    settings = folder / "dagster.yaml"
    if not settings.exists():
        settings.write_text(INSTANCE_SETTINGS, encoding="utf-8")
    return folder


@dg.logger(config_schema={}, description="Our own progress messages, one short line each.")
def progress_logger(context: dg.InitLoggerContext) -> logging.Logger:
    """Messages that stages write, without Dagster's own events."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(_ShortLines())
    logger = logging.Logger("corpusmill", level=logging.INFO)
    logger.addHandler(handler)
    return logger


class _ShortLines(logging.Formatter):
    """`12:30:01 message`, warnings and errors marked."""

    def format(self, record: logging.LogRecord) -> str:
        meta = getattr(record, "dagster_meta", None) or {}
        message = meta.get("orig_message") or record.getMessage()
        mark = "" if record.levelno < logging.WARNING else f"{record.levelname}: "
        return f"{time.strftime('%H:%M:%S', time.localtime(record.created))} {mark}{message}"
