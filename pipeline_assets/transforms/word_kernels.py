"""The compiled inner loops of `word_cache` and `byte_pairs`: arrays in, arrays filled in place.

As those of `kernels`: each is called by one function of the module that explains it, releases the GIL, is compiled once
and cached, takes no Python object, and is imported when it is first called. What `encode_block` calls is here too, for
numba keeps compiled code as long as its own file is the same.

First where words end, then how they are merged, then the table, then a block of texts. A run of ASCII letters ends
where eight bytes at once say so; else every character's class is looked up. A run that is read to its end is taken to
its end but for its last characters, so no text takes more than a few steps a byte.
"""

import numba as nb
import numpy as np

from pipeline_assets.transforms.byte_pairs import MAX_WINDOW_BYTES, MAX_WORD_BYTES, MIN_WINDOW_BYTES, NUM_BYTES
from pipeline_assets.transforms.kernels import (
    READ_I64,
    READ_U8,
    READ_U32,
    READ_U64,
    SPREAD,
    byte_at,
    code_point_at,
    fmix64,
    untyped_intrinsic,
)
from pipeline_assets.transforms.word_classes import (
    CONTRACTION,
    INVALID,
    KIND,
    LETTER,
    LOWER,
    NUMBER,
    OTHER,
    SPACE,
    UNKNOWN,
    UPPER,
)
from pipeline_assets.transforms.word_patterns import CASED, CASED_CONTRACTED, GPT2
from pipeline_assets.transforms.word_tables import INLINE_BYTES, INLINE_IDS

LONG = np.uint64(0xFF)  # in place of a length: the word is elsewhere
NO_PAIR = np.uint64(0xFFFFFFFFFFFFFFFF)  # above every rank
EMPTY = np.uint64(0)
ONE, LOW_HALF = np.uint64(1), np.uint64(0xFFFFFFFF)
ALL = np.uint64(0xFFFFFFFFFFFFFFFF)
BITS_32, BITS_40, BITS_56 = np.uint64(32), np.uint64(40), np.uint64(56)
EIGHT, TWO_EIGHTS, THREE_EIGHTS = np.uint64(8), np.uint64(16), np.uint64(24)  # a slot's other numbers, in bytes
PAIR_SIZE, SLOT_SIZE = np.uint64(16), np.uint64(32)
PLACE = np.uint64((1 << 40) - 1)  # bits of an offset into the bytes of long words, and into the ids

# Eight bytes at once: each is compared in its own lower seven bits (Warren, Hacker's Delight, 6-1).
ONES = np.uint64(0x0101010101010101)
HIGH_BITS, LOW_BITS, CASE_BITS = ONES * np.uint64(0x80), ONES * np.uint64(0x7F), ONES * np.uint64(0x20)
FROM_A, FROM_BEHIND_Z = ONES * np.uint64(0x80 - 0x61), ONES * np.uint64(0x80 - 0x7B)
CASE_TO_HIGH, BITS_A_BYTE = np.uint64(2), np.uint64(3)

SPACE_BYTE, APOSTROPHE, SLASH, NEWLINE, RETURN = 0x20, 0x27, 0x2F, 0x0A, 0x0D
NOTHING = np.uint8(0)
WORD_PART = UPPER | LOWER
NOT_UTF8, NO_ROOM, ALL_DONE = -1, -2, -3  # in place of a code point whose class is to be asked

MIN_BYTES_A_WINDOW = 8  # of a long word, for each window tried
MISFITS_BEFORE_GROWING = 4

# Slots that a lookup in the table of words reads at most: words can be chosen to fall together. Of other words hardly
# one needs so many in a table that is half full.
MAX_PROBES = 64

READ_PAIRS = nb.types.Array(nb.uint64, 2, "C", readonly=True)
READ_BOOL = nb.types.Array(nb.boolean, 1, "C", readonly=True)


@untyped_intrinsic
def eight_at(typing, address, index):  # type: ignore[no-untyped-def]
    """The eight bytes at an address plus an index as one number, little-endian."""

    def generate(context, builder, signature, values):  # type: ignore[no-untyped-def]
        pointer = builder.inttoptr(builder.add(*values), context.get_value_type(nb.uint64).as_pointer())
        return context.data_model_manager[nb.uint64].load_from_data_pointer(builder, pointer, align=1)

    return nb.uint64(nb.uint64, nb.uint64), generate


@untyped_intrinsic
def zeros_below(typing, number):  # type: ignore[no-untyped-def]
    """How many zero bits are below the lowest other one, of a number above 0."""

    def generate(context, builder, signature, values):  # type: ignore[no-untyped-def]
        return builder.cttz(values[0], context.get_constant(nb.boolean, True))

    return nb.uint64(nb.uint64), generate


@nb.njit(inline="always")
def _letters_of(eight):  # type: ignore[no-untyped-def]
    """The high bit of each of eight bytes that is an ASCII letter."""
    lower = (eight | CASE_BITS) & LOW_BITS
    return (lower + FROM_A) & ~(lower + FROM_BEHIND_Z) & ~eight & HIGH_BITS


@nb.njit
def _letters_end(data, at, end):  # type: ignore[no-untyped-def]
    """Where a run of ASCII letters ends, perhaps at once. Up to eight bytes behind `end` are read."""
    while at < end:
        others = _letters_of(eight_at(data, at)) ^ HIGH_BITS
        if others:
            at += np.int64(zeros_below(others) >> BITS_A_BYTE)
            break
        at += 8
    return min(at, end)


@nb.njit
def _cased_letters_end(data, at, end, has_contractions):  # type: ignore[no-untyped-def]
    """Where capitals and then small letters end, all ASCII and fewer than eight; `at` where there is more."""
    eight = eight_at(data, at)
    letters = _letters_of(eight)
    others = letters ^ HIGH_BITS
    if not others:
        return at
    run = letters & ((others & (~others + ONE)) - ONE)
    small = run & eight << CASE_TO_HIGH
    capitals_after = (run ^ small) & ~(small ^ (small - ONE)) if small else EMPTY
    if capitals_after:
        return min(at + np.int64(zeros_below(capitals_after) >> BITS_A_BYTE), end)
    stop = min(at + np.int64(zeros_below(others) >> BITS_A_BYTE), end)
    is_plain = stop == end or (
        byte_at(data, stop) < 0x80 and not (has_contractions and byte_at(data, stop) == APOSTROPHE)
    )
    return stop if is_plain else at


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
    if kind == LETTER:
        at = _letters_end(data, at, end)
    while at < end:
        flags, width = _flags_at(data, at, end, classes)
        if flags & KIND != kind:
            return at, flags
        at += width
    return at, NOTHING


@nb.njit(inline="always")
def _is_newline(byte):  # type: ignore[no-untyped-def]
    return byte == NEWLINE or byte == RETURN  # a tuple would be a loop


@nb.njit
def _spaces_end(data, start, end, classes, newlines_first):  # type: ignore[no-untyped-def]
    r"""Where `\s*[\r\n]+|\s+(?!\S)|\s+` ends, without the first of them unless `newlines_first`."""
    at = last = after_newline = start
    stop = NOTHING
    while at < end:
        flags, width = _flags_at(data, at, end, classes)
        if not flags & SPACE:
            stop = flags
            break
        last = at
        at += width
        if _is_newline(byte_at(data, last)):
            after_newline = at
    if newlines_first and after_newline > start:
        return after_newline, stop
    if at == end or last == start or not stop & KIND:
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
    r"""One match of `'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+`, and classes seen.

    A character that is cut out alone ends the text for what is before it.
    """
    first = byte_at(data, start)
    if first == APOSTROPHE:
        following = byte_at(data, start + 1) if start + 1 < end else NOTHING
        if following == 0x73 or following == 0x74 or following == 0x6D or following == 0x64:
            return start + 2, NOTHING
        if _two_letters(data, start, end, NOTHING):
            return start + 3, NOTHING
    flags, width = _flags_at(data, start, end, classes)
    at, seen = start + width, flags
    if first == SPACE_BYTE and at < end:
        following, width = _flags_at(data, at, end, classes)
        seen |= following
        if following & (LETTER | NUMBER | OTHER):
            flags, at = following, at + width
    if flags & SPACE:
        stop, following = _spaces_end(data, start, end, classes, False)
        return stop, seen | following
    if not flags & KIND:
        return at, seen
    at, following = _run_end(data, at, end, classes, flags & KIND)
    return at, seen | following


@nb.njit
def _contraction_end(data, start, end, classes):  # type: ignore[no-untyped-def]
    """Where a contraction of any case ends that an apostrophe at `start` begins, and classes seen; else `start`."""
    if start + 1 >= end:
        return start, NOTHING
    following, width = _flags_at(data, start + 1, end, classes)
    if following & CONTRACTION:
        return start + 1 + width, following
    if _two_letters(data, start, end, np.uint8(0x20)):
        return start + 3, following
    return start, following


@nb.njit
def _digits_end(data, at, end, classes, max_digits):  # type: ignore[no-untyped-def]
    """Where a run of at most so many digits ends, and classes seen."""
    seen = NOTHING
    for _ in range(max_digits):
        flags, width = _flags_at(data, at, end, classes) if at < end else (NOTHING, 1)
        seen |= flags
        if not flags & NUMBER:
            break
        at += width
    return at, seen


@nb.njit
def _others_end(data, at, end, classes, with_slashes):  # type: ignore[no-untyped-def]
    r"""Where a run of others and the newlines after it end (`[\r\n]*`, or `[\r\n/]*`), and classes seen."""
    at, seen = _run_end(data, at, end, classes, OTHER)
    while at < end:
        byte = byte_at(data, at)
        if not (_is_newline(byte) or (with_slashes and byte == SLASH)):
            break
        at += 1
    return at, seen


@nb.njit
def _split_end(data, start, end, classes, max_digits):  # type: ignore[no-untyped-def]
    r"""One match of Llama 3's pattern (`\p{N}{1,max_digits}`), and classes seen."""
    first = byte_at(data, start)
    seen = NOTHING
    if first == APOSTROPHE:
        at, seen = _contraction_end(data, start, end, classes)
        if at > start:
            return at, seen
    flags, width = _flags_at(data, start, end, classes)
    at, seen = start + width, seen | flags
    if flags & NUMBER:
        stop, following = _digits_end(data, start, end, classes, max_digits)
        return stop, seen | following
    following = NOTHING
    if flags & LETTER == 0 and at < end:
        following, width = _flags_at(data, at, end, classes)
        seen |= following
    if flags & LETTER or (following & LETTER and not _is_newline(first)):
        at, following = _run_end(data, at, end, classes, LETTER)
        return at, seen | following
    if flags & OTHER or (first == SPACE_BYTE and following & OTHER):
        at, following = _others_end(data, at, end, classes, False)
        return at, seen | following
    at, following = _spaces_end(data, start, end, classes, True)
    return at, seen | following


@nb.njit
def _cased_run_end(data, start, end, classes):  # type: ignore[no-untyped-def]
    """Where `UPPER*LOWER+` ends, else `UPPER+`; whether it was the first; and classes seen.

    The first gives capitals back until one is left that is lower too.
    """
    at = after_both = start
    flags, width = NOTHING, 0
    while at < end:
        flags, width = _flags_at(data, at, end, classes)
        if not flags & UPPER:
            break
        at += width
        if flags & LOWER:
            after_both = at
        flags = NOTHING
    seen = flags
    if not flags & LOWER:
        return (after_both, True, seen) if after_both > start else (at, False, seen)
    while at < end:
        flags, width = _flags_at(data, at, end, classes)
        if not flags & LOWER:
            return at, True, seen | flags
        at += width
    return at, True, seen


@nb.njit
def _cased_end(data, start, end, classes, max_digits, has_contractions):  # type: ignore[no-untyped-def]
    """One match of GPT-4o's pattern, with contractions or without, and classes seen."""
    first = byte_at(data, start)
    flags, width = _flags_at(data, start, end, classes)
    at, seen = start + width, flags
    if flags & NUMBER:
        stop, following = _digits_end(data, start, end, classes, max_digits)
        return stop, seen | following
    following = NOTHING
    if flags & LETTER == 0 and at < end:
        following, width = _flags_at(data, at, end, classes)
        seen |= following
    has_prefix = following & WORD_PART and not _is_newline(first)
    if has_prefix or flags & WORD_PART:
        stop, is_lower, following = _cased_run_end(data, at if has_prefix else start, end, classes)
        seen |= following
        if has_prefix and flags & WORD_PART and not is_lower:
            stop = at  # a mark before capitals alone: `UPPER*LOWER+` without a prefix comes first, and ends with it
        if has_contractions and stop < end and byte_at(data, stop) == APOSTROPHE:
            stop, following = _contraction_end(data, stop, end, classes)
            seen |= following
        return stop, seen
    if flags & OTHER or (first == SPACE_BYTE and following & OTHER):
        at, following = _others_end(data, at, end, classes, True)
        return at, seen | following
    at, following = _spaces_end(data, start, end, classes, True)
    return at, seen | following


@nb.njit
def _word_end(data, start, end, classes, shape, max_digits):  # type: ignore[no-untyped-def]
    """Where the word at `start` ends, and classes seen: where one of them is unknown, it is not the end."""
    if shape == GPT2:
        return _gpt2_end(data, start, end, classes)
    if shape >= CASED:
        return _cased_end(data, start, end, classes, max_digits, shape == CASED_CONTRACTED)
    return _split_end(data, start, end, classes, max_digits)


@nb.njit(inline="always")
def _plain_end(data, start, end, shape):  # type: ignore[no-untyped-def]
    """Where a word ends that is ASCII letters after a space or nothing; `start` for any other."""
    at = start + (byte_at(data, start) == SPACE_BYTE)
    if shape >= CASED:
        stop = _cased_letters_end(data, at, end, shape == CASED_CONTRACTED)
        return stop if stop > at else start
    stop = _letters_end(data, at, end)
    return stop if stop > at and (stop == end or byte_at(data, stop) < 0x80) else start


@nb.njit(inline="always")
def _first_place(key, mask):  # type: ignore[no-untyped-def]
    mixed = key * SPREAD
    return (mixed ^ mixed >> BITS_32) & mask


@nb.njit
def _pair_value(pairs, mask, left, right):  # type: ignore[no-untyped-def]
    """rank << 32 | new id of two neighbours, NO_PAIR where they do not merge."""
    key = (np.uint64(left) + ONE) << BITS_32 | (np.uint64(right) + ONE)
    at = _first_place(key, mask)
    found = eight_at(pairs, at * PAIR_SIZE)
    while found != EMPTY:
        if found == key:
            return eight_at(pairs, at * PAIR_SIZE + EIGHT)
        at = (at + ONE) & mask
        found = eight_at(pairs, at * PAIR_SIZE)
    return NO_PAIR


@nb.njit(nb.void(nb.uint64[:, ::1], nb.uint64[::1], READ_U32, READ_U32, READ_U32, READ_U32), nogil=True, cache=True)
def fill_pairs(pairs, byte_values, byte_ids, left, right, merged):  # type: ignore[no-untyped-def]
    mask = np.uint64(len(pairs) - 1)
    for rank in range(len(left)):
        key = (np.uint64(left[rank]) + ONE) << BITS_32 | (np.uint64(right[rank]) + ONE)
        at = _first_place(key, mask)
        while pairs[at, 0] != EMPTY and pairs[at, 0] != key:
            at = (at + ONE) & mask
        # Of a pair that is there twice the library takes the later rank.
        pairs[at, 0], pairs[at, 1] = key, np.uint64(rank) << BITS_32 | np.uint64(merged[rank])
    for one in range(NUM_BYTES):
        for other in range(NUM_BYTES):
            value = _pair_value(pairs.ctypes.data, mask, byte_ids[one], byte_ids[other])
            byte_values[one * NUM_BYTES + other] = value


@nb.njit
def _merge(data, start, size, model, room):  # type: ignore[no-untyped-def]
    """Ids of one word into the room's symbols, and their number: the first pair of the lowest rank is merged, again and
    again."""
    byte_ids, byte_values, pairs, mask, _ = model
    symbols, values = room
    for index in range(size):
        symbols[np.uintp(index)] = byte_ids[byte_at(data, start + index)]
    for index in range(size - 1):
        one, other = np.uintp(byte_at(data, start + index)), np.uintp(byte_at(data, start + index + 1))
        values[np.uintp(index)] = byte_values[one * np.uintp(NUM_BYTES) + other]
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


@nb.njit
def _room():  # type: ignore[no-untyped-def]
    """Symbols and values of a window."""
    return np.empty(MAX_WINDOW_BYTES, dtype=np.uint32), np.empty(MAX_WINDOW_BYTES, dtype=np.uint64)


@nb.njit
def _fits(data, at, before, after, model, room):  # type: ignore[no-untyped-def]
    """Whether the bytes of two ids that meet at `at`, merged alone, come out as the two."""
    sizes = model[4]
    size, size_after = np.int64(sizes[np.uintp(before)]), np.int64(sizes[np.uintp(after)])
    if size + size_after > MAX_WINDOW_BYTES:
        return False
    return _merge(data, at - size, size + size_after, model, room) == 2 and room[0][0] == before


@nb.njit
def _merge_long(data, start, stop, model, room, spare, ids, first):  # type: ignore[no-untyped-def]
    """Ids of one long word into `ids` from `first` on, and their number, -1 for a word that is left to the library; and
    how many windows were merged, at most one for some bytes, whatever the merges are."""
    sizes, symbols = model[4], room[0]
    at, last, window, num_windows, num_misfits = start, first, MIN_WINDOW_BYTES, 0, 0
    while window <= MAX_WINDOW_BYTES and num_windows * MIN_BYTES_A_WINDOW <= stop - start:
        end = min(at + window, stop)
        found = _merge(data, at, end - at, model, room)
        num_windows += 1
        if last > first and not _fits(data, at, ids[np.uintp(last - 1)], symbols[0], model, spare):
            last -= 1
            at -= np.int64(sizes[np.uintp(ids[np.uintp(last)])])
            num_misfits += 1
            if num_misfits % MISFITS_BEFORE_GROWING == 0:
                window *= 2
            continue
        before, most = last, end if end == stop else end - window // 4
        for index in range(found):
            after = at + np.int64(sizes[np.uintp(symbols[np.uintp(index)])])
            if after > most:
                break
            ids[np.uintp(last)] = symbols[np.uintp(index)]
            last, at = last + 1, after
        if at == stop:
            return last - first, num_windows
        if last == before:
            window *= 2
    return -1, num_windows


MODEL = (READ_U32, READ_U64, READ_PAIRS, READ_U32)


@nb.njit(nb.int64(READ_U8, READ_I64, *MODEL, nb.uint32[::1], nb.int64[::1]), nogil=True, cache=True)
def merge_words(data, offsets, byte_ids, byte_values, pairs, sizes, ids, num_ids):  # type: ignore[no-untyped-def]
    model = (byte_ids, byte_values, pairs.ctypes.data, np.uint64(len(pairs) - 1), sizes)
    room, spare = _room(), _room()
    text, total, num_windows = data.ctypes.data, 0, 0
    for word in range(len(offsets) - 1):
        start, stop = offsets[word], offsets[word + 1]
        if stop - start > MAX_WORD_BYTES:
            num_ids[word], windows = _merge_long(text, start, stop, model, room, spare, ids, total)
            num_windows += windows
        else:
            num_ids[word] = _merge(text, start, stop - start, model, room)
            for index in range(num_ids[word]):
                ids[total + index] = room[0][index]
        total += max(num_ids[word], 0)
    return num_windows


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
    """(slot of a word, whether it is there). Bytes are compared, never a hash.

    The slot is empty where the word is not there, or taken by another where it is not within MAX_PROBES.
    """
    at = _first_slot(key, second, mask)
    behind = (at + np.uint64(MAX_PROBES)) & mask
    found = eight_at(slots, at * SLOT_SIZE + EIGHT)
    while found != EMPTY:
        if eight_at(slots, at * SLOT_SIZE) == key:
            if size <= INLINE_BYTES:
                if found == second:
                    return at, True
            elif found >> BITS_40 == second >> BITS_40 and _same_bytes(data, start, size, long_bytes, found & PLACE):
                return at, True
        following = (at + ONE) & mask
        if following == behind:
            break
        at = following
        found = eight_at(slots, at * SLOT_SIZE + EIGHT)
    return at, False


@nb.njit
def _insert(start, size, key, second, ids, num_ids, at, data, slots, long_bytes, long_ids, used):  # type: ignore[no-untyped-def]
    """Keep a word and its ids in a slot if that is empty; `used[3]` is raised where there is no room."""
    if slots[at, 1] != EMPTY:
        return
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


@nb.njit(nb.int64(nb.uint64[:, ::1], nb.uint64[:, ::1]), nogil=True, cache=True)
def move_slots(old, slots):  # type: ignore[no-untyped-def]
    """How many were moved: not those already there, nor those that no lookup would find."""
    mask, num_moved = np.uint64(len(slots) - 1), 0
    for number in range(len(old)):
        if old[number, 1] != EMPTY:
            second = old[number, 1]
            if second >> BITS_56 == LONG:
                second = second >> BITS_40 << BITS_40
            at = _first_slot(old[number, 0], second, mask)
            for _ in range(MAX_PROBES):
                if slots[at, 0] == old[number, 0] and slots[at, 1] == old[number, 1]:
                    break
                if slots[at, 1] == EMPTY:
                    for part in range(4):
                        slots[at, part] = old[number, part]
                    num_moved += 1
                    break
                at = (at + ONE) & mask
    return num_moved


@nb.njit
def _unclear(data, start, end, classes):  # type: ignore[no-untyped-def]
    """The first code point from `start` on whose class is not known, NOT_UTF8 where the bytes are not."""
    while start < end:
        flags, width = _flags_at(data, start, end, classes)
        if flags == INVALID:
            break
        if flags & UNKNOWN:
            return np.int64(byte_at(data, start)) if width == 1 else code_point_at(data, start, end)[0]
        start += width
    return NOT_UTF8


@nb.njit(
    nb.int64(
        READ_U8, READ_I64, READ_U8, nb.int64, nb.int64, *MODEL, *WORD_TABLE, nb.int64,
        nb.uint32, nb.uint32[::1], nb.int64[::1], nb.int64[:, ::1], nb.int64[::1],
    ),
    nogil=True,
    cache=True,
)  # fmt: skip
def encode_block(  # type: ignore[no-untyped-def]
    data,
    offsets,
    classes,
    shape,
    max_digits,
    byte_ids,
    byte_values,
    pairs,
    sizes,
    slots,
    long_bytes,
    long_ids,
    used,
    max_slots,
    eos,
    ids,
    ends,
    holes,
    progress,
):
    """ALL_DONE, or what stopped it: a code point whose class is not known, NOT_UTF8, or NO_ROOM in the table.

    `progress` is where it goes on: document, byte, ids written, holes.
    """
    model = (byte_ids, byte_values, pairs.ctypes.data, np.uint64(len(pairs) - 1), sizes)
    room, spare = _room(), _room()
    symbols = room[0]
    text, class_table, table = data.ctypes.data, classes.ctypes.data, slots.ctypes.data
    kept_bytes, mask = long_bytes.ctypes.data, np.uint64(len(slots) - 1)
    first_document, start, num_ids, num_holes = progress[0], progress[1], progress[2], progress[3]
    for document in range(first_document, len(offsets) - 1):
        end = offsets[document + 1]
        while start < end:
            stop = _plain_end(text, start, end, shape)
            if stop == start:
                stop, seen = _word_end(text, start, end, class_table, shape, max_digits)
                if seen & UNKNOWN:
                    progress[0], progress[1], progress[2], progress[3] = document, start, num_ids, num_holes
                    return _unclear(text, start, end, class_table)
            size = stop - start
            if size > MAX_WORD_BYTES:
                count, _ = _merge_long(text, start, stop, model, room, spare, ids, num_ids)
                if count < 0:
                    holes[num_holes, 0], holes[num_holes, 1], holes[num_holes, 2] = num_ids, start, stop
                    num_holes, count = num_holes + 1, 0
                num_ids += count
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
                count = _merge(text, start, size, model, room)
                for index in range(count):
                    ids[np.uintp(num_ids + index)] = symbols[np.uintp(index)]
                _insert(start, size, key, second, symbols, count, at, data, slots, long_bytes, long_ids, used)
                if used[3] and len(slots) < max_slots:
                    progress[0], progress[1], progress[2], progress[3] = document, stop, num_ids + count, num_holes
                    return NO_ROOM
            num_ids += count
            start = stop
        ids[np.uintp(num_ids)] = eos
        num_ids += 1
        ends[document] = num_ids
    progress[0], progress[1], progress[2], progress[3] = len(offsets) - 1, start, num_ids, num_holes
    return ALL_DONE


@nb.njit(nb.void(READ_U8, READ_I64, READ_U8, READ_I64, nb.boolean[::1]), nogil=True, cache=True)
def find_contents(data, offsets, contents, content_offsets, is_with):  # type: ignore[no-untyped-def]
    text = data.ctypes.data
    is_first = np.zeros(NUM_BYTES, dtype=np.bool_)
    for content in range(len(content_offsets) - 1):
        is_first[contents[content_offsets[content]]] = True
    for document in range(len(offsets) - 1):
        at, end = offsets[document], offsets[document + 1]
        while at < end and not is_with[document]:
            if is_first[byte_at(text, at)]:
                for content in range(len(content_offsets) - 1):
                    start, size = content_offsets[content], content_offsets[content + 1] - content_offsets[content]
                    if size <= end - at and _same_bytes(text, at, size, contents.ctypes.data, start):
                        is_with[document] = True
            at += 1


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
