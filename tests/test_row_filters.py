"""Filters: rows removed one by one as by hand, row groups left unread by proof, and nothing uncounted."""

import json
from collections.abc import Callable, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import naive_sampled as naive
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import small_corpus
from hypothesis import given
from hypothesis import strategies as st
from small_corpus import Built, build, copy_home, judged
from test_asset_checks import change_table, seal_again, set_cell, units
from test_sampled import FILES, HOSTILE, page, pool_rows, recipe_with, rows_by_file, table, write_scored

from pipeline_assets.recipe_file import load_recipe
from pipeline_assets.row_filters import FILTERED_NAME
from pipeline_assets.sampled import EFFECTS_NAME, FILES_NAME, NAMES_NAME, THRESHOLDS_NAME, VALUES_NAME
from pipeline_assets.schemas import ROWS_NAME
from pipeline_assets.sections.reading import RowFilters
from pipeline_assets.stripes import units_in
from pipeline_assets.transforms.filters import (
    FILTERS,
    PASSED,
    filter_that_excludes,
    first_failures,
    measure_filters,
    passes,
)
from pipeline_assets.transforms.rows import MEASURED_COLUMNS, OPTIONAL_COLUMNS
from resources.row_group_statistics import column_bounds
from training_io.errors import SourceError

LAW = "every_source_row_is_used_or_counted"
KINDS = {name: (OPTIONAL_COLUMNS | MEASURED_COLUMNS)[name] for name in FILTERS.values()}
NAN = float("nan")

names = st.none() | st.sampled_from(["a", "b", "ä", "中"])
scores = st.none() | st.sampled_from([NAN, float("inf"), -float("inf"), 2.5, 3.0]) | st.floats(-5, 5)
row_strategy = st.fixed_dictionaries(
    {
        "text": st.sampled_from(["x", "xx", "é"]),
        "dump": names,
        "language": names,
        "language_score": scores,
        "score": scores,
        "int_score": st.none() | st.integers(-2, 5),
    }
)
listed = st.lists(st.sampled_from(["a", "b", "ä", "中", "z"]), min_size=1, max_size=3).map(tuple)
filters_strategy = st.fixed_dictionaries(
    {},
    optional={
        "dumps": listed,
        "languages": listed,
        "min_language_score": st.sampled_from([2.5, 3.0]) | st.floats(-5, 5),
        "min_score": st.sampled_from([2.5, 3.0]) | st.floats(-5, 5),
        "min_int_score": st.integers(-2, 6),
    },
)


def columns_of(rows: list[dict[str, Any]]) -> dict[str, pa.Array]:
    return {name: pa.array([row[name] for row in rows], kind) for name, kind in KINDS.items()}


@given(st.lists(row_strategy, max_size=12), filters_strategy)
def test_each_row_fails_the_first_filter_that_it_does_not_pass_by_hand(rows, filters) -> None:
    failures = first_failures(columns_of(rows), filters)
    found = [None if place == PASSED else list(FILTERS)[place] for place in failures.tolist()]
    assert found == [naive.first_failure(row, filters) for row in rows]
    effects = measure_filters(columns_of(rows), np.array([naive.size(row) for row in rows], np.int64), filters)
    assert list(effects) == [name for name in FILTERS if name in filters]
    for name, effect in effects.items():
        removed = [row for row, first in zip(rows, found, strict=True) if first == name]
        failing = [row for row in rows if naive.fails(row, name, filters[name])]
        values = [row[FILTERS[name]] for row in rows]
        assert (effect.removed_documents, effect.removed_bytes) == (len(removed), sum(map(naive.size, removed)))
        assert (effect.failing_documents, effect.failing_bytes) == (len(failing), sum(map(naive.size, failing)))
        assert effect.failing_without_value == sum(value is None or value != value for value in values)


ODD_KINDS = {
    "dump": [pa.string(), pa.large_string(), pa.binary(), pa.dictionary(pa.int8(), pa.string())],
    "score": [pa.float64(), pa.float32(), pa.string(), pa.decimal128(6, 2)],
    "int_score": [pa.int64(), pa.uint8(), pa.float32(), pa.bool_(), pa.string()],
}


def as_kind(value: Any, kind: pa.DataType) -> Any:
    """A name or a number as Arrow takes it for a column of a kind."""
    if isinstance(value, str):
        return value.encode() if pa.types.is_binary(kind) else value
    makers = {
        pa.string(): str,
        pa.bool_(): bool,
        pa.decimal128(6, 2): Decimal,
        pa.float64(): float,
        pa.float32(): float,
    }
    return makers.get(kind, int)(value)


@given(st.data())
def test_a_row_group_is_left_unread_only_where_no_row_of_it_passes(data) -> None:
    """Written and read by Parquet itself, in all kinds of columns that rows are read from."""
    name = data.draw(st.sampled_from(["dumps", "min_score", "min_int_score"]))
    kind = data.draw(st.sampled_from(ODD_KINDS[FILTERS[name]]))
    limit = data.draw(
        listed if name == "dumps" else st.integers(0, 6).map(lambda number: number / (1 + (name == "min_score")))
    )
    drawn = st.sampled_from(["a", "b", "ä", "中"]) if name == "dumps" else st.integers(0, 5)
    values = data.draw(st.lists(st.none() | drawn, min_size=1, max_size=4))
    column = pa.array([None if value is None else as_kind(value, kind) for value in values], kind)
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({FILTERS[name]: column}), sink)
    bounds = column_bounds(pq.read_metadata(pa.BufferReader(sink.getvalue())).row_group(0), list(FILTERS.values()))
    read = pq.read_table(pa.BufferReader(sink.getvalue())).column(0).combine_chunks()
    read = read.cast(pa.string()) if pa.types.is_dictionary(read.type) else read
    passing = passes(read.cast(KINDS[FILTERS[name]]), limit)
    excluded = filter_that_excludes(bounds, {name: limit})
    assert excluded is None or not passing.any()
    if kind in (pa.float64(), pa.int64()):
        assert (excluded is not None) == (not passing.any() and not pa.types.is_string(kind)) or set(values) == {None}


def bounds_in(columns: Mapping[str, Any], **options: Any) -> Mapping[str, tuple[Any, Any]]:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns) if isinstance(columns, dict) else columns, sink, **options)
    metadata = pq.read_metadata(pa.BufferReader(sink.getvalue()))
    return column_bounds(metadata.row_group(0), list(FILTERS.values()))


def test_bounds_are_what_a_footer_states_of_flat_columns_that_are_there_once() -> None:
    columns = {
        "dump": pa.array(["b", None, "a"]),
        "language": pa.nulls(3, pa.string()),
        "score": pa.array([NAN, 2.0, 1.0]),
        "int_score": pa.array([[1], [2], []]),
        "language_score": pa.array([{"score": 1}] * 3),
        "other": pa.array([1, 2, 3]),
    }
    assert bounds_in(columns) == {"dump": ("a", "b"), "language": (None, None), "score": (1.0, 2.0)}
    assert bounds_in(columns, write_statistics=False) == {}
    assert bounds_in(pa.table([[1.0], [2.0]], names=["score", "score"])) == {}
    not_utf8 = pa.array([b"\xff", b"a"])
    as_text = pa.Array.from_buffers(pa.string(), 2, not_utf8.buffers())
    assert bounds_in({"dump": as_text, "language": pa.array(["x" * 9_000] * 2)}) == {}


@pytest.mark.parametrize(
    ("bounds", "limits", "expected"),
    [
        ({"dump": ("b", "d")}, {"dumps": ("a", "e")}, "dumps"),
        ({"dump": ("b", "d")}, {"dumps": ("a", "d")}, None),
        ({"dump": ("b", "d")}, {"dumps": ("c",)}, None),
        ({"dump": ("b", "b")}, {"dumps": ("bb",)}, "dumps"),
        ({"dump": (None, None)}, {"dumps": ("a",)}, "dumps"),
        ({"dump": (b"b", b"d")}, {"dumps": ("a",)}, None),
        ({"dump": (1, 2)}, {"dumps": ("a",)}, None),
        ({}, {"dumps": ("a",)}, None),
        ({"language": ("b", "d")}, {"dumps": ("a",)}, None),
        ({"score": (1.0, 2.9)}, {"min_score": 3.0}, "min_score"),
        ({"score": (1.0, 3.0)}, {"min_score": 3.0}, None),
        ({"score": (NAN, NAN)}, {"min_score": 3.0}, None),
        ({"score": ("1", "2")}, {"min_score": 3.0}, None),
        ({"score": (False, True)}, {"min_score": 3.0}, None),
        ({"score": (1.0, 2.0), "dump": ("b", "d")}, {"min_score": 3.0, "dumps": ("a",)}, "dumps"),
    ],
)
def test_what_statistics_prove(bounds, limits, expected) -> None:
    assert filter_that_excludes(bounds, limits) == expected


def test_the_recipe_has_the_filters_that_the_transform_knows() -> None:
    assert list(RowFilters.model_fields) == list(FILTERS)
    filters = RowFilters.model_validate({"min_int_score": 3, "languages": ["en"]})
    assert list(filters.limits.items()) == [("languages", ("en",)), ("min_int_score", 3)]


EDU = {
    "dumps": ["CC-MAIN-2013-10", "CC-MAIN-2015-10", "CC-MAIN-2016-10", "CC-MAIN-2017-10", "\x1b[31m"],
    "languages": ["en", "de"],
    "min_language_score": 0.7,
    "min_score": 3.1,
    "min_int_score": 4,
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_scored(tmp_path_factory.mktemp("filters"))


def built_with(corpus: Path, name: str, filters: Mapping[str, Any], upto: str = "raw_row_groups") -> Built:
    return build(recipe_with(corpus, name, {"reading.filters": filters} if filters else {}), corpus / name, upto)


@pytest.fixture(scope="module")
def plain(corpus: Path) -> Built:
    return built_with(corpus, "plain", {})


@pytest.fixture(scope="module")
def filtered(corpus: Path) -> Built:
    return built_with(corpus, "filtered", {"edu": EDU})


def row_groups_of_edu() -> dict[tuple[str, int], list[dict[str, Any]]]:
    return {
        (f"{file}.parquet", start // 10): rows[start : start + 10]
        for file, rows in rows_by_file()["edu"].items()
        for start in range(0, len(rows), 10)
    }


# Parquet states no bounds of values as long as the hostile name.
UNREAD = {
    key: "dumps"
    for key, rows in row_groups_of_edu().items()
    if not {row["dump"] for row in rows} & {*EDU["dumps"], HOSTILE}
}


def tables_of(built: Built, pool: str, name: str) -> list[dict[str, Any]]:
    """The rows of one table of all units of a pool, with their files."""
    parts = [unit for unit in units_in(built.stage, built.refs["raw_row_groups"]) if unit.counts["pool"] == pool]
    return [{**row, "file": part.counts["file"]} for part in parts for row in built.stage.table(part, name).to_pylist()]


def address(row: Mapping[str, Any]) -> tuple[str, int, int]:
    return row["file"], row["row_group"], row["row"]


def test_the_used_rows_are_those_that_pass_and_the_others_are_stored_with_what_they_fail(filtered: Built) -> None:
    assert len(UNREAD) > 1
    used, removed = {}, {}
    for (file, group), rows in row_groups_of_edu().items():
        for number, row in enumerate(rows):
            if row["text"] and (file, group) not in UNREAD:
                first = naive.first_failure(row, EDU)
                (used if first is None else removed)[file, group, number] = first or row["text"]
    assert {address(row): row["text"] for row in tables_of(filtered, "edu", ROWS_NAME)} == used
    assert {address(row): row["filter"] for row in tables_of(filtered, "edu", FILTERED_NAME)} == removed
    assert set(removed.values()) == set(EDU)
    assert len(used) > 0
    counts = filtered.refs["raw_row_groups"].counts
    unread = sum(len(rows) for key, rows in row_groups_of_edu().items() if key in UNREAD)
    assert (counts["rows_filtered"], counts["rows_excluded"]) == (len(removed), unread)
    others = sum(len(naive.usable(rows)) for rows in small_corpus.corpus_rows()["alpha"].values()) + 30
    assert counts["documents"] == counts["rows_used"] == len(used) + others
    text_bytes = sum(len(text.encode()) for text in used.values())
    parts = [unit for unit in units_in(filtered.stage, filtered.refs["raw_row_groups"]) if unit.counts["pool"] == "edu"]
    assert sum(part.counts["text_bytes"] for part in parts) == text_bytes


def test_the_page_says_what_each_filter_removed_of_what_was_read(filtered: Built) -> None:
    read = [row for key, rows in row_groups_of_edu().items() if key not in UNREAD for row in naive.usable(rows)]
    effects = {row["filter"]: row for row in table(filtered, EFFECTS_NAME)}
    assert list(effects) == list(EDU)
    for name, row in effects.items():
        removed = [one for one in read if naive.first_failure(one, EDU) == name]
        failing = [one for one in read if naive.fails(one, name, EDU[name])]
        assert (row["documents"], row["text_bytes"]) == (len(read), sum(map(naive.size, read)))
        assert (row["removed_documents"], row["removed_bytes"]) == (len(removed), sum(map(naive.size, removed)))
        assert (row["failing_documents"], row["failing_bytes"]) == (len(failing), sum(map(naive.size, failing)))
        excluded = [key for key, first in UNREAD.items() if first == name]
        assert row["row_groups_excluded"] == len(excluded)
        assert row["rows_excluded"] == sum(len(row_groups_of_edu()[key]) for key in excluded)
    shown = page(filtered)
    assert [record.data["filter"] for record in shown["filters"].records] == list(EDU)
    files = [row for row in table(filtered, FILES_NAME) if row["pool"] == "edu"]
    assert sum(row["row_groups_excluded"] for row in files) == len(UNREAD) > 1
    assert all(row["row_groups_read"] + row["row_groups_excluded"] == row["row_groups"] for row in files)
    limits = {record.data["filter"]: record.data["limit"] for record in shown["filters"].records}
    assert limits["dumps"].isprintable()


def test_thresholds_are_measured_before_the_filters_and_the_recipes_own_is_among_them(filtered: Built) -> None:
    read = [row for key, rows in row_groups_of_edu().items() if key not in UNREAD for row in naive.usable(rows)]
    rows = [row for row in table(filtered, THRESHOLDS_NAME) if row["pool"] == "edu"]
    assert {row["column"]: row["threshold"] for row in rows if row["is_chosen"]} == {
        "language_score": 0.7,
        "score": 3.1,
        "int_score": 4.0,
    }
    for row in rows:
        known = read if row["is_chosen"] else [{**one, "score": naive.number(one, "score")} for one in read]
        assert (row["documents"], row["text_bytes"]) == naive.kept_at(known, row["column"], row["threshold"]), row
    values = {row["value"] for row in table(filtered, VALUES_NAME) if (row["pool"], row["column"]) == ("edu", "score")}
    assert min(values) < 3.1


def test_without_filters_of_its_pool_a_units_identity_and_bytes_stay(plain: Built, filtered: Built) -> None:
    for pool, is_same in (("alpha", True), ("web", True), ("edu", False)):
        first, second = (
            {
                unit.unit: (unit.identity, unit.digest)
                for unit in units_in(built.stage, built.refs["raw_row_groups"])
                if unit.counts["pool"] == pool
            }
            for built in (plain, filtered)
        )
        assert first.keys() == second.keys()
        assert [first[unit] == second[unit] for unit in first] == [is_same] * len(first)
    assert "rows_filtered" not in plain.refs["raw_row_groups"].counts
    for unit in units_in(plain.stage, plain.refs["raw_row_groups"]):
        assert "filters" not in plain.stage.open(unit)[1].parameters


def test_a_filter_that_everything_passes_changes_no_row(corpus: Path, plain: Built) -> None:
    lenient = built_with(corpus, "lenient", {"edu": {"min_language_score": 0.0}})
    for unit, folder in units(lenient, "raw_row_groups"):
        (other,) = [path for name, path in units(plain, "raw_row_groups") if name == unit]
        assert (folder / ROWS_NAME).read_bytes() == (other / ROWS_NAME).read_bytes()
        assert (folder / VALUES_NAME).read_bytes() == (other / VALUES_NAME).read_bytes()
        assert (folder / NAMES_NAME).read_bytes() == (other / NAMES_NAME).read_bytes()


def test_a_row_group_that_no_row_can_pass_is_not_read(corpus: Path, tmp_path: Path) -> None:
    folder = write_scored(tmp_path / "damaged")
    path = folder / "edu" / "e_000.parquet"
    group = pq.read_metadata(path).row_group(1)
    assert [row["dump"] for row in row_groups_of_edu()["e_000.parquet", 1]] == ["CC-MAIN-2014-10"] * 10
    content = bytearray(path.read_bytes())
    start = min(
        group.column(number).dictionary_page_offset or group.column(number).data_page_offset
        for number in range(group.num_columns)
    )
    content[start : start + group.total_byte_size // 4] = bytes(group.total_byte_size // 4)
    path.write_bytes(content)
    built = built_with(folder, "filtered", {"edu": EDU})
    assert judged(LAW, built).num_violations == 0
    with pytest.raises(SourceError, match=r"e_000\.parquet"):
        built_with(folder, "plain", {})


def test_statistics_that_were_not_written_exclude_nothing(tmp_path: Path) -> None:
    folder = write_scored(tmp_path / "bare")
    for file in FILES["edu"]:
        path = folder / "edu" / f"{file}.parquet"
        pq.write_table(pq.read_table(path), path, row_group_size=10, write_statistics=False, write_page_checksum=True)
    built = built_with(folder, "filtered", {"edu": {"dumps": ["CC-MAIN-2013-10"]}})
    counts = built.refs["raw_row_groups"].counts
    assert counts["rows_excluded"] == 0
    assert counts["rows_filtered"] == len(naive.usable(pool_rows("edu"))) - 8
    assert judged(LAW, built).num_violations == 0


def test_a_column_that_a_file_lacks_is_one_error_that_names_both(corpus: Path) -> None:
    with pytest.raises(SourceError) as caught:
        built_with(corpus, "lacking", {"web": {"min_score": 3.0, "languages": ["en"]}})
    for part in ("reading.filters.web", "language, score", "w_000.parquet", "text, date", "Take the filter out"):
        assert part in str(caught.value)
    assert not (corpus / "lacking" / "raw_row_groups").exists()


def test_filters_that_leave_nothing_say_so(corpus: Path) -> None:
    recipe = recipe_with(
        corpus,
        "nothing",
        {
            "source.pools": [{"name": "edu", "path": "edu"}],
            "reading.filters": {"edu": {"dumps": ["CC-MAIN-2013-10"], "languages": ["eo"]}},
        },
    )
    with pytest.raises(SourceError, match=r"none in 15 rows \(1 null, 1 empty, .* 13 filtered\) and 60 in row groups"):
        build(recipe, corpus / "nothing", "raw_row_groups")


def test_everything_after_takes_units_that_filters_left_empty(corpus: Path) -> None:
    built = built_with(corpus, "whole", {"edu": {**EDU, "min_score": 4.9}}, "handoff_package")
    sizes = [unit.counts["documents"] for unit in units_in(built.stage, built.refs["raw_row_groups"])]
    assert 0 in sizes
    assert built.refs["handoff_package"].counts


def test_dagster_materializes_filtered_rows_and_judges_them(corpus: Path) -> None:
    recipe = recipe_with(corpus, "run", {"reading.filters": {"edu": EDU}})
    result = small_corpus.materialize(recipe, corpus / "run", "raw_row_groups")
    assert result.success, small_corpus.failures(result)
    found = small_corpus.evaluations(result)
    assert found[LAW].passed
    shown = small_corpus.materialized_metadata(result)["raw_row_groups"]
    assert shown["rows_filtered"] > 0
    assert shown["rows_excluded"] > 0


def test_filters_are_read_from_the_recipes_file(corpus: Path) -> None:
    recipe = load_recipe(str(recipe_with(corpus, "read", {"reading.filters": {"edu": EDU}})))
    assert recipe.reading.filters["edu"].limits["dumps"] == tuple(EDU["dumps"])


def test_real_rows_are_filtered_as_by_hand(sample_data: Path, tmp_path: Path) -> None:
    filters = {"min_language_score": 0.9, "languages": ["zh"]}
    changes = {
        "source.pools": [{"name": "chinese", "path": str(sample_data / "sample" / "chinese")}],
        "references": [small_corpus.RECIPE["references"][0]],
        "reading.filters": {"chinese": filters},
    }
    built = build(small_corpus.write_recipe(tmp_path, changes), tmp_path / "home", "raw_row_groups")
    (path,) = (sample_data / "sample" / "chinese").glob("*.parquet")
    rows = pq.read_table(path, columns=["text", "language", "language_score"]).to_pylist()
    passing = sorted(row["text"] for row in rows if naive.first_failure(row, filters) is None)
    assert 0 < len(passing) < len(rows)
    assert sorted(row["text"] for row in tables_of(built, "chinese", ROWS_NAME)) == passing
    assert judged(LAW, built).num_violations == 0


def of_edu(built: Built, *, holding: str = FILTERED_NAME) -> tuple[str, Path]:
    """The first unit of the pool with rows in a table."""
    for unit, folder in units(built, "raw_row_groups"):
        if (folder / FILTERED_NAME).exists() and pq.read_metadata(folder / holding).num_rows > 1:
            return unit, folder
    raise AssertionError(f"no unit has rows in {holding}")


def lose_a_removed_row(built: Built) -> str:
    unit, folder = of_edu(built)
    change_table(folder / FILTERED_NAME, lambda rows: rows[1:])
    seal_again(built, folder)
    return f"{unit}: expected"


def blame_another_filter(built: Built) -> str:
    _, folder = of_edu(built)
    row = pq.read_table(folder / FILTERED_NAME).slice(0, 1).to_pylist()[0]
    other = next(name for name in FILTERS if name != row["filter"])
    set_cell(folder / FILTERED_NAME, 0, "filter", other)
    seal_again(built, folder)
    return f"row {row['row']:,} of row group {row['row_group']:,}: expected to fail {row['filter']}, found removed by {other}"


def remove_what_passes(built: Built) -> str:
    _, folder = of_edu(built)
    passing = {"dump": EDU["dumps"][0], "language": "en", "language_score": 0.9, "score": 5.0, "int_score": 5}
    change_table(folder / FILTERED_NAME, lambda rows: [{**rows[0], **passing}, *rows[1:]])
    seal_again(built, folder)
    return "expected to fail nothing, found removed by"


def use_a_low_score(built: Built) -> str:
    unit, folder = of_edu(built, holding=ROWS_NAME)
    set_cell(folder / ROWS_NAME, 0, "score", 3.05)
    seal_again(built, folder)
    return f"{unit}: expected no row that fails min_score, found 1 used"


def use_another_language(built: Built) -> str:
    unit, folder = of_edu(built, holding=ROWS_NAME)
    set_cell(folder / ROWS_NAME, 0, "language", None)
    seal_again(built, folder)
    return f"{unit}: expected no row that fails languages, found 1 used"


def repeat_a_row(built: Built) -> str:
    unit, folder = of_edu(built)
    change_table(
        folder / FILTERED_NAME,
        lambda rows: [rows[0], {**rows[1], "row": rows[0]["row"], "row_group": rows[0]["row_group"]}, *rows[2:]],
    )
    seal_again(built, folder)
    return f"{unit}: expected each row once, found 1 twice"


def overlook_low_int_scores(built: Built) -> str:
    for unit, folder in units(built, "raw_row_groups"):
        rows = pq.read_table(folder / FILTERED_NAME).to_pylist() if (folder / FILTERED_NAME).exists() else []
        low = [number for number, row in enumerate(rows) if row["int_score"] is not None and row["int_score"] < 4]
        num_low = len(low) + sum(row["int_score"] is None for row in rows)
        if low:
            set_cell(folder / FILTERED_NAME, low[0], "int_score", 4)
            seal_again(built, folder)
            return f"{unit}: expected {num_low:,} removed rows that fail min_int_score, found {num_low - 1:,}"
    raise AssertionError("no removed row has a low int_score")


def forget_what_was_sampled(built: Built) -> str:
    unit, folder = of_edu(built)
    change_table(folder / VALUES_NAME, lambda rows: [row for row in rows if row["column"] != "bytes"])
    seal_again(built, folder)
    return f"{unit}: expected"


POISONS: list[Callable[[Built], str]] = [
    lose_a_removed_row,
    blame_another_filter,
    remove_what_passes,
    use_a_low_score,
    use_another_language,
    repeat_a_row,
    overlook_low_int_scores,
    forget_what_was_sampled,
]


@pytest.mark.parametrize("poison", POISONS, ids=lambda poison: poison.__name__)
def test_the_law_fails_on_filtered_rows_that_are_poisoned_in_one_place(filtered: Built, tmp_path: Path, poison) -> None:
    assert judged(LAW, filtered).num_violations == 0
    copy = copy_home(filtered, tmp_path / "home")
    needle = poison(copy)
    verdict = judged(LAW, copy)
    assert verdict.num_violations >= 1
    assert needle in str([dict(example) for example in verdict.examples]), verdict.examples


@pytest.mark.parametrize(
    ("key", "value", "needle"),
    [
        ("largest", "CC-MAIN-2099-10", "by which no row passes dumps, found CC-MAIN-2014-10 to CC-MAIN-2099-10"),
        ("row_group", 0, "row group 0: expected it read"),  # of another unit
        ("row_group", 3, "row group 3: expected it read"),
        ("rows", 11, "left out"),
    ],
)
def test_a_row_group_that_was_not_read_needs_its_proof(filtered: Built, tmp_path: Path, key, value, needle) -> None:
    copy = copy_home(filtered, tmp_path / "home")
    listing = copy.folder("raw_row_groups") / "units.json"
    content = json.loads(listing.read_bytes())
    (group,) = [
        group
        for unit in content
        for group in unit["counts"].get("row_groups_excluded", ())
        if (unit["counts"]["file"], group["row_group"]) == ("e_000.parquet", 1)
    ]
    group[key] = value
    listing.write_text(json.dumps(content), encoding="utf-8")
    seal_again(copy, listing.parent)
    verdict = judged(LAW, copy)
    assert verdict.num_violations >= 1
    assert needle in str([dict(example) for example in verdict.examples]), verdict.examples
