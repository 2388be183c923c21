"""Byte-pair merging: a byte-level BPE model of the `tokenizers` library in, ids of words out.

Again and again the first pair of the lowest rank is merged. That takes the square of a word's length, so a word of more
than MAX_WORD_BYTES is merged window by window. A window's ids are kept up to some way before its end, and the next
window starts there. That is right wherever the two ids on each side of a cut, spelled out and merged alone, come out as
those two: had a merge crossed the cut in the whole word, the first one to do so would have crossed it there as well,
for until then the bytes of both ids merge as they do alone. Where they do not, the cut moves back, then the window
grows; a word that has no cut in MAX_WINDOW_BYTES is left to the library.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from pipeline_assets.transforms.arrays import U32, U64

MAX_WORD_BYTES = 128
MIN_WINDOW_BYTES, MAX_WINDOW_BYTES = 128, 1024

NUM_BYTES = 256


@dataclass(frozen=True, kw_only=True)
class Merges:
    """A byte-level BPE: the id of each byte, rank and new id of each two bytes, a hash table of pairs to rank and
    new id, the number of bytes of each id."""

    byte_ids: U32
    byte_values: U64
    pairs: U64
    sizes: U32

    @property
    def arrays(self) -> tuple[U32, U64, U64, U32]:
        """As the kernels take them."""
        return self.byte_ids, self.byte_values, self.pairs, self.sizes


@cache
def byte_characters() -> tuple[str, ...]:
    """The character that stands for each byte in a byte-level vocabulary: itself if it prints, else from U+0100 on.

    >>> byte_characters()[ord(" ")]
    'Ġ'
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (chr(code_point) for code_point in range(0x100, 0x200))
    return tuple(chr(byte) if byte in printable else next(others) for byte in range(NUM_BYTES))


def words_of(vocabulary: Mapping[str, int]) -> dict[bytes, int]:
    """The vocabulary by bytes, without what is not made of byte characters."""
    byte_of = {character: byte for byte, character in enumerate(byte_characters())}
    return {
        bytes(byte_of[character] for character in word): number
        for word, number in vocabulary.items()
        if word and byte_of.keys() >= set(word)
    }


def read_merges(model: Mapping[str, Any]) -> Merges | None:
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
    byte_values = np.empty(NUM_BYTES * NUM_BYTES, dtype=np.uint64)
    word_kernels.fill_pairs(pairs, byte_values, byte_ids, left, right, merged)
    sizes = np.zeros(max(vocabulary.values()) + 1, dtype=np.uint32)
    sizes[[*vocabulary.values()]] = [len(word) for word in vocabulary]
    return Merges(byte_ids=byte_ids, byte_values=byte_values, pairs=pairs, sizes=sizes)


def merged(merges: Merges, words: Sequence[bytes]) -> Iterator[list[int] | None]:
    """Ids of words; None for one that is left to the library."""
    from pipeline_assets.transforms import word_kernels

    data = np.frombuffer(b"".join(words), dtype=np.uint8)
    offsets = np.cumsum([0, *map(len, words)], dtype=np.int64)
    ids, num_ids = np.empty(len(data), dtype=np.uint32), np.empty(len(words), dtype=np.int64)
    word_kernels.merge_words(data, offsets, *merges.arrays, ids, num_ids)
    ends = np.cumsum(np.maximum(num_ids, 0))
    for end, number in zip(ends.tolist(), num_ids.tolist(), strict=True):
        yield None if number < 0 else ids[end - number : end].tolist()


def unmerged(merges: Merges, words: Mapping[bytes, int]) -> dict[bytes, int]:
    """The vocabulary's words that merges do not give: `ignore_merges` makes one token of them all the same."""
    return {
        word: number
        for (word, number), found in zip(words.items(), merged(merges, [*words]), strict=True)
        if found != [number]
    }
