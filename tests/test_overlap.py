"""Overlap finds what sets of word tuples find, whatever the units, the collisions and the buffers."""

import hashlib

import naive_overlap
import naive_text
import numpy as np
import pyarrow as pa
import pytest
import small_corpus
from hypothesis import given
from hypothesis import strategies as st

from pipeline_assets.transforms import overlap
from pipeline_assets.transforms.overlap import (
    check_universe,
    expected_by_chance,
    find_overlap,
    index_items,
    overlap_hits,
    spelled,
)
from training_io.errors import RecipeError

# Words from few letters of many kinds, so that texts share n-grams, repeat them, and hold runs and single ideographs.
mixed_text = st.text(alphabet="aZé ,東ー안\u0301𠀀\n7", max_size=40) | st.lists(
    st.sampled_from(["a", "B", "cd", "東", ",", "é"]), max_size=25
).map(" ".join)
# Units of documents, with copies within them and across them.
copied_units = st.lists(mixed_text, min_size=1, max_size=4).flatmap(
    lambda texts: st.lists(st.lists(st.sampled_from(texts), max_size=6), max_size=3)
)
settings = st.tuples(st.integers(1, 6), st.integers(1, 6), st.integers(1, 3)).map(
    lambda drawn: {"ngram": max(drawn[:2]), "min_words": min(drawn[:2]), "max_documents": drawn[2]}
)


def ids_of(documents):
    joined = b"".join(hashlib.sha256(document.encode()).digest() for document in documents)
    return np.frombuffer(joined, np.uint8).reshape(-1, 32)


def unlike(num_rows):
    """Ids of rows that no other one stands for."""
    return ids_of(map(str, range(num_rows)))


def found_in(documents, index, **knobs):
    return find_overlap(pa.array(documents, pa.large_string()), ids_of(documents), index, **knobs)[0]


def searched(items, units, *, ngram=13, min_words=8, max_documents=10, hash_bits=64):
    """Index, hits, statistics of the index and of the hits; units are lists of documents."""
    index, index_stats = index_items(
        pa.array(items, pa.string()), ngram=ngram, min_words=min_words, hash_bits=hash_bits
    )
    found = [found_in(unit, index, max_documents=max_documents) for unit in units]
    firsts = np.cumsum([0, *map(len, units)])[:-1].tolist()
    doc_ids = ids_of([document for unit in units for document in unit])
    hits, stats = overlap_hits(index, found, firsts, doc_ids, max_documents=max_documents)
    return index, hits, index_stats, stats


def rows_of(hits):
    return [tuple(row.values()) for row in hits.hits.to_pylist()]


def boilerplate_of(hits):
    return {row["ngram"]: (row["num_documents"], row["num_items"]) for row in hits.boilerplate.to_pylist()}


@given(
    st.lists(mixed_text, max_size=5),
    st.lists(st.lists(mixed_text, max_size=4), max_size=3) | copied_units,
    settings,
    st.sampled_from([1, 3, 64]),
)
def test_what_is_found_is_what_sets_of_word_tuples_find(items, units, knobs, hash_bits):
    documents = [document for unit in units for document in unit]
    index, hits, index_stats, stats = searched(items, units, **knobs, hash_bits=hash_bits)
    expected, common = naive_overlap.overlap(items, documents, **knobs)
    assert rows_of(hits) == expected
    assert boilerplate_of(hits) == common
    of_item = [naive_overlap.ngrams(item, knobs["ngram"], knobs["min_words"]) for item in items]
    distinct = {one for some in of_item for one in some}
    num_words = [len(naive_text.words(item)) for item in items]
    assert sorted(spelled(index, np.arange(index.num_ngrams)).to_pylist()) == sorted(map(" ".join, distinct))
    assert index_stats.num_ngrams == len(distinct)
    assert index_stats.num_words == sum(num_words)
    assert index_stats.num_too_short == sum(not some for some in of_item)
    assert index_stats.num_whole == sum(knobs["min_words"] <= count < knobs["ngram"] for count in num_words)
    matched, held = {row[0] for row in expected}, set(common)
    assert (stats.num_items, stats.num_documents) == (len(matched), len({row[1] for row in expected}))
    left_out = {i for i, some in enumerate(of_item) if held & set(map(" ".join, some))} - matched
    assert (stats.num_boilerplate, stats.num_left_out) == (len(common), len(left_out))
    assert stats.num_ngrams_found == sum(
        any(naive_overlap.holds(document, one) for document in documents) for one in distinct
    )


@given(st.lists(mixed_text, min_size=1, max_size=6), mixed_text, settings, st.randoms(use_true_random=False))
def test_an_item_that_is_quoted_is_found(others, item, knobs, random):
    at = random.randrange(len(others) + 1)
    documents = [*others[:at], f"{random.choice(others)} . {item} . {random.choice(others)}", *others[at:]]
    _, hits, _, _ = searched([item], [documents], **{**knobs, "max_documents": len(documents)})
    if len(naive_text.words(item)) >= knobs["min_words"]:
        assert at in [row[1] for row in rows_of(hits)]


@given(
    st.lists(mixed_text, min_size=1, max_size=4),
    st.lists(st.lists(mixed_text, max_size=3), min_size=1, max_size=4) | copied_units,
    settings,
    st.randoms(use_true_random=False),
)
def test_the_order_of_units_and_their_cuts_change_nothing(items, units, knobs, random):
    _, hits, _, stats = searched(items, units, **knobs)
    index, _ = index_items(pa.array(items), ngram=knobs["ngram"], min_words=knobs["min_words"])
    firsts = np.cumsum([0, *map(len, units)])[:-1].tolist()
    order = random.sample(range(len(units)), len(units))
    found = [found_in(units[n], index, max_documents=knobs["max_documents"]) for n in order]
    doc_ids = ids_of([document for unit in units for document in unit])
    other, other_stats = overlap_hits(
        index, found, [firsts[n] for n in order], doc_ids, max_documents=knobs["max_documents"]
    )
    assert rows_of(other) == rows_of(hits)
    assert other.boilerplate.to_pylist() == hits.boilerplate.to_pylist()
    assert other_stats == stats
    _, joined, _, _ = searched(items, [[document for unit in units for document in unit]], **knobs)
    assert rows_of(joined) == rows_of(hits)
    assert boilerplate_of(joined) == boilerplate_of(hits)


@given(st.lists(mixed_text, max_size=6), st.randoms(use_true_random=False))
def test_the_index_depends_on_the_items_and_not_on_their_order(items, random):
    order = random.sample(range(len(items)), len(items))
    index, stats = index_items(pa.array(items, pa.string()), ngram=3, min_words=2)
    other, other_stats = index_items(pa.array([items[n] for n in order], pa.string()), ngram=3, min_words=2)
    assert stats == other_stats
    assert (index.hashes == other.hashes).all()
    numbers = np.arange(index.num_ngrams)
    assert spelled(index, numbers).to_pylist() == spelled(other, numbers).to_pylist()
    for number in numbers.tolist():
        mine, theirs = (
            {
                (items[order[i]] if one is other else items[i])
                for i in one.items[one.owners[number] : one.owners[number + 1]]
            }
            for one in (index, other)
        )
        assert mine == theirs


@pytest.mark.parametrize("type_", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_array_types_and_slices_do_not_matter(type_):
    items = ["one two three", "four five six"]
    array = pa.array(["zero", *items, "last"]).cast(type_)
    index, _ = index_items(array.slice(1, 2), ngram=3, min_words=3)
    assert sorted(spelled(index, np.arange(2)).to_pylist()) == sorted(items)
    documents = pa.chunked_array([array.slice(1, 1), array.slice(0, 0), array.slice(0, 3)])
    found, stats = find_overlap(documents, unlike(4), index)
    assert sorted(found.hits[:, 1].tolist()) == [0, 2, 3]
    assert (stats.num_documents, stats.num_bytes, stats.num_ngrams_found) == (4, 13 + 4 + 13 + 13, 2)


def test_collisions_happen_and_are_no_hits():
    items, documents = [small_corpus.sentences(n) for n in range(5)], [small_corpus.sentences(n) for n in range(50, 60)]
    index, hits, _, stats = searched(items, [documents], hash_bits=2)
    assert len(np.unique(index.hashes)) <= 4 < index.num_ngrams
    assert stats.num_ngrams_found == 0
    assert rows_of(hits) == []


def test_boilerplate_in_many_documents_does_not_flag_them_all():
    banner = "this page uses cookies to give you the best experience on our site today"
    question = "which of the seven hills of the old city did the twin brothers settle first of all"
    documents = [f"{small_corpus.sentences(n)} {banner} {small_corpus.sentences(n + 100)}" for n in range(30)]
    documents[7] += f" {question.upper()}!"
    _, hits, _, stats = searched([f"{question} {banner}", banner], [documents[:20], documents[20:]])
    (hit,) = rows_of(hits)
    assert hit[:3] == (0, 7, 17 - 13 + 1)
    assert hit[4] == " ".join(question.split()[:13])
    assert boilerplate_of(hits) == {" ".join(banner.split()[i : i + 13]): (30, 2) for i in range(2)}
    assert (stats.num_items, stats.num_documents, stats.num_left_out) == (1, 1, 1)


@pytest.mark.parametrize(("copies", "is_found"), [(10, True), (11, False)])
def test_the_limit_counts_documents_over_all_units(copies, is_found):
    question = small_corpus.sentences(1, 20)
    units = [[f"{small_corpus.sentences(10 + n)} {question} {question}"] for n in range(copies)]
    _, hits, _, _ = searched([question], units)
    assert len(rows_of(hits)) == (copies if is_found else 0)
    assert len(boilerplate_of(hits)) == (0 if is_found else 8)


@pytest.mark.parametrize("cuts", [[33], [1, 32], [11, 11, 11], [3] * 11])
def test_copies_of_one_text_are_no_boilerplate(cuts):
    question = small_corpus.sentences(1, 20)
    texts = [f"{small_corpus.sentences(10 + n)} {question}" for n in range(3)]
    documents = iter(texts * 11)
    units = [[next(documents) for _ in range(size)] for size in cuts]
    _, hits, _, stats = searched([question], units, max_documents=3)
    assert [row[:3] for row in rows_of(hits)] == [(0, document, 8) for document in range(3)]
    assert (boilerplate_of(hits), stats.num_left_out) == ({}, 0)
    _, hits, _, stats = searched([question], units, max_documents=2)
    assert rows_of(hits) == []
    assert set(boilerplate_of(hits).values()) == {(33, 1)}
    assert stats.num_left_out == 1


def test_items_are_whole_where_they_are_short_and_counted_where_they_are_too_short():
    items = ["w " * n for n in range(1, 16)] + ["", "…", " ".join(f"w{n}" for n in range(9))]
    document = " ".join(f"w{n}" for n in range(-3, 40))
    _, hits, stats, _ = searched(items, [[document, "w " * 12]])
    assert (stats.num_items, stats.num_whole, stats.num_too_short) == (18, 6, 9)
    # "w" 8 to 12 times is held by a text of twelve; nine words in a row by the one that counts up.
    assert [row[:2] for row in rows_of(hits)] == [(n, 1) for n in range(7, 12)] + [(17, 0)]


@pytest.mark.parametrize("template", ["w{} ", "東"])
def test_texts_longer_than_the_word_buffer_have_no_seam(template):
    places = [*range(4080, 4100), *range(8165, 8185)]
    assert places[0] < overlap.WORD_BUFFER - 13 < overlap.WORD_BUFFER < places[19]
    unseen = " ".join(f"x{n}" for n in range(13))
    around = {count: "".join(template.format(n) for n in range(count)) for count in places}
    documents = [f"{around[count]} {unseen} {around[4080]}" for count in places]
    _, hits, _, _ = searched([unseen, unseen.rsplit(" ", 4)[0]], [[*documents, around[4080]]], max_documents=40)
    assert [row[:3] for row in rows_of(hits)] == [(item, n, 1) for item in range(2) for n in range(len(places))]


@given(st.lists(st.sampled_from(["ab", "東", "c"]), min_size=30, max_size=60), st.sampled_from([5, 9, 16]))
def test_small_buffers_change_nothing(drawn, size):
    document, items = " ".join(drawn), [" ".join(drawn[start : start + 14]) for start in range(0, 16, 3)]
    expected = searched(items, [[document, document[3:]], [document]])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overlap, "HIT_BUFFER", size)
        patch.setattr(overlap, "BLOCK_BYTES", size)
        small = searched(items, [[document, document[3:]], [document]])
    assert rows_of(small[1]) == rows_of(expected[1])
    assert rows_of(expected[1])
    assert small[2:] == expected[2:]


def test_invalid_bytes_separate_words():
    index, _ = index_items(pa.array(["one two"]), ngram=2, min_words=2)
    data = [b"one \xff two", b"one\xfftwo", b"one t\xffwo", b"one two\xe4", b"\xe4one two"]
    texts = pa.array(data, pa.binary()).view(pa.string())
    found, _ = find_overlap(texts, unlike(5), index)
    assert found.hits[:, 1].tolist() == [0, 1, 3, 4]


def test_a_longer_word_is_no_match():
    index, _ = index_items(pa.array(["one two"]), ngram=2, min_words=2, hash_bits=1)
    found = found_in(["one twofold", "none two", "one two", "oneTwo", "ONE-two"], index)
    assert found.hits[:, 1].tolist() == [2, 4]


def test_no_items_and_no_documents():
    index, hits, stats, _ = searched([], [["a b c"], []])
    assert (index.num_ngrams, stats.num_items) == (0, 0)
    assert rows_of(hits) == []
    _, hits, _, stats = searched([small_corpus.sentences(1)], [])
    assert rows_of(hits) == []
    assert stats.num_ngrams_found == 0


def test_matches_by_chance():
    assert 160 < expected_by_chance(88_000, 2_424_000, 1_300_000_000) < 175
    assert expected_by_chance(5, 10, 10) == 5
    check_universe("exam", 5, 10, 10)
    for texts, documents in ((88_000, 2_424_000), (2_424_000, 88_000)):
        with pytest.raises(RecipeError, match=r"exam: expected universe_documents of at least 2,424,000.* found 1,00"):
            check_universe("exam", texts, documents, 1_000_000)


def test_chance_is_what_drawing_gives():
    generator = np.random.default_rng(3)
    draws = [
        len(np.intersect1d(generator.choice(2000, 300, replace=False), generator.choice(2000, 400, replace=False)))
        for _ in range(300)
    ]
    assert np.mean(draws) == pytest.approx(expected_by_chance(300, 400, 2000), abs=1.5)


def test_golden_hashes():
    index, _ = index_items(pa.array(["The quick brown fox", "jumps over"]), ngram=3, min_words=2)
    assert dict(zip(spelled(index, np.arange(3)).to_pylist(), index.hashes.tolist(), strict=True)) == GOLDEN
    assert {words: hashed(words.split()) for words in GOLDEN} == GOLDEN


def hashed(some_words):
    value = 0
    for word in some_words:
        value = (value * 0x9E3779B97F4A7C15 + naive_text.word_hash(word)) & naive_text.MASK_64
    return value


GOLDEN = {
    "the quick brown": 3415674066001340534,
    "quick brown fox": 4502991851167473537,
    "jumps over": 10580998283271662418,
}
