import hashlib

import naive_text
import numpy as np
import pyarrow as pa
import pytest
from datasketch import MinHash
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline_assets.transforms import minhash, signature_kernels
from pipeline_assets.transforms.minhash import MinHashParams, is_wordless, permutations, sign_documents
from pipeline_assets.transforms.shingles import BLOCK, shingle_hashes
from training_io.errors import RecipeError

PARAMS = MinHashParams()

texts_strategy = st.lists(st.text(max_size=40) | st.text(alphabet="ab 東", max_size=40), max_size=6)


def library_signature(text, params):
    sketch = MinHash(
        num_perm=params.num_perm, seed=params.seed, scheme="affine32", hashfunc=lambda b: int.from_bytes(b, "little")
    )
    for value in shingle_hashes(text, params.ngram).tolist():
        sketch.update(value.to_bytes(4, "little"))
    return sketch.hashvalues.tolist()


@settings(deadline=None)
@given(
    texts_strategy, st.sampled_from([PARAMS, MinHashParams(num_perm=12, num_bands=3, rows_per_band=4, ngram=2, seed=7)])
)
def test_signatures_are_those_of_datasketch_bit_for_bit(texts, params):
    signatures, _ = sign_documents(pa.array(texts, type=pa.string()), params)
    assert signatures.dtype == np.uint32
    assert signatures.tolist() == [library_signature(text, params) for text in texts]


@settings(deadline=None, max_examples=30)
@given(texts_strategy)
def test_signatures_are_those_of_the_plain_version(texts):
    multipliers, addends = (values.tolist() for values in permutations(112, 1))
    signatures, stats = sign_documents(pa.array(texts, type=pa.string()), PARAMS)
    hashes = [naive_text.shingle_hashes(text, 5) for text in texts]
    assert signatures.tolist() == [naive_text.signature(some, multipliers, addends) for some in hashes]
    assert stats.num_documents == len(texts)
    assert stats.num_bytes == sum(len(text.encode()) for text in texts)
    assert stats.num_words == sum(len(naive_text.words(text)) for text in texts)
    assert stats.num_shingles == sum(map(len, hashes))
    assert stats.num_wordless == sum(not some for some in hashes)


def test_a_long_document_is_signed_as_datasketch_does():
    text = " ".join(f"w{number * number % 1009}" for number in range(6000))
    signatures, _ = sign_documents(pa.array(["", text, "x"]), PARAMS)
    assert signatures[1].tolist() == library_signature(text, PARAMS)


@given(texts_strategy, st.integers(0, 4))
def test_grouping_and_array_type_do_not_matter(texts, start):
    array = pa.array(texts, type=pa.string())
    expected, stats = sign_documents(array, PARAMS)
    for same in (array, array.cast(pa.large_string()), array.dictionary_encode()):
        signatures, _ = sign_documents(same, PARAMS)
        assert (signatures == expected).all()
        sliced, _ = sign_documents(same.slice(start), PARAMS)
        assert (sliced == expected[start:]).all()
        pieces = [same.slice(0, start), same.slice(start, 1), same.slice(start + 1)]
        signatures, chunked_stats = sign_documents(pa.chunked_array(pieces), PARAMS)
        assert (signatures == expected).all()
        assert chunked_stats == stats


@given(texts_strategy, st.integers(1, 50))
def test_neither_threads_nor_blocks_change_anything(texts, block_bytes):
    texts = pa.array(texts, type=pa.string())
    expected, stats = sign_documents(texts, PARAMS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(minhash, "BLOCK_BYTES", block_bytes)
        for num_threads in (1, 2, 4):
            signatures, same_stats = sign_documents(texts, PARAMS, num_threads)
            assert (signatures == expected).all()
            assert same_stats == stats


def test_threads_sign_several_blocks_of_a_large_array_without_the_gil():
    texts = pa.array([f"text {number} has its own words {number * 7 % 1013} " * 200 for number in range(600)])
    assert texts.nbytes > 3 * minhash.BLOCK_BYTES
    expected, stats = sign_documents(texts, PARAMS)
    assert stats.num_documents == len(np.unique(expected, axis=0)) == 600
    for num_threads in (2, 4):
        signatures, same_stats = sign_documents(texts, PARAMS, num_threads)
        assert (signatures == expected).all()
        assert same_stats == stats
    assert signature_kernels.hash_documents.targetoptions["nogil"]
    assert signature_kernels.sign.targetoptions["nogil"]


def test_no_threads_at_all_are_our_mistake():
    with pytest.raises(AssertionError, match="0"):
        sign_documents(pa.array(["a"]), PARAMS, 0)


def test_an_error_in_a_thread_is_raised():
    with pytest.raises(AssertionError, match="1 null"):
        sign_documents(pa.array(["a", None]), PARAMS, 2)


@given(st.permutations(["one two three four five six", "seven", "eight nine", ""]))
def test_rows_follow_their_documents(texts):
    signatures, _ = sign_documents(pa.array(texts), PARAMS)
    alone = [sign_documents(pa.array([text]), PARAMS)[0][0].tolist() for text in texts]
    assert signatures.tolist() == alone


def test_only_the_set_of_shingles_counts():
    signatures, _ = sign_documents(pa.array(["la la la la la", "La, la. LA la la la la la", "la la la la"]), PARAMS)
    assert (signatures[0] == signatures[1]).all()
    assert (signatures[0] != signatures[2]).any()


def test_documents_without_words_are_marked_and_counted():
    signatures, stats = sign_documents(pa.array(["", "…", "a"]), PARAMS)
    assert is_wordless(signatures).tolist() == [True, True, False]
    assert stats.num_wordless == 2


@pytest.mark.parametrize("type_", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_no_documents_and_documents_without_bytes(type_, num_threads):
    empty = pa.array([], type=pa.string()).cast(type_)
    for texts in (empty, pa.chunked_array([], type=type_), pa.chunked_array([empty, empty])):
        signatures, stats = sign_documents(texts, PARAMS, num_threads)
        assert signatures.shape == (0, 112)
        assert stats.num_documents == stats.num_steps == 0
    signatures, stats = sign_documents(pa.array([""] * 1000).cast(type_), PARAMS, num_threads)
    assert is_wordless(signatures).all()
    assert (stats.num_documents, stats.num_wordless, stats.num_steps) == (1000, 1000, 0)


def array_of_bytes(texts):
    """An Arrow array whose bytes nobody has checked, as a Parquet file may hold."""
    offsets = np.cumsum([0, *map(len, texts)], dtype=np.int32)
    return pa.Array.from_buffers(pa.string(), len(texts), [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(texts))])


@pytest.mark.parametrize(
    ("unit", "words_a_unit"),
    [
        (b"a", 0),
        ("\u0301".encode(), 0),
        (b" ", 0),
        (b"\0", 0),
        (b"\xff", 0),
        (b"\xe4", 0),
        ("🙂".encode(), 0),
        (b"a ", 1),
        ("שלום ".encode(), 1),
        ("漢".encode(), 1),
    ],
)
def test_a_megabyte_of_anything_is_signed_in_linear_work(unit, words_a_unit):
    """Counted, not timed: steps of all passes over the bytes, and shingles, each of which costs as much as another."""
    num_units = 1_000_000 // len(unit)
    signatures, stats = sign_documents(array_of_bytes([unit * num_units, b"two words"]), PARAMS)
    is_one_word = unit in (b"a", "\u0301".encode())
    assert stats.num_words == words_a_unit * num_units + is_one_word + 2
    assert stats.num_shingles <= stats.num_words <= (stats.num_bytes + 2) // 2
    assert stats.num_steps <= 5 * stats.num_bytes + 1000
    assert is_wordless(signatures).tolist() == [not (words_a_unit or is_one_word), False]


@given(st.lists(st.binary(max_size=40), max_size=5))
def test_invalid_bytes_are_signed_as_replaced_ones(texts):
    signatures, _ = sign_documents(array_of_bytes(texts), PARAMS)
    replaced, _ = sign_documents(
        pa.array([text.decode("utf-8", "replace") for text in texts], type=pa.string()), PARAMS
    )
    assert (signatures == replaced).all()


def test_a_document_of_many_blocks_between_others():
    text = "".join(f"w{number * number % 1009} 東京 é{number % 7}, " for number in range(2000))
    assert len(text.encode()) > 5 * BLOCK
    multipliers, addends = (values.tolist() for values in permutations(112, 1))
    signatures, _ = sign_documents(pa.array(["x", text, "y"]), PARAMS)
    hashes = set(naive_text.shingle_hashes(text, 5))
    assert signatures[1].tolist() == naive_text.signature(hashes, multipliers, addends)


def test_112_permutations_are_not_the_first_of_128():
    assert (permutations(112, 1)[1] != permutations(128, 1)[1][:112]).any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_perm": 128}, "num_perm = 128, found 14 × 8 = 112"),
        ({"rows_per_band": 9}, "14 × 9 = 126"),
        ({"ngram": 0}, "ngram: expected at least 1, found 0"),
        ({"seed": -1}, "seed: expected 0 to 4,294,967,295, found -1"),
        ({"unicode_version": "1.1.0"}, "expected Unicode 1.1.0"),
    ],
)
def test_parameters_that_contradict_themselves_are_refused(changes, message):
    with pytest.raises(RecipeError, match=message):
        MinHashParams(**changes)


def test_golden_signature():
    signatures, _ = sign_documents(pa.array(["The quick brown fox jumps over the lazy dog"]), PARAMS)
    assert signatures[0, :4].tolist() == GOLDEN_START
    assert hashlib.sha256(signatures.astype("<u4").tobytes()).hexdigest() == GOLDEN_SHA256


GOLDEN_START = [436652990, 1549855998, 99961124, 150352965]
GOLDEN_SHA256 = "125c7a8c1479a916d4f99d4a808323f2ef2b890b40665500855c51c5134bc321"
