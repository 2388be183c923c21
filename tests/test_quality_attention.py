"""What the report says first: what did not pass or count, warnings, what cannot be read; and nothing twice."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import small_corpus
from small_corpus import Built
from test_quality_report import KNOWN, record_path
from test_quality_tables import drawn_page

from pipeline_assets.findings import FoundAsset, FoundVerdict, KnownCheck
from pipeline_assets.flow import STAGES
from pipeline_assets.quality_attention import MAX_UNREAD, MEANING_CHARACTERS, attention
from pipeline_assets.quality_page import Note, Page, Section, Table
from pipeline_assets.verdict_records import Outcome, VerdictRecord
from training_io.manifest import MANIFEST_NAME

NOTHING = "Nothing: every check passed."


def lines_of(page: Page) -> list[str]:
    """The lines of the section, in order; what is a table there stands for itself."""
    (section,) = [one for one in page.sections if one.anchor == "attention"]
    assert page.sections[0] is section
    return lines_in(section)


def lines_in(section: Section) -> list[str]:
    return [block.text if isinstance(block, Note) else block.caption for block in section.blocks]  # type: ignore[union-attr]


def with_warnings_of(built: Built, **changes: Any) -> Page:
    """The page under a recipe that asks for something else of the same artifacts."""
    recipe = built.stage.recipe
    stage = replace(built.stage, pipeline=replace(built.stage.pipeline, recipe=recipe.model_copy(update=changes)))
    section = attention(stage, found_in(built), [], [])
    return Page(title="t", summary=[], sections=[section])


def test_a_home_in_which_all_passed_has_nothing_to_attend_to_but_warnings(clean: Built) -> None:
    assert not [line for line in lines_of(drawn_page(clean)) if "not counted" in line]
    assert lines_of(with_warnings_of(clean, tokenizer=given(clean))) == [NOTHING]


def given(built: Built) -> Any:
    """The tokenizer section of a recipe that asks for as many ids as there are."""
    num_ids = built.refs["tokenizer"].counts["vocab_size"]
    return built.stage.recipe.tokenizer.model_copy(update={"vocab_size": num_ids})


def test_a_tokenizer_of_fewer_ids_than_asked_for_is_told(clean: Built) -> None:
    found = clean.refs["tokenizer"].counts["vocab_size"]
    asked = given(clean).model_copy(update={"vocab_size": found + 1_000})
    assert lines_of(with_warnings_of(clean, tokenizer=asked)) == [
        f"tokenizer: expected {found + 1_000:,} ids, the sample has merges for {found:,}; enlarge the sample or lower"
        " tokenizer.vocab_size."
    ]


def test_all_checks_of_an_asset_that_is_not_there_take_one_line(tmp_path: Path) -> None:
    folder = small_corpus.write_corpus(tmp_path)
    built = small_corpus.build(small_corpus.write_recipe(folder), folder / "home", upto="raw_row_groups")
    lines = lines_of(drawn_page(built))
    checked = {check.asset for check in KNOWN}
    for asset in checked - {"raw_row_groups"}:
        number = sum(check.asset == asset for check in KNOWN)
        noun = "check" if number == 1 else "checks"
        assert lines.count(f"{asset}: not built with this recipe; {number} {noun} not counted.") == 1
    assert lines.count("raw_row_groups: all 2 checks not counted. Not counted yet on what is there: execute it.") == 1
    unchecked = {"tokenizer", "packing_stats"}
    assert {f"{asset}: not built with this recipe." for asset in unchecked} < set(lines)
    assert len(lines) == len(checked | unchecked)


def test_what_one_check_did_not_count_is_told_by_its_name(copy: Built) -> None:
    record_path(copy, "no_pack_is_over_capacity").unlink()
    lines = lines_of(drawn_page(copy))
    told = "packing_plan: 1 check not counted (no_pack_is_over_capacity). Not counted yet on what is there: execute it."
    assert told in lines
    assert NOTHING not in lines


def test_what_cannot_be_read_needs_attention(copy: Built) -> None:
    (copy.folder("packing_stats") / "stats.json").write_text("[]")
    page = drawn_page(copy)
    assert page.unread
    assert [line for line in lines_of(page) if "stats.json" in line] == page.unread
    (copy.folder("packing_stats") / MANIFEST_NAME).unlink()
    assert lines_of(drawn_page(copy)) == ["packing_stats: no longer whole: materialize it again."]


def verdict(check: KnownCheck, outcome: Outcome) -> FoundVerdict:
    record = VerdictRecord(
        basis="b", judged={}, outcome=outcome, expected="no violation", found=f"{outcome} here", num_violations=1
    )
    return FoundVerdict(check=check, record=record)


def test_what_did_not_pass_is_in_the_table_and_nothing_else_is(clean: Built) -> None:
    outcomes: list[Outcome] = ["passed", "warned", "crashed", "failed"]
    verdicts = [verdict(check, outcome) for check, outcome in zip(KNOWN[:4], outcomes, strict=True)]
    uncounted = FoundVerdict(check=KNOWN[-1], record=None, reason="because")
    section = attention(clean.stage, found_in(clean), [*verdicts, uncounted], [])
    (table,) = [block for block in section.blocks if isinstance(block, Table)]
    assert list(table.columns) == ["outcome", "check", "asset", "found", "meaning and what to do"]
    expected = [("failed", KNOWN[2]), ("failed", KNOWN[3]), ("warned", KNOWN[1])]
    said = ["crashed here", "failed here", "warned here"]
    assert [list(row) for row in table.rows] == [
        [outcome, check.name, check.asset, found, cut(check.description, MEANING_CHARACTERS)]
        for (outcome, check), found in zip(expected, said, strict=True)
    ]
    assert f"{KNOWN[-1].asset}: 1 check not counted. because" in lines_in(section)


def cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def found_in(built: Built) -> Mapping[str, FoundAsset]:
    return {asset: FoundAsset(asset=asset, state="built", ref=built.refs[asset]) for asset in STAGES}


def test_a_list_of_what_cannot_be_read_is_bounded(clean: Built) -> None:
    section = attention(clean.stage, found_in(clean), [], [f"thing {number}" for number in range(4_000)])
    lines = [block.text for block in section.blocks if isinstance(block, Note)]
    assert sum(line.startswith("thing ") for line in lines) == MAX_UNREAD
    assert lines[-1] == f"{MAX_UNREAD} of 4,000 things that could not be read are shown; the rest is below."
