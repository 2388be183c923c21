"""Stored columns from documents to shards: signatures, tokens, tokenizers, token files and their index.

In: artifacts of those assets. Out: a `StoredAsset` each. The promise: what is written here is what the files are, and
every file is here; tests compare them.
"""

from pathlib import Path

import numpy as np

from pipeline_assets.stored import (
    Row,
    StoredAsset,
    StoredColumn,
    StoredRows,
    array,
    fields,
    filled,
    first_rows,
    listed,
    shown,
    splits_holding,
)
from pipeline_assets.stripes import SAMPLE_ROWS
from pipeline_assets.transforms.lookup import printable
from resources.tables import read_array, read_json

SIGNATURES = StoredAsset(
    columns=(
        array("doc_id", "uint8[n, 32]", "SHA-256 of the text's UTF-8 bytes"),
        array(
            "signatures",
            "uint32[n, num_perm]",
            "MinHash values of the document's shingles, bands × rows a band of them; all bits set where it has no word",
        ),
        array("text_bytes", "int64[n]", "UTF-8 bytes of the text", unit="bytes"),
        array("band_keys", "uint64[k]", "Keys of the bands of all documents that have a word, sorted by value"),
        array("band_rows", "uint32[k]", "The document of each band key, by its place in the unit", unit="rows"),
    ),
    rows=lambda stage, ref, parts: StoredRows(
        num_rows=ref.counts["documents"],
        sample=first_rows(stage.folder(filled(parts)), ["doc_id", "signatures", "text_bytes"]),
    ),
)


TOKENS = StoredAsset(
    columns=(
        array("doc_id", "uint8[n, 32]", "SHA-256 of the text's UTF-8 bytes"),
        array("tokens", "uint16|uint32[t]", "Token ids, document after document, each with its EOS", unit="tokens"),
        array("length", "int64[n]", "Tokens of the document, the end-of-document token included", unit="tokens"),
        array("row", "int64[n]", "Place of the document among its raw unit's rows", unit="rows"),
        array("place", "int64[n, 2]", "Source coordinate within the file: row group, and row within it"),
    ),
    rows=lambda stage, ref, parts: StoredRows(
        num_rows=ref.counts["documents"], sample=_token_rows(stage.folder(filled(parts)))
    ),
)


def _token_rows(folder: Path) -> list[Row]:
    rows = first_rows(folder, ["doc_id", "length", "row", "place"])
    tokens, ends = read_array(folder / "tokens.npy"), np.cumsum([0, *(row["length"] for row in rows)])
    return [row | {"tokens": shown(tokens[end - row["length"] : end])} for row, end in zip(rows, ends[1:], strict=True)]


TOKENIZER_FILE = "tokenizer.json"
TOKENIZER = StoredAsset(
    columns=(
        StoredColumn(
            name="vocabulary",
            type="object|array",
            description="Each token, as the model spells it, with its id; or, in the order of ids, with its score",
            file=TOKENIZER_FILE,
            key="model.vocab",
        ),
        *fields(
            TOKENIZER_FILE,
            "",
            {
                "version": ("string", "Version of the file's format"),
                "model": ("object", "The model: its type, vocabulary, merges and options"),
                "added_tokens": ("array", "Tokens that are matched as a whole, each with its id and how it is matched"),
                "normalizer": ("object|null", "What is done to a text first"),
                "pre_tokenizer": ("object|null", "How a text is cut before the model sees it"),
                "post_processor": ("object|null", "What is added to the ids of a text"),
                "decoder": ("object|null", "How tokens become a text again"),
                "truncation": ("object|null", "How ids are cut short; it is not used"),
                "padding": ("object|null", "How ids are padded; it is not used"),
            },
        ),
    ),
    rows=lambda stage, ref, parts: vocabulary_rows(stage.folder(ref) / TOKENIZER_FILE),
)


def vocabulary_rows(path: Path) -> StoredRows:
    """The model's own vocabulary in a tokenizer.json, and entries of it from the first id to the last."""
    vocabulary = read_json(path)["model"]["vocab"]
    pairs = vocabulary.items() if isinstance(vocabulary, dict) else ((one[0], at) for at, one in enumerate(vocabulary))
    by_id = sorted((number, token) for token, number in pairs)
    places = np.unique(np.linspace(0, len(by_id) - 1, SAMPLE_ROWS).astype(np.int64)).tolist()
    sample = [{"token": printable(by_id[place][1]), "id": by_id[place][0]} for place in places]
    return StoredRows(num_rows=len(by_id), sample=sample)


TOKENIZER_REPORT_FILE = "report.json"
TOKENIZER_REPORT = StoredAsset(
    columns=(
        *fields(
            TOKENIZER_REPORT_FILE,
            "",
            {
                "tokenizer": ("string", "The recipe's name of it, `chosen` for the one in use"),
                "vocabulary": ("integer", "Rows of its embedding table: the largest id and one", "tokens"),
                "tokens_estimated": ("integer", "Tokens of all kept documents, estimated from the sample", "tokens"),
                "tokens_to_chosen": ("number", "The same over the chosen tokenizer's"),
                "bytes_a_token": ("number", "UTF-8 bytes of text for each token", "bytes"),
                "round_trip_share": ("number", "Share of sampled documents that decode to their text"),
                "table_parameters": ("integer", "Parameters of the embedding table in the compared model"),
                "table_share_of_model": ("number", "The same over all its parameters"),
                "multiply_adds_a_byte": ("number", "Multiply-adds of the model for each byte of text"),
                "encoder": ("string", "What encodes: `words` is our own, `library` the tokenizers library"),
                "because": ("string", "Why that one"),
                "eos": ("string", "The end-of-document token"),
                "fingerprint": ("string", "SHA-256 of the tokenizer's canonical form"),
            },
            "tokenizers[].",
        ),
        *fields(
            TOKENIZER_REPORT_FILE,
            "",
            {
                "pools": ("array", "One row a tokenizer and pool: documents, bytes, tokens, round trips, lengths"),
                "inventory": ("array", "One row a pool: documents, bytes and tokens of all that is kept"),
            },
        ),
    ),
    rows=lambda stage, ref, parts: listed(read_json(stage.folder(ref) / TOKENIZER_REPORT_FILE)["tokenizers"]),
)


def index_columns(folder: str) -> tuple[StoredColumn, ...]:
    """The document index of each split, and the shards beside it."""
    index = f"{folder}*_index/"
    return (
        array("doc_id", "uint8[n, 32]", "SHA-256 of the text's UTF-8 bytes", f"{index}doc_id.npy"),
        array("pool", "uint16[n]", "Pool of the document, by its place in index.pools", f"{index}pool.npy"),
        array("shard", "int32[n]", "Shard that holds it, by its place in index.shards", f"{index}shard.npy"),
        array("offset", "int64[n]", "Its first token, counted from the shard's first", f"{index}offset.npy", "tokens"),
        array("length", "int64[n]", "Its tokens, the end-of-document token included", f"{index}length.npy", "tokens"),
        array(
            "tokens",
            "uint16|uint32[t]",
            "Token ids of the shard, behind a header of 256 int32: magic, version, t, and zeros",
            f"{folder}*.bin",
            "tokens",
        ),
        *fields(
            f"{index}index.json",
            "index.",
            {
                "format": ("string", "Format of the index"),
                "split": ("string", "Split"),
                "pools": ("array", "Names of the pools in order of priority"),
                "num_documents": ("integer", "Documents in the split", "documents"),
                "num_tokens": ("integer", "Tokens in its shards", "tokens"),
                "shards": ("array", "File and tokens of each shard, in order"),
                "eos_id": ("integer", "Id of the end-of-document token"),
                "token_dtype": ("string", "dtype of the shards' tokens"),
                "tokenizer_fingerprint": ("string", "SHA-256 of the canonical form of the tokenizer that made them"),
            },
        ),
    )


SHARDS = StoredAsset(
    columns=index_columns(""),
    rows=lambda stage, ref, parts: StoredRows(
        num_rows=ref.counts["documents"],
        sample=index_rows(stage.folder(ref), next(splits_holding(ref.counts["splits"], "documents"))),
    ),
)


def index_rows(folder: Path, split: str) -> list[Row]:
    rows = first_rows(folder / f"{split}_index", ["doc_id", "pool", "shard", "offset", "length"])
    return [{"split": split} | row for row in rows]
