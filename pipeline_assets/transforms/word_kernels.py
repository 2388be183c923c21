"""The compiled inner loops of `word_cache`: arrays in, arrays filled in place.

As those of `kernels`: each is called by one function of the module that explains it, releases the GIL, is compiled once
and cached, takes no Python object, and is imported when it is first called.
"""

import numba as nb
import numpy as np

from pipeline_assets.transforms.kernels import (
    READ_I64,
    READ_U8,
    READ_U32,
    SPREAD,
    byte_at,
    code_point_at,
    fmix64,
    untyped_intrinsic,
)
from pipeline_assets.transforms.word_cache import INLINE_BYTES, INLINE_IDS, MAX_WORD_BYTES
from pipeline_assets.transforms.word_classes import (
    CONTRACTION,
    INVALID,
    KIND,
    LETTER,
    NUMBER,
    OTHER,
    SPACE,
    UNKNOWN,
)

LONG = np.uint64(0xFF)  # in place of a length: the word is elsewhere
NO_PAIR = np.uint64(0xFFFFFFFFFFFFFFFF)  # above every rank
EMPTY = np.uint64(0)
ONE, LOW_HALF = np.uint64(1), np.uint64(0xFFFFFFFF)
ALL = np.uint64(0xFFFFFFFFFFFFFFFF)
BITS_32, BITS_40, BITS_56 = np.uint64(32), np.uint64(40), np.uint64(56)
EIGHT, TWO_EIGHTS, THREE_EIGHTS = np.uint64(8), np.uint64(16), np.uint64(24)  # a slot's other numbers, in bytes
PAIR_SIZE, SLOT_SIZE = np.uint64(16), np.uint64(32)
PLACE = np.uint64((1 << 40) - 1)  # bits of an offset into the bytes of long words, and into the ids

READ_PAIRS = nb.types.Array(nb.uint64, 2, "C", readonly=True)
READ_BOOL = nb.types.Array(nb.boolean, 1, "C", readonly=True)


@untyped_intrinsic
def eight_at(typing, address, index):  # type: ignore[no-untyped-def]
    """The eight bytes at an address plus an index as one number, little-endian."""

    def generate(context, builder, signature, values):  # type: ignore[no-untyped-def]
        pointer = builder.inttoptr(builder.add(*values), context.get_value_type(nb.uint64).as_pointer())
        return context.data_model_manager[nb.uint64].load_from_data_pointer(builder, pointer, align=1)

    return nb.uint64(nb.uint64, nb.uint64), generate


@nb.njit
def _wide_flags_at(data, at, end, classes):  # type: ignore[no-untyped-def]
    code_point, width = code_point_at(data, at, end)
    return (byte_at(classes, code_point), width) if code_point >= 0 else (INVALID, 1)


# Inlined, and the rest of it not: a call takes several times as long as all else here.
@nb.njit(inline="always")
def _flags_at(data, at, end, classes):  # type: ignore[no-untyped-def]
    """Class of the character at `at` and its width; INVALID where the bytes are not UTF-8."""
    lead = byte_at(data, at)
    flags, width = byte_at(classes, lead), 1
    if lead >= np.uint8(0x80):
        flags, width = _wide_flags_at(data, at, end, classes)
    return flags, width


@nb.njit
def _run_end(data, at, end, classes, kind):  # type: ignore[no-untyped-def]
    """Where a run of one kind ends, and the class of what follows it."""
    while at < end:
        flags, width = _flags_at(data, at, end, classes)
        if flags & KIND != kind:
            return at, flags
        at += width
    return at, np.uint8(0)


@nb.njit
def _spaces_end(data, start, end, classes, newlines_first):  # type: ignore[no-untyped-def]
    r"""Where `\s*[\r\n]+|\s+(?!\S)|\s+` ends, without the first of them unless `newlines_first`."""
    at = last = after_newline = start
    stop = np.uint8(0)
    while at < end:
        flags, width = _flags_at(data, at, end, classes)
        if not flags & SPACE:
            stop = flags
            break
        last = at
        at += width
        if byte_at(data, last) == 0x0A or byte_at(data, last) == 0x0D:
            after_newline = at
    if newlines_first and after_newline > start:
        return after_newline, stop
    if at == end or last == start:
        return at, stop
    return last, stop


@nb.njit
def _two_letters(data, start, end, case):  # type: ignore[no-untyped-def]
    """Whether an apostrophe at `start` begins 're, 've or 'll; `case` is 0x20 to take upper case for lower."""
    if start + 2 >= end:
        return False
    one, two = byte_at(data, start + 1) | case, byte_at(data, start + 2) | case
    return ((one == 0x72 or one == 0x76) and two == 0x65) or (one == 0x6C and two == 0x6C)


@nb.njit
def _gpt2_end(data, start, end, classes):  # type: ignore[no-untyped-def]
    r"""One match of `'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+`, and classes seen."""
    first = byte_at(data, start)
    if first == 0x27:
        following = byte_at(data, start + 1) if start + 1 < end else np.uint8(0)
        if following == 0x73 or following == 0x74 or following == 0x6D or following == 0x64:
            return start + 2, np.uint8(0)
        if _two_letters(data, start, end, np.uint8(0)):
            return start + 3, np.uint8(0)
    flags, width = _flags_at(data, start, end, classes)
    at, seen = start + width, flags
    if first == 0x20 and at < end:
        following, width = _flags_at(data, at, end, classes)
        seen |= following
        if not following & SPACE:
            flags, at = following, at + width
    if flags & SPACE:
        stop, following = _spaces_end(data, start, end, classes, False)
        return stop, seen | following
    at, following = _run_end(data, at, end, classes, flags & KIND)
    return at, seen | following


@nb.njit
def _contraction_end(data, start, end, classes):  # type: ignore[no-untyped-def]
    """Where a contraction of any case ends that an apostrophe at `start` begins, and classes seen; else `start`."""
    if start + 1 >= end:
        return start, np.uint8(0)
    following, width = _flags_at(data, start + 1, end, classes)
    if following & CONTRACTION:
        return start + 1 + width, np.uint8(0)
    if _two_letters(data, start, end, np.uint8(0x20)):
        return start + 3, np.uint8(0)
    return start, following


@nb.njit
def _split_end(data, start, end, classes, max_digits):  # type: ignore[no-untyped-def]
    r"""One match of Llama 3's pattern (`\p{N}{1,max_digits}`), and classes seen."""
    first = byte_at(data, start)
    seen = np.uint8(0)
    if first == 0x27:
        at, seen = _contraction_end(data, start, end, classes)
        if at > start:
            return at, seen
    flags, width = _flags_at(data, start, end, classes)
    at, seen = start + width, seen | flags
    if flags & NUMBER:
        for _ in range(1, max_digits):
            flags, width = _flags_at(data, at, end, classes) if at < end else (np.uint8(0), 1)
            seen |= flags
            if not flags & NUMBER:
                break
            at += width
        return at, seen
    following = np.uint8(0)
    if flags & LETTER == 0 and at < end:
        following, width = _flags_at(data, at, end, classes)
        seen |= following
    is_newline = first == 0x0A or first == 0x0D
    if flags & LETTER or (following & LETTER and not is_newline):
        at, following = _run_end(data, at, end, classes, LETTER)
        return at, seen | following
    if flags & OTHER or (first == 0x20 and following & OTHER):
        at, following = _run_end(data, at, end, classes, OTHER)
        while at < end and (byte_at(data, at) == 0x0A or byte_at(data, at) == 0x0D):
            at += 1
        return at, seen | following
    at, following = _spaces_end(data, start, end, classes, True)
    return at, seen | following


@nb.njit
def _pair_value(pairs, mask, left, right):  # type: ignore[no-untyped-def]
    """rank << 32 | new id of two neighbours, NO_PAIR where they do not merge."""
    key = (np.uint64(left) + ONE) << BITS_32 | (np.uint64(right) + ONE)
    at = fmix64(key) & mask
    found = eight_at(pairs, at * PAIR_SIZE)
    while found != EMPTY:
        if found == key:
            return eight_at(pairs, at * PAIR_SIZE + EIGHT)
        at = (at + ONE) & mask
        found = eight_at(pairs, at * PAIR_SIZE)
    return NO_PAIR


@nb.njit(nb.void(nb.uint64[:, ::1], READ_U32, READ_U32, READ_U32), nogil=True, cache=True)
def fill_pairs(pairs, left, right, merged):  # type: ignore[no-untyped-def]
    mask = np.uint64(len(pairs) - 1)
    for rank in range(len(left)):
        key = (np.uint64(left[rank]) + ONE) << BITS_32 | (np.uint64(right[rank]) + ONE)
        at = fmix64(key) & mask
        while pairs[at, 0] != EMPTY and pairs[at, 0] != key:
            at = (at + ONE) & mask
        # Of a pair that is there twice the library takes the later rank.
        pairs[at, 0], pairs[at, 1] = key, np.uint64(rank) << BITS_32 | np.uint64(merged[rank])


@nb.njit
def _merge(data, start, size, byte_ids, pairs, mask, symbols, values):  # type: ignore[no-untyped-def]
    """Ids of one word into `symbols`, and their number: again and again the first pair of the lowest rank is merged."""
    for index in range(size):
        symbols[np.uintp(index)] = byte_ids[byte_at(data, start + index)]
    for index in range(size - 1):
        values[np.uintp(index)] = _pair_value(pairs, mask, symbols[np.uintp(index)], symbols[np.uintp(index + 1)])
    while size > 1:
        best, at = NO_PAIR, 0
        for index in range(size - 1):
            if values[np.uintp(index)] < best:
                best, at = values[np.uintp(index)], index
        if best == NO_PAIR:
            break
        symbols[np.uintp(at)] = best & LOW_HALF
        size -= 1
        for index in range(at + 1, size):
            symbols[np.uintp(index)] = symbols[np.uintp(index + 1)]
            values[np.uintp(index - 1)] = values[np.uintp(index)]
        # What stood at `at` was the merged pair; the pairs on its two sides are new.
        if at > 0:
            left, right = symbols[np.uintp(at - 1)], symbols[np.uintp(at)]
            values[np.uintp(at - 1)] = _pair_value(pairs, mask, left, right)
        if at < size - 1:
            left, right = symbols[np.uintp(at)], symbols[np.uintp(at + 1)]
            values[np.uintp(at)] = _pair_value(pairs, mask, left, right)
    return size


@nb.njit(nb.void(READ_U8, READ_I64, READ_U32, READ_PAIRS, nb.uint32[::1], nb.int64[::1]), nogil=True, cache=True)
def merge_words(data, offsets, byte_ids, pairs, ids, num_ids):  # type: ignore[no-untyped-def]
    symbols = np.empty(MAX_WORD_BYTES, dtype=np.uint32)
    values = np.empty(MAX_WORD_BYTES, dtype=np.uint64)
    text, pair_table, mask = data.ctypes.data, pairs.ctypes.data, np.uint64(len(pairs) - 1)
    total = 0
    for word in range(len(offsets) - 1):
        start, size = offsets[word], offsets[word + 1] - offsets[word]
        num_ids[word] = _merge(text, start, size, byte_ids, pair_table, mask, symbols, values)
        for index in range(num_ids[word]):
            ids[total + index] = symbols[index]
        total += num_ids[word]


@nb.njit
def _word_key(data, start, size):  # type: ignore[no-untyped-def]
    """Two numbers of a word: all of its bytes and its length, or of a long word a hash and LONG with its length."""
    first = eight_at(data, start)
    if size <= 8:
        return first & ALL >> np.uint64(64 - 8 * size), np.uint64(size) << BITS_56
    if size <= INLINE_BYTES:
        rest = eight_at(data, start + 8) & (ONE << np.uint64(8 * (size - 8))) - ONE
        return first, rest | np.uint64(size) << BITS_56
    run = np.uint64(size)
    for at in range(start, start + size - 8, 8):
        run = fmix64(run ^ eight_at(data, at)) * SPREAD
    run = fmix64(run ^ eight_at(data, start + size - 8))
    return run, LONG << BITS_56 | np.uint64(size) << BITS_40


@nb.njit(inline="always")
def _first_slot(key, second, mask):  # type: ignore[no-untyped-def]
    mixed = (key ^ (second * SPREAD)) * SPREAD
    return (mixed ^ mixed >> BITS_32) & mask


@nb.njit
def _same_bytes(data, start, size, long_bytes, place):  # type: ignore[no-untyped-def]
    for index in range(size):  # noqa: SIM110 - numba has no all()
        if byte_at(data, start + index) != byte_at(long_bytes, place + index):
            return False
    return True


@nb.njit
def _find(data, start, size, key, second, slots, mask, long_bytes):  # type: ignore[no-untyped-def]
    """(slot of a word, whether it is there); the slot is empty where it is not. Bytes are compared, never a hash."""
    at = _first_slot(key, second, mask)
    found = eight_at(slots, at * SLOT_SIZE + EIGHT)
    while found != EMPTY:
        if eight_at(slots, at * SLOT_SIZE) == key:
            if size <= INLINE_BYTES:
                if found == second:
                    return at, True
            elif found >> BITS_40 == second >> BITS_40 and _same_bytes(data, start, size, long_bytes, found & PLACE):
                return at, True
        at = (at + ONE) & mask
        found = eight_at(slots, at * SLOT_SIZE + EIGHT)
    return at, False


@nb.njit
def _insert(start, size, key, second, ids, num_ids, at, data, slots, long_bytes, long_ids, used):  # type: ignore[no-untyped-def]
    """Keep a word and its ids in an empty slot; `used[3]` is raised where there is no room."""
    is_long, is_many = size > INLINE_BYTES, num_ids > INLINE_IDS
    if (
        used[0] * 2 >= len(slots)
        or (is_long and used[1] + size > len(long_bytes))
        or (is_many and used[2] + num_ids > len(long_ids))
    ):
        used[3] = 1
        return
    third = EMPTY
    if is_long:
        for index in range(size):
            long_bytes[used[1] + index] = data[start + index]
        second |= np.uint64(used[1])
        used[1] += size
    if is_many:
        for index in range(num_ids):
            long_ids[used[2] + index] = ids[index]
        third = np.uint64(used[2])
        used[2] += num_ids
    else:
        for index in range(num_ids):
            third |= np.uint64(ids[index]) << np.uint64(32 * index)
    used[0] += 1
    slots[at, 0], slots[at, 1], slots[at, 2], slots[at, 3] = key, second, third, np.uint64(num_ids)


WORD_TABLE = (nb.uint64[:, ::1], nb.uint8[::1], nb.uint32[::1], nb.int64[::1])


@nb.njit(nb.void(READ_U8, READ_I64, READ_U32, *WORD_TABLE), nogil=True, cache=True)
def insert_words(data, offsets, ids, slots, long_bytes, long_ids, used):  # type: ignore[no-untyped-def]
    text, table, mask = data.ctypes.data, slots.ctypes.data, np.uint64(len(slots) - 1)
    for word in range(len(offsets) - 1):
        start, size = offsets[word], offsets[word + 1] - offsets[word]
        key, second = _word_key(text, start, size)
        at, is_there = _find(text, start, size, key, second, table, mask, long_bytes.ctypes.data)
        if not is_there:
            _insert(start, size, key, second, ids[word : word + 1], 1, at, data, slots, long_bytes, long_ids, used)


@nb.njit(nb.void(nb.uint64[:, ::1], nb.uint64[:, ::1]), nogil=True, cache=True)
def move_slots(old, slots):  # type: ignore[no-untyped-def]
    mask = np.uint64(len(slots) - 1)
    for number in range(len(old)):
        if old[number, 1] != EMPTY:
            second = old[number, 1]
            if second >> BITS_56 == LONG:
                second = second >> BITS_40 << BITS_40
            at = _first_slot(old[number, 0], second, mask)
            while slots[at, 1] != EMPTY:
                at = (at + ONE) & mask
            for part in range(4):
                slots[at, part] = old[number, part]


@nb.njit
def _unclear(data, start, end, classes):  # type: ignore[no-untyped-def]
    """The first code point from `start` on whose class is not known, -1 where the bytes are not UTF-8."""
    while start < end:
        flags, width = _flags_at(data, start, end, classes)
        if flags & INVALID:
            return -1
        if flags & UNKNOWN:
            return np.int64(byte_at(data, start)) if width == 1 else code_point_at(data, start, end)[0]
        start += width
    return -1


@nb.njit(
    nb.types.UniTuple(nb.int64, 4)(  # type: ignore[no-untyped-call]
        READ_U8, READ_I64, READ_U8, nb.int64, READ_U32, READ_PAIRS, *WORD_TABLE, nb.uint32, nb.uint32[::1],
        nb.int64[::1], nb.int64[:, ::1], nb.int64, nb.int64,
    ),
    nogil=True,
    cache=True,
)  # fmt: skip
def encode_block(  # type: ignore[no-untyped-def]
    data,
    offsets,
    classes,
    max_digits,
    byte_ids,
    pairs,
    slots,
    long_bytes,
    long_ids,
    used,
    eos,
    ids,
    ends,
    holes,
    first_document,
    num_holes,
):
    """(documents done, ids written, holes, code point that the next document stopped it at or -1), from one on."""
    symbols = np.empty(MAX_WORD_BYTES, dtype=np.uint32)
    values = np.empty(MAX_WORD_BYTES, dtype=np.uint64)
    text, class_table, table = data.ctypes.data, classes.ctypes.data, slots.ctypes.data
    pair_table, kept_bytes = pairs.ctypes.data, long_bytes.ctypes.data
    mask, pair_mask = np.uint64(len(slots) - 1), np.uint64(len(pairs) - 1)
    num_ids = ends[first_document - 1] if first_document else 0
    for document in range(first_document, len(offsets) - 1):
        start, end = offsets[document], offsets[document + 1]
        ids_before, holes_before = num_ids, num_holes
        while start < end:
            if max_digits:
                stop, seen = _split_end(text, start, end, class_table, max_digits)
            else:
                stop, seen = _gpt2_end(text, start, end, class_table)
            if seen & (UNKNOWN | INVALID):
                return document, ids_before, holes_before, _unclear(text, start, end, class_table)
            size = stop - start
            if size > MAX_WORD_BYTES:
                holes[num_holes, 0], holes[num_holes, 1], holes[num_holes, 2] = num_ids, start, stop
                num_holes += 1
                start = stop
                continue
            key, second = _word_key(text, start, size)
            at, is_there = _find(text, start, size, key, second, table, mask, kept_bytes)
            if is_there:
                packed = eight_at(table, at * SLOT_SIZE + TWO_EIGHTS)
                count = np.int64(eight_at(table, at * SLOT_SIZE + THREE_EIGHTS))
                if count <= INLINE_IDS:
                    # Both are written, whatever their number: cheaper than asking, and the next word overwrites.
                    ids[np.uintp(num_ids)] = packed & LOW_HALF
                    ids[np.uintp(num_ids + 1)] = packed >> BITS_32
                else:
                    for index in range(count):
                        ids[np.uintp(num_ids + index)] = long_ids[np.uintp(packed) + np.uintp(index)]
            else:
                count = _merge(text, start, size, byte_ids, pair_table, pair_mask, symbols, values)
                for index in range(count):
                    ids[np.uintp(num_ids + index)] = symbols[np.uintp(index)]
                _insert(start, size, key, second, symbols, count, at, data, slots, long_bytes, long_ids, used)
            num_ids += count
            start = stop
        ids[np.uintp(num_ids)] = eos
        num_ids += 1
        ends[document] = num_ids
    return len(offsets) - 1, num_ids, num_holes, -1


@nb.njit(nb.void(READ_U8, READ_I64, READ_BOOL, nb.boolean[::1]), nogil=True, cache=True)
def find_unsettled(data, offsets, is_settled, is_unsettled):  # type: ignore[no-untyped-def]
    text = data.ctypes.data
    for document in range(len(offsets) - 1):
        at, end = offsets[document], offsets[document + 1]
        while at < end:
            if byte_at(text, at) < np.uint8(0x80):
                at += 1
                continue
            code_point, width = code_point_at(text, at, end)
            if code_point < 0 or not is_settled[np.uintp(code_point)]:
                is_unsettled[document] = True
                break
            at += width
