"""whole flow: `python -m pipeline_assets run --without-training` on the text as one Parquet file. No peer yet.

Each run is a new process with an empty CORPUSMILL_HOME and the recipe `sample`, reading the text instead of packages.
Two times are told apart. `whole_flow` is the process from start to end: imports, Dagster, every check, statistics and
the package. `whole_flow to shards` is what the assets from `raw_row_groups` to `token_shards` report as their own
seconds, checks excluded. Where the command is missing or fails, the row says so and nothing else stops.
"""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import Bench
from corpus import write_parquet
from measure import Row, alternate, seconds_of

from pipeline_assets.recipe import load_recipe

NAME = "whole_flow"
LAST_ASSET = "token_shards"
MAX_RUNS = 3


class FlowFailed(Exception):
    """The command ended with an error."""


def measure(bench: Bench) -> list[Row]:
    """Two rows, MB of text a second; one row with a note where the command does not do its work."""
    if importlib.util.find_spec("pipeline_assets.__main__") is None:
        return [missing_row(bench, "not measured: there is no `python -m pipeline_assets`")]
    folder = bench.scratch / NAME
    write_parquet(folder / "text", bench.text.texts)
    recipe = folder / "recipe.yaml"
    recipe.write_text(json.dumps(recipe_over(folder / "text")), encoding="utf-8")
    reports: list[dict[str, Any]] = []

    def one_run() -> float:
        home = folder / f"home{len(reports)}"
        seconds = seconds_of(lambda: run_flow(home, recipe))
        reports.append(json.loads((home / "report.json").read_bytes()))
        return seconds

    try:
        seconds = alternate(min(bench.runs, MAX_RUNS), {"ours": one_run})["ours"]
    except FlowFailed as error:
        return [missing_row(bench, f"not measured: {error}")]
    return rows_of(bench.text.num_megabytes, seconds, reports)


def recipe_over(folder: Path) -> dict[str, Any]:
    """The recipe `sample` with a folder of Parquet files as its only pool."""
    recipe = load_recipe("sample").model_dump(mode="json")
    return {**recipe, "name": "bench", "source": {"kind": "local", "pools": [{"name": "text", "path": str(folder)}]}}


def run_flow(home: Path, recipe: Path) -> None:
    """Run the command; FlowFailed with its last line of output."""
    home.mkdir()
    environment = {name: value for name, value in os.environ.items() if name != "DAGSTER_HOME"}
    environment |= {"CORPUSMILL_HOME": str(home), "CORPUSMILL_RECIPE": str(recipe), "CORPUSMILL_PROFILE": "local"}
    command = [
        sys.executable,
        "-m",
        "pipeline_assets",
        "run",
        "--without-training",
        "--json",
        str(home / "report.json"),
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise FlowFailed(f"exit status {done.returncode}: {last}")


def rows_of(num_megabytes: float, seconds: Sequence[float], reports: Sequence[Mapping[str, Any]]) -> list[Row]:
    """The process's own times, and those that the assets report up to the shards."""
    to_shards = [seconds_to_shards(report["assets"]) for report in reports]
    process = Row(name=NAME, amount=num_megabytes, unit="MB", ours_seconds=seconds)
    if not all(to_shards):
        return [process]
    return [process, Row(name=f"{NAME} to shards", amount=num_megabytes, unit="MB", ours_seconds=to_shards)]


def seconds_to_shards(assets: Sequence[Mapping[str, Any]]) -> float:
    """Sum of the seconds of the assets up to token_shards, in the order of the flow.

    >>> seconds_to_shards([{"asset": "token_shards", "seconds": 2.0}, {"asset": "packing_plan", "seconds": 9.0}])
    2.0
    """
    names = [line["asset"] for line in assets]
    return sum((line["seconds"] or 0.0 for line in assets[: names.index(LAST_ASSET) + 1]), 0.0)


def missing_row(bench: Bench, note: str) -> Row:
    """A row without times."""
    return Row(name=NAME, amount=bench.text.num_megabytes, unit="MB", note=note)
