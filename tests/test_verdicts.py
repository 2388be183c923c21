"""What a check puts into the event log: small and readable whatever its verdict holds."""

import json
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import small_corpus
from small_corpus import Built

from asset_checks.verdicts import Verdict, law, verdict_of
from pipeline_assets.definitions import build_definitions
from pipeline_assets.event_size import EVENT_BYTES, PAGES_FOLDER
from pipeline_assets.references import PipelineResource
from pipeline_assets.stripes import Stage
from pipeline_assets.verdict_records import VerdictRecord, bounded, read_verdict
from resources.artifact_store import ArtifactRef

HUGE = 100_000


def wide(cell: str, name: str = "column") -> list[dict[str, str]]:
    """As many rows and columns as an event shows."""
    return [{f"{name}_{column}": cell for column in range(40)} for _ in range(20)]


def executed(built: Built, verdict: Verdict) -> tuple[dg.AssetCheckEvaluation, int, list[str]]:
    """The evaluation of a check that comes to this verdict, the bytes of its event, and what the log says of it."""

    def a_law(stage: Stage, packing_plan: ArtifactRef) -> Verdict:
        return verdict

    check = law(a_law, blocking=False, description="A law.")
    definitions = dg.Definitions.merge(
        build_definitions(PipelineResource(recipe=str(built.recipe), home=str(built.home))),
        dg.Definitions(
            asset_checks=[check],
            jobs=[dg.define_asset_job("one_check", selection=dg.AssetSelection.checks(*check.check_keys))],
        ),
    )
    with small_corpus.short_instance() as instance:
        result = small_corpus.execute(definitions.resolve_job_def("one_check"), instance)
        said = [entry.user_message for entry in instance.all_logs(result.run_id)]
    assert result.success
    (event,) = [one for one in result.all_events if one.event_type == dg.DagsterEventType.ASSET_CHECK_EVALUATION]
    (evaluation,) = result.get_asset_check_evaluations()
    return evaluation, len(dg.serialize_value(event)), [line for line in said if line.startswith("a_law: ")]


VERDICTS: dict[str, dict[str, Any]] = {
    "wide examples": {"examples": wide("x" * 160)},
    "wide examples of wide letters": {"examples": wide("漢" * 160)},
    "examples that are too many, too long and named at length": {"examples": wide("x" * HUGE, "x" * HUGE) * 20},
    "a number named at length": {"numbers": {"x" * HUGE: 0.5}},
    "numbers that are too many": {"numbers": {f"{number}{'𝒙' * HUGE}": 0.5 for number in range(500)}},
    "long sentences": {"expected": "𝒙" * HUGE, "found": "𝒙" * HUGE},
    "all of it": {
        "expected": "𝒙" * HUGE,
        "found": "𝒙" * HUGE,
        "examples": wide("𝒙" * 160, "𝒙" * HUGE),
        "numbers": {f"{number}{'𝒙' * HUGE}": 0.5 for number in range(500)},
    },
}


@pytest.mark.parametrize("name", VERDICTS)
def test_the_event_of_a_check_is_small_whatever_it_found(name: str, copy: Built) -> None:
    verdict = Verdict(**{"expected": "none", "found": "some", "num_violations": 3, **VERDICTS[name]})
    evaluation, size, said = executed(copy, verdict)
    assert size < EVENT_BYTES
    assert evaluation.metadata["num_violations"].value == 3
    assert not evaluation.passed
    (line,) = said
    assert len(line) < 1_100


def test_examples_that_fit_are_shown_and_others_are_in_a_file(copy: Built) -> None:
    some = {"expected": "none", "found": "some", "num_violations": 20}
    shown, size, _ = executed(copy, Verdict(**some, examples=wide("x" * 160)))
    assert size > 20 * 40 * 160
    assert [dict(record.data) for record in shown.metadata["examples"].records] == wide("x" * 160)
    filed, _, _ = executed(copy, Verdict(**some, examples=wide("漢" * 160)))
    path = Path(filed.metadata["examples"].path)
    executed(copy, Verdict(**some, examples=wide("文" * 160)))  # of the same artifact, later: the link stays true
    assert path.is_relative_to(copy.home.resolve() / PAGES_FOLDER / "packing_plan")
    assert json.loads(path.read_bytes()) == wide("漢" * 160)


def test_the_event_says_what_the_record_says(copy: Built) -> None:
    numbers = {"share": 0.5, "none": float("nan"), **{f"removed_share_pool_{number}": 0.1 for number in range(64)}}
    examples = [{"id": bytes(32), "text": "\ud800" + "x" * 500, "none": None}] * 30
    verdict = Verdict(expected="e", found="f" * HUGE, num_violations=30, examples=examples, numbers=numbers)
    evaluation, _, _ = executed(copy, verdict)
    record = read_verdict(copy.stage.store, copy.refs["packing_plan"], "a_law")
    assert record is not None
    assert len(record.numbers) == 66
    shown = [name for name in numbers if name != "none"] + ["numbers_left_out"]
    assert {name: evaluation.metadata[name].value for name in shown} == record.numbers
    assert "none" not in evaluation.metadata
    assert [dict(record.data) for record in evaluation.metadata["examples"].records] == record.examples
    assert evaluation.metadata["found"].value == evaluation.description == record.found


def test_numbers_that_are_left_out_are_counted(copy: Built) -> None:
    numbers = {f"stage_{number // 64}_pool_{number % 64}_tokens": number for number in range(3 * 64)}
    evaluation, _, _ = executed(copy, Verdict(expected="e", found="f", num_violations=0, numbers=numbers))
    shown = {name: entry.value for name, entry in evaluation.metadata.items() if name in numbers}
    assert shown == {name: number for name, number in numbers.items() if number < 149}
    assert evaluation.metadata["numbers_left_out"].value == 3 * 64 - 149


@pytest.mark.parametrize(
    ("numbers", "left_out"),
    [
        ({"a": 1}, None),
        ({"a": 1, "b": float("nan"), "c": float("-inf")}, 2),
        ({f"{'x' * 90}{number}": number for number in range(3)}, 2),  # one name, once it is cut
        ({str(number): number for number in range(150)}, None),
        ({str(number): number for number in range(149)} | {"none": float("nan")}, 1),
        ({str(number): number for number in range(150)} | {"none": float("nan")}, 2),
    ],
)
def test_every_number_is_there_or_counted_as_left_out(numbers: dict[str, float], left_out: int | None) -> None:
    record = VerdictRecord(
        basis="b", judged={}, outcome="passed", expected="e", found="f", num_violations=0, numbers=numbers
    )
    kept = bounded(record)
    assert kept.numbers.get("numbers_left_out") == left_out
    assert len(kept.numbers) == len(numbers) - (left_out or 0) + bool(left_out) <= 150
    assert bounded(kept) == kept


@pytest.mark.parametrize(("number", "words"), [(0, "0 violations"), (1, "1 violation"), (1_200, "1,200 violations")])
def test_one_violation_is_told_in_the_singular(number: int, words: str) -> None:
    assert verdict_of("none", ["v"] * number, "7 rows").found == f"{words} in 7 rows"
