"""What was sampled: every number counted by hand, whatever the units; nothing hostile in what is shown."""

import random
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import naive_sampled as naive
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import small_corpus
from hypothesis import example, given
from hypothesis import strategies as st
from small_corpus import Built, build, sentences, write_corpus, write_recipe

from pipeline_assets.pictures import MAX_PICTURE_BYTES
from pipeline_assets.sampled import (
    COLUMNS_NAME,
    EFFECTS_NAME,
    FILES_NAME,
    NAMES_NAME,
    THRESHOLDS_NAME,
    VALUES_NAME,
)
from pipeline_assets.sampled_page import PICTURES, write_pictures
from pipeline_assets.source import seal_rows
from pipeline_assets.stripes import units_in
from pipeline_assets.transforms.sampled import (
    MAX_THRESHOLDS,
    NAME_CHARACTERS,
    PERCENTS,
    count_names,
    count_values,
    exact_sum,
    grid,
    measure_thresholds,
    merge_counts,
    merge_summaries,
    on_grid,
    percentiles,
    shown_name,
    summarise,
)
from resources.tables import write_table

HOSTILE = "$\\frac{\x1b[31m<script>alert(1)</script>\n| \u202egnp.exe 中" + "x" * 5_000
TABLES = (COLUMNS_NAME, FILES_NAME, NAMES_NAME, THRESHOLDS_NAME, VALUES_NAME, EFFECTS_NAME)

finite = st.floats(allow_nan=False, allow_infinity=False)
value_strategy = st.one_of(
    finite.filter(lambda value: abs(value) < 1e12),
    st.integers(-10, 10**6).map(float),
    st.integers(0, 400).map(lambda number: number / 64),
    st.sampled_from([0.3, 2.9, 2.91, 0.0001, 0.00009, -0.00001, -0.0001, 9_999.0, 10_001.0, -0.0, 1e-320]),
)
rows_strategy = st.lists(st.tuples(value_strategy, st.integers(1, 9)), max_size=30)


def arrays(rows: list[tuple[float, int]]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([value for value, _ in rows], np.float64), np.array([size for _, size in rows], np.int64)


def as_rows(rows: list[tuple[float, int]]) -> list[dict[str, Any]]:
    return [{"text": "x" * size, "score": value} for value, size in rows]


@given(value_strategy)
def test_a_value_is_counted_at_the_largest_decimal_of_four_digits_not_above_it(value: float) -> None:
    (found,) = on_grid(np.array([value]))
    assert found == naive.four_digits(value)
    assert found <= value
    assert not np.signbit(found) or found < 0


def test_the_grid_rises_and_a_value_beyond_it_is_counted_at_its_end() -> None:
    assert (np.diff(grid()) > 0).all()
    ends = np.array([-1e300, 1e300])
    assert on_grid(ends).tolist() == [grid()[0], grid()[-1]] == [-9.999e12, 9.999e12]


@given(rows_strategy, st.integers(0, 30), st.randoms(use_true_random=False))
def test_values_are_counted_as_by_hand_and_units_add_up(rows, cut, order) -> None:
    values, sizes = arrays(rows)
    whole = count_values(values, sizes)
    expected = naive.values_of(as_rows(rows), "score")
    assert [tuple(row.values()) for row in whole.to_pylist()] == [(at, *expected[at]) for at in sorted(expected)]
    parts = [count_values(*(column[part] for column in (values, sizes))) for part in (slice(cut), slice(cut, None))]
    order.shuffle(parts)
    assert merge_counts(parts).equals(whole)


@given(st.lists(finite, max_size=20), st.integers(0, 20))
def test_sums_are_exact_however_the_values_are_grouped(values: list[float], cut: int) -> None:
    expected = sum(map(Fraction, values), Fraction())
    assert exact_sum(np.array(values, np.float64)) == expected
    parts = [summarise(np.array(part, np.float64)) for part in (values[cut:], values[:cut])]
    merged = merge_summaries(parts)
    assert (merged.documents, merged.total) == (len(values), expected)
    assert (merged.smallest, merged.largest) == ((min(values), max(values)) if values else (None, None))


@given(rows_strategy.filter(bool))
def test_percentiles_are_those_of_the_sorted_values(rows) -> None:
    counted = count_values(*arrays(rows))
    found = percentiles(*(np.asarray(counted.column(name)) for name in ("value", "documents")))
    assert found == [naive.percentile(as_rows(rows), "score", percent) for percent in PERCENTS]


@given(rows_strategy, st.sampled_from([0.0, 1.0]))
@example([(0.0, 1), (-1e-146, 1)], 0.0)  # no number of the grid lies between
def test_thresholds_are_few_round_and_count_what_they_keep_exactly(rows, finest) -> None:
    counted = count_values(*arrays(rows))
    effects = list(measure_thresholds(*(np.asarray(column) for column in counted.columns), finest=finest))
    assert len(effects) <= MAX_THRESHOLDS
    for effect in effects:
        assert (effect.documents, effect.text_bytes) == naive.kept_at(as_rows(rows), "score", effect.threshold)
        assert effect.threshold == naive.four_digits(effect.threshold)
        assert not finest or effect.threshold % 1 == 0
    assert [effect.threshold for effect in effects] == sorted({effect.threshold for effect in effects})
    if counted.num_rows == 1 and not finest:
        assert [effect.documents for effect in effects] == [len(rows)]


def test_the_thresholds_of_an_educational_score_are_halves() -> None:
    scores = np.array([2.5 + number / 64 for number in range(160)])
    counted = count_values(scores, np.ones(160, np.int64))
    effects = list(measure_thresholds(*(np.asarray(column) for column in counted.columns)))
    assert [effect.threshold for effect in effects] == [3.0, 3.5, 4.0, 4.5]
    assert [effect.documents for effect in effects] == [128, 96, 64, 32]


names_strategy = st.lists(
    st.tuples(st.none() | st.sampled_from(["a", "", "a\nb", "a\\nb", HOSTILE, HOSTILE + "y"]), st.integers(1, 9))
)


@given(names_strategy)
def test_names_are_counted_apart_and_shown_without_what_is_hostile_in_them(rows) -> None:
    counted = count_names(
        pa.array([name for name, _ in rows], pa.string()), np.array([size for _, size in rows], np.int64)
    )
    expected = naive.tally([{"text": "x" * size, "dump": name} for name, size in rows], lambda row: row["dump"])
    shown = {None if name is None else shown_name(name): counts for name, counts in expected.items()}
    assert len(shown) == len(expected)
    assert {row["name"]: (row["documents"], row["text_bytes"]) for row in counted.to_pylist()} == shown
    for name in filter(None, shown):
        assert name.isprintable()
        assert len(name) <= NAME_CHARACTERS + len("… #01234567")


@pytest.mark.parametrize("name", ["CC-MAIN-2024-10", "en", "中文", ""])
def test_a_plain_name_is_shown_as_it_is(name: str) -> None:
    assert shown_name(name) == name


EDU_DUMPS = [*(f"CC-MAIN-{year}-10" for year in range(2013, 2019)), None, HOSTILE]
FILES = {
    "edu": {"e_000": range(0, 40), "deep/e_001": range(40, 75)},
    "web": {"w_000": range(100, 130)},
}


def row_of(number: int) -> dict[str, Any]:
    """A row as FineWeb-Edu has them; some texts are null or empty, some values are missing or no number."""
    generator = random.Random(number)
    score = 2.5 + generator.randrange(160) / 64
    odd = {3: None, 11: float("nan"), 12: float("inf")}
    return {
        "text": {5: None, 6: ""}.get(number, sentences(number, generator.randrange(2, 40)) + "é中"),
        "dump": EDU_DUMPS[number // 10 % len(EDU_DUMPS)],
        "language": [None, "en", "en", "fr"][number % 4],
        "language_score": 0.65 + generator.randrange(35) / 100,
        "score": odd.get(number, score),
        "int_score": None if number == 3 else round(score),
        "date": "not in FineWeb-Edu",
    }


COLUMNS_OF_POOL = {
    "edu": ["text", "dump", "language", "language_score", "score", "int_score"],
    "web": ["text", "date"],
}
KINDS = {"language_score": pa.float64(), "score": pa.float32(), "int_score": pa.int64()}


def rows_by_file() -> dict[str, dict[str, list[dict[str, Any]]]]:
    """What the source gives, by pool and file."""
    return {
        pool: {
            file: [{name: row_of(number)[name] for name in COLUMNS_OF_POOL[pool]} for number in numbers]
            for file, numbers in files.items()
        }
        for pool, files in FILES.items()
    }


def write_scored(folder: Path) -> Path:
    """The small corpus and, beside its pools, one as FineWeb-Edu is and one of nothing but texts and dates."""
    write_corpus(folder)
    for pool, files in rows_by_file().items():
        for file, rows in files.items():
            names = COLUMNS_OF_POOL[pool]
            columns = {name: pa.array([row[name] for row in rows], KINDS.get(name, pa.string())) for name in names}
            path = folder / pool / f"{file}.parquet"
            path.parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(pa.table(columns), path, row_group_size=10, write_page_checksum=True)
    return folder


POOLS = [{"name": name, "path": name} for name in ("alpha", "edu", "web")]


def recipe_with(folder: Path, name: str, changes: Mapping[str, Any] | None = None) -> Path:
    return write_recipe(folder, {"source.pools": POOLS, **(changes or {})}, f"{name}.yaml")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_scored(tmp_path_factory.mktemp("sampled"))


@pytest.fixture(scope="module")
def built(corpus: Path) -> Built:
    return build(recipe_with(corpus, "two"), corpus / "two", "raw_row_groups")


def table(built: Built, name: str) -> list[dict[str, Any]]:
    return pq.read_table(built.folder("raw_row_groups") / name).to_pylist()


def pool_rows(pool: str) -> list[dict[str, Any]]:
    return [row for rows in rows_by_file()[pool].values() for row in rows]


def test_every_column_is_summarised_and_what_the_source_lacks_is_absent(built: Built) -> None:
    rows = {(row["pool"], row["column"]): row for row in table(built, COLUMNS_NAME)}
    names = ["dump", "language", "language_score", "score", "int_score", "date", "characters", "bytes"]
    assert list(rows) == [(pool, name) for pool in ("alpha", "edu", "web") for name in names]
    for pool in ("edu", "web"):
        documents = naive.usable(pool_rows(pool))
        for name in names:
            row = rows[pool, name]
            is_there = name in (*COLUMNS_OF_POOL[pool], "characters", "bytes")
            assert (row["files"], row["files_without"]) == (
                (len(FILES[pool]), 0) if is_there else (0, len(FILES[pool]))
            )
            if not is_there or name == "date":
                assert {row[key] for key in row if key not in ("pool", "column", "files", "files_without")} == {None}
                continue
            is_named = name in ("dump", "language")
            known = [one for one in documents if (one[name] if is_named else naive.number(one, name)) is not None]
            assert (row["with_value"], row["without_value"]) == (len(known), len(documents) - len(known)), (pool, name)
            if is_named:
                continue
            assert row["mean"] == naive.mean_of(documents, name)
            values = [naive.number(one, name) for one in known]
            assert (row["smallest"], row["largest"]) == (min(values), max(values))
            assert [row[f"p{percent}"] for percent in PERCENTS] == [
                naive.percentile(documents, name, percent) for percent in PERCENTS
            ]
    assert rows["edu", "score"]["without_value"] == 3
    assert rows["edu", "dump"]["without_value"] > 0


def test_values_and_names_are_counted_by_pool_and_file(built: Built) -> None:
    values = table(built, VALUES_NAME)
    for name in ("score", "int_score", "language_score", "characters", "bytes"):
        found = {
            row["value"]: (row["documents"], row["text_bytes"])
            for row in values
            if (row["pool"], row["column"]) == ("edu", name)
        }
        assert found == naive.values_of(pool_rows("edu"), name), name
    assert {row["column"] for row in values if row["pool"] == "web"} == {"characters", "bytes"}
    names = table(built, NAMES_NAME)
    for file, rows in rows_by_file()["edu"].items():
        for column in ("dump", "language"):
            expected = naive.tally(rows, lambda row, column=column: row[column] and shown_name(row[column]))
            found = {
                row["name"]: (row["documents"], row["text_bytes"])
                for row in names
                if (row["pool"], row["file"], row["column"]) == ("edu", f"{file}.parquet", column)
            }
            assert found == expected
    assert not [row for row in names if row["pool"] == "web"]


def test_what_was_read_of_each_file_and_its_crawls(built: Built) -> None:
    rows = {(row["pool"], row["file"]): row for row in table(built, FILES_NAME)}
    for pool, files in rows_by_file().items():
        for file, source in files.items():
            row = rows[pool, f"{file}.parquet"]
            groups = -(-len(source) // 10)
            assert (row["row_groups"], row["row_groups_read"], row["row_groups_excluded"]) == (groups, groups, 0)
            documents = naive.usable(source)
            assert (row["documents"], row["text_bytes"]) == (len(documents), sum(map(naive.size, documents)))
            crawls = {one["dump"] for one in documents} - {None} if pool == "edu" else None
            assert row["num_dumps"] == (None if crawls is None else len(crawls))
    assert [row["num_dumps"] for row in rows.values()] == [2, 2, 3, 4, None]


def test_thresholds_of_each_score_are_those_of_the_rows(built: Built) -> None:
    rows = table(built, THRESHOLDS_NAME)
    documents = naive.usable(pool_rows("edu"))
    assert {(row["pool"], row["column"]) for row in rows} == {("edu", name) for name in KINDS}
    assert [row["threshold"] for row in rows if row["column"] == "int_score"] == [3.0, 4.0, 5.0]
    known = [{**row, "score": naive.number(row, "score")} for row in documents]  # a curve has no place for infinity
    for row in rows:
        assert (row["documents"], row["text_bytes"]) == naive.kept_at(known, row["column"], row["threshold"])
        assert row["share_of_documents"] == row["documents"] / len(documents)
        assert row["share_of_bytes"] == row["text_bytes"] / sum(map(naive.size, documents))
        assert not row["is_chosen"]
    assert table(built, EFFECTS_NAME) == []


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("one", {"reading.stripes": 1, "reading.stripes_read": 1}),
        ("three", {"reading.stripes": 3, "reading.stripes_read": 3}),
    ],
)
def test_nothing_that_is_shown_depends_on_stripes(
    corpus: Path, built: Built, name: str, changes: Mapping[str, Any]
) -> None:
    other = build(recipe_with(corpus, name, changes), corpus / name, "raw_row_groups")
    for file in (*TABLES, *(f"{picture}.png" for picture in PICTURES)):
        first, second = (one.folder("raw_row_groups") / file for one in (built, other))
        assert first.read_bytes() == second.read_bytes(), file


def test_a_sample_of_stripes_counts_what_it_read(corpus: Path) -> None:
    changes = {"reading.stripes": 2, "reading.stripes_read": 1}
    half = build(recipe_with(corpus, "half", changes), corpus / "half", "raw_row_groups")
    source = [
        row
        for rows in rows_by_file()["edu"].values()
        for start in range(0, len(rows), 20)
        for row in rows[start : start + 10]
    ]
    rows = [row for row in table(half, FILES_NAME) if row["pool"] == "edu"]
    assert [(row["row_groups"], row["row_groups_read"]) for row in rows] == [(4, 2), (4, 2)]
    assert sum(row["documents"] for row in rows) == len(naive.usable(source))


def page(built: Built) -> Mapping[str, Any]:
    return seal_rows(built.stage, units_in(built.stage, built.refs["raw_row_groups"])).metadata


def test_the_page_shows_the_tables_and_pictures(built: Built) -> None:
    shown = page(built)
    assert (shown["dumps"], shown["fewest_dumps_of_a_file"], shown["most_dumps_of_a_file"]) == (9, 2, 4)
    crawls = [record.data for record in shown["sampled_dumps"].records]
    expected = naive.tally(
        [*pool_rows("edu"), *(row for rows in small_corpus.corpus_rows()["alpha"].values() for row in rows)],
        lambda row: "(none)" if row["dump"] is None else shown_name(row["dump"]),
    )
    assert {row["name"]: (row["documents"], row["text_bytes"]) for row in crawls} == expected
    assert sum(row["share_of_documents"] for row in crawls) == pytest.approx(1)
    assert {row["name"]: row["files"] for row in crawls}["crawl-0"] == 2
    assert all(
        row["name"].isprintable() and "<script>" not in row["name"].replace("<script>alert(1)", "") for row in crawls
    )
    scores = {record.data["int_score"]: record.data["documents"] for record in shown["sampled_int_scores"].records}
    assert scores == {int(at): counts[0] for at, counts in naive.values_of(pool_rows("edu"), "int_score").items()}
    assert {"sampled_columns", "sampled_files", "sampled_languages", "score_thresholds"} <= shown.keys()
    assert shown["filters"].text == "the recipe has no reading.filters"
    for name in PICTURES:
        assert shown[name].md_str.startswith("![")
        assert 0 < (built.folder("raw_row_groups") / f"{name}.png").stat().st_size <= MAX_PICTURE_BYTES


def test_pictures_of_many_pools_and_strange_names_stay_small(tmp_path: Path) -> None:
    generator = random.Random(1)
    pools = [f"pool_{'x' * 24}_{number}" for number in range(10)]
    curves = [
        {"pool": pool, "column": column, "value": 1.1**at, "documents": generator.randrange(1, 10**9), "text_bytes": 1}
        for pool in pools
        for column in ("characters", "score")
        for at in range(200)
    ]
    names = [
        {"pool": pool, "file": "f", "column": "dump", "documents": generator.randrange(1, 10**9), "text_bytes": 1}
        | {"name": "".join(chr(generator.randrange(0x4E00, 0x9000)) for _ in range(40))}
        for pool in pools
        for _ in range(9)
    ]
    files = [
        {"pool": pool, "file": f"$f$_{'x' * 90}_{number}", "documents": 1, "num_dumps": generator.randrange(99)}
        for pool in pools
        for number in range(9)
    ]
    for name, rows in ((VALUES_NAME, curves), (NAMES_NAME, names), (FILES_NAME, files)):
        write_table(pa.Table.from_pylist(rows), tmp_path / name)
    write_pictures(tmp_path)
    for name in PICTURES:
        assert 0 < (tmp_path / f"{name}.png").stat().st_size <= MAX_PICTURE_BYTES


def test_a_source_of_texts_alone_shows_its_lengths_and_what_it_lacks(corpus: Path) -> None:
    changes = {
        "source.pools": [{"name": "web", "path": "web"}],
        "references": [{**small_corpus.RECIPE["references"][0]}],
    }
    plain = build(recipe_with(corpus, "plain", changes), corpus / "plain", "raw_row_groups")
    shown = page(plain)
    assert "dumps" not in shown
    assert "column dump" in shown["sampled_dumps"].text
    assert "column language" in shown["sampled_languages"].text
    assert "int_score" in shown["sampled_int_scores"].text
    assert "language_score, score or int_score" in shown["score_thresholds"].text
    assert {"kept_by_score", "text_lengths", "documents_by_dump", "dumps_by_file"} & shown.keys() == {"text_lengths"}


def test_real_rows_are_counted_as_by_hand(sample_data: Path, tmp_path: Path) -> None:
    pools = [pool.name for pool in sorted((sample_data / "sample").iterdir()) if pool.is_dir()]
    changes = {
        "source.pools": [{"name": name, "path": str(sample_data / "sample" / name)} for name in pools],
        "reading.unit_megabytes": 2,
        "references": [small_corpus.RECIPE["references"][0]],
    }
    real = build(write_recipe(tmp_path, changes), tmp_path / "home", "raw_row_groups")
    columns = {(row["pool"], row["column"]): row for row in table(real, COLUMNS_NAME)}
    for pool in pools:
        (path,) = (sample_data / "sample" / pool).glob("*.parquet")
        rows = pq.read_table(path, columns=["text", "dump", "language", "language_score"]).to_pylist()
        for name in ("language_score", "characters", "bytes"):
            row = columns[pool, name]
            assert (row["with_value"], row["mean"]) == (len(rows), naive.mean_of(rows, name))
            assert row["p50"] == naive.percentile(rows, name, 50)
        assert columns[pool, "score"]["files"] == 0
        assert columns[pool, "date"]["files"] == 1
        found = {
            row["name"]: row["documents"]
            for row in table(real, NAMES_NAME)
            if (row["pool"], row["column"]) == (pool, "language")
        }
        assert found == {name: counts[0] for name, counts in naive.tally(rows, lambda row: row["language"]).items()}
