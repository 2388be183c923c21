"""MinHash signatures: Arrow texts in, 112 values a document out.

The scheme is datasketch 2.0's `affine32`, bit for bit: a shingle's 32-bit hash h is finalised once (MurmurHash3's
fmix32), and value i is the minimum over the shingles of a_i × h + b_i modulo 2^32, a_i odd. Equal shingle sets give
equal rows, on any machine and in any grouping. Cost: one pass over the text, 4 bytes a value, and a few megabytes a
thread.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields
from functools import cache, partial

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pipeline_assets.transforms.arrays import I64, U8, U32, utf8_blocks
from pipeline_assets.transforms.shingles import hash_and_count
from pipeline_assets.transforms.words import UNICODE_VERSION, fold_table
from training_io.errors import RecipeError

SCHEME = "affine32"
EMPTY_VALUE = np.uint32(0xFFFFFFFF)  # the minimum over no shingle at all

BLOCK_BYTES = 1 << 20  # text hashed before it is signed: its shingles stay in the cache


@dataclass(frozen=True, kw_only=True)
class MinHashParams:
    """What signatures depend on; unequal ones must not be compared.

    RecipeError when bands and rows do not use every value, or a number is below 1.
    """

    num_perm: int = 112
    num_bands: int = 14
    rows_per_band: int = 8
    ngram: int = 5
    seed: int = 1
    unicode_version: str = UNICODE_VERSION

    def __post_init__(self) -> None:
        for name in ("num_perm", "num_bands", "rows_per_band", "ngram"):
            if getattr(self, name) < 1:
                raise RecipeError(f"MinHash {name}: expected at least 1, found {getattr(self, name):,}.")
        if not 0 <= self.seed < 1 << 32:
            raise RecipeError(f"MinHash seed: expected 0 to {(1 << 32) - 1:,}, found {self.seed:,}.")
        used = self.num_bands * self.rows_per_band
        if used != self.num_perm:
            raise RecipeError(
                f"MinHash bands: expected num_bands × rows_per_band = num_perm = {self.num_perm:,}, found"
                f" {self.num_bands:,} × {self.rows_per_band:,} = {used:,}. Change one of the three."
            )
        if self.unicode_version != UNICODE_VERSION:
            raise RecipeError(
                f"MinHash words: expected Unicode {self.unicode_version}, found {UNICODE_VERSION} in this Python."
                " Words may differ; sign again, or use the Python that signed."
            )


@dataclass(frozen=True, kw_only=True)
class SignStats:
    """What was signed; `num_shingles` counts repeats, `num_wordless` documents have none.

    The work is `num_steps`, at most a few for each byte, and num_perm for each shingle.
    """

    num_documents: int
    num_bytes: int
    num_words: int
    num_shingles: int
    num_wordless: int
    num_steps: int


def sign_documents(
    texts: pa.Array | pa.ChunkedArray, params: MinHashParams, num_threads: int = 1
) -> tuple[U32, SignStats]:
    """Signatures of texts (string, large_string or dictionary, whole or sliced, no nulls): uint32[n, num_perm], stats.

    A document without words gets a row of 0xFFFFFFFF. J(A, B) is estimated by the share of equal values (Broder 1997).
    Threads share blocks of whole texts, about a megabyte each; how many there are changes no result.

    >>> signatures, stats = sign_documents(pa.array(["the cat sat", "THE CAT, SAT!"]), MinHashParams())
    >>> bool((signatures[0] == signatures[1]).all()), stats.num_words
    (True, 6)
    """
    assert num_threads >= 1, num_threads
    signatures = np.full((len(texts), params.num_perm), EMPTY_VALUE, dtype=np.uint32)
    blocks = _with_rows(utf8_blocks(texts, BLOCK_BYTES), signatures)
    sign = partial(_sign_block, params)
    if num_threads == 1:
        return signatures, _total(map(sign, blocks))
    fold_table()  # takes half a second: once, not in every thread that does not find it
    return signatures, _total(_in_threads(sign, blocks, num_threads))


Block = tuple[U8, I64, U32]  # bytes, offsets of texts in them, the texts' rows of the result


def _with_rows(blocks: Iterable[tuple[U8, I64]], signatures: U32) -> Iterator[Block]:
    row = 0
    for data, offsets in blocks:
        end = row + len(offsets) - 1
        yield data, offsets, signatures[row:end]
        row = end
    assert row == len(signatures), (row, len(signatures))


def _in_threads(sign: Callable[[Block], SignStats], blocks: Iterable[Block], num_threads: int) -> Iterator[SignStats]:
    """Results in order; blocks are made as they are wanted, so that few are in memory."""
    pending: deque[Future[SignStats]] = deque()
    with ThreadPoolExecutor(num_threads) as pool:
        for block in blocks:
            pending.append(pool.submit(sign, block))
            if len(pending) > 2 * num_threads:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


def _sign_block(params: MinHashParams, block: Block) -> SignStats:
    """Fill a block's rows, which hold EMPTY_VALUE, without the GIL."""
    from pipeline_assets.transforms import signature_kernels  # numba takes a second to import

    data, offsets, signatures = block
    hashes, hash_offsets, num_words, num_steps = hash_and_count(data, offsets, params.ngram)
    signature_kernels.sign(hashes, hash_offsets, *permutations(params.num_perm, params.seed), signatures)
    return SignStats(
        num_documents=len(num_words),
        num_bytes=int(offsets[-1] - offsets[0]),
        num_words=int(num_words.sum()),
        num_shingles=len(hashes),
        num_wordless=int((num_words == 0).sum()),
        num_steps=num_steps,
    )


def _total(parts: Iterable[SignStats]) -> SignStats:
    known = list(parts)
    return SignStats(**{field.name: sum(getattr(part, field.name) for part in known) for field in fields(SignStats)})


def is_wordless(signatures: U32) -> npt.NDArray[np.bool_]:
    """Which rows are signatures of documents without words: uint32[n, num_perm] -> bool[n]."""
    result: npt.NDArray[np.bool_] = (signatures == EMPTY_VALUE).all(axis=1)
    return result


@cache
def permutations(num_perm: int, seed: int) -> tuple[U32, U32]:
    """datasketch's affine32 permutations: multipliers (odd) and addends, uint32[num_perm] each, read-only.

    Drawing 112 values is not drawing the first 112 of 128: the count is part of the scheme.
    """
    generator = np.random.RandomState(seed)  # the stream that datasketch draws from, in its order; not the global one
    multipliers = generator.randint(0, 1 << 31, num_perm, dtype=np.uint32) * np.uint32(2) + np.uint32(1)
    addends = generator.randint(0, 1 << 32, num_perm, dtype=np.uint32)
    multipliers.flags.writeable = addends.flags.writeable = False
    return multipliers, addends
