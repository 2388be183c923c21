"""The compiled inner loops of the transforms: arrays in, arrays filled in place.

Each is called by one function of the module that explains it. They release the GIL, are compiled once and cached, and
take no Python object. numba takes most of a second to import, so those functions import this module when they are
first called, and the code location loads without it.
"""

import numba as nb
import numpy as np

MIX_1 = np.uint64(0xFF51AFD7ED558CCD)
MIX_2 = np.uint64(0xC4CEB9FE1A85EC53)
SHIFT = np.uint64(33)

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
