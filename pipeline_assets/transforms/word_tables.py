"""The table of words seen: words in, their ids out, in a bounded room.

Open addressing; the kernels read and write it. It grows by four when it has refused a word, up to a limit; after that
new words are merged every time. So are words with too many others in their way, which web text may hold on purpose.
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
    """A small table with the words that are there from the start, all of which must fit."""
    table = _table_of(whole_words, min(MIN_SLOTS, max_slots))
    assert table.used[0] == len(whole_words), table.used
    return table


def fit_every_table(whole_words: Mapping[bytes, int]) -> bool:
    """Whether the words that are there from the start find room in a table of any size that it may have."""
    if not whole_words:
        return True
    sizes = [1 << power for power in range(MIN_SLOTS.bit_length() - 1, MAX_SLOTS.bit_length())]
    return all(_table_of(whole_words, num_slots).used[0] == len(whole_words) for num_slots in sizes)


def _table_of(whole_words: Mapping[bytes, int], num_slots: int) -> WordTable:
    from pipeline_assets.transforms import word_kernels

    table = new_table(num_slots)
    if whole_words:
        words = np.frombuffer(b"".join(whole_words) + bytes(PADDING), dtype=np.uint8)
        offsets = np.cumsum([0, *map(len, whole_words)], dtype=np.int64)
        word_kernels.insert_words(words, offsets, np.array([*whole_words.values()], dtype=np.uint32), *table.arrays)
    return table


def enlarged(table: WordTable, whole_words: Mapping[bytes, int], max_slots: int) -> WordTable:
    """A table four times as large, or of the most slots, with the same words but for some with others in their way.

    Those that are there from the start go first, so none of them is left out; their bytes come first in every table.
    """
    from pipeline_assets.transforms import word_kernels

    larger = _table_of(whole_words, min(4 * len(table.slots), max_slots))
    assert larger.used[0] == len(whole_words), larger.used
    larger.used[0] += word_kernels.move_slots(table.slots, larger.slots)
    larger.long_bytes[: table.used[1]] = table.long_bytes[: table.used[1]]
    larger.long_ids[: table.used[2]] = table.long_ids[: table.used[2]]
    larger.used[1:3] = table.used[1:3]
    return larger
