"""Promise: a split's shards, one after another, are its documents in order, nothing lost."""

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from asset_checks.verdicts import MAX_EXAMPLES, Verdict, law, verdict_of
from pipeline_assets.source import ROWS_NAME, pool_names
from pipeline_assets.splits import TABLE_NAME
from pipeline_assets.stripes import Stage, units_in
from pipeline_assets.tokens import DOC_IDS, LENGTHS, ROWS, TOKENS
from resources.artifact_store import ArtifactRef
from training_io import invariants
from training_io.document_index import DocumentIndex, read_index
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

    The order is recounted by sorting doc_ids and source coordinates in Python; tokens are compared by their hash.
    """
    folder = stage.folder(token_shards)
    violations: list[str] = []
    expected = _documents_by_split(stage, split_documents, document_tokens, raw_row_groups)
    for index in indexes(folder, token_shards):
        wanted = [document for _, document in sorted(expected.get(index.split, []))]
        found = list(_documents_in_shards(folder, index))
        if found == wanted:
            continue
        lost, extra = set(wanted) - set(found), set(found) - set(wanted)
        at = next((row for row, pair in enumerate(zip(found, wanted, strict=False)) if pair[0] != pair[1]), len(found))
        violations.append(
            f"{index.split}: {len(lost):,} documents of the split are not in the shards with their tokens,"
            f" {len(extra):,} others are, {len(found):,} in the shards and {len(wanted):,} in the tables;"
            f" the first difference is at document {at:,}, {_named(found, at)} where {_named(wanted, at)} belongs"
        )
    return verdict_of(
        "documents in the shards = documents of the split, in order, token for token",
        violations,
        f"{token_shards.counts['documents']:,} documents, {token_shards.counts['tokens']:,} tokens",
    )


def _named(documents: list["Document"], at: int) -> str:
    return documents[at][0].hex()[:16] if at < len(documents) else "none"


Document = tuple[bytes, str, bytes]
"""doc_id, pool, and the hash of the tokens' bytes."""


def _documents_by_split(
    stage: Stage, split_documents: ArtifactRef, document_tokens: ArtifactRef, raw_row_groups: ArtifactRef
) -> dict[str, list[tuple[Any, Document]]]:
    """By split: the sort key and content of each document, from the token units and the raw rows."""
    documents: dict[str, list[tuple[Any, Document]]] = {}
    units = [units_in(stage, asset) for asset in (split_documents, document_tokens, raw_row_groups)]
    pools = pool_names(stage.recipe)
    key = derive_seed(stage.recipe.seed, "shuffle")
    for table_unit, unit, raw in zip(*units, strict=True):
        splits = stage.table(table_unit, TABLE_NAME, ["split"]).column("split").to_pylist()
        places = stage.table(raw, ROWS_NAME, ["pool", "file", "row_group", "row"]).to_pylist()
        doc_ids, tokens, rows = (stage.array(unit, name) for name in (DOC_IDS, TOKENS, ROWS))
        ends = np.cumsum(stage.array(unit, LENGTHS))
        hashes = keyed_hash(np.asarray(doc_ids), key).tolist()
        start = 0
        for row, split in enumerate(splits):
            place = places[rows[row]]
            doc_id = doc_ids[row].tobytes()
            coordinate = (pools.index(place["pool"]), place["file"], place["row_group"], place["row"])
            order = coordinate if stage.recipe.splits.order == "source" else (hashes[row], doc_id, coordinate)
            content = hashlib.sha256(tokens[start : ends[row]].tobytes()).digest()
            documents.setdefault(split, []).append((order, (doc_id, place["pool"], content)))
            start = ends[row]
    return documents


def _documents_in_shards(folder: Path, index: DocumentIndex) -> Iterator[Document]:
    """Each document's doc_id and the hash of its tokens, read from the shard files by byte offset."""
    token_bytes = _token_bytes(index)
    for shard, file in enumerate(index.shard_files):
        with (folder / file).open("rb") as opened:
            for row in np.flatnonzero(index.shards == shard):
                opened.seek(HEADER_BYTES + int(index.offsets[row]) * token_bytes)
                content = opened.read(int(index.lengths[row]) * token_bytes)
                pool = index.pool_names[index.pools[row]]
                yield index.doc_ids[row].tobytes(), pool, hashlib.sha256(content).digest()


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
