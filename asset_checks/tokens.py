"""Promise: every kept document is tokenized once, its EOS stands once at its real end, and decoding gives it back."""

from collections import Counter

import numpy as np
import pyarrow as pa

from asset_checks.verdicts import MAX_EXAMPLES, Verdict, law, verdict_of
from pipeline_assets.clusters import slice_name
from pipeline_assets.source import ROWS_NAME
from pipeline_assets.stripes import Stage, units_in
from pipeline_assets.tokens import DOC_IDS, LENGTHS, ROWS, TOKENS
from resources.artifact_store import ArtifactRef
from resources.tokenizer import load_tokenizer
from training_io.handoff import TOKENIZER_NAME
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
    """Count of EOS ids = number of documents, and the last token of each document is one.

    Lengths, tokens and the counts in the manifests agree on how many there are.
    """
    eos_id = tokenizer.counts["eos_id"]
    violations, documents, num_tokens = [], 0, 0
    for unit in units_in(stage, document_tokens):
        tokens, lengths = stage.array(unit, TOKENS), stage.array(unit, LENGTHS)
        documents, num_tokens = documents + len(lengths), num_tokens + len(tokens)
        if not int(lengths.sum()) == len(tokens) == unit.counts["tokens"]:
            violations.append(
                f"{unit.unit}: lengths sum to {int(lengths.sum()):,}, there are {len(tokens):,} tokens,"
                f" {unit.counts['tokens']:,} are listed"
            )
            continue
        violations += [f"{unit.unit}: document {int(at):,} has no token" for at in np.flatnonzero(lengths < 1)]
        ends = np.cumsum(lengths) - 1
        wrong = np.setxor1d(np.flatnonzero(tokens == eos_id), ends)
        violations += [
            f"{unit.unit}: token {int(at):,} is an EOS inside a document or an end without one" for at in wrong
        ]
    counted, stated = {"documents": documents, "tokens": num_tokens}, stage.open(document_tokens)[1].counts
    violations += [
        f"{name}: counted {count:,}, found {stated[name]:,} in the manifest"
        for name, count in counted.items()
        if count != stated[name]
    ]
    return verdict_of("one EOS a document, as its last token", violations, f"{documents:,} documents")


def tokens_decode_to_the_text(
    stage: Stage, document_tokens: ArtifactRef, raw_row_groups: ArtifactRef, tokenizer: ArtifactRef
) -> Verdict:
    """A keyed sample of each unit's documents: the library decodes to the text, and encodes it to these very ids.

    All ids are of the tokenizer's vocabulary, and stored in two bytes if the largest one fits, else in four.
    """
    encoder = load_tokenizer(stage.folder(tokenizer) / TOKENIZER_NAME, tokenizer.counts["eos"])
    dtype = "uint16" if encoder.max_id < 1 << 16 else "uint32"
    known = {name: getattr(encoder, name) for name in ("fingerprint", "vocab_size", "max_id", "eos_id")}
    violations = [
        f"tokenizer: {name}: expected {value} from the file, found {tokenizer.counts[name]} in its manifest"
        for name, value in {**known, "token_dtype": dtype}.items()
        if value != tokenizer.counts[name]
    ]
    decoded = 0
    raw = {unit.unit: unit for unit in units_in(stage, raw_row_groups)}
    for unit in units_in(stage, document_tokens):
        doc_ids, lengths, tokens = (stage.array(unit, name) for name in (DOC_IDS, LENGTHS, TOKENS))
        if tokens.dtype.name != dtype:
            violations.append(
                f"{unit.unit}: expected {dtype} ids, the largest is {encoder.max_id:,}, found {tokens.dtype}"
            )
        violations += [
            f"{unit.unit}: token {int(at):,}: expected an id up to {encoder.max_id:,}, found {int(tokens[at]):,}"
            for at in np.flatnonzero(tokens > encoder.max_id)[:MAX_EXAMPLES]
        ]
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
        description="Fails when ids do not decode to the text they were made from or are not the tokenizer's: another "
        f"tokenizer, or altered text. {AGAIN}",
    ),
]
