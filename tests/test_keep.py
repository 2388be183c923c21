import naive_text
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline_assets.transforms.keep import choose_kept, preferences

small = st.integers(0, 3)


@given(st.lists(st.tuples(small, small, small | st.just(2**64 - 1)), max_size=25))
def test_kept_is_the_first_by_preferences_and_node(rows):
    labels, priorities, keys = zip(*rows, strict=True) if rows else ((), (), ())
    preferred = (np.array(priorities, dtype=np.uint16), np.array(keys, dtype=np.uint64))
    kept = choose_kept(np.array(labels, dtype=np.int64), preferred)
    assert kept.tolist() == naive_text.kept(labels, priorities, keys)


@given(st.lists(st.tuples(small, small, small), min_size=1, max_size=25))
def test_one_of_each_cluster_is_kept_and_it_is_a_member(rows):
    labels, priorities, keys = (np.array(column) for column in zip(*rows, strict=True))
    kept = choose_kept(labels, (priorities, keys.astype(np.uint64)))
    assert (labels[kept] == labels).all()
    assert (kept[kept] == kept).all()
    assert len(np.unique(kept)) == len(np.unique(labels))


@pytest.mark.parametrize(("rule", "kept"), [("pool_priority", 1), ("random", 2), ("longest", 3), ("highest_score", 0)])
def test_each_rule_prefers_its_own(rule, kept):
    columns = {
        "pools": np.array([1, 0, 2, 0]),
        "text_bytes": np.array([10, 20, 30, 40]),
        "scores": np.array([3.5, np.nan, 3.25, -1.0]),
        "keys": np.array([7, 5, 0, 2**64 - 1], np.uint64),
    }
    assert choose_kept(np.zeros(4, np.int64), preferences(rule, **columns)).tolist() == [kept] * 4


@pytest.mark.parametrize("rule", ["longest", "highest_score"])
def test_equals_are_settled_by_the_keyed_hash(rule):
    columns = {"pools": np.arange(3), "text_bytes": np.full(3, 9), "scores": np.full(3, np.nan)}
    preferred = preferences(rule, **columns, keys=np.array([4, 3, 9], np.uint64))
    assert choose_kept(np.zeros(3, np.int64), preferred).tolist() == [1] * 3
