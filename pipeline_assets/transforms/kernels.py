"""The compiled inner loops of the transforms: arrays in, arrays filled in place.

Each is called by one function of the module that explains it. They release the GIL, are compiled once and cached, and
take no Python object. numba takes most of a second to import, so those functions import this module when they are
first called, and the code location loads without it.
"""

from typing import Any

import numba as nb
import numpy as np
from numba.extending import intrinsic

FNV_OFFSET = np.uint64(0xCBF29CE484222325)
FNV_PRIME = np.uint64(0x100000001B3)
SPREAD = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio (Knuth, The Art of Computer Programming 3, 6.4)
MIX_1 = np.uint64(0xFF51AFD7ED558CCD)
MIX_2 = np.uint64(0xC4CEB9FE1A85EC53)
SHIFT = np.uint64(33)

# Arrow's buffers are read-only: the kernels take their inputs as such; writable arrays convert.
READ_U8 = nb.types.Array(nb.uint8, 1, "C", readonly=True)
READ_U16 = nb.types.Array(nb.uint16, 1, "C", readonly=True)
READ_U32 = nb.types.Array(nb.uint32, 1, "C", readonly=True)
READ_U64 = nb.types.Array(nb.uint64, 1, "C", readonly=True)
READ_I64 = nb.types.Array(nb.int64, 1, "C", readonly=True)
READ_PAIRS = nb.types.Array(nb.int64, 2, "C", readonly=True)


@nb.njit(inline="always")
def fmix64(value):  # type: ignore[no-untyped-def]
    value = value ^ (value >> SHIFT)
    value = value * MIX_1
    value = value ^ (value >> SHIFT)
    value = value * MIX_2
    return value ^ (value >> SHIFT)


untyped_intrinsic: Any = intrinsic  # its own type wants the typing context as an argument of each call


# Text is read through an address where a function is called for every word or character: of an array that is handed to
# one numba counts the references, at each call, which takes longer than splitting a word does. The callers hold it.
@untyped_intrinsic
def byte_at(typing, address, index):  # type: ignore[no-untyped-def]
    """The byte at an address plus an index."""

    def generate(context, builder, signature, values):  # type: ignore[no-untyped-def]
        pointer = builder.inttoptr(builder.add(*values), context.get_value_type(nb.uint8).as_pointer())
        return context.data_model_manager[nb.uint8].load_from_data_pointer(builder, pointer)

    return nb.uint8(nb.uint64, nb.uint64), generate


@nb.njit
def code_point_at(data, at, end):  # type: ignore[no-untyped-def]
    """Code point at `at`, of more than one byte, and its width; (-1, 1) where the bytes are not UTF-8."""
    lead = np.int64(byte_at(data, at))
    if 0xC2 <= lead < 0xE0:
        width, least, code_point = 2, 0x80, lead & 0x1F
    elif 0xE0 <= lead < 0xF0:
        width, least, code_point = 3, 0x800, lead & 0x0F
    elif 0xF0 <= lead < 0xF5:
        width, least, code_point = 4, 0x10000, lead & 0x07
    else:
        return -1, 1
    if at + width > end:
        return -1, 1
    for index in range(at + 1, at + width):
        byte = np.int64(byte_at(data, index))
        if byte & 0xC0 != 0x80:
            return -1, 1
        code_point = code_point << 6 | byte & 0x3F
    if code_point < least or code_point > 0x10FFFF:
        return -1, 1
    return code_point, width


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


@nb.njit(
    [
        nb.void(READ_U16, READ_I64, READ_I64, nb.uint16[::1], READ_I64),
        nb.void(READ_U32, READ_I64, READ_I64, nb.uint32[::1], READ_I64),
    ],
    nogil=True,
    cache=True,
)
def copy_ranges(source, start, length, target, place):  # type: ignore[no-untyped-def]
    for row in range(len(start)):
        first, to = start[row], place[row]
        for index in range(length[row]):
            target[np.uintp(to + index)] = source[np.uintp(first + index)]
