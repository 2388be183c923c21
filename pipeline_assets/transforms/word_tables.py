"""The table of words seen: words in, their ids out, in a bounded room.

Open addressing; the kernels read and write it. It grows by four when it has refused a word, up to a limit; after that
new words are merged every time.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pipeline_assets.transforms.arrays import I64, U8, U32, U64

INLINE_BYTES, INLINE_IDS = 15, 2  # what a slot of 32 bytes holds itself
MIN_SLOTS, MAX_SLOTS = 1 << 16, 1 << 20
LONG_BYTES_PER_SLOT, LONG_IDS_PER_SLOT = 8, 2
PADDING = 16  # the kernels read eight bytes at once, twice


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


def first_table(whole_words: Mapping[bytes, int], max_slots: int) -> WordTable:
    """A small table with the words that are there from the start."""
    from pipeline_assets.transforms import word_kernels

    table = new_table(min(MIN_SLOTS, max_slots))
    if whole_words:
        words = np.frombuffer(b"".join(whole_words) + bytes(PADDING), dtype=np.uint8)
        offsets = np.cumsum([0, *map(len, whole_words)], dtype=np.int64)
        word_kernels.insert_words(words, offsets, np.array([*whole_words.values()], dtype=np.uint32), *table.arrays)
        assert table.used[0] == len(whole_words), table.used
    return table


def enlarged(table: WordTable, max_slots: int) -> WordTable:
    """A table four times as large, or of the most slots, with the same words."""
    from pipeline_assets.transforms import word_kernels

    larger = new_table(min(4 * len(table.slots), max_slots))
    word_kernels.move_slots(table.slots, larger.slots)
    larger.long_bytes[: table.used[1]] = table.long_bytes[: table.used[1]]
    larger.long_ids[: table.used[2]] = table.long_ids[: table.used[2]]
    larger.used[:3] = table.used[:3]
    return larger
