"""whole flow: raw Parquet to sealed shards, against the same work composed from datatrove; and memory.

Each run of ours is a new process with an empty CORPUSMILL_HOME and the recipe `sample`, reading the text instead of
packages. `whole_flow` is `python -m pipeline_assets run --without-training` from start to end: imports, Dagster, every
check, statistics and the package; how much of it the checks took stands in its note.

`whole_flow to shards` is `flow_to_shards.py` against `peers/datatrove_flow.py`: the same Parquet file and
tokenizer.json, one core, until the token files are there. Ours goes through Dagster, keeps its evidence, writes split
tables and synchronises what it writes; no check runs. The text is met twice: as it is on both sides, and ours twenty
times as long, in `altered_copy`s. What ours costs once a run, whatever the text, is much of the former and little of
the latter, so the bar is on the latter: our rate there over the peer's, whose time is in proportion to its text. `cpu_`
figures are of seconds of the processor, which another program on the core does not lengthen.

`whole_flow memory` is the peak of resident memory on the text and on ten times as much, in units of a quarter of it, so
that the number of units grows and not their size. Where the command is missing or fails, its row says so.
"""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from bench import Bench
from corpus import Text, altered_copy, limited, write_parquet
from measure import Bar, Row, alternate, seconds_of
from peer_environment import running_peer

from pipeline_assets.recipe_file import load_recipe
from resources.tokenizer import load_tokenizer, train_tokenizer

NAME = "whole_flow"
SCRIPT = Path(__file__).resolve().parent / "flow_to_shards.py"
MAX_RUNS = 3
TIMES, MEMORY_TIMES = 20, 10
VOCAB_SIZE = 32_768
TRAINING_BYTES, WARM_UP_BYTES = 4_000_000, 300_000
EOS = "<|endoftext|>"
BARS = [Bar(figure="rate_over_peer_rate", at_least=40)]
MEMORY_BARS = [Bar(figure="peak_for_10_times", at_most=1.3)]

Answer = Mapping[str, Any]


class FlowFailed(Exception):
    """The command ended with an error."""


def measure(bench: Bench) -> list[Row]:
    """The command, ours against the peer, ours on more text, and memory: MB of text a second."""
    folder = bench.scratch / NAME
    inputs = write_inputs(folder, bench.text, bench.tokenizer_path)
    runs = min(bench.runs, MAX_RUNS)
    answers: list[Answer] = []

    def ours(recipe: Path) -> Answer:
        answers.append(run_to_shards(folder / f"home{len(answers)}", inputs["warm_up"], recipe))
        return answers[-1]

    with running_peer(bench.peer_python, "datatrove_flow.py", folder) as ask:
        rounds = [(ours(inputs["text"]), ask("run"), ours(inputs["long"])) for _ in range(runs)]
        peer = ask("versions")["versions"]
    peaks = ours(inputs["text_in_units"]), ours(inputs["tenfold_in_units"])
    return [
        whole_command(bench, inputs["command"]),
        *rows_against(bench.text.num_megabytes, peer, rounds),
        memory_row(*peaks),
    ]


def write_inputs(folder: Path, text: Text, tokenizer_path: Path | None) -> dict[str, Path]:
    """The text, longer ones and a little of it, and recipes over them, all but the command's with one tokenizer."""
    write_parquet(folder / "warm_up", [limited(text.texts, WARM_UP_BYTES)])
    write_parquet(folder / "text", [text.texts])
    for name, times in (("long", TIMES), ("tenfold", MEMORY_TIMES)):
        write_parquet(folder / name, (altered_copy(text.texts, number) for number in range(times)))
    tokenizer = folder / "tokenizer.json"
    if tokenizer_path:
        load_tokenizer(tokenizer_path).library.save(str(tokenizer))
    else:
        tokenizer.write_bytes(train_tokenizer(limited(text.texts, TRAINING_BYTES).to_pylist(), VOCAB_SIZE, EOS))
    given: dict[str, Any] = {"references": [], "tokenizer": {"kind": "file", "path": str(tokenizer), "eos": EOS}}
    in_units = {"reading": {"stripes": 2, "stripes_read": 2, "unit_megabytes": max(1, round(text.num_megabytes / 4))}}
    recipes = {
        "command": recipe_over(folder / "text"),
        **{name: recipe_over(folder / name) | given for name in ("warm_up", "text", "long")},
        **{f"{name}_in_units": recipe_over(folder / name) | given | in_units for name in ("text", "tenfold")},
    }
    return {name: write_recipe(folder / f"{name}.json", recipe) for name, recipe in recipes.items()}


def write_recipe(path: Path, recipe: Mapping[str, Any]) -> Path:
    """Write a recipe and give its path."""
    path.write_text(json.dumps(recipe), encoding="utf-8")
    return path


def recipe_over(folder: Path) -> dict[str, Any]:
    """The recipe `sample` with a folder of Parquet files as its only pool."""
    recipe = load_recipe("sample").model_dump(mode="json")
    return {**recipe, "name": "bench", "source": {"kind": "local", "pools": [{"name": "text", "path": str(folder)}]}}


def run_to_shards(home: Path, warm_up: Path, recipe: Path) -> Answer:
    """What `flow_to_shards.py` says of one run; RuntimeError with its last line of output."""
    command = [sys.executable, str(SCRIPT), str(home), str(warm_up), str(recipe)]
    environment = os.environ | {"CORPUSMILL_PROFILE": "local"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{SCRIPT.name}: exit status {done.returncode}: {last_line(done)}")
    answer: Answer = json.loads(done.stdout.splitlines()[-1])
    return answer


def rows_against(num_megabytes: float, peer: str, rounds: Sequence[tuple[Answer, Answer, Answer]]) -> list[Row]:
    """Two rows: the text on both sides, and ours on much more against the peer's rate."""
    short, theirs, long = zip(*rounds, strict=True)
    peer_rate, cpu_peer_rate = (num_megabytes / median_of(theirs, name) for name in ("seconds", "cpu_seconds"))
    amount = num_megabytes * TIMES
    return [
        Row(
            name=f"{NAME} to shards",
            amount=num_megabytes,
            unit="MB",
            ours_seconds=[answer["seconds"] for answer in short],
            peer=f"{peer}, MinHash and DocumentTokenizer",
            peer_seconds=[answer["seconds"] for answer in theirs],
            extra={
                "cpu_ratio": median_of(theirs, "cpu_seconds") / median_of(short, "cpu_seconds"),
                "peer_cpu_rate": cpu_peer_rate,
                **seconds_of_parts(short),
            },
            note=f"{theirs[-1]['documents']:,} documents and {theirs[-1]['tokens']:,} tokens of the peer's",
        ),
        Row(
            name=f"{NAME} to shards, {TIMES} times the text",
            amount=amount,
            unit="MB",
            ours_seconds=[answer["seconds"] for answer in long],
            extra={
                "rate_over_peer_rate": amount / median_of(long, "seconds") / peer_rate,
                "cpu_rate_over_peer_cpu_rate": amount / median_of(long, "cpu_seconds") / cpu_peer_rate,
                **seconds_of_parts(long),
            },
            bars=BARS,
            note=f"the peer makes {peer_rate:.2f} MB/s",
        ),
    ]


def median_of(answers: Sequence[Answer], name: str) -> float:
    """The median of one number of every run."""
    return float(median(answer[name] for answer in answers))


def seconds_of_parts(answers: Sequence[Answer]) -> dict[str, float]:
    """Median seconds of each asset's steps, and what a run took beside all of them: Dagster's own."""
    parts = {f"{name}_seconds": median(answer["assets"][name] for answer in answers) for name in answers[0]["assets"]}
    between = median(answer["seconds"] - sum(answer["assets"].values()) for answer in answers)
    return {**parts, "between_steps_seconds": between}


def memory_row(short: Answer, long: Answer) -> Row:
    """Peaks of resident memory at both sizes, whole and beyond what the process had before its run."""
    beyond = [answer["peak_bytes"] - answer["start_bytes"] for answer in (short, long)]
    return Row(
        name=f"{NAME} memory",
        amount=MEMORY_TIMES,
        unit="times the text",
        extra={
            "peak_for_10_times": long["peak_bytes"] / short["peak_bytes"],
            "peak_bytes": short["peak_bytes"],
            "peak_bytes_of_10_times": long["peak_bytes"],
            "bytes_beyond_start": beyond[0],
            "bytes_beyond_start_of_10_times": beyond[1],
        },
        bars=MEMORY_BARS,
    )


def whole_command(bench: Bench, recipe: Path) -> Row:
    """The command line's row, or one with a note where it does not do its work."""
    if importlib.util.find_spec("pipeline_assets.__main__") is None:
        return missing_row(bench, "not measured: there is no `python -m pipeline_assets`")
    notes: list[str] = []

    def one_run() -> float:
        return seconds_of(lambda: notes.append(run_command(recipe.parent / f"command{len(notes)}", recipe)))

    try:
        seconds = alternate(min(bench.runs, MAX_RUNS), {"ours": one_run})["ours"]
    except FlowFailed as error:
        return missing_row(bench, f"not measured: {error}")
    return Row(name=NAME, amount=bench.text.num_megabytes, unit="MB", ours_seconds=seconds, note=notes[-1])


def run_command(home: Path, recipe: Path) -> str:
    """Run the command and give its line about the checks; FlowFailed with its last line of output."""
    home.mkdir()
    environment = {name: value for name, value in os.environ.items() if name != "DAGSTER_HOME"}
    environment |= {"CORPUSMILL_HOME": str(home), "CORPUSMILL_RECIPE": str(recipe), "CORPUSMILL_PROFILE": "local"}
    command = [sys.executable, "-m", "pipeline_assets", "run", "--without-training"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise FlowFailed(f"exit status {done.returncode}: {last_line(done)}")
    return next((line for line in done.stdout.splitlines() if "in the checks" in line), "")


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    """The last line that a process wrote."""
    return (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]


def missing_row(bench: Bench, note: str) -> Row:
    """A row without times."""
    return Row(name=NAME, amount=bench.text.num_megabytes, unit="MB", note=note)
