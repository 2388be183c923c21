"""Tokenizers compared: the same texts and several tokenizers in, what each makes of them and what its table costs out.

A larger vocabulary gives fewer tokens and a larger table: both are counted, and the work that they come to together.
The promise: the texts are chosen by their content and a key, however the corpus is cut. Cost: each text is encoded and
decoded once a tokenizer.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pipeline_assets.transforms.arrays import I64
from pipeline_assets.transforms.encode import Encoder, decode_documents, encode_documents
from training_io.hashing import keyed_hash

LENGTH_SHARES = (0.1, 0.5, 0.9, 0.99)


def choose_documents(doc_ids: npt.NDArray[np.uint8], num_documents: int, key: int) -> I64:
    """Rows of the documents with the smallest keyed hash, smallest first, each text once: int64[<= num_documents].

    What is chosen from all documents is chosen from what was chosen in each part of them.
    """
    _, rows = np.unique(keyed_hash(doc_ids, key), return_index=True)
    chosen: I64 = rows[:num_documents].astype(np.int64)
    return chosen


@dataclass(frozen=True, kw_only=True)
class TextMeasure:
    """What a tokenizer makes of some texts; tokens include one EOS a document."""

    num_documents: int
    text_bytes: int
    num_tokens: int
    num_round_trips: int  # texts that decoding gives back as they were
    length_quantiles: tuple[float, ...]  # tokens a document at LENGTH_SHARES
    longest: int

    @property
    def bytes_a_token(self) -> float:
        """Text bytes for each token."""
        return self.text_bytes / self.num_tokens


def measure_texts(tokenizer: Encoder, texts: pa.Array | pa.ChunkedArray) -> TextMeasure:
    """Encode and decode texts: at least one, no nulls."""
    ids, offsets = encode_documents(tokenizer, texts)
    lengths = np.diff(offsets)
    decoded = decode_documents(tokenizer, ids, offsets)
    return TextMeasure(
        num_documents=len(lengths),
        text_bytes=int(pc.sum(pc.binary_length(texts)).as_py()),
        num_tokens=len(ids),
        num_round_trips=sum(text == again for text, again in zip(texts.to_pylist(), decoded, strict=True)),
        length_quantiles=tuple(np.quantile(lengths, LENGTH_SHARES).tolist()),
        longest=int(lengths.max()),
    )


def estimate_tokens(measures: Mapping[str, TextMeasure], text_bytes: Mapping[str, int]) -> float:
    """Tokens of a whole inventory, from a sample of each pool and the pools' bytes (ratio estimate, pool by pool)."""
    return sum(text_bytes[pool] / measure.bytes_a_token for pool, measure in measures.items())


class Shape(Protocol):
    """The decoder that a vocabulary's table is a part of."""

    @property
    def d_model(self) -> int:
        """Width of an embedding."""

    @property
    def num_layers(self) -> int:
        """Blocks."""

    @property
    def num_heads(self) -> int:
        """Query heads."""

    @property
    def num_kv_heads(self) -> int:
        """Key and value heads."""

    @property
    def d_ff(self) -> int:
        """Width of the feed-forward layer."""

    @property
    def norm(self) -> Any:
        """rmsnorm, or layernorm, which has a bias too."""


@dataclass(frozen=True, kw_only=True)
class TableCost:
    """What a vocabulary's table comes to in a decoder whose input and output share it."""

    num_rows: int
    table_parameters: int
    other_parameters: int  # learned positions left out

    @property
    def share(self) -> float:
        """Share of the model's parameters that is the table."""
        return self.table_parameters / (self.table_parameters + self.other_parameters)

    def multiply_adds_a_byte(self, bytes_a_token: float) -> float:
        """Multiply-adds of a forward pass for each byte of text, attention's pairs left out.

        Each weight is used once a token: those of the blocks, and the table's as the output layer. The input only looks
        a row up. A larger table pays when this falls.
        """
        return (self.table_parameters + self.other_parameters) / bytes_a_token


def table_cost(max_id: int, model: Shape) -> TableCost:
    """The table of a tokenizer whose ids go up to max_id, in a model of this shape.

    Attention d (2 d + 2 d_kv), SwiGLU 3 d d_ff, and two norms a block and one at the end.
    """
    width = model.d_model
    norm = width * (2 if model.norm == "layernorm" else 1)
    attention = width * (2 * width + 2 * model.num_kv_heads * (width // model.num_heads))
    block = attention + 3 * width * model.d_ff + 2 * norm
    return TableCost(
        num_rows=max_id + 1,
        table_parameters=(max_id + 1) * width,
        other_parameters=model.num_layers * block + norm,
    )
