import itertools

import naive_text
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline_assets.transforms.arrays import utf8_blocks
from pipeline_assets.transforms.shingles import (
    BLOCK,
    hash_and_count,
    hash_documents,
    shingle_hashes,
    unique_shingles,
)

# Words from few letters of many kinds, so that short texts have runs, repeats, ideographs and separators.
mixed_text = st.text(alphabet="aZé ,東ー안\u0301𠀀\n7", max_size=40)

# Characters of the kinds that the word rule tells apart, of every plane; surrogates are no text.
kinds = st.one_of(
    st.characters(categories=["L"]),
    st.characters(categories=["M"]),
    st.characters(categories=["N"]),
    st.characters(categories=["P", "S", "Z", "Cc", "Cf", "Cn", "Co"]),
    st.characters(min_codepoint=0x3041, max_codepoint=0x30FF),
    st.characters(min_codepoint=0x4E00, max_codepoint=0x9FFF),
    st.characters(min_codepoint=0xAC00, max_codepoint=0xD7A3),
    st.characters(min_codepoint=0x10000),
)
# ASCII in runs that are long enough to be folded at once, with anything in between.
ascii_runs = st.text(st.characters(max_codepoint=0x7F), max_size=150) | st.text(alphabet="ab, ", max_size=150)
long_text = st.lists(ascii_runs | st.text(kinds, max_size=6), max_size=12).map("".join)


def hash_bytes(pieces, ngram=5):
    offsets = np.concatenate([[0], np.cumsum([len(piece) for piece in pieces])]).astype(np.int64)
    return hash_documents(np.frombuffer(b"".join(pieces), dtype=np.uint8), offsets, ngram)


@given(mixed_text | st.text(kinds, max_size=60) | long_text, st.integers(1, 7))
def test_hashes_are_those_of_the_plain_version(text, ngram):
    assert shingle_hashes(text, ngram).tolist() == naive_text.shingle_hashes(text, ngram)


@given(long_text, st.integers(0, 100) | st.integers(BLOCK - 200, BLOCK + 100))
def test_where_a_text_lies_in_blocks_and_steps_does_not_matter(text, num_spaces):
    shifted = " " * num_spaces + text
    assert shingle_hashes(shifted).tolist() == shingle_hashes(text).tolist()


@given(
    st.sampled_from(["a", "a,b", "é ", "東", "\u0301", "🙂", "Ж ж"]),
    st.integers(-80, 80),
    long_text,
    st.sampled_from([1, 2]),
)
def test_block_borders_inside_long_texts_leave_no_seam(filler, excess, text, num_blocks):
    num_bytes = num_blocks * BLOCK + excess
    whole = (filler * (num_bytes // len(filler.encode()) + 1)).encode()[:num_bytes].decode("utf-8", "ignore") + text
    assert shingle_hashes(whole, 3).tolist() == naive_text.shingle_hashes(whole, 3)


@given(st.lists(mixed_text | long_text, max_size=8), st.integers(1, 6))
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
                b"Some ASCII, longer than one step of it: 42 bytes.",
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


@pytest.mark.parametrize("num_bytes", [BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7])
@pytest.mark.parametrize("letter", ["q", "É", "안", "𐐀"])
def test_a_word_longer_than_a_block_is_one_word(num_bytes, letter):
    word = letter * (num_bytes // len(letter.encode()))
    text = f"{word} one {word}{word}, two {word}"
    assert shingle_hashes(text, 2).tolist() == naive_text.shingle_hashes(text, 2)
    assert len(shingle_hashes(text, 2)) == 4


@pytest.mark.parametrize("ngram", [1, 5, BLOCK, 3 * BLOCK])
def test_runs_of_more_words_than_a_block_has(ngram):
    text = " ".join(f"w{number % 97}" for number in range(3 * BLOCK + 2))
    hashes = shingle_hashes(text, ngram)
    assert len(hashes) == 3 * BLOCK + 2 - ngram + 1
    assert [hashes[0], hashes[-1]] == [
        naive_text.shingle_hash(some) for some in (text.split()[:ngram], text.split()[-ngram:])
    ]


PATHOLOGICAL = {
    "no separator": b"a",
    "upper case, no separator": "É".encode(),
    "one-letter words": b"a ",
    "one-digit words and punctuation": b"1,2;",
    "only spaces": b" ",
    "only NUL": b"\0",
    "only emoji": "🙂".encode(),
    "only combining marks": "\u0301".encode(),
    "letters with many marks": ("e" + "\u0301" * 30).encode(),
    "right to left": "שלום עולם مرحبا ".encode(),
    "ideographs": "漢字かな".encode(),
    "ideographs beyond the first plane": "𠀀".encode(),
    "ideographs between letters": "a東".encode(),
    "never a byte of UTF-8": b"\xff",
    "continuation bytes": b"\x80",
    "leads without continuations": b"\xe4",
    "leads before ASCII": b"\xf0a",
    "cut code points": "漢".encode()[:2] + " é".encode()[:2],
    "surrogates": b"\xed\xa0\x80",
    "not ASCII once in a step": b"thirty-one bytes of ASCII, then " + "é".encode(),
}


@pytest.mark.parametrize("unit", PATHOLOGICAL.values(), ids=PATHOLOGICAL.keys())
def test_pathological_bytes_are_hashed_as_by_the_plain_version(unit):
    data = unit * (2 * BLOCK // len(unit) + 1)
    hashes, _, num_words = hash_bytes([b"x", data], 3)
    text = data.decode("utf-8", "replace")
    assert num_words.tolist() == [1, len(naive_text.words(text))]
    assert hashes.tolist() == naive_text.shingle_hashes("x", 3) + naive_text.shingle_hashes(text, 3)


@pytest.mark.parametrize("unit", PATHOLOGICAL.values(), ids=PATHOLOGICAL.keys())
def test_the_work_is_linear_in_the_bytes_whatever_they_are(unit):
    """Counted, not timed: no pass takes more than a few steps a byte, and twice the bytes take twice the steps."""
    num_steps = []
    for num_bytes in (500_000, 1_000_000):
        data = np.frombuffer(unit * (num_bytes // len(unit)), dtype=np.uint8)
        hashes, _, num_words, steps = hash_and_count(data, np.array([0, len(data)]), 5)
        assert steps <= 5 * len(data) + 1000
        assert len(hashes) <= num_words[0] <= (len(data) + 1) // 2
        num_steps.append(steps)
    assert num_steps[1] <= 2 * num_steps[0] + 1000


def test_many_short_documents_take_few_steps_each():
    offsets = np.arange(0, 300_001, 3)
    _, _, num_words, steps = hash_and_count(np.frombuffer(b"a b" * 100_000, dtype=np.uint8), offsets, 5)
    assert (num_words == 2).all()
    assert steps <= 50 * 100_000


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


def test_a_dictionary_is_repeated_a_block_at_a_time():
    texts = pa.array(["ab" * 50, "c"] * 500).dictionary_encode()
    blocks = list(utf8_blocks(texts.slice(3), 1000))
    assert sum(len(offsets) - 1 for _, offsets in blocks) == 997
    assert max(len(data) for data, _ in blocks) <= 1000


def test_nulls_and_other_types_are_our_mistake():
    with pytest.raises(AssertionError, match="1 null"):
        list(utf8_blocks(pa.array(["a", None]), 10))
    with pytest.raises(AssertionError, match="1 null"):
        list(utf8_blocks(pa.array(["a", None]).dictionary_encode(), 10))
    for wrong in (pa.array([1]), pa.array([1]).dictionary_encode()):
        with pytest.raises(AssertionError, match="int64"):
            list(utf8_blocks(wrong, 10))
