import itertools
import tracemalloc
from concurrent.futures import ThreadPoolExecutor, as_completed

import naive_clusters
import naive_text
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline_assets.transforms.components import components_of_parts, connected_components
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


def plain_key(band, values):
    key = naive_text.fmix64(band + 1)
    for value in values:
        key = naive_text.fmix64(key ^ value)
    return key


@given(signatures_strategy)
def test_keys_are_those_of_the_formula(signatures):
    assert band_keys(signatures, PARAMS).tolist() == [
        [plain_key(band, row[2 * band : 2 * band + 2]) for band in range(3)] for row in signatures.tolist()
    ]


@pytest.mark.parametrize("num_documents", range(1, 10))
def test_only_a_document_without_words_has_no_keys(num_documents):
    for wordless in range(num_documents):
        signatures = np.full((num_documents, 6), 0xFFFFFFFE, dtype=np.uint32)
        signatures[:, :5] = signatures[wordless] = 0xFFFFFFFF  # one smaller value is a word
        has_keys = np.arange(num_documents) != wordless
        assert ((band_keys(signatures, PARAMS) != NO_KEY) == has_keys[:, None]).all()


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


def stored_units(keys, num_units):
    """Sorted keys and their documents of each stripe of the documents, as they are stored."""
    for first in range(num_units):
        rows = np.arange(first, len(keys), num_units)
        order = np.argsort(keys[rows], axis=None, kind="stable")
        yield keys[rows].ravel()[order], np.repeat(rows, keys.shape[1])[order].astype(np.uint32)


def buckets_of(units, num_buckets):
    """Each bucket's keys and documents over all units."""
    bounds = [bucket_bounds(keys, num_buckets) for keys, _ in units]
    for bucket in range(num_buckets):
        ranges = [slice(*bound[bucket : bucket + 2]) for bound in bounds]
        yield tuple(
            np.concatenate([unit[part][one] for unit, one in zip(units, ranges, strict=True)]) for part in (0, 1)
        )


@given(
    signatures_strategy.filter(len),
    st.integers(1, 4),
    st.sampled_from([1, 2, 8]),
    st.sampled_from([1, 2, 4]),
    st.randoms(use_true_random=False),
)
def test_clusters_do_not_depend_on_rows_units_buckets_or_workers(signatures, num_units, num_buckets, workers, random):
    n = len(signatures)
    keys = band_keys(signatures, PARAMS)
    expected = naive_text.components(n, naive_clusters.sharing_a_key(keys.tolist()))
    units = list(stored_units(keys, num_units))
    random.shuffle(units)
    with ThreadPoolExecutor(workers) as pool:
        steps = [pool.submit(star_edges, *bucket) for bucket in buckets_of(units, num_buckets)]
        labels = components_of_parts(n, (step.result() for step in as_completed(steps)))
    assert labels.tolist() == connected_components(n, candidate_pairs(keys)).tolist() == expected
    order = np.array(random.sample(range(n), n))
    moved = order[connected_components(n, candidate_pairs(band_keys(signatures[order], PARAMS)))]
    assert {frozenset(order[moved == one].tolist()) for one in moved} == {
        frozenset(np.flatnonzero(labels == one).tolist()) for one in labels
    }


@given(signatures_strategy)
def test_deduplicating_what_is_kept_removes_nothing(signatures):
    labels = connected_components(len(signatures), candidate_pairs(band_keys(signatures, PARAMS)))
    kept = signatures[labels == np.arange(len(labels))]
    assert not len(candidate_pairs(band_keys(kept, PARAMS)))


MANY_KEYS = {
    "few equal": lambda numbers: numbers * np.uint64(0x9E3779B97F4A7C15),
    "equal but for the top bits": lambda numbers: numbers << np.uint64(44),
    "equal but for the low bits": lambda numbers: numbers | np.uint64(3 << 62),
    "mostly equal": lambda numbers: numbers % np.uint64(997),
    "no keys": np.zeros_like,
}


@pytest.mark.parametrize("kind", MANY_KEYS)
def test_star_edges_of_many_keys_are_those_of_the_plain_version(kind):
    generator = np.random.default_rng(3)
    numbers = generator.integers(1, 200_000, 60_000, dtype=np.uint64)
    keys, nodes = MANY_KEYS[kind](numbers), generator.permutation(60_000).astype(np.uint32) // np.uint32(3)
    expected = naive_text.star_edges(keys.tolist(), nodes.tolist())
    assert (len(expected) > 1_000) == (kind != "no keys")
    assert list(map(tuple, star_edges(keys, nodes).tolist())) == expected
    keys.flags.writeable = nodes.flags.writeable = False  # as mapped from a file
    assert star_edges(keys[::-1], nodes[::-1]).tolist() == star_edges(keys, nodes).tolist()


def test_keys_that_differ_in_one_bit_only_are_not_equal():
    keys = np.uint64(1) << np.arange(64, dtype=np.uint64)
    assert not len(star_edges(keys, np.arange(64)))
    assert star_edges(np.tile(keys, 2), np.arange(128)).tolist() == [[node, node + 64] for node in range(64)]


def test_a_document_in_buckets_takes_8_bytes_beyond_one_bucket():
    def peak_bytes(num_documents):
        def random_buckets():
            for bucket in range(num_documents // 5_000):
                generator = np.random.default_rng(bucket)
                keys = generator.integers(1, 50_000, 5_000, dtype=np.uint64) << np.uint64(40)
                yield star_edges(keys, generator.integers(0, num_documents, 5_000, dtype=np.uint32))

        tracemalloc.start()
        labels = components_of_parts(num_documents, random_buckets())
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert len(np.unique(labels)) < num_documents
        return peak

    peak_bytes(10_000)  # what is compiled and imported is not a document's
    small, large = peak_bytes(50_000), peak_bytes(500_000)
    assert 8 <= (large - small) / 450_000 < 9


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
