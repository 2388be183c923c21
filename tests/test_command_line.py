"""How the command lines end when what they print cannot be written: never with a status that stands for an answer."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import small_corpus
from small_corpus import Built

FULL = Path("/dev/full")
GONE = 128 + signal.SIGPIPE
CLOSED = "standard output: expected it open, found it closed. Redirect it to a file or to /dev/null.\n"
PRINTING = [
    sys.executable,
    "-c",
    "import sys; from training_io.command_line import exit_status_of, say\n"
    "def command():\n    say(sys.argv[1] * int(sys.argv[2]))\n    return 1\n"
    "sys.exit(exit_status_of(command))",
]
HELP = [
    sys.executable,
    "-c",
    "import argparse, sys; from training_io.command_line import exit_status_of\n"
    "sys.exit(exit_status_of(lambda: argparse.ArgumentParser().parse_args(['--help'])))",
]
COMPLAINING = [
    sys.executable,
    "-c",
    "import sys; from training_io.command_line import complain, exit_status_of, say\n"
    "def command():\n    complain('wrong')\n    say('said')\n    return 7\n"
    "sys.exit(exit_status_of(command))",
]

needs_a_full_device = pytest.mark.skipif(not FULL.exists(), reason="no /dev/full on this machine")


def run(
    command: list[str], redirections: str = "", stdout: int = subprocess.PIPE, **environment: str
) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of a command with a shell's redirections; Python's output is buffered, as usual."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {redirections}', "sh", *command],
        env={**inherited, "PYTHONPATH": str(small_corpus.ROOT), **environment},
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=300,
        check=False,
    )
    return done.returncode, done.stdout or "", done.stderr


def run_without_a_reader(command: list[str], redirections: str = "", **environment: str) -> tuple[int, str, str]:
    """The same, with a pipe as stdout whose reader is gone before anything is written."""
    read, write = os.pipe()
    os.close(read)
    try:
        return run(command, redirections, stdout=write, **environment)
    finally:
        os.close(write)


def test_what_can_be_written_leaves_the_command_its_status() -> None:
    assert run([*PRINTING, "é", "3"], PYTHONIOENCODING="ascii") == (1, r"\xe9\xe9\xe9" + "\n", "")
    assert run(COMPLAINING) == (7, "said\n", "wrong\n")


@pytest.mark.parametrize("length", [1, 100_000])
def test_a_reader_that_went_away_ends_it_quietly(length: int) -> None:
    assert run_without_a_reader([*PRINTING, "x", str(length)]) == (GONE, "", "")
    assert run_without_a_reader([*PRINTING, "x", str(length)], PYTHONUNBUFFERED="1") == (GONE, "", "")


def test_help_that_nobody_reads_ends_quietly() -> None:
    assert run_without_a_reader(HELP) == (GONE, "", "")
    assert run(HELP)[0] == 0


def test_head_is_served_and_the_rest_is_dropped() -> None:
    command = ["sh", "-c", '"$@" | head -c 1', "sh", *PRINTING, "x", "1000000"]
    assert run(command) == (0, "x", "")


@needs_a_full_device
@pytest.mark.parametrize("length", [1, 100_000])
def test_a_full_disk_is_one_line_and_a_status_of_its_own(length: int) -> None:
    status, _, err = run([*PRINTING, "x", str(length)], ">/dev/full")
    assert (status, err.count("\n")) == (2, 1)
    assert "No space left" in err
    assert run([*PRINTING, "x", str(length)], ">/dev/full 2>&1")[0] == 2


def test_a_closed_stdout_is_one_line_before_anything_is_done(tmp_path: Path) -> None:
    touching = "import sys, pathlib; from training_io.command_line import exit_status_of\n"
    touching += "sys.exit(exit_status_of(lambda: pathlib.Path(sys.argv[1]).touch()))"
    assert run([sys.executable, "-c", touching, str(tmp_path / "a")], ">&-") == (2, "", CLOSED)
    assert not (tmp_path / "a").exists()
    assert run([*PRINTING, "x", "1"], ">&- 2>&-") == (2, "", "")


def test_a_complaint_that_cannot_be_written_changes_no_status_and_never_goes_to_stdout() -> None:
    assert run(COMPLAINING, "2>&-") == (7, "said\n", "")
    assert run_without_a_reader(COMPLAINING, "2>&1") == (GONE, "", "")


@needs_a_full_device
def test_a_complaint_on_a_full_disk_changes_no_status() -> None:
    assert run(COMPLAINING, "2>/dev/full") == (7, "said\n", "")


@pytest.mark.parametrize(
    ("which", "redirection"),
    [
        ("find", ">&-"),
        ("find", "a reader gone"),
        ("find --json", ">/dev/full"),
        ("removals", "a reader gone"),
        ("instance", "a reader gone"),
        ("inspect", ">/dev/full"),
        ("verify", "a reader gone"),
    ],
)
def test_every_command_ends_so(clean: Built, which: str, redirection: str) -> None:
    shards = str(clean.folder("token_shards"))
    command = {
        "find": small_corpus.command("find", "nobody wrote this"),
        "find --json": small_corpus.command("find", "--json", small_corpus.UNIQUE),
        "removals": small_corpus.command("removals"),
        "instance": small_corpus.command("instance"),
        "inspect": [sys.executable, "-m", "training_io", "inspect", shards],
        "verify": [sys.executable, "-m", "training_io", "verify", shards],
    }[which]
    environment = {"CORPUSMILL_RECIPE": str(clean.recipe), "CORPUSMILL_HOME": str(clean.home)}
    if redirection == "a reader gone":
        assert run_without_a_reader(command, **environment) == (GONE, "", "")
        return
    if redirection == ">/dev/full" and not FULL.exists():
        pytest.skip("no /dev/full on this machine")
    status, _, err = run(command, redirection, **environment)
    assert (status, err.count("\n")) == (2, 1)
    assert err.startswith("standard output: expected ")


def test_a_run_with_a_closed_stdout_does_nothing(tmp_path: Path) -> None:
    environment = {"CORPUSMILL_HOME": str(tmp_path / "home")}
    assert run(small_corpus.command("run"), ">&-", **environment) == (2, "", CLOSED)
    assert not (tmp_path / "home").exists()


def test_a_run_whose_table_nobody_reads_has_written_its_report(tmp_path: Path) -> None:
    recipe = small_corpus.write_recipe(tmp_path)  # its pools are not there: the first step fails
    environment = {"CORPUSMILL_RECIPE": str(recipe), "CORPUSMILL_HOME": str(tmp_path / "home")}
    report = tmp_path / "report.json"
    status, _, err = run_without_a_reader(small_corpus.command("run", "--json", str(report)), **environment)
    assert (status, err) == (GONE, "")
    assert '"success": false' in report.read_text()


def test_an_interrupted_run_in_processes_says_so_last(clean: Built, tmp_path: Path) -> None:
    home = tmp_path / "home"
    running = subprocess.Popen(
        small_corpus.command("run"),
        env=small_corpus.command_environment(clean.recipe, home, CORPUSMILL_PROFILE="processes"),
        cwd=small_corpus.ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    while running.poll() is None and not (home / "raw_row_groups").exists():
        time.sleep(0.01)
    os.killpg(running.pid, signal.SIGINT)  # as the terminal does it
    _, err = running.communicate(timeout=300)
    assert running.returncode == 1
    assert err.rstrip().endswith("interrupted; run again to go on from what is done"), err


def test_a_closed_stdin_is_an_error_of_find(clean: Built) -> None:
    environment = {"CORPUSMILL_RECIPE": str(clean.recipe), "CORPUSMILL_HOME": str(clean.home)}
    status, out, err = run(small_corpus.command("find", "-"), "<&-", **environment)
    assert (status, out) == (2, "")
    assert err.startswith("SourceError: standard input: expected the text there, found it closed.")
