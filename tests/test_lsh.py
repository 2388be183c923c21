import itertools

import naive_text
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline_assets.transforms.components import connected_components
from pipeline_assets.transforms.lsh import (
    NO_KEY,
    band_keys,
    bucket_bounds,
    candidate_pairs,
    collision_probability,
    shared_bands,
    star_edges,
    unique_pairs,
)
from pipeline_assets.transforms.minhash import MinHashParams, sign_documents

PARAMS = MinHashParams(num_perm=6, num_bands=3, rows_per_band=2)

signatures_strategy = st.lists(st.lists(st.integers(0, 2), min_size=6, max_size=6), max_size=12).map(
    lambda rows: np.array(rows, dtype=np.uint32).reshape(-1, 6)
)
keys_strategy = st.lists(st.integers(0, 4), max_size=20)


def bands_in_common(left, right):
    return sum((left[start : start + 2] == right[start : start + 2]).all() for start in (0, 2, 4))


@given(signatures_strategy)
def test_keys_are_equal_exactly_where_bands_are(signatures):
    keys = band_keys(signatures, PARAMS)
    assert keys.shape == (len(signatures), 3)
    assert (keys != NO_KEY).all()
    for left in range(len(signatures)):
        for right in range(left):
            num_equal = bands_in_common(signatures[left], signatures[right])
            assert (keys[left] == keys[right]).sum() == num_equal
            pair = (signatures[left : left + 1], signatures[right : right + 1])
            assert shared_bands(*pair, PARAMS).tolist() == [num_equal]
    # The band's number is mixed in, so no key of one band is a key of another.
    columns = [set(column.tolist()) for column in keys.T]
    assert len(set().union(*columns)) == sum(map(len, columns))


@given(signatures_strategy)
def test_candidates_are_stars_that_connect_what_shares_a_band(signatures):
    pairs = candidate_pairs(band_keys(signatures, PARAMS))
    n = len(signatures)
    sharing = [(i, j) for j in range(n) for i in range(j) if bands_in_common(signatures[i], signatures[j])]
    assert pairs.dtype == np.int64
    assert set(map(tuple, pairs.tolist())) <= set(sharing)
    assert list(map(tuple, pairs.tolist())) == sorted(set(map(tuple, pairs.tolist())))
    assert connected_components(n, pairs).tolist() == naive_text.components(n, sharing)


@given(keys_strategy, st.randoms(use_true_random=False))
def test_star_edges_are_those_of_the_plain_version_in_any_order(keys, random):
    rows = list(enumerate(keys))
    random.shuffle(rows)
    nodes = np.array([node for node, _ in rows], dtype=np.int64)
    edges = star_edges(np.array([key for _, key in rows], dtype=np.uint64), nodes)
    assert list(map(tuple, edges.tolist())) == naive_text.star_edges(keys, range(len(keys)))


@given(keys_strategy, st.sampled_from([1, 2, 8]))
def test_buckets_do_not_change_the_edges(keys, num_buckets):
    spread = np.sort(np.array(keys, dtype=np.uint64) << np.uint64(61))
    nodes = np.arange(len(keys), dtype=np.int64)
    bounds = bucket_bounds(spread, num_buckets)
    assert bounds[0] == 0
    assert bounds[-1] == len(keys)
    parts = [star_edges(spread[a:b], nodes[a:b]) for a, b in itertools.pairwise(bounds)]
    assert unique_pairs(np.concatenate(parts)).tolist() == star_edges(spread, nodes).tolist()


def test_a_bucket_is_the_top_bits_of_a_key():
    keys = np.array([0, 1, (1 << 62) - 1, 1 << 62, 3 << 62, (1 << 64) - 1], dtype=np.uint64)
    assert bucket_bounds(keys, 4).tolist() == [0, 3, 4, 4, 6]
    with pytest.raises(AssertionError, match="power of two"):
        bucket_bounds(keys, 3)


def test_documents_without_words_are_nobodys_candidates():
    params = MinHashParams()
    signatures, _ = sign_documents(pa.array(["", "same words here", "…", "Same words, here!", ""]), params)
    assert candidate_pairs(band_keys(signatures, params)).tolist() == [[1, 3]]


def test_edges_grow_linearly_with_a_group():
    assert len(star_edges(np.ones(1000, dtype=np.uint64), np.arange(1000))) == 999


def test_results_do_not_depend_on_the_order_of_rows():
    params = MinHashParams()
    texts = [f"page {n // 3} has some words that all of its three copies share" for n in range(30)]
    order = np.random.default_rng(5).permutation(30)
    pairs = [
        candidate_pairs(band_keys(sign_documents(pa.array(rows), params)[0], params))
        for rows in (texts, [texts[row] for row in order])
    ]
    plain, shuffled = connected_components(30, pairs[0]), connected_components(30, pairs[1])
    groups = [{frozenset(np.flatnonzero(labels == label).tolist()) for label in labels} for labels in (plain, shuffled)]
    assert {frozenset(order[list(group)].tolist()) for group in groups[1]} == groups[0]
    assert max(map(len, groups[0])) >= 3


@pytest.mark.parametrize(
    ("similarity", "probability"),
    [
        (0.50, 0.0533),
        (0.60, 0.2111),
        (0.65, 0.3645),
        (0.70, 0.5645),
        (0.75, 0.7716),
        (0.80, 0.9235),
        (0.85, 0.9884),
        (0.90, 0.9996),
    ],
)
def test_collision_probability_table(similarity, probability):
    assert collision_probability(similarity, 14, 8) == pytest.approx(probability, abs=5e-5)
