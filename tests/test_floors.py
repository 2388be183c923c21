"""Floors: what each would remove, counted from the documents by hand; and nothing hostile in what is shown of them."""

from fractions import Fraction
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import small_corpus
from hypothesis import given
from hypothesis import strategies as st
from small_corpus import Built, build, sentences, write_corpus, write_recipe

from pipeline_assets.floors import FLOORS_NAME, NUM_SHORTEST, SHORTEST_NAME, floors_metadata
from pipeline_assets.splits import TABLE_NAME, seal_split_documents, split_plan
from pipeline_assets.stripes import units_in
from pipeline_assets.transforms.floors import FLOORS, measure_floors, shortest_documents

HOSTILE = "\x1b[31m<script>alert(1)</script>\n| \u202ecod.exe"
score_strategy = st.none() | st.sampled_from([float("nan"), float("inf")]) | st.floats(-5, 5)


def mean_of(scores: list[float | None]) -> float | None:
    known = [Fraction(score) for score in scores if score is not None and abs(score) < 1e300]
    return float(sum(known) / len(known)) if known else None


def counted(documents: list[tuple[int, float | None]], floor: int) -> dict[str, object]:
    """Documents below a floor and what they are, from (tokens, score) pairs."""
    below = [document for document in documents if document[0] < floor]
    return {
        "documents": len(below),
        "tokens": sum(tokens for tokens, _ in below),
        "mean_score": mean_of([score for _, score in below]),
        "mean_score_of_all": mean_of([score for _, score in documents]),
    }


def columns(documents: list[tuple[int, float | None]]) -> tuple[np.ndarray, np.ndarray]:
    """The pairs as the transform takes them."""
    scores = [np.nan if score is None else score for _, score in documents]
    return np.array([tokens for tokens, _ in documents], np.int64), np.array(scores, np.float64)


@given(st.lists(st.tuples(st.integers(1, 300), score_strategy), max_size=20), st.integers(0, 300))
def test_each_floor_is_what_is_counted_by_hand_in_any_order(documents, chosen):
    effects = list(measure_floors(*columns(documents), chosen))
    assert [effect.floor for effect in effects] == sorted({32, 64, 128, 256, chosen})
    assert [effect.floor for effect in effects if effect.is_chosen] == [chosen]
    for effect in effects:
        for name, value in counted(documents, effect.floor).items():
            assert getattr(effect, name) == (None if value is None else pytest.approx(value, rel=1e-12)), name
        assert effect.share_of_documents == effect.documents / max(len(documents), 1)
        assert effect.share_of_tokens == effect.tokens / max(sum(tokens for tokens, _ in documents), 1)
    assert list(measure_floors(*columns(documents[::-1]), chosen)) == effects


@given(st.lists(st.integers(1, 5), max_size=12), st.integers(1, 5))
def test_the_shortest_come_first_and_of_equal_ones_the_first(num_tokens, most):
    expected = sorted(range(len(num_tokens)), key=lambda row: (num_tokens[row], row))[:most]
    assert shortest_documents(np.array(num_tokens, np.int64), most).tolist() == expected


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small corpus, and a file whose rows have scores: short texts, a hostile one, one without a score."""
    folder = write_corpus(tmp_path_factory.mktemp("floors"))
    texts = [sentences(3_000 + number, 2 + number) for number in range(40)] + [HOSTILE]
    scores = [None if number == 7 else 2.5 + number / 64 for number in range(len(texts))]
    table = pa.table({"text": texts, "score": pa.array(scores, pa.float64())})
    pq.write_table(table, folder / "beta" / "scored.parquet", row_group_size=9)
    return folder


def built_with(corpus: Path, name: str, changes: dict[str, object]) -> Built:
    return build(write_recipe(corpus, changes, f"{name}.yaml"), corpus / name, "split_documents")


@pytest.fixture(scope="module")
def built(corpus: Path) -> Built:
    return built_with(corpus, "two", {"splits.min_tokens": 40})


def plan_folder(built: Built) -> Path:
    (plan,) = (built.home / "split_documents" / "plan").iterdir()
    return plan


def documents_of(built: Built) -> list[dict]:
    """Every kept document with the score that its row in the source file has."""
    scored = pq.read_table(built.recipe.parent / "beta" / "scored.parquet").to_pylist()
    score_of = {row["text"]: row["score"] for row in scored}
    tables = [built.stage.table(unit, TABLE_NAME) for unit in units_in(built.stage, built.refs["split_documents"])]
    return [{**row, "score": score_of.get(row["text"])} for row in pa.concat_tables(tables).to_pylist()]


def test_the_stored_floors_are_of_the_kept_documents(built: Built) -> None:
    documents = documents_of(built)
    pairs = [(document["num_tokens"], document["score"]) for document in documents]
    rows = pq.read_table(plan_folder(built) / FLOORS_NAME).to_pylist()
    assert [row["floor"] for row in rows] == sorted({*FLOORS, 40})
    assert [row["floor"] for row in rows if row["is_chosen"]] == [40]
    for row in rows:
        for name, value in counted(pairs, row["floor"]).items():
            assert row[name] == pytest.approx(value, rel=1e-12), name
    assert 0 < rows[0]["documents"] < rows[-1]["documents"] < len(documents) <= small_corpus.NUM_ROWS + 41
    assert len({row["mean_score"] for row in rows}) > 1


def test_what_the_chosen_floor_removed_is_counted(built: Built) -> None:
    removed = [document for document in documents_of(built) if document["num_tokens"] < 40]
    counts = built.refs["split_documents"].counts
    assert counts["unused_below_min_tokens"] == len(removed) > 0
    assert counts["unused_below_min_tokens_tokens"] == sum(document["num_tokens"] for document in removed)
    assert counts["unused_below_min_tokens_bytes"] == sum(len(document["text"].encode()) for document in removed)
    assert {document["split"] for document in removed} == {"unused"}
    assert {document["reason"] for document in removed} == {"below_min_tokens"}


def test_the_shortest_documents_are_shown_without_what_is_hostile_in_them(built: Built) -> None:
    documents = documents_of(built)
    rows = pq.read_table(plan_folder(built) / SHORTEST_NAME).to_pylist()
    lengths = sorted(document["num_tokens"] for document in documents)[:NUM_SHORTEST]
    assert [row["num_tokens"] for row in rows] == lengths
    by_id = {document["doc_id"]: document for document in documents}
    for row in rows:
        document = by_id[row["doc_id"]]
        assert all(row[name] == document[name] for name in ("num_tokens", "pool", "split", "reason", "score"))
        assert row["text"].isprintable()
    assert {row["reason"] for row in rows} == {"used", "below_min_tokens"}
    (shown,) = [row["text"] for row in rows if row["doc_id"] == small_corpus.doc_id(HOSTILE)]
    assert shown == r"\x1b[31m<script>alert(1)</script> | \u202ecod.exe"


def test_the_page_shows_both_tables(built: Built) -> None:
    upstream = {name: built.refs[name] for name in ("raw_row_groups", "lsh_clusters", "document_tokens")}
    parts = units_in(built.stage, built.refs["split_documents"])
    metadata = seal_split_documents(built.stage, parts, **upstream).metadata
    assert [record.data["floor"] for record in metadata["floors"].records] == sorted({*FLOORS, 40})
    assert len(metadata["shortest_documents"].records) == NUM_SHORTEST
    assert metadata["shortest_documents_rows"] == f"{NUM_SHORTEST} of {len(documents_of(built)):,}"
    removed = {record.data["reason"]: record.data for record in metadata["unused"].records}["below_min_tokens"]
    assert removed["tokens"] == built.refs["split_documents"].counts["unused_below_min_tokens_tokens"]
    assert floors_metadata(built.stage, split_plan(built.stage, **upstream)).keys() <= metadata.keys()


def test_floors_do_not_depend_on_stripes(corpus: Path, built: Built) -> None:
    changes = {"splits.min_tokens": 40, "reading.stripes": 3, "reading.stripes_read": 3}
    other = built_with(corpus, "three", changes)
    for name in (FLOORS_NAME, SHORTEST_NAME):
        assert (plan_folder(other) / name).read_bytes() == (plan_folder(built) / name).read_bytes()


def test_the_largest_scores_have_a_mean() -> None:
    largest = float(np.finfo(np.float64).max)
    (effect, *_) = measure_floors(np.array([1, 2]), np.array([largest, largest]), chosen=32)
    assert effect.mean_score == largest
