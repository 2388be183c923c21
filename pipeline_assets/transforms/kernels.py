"""The compiled inner loops of the transforms: arrays in, arrays filled in place.

Each is called by one function of the module that explains it. They release the GIL, are compiled once and cached, and
take no Python object. numba takes most of a second to import, so those functions import this module when they are
first called, and the code location loads without it.
"""

import numba as nb
import numpy as np

from pipeline_assets.transforms.shingles import BASE
from pipeline_assets.transforms.words import SINGLE

FNV_OFFSET = np.uint64(0xCBF29CE484222325)
FNV_PRIME = np.uint64(0x100000001B3)
COUNT = np.uint64(0xD6E8FEB86659FD93)
MIX_1 = np.uint64(0xFF51AFD7ED558CCD)
MIX_2 = np.uint64(0xC4CEB9FE1A85EC53)
SHIFT = np.uint64(33)
TOP = np.uint64(32)
SEPARATOR = np.uint32(0)

MIX32_1 = np.uint32(0x85EBCA6B)
MIX32_2 = np.uint32(0xC2B2AE35)
SHIFT_13 = np.uint32(13)
SHIFT_16 = np.uint32(16)
BLOCK_SHINGLES = 1024

# Arrow's buffers are read-only: the kernels take their inputs as such; writable arrays convert.
READ_U8 = nb.types.Array(nb.uint8, 1, "C", readonly=True)
READ_U32 = nb.types.Array(nb.uint32, 1, "C", readonly=True)
READ_I64 = nb.types.Array(nb.int64, 1, "C", readonly=True)
READ_PAIRS = nb.types.Array(nb.int64, 2, "C", readonly=True)


@nb.njit(inline="always")
def fmix64(value):  # type: ignore[no-untyped-def]
    value = value ^ (value >> SHIFT)
    value = value * MIX_1
    value = value ^ (value >> SHIFT)
    value = value * MIX_2
    return value ^ (value >> SHIFT)


@nb.njit
def _code_point(data, start, end):  # type: ignore[no-untyped-def]
    """Code point at `start` and its width in bytes; (-1, 1) where the bytes are not UTF-8."""
    lead = np.int64(data[start])
    if 0xC2 <= lead < 0xE0:
        width, least, code_point = 2, 0x80, lead & 0x1F
    elif 0xE0 <= lead < 0xF0:
        width, least, code_point = 3, 0x800, lead & 0x0F
    elif 0xF0 <= lead < 0xF5:
        width, least, code_point = 4, 0x10000, lead & 0x07
    else:
        return -1, 1
    if start + width > end:
        return -1, 1
    for index in range(start + 1, start + width):
        byte = np.int64(data[index])
        if byte & 0xC0 != 0x80:
            return -1, 1
        code_point = code_point << 6 | byte & 0x3F
    if code_point < least or code_point > 0x10FFFF:
        return -1, 1
    return code_point, width


# Indices are cast to np.uintp: numba tests signed ones for negative values, which costs a third of the speed.
@nb.njit
def _scan_words(data, start, end, fold, words, num_words):  # type: ignore[no-untyped-def]
    """Append FNV-1a hashes to `words` until the text ends or two places are left: (number of words, where it stopped).

    It stops between words only. The hash in progress is stored at every byte and counted only where a word ends:
    without a branch that depends on where words end, a byte costs half as much.
    """
    run, is_open = FNV_OFFSET, np.int64(0)
    while start < end and num_words < len(words) - 2:
        lead = data[np.uintp(start)]
        if lead < np.uint8(0x80):
            entry = fold[lead]
            start += 1
        else:
            code_point, width = _code_point(data, start, end)
            entry = fold[np.uintp(code_point)] if code_point >= 0 else SEPARATOR
            start += width
            if entry >= SINGLE:
                words[np.uintp(num_words)] = run
                num_words += is_open
                words[np.uintp(num_words)] = (FNV_OFFSET ^ np.uint64(entry ^ SINGLE)) * FNV_PRIME
                num_words += 1
                entry, is_open = SEPARATOR, np.int64(0)
        words[np.uintp(num_words)] = run
        is_separator = np.int64(entry == SEPARATOR)
        num_words += is_open & is_separator
        is_open = 1 - is_separator
        run = FNV_OFFSET if is_separator else (run ^ np.uint64(entry)) * FNV_PRIME
    if is_open:
        words[np.uintp(num_words)] = run
        num_words += 1
    return num_words, start


@nb.njit
def _roll_shingles(words, num_words, ngram, lead_power, hashes, num_hashes):  # type: ignore[no-untyped-def]
    """Hash every run of `ngram` words into `hashes` from `num_hashes` on; the last ngram - 1 words as a polynomial."""
    rolling = np.uint64(0)
    for index in range(min(ngram - 1, num_words)):
        rolling = rolling * BASE + words[np.uintp(index)]
    for index in range(ngram - 1, num_words):
        rolling = rolling * BASE + words[np.uintp(index)]
        hashes[np.uintp(num_hashes)] = fmix64(rolling + np.uint64(ngram) * COUNT) >> TOP
        num_hashes += 1
        rolling -= words[np.uintp(index - ngram + 1)] * lead_power
    return rolling


@nb.njit(
    nb.void(READ_U8, READ_I64, READ_U32, nb.int64, nb.uint64, nb.uint64[::1], nb.uint32[::1], nb.int64[::1]),
    nogil=True,
    cache=True,
)
def hash_documents(data, offsets, fold, ngram, lead_power, words, hashes, num_words):  # type: ignore[no-untyped-def]
    num_hashes = 0
    for document in range(len(offsets) - 1):
        position, end = offsets[document], offsets[document + 1]
        total, kept, rolling = 0, 0, np.uint64(0)
        while position < end:
            filled, position = _scan_words(data, position, end, fold, words, kept)
            total += filled - kept
            for index in range(kept, filled):
                words[np.uintp(index)] = fmix64(words[np.uintp(index)])
            rolling = _roll_shingles(words, filled, ngram, lead_power, hashes, num_hashes)
            num_hashes += max(0, filled - ngram + 1)
            # The last ngram - 1 words move to the front: the next block's shingles begin with them.
            kept = min(ngram - 1, filled)
            for index in range(kept):
                words[index] = words[filled - kept + index]
        if 0 < total < ngram:
            hashes[num_hashes] = fmix64(rolling + np.uint64(total) * COUNT) >> TOP
            num_hashes += 1
        num_words[document] = total


# numba widens uint32 × uint32 to 64 bits, which would be another hash family: every product is cast back.
@nb.njit(nb.void(READ_U32, READ_I64, READ_U32, READ_U32, nb.uint32[:, ::1]), nogil=True, cache=True)
def sign(hashes, offsets, multipliers, addends, signatures):  # type: ignore[no-untyped-def]
    mixed = np.empty(BLOCK_SHINGLES, dtype=np.uint32)
    for document in range(len(offsets) - 1):
        signature = signatures[document]
        for start in range(offsets[document], offsets[document + 1], BLOCK_SHINGLES):
            num = min(BLOCK_SHINGLES, offsets[document + 1] - start)
            for index in range(num):
                value = hashes[start + index]
                value = np.uint32((value ^ (value >> SHIFT_16)) * MIX32_1)
                value = np.uint32((value ^ (value >> SHIFT_13)) * MIX32_2)
                mixed[index] = value ^ (value >> SHIFT_16)
            for permutation in range(len(multipliers)):
                multiplier, addend = multipliers[permutation], addends[permutation]
                least = signature[permutation]
                for index in range(num):
                    least = min(least, np.uint32(np.uint32(multiplier * mixed[index]) + addend))
                signature[permutation] = least


@nb.njit(
    nb.void(READ_U32, READ_I64, READ_PAIRS, nb.float64[::1]),
    nogil=True,
    cache=True,
)
def jaccard(hashes, offsets, pairs, similarities):  # type: ignore[no-untyped-def]
    for row in range(len(pairs)):
        left, left_end = offsets[pairs[row, 0]], offsets[pairs[row, 0] + 1]
        right, right_end = offsets[pairs[row, 1]], offsets[pairs[row, 1] + 1]
        num_values = left_end - left + right_end - right
        num_shared = 0
        while left < left_end and right < right_end:
            num_shared += hashes[left] == hashes[right]
            left, right = left + (hashes[left] <= hashes[right]), right + (hashes[right] <= hashes[left])
        if num_values:
            similarities[row] = num_shared / (num_values - num_shared)
