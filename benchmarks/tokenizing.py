"""tokenizing: token ids of whole documents, against tokenizers and tiktoken on one thread.

A quarter of the documents warms each side up, the rest is timed; every run starts with a tokenizer loaded anew, so
that nothing learned from the timed text helps a later run: our table of words holds those of the warm-up only. Ours
starts from Arrow and ends with one flat array, EOS included; of the peers only the calls of `encode_batch_fast` and
`encode_ordinary` are timed, on `str`, not reading the ids out. The tokenizer is the one given, else a byte-level BPE of
8,192 ids trained on the warm-up text; tiktoken gets the same ranks, and its row is left out for a tokenizer whose
pattern is not GPT-2's. That the ids are identical is asserted first.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from bench import Bench
from corpus import limited, num_bytes_of, write_plain
from measure import Bar, Row, alternate, require_same, seconds_of
from peer_environment import running_peer

from pipeline_assets.transforms.encode import encode_documents
from pipeline_assets.transforms.word_cache import encoder_for
from resources.tokenizer import load_tokenizer, train_tokenizer

VOCAB_SIZE = 8192
TRAINING_BYTES = 4_000_000
WARM_UP_EVERY = 4


@dataclass(frozen=True, kw_only=True)
class Peer:
    """Whom to compare with: the row's name, the script in `peers/`, the call that it times, our bar."""

    name: str
    script: str
    call: str
    at_least: float


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """A tokenizer.json with the texts beside it, and the texts."""

    path: Path
    warm_up: pa.LargeStringArray
    timed: pa.LargeStringArray


TOKENIZERS = Peer(name="tokenizing", script="tokenizers_encode.py", call="encode_batch_fast", at_least=15)
TIKTOKEN = Peer(name="tokenizing_tiktoken", script="tiktoken_encode.py", call="encode_ordinary", at_least=3)


def measure(bench: Bench) -> list[Row]:
    """A row for each peer: MB of text a second."""
    inputs = write_inputs(bench)
    return [against(peer, bench, inputs) for peer in peers_for(inputs.path)]


def write_inputs(bench: Bench) -> Inputs:
    """The texts and the tokenizer in the scratch folder, for both sides."""
    folder = bench.scratch / "tokenizing"
    warm_up, timed = warm_up_and_timed(bench.text.texts)
    write_plain(folder, "warm_up", warm_up)
    write_plain(folder, "timed", timed)
    path = folder / "tokenizer.json"
    if bench.tokenizer_path:
        load_tokenizer(bench.tokenizer_path).library.save(str(path))
    else:
        path.write_bytes(train_tokenizer(limited(warm_up, TRAINING_BYTES).to_pylist(), VOCAB_SIZE))
    return Inputs(path=path, warm_up=warm_up, timed=timed)


def peers_for(path: Path) -> list[Peer]:
    """tokenizers, and tiktoken where it can be told to do the same."""
    form = json.loads(path.read_text(encoding="utf-8"))
    found = form["pre_tokenizer"] or {}
    is_gpt2 = form["normalizer"] is None and (found.get("type"), found.get("use_regex", True)) == ("ByteLevel", True)
    return [TOKENIZERS, TIKTOKEN] if is_gpt2 else [TOKENIZERS]


def against(peer: Peer, bench: Bench, inputs: Inputs) -> Row:
    """Ours and one peer in turns."""
    with running_peer(bench.peer_python, peer.script, inputs.path.parent) as ask:
        require_same(peer.name, digest_of_ids(inputs.path, inputs.timed), ask("check")["digest"])
        seconds = alternate(bench.runs, {"ours": lambda: warmed_seconds(inputs), "peer": lambda: ask("run")["seconds"]})
        versions = ask("versions")["versions"]
    tokenizer = load_tokenizer(inputs.path)
    return Row(
        name=peer.name,
        amount=num_bytes_of(inputs.timed) / 1e6,
        unit="MB",
        ours_seconds=seconds["ours"],
        peer=f"{versions}, {peer.call}",
        peer_seconds=seconds["peer"],
        extra={"vocab_size": tokenizer.vocab_size},
        bars=[Bar(figure="ratio", at_least=peer.at_least)],
        note=f"{'given' if bench.tokenizer_path else 'trained'} tokenizer {tokenizer.fingerprint[:12]},"
        f" {encoder_for(tokenizer)[1]}",
    )


def warm_up_and_timed(texts: pa.LargeStringArray) -> tuple[pa.LargeStringArray, pa.LargeStringArray]:
    """Every fourth document, and the others."""
    is_warm_up = np.arange(len(texts)) % WARM_UP_EVERY == 0
    return texts.filter(pa.array(is_warm_up)), texts.filter(pa.array(~is_warm_up))


def digest_of_ids(path: Path, texts: pa.LargeStringArray) -> str:
    """SHA-256 of all ids as uint32, EOS left out, then of the int64 lengths."""
    ids, offsets = encode_documents(load_tokenizer(path), texts)
    plain = np.delete(ids, offsets[1:] - 1).astype(np.uint32)
    return hashlib.sha256(plain.tobytes() + (np.diff(offsets) - 1).tobytes()).hexdigest()


def warmed_seconds(inputs: Inputs) -> float:
    """Seconds of encoding the timed texts with a tokenizer that has seen the warm-up."""
    tokenizer = load_tokenizer(inputs.path)
    encode_documents(tokenizer, inputs.warm_up)
    return seconds_of(lambda: encode_documents(tokenizer, inputs.timed))
