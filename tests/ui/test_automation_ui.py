"""What happens by itself, as a person sees it: a queue without a daemon, switches, badges, one run of a new revision.

On a copy of a finished home over a corpus of its own, behind one server. The tests run in any order.
"""

import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import small_corpus
from browser import SCREENSHOTS
from dagster_server import (
    DAEMON,
    DEFINITIONS,
    START_SECONDS,
    Server,
    running,
    runs_of,
    skipped_since,
    wait_for_new_runs,
    wait_until,
)
from small_corpus import Built

from pipeline_assets.automation import FAIL_WINDOW, new_revision_sensor, nightly_schedule
from pipeline_assets.flow import STAGES
from resources.execution import open_instance

pytestmark = pytest.mark.desk

LOCATION = "locations/pipeline_assets.definitions"
SENSOR, SCHEDULE = new_revision_sensor.name, nightly_schedule.name
ON, OFF = "RUNNING", "STOPPED"
TICK_SECONDS = 240
CHANGED_FILE, CHANGED_ROW = Path("beta") / "b_000.parquet", 20


@pytest.fixture(scope="module")
def corpus(finished_home: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the finished home's corpus, free to be changed, and its recipe."""
    folder = tmp_path_factory.mktemp("automation") / "corpus"
    kept = shutil.ignore_patterns(finished_home.home.name, "*.lock")
    shutil.copytree(finished_home.recipe.parent, folder, ignore=kept)
    return folder


@pytest.fixture(scope="module")
def server(finished_home: Built, corpus: Path) -> Iterator[Server]:
    home = small_corpus.copy_home(finished_home, corpus.parent / "home")
    with running(home.home, corpus / finished_home.recipe.name) as server:
        yield server


def states(server: Server) -> dict[str, str]:
    """Whether the sensor and the schedule are on."""
    answer = server.ask(
        f'{{sensorOrError(sensorSelector:{{{DEFINITIONS},sensorName:"{SENSOR}"}})'
        "{... on Sensor{sensorState{status}}}"
        f' scheduleOrError(scheduleSelector:{{{DEFINITIONS},scheduleName:"{SCHEDULE}"}})'
        "{... on Schedule{scheduleState{status}}}}"
    )
    return {
        "sensors": answer["sensorOrError"]["sensorState"]["status"],
        "schedules": answer["scheduleOrError"]["scheduleState"]["status"],
    }


def by_asset(server: Server, field: str) -> dict[str, Any]:
    """One field of each materialized asset, by GraphQL's name."""
    nodes = server.ask(f"{{assetNodes{{assetKey{{path}} {field}}}}}")["assetNodes"]
    found = {node["assetKey"]["path"][-1]: node[field.partition("{")[0]] for node in nodes}
    return {name: found[name] for name in STAGES}


def flip(page: Any, server: Server, kind: str, name: str, expected: str) -> None:
    """Click the switch on a sensor's or a schedule's page, and wait until the instance has it so."""
    assert states(server)[kind] != expected
    page.goto(f"{server.address}/{LOCATION}/{kind}/{name}")
    page.get_by_role("row").filter(has_text="Running").locator("label").click()
    wait_until(lambda: states(server)[kind] == expected, START_SECONDS, f"{name} to be {expected}")


def forget_heartbeats(server: Server) -> None:
    """Leave no trace of a daemon: Dagster takes one for alive until half an hour after its last sign of life."""
    folder = server.environment["DAGSTER_HOME"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DAGSTER_HOME", folder)
        with open_instance(Path(folder)) as instance:
            instance.wipe_daemon_heartbeats()


def test_without_a_daemon_a_run_waits_with_a_warning_and_starts_when_there_is_one(server: Server, page: Any) -> None:
    server.stop(DAEMON)
    try:
        forget_heartbeats(server)
        known = runs_of(server)
        page.goto(f"{server.address}/assets/raw_row_groups")
        page.get_by_role("button", name=re.compile(r"\bMaterialize$")).click()
        (run,) = wait_until(
            lambda: [one for one in runs_of(server) if one["status"] == "QUEUED"], START_SECONDS, "the launched run"
        )
        page.goto(f"{server.address}/runs")
        page.get_by_text("Queued (1)").click()
        page.get_by_text("The queued run coordinator is not healthy.").wait_for()
        page.get_by_text(run["runId"][:8]).first.wait_for()
        page.screenshot(path=SCREENSHOTS / "queued_without_a_daemon.png")
        assert run in runs_of(server)
    finally:
        server.start(DAEMON)
    (ended,) = wait_for_new_runs(server, known)
    assert ended["runId"] == run["runId"]
    assert ended["status"] == "SUCCESS", server.log_tail()
    page.get_by_text("The queued run coordinator is not healthy.").wait_for(state="detached")


def test_the_schedules_switch_turns_it_on_and_off(server: Server, page: Any) -> None:
    flip(page, server, "schedules", SCHEDULE, ON)
    page.screenshot(path=SCREENSHOTS / "schedule_is_on.png")
    flip(page, server, "schedules", SCHEDULE, OFF)


def test_an_asset_wears_a_badge_of_freshness(server: Server, page: Any) -> None:
    field = "freshnessStatusInfo{freshnessStatus}"

    def are_judged() -> bool:
        return {info["freshnessStatus"] for info in by_asset(server, field).values()} == {"HEALTHY"}

    wait_until(are_judged, TICK_SECONDS, "the daemon to judge freshness")
    page.goto(f"{server.address}/assets/packing_plan")
    page.get_by_text(f"Fails if more than {FAIL_WINDOW.days} days since last materialization").wait_for()
    page.get_by_text("Passing", exact=True).first.wait_for()


def test_a_new_revision_is_shown_and_gets_one_run_that_no_restart_repeats(
    server: Server, corpus: Path, page: Any
) -> None:
    assert set(by_asset(server, "staleStatus").values()) == {"FRESH"}
    rows = small_corpus.corpus_rows()["beta"]["b_000"]
    rows[CHANGED_ROW]["text"] = small_corpus.sentences(5_001)
    small_corpus.write_rows(corpus / CHANGED_FILE, rows)
    known = runs_of(server)
    page.goto(f"{server.address}/assets/dataset_revision")
    page.get_by_role("button", name="Observe").click()
    (observing,) = wait_for_new_runs(server, known)
    assert observing["status"] == "SUCCESS", server.log_tail()
    assert by_asset(server, "staleStatus")["raw_row_groups"] == "STALE"
    page.goto(f"{server.address}/assets/raw_row_groups")
    page.get_by_text("Unsynced").first.wait_for()
    page.screenshot(path=SCREENSHOTS / "unsynced.png")

    flip(page, server, "sensors", SENSOR, ON)
    (run,) = wait_for_new_runs(server, [*known, observing])
    ended = time.time()
    assert run["status"] == "SUCCESS", server.log_tail()
    tags = {tag["key"]: tag["value"] for tag in run["tags"]}
    assert tags["dagster/sensor_name"] == new_revision_sensor.name
    assert set(by_asset(server, "staleStatus").values()) == {"FRESH"}
    wait_until(lambda: skipped_since(server, SENSOR, ended), TICK_SECONDS, "a tick after the run")

    server.stop(DAEMON)
    restarted = time.time()
    server.start(DAEMON)
    wait_until(lambda: len(skipped_since(server, SENSOR, restarted)) >= 2, TICK_SECONDS, "two ticks after the restart")
    assert [one["runId"] for one in runs_of(server)] == [one["runId"] for one in (run, observing, *known)]
    flip(page, server, "sensors", SENSOR, OFF)
    page.goto(f"{server.address}/assets/raw_row_groups")
    page.get_by_text("Latest materialization").first.wait_for()
    assert page.get_by_text("Unsynced").count() == 0
