import json
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from pipeline_assets.transforms import word_cache, word_classes, word_kernels
from pipeline_assets.transforms.encode import encode_by_library, encode_documents
from pipeline_assets.transforms.word_cache import (
    INLINE_BYTES,
    MAX_DIGITS,
    MAX_WORD_BYTES,
    encode_by_words,
    encoder_for,
    new_table,
)
from resources.tokenizer import load_tokenizer, train_tokenizer

EOS = "<|endoftext|>"
TRAINING = [
    "The cat sat on the mat; it didn't say they'll, we've, I'm, you're or HE'D, and 1234567 dogs ran  in\n\n  3 rows.",
    "def f(x):\n    return x[0] + 12.5  # ok\n\n\nfor i in range(10):\n\tprint(f(i), 'abc')\r\n",
    "Ünïcödé naïve café — “it’s” 日本語のテキスト 한국어 Привет мир 🙂🙂 e\u0301 <|endoftext|> <think>",
] * 3

# Every way in which the patterns may cut, and what looks like something else.
FRAGMENTS = [
    *("'s", "'t", "'re", "'ve", "'m", "'ll", "'d", "'S", "'RE", "'Ve", "'lL", "'D", "'\u017f", "'", "''", "’s", "'r", "'x"),
    *(" ", "  ", "   ", "\t", "\n", "\n\n", "\r\n", "\r", " \n", "\n ", "\u00a0", "\u3000", "\u2028", "\u0085", "\v", "\x1c"),
    *("a", "Z", "the", " cat", "1", "12", "1234567", " 7", "½", "٣", "Ⅷ", "²", "!", "?!", " ...", "$", "_", "~~", "\0", "\x7f"),
    *("é", "e\u0301", "\u0301", "\u0344", "Å", "ﬁ", "日本", "語", "かな", "한", "\u1100\u1161\u11a8", "क्षि", "ไทย", "🙂", "👩‍👩‍👧", "🇩🇪"),
    *("\ufeff", "\ufffd", "\ufffe", "\u200b", "\u00ad", "\ue000", "\U0010ffff", "\U000e0001", "ǅ", "\u0345", "K", "ß", "ı"),
    *(EOS, "<|endoftext", "<think>", "<thin", "</think>", "Ġ", "Ċ", "ÿ"),
    *("ab" * 7 + "c", "ab" * 8, "x" * 17, "y" * MAX_WORD_BYTES, "y" * (MAX_WORD_BYTES + 1), "é" * 65, "-" * 300, " " * 200),
]  # fmt: skip
texts_of = st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.text(max_size=6)), max_size=14).map("".join)
documents_of = st.lists(texts_of, max_size=6)


UINT16 = np.dtype(np.uint16)


@dataclass(frozen=True)
class Given:
    """A tokenizer as `encode_by_words` takes it."""

    library: Any
    eos_id: int = 0
    token_dtype: Any = UINT16


def split_by(pattern: str) -> pre_tokenizers.PreTokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), byte_level])


GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
PRE_TOKENIZERS = {"gpt2": GPT2, **{f"digits_{number}": split_by(text) for text, number in MAX_DIGITS.items()}}


def train(pre_tokenizer, model=None) -> Tokenizer:
    library = Tokenizer(model or models.BPE())
    library.pre_tokenizer = pre_tokenizer
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=[EOS], initial_alphabet=alphabet, show_progress=False, min_frequency=2
    )
    library.train_from_iterator(TRAINING, trainer=trainer)
    library.encode_special_tokens = True
    return library


def normalizing(library: Tokenizer) -> Tokenizer:
    """Like Qwen 3's: NFC, and added tokens that are ordinary text."""
    library.normalizer = normalizers.NFC()
    library.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)])
    library.post_processor = processors.ByteLevel(trim_offsets=False)
    return library


def ignoring_merges(library: Tokenizer) -> Tokenizer:
    """Like Llama 3's: words of the vocabulary are tokens, also those that merges do not give."""
    state = json.loads(library.to_str())["model"]
    vocabulary = {**state["vocab"], **{word: 500 + at for at, word in enumerate(("Ġzebra", "xqz", "123", "zz", "'lL"))}}
    merges = [tuple(merge) for merge in state["merges"]]
    library.model = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True)
    return library


@pytest.fixture(scope="module", params=[*PRE_TOKENIZERS, "normalizing", "ignoring_merges"])
def tokenizer(request) -> Given:
    if request.param == "normalizing":
        return Given(normalizing(train(PRE_TOKENIZERS["digits_1"])))
    if request.param == "ignoring_merges":
        return Given(ignoring_merges(train(PRE_TOKENIZERS["digits_3"])))
    return Given(train(PRE_TOKENIZERS[request.param]))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_bytes(train_tokenizer(TRAINING, 400))
    return load_tokenizer(path)


def library_ids(tokenizer: Given, texts: Sequence[str]) -> list[list[int]]:
    """The definition: what the library gives for whole texts, and an EOS."""
    encodings = tokenizer.library.encode_batch(list(texts), add_special_tokens=False)
    return [[*one.ids, tokenizer.eos_id] for one in encodings]


def flat_ids(tokenizer: Given, texts: Sequence[str]) -> list[int]:
    return [*chain.from_iterable(library_ids(tokenizer, texts))]


def word_ids(tokenizer: Given, texts: Sequence[str], **changes) -> list[list[int]]:
    encoder, reason = encoder_for(tokenizer)
    assert encoder is not None, reason
    ids, offsets = encode_by_words(
        replace(encoder, tables=[], **changes) if changes else encoder, tokenizer, pa.array(texts, type=pa.string())
    )
    assert ids.dtype == tokenizer.token_dtype
    assert offsets.dtype == np.int64
    assert offsets[0] == 0
    assert offsets[-1] == len(ids)
    return [ids[start:end].tolist() for start, end in pairwise(offsets.tolist())]


def assert_same(tokenizer: Given, texts: Sequence[str], **changes) -> None:
    expected = library_ids(tokenizer, texts)
    for text, found, wanted in zip(texts, word_ids(tokenizer, texts, **changes), expected, strict=True):
        assert found == wanted, text


@settings(max_examples=300)
@given(texts=documents_of)
@example(texts=FRAGMENTS)
@example(texts=[left + right for left in FRAGMENTS[:46] for right in FRAGMENTS[:46]])
@example(texts=["  a", " \na", "\n a", "\t\ta", "a  ", "a \n ", "1  2", "  \n\n  x", "' s", " 's", " 'll", "'s's"])
def test_ids_are_the_librarys(tokenizer, texts):
    assert_same(tokenizer, texts)


@settings(max_examples=300)
@given(texts=st.lists(st.text(max_size=40), max_size=4))
def test_ids_of_any_unicode_are_the_librarys(tokenizer, texts):
    assert_same(tokenizer, texts)


@given(texts=documents_of)
def test_documents_are_encoded_by_words_as_by_the_library(trained, texts):
    array = pa.array(texts, type=pa.string())
    assert encoder_for(trained)[0] is not None
    found, expected = encode_documents(trained, array), encode_by_library(trained, array)
    assert [one.tolist() for one in found] == [one.tolist() for one in expected]
    assert [one.dtype for one in found] == [one.dtype for one in expected]
    assert len(encoder_for(trained)[0].tables) == 1


@given(texts=documents_of, max_slots=st.sampled_from([2, 8, 64]))
def test_a_table_that_is_full_changes_nothing(tokenizer, texts, max_slots):
    if encoder_for(tokenizer)[0].whole_words:
        max_slots = 64  # words that merges do not give must fit
    assert_same(tokenizer, [*texts, *texts], max_slots=max_slots)


def test_a_small_table_grows_to_its_limit_and_no_further(tokenizer, monkeypatch):
    monkeypatch.setattr(word_cache, "MIN_SLOTS", 16)
    monkeypatch.setattr(word_cache, "BLOCK_BYTES", 40)
    encoder = replace(encoder_for(tokenizer)[0], tables=[], max_slots=256)
    names = [chr(97 + number // 26) + chr(97 + number % 26) for number in range(300)]
    words = [f"word{name} and {'long' * 5}{name}" for name in names]
    for texts in (words, words[::-1]):
        ids, _ = encode_by_words(encoder, tokenizer, pa.array(texts))
        assert ids.tolist() == flat_ids(tokenizer, texts)
    (table,) = encoder.tables
    assert len(table.slots) == 256
    assert 16 < table.used[0] <= 128 < len({word for text in words for word in text.split()})
    assert (table.slots[:, 1] != 0).sum() == table.used[0]
    assert table.used[1] <= len(table.long_bytes)
    assert table.used[2] <= len(table.long_ids)
    assert table.used[3] == 1


def test_a_word_is_merged_once_and_found_afterwards(tokenizer):
    encoder = replace(encoder_for(tokenizer)[0], tables=[])
    texts = pa.array(["the quick brown fox " * 20, "fox the brown quick " * 20])
    encode_by_words(encoder, tokenizer, texts)
    num_words = int(encoder.tables[0].used[0])
    before = encoder.tables[0].slots.copy()
    encode_by_words(encoder, tokenizer, texts)
    assert 5 <= num_words - len(encoder.whole_words) <= 12
    assert encoder.tables[0].used[0] == num_words
    assert (encoder.tables[0].slots == before).all()


@given(texts=documents_of, block_bytes=st.sampled_from([1, 7, 64]), start=st.integers(0, 3))
def test_blocks_array_types_and_slices_change_nothing(tokenizer, texts, block_bytes, start):
    expected = flat_ids(tokenizer, texts[start:])
    encoder, _ = encoder_for(tokenizer)
    array = pa.array(texts, type=pa.string())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(word_cache, "BLOCK_BYTES", block_bytes)
        for same in (array, array.cast(pa.large_string()), array.dictionary_encode(), pa.chunked_array([array])):
            assert encode_by_words(encoder, tokenizer, same.slice(start))[0].tolist() == expected


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_every_character_of_the_basic_plane_is_of_the_class_that_the_library_sees(name):
    tokenizer = Given(train(PRE_TOKENIZERS[name]))
    characters = [chr(number) for number in range(0x10000) if not 0xD800 <= number < 0xE000]
    texts = [
        "".join(f"a{one}1{one}! {one}'{one}a\n" for one in characters[at : at + 256])
        for at in range(0, len(characters), 256)
    ]
    assert_same(tokenizer, texts)


def test_a_code_point_is_asked_for_when_a_text_first_has_it(tokenizer):
    encoder, _ = encoder_for(tokenizer)
    page = 0x16F00  # Miao
    encoder.classes[page : page + word_classes.PAGE] = word_classes.UNKNOWN
    text = "known \U00016f04 and \U00016f50\U00016f51"
    assert_same(tokenizer, ["before", text, "after " + text])
    known = encoder.classes[page : page + word_classes.PAGE]
    assert set(known.tolist()) == {1, 8}
    assert (encoder.classes[0xD800:0xE000] == word_classes.INVALID).all()


class CountingModel:
    """The library's model, and how often it was asked."""

    def __init__(self, library):
        self.library, self.asked = library, []

    def __getattr__(self, name):
        return getattr(self.library, name)

    @property
    def model(self):
        return self

    def tokenize(self, word):
        self.asked.append(len(word))
        return self.library.model.tokenize(word)


def test_a_word_of_a_megabyte_goes_to_the_library_once_and_is_not_kept(tokenizer):
    library = CountingModel(tokenizer.library)
    encoder = replace(encoder_for(tokenizer)[0], tables=[])
    texts = ["start " + "abc" * 350_000 + " end", "-" * MAX_WORD_BYTES, "=" * (MAX_WORD_BYTES + 1)]
    ids, _ = encode_by_words(encoder, replace(tokenizer, library=library), pa.array(texts))
    assert [size for size in library.asked if size > 1000] == [1_050_001] == [max(library.asked)]
    assert len(library.asked) == 2
    assert ids.tolist() == flat_ids(tokenizer, texts)
    assert encoder.tables[0].used[1] < 200


def test_a_document_of_fifty_megabytes_asks_the_library_nothing():
    tokenizer = Given(train(GPT2))
    encoder = replace(encoder_for(tokenizer)[0], tables=[])
    library = CountingModel(tokenizer.library)
    line = "".join(f"line {number}: the cat isn't   there, {number * 7919}!\n" for number in range(500))
    times = 50_000_000 // len(line) + 1
    ids, offsets = encode_by_words(encoder, replace(tokenizer, library=library), pa.array([line * times]))
    assert len(line) * times >= 50_000_000
    assert offsets.tolist() == [0, len(ids)]
    once = library_ids(tokenizer, [line])[0][:-1]
    assert np.array_equal(ids[:-1].reshape(times, len(once)), np.broadcast_to(once, (times, len(once))))
    assert library.asked == []
    assert encoder.tables[0].used[0] < 2000


def test_no_hash_stands_for_a_word():
    """Two words with the same hash: both are kept, each with its own id."""
    spread, first, other = int(word_kernels.SPREAD), 0x6162636465666768, 0x6162636465666769

    def run_of(word):
        return word_kernels.fmix64(np.uint64((INLINE_BYTES + 1) ^ word)) * spread % (1 << 64)

    last = 0x3132333435363738
    words = [
        first.to_bytes(8, "little") + last.to_bytes(8, "little"),
        other.to_bytes(8, "little") + (last ^ run_of(first) ^ run_of(other)).to_bytes(8, "little"),
    ]
    data = np.frombuffer(b"".join(words) + bytes(16), dtype=np.uint8)
    table = new_table(16)
    for _ in range(2):
        word_kernels.insert_words(data, np.array([0, 16, 32]), np.array([7, 9], dtype=np.uint32), *table.arrays)
    filled = table.slots[table.slots[:, 1] != 0]
    assert len(filled) == 2
    assert filled[0, 0] == filled[1, 0]
    assert sorted(filled[:, 2].tolist()) == [7, 9]


def test_threads_share_an_encoder(tokenizer):
    encoder = replace(encoder_for(tokenizer)[0], tables=[])
    texts = [
        [f"thread {number} says {number * at} things, {'x' * (at % 40)}" for at in range(400)] for number in range(4)
    ]
    found: list[Any] = [None] * 4
    start = threading.Barrier(4)

    def work(number):
        start.wait()
        found[number] = [encode_by_words(encoder, tokenizer, pa.array(texts[number]))[0].tolist() for _ in range(5)]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(4):
        assert found[number] == [flat_ids(tokenizer, texts[number])] * 5
    assert 1 <= len(encoder.tables) <= 4


@pytest.mark.parametrize(
    "broken", [b"ok \xff", b"\xc3", b"\xed\xa0\x80", b"a\xc0\x80", b"\xf4\x90\x80\x80", b"\xe2\x82"]
)
def test_bytes_that_are_not_utf8_are_refused(tokenizer, broken):
    texts = pa.array([b"fine", broken + b" x", b"fine"], type=pa.binary())
    encoder, _ = encoder_for(tokenizer)
    as_text = pa.StringArray.from_buffers(3, texts.buffers()[1], texts.buffers()[2])
    with pytest.raises(UnicodeDecodeError):
        encode_by_words(encoder, tokenizer, as_text)
    assert_same(tokenizer, ["still fine"])


def test_no_documents(tokenizer):
    assert word_ids(tokenizer, []) == []
    assert word_ids(tokenizer, ["", ""]) == [[0], [0]]


def refused(change) -> Tokenizer:
    library = train(GPT2)
    change(library)
    return library


def without_a_byte(library):
    library.model = models.BPE(vocab={"a": 0, "b": 1}, merges=[])


REFUSED = {
    "special tokens": lambda library: setattr(library, "encode_special_tokens", False),
    "cuts or pads": lambda library: library.enable_truncation(5),
    "normalizer": lambda library: setattr(library, "normalizer", normalizers.Lowercase()),
    "pre-tokenizer": lambda library: setattr(library, "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "none": lambda library: setattr(library, "pre_tokenizer", None),
    '"Whitespace"': lambda library: setattr(library, "pre_tokenizer", pre_tokenizers.Whitespace()),
    "w+": lambda library: setattr(library, "pre_tokenizer", split_by(r"\w+")),
    "post-processor": lambda library: setattr(library, "post_processor", processors.BertProcessing(("a", 1), ("b", 2))),
    "not BPE": lambda library: setattr(library, "model", models.WordLevel({"a": 0}, unk_token="a")),
    "unk_token": lambda library: setattr(library, "model", models.BPE({"a": 0}, [], unk_token="a")),
    "dropout": lambda library: setattr(library.model, "dropout", 0.5),
    "lacks a byte": without_a_byte,
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_is_not_known_is_left_to_the_library(reason):
    encoder, found = encoder_for(Given(refused(REFUSED[reason])))
    assert encoder is None
    assert reason in found


def test_added_tokens_in_normalized_text_are_left_to_the_library():
    library = normalizing(train(GPT2))
    assert encoder_for(Given(library))[0] is not None
    library.add_tokens([AddedToken("<new>", normalized=True)])
    encoder, reason = encoder_for(Given(library))
    assert encoder is None
    assert "added tokens in normalized text" in reason


def test_what_is_no_library_tokenizer_is_left_alone():
    assert encoder_for(object()) == (None, "it is not one of the tokenizers library")


def test_a_tokenizer_has_one_encoder_until_its_settings_change():
    tokenizer = Given(train(GPT2))
    encoder, reason = encoder_for(tokenizer)
    assert reason == "byte-level BPE over words of GPT-2's pattern"
    assert encoder_for(tokenizer)[0] is encoder
    tokenizer.library.add_tokens(["the"])
    changed, _ = encoder_for(tokenizer)
    assert changed is not encoder
    assert_same(tokenizer, ["the cat", "th e", "other", "theth"])
    tokenizer.library.encode_special_tokens = False
    assert encoder_for(tokenizer)[0] is None


def test_an_encoder_goes_with_its_tokenizer():
    num_known = len(word_cache._known)
    library = train(GPT2)
    encoder_for(Given(library))
    assert len(word_cache._known) == num_known + 1
    del library
    assert len(word_cache._known) == num_known


def data_folder() -> Path:
    folder = os.environ.get("CORPUSMILL_TEST_DATA")
    if not folder:
        pytest.skip("CORPUSMILL_TEST_DATA names no folder with tokenizers/ and sample/")
    return Path(folder)


@pytest.mark.parametrize("name", ["gpt2.tokenizer.json", "qwen3.tokenizer.json.gz"])
def test_real_tokenizers_on_every_document_of_the_sample(name):
    tokenizer = load_tokenizer(data_folder() / "tokenizers" / name)
    given_tokenizer = Given(tokenizer.library, tokenizer.eos_id, tokenizer.token_dtype)
    files = sorted((data_folder() / "sample").rglob("*.parquet"))
    assert files
    for file in files:
        assert_same(given_tokenizer, pq.read_table(file, columns=["text"])["text"].to_pylist())
    assert_same(given_tokenizer, FRAGMENTS)
