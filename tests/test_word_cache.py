import json
import os
import random
import threading
import tracemalloc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from pipeline_assets.transforms import byte_pairs, word_cache, word_classes, word_kernels, word_tables
from pipeline_assets.transforms.byte_pairs import MAX_WORD_BYTES, MIN_WINDOW_BYTES, merged, read_merges
from pipeline_assets.transforms.encode import encode_by_library, encode_documents
from pipeline_assets.transforms.word_cache import encode_by_words, encoder_for
from pipeline_assets.transforms.word_kernels import MAX_PROBES
from pipeline_assets.transforms.word_patterns import SPLIT_PATTERNS
from pipeline_assets.transforms.word_tables import INLINE_BYTES, WordTable, enlarged, first_table, new_table
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
# What GPT-4o's pattern tells apart: capitals, small letters, letters of no case, marks, and what may stand around them.
FRAGMENTS += [
    "A",
    "aB",
    "ABc",
    "DON'T",
    "x'Ll",
    "漢A",
    "A漢",
    "ʰ",
    "ªB",
    "A\u0301B",
    "\u0301AB",
    "!\u0301",
    "!\n/\r",
    "//",
]
# Digits that the library cuts out, but that its patterns take for none; digits of other scripts; emoji in pieces.
FRAGMENTS += [
    "\U00011de0",
    "\U00016ff4",
    "๓๔",
    "१२३४",
    "㊿",
    "❤\ufe0f",
    "1\ufe0f\u20e3",
    "👍🏽",
    "\r\r\n",
    " \t\n\t ",
    "\n \n ",
]
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
DIGITS = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2])
BY_SPLIT = {pattern.name: split_by(regex) for regex, pattern in SPLIT_PATTERNS.items()}
PRE_TOKENIZERS = {"gpt2": GPT2, "digits": DIGITS, **BY_SPLIT}


def train(pre_tokenizer, model=None, training=True) -> Tokenizer:
    library = Tokenizer(model or models.BPE())
    library.pre_tokenizer = pre_tokenizer
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=[EOS], initial_alphabet=alphabet, show_progress=False, min_frequency=2
    )
    if training:
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
        return Given(normalizing(train(PRE_TOKENIZERS["Qwen"])))
    if request.param == "ignoring_merges":
        return Given(ignoring_merges(train(PRE_TOKENIZERS["Llama 3"])))
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


@given(texts=documents_of)
@example(texts=FRAGMENTS)
@example(texts=[left + right for left in FRAGMENTS[:46] for right in FRAGMENTS[:46]])
@example(texts=["  a", " \na", "\n a", "\t\ta", "a  ", "a \n ", "1  2", "  \n\n  x", "' s", " 's", " 'll", "'s's"])
def test_ids_are_the_librarys(tokenizer, texts):
    assert_same(tokenizer, texts)


@given(texts=st.lists(st.text(max_size=40), max_size=4))
def test_ids_of_any_unicode_are_the_librarys(tokenizer, texts):
    assert_same(tokenizer, texts)


# One of each class that some pattern knows, and the bytes that it names.
KINDS = ["A", "a", "語", "\u0301", "1", "½", " ", "\u3000", "\n", "!", "/", "'", "s", "L"]


@pytest.mark.parametrize("following", KINDS)
def test_every_text_of_four_characters_of_any_classes_is_cut_as_by_the_library(tokenizer, following):
    assert_same(tokenizer, [following + "".join(rest) for rest in product(KINDS, repeat=3)])


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


@pytest.mark.parametrize("block_bytes", [40, 1 << 20])
def test_a_small_table_grows_to_its_limit_and_no_further(tokenizer, monkeypatch, block_bytes):
    """Between blocks, and within one."""
    monkeypatch.setattr(word_tables, "MIN_SLOTS", 16)
    monkeypatch.setattr(word_cache, "BLOCK_BYTES", block_bytes)
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


# The basic plane, and of the others letters with case, marks, numbers, emoji and tags.
CHARACTERS = [
    *(range(0xD800), range(0xE000, 0x10000), range(0x10400, 0x10500), range(0x11000, 0x11100)),
    *(range(0x11D80, 0x11E00), range(0x16F00, 0x17000), range(0x1D400, 0x1D800), range(0x1E900, 0x1E980)),
    *(range(0x1F300, 0x1F680), range(0xE0000, 0xE0200)),
]


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_every_character_is_of_the_class_that_the_library_sees(name):
    tokenizer = Given(train(PRE_TOKENIZERS[name]))
    characters = [chr(number) for number in chain(*CHARACTERS)]
    texts = [
        "".join(f"a{one}1{one}! {one}'{one}a\nA{one}Aa{one}{one}" for one in characters[at : at + 256])
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
    assert {*(known & word_classes.KIND).tolist()} == {int(word_classes.LETTER), int(word_classes.OTHER)}
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


LETTERS, DIGIT_CHARACTERS = "abcdefghijklmnopqrstuvwxyz", "0123456789"
# Words without end, in some patterns.
ENDLESS = {
    "prose without spaces": "thecatsatonthematanditdidnotsaythatitwould",
    "letters": "".join(random.Random(1).choices(LETTERS, k=10_007)),
    "one letter": "a",
    "digits": "".join(random.Random(2).choices(DIGIT_CHARACTERS, k=10_007)),
    "newlines": "\n",
    "spaces": " ",
    "both": " \n",
    "marks": "\u0301",
    "ideographs": "漢字仮名交じり文",
    "capitals": "ABÇD",
    "signs": "=-=",
}


def endless(kind: str, num_bytes: int) -> str:
    return ENDLESS[kind] * (num_bytes // len(ENDLESS[kind].encode()))


@pytest.mark.parametrize("kind", ENDLESS)
def test_a_document_of_one_word_is_encoded_in_windows_without_the_library(tokenizer, kind):
    library = CountingModel(tokenizer.library)
    encoder = replace(encoder_for(tokenizer)[0], tables=[])
    texts = [endless(kind, 200_000), "x", f"start {endless(kind, 300)} end"]
    ids, _ = encode_by_words(encoder, replace(tokenizer, library=library), pa.array(texts))
    assert library.asked == []
    assert ids.tolist() == flat_ids(tokenizer, texts)
    assert encoder.tables[0].used[1] <= MAX_WORD_BYTES * encoder.tables[0].used[0]


@settings(max_examples=50)
@given(
    parts=st.lists(st.tuples(st.sampled_from(["the", "ab", "abc", "zq", "é", "語"]), st.integers(1, 90)), max_size=12)
)
def test_long_words_of_uneven_parts_are_the_librarys(tokenizer, parts):
    assert_same(tokenizer, ["".join(part * times for part, times in parts)])


@pytest.mark.parametrize("num_bytes", [20_000, 2_000_000])
def test_windows_are_as_many_as_the_bytes_ask_for(tokenizer, num_bytes):
    """They are what a long word costs: each takes at most the square of MAX_WINDOW_BYTES."""
    merges = encoder_for(tokenizer)[0].merges
    for kind in ENDLESS:
        word = endless(kind, num_bytes).encode()
        assert len(word) // MIN_WINDOW_BYTES <= num_windows(merges, word) <= len(word) // (MIN_WINDOW_BYTES // 2)


def num_windows(merges: byte_pairs.Merges, word: bytes) -> int:
    ids, num_ids = np.empty(len(word), dtype=np.uint32), np.empty(1, dtype=np.int64)
    return word_kernels.merge_words(
        np.frombuffer(word, dtype=np.uint8), np.array([0, len(word)]), *merges.arrays, ids, num_ids
    )


def model_of(pairs: Sequence[tuple[str, str]]) -> models.BPE:
    """A byte-level model with these merges, lowest rank first."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = dict.fromkeys([*alphabet, *(left + right for left, right in pairs)])
    return models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=[*pairs])


def merged_by_both(pairs: Sequence[tuple[str, str]], words: Sequence[str]) -> tuple[list[Any], list[list[int]]]:
    """Ids of words by windows and by the library."""
    library = Tokenizer(model_of(pairs))
    ours = merged(read_merges(json.loads(library.to_str())["model"]), [word.encode() for word in words])
    return [*ours], [[token.id for token in library.model.tokenize(word)] for word in words]


@st.composite
def random_merges(draw) -> list[tuple[str, str]]:
    """Merges of anything with anything, the same word from several pairs too: as no training gives them."""
    known, pairs = ["a", "b", "c"], []
    for _ in range(draw(st.integers(1, 30))):
        pair = draw(st.sampled_from(known)), draw(st.sampled_from(known))
        if pair not in pairs and len(pair[0] + pair[1]) < 400:
            pairs.append(pair)
            known.append(pair[0] + pair[1])
    return draw(st.permutations(pairs))


@settings(max_examples=200)
@given(pairs=random_merges(), parts=st.lists(st.tuples(st.text("abc", min_size=1, max_size=8), st.integers(1, 99))))
def test_windows_of_any_merges_give_the_librarys_ids_or_none(pairs, parts):
    word = "".join(part * times for part, times in parts)
    (ours,), (librarys,) = merged_by_both(pairs, [word])
    assert ours is None or ours == librarys


def test_a_cut_moves_until_it_fits():
    """Each pair of neighbours in a run of 61 letters merges before the pair on its left: a run is paired from its right
    end, so a window that ends in it pairs it otherwise."""
    letters = [chr(number) for number in range(0x30, 0x6D)]
    pairs = [*pairwise(letters)][::-1]
    for length in (1, 2, 3, 4, 5):
        word = "".join(letters) * 40 * length
        (ours,), (librarys,) = merged_by_both(pairs, [word])
        assert ours == librarys


def test_a_word_without_cuts_is_left_to_the_library():
    doubling = [("a" * 2**power, "a" * 2**power) for power in range(12)]
    words = ["a" * 100, "a" * 1000, "a" * 5000, "b" * 5000]
    ours, librarys = merged_by_both(doubling, words)
    assert [one is None for one in ours] == [False, False, True, False]
    assert [one for one in ours if one is not None] == [one for one, own in zip(librarys, ours, strict=True) if own]
    library = train(GPT2, model_of(doubling), training=False)
    counting = CountingModel(library)
    encoder, reason = encoder_for(Given(library))
    assert encoder is not None, reason
    texts = [f"{word} {word}b" for word in words]
    ids, _ = encode_by_words(replace(encoder, tables=[]), replace(Given(library), library=counting), pa.array(texts))
    assert sorted(counting.asked) == [5000, 5002]
    assert ids.tolist() == flat_ids(Given(library), texts)


FIFTY_MEGABYTES = 50_000_000


def test_a_document_of_fifty_megabytes_of_lines_asks_the_library_nothing():
    tokenizer = Given(train(GPT2))
    encoder = replace(encoder_for(tokenizer)[0], tables=[])
    library = CountingModel(tokenizer.library)
    line = "".join(f"line {number}: the cat isn't   there, {number * 7919}!\n" for number in range(500))
    times = FIFTY_MEGABYTES // len(line) + 1
    ids, offsets = encode_by_words(encoder, replace(tokenizer, library=library), pa.array([line * times]))
    assert offsets.tolist() == [0, len(ids)]
    once = library_ids(tokenizer, [line])[0][:-1]
    assert np.array_equal(ids[:-1].reshape(times, len(once)), np.broadcast_to(once, (times, len(once))))
    assert library.asked == []
    assert encoder.tables[0].used[0] < 2000


@pytest.mark.parametrize("kind", ["prose without spaces", "digits", "newlines", "spaces"])
def test_a_document_of_fifty_megabytes_in_one_word_asks_the_library_nothing_and_takes_bounded_memory(kind):
    tokenizer = Given(train(GPT2))
    library = CountingModel(tokenizer.library)
    encoder = replace(encoder_for(tokenizer)[0], tables=[])
    few = encode_by_words(encoder, tokenizer, pa.array([endless(kind, 500_000)]))[0]
    texts = pa.array([endless(kind, FIFTY_MEGABYTES)])
    tracemalloc.start()
    ids, _ = encode_by_words(encoder, replace(tokenizer, library=library), texts)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert library.asked == []
    assert encoder.merges.sizes[ids[:-1]].sum() == len(endless(kind, FIFTY_MEGABYTES))
    assert np.array_equal(ids[: len(few) - 1000], few[:-1000])
    assert 90 * len(few) < len(ids) < 110 * len(few)
    # The text padded, an id for each byte in 4 bytes and in 2, and once more where parts are put together.
    assert peak < 10 * FIFTY_MEGABYTES


def test_a_document_of_many_new_characters_is_not_begun_again_for_each_page(monkeypatch):
    """A page that is not known stops the kernel: it goes on where it was."""
    tokenizer = Given(train(GPT2))
    unknown = np.full(word_classes.NUM_CODE_POINTS, word_classes.UNKNOWN, dtype=np.uint8)
    encoder = replace(encoder_for(tokenizer)[0], tables=[], classes=unknown)
    encode_block, stops = word_kernels.encode_block, []

    def watched(*arguments):
        stopped_by = encode_block(*arguments)
        stops.append(int(arguments[-1][1]))
        return stopped_by

    monkeypatch.setattr(word_kernels, "encode_block", watched)
    pages = range(0x4E00, 0x9F00, word_classes.PAGE)
    text = "".join(f"{chr(page)} word " for page in pages) * 3
    ids, _ = encode_by_words(encoder, tokenizer, pa.array([text]))
    assert ids.tolist() == flat_ids(tokenizer, [text])
    assert stops == sorted(stops)
    assert len(set(stops)) > len(pages)
    assert stops[-1] == len(text.encode())


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


NUM_SLOTS = 1 << 12


def first_slots(words: Sequence[str], num_slots: int) -> np.ndarray:
    """Where the lookup of words of eight bytes begins."""
    spread, length = 0x9E3779B97F4A7C15, 8 << 56
    keys = np.frombuffer("".join(words).encode(), dtype="<u8")
    mixed = (keys ^ np.uint64(length * spread % (1 << 64))) * np.uint64(spread)
    return (mixed ^ mixed >> np.uint64(32)) & np.uint64(num_slots - 1)


@pytest.fixture(scope="module")
def chosen_words() -> list[str]:
    """Words whose lookup begins in the same eight slots of a table of NUM_SLOTS, in any order."""
    letters = np.random.default_rng(1).integers(97, 123, (400_000, 8), dtype=np.uint8)
    words = [row.tobytes().decode() for row in np.unique(letters, axis=0)]
    return [word for word, at in zip(words, first_slots(words, NUM_SLOTS).tolist(), strict=True) if at < 8]


def place_of(table: WordTable, word: str) -> int | None:
    """How many slots behind its first one a word of eight bytes is, None where it is in none."""
    (key,) = np.frombuffer(word.encode(), dtype="<u8")
    at = np.flatnonzero((table.slots[:, 0] == key) & (table.slots[:, 1] == np.uint64(8 << 56)))
    assert len(at) <= 1
    num_slots = len(table.slots)
    return int(at[0] - first_slots([word], num_slots)[0]) % num_slots if len(at) else None


def test_chosen_words_take_a_bounded_part_of_the_table_and_leave_it_to_others(chosen_words, monkeypatch):
    monkeypatch.setattr(word_tables, "MIN_SLOTS", NUM_SLOTS)
    tokenizer = Given(train(GPT2))
    encoder = replace(encoder_for(tokenizer)[0], tables=[])
    texts = ["\n".join(chosen_words), "\n".join(chosen_words[::-1])]
    ids, _ = encode_by_words(encoder, tokenizer, pa.array(texts))
    assert ids.tolist() == flat_ids(tokenizer, texts)
    (table,) = encoder.tables
    places = [place for word in chosen_words if (place := place_of(table, word)) is not None]
    assert max(places) == MAX_PROBES - 1
    assert MAX_PROBES <= len(places) < MAX_PROBES + 8 < len(chosen_words) // 4
    assert (len(table.slots), table.used[3]) == (NUM_SLOTS, 0)
    assert (table.slots[:, 1] != 0).sum() == table.used[0]

    num_words, honest = int(table.used[0]), [f"honest {number}" for number in range(500)]
    assert encode_by_words(encoder, tokenizer, pa.array(honest))[0].tolist() == flat_ids(tokenizer, honest)
    assert 0.9 * 501 < encoder.tables[0].used[0] - num_words <= 501


@pytest.mark.parametrize("num_before", [0, 1, MAX_PROBES - 1, MAX_PROBES, MAX_PROBES + 1])
def test_a_lookup_ends_after_so_many_slots(num_before):
    """A word is put there by hand with an id that merges do not give: what is found is that id, or its own ids."""
    tokenizer = Given(train(GPT2))
    encoder = replace(encoder_for(tokenizer)[0], tables=[])
    word, (own, _) = "qzqzjxkw", library_ids(tokenizer, ["qzqzjxkw", ""])
    table = new_table(NUM_SLOTS)
    (first,) = first_slots([word], NUM_SLOTS).tolist()
    run = np.arange(first, first + num_before) % NUM_SLOTS
    table.slots[run] = [1, 1 << 56, 0, 1]  # other words
    (key,) = np.frombuffer(word.encode(), dtype="<u8").tolist()
    table.slots[(first + num_before) % NUM_SLOTS] = [key, 8 << 56, 300, 1]
    before = table.slots.copy()
    encoder.tables.append(table)
    ids, _ = encode_by_words(encoder, tokenizer, pa.array([word]))
    assert ids.tolist() == ([300, 0] if num_before < MAX_PROBES else own)
    assert (table.slots == before).all()


def test_a_larger_table_has_the_words_from_the_start_and_no_word_beyond_a_lookup(chosen_words):
    """Three small tables of chosen words become one in which their lookups begin together."""
    whole_words = {word.encode(): 700 + number for number, word in enumerate(chosen_words[:5])}
    whole_words |= {b"a whole word of many bytes": 800, b"another one of many bytes": 801}
    old = first_table(whole_words, NUM_SLOTS)
    others = chosen_words[5 : 5 + MAX_PROBES + 20]
    scattered = np.arange(1000, 1000 + len(others))
    for slot, word in zip(scattered, others, strict=True):  # as they may lie in a table of another size
        (key,) = np.frombuffer(word.encode(), dtype="<u8").tolist()
        old.slots[slot] = [key, 8 << 56, 7, 1]
    old.used[0] += len(others)
    larger = enlarged(old, whole_words, NUM_SLOTS)
    assert all(place_of(larger, word) is not None for word in chosen_words[:5])
    places = [place_of(larger, word) for word in others]
    assert None in places
    assert max(place for place in places if place is not None) == MAX_PROBES - 1
    assert (larger.slots[:, 1] != 0).sum() == larger.used[0] < old.used[0]
    num_bytes = old.used[1]
    assert larger.used[1] == num_bytes == len(b"a whole word of many bytes" + b"another one of many bytes")
    assert (larger.long_bytes[:num_bytes] == old.long_bytes[:num_bytes]).all()
    assert {800, 801} <= {*larger.slots[:, 2].tolist()}


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


def with_template(single: str):
    template = processors.TemplateProcessing(single=single, special_tokens=[(EOS, 0), ("a", 5)])

    def change(library):
        library.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])

    return change


def with_long_whole_words(library):
    """More bytes of them than a new table has room for."""
    words = [f"{number:05}{'xy' * 50}" for number in range(6000)]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    vocabulary = {word: number for number, word in enumerate([*alphabet, *words])}
    library.model = models.BPE(vocab=vocabulary, merges=[], ignore_merges=True)


def with_many_added(library):
    """Each place of a text of their common beginning would be compared with all of them."""
    library.add_tokens([AddedToken(f"<extra_{number:03}>", normalized=False) for number in range(100)])


def byte_level(use_regex: bool, trim_offsets: bool) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex, trim_offsets=trim_offsets)


def split(regex: str, behavior="isolated", invert=False) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(regex), behavior, invert)


REGEX = {pattern.name: regex for regex, pattern in SPLIT_PATTERNS.items()}
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# As tokenizer.json files have them, and the name of the pattern.
SPELLINGS = {
    "trimming": (byte_level(True, True), "GPT-2"),
    "not trimming": (byte_level(True, False), "GPT-2"),
    "alone in a sequence": (pre_tokenizers.Sequence([byte_level(True, True)]), "GPT-2"),
    "GPT-2's as a split": (pre_tokenizers.Sequence([split(REGEX["GPT-2"]), byte_level(False, True)]), "GPT-2"),
    "SmolLM": (pre_tokenizers.Sequence([pre_tokenizers.Digits(True), byte_level(True, True)]), "SmolLM"),
    "GPT-4o": (pre_tokenizers.Sequence([split(GPT4O), byte_level(False, True)]), "GPT-4o"),
    "Llama 3": (pre_tokenizers.Sequence([split(LLAMA3), byte_level(False, True)]), "Llama 3"),
    "Qwen": (pre_tokenizers.Sequence([split(LLAMA3.replace("{1,3}", "")), byte_level(False, False)]), "Qwen"),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spellings_of_known_patterns_are_known(spelling):
    pre_tokenizer, name = SPELLINGS[spelling]
    tokenizer = Given(train(pre_tokenizer))
    assert encoder_for(tokenizer)[1] == f"byte-level BPE over words of {name}'s pattern"
    assert_same(tokenizer, [*FRAGMENTS, "".join(FRAGMENTS), "".join(FRAGMENTS[::-1])])


UNKNOWN_SPELLINGS = {
    "another behaviour": [split(LLAMA3, "merged_with_next"), byte_level(False, True)],
    "inverted": [split(LLAMA3, invert=True), byte_level(False, True)],
    "a string": [pre_tokenizers.Split(LLAMA3, "isolated"), byte_level(False, True)],
    "two patterns": [split(LLAMA3), byte_level(True, True)],
    "another number of digits": [split(LLAMA3.replace("{1,3}", "{1,2}")), byte_level(False, True)],
    "no slash": [split(GPT4O.replace("/", "")), byte_level(False, True)],
    "digits in runs": [pre_tokenizers.Digits(False), byte_level(True, True)],
    "digits last": [byte_level(True, True), pre_tokenizers.Digits(True)],
    "a space put first": [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=True)],
    "three parts": [pre_tokenizers.Digits(True), split(LLAMA3), byte_level(False, True)],
}


@pytest.mark.parametrize("spelling", UNKNOWN_SPELLINGS)
def test_other_spellings_are_left_to_the_library(spelling):
    encoder, reason = encoder_for(Given(train(pre_tokenizers.Sequence(UNKNOWN_SPELLINGS[spelling]))))
    assert encoder is None
    assert "its pre-tokenizer is not one of the known ones" in reason


REFUSED = {
    "special tokens": lambda library: setattr(library, "encode_special_tokens", False),
    "cuts or pads": lambda library: library.enable_truncation(5),
    "normalizer": lambda library: setattr(library, "normalizer", normalizers.Lowercase()),
    "pre-tokenizer": lambda library: setattr(library, "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "none": lambda library: setattr(library, "pre_tokenizer", None),
    '"Whitespace"': lambda library: setattr(library, "pre_tokenizer", pre_tokenizers.Whitespace()),
    "w+": lambda library: setattr(library, "pre_tokenizer", split_by(r"\w+")),
    "post-processor": lambda library: setattr(library, "post_processor", processors.BertProcessing(("a", 1), ("b", 2))),
    "more than add special tokens": with_template("$A $A"),
    "special tokens: Sequence": with_template("a"),
    "6,000 words that are not what their merges give do not fit": with_long_whole_words,
    "ordinary added tokens are 1,100 bytes": with_many_added,
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


@pytest.mark.parametrize("single", ["$A", "$A:1", f"{EOS} $A a", f"$0 {EOS}"])
def test_templates_that_only_add_special_tokens_are_known(single):
    assert_same(Given(refused(with_template(single))), FRAGMENTS)


@pytest.mark.parametrize("change", [with_template("$A $A"), with_template("a"), with_many_added])
def test_what_is_left_to_the_library_has_its_ids(change, tmp_path):
    library = refused(change)
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    texts = ["hello <extra_001> world", "<extra_"]
    ids, _ = encode_documents(tokenizer, pa.array(texts))
    assert ids.tolist() == flat_ids(Given(tokenizer.library, tokenizer.eos_id), texts)


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


@pytest.mark.parametrize(("name", "every"), [("gpt2.tokenizer.json", 1), ("qwen3.tokenizer.json.gz", 3)])
def test_real_tokenizers_on_documents_of_the_sample(name, every):
    tokenizer = load_tokenizer(data_folder() / "tokenizers" / name)
    given_tokenizer = Given(tokenizer.library, tokenizer.eos_id, tokenizer.token_dtype)
    files = sorted(path for part in ("sample", "fineweb_rows") for path in (data_folder() / part).rglob("*.parquet"))
    assert files
    for file in files:
        assert_same(given_tokenizer, pq.read_table(file, columns=["text"])["text"].to_pylist()[::every])
    assert_same(given_tokenizer, FRAGMENTS)
