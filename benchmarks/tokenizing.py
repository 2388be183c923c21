"""tokenizing: token ids of whole documents, against tokenizers, tiktoken and quicktok on one thread.

A quarter of the documents warms each side up, the rest is timed; every run starts with a tokenizer loaded anew, so
that nothing learned from the timed text helps a later run: our table of words holds those of the warm-up only.
`tokenizing_cold` has no warm-up: ours is timed from reading the tokenizer's file on, over all documents. Ours starts
from Arrow and ends with one flat array, EOS included; of the peers only the calls that a row names are timed, on `str`,
not reading the ids out.

The tokenizer is the one given, else a byte-level BPE of 8,192 ids trained on the warm-up text; tiktoken gets the same
ranks, and its row is left out for a tokenizer whose pattern is not GPT-2's. Then come the encodings of public models
that quicktok ships (`encodings_shipped`), with our bar against tokenizers and against it. That the ids are identical is
asserted first.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from bench import Bench
from corpus import limited, num_bytes_of, write_plain
from encodings_shipped import ENCODINGS, write_tokenizer
from measure import Bar, Row, alternate, require_same, seconds_of
from peer_environment import running_peer

from pipeline_assets.transforms.encode import encode_documents
from pipeline_assets.transforms.word_cache import encoder_for
from resources.tokenizer import load_tokenizer, train_tokenizer

QUICKTOK = "quicktok_encode.py"
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

    @property
    def all_texts(self) -> pa.LargeStringArray:
        """Both."""
        return pa.concat_arrays([self.warm_up, self.timed])


TOKENIZERS = Peer(name="tokenizing", script="tokenizers_encode.py", call="encode_batch_fast", at_least=15)
TIKTOKEN = Peer(name="tokenizing_tiktoken", script="tiktoken_encode.py", call="encode_ordinary", at_least=3)
COLD = Peer(name="tokenizing_cold", script="tokenizers_encode.py", call="encode_batch_fast, no warm-up", at_least=8)


def measure(bench: Bench) -> list[Row]:
    """A row for each peer: MB of text a second."""
    inputs = write_inputs(bench)
    given = "given" if bench.tokenizer_path else "trained"
    rows = [against(peer, bench, inputs, given) for peer in peers_for(inputs.path)]
    return [*rows, *(row for name in ENCODINGS for row in with_encoding(name, bench))]


def with_encoding(name: str, bench: Bench) -> list[Row]:
    """Rows of an encoding that quicktok ships, against tokenizers and against quicktok."""
    folder = bench.scratch / f"tokenizing_{name}"
    warm_up, timed = write_texts(folder, bench)
    (folder / "encoding.txt").write_text(name, encoding="utf-8")
    with running_peer(bench.peer_python, QUICKTOK, folder) as ask:
        ask("ranks")
    path = folder / "tokenizer.json"
    write_tokenizer(path, name, json.loads((folder / "ranks.json").read_text(encoding="utf-8")))
    inputs = Inputs(path=path, warm_up=warm_up, timed=timed)
    peers = [
        Peer(name=f"tokenizing_{name}", script="tokenizers_encode.py", call="encode_batch_fast", at_least=8),
        Peer(name=f"tokenizing_{name}_quicktok", script=QUICKTOK, call="encode_batch", at_least=1),
    ]
    return [against(peer, bench, inputs, f"{name}'s") for peer in peers]


def write_inputs(bench: Bench) -> Inputs:
    """The texts and the tokenizer in the scratch folder, for both sides."""
    folder = bench.scratch / "tokenizing"
    warm_up, timed = write_texts(folder, bench)
    path = folder / "tokenizer.json"
    if bench.tokenizer_path:
        load_tokenizer(bench.tokenizer_path).library.save(str(path))
    else:
        path.write_bytes(train_tokenizer(limited(warm_up, TRAINING_BYTES).to_pylist(), VOCAB_SIZE))
    return Inputs(path=path, warm_up=warm_up, timed=timed)


def write_texts(folder: Path, bench: Bench) -> tuple[pa.LargeStringArray, pa.LargeStringArray]:
    """The texts to warm up on and those to time, in a folder for the peers."""
    warm_up, timed = warm_up_and_timed(bench.text.texts)
    write_plain(folder, "warm_up", warm_up)
    write_plain(folder, "timed", timed)
    return warm_up, timed


def peers_for(path: Path) -> list[Peer]:
    """tokenizers, warmed and cold, and tiktoken where it can be told to do the same."""
    form = json.loads(path.read_text(encoding="utf-8"))
    found = form["pre_tokenizer"] or {}
    is_gpt2 = form["normalizer"] is None and (found.get("type"), found.get("use_regex", True)) == ("ByteLevel", True)
    return [TOKENIZERS, TIKTOKEN, COLD] if is_gpt2 else [TOKENIZERS, COLD]


def against(peer: Peer, bench: Bench, inputs: Inputs, whose: str) -> Row:
    """Ours and one peer in turns."""
    is_cold = peer is COLD
    ours = cold_seconds if is_cold else warmed_seconds
    with running_peer(bench.peer_python, peer.script, inputs.path.parent) as ask:
        require_same(peer.name, digest_of_ids(inputs.path, inputs.timed), ask("check")["digest"])
        job = "cold" if is_cold else "run"
        seconds = alternate(bench.runs, {"ours": lambda: ours(inputs), "peer": lambda: ask(job)["seconds"]})
        versions = ask("versions")["versions"]
    tokenizer = load_tokenizer(inputs.path)
    return Row(
        name=peer.name,
        amount=num_bytes_of(inputs.all_texts if is_cold else inputs.timed) / 1e6,
        unit="MB",
        ours_seconds=seconds["ours"],
        peer=f"{versions}, {peer.call}",
        peer_seconds=seconds["peer"],
        extra={"vocab_size": tokenizer.vocab_size},
        bars=[Bar(figure="ratio", at_least=peer.at_least)],
        note=f"{whose} tokenizer {tokenizer.fingerprint[:12]}, {encoder_for(tokenizer)[1]}",
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


def cold_seconds(inputs: Inputs) -> float:
    """Seconds from a tokenizer's file to the ids of all texts."""
    return seconds_of(lambda: encode_documents(load_tokenizer(inputs.path), inputs.all_texts))
