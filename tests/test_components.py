import naive_text
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline_assets.transforms.components import components_of_parts, connected_components


@st.composite
def graphs(draw):
    num_nodes = draw(st.integers(1, 25))
    node = st.integers(0, num_nodes - 1)
    return num_nodes, draw(st.lists(st.tuples(node, node), max_size=30))


@given(graphs(), st.randoms(use_true_random=False))
def test_labels_are_smallest_reachable_nodes_whatever_the_order_of_pairs(graph, random):
    num_nodes, pairs = graph
    expected = naive_text.components(num_nodes, pairs)
    shuffled = [pair[:: random.choice([1, -1])] for pair in random.sample(pairs, len(pairs))]
    for some in (pairs, shuffled):
        assert connected_components(num_nodes, np.array(some, dtype=np.int64).reshape(-1, 2)).tolist() == expected


@given(graphs(), st.lists(st.integers(0, 30), max_size=4))
def test_pairs_may_come_in_any_parts(graph, cuts):
    num_nodes, pairs = graph
    rows = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    parts = np.split(rows, sorted(cuts))
    assert components_of_parts(num_nodes, iter(parts)).tolist() == naive_text.components(num_nodes, pairs)


def test_no_parts_leave_every_node_alone():
    assert components_of_parts(3, iter([])).tolist() == [0, 1, 2]


@pytest.mark.parametrize("step", [1, -1])
def test_a_long_chain_is_one_component(step):
    nodes = np.arange(10_000)[::step]
    pairs = np.column_stack([nodes[:-1], nodes[1:]])
    assert not connected_components(10_000, pairs).any()


def test_no_pairs_and_no_nodes():
    nothing = np.empty((0, 2), dtype=np.int64)
    assert connected_components(3, nothing).tolist() == [0, 1, 2]
    assert connected_components(0, nothing).tolist() == []


def test_a_node_out_of_range_is_our_mistake():
    with pytest.raises(AssertionError):
        connected_components(3, np.array([[0, 3]]))
