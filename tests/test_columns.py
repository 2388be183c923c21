"""Documents as columns: found and numbered as Python's dictionaries would, and a few tens of bytes a document.

Memory is counted by what Python and numpy allocate, as the difference between a corpus and one of three times its
size, so that what does not depend on the number of documents does not count.
"""

import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import naive_text
import numpy as np
import pyarrow as pa
import pytest
import small_corpus
from hypothesis import given
from hypothesis import strategies as st
from small_corpus import Built, judged

from asset_checks.columns import count_rows, find_rows, group_numbers, id_rows, named, run_starts, sorted_rows
from asset_checks.components import NO_VALUE, near_components
from asset_checks.decisions import side_by_side
from asset_checks.leaks import _in_two_splits
from pipeline_assets.rounds import _new_documents

IDS = st.lists(
    st.integers(0, 6).map(lambda number: bytes(31) + bytes([number]) if number % 2 else bytes([number] * 32))
)
SIZES = (3_000, 9_000)  # from where on a unit's signatures are mapped, not read


def assert_found(held: list[bytes], wanted: list[bytes]) -> None:
    rows, names = id_rows(held), id_rows(wanted)
    by_bytes = sorted_rows(rows)
    last = {doc_id: row for row, doc_id in enumerate(held)}
    assert find_rows(rows, by_bytes, names).tolist() == [last.get(doc_id, -1) for doc_id in wanted]
    assert count_rows(rows, by_bytes, names).tolist() == [held.count(doc_id) for doc_id in wanted]


def assert_numbered(held: list[bytes]) -> None:
    rows, distinct = id_rows(held), sorted({*held})
    assert group_numbers(rows).tolist() == [distinct.index(doc_id) for doc_id in held]
    assert run_starts(rows, sorted_rows(rows)).sum() == len(distinct)


@given(IDS, IDS)
def test_rows_are_found_as_in_a_dictionary(held: list[bytes], wanted: list[bytes]) -> None:
    assert_found(held, wanted)


@given(IDS)
def test_equal_rows_have_one_number(held: list[bytes]) -> None:
    assert_numbered(held)


def test_blocks_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asset_checks.columns.AT_ONCE", 3)
    generator = random.Random(5)
    for size in range(20):
        held = [bytes([generator.randrange(4)] * 32) for _ in range(size)]
        assert_numbered(held)
        assert_found(held, [bytes([number] * 32) for number in range(size)])


@given(st.lists(st.lists(st.sampled_from(["one", "two", "", None]))))
def test_names_are_numbered_in_order(columns: list[list[str | None]]) -> None:
    numbers, names = named(pa.chunked_array([column], pa.string()) for column in columns)
    assert [names[number] for number in numbers] == [name or "" for column in columns for name in column]
    assert names == sorted({*names})


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2))))
def test_values_in_two_splits_are_named_by_their_first_rows(rows: list[tuple[int, int]]) -> None:
    values = id_rows(bytes([value]) * 32 for value, _ in rows)
    found, count = _in_two_splits("document", values, np.array([split for _, split in rows], np.int8))
    splits: dict[int, set[int]] = {}
    for value, split in rows:
        splits.setdefault(value, set()).add(split)
    wanted = {value: sorted(("train", "validation", "test")[split] for split in some) for value, some in splits.items()}
    assert count == len(splits)
    assert found == [
        f"document {bytes([value] * 8).hex()} is in {' and '.join(names)}"
        for value, names in wanted.items()
        if len(names) > 1
    ]


@given(st.lists(IDS))
def test_a_document_is_new_in_the_first_round_that_holds_it(rounds: list[list[bytes]]) -> None:
    seen: set[bytes] = set()
    wanted = []
    for held in rounds:
        wanted.append(
            [(doc_id, row) for row, doc_id in enumerate(held) if doc_id not in seen and doc_id not in held[:row]]
        )
        seen.update(held)
    found = _new_documents((id_rows(held), np.arange(len(held))) for held in rounds)
    assert [[(doc_id.tobytes(), row) for doc_id, row in zip(*new, strict=True)] for new in found] == wanted


@given(st.lists(st.tuples(st.integers(0, 1 << 62), st.integers(0, 255), st.booleans())))
def test_columns_lie_side_by_side(rows: list[tuple[int, int, bool]]) -> None:
    """As the bytes of each row's values, where there is no row too."""
    numbers, ids = np.array([row[0] for row in rows], np.int64), id_rows(bytes([row[1]]) * 32 for row in rows)
    found = side_by_side(numbers, ids, np.array([row[2] for row in rows], np.bool_))
    assert found.shape == (len(rows), 41)
    assert [row.tobytes() for row in found] == [
        number.to_bytes(8, "little") + bytes([value]) * 32 + bytes([flag]) for number, value, flag in rows
    ]


SIGNED = st.tuples(st.integers(0, 9), st.integers(0, 1), *[st.sampled_from([0, 1, NO_VALUE])] * 4)


@given(st.lists(st.lists(SIGNED), min_size=1).filter(any))
def test_components_of_bands_are_those_of_a_search_from_row_to_row(units: list[list[tuple[int, ...]]]) -> None:
    """Rows are text, crawl and a signature of two bands of two values; units of any number of rows."""
    rows = [row for unit in units for row in unit]
    doc_ids = id_rows(bytes([text]) * 32 for text, *_ in rows)
    crawls = np.array([[crawl] for _, crawl, *_ in rows], np.uint8)
    signatures = [np.array([row[2:] for row in unit], np.uint32).reshape(-1, 4) for unit in units]

    def share(left: tuple[int, ...], right: tuple[int, ...]) -> bool:
        are_worded = {*left[2:]} != {NO_VALUE} != {*right[2:]}
        return left[0] == right[0] or (are_worded and (left[2:4] == right[2:4] or left[4:] == right[4:]))

    pairs = [(a, b) for b in range(len(rows)) for a in range(b) if share(rows[a], rows[b])]
    inside = [(a, b) for a, b in pairs if rows[a][1] == rows[b][1]]
    for wanted, apart in ((pairs, None), (inside, crawls)):
        labels = near_components(doc_ids, signatures, 2, apart)
        firsts = np.unique(labels, return_index=True)[1]
        assert firsts[labels].tolist() == naive_text.components(len(rows), wanted)


def peak_bytes(work: Callable[[], object]) -> int:
    """The most that Python and numpy hold at once while some work is done."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_rounds_hold_columns() -> None:
    generator = np.random.default_rng(3)
    rounds = [(generator.integers(0, 256, (1_000, 32), np.uint8), np.arange(1_000)) for _ in range(30)]
    assert peak_bytes(lambda: list(_new_documents(iter(rounds)))) < 130 * 30_000


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> list[Built]:
    """Two corpora of short texts, some of them twice or nearly so."""
    return [build(tmp_path_factory.mktemp("columns"), size) for size in SIZES]


def build(folder: Path, num_documents: int) -> Built:
    generator = random.Random(num_documents)
    vocabulary = small_corpus.sentences(1, 3_000).split()
    texts = [" ".join(generator.choices(vocabulary, k=12)) for _ in range(num_documents)]
    for row in range(0, num_documents, 10):
        texts[row] = texts[row + 1] + " again" * (row % 20 == 0)
    small_corpus.write_rows(folder / "alpha" / "texts.parquet", [{"text": text} for text in texts], 2_000)
    (folder / "held_out.txt").write_text("\n".join(texts[5:9]), encoding="utf-8")
    changes = {
        "source.pools": [{"name": "alpha", "path": "alpha"}],
        "reading": {"stripes": 1, "stripes_read": 1, "unit_megabytes": 1},
        "splits.min_tokens": 5,
    }
    return small_corpus.build(small_corpus.write_recipe(folder, changes), folder / "home", upto="token_shards")


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("no_document_is_in_two_splits", 200),
        ("no_cluster_is_in_two_splits", 200),
        ("no_reference_text_is_in_validation", 200),
        ("shards_hold_every_document_once", 300),
        ("reference_texts_are_found", 200),
        ("every_removal_has_evidence", 300),
        ("every_row_has_one_decision", 260),
        ("one_document_is_kept_per_cluster", 200),
        ("clusters_are_connected_components", 220),
        ("removal_is_plausible", 110),
    ],
)
def test_a_law_over_the_whole_corpus_holds_columns(corpora: list[Built], name: str, most: int) -> None:
    """Each corpus is one unit, so what is held of one unit alone counts in."""
    assert judged(name, corpora[0]).num_violations == 0  # and what is loaded once is loaded
    small, large = (peak_bytes(lambda built=built: judged(name, built)) for built in corpora)
    assert (large - small) / (SIZES[1] - SIZES[0]) < most
