"""tokenizing: token ids of whole documents, against `encode_batch_fast` of tokenizers on one thread.

A quarter of the documents warms each side up, the rest is timed; every run starts with a tokenizer loaded anew, so
that nothing learned from the timed text helps a later run. Ours starts from Arrow and ends with one flat array, EOS
included; of the peer only the calls of `encode_batch_fast` are timed, on lists of `str`, not reading the ids out. The
tokenizer is the one given, else a byte-level BPE of 8,192 ids trained on the warm-up text. That the ids are identical
is asserted first.
"""

import hashlib
from pathlib import Path

import numpy as np
import pyarrow as pa
from bench import Bench
from corpus import limited, num_bytes_of, write_plain
from measure import Row, alternate, require_same, seconds_of
from peer_environment import running_peer

from pipeline_assets.transforms.encode import encode_documents
from resources.tokenizer import load_tokenizer, train_tokenizer

VOCAB_SIZE = 8192
TRAINING_BYTES = 4_000_000
WARM_UP_EVERY = 4


def measure(bench: Bench) -> list[Row]:
    """One row: MB of text a second."""
    folder = bench.scratch / "tokenizing"
    warm_up, timed = warm_up_and_timed(bench.text.texts)
    write_plain(folder, "warm_up", warm_up)
    write_plain(folder, "timed", timed)
    path = folder / "tokenizer.json"
    if bench.tokenizer_path:
        load_tokenizer(bench.tokenizer_path).library.save(str(path))
    else:
        path.write_bytes(train_tokenizer(limited(warm_up, TRAINING_BYTES).to_pylist(), VOCAB_SIZE))
    with running_peer(bench.peer_python, "tokenizers_encode.py", folder) as ask:
        require_same("tokenizing", digest_of_ids(path, timed), ask("check")["digest"])
        seconds = alternate(
            bench.runs, {"ours": lambda: warmed_seconds(path, warm_up, timed), "peer": lambda: ask("run")["seconds"]}
        )
        peer = ask("versions")["versions"]
    tokenizer = load_tokenizer(path)
    return [
        Row(
            name="tokenizing",
            amount=num_bytes_of(timed) / 1e6,
            unit="MB",
            ours_seconds=seconds["ours"],
            peer=f"{peer}, encode_batch_fast",
            peer_seconds=seconds["peer"],
            extra={"vocab_size": tokenizer.vocab_size},
            note=f"{'given' if bench.tokenizer_path else 'trained'} tokenizer {tokenizer.fingerprint[:12]}",
        )
    ]


def warm_up_and_timed(texts: pa.LargeStringArray) -> tuple[pa.LargeStringArray, pa.LargeStringArray]:
    """Every fourth document, and the others."""
    is_warm_up = np.arange(len(texts)) % WARM_UP_EVERY == 0
    return texts.filter(pa.array(is_warm_up)), texts.filter(pa.array(~is_warm_up))


def digest_of_ids(path: Path, texts: pa.LargeStringArray) -> str:
    """SHA-256 of all ids as uint32, EOS left out, then of the int64 lengths."""
    ids, offsets = encode_documents(load_tokenizer(path), texts)
    plain = np.delete(ids, offsets[1:] - 1).astype(np.uint32)
    return hashlib.sha256(plain.tobytes() + (np.diff(offsets) - 1).tobytes()).hexdigest()


def warmed_seconds(path: Path, warm_up: pa.LargeStringArray, timed: pa.LargeStringArray) -> float:
    """Seconds of encoding the timed texts with a tokenizer that has seen the warm-up."""
    tokenizer = load_tokenizer(path)
    encode_documents(tokenizer, warm_up)
    return seconds_of(lambda: encode_documents(tokenizer, timed))
