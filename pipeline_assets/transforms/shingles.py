"""Shingles: texts as UTF-8 bytes in, one 32-bit hash for each run of `ngram` consecutive words out.

    word hash    = fmix64(FNV-1a 64 over the word's lower-case code points)
    shingle hash = top 32 bits of fmix64(sum over i of word hash i × B^(n-1-i) + n × C), modulo 2^64, n its words

A text of fewer than `ngram` words has one shingle of all of them, so that short texts can be equal; a text without
words has none. A byte that is not valid UTF-8 separates words. Cost: one compiled pass over the bytes, no Python object
a word or a document; 4 bytes a shingle and a fixed buffer of words.
"""

from collections.abc import Iterator

import numba as nb
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pipeline_assets.transforms.words import SINGLE, fold_table

U8 = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]

FNV_OFFSET = np.uint64(0xCBF29CE484222325)
FNV_PRIME = np.uint64(0x100000001B3)
BASE = np.uint64(0x9E3779B97F4A7C15)
COUNT = np.uint64(0xD6E8FEB86659FD93)
MIX_1 = np.uint64(0xFF51AFD7ED558CCD)
MIX_2 = np.uint64(0xC4CEB9FE1A85EC53)
SHIFT = np.uint64(33)
TOP = np.uint64(32)
SEPARATOR = np.uint32(0)

WORD_BUFFER = 4096  # words hashed before their shingles: 32 kB, so that they stay in the first-level cache

# Arrow's buffers are read-only: the kernels take their inputs as such; writable arrays convert.
READ_U8 = nb.types.Array(nb.uint8, 1, "C", readonly=True)
READ_U32 = nb.types.Array(nb.uint32, 1, "C", readonly=True)
READ_I64 = nb.types.Array(nb.int64, 1, "C", readonly=True)


def shingle_hashes(text: str, ngram: int = 5) -> U32:
    """Hashes of a text's shingles in order, repeats included, as fed to MinHash: uint32[num_shingles].

    >>> len(shingle_hashes("the cat sat on the mat and then slept"))
    5
    """
    data = np.frombuffer(text.encode("utf-8", "replace"), dtype=np.uint8)
    hashes, _, _ = hash_documents(data, np.array([0, len(data)]), ngram)
    return hashes


def unique_shingles(text: str, ngram: int = 5) -> U32:
    """A text as the set that Jaccard similarity compares: its distinct shingle hashes, ascending.

    >>> len(unique_shingles("la la la la la la la"))
    1
    """
    return np.unique(shingle_hashes(text, ngram))


def hash_documents(data: U8, offsets: I64, ngram: int) -> tuple[U32, I64, I64]:
    """Shingles of many texts: bytes and int64[n + 1] offsets into them -> (hashes uint32[total], their offsets
    int64[n + 1], words a text int64[n])."""
    assert ngram >= 1, ngram
    assert offsets[0] >= 0, offsets[0]
    assert offsets[-1] <= len(data), (offsets[-1], len(data))
    assert (np.diff(offsets) >= 0).all(), "offsets must not fall"
    num_documents = len(offsets) - 1
    # Words of one byte need a separator between them, so a text of n bytes has at most (n + 1) // 2.
    hashes = np.empty((int(offsets[-1] - offsets[0]) + num_documents) // 2 + 1, dtype=np.uint32)
    num_words = np.empty(num_documents, dtype=np.int64)
    buffer = np.empty(max(WORD_BUFFER, 4 * ngram) + 2, dtype=np.uint64)
    lead_power = np.uint64(pow(int(BASE), ngram - 1, 1 << 64))
    _hash_documents(data, offsets, fold_table(), ngram, lead_power, buffer, hashes, num_words)
    num_shingles = np.minimum(num_words, np.maximum(1, num_words - ngram + 1))
    hash_offsets = np.concatenate([[0], np.cumsum(num_shingles)])
    return hashes[: hash_offsets[-1]], hash_offsets, num_words


def utf8_blocks(texts: pa.Array | pa.ChunkedArray, max_bytes: int) -> Iterator[tuple[U8, I64]]:
    """The bytes and int64 offsets behind an Arrow array of texts, without a copy, in blocks of about `max_bytes`.

    Takes string, large_string and dictionary-encoded arrays, whole or sliced. A block holds whole texts, at least one.
    """
    for chunk in texts.chunks if isinstance(texts, pa.ChunkedArray) else [texts]:
        array = chunk.dictionary_decode() if pa.types.is_dictionary(chunk.type) else chunk
        assert pa.types.is_string(array.type) or pa.types.is_large_string(array.type), array.type
        assert array.null_count == 0, f"{array.null_count:,} null texts"
        if len(array):
            data, offsets = _utf8_buffers(array)
            yield from _cut_by_bytes(data, offsets, max_bytes)


def _utf8_buffers(array: pa.Array) -> tuple[U8, I64]:
    _, offset_buffer, data_buffer = array.buffers()
    width = np.int64 if pa.types.is_large_string(array.type) else np.int32
    offsets = np.frombuffer(offset_buffer, dtype=width)[array.offset : array.offset + len(array) + 1]
    data = np.frombuffer(data_buffer or b"", dtype=np.uint8)
    return data, offsets.astype(np.int64)


def _cut_by_bytes(data: U8, offsets: I64, max_bytes: int) -> Iterator[tuple[U8, I64]]:
    start, num_documents = 0, len(offsets) - 1
    while start < num_documents:
        end = int(np.searchsorted(offsets, offsets[start] + max_bytes, side="right")) - 1
        end = min(max(end, start + 1), num_documents)
        yield data, offsets[start : end + 1]
        start = end


@nb.njit(inline="always")
def _fmix64(value):  # type: ignore[no-untyped-def]
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
        hashes[np.uintp(num_hashes)] = _fmix64(rolling + np.uint64(ngram) * COUNT) >> TOP
        num_hashes += 1
        rolling -= words[np.uintp(index - ngram + 1)] * lead_power
    return rolling


@nb.njit(
    nb.void(READ_U8, READ_I64, READ_U32, nb.int64, nb.uint64, nb.uint64[::1], nb.uint32[::1], nb.int64[::1]),
    nogil=True,
    cache=True,
)
def _hash_documents(data, offsets, fold, ngram, lead_power, words, hashes, num_words):  # type: ignore[no-untyped-def]
    num_hashes = 0
    for document in range(len(offsets) - 1):
        position, end = offsets[document], offsets[document + 1]
        total, kept, rolling = 0, 0, np.uint64(0)
        while position < end:
            filled, position = _scan_words(data, position, end, fold, words, kept)
            total += filled - kept
            for index in range(kept, filled):
                words[np.uintp(index)] = _fmix64(words[np.uintp(index)])
            rolling = _roll_shingles(words, filled, ngram, lead_power, hashes, num_hashes)
            num_hashes += max(0, filled - ngram + 1)
            # The last ngram - 1 words move to the front: the next block's shingles begin with them.
            kept = min(ngram - 1, filled)
            for index in range(kept):
                words[index] = words[filled - kept + index]
        if 0 < total < ngram:
            hashes[num_hashes] = _fmix64(rolling + np.uint64(total) * COUNT) >> TOP
            num_hashes += 1
        num_words[document] = total
