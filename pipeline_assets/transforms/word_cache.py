"""Token ids by words: Arrow texts and a tokenizer object of the `tokenizers` library in, its very ids out, faster.

A byte-level BPE first cuts a text into words (its pre-tokens) and never merges across them, so the ids of a text are
those of its words, and a word's ids are worked out once:

    text ─▶ words, by the tokenizer's pattern ─▶ table of words seen ─▶ ids
                                                   └ not there: merged by rank, then kept

The library stays the definition. Which characters are letters, numbers and spaces is asked of its own pre-tokenizer,
merges and vocabulary are its own, a sample of its vocabulary is encoded by both before an encoder is used, and what is
not known here exactly is left to it: other patterns, models and normalizers altogether, texts with its ordinary added
tokens whole, words of more than 128 bytes one by one.

Cost: one compiled pass over the bytes; a table of at most 52 MB for each call that runs at the same time. A full table
takes no more words: new ones are then merged every time.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pipeline_assets.transforms.arrays import I64, U8, U32, U64, utf8_blocks
from pipeline_assets.transforms.word_classes import GPT2, ask_classes, class_table, settled_by_nfc
from training_io.errors import InvariantBroken

MAX_WORD_BYTES = 128  # merging takes the square of a word's length; the library's way does not
INLINE_BYTES, INLINE_IDS = 15, 2  # what a slot of 32 bytes holds itself

MIN_SLOTS, MAX_SLOTS = 1 << 16, 1 << 20
MAX_WHOLE_WORDS = 1 << 14  # that a new table holds from the start
LONG_BYTES_PER_SLOT, LONG_IDS_PER_SLOT = 8, 2
BLOCK_BYTES = 1 << 20
PADDING = 16  # the kernels read eight bytes at once, twice
NUM_PROBES = 512

NUM_BYTES = 256

SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
MAX_DIGITS = {SPLIT_PATTERN % r"\p{N}": 1, SPLIT_PATTERN % r"\p{N}{1,3}": 3}  # Qwen 2 and 3; Llama 3 and cl100k
PATTERN_NAMES = {GPT2: "GPT-2", 1: "Qwen", 3: "Llama 3"}

PLAIN_BPE: Mapping[str, Any] = {
    "type": "BPE",
    "dropout": None,
    "unk_token": None,
    "continuing_subword_prefix": None,
    "end_of_word_suffix": None,
    "byte_fallback": False,
}
HARMLESS_POST_PROCESSORS = {"ByteLevel", "TemplateProcessing"}  # they add only special tokens, and none are asked for


@dataclass(frozen=True, kw_only=True)
class WordTable:
    """Words seen and their ids, open addressing on a power of two of slots, at most half of them used.

    A slot: the word's bytes 0 to 7, and 8 to 14 with its length on top, or a hash and the place of its bytes; its ids,
    or their place; their number. `used` counts words, bytes of long words, ids of many; its last is 1 once a word was
    refused.
    """

    slots: U64
    long_bytes: U8
    long_ids: U32
    used: I64

    @property
    def arrays(self) -> tuple[U64, U8, U32, I64]:
        """As the kernels take them."""
        return self.slots, self.long_bytes, self.long_ids, self.used


@dataclass(frozen=True, kw_only=True)
class Merges:
    """A byte-level BPE: the id of each byte, and a hash table of pairs of ids to rank and new id."""

    byte_ids: U32
    pairs: U64


@dataclass(frozen=True, kw_only=True)
class WordEncoder:
    """What is needed besides the library's tokenizer to encode as it does; the tables are those not in use now."""

    max_digits: int
    classes: U8
    merges: Merges
    added: Sequence[bytes]
    is_normalizing: bool
    whole_words: Mapping[bytes, int]
    max_slots: int = MAX_SLOTS
    tables: list[WordTable] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class _Settings:
    """What decides on a library tokenizer's ids besides its model's merges; cheap to read."""

    spells_out_special: bool
    is_whole: bool
    normalizer: bytes | None
    pre_tokenizer: bytes | None
    post_processor: bytes | None
    model: tuple[Any, ...]
    added: Sequence[tuple[int, str, bool, bool]]


class LibraryTokenizer(Protocol):
    """What is asked of a tokenizer here."""

    @property
    def library(self) -> Any:
        """A `tokenizers.Tokenizer`."""

    @property
    def eos_id(self) -> int:
        """Id appended to every text."""

    @property
    def token_dtype(self) -> np.dtype[Any]:
        """uint16 or uint32: what the largest id fits into."""


_known: WeakKeyDictionary[Any, tuple[_Settings, WordEncoder | None, str]] = WeakKeyDictionary()


def encoder_for(tokenizer: object) -> tuple[WordEncoder | None, str]:
    """An encoder by words for a tokenizer, or None where only the library will do; and why.

    Made once for each library tokenizer, and again when its settings have changed; its model must not.
    """
    library = getattr(tokenizer, "library", None)
    if not hasattr(library, "pre_tokenizer"):
        return None, "it is not one of the tokenizers library"
    settings = _settings_of(library)
    known = _known.get(library)
    if known is None or known[0] != settings:
        _known[library] = known = (settings, *_make_encoder(library, settings))
    return known[1:]


def encode_by_words(
    encoder: WordEncoder, tokenizer: LibraryTokenizer, texts: pa.Array | pa.ChunkedArray
) -> tuple[npt.NDArray[Any], I64]:
    """The library's ids of texts without nulls, each with an EOS: (uint16 or uint32 [tokens], int64[n + 1] offsets).

    UnicodeDecodeError for bytes that are not UTF-8.
    """
    library, dtype = tokenizer.library, tokenizer.token_dtype
    parts, lengths = [np.empty(0, dtype=dtype)], [np.zeros(1, dtype=np.int64)]
    try:
        table = encoder.tables.pop()  # each call has one to itself: no two threads write into it
    except IndexError:
        table = _first_table(encoder)
    for data, offsets in utf8_blocks(texts, BLOCK_BYTES):
        block = _prepare(encoder, library, data, offsets)
        ids, ends = _encode_block(encoder, tokenizer, table, block)
        parts.append(ids)
        lengths.append(np.diff(ends, prepend=0))
        table = _with_room(table, encoder.max_slots)
    encoder.tables.append(table)
    return np.concatenate(parts), np.cumsum(np.concatenate(lengths))


@dataclass(frozen=True, kw_only=True)
class _Block:
    """Texts as the kernel takes them: bytes with padding behind, offsets; `whole` holds the ids of those left to the
    library, which are empty here."""

    data: U8
    offsets: I64
    whole: Mapping[int, list[int]]


def _encode_block(
    encoder: WordEncoder, tokenizer: LibraryTokenizer, table: WordTable, block: _Block
) -> tuple[npt.NDArray[Any], I64]:
    """Ids of a block, and where each text's end."""
    from pipeline_assets.transforms import word_kernels  # numba takes a second to import: not with the code location

    num_bytes, num_documents = len(block.data) - PADDING, len(block.offsets) - 1
    # A token is a byte or more. Pages of it that are not written take no memory.
    ids = np.empty(num_bytes + num_documents + INLINE_IDS, dtype=np.uint32)
    ends = np.empty(num_documents, dtype=np.int64)
    holes = np.empty((num_bytes // MAX_WORD_BYTES + 1, 3), dtype=np.int64)
    num_done = num_ids = num_holes = 0
    while True:
        num_done, num_ids, num_holes, code_point = word_kernels.encode_block(
            block.data,
            block.offsets,
            encoder.classes,
            encoder.max_digits,
            encoder.merges.byte_ids,
            encoder.merges.pairs,
            *table.arrays,
            tokenizer.eos_id,
            ids,
            ends,
            holes,
            num_done,
            num_holes,
        )
        if num_done == num_documents:
            break
        if code_point < 0:
            _refuse_invalid(block, num_done)
        ask_classes(tokenizer.library.pre_tokenizer, encoder.classes, encoder.max_digits, code_point)
    filled = [
        (int(at), _library_ids(tokenizer.library, block.data[start:end].tobytes()))
        for at, start, end in holes[:num_holes]
    ]
    filled += [(int(ends[document]) - 1, found) for document, found in block.whole.items()]
    return _fill_holes(ids[:num_ids].astype(tokenizer.token_dtype), ends, sorted(filled, key=lambda hole: hole[0]))


def _fill_holes(
    ids: npt.NDArray[Any], ends: I64, holes: Sequence[tuple[int, Sequence[int]]]
) -> tuple[npt.NDArray[Any], I64]:
    """Put ids between others: each hole stands before the id at its position."""
    if not holes:
        return ids, ends
    positions = np.array([at for at, _ in holes], dtype=np.int64)
    added = np.cumsum([0, *(len(found) for _, found in holes)])
    cut = np.split(ids, positions)
    parts = [cut[0]]
    for (_, found), rest in zip(holes, cut[1:], strict=True):
        parts += [np.array(found, dtype=ids.dtype), rest]
    return np.concatenate(parts), ends + added[np.searchsorted(positions, ends)]


def _library_ids(library: Any, word: bytes) -> list[int]:
    alphabet = byte_characters()
    return [token.id for token in library.model.tokenize("".join([alphabet[byte] for byte in word]))]


def _refuse_invalid(block: _Block, document: int) -> None:
    start, end = block.offsets[document : document + 2]
    str(block.data[start:end].tobytes(), "utf-8")
    raise InvariantBroken(f"document {document:,} of a block: expected bytes that are not UTF-8, found that they are.")


def _prepare(encoder: WordEncoder, library: Any, data: U8, offsets: I64) -> _Block:
    """A block's bytes copied, normalized where that may change them, without the texts left to the library."""
    first, last = int(offsets[0]), int(offsets[-1])
    padded = np.zeros(last - first + PADDING, dtype=np.uint8)
    padded[: last - first] = data[first:last]
    offsets = offsets - first
    replaced: dict[int, bytes] = {}
    whole: dict[int, list[int]] = {}
    for document in _unsettled(encoder, padded, offsets):
        text = str(padded[offsets[document] : offsets[document + 1]].tobytes(), "utf-8")
        replaced[document] = library.normalizer.normalize_str(text).encode()
    for document in _with_added(encoder.added, padded, offsets):
        text = str(padded[offsets[document] : offsets[document + 1]].tobytes(), "utf-8")
        whole[document] = library.encode(text, add_special_tokens=False).ids
        replaced[document] = b""
    if replaced:
        padded, offsets = _with_replaced(padded, offsets, replaced)
    return _Block(data=padded, offsets=offsets, whole=whole)


def _unsettled(encoder: WordEncoder, data: U8, offsets: I64) -> list[int]:
    """Documents that normalizing may change, or that are not UTF-8."""
    if not encoder.is_normalizing:
        return []
    from pipeline_assets.transforms import word_kernels

    is_unsettled = np.zeros(len(offsets) - 1, dtype=np.bool_)
    word_kernels.find_unsettled(data, offsets, settled_by_nfc(), is_unsettled)
    return np.flatnonzero(is_unsettled).tolist()


def _with_added(added: Sequence[bytes], data: U8, offsets: I64) -> list[int]:
    """Documents that spell out an added token: the library cuts those elsewhere."""
    if not added:
        return []
    block, found = data[:-PADDING].tobytes(), set[int]()
    for content in added:
        at = block.find(content)
        while at >= 0:
            document = int(np.searchsorted(offsets, at, side="right")) - 1
            found.add(document)
            at = block.find(content, int(offsets[document + 1]))
    return sorted(found)


def _with_replaced(data: U8, offsets: I64, replaced: Mapping[int, bytes]) -> tuple[U8, I64]:
    texts = [
        replaced.get(document, data[start:end].tobytes())
        for document, (start, end) in enumerate(pairwise(offsets.tolist()))
    ]
    changed = np.frombuffer(b"".join([*texts, bytes(PADDING)]), dtype=np.uint8)
    return changed, np.cumsum([0, *map(len, texts)], dtype=np.int64)


def new_table(num_slots: int) -> WordTable:
    """An empty table of a power of two of slots."""
    assert num_slots & (num_slots - 1) == 0, num_slots
    # Slots that begin at multiples of their size lie in one line of the cache each.
    room = np.zeros(4 * num_slots + 8, dtype=np.uint64)
    skipped = -room.ctypes.data % 64 // 8
    return WordTable(
        slots=room[skipped : skipped + 4 * num_slots].reshape(num_slots, 4),
        long_bytes=np.empty(LONG_BYTES_PER_SLOT * num_slots, dtype=np.uint8),
        long_ids=np.empty(LONG_IDS_PER_SLOT * num_slots, dtype=np.uint32),
        used=np.zeros(4, dtype=np.int64),
    )


def _first_table(encoder: WordEncoder) -> WordTable:
    from pipeline_assets.transforms import word_kernels

    table = new_table(min(MIN_SLOTS, encoder.max_slots))
    if encoder.whole_words:
        words = np.frombuffer(b"".join(encoder.whole_words) + bytes(PADDING), dtype=np.uint8)
        offsets = np.cumsum([0, *map(len, encoder.whole_words)], dtype=np.int64)
        word_kernels.insert_words(
            words, offsets, np.array([*encoder.whole_words.values()], dtype=np.uint32), *table.arrays
        )
        assert table.used[0] == len(encoder.whole_words), table.used
    return table


def _with_room(table: WordTable, max_slots: int) -> WordTable:
    """The table, or one four times as large with the same words when it has refused one."""
    if not table.used[3] or len(table.slots) >= max_slots:
        return table
    from pipeline_assets.transforms import word_kernels

    larger = new_table(min(4 * len(table.slots), max_slots))
    word_kernels.move_slots(table.slots, larger.slots)
    larger.long_bytes[: table.used[1]] = table.long_bytes[: table.used[1]]
    larger.long_ids[: table.used[2]] = table.long_ids[: table.used[2]]
    larger.used[:3] = table.used[:3]
    return larger


def _settings_of(library: Any) -> _Settings:
    model = library.model
    return _Settings(
        spells_out_special=library.encode_special_tokens,
        is_whole=library.truncation is None and library.padding is None,
        normalizer=_state_of(library.normalizer),
        pre_tokenizer=_state_of(library.pre_tokenizer),
        post_processor=_state_of(library.post_processor),
        model=(type(model).__name__, *(getattr(model, name, None) for name in (*PLAIN_BPE, "ignore_merges"))),
        added=[
            (number, token.content, token.special, token.normalized)
            for number, token in library.get_added_tokens_decoder().items()
        ],
    )


def _state_of(part: Any) -> bytes | None:
    return None if part is None else bytes(part.__getstate__())


def _make_encoder(library: Any, settings: _Settings) -> tuple[WordEncoder | None, str]:
    max_digits = _known_pattern(settings)
    reason = _why_not(settings, max_digits)
    if reason or max_digits is None:
        return None, reason
    model = json.loads(library.to_str())["model"]
    differing = [name for name, value in PLAIN_BPE.items() if (model.get(name) or None) != (value or None)]
    if differing:
        return None, f"its model has a {differing[0]} that is not a plain byte-level BPE's"
    merges = _read_merges(model)
    if merges is None:
        return None, "its vocabulary lacks a byte or what a merge gives"
    words = _words_of(model["vocab"])
    whole_words = _unmerged(merges, words) if model.get("ignore_merges") else {}
    if len(whole_words) > MAX_WHOLE_WORDS:
        return None, f"{len(whole_words):,} of its words are not what their merges give"
    if not _agrees(library, merges, whole_words, [*words]):
        return None, "a sample of its words came out otherwise"
    encoder = WordEncoder(
        max_digits=max_digits,
        classes=class_table(max_digits),
        merges=merges,
        added=[content.encode() for _, content, is_special, _ in settings.added if not is_special],
        is_normalizing=settings.normalizer is not None,
        whole_words=whole_words,
    )
    return encoder, f"byte-level BPE over words of {PATTERN_NAMES[max_digits]}'s pattern"


def _known_pattern(settings: _Settings) -> int | None:
    """GPT2, or the most digits of a word; None for a pre-tokenizer that is not known."""
    found = json.loads(settings.pre_tokenizer or b"{}")
    if _is_byte_level(found, use_regex=True):
        return GPT2
    parts = found.get("pretokenizers", [])
    if found.get("type") != "Sequence" or len(parts) != 2 or not _is_byte_level(parts[1], use_regex=False):
        return None
    split = dict(parts[0])
    pattern = split.pop("pattern", {}).get("Regex")
    is_plain = split == {"type": "Split", "behavior": "Isolated", "invert": False}
    return MAX_DIGITS.get(pattern) if is_plain else None


def _is_byte_level(found: Mapping[str, Any], use_regex: bool) -> bool:
    return (found.get("type"), found.get("add_prefix_space"), found.get("use_regex")) == ("ByteLevel", False, use_regex)


def _why_not(settings: _Settings, max_digits: int | None) -> str:
    """What of a tokenizer is not known here, empty for nothing."""
    normalizer = json.loads(settings.normalizer or b"null")
    post_processor = json.loads(settings.post_processor or b"null")
    if not settings.spells_out_special:
        return "it makes special tokens of text that spells them out"
    if not settings.is_whole:
        return "it cuts or pads"
    if max_digits is None:
        return f"its pre-tokenizer is not one of the known ones: {(settings.pre_tokenizer or b'none').decode()}"
    if normalizer not in (None, {"type": "NFC"}):
        return f"its normalizer is not NFC: {normalizer}"
    if not _is_harmless(post_processor):
        return f"its post-processor is not one of the known ones: {post_processor.get('type')}"
    if settings.model[0] != "BPE":
        return f"its model is not BPE: {settings.model[0]}"
    if normalizer and any(is_normalized and not is_special for _, _, is_special, is_normalized in settings.added):
        return "it looks for added tokens in normalized text"
    return ""


def _is_harmless(post_processor: Mapping[str, Any] | None) -> bool:
    if post_processor is None:
        return True
    if post_processor["type"] == "Sequence":
        return all(map(_is_harmless, post_processor["processors"]))
    return post_processor["type"] in HARMLESS_POST_PROCESSORS


@cache
def byte_characters() -> tuple[str, ...]:
    """The character that stands for each byte in a byte-level vocabulary: itself if it prints, else from U+0100 on.

    >>> byte_characters()[ord(" ")]
    'Ġ'
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (chr(code_point) for code_point in range(0x100, 0x200))
    return tuple(chr(byte) if byte in printable else next(others) for byte in range(NUM_BYTES))


def _words_of(vocabulary: Mapping[str, int]) -> dict[bytes, int]:
    """The vocabulary by bytes, without what is not made of byte characters."""
    byte_of = {character: byte for byte, character in enumerate(byte_characters())}
    return {
        bytes(byte_of[character] for character in word): number
        for word, number in vocabulary.items()
        if word and byte_of.keys() >= set(word)
    }


def _read_merges(model: Mapping[str, Any]) -> Merges | None:
    """The BPE of a tokenizer.json; None where the vocabulary lacks a byte or the result of a merge."""
    from pipeline_assets.transforms import word_kernels

    vocabulary: Mapping[str, int] = model["vocab"]
    try:
        byte_ids = np.array([vocabulary[character] for character in byte_characters()], dtype=np.uint32)
        rows = [(vocabulary[left], vocabulary[right], vocabulary[left + right]) for left, right in model["merges"]]
    except KeyError:
        return None
    left, right, merged = np.ascontiguousarray(np.array(rows, dtype=np.uint32).reshape(-1, 3).T)
    pairs = np.zeros((1 << (2 * len(rows)).bit_length(), 2), dtype=np.uint64)
    word_kernels.fill_pairs(pairs, left, right, merged)
    return Merges(byte_ids=byte_ids, pairs=pairs)


def _merged(merges: Merges, words: Sequence[bytes]) -> Iterator[list[int]]:
    """Ids of words of at most MAX_WORD_BYTES bytes."""
    from pipeline_assets.transforms import word_kernels

    data = np.frombuffer(b"".join(words), dtype=np.uint8)
    offsets = np.cumsum([0, *map(len, words)], dtype=np.int64)
    ids, num_ids = np.empty(len(data), dtype=np.uint32), np.empty(len(words), dtype=np.int64)
    word_kernels.merge_words(data, offsets, merges.byte_ids, merges.pairs, ids, num_ids)
    for start, end in pairwise(np.cumsum([0, *num_ids]).tolist()):
        yield ids[start:end].tolist()


def _unmerged(merges: Merges, words: Mapping[bytes, int]) -> dict[bytes, int]:
    """The vocabulary's words that merges do not give: `ignore_merges` makes one token of them all the same."""
    short = [word for word in words if len(word) <= MAX_WORD_BYTES]
    return {
        word: words[word] for word, found in zip(short, _merged(merges, short), strict=True) if found != [words[word]]
    }


def _agrees(library: Any, merges: Merges, whole_words: Mapping[bytes, int], words: Sequence[bytes]) -> bool:
    """Whether the library gives the same ids for a sample of its words, and for each followed by another."""
    sample = words[:: max(1, len(words) // NUM_PROBES)]
    probes = [*sample, *(left + right for left, right in zip(sample, reversed(sample), strict=True))]
    probes = [probe for probe in probes if len(probe) <= MAX_WORD_BYTES]
    ours = (
        [whole_words[word]] if word in whole_words else ids
        for word, ids in zip(probes, _merged(merges, probes), strict=True)
    )
    return all(ids == _library_ids(library, probe) for probe, ids in zip(probes, ours, strict=True))
