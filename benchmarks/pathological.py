"""pathological: signing bytes that are not like text, beside signing text.

Each row is one document of a million bytes after another, all of one kind. There is no peer; `times_text` is a row's
rate over that of the measured text, and `steps_a_byte` counts what the passes over the bytes do, which is what must not
grow: a rate depends on the machine, and on how many words there are to hash and sign.
"""

from statistics import median

import numpy as np
import pyarrow as pa
from bench import Bench
from measure import Bar, Row, alternate, seconds_of

from pipeline_assets.transforms.minhash import MinHashParams, sign_documents

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


def measure(bench: Bench) -> list[Row]:
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
