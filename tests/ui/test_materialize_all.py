"""A person's first visit: open the page, click *Materialize all* once, see the graph and every check turn green.

Against the real webserver and daemon on a fresh home, in headless Chromium. It skips where there is no browser; CI
installs one.
"""

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import small_corpus
from dagster_server import ROOT, Server, running, runs_of, wait_until

from pipeline_assets.definitions import ASSETS, CHECKS

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
SCREENSHOTS = ROOT / "test-artifacts"
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


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("ui")
    small_corpus.write_corpus(folder)
    with running(folder / "home", small_corpus.write_recipe(folder)) as server:
        yield server


@pytest.fixture(scope="module")
def page(server: Server) -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    SCREENSHOTS.mkdir(exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=BROWSER_FLAGS)
        yield browser.new_page(viewport={"width": 1600, "height": 1000})
        browser.close()


def test_one_click_on_a_fresh_home_is_one_green_run(server: Server, page: Any) -> None:
    names = [asset.key.path[-1] for asset in ASSETS]
    page.goto(f"{server.address}/asset-groups")
    for name in names:
        page.get_by_text(name, exact=True).first.wait_for(timeout=60_000)
    assert page.get_by_role("dialog").count() == 0
    button = page.get_by_role("button", name="Materialize all")
    assert "…" not in button.inner_text()
    assert runs_of(server) == []
    button.click()

    def finished() -> bool:
        found = runs_of(server)
        return bool(found) and all(run["status"] in ("SUCCESS", "FAILURE", "CANCELED") for run in found)

    wait_until(finished, RUN_SECONDS, "the run to finish")
    assert [run["status"] for run in runs_of(server)] == ["SUCCESS"], server.log.read_text()[-5_000:]

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
