"""What a person sees when something is wrong: a stripe that cannot be read and is made good; a leak that stops the flow.

On a fresh home over a copy of the finished home's corpus, behind one server. The first run fails in one stripe, a page
of whose file is damaged. The file is mended, and *From failure* brings the home to what an undisturbed one holds. Then
the pipeline is made to leak.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import small_corpus
from browser import SCREENSHOTS, VIEW, VIEW_MILLISECONDS
from dagster_server import (
    ROOT,
    Server,
    materializations_of,
    running,
    runs_of,
    steps_of,
    verdicts_of,
    wait_for_new_runs,
)
from small_corpus import LAST, TRAINING, Built, recorded
from test_asset_checks import leak_in_the_split_plan, repeat_a_segment

from pipeline_assets.flow import STAGES

pytestmark = pytest.mark.desk

DAMAGED = Path("alpha") / "a_000.parquet"
BEFORE_THE_LEAK = {
    *("raw_row_groups", "reference_sets", "minhash_signatures", "lsh_clusters"),
    *("tokenizer", "document_tokens", "tokenizer_report", "split_documents"),
}
LEAK, RULE = "no_reference_text_is_in_validation", "documents_are_in_the_split_of_the_rule"
REPEATED = "every_pair_comes_exactly_once"


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """A run that failed in one stripe, and its re-execution from there."""

    server: Server
    built: Built
    failed: dict[str, Any]
    failed_steps: dict[str, str]
    again: dict[str, Any]
    steps: dict[str, str]
    files: dict[str, str]


def damage_a_page(path: Path) -> bytes:
    """Flip a byte of the first page of text in place, so that the file's size and footer stay; what there was before."""
    before = path.read_bytes()
    column = pq.read_metadata(path).row_group(0).column(0)
    content = bytearray(before)
    content[column.data_page_offset + column.total_compressed_size - 5] ^= 0xFF
    path.write_bytes(content)
    return before


def click_for_a_run(page: Any, server: Server, label: str, role: str = "button") -> dict[str, Any]:
    """The run that a click on a button of the shown page starts, once it has ended."""
    known = runs_of(server)
    page.get_by_role(role, name=re.compile(rf"\b{label}\b")).first.click()
    (run,) = wait_for_new_runs(server, known)
    return run


@pytest.fixture(scope="module")
def recovery(browser: Any, finished_home: Built, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recovery]:
    folder = tmp_path_factory.mktemp("failures")
    corpus, home = folder / "corpus", folder / "home"
    kept = shutil.ignore_patterns(finished_home.home.name, "*.lock")
    shutil.copytree(finished_home.recipe.parent, corpus, ignore=kept)
    recipe = corpus / finished_home.recipe.name
    undamaged = damage_a_page(corpus / DAMAGED)
    with running(home, recipe) as server:
        page = browser.new_page(viewport=VIEW)
        page.set_default_timeout(VIEW_MILLISECONDS)
        page.goto(f"{server.address}/asset-groups")
        failed = click_for_a_run(page, server, "Materialize all")
        failed_steps = steps_of(server, failed["runId"])
        page.goto(f"{server.address}/runs/{failed['runId']}")
        page.get_by_text(DAMAGED.name).first.wait_for()
        page.screenshot(path=SCREENSHOTS / "a_stripe_failed.png")
        (corpus / DAMAGED).write_bytes(undamaged)
        page.get_by_role("button").filter(has=page.get_by_role("img", name="arrow_drop_down")).click()
        again = click_for_a_run(page, server, "From failure", role="menuitem")
        page.goto(f"{server.address}/runs/{again['runId']}")
        page.get_by_text("RUN_SUCCESS").first.wait_for()
        page.screenshot(path=SCREENSHOTS / "from_failure.png")
        page.close()
        yield Recovery(
            server=server,
            built=Built(recipe=recipe, home=home, refs=recorded(recipe, home)),
            failed=failed,
            failed_steps=failed_steps,
            again=again,
            steps=steps_of(server, again["runId"]),
            files=small_corpus.artifact_files(home, leave_out=LAST),
        )


def test_from_failure_redoes_one_stripe_and_what_follows_and_gives_the_same_bytes(
    recovery: Recovery, finished_home: Built
) -> None:
    assert recovery.failed["status"] == "FAILURE"
    (broken,) = [step for step, status in recovery.failed_steps.items() if status == "FAILURE"]
    done = {step for step, status in recovery.failed_steps.items() if status == "SUCCESS"}
    assert broken.startswith("raw_row_groups.raw_row_groups_build[stripe_")
    assert [step for step in done if step.startswith("raw_row_groups.raw_row_groups_build[")]
    assert recovery.again["status"] == "SUCCESS", recovery.server.log_tail()
    assert set(recovery.steps.values()) == {"SUCCESS"}
    assert [step for step in recovery.steps if "raw_row_groups_build" in step] == [broken]
    assert recovery.steps.keys().isdisjoint(done)
    expected = small_corpus.artifact_files(finished_home.home, leave_out=LAST)  # they name the recipe's own place
    assert recovery.files == expected


def test_a_leak_stops_all_that_comes_later_and_each_of_it_alone(recovery: Recovery, page: Any, tmp_path: Path) -> None:
    server, built = recovery.server, recovery.built
    leak_in_the_split_plan(built)
    before = materializations_of(server)
    page.goto(f"{server.address}/asset-groups")
    run = click_for_a_run(page, server, "Materialize all")
    assert run["status"] == "FAILURE"
    after, verdicts = materializations_of(server), verdicts_of(server)
    assert verdicts[LEAK]["run"] == run["runId"]
    failed = {name for name, verdict in verdicts.items() if verdict["status"] == "FAILED"}
    assert {name for name in failed if verdicts[name]["severity"] == "ERROR"} == {LEAK, RULE}
    assert {name for name, last in after.items() if last["run"] == run["runId"]} == BEFORE_THE_LEAK
    untouched = set(STAGES) - BEFORE_THE_LEAK
    assert {name: after[name] for name in untouched} == {name: before[name] for name in untouched}
    page.goto(f"{server.address}/asset-groups")
    page.get_by_text("token_shards", exact=True).first.wait_for()
    page.screenshot(path=SCREENSHOTS / "a_leak_in_the_graph.png")

    refuse_alone(server, page, "token_shards", LEAK)

    repeat_a_segment(Built(recipe=built.recipe, home=built.home, refs=recorded(built.recipe, built.home)))
    page.goto(f"{server.address}/assets/packing_plan?view=checks&checkDetail={REPEATED}")
    click_for_a_run(page, server, "Execute(?! all)")
    assert verdicts_of(server)[REPEATED]["status"] == "FAILED"
    refuse_alone(server, page, TRAINING, REPEATED)
    plan = recorded(built.recipe, built.home)["packing_plan"]
    command = [sys.executable, "-m", "training_io.train", "--steps", "1", "--output", str(tmp_path)]
    refused = subprocess.run(
        [*command, "--plan", str(built.stage.store.folder(plan))],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert refused.returncode == 1
    assert "quarantined by a failed blocking check" in refused.stderr
    assert REPEATED in refused.stderr
    assert list(tmp_path.iterdir()) == []


def refuse_alone(server: Server, page: Any, asset: str, check: str) -> None:
    """Materialize an asset alone: it fails before it does anything, and its run's page names the check."""
    before = materializations_of(server)
    page.goto(f"{server.address}/assets/{asset}")
    run = click_for_a_run(page, server, "Materialize")
    assert run["status"] == "FAILURE"
    assert materializations_of(server) == before
    page.goto(f"{server.address}/runs/{run['runId']}")
    page.get_by_text("quarantined by a failed blocking check").filter(has_text=check).first.wait_for()
    page.screenshot(path=SCREENSHOTS / f"{asset}_alone_is_refused.png")
