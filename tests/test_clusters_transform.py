import hashlib
import random

import naive_clusters
import naive_text
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline_assets.transforms.clusters import (
    REASONS,
    Documents,
    DumpScope,
    canonical_order,
    decide,
    match_all_references,
    match_references,
)
from pipeline_assets.transforms.lsh import band_keys, candidate_pairs
from pipeline_assets.transforms.minhash import MinHashParams, sign_documents

MODES = ["near", "exact", "off"]
# Few ids, some of which share their first eight bytes, so that every tie is met.
some_id = st.sampled_from([bytes([1]) * 32, bytes([2]) * 32, bytes([1]) * 8 + bytes(24), bytes(32), bytes([255]) * 32])


@st.composite
def corpora(draw):
    """Doc_ids, distinct coordinates, edges, reference hits."""
    doc_ids = draw(st.lists(some_id, max_size=12))
    places = draw(st.permutations(range(len(doc_ids))))
    coordinates = [(draw(st.integers(0, 2)), draw(st.integers(0, 1)), 0, place) for place in places]
    document = st.integers(0, max(0, len(doc_ids) - 1))
    edges = draw(st.lists(st.tuples(document, document), max_size=6)) if doc_ids else []
    hits = draw(st.lists(st.tuples(st.integers(0, 3), document), max_size=3)) if doc_ids else []
    return doc_ids, coordinates, edges, hits


def matrix(doc_ids):
    return np.frombuffer(b"".join(doc_ids), np.uint8).reshape(-1, 32)


def pairs(values):
    return np.array(values, dtype=np.int64).reshape(-1, 2)


def numbers_of_bits(bits):
    return {number for number in range(64) if int(bits) >> number & 1}


def pool_then_key(doc_ids, coordinates, seed):
    """The default rule's preferences, as columns."""
    pools = np.array([place[0] for place in coordinates], np.int64)
    return pools, np.array([naive_text.keyed_hash(doc_id, seed) for doc_id in doc_ids], np.uint64)


def decisions_of(doc_ids, coordinates, edges, hits, mode, excluding, seed, within=None):
    """Ours, in the oracle's form."""
    documents = Documents(doc_ids=matrix(doc_ids), coordinates=np.array(coordinates, np.int64).reshape(-1, 4))
    scope = within and DumpScope(dumps=np.array(within[0], np.int64), edges=pairs(within[1]))
    found = decide(
        documents,
        pairs(edges),
        pairs(hits),
        mode=mode,
        excluding_sets=frozenset(excluding),
        preferred=pool_then_key(doc_ids, coordinates, seed),
        within=scope,
    )
    return [
        {
            "cluster": int(found.cluster[row]),
            "kept": int(found.kept[row]),
            "cluster_size": int(found.cluster_size[row]),
            "reason": REASONS[found.reason[row]],
            "barred": bool(found.barred[row]),
            "matched_sets": numbers_of_bits(found.matched_sets[row]),
            "pool_tags": numbers_of_bits(found.pool_tags[row]),
        }
        for row in range(len(doc_ids))
    ]


def expected_of(corpus, mode, excluding, seed, within=None):
    """The oracle's decisions by the default rule."""
    doc_ids, coordinates, _, _ = corpus
    preferred = list(zip(*(column.tolist() for column in pool_then_key(doc_ids, coordinates, seed)), strict=True))
    return naive_clusters.decide(*corpus, mode, excluding, preferred, within)


@given(corpora(), st.sampled_from(MODES), st.sets(st.integers(0, 3)), st.integers(0, 2**64 - 1))
def test_decisions_are_those_of_sets_and_breadth_first_search(corpus, mode, excluding, seed):
    assert decisions_of(*corpus, mode, excluding, seed) == expected_of(corpus, mode, excluding, seed)


@given(corpora(), st.data(), st.integers(0, 99))
def test_within_crawls_near_copies_of_other_crawls_stay_and_texts_are_used_once(corpus, data, seed):
    doc_ids, _, edges, _ = corpus
    dumps = [data.draw(st.integers(0, 2)) for _ in doc_ids]
    within = (dumps, [(left, right) for left, right in edges if dumps[left] == dumps[right]])
    rows = decisions_of(*corpus, "near", set(), seed, within)
    assert rows == expected_of(corpus, "near", set(), seed, within)
    used = [doc_id for doc_id, row in zip(doc_ids, rows, strict=True) if row["reason"] == "kept"]
    assert sorted(used) == sorted(set(used))
    assert {row["kept"] for row in rows} == {number for number, row in enumerate(rows) if row["reason"] == "kept"}
    if len(set(dumps)) == 1:
        assert rows == decisions_of(*corpus, "near", set(), seed)


def test_a_removed_copy_points_to_what_replaced_its_text():
    ids = [bytes([1]) * 32, bytes([1]) * 32, bytes([2]) * 32]  # one text in crawls 0 and 1, and a near copy in crawl 1
    places = [(1, 0, 0, 0), (0, 0, 0, 1), (0, 0, 0, 2)]
    rows = decisions_of(ids, places, [(0, 1), (1, 2)], [], "near", set(), 3, ([0, 1, 1], [(1, 2)]))
    assert {row["cluster"] for row in rows} == {1}
    assert rows[1]["kept"] == rows[2]["kept"]  # one of the two that are alike in crawl 1
    assert rows[0]["kept"] == (1 if rows[1]["reason"] == "kept" else 0)  # its text is not lost with the other copy


def test_a_text_is_kept_where_no_near_copy_of_its_own_crawl_replaces_it():
    ids = [bytes([1]) * 32, bytes([2]) * 32, bytes([1]) * 32]  # text 1 beside a preferred near copy, and alone
    places = [(1, 0, 0, 0), (0, 0, 0, 1), (1, 0, 0, 2)]
    rows = decisions_of(ids, places, [(0, 1)], [], "near", set(), 3, ([0, 0, 1], [(0, 1)]))
    assert [row["reason"] for row in rows] == ["near_duplicate", "kept", "kept"]


@given(corpora(), st.sampled_from(MODES), st.sets(st.integers(0, 3)), st.randoms(use_true_random=False))
def test_the_order_of_rows_and_edges_does_not_matter(corpus, mode, excluding, shuffler):
    doc_ids, coordinates, edges, hits = corpus
    before = decisions_of(*corpus, mode, excluding, 7)
    source = list(range(len(doc_ids)))
    shuffler.shuffle(source)
    place = {document: row for row, document in enumerate(source)}
    turned = [(place[right], place[left]) for left, right in edges]
    shuffler.shuffle(turned)
    after = decisions_of(
        [doc_ids[document] for document in source],
        [coordinates[document] for document in source],
        turned,
        [(reference, place[document]) for reference, document in reversed(hits)],
        mode,
        excluding,
        7,
    )
    for document, decision in enumerate(before):
        expected = {**decision, "cluster": place[decision["cluster"]], "kept": place[decision["kept"]]}
        assert after[place[document]] == expected


@given(corpora(), st.sampled_from(["near", "exact"]), st.integers(0, 99))
def test_deduplicating_twice_removes_nothing_the_second_time(corpus, mode, seed):
    doc_ids, coordinates, edges, _ = corpus
    first = decisions_of(doc_ids, coordinates, edges, [], mode, set(), seed)
    kept = [document for document, decision in enumerate(first) if decision["reason"] == "kept"]
    place = {document: row for row, document in enumerate(kept)}
    left = [(place[a], place[b]) for a, b in edges if a in place and b in place]
    second = decisions_of([doc_ids[d] for d in kept], [coordinates[d] for d in kept], left, [], mode, set(), seed)
    assert [decision["reason"] for decision in second] == ["kept"] * len(kept)


@given(corpora(), st.integers(0, 99))
def test_in_mode_off_every_document_stays_unless_a_reference_excludes_it(corpus, seed):
    assert {row["reason"] for row in decisions_of(*corpus, "off", set(), seed)} <= {"kept"}
    excluded = decisions_of(*corpus, "off", {0, 1, 2, 3}, seed)
    assert all((row["reason"] == "reference") == row["barred"] for row in excluded)


@given(corpora())
def test_canonical_order_is_by_doc_id_then_coordinate(corpus):
    doc_ids, coordinates, _, _ = corpus
    documents = Documents(doc_ids=matrix(doc_ids), coordinates=np.array(coordinates, np.int64).reshape(-1, 4))
    expected = sorted(range(len(doc_ids)), key=lambda document: (doc_ids[document], coordinates[document]))
    assert canonical_order(documents).tolist() == expected


def test_the_first_pool_wins_then_the_smallest_keyed_hash_then_the_coordinate():
    ids = [bytes([number]) * 32 for number in range(6)]
    chosen = set()
    for seed in range(40):
        rows = decisions_of(
            ids,
            [(1, 0, 0, n) for n in range(5)] + [(0, 0, 0, 5)],
            [(0, n) for n in range(1, 6)],
            [],
            "near",
            set(),
            seed,
        )
        assert {row["kept"] for row in rows} == {5}
        one_pool = decisions_of(
            ids, [(0, 0, 0, n) for n in range(6)], [(0, n) for n in range(1, 6)], [], "near", set(), seed
        )
        chosen |= {row["kept"] for row in one_pool}
    assert chosen == set(range(6))  # random, whatever comes first
    twins = decisions_of([ids[1]] * 3, [(0, 1, 0, 0), (0, 0, 9, 9), (0, 0, 9, 8)], [], [], "exact", set(), 1)
    assert [row["reason"] for row in twins] == ["exact_duplicate", "exact_duplicate", "kept"]


def test_a_corpus_without_duplicates_or_documents_is_valid():
    ids = [bytes([number]) * 32 for number in range(4)]
    rows = decisions_of(ids, [(0, 0, 0, n) for n in range(4)], [], [], "near", {0}, 1)
    assert [(row["reason"], row["cluster_size"], row["barred"], row["pool_tags"]) for row in rows] == [
        ("kept", 1, False, {0})
    ] * 4
    assert decisions_of([], [], [], [], "near", set(), 1) == []


@pytest.mark.parametrize(
    ("excluding", "reasons"), [(set(), ["kept", "near_duplicate", "kept"]), ({2}, ["reference", "reference", "kept"])]
)
def test_a_hit_bars_or_removes_the_whole_cluster(excluding, reasons):
    ids = [bytes([number]) * 32 for number in range(3)]
    rows = decisions_of(ids, [(n, 0, 0, 0) for n in range(3)], [(0, 1)], [(2, 1)], "near", excluding, 1)
    assert [row["reason"] for row in rows] == reasons
    assert [row["barred"] for row in rows] == [True, True, False]
    assert [row["matched_sets"] for row in rows] == [{2}, {2}, set()]


def words(seed, count):
    generator = random.Random(seed)
    return [f"word{generator.randrange(999)}" for _ in range(count)]


def test_planted_copies_come_out_as_planted_and_nothing_goes_the_second_time():
    base = words(1, 300)
    near = [*base[:150], "changed", *base[151:]]
    texts = {
        "original": " ".join(base),
        "exact copy": " ".join(base),
        "near copy": " ".join(near),
        "unique": " ".join(words(2, 300)),
        "short": "two words",
        "short copy": "two words",
        "wordless": "...",
        "other wordless": "!!!",
    }

    def deduplicated(kept):
        params = MinHashParams()
        signatures, _ = sign_documents(pa.array([texts[name] for name in kept]), params)
        ids = [hashlib.sha256(texts[name].encode()).digest() for name in kept]
        coordinates = [(0, 0, 0, list(texts).index(name)) for name in kept]
        edges = candidate_pairs(band_keys(signatures, params)).tolist()
        rows = decisions_of(ids, coordinates, edges, [], "near", set(), 3)
        return {name: row["reason"] for name, row in zip(kept, rows, strict=True)}

    first = deduplicated(list(texts))
    assert sorted(first[name] for name in ("original", "exact copy", "near copy")).count("kept") == 1
    assert "near_duplicate" in [first[name] for name in ("original", "exact copy", "near copy")]
    assert first | {"original": "", "exact copy": "", "near copy": ""} == {
        "original": "", "exact copy": "", "near copy": "", "unique": "kept",
        "short": "kept", "short copy": "exact_duplicate", "wordless": "kept", "other wordless": "kept",
    }  # fmt: skip
    kept = [name for name, reason in first.items() if reason == "kept"]
    assert set(deduplicated(kept).values()) == {"kept"}


key_and_number = st.lists(st.tuples(st.integers(0, 4) | st.just(2**64 - 1), st.integers(0, 6)), max_size=12)


@given(key_and_number, key_and_number, st.lists(st.integers(0, 3), min_size=7, max_size=7), st.integers(1, 9))
def test_references_are_matched_as_by_comparing_all_keys(corpus, references, order_of, max_pairs):
    def columns(rows):
        return np.array([key for key, _ in rows], np.uint64), np.array([number for _, number in rows], np.int64)

    hits = match_references(*columns(corpus), *columns(references), np.array(order_of, np.uint64))
    assert (hits.dtype, hits.shape[1]) == (np.int64, 2)
    assert [tuple(hit) for hit in hits.tolist()] == naive_clusters.match_references(corpus, references, order_of)
    blocks = list(match_all_references(*columns(corpus), *columns(references), max_pairs))
    everything = {(number, node) for key, number in references for other, node in corpus if key == other}
    assert {tuple(pair) for block in blocks for pair in block.tolist()} == everything
    most = max([max_pairs, *(sum(key == other for other, _ in corpus) for key, _ in references)])
    assert all(0 <= len(block) <= most for block in blocks)
