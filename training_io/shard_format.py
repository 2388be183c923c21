"""Token shards in llm.c's file layout.

In: a 1-D array of token ids. Out: a file of 256 little-endian int32 header fields ([0] magic, [1] version, [2] number
of tokens, the rest zero) and then the tokens. The promise: what was written is what is read, and a file that is not
what its header says is refused. Cost: one write; reading maps the file and touches nothing but the header.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from training_io.errors import FormatError

SHARD_HEADER_BYTES = 1024
MAX_SHARD_TOKENS = 2**31 - 1  # the count is a signed 32-bit field

# (magic, version) -> dtype of the tokens: GPT-2 shards and Llama-3 shards of llm.c.
DTYPES: dict[tuple[int, int], np.dtype[Any]] = {
    (20240520, 1): np.dtype("<u2"),
    (20240801, 7): np.dtype("<u4"),
}
_KINDS = {dtype: kind for kind, dtype in DTYPES.items()}

Tokens = npt.NDArray[np.unsignedinteger[Any]]


def shard_header(dtype: npt.DTypeLike, num_tokens: int) -> bytes:
    """The 1,024 header bytes of a shard; FormatError for a dtype or count that the layout cannot hold."""
    kind = _KINDS.get(np.dtype(dtype).newbyteorder("<"))
    if kind is None:
        raise FormatError(
            f"shard: expected tokens of dtype uint16 or uint32, found {np.dtype(dtype)}. Convert the ids first."
        )
    if not 0 <= num_tokens <= MAX_SHARD_TOKENS:
        raise FormatError(
            f"shard: expected 0 to {MAX_SHARD_TOKENS:,} tokens, found {num_tokens:,}. Cut the split into more shards."
        )
    fields = np.zeros(SHARD_HEADER_BYTES // 4, dtype="<i4")
    fields[:3] = (*kind, num_tokens)
    return fields.tobytes()


def write_shard(path: Path | str, tokens: npt.ArrayLike) -> None:
    """Write a uint16[n] or uint32[n] array as one shard, replacing the file; zero tokens are legal.

    Raises FormatError for another dtype, another shape, or 2^31 tokens and more.
    """
    array = np.asarray(tokens)
    if array.ndim != 1:
        raise FormatError(f"{path}: expected a 1-D array of tokens, found shape {array.shape}. Flatten it first.")
    write_blocks(path, array.dtype, len(array), [array])


def write_blocks(path: Path | str, dtype: npt.DTypeLike, num_tokens: int, blocks: Iterable[Tokens]) -> None:
    """Write one shard of tokens that come block by block, so that no more than a block is in memory.

    Raises FormatError as `write_shard`, and where the blocks do not hold so many tokens of the dtype together.
    """
    header, stored, written = shard_header(dtype, num_tokens), np.dtype(dtype).newbyteorder("<"), 0
    with Path(path).open("wb") as file:
        file.write(header)
        for block in blocks:
            if block.dtype.newbyteorder("<") != stored:
                raise FormatError(f"{path}: expected tokens of dtype {stored.name}, found {block.dtype.name}.")
            file.write(np.ascontiguousarray(block, dtype=stored).data)
            written += len(block)
    if written != num_tokens:
        raise FormatError(
            f"{path}: expected {num_tokens:,} tokens as its header says, found {written:,}."
            " Materialize token_shards again."
        )


def header_of(path: Path | str) -> tuple[np.dtype[Any], int]:
    """Token dtype and number of tokens of a shard; FormatError when the file is not what its header says."""
    path = Path(path)
    if not path.is_file():
        raise FormatError(f"{path}: expected a token shard, found no file. Materialize token_shards again.")
    with path.open("rb") as file:
        header = file.read(SHARD_HEADER_BYTES)
    if len(header) < SHARD_HEADER_BYTES:
        raise FormatError(
            f"{path}: expected a header of {SHARD_HEADER_BYTES:,} bytes, file has {len(header):,} bytes."
            " The write was interrupted; materialize token_shards again."
        )
    magic, version, num_tokens = (int(field) for field in np.frombuffer(header, dtype="<i4", count=3))
    dtype = DTYPES.get((magic, version))
    if dtype is None:
        known = " or ".join(f"{known_magic} version {known_version}" for known_magic, known_version in DTYPES)
        raise FormatError(
            f"{path}: expected magic {known}, found {magic} version {version}."
            " The file is not a token shard; give a shard that token_shards wrote."
        )
    expected_bytes = SHARD_HEADER_BYTES + num_tokens * dtype.itemsize
    if num_tokens < 0 or path.stat().st_size != expected_bytes:
        raise FormatError(
            f"{path}: header says {num_tokens:,} tokens ({expected_bytes:,} bytes), file has"
            f" {path.stat().st_size:,} bytes. The write was interrupted; materialize token_shards again."
        )
    return dtype, num_tokens


def read_shard(path: Path | str) -> Tokens:
    """Tokens of a shard as a read-only memory-mapped array, uint16[n] or uint32[n].

    Raises FormatError for a short file, a wrong magic or version, or a count that disagrees with the file's size.
    """
    dtype, num_tokens = header_of(path)
    return np.memmap(path, dtype=dtype, mode="r", offset=SHARD_HEADER_BYTES, shape=(num_tokens,))
