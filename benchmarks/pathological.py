"""pathological: signing bytes that are not like text, and encoding documents that are one long word, beside text.

Each row of signing is one document of a million bytes after another, all of one kind; each row of encoding one
document of fifty million. There is no peer; `times_text` is a row's rate over that of the measured text.

`steps_a_byte` counts what the passes of signing do over the bytes, which is what must not grow: a rate depends on the
machine, and on how many words there are to hash and sign. Of encoding, `growth` is the time of such a document over
that of one of a quarter of its size: 4 where time is linear.
"""

import random
from statistics import median

import numpy as np
import pyarrow as pa
from bench import Bench
from corpus import num_bytes_of
from measure import Bar, Row, alternate, seconds_of
from tokenizing import write_inputs

from pipeline_assets.transforms.encode import encode_documents
from pipeline_assets.transforms.minhash import MinHashParams, sign_documents
from resources.tokenizer import load_tokenizer

PARAMS = MinHashParams()
DOCUMENT_BYTES, NUM_DOCUMENTS = 1_000_000, 4
BARS = [Bar(figure="steps_a_byte", at_most=5)]

KINDS = {
    "no space": b"a",
    "one-letter words": b"a ",
    "emoji": "🙂".encode(),
    "NUL": b"\0",
    "combining marks": "\u0301".encode(),
    "right to left": "שלום עולם مرحبا ".encode(),
    "ideographs": "漢字".encode(),
    "not UTF-8": b"\xff",
    "cut code points": "漢".encode()[:2],
}

ONE_DOCUMENT_BYTES, PARTS = 50_000_000, 4
LONG_WORDS = {
    "letters": "".join(random.Random(1).choices("abcdefghijklmnopqrstuvwxyz", k=10_007)),
    "digits": "".join(random.Random(2).choices("0123456789", k=10_007)),
    "newlines": "\n",
    "spaces": " ",
}


def measure(bench: Bench) -> list[Row]:
    """Rows of signing, then of encoding."""
    return [*signing(bench), *encoding(bench)]


def signing(bench: Bench) -> list[Row]:
    """A row for the text, and one for each kind: MB a second."""
    inputs: dict[str, pa.Array] = {"text": bench.text.texts} | {
        kind: documents_of(unit) for kind, unit in KINDS.items()
    }
    contenders = {
        kind: (lambda texts=texts: seconds_of(lambda: sign_documents(texts, PARAMS))) for kind, texts in inputs.items()
    }
    sign_documents(bench.text.texts, PARAMS)
    seconds = alternate(bench.runs, contenders)
    return [
        row_of(kind, texts, seconds[kind], bench.text.num_megabytes / median(seconds["text"]))
        for kind, texts in inputs.items()
    ]


def documents_of(unit: bytes) -> pa.LargeStringArray:
    """Documents of one kind of bytes, unchecked, as a file may hold them."""
    document = unit * (DOCUMENT_BYTES // len(unit))
    offsets = np.arange(NUM_DOCUMENTS + 1, dtype=np.int64) * len(document)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(document * NUM_DOCUMENTS)]
    return pa.Array.from_buffers(pa.large_string(), NUM_DOCUMENTS, buffers)


def row_of(kind: str, texts: pa.LargeStringArray, seconds: tuple[float, ...], text_rate: float) -> Row:
    """A kind's rate, how it compares with text, and its steps."""
    _, stats = sign_documents(texts, PARAMS)
    megabytes = stats.num_bytes / 1e6
    return Row(
        name=f"pathological: {kind}",
        amount=megabytes,
        unit="MB",
        ours_seconds=seconds,
        extra={
            "times_text": megabytes / median(seconds) / text_rate,
            "steps_a_byte": stats.num_steps / stats.num_bytes,
            "num_words": stats.num_words,
        },
        bars=BARS,
    )


def encoding(bench: Bench) -> list[Row]:
    """A row for the text as one document, and one for each kind of long word: MB a second."""
    tokenizer = load_tokenizer(write_inputs(bench).path)
    text = "\n".join(bench.text.texts.to_pylist())
    documents = {
        (kind, parts): one_document(unit, ONE_DOCUMENT_BYTES // parts)
        for kind, unit in {"text": text, **LONG_WORDS}.items()
        for parts in (1, PARTS)
    }
    contenders = {
        f"{kind} {parts}": (lambda texts=texts: seconds_of(lambda: encode_documents(tokenizer, texts)))
        for (kind, parts), texts in documents.items()
    }
    encode_documents(tokenizer, documents["text", 1])
    seconds = {name: median(found) for name, found in alternate(bench.runs, contenders).items()}
    return [
        Row(
            name=f"one document: {kind}",
            amount=num_bytes_of(texts) / 1e6,
            unit="MB",
            ours_seconds=[seconds[f"{kind} 1"]],
            extra={
                "times_text": seconds["text 1"] / seconds[f"{kind} 1"],
                "growth": seconds[f"{kind} 1"] / seconds[f"{kind} {PARTS}"],
            },
            bars=[Bar(figure="growth", at_most=1.5 * PARTS)],
        )
        for (kind, parts), texts in documents.items()
        if parts == 1
    ]


def one_document(unit: str, num_bytes: int) -> pa.LargeStringArray:
    """A text over and over, in one document of about so many bytes."""
    size = len(unit.encode())
    times, rest = divmod(num_bytes, size)
    return pa.array([unit * times + unit[: rest * len(unit) // size]], pa.large_string())
