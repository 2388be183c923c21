"""Stored columns from documents to shards: signatures, tokens, tokenizers, token files and their index.

In: artifacts of those assets. Out: a `StoredAsset` each. The promise: what is written here is what the files are, and
every file is here; tests compare them.
"""

from pathlib import Path

import numpy as np

from pipeline_assets.measures import SHARE
from pipeline_assets.stored import (
    PLACE_UNIT,
    Row,
    StoredAsset,
    StoredColumn,
    StoredRows,
    describe_array,
    describe_fields,
    find_splits,
    find_unit_with_documents,
    read_array_rows,
    sample_rows,
    show_values,
)
from pipeline_assets.stripes import SAMPLE_ROWS
from pipeline_assets.transforms.lookup import printable
from resources.tables import read_array, read_json
from training_io.handoff import TOKENIZER_NAME
from training_io.places import spread_places

SIGNATURES = StoredAsset(
    columns=(
        describe_array("doc_id", "uint8[n, 32]", "SHA-256 of the text's UTF-8 bytes"),
        describe_array(
            "signatures",
            "uint32[n, num_perm]",
            "MinHash values of the document's shingles, bands × rows a band of them; all bits set where it has no word",
        ),
        describe_array("text_bytes", "int64[n]", "UTF-8 bytes of the text", unit="bytes"),
        describe_array(
            "band_keys", "uint64[k]", "Keys of the bands of all documents that have a word, sorted by value"
        ),
        describe_array(
            "band_rows", "uint32[k]", "The document of each band key, by its place in the unit", unit=PLACE_UNIT
        ),
    ),
    rows=lambda stage, ref, parts: StoredRows(
        num_rows=ref.counts["documents"],
        sample=read_array_rows(stage.folder(find_unit_with_documents(parts)), ["doc_id", "signatures", "text_bytes"]),
    ),
)


TOKENS = StoredAsset(
    columns=(
        describe_array("doc_id", "uint8[n, 32]", "SHA-256 of the text's UTF-8 bytes"),
        describe_array(
            "tokens", "uint16|uint32[t]", "Token ids, document after document, each with its EOS", unit="tokens"
        ),
        describe_array(
            "length", "int64[n]", "Tokens of the document, the end-of-document token included", unit="tokens"
        ),
        describe_array("row", "int64[n]", "Place of the document among its raw unit's rows", unit=PLACE_UNIT),
        describe_array("place", "int64[n, 2]", "Source coordinate within the file: row group, and row within it"),
    ),
    rows=lambda stage, ref, parts: StoredRows(
        num_rows=ref.counts["documents"], sample=_token_rows(stage.folder(find_unit_with_documents(parts)))
    ),
)


def _token_rows(folder: Path) -> list[Row]:
    rows = read_array_rows(folder, ["doc_id", "length", "row", "place"])
    tokens, ends = read_array(folder / "tokens.npy"), np.cumsum([0, *(row["length"] for row in rows)])
    return [
        row | {"tokens": show_values(tokens[end - row["length"] : end])}
        for row, end in zip(rows, ends[1:], strict=True)
    ]


TOKENIZER = StoredAsset(
    columns=(
        StoredColumn(
            name="vocabulary",
            type="object|array",
            description="Each token, as the model spells it, with its id; or, in the order of ids, with its score",
            file=TOKENIZER_NAME,
            key="model.vocab",
        ),
        *describe_fields(
            TOKENIZER_NAME,
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
    rows=lambda stage, ref, parts: sample_vocabulary(stage.folder(ref) / TOKENIZER_NAME),
)


def sample_vocabulary(path: Path) -> StoredRows:
    """The model's own vocabulary in a tokenizer.json, and entries of it from the first id to the last."""
    vocabulary = read_json(path)["model"]["vocab"]
    pairs = vocabulary.items() if isinstance(vocabulary, dict) else ((one[0], at) for at, one in enumerate(vocabulary))
    by_id = sorted((number, token) for token, number in pairs)
    spread = [by_id[place] for place in spread_places(len(by_id), SAMPLE_ROWS)]
    sample = [{"token": printable(token), "id": number} for number, token in spread]
    return StoredRows(num_rows=len(by_id), sample=sample)


REPORT_NAME = "report.json"
TOKENIZER_REPORT = StoredAsset(
    columns=(
        *describe_fields(
            REPORT_NAME,
            "",
            {
                "tokenizer": ("string", "The recipe's name of it, `chosen` for the one in use"),
                "vocabulary": ("integer", "Rows of its embedding table: the largest id and one", "tokens"),
                "tokens_estimated": ("integer", "Tokens of all kept documents, estimated from the sample", "tokens"),
                "tokens_to_chosen": ("number", "The same over the chosen tokenizer's", "ratio"),
                "bytes_a_token": ("number", "UTF-8 bytes of text for each token", "bytes a token"),
                "round_trip_share": ("number", "Share of sampled documents that decode to their text", SHARE),
                "table_parameters": ("integer", "Parameters of the embedding table in the compared model", "numbers"),
                "table_share_of_model": ("number", "The same over all its parameters", SHARE),
                "multiply_adds_a_byte": ("number", "Multiply-adds of the model for each byte of text", "operations"),
                "encoder": ("string", "What encodes: `words` is our own, `library` the tokenizers library"),
                "because": ("string", "Why that one"),
                "eos": ("string", "The end-of-document token"),
                "fingerprint": ("string", "SHA-256 of the tokenizer's canonical form"),
            },
            "tokenizers[].",
        ),
        *describe_fields(
            REPORT_NAME,
            "",
            {
                "pools": ("array", "One row a tokenizer and pool: documents, bytes, tokens, round trips, lengths"),
                "inventory": ("array", "One row a pool: documents, bytes and tokens of all that is kept"),
            },
        ),
    ),
    rows=lambda stage, ref, parts: sample_rows(read_json(stage.folder(ref) / REPORT_NAME)["tokenizers"]),
)


def describe_index(folder: str) -> tuple[StoredColumn, ...]:
    """The document index of each split, and the shards beside it."""
    index = f"{folder}*_index/"
    return (
        describe_array("doc_id", "uint8[n, 32]", "SHA-256 of the text's UTF-8 bytes", f"{index}doc_id.npy"),
        describe_array(
            "pool", "uint16[n]", "Pool of the document, by its place in index.pools", f"{index}pool.npy", PLACE_UNIT
        ),
        describe_array(
            "shard", "int32[n]", "Shard that holds it, by its place in index.shards", f"{index}shard.npy", PLACE_UNIT
        ),
        describe_array(
            "offset", "int64[n]", "Its first token, counted from the shard's first", f"{index}offset.npy", "tokens"
        ),
        describe_array(
            "length", "int64[n]", "Its tokens, the end-of-document token included", f"{index}length.npy", "tokens"
        ),
        describe_array(
            "tokens",
            "uint16|uint32[t]",
            "Token ids of the shard, behind a header of 256 int32: magic, version, t, and zeros",
            f"{folder}*.bin",
            "tokens",
        ),
        *describe_fields(
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
    columns=describe_index(""),
    rows=lambda stage, ref, parts: StoredRows(
        num_rows=ref.counts["documents"],
        sample=read_index_rows(stage.folder(ref), find_splits(ref.counts["splits"], "documents")[0]),
    ),
)


def read_index_rows(folder: Path, split: str) -> list[Row]:
    """The first documents of a split's index, each with its split."""
    rows = read_array_rows(folder / f"{split}_index", ["doc_id", "pool", "shard", "offset", "length"])
    return [{"split": split} | row for row in rows]
