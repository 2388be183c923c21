"""Three artifacts are poisoned in one place each, and a person executes checks: exactly the right one fails, and says why.

On a copy of a finished home, behind a server of its own. The poisons are those of the checks' own tests.
"""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import small_corpus
from dagster_server import Server, materializations_of, running, runs_of, verdicts_of, wait_for_new_runs
from small_corpus import Built, assets_read_by, recorded
from test_asset_checks import POISONS

pytestmark = pytest.mark.desk

ALL, ONE = "Execute all", "Execute"


@pytest.fixture(scope="module")
def poisoned(finished_home: Built, tmp_path_factory: pytest.TempPathFactory) -> Built:
    return small_corpus.copy_home(finished_home, tmp_path_factory.mktemp("poisoned") / "home")


@pytest.fixture(scope="module")
def server(poisoned: Built) -> Iterator[Server]:
    with running(poisoned.home, poisoned.recipe) as server:
        yield server


@pytest.mark.parametrize(
    ("name", "button"),
    [
        ("every_pair_comes_exactly_once", ONE),  # a repeated segment breaks the law of the batches too
        ("shards_hold_every_document_once", ALL),
        ("every_removal_has_evidence", ONE),  # what has none is not plausible either
    ],
)
def test_exactly_the_check_of_what_was_poisoned_fails(
    server: Server, poisoned: Built, page: Any, name: str, button: str
) -> None:
    asset = assets_read_by(name)[0]
    runs, before, materializations = runs_of(server), verdicts_of(server), materializations_of(server)
    assert before[name]["status"] == "SUCCEEDED"
    built = Built(recipe=poisoned.recipe, home=poisoned.home, refs=recorded(poisoned.recipe, poisoned.home))
    needle = POISONS[name](built)

    page.goto(f"{server.address}/assets/{asset}?view=checks&checkDetail={name}")
    page.get_by_role("button", name=re.compile(rf"\b{button}$")).click()
    (run,) = wait_for_new_runs(server, runs)

    after = verdicts_of(server)
    executed = {check for check, verdict in after.items() if verdict["run"] == run["runId"]}
    assert executed == {check for check in after if after[check]["asset"] == asset and (button == ALL or check == name)}
    assert {check for check in executed if after[check]["status"] != "SUCCEEDED"} == {name}
    assert after[name]["status"] == "FAILED"
    assert after[name]["severity"] == "ERROR"
    assert re.match(r"[1-9][\d,]* violations? in ", after[name]["description"])
    assert {check: after[check] for check in after if check not in executed} == {
        check: before[check] for check in before if check not in executed
    }
    assert materializations_of(server) == materializations

    page.goto(f"{server.address}/assets/{asset}?view=checks&checkDetail={name}")
    page.get_by_text(after[name]["description"]).first.wait_for()
    page.get_by_text("Failed", exact=True).first.wait_for()
    page.locator("table").filter(has_text=needle).first.wait_for()
