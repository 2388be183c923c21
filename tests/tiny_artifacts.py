"""Tiny sealed artifacts for tests: a token_shards artifact and a packing_plan artifact over it, as the stages write
them.
"""

import hashlib
import json
from dataclasses import asdict
from functools import cache
from pathlib import Path

import numpy as np

from resources.tokenizer import load_tokenizer, train_tokenizer
from training_io.document_index import cut_shards, index_of, read_index, write_index
from training_io.handoff import PACKAGE_FORMAT
from training_io.hashing import identity_of, sha256_file
from training_io.manifest import MANIFEST_NAME, Manifest, artifact_identity, load_manifest
from training_io.mixture import MixtureStage
from training_io.plan import ShardsReference, load_plan, splits_of, write_plan
from training_io.planning import plan_packs
from training_io.sampler import Sampler
from training_io.shard_format import write_shard

FINGERPRINT = hashlib.sha256(b"a tokenizer").hexdigest()


def address_docs(lengths, base=0):
    """Documents whose tokens encode their address: text token p of document d is d * 10_000 + p + 1 (never 0)."""
    return [[(base + d) * 10_000 + p + 1 for p in range(length)] for d, length in enumerate(lengths)]


def make_token_shards(
    root: Path,
    split_docs: dict[str, list[list[int]]],
    eos_id: int = 0,
    *,
    token_dtype: str = "uint32",
    max_shard_tokens: int = 1_000_000,
    pool_names: tuple[str, ...] = ("tiny",),
    fingerprint: str = FINGERPRINT,
) -> Path:
    """Write and seal `<root>/token_shards/-/<identity>`; split_docs holds text tokens WITHOUT the EOS, which is
    appended.

    A document's doc_id is the SHA-256 of its tokens; document i is in pool i modulo the number of pools.
    """
    content = identity_of(dict(split_docs))
    inputs = {"document_tokens": content}
    parameters = {"eos_id": eos_id, "token_dtype": token_dtype, "max_shard_tokens": max_shard_tokens}
    folder = root / "token_shards" / "-" / artifact_identity("token_shards", "-", inputs, parameters, 1)
    folder.mkdir(parents=True, exist_ok=True)
    counts = {}
    for split, docs in split_docs.items():
        closed = [[*doc, eos_id] for doc in docs]
        lengths = np.array([len(doc) for doc in closed], dtype=np.int64)
        index = index_of(
            split=split,
            doc_ids=_doc_ids(docs),
            pools=(np.arange(len(docs)) % len(pool_names)).astype(np.uint16),
            pool_names=pool_names,
            lengths=lengths,
            cuts=cut_shards(lengths, max_shard_tokens),
            eos_id=eos_id,
            token_dtype=token_dtype,
            tokenizer_fingerprint=fingerprint,
        )
        tokens = np.array([token for doc in closed for token in doc], dtype=token_dtype)
        ends = np.concatenate([[0], np.cumsum(index.shard_tokens, dtype=np.int64)])
        for file, start, end in zip(index.shard_files, ends[:-1], ends[1:], strict=True):
            write_shard(folder / file, tokens[start:end])
        write_index(folder / f"{split}_index", index)
        counts[split] = {"num_documents": index.num_documents, "num_tokens": index.num_tokens}
    return seal(folder, "token_shards", inputs, parameters, counts)


def make_plan(
    root: Path,
    shards_artifact: Path,
    *,
    splits: tuple[str, ...] = ("train",),
    max_seq_len: int = 8,
    capacity: int = 16,
    strategy: str = "oldest_first",
    buffer: int = 16,
    packs_per_microbatch: int = 2,
    microbatches_per_step: int = 2,
    epoch_seed: int = 1,
    long_documents: str = "cut",
    overlap: int = 0,
    mixture: tuple[MixtureStage, ...] = (),
) -> Path:
    """Write and seal `<root>/packing_plan/-/<identity>` with one folder a split, over a token_shards artifact."""
    manifest = load_manifest(shards_artifact)
    reference = ShardsReference(path=shards_artifact, identity=manifest.identity, digest=manifest.digest)
    inputs = {"token_shards": manifest.digest}
    parameters = {
        "max_seq_len": max_seq_len,
        "capacity": capacity,
        "strategy": strategy,
        "buffer": buffer,
        "packs_per_microbatch": packs_per_microbatch,
        "microbatches_per_step": microbatches_per_step,
        "epoch_seed": epoch_seed,
        "long_documents": long_documents,
        "overlap": overlap,
        "mixture": [asdict(stage) for stage in mixture],
        "splits": list(splits),
    }
    folder = root / "packing_plan" / "-" / artifact_identity("packing_plan", "-", inputs, parameters, 1)
    counts = {}
    for split in splits:
        plan = plan_packs(
            read_index(shards_artifact / f"{split}_index"),
            shards=reference,
            max_seq_len=max_seq_len,
            capacity=capacity,
            strategy=strategy,
            buffer=buffer,
            packs_per_microbatch=packs_per_microbatch,
            microbatches_per_step=microbatches_per_step,
            epoch_seed=epoch_seed,
            long_documents=long_documents,
            overlap=overlap,
            mixture=mixture if split == "train" else (),
        )
        write_plan(folder / split, plan, shards_artifact)
        counts[split] = {"num_packs": plan.num_packs, "num_targets": plan.num_targets}
    return seal(folder, "packing_plan", inputs, parameters, counts)


TINY_TEXTS = ("ab ba", "abba")


@cache
def tiny_tokenizer() -> bytes:
    """A tokenizer.json over the tiny texts."""
    return train_tokenizer([*TINY_TEXTS] * 9, 260)


def tiny_fingerprint() -> str:
    """The fingerprint of the tiny tokenizer: shards of a package are made with it."""
    content = json.loads(tiny_tokenizer())
    return identity_of({name: value for name, value in content.items() if name not in ("truncation", "padding")})


def make_package(root: Path, shards_artifact: Path, plan_artifact: Path) -> dict:
    """Turn the root of a shards and a plan artifact into a hand-off package; returns its description."""
    (root / "tokenizer.json").write_bytes(tiny_tokenizer())
    tokenizer = load_tokenizer(root / "tokenizer.json")
    plans = {split: load_plan(plan_artifact, split) for split in splits_of(plan_artifact)}
    package = {
        "format": PACKAGE_FORMAT,
        "tokenizer": {"file": "tokenizer.json", "fingerprint": tokenizer.fingerprint},
        "data": {},
        "sequence_rules": {"token_dtype": "uint16", "eos_id": tokenizer.eos_id},
        "quotas": {},
        "sampling": {},
        "plans": {
            split: {"path": plan_artifact.relative_to(root).as_posix(), "identity": plan.identity}
            for split, plan in plans.items()
        },
        "reading_state": {split: Sampler(plan).state_dict() for split, plan in plans.items()},
        "self_test": {
            "documents": [
                {"text": text, "ids": [*ids, tokenizer.eos_id]}
                for text, ids in zip(TINY_TEXTS, tokenizer.encode_batch(TINY_TEXTS), strict=True)
            ]
        },
    }
    (root / "package.json").write_text(json.dumps(package))
    return package


def seal(folder: Path, asset: str, inputs: dict, parameters: dict, counts: dict) -> Path:
    """Write the manifest of everything in a folder; sealing again after a change keeps the identity, not the digest."""
    files = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != MANIFEST_NAME
    }
    manifest = Manifest(
        asset=asset, unit="-", inputs=inputs, parameters=parameters, version=1, counts=counts, files=files
    )
    text = json.dumps(manifest.to_json(), indent=1)
    (folder / MANIFEST_NAME).write_text(text, encoding="utf-8")
    return folder


def _doc_ids(docs: list[list[int]]) -> np.ndarray:
    raw = b"".join(hashlib.sha256(repr(doc).encode()).digest() for doc in docs)
    return np.frombuffer(raw, dtype=np.uint8).reshape(-1, 32)
