"""The desk that the browser tests sit at: a browser, a home that one click made green, copies of it to damage.

* `page`: a new tab in a context of its own; whatever it shows at the end is kept as `test-artifacts/<test>.png`.
* `first_visit`: the server that `make ui` starts on a fresh home, after one click on *Materialize all*. One a session:
  tests may read it, execute its checks and materialize again, and must damage nothing.
* `finished_home`: that home as it was after the first run, without a server. To read, not to change.
* `home`: a copy of it of the test's own, with its history. To damage; `with running(home.home, home.recipe) as server`
  (`dagster_server`) serves it.

All skip where there is no Chromium.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import small_corpus
from browser import BROWSER_FLAGS, CHROMIUM, SCREENSHOTS, VIEW, VIEW_MILLISECONDS
from dagster_server import (
    ROOT,
    Server,
    copy_served_home,
    materializations_of,
    running_make_ui,
    runs_of,
    verdicts_of,
    wait_for_new_runs,
)
from small_corpus import Built

from pipeline_assets.definitions import ASSETS
from resources.artifact_store import locked

RECIPE, HOME = "recipe.yaml", "home"
HOSTILE = """<script>document.title='ran'</script></table>"><img src=x onerror="document.title='ran'">"""


def hostile_rows() -> list[dict[str, str]]:
    """Rows that would change the title of a page which took them for markup: the largest cluster, the longest text."""
    copied, longest = HOSTILE + small_corpus.sentences(3_000), HOSTILE + small_corpus.sentences(3_001, 2_000)
    texts = [copied] * 6 + [longest]
    return [
        {"text": text, "id": f"{HOSTILE}{row}", "dump": HOSTILE, "url": f"javascript:{HOSTILE}"}
        for row, text in enumerate(texts)
    ]


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine")
    from playwright.sync_api import sync_playwright

    SCREENSHOTS.mkdir(exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=BROWSER_FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    context = browser.new_context(viewport=VIEW)
    context.set_default_timeout(VIEW_MILLISECONDS)
    page = context.new_page()
    yield page
    name = re.sub(r"[^\w-]+", "-", request.node.name.removeprefix("test_")).strip("-")
    page.screenshot(path=SCREENSHOTS / f"{name}.png")
    context.close()


@dataclass(frozen=True, kw_only=True)
class FirstVisit:
    """What a person met who opened the page on a fresh home, and what there was after the run of the one click."""

    server: Server
    built: Built
    runs_before: list[dict[str, Any]]
    num_dialogs: int
    button: str
    runs: list[dict[str, Any]]
    materializations: dict[str, dict[str, Any]]
    verdicts: dict[str, dict[str, Any]]


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all processes of a test session, with the small corpus, hostile texts, and the recipe."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "desk"
    folder.mkdir(exist_ok=True)
    with locked(folder):
        if not (folder / RECIPE).exists():
            small_corpus.write_rows(small_corpus.write_corpus(folder) / "alpha" / "hostile.parquet", hostile_rows())
            small_corpus.write_recipe(folder, name=RECIPE)
    return folder


@pytest.fixture(scope="session")
def first_visit(browser: Any, tmp_path_factory: pytest.TempPathFactory, shared_folder: Path) -> Iterator[FirstVisit]:
    recipe, home = shared_folder / RECIPE, tmp_path_factory.mktemp("ui") / "home"
    with running_make_ui(home, recipe) as server:
        page = browser.new_page(viewport=VIEW)
        page.goto(f"{server.address}/asset-groups")
        for asset in ASSETS:
            page.get_by_text(asset.key.path[-1], exact=True).first.wait_for(timeout=VIEW_MILLISECONDS)
        page.screenshot(path=SCREENSHOTS / "first_screen.png")
        button = page.get_by_role("button", name="Materialize all")
        runs_before, num_dialogs, label = runs_of(server), page.get_by_role("dialog").count(), button.inner_text()
        button.click()
        runs = wait_for_new_runs(server, runs_before)
        page.close()
        assert [run["status"] for run in runs] == ["SUCCESS"], server.log_tail()
        with locked(shared_folder):
            if not (shared_folder / HOME).exists():
                copy_served_home(home, shared_folder / HOME)
        yield FirstVisit(
            server=server,
            built=built(recipe, home),
            runs_before=runs_before,
            num_dialogs=num_dialogs,
            button=label,
            runs=runs,
            materializations=materializations_of(server),
            verdicts=verdicts_of(server),
        )


@pytest.fixture(scope="session")
def finished_home(browser: Any, shared_folder: Path) -> Built:
    """The first visit's home where a process of this session has made it already, else one of the command line's."""
    recipe, home = shared_folder / RECIPE, shared_folder / HOME
    with locked(shared_folder):
        if not home.exists():
            environment = os.environ | {"CORPUSMILL_HOME": str(home), "CORPUSMILL_RECIPE": str(recipe)}
            command = [sys.executable, "-m", "pipeline_assets", "run"]
            ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
            assert ran.returncode == 0, ran.stdout + ran.stderr
    return built(recipe, home)


@pytest.fixture
def home(finished_home: Built, tmp_path: Path) -> Built:
    return small_corpus.copy_home(finished_home, tmp_path / "home")


def built(recipe: Path, home: Path) -> Built:
    """A finished home as the poisons of the checks take it."""
    return Built(recipe=recipe, home=home, refs=small_corpus.recorded(recipe, home))
