"""The report: what the web wrote is shown and never run, every state of a home is drawn, and the same gives the same."""

import base64
import json
import re
import shutil
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import naive_html
import numpy as np
import pyarrow.parquet as pq
import pytest
import small_corpus
from hypothesis import example, given
from hypothesis import strategies as st
from small_corpus import Built, evaluations, materialize, materialized_metadata, run_checks
from test_asset_checks import POISONS, first_slice, seal_again
from test_pictures import contrast

from asset_checks.quality_report import report_is_self_contained
from pipeline_assets.definitions import CHECKS_OF_DATA
from pipeline_assets.findings import KnownCheck
from pipeline_assets.parameters import recipe_digest
from pipeline_assets.quality_page import (
    MAX_PAGE_BYTES,
    CheckEntry,
    CutText,
    Drawing,
    Note,
    Page,
    Picture,
    Section,
    Spelled,
    Table,
    render,
    render_within,
    table_of,
)
from pipeline_assets.quality_report import FACTS_NAME, PAGE_NAME, build_report
from pipeline_assets.suspicious import CONTEXT_CHARACTERS, cut_text, pack_lengths
from pipeline_assets.tokenizer import open_tokenizer
from pipeline_assets.transforms.drawings import attention_svg, pack_svg
from pipeline_assets.transforms.lookup import printable
from pipeline_assets.verdict_records import VerdictRecord, forget_verdict, read_verdict, record_verdict
from resources.artifact_store import ArtifactRef
from training_io.document_index import read_index
from training_io.errors import FormatError
from training_io.manifest import MANIFEST_NAME
from training_io.plan import Plan, ShardsReference, load_plan
from training_io.planning import plan_packs

KNOWN = tuple(
    KnownCheck(
        asset=spec.asset_key.path[-1], name=spec.name, description=spec.description or "", is_blocking=spec.blocking
    )
    for check in CHECKS_OF_DATA
    for spec in check.check_specs
)
HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' onmouseover='alert(1)",
    "{{ 7 * 7 }}{% raw %}{# x #}",
    "</table></main></body></html>",
    "</style><style>*{display:none}",
    "</title><script>",
    "]]><!-- <![CDATA[",
    "&lt;b&gt; &amp; &#60; &",
    "nul \x00, bell \x07, escape \x1b[31m",
    "reversed \u202e txt.exe \u2066",
    "back\\slash \\x41 \\n",
    "␟ of its own",
    "javascript:alert(1)",
)
MARK = "QQQ"


def table(text: str) -> Table:
    cells = [text, Spelled(printable(text)), CutText(parts=[text, text]), 1]
    meanings = {text: text}
    return Table(caption=text, columns=[text, "b", "c", "d"], rows=[cells], total=2, rest=text, meanings=meanings)


def turned_table(text: str) -> Table:
    firsts = [text, Spelled(printable(text)), CutText(parts=[text, text])]
    rows = [[first, text] for first in firsts]
    return Table(caption=text, columns=[text, "b"], rows=rows, total=4, rest=text, is_turned=True)


def page_with(text: str) -> Page:
    """A page with the same text wherever one can be."""
    check = CheckEntry(
        name="a_law",
        asset=text,
        outcome=text,
        severity=text,
        expected=text,
        found=text,
        description=text,
        numbers={text: 0.5},
        examples=table(text),
    )
    blocks = (
        table(text),
        turned_table(text),
        Picture(png=b"png", alternative=text),
        Drawing(svg=pack_svg([1], 2), alternative=text),
        Note(text=text),
        check,
    )
    return Page(title=text, summary=[text], sections=[Section(heading=text, anchor="here", blocks=blocks)])


@given(st.one_of(st.sampled_from(HOSTILE), st.text(min_size=1).filter(lambda text: text.strip(" \n"))))
@example("<b>" * 1_000)
def test_no_text_changes_the_page_around_it_and_each_comes_back(text: str) -> None:
    plain, hostile = naive_html.parse(render(page_with(MARK))), naive_html.parse(render(page_with(text)))
    assert hostile.tags == plain.tags
    assert [attribute[:2] for attribute in hostile.attributes] == [attribute[:2] for attribute in plain.attributes]
    shown, found = (
        [*page.texts, *(value for *_, value in page.attributes if value not in ("long", "short"))]
        for page in (plain, hostile)
    )
    assert sum(MARK in one for one in shown) >= 35
    for before, after in zip(shown, found, strict=True):
        if before == MARK or MARK not in before:
            assert naive_html.spelled_back(after) == before.replace(MARK, text)
        else:  # beside words of our own, and spaces of a class that are dashes
            assert naive_html.spelled_back(after) in (
                before.replace(MARK, text),
                before.replace(MARK, text.replace(" ", "-")),
            )


def test_a_line_of_a_megabyte_is_text_like_any_other() -> None:
    line = "<b>'" * 250_000
    parsed = naive_html.parse(render(Page(title="page", summary=[line], sections=[])))
    assert line in parsed.texts
    assert "b" not in parsed.tags


def test_what_is_unprintable_is_spelled_out() -> None:
    html = render(page_with("".join(HOSTILE)))
    assert not [character for character in html if not character.isprintable() and character != "\n"]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(0, 100))
def test_a_pack_has_one_block_a_segment_as_wide_as_its_tokens(lengths: list[int], empty: int) -> None:
    capacity = sum(lengths) + empty
    svg = ElementTree.fromstring(pack_svg(lengths, capacity))
    blocks = [node for node in svg if node.tag.endswith("rect")]
    assert [int(node.attrib["width"]) for node in blocks] == lengths
    assert [int(node.attrib["x"]) for node in blocks] == [sum(lengths[:number]) for number in range(len(lengths))]
    assert all(one.attrib["fill"] != other.attrib["fill"] for one, other in pairwise(blocks))
    width = int(svg.attrib["viewBox"].split()[2])
    assert sum(int(node.attrib["width"]) for node in blocks) / width == sum(lengths) / capacity


def is_inside(x: float, y: float, corners: list[tuple[float, float]]) -> bool:
    """Even-odd rule: whether a ray to the right crosses the outline an odd number of times."""
    crossings = 0
    for (x0, y0), (x1, y1) in pairwise([*corners, corners[0]]):
        if (y0 > y) != (y1 > y):
            crossings += x < x0 + (y - y0) * (x1 - x0) / (y1 - y0)
    return crossings % 2 == 1


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_attention_covers_exactly_the_pairs_of_a_block_diagonal_causal_mask(lengths: list[int]) -> None:
    svg = ElementTree.fromstring(attention_svg(lengths))
    outlines = [
        [tuple(map(float, point.split(","))) for point in node.attrib["points"].split()]
        for node in svg
        if node.tag.endswith("polygon")
    ]
    assert len(outlines) == len(lengths)
    segment = [number for number, length in enumerate(lengths) for _ in range(length)]
    for query in range(len(segment)):
        for key in range(len(segment)):
            covered = sum(is_inside(key + 0.5, query + 0.5, corners) for corners in outlines)
            assert covered == (segment[query] == segment[key] and key <= query), (query, key)


def test_a_table_is_cut_and_says_so() -> None:
    rows = [{"text": "a" * 1_000, "id": bytes([number]) * 32} for number in range(60)] + [{"other": None}]
    cut = table_of("rows", rows)
    assert list(cut.columns) == ["text", "id", "other"]
    assert len(cut.rows) == 50
    assert all(len(row[0]) == 160 for row in cut.rows)
    assert cut.note == "Shown: 50 of 61 rows."
    assert table_of("rows", rows[:50]).note == ""
    first = table_of("rows", rows[:50], total=4_000, rest="rows.parquet of an asset")
    assert first.note == "Shown: 50 of 4,000 rows; the rest is in rows.parquet of an asset."


def test_a_few_rows_of_many_columns_are_shown_as_columns() -> None:
    rows = [{"row_length": number, **{f"v_{place}": number * place for place in range(9)}} for number in (512, 1_024)]
    turned = table_of("rows", rows).laid_out
    assert list(turned.columns) == ["row length", 512, 1_024]
    assert [list(row) for row in turned.rows] == [[f"v {place}", 512 * place, 1_024 * place] for place in range(9)]
    for unturned in (rows * 3, [{name: row[name] for name in list(row)[:8]} for row in rows]):
        assert len(table_of("rows", unturned).laid_out.rows) == len(unturned)


MEASURES = {f"v_{place}": place for place in range(9)}


def headings_of(html: str) -> list[str]:
    """What the page's tables have above their columns, as it is written in the page."""
    return re.findall(r'<th scope="col"[^>]*>(.*?)</th>', html)


@pytest.mark.parametrize(
    ("first", "heading"),
    [
        (1_024, "1,024"),
        (True, "yes"),
        (None, ""),
        (bytes(32), "0" * 16),
        ("C:\\", "C:\\\\"),
        ("bell \x07", "bell \\x07"),
        ("<b>", "&lt;b&gt;"),
        (Spelled("bell \\x07"), "bell \\x07"),
        (CutText(parts=["C:\\", "<b>"]), 'C:\\\\<b class="border">␟</b>&lt;b&gt;'),
    ],
)
def test_a_cell_that_became_a_heading_is_shown_as_any_other(first: Any, heading: str) -> None:
    turned = table_of("rows", [{"name": first, **MEASURES}])
    assert headings_of(render(Page(title="t", summary=[], sections=[section_of(turned)]))) == ["name", heading]
    kept = table_of("rows", [{"name": first}])
    assert f">{heading}</td>" in render(Page(title="t", summary=[], sections=[section_of(kept)]))


def test_a_turned_table_says_what_it_leaves_out_as_it_is_seen() -> None:
    rows = [{str(column): row for column in range(42)} for row in range(7)]
    assert table_of("rows", rows).note == "Shown: 40 of 42 columns."
    turned = table_of("rows", rows, max_rows=2)
    assert turned.note == "Shown: 2 of 7 columns and 40 of 42 rows."
    shown = turned.laid_out
    assert (len(shown.columns), len(shown.rows)) == (1 + 2, 40 - 1)


def test_a_turned_table_is_whole_where_others_are_shortened() -> None:
    """It has as few rows as a table is shortened to, however many columns are drawn as rows."""
    turned = table_of("few rows", [{"name": name, **MEASURES} for name in ("one", "other")])
    long = table_of("many rows", [{"name": number, **MEASURES} for number in range(50)])
    page = Page(title="t", summary=[], sections=[section_of(turned), section_of(long)])
    html = render_within(page, max_bytes=len(render(page).encode()))
    assert naive_html.parse(html).texts.count("Shown: 5 of 50 rows.") == 1
    told = "Left out, to keep this page small: rows of tables beyond 5."
    sections = [section_of(turned), section_of(shortened(long))]
    assert html == render(replace(page, summary=[told], sections=sections))
    texts = naive_html.parse(html).texts
    assert [texts.count(name.replace("_", " ")) for name in MEASURES] == [2] * len(MEASURES)


def test_a_meaning_that_columns_share_is_told_once() -> None:
    meanings = {"packs": "How many", "best_fit": "Rows", "concat": "Rows", "absent": "Nothing"}
    table = table_of("rows", [{"packs": 1, "best_fit": 2, "concat": 3}], meanings=meanings)
    assert table.legend == {"packs": "How many", "best fit, concat": "Rows"}
    html = render(Page(title="t", summary=[], sections=[section_of(table)]))
    texts = naive_html.parse(html.partition('<dl class="meanings">')[2]).texts
    assert texts == ["packs", "How many", "best fit, concat", "Rows"]


def shortened(table: Table) -> Table:
    return replace(table, rows=table.rows[:5])


def test_a_shortened_table_says_of_how_many_rows_it_shows_some_and_where_the_rest_is() -> None:
    rows = [{str(column): row for column in range(42)} for row in range(50)]
    long = table_of("long", rows, total=4_000, rest="rows.parquet of an asset")
    short = table_of("short", [{"name": number} for number in range(5)], rest="others.parquet")
    page = Page(title="t", summary=[], sections=[section_of(long), section_of(short)])
    whole = render(page)
    assert "Shown: 50 of 4,000 rows and 40 of 42 columns; the rest is in rows.parquet of an asset." in whole
    texts = naive_html.parse(render_within(page, max_bytes=len(whole.encode()))).texts
    notes = [text for text in texts if text.startswith("Shown: ")]
    assert notes == ["Shown: 5 of 4,000 rows and 40 of 42 columns; the rest is in rows.parquet of an asset."]
    without = naive_html.parse(render_within(page, max_bytes=0)).texts
    assert "Left out, to keep this page small: long; it is in rows.parquet of an asset." in without


def test_numbers_among_texts_of_a_turned_table_are_aligned_as_numbers() -> None:
    rows = [{"name": name, "text": "words", **MEASURES} for name in ("one", "other")]
    parsed = naive_html.parse(render(Page(title="t", summary=[], sections=[section_of(table_of("rows", rows))])))
    assert parsed.values("class").count("number") == 2 + 2 * len(MEASURES)


def test_a_column_is_one_of_numbers_when_all_of_it_is() -> None:
    rows: list[list[Any]] = [[None, None, 1, 1, True], [2.5, None, "a", 3, False]]
    found = Table(caption="all", columns=["numbers", "nothing", "mixed", "whole", "answers"], rows=rows).headings
    assert [name for name, is_number in found if is_number] == ["numbers", "whole"]
    parsed = naive_html.parse(
        render(
            Page(
                title="t",
                summary=[],
                sections=[
                    section_of(
                        Table(caption="all", columns=["numbers", "nothing", "mixed", "whole", "answers"], rows=rows)
                    )
                ],
            )
        )
    )
    assert parsed.values("class").count("number") == 2 + 3  # headings and cells


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.123456789, "0.12346"),
        (9.0354, "9.0354"),
        (4_117.0, "4,117"),
        (1_234_567.8, "1,234,568"),
        (-25_000.4, "-25,000"),
        (1e-9, "1e-09"),
        (float("inf"), "inf"),
        (float("nan"), "nan"),
        (1_234_567, "1,234,567"),
    ],
)
def test_a_number_is_shown_to_be_read(value: float, shown: str) -> None:
    table = Table(caption="one", columns=["value"], rows=[[value]])
    assert shown in naive_html.parse(render(Page(title="t", summary=[], sections=[section_of(table)]))).texts


def section_of(block: Table) -> Section:
    return Section(heading="one", anchor="one", blocks=[block])


PALETTE = re.compile(r"--(paper|ink|soft|rule|faint|link): (#[0-9a-f]{3,6});")
MARK_OF_OUTCOME = re.compile(r"--mark: (#[0-9a-f]{6});")


def test_words_read_on_light_and_dark_paper() -> None:
    """WCAG 2.2, level AA: 4.5 for text, by the formula that the pictures are judged by."""
    html = render(Page(title="t", summary=[], sections=[]))
    light, dark = (dict(PALETTE.findall(part)) for part in html.partition("prefers-color-scheme: dark")[::2])
    assert light.keys() == dark.keys() >= {"paper", "ink", "soft", "link"}
    for palette in (light, dark):
        shades = {name: of_hex(code) for name, code in palette.items()}
        for name in ("ink", "soft", "link"):
            assert contrast(shades[name], shades["paper"]) >= 4.5, (name, palette)
    marks = MARK_OF_OUTCOME.findall(html)
    assert len(marks) == 4  # an outcome each
    assert all(contrast(of_hex(code), (255, 255, 255)) >= 4.5 for code in marks)


def of_hex(code: str) -> tuple[int, ...]:
    digits = code[1:] if len(code) == 7 else "".join(2 * digit for digit in code[1:])
    return tuple(bytes.fromhex(digits))


@pytest.mark.parametrize(("num_pictures", "num_tables"), [(1, 1), (20, 30), (60, 60)])
def test_the_largest_page_fits_and_says_what_is_left_out(num_pictures: int, num_tables: int) -> None:
    rows = [{str(column): "&" * 160 for column in range(12)} for _ in range(50)]
    pictures = [Picture(png=bytes(50_000), alternative=f"picture {number}") for number in range(num_pictures)]
    tables = [table_of(f"table {number}", rows) for number in range(num_tables)]
    sections = [Section(heading="all", anchor="all", blocks=[*pictures, *tables])]
    html = render_within(Page(title="full", summary=[], sections=sections))
    assert len(html.encode()) < 0.9 * MAX_PAGE_BYTES  # what is added to every page later has room
    parsed = naive_html.parse(html)
    assert parsed.tags.count("table") == num_tables
    left_out = [text for text in parsed.texts if text.startswith("Left out, to keep this page small: picture")]
    assert parsed.tags.count("img") + len(left_out) == num_pictures
    if num_tables == 1:
        assert not left_out
        assert html == render(Page(title="full", summary=[], sections=sections))
    else:
        assert parsed.texts.count("Shown: 5 of 50 rows.") == num_tables
        told = {20: "rows of tables beyond 5, pictures.", 60: "pictures, ends of long cells, meanings of columns."}
        (line,) = [text for text in parsed.texts if text.startswith("Left out, to keep this page small: rows")]
        assert line.endswith(told[num_pictures])


def test_the_worst_texts_of_all_checks_fit() -> None:
    """Names and texts of characters that take ten bytes each, as many as a record may hold."""
    letter = "\U000e0001"
    entry = replace(
        page_with(MARK).sections[0].blocks[-1],
        expected=letter * 1_000,
        found=letter * 1_000,
        numbers={f"{number}{letter * 76}": 0.5 for number in range(150)},
    )
    blocks = [entry, *[Note(text=letter * 1_000)] * 2] * 41
    html = render_within(Page(title="full", summary=[], sections=[Section(heading="all", anchor="a", blocks=blocks)]))
    assert len(html.encode()) < 0.9 * MAX_PAGE_BYTES
    parsed = naive_html.parse(html)
    assert parsed.values("data-outcome") == [MARK] * 41
    assert any(text.endswith("numbers of checks, ends of long texts.") for text in parsed.texts)


def report_of(built: Built) -> tuple[ArtifactRef, naive_html.Parsed, str]:
    """The report of a home as it is, drawn without Dagster."""
    ref = build_report(built.stage, KNOWN).ref
    html = (built.stage.store.folder(ref) / PAGE_NAME).read_text(encoding="utf-8")
    return ref, naive_html.parse(html), html


def outcomes(parsed: naive_html.Parsed) -> dict[str, str]:
    """Outcome by check; each check is there once."""
    names = [value.removeprefix("check-") for value in parsed.values("id") if value.startswith("check-")]
    assert len(set(names)) == len(names)
    return dict(zip(names, parsed.values("data-outcome"), strict=True))


def test_a_clean_home_shows_every_check_once_and_none_failed(clean: Built) -> None:
    assert clean.result is not None
    metadata = materialized_metadata(clean.result)["quality_report"]
    html = Path(metadata["report"]).read_text(encoding="utf-8")
    parsed = naive_html.parse(html)
    said = evaluations(clean.result)
    assert outcomes(parsed) == {check.name: "passed" if said[check.name].passed else "warned" for check in KNOWN}
    assert metadata["checks_failed"] == metadata["checks_not_counted"] == 0
    assert metadata["checks_passed"] == Counter(outcomes(parsed).values())["passed"]
    for check in KNOWN:
        assert check.description in parsed.texts
        assert said[check.name].description in html.replace("&#39;", "'").replace("&#34;", '"').replace("&gt;", ">")
    assert str(clean.home) not in html
    assert clean.result.run_id not in html
    assert len(html.encode()) < MAX_PAGE_BYTES


def test_the_pictures_are_those_of_the_artifacts_and_all_tags_are_known(clean: Built) -> None:
    _, parsed, _ = report_of(clean)
    shown = {base64.b64decode(value.partition(",")[2]) for value in parsed.values("src")}
    stored = {
        path.read_bytes()
        for asset, ref in clean.refs.items()
        for folder in (clean.folder(asset), *plan_folders(clean, ref))
        for path in folder.glob("*.png")
    }
    assert len(stored) >= 8
    assert shown == stored
    assert not {tag.removeprefix("/") for tag in parsed.tags} & {"script", "link", "iframe", "object", "form", "base"}
    assert all(value.startswith("#") for value in parsed.values("href"))
    assert all(parsed.values("alt"))


def plan_folders(built: Built, ref: ArtifactRef) -> list[Path]:
    plans = built.stage.open(ref)[1].inputs.get("plans", ())
    return [built.home / ref.asset / plan["unit"] / plan["identity"] for plan in plans]


def test_a_failure_is_drawn_by_materializing_the_report_alone(copy: Built) -> None:
    name = "every_pair_comes_exactly_once"
    needle = POISONS[name](copy)
    assert not evaluations(run_checks(copy.recipe, copy.home, name))[name].passed
    result = materialize(copy.recipe, copy.home, "quality_report")
    assert result.success
    assert evaluations(result)["report_is_self_contained"].passed
    metadata = materialized_metadata(result)["quality_report"]
    html = Path(metadata["report"]).read_text(encoding="utf-8")
    parsed = naive_html.parse(html)
    found = outcomes(parsed)
    assert [check for check, outcome in found.items() if outcome == "failed"] == [name]
    assert metadata["checks_failed"] == 1
    assert "Every pair comes exactly once" in [text.strip() for text in parsed.texts]
    assert any(needle in text for text in parsed.texts)
    assert "held back by its checks" in parsed.texts
    assert "Held back by checks, so that nothing is built from it: packing_plan." in parsed.texts
    other_bytes = {"packing_plan", "handoff_package", "varlen_training_run"}  # the plan, and what came from it
    others = {check.name for check in KNOWN if other_bytes & {*small_corpus.assets_read_by(check.name)}} - {name}
    assert {check for check, outcome in found.items() if outcome == "not counted"} == others


def test_what_was_counted_with_another_recipe_is_no_verdict(copy: Built) -> None:
    other = small_corpus.write_recipe(copy.recipe.parent, {"training.steps": 100_000}, name="longer.yaml")
    _, parsed, _ = report_of(replace(copy, recipe=other))
    assert set(outcomes(parsed).values()) == {"not counted"}
    assert "It was counted with another recipe or code: execute it again." in [text.strip() for text in parsed.texts]


def test_counts_are_those_that_were_sealed(copy: Built) -> None:
    for path in (copy.home / "_references" / "lsh_clusters").glob("*.json"):
        entry = json.loads(path.read_text())
        entry["ref"]["counts"] = {"kept": 7}
        path.write_text(json.dumps(entry))
    _, parsed, _ = report_of(copy)
    kept = copy.stage.open(copy.refs["lsh_clusters"])[1].counts["kept"]
    row = parsed.texts.index("kept by deduplication")
    assert f"{kept:,}" in parsed.texts[row : row + 8]


def test_what_is_not_built_and_not_counted_is_said_to_be_so(tmp_path: Path) -> None:
    folder = small_corpus.write_corpus(tmp_path)
    recipe = small_corpus.write_recipe(folder)
    built = small_corpus.build(recipe, folder / "home", upto="lsh_clusters")
    ref, parsed, _ = report_of(built)
    assert set(outcomes(parsed).values()) == {"not counted"}
    assert ref.counts["assets_shown"] == 4
    assert "varlen_training_run is not built with this recipe." in parsed.texts
    assert "Not counted yet on what is there: execute it." in parsed.texts
    assert "Not drawn: packing_plan is not built with this recipe." in parsed.texts


def test_a_crash_and_a_damaged_artifact_are_drawn(copy: Built) -> None:
    _, path = first_slice(copy)
    path.write_bytes(b"PAR1 this is no table PAR1")
    seal_again(copy, copy.folder("lsh_clusters"))
    assert not run_checks(copy.recipe, copy.home, "every_row_has_one_decision").success
    (copy.folder("token_shards") / MANIFEST_NAME).unlink()
    _, parsed, html = report_of(copy)
    assert outcomes(parsed)["every_row_has_one_decision"] == "failed"
    assert any(text.startswith("the check crashed: ") for text in parsed.texts)
    assert "no longer whole: materialize it again" in parsed.texts
    assert any(text.startswith("Not drawn: ") for text in parsed.texts)
    assert str(copy.home) not in html


ONE_POISON_AN_ASSET = {
    small_corpus.assets_read_by(name)[0]: name for name in POISONS if name != "report_is_self_contained"
}


@pytest.mark.parametrize("name", ONE_POISON_AN_ASSET.values())
def test_a_report_is_drawn_of_every_poisoned_home(name: str, copy: Built) -> None:
    POISONS[name](copy)
    ref, parsed, _ = report_of(copy)
    assert len(outcomes(parsed)) == len(KNOWN)
    assert report_is_self_contained(copy.stage, ref).num_violations == 0


def test_the_same_is_drawn_as_the_same_bytes_and_another_verdict_as_another_page(copy: Built) -> None:
    first, _, html = report_of(copy)
    again, _, _ = report_of(copy)
    assert (again.outcome, again.identity) == ("reused", first.identity)
    shutil.rmtree(copy.home / "quality_report")
    rebuilt, _, same = report_of(copy)
    assert (rebuilt.outcome, rebuilt.digest) == ("built", first.digest)
    assert same == html
    forget_verdict(copy.stage.store, copy.refs["packing_plan"], "no_pack_is_over_capacity")
    other, parsed, _ = report_of(copy)
    assert other.identity != first.identity
    assert outcomes(parsed)["no_pack_is_over_capacity"] == "not counted"


def test_what_the_web_wrote_is_text_on_the_page(tmp_path: Path) -> None:
    folder = small_corpus.write_corpus(tmp_path)
    hostile = [{"text": text, "id": text, "dump": text, "url": text} for text in HOSTILE]
    copied = [{**row, "text": f"{row['text']} {small_corpus.sentences(number)}"} for number, row in enumerate(hostile)]
    rows = [row for row in (*hostile, *copied) for _ in range(2)]
    small_corpus.write_rows(folder / "alpha" / "hostile.parquet", rows)
    recipe = small_corpus.write_recipe(folder, {"splits.min_tokens": 1})
    built = small_corpus.build(recipe, folder / "home")
    ref, parsed, html = report_of(built)
    assert report_is_self_contained(built.stage, ref).num_violations == 0
    texts = [naive_html.spelled_back(text) for text in parsed.texts]
    assert sum(any(text in shown for shown in texts) for text in HOSTILE) >= len(HOSTILE) // 2
    assert any(HOSTILE[0] in text for text in texts)
    assert "script" not in parsed.tags
    assert not [name for _, name, _ in parsed.attributes if name.startswith("on")]
    assert "\x00" not in html


def texts_by_id(built: Built) -> dict[bytes, str]:
    tables = sorted((built.home / "split_documents").glob("*/*/documents.parquet"))
    rows = [row for path in tables for row in pq.read_table(path, columns=["doc_id", "text"]).to_pylist()]
    return {row["doc_id"]: row["text"] for row in rows}


@pytest.mark.parametrize("overlap", [0, 5])
def test_cuts_are_shown_where_the_tokenizer_says_that_tokens_begin(clean: Built, overlap: int) -> None:
    """The oracle is the tokenizer's own offsets: where in the text each token of a whole encoding begins."""
    encoder = open_tokenizer(clean.stage, clean.refs["tokenizer"])
    texts = texts_by_id(clean)
    inside = 0
    for split in ("train", "validation"):
        plan = other_plan(clean, split, overlap)
        for document in np.flatnonzero(plan.index.lengths > 33).tolist():
            text = texts[plan.index.doc_ids[document].tobytes()]
            offsets = encoder.library.encode(text, add_special_tokens=False).offsets
            assert len(offsets) + 1 == plan.index.lengths[document]
            ends = list(range(32, int(plan.index.lengths[document]) - 1, 32 - overlap))
            places = [offsets[end][0] for end in ends]
            start, stop = max(0, places[0] - CONTEXT_CHARACTERS), min(len(text), places[0] + CONTEXT_CHARACTERS)
            bounds = [start, *(place for place in places if place < stop), stop]
            cut = cut_text(plan, encoder, document)
            assert list(cut.text.parts) == [text[one:other] for one, other in pairwise(bounds)]
            assert "".join(cut.text.parts) in text
            is_inside_character = offsets[ends[0] - 1][1] > offsets[ends[0]][0]
            assert cut.is_inside_character == is_inside_character
            inside += is_inside_character
    assert inside >= 1


def other_plan(built: Built, split: str, overlap: int) -> Plan:
    shards, ref = built.folder("token_shards"), built.refs["token_shards"]
    return plan_packs(
        read_index(shards / f"{split}_index"),
        shards=ShardsReference(path=shards, identity=ref.identity, digest=ref.digest),
        max_seq_len=32,
        overlap=overlap,
        capacity=64,
        strategy="oldest_first",
        buffer=16,
        packs_per_microbatch=1,
        microbatches_per_step=1,
        epoch_seed=1,
    )


def test_the_drawn_pack_is_the_fullest_and_its_borders_are_on_the_page(clean: Built) -> None:
    _, parsed, html = report_of(clean)
    plan = load_plan(clean.folder("packing_plan"), "train", allow_quarantined=True)
    lengths = [pack_lengths(plan, pack) for pack in range(plan.num_packs)]
    (label,) = [value for value in parsed.values("aria-label") if value.startswith("The fullest pack")]
    fullest = max(lengths, key=lambda pack: (sum(pack), len(pack)))
    assert f"{len(fullest):,} segments, a block each, {sum(fullest):,} of 64 tokens" in label
    (label,) = [value for value in parsed.values("aria-label") if value.startswith("The emptiest pack")]
    assert f"{min(map(sum, lengths)):,} of 64 tokens" in label
    assert pack_svg(fullest, 64) in html
    assert html.count('<b class="border">␟</b>') >= 10


def test_the_page_is_judged_by_its_own_bytes(copy: Built) -> None:
    ref, _, html = report_of(copy)
    folder = copy.stage.store.folder(ref)

    def violations(page: str) -> str:
        (folder / PAGE_NAME).write_text(page, encoding="utf-8")
        return str(report_is_self_contained(copy.stage, ref).examples)

    assert violations(html) == "[]"
    for spoiled, needle in (
        ("<script>1</script>", "<script>: expected no element but the template's"),
        ('<p onclick="x">', "expected no attribute that runs, found onclick"),
        ('<a href="https://example/">x</a>', "expected href within the page"),
        ('<meta http-equiv="Refresh" content="0">', "expected no refresh"),
        ("<style>p { background: url(x) }</style>", "a style that fetches nothing"),
        ("<style>p { background: URL(x) }</style>", "a style that fetches nothing"),
        ("<style>@IMPORT 'x';</style>", "a style that fetches nothing"),
        ("<style>p { background: Image-Set('x' 1x) }</style>", "a style that fetches nothing"),
        ("<style>p { background: \\75rl(x) }</style>", "a style that fetches nothing"),
        ('<p style="background: url(x)">', "the template's, found style"),
        ('<a href="#here" ping="https://example/">x</a>', "the template's, found ping"),
        ('<a href="#here" href="https://example/">x</a>', "each attribute once"),
        ('<svg><animate attributeName="href" to="x"/></svg>', "<animate>: expected no element but the template's"),
        ('<svg><rect href="https://example/"/></svg>', "expected href within the page"),
        ('<svg><rect xlink:href="https://example/"/></svg>', "the template's, found xlink:href"),
        ('<svg><rect fill="url(https://example/)"/></svg>', "expected a colour as fill"),
        ('<html manifest="https://example/">', "the template's, found manifest"),
        ('<IMG SRC="https://example/" ALT="">', "expected src within the page"),
        ('<img src="data:image/svg+xml,x" alt="">', "expected src within the page"),
        ('<meta http-equiv="Set-Cookie" content="x">', "no header but the policy"),
        ("<!--><b>--><b></b>", "no comment or declaration"),
        ("<!-- <p> -->", "no comment or declaration"),
        ("<![CDATA[<p>]]>", "no comment or declaration"),
        ("<?xml-stylesheet href='x'?>", "no comment or declaration"),
        ('<article id="check-another" data-outcome="passed">', "another: expected the verdict [], found ['passed']"),
        (" " * MAX_PAGE_BYTES, "expected fewer than 3,000,000 bytes"),
    ):
        assert needle in violations(html.replace("</main>", f"{spoiled}</main>")), spoiled
    assert "expected one policy" in violations(html.replace("img-src data:", "img-src *"))
    assert "found []" in violations(html.replace(' data-outcome="passed"', "", 1))
    assert "found ['failed']" in violations(html.replace('data-outcome="passed"', 'data-outcome="failed"', 1))
    facts = json.loads((folder / FACTS_NAME).read_bytes())
    assert violations(html) == "[]"
    spoiled_counts = replace(ref, counts={**ref.counts, "checks_passed": len(facts) + 1})
    assert "checks passed as counted" in str(report_is_self_contained(copy.stage, spoiled_counts).examples)


RECORD: dict[str, Any] = {
    "basis": "b",
    "judged": {"packing_plan": "1"},
    "outcome": "failed",
    "expected": "e",
    "found": "f",
}


def test_a_record_survives_being_written_and_a_damaged_one_is_told(copy: Built) -> None:
    store, ref = copy.stage.store, copy.refs["packing_plan"]
    examples = [{"id": bytes(32), "text": "x" * 1_000, "none": None, "number": 0.5}] * 30
    record_verdict(store, ref, "a_law", VerdictRecord(**RECORD, num_violations=30, examples=examples))
    read = read_verdict(store, ref, "a_law")
    assert read is not None
    assert (read.num_violations, read.judged, read.outcome) == (30, {"packing_plan": "1"}, "failed")
    assert len(read.examples) == 20
    assert read.examples[0]["id"] == "0" * 16
    (path,) = copy.home.glob("_verdicts/packing_plan/*/a_law.latest.json")
    for damaged in ("", "[]", "{}", path.read_text()[:-9]):
        path.write_text(damaged)
        with pytest.raises(FormatError, match="Execute a_law again"):
            read_verdict(store, ref, "a_law")
    forget_verdict(store, ref, "a_law")
    assert read_verdict(store, ref, "a_law") is None
    damaged_record = path.with_name("no_pack_is_over_capacity.latest.json")
    damaged_record.write_text("{")
    _, parsed, html = report_of(copy)
    assert outcomes(parsed)["no_pack_is_over_capacity"] == "not counted"
    assert "Execute no_pack_is_over_capacity again" in html


ODD_VALUES: dict[str, dict[str, Any]] = {
    "an asset that is not known": {"judged": {"old_asset": "1"}},
    "judged a list": {"judged": ["packing_plan"]},
    "judged null": {"judged": None},
    "a digest that is a number": {"judged": {"packing_plan": 1}},
    "another outcome": {"outcome": "skipped"},
    "an outcome that is a list": {"outcome": ["failed"]},
    "found null": {"found": None},
    "found a number": {"found": 5},
    "a lone surrogate": {"found": "bad \ud800 text"},
    "a lone surrogate in an example": {"examples": [{"a": "\ud800"}]},
    "expected null": {"expected": None},
    "examples null": {"examples": None},
    "examples of texts": {"examples": ["a"]},
    "not a number in an example": {"examples": [{"a": float("nan")}]},
    "numbers null": {"numbers": None},
    "numbers a list": {"numbers": [1]},
    "a text as number": {"numbers": {"a": "1"}},
    "a number that is none": {"numbers": {"a": float("nan")}},
    "an infinite number": {"numbers": {"a": float("inf")}},
    "a number beyond floats": {"numbers": {"a": 10**400}},
    "violations in words": {"num_violations": "many"},
    "a key of its own": {"another": 1},
}
ODD_CONTENTS = {"deep": b"[" * 200_000, "not UTF-8": b"\xff\xfe", "empty": b"", "null": b"null", "1e999": b"1e999"}


def record_path(built: Built, check: str) -> Path:
    """Where what a check said last of the plan lies."""
    (path,) = built.home.glob(f"_verdicts/packing_plan/*/{check}.latest.json")
    return path


@pytest.fixture(scope="module")
def spoiled(clean: Built, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], Built]:
    """A record of a check of a home of its own, and what it says: each test spoils it anew."""
    home = tmp_path_factory.mktemp("spoiled") / "home"
    shutil.copytree(clean.home, home)
    built = Built(recipe=clean.recipe, home=home, refs=clean.refs)
    path = record_path(built, "no_pack_is_over_capacity")
    return path, json.loads(path.read_bytes()), built


def is_told_as_damaged(built: Built) -> bool:
    ref, parsed, html = report_of(built)
    assert report_is_self_contained(built.stage, ref).num_violations == 0
    assert Counter(outcomes(parsed).values())["not counted"] <= 1
    is_told = "Execute no_pack_is_over_capacity again." in html and "Its record is damaged" in html
    return is_told and outcomes(parsed)["no_pack_is_over_capacity"] == "not counted"


@pytest.mark.parametrize("name", [*ODD_VALUES, *ODD_CONTENTS])
def test_an_odd_record_is_told_as_damaged(name: str, spoiled: tuple[Path, dict[str, Any], Built]) -> None:
    path, good, built = spoiled
    content = ODD_CONTENTS.get(name)
    path.write_bytes(json.dumps({**good, **ODD_VALUES[name]}).encode() if content is None else content)
    assert is_told_as_damaged(built)
    path.write_text(json.dumps(good))
    assert not is_told_as_damaged(built)


def test_a_folder_in_a_records_place_is_told_and_gives_way(copy: Built) -> None:
    path = record_path(copy, "no_pack_is_over_capacity")
    path.unlink()
    path.mkdir()
    assert is_told_as_damaged(copy)
    record = VerdictRecord(**RECORD, num_violations=1)
    record_verdict(copy.stage.store, copy.refs["packing_plan"], "no_pack_is_over_capacity", record)
    assert json.loads(path.read_bytes())["outcome"] == "failed"


LEFT_OUT = {"a": 0.5, "numbers_left_out": 2}
HUGE = "\U000e0001&" * 1_000_000


def test_what_is_written_of_a_verdict_is_small_and_can_be_read_back(copy: Built) -> None:
    store, ref = copy.stage.store, copy.refs["packing_plan"]
    examples = [{"a": float("nan"), "b": "\ud800", "c": [HUGE], "d": {"e": [1] * 100_000}, HUGE: HUGE}] * 30
    texts = {"expected": HUGE, "found": f"\ud800{HUGE}"}
    numbers = {"a": 0.5, "b": float("nan"), "c": float("inf")}
    record_verdict(
        store, ref, "a_law", VerdictRecord(**{**RECORD, **texts}, num_violations=1, examples=examples, numbers=numbers)
    )
    (path,) = copy.home.glob("_verdicts/packing_plan/*/a_law.latest.json")
    assert path.stat().st_size < 200_000
    read = read_verdict(store, ref, "a_law")
    assert read is not None
    assert read.found.startswith("\\ud800")
    assert read.found.endswith("… cut")
    assert len(read.expected) == 1_000
    assert (read.examples[0]["a"], read.examples[0]["b"], read.numbers) == ("nan", "\\ud800", LEFT_OUT)
    assert [len(str(value)) for value in read.examples[0].values()][2:] == [160, 160, 161]
    record_verdict(store, ref, "a_law", read)
    assert read_verdict(store, ref, "a_law") == read


def test_the_page_fits_whatever_was_said(copy: Built) -> None:
    """Every record, as an earlier version or a hand may have left it, and every reason, with texts of megabytes."""
    for path in copy.home.glob("_verdicts/*/*/*.latest.json"):
        good = json.loads(path.read_bytes())
        examples = [{str(column): "&" * 1_000 for column in range(500)}] * 3
        path.write_text(
            json.dumps({**good, "outcome": "failed", "num_violations": 1, "found": "&" * 200_000, "examples": examples})
        )
    path = record_path(copy, "no_pack_is_over_capacity")
    path.write_text(json.dumps({**json.loads(path.read_bytes()), "expected": HUGE, "found": HUGE}))
    copy.stage.store.quarantine(copy.refs["packing_plan"], "no_pack_is_over_capacity", HUGE)
    ref, parsed, html = report_of(copy)
    assert len(html.encode()) < MAX_PAGE_BYTES
    assert report_is_self_contained(copy.stage, ref).num_violations == 0
    assert set(outcomes(parsed).values()) == {"failed"}
    assert html.count("… cut") >= len(KNOWN)


def test_a_damage_that_was_mended_is_not_shown_again(copy: Built) -> None:
    whole, _, html = report_of(copy)
    assert "Not drawn" not in html
    path = copy.folder("lsh_clusters") / "largest_clusters.parquet"
    content = path.read_bytes()
    path.write_bytes(content[:-20])
    damaged, _, html = report_of(copy)
    assert "Not drawn" in html
    assert damaged.identity != whole.identity
    path.write_bytes(content)
    mended, _, html = report_of(copy)
    assert "Not drawn" not in html
    assert (mended.outcome, mended.identity) == ("reused", whole.identity)


def test_the_page_names_its_recipe_and_the_sources_revision(clean: Built) -> None:
    _, parsed, _ = report_of(clean)
    revision = clean.stage.pipeline.revision_of(clean.refs["raw_row_groups"])
    assert revision is not None
    assert f"Recipe {recipe_digest(clean.stage.recipe)[:12]}, source revision {revision[:12]}." in parsed.texts
