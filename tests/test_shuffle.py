import heapq

import naive_text
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline_assets.transforms.shuffle import ORDERS, order_documents, order_keys
from training_io.errors import RecipeError
from training_io.hashing import derive_seed

ids_strategy = st.sampled_from([bytes([b]) * 32 for b in range(4)]) | st.binary(min_size=32, max_size=32)
rows_strategy = st.lists(
    st.tuples(ids_strategy, st.tuples(*[st.integers(0, 3)] * 3)), max_size=15, unique_by=lambda row: row[1]
)


def arrays(rows):
    ids = np.frombuffer(b"".join(doc_id for doc_id, _ in rows), dtype=np.uint8).reshape(-1, 32)
    return ids, np.array([coordinate for _, coordinate in rows], dtype=np.int64).reshape(-1, 3)


@given(rows_strategy, st.integers(0, 5))
def test_shuffled_is_by_keyed_hash_then_doc_id_then_coordinate(rows, seed):
    key = derive_seed(seed, "shuffle")
    expected = sorted(range(len(rows)), key=lambda row: (naive_text.keyed_hash(rows[row][0], key), *rows[row]))
    assert order_documents(*arrays(rows), "shuffled", seed).tolist() == expected


@given(rows_strategy)
def test_source_is_by_coordinate(rows):
    assert order_documents(*arrays(rows), "source").tolist() == sorted(range(len(rows)), key=lambda row: rows[row][1])


@given(rows_strategy, st.sampled_from(ORDERS), st.integers(0, 15))
def test_sorted_runs_merge_into_the_whole_order(rows, order, cut):
    whole = [rows[row] for row in order_documents(*arrays(rows), order, 7)]
    runs = []
    for run in (rows[:cut], rows[cut:]):
        permutation = order_documents(*arrays(run), order, 7)
        keys = order_keys(*arrays(run), order, 7)[permutation].tolist()
        runs.append(zip(keys, [run[row] for row in permutation], strict=True))
    assert [row for _, row in heapq.merge(*runs, key=lambda pair: pair[0])] == whole


@given(rows_strategy, st.randoms(use_true_random=False))
def test_the_order_does_not_depend_on_how_rows_arrive(rows, random):
    arrived = random.sample(rows, len(rows))
    assert [arrived[row] for row in order_documents(*arrays(arrived))] == [
        rows[row] for row in order_documents(*arrays(rows))
    ]


def test_another_seed_gives_another_order():
    ids, coordinates = arrays([(bytes([b]) * 32, (0, 0, b)) for b in range(100)])
    first, second = (order_documents(ids, coordinates, "shuffled", seed).tolist() for seed in (1, 2))
    assert sorted(first) == sorted(second) == list(range(100))
    assert first != second
    assert first != list(range(100))


def test_golden_order():
    ids, coordinates = arrays([(bytes([b]) * 32, (0, 0, b)) for b in range(12)])
    assert order_documents(ids, coordinates, "shuffled", 1337).tolist() == GOLDEN


GOLDEN = [3, 9, 0, 5, 8, 4, 1, 2, 11, 10, 6, 7]


def test_an_unknown_order_is_refused():
    with pytest.raises(RecipeError, match="expected one of shuffled, source, found 'random'"):
        order_documents(*arrays([]), "random")
