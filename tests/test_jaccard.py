import naive_text
import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from pipeline_assets.transforms.jaccard import jaccard_of_pairs, shingle_sets
from pipeline_assets.transforms.shingles import unique_shingles

texts_strategy = st.lists(st.text(alphabet="ab 東,", max_size=20), min_size=1, max_size=6)


@given(texts_strategy, st.integers(1, 5))
def test_similarity_is_that_of_sets_of_word_tuples(texts, ngram):
    pairs = [(i, j) for i in range(len(texts)) for j in range(len(texts))]
    sets = [set(naive_text.shingles(text, ngram)) for text in texts]
    expected = [naive_text.jaccard(sets[i], sets[j]) for i, j in pairs]
    assert jaccard_of_pairs(pa.array(texts), np.array(pairs), ngram).tolist() == expected


@given(texts_strategy)
def test_sets_are_distinct_and_ascending(texts):
    hashes, offsets = shingle_sets(pa.chunked_array([texts, texts[:1]]), 2)
    for row, text in enumerate([*texts, texts[0]]):
        assert hashes[offsets[row] : offsets[row + 1]].tolist() == unique_shingles(text, 2).tolist()


def test_worked_example():
    texts = pa.array(["the cat sat on the mat and then slept", "unrelated", "the cat sat on the mat and then left"])
    assert jaccard_of_pairs(texts, np.array([[0, 2], [2, 2], [0, 1]])).tolist() == [4 / 6, 1.0, 0.0]


def test_texts_without_words_are_like_nothing():
    assert jaccard_of_pairs(pa.array(["", "…", "a"]), np.array([[0, 1], [0, 0], [0, 2]])).tolist() == [0, 0, 0]


def test_no_pairs():
    assert jaccard_of_pairs(pa.array(["a"]), np.empty((0, 2), dtype=np.int64)).tolist() == []


def test_the_array_type_does_not_matter():
    texts = pa.array(["a b c", "A, B, C!", "d", "a b c"])
    pairs = np.array([[0, 1], [2, 3], [3, 0]])
    for same in (
        texts,
        texts.cast(pa.large_string()),
        texts.dictionary_encode(),
        pa.chunked_array([texts[:1], texts[1:]]),
    ):
        assert jaccard_of_pairs(same, pairs).tolist() == [1.0, 0.0, 1.0]
