"""One run of the flow up to `token_shards` without its checks, for `whole_flow.py`.

`python benchmarks/flow_to_shards.py HOME WARM_UP_RECIPE RECIPE`: every asset goes through Dagster in this process, as
`python -m pipeline_assets run` does it. A small text goes first, into a home of its own: what is timed then starts with
code loaded and kernels compiled, and nothing else. Prints one line of JSON: seconds of the run by the clock and of the
processor, seconds of each asset's own steps, and the peak of resident memory in bytes before and after.
"""

import json
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import dagster as dg
from lsh_in_buckets import peak_bytes

from pipeline_assets.flow import STAGES, ancestors
from resources.execution import open_instance, prepare_instance
from training_io.home import HOME_VARIABLE

LAST_ASSET = "token_shards"
NAMES = tuple(name for name in STAGES if name in ancestors(LAST_ASSET))


def run(home: Path, recipe: Path) -> dict[str, Any]:
    """Materialize the assets; dagster.Failure with the reason when one fails."""
    home.mkdir(parents=True)
    os.environ |= {HOME_VARIABLE: str(home), "CORPUSMILL_RECIPE": str(recipe)}
    instance_folder = prepare_instance(home)
    os.environ["DAGSTER_HOME"] = str(instance_folder)
    from pipeline_assets.definitions import ASSETS, definitions  # they read the environment

    shared = {"resources": definitions.resources, "loggers": definitions.loggers}
    job = dg.Definitions(assets=ASSETS, **shared).resolve_implicit_global_asset_job_def()
    with open_instance(instance_folder) as instance:
        start, start_of_processor = time.perf_counter(), time.process_time()
        result = job.execute_in_process(
            instance=instance,
            asset_selection=[dg.AssetKey(name) for name in NAMES],
            run_config={"loggers": {"progress": {"config": {}}}},
        )
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - start_of_processor
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, "assets": seconds_by_asset(result.all_events)}


def seconds_by_asset(events: Iterable[dg.DagsterEvent]) -> dict[str, float]:
    """Sum of the seconds of each asset's steps, planning and sealing too, in the order of the flow."""
    seconds = dict.fromkeys(NAMES, 0.0)
    for event in events:
        if event.event_type == dg.DagsterEventType.STEP_SUCCESS:
            name = str(event.step_key).split(".")[0]
            seconds[name] += event.step_success_data.duration_ms / 1000
    return seconds


def main() -> None:
    """Run the flow on the recipes named on the command line."""
    home, warm_up, recipe = (Path(name).absolute() for name in sys.argv[1:])
    run(home / "warm_up", warm_up)
    before = peak_bytes()
    print(json.dumps({**run(home / "timed", recipe), "start_bytes": before, "peak_bytes": peak_bytes()}))


if __name__ == "__main__":
    main()
