"""Promise: every kept document is tokenized once, its EOS stands once at its real end, and decoding gives it back."""

from collections import Counter

import numpy as np
import pyarrow as pa

from asset_checks.verdicts import Verdict, law, verdict_of
from pipeline_assets.clusters import slice_name
from pipeline_assets.source import ROWS_NAME
from pipeline_assets.stripes import Stage, units_in
from pipeline_assets.tokens import DOC_IDS, LENGTHS, ROWS, TOKENIZER_NAME, TOKENS
from resources.artifact_store import ArtifactRef
from resources.tokenizer import load_tokenizer
from training_io.hashing import derive_seed, keyed_hash

DECODED_PER_UNIT = 64


def every_kept_document_is_tokenized_once(
    stage: Stage, document_tokens: ArtifactRef, lsh_clusters: ArtifactRef
) -> Verdict:
    """The documents of a token unit are the kept rows of its slice of the clusters, each once."""
    violations, documents = [], 0
    for unit in units_in(stage, document_tokens):
        slices = stage.table(lsh_clusters, slice_name(unit.unit), ["doc_id", "kept"])
        rows = zip(slices.column("doc_id").to_pylist(), slices.column("kept").to_pylist(), strict=True)
        kept = Counter(doc_id for doc_id, is_kept in rows if is_kept)
        tokenized = Counter(doc_id.tobytes() for doc_id in stage.array(unit, DOC_IDS))
        documents += kept.total()
        violations += [
            f"{unit.unit}: {doc_id.hex()[:16]} kept {kept[doc_id]} times, tokenized {tokenized[doc_id]} times"
            for doc_id in (kept - tokenized) | (tokenized - kept)
        ]
    return verdict_of("tokenized documents = kept documents", violations, f"{documents:,} kept documents")


def end_of_document_comes_once_at_the_end(
    stage: Stage, document_tokens: ArtifactRef, tokenizer: ArtifactRef
) -> Verdict:
    """Count of EOS ids = number of documents, and the last token of each document is one."""
    eos_id = tokenizer.counts["eos_id"]
    violations, documents = [], 0
    for unit in units_in(stage, document_tokens):
        tokens, lengths = stage.array(unit, TOKENS), stage.array(unit, LENGTHS)
        documents += len(lengths)
        if int(lengths.sum()) != len(tokens):
            violations.append(f"{unit.unit}: lengths sum to {int(lengths.sum()):,}, there are {len(tokens):,} tokens")
            continue
        ends = np.cumsum(lengths) - 1
        wrong = np.setxor1d(np.flatnonzero(tokens == eos_id), ends)
        violations += [
            f"{unit.unit}: token {int(at):,} is an EOS inside a document or an end without one" for at in wrong
        ]
    return verdict_of("one EOS a document, as its last token", violations, f"{documents:,} documents")


def tokens_decode_to_the_text(
    stage: Stage, document_tokens: ArtifactRef, raw_row_groups: ArtifactRef, tokenizer: ArtifactRef
) -> Verdict:
    """A keyed sample of each unit's documents: the library decodes to the text, and encodes it to these very ids."""
    encoder = load_tokenizer(stage.folder(tokenizer) / TOKENIZER_NAME, tokenizer.counts["eos"])
    claimed = {name: tokenizer.counts[name] for name in ("fingerprint", "vocab_size", "max_id", "eos_id")}
    violations = [
        f"tokenizer: {name}: expected {getattr(encoder, name)} from the file, found {value} in its manifest"
        for name, value in claimed.items()
        if value != getattr(encoder, name)
    ]
    decoded = 0
    raw = {unit.unit: unit for unit in units_in(stage, raw_row_groups)}
    for unit in units_in(stage, document_tokens):
        doc_ids, lengths, tokens = (stage.array(unit, name) for name in (DOC_IDS, LENGTHS, TOKENS))
        chosen = np.argsort(keyed_hash(np.asarray(doc_ids), derive_seed(0, "decoded")))[:DECODED_PER_UNIT]
        rows = stage.array(unit, ROWS)[chosen]
        texts = stage.table(raw[unit.unit], ROWS_NAME, ["text"]).column("text").take(pa.array(rows)).to_pylist()
        ends = np.cumsum(lengths)
        for document, text in zip(chosen.tolist(), texts, strict=True):
            ids = tokens[ends[document] - lengths[document] : ends[document] - 1].tolist()
            decoded += 1
            if encoder.decode_batch([ids])[0] != encoder.normalize(text):
                violations.append(
                    f"{unit.unit}: document {doc_ids[document].tobytes().hex()[:16]} does not decode to its text"
                )
            elif ids != encoder.encode_batch([text])[0]:
                violations.append(
                    f"{unit.unit}: document {doc_ids[document].tobytes().hex()[:16]} has other ids than the tokenizer's"
                )
    return verdict_of(
        "decode(encode(text)) = text, by the library's own encoding", violations, f"{decoded:,} sampled documents"
    )


AGAIN = "Materialize document_tokens again."

CHECKS = [
    law(
        every_kept_document_is_tokenized_once,
        blocking=True,
        description=f"Fails when a document was lost or repeated between clustering and tokenizing. {AGAIN}",
    ),
    law(
        end_of_document_comes_once_at_the_end,
        blocking=True,
        description="Fails when an end-of-document id is missing, doubled, or stands inside a document: the model "
        f"would learn false ends. {AGAIN}",
    ),
    law(
        tokens_decode_to_the_text,
        blocking=True,
        description="Fails when ids do not decode to the text they were made from: another tokenizer, or altered "
        f"text. {AGAIN}",
    ),
]
