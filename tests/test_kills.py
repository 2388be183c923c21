"""A run that is killed again and again ends with the bytes of a run that nobody disturbed.

Each round starts the command line on the same home, waits until a given thing appears in it, and kills the whole
process group with SIGKILL. What is there then is sealed or plainly unfinished; the last round runs to the end.
"""

import glob
import os
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

import dagster as dg
import pytest
import small_corpus
from small_corpus import REPORT, TRAINING, Built

from pipeline_assets.flow import STAGES
from training_io.manifest import damaged_files, load_manifest

SECONDS_TO_APPEAR = 120
SECONDS_BETWEEN_LOOKS = 0.01

# What has to appear before the kill; the first one is a step's unfinished folder.
POINTS = (
    "raw_row_groups/*/.tmp-*",
    "raw_row_groups/-/*",
    "lsh_clusters/-/*",
    "split_documents/plan/*",
    "_training/**/step_*",
)
LONGER_TRAINING = {"training.steps": 200, "training.eval_every": 200, "training.checkpoint_every": 10}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The same corpus with a training run that is long enough to be killed in its middle."""
    folder = small_corpus.write_corpus(tmp_path_factory.mktemp("kills"))
    changes = {"reading.stripes": 1, "reading.stripes_read": 1, **LONGER_TRAINING}
    recipe = small_corpus.write_recipe(folder, changes)
    built = small_corpus.build(recipe, folder / "home")
    result = small_corpus.materialize(recipe, folder / "home", TRAINING)
    assert result.success
    return Built(recipe=recipe, home=built.home, refs=small_corpus.recorded(recipe, built.home))


def start(recipe: Path, home: Path, log: Path) -> subprocess.Popen[bytes]:
    """The command line in a process group of its own."""
    with log.open("wb") as output:
        return subprocess.Popen(
            small_corpus.command("run"),
            env=small_corpus.command_environment(recipe, home),
            cwd=small_corpus.ROOT,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def there(home: Path, pattern: str) -> set[str]:
    """What matches, as far as it stays while one looks."""
    found = glob.glob(pattern, root_dir=home, recursive=True, include_hidden=True)  # noqa: PTH207 - Path.glob would raise
    return set(found)


def kill_when_there(running: subprocess.Popen[bytes], home: Path, pattern: str) -> bool:
    """Kill the process group as soon as the pattern matches something that was not there; whether it came to that."""
    before = there(home, pattern)
    deadline = time.monotonic() + SECONDS_TO_APPEAR
    try:
        while time.monotonic() < deadline:
            if there(home, pattern) - before:
                return running.poll() is None
            if running.poll() is not None:
                return False
            time.sleep(SECONDS_BETWEEN_LOOKS)
        return False
    finally:
        if running.poll() is None:
            os.killpg(running.pid, signal.SIGKILL)
        running.wait()


def assert_whole(home: Path) -> None:
    """Everything that looks like an artifact is sealed and undamaged."""
    for asset in STAGES:
        for folder in home.glob(f"{asset}/*/*"):
            if not folder.name.startswith("."):
                assert damaged_files(folder, load_manifest(folder)) == []


def test_a_run_killed_at_every_stage_ends_like_an_undisturbed_one(undisturbed: Built, tmp_path: Path) -> None:
    home = tmp_path / "home"
    killed = []
    for number, pattern in enumerate(POINTS):
        log = tmp_path / f"{number}.log"
        assert kill_when_there(start(undisturbed.recipe, home, log), home, pattern), (pattern, log.read_text())
        assert_whole(home)
        killed.append(pattern)
    assert killed == list(POINTS)
    last = max((home / "_training").glob("**/step_*"))
    assert 0 < int(last.name.removeprefix("step_")) < LONGER_TRAINING["training.steps"]

    done = small_corpus.run_command(undisturbed.recipe, home, "run")
    assert done.returncode == 0, done.stdout + done.stderr
    assert small_corpus.unfinished(home) == []
    refs = small_corpus.recorded(undisturbed.recipe, home)
    del refs[REPORT]  # it tells of checks, and the undisturbed home was built without any
    assert {name: ref.identity for name, ref in refs.items()} == {
        name: ref.identity for name, ref in undisturbed.refs.items()
    }
    found, expected = (small_corpus.artifact_files(one, leave_out=[REPORT]) for one in (home, undisturbed.home))
    assert found == expected
    assert_dead_runs_are_closed(home)


def assert_dead_runs_are_closed(home: Path) -> None:
    """Dagster counts the killed runs as failed, and none of them holds a slot that a later run would wait for."""
    with dg.DagsterInstance.from_config(str(home / "dagster")) as instance:
        statuses = Counter(run.status for run in instance.get_runs())
        assert statuses == {dg.DagsterRunStatus.SUCCESS: 1, dg.DagsterRunStatus.FAILURE: len(POINTS)}
        assert instance.event_log_storage.get_concurrency_run_ids() == set()
    assert list((home / "dagster" / "processes").iterdir()) == []
