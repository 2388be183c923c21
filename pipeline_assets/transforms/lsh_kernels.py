"""The compiled inner loops of `lsh` and `components`: arrays in, arrays filled in place.

As those of `kernels`: each is called by one function of the module that explains it, releases the GIL, is compiled once
and cached, takes no Python object, and is imported when it is first called.
"""

import numba as nb
import numpy as np

from pipeline_assets.transforms.kernels import READ_PAIRS, READ_U64, SPREAD, fmix64
from pipeline_assets.transforms.lsh import NO_KEY
from pipeline_assets.transforms.minhash import EMPTY_VALUE

ONE, HALF, LAST_BIT = np.uint64(1), np.uint64(32), np.uint64(63)
NO_ENTRY = np.uint64(0xFFFFFFFFFFFFFFFF)  # no entry's position has all bits set

# Stored arrays are mapped read-only: the kernels take their inputs as such; writable arrays convert.
READ_SIGNATURES = nb.types.Array(nb.uint32, 2, "C", readonly=True)


# Indices are cast to np.uintp: numba tests signed ones for negative values, which costs a third of the speed.
@nb.njit(nb.void(READ_SIGNATURES, nb.int64, nb.uint64[:, ::1]), nogil=True, cache=True)
def band_keys(signatures, rows_per_band, keys_by_band):  # type: ignore[no-untyped-def]
    last = len(signatures) - 1
    for first in range(0, len(signatures), 4):
        # A key waits for each value to be mixed in: four documents at once keep the processor busy.
        rows = (first, min(first + 1, last), min(first + 2, last), min(first + 3, last))
        a, b, c, d = signatures[rows[0]], signatures[rows[1]], signatures[rows[2]], signatures[rows[3]]
        least_a = least_b = least_c = least_d = EMPTY_VALUE
        for band in range(len(keys_by_band)):
            key_a = key_b = key_c = key_d = fmix64(np.uint64(band + 1))
            for index in range(band * rows_per_band, (band + 1) * rows_per_band):
                at = np.uintp(index)
                least_a, least_b = min(least_a, a[at]), min(least_b, b[at])
                least_c, least_d = min(least_c, c[at]), min(least_d, d[at])
                key_a, key_b = fmix64(key_a ^ np.uint64(a[at])), fmix64(key_b ^ np.uint64(b[at]))
                key_c, key_d = fmix64(key_c ^ np.uint64(c[at])), fmix64(key_d ^ np.uint64(d[at]))
            for row, key in zip(rows, (key_a, key_b, key_c, key_d)):  # noqa: B905 - numba has no strict zip
                keys_by_band[np.uintp(band), np.uintp(row)] = max(key, ONE)
        for row, least in zip(rows, (least_a, least_b, least_c, least_d)):  # noqa: B905
            if least == EMPTY_VALUE:
                keys_by_band[:, row] = NO_KEY


@nb.njit(inline="always")
def _spread(key):  # type: ignore[no-untyped-def]
    """Top bits that depend on all of the key's, one to one: a bucket's keys have their own top bits in common."""
    return key * SPREAD


@nb.njit
def _deal(keys, part_bits, position_bits, entries):  # type: ignore[no-untyped-def]
    """Deal the keys into parts by their spread top bits, as entries, the next bits above a position: parts' starts."""
    shift = LAST_BIT - part_bits
    starts = np.zeros((1 << part_bits) + 1, dtype=np.int64)
    for position in range(len(keys)):
        if keys[position] != NO_KEY:
            starts[np.uintp(_spread(keys[position]) >> ONE >> shift) + np.uintp(1)] += 1
    for part in range(1, len(starts)):
        starts[part] += starts[part - 1]
    ends = starts[:-1].copy()
    for position in range(len(keys)):
        if keys[position] != NO_KEY:
            spread = _spread(keys[position])
            at = np.uintp(spread >> ONE >> shift)
            entries[np.uintp(ends[at])] = spread << part_bits >> position_bits << position_bits | np.uint64(position)
            ends[at] += 1
    return starts


@nb.njit
def _slot_bits(num_entries):  # type: ignore[no-untyped-def]
    """Bits of a slot's number in a table of at least twice as many slots."""
    bits = ONE
    while num_entries << ONE > ONE << bits:
        bits += ONE
    return bits


@nb.njit
def _pair_part(keys, position_bits, entries, start, end, table, num_pairs):  # type: ignore[no-untyped-def]
    """Put a part's entries through a table, open with linear probing; one that finds its key there makes a pair."""
    position_mask = (ONE << position_bits) - ONE
    slot_bits = _slot_bits(np.uint64(end - start))
    slot_mask = (ONE << slot_bits) - ONE
    table[: 1 << slot_bits] = NO_ENTRY
    for index in range(start, end):
        entry = entries[np.uintp(index)]
        slot = entry >> (LAST_BIT - slot_bits + ONE)
        while table[np.uintp(slot)] != NO_ENTRY:
            first = table[np.uintp(slot)]
            is_alike = (first ^ entry) >> position_bits == 0
            # An entry has no room for all of its key: the whole keys decide.
            if is_alike and keys[first & position_mask] == keys[entry & position_mask]:
                # Pairs overwrite entries that have been read: at most one for each.
                entries[np.uintp(num_pairs)] = (first & position_mask) << HALF | entry & position_mask
                num_pairs += 1
                break
            slot = (slot + ONE) & slot_mask
        else:
            table[np.uintp(slot)] = entry
    return num_pairs


@nb.njit(nb.int64(READ_U64, nb.uint64, nb.uint64, nb.uint64[::1]), nogil=True, cache=True)
def pair_equal(keys, part_bits, position_bits, pairs):  # type: ignore[no-untyped-def]
    starts = _deal(keys, part_bits, position_bits, pairs)
    table = np.empty(1 << _slot_bits(np.uint64(np.max(np.diff(starts)))), dtype=np.uint64)
    num_pairs = 0
    for part in range(len(starts) - 1):
        num_pairs = _pair_part(keys, position_bits, pairs, starts[part], starts[part + 1], table, num_pairs)
    return num_pairs


@nb.njit
def _root(parents, node):  # type: ignore[no-untyped-def]
    while parents[node] != node:
        parents[node] = parents[parents[node]]
        node = parents[node]
    return node


@nb.njit(nb.void(nb.int64[::1], READ_PAIRS), nogil=True, cache=True)
def link(parents, pairs):  # type: ignore[no-untyped-def]
    for row in range(len(pairs)):
        first, second = _root(parents, pairs[row, 0]), _root(parents, pairs[row, 1])
        parents[max(first, second)] = min(first, second)


@nb.njit(nb.void(nb.int64[::1]), nogil=True, cache=True)
def flatten(parents):  # type: ignore[no-untyped-def]
    for node in range(len(parents)):
        # A parent is never larger than its child: it has its final label already.
        parents[node] = parents[parents[node]]
