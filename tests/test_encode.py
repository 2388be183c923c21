import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline_assets.transforms import encode
from pipeline_assets.transforms.encode import decode_documents, encode_documents, way_of_encoding
from resources.tokenizer import load_tokenizer, train_tokenizer

EOS = "<|endoftext|>"
CANARIES = [EOS, f"a{EOS}b", f"{EOS}{EOS}", f" {EOS}\n", "<|endoftext", "a\0b", "\r\n", "\ufeffhi", ""]

texts_strategy = st.lists(st.text(max_size=30) | st.sampled_from(CANARIES), max_size=8)


def load_trained(folder):
    path = folder / "tokenizer.json"
    path.write_bytes(train_tokenizer([f"the cat {n} sat on the mat <|endoftext|>" for n in range(50)], 300))
    return load_tokenizer(path)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_trained(tmp_path_factory.mktemp("tokenizer"))


def data_tokenizer(name):
    folder = os.environ.get("CORPUSMILL_TEST_DATA")
    if not folder:
        pytest.skip("CORPUSMILL_TEST_DATA names no folder with tokenizers/")
    return load_tokenizer(Path(folder) / "tokenizers" / name)


@pytest.fixture(scope="module")
def gpt2():
    return data_tokenizer("gpt2.tokenizer.json")


@pytest.fixture(scope="module")
def qwen3():
    return data_tokenizer("qwen3.tokenizer.json.gz")


def ids_of(tokenizer, text):
    ids, offsets = encode_documents(tokenizer, pa.array([text]))
    assert offsets.tolist() == [0, len(ids)]
    assert ids[-1] == tokenizer.eos_id
    return ids[:-1].tolist()


def assert_round_trip(tokenizer, texts):
    ids, offsets = encode_documents(tokenizer, pa.array(texts, type=pa.string()))
    assert ids.dtype == tokenizer.token_dtype
    assert offsets.dtype == np.int64
    assert np.flatnonzero(ids == tokenizer.eos_id).tolist() == (offsets[1:] - 1).tolist()
    assert decode_documents(tokenizer, ids, offsets) == texts


@given(texts=texts_strategy)
def test_eos_ends_each_document_and_is_nowhere_else_and_decoding_gives_the_texts_back(tokenizer, texts):
    assert_round_trip(tokenizer, texts)


@pytest.mark.parametrize("name", ["tokenizer", "gpt2", "qwen3"])
def test_canaries_are_ordinary_text(name, request):
    assert_round_trip(request.getfixturevalue(name), [*CANARIES, "日本語 🙂"])


@given(texts=texts_strategy, start=st.integers(0, 4))
def test_array_type_and_slices_do_not_matter(tokenizer, texts, start):
    array = pa.array(texts, type=pa.string())
    expected = [list_.tolist() for list_ in encode_documents(tokenizer, array.slice(start))]
    for same in (array.cast(pa.large_string()), array.dictionary_encode(), pa.chunked_array([array])):
        assert [list_.tolist() for list_ in encode_documents(tokenizer, same.slice(start))] == expected


def test_batches_are_cut_by_bytes_and_change_nothing(tokenizer, monkeypatch):
    texts = pa.array(["one", "the cat " * 100, "", "two", "three"])
    whole = encode_documents(tokenizer, texts)
    batches = []

    class Counting:
        eos_id = tokenizer.eos_id
        token_dtype = tokenizer.token_dtype

        def encode_batch(self, some):
            batches.append(len(some))
            return tokenizer.encode_batch(some)

    monkeypatch.setattr(encode, "BATCH_BYTES", 10)
    cut = encode_documents(Counting(), texts)
    assert batches == [1, 1, 3]
    assert [one.tolist() for one in cut] == [one.tolist() for one in whole]


def test_the_way_of_encoding_is_named_with_its_reason(tokenizer):
    class Other:
        pass

    assert way_of_encoding(tokenizer) == "a table of words: byte-level BPE over words of GPT-2's pattern"
    assert way_of_encoding(Other()) == "the library, since it is not one of the tokenizers library"


def test_no_documents(tokenizer):
    ids, offsets = encode_documents(tokenizer, pa.array([], type=pa.string()))
    assert ids.dtype == np.uint16
    assert offsets.tolist() == [0]


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("Hello world", [15496, 995]),
        ("Hello, world!", [15496, 11, 995, 0]),
        (EOS, [27, 91, 437, 1659, 5239, 91, 29]),
        ("\r\n", [201, 198]),
        ("a\0b", [64, 188, 65]),
    ],
)
def test_gpt2_ids(gpt2, text, ids):
    assert ids_of(gpt2, text) == ids


def test_gpt2_byte_order_mark(gpt2):
    assert ids_of(gpt2, "\ufeffhi")[:3] == [171, 119, 123]


@pytest.mark.parametrize(
    ("text", "num_gpt2", "num_qwen3"),
    [("Keep duplicate values.", 4, 4), ("sorted(xs)", 5, 3), ("[3, 1, 3]", 7, 9)],
)
def test_counts_of_two_tokenizers(gpt2, qwen3, text, num_gpt2, num_qwen3):
    assert (len(ids_of(gpt2, text)), len(ids_of(qwen3, text))) == (num_gpt2, num_qwen3)


def test_qwen3_ids_need_32_bits(qwen3):
    assert ids_of(qwen3, "sorted(xs)") == [28298, 53322, 8]
    ids, _ = encode_documents(qwen3, pa.array(["sorted(xs)"]))
    assert ids.dtype == np.uint32
    assert ids[-1] == 151643
