"""The compiled inner loops of overlap matching: arrays in, arrays filled in place.

Called by `overlap`, which explains them and imports this module when it is first called: numba takes most of a second
to import. An n-gram's hash is the sum over i of word hash i × BASE^(n-1-i), modulo 2^64. Indices are cast to np.uintp
where it matters: numba tests signed ones for negative values.
"""

import numba as nb
import numpy as np

from pipeline_assets.transforms.kernels import (
    FNV_OFFSET,
    FNV_PRIME,
    READ_I64,
    READ_U8,
    READ_U32,
    READ_U64,
    byte_at,
    code_point_at,
    fmix64,
)
from pipeline_assets.transforms.overlap import WORD_BUFFER
from pipeline_assets.transforms.shingles import BASE
from pipeline_assets.transforms.words import SINGLE

SEPARATOR = np.uint32(0)
WORD_BITS = np.uint64(6)
LOW_BITS = np.uint64(63)
ONE = np.uint64(1)


@nb.njit
def _entry_at(text, position, end, fold):  # type: ignore[no-untyped-def]
    """What the code point at a position means, and its width; a byte that is not UTF-8 separates."""
    lead = byte_at(text, position)
    if lead < np.uint8(0x80):
        return fold[np.uintp(lead)], 1
    code_point, width = code_point_at(text, position, end)
    return (fold[np.uintp(code_point)], width) if code_point >= 0 else (SEPARATOR, 1)


@nb.njit
def _scan_words(text, position, end, fold, hashes, starts, num_words):  # type: ignore[no-untyped-def]
    """Append words until the text ends or two places are left: (number of words, where it stopped).

    It stops between words only. `starts` gets the byte at which each word begins. The hash in progress is stored at
    every byte and counted only where a word ends: a branch there would cost as much as all the rest.
    """
    run, is_open, begin = FNV_OFFSET, np.int64(0), position
    while position < end and num_words < len(hashes) - 2:
        lead = byte_at(text, position)
        if lead < np.uint8(0x80):
            entry, width = fold[np.uintp(lead)], 1
        else:
            entry, width = _entry_at(text, position, end, fold)
            if entry >= SINGLE:
                hashes[np.uintp(num_words)], starts[np.uintp(num_words)] = run, begin
                num_words += is_open
                hashes[np.uintp(num_words)] = (FNV_OFFSET ^ np.uint64(entry ^ SINGLE)) * FNV_PRIME
                starts[np.uintp(num_words)] = position
                num_words += 1
                entry, is_open = SEPARATOR, np.int64(0)
        begin = begin if is_open else position
        hashes[np.uintp(num_words)], starts[np.uintp(num_words)] = run, begin
        is_separator = np.int64(entry == SEPARATOR)
        num_words += is_open & is_separator
        is_open = 1 - is_separator
        run = FNV_OFFSET if is_separator else (run ^ np.uint64(entry)) * FNV_PRIME
        position += width
    if is_open:
        hashes[np.uintp(num_words)], starts[np.uintp(num_words)] = run, begin
        num_words += 1
    return num_words, position


@nb.njit(
    nb.int64(READ_U8, READ_I64, READ_U32, nb.uint32[::1], nb.int64[::1], nb.uint64[::1], nb.int64[::1]),
    nogil=True,
    cache=True,
)
def spell_words(data, offsets, fold, points, bounds, hashes, num_words):  # type: ignore[no-untyped-def]
    """Each word's lower-case code points and a separator, where each word begins among them, and its hash."""
    text, num_points, total = data.ctypes.data, 0, 0
    for document in range(len(offsets) - 1):
        position, end, first = offsets[document], offsets[document + 1], total
        run, is_open, was_single = FNV_OFFSET, False, False
        while position <= end:
            entry, width = SEPARATOR, 1  # as if a separator followed the text
            if position < end:
                entry, width = _entry_at(text, position, end, fold)
            position += width
            is_single = bool(entry >= SINGLE)
            if is_open and (entry == SEPARATOR or is_single or was_single):
                hashes[total] = fmix64(run)
                points[num_points] = SEPARATOR
                num_points, total, run, is_open = num_points + 1, total + 1, FNV_OFFSET, False
            if entry == SEPARATOR:
                continue
            if not is_open:
                bounds[total] = num_points
            points[num_points] = entry ^ SINGLE if is_single else entry
            run = (run ^ np.uint64(points[num_points])) * FNV_PRIME
            num_points, is_open, was_single = num_points + 1, True, is_single
        num_words[document] = total - first
    bounds[total] = num_points
    return total


@nb.njit(nb.void(READ_U64, READ_I64, READ_I64, nb.uint64, nb.uint64[::1]), nogil=True, cache=True)
def hash_ngrams(words, firsts, lengths, mask, hashes):  # type: ignore[no-untyped-def]
    for number in range(len(firsts)):
        value = np.uint64(0)
        for word in range(firsts[number], firsts[number] + lengths[number]):
            value = value * BASE + words[word]
        hashes[number] = value & mask


@nb.njit
def _same_points(points, starts, ends, left, right):  # type: ignore[no-untyped-def]
    length = ends[left] - starts[left]
    if ends[right] - starts[right] != length:
        return False
    for index in range(length):  # noqa: SIM110 - numba has no generator here
        if points[starts[left] + index] != points[starts[right] + index]:
            return False
    return True


@nb.njit(nb.void(READ_U64, READ_I64, READ_I64, READ_U32, nb.int64[::1]), nogil=True, cache=True)
def number_ngrams(hashes, starts, ends, points, numbers):  # type: ignore[no-untyped-def]
    """Give n-grams of the same words one number, the place of the first of them; they come by ascending hash."""
    group = 0
    for place in range(len(hashes)):
        if hashes[place] != hashes[group]:
            group = place
        numbers[place] = place
        for earlier in range(group, place):
            if numbers[earlier] == earlier and _same_points(points, starts, ends, earlier, place):
                numbers[place] = earlier
                break


@nb.njit
def _has_words(text, position, end, fold, points, start, stop):  # type: ignore[no-untyped-def]
    """Whether the text from a word's first byte on has exactly the words that points[start:stop] spell."""
    at, is_gap, was_single = start, False, False
    while position < end:
        entry, width = _entry_at(text, position, end, fold)
        if entry == SEPARATOR:
            if at == stop:
                return True
            is_gap = True
            position += width
            continue
        is_single = entry >= SINGLE
        if at > start and (is_gap or is_single or was_single):
            if at == stop:
                return True
            if points[at] != SEPARATOR:
                return False
            at += 1
        if at >= stop or points[at] != (entry ^ SINGLE if is_single else entry):
            return False
        at += 1
        position += width
        is_gap, was_single = False, is_single
    return at == stop


@nb.njit
def _first_at(hashes, key):  # type: ignore[no-untyped-def]
    low, high = 0, len(hashes)
    while low < high:
        middle = (low + high) >> 1
        if hashes[np.uintp(middle)] < key:
            low = middle + 1
        else:
            high = middle
    return low


@nb.njit
def _sift(sums, num_words, length, power, mask, sieve, sieve_shift, passed):  # type: ignore[no-untyped-def]
    """Note at which words an n-gram begins whose hash passes the sieve. Without a branch, its cache misses overlap."""
    num_passed = np.int64(0)
    for index in range(num_words - length + 1):
        key = (sums[np.uintp(index + length)] - sums[np.uintp(index)] * power) & mask
        slot = key >> sieve_shift
        passed[np.uintp(num_passed)] = index
        num_passed += np.int64((sieve[np.uintp(slot >> WORD_BITS)] >> (slot & LOW_BITS)) & ONE)
    return num_passed


@nb.njit(
    nb.int64(
        READ_U8,
        READ_I64,
        READ_U32,
        READ_U64,
        READ_I64,
        READ_I64,
        READ_I64,
        READ_U32,
        READ_U64,
        nb.uint64,
        READ_I64,
        nb.uint64,
        nb.int64,
        READ_I64,
        nb.int64,
        nb.int64[::1],
        nb.int64[:, ::1],
        nb.int64[::1],
        nb.int64[:, ::1],
    ),
    nogil=True,
    cache=True,
)
def find_ngrams(  # type: ignore[no-untyped-def]
    data,
    offsets,
    fold,
    hashes,
    lengths,
    starts,
    ends,
    points,
    sieve,
    sieve_shift,
    kinds,
    mask,
    first_row,
    copies,
    max_documents,
    last_row,
    counts,
    cursor,
    hits,
):
    """Fill `hits` with (n-gram, row), from the text that `cursor` names on; returns how many.

    A text at which the hits run full is named by `cursor` and read again: `last_row` knows what was counted in it.
    `copies` is how many rows a row stands for, 0 where another one stands for it: such a text is not read.
    """
    text, num_hits, longest = data.ctypes.data, 0, kinds[-1]
    size = max(WORD_BUFFER, 4 * longest) + 2
    words, word_starts = np.empty(size, np.uint64), np.empty(size, np.int64)
    sums, passed = np.empty(size + 1, np.uint64), np.empty(size + 1, np.int64)
    sums[0] = np.uint64(0)
    powers = np.ones(len(kinds), np.uint64)
    for kind in range(len(kinds)):
        for _ in range(kinds[kind]):
            powers[kind] *= BASE
    for document in range(cursor[0], len(offsets) - 1):
        cursor[0] = document
        row, position, end, kept = first_row + document, offsets[document], offsets[document + 1], np.int64(0)
        while position < end and copies[row]:
            filled, position = _scan_words(text, position, end, fold, words, word_starts, kept)
            for index in range(kept, filled):
                words[np.uintp(index)] = fmix64(words[np.uintp(index)])
            for index in range(filled):
                sums[np.uintp(index + 1)] = sums[np.uintp(index)] * BASE + words[np.uintp(index)]
            for kind in range(len(kinds)):
                length, power = kinds[kind], powers[kind]
                num_passed = _sift(sums, filled, length, power, mask, sieve, sieve_shift, passed)
                for index in passed[:num_passed]:
                    key = (sums[index + length] - sums[index] * power) & mask
                    for number in range(_first_at(hashes, key), len(hashes)):
                        if hashes[number] != key:
                            break
                        if lengths[number] != length or last_row[number] == row:
                            continue
                        if not _has_words(text, word_starts[index], end, fold, points, starts[number], ends[number]):
                            continue
                        if counts[number, 0] < max_documents:
                            if num_hits == len(hits):
                                return num_hits
                            hits[num_hits, 0], hits[num_hits, 1] = number, row
                            num_hits += 1
                        last_row[number] = row
                        counts[number, 0] += 1
                        counts[number, 1] += copies[row]
            # The last words move to the front: the next block's n-grams begin with them.
            kept = min(longest - 1, filled)
            for index in range(kept):
                words[index] = words[filled - kept + index]
                word_starts[index] = word_starts[filled - kept + index]
    cursor[0] = len(offsets) - 1
    return num_hits
