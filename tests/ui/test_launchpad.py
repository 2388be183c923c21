"""A person launches the job `train` with values of their own: what cannot be is refused in the dialog, and makes no run.

Against the webserver alone on an empty home: what is launched stays in the queue.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import small_corpus
from browser import SCREENSHOTS
from dagster_server import START_SECONDS, WEBSERVER, Server, running, runs_of, wait_until

TRAIN = "locations/pipeline_assets.definitions/jobs/train"
REFUSAL = "steps: expected 1 to 999,999,999, or 0 for the recipe's, found -3. Correct steps in the run's configuration."


@pytest.fixture
def server(browser: Any, tmp_path: Path) -> Iterator[Server]:
    recipe = small_corpus.write_recipe(small_corpus.write_corpus(tmp_path / "corpus"))
    with running(tmp_path / "home", recipe, WEBSERVER) as server:
        yield server


def type_into(launchpad: Any, config: str) -> None:
    """Replace what the launchpad's editor holds."""
    launchpad.locator(".CodeMirror").click()
    launchpad.page.keyboard.press("Control+a")
    launchpad.page.keyboard.type(config)


def config_of(server: Server, run_id: str) -> str:
    answer = server.ask(f'{{runOrError(runId:"{run_id}"){{... on Run{{runConfigYaml}}}}}}')
    return str(answer["runOrError"]["runConfigYaml"]).strip()


def test_the_launchpad_refuses_a_bad_value_in_our_words_and_launches_a_good_one(server: Server, page: Any) -> None:
    page.goto(f"{server.address}/{TRAIN}")
    page.get_by_role("button").filter(has=page.get_by_role("img", name="arrow_drop_down")).last.click()
    page.get_by_role("menuitem", name="Open launchpad").click()
    page.get_by_role("button", name="Confirm").click()  # Dagster asks, as there is no plan yet to train on
    launchpad = page.get_by_role("dialog").filter(has_text="Launchpad")
    launchpad.get_by_text("Optimizer steps to train for: 1 to 999,999,999.").wait_for()
    launch = launchpad.get_by_role("button", name=re.compile(r"\bMaterialize$"))

    type_into(launchpad, "steps: -3")
    launchpad.get_by_text("No errors").wait_for()
    launch.click()
    refusal = page.get_by_role("dialog").filter(has_text="DagsterInvalidDefinitionError").last
    refusal.wait_for()
    assert REFUSAL in " ".join(refusal.inner_text().split())
    page.screenshot(path=SCREENSHOTS / "launchpad_refuses_minus_three.png")
    assert runs_of(server) == []
    page.get_by_role("button", name="OK", exact=True).click()

    type_into(launchpad, "steps: x")
    launchpad.get_by_text('Invalid scalar at path root:steps. Value "x"').wait_for()
    page.screenshot(path=SCREENSHOTS / "launchpad_refuses_a_letter.png")
    assert launch.is_disabled()

    type_into(launchpad, "steps: 2")
    launchpad.get_by_text("No errors").wait_for()
    launch.click()
    (run,) = wait_until(
        lambda: [run for run in runs_of(server) if run["status"] == "QUEUED"], START_SECONDS, "the launched run"
    )
    assert config_of(server, run["runId"]) == "steps: 2"
