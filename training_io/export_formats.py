"""How other trainers lay tokens out: one function a format, from splits of token shards to files in a folder.

In: splits with their documents, and a folder. Out: files. The promise: every document once, in the split's order, its
tokens as stored and its EOS with them; the same splits give the same bytes. Cost: each shard is read once; memory
holds a block of tokens and a few numbers a document.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from training_io.columns import write_fields
from training_io.document_index import I64, DocumentIndex, cut_shards
from training_io.errors import FormatError
from training_io.hashing import canonical_json
from training_io.segments import offsets_of
from training_io.shard_format import Tokens, read_shard, write_shard

BLOCK_TOKENS = 1 << 20
MDS_SHARD_BYTES = 1 << 26  # streaming's own default
MAX_MDS_SHARD_BYTES = 2**32 - 1  # its offsets are unsigned 32-bit numbers

MEGATRON_CODES = {"uint16": 8, "int32": 4}

# A sample of MDS: the sizes of its two columns, then the columns. An ndarray begins with its number of dimensions and
# the width of their sizes (1 << 2 | 2: one dimension, 4 bytes), then its length.
MDS_SAMPLE = np.dtype(
    [("doc_id_bytes", "<u4"), ("tokens_bytes", "<u4"), ("doc_id", "S64"), ("shape", "u1"), ("length", "<u4")]
)
MDS_SHAPE = 1 << 2 | 2


@dataclass(frozen=True, kw_only=True, eq=False)
class Documents:
    """Neighbouring documents: their tokens one after another, EOS included."""

    tokens: Tokens  # [sum of lengths]
    lengths: I64  # [n]
    doc_ids: npt.NDArray[np.uint8]  # [n, 32]

    @property
    def hex_ids(self) -> npt.NDArray[np.bytes_]:
        """The doc_ids as hexadecimal digits, S64[n]."""
        return np.frombuffer(self.doc_ids.tobytes().hex().encode(), "S64")

    def blocks(self) -> Iterator["Documents"]:
        """The same documents in runs of about a million tokens."""
        return self.runs(self.lengths, BLOCK_TOKENS)

    def runs(self, sizes: I64, max_size: int) -> Iterator["Documents"]:
        """The same documents in runs whose sizes add up to at most max_size; a larger document goes alone."""
        ends = offsets_of(self.lengths)
        for start, end in pairwise(cut_shards(sizes, max_size).tolist()):
            yield Documents(
                tokens=self.tokens[ends[start] : ends[end]],
                lengths=self.lengths[start:end],
                doc_ids=self.doc_ids[start:end],
            )


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenSplit:
    """One split of a sealed token_shards artifact."""

    artifact: Path
    digest: str
    index: DocumentIndex

    @property
    def name(self) -> str:
        """The split's name."""
        return self.index.split

    @property
    def short_name(self) -> str:
        """The name that nanoGPT and llm.c give it: `val` for validation."""
        return "val" if self.name == "validation" else self.name

    def shards(self) -> Iterator[Documents]:
        """The documents of each shard, in order; their tokens are memory-mapped."""
        firsts = np.searchsorted(self.index.shards, np.arange(len(self.index.shard_files) + 1)).tolist()
        for file, (start, end) in zip(self.index.shard_files, pairwise(firsts), strict=True):
            yield Documents(
                tokens=read_shard(self.artifact / file),
                lengths=self.index.lengths[start:end],
                doc_ids=self.index.doc_ids[start:end],
            )


def write_document_cache(splits: Sequence[TokenSplit], folder: Path) -> None:
    """`<split>.bin` (uint32) and `<split>.jsonl`: a document's id, its offset and length in tokens, a line each."""
    for split in splits:
        offset = 0
        with (folder / f"{split.name}.bin").open("wb") as tokens, (folder / f"{split.name}.jsonl").open("wb") as lines:
            for run in (block for shard in split.shards() for block in shard.blocks()):
                append_tokens(tokens, run.tokens, "uint32")
                offsets = offset + np.cumsum(run.lengths) - run.lengths
                rows = zip(run.hex_ids.tolist(), offsets.tolist(), run.lengths.tolist(), strict=True)
                lines.writelines(b'{"document_id": "%s", "offset": %d, "length": %d}\n' % row for row in rows)
                offset += len(run.tokens)


def write_nanogpt(splits: Sequence[TokenSplit], folder: Path) -> None:
    """`train.bin` and `val.bin`: bare uint16, as nanoGPT maps them; FormatError for ids of 32 bits.

    Its train.py builds a table of 50,304 ids; a tokenizer with more needs a `meta.pkl` with its vocab_size.
    """
    for split in splits:
        if split.index.token_dtype != "uint16":
            raise FormatError(
                f"nanogpt: expected ids of 16 bits, which is all that nanoGPT reads, found {split.index.token_dtype}"
                f" shards in {split.artifact}."
                " Export another format, or use a tokenizer of at most 65,536 ids."
            )
        with (folder / f"{split.short_name}.bin").open("wb") as file:
            for shard in split.shards():
                append_tokens(file, shard.tokens, "uint16")


def write_llmc(splits: Sequence[TokenSplit], folder: Path) -> None:
    """`tokens_<train|val>_000000.bin` and on: the shards themselves, for a pattern like `tokens_train_*.bin`.

    llm.c's GPT-2 programs read uint16 shards, its Llama 3 ones uint32; both refuse a shard shorter than a batch.
    """
    for split in splits:
        for number, shard in enumerate(split.shards()):
            write_shard(folder / f"tokens_{split.short_name}_{number:06d}.bin", shard.tokens)


def write_megatron(splits: Sequence[TokenSplit], folder: Path) -> None:
    """`<split>.bin` and `<split>.idx` (MMIDIDX, version 1): a sequence a document, for `--data-path DIR/<split>`."""
    for split in splits:
        lengths, n = split.index.lengths, split.index.num_documents
        dtype = "uint16" if split.index.token_dtype == "uint16" else "int32"  # the format has no uint32
        with (folder / f"{split.name}.bin").open("wb") as file:
            for shard in split.shards():
                append_tokens(file, shard.tokens, dtype)
        with (folder / f"{split.name}.idx").open("wb") as file:
            file.write(b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, MEGATRON_CODES[dtype], n, n + 1))
            file.write(lengths.astype("<i4").data)
            file.write(((np.cumsum(lengths) - lengths) * np.dtype(dtype).itemsize).astype("<i8").data)
            file.write(np.arange(n + 1, dtype="<i8").data)


def write_mds(splits: Sequence[TokenSplit], folder: Path) -> None:
    """`<split>/index.json` and `<split>/shard.00000.mds` and on, as MosaicML's StreamingDataset reads them.

    A sample is a document: `tokens` as an ndarray of the stored dtype, `doc_id` as hexadecimal digits.
    """
    for split in splits:
        (folder / split.name).mkdir()
        config = _mds_config(split.index.token_dtype)
        entries: list[dict[str, Any]] = []
        for shard in split.shards():
            for run in shard.runs(_mds_sizes(shard), MDS_SHARD_BYTES):
                name = f"shard.{len(entries):05d}.mds"
                num_bytes = _write_mds_shard(folder / split.name / name, run, config)
                raw = {"basename": name, "bytes": num_bytes, "hashes": {}}
                entries.append({**config, "raw_data": raw, "zip_data": None, "samples": len(run.lengths)})
        write_fields(folder / split.name / "index.json", {"version": 2, "shards": entries})


def _mds_config(token_dtype: str) -> dict[str, Any]:
    return {
        "version": 2,
        "format": "mds",
        "column_names": ["doc_id", "tokens"],
        "column_encodings": ["str", f"ndarray:{token_dtype}"],
        "column_sizes": [None, None],
        "compression": None,
        "hashes": [],
        "size_limit": MDS_SHARD_BYTES,
    }


def _mds_sizes(documents: Documents) -> I64:
    """Bytes of each document as a sample, with its place among the shard's offsets."""
    return MDS_SAMPLE.itemsize + documents.lengths * documents.tokens.dtype.itemsize + 4


def _write_mds_shard(path: Path, documents: Documents, config: dict[str, Any]) -> int:
    """One shard: number of samples, n + 1 offsets, the configuration, the samples; returns its bytes."""
    described = canonical_json(config)
    lengths, n = documents.lengths, len(documents.lengths)
    offsets = 4 * (1 + n + 1) + len(described) + np.concatenate([[0], np.cumsum(_mds_sizes(documents) - 4)])
    if offsets[-1] > MAX_MDS_SHARD_BYTES:
        raise FormatError(
            f"mds: document {documents.hex_ids[0].decode()}: expected a sample of at most {MAX_MDS_SHARD_BYTES:,}"
            f" bytes, found {int(offsets[-1]):,}. Export another format, or leave the document out."
        )
    samples = np.zeros(n, dtype=MDS_SAMPLE)
    samples["doc_id_bytes"], samples["tokens_bytes"] = 64, 5 + lengths * documents.tokens.dtype.itemsize
    samples["doc_id"], samples["shape"], samples["length"] = documents.hex_ids, MDS_SHAPE, lengths
    bounds = pairwise([0, *np.cumsum(lengths).tolist()])
    with path.open("wb") as file:
        file.write(struct.pack("<I", n) + offsets.astype("<u4").tobytes() + described)
        for sample, (start, end) in zip(samples, bounds, strict=True):
            file.write(sample.tobytes())
            file.write(documents.tokens[start:end].data)
    return int(offsets[-1])


def append_tokens(file: BinaryIO, tokens: Tokens, dtype: str) -> None:
    """Append tokens as little-endian ids of a dtype, block by block; FormatError for an id that does not fit."""
    stored = np.dtype(dtype).newbyteorder("<")
    for start in range(0, len(tokens), BLOCK_TOKENS):
        block = tokens[start : start + BLOCK_TOKENS]
        if int(block.max()) > np.iinfo(stored).max:
            raise FormatError(
                f"{file.name}: expected ids of at most {np.iinfo(stored).max:,}, found {int(block.max()):,}."
                " The format cannot hold this tokenizer's ids; export another one."
            )
        file.write(np.ascontiguousarray(block, dtype=stored).data)
