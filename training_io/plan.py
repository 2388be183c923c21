"""The packing plan: which segments share which pack, and which packs a step trains on.

In: a document index and the packing parameters. Out: `plan.json` and `.npy` columns, one folder a split. The promise:
the plan is the recorded output of the streaming packer, every segment once an epoch, and each step's loss denominator
is known before the step. Cost: planning is linear in the segments; loading maps the columns.
"""

import hashlib
import os
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from training_io.columns import read_column, read_fields, write_column, write_fields
from training_io.document_index import DocumentIndex, read_index
from training_io.errors import FormatError, RecipeError, StateMismatch
from training_io.hashing import derive_seed, identity_of, mix64
from training_io.manifest import Manifest, open_artifact
from training_io.packing import pack
from training_io.segments import first_segments, locate_segments, segment_table
from training_io.shard_format import Tokens, read_shard

I64 = npt.NDArray[np.int64]

PLAN_FORMAT = "corpusmill-plan/1"
PLAN_NAME = "plan.json"
_FIELDS = (
    "split",
    "shards",
    "tokenizer_fingerprint",
    "token_dtype",
    "eos_id",
    "max_seq_len",
    "capacity",
    "strategy",
    "buffer",
    "packs_per_microbatch",
    "microbatches_per_step",
    "epoch_seed",
    "num_documents",
    "num_segments",
    "num_packs",
    "num_targets",
    "num_steps",
)


@dataclass(frozen=True, kw_only=True)
class ShardsReference:
    """The token_shards artifact that a plan reads: its folder, identity and digest."""

    path: Path
    identity: str
    digest: str


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """Packs of one split; order holds segment numbers (rows of the segment table) in pack order."""

    index: DocumentIndex
    shards: ShardsReference
    max_seq_len: int
    capacity: int
    strategy: str
    buffer: int
    packs_per_microbatch: int
    microbatches_per_step: int
    epoch_seed: int
    order: npt.NDArray[Any]  # uint32[s] or int64[s]
    pack_offsets: I64  # [p + 1], over order
    pack_targets: I64  # [p]
    pack_sum_squares: I64  # [p], sum of length^2: attention work

    @property
    def split(self) -> str:
        """Name of the split."""
        return self.index.split

    @property
    def num_segments(self) -> int:
        """Segments in the plan."""
        return len(self.order)

    @property
    def num_packs(self) -> int:
        """Packs in the plan."""
        return len(self.pack_targets)

    @property
    def packs_per_step(self) -> int:
        """Packs that one global step trains on, over all ranks and microbatches; the last step may have fewer."""
        return self.packs_per_microbatch * self.microbatches_per_step

    @property
    def num_steps(self) -> int:
        """Global steps in one epoch."""
        return -(-self.num_packs // self.packs_per_step)

    @cached_property
    def num_targets(self) -> int:
        """Next-token pairs in one epoch."""
        return int(self.pack_targets.sum())

    @cached_property
    def identity(self) -> str:
        """SHA-256 over the fields of plan.json without the path, and the bytes of every column."""
        fields = self.to_fields("")
        del fields["shards"]["path"]
        columns = {
            name: hashlib.sha256(np.ascontiguousarray(column).data).hexdigest() for name, column in self.columns.items()
        }
        return identity_of({"plan": fields, "columns": columns})

    @property
    def columns(self) -> dict[str, npt.NDArray[Any]]:
        """The stored arrays by name."""
        return {
            "order": self.order,
            "pack_offsets": self.pack_offsets,
            "pack_targets": self.pack_targets,
            "pack_sum_squares": self.pack_sum_squares,
        }

    @cached_property
    def token_shards(self) -> tuple[Tokens, ...]:
        """The split's shards in order, memory-mapped when first asked for."""
        return tuple(read_shard(self.shards.path / file) for file in self.index.shard_files)

    @cached_property
    def segment_firsts(self) -> I64:
        """Number of the first segment of each document, int64[n + 1]."""
        return first_segments(self.index.lengths, self.max_seq_len)

    def locate(self, numbers: npt.NDArray[np.integer[Any]]) -> tuple[I64, I64, I64]:
        """Document, start and end of the given segments: three int64[k]."""
        return locate_segments(numbers, self.segment_firsts, self.index.lengths, self.max_seq_len)

    def segments_of(self, packs: I64) -> npt.NDArray[Any]:
        """Segment numbers of the given packs, one pack after another."""
        bounds = zip(self.pack_offsets[packs].tolist(), self.pack_offsets[packs + 1].tolist(), strict=True)
        return np.concatenate([self.order[:0], *(self.order[start:end] for start, end in bounds)])

    def step_packs(self, epoch: int, step: int) -> I64:
        """Pack numbers of a global step: the plan's order in epoch 0, permuted by a keyed hash in later ones."""
        assert 0 <= step < self.num_steps, (step, self.num_steps)
        first, last = step * self.packs_per_step, min((step + 1) * self.packs_per_step, self.num_packs)
        if epoch == 0:
            return np.arange(first, last, dtype=np.int64)
        return epoch_order(self.num_packs, self.epoch_seed, epoch)[first:last]

    def step_targets(self, epoch: int, step: int) -> int:
        """Loss denominator of a global step: the targets of all its packs."""
        return int(self.pack_targets[self.step_packs(epoch, step)].sum())

    def to_fields(self, shards_path: str) -> dict[str, Any]:
        """The object stored in plan.json."""
        return {
            "format": PLAN_FORMAT,
            "split": self.split,
            "shards": {"path": shards_path, "identity": self.shards.identity, "digest": self.shards.digest},
            "tokenizer_fingerprint": self.index.tokenizer_fingerprint,
            "token_dtype": self.index.token_dtype,
            "eos_id": self.index.eos_id,
            "max_seq_len": self.max_seq_len,
            "capacity": self.capacity,
            "strategy": self.strategy,
            "buffer": self.buffer,
            "packs_per_microbatch": self.packs_per_microbatch,
            "microbatches_per_step": self.microbatches_per_step,
            "epoch_seed": self.epoch_seed,
            "num_documents": self.index.num_documents,
            "num_segments": self.num_segments,
            "num_packs": self.num_packs,
            "num_targets": self.num_targets,
            "num_steps": self.num_steps,
        }


@lru_cache(maxsize=2)
def epoch_order(num_packs: int, epoch_seed: int, epoch: int) -> I64:
    """Pack numbers of an epoch in order: sorted by mix64(mix64(key) ^ pack), key = derive_seed(epoch_seed, "epoch e").

    mix64 is a bijection, so there are no ties. Read-only; the last two epochs are kept.
    """
    key = mix64(np.array([derive_seed(epoch_seed, f"epoch {epoch}")], dtype=np.uint64))
    order = np.argsort(mix64(np.arange(num_packs, dtype=np.uint64) ^ key)).astype(np.int64, copy=False)
    order.flags.writeable = False
    return order


def plan_packs(
    index: DocumentIndex,
    *,
    shards: ShardsReference,
    max_seq_len: int,
    capacity: int,
    strategy: str,
    buffer: int,
    packs_per_microbatch: int,
    microbatches_per_step: int,
    epoch_seed: int,
) -> Plan:
    """Cut a split's documents into segments and pack them; RecipeError for impossible numbers."""
    if packs_per_microbatch < 1 or microbatches_per_step < 1:
        raise RecipeError(
            "packs: expected at least 1 pack a microbatch and 1 microbatch a step, found"
            f" {packs_per_microbatch:,} and {microbatches_per_step:,}. Raise them."
        )
    _, start, end = segment_table(index.lengths, max_seq_len)
    order, pack_offsets = pack(end - start, capacity, strategy, buffer)
    packed = (end - start)[order]
    return Plan(
        index=index,
        shards=shards,
        max_seq_len=max_seq_len,
        capacity=capacity,
        strategy=strategy,
        buffer=buffer,
        packs_per_microbatch=packs_per_microbatch,
        microbatches_per_step=microbatches_per_step,
        epoch_seed=epoch_seed,
        order=order.astype(np.uint32) if len(order) <= 2**32 else order,
        pack_offsets=pack_offsets,
        pack_targets=_pack_sums(packed, pack_offsets),
        pack_sum_squares=_pack_sums(packed * packed, pack_offsets),
    )


def write_plan(folder: Path, plan: Plan, shards_path: Path) -> None:
    """Write a plan into a split folder, which is made; shards_path is the token_shards artifact.

    The path is stored relative to the folder, so both must stand where they will stand to each other when read.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, column in plan.columns.items():
        write_column(folder, name, column)
    relative = Path(os.path.relpath(shards_path, folder)).as_posix()
    write_fields(folder / PLAN_NAME, plan.to_fields(relative))


def load_plan(path: Path | str, split: str = "train", *, allow_quarantined: bool = False) -> Plan:
    """Load a split's plan from its folder, or from the packing_plan artifact that holds it, columns memory-mapped.

    Raises FormatError when the plan or its token shards are unsealed, quarantined (unless allowed: checks may look) or
    damaged in their shape, and StateMismatch when the shards are not those that were planned.
    """
    path = Path(path)
    folder = path if (path / PLAN_NAME).is_file() else path / split
    artifact = folder.absolute().parent
    _open(artifact, "packing_plan", allow_quarantined)
    if not (folder / PLAN_NAME).is_file():
        raise FormatError(
            f"{path}: expected a plan of split {split}, found {', '.join(splits_of(path)) or 'none'}."
            " Name a split that the plan has."
        )
    fields = read_fields(folder / PLAN_NAME, PLAN_FORMAT, _FIELDS)
    if fields["split"] != folder.absolute().name:
        raise FormatError(
            f"{folder / PLAN_NAME}: expected split {folder.absolute().name}, found {fields['split']}."
            " The folder was renamed; materialize packing_plan again."
        )
    shards = _resolve_shards(folder, fields["shards"], allow_quarantined)
    index = read_index(shards.path / f"{fields['split']}_index")
    plan = _plan_of(folder, fields, shards, index)
    _refuse_contradictions(folder, fields, plan)
    return plan


def splits_of(artifact: Path) -> list[str]:
    """Names of the splits that a packing_plan artifact holds, sorted."""
    return sorted(path.parent.name for path in artifact.glob(f"*/{PLAN_NAME}"))


def _open(artifact: Path, asset: str, allow_quarantined: bool) -> Manifest:
    manifest = open_artifact(artifact, allow_quarantined=allow_quarantined)
    if manifest.asset != asset:
        raise FormatError(
            f"{artifact}: expected an artifact of {asset}, found one of {manifest.asset}. Give the folder of {asset}."
        )
    return manifest


def _resolve_shards(folder: Path, stored: dict[str, Any], allow_quarantined: bool) -> ShardsReference:
    path = Path(os.path.normpath(folder.absolute() / stored["path"]))
    manifest = _open(path, "token_shards", allow_quarantined)
    for name, planned, found in (
        ("identity", stored["identity"], manifest.identity),
        ("digest", stored["digest"], manifest.digest),
    ):
        if planned != found:
            raise StateMismatch(
                f"{folder}: the plan was made for token_shards of {name} {planned[:12]}…, {path} has {found[:12]}…."
                " Materialize packing_plan again, or give the shards that it was made for."
            )
    return ShardsReference(path=path, identity=manifest.identity, digest=manifest.digest)


def _plan_of(folder: Path, fields: dict[str, Any], shards: ShardsReference, index: DocumentIndex) -> Plan:
    num_segments, num_packs = int(fields["num_segments"]), int(fields["num_packs"])
    return Plan(
        index=index,
        shards=shards,
        max_seq_len=int(fields["max_seq_len"]),
        capacity=int(fields["capacity"]),
        strategy=str(fields["strategy"]),
        buffer=int(fields["buffer"]),
        packs_per_microbatch=int(fields["packs_per_microbatch"]),
        microbatches_per_step=int(fields["microbatches_per_step"]),
        epoch_seed=int(fields["epoch_seed"]),
        order=read_column(folder, "order", ("uint32", "int64"), (num_segments,)),
        pack_offsets=read_column(folder, "pack_offsets", ("int64",), (num_packs + 1,)),
        pack_targets=read_column(folder, "pack_targets", ("int64",), (num_packs,)),
        pack_sum_squares=read_column(folder, "pack_sum_squares", ("int64",), (num_packs,)),
    )


def _refuse_contradictions(folder: Path, fields: dict[str, Any], plan: Plan) -> None:
    """FormatError when plan.json, its columns and the index of the shards do not fit together."""
    derived = plan.to_fields(fields["shards"]["path"])
    wrong = [name for name in _FIELDS if fields[name] != derived[name]]
    if wrong:
        listed = "; ".join(
            f"{name}: says {fields[name]}, its shards and columns give {derived[name]}" for name in wrong
        )
        raise FormatError(f"{folder / PLAN_NAME}: {listed}. Materialize packing_plan again.")
    num_segments = int(plan.segment_firsts[-1])
    ends_at = int(plan.pack_offsets[-1])
    if plan.pack_offsets[0] != 0 or ends_at != plan.num_segments or plan.num_segments != num_segments:
        raise FormatError(
            f"{folder}: expected packs over the {num_segments:,} segments of its documents, found"
            f" {plan.num_segments:,} in order.npy and offsets that end at {ends_at:,}."
            " Materialize packing_plan again."
        )


def _pack_sums(values: I64, pack_offsets: I64) -> I64:
    sums = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(values, dtype=np.int64)])
    return np.diff(sums[pack_offsets])
