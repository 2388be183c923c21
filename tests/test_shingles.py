import itertools

import naive_text
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline_assets.transforms import shingles
from pipeline_assets.transforms.arrays import utf8_blocks
from pipeline_assets.transforms.shingles import hash_documents, shingle_hashes, unique_shingles

# Words from few letters of many kinds, so that short texts have runs, repeats, ideographs and separators.
mixed_text = st.text(alphabet="aZé ,東ー안\u0301𠀀\n7", max_size=40)


def hash_bytes(pieces, ngram=5):
    offsets = np.concatenate([[0], np.cumsum([len(piece) for piece in pieces])]).astype(np.int64)
    return hash_documents(np.frombuffer(b"".join(pieces), dtype=np.uint8), offsets, ngram)


@given(mixed_text | st.text(max_size=60), st.integers(1, 7))
def test_hashes_are_those_of_the_plain_version(text, ngram):
    assert shingle_hashes(text, ngram).tolist() == naive_text.shingle_hashes(text, ngram)


@given(st.lists(mixed_text, max_size=8), st.integers(1, 6))
def test_documents_side_by_side_do_not_touch_each_other(texts, ngram):
    hashes, offsets, num_words = hash_bytes([text.encode() for text in texts], ngram)
    assert [hashes[a:b].tolist() for a, b in itertools.pairwise(offsets)] == [
        naive_text.shingle_hashes(text, ngram) for text in texts
    ]
    assert num_words.tolist() == [len(naive_text.words(text)) for text in texts]


@given(
    st.binary(max_size=60)
    | st.lists(
        st.sampled_from(
            [
                b"a",
                b" ",
                b"\xe4\xb8\xad",
                b"\xe4",
                b"\xc0\xaf",
                b"\xed\xa0\x80",
                b"\xf4\x90\x80\x80",
                b"\xf0\x9f",
                b"\x80",
                b"\xff",
            ]
        ),
        max_size=12,
    ).map(b"".join)
)
def test_invalid_bytes_separate_words(data):
    hashes, _, num_words = hash_bytes([data, b"the end"], 2)
    text = data.decode("utf-8", "replace")
    assert hashes.tolist() == naive_text.shingle_hashes(text, 2) + naive_text.shingle_hashes("the end", 2)
    assert num_words.tolist() == [len(naive_text.words(text)), 2]


def test_a_code_point_cut_off_by_the_document_end_is_not_completed_from_the_next_one():
    whole = "中".encode()
    hashes, offsets, _ = hash_bytes([whole[:2], whole[2:], whole])
    assert offsets.tolist() == [0, 0, 0, 1]
    assert hashes.tolist() == naive_text.shingle_hashes("中", 5)


@pytest.mark.parametrize("num_words", [4093, 4094, 4095, 4096, 4097, 4098, 8190, 12_400])
@pytest.mark.parametrize("template", ["w{} ", "東"])
def test_texts_longer_than_the_word_buffer_have_no_seam(num_words, template):
    text = "".join(template.format(number) for number in range(num_words))
    assert num_words + 10 > shingles.WORD_BUFFER
    assert shingle_hashes(text, 5).tolist() == naive_text.shingle_hashes(text, 5)
    assert shingle_hashes(text + " . " * 50, 5).tolist() == naive_text.shingle_hashes(text, 5)


def test_the_number_of_words_is_part_of_a_short_shingle():
    assert len(shingle_hashes("one two three")) == 1
    assert len({shingle_hashes(text)[0] for text in ("one", "one two", "one two three", "one two three four")}) == 4
    assert len(shingle_hashes("… !")) == 0


def test_worked_example_of_two_sentences_that_differ_in_their_last_word():
    left = unique_shingles("the cat sat on the mat and then slept")
    right = unique_shingles("the cat sat on the mat and then left")
    assert len(left) == len(right) == 5
    assert len(np.intersect1d(left, right)) == 4
    assert len(np.union1d(left, right)) == 6


def test_golden_hashes():
    assert shingle_hashes("The quick brown fox jumps over the lazy dog").tolist() == GOLDEN
    assert naive_text.shingle_hashes("the quick brown fox jumps over the lazy dog", 5) == GOLDEN


GOLDEN = [3057792619, 3039189572, 3834456438, 1415299184, 496497620]


@pytest.mark.parametrize("type_", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
@given(texts=st.lists(mixed_text, max_size=10), start=st.integers(0, 5), max_bytes=st.integers(1, 100))
def test_blocks_hold_the_texts_of_whole_and_sliced_arrays(type_, texts, start, max_bytes):
    array = pa.array(texts, type=pa.string()).cast(type_).slice(start)
    chunked = pa.chunked_array([array, array.slice(0, 1), array.slice(0, 0)])
    found = [
        bytes(data[a:b]).decode()
        for data, offsets in utf8_blocks(chunked, max_bytes)
        for a, b in itertools.pairwise(offsets)
    ]
    assert found == chunked.to_pylist()


def test_one_text_larger_than_a_block_passes():
    texts = pa.array(["a", "b" * 1000, "c", "d"])
    assert [len(offsets) - 1 for _, offsets in utf8_blocks(texts, 10)] == [1, 1, 2]


def test_nulls_and_other_types_are_our_mistake():
    with pytest.raises(AssertionError, match="1 null"):
        list(utf8_blocks(pa.array(["a", None]), 10))
    with pytest.raises(AssertionError, match="int64"):
        list(utf8_blocks(pa.array([1]), 10))
