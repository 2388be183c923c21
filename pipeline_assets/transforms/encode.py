"""Token ids: a tokenizer object and Arrow texts in, one flat array of ids and its offsets out, EOS after each text.

Words are looked up (`word_cache`) where that gives the same ids, many times faster; else the tokenizer encodes.
Whole texts are encoded, never cut or padded; a text that spells the EOS out gets ordinary tokens, so EOS occurs exactly
once a document, at its end. Batches are cut by bytes: memory does not follow the longest run of long documents.
Cost: the tokenizer's, and 2 or 4 bytes a token.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pipeline_assets.transforms.arrays import I64, utf8_blocks
from pipeline_assets.transforms.word_cache import LibraryTokenizer, encode_by_words, encoder_for

Ids = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]

BATCH_BYTES = 8 << 20  # encoding needs 20 to 30 times its text in memory


class Encoder(Protocol):
    """A tokenizer as encoding needs it; `encode_batch` adds no special tokens and spells literal ones out."""

    @property
    def eos_id(self) -> int:
        """Id appended to every document."""

    @property
    def token_dtype(self) -> np.dtype[Any]:
        """uint16 or uint32: what the largest id fits into."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text."""

    def decode_batch(self, ids: Sequence[Sequence[int]]) -> list[str]:
        """Text of each row of ids."""


def encode_documents(tokenizer: Encoder, texts: pa.Array | pa.ChunkedArray) -> tuple[Ids, I64]:
    """Ids of all texts, EOS appended to each: (uint16 or uint32 [tokens], int64[n + 1] offsets). No nulls.

    By words where the tokenizer is one that `word_cache` knows, else by the library: the ids are the same.
    """
    encoder, _ = encoder_for(tokenizer)
    if encoder is None:
        return encode_by_library(tokenizer, texts)
    return encode_by_words(encoder, cast(LibraryTokenizer, tokenizer), texts)  # it has an encoder, so it is one


def way_of_encoding(tokenizer: Encoder) -> str:
    """Which way `encode_documents` goes with a tokenizer, and why."""
    encoder, reason = encoder_for(tokenizer)
    return f"the library, since {reason}" if encoder is None else f"a table of words: {reason}"


def encode_by_library(tokenizer: Encoder, texts: pa.Array | pa.ChunkedArray) -> tuple[Ids, I64]:
    """The same, every text by the tokenizer itself: what `encode_documents` is held to."""
    parts: list[Ids] = []
    lengths: list[int] = []
    for batch in _batches(texts):
        for ids in tokenizer.encode_batch(batch):
            parts.append(np.array([*ids, tokenizer.eos_id], dtype=tokenizer.token_dtype))
            lengths.append(len(ids) + 1)
    offsets = np.concatenate([[0], np.cumsum(np.array(lengths, dtype=np.int64))])
    return np.concatenate([np.empty(0, dtype=tokenizer.token_dtype), *parts]), offsets


def decode_documents(tokenizer: Encoder, ids: Ids, offsets: I64) -> list[str]:
    """The texts again, without their EOS: what a round trip compares with the (normalised) texts."""
    return tokenizer.decode_batch([ids[start : end - 1].tolist() for start, end in pairwise(offsets)])


def _batches(texts: pa.Array | pa.ChunkedArray) -> Iterator[list[str]]:
    for data, offsets in utf8_blocks(texts, BATCH_BYTES):
        block = data.data
        yield [str(block[start:end], "utf-8") for start, end in pairwise(offsets.tolist())]
