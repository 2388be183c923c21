"""A person's first visit: open the page, click *Materialize all* once, see the graph and every check turn green.

Against the real webserver and daemon on a fresh home, in headless Chromium. It skips where there is no browser; CI
installs one.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import small_corpus

from pipeline_assets.definitions import ASSETS, CHECKS
from resources.execution import prepare_instance

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
ROOT = Path(__file__).parents[2]
SCREENSHOTS = ROOT / "test-artifacts"
START_SECONDS = 180
RUN_SECONDS = 300
BROWSER_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")


class Server:
    """`dagster dev` on a fresh home and a free port, asked through GraphQL."""

    def __init__(self, home: Path, recipe: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.address = f"http://127.0.0.1:{self.port}"
        self.log = home / "server.log"
        environment = os.environ | {
            "CORPUSMILL_HOME": str(home),
            "CORPUSMILL_RECIPE": str(recipe),
            "DAGSTER_HOME": str(prepare_instance(home)),
        }
        command = [sys.executable, "-m", "dagster", "dev", "--workspace", "workspace.yaml"]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*command, "--host", "127.0.0.1", "--port", str(self.port)],
                cwd=ROOT,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def ask(self, query: str) -> dict[str, Any]:
        request = urllib.request.Request(
            f"{self.address}/graphql", json.dumps({"query": query}).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=30) as response:
            return json.load(response)["data"]

    def stop(self) -> None:
        os.killpg(self.process.pid, signal.SIGTERM)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:  # a busy machine: its children are still being told
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(60)


def wait_until(found: Callable[[], Any], seconds: float, what: str) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := found():
            return value
        time.sleep(0.5)
    raise AssertionError(f"after {seconds:.0f} s still waiting for {what}")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("ui")
    small_corpus.write_corpus(folder)
    server = Server(folder / "home", small_corpus.write_recipe(folder))

    def is_loaded() -> bool:
        assert server.process.poll() is None, server.log.read_text()
        try:
            entries = server.ask("{workspaceOrError{... on Workspace{locationEntries{loadStatus}}}}")
        except OSError:
            return False
        return [entry["loadStatus"] for entry in entries["workspaceOrError"]["locationEntries"]] == ["LOADED"]

    try:
        wait_until(is_loaded, START_SECONDS, "the code location")
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="module")
def page(server: Server) -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    SCREENSHOTS.mkdir(exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=BROWSER_FLAGS)
        yield browser.new_page(viewport={"width": 1600, "height": 1000})
        browser.close()


def runs(server: Server) -> list[dict[str, str]]:
    return server.ask("{runsOrError{... on Runs{results{runId status}}}}")["runsOrError"]["results"]


def test_one_click_on_a_fresh_home_is_one_green_run(server: Server, page: Any) -> None:
    names = [asset.key.path[-1] for asset in ASSETS]
    page.goto(f"{server.address}/asset-groups")
    for name in names:
        page.get_by_text(name, exact=True).first.wait_for(timeout=60_000)
    assert page.get_by_role("dialog").count() == 0
    button = page.get_by_role("button", name="Materialize all")
    assert "…" not in button.inner_text()
    assert runs(server) == []
    button.click()

    def finished() -> bool:
        found = runs(server)
        return bool(found) and all(run["status"] in ("SUCCESS", "FAILURE", "CANCELED") for run in found)

    wait_until(finished, RUN_SECONDS, "the run to finish")
    assert [run["status"] for run in runs(server)] == ["SUCCESS"], server.log.read_text()[-5_000:]

    page.goto(f"{server.address}/asset-groups")
    page.get_by_text(names[-1], exact=True).first.wait_for(timeout=60_000)
    page.screenshot(path=SCREENSHOTS / "lineage.png")
    nodes = server.ask("{assetNodes{assetKey{path} isMaterializable assetMaterializations(limit:1){timestamp}}}")
    for node in nodes["assetNodes"]:
        assert bool(node["assetMaterializations"]) == node["isMaterializable"], node
    executions = server.ask(
        "{assetNodes{assetChecksOrError{... on AssetChecks{checks{name executionForLatestMaterialization{status}}}}}}"
    )
    statuses = {
        check["name"]: check["executionForLatestMaterialization"]["status"]
        for node in executions["assetNodes"]
        for check in node["assetChecksOrError"]["checks"]
    }
    assert set(statuses) == {spec.name for check in CHECKS for spec in check.check_specs}
    warning = {name for check in CHECKS for name in [spec.name for spec in check.check_specs if not spec.blocking]}
    assert {name for name, status in statuses.items() if status != "SUCCEEDED"} <= warning


def test_an_asset_page_shows_its_description_its_columns_and_a_loaded_picture(server: Server, page: Any) -> None:
    page.goto(f"{server.address}/assets/lsh_clusters")
    page.get_by_text("Connected components of documents").first.wait_for(timeout=60_000)
    page.get_by_text("Smallest doc_id of the row's cluster").first.wait_for(timeout=60_000)
    page.get_by_text("Show Markdown").first.click()
    picture = page.locator("img[src^='data:image/png']").first
    picture.wait_for(timeout=60_000)
    assert picture.evaluate("image => image.naturalWidth") > 0
    page.screenshot(path=SCREENSHOTS / "lsh_clusters.png")
