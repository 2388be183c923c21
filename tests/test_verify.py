"""Verified edges: the components of all pairs that share a key and are alike, at a bounded number of comparisons."""

import naive_clusters
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pipeline_assets.transforms.verify import MAX_COMPARED, MAX_ROUNDS, verified_edges

THRESHOLD = 0.5


def columns(rows):
    return np.array([key for key, _ in rows], np.uint64), np.array([node for _, node in rows], np.int64)


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), unique=True, max_size=30),
    st.sets(st.tuples(st.integers(0, 9), st.integers(0, 9))),
)
def test_small_groups_give_every_pair_that_shares_a_key_and_is_alike(rows, alike):
    def similarity(pairs):
        assert [tuple(pair) for pair in pairs.tolist()] == sorted({tuple(pair) for pair in pairs.tolist()})
        return np.array([0.5 if tuple(pair) in alike else 0.499 for pair in pairs.tolist()])

    edges, stats = verified_edges(*columns(rows), similarity, THRESHOLD)
    candidates = {(a, b) for key, a in rows for other, b in rows if key == other != 0 and a < b}
    assert [tuple(edge) for edge in edges.tolist()] == sorted(candidates & alike)
    assert (stats.num_compared, stats.num_verified, stats.num_left) == (len(candidates), len(candidates & alike), 0)


@given(st.lists(st.integers(0, 5), min_size=MAX_COMPARED + 1, max_size=60), st.randoms(use_true_random=False))
def test_large_groups_fall_into_their_kinds(kinds, shuffler):
    rows = [(7, node) for node in range(len(kinds))]
    shuffler.shuffle(rows)

    def similarity(pairs):
        return np.array([float(kinds[a] == kinds[b]) for a, b in pairs.tolist()])

    edges, stats = verified_edges(*columns(rows), similarity, THRESHOLD)
    found = naive_clusters.components(len(kinds), [tuple(edge) for edge in edges.tolist()])
    expected = [{other for other, kind in enumerate(kinds) if kind == kinds[node]} for node in range(len(kinds))]
    assert [found[node] for node in range(len(kinds))] == expected
    assert stats.num_left == 0
    assert stats.num_compared <= MAX_ROUNDS * len(kinds)


@given(st.integers(MAX_COMPARED + 1, 50), st.data())
def test_large_groups_give_the_components_of_any_likeness(num_nodes, data):
    """Being alike is not transitive: chains are followed, whatever the order of the rows."""
    node = st.integers(0, num_nodes - 1)
    alike = {tuple(sorted(pair)) for pair in data.draw(st.sets(st.tuples(node, node), max_size=80))}
    keys = data.draw(st.permutations([3] * num_nodes + [5] * num_nodes))
    numbers = {3: iter(range(num_nodes)), 5: iter(range(num_nodes))}
    rows = [(key, next(numbers[key])) for key in keys]

    def similarity(pairs):
        return np.array([float(tuple(pair) in alike) for pair in pairs.tolist()])

    edges, stats = verified_edges(*columns(rows), similarity, THRESHOLD)
    assert {tuple(edge) for edge in edges.tolist()} <= alike
    found = naive_clusters.components(num_nodes, [tuple(edge) for edge in edges.tolist()])
    assert found == naive_clusters.components(num_nodes, alike)
    assert stats.num_left == 0


def test_a_group_of_strangers_is_given_up_after_so_many_rounds():
    num_nodes = 10_000
    rows = [(3, node) for node in range(num_nodes)]
    edges, stats = verified_edges(*columns(rows), lambda pairs: np.zeros(len(pairs)), THRESHOLD)
    assert not len(edges)
    assert stats.num_left == num_nodes - MAX_ROUNDS
    assert stats.num_compared < MAX_ROUNDS * num_nodes


def test_nothing_is_compared_where_nothing_is_shared():
    def similarity(pairs):
        raise AssertionError(pairs)

    for rows in ([], [(5, 1)], [(5, 1), (6, 2)], [(0, 1), (0, 2)]):
        edges, stats = verified_edges(*columns(rows), similarity, THRESHOLD)
        assert edges.shape == (0, 2)
        assert stats.num_compared == 0
