"""Materialize everything from the command line: `python -m pipeline_assets run`, with progress and one table.

run [--without-training] [--json FILE]   materialize, print the table; exit status 1 with the reason last
instance                                 prepare Dagster's home below CORPUSMILL_HOME and print its path
train [--plan DIR] [OPTION …]            train without Dagster, as the recipe says; options as of `training_io.train`
find [TEXT | --file FILE | -]            is this whole text in the corpus? exit status 0: found, 1: not, 2: an error
removals [--reason R] [--pool P]         which rows lsh_clusters removed, why, and which are used in their place
export FORMAT [ARTIFACT] --output DIR    the latest token shards as another trainer reads them

Output that cannot be written ends as in `training_io.command_line`.
"""

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import dagster as dg
from dagster import DagsterEventType

from pipeline_assets.flow import STAGES
from pipeline_assets.queries import add_find, add_removals, find, list_removals
from pipeline_assets.recipe_file import load_recipe
from pipeline_assets.references import PipelineResource
from pipeline_assets.transforms.lookup import printable_lines
from resources.execution import PROCESS_TAG, close_dead_runs, open_instance, prepare_instance, process_lock, profile
from training_io.__main__ import add_export_options, run_export
from training_io.command_line import complain, exit_status_of, say
from training_io.errors import CorpusmillError, RecipeError
from training_io.home import home_folder

Result = dg.ExecuteInProcessResult | dg.JobExecutionResult
INTERRUPTED = "interrupted; run again to go on from what is done"
TRAINING_ASSET = "varlen_training_run"
REPORT_ASSET, REPORT_PAGE = "quality_report", "report.html"
COLUMNS = ("stage", "asset", "stripes", "rows", "tokens", "bytes", "seconds", "passed", "warned", "failed")


@dataclass(kw_only=True)
class AssetLine:
    """One line of the table: what an asset came to in this run."""

    stage: str
    asset: str
    stripes: int | None = None
    rows: int | None = None
    tokens: int | None = None
    bytes: int | None = None
    seconds: float | None = None
    folder: str | None = None
    passed: int = 0
    warned: int = 0
    failed: int = 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    return exit_status_of(lambda: _command(arguments))


def _command(arguments: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pipeline_assets", description="Materialize the asset graph.")
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run", help="materialize every asset with its checks and print one table")
    running.add_argument("--without-training", action="store_true", help="stop at the hand-off package; needs no torch")
    running.add_argument("--json", type=Path, metavar="FILE", help="write the table as JSON to a file as well")
    commands.add_parser("instance", help="prepare Dagster's home and print its path")
    _add_train(commands)
    add_find(commands)
    add_removals(commands)
    _add_export(commands)
    parsed, options = parser.parse_known_args(arguments)
    if options and parsed.command != "train":
        parser.error(f"unrecognized arguments: {' '.join(options)}")
    if parsed.command == "find":
        return find(parsed)
    try:
        if parsed.command == "export":
            return _export(parsed)
        if parsed.command == "removals":
            return list_removals(parsed)
        if parsed.command == "train":
            return _train(parsed.plan, options)
        load_recipe()  # a mistake in it needs no graph to be told
        home = home_folder()
        instance_folder = prepare_instance(home)
        if parsed.command == "instance":
            say(str(instance_folder))
            return 0
        return _run(home, instance_folder, parsed.without_training, parsed.json)
    except CorpusmillError as error:
        complain(printable_lines(f"{type(error).__name__}: {error}"))
    except OSError as error:
        complain(printable_lines(f"{type(error).__name__}: {error}. Check CORPUSMILL_HOME, its disk and permissions."))
    return 1


def _run(home: Path, instance_folder: Path, without_training: bool, output: Path | None) -> int:
    if output is not None and not output.resolve().parent.is_dir():
        raise RecipeError(f"--json: expected a file in a folder that exists, found {output}. Make the folder first.")
    os.environ["DAGSTER_HOME"] = str(instance_folder)

    started = time.monotonic()
    assets = [name for name in STAGES if not (without_training and name == TRAINING_ASSET)]
    execute = _in_this_process() if profile() == "local" else _in_processes()
    with open_instance(instance_folder) as instance, process_lock(instance_folder) as process:
        close_dead_runs(instance, instance_folder)
        result = execute(
            instance=instance,
            asset_selection=[dg.AssetKey(name) for name in assets],
            raise_on_error=False,
            run_config={"loggers": {"progress": {}}},
            tags={PROCESS_TAG: process},
        )
        lines = _lines(result.all_events, assets)
        reasons = list(_reasons(result.all_events)) or list(_reasons_of_the_run(result.all_events))
        warned = list(_unmet(result.all_events, dg.AssetCheckSeverity.WARN))
        check_seconds = _check_seconds(result.all_events)
    seconds = time.monotonic() - started
    if output is not None:  # before what is printed, which may have lost its reader
        report = {"seconds": seconds, "success": result.success, "assets": [asdict(line) for line in lines]}
        output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    say(_table([line for line in lines if line.folder is not None or line.failed]))
    say(f"\n{seconds:.1f} s, of which {check_seconds:.1f} s in the checks: {_counted(result)}.")
    if warned:
        say("\nWarned:\n" + printable_lines("\n".join(warned)))
    say(f"\nArtifacts: {home}")
    for line in lines:
        if line.folder is not None:
            say(f"  {line.asset:<20} {line.folder}")
    for line in lines:
        if line.asset == REPORT_ASSET and line.folder is not None:
            say(f"Open the report in a browser: {Path(line.folder) / REPORT_PAGE}")
    say("Open the UI with `make ui`, or look at one of them with `python -m training_io inspect`.")
    if not result.success:
        complain("\nFailed:\n" + printable_lines("\n".join(reasons)))
    return 0 if result.success else 1


def _in_this_process() -> Callable[..., Result]:
    return all_assets_job().execute_in_process  # which takes no notice of the job's executor


def _in_processes() -> Callable[..., Result]:
    """The job by the name of what makes it, so that each step's process can make it again.

    Dagster says of each process that it started, a line on standard error.
    """
    return partial(dg.execute_job, dg.build_reconstructable_job("pipeline_assets.__main__", all_assets_job.__name__))


def all_assets_job() -> dg.JobDefinition:
    """The job that materializes everything, as the environment has it."""
    from pipeline_assets.automation import everything
    from pipeline_assets.definitions import build_definitions  # it reads the environment

    return build_definitions().resolve_job_def(everything.name)


def _add_train(commands: Any) -> None:
    training = commands.add_parser(
        "train", help="train on the latest plan without Dagster, as the recipe says; options as of training_io.train"
    )
    training.add_argument("--plan", type=Path, metavar="DIR", help="another packing_plan artifact (default: latest)")


def _train(plan: Path | None, options: Sequence[str]) -> int:
    """Say the training command that the recipe stands for, and run it here; further options go behind its own."""
    from pipeline_assets.training import training_options
    from training_io.train_command import main as train  # torch: only who trains waits for it

    chosen = [*training_options(PipelineResource().open(), plan), *options]
    say(f"python -m training_io.train {shlex.join(chosen)}")
    return train(chosen)


def _add_export(commands: Any) -> None:
    exporting = commands.add_parser("export", help="write the latest token shards as another trainer reads them")
    add_export_options(exporting)
    exporting.add_argument(
        "artifact", type=Path, nargs="?", metavar="ARTIFACT", help="other token shards, or a package (default: latest)"
    )
    exporting.add_argument("--json", action="store_true", help="print the manifest as JSON")


def _export(parsed: argparse.Namespace) -> int:
    if parsed.artifact is None:
        pipeline = PipelineResource().open()
        parsed.artifact, _ = pipeline.store.open(pipeline.resolve("token_shards"))
    return run_export(parsed)


def _lines(events: Sequence[dg.DagsterEvent], assets: Sequence[str]) -> list[AssetLine]:
    lines = {name: AssetLine(stage=STAGES[name], asset=name) for name in assets}
    for event in events:
        if event.event_type == DagsterEventType.ASSET_MATERIALIZATION:
            materialization = event.step_materialization_data.materialization
            _fill(lines[materialization.asset_key.path[-1]], materialization.metadata)
        if event.event_type == DagsterEventType.ASSET_CHECK_EVALUATION:
            evaluation = event.asset_check_evaluation_data
            line = lines[evaluation.asset_key.path[-1]]
            if evaluation.passed:
                line.passed += 1
            elif evaluation.severity == dg.AssetCheckSeverity.WARN:
                line.warned += 1
            else:
                line.failed += 1
    return list(lines.values())


def _fill(line: AssetLine, metadata: dict[str, Any]) -> None:
    def number(*names: str) -> Any:
        return next((metadata[name].value for name in names if name in metadata), None)

    line.stripes = number("mapped_steps")
    line.rows = number("dagster/row_count", "documents")
    line.tokens = number("tokens", "targets")
    line.bytes = number("bytes")
    line.seconds = number("seconds")
    line.folder = number("folder")


def _reasons(events: Sequence[dg.DagsterEvent]) -> Iterator[str]:
    """What failed and why: first the steps, then the blocking checks."""
    for event in events:
        if event.event_type == DagsterEventType.STEP_FAILURE:
            failure = event.step_failure_data
            described = failure.user_failure_data.description if failure.user_failure_data else None
            raised = _root_message(failure.error)
            if "DagsterExecutionInterruptedError" in raised:
                raised = INTERRUPTED
            yield f"{event.step_key}: {described or raised}"
    yield from _unmet(events, dg.AssetCheckSeverity.ERROR)


def _reasons_of_the_run(events: Sequence[dg.DagsterEvent]) -> Iterator[str]:
    """Why a run ended in which nothing failed, as one that is interrupted between its steps' processes."""
    for event in events:
        if event.event_type in (DagsterEventType.RUN_FAILURE, DagsterEventType.RUN_CANCELED):
            message = event.message or ""
            yield f"run: {INTERRUPTED if 'was interrupted' in message else message}"


def _root_message(error: Any) -> str:
    while error is not None and error.cause is not None:
        error = error.cause
    return error.message.strip() if error is not None else "no reason given"


def _unmet(events: Sequence[dg.DagsterEvent], severity: dg.AssetCheckSeverity) -> Iterator[str]:
    """The checks of a severity that did not pass, each with what it found and its first example."""
    for event in events:
        if event.event_type == DagsterEventType.ASSET_CHECK_EVALUATION:
            evaluation = event.asset_check_evaluation_data
            if not evaluation.passed and evaluation.severity == severity:
                name = f"{evaluation.asset_key.to_user_string()}: {evaluation.check_name}"
                yield f"{name}: {evaluation.description}{_first_example(evaluation.metadata)}"


def _first_example(metadata: Mapping[str, Any]) -> str:
    records = getattr(metadata["examples"], "records", [])
    violation = records[0].data.get("violation") if records else None
    return f" ({violation})" if violation else ""


def _check_seconds(events: Sequence[dg.DagsterEvent]) -> float:
    checks = {event.step_key for event in events if event.event_type == DagsterEventType.ASSET_CHECK_EVALUATION}
    finished = [event for event in events if event.event_type == DagsterEventType.STEP_SUCCESS]
    return sum(event.step_success_data.duration_ms for event in finished if event.step_key in checks) / 1000


def _counted(result: Result) -> str:
    """How many verdicts this run counted, and how many stand from an earlier count of the very same bytes."""
    evaluations = result.get_asset_check_evaluations()
    here = sum(evaluation.metadata["counted_in"].value == result.run_id for evaluation in evaluations)
    return f"{here:,} counted now, {len(evaluations) - here:,} counted before on the very same bytes"


def _table(lines: Sequence[AssetLine]) -> str:
    rows = [COLUMNS, *(tuple(_cell(getattr(line, name)) for name in COLUMNS) for line in lines)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.1f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


if __name__ == "__main__":
    sys.exit(main())
