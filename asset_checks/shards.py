"""Promise: a split's shards, one after another, are its documents in order, nothing lost."""

from collections import Counter
from pathlib import Path

import numpy as np

from asset_checks.verdicts import Verdict, law, verdict_of
from pipeline_assets.splits import TABLE_NAME
from pipeline_assets.stripes import Stage, units_in
from pipeline_assets.tokens import DOC_IDS, LENGTHS, TOKENS
from resources.artifact_store import ArtifactRef
from training_io import invariants
from training_io.document_index import DocumentIndex, read_index
from training_io.manifest import damaged_files

HEADER_BYTES = 1024


def shards_match_their_headers_and_hashes(stage: Stage, token_shards: ArtifactRef) -> Verdict:
    """Every file has the manifest's size and SHA-256; every shard's header, size and index agree."""
    folder, manifest = stage.open(token_shards)
    violations = damaged_files(folder, manifest)
    for index in indexes(folder, token_shards):
        violations += invariants.shards_match_headers(folder, index)
        violations += invariants.documents_tile_shards(index)
    return verdict_of("sizes, hashes, headers and index agree", violations, f"{len(manifest.files):,} files")


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
    stage: Stage, token_shards: ArtifactRef, split_documents: ArtifactRef, document_tokens: ArtifactRef
) -> Verdict:
    """Documents and token sums of the split tables = those of the index; each document's tokens = its unit's tokens."""
    folder = stage.folder(token_shards)
    violations: list[str] = []
    expected = _documents_by_split(stage, split_documents, document_tokens)
    for index in indexes(folder, token_shards):
        found, wanted = Counter(_documents_in_shards(folder, index)), Counter(expected.get(index.split, []))
        violations += [
            f"{index.split}: {doc_id.hex()[:16]} of the split tables is not in the shards with its tokens"
            for doc_id, _ in wanted - found
        ]
        violations += [
            f"{index.split}: {doc_id.hex()[:16]} is in the shards, but not in the split tables with those tokens"
            for doc_id, _ in found - wanted
        ]
    return verdict_of(
        "documents in the shards = documents of the split, token for token",
        violations,
        f"{token_shards.counts['documents']:,} documents, {token_shards.counts['tokens']:,} tokens",
    )


def _documents_by_split(
    stage: Stage, split_documents: ArtifactRef, document_tokens: ArtifactRef
) -> dict[str, list[tuple[bytes, bytes]]]:
    """By split: each document's doc_id and token bytes, from the token units."""
    documents: dict[str, list[tuple[bytes, bytes]]] = {}
    pairs = zip(units_in(stage, split_documents), units_in(stage, document_tokens), strict=True)
    for table_unit, unit in pairs:
        splits = stage.table(table_unit, TABLE_NAME, ["split"]).column("split").to_pylist()
        doc_ids, tokens = stage.array(unit, DOC_IDS), stage.array(unit, TOKENS)
        ends = np.cumsum(stage.array(unit, LENGTHS))
        starts = np.concatenate([[0], ends[:-1]])
        for row, split in enumerate(splits):
            content = tokens[starts[row] : ends[row]].tobytes()
            documents.setdefault(split, []).append((doc_ids[row].tobytes(), content))
    return documents


def _documents_in_shards(folder: Path, index: DocumentIndex) -> list[tuple[bytes, bytes]]:
    """Each document's doc_id and token bytes, read from the shard files by byte offset."""
    found = []
    token_bytes = 2 if index.token_dtype == "uint16" else 4
    contents = [(folder / file).read_bytes() for file in index.shard_files]
    for row in range(index.num_documents):
        start = HEADER_BYTES + int(index.offsets[row]) * token_bytes
        end = start + int(index.lengths[row]) * token_bytes
        found.append((index.doc_ids[row].tobytes(), contents[int(index.shards[row])][start:end]))
    return found


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
