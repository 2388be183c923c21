"""A person's first visit: open the page, click *Materialize all* once, see all turn green, look around, click again.

Against what `make ui` starts on a fresh home, in headless Chromium. What a page must show is read from the definitions,
from the run's events and from the artifacts' files. The tests share one server, in any order.
"""

import base64
import re
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import small_corpus
from browser import SCREENSHOTS, VIEW
from dagster_server import materializations_of, runs_of, steps_of, verdicts_of, wait_for_new_runs

from pipeline_assets.definitions import ASSETS, CHECKS, build_definitions
from pipeline_assets.flow import STAGES
from pipeline_assets.quality_report import PAGE_NAME

GRAPH = build_definitions().resolve_asset_graph()
DESCRIPTIONS = {asset.key.path[-1]: GRAPH.get(asset.key).description for asset in ASSETS}
BLOCKING = {spec.name: spec.blocking for check in CHECKS for spec in check.check_specs}
OF_THE_REPORT = {
    spec.name for check in CHECKS for spec in check.check_specs if spec.asset_key.path[-1] == "quality_report"
}
TABLES = {"raw_row_groups", "reference_sets", "lsh_clusters", "split_documents", "mixture_ledger"}
"""Assets that are tables: their rows can be counted in their Parquet files."""
DRAWN = {
    "raw_row_groups",
    "minhash_signatures",
    "lsh_clusters",
    "tokenizer_report",
    "packing_stats",
    "mixture_ledger",
    "varlen_training_run",
}
"""Assets with pictures."""


def test_the_first_screen_asks_for_one_click(first_visit: Any) -> None:
    assert first_visit.runs_before == []
    assert first_visit.num_dialogs == 0
    assert first_visit.button == f"Materialize all ({len(STAGES)})"


def test_one_click_is_one_green_run(first_visit: Any, page: Any) -> None:
    (run,) = first_visit.runs
    assert run["status"] == "SUCCESS"
    assert {name: last["run"] for name, last in first_visit.materializations.items()} == dict.fromkeys(
        STAGES, run["runId"]
    )
    verdicts = first_visit.verdicts
    assert {name: verdict["run"] for name, verdict in verdicts.items()} == dict.fromkeys(BLOCKING, run["runId"])
    not_passed = {name: verdict for name, verdict in verdicts.items() if verdict["status"] != "SUCCEEDED"}
    assert not [name for name in not_passed if BLOCKING[name]], not_passed

    page.goto(f"{first_visit.server.address}/asset-groups")
    page.get_by_role("img", name="run_success").nth(len(ASSETS) - 1).wait_for()


def test_the_run_page_shows_every_mapped_step(first_visit: Any, page: Any) -> None:
    (run,) = first_visit.runs
    mapped = [step for step in steps_of(first_visit.server, run["runId"]) if "[" in step]
    stripes = [step for step in mapped if "stripe_" in step]
    assert len(stripes) == small_corpus.RECIPE["reading"]["stripes"] >= 2
    page.set_viewport_size({**VIEW, "height": 9_000})  # steps that do not fit are not drawn
    page.goto(f"{first_visit.server.address}/runs/{run['runId']}")
    for step in mapped:
        page.locator(f'.chart-element[data-tooltip="{step}"]').wait_for()
    page.screenshot(path=SCREENSHOTS / "mapped_steps.png", clip={"x": 0, "y": 0, "width": 1600, "height": 2600})
    page.set_viewport_size(VIEW)
    page.locator(f'.chart-element[data-tooltip="{stripes[-1]}"]').wait_for()


@pytest.mark.parametrize("asset", DESCRIPTIONS)
def test_the_page_of(first_visit: Any, page: Any, asset: str) -> None:
    page.goto(f"{first_visit.server.address}/assets/{asset}")
    shown = page.locator("body")
    wait_for_words(page, DESCRIPTIONS[asset])
    if asset not in STAGES:
        return
    metadata = first_visit.materializations[asset]["metadata"]

    columns = {
        column["name"]: column["description"] for column in metadata.get("dagster/column_schema", {}).get("columns", [])
    }
    for name, description in columns.items():
        assert description, name
        wait_for_words(page, description)
    if (num_rows := metadata.get("dagster/row_count")) is not None:
        assert re.search(rf"Row count\s+{num_rows:,}\b", shown.inner_text())
    artifact = first_visit.built.home / asset
    if asset in TABLES:
        tables = [pq.ParquetFile(path) for path in artifact.rglob("*.parquet")]
        counted = [table.metadata.num_rows for table in tables if table.schema_arrow.names == list(columns)]
        assert sum(counted) == num_rows > 0, [table.schema_arrow.names for table in tables]

    pictures = [value for value in metadata.values() if isinstance(value, str) and "data:image/png" in value]
    assert bool(pictures) >= (asset in DRAWN)
    drawn = set()
    for number in range(page.get_by_text("[Show Markdown]").count()):
        page.get_by_text("[Show Markdown]").nth(number).click()
        picture = page.get_by_role("dialog").locator("img[src^='data:image/png']")
        picture.wait_for()
        assert picture.evaluate("image => image.decode().then(() => image.naturalWidth)") > 0
        page.screenshot(path=SCREENSHOTS / f"picture_{asset}_{number}.png")
        drawn.add(base64.b64decode(picture.get_attribute("src").partition(",")[2]))
        page.keyboard.press("Escape")
        picture.wait_for(state="detached")
    assert len(drawn) == len(pictures)
    assert drawn >= {path.read_bytes() for path in artifact.rglob("*.png")}

    numbers = {label for label, value in metadata.items() if isinstance(value, int | float)}
    assert numbers
    page.get_by_role("tab", name="Plots").or_(page.get_by_text("Plots", exact=True)).first.click()
    page.locator("canvas").nth(len(numbers) - 1).wait_for()
    for label in numbers:
        page.get_by_text(label, exact=True).first.wait_for()


def test_execute_all_executes_the_checks_of_the_asset_and_nothing_else(first_visit: Any, page: Any) -> None:
    server, asset = first_visit.server, "lsh_clusters"
    runs, before, materializations = runs_of(server), verdicts_of(server), materializations_of(server)
    page.goto(f"{server.address}/assets/{asset}?view=checks")
    page.get_by_role("button", name="Execute all").click()
    (run,) = wait_for_new_runs(server, runs)
    assert run["status"] == "SUCCESS", server.log_tail()
    after = verdicts_of(server)
    executed = {name for name, verdict in after.items() if verdict["run"] == run["runId"]}
    assert executed == {name for name, verdict in after.items() if verdict["asset"] == asset}
    assert len(executed) >= 2
    assert {after[name]["status"] for name in executed} == {"SUCCEEDED"}
    assert {name: verdict for name, verdict in after.items() if name not in executed} == {
        name: verdict for name, verdict in before.items() if name not in executed
    }
    assert materializations_of(server) == materializations
    page.goto(f"{server.address}/assets/{asset}?view=checks")
    page.get_by_text("Succeeded", exact=True).nth(len(executed) - 1).wait_for()


def test_a_second_click_gives_the_same_data_versions_and_builds_nothing(first_visit: Any, page: Any) -> None:
    server, home = first_visit.server, first_visit.built.home
    runs, files = runs_of(server), small_corpus.artifact_files(home)
    page.goto(f"{server.address}/asset-groups")
    page.get_by_role("button", name="Materialize all").click()
    (run,) = wait_for_new_runs(server, runs)
    assert run["status"] == "SUCCESS", server.log_tail()
    after = materializations_of(server)
    assert {last["run"] for last in after.values()} == {run["runId"]}
    assert {name: last["data_version"] for name, last in after.items()} == {
        name: last["data_version"] for name, last in first_visit.materializations.items()
    }
    for name in STAGES:
        done = [after[name]["metadata"][f"artifacts_{outcome}"] for outcome in ("built", "rebuilt", "reused")]
        assert done[:2] == [0, 0], name
        assert done[2] > 0, name
    assert small_corpus.artifact_files(home) == files
    page.get_by_role("img", name="run_success").nth(len(ASSETS) - 1).wait_for()


def test_the_report_opens_from_disk_without_network_and_runs_nothing(
    first_visit: Any, browser: Any, tmp_path: Path
) -> None:
    """Once as it is, once without its content security policy: what stops a text from running is that it is escaped."""
    report = report_of(first_visit)
    html = report.read_text(encoding="utf-8")
    assert len(html.encode()) < 3_000_000
    policy = re.compile(r'<meta http-equiv="Content-Security-Policy"[^>]*>')
    bare = tmp_path / "report.html"
    bare.write_text(policy.sub("", html), encoding="utf-8")
    assert policy.search(html)
    assert not policy.search(bare.read_text(encoding="utf-8"))
    for path in (report, bare):
        context = browser.new_context(viewport=VIEW, offline=True)
        page = context.new_page()
        requests, dialogs, errors = [], [], []
        page.on("request", lambda request, seen=requests: seen.append(request.url))
        page.on("dialog", lambda dialog, seen=dialogs: (seen.append(dialog.message), dialog.dismiss()))
        page.on("pageerror", lambda error, seen=errors: seen.append(str(error)))
        page.goto(path.as_uri())
        page.wait_for_load_state("networkidle")
        assert [url for url in requests if not url.startswith("data:")] == [path.as_uri()]
        assert dialogs == errors == []
        assert page.title() != "ran"
        assert "onerror" in page.locator("body").inner_text(), "no hostile text is shown"
        images = page.locator("img")
        widths = [images.nth(number).evaluate("image => image.naturalWidth") for number in range(images.count())]
        assert widths
        assert 0 not in widths
        checks = page.locator("[data-outcome]").evaluate_all("found => found.map(one => one.id)")
        assert sorted(checks) == sorted(f"check-{name}" for name in BLOCKING if name not in OF_THE_REPORT)
        if path == report:
            page.screenshot(path=SCREENSHOTS / "quality_report.png", full_page=True)
            pdf = page.pdf()
            assert pdf.startswith(b"%PDF-")
            assert pdf.count(b"/Type /Page\n") + pdf.count(b"/Type /Page ") > 1
        context.close()


def test_the_report_is_accessible(first_visit: Any, page: Any) -> None:
    from axe_playwright_python.sync_playwright import Axe

    page.goto(report_of(first_visit).as_uri())
    assert serious(Axe().run(page)) == {}
    page.evaluate("document.body.append(new Image())")  # a picture without words, to see that it is looked for
    assert "image-alt" in serious(Axe().run(page))


def wait_for_words(page: Any, markdown: str) -> None:
    """Wait until the page shows a text of ours, which may set names as `code`."""
    shows = "words => document.body.innerText.replace(/\\s+/g, ' ').includes(words)"
    page.wait_for_function(shows, arg=" ".join(markdown.replace("`", "").split()))


def report_of(first_visit: Any) -> Path:
    """The report of the first visit's run."""
    return Path(first_visit.materializations["quality_report"]["metadata"]["folder"]) / PAGE_NAME


def serious(results: Any) -> dict[str, list[str]]:
    """Elements by the rule of accessibility that they break, where that is serious or critical."""
    return {
        violation["id"]: [node["html"] for node in violation["nodes"]]
        for violation in results.response["violations"]
        if violation["impact"] in ("serious", "critical")
    }
