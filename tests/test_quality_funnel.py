"""The report's first table: each step's number is one that a count of the stored files themselves comes to."""

import html
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import small_corpus
from small_corpus import Built
from test_quality_report import report_of
from test_row_filters import EDU
from test_sampled import recipe_with, rows_by_file, write_scored

from pipeline_assets.findings import FoundAsset
from pipeline_assets.flow import STAGES
from pipeline_assets.quality_funnel import NOT_USED, REMOVED, UNUSED, funnel
from pipeline_assets.quality_page import Note, Page, Section, render
from pipeline_assets.transforms import clusters, split
from training_io.document_index import read_index
from training_io.manifest import MANIFEST_NAME
from training_io.plan import load_plan

FUNNEL, SPLITS = "From rows of the source to packs", "Tokens and packs of each split"
LOSSES = {
    "splits.min_tokens": 60,
    "packs.max_seq_len": 256,
    "packs.capacity": 512,
    "packs.eval_microbatch_tokens": 512,
    "packs.long_documents": "divert",
    "references": [
        {"name": "sample", "kind": "tokenizer_sample", "documents_per_pool": 12},
        {"name": "held_out", "kind": "file", "path": "held_out.txt", "action": "exclude"},
    ],
}


@pytest.fixture(scope="module")
def lossy(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """A home in which every step leaves something out."""
    folder = small_corpus.write_corpus(tmp_path_factory.mktemp("lossy"))
    return small_corpus.build(small_corpus.write_recipe(folder, LOSSES), folder / "home")


def shown(page: str, caption: str) -> list[list[str]]:
    """The cells of a table of the page, heading first."""
    _, found, rest = page.partition(f"<caption>{caption}</caption>")
    assert found, caption
    lines = rest.partition("</table>")[0].split("<tr>")[1:]
    return [[html.unescape(cell) for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", line)] for line in lines]


def by_step(page: str) -> dict[str, dict[str, str]]:
    heading, *rows = shown(page, FUNNEL)
    return {row[0]: dict(zip(heading, row, strict=True)) for row in rows}


def rows_of(built: Built, asset: str, pattern: str, columns: list[str]) -> list[dict[str, Any]]:
    """The rows of all Parquet files of an asset whose paths match."""
    paths = sorted((built.home / asset).glob(pattern))
    return pa.concat_tables([pq.read_table(path, columns=columns) for path in paths]).to_pylist()


def counted(built: Built) -> dict[str, tuple[int, int | None, int | None]]:
    """Documents, bytes of text and tokens at each step, from source files, tables, indexes and plans."""
    files = [path for pool in small_corpus.FILES for path in files_of(built.recipe.parent / pool)]
    source = [pq.read_table(path, columns=["text"]) for path in files]
    texts = [text for table in source for text in table.column("text").to_pylist()]
    used = [text for text in texts if text]
    decisions = rows_of(built, "lsh_clusters", "-/*/clusters/*.parquet", ["kept"])
    documents = rows_of(built, "split_documents", "*/*/documents.parquet", ["text", "num_tokens", "split"])
    assigned = [row for row in documents if row["split"] != "unused"]
    lengths = [read_index(path).lengths for path in built.folder("token_shards").glob("*_index")]
    plans = [load_plan(path.parent, path.name) for path in built.folder("packing_plan").iterdir() if path.is_dir()]
    packed = [np.unique(plan.locate(plan.segments_of(np.arange(plan.num_packs)))[0]) for plan in plans]

    def sized(rows: list[dict[str, Any]]) -> tuple[int, int, int]:
        return len(rows), num_bytes([row["text"] for row in rows]), sum(row["num_tokens"] for row in rows)

    return {
        "rows of the source, as chosen": (len(texts), None, None),
        "read and used": (len(used), num_bytes(used), None),
        "kept by deduplication": (sum(row["kept"] for row in decisions), None, None),
        "tokenized": sized(documents),
        "in a split": sized(assigned),
        "in token shards": (sum(map(len, lengths)), None, sum(int(some.sum()) for some in lengths)),
        "packed": (sum(map(len, packed)), None, None),
    }


def files_of(pool: Path) -> list[Path]:
    return sorted(pool.rglob("*.parquet"))


def num_bytes(texts: list[str]) -> int:
    return sum(len(text.encode()) for text in texts)


@pytest.mark.parametrize("home", ["clean", "lossy"])
def test_each_step_shows_what_a_count_of_the_files_finds(home: str, request: pytest.FixtureRequest) -> None:
    built = request.getfixturevalue(home)
    page, expected = report_of(built)[2], counted(built)
    found = by_step(page)
    assert list(found) == list(expected)
    first = expected["rows of the source, as chosen"][0]
    for step, (documents, text_bytes, tokens) in expected.items():
        row = found[step]
        assert row["documents"] == f"{documents:,}", step
        assert float(row["of the rows (%)"]) == pytest.approx(100 * documents / first, abs=0.005), step
        assert row["tokens"] == ("" if tokens is None else f"{tokens:,}"), step
        if text_bytes is not None:
            assert float(row["text (MB)"]) == pytest.approx(text_bytes / 1e6, abs=0.005), step
    assert page.index(FUNNEL) < page.index("Every asset, in the order of the flow")


def test_what_is_left_out_is_what_a_step_lacks_of_the_one_before(lossy: Built) -> None:
    found = list(by_step(report_of(lossy)[2]).values())
    reasons = {}
    for before, row in pairwise(found):
        numbers = [int(number.replace(",", "")) for number in re.findall(r"([\d,]*\d) ", row["left out here"])]
        assert sum(numbers) == int(before["documents"].replace(",", "")) - int(row["documents"].replace(",", ""))
        reasons[row["step"]] = re.sub(r"[\d,]*\d ", "", row["left out here"])
    assert reasons == {
        "read and used": "without a text, with an empty text",
        "kept by deduplication": "exact duplicates, near duplicates, like a reference text",
        "tokenized": "none",
        "in a split": "below the token floor",
        "in token shards": "none",
        "packed": "longer than a segment may be",
    }


def test_rows_that_filters_remove_or_leave_unread_are_left_out_of_the_source(tmp_path: Path) -> None:
    corpus = write_scored(tmp_path)
    built = small_corpus.build(
        recipe_with(corpus, "filtered", {"reading.filters": {"edu": EDU}}), tmp_path / "home", "raw_row_groups"
    )
    found = by_step(report_of(built)[2])
    rows = sum(
        pq.read_metadata(path).num_rows for pool in (*rows_by_file(), "alpha") for path in files_of(corpus / pool)
    )
    used = len(rows_of(built, "raw_row_groups", "*/*/rows.parquet", ["doc_id"]))
    assert found["rows of the source, as chosen"]["documents"] == f"{rows:,}"
    assert found["read and used"]["documents"] == f"{used:,}"
    filtered = len(rows_of(built, "raw_row_groups", "*/*/filtered_rows.parquet", ["filter"]))
    said = found["read and used"]["left out here"]
    assert f"{filtered:,} failed a filter" in said
    (unread,) = re.findall(r"([\d,]+) in row groups that no filter lets pass", said)
    assert int(unread) > 0
    assert found["packed"]["left out here"] == "not built with this recipe"
    assert found["packed"]["documents"] == ""


def test_each_split_shows_its_tokens_and_packs(lossy: Built) -> None:
    (_, *names), *rows = shown(report_of(lossy)[2], SPLITS)
    found = {row[0]: dict(zip(names, row[1:], strict=True)) for row in rows}
    assert set(names) == {"train", "validation"}
    for name in names:
        plan = load_plan(lossy.folder("packing_plan"), name)
        _, start, end = plan.locate(plan.segments_of(np.arange(plan.num_packs)))
        documents = rows_of(lossy, "split_documents", "*/*/documents.parquet", ["num_tokens", "split"])
        lengths = [row["num_tokens"] for row in documents if row["split"] == name]
        assert found["documents"][name] == f"{len(lengths):,}"
        assert found["tokens"][name] == f"{sum(lengths):,}"
        assert found["next-token pairs"][name] == f"{int((end - start).sum()):,}"
        assert found["segments"][name] == f"{len(start):,}"
        filled = 100 * int((end - start).sum()) / (plan.num_packs * plan.capacity)
        assert float(found["filled (%)"][name]) == pytest.approx(filled, abs=0.005)


def test_steps_that_do_not_follow_from_each_other_are_told(tmp_path: Path) -> None:
    folder = small_corpus.write_corpus(tmp_path)
    recipe, home, assets = small_corpus.write_recipe(folder), folder / "home", list(STAGES)
    upto_shards = assets[: assets.index("token_shards") + 1]
    assert small_corpus.materialize(recipe, home, *upto_shards).success
    built = Built(recipe=recipe, home=home, refs=small_corpus.recorded(recipe, home))
    before = report_of(built)[2]
    assert "Counts may not follow" not in before
    assert "made from others than shown" not in before
    small_corpus.write_rows(folder / "beta" / "b_001.parquet", [{"text": small_corpus.sentences(4_000)}])
    assert small_corpus.materialize(recipe, home, *upto_shards[:-1]).success
    _, parsed, page = report_of(built)
    (told,) = [text for text in parsed.texts if text.startswith("Counts may not follow from each other: ")]
    assert "token_shards was made from another" in told
    assert "split_documents than is shown." in told
    older = made_from_others(page)
    assert [asset for asset, others in older.items() if others] == ["token_shards"]
    assert f" {older['token_shards']} than is shown." in told


def made_from_others(page: str) -> dict[str, str]:
    """By asset, those of which other bytes are shown than it was made from."""
    heading, *rows = shown(page, "Every asset, in the order of the flow")
    place = heading.index("made from others than shown")
    return {row[heading.index("asset")]: row[place] for row in rows}


def test_an_asset_that_is_not_shown_is_none_that_others_do_not_follow_from(copy: Built) -> None:
    (copy.folder("raw_row_groups") / MANIFEST_NAME).unlink()
    page = report_of(copy)[2]
    assert by_step(page)["read and used"]["left out here"] == "no longer whole: materialize it again"
    assert by_step(page)["packed"]["documents"]
    assert "Counts may not follow" not in page
    assert "made from others than shown" not in page


def test_every_reason_that_documents_have_is_said_in_words() -> None:
    assert tuple(REMOVED) == clusters.REASONS[1:]
    assert tuple(UNUSED) == split.REASONS[1:]


READ = {
    "raw_row_groups": {"rows_read", "rows_used", "text_bytes", *NOT_USED},
    "lsh_clusters": {"kept", *REMOVED},
    "document_tokens": {"documents", "text_bytes", "tokens"},
    "split_documents": {
        *("documents", "text_bytes", "tokens", "unused_documents", "unused_tokens"),
        *(f"unused_{name}{kind}" for name in UNUSED for kind in ("", "_bytes")),
    },
    "token_shards": {"documents", "tokens", "splits", *(f"train {name}" for name in ("documents", "tokens", "shards"))},
    "packing_plan": {
        "splits",
        *("train documents", "train diverted", "train segments", "train packs"),
        *("train targets", "train steps", "train utilisation"),
    },
}
"""The counts that the two tables show."""


def with_odd_counts(counts: Mapping[str, Any], odd: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """A manifest's counts with one of them odd, or one of a split's, each in turn."""
    yield from ((name, {**counts, name: odd}) for name in (*counts, *NOT_USED))
    if "splits" in counts:
        train = counts["splits"]["train"]
        for name in train:
            yield f"train {name}", {**counts, "splits": {**counts["splits"], "train": {**train, name: odd}}}


@pytest.mark.parametrize("odd", [{}, [], "x", None, True, -1, 10**400])
def test_a_count_that_can_be_none_is_told_once_and_the_rest_is_shown(odd: Any, clean: Built) -> None:
    assets = {name: FoundAsset(asset=name, state="built", ref=clean.refs[name]) for name in list(STAGES)[:-1]}
    for asset, names in READ.items():
        ref = clean.refs[asset]
        told = set()
        for name, counts in with_odd_counts(ref.counts, odd):
            found = replace(assets[asset], ref=replace(ref, counts=counts))
            blocks = list(funnel(assets | {asset: found}))
            notes = [block for block in blocks if isinstance(block, Note)]
            page = render(Page(title="t", summary=[], sections=[Section(heading="h", anchor="h", blocks=blocks)]))
            steps = by_step(page)
            assert len(steps) == 7
            if notes:
                told.add(name)
                assert [note.is_unread for note in notes] == [True], (asset, name)
                assert {row["asset"] for row in steps.values() if row["left out here"] == "not known"} <= {asset}
        assert told == names - ({"splits"} if odd == {} else set()), asset  # no splits at all are splits, too


def test_a_split_without_packs_that_can_be_read_shows_its_tokens(clean: Built) -> None:
    assets = {name: FoundAsset(asset=name, state="built", ref=clean.refs[name]) for name in list(STAGES)[:-1]}
    plan = replace(assets["packing_plan"], ref=replace(clean.refs["packing_plan"], counts={}))
    blocks = list(funnel(assets | {"packing_plan": plan}))
    (_, *names), *rows = shown(
        render(Page(title="t", summary=[], sections=[Section(heading="h", anchor="h", blocks=blocks)])), SPLITS
    )
    assert names == ["documents", "tokens", "of all tokens (%)", "shards (files)"]
    splits = clean.refs["token_shards"].counts["splits"]
    assert {row[0]: row[2] for row in rows} == {name: f"{one['tokens']:,}" for name, one in splits.items()}
