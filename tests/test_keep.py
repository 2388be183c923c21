import naive_text
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pipeline_assets.transforms.keep import choose_kept

small = st.integers(0, 3)


@given(st.lists(st.tuples(small, small, small | st.just(2**64 - 1)), max_size=25))
def test_kept_is_the_first_by_pool_key_and_node(rows):
    labels, priorities, keys = zip(*rows, strict=True) if rows else ((), (), ())
    kept = choose_kept(
        np.array(labels, dtype=np.int64), np.array(priorities, dtype=np.uint16), np.array(keys, dtype=np.uint64)
    )
    assert kept.tolist() == naive_text.kept(labels, priorities, keys)


@given(st.lists(st.tuples(small, small, small), min_size=1, max_size=25))
def test_one_of_each_cluster_is_kept_and_it_is_a_member(rows):
    labels, priorities, keys = (np.array(column) for column in zip(*rows, strict=True))
    kept = choose_kept(labels, priorities, keys.astype(np.uint64))
    assert (labels[kept] == labels).all()
    assert (kept[kept] == kept).all()
    assert len(np.unique(kept)) == len(np.unique(labels))
