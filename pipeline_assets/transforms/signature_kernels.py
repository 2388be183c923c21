"""The compiled inner loops of `shingles` and `minhash`: UTF-8 bytes in, shingle hashes and signatures filled in place.

As those of `kernels`: each is called by one function of the module that explains it, releases the GIL, is compiled once
and cached, takes no Python object, and is imported when it is first called.

Text becomes shingle hashes in blocks that stay in the first-level cache, each in three passes: bytes to entries (a
code point lower-cased, or a mark that it separates words), entries to word hashes, word hashes to shingle hashes. Long
runs of ASCII are folded by vector instructions, anything else code point by code point. A hash waits for its own last
product, so a block's entries are hashed in four quarters side by side. No pass goes back: the steps that they return
are at most a few for each byte, whatever the text.

Two habits are for speed alone. Indices are cast to np.uintp, because numba tests signed ones for negative values. What
runs for every few bytes is inlined and gets bytes rather than arrays, because a call counts references to its arrays.
"""

import numba as nb
import numpy as np

from pipeline_assets.transforms.kernels import FNV_OFFSET, FNV_PRIME, READ_I64, READ_U8, READ_U32, fmix64
from pipeline_assets.transforms.shingles import BASE, BLOCK
from pipeline_assets.transforms.words import SINGLE

# Entries above 0 are lower-cased code points of words.
SEPARATES = np.int32(0)
ENDS = np.int32(-128)  # separates, and ends the word before it; in one byte the highest bit

ASCII_STEP = 32  # bytes that are looked at, and found to be ASCII or not, at once
NOT_ASCII = np.uint8(0x80)
NO_BYTE = np.uint8(0)
CASE_BIT = np.uint8(0x20)  # set in digits too
LETTER_A, NUM_LETTERS = np.uint8(ord("a")), np.uint8(26)
DIGIT_0, NUM_DIGITS = np.uint8(ord("0")), np.uint8(10)
SIX = np.uint32(6)

COUNT = np.uint64(0xD6E8FEB86659FD93)
TOP = np.uint64(32)
SIGN = np.uint32(31)

MIX32_1 = np.uint32(0x85EBCA6B)
MIX32_2 = np.uint32(0xC2B2AE35)
SHIFT_13 = np.uint32(13)
SHIFT_16 = np.uint32(16)
BLOCK_SHINGLES = 1024

WRITE_U8, WRITE_I32 = nb.uint8[::1], nb.int32[::1]
WRITE_U32, WRITE_U64 = nb.uint32[::1], nb.uint64[::1]


@nb.njit(inline="always")
def _is_ascii_word(byte):  # type: ignore[no-untyped-def]
    is_letter = np.uint8((byte | CASE_BIT) - LETTER_A) < NUM_LETTERS
    return is_letter | (np.uint8(byte - DIGIT_0) < NUM_DIGITS)


@nb.njit(inline="always")
def _ascii_run(data, start, end, step):  # type: ignore[no-untyped-def]
    """How many of the bytes in [start, end) are ASCII up to the first that is not, in whole steps."""
    position = start
    while position + step <= end:
        seen = NO_BYTE
        for index in range(step):
            seen = np.uint8(seen | data[np.uintp(position) + np.uintp(index)])
        if seen >= NOT_ASCII:
            break
        position += step
    return position - start


@nb.njit(inline="always")
def _fold_ascii(data, start, num, folded, entries, num_entries):  # type: ignore[no-untyped-def]
    """Append the entries of `num` bytes of ASCII, which are not the first of the data, through bytes of 8 bits."""
    for index in range(num):
        at = np.uintp(start) + np.uintp(index)
        ends = NOT_ASCII if _is_ascii_word(data[at - np.uintp(1)]) else NO_BYTE
        folded[np.uintp(index)] = np.uint8(data[at] | CASE_BIT) if _is_ascii_word(data[at]) else ends
    for index in range(num):
        entries[np.uintp(num_entries) + np.uintp(index)] = np.int32(np.int8(folded[np.uintp(index)]))
    if entries[num_entries] <= 0:  # what comes before the first byte may be of another document, or not ASCII
        entries[num_entries] = ENDS if entries[num_entries - 1] > 0 else SEPARATES
    return num_entries + num


@nb.njit(inline="always")
def _continues(byte):  # type: ignore[no-untyped-def]
    return byte & np.uint8(0xC0) == NOT_ASCII


@nb.njit(inline="always")
def _longer(value, byte):  # type: ignore[no-untyped-def]
    return np.uint32(value << SIX | np.uint32(byte & np.uint8(0x3F)))


@nb.njit
def _code_point(lead, second, third, fourth):  # type: ignore[no-untyped-def]
    """The code point that four bytes begin with and its width; (0, 1) where that is not UTF-8 (RFC 3629)."""
    if lead < np.uint8(0xE0):
        if lead >= np.uint8(0xC2) and _continues(second):
            return _longer(np.uint32(lead & np.uint8(0x1F)), second), 2
    elif lead < np.uint8(0xF0):
        code_point = _longer(_longer(np.uint32(lead & np.uint8(0x0F)), second), third)
        if code_point >= 0x800 and _continues(second) and _continues(third):
            return code_point, 3
    else:
        code_point = _longer(_longer(_longer(np.uint32(lead & np.uint8(0x0F)), second), third), fourth)
        if 0x10000 <= code_point < 0x110000 and _continues(second) and _continues(third) and _continues(fourth):
            return code_point, 4
    return np.uint32(0), 1


@nb.njit(inline="always")
def _fold_code_points(data, start, stop, end, fold, entries, num_entries):  # type: ignore[no-untyped-def]
    """Append the entries of the code points that start in [start, stop): (where they end, number of entries)."""
    last = entries[num_entries - 1]
    while start < stop:
        at, left = np.uintp(start), end - start
        lead = data[at]
        if lead < NOT_ASCII:
            entry = fold[np.uintp(lead)]
            start += 1
        else:
            second = data[at + np.uintp(1)] if left > 1 else NO_BYTE
            third = data[at + np.uintp(2)] if left > 2 else NO_BYTE
            fourth = data[at + np.uintp(3)] if left > 3 else NO_BYTE
            code_point, width = _code_point(lead, second, third, fourth)
            entry = fold[np.uintp(code_point)]
            start += width
            if entry >= SINGLE:
                entries[np.uintp(num_entries)] = ENDS
                num_entries += last > 0
                last = np.int32(entry ^ SINGLE)
                entries[np.uintp(num_entries)] = last
                num_entries += 1
                entry = np.uint32(0)
        ends = ENDS if last > 0 else SEPARATES
        last = np.int32(entry) if entry > 0 else ends
        entries[np.uintp(num_entries)] = last
        num_entries += 1
    return start, num_entries


@nb.njit((READ_U8, nb.int64, nb.int64, READ_U32, WRITE_U8, WRITE_I32))
def _fold_block(data, start, end, fold, folded, entries):  # type: ignore[no-untyped-def]
    """Fill `entries` from 1 on for a document's next block: (where it ends, number of entries, steps).

    entries[0] is the last one of the block before. A byte makes at most one entry, and a document's end makes one.
    """
    num_entries, num_turns, block_start = 1, 0, start
    block_end = min(start + BLOCK, end)
    step = len(folded) // (BLOCK // ASCII_STEP)  # unknown to the compiler, which makes vectors of loops of such lengths
    while start < block_end:
        num_ascii = _ascii_run(data, start, block_end, step) if start else 0
        num_turns += 1
        if num_ascii:
            num_entries = _fold_ascii(data, start, num_ascii, folded, entries, num_entries)
            start += num_ascii
            continue
        stop = min(start + step, block_end)
        start, num_entries = _fold_code_points(data, start, stop, end, fold, entries, num_entries)
    if start >= end and entries[num_entries - 1] > 0:
        entries[num_entries] = ENDS
        num_entries += 1
    return start, num_entries, 2 * (start - block_start) + step * num_turns


@nb.njit((WRITE_I32, nb.int64, nb.int64))
def _last_cut(entries, start, end):  # type: ignore[no-untyped-def]
    """The last place in (start, end] before which an entry separates words, else `start`."""
    while end > start and entries[np.uintp(end - 1)] > 0:
        end -= 1
    return end


@nb.njit(inline="always")
def _take_in(entry, run, place):  # type: ignore[no-untyped-def]
    """FNV-1a over an entry of a word, else a fresh hash; the place moves on where a word ends. Nothing branches."""
    run = (run ^ np.uint64(np.uint32(entry))) * FNV_PRIME if entry > 0 else FNV_OFFSET
    return run, place + np.uintp(np.uint32(entry) >> SIGN)


@nb.njit((WRITE_I32, nb.int64, nb.int64, nb.uint64, nb.uintp, WRITE_U64))
def _hash_rest(entries, start, end, run, place, hashes):  # type: ignore[no-untyped-def]
    for index in range(start, end):
        hashes[place] = run
        run, place = _take_in(entries[np.uintp(index)], run, place)
    return run, np.int64(place)


@nb.njit((WRITE_U64, nb.int64, nb.int64, WRITE_U64, nb.int64))
def _append_mixed(hashes, start, end, words, num_words):  # type: ignore[no-untyped-def]
    for index in range(end - start):
        words[np.uintp(num_words + index)] = fmix64(hashes[np.uintp(start + index)])
    return num_words + end - start


@nb.njit((WRITE_I32, nb.int64, nb.uint64, WRITE_U64, WRITE_U64, nb.int64))
def _hash_entries(entries, num_entries, run, hashes, words, num_words):  # type: ignore[no-untyped-def]
    """Append the hashes of a block's words to `words`: (hash of the word that is open at its end, number of words,
    steps). `run` is that of the block before.

    Every entry stores the hash so far where the next word's belongs; it stays there if the entry ends a word.
    """
    quarter = (num_entries - 1) // 4
    cut1 = _last_cut(entries, 1, 1 + quarter)
    cut2 = _last_cut(entries, cut1, 1 + 2 * quarter)
    cut3 = _last_cut(entries, cut2, 1 + 3 * quarter)
    # The open word goes on in the first quarter that is not empty; the fourth never is.
    run0, run1 = run, run if cut1 == 1 else FNV_OFFSET
    run2, run3 = run if cut2 == 1 else FNV_OFFSET, run if cut3 == 1 else FNV_OFFSET
    place0, place1, place2, place3 = np.uintp(1), np.uintp(cut1), np.uintp(cut2), np.uintp(cut3)
    shortest = min(cut1 - 1, cut2 - cut1, cut3 - cut2, num_entries - cut3)
    for index in range(np.uintp(shortest)):
        hashes[place0], hashes[place1], hashes[place2], hashes[place3] = run0, run1, run2, run3
        run0, place0 = _take_in(entries[np.uintp(1) + index], run0, place0)
        run1, place1 = _take_in(entries[np.uintp(cut1) + index], run1, place1)
        run2, place2 = _take_in(entries[np.uintp(cut2) + index], run2, place2)
        run3, place3 = _take_in(entries[np.uintp(cut3) + index], run3, place3)
    _, end0 = _hash_rest(entries, 1 + shortest, cut1, run0, place0, hashes)
    _, end1 = _hash_rest(entries, cut1 + shortest, cut2, run1, place1, hashes)
    _, end2 = _hash_rest(entries, cut2 + shortest, cut3, run2, place2, hashes)
    run, end3 = _hash_rest(entries, cut3 + shortest, num_entries, run3, place3, hashes)
    num_words = _append_mixed(hashes, 1, end0, words, num_words)
    num_words = _append_mixed(hashes, cut1, end1, words, num_words)
    num_words = _append_mixed(hashes, cut2, end2, words, num_words)
    num_words = _append_mixed(hashes, cut3, end3, words, num_words)
    return run, num_words, num_entries + (1 + quarter - cut1) + (1 + 2 * quarter - cut2) + (1 + 3 * quarter - cut3)


@nb.njit((WRITE_U64, nb.int64, nb.int64))
def _polynomial(words, start, end):  # type: ignore[no-untyped-def]
    value = np.uint64(0)
    for index in range(start, end):
        value = value * BASE + words[np.uintp(index)]
    return value


@nb.njit((WRITE_U64, nb.int64, nb.int64, nb.uint64, WRITE_U64, WRITE_U32, nb.int64))
def _roll_shingles(words, num_shingles, ngram, lead_power, rolled, hashes, num_hashes):  # type: ignore[no-untyped-def]
    """Hash the first `num_shingles` runs of `ngram` words into `hashes` from `num_hashes` on.

    Two halves are rolled side by side: one waits for its own last product. They share a shingle where there is an odd
    number of them.
    """
    half = (num_shingles + 1) // 2
    second = num_shingles - half
    left = _polynomial(words, 0, ngram - 1)
    right = _polynomial(words, second, second + ngram - 1)
    for index in range(half):
        left = left * BASE + words[np.uintp(index + ngram - 1)]
        right = right * BASE + words[np.uintp(second + index + ngram - 1)]
        rolled[np.uintp(index)] = left
        rolled[np.uintp(second + index)] = right
        left -= words[np.uintp(index)] * lead_power
        right -= words[np.uintp(second + index)] * lead_power
    count = np.uint64(ngram) * COUNT
    for index in range(num_shingles):
        hashes[np.uintp(num_hashes + index)] = fmix64(rolled[np.uintp(index)] + count) >> TOP


@nb.njit(
    nb.int64(READ_U8, READ_I64, READ_U32, nb.int64, nb.uint64, nb.uint32[::1], nb.int64[::1]),
    nogil=True,
    cache=True,
)
def hash_documents(data, offsets, fold, ngram, lead_power, hashes, num_words):  # type: ignore[no-untyped-def]
    folded = np.empty(BLOCK, dtype=np.uint8)
    entries = np.empty(BLOCK + 8, dtype=np.int32)
    scratch = np.empty(BLOCK + 8, dtype=np.uint64)
    words = np.empty(ngram + BLOCK // 2 + 8, dtype=np.uint64)  # a word has at least two entries
    num_hashes = num_steps = 0
    for document in range(len(offsets) - 1):
        position, end = offsets[document], offsets[document + 1]
        total, kept, run = 0, 0, FNV_OFFSET
        entries[0] = SEPARATES
        while position < end:
            position, num_entries, fold_steps = _fold_block(data, position, end, fold, folded, entries)
            run, filled, hash_steps = _hash_entries(entries, num_entries, run, scratch, words, kept)
            entries[0] = entries[num_entries - 1]
            num_steps += fold_steps + hash_steps
            total += filled - kept
            num_shingles = max(0, filled - ngram + 1)
            if num_shingles:
                _roll_shingles(words, num_shingles, ngram, lead_power, scratch, hashes, num_hashes)
                num_hashes += num_shingles
            # The last ngram - 1 words move to the front: the next block's shingles begin with them.
            kept = min(ngram - 1, filled)
            for index in range(kept):
                words[index] = words[filled - kept + index]
        if 0 < total < ngram:
            hashes[num_hashes] = fmix64(_polynomial(words, 0, total) + np.uint64(total) * COUNT) >> TOP
            num_hashes += 1
        num_words[document] = total
    return num_steps


# numba widens uint32 × uint32 to 64 bits, which would be another hash family: every product is cast back.
@nb.njit(inline="always")
def _fmix32(value):  # type: ignore[no-untyped-def]
    value = np.uint32((value ^ (value >> SHIFT_16)) * MIX32_1)
    value = np.uint32((value ^ (value >> SHIFT_13)) * MIX32_2)
    return value ^ (value >> SHIFT_16)


@nb.njit(inline="always")
def _permuted(value, multiplier, addend):  # type: ignore[no-untyped-def]
    return np.uint32(np.uint32(multiplier * value) + addend)


@nb.njit(nb.void(READ_U32, READ_I64, READ_U32, READ_U32, nb.uint32[:, ::1]), nogil=True, cache=True)
def sign(hashes, offsets, multipliers, addends, signatures):  # type: ignore[no-untyped-def]
    mixed = np.empty(BLOCK_SHINGLES + 3, dtype=np.uint32)
    for document in range(len(offsets) - 1):
        signature = signatures[document]
        for start in range(offsets[document], offsets[document + 1], BLOCK_SHINGLES):
            num = min(BLOCK_SHINGLES, offsets[document + 1] - start)
            for index in range(num):
                mixed[np.uintp(index)] = _fmix32(hashes[np.uintp(start + index)])
            mixed[num : num + 3] = mixed[num - 1]  # the last one again lowers no minimum
            # Four shingles meet each permutation at once: its numbers are loaded once for all of them.
            for index in range(0, num, 4):
                value0, value1 = mixed[np.uintp(index)], mixed[np.uintp(index + 1)]
                value2, value3 = mixed[np.uintp(index + 2)], mixed[np.uintp(index + 3)]
                for permutation in range(np.uintp(len(multipliers))):
                    multiplier, addend = multipliers[permutation], addends[permutation]
                    least = min(signature[permutation], _permuted(value0, multiplier, addend))
                    least = min(least, _permuted(value1, multiplier, addend))
                    least = min(least, _permuted(value2, multiplier, addend))
                    signature[permutation] = min(least, _permuted(value3, multiplier, addend))
