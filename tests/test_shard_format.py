"""Shards: llm.c's bytes, and a refusal for every way in which a file can disagree with its header."""

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from training_io.errors import FormatError
from training_io.shard_format import (
    MAX_SHARD_TOKENS,
    SHARD_HEADER_BYTES,
    header_of,
    read_shard,
    shard_header,
    write_blocks,
    write_shard,
)

relaxed = settings(deadline=None, max_examples=40)


@pytest.mark.parametrize(("dtype", "magic", "version"), [("uint16", 20240520, 1), ("uint32", 20240801, 7)])
def test_bytes_are_the_layout_of_llm_c(tmp_path, dtype, magic, version):
    write_shard(tmp_path / "a.bin", np.array([5, 0, 65_535], dtype=dtype))
    raw = (tmp_path / "a.bin").read_bytes()
    assert struct.unpack("<256i", raw[:SHARD_HEADER_BYTES]) == (magic, version, 3) + (0,) * 253
    assert raw[SHARD_HEADER_BYTES:] == struct.pack("<3H" if dtype == "uint16" else "<3I", 5, 0, 65_535)


@relaxed
@given(st.sampled_from(["uint16", "uint32"]), st.lists(st.integers(0, 65_535), max_size=50))
def test_what_is_written_is_read(tmp_path_factory, dtype, tokens):
    path = tmp_path_factory.mktemp("shard") / "a.bin"
    write_shard(path, np.array(tokens, dtype=dtype))
    read = read_shard(path)
    assert isinstance(read, np.memmap)
    assert not read.flags.writeable
    assert (read.dtype, read.ndim, read.tolist()) == (np.dtype(dtype), 1, tokens)
    assert header_of(path) == (np.dtype(dtype), len(tokens))


@relaxed
@given(st.sampled_from(["uint16", "uint32"]), st.lists(st.lists(st.integers(0, 65_535), max_size=9), max_size=5))
def test_a_shard_that_comes_in_blocks_has_the_same_bytes(tmp_path_factory, dtype, blocks):
    folder = tmp_path_factory.mktemp("shard")
    tokens = [token for block in blocks for token in block]
    write_shard(folder / "whole.bin", np.array(tokens, dtype))
    write_blocks(folder / "blocks.bin", dtype, len(tokens), (np.array(block, dtype) for block in blocks))
    assert (folder / "blocks.bin").read_bytes() == (folder / "whole.bin").read_bytes()


@pytest.mark.parametrize(
    ("num_tokens", "dtype", "message"),
    [
        (3, "uint16", "expected 3 tokens as its header says, found 2"),
        (1, "uint16", "expected 1 tokens as its header says, found 2"),
        (2, "uint32", "expected tokens of dtype uint32, found uint16"),
        (2, "int64", "uint16 or uint32, found int64"),
    ],
)
def test_blocks_that_are_not_what_the_header_says_are_refused(tmp_path, num_tokens, dtype, message):
    with pytest.raises(FormatError, match=message):
        write_blocks(tmp_path / "a.bin", dtype, num_tokens, [np.array([1, 2], np.uint16)])


def test_the_last_of_two_to_the_31_tokens_is_read_past_the_reach_of_32_bits(tmp_path):
    """Four bytes each, 8 GiB, of which the file system holds the last page."""
    path, num_tokens = tmp_path / "a.bin", MAX_SHARD_TOKENS
    with path.open("wb") as file:
        file.write(shard_header("uint32", num_tokens))
        file.seek(SHARD_HEADER_BYTES + 4 * (num_tokens - 1))
        file.write(struct.pack("<I", 70_000))
    assert path.stat().st_blocks * 512 < 1 << 20
    tokens = read_shard(path)
    assert (len(tokens), int(tokens[-1]), int(tokens[-2])) == (num_tokens, 70_000, 0)


def test_zero_tokens_are_legal(tmp_path):
    write_shard(tmp_path / "a.bin", np.array([], dtype=np.uint16))
    assert read_shard(tmp_path / "a.bin").shape == (0,)


def test_big_endian_and_strided_tokens_are_stored_little_endian(tmp_path):
    write_shard(tmp_path / "a.bin", np.arange(10, dtype=">u2")[::3])
    assert read_shard(tmp_path / "a.bin").tolist() == [0, 3, 6, 9]


@pytest.mark.parametrize("dtype", ["int64", "int32", "uint8", "uint64", "float32"])
def test_other_dtypes_are_refused_before_a_file_appears(tmp_path, dtype):
    with pytest.raises(FormatError, match=f"uint16 or uint32, found {dtype}"):
        write_shard(tmp_path / "a.bin", np.array([1], dtype=dtype))
    assert not (tmp_path / "a.bin").exists()


def test_two_dimensions_are_refused(tmp_path):
    with pytest.raises(FormatError, match="1-D"):
        write_shard(tmp_path / "a.bin", np.zeros((2, 2), dtype=np.uint16))


def test_a_count_beyond_int32_is_refused_without_allocating(tmp_path):
    assert shard_header("uint16", MAX_SHARD_TOKENS)
    too_many = np.broadcast_to(np.uint16(1), (2**31,))
    with pytest.raises(FormatError, match="found 2,147,483,648"):
        write_shard(tmp_path / "a.bin", too_many)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda raw: raw[:-1], r"header says 3 tokens \(1,030 bytes\), file has 1,029 bytes"),
        (lambda raw: raw + b"\0", r"header says 3 tokens \(1,030 bytes\), file has 1,031 bytes"),
        (lambda raw: raw[:100], "expected a header of 1,024 bytes, file has 100 bytes"),
        (lambda raw: b"", "file has 0 bytes"),
        (lambda raw: struct.pack("<i", 7) + raw[4:], "found 7 version 1"),
        (lambda raw: raw[:4] + struct.pack("<i", 7) + raw[8:], "found 20240520 version 7"),
        (lambda raw: raw[:8] + struct.pack("<i", -1) + raw[12:], "header says -1 tokens"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path, damage, message):
    path = tmp_path / "a.bin"
    write_shard(path, np.array([1, 2, 3], dtype=np.uint16))
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(FormatError, match=message):
        read_shard(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FormatError, match=r"absent\.bin.*found no file"):
        read_shard(tmp_path / "absent.bin")
