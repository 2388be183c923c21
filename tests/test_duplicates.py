"""What was removed, counted: each number against a count over plain Python lists."""

from collections import Counter, defaultdict

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pipeline_assets.duplicates import similarity_picture
from pipeline_assets.transforms.arrays import blocks_of
from pipeline_assets.transforms.duplicates import (
    SIMILARITY_EDGES,
    all_pairs,
    clusters_by_spread,
    cross_table,
    example_pairs,
    keys_within,
    largest_clusters,
    members_by_cluster,
    pair_table,
)
from pipeline_assets.transforms.lsh import NO_KEY

NAMES = ["a", "b", "c"]
code = st.integers(0, 2)
similarity = st.sampled_from([0.0, 0.3, 0.5, 0.55, 0.79, 0.8, 0.97, 0.999, 1.0])
key = st.integers(0, 9) | st.integers(0, 2**64 - 1)


def array(values, kind=np.int64):
    return np.array(values, kind)


@st.composite
def labels(draw):
    """Labels as components have them: each is the smallest member of its cluster."""
    kinds = draw(st.lists(st.integers(0, 4), min_size=1, max_size=20))
    first = {kind: kinds.index(kind) for kind in kinds}
    return [first[kind] for kind in kinds]


@given(st.lists(st.tuples(code, code, st.integers(0, 9)), max_size=20))
def test_pairs_are_counted_by_both_names(rows):
    removed, kept, sizes = (array(column) for column in zip(*rows, strict=True)) if rows else [array([])] * 3
    documents, sums = Counter(), Counter()
    for left, right, size in rows:
        documents[NAMES[left], NAMES[right]] += 1
        sums[NAMES[left], NAMES[right]] += size
    found = pair_table(removed, kept, sizes, NAMES)
    assert {row[:2]: row[2:] for row in found} == {pair: (documents[pair], sums[pair]) for pair in documents}
    assert found == sorted(found, key=lambda row: (-row[2], row[:2]))


@given(st.dictionaries(st.tuples(*[st.sampled_from("abcdefg")] * 2), st.integers(0, 9), max_size=30), st.integers(1, 8))
def test_a_cross_table_counts_every_pair_in_its_place_or_among_the_others(counted, most):
    names, table = cross_table([(*pair, number) for pair, number in counted.items()], most)
    everyone = {name for pair in counted for name in pair}
    listed = names if len(everyone) <= most else names[:-1]
    assert len(names) <= most
    assert listed == sorted(listed)
    assert len(everyone) > most or set(listed) == everyone
    expected = Counter()
    for pair, number in counted.items():
        expected[tuple(names.index(name) if name in listed else len(listed) for name in pair)] += number
    assert {place: number for place, number in np.ndenumerate(table) if number} == +expected
    totals = {name: sum(number * pair.count(name) for pair, number in counted.items()) for name in everyone}
    for name in listed:
        assert all(totals[name] >= totals[other] for other in everyone if other not in listed)


def test_how_like_the_kept_ones_are_is_drawn_only_where_there_are_any():
    """What a chain removed, less similar than the threshold, is drawn, and so is a similarity of 1."""
    assert similarity_picture(array([], np.float64), {}) is None
    drawn = {similarity_picture(array([one], np.float64), {"threshold": 0.7}) for one in (0.0, 0.3, 0.7, 1.0)}
    assert len(drawn) == 4


@given(labels(), st.data())
def test_clusters_lie_within_one_crawl_or_over_several(clusters, data):
    dumps = [data.draw(code) for _ in clusters]
    members = defaultdict(list)
    for label, dump in zip(clusters, dumps, strict=True):
        members[label].append(dump)
    shared = [crawls for crawls in members.values() if len(crawls) > 1]
    expected = (sum(len(set(one)) == 1 for one in shared), sum(len(set(one)) > 1 for one in shared))
    assert clusters_by_spread(array(clusters), array(dumps)) == expected


@given(st.lists(st.tuples(similarity, key), max_size=25), st.integers(1, 3))
def test_examples_are_those_of_smallest_key_in_each_range_each_key_once(rows, per_range):
    ranges = defaultdict(list)
    first = {name: number for number, (_, name) in reversed(list(enumerate(rows)))}
    for number, (value, name) in enumerate(rows):
        if first[name] != number:
            continue
        ranges[sum(value >= edge for edge in SIMILARITY_EDGES)].append((name, number))
    expected = {number for members in ranges.values() for _, number in sorted(members)[:per_range]}
    values = array([value for value, _ in rows], np.float64)
    keys = array([name for _, name in rows], np.uint64)
    chosen = example_pairs(values, keys, per_range).tolist()
    assert set(chosen) == expected
    assert len(chosen) == len(expected)
    assert [rows[number][0] for number in chosen] == sorted((rows[number][0] for number in chosen), reverse=True)


@given(labels(), st.integers(1, 3), st.integers(1, 4), st.randoms(use_true_random=False))
def test_the_largest_clusters_and_some_members(clusters, num_clusters, max_members, generator):
    sizes = Counter(clusters)
    keys = [generator.getrandbits(64) for _ in clusters]
    wanted = largest_clusters(
        array(clusters), array([sizes[label] for label in clusters]), array(keys, np.uint64), num_clusters
    )
    expected = sorted((label for label in sizes if sizes[label] > 1), key=lambda label: (-sizes[label], keys[label]))
    assert wanted.tolist() == expected[:num_clusters]
    found = members_by_cluster(array(clusters), wanted, array(keys, np.uint64), max_members)
    for label, members in zip(wanted.tolist(), found, strict=True):
        inside = [number for number, one in enumerate(clusters) if one == label]
        assert members.tolist() == sorted(sorted(inside, key=keys.__getitem__)[:max_members])


def test_all_pairs_are_every_two():
    assert all_pairs(array([4, 7, 9])).tolist() == [[4, 7], [4, 9], [7, 9]]
    assert all_pairs(array([4])).shape == (0, 2)


@given(st.lists(st.tuples(st.sampled_from([0, 1, 5, 2**64 - 1]), code), max_size=20))
def test_keys_within_groups_are_equal_where_both_are(rows):
    found = keys_within(array([one for one, _ in rows], np.uint64), array([group for _, group in rows]), NO_KEY)
    for left, left_key in zip(rows, found.tolist(), strict=True):
        assert (left_key == NO_KEY) == (left[0] == NO_KEY)
        for right, right_key in zip(rows, found.tolist(), strict=True):
            if left[0] != NO_KEY != right[0]:
                assert (left_key == right_key) == (left == right)


@given(st.lists(st.integers(0, 50), max_size=20), st.integers(1, 60))
def test_blocks_are_consecutive_and_no_larger_than_needed(sizes, most):
    blocks = list(blocks_of(array(sizes), most))
    assert [number for start, end in blocks for number in range(start, end)] == list(range(len(sizes)))
    for start, end in blocks:
        assert end == start + 1 or sum(sizes[start:end]) <= most
        assert end == len(sizes) or sum(sizes[start : end + 1]) > most
