"""The document index: which tokens of which shard are which document.

In: doc_ids, pools and lengths of a split's documents in order, and where its shards end. Out: `.npy` columns and
`index.json` in one folder. The promise: the documents tile the shards exactly, in order. Boundaries come from here
only, never from a scan for EOS. Cost: a few int64 passes over the documents.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from training_io.columns import read_column, read_fields, write_column, write_fields
from training_io.errors import FormatError
from training_io.hashing import DOC_ID_BYTES
from training_io.segments import offsets_of

I64 = npt.NDArray[np.int64]

INDEX_FORMAT = "corpusmill-index/1"
INDEX_FILES = ("index.json", "doc_id.npy", "pool.npy", "shard.npy", "offset.npy", "length.npy")
TOKEN_DTYPES = ("uint16", "uint32")
SPLIT_NAME = re.compile("(?!val$)[a-z]+")  # a part of paths here and in exports, some of which say val for validation
_FIELDS = (
    "split",
    "pools",
    "num_documents",
    "num_tokens",
    "shards",
    "eos_id",
    "token_dtype",
    "tokenizer_fingerprint",
)


@dataclass(frozen=True, kw_only=True, eq=False)
class DocumentIndex:
    """Documents of one split in order; lengths include the EOS, offsets count tokens inside the shard."""

    split: str
    doc_ids: npt.NDArray[np.uint8]  # [n, 32]
    pools: npt.NDArray[np.uint16]  # [n], positions in pool_names
    pool_names: tuple[str, ...]
    shards: npt.NDArray[np.int32]  # [n], positions in shard_files
    offsets: I64  # [n]
    lengths: I64  # [n]
    shard_files: tuple[str, ...]
    shard_tokens: tuple[int, ...]
    eos_id: int
    token_dtype: str
    tokenizer_fingerprint: str

    @property
    def num_documents(self) -> int:
        """Documents in the split."""
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        """Tokens in the split, every EOS included."""
        return sum(self.shard_tokens)

    @property
    def files(self) -> tuple[str, ...]:
        """All that the split consists of, as its artifact's manifest names it."""
        return (*(f"{self.split}_index/{file}" for file in INDEX_FILES), *self.shard_files)


def cut_shards(lengths: I64, max_shard_tokens: int) -> I64:
    """Where shards end, as running document numbers int64[k + 1]: whole documents until the limit, in order.

    A document longer than the limit gets a shard of its own.

    >>> cut_shards(np.array([4, 4, 9, 1]), 8).tolist()
    [0, 2, 3, 4]
    """
    ends = np.cumsum(lengths, dtype=np.int64)
    cuts, base = [0], 0
    while cuts[-1] < len(lengths):
        fitting = int(np.searchsorted(ends, base + max_shard_tokens, side="right"))
        cuts.append(max(fitting, cuts[-1] + 1))
        base = int(ends[cuts[-1] - 1])
    return np.array(cuts, dtype=np.int64)


def index_of(
    *,
    split: str,
    doc_ids: npt.NDArray[np.uint8],
    pools: npt.NDArray[np.uint16],
    pool_names: Sequence[str],
    lengths: I64,
    cuts: I64,
    eos_id: int,
    token_dtype: str,
    tokenizer_fingerprint: str,
) -> DocumentIndex:
    """Index of documents whose shard k holds documents [cuts[k], cuts[k + 1]); files are `<split>_000000.bin` and
    on.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    ends = offsets_of(lengths)
    shards = np.repeat(np.arange(len(cuts) - 1, dtype=np.int32), np.diff(cuts))
    return DocumentIndex(
        split=split,
        doc_ids=doc_ids,
        pools=pools,
        pool_names=tuple(pool_names),
        shards=shards,
        offsets=ends[:-1] - ends[cuts[:-1]][shards],
        lengths=lengths,
        shard_files=_shard_names(split, len(cuts) - 1),
        shard_tokens=tuple(np.diff(ends[cuts]).tolist()),
        eos_id=eos_id,
        token_dtype=token_dtype,
        tokenizer_fingerprint=tokenizer_fingerprint,
    )


def write_index(folder: Path, index: DocumentIndex) -> None:
    """Write an index into a folder, which is made; FormatError when its documents do not tile its shards."""
    _refuse_broken(folder, index)
    folder.mkdir(parents=True, exist_ok=True)
    write_column(folder, "doc_id", index.doc_ids)
    write_column(folder, "pool", index.pools)
    write_column(folder, "shard", index.shards)
    write_column(folder, "offset", index.offsets)
    write_column(folder, "length", index.lengths)
    write_fields(
        folder / "index.json",
        {
            "format": INDEX_FORMAT,
            "split": index.split,
            "pools": list(index.pool_names),
            "num_documents": index.num_documents,
            "num_tokens": index.num_tokens,
            "shards": [
                {"file": file, "num_tokens": num_tokens}
                for file, num_tokens in zip(index.shard_files, index.shard_tokens, strict=True)
            ],
            "eos_id": index.eos_id,
            "token_dtype": index.token_dtype,
            "tokenizer_fingerprint": index.tokenizer_fingerprint,
        },
    )


def read_index(folder: Path) -> DocumentIndex:
    """Read an index, its columns memory-mapped; FormatError unless its documents tile its shards exactly, in order.

    Its split is the one that its folder is named for, and its shards lie beside that folder: an index from elsewhere
    leads to no other place.
    """
    fields = read_fields(folder / "index.json", INDEX_FORMAT, _FIELDS)
    try:
        n = int(fields["num_documents"])
        files, counts = _shard_list(fields["shards"])
        eos_id, num_tokens = int(fields["eos_id"]), int(fields["num_tokens"])
        pool_names = tuple(str(name) for name in fields["pools"])
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(
            f"{folder / 'index.json'}: expected counts, pools and shards, found {error!r}."
            " Materialize token_shards again."
        ) from error
    index = DocumentIndex(
        split=str(fields["split"]),
        doc_ids=read_column(folder, "doc_id", ("uint8",), (n, DOC_ID_BYTES)),
        pools=read_column(folder, "pool", ("uint16",), (n,)),
        pool_names=pool_names,
        shards=read_column(folder, "shard", ("int32",), (n,)),
        offsets=read_column(folder, "offset", ("int64",), (n,)),
        lengths=read_column(folder, "length", ("int64",), (n,)),
        shard_files=files,
        shard_tokens=counts,
        eos_id=eos_id,
        token_dtype=str(fields["token_dtype"]),
        tokenizer_fingerprint=str(fields["tokenizer_fingerprint"]),
    )
    _refuse_broken(folder, index)
    if num_tokens != index.num_tokens:
        raise FormatError(
            f"{folder}: index.json says {num_tokens:,} tokens, its shards hold {index.num_tokens:,}."
            " Materialize token_shards again."
        )
    return index


def _shard_list(shards: list[dict[str, Any]]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    return tuple(str(shard["file"]) for shard in shards), tuple(int(shard["num_tokens"]) for shard in shards)


def _shard_names(split: str, num_shards: int) -> tuple[str, ...]:
    return tuple(f"{split}_{shard:06d}.bin" for shard in range(num_shards))


def _refuse_broken(folder: Path, index: DocumentIndex) -> None:
    fault = _name_fault(folder, index) or _fault_of(index)
    if fault:
        raise FormatError(f"{folder}: {fault}. Materialize token_shards again.")


def _name_fault(folder: Path, index: DocumentIndex) -> str:
    """The first name that is not the writer's, or nothing."""
    if not SPLIT_NAME.fullmatch(index.split) or folder.name != f"{index.split}_index":
        return f"expected a split of letters a to z, not val, that its folder is named for, found {index.split[:80]!r}"
    names = _shard_names(index.split, len(index.shard_files))
    wrong = [file for name, file in zip(names, index.shard_files, strict=True) if name != file]
    return f"expected shards {names[0]} and on, found {wrong[0][:80]!r}" if wrong else ""


def _fault_of(index: DocumentIndex) -> str:
    """The first thing wrong with an index, or nothing."""
    n, num_shards = index.num_documents, len(index.shard_files)
    columns = (index.doc_ids, index.pools, index.shards, index.offsets)
    if any(len(column) != n for column in columns) or len(index.shard_tokens) != num_shards:
        return f"expected columns of {n:,} documents and {num_shards:,} shards, found others"
    if index.token_dtype not in TOKEN_DTYPES:
        return f"expected token_dtype {' or '.join(TOKEN_DTYPES)}, found {index.token_dtype}"
    if not 0 <= index.eos_id <= np.iinfo(index.token_dtype).max:
        return f"expected an EOS id that fits {index.token_dtype}, found {index.eos_id:,}"
    if n and int(index.lengths.min()) < 1:
        return (
            f"document {int(index.lengths.argmin()):,}: expected at least 1 token, found {int(index.lengths.min()):,}"
        )
    if n and int(index.pools.max()) >= len(index.pool_names):
        return f"expected pools below {len(index.pool_names):,}, found {int(index.pools.max()):,}"
    return _tiling_fault(index)


def _tiling_fault(index: DocumentIndex) -> str:
    """How the documents fail to tile the shards, or nothing."""
    shards, num_shards = index.shards.astype(np.int64), len(index.shard_files)
    if len(shards) and (shards[0] < 0 or shards[-1] >= num_shards or bool((np.diff(shards) < 0).any())):
        return f"expected documents in the order of {num_shards:,} shards, found them in another order"
    ends = offsets_of(index.lengths)
    firsts = np.searchsorted(shards, np.arange(num_shards + 1))
    held = np.diff(ends[firsts])
    wrong_shards = np.flatnonzero(held != np.array(index.shard_tokens, dtype=np.int64))
    if len(wrong_shards):
        k = int(wrong_shards[0])
        return (
            f"{index.shard_files[k]}: the index lists {int(held[k]):,} tokens,"
            f" the shard holds {index.shard_tokens[k]:,}"
        )
    wrong = np.flatnonzero(index.offsets != ends[:-1] - ends[firsts[shards]])
    if len(wrong):
        d = int(wrong[0])
        expected = int(ends[d] - ends[firsts[shards[d]]])
        return f"document {d:,}: expected offset {expected:,}, found {int(index.offsets[d]):,}"
    return ""
