"""Token ids by words: Arrow texts and a tokenizer object of the `tokenizers` library in, its very ids out, faster.

A byte-level BPE first cuts a text into words (its pre-tokens) and never merges across them, so the ids of a text are
those of its words, and a word's ids are worked out once:

    text ─▶ words, by the tokenizer's pattern ─▶ table of words seen ─▶ ids
                                                   └ not there: merged by rank, then kept

The library stays the definition. Which characters are letters, numbers and spaces is asked of its own pre-tokenizer,
merges and vocabulary are its own, a sample of its vocabulary is encoded by both before an encoder is used, and what is
not known here exactly is left to it: other patterns (`word_patterns`), models and normalizers altogether, texts with
its ordinary added tokens whole, long words without a cut (`byte_pairs`) one by one.

Cost: one compiled pass over the bytes, on texts of any size; a table of at most 52 MB for each call that runs at the
same time. A full table takes no more words: new ones are then merged every time.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pipeline_assets.transforms.arrays import I64, U8, utf8_blocks
from pipeline_assets.transforms.byte_pairs import (
    MAX_WORD_BYTES,
    Merges,
    byte_characters,
    merged,
    read_merges,
    unmerged,
    words_of,
)
from pipeline_assets.transforms.word_classes import ask_classes, class_table, settled_by_nfc
from pipeline_assets.transforms.word_patterns import WordPattern, known_pattern
from pipeline_assets.transforms.word_tables import (
    INLINE_IDS,
    MAX_SLOTS,
    PADDING,
    WordTable,
    enlarged,
    first_table,
    fit_every_table,
)
from training_io.errors import InvariantBroken

MAX_WHOLE_WORDS = 1 << 14  # that a new table holds from the start
BLOCK_BYTES = 1 << 20
NUM_PROBES = 512
MAX_ADDED_BYTES = 1 << 10  # of all ordinary added tokens: each byte of a text may be compared with so many

PLAIN_BPE: Mapping[str, Any] = {
    "type": "BPE",
    "dropout": None,
    "unk_token": None,
    "continuing_subword_prefix": None,
    "end_of_word_suffix": None,
    "byte_fallback": False,
}


@dataclass(frozen=True, kw_only=True)
class WordEncoder:
    """What is needed besides the library's tokenizer to encode as it does; the tables are those not in use now."""

    pattern: WordPattern
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
    parts, lengths = [np.empty(0, dtype=tokenizer.token_dtype)], [np.zeros(1, dtype=np.int64)]
    try:
        table = encoder.tables.pop()  # each call has one to itself: no two threads write into it
    except IndexError:
        table = first_table(encoder.whole_words, encoder.max_slots)
    for data, offsets in utf8_blocks(texts, BLOCK_BYTES):
        block = _prepare(encoder, tokenizer.library, data, offsets)
        ids, ends, table = _encode_block(encoder, tokenizer, table, block)
        parts.append(ids)
        lengths.append(np.diff(ends, prepend=0))
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
) -> tuple[npt.NDArray[Any], I64, WordTable]:
    """Ids of a block, where each text's end, and the table, which may have grown."""
    from pipeline_assets.transforms import word_kernels  # numba takes a second to import: not with the code location

    num_bytes, num_documents = len(block.data) - PADDING, len(block.offsets) - 1
    # A token is a byte or more. Pages of it that are not written take no memory.
    ids = np.empty(num_bytes + num_documents + INLINE_IDS, dtype=np.uint32)
    ends = np.empty(num_documents, dtype=np.int64)
    holes = np.empty((num_bytes // MAX_WORD_BYTES + 1, 3), dtype=np.int64)
    progress = np.zeros(4, dtype=np.int64)
    while (
        stopped_by := word_kernels.encode_block(
            block.data,
            block.offsets,
            encoder.classes,
            encoder.pattern.shape,
            encoder.pattern.max_digits,
            *encoder.merges.arrays,
            *table.arrays,
            encoder.max_slots,
            tokenizer.eos_id,
            ids,
            ends,
            holes,
            progress,
        )
    ) != word_kernels.ALL_DONE:
        if stopped_by == word_kernels.NOT_UTF8:
            _refuse_invalid(block, int(progress[0]))
        elif stopped_by == word_kernels.NO_ROOM:
            table = enlarged(table, encoder.whole_words, encoder.max_slots)
        else:
            ask_classes(tokenizer.library.pre_tokenizer, encoder.classes, encoder.pattern, stopped_by)
    num_ids, num_holes = progress[2:].tolist()
    filled = [
        (int(at), _library_ids(tokenizer.library, block.data[start:end].tobytes()))
        for at, start, end in holes[:num_holes]
    ]
    filled += [(int(ends[document]) - 1, found) for document, found in block.whole.items()]
    whole = ids[:num_ids].astype(tokenizer.token_dtype)
    return *_fill_holes(whole, ends, sorted(filled, key=lambda hole: hole[0])), table


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
    from pipeline_assets.transforms import word_kernels

    is_with = np.zeros(len(offsets) - 1, dtype=np.bool_)
    contents = np.frombuffer(b"".join(added), dtype=np.uint8)
    word_kernels.find_contents(data, offsets, contents, np.cumsum([0, *map(len, added)], dtype=np.int64), is_with)
    return np.flatnonzero(is_with).tolist()


def _with_replaced(data: U8, offsets: I64, replaced: Mapping[int, bytes]) -> tuple[U8, I64]:
    texts = [
        replaced.get(document, data[start:end].tobytes())
        for document, (start, end) in enumerate(pairwise(offsets.tolist()))
    ]
    changed = np.frombuffer(b"".join([*texts, bytes(PADDING)]), dtype=np.uint8)
    return changed, np.cumsum([0, *map(len, texts)], dtype=np.int64)


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
    pattern = known_pattern(settings.pre_tokenizer)
    reason = _why_not(settings, pattern)
    if reason or pattern is None:
        return None, reason
    model = json.loads(library.to_str())["model"]
    differing = [name for name, value in PLAIN_BPE.items() if (model.get(name) or None) != (value or None)]
    if differing:
        return None, f"its model has a {differing[0]} that is not a plain byte-level BPE's"
    merges = read_merges(model)
    if merges is None:
        return None, "its vocabulary lacks a byte or what a merge gives"
    words = words_of(model["vocab"])
    whole_words = unmerged(merges, words) if model.get("ignore_merges") else {}
    if len(whole_words) > MAX_WHOLE_WORDS:
        return None, f"{len(whole_words):,} of its words are not what their merges give"
    if any(len(word) > MAX_WORD_BYTES for word in whole_words):
        return None, f"a word of more than {MAX_WORD_BYTES} bytes is not what its merges give"
    if not fit_every_table(whole_words):
        return None, f"its {len(whole_words):,} words that are not what their merges give do not fit into a table"
    added = [content.encode() for _, content, is_special, _ in settings.added if not is_special]
    if sum(map(len, added)) > MAX_ADDED_BYTES:
        return None, f"its ordinary added tokens are {sum(map(len, added)):,} bytes, more than {MAX_ADDED_BYTES:,}"
    if not _agrees(library, merges, whole_words, [*words]):
        return None, "a sample of its words came out otherwise"
    encoder = WordEncoder(
        pattern=pattern,
        classes=class_table(pattern),
        merges=merges,
        added=added,
        is_normalizing=settings.normalizer is not None,
        whole_words=whole_words,
    )
    return encoder, f"byte-level BPE over words of {pattern.name}'s pattern"


def _why_not(settings: _Settings, pattern: WordPattern | None) -> str:
    """What of a tokenizer is not known here, empty for nothing."""
    normalizer = json.loads(settings.normalizer or b"null")
    post_processor = json.loads(settings.post_processor or b"null")
    if not settings.spells_out_special:
        return "it makes special tokens of text that spells them out"
    if not settings.is_whole:
        return "it cuts or pads"
    if pattern is None:
        return f"its pre-tokenizer is not one of the known ones: {(settings.pre_tokenizer or b'none').decode()}"
    if normalizer not in (None, {"type": "NFC"}):
        return f"its normalizer is not NFC: {normalizer}"
    if not _is_harmless(post_processor):
        return f"its post-processor may do more than add special tokens: {post_processor['type']}"
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
    if post_processor["type"] == "TemplateProcessing":
        # Special tokens are not asked for; the text could be left out, or be there twice.
        texts = [piece["Sequence"]["id"] for piece in post_processor["single"] if "Sequence" in piece]
        return texts == ["A"]
    return bool(post_processor["type"] == "ByteLevel")


def _agrees(library: Any, merges: Merges, whole_words: Mapping[bytes, int], words: Sequence[bytes]) -> bool:
    """Whether the library gives the same ids for a sample of its words, and for each followed by another."""
    sample = words[:: max(1, len(words) // NUM_PROBES)]
    probes = [*sample, *(left + right for left, right in zip(sample, reversed(sample), strict=True))]
    ours = (
        [whole_words[word]] if word in whole_words else ids
        for word, ids in zip(probes, merged(merges, probes), strict=True)
    )
    return all(
        ids is None or ids == _library_ids(library, probe)  # None: it would be asked
        for probe, ids in zip(probes, ours, strict=True)
    )
