"""Promise: a split's shards, one after another, are its documents in order, nothing lost."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from asset_checks.columns import named, places_in, whole
from asset_checks.verdicts import MAX_EXAMPLES, Verdict, law, verdict_of
from pipeline_assets.schemas import PLACE
from pipeline_assets.source import ROWS_NAME, pool_names
from pipeline_assets.splits import TABLE_NAME
from pipeline_assets.stripes import Stage, units_in
from pipeline_assets.tokens import DOC_IDS, LENGTHS, ROWS, TOKENS
from resources.artifact_store import ArtifactRef
from training_io import invariants
from training_io.document_index import DocumentIndex, read_index
from training_io.errors import InvariantBroken
from training_io.hashing import derive_seed, keyed_hash
from training_io.manifest import damaged_files

HEADER_BYTES = 1024


def shards_match_their_headers_and_hashes(stage: Stage, token_shards: ArtifactRef, tokenizer: ArtifactRef) -> Verdict:
    """Every file has the manifest's size and SHA-256; every shard's header, size and index agree; the tokenizer too.

    Documents and tokens are as many in the manifest as in the indexes and in the files.
    """
    folder, manifest = stage.open(token_shards)
    violations = damaged_files(folder, manifest)
    found = indexes(folder, token_shards)
    violations += _misstated_counts(manifest.counts, folder, found)
    max_id = tokenizer.counts["max_id"]
    if manifest.counts["vocab_size"] != max_id + 1:
        violations.append(f"vocab_size: expected {max_id + 1:,}, found {manifest.counts['vocab_size']:,}")
    for index in found:
        violations += invariants.shards_match_headers(folder, index)
        violations += invariants.documents_tile_shards(index)
        violations += _ids_of_no_vocabulary(folder, index, max_id)
        claimed = (index.tokenizer_fingerprint[:12], index.eos_id, index.token_dtype)
        dtype = "uint16" if max_id < 1 << 16 else "uint32"
        wanted = (tokenizer.counts["fingerprint"][:12], tokenizer.counts["eos_id"], dtype)
        if claimed != wanted:
            violations.append(f"{index.split}: expected tokenizer, EOS and dtype {wanted}, found {claimed}")
    return verdict_of("sizes, hashes, headers, counts and index agree", violations, f"{len(manifest.files):,} files")


def _misstated_counts(stated: Mapping[str, Any], folder: Path, found: list[DocumentIndex]) -> list[str]:
    """Counts of the manifest that are not those of the indexes, and sizes of files that are not the indexes' tokens."""
    counted = {
        index.split: {
            "documents": len(index.doc_ids),
            "tokens": int(index.lengths.sum()),
            "shards": len(index.shard_files),
        }
        for index in found
    }
    violations = []
    for index in found:
        held = sum(
            (folder / file).stat().st_size - HEADER_BYTES for file in index.shard_files if (folder / file).exists()
        )
        if held != counted[index.split]["tokens"] * _token_bytes(index):
            violations.append(
                f"{index.split}: expected files of {counted[index.split]['tokens'] * _token_bytes(index):,} bytes"
                f" beside their headers, found {held:,}"
            )
    totals = {name: sum(split[name] for split in counted.values()) for name in ("documents", "tokens", "shards")}
    violations += [
        f"{name}: counted {count}, found {stated[name]} in the manifest"
        for name, count in {**totals, "splits": counted}.items()
        if count != stated[name]
    ]
    return violations


def _ids_of_no_vocabulary(folder: Path, index: DocumentIndex, max_id: int) -> list[str]:
    """Ids above the largest one, in the shards that have the size that their header and the index say."""
    violations = []
    for file, num_tokens in zip(index.shard_files, index.shard_tokens, strict=True):
        path, dtype = folder / file, f"<u{_token_bytes(index)}"
        if not path.exists() or path.stat().st_size != HEADER_BYTES + num_tokens * _token_bytes(index):
            continue
        tokens = np.memmap(path, dtype, mode="r", offset=HEADER_BYTES, shape=(num_tokens,))
        violations += [
            f"{file}: token {int(at):,}: expected an id up to {max_id:,}, found {int(tokens[at]):,}"
            for at in np.flatnonzero(tokens > max_id)[:MAX_EXAMPLES]
        ]
    return violations


def _token_bytes(index: DocumentIndex) -> int:
    return 2 if index.token_dtype == "uint16" else 4


def shards_end_every_document_once(stage: Stage, token_shards: ArtifactRef) -> Verdict:
    """In the shards' bytes the EOS stands at each document's end and nowhere else."""
    folder = stage.folder(token_shards)
    violations = [
        violation
        for index in indexes(folder, token_shards)
        for violation in invariants.eos_ends_documents(folder, index)
    ]
    return verdict_of("one EOS a document, at its end", violations, f"{token_shards.counts['documents']:,} documents")


def shards_hold_every_document_once(
    stage: Stage,
    token_shards: ArtifactRef,
    split_documents: ArtifactRef,
    document_tokens: ArtifactRef,
    raw_row_groups: ArtifactRef,
) -> Verdict:
    """The index's documents are those of the split, in the recipe's order, and each has its unit's tokens.

    The order is recounted by one sort by doc_ids and source coordinates; tokens are compared by their hash.
    """
    folder = stage.folder(token_shards)
    violations: list[str] = []
    expected = _documents_by_split(stage, split_documents, document_tokens, raw_row_groups)
    for index in indexes(folder, token_shards):
        wanted = expected.get(index.split, np.empty(0, DOCUMENT))
        found = _documents_in_shards(folder, index, pool_names(stage.recipe))
        both = min(len(found), len(wanted))
        differing = np.flatnonzero(_bytes_of(found[:both]) != _bytes_of(wanted[:both]))
        if not len(differing) and len(found) == len(wanted):
            continue
        lost, extra = (
            len(np.setdiff1d(_bytes_of(some), _bytes_of(others))) for some, others in ((wanted, found), (found, wanted))
        )
        at = int(differing[0]) if len(differing) else len(found)
        violations.append(
            f"{index.split}: the first difference is at document {at:,}, {_named(found, at)} where"
            f" {_named(wanted, at)} belongs; {lost:,} documents of the split are not in the shards with their tokens,"
            f" {extra:,} others are, {len(found):,} in the shards and {len(wanted):,} in the tables"
        )
    return verdict_of(
        "documents in the shards = documents of the split, in order, token for token",
        violations,
        f"{token_shards.counts['documents']:,} documents, {token_shards.counts['tokens']:,} tokens",
    )


DOCUMENT = np.dtype([("doc_id", "V32"), ("pool", "<u2"), ("tokens", "V32")])
"""doc_id, the pool's place in the recipe, and the SHA-256 of the tokens' bytes: 66 bytes a document."""

Documents = npt.NDArray[np.void]  # of dtype DOCUMENT
Places = list[npt.NDArray[Any]]  # columns to sort by, the first one decides


def _bytes_of(documents: Documents) -> npt.NDArray[np.void]:
    return np.ascontiguousarray(documents).view(f"V{DOCUMENT.itemsize}")


def _named(documents: Documents, at: int) -> str:
    return documents["doc_id"][at].tobytes().hex()[:16] if at < len(documents) else "none"


def _documents_by_split(
    stage: Stage, split_documents: ArtifactRef, document_tokens: ArtifactRef, raw_row_groups: ArtifactRef
) -> dict[str, Documents]:
    """By split: the content of each document in the recipe's order, from the token units and the raw rows."""
    units = [units_in(stage, asset) for asset in (split_documents, document_tokens, raw_row_groups)]
    files = sorted(
        {file for raw in units[2] for file in stage.table(raw, ROWS_NAME, ["file"]).column("file").unique().to_pylist()}
    )
    splits = [stage.table(unit, TABLE_NAME, ["split"]).column("split") for unit in units[0]]
    parts: list[Documents] = []
    places: list[Places] = []
    for column, unit, raw in zip(splits, *units[1:], strict=True):
        documents, place = _documents_of(stage, unit, raw, len(column), files)
        parts.append(documents)
        places.append(place)
    documents = np.concatenate(parts)
    parts.clear()
    columns = [np.concatenate(column) for column in zip(*places, strict=True)]
    places.clear()
    order = np.lexsort(_columns_to_sort_by(stage, documents, columns)[::-1])
    numbers, names = named(splits)
    return {split: documents[order[numbers[order] == number]] for number, split in enumerate(names)}


def _documents_of(
    stage: Stage, unit: ArtifactRef, raw: ArtifactRef, num_documents: int, files: Sequence[str]
) -> tuple[Documents, Places]:
    """The documents of a unit's split table, row by row, and pool, file, row group and row of each in the source."""
    taken = np.arange(num_documents)
    rows, tokens = stage.array(unit, ROWS)[taken], stage.array(unit, TOKENS)
    source = stage.table(raw, ROWS_NAME, PLACE).take(pa.array(rows))
    lengths = stage.array(unit, LENGTHS)[taken]
    ends = np.cumsum(lengths)
    documents = np.empty(num_documents, DOCUMENT)
    documents["doc_id"] = whole(stage.array(unit, DOC_IDS)[taken])
    documents["pool"] = _places_in(pool_names(stage.recipe), source.column("pool"))
    documents["tokens"] = _digests(
        tokens[start:end].tobytes() for start, end in zip((ends - lengths).tolist(), ends.tolist(), strict=True)
    )
    place = [np.asarray(source.column(name), np.int32) for name in ("row_group", "row")]
    return documents, [documents["pool"].copy(), _places_in(files, source.column("file")), *place]


def _places_in(names: Sequence[str], column: pa.ChunkedArray) -> npt.NDArray[np.int32]:
    """Where each name of a column is in a list; InvariantBroken for a name that is not there."""
    places = places_in(names, column)
    if (places < 0).any():
        other = column[int(np.argmin(places))].as_py()
        raise InvariantBroken(f"raw_row_groups: expected pools and files of the recipe, found {other!r}.")
    return places


def _digests(contents: Iterable[bytes]) -> npt.NDArray[np.void]:
    return np.fromiter((hashlib.sha256(content).digest() for content in contents), "V32")


def _columns_to_sort_by(stage: Stage, documents: Documents, places: Places) -> Places:
    if stage.recipe.splits.order == "source":
        return places
    doc_ids = np.ascontiguousarray(documents["doc_id"]).view(np.uint8).reshape(-1, 32)
    return [keyed_hash(doc_ids, derive_seed(stage.recipe.seed, "shuffle")), *doc_ids.view(">u8").T, *places]


def _documents_in_shards(folder: Path, index: DocumentIndex, pools: Sequence[str]) -> Documents:
    """Each document of the shards, one shard after another, its tokens read by byte offset."""
    in_shard = [np.flatnonzero(index.shards == shard) for shard in range(len(index.shard_files))]
    rows = np.concatenate([np.empty(0, np.int64), *in_shard])
    documents = np.empty(len(rows), DOCUMENT)
    documents["doc_id"] = whole(index.doc_ids[rows])
    numbers = [pools.index(pool) if pool in pools else len(pools) for pool in index.pool_names]
    documents["pool"] = np.array(numbers, np.uint16)[index.pools[rows]]
    documents["tokens"] = _digests(_contents(folder, index, in_shard))
    return documents


def _contents(folder: Path, index: DocumentIndex, in_shard: Sequence[npt.NDArray[np.int64]]) -> Iterator[bytes]:
    token_bytes = _token_bytes(index)
    for file, rows in zip(index.shard_files, in_shard, strict=True):
        with (folder / file).open("rb") as opened:
            for row in rows:
                opened.seek(HEADER_BYTES + int(index.offsets[row]) * token_bytes)
                yield opened.read(int(index.lengths[row]) * token_bytes)


def indexes(folder: Path, token_shards: ArtifactRef) -> list[DocumentIndex]:
    """The document index of every split."""
    return [read_index(folder / f"{split}_index") for split in sorted(token_shards.counts["splits"])]


AGAIN = "Materialize token_shards again."

CHECKS = [
    law(
        shards_match_their_headers_and_hashes,
        blocking=True,
        description=f"Fails when a shard was cut short, damaged, or contradicts its index. {AGAIN}",
    ),
    law(
        shards_end_every_document_once,
        blocking=True,
        description=f"Fails when a document in the shards has no end, two, or one in its middle. {AGAIN}",
    ),
    law(
        shards_hold_every_document_once,
        blocking=True,
        description=f"Fails when a split's document was lost, repeated or altered on the way into its shard. {AGAIN}",
    ),
]
