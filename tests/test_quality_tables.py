"""The report's own sections of assets: each number has its meaning, and a file that is not as expected is told."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import naive_html
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import small_corpus
from small_corpus import TRAINING, Built
from test_asset_checks import seal_again
from test_quality_funnel import shown
from test_quality_report import KNOWN, outcomes, plan_folders, report_of

from asset_checks.quality_report import report_is_self_contained
from pipeline_assets.columns import STORED
from pipeline_assets.findings import find_asset, find_verdict
from pipeline_assets.flow import STAGES
from pipeline_assets.measures import MEASURES, Measure
from pipeline_assets.quality_page import MAX_PAGE_BYTES, Page, Section, Table, render
from pipeline_assets.quality_sections import page_of
from pipeline_assets.quality_tables import FACTS, OF_FILES, explanation_of, legend_of
from pipeline_assets.shown_columns import OF_CUTS
from resources.artifact_store import ArtifactRef
from resources.tables import write_json
from training_io.errors import FormatError
from training_io.manifest import MANIFEST_NAME, QUARANTINE_NAME

ODD: tuple[Any, ...] = ([], {}, None, 0, "x", [{}])
READ_FOR_THE_PAGE = {
    "raw_row_groups": (),
    "minhash_signatures": ("bins.json",),
    "tokenizer": ("tokenizer.json",),
    "tokenizer_report": ("report.json",),
    "split_documents": ("units.json",),
    "token_shards": ("train_index/index.json",),
    "packing_plan": tuple(
        f"{split}/{name}.json" for split in ("train", "validation") for name in ("plan", "snapshots")
    ),
    "packing_stats": ("stats.json",),
}
"""JSON files of each asset, or of its plans, that the report reads."""


def drawn_page(built: Built) -> Page:
    """What the report shows of a home as it is."""
    stage = built.stage
    assets = {asset: find_asset(stage, asset) for asset in STAGES if asset != "quality_report"}
    return page_of(stage, assets, [find_verdict(stage, check, assets) for check in KNOWN], "recipe", "revision")


def json_files(built: Built) -> Iterator[tuple[str, Path]]:
    """Every JSON file of every artifact, the asset's name before it."""
    for asset in STAGES:
        folders = [built.folder(asset), *plan_folders(built, built.refs[asset])]
        yield from ((asset, path) for folder in folders for path in sorted(folder.rglob("*.json")))


def is_read(built: Built, asset: str, path: Path) -> bool:
    """Whether the report reads the file; what lies in a package or a training run is not looked at."""
    names = READ_FOR_THE_PAGE.get(asset, ())
    folders = [built.folder(asset), *plan_folders(built, built.refs[asset])]
    return path in [folder / name for folder in folders for name in names]


def test_json_of_another_shape_is_told_and_the_rest_is_drawn(copy: Built) -> None:
    whole = drawn_page(copy)
    assert whole.unread == []
    read = 0
    files = [(asset, path) for asset, path in json_files(copy) if path.name != MANIFEST_NAME]
    for number, (asset, path) in enumerate(files):
        content = path.read_bytes()
        is_parsed = is_read(copy, asset, path) and path.name != "snapshots.json" and path.parent.name != "validation"
        for odd in ODD if is_parsed else ODD[number % len(ODD) :][:1]:
            path.write_text(json.dumps(odd))
            page = drawn_page(copy)
            assert len(page.sections) == len(whole.sections)
            if is_read(copy, asset, path):
                assert page.unread, (path, odd)
                assert all(path.name in text and ": expected " in text for text in page.unread), (path, page.unread)
                read += 1
            else:
                assert page.unread == [], path
        path.write_bytes(content)
    assert read == len(ODD) * (len(READ_FOR_THE_PAGE) - 1) + 3  # no file of raw_row_groups; three are hashed alone
    assert drawn_page(copy) == whole


def test_a_manifest_of_another_shape_is_no_artifact_and_no_pass(copy: Built) -> None:
    for number, asset in enumerate(asset for asset in STAGES if asset != "quality_report"):
        path = copy.folder(asset) / MANIFEST_NAME
        content = path.read_bytes()
        path.write_text(json.dumps(ODD[number % len(ODD)]))
        _, parsed, _ = report_of(copy)
        path.write_bytes(content)
        of_asset = {check.name for check in KNOWN if check.asset == asset}
        found = outcomes(parsed)
        assert {found[name] for name in of_asset} <= {"not counted"}, asset
        assert any(text.startswith(f"Not there: {asset}") for text in parsed.texts)


@pytest.mark.parametrize("asset", ["minhash_signatures", "tokenizer_report", "split_documents", "packing_stats"])
def test_a_sealed_file_of_another_shape_is_told(asset: str, copy: Built) -> None:
    """As another version may have written it: the hashes agree, and what is in the file is not what is read."""
    (name,) = READ_FOR_THE_PAGE[asset]
    folders = [copy.folder(asset), *plan_folders(copy, copy.refs[asset])]
    (path,) = [folder / name for folder in folders if (folder / name).exists()]
    for odd in ODD:
        if (asset, odd) == ("minhash_signatures", []):
            continue  # a corpus of short texts has no bins
        path.write_text(json.dumps(odd))
        seal_again(copy, path.parent)
        page = drawn_page(replace(copy, refs=small_corpus.recorded(copy.recipe, copy.home)))
        assert page.unread, odd
        assert all(name in text and ": expected " in text and "materialize" in text for text in page.unread)


@pytest.mark.parametrize("asset", list(STAGES)[:-1])
def test_counts_of_another_version_are_told(asset: str, copy: Built) -> None:
    """A manifest that agrees with its own hashes, with other counts than are read."""
    folder = copy.folder(asset)
    manifest = copy.stage.open(copy.refs[asset])[1]
    for counts in ({}, {"documents": "x", "splits": []}, {"documents": {}, "tokens": 1}):
        (folder / MANIFEST_NAME).write_text(json.dumps(replace(manifest, counts=counts).to_json()))
        page = drawn_page(copy)
        needed = {"raw_row_groups", "lsh_clusters", "tokenizer", "document_tokens", "split_documents"}
        is_needed = asset in needed | {"token_shards", "packing_plan"}
        assert bool(page.unread) == is_needed, page.unread
        assert all(f"{MANIFEST_NAME} of {asset}, counts" in text for text in page.unread)


@pytest.mark.parametrize(
    ("asset", "changes"),
    [
        ("document_tokens", {"text_bytes": {}}),
        ("document_tokens", {"tokens": {}}),
        ("raw_row_groups", {"rows_filtered": {}}),
        ("token_shards", {"splits": {"train": {"documents": 1, "tokens": 10**400, "shards": 1}}}),
        ("packing_plan", {"splits": {"x" * 5_000: {"documents": 1}}}),
    ],
)
def test_one_count_of_another_kind_is_told_once_and_the_page_drawn(
    asset: str, changes: dict[str, Any], copy: Built
) -> None:
    manifest = copy.stage.open(copy.refs[asset])[1]
    counts = {**manifest.counts, **changes}
    (copy.folder(asset) / MANIFEST_NAME).write_text(json.dumps(replace(manifest, counts=counts).to_json()))
    page = drawn_page(copy)
    (said,) = page.unread
    assert said.startswith(f"Not shown: {MANIFEST_NAME} of {asset}, counts, {next(iter(changes))}")
    assert ": expected " in said
    assert "Error(" not in said
    assert said.endswith("materialize its asset again.")
    assert len(said) < 500
    assert len(render(page)) > 100_000


def test_a_record_of_another_shape_is_none(copy: Built) -> None:
    good = copy.refs["lsh_clusters"].to_json()
    assert ArtifactRef.from_json(good) == copy.refs["lsh_clusters"]
    for name in good:
        for odd in ODD:
            if isinstance(odd, type(good[name])) and not (name == "warnings" and odd):
                continue
            if name == "seconds" and odd == 0:
                continue
            with pytest.raises(FormatError, match=r"a recorded reference.*: expected .*, found .*materialize"):
                ArtifactRef.from_json({**good, name: odd})
    with pytest.raises(FormatError, match="expected a text, found 1"):
        ArtifactRef.from_json({**good, "lineage": {"raw_row_groups": 1}})
    for path in (copy.home / "_references" / "lsh_clusters").glob("*.json"):
        entry = json.loads(path.read_bytes())
        path.write_text(json.dumps({**entry, "ref": {**entry["ref"], "lineage": []}}))
    _, parsed, _ = report_of(copy)
    assert "lsh_clusters: not built with this recipe; 6 checks not counted." in parsed.texts
    assert outcomes(parsed)["every_row_has_one_decision"] == "not counted"


def test_many_reasons_are_bounded_and_the_file_is_named(copy: Built) -> None:
    reasons = {f"check_{number:,}": "&" * 200 for number in range(4_000)}
    (copy.folder("packing_plan") / QUARANTINE_NAME).write_text(json.dumps(reasons))
    ref, parsed, html = report_of(copy)
    assert len(html.encode()) < MAX_PAGE_BYTES
    assert parsed.tags.count("img") > 0  # nothing had to give way
    ((told,),) = [[text for text in parsed.texts if "of 4,000 reasons are shown" in text]]
    assert told.startswith("10 of 4,000 reasons are shown; the rest is in CORPUSMILL_HOME/packing_plan/-/")
    assert told.endswith(f"/{QUARANTINE_NAME}.")
    assert sum(text.startswith("Held back by check_") for text in parsed.texts) == 10
    manifest = copy.stage.store.folder(ref) / MANIFEST_NAME
    assert manifest.stat().st_size < 50_000
    assert report_is_self_contained(copy.stage, ref).num_violations == 0


def test_a_long_table_says_how_many_rows_its_file_has(copy: Built) -> None:
    """Of a table under a contract, the first rows are shown."""
    names = [name for of_asset in OF_FILES.values() for name in of_asset if name.endswith(".parquet")]
    assert len(names) >= 6
    path = copy.folder("lsh_clusters") / "removed_by_pair.parquet"
    table = pq.read_table(path)
    pq.write_table(pa.concat_tables([table] * 60), path)
    seal_again(copy, path.parent)
    _, parsed, _ = report_of(replace(copy, refs=small_corpus.recorded(copy.recipe, copy.home)))
    total = 60 * table.num_rows
    assert f"Shown: 50 of {total:,} rows; the rest is in removed_by_pair.parquet of lsh_clusters." in parsed.texts


def counts_on(page: str, asset: str) -> dict[str, dict[str, str]]:
    heading, *rows = shown(page, f"Counts of {asset}")
    assert heading == ["count", "value", "unit", "meaning"]
    return {row[0]: dict(zip(heading, row, strict=True)) for row in rows}


def test_every_count_is_shown_with_its_unit_and_meaning(clean: Built) -> None:
    _, parsed, html = report_of(clean)
    num_shown = 0
    for asset in list(STAGES)[:-1]:
        counts = clean.stage.open(clean.refs[asset])[1].counts
        numbers = {name.replace("_", " "): one for name, one in counts.items() if isinstance(one, int | float)}
        found = counts_on(html, asset) if numbers else {}
        assert found.keys() == numbers.keys(), asset
        for name, row in found.items():
            assert row["unit"], (asset, name)
            assert row["meaning"], (asset, name)
            if isinstance(numbers[name], int):
                assert row["value"] == f"{numbers[name]:,}"
        num_shown += len(found)
        facts = {name.replace("_", " ") for name, one in counts.items() if isinstance(one, str)}
        if facts:
            assert {row[0] for row in shown(html, f"Facts of {asset}")[1:] if row[2]} == facts
    assert num_shown > 70
    assert parsed.values("class").count("number") > num_shown


def test_what_a_count_of_several_means_is_told_by_its_own_name() -> None:
    for asset, name, unit, words in (
        ("split_documents", "unused_below_min_tokens", "documents", "for this reason"),
        ("split_documents", "unused_below_min_tokens_tokens", "tokens", "Their tokens"),
        ("split_documents", "unused_over_budget_bytes", "bytes", "UTF-8 bytes"),
        ("split_documents", "unused_tokens", "tokens", "Their tokens"),
        ("split_documents", "validation_documents", "documents", "in the split"),
        (TRAINING, "final_validation_loss_of_web", "nats a token", "the pool's documents"),
        ("packing_stats", "best_fit_utilisation", "share, 0 to 1", "Cells that hold a token"),
        ("raw_row_groups", "documents", "documents", "the same as “rows used”"),
        ("raw_row_groups", "rows_filtered", "rows", "where the recipe has reading.filters"),
    ):
        found = explanation_of(asset, name)
        assert found.unit == unit, name
        assert words in found.meaning, name
    assert explanation_of("raw_row_groups", "of_a_later_version").meaning == ""


def test_counts_of_one_split_stay_together(clean: Built) -> None:
    names = list(counts_on(report_of(clean)[2], "split_documents"))
    for split in ("train", "validation", "test"):
        at = names.index(f"{split} documents")
        assert names[at + 1] == f"{split} tokens"
    at = names.index("unused over budget")
    assert names[at : at + 3] == [f"unused over budget{kind}" for kind in ("", " tokens", " bytes")]


SAID_BY_THEIR_NAMES = {"packs", "documents", "rows"}


def test_every_column_of_numbers_of_an_assets_table_is_explained(clean: Built) -> None:
    sections = {section.heading: section for section in drawn_page(clean).sections}
    columns = [
        (block, name, all(isinstance(row[at], int | float | None) for row in block.rows))
        for asset in list(STAGES)[:-1]
        for block in sections[asset].blocks
        if isinstance(block, Table) and block.caption.startswith(f"{asset}: ")
        for at, name in enumerate(block.columns)
    ]
    numbers = [(block, name) for block, name, is_number in columns if is_number and name not in SAID_BY_THEIR_NAMES]
    assert len({block.caption for block, _ in numbers}) >= 18
    assert [(block.caption, name) for block, name in numbers if name not in block.meanings] == []
    block, name = numbers[0]
    html = render(Page(title="t", summary=[], sections=[Section(heading="h", anchor="h", blocks=[block])]))
    texts = naive_html.parse(html.partition('<dl class="meanings">')[2]).texts
    assert texts[texts.index(name) + 1] == block.meanings[name]


def test_documents_that_are_cut_are_explained_as_other_columns_are(clean: Built) -> None:
    (section,) = [one for one in drawn_page(clean).sections if one.anchor == "cuts"]
    (table,) = [block for block in section.blocks if isinstance(block, Table)]
    assert table.meanings == {name.replace("_", " "): one.meaning for name, one in OF_CUTS.items()}
    assert {name for name in table.columns if name not in table.meanings} == {"document", "pool", "text"}


def test_units_are_said_once() -> None:
    columns = {
        "documents": Measure("documents", "Documents of the pool"),
        "text_bytes": Measure("bytes", "Size of `documents`"),
        "share %": Measure("%", "Those over all"),
        "pool": Measure("", "Pool"),
        "best_fit": Measure("rows", "Rows that it takes, best_fit"),
    }
    assert legend_of(columns) == {
        "documents": "Documents of the pool",
        "text_bytes": "Size of “documents” (bytes)",
        "share %": "Those over all",
        "best_fit": "Rows that it takes",
    }


def test_tables_of_json_are_those_that_the_assets_state(clean: Built) -> None:
    for asset, name in (("tokenizer_report", "report.json"), ("packing_stats", "stats.json")):
        stored = json.loads((clean.folder(asset) / name).read_bytes())
        stated = {column.key.partition("[]")[0] for column in STORED[asset].columns if column.file == name}
        assert stored.keys() == stated


def test_facts_are_explained_and_occur(clean: Built) -> None:
    facts: Mapping[str, Any] = {
        name: one for ref in clean.refs.values() for name, one in ref.counts.items() if isinstance(one, str)
    }
    assert facts.keys() == FACTS.keys()
    assert not facts.keys() & {name for of_asset in MEASURES.values() for name in of_asset}


def test_a_picture_that_is_not_the_sealed_one_is_told(copy: Built) -> None:
    write_json([], copy.folder("packing_stats") / "utilisation.png")
    page = drawn_page(copy)
    assert len(page.unread) == 1
    assert "utilisation.png: expected " in page.unread[0]
