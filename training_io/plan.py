"""The packing plan: which segments share which pack, and which packs a step trains on.

In: what `planning` made, or a folder. Out: `plan.json`, `.npy` columns and snapshots of the packer, one folder a split.
The promise: every segment once an epoch, each step's loss denominator known before the step, and nothing loaded that
contradicts itself or its shards. Cost: a segment takes 4 bytes and a pack 12 (more only where numbers do not fit 32
bits); loading maps the columns.
"""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from training_io.batch import ConstantShape, joined
from training_io.columns import read_column, read_fields, write_column, write_fields
from training_io.document_index import DocumentIndex, read_index
from training_io.epochs import epoch_packs
from training_io.errors import FormatError, StateMismatch
from training_io.hashing import identity_of
from training_io.manifest import Manifest, open_artifact
from training_io.mixture import PlannedStage
from training_io.segments import Segments, keep_whole, offsets_of, repeated_inputs
from training_io.shard_format import Tokens, read_shard

I64 = npt.NDArray[np.int64]

PLAN_FORMAT = "corpusmill-plan/3"
SNAPSHOTS_FORMAT = "corpusmill-snapshots/1"
PLAN_NAME, SNAPSHOTS_NAME = "plan.json", "snapshots.json"
WIDTHS = ("uint32", "int64")
_FIELDS = (
    "split",
    "shards",
    "tokenizer_fingerprint",
    "token_dtype",
    "eos_id",
    "max_seq_len",
    "long_documents",
    "overlap",
    "capacity",
    "strategy",
    "buffer",
    "packs_per_microbatch",
    "microbatches_per_step",
    "epoch_seed",
    "num_documents",
    "num_diverted",
    "num_segments",
    "num_packs",
    "num_targets",
    "num_steps",
    "stages",
    "num_scheduled",
)


@dataclass(frozen=True, kw_only=True)
class ShardsReference:
    """The token_shards artifact that a plan reads: its folder, identity and digest."""

    path: Path
    identity: str
    digest: str


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """Packs of one split; order holds segment numbers (rows of the segment table) in pack order.

    snapshots[i] is the packer's state before pack i x planning.SNAPSHOT_PACKS; there is none for a strategy that cannot
    stream. A mixture packs each pool by itself, one after another and without snapshots; its stages say what the
    schedule reads, pack by pack, some of them often and some never.
    """

    index: DocumentIndex
    shards: ShardsReference
    max_seq_len: int
    long_documents: str  # cut, refuse or divert
    overlap: int  # inputs that a segment repeats of the one before it in its document, untrained
    capacity: int
    strategy: str
    buffer: int
    packs_per_microbatch: int
    microbatches_per_step: int
    epoch_seed: int
    order: npt.NDArray[Any]  # [s]; each column is uint32, or int64 where that is too narrow
    pack_offsets: npt.NDArray[Any]  # [p + 1], over order
    pack_targets: npt.NDArray[Any]  # [p], trained ones
    pack_sum_squares: npt.NDArray[Any]  # [p], sum of length^2: attention work
    snapshots: tuple[Mapping[str, Any], ...]
    stages: tuple[PlannedStage, ...] = ()
    schedule: npt.NDArray[Any] | None = None  # [k], packs of a mixture in the order of reading

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
    def num_scheduled(self) -> int:
        """Packs that an epoch reads: each once, or what the mixture asks for."""
        return self.num_packs if self.schedule is None else len(self.schedule)

    @property
    def packs_per_step(self) -> int:
        """Packs that one global step trains on, over all ranks and microbatches; the last step may have fewer."""
        return self.packs_per_microbatch * self.microbatches_per_step

    @property
    def num_steps(self) -> int:
        """Global steps in one epoch."""
        return -(-self.num_scheduled // self.packs_per_step)

    @cached_property
    def constant_shape(self) -> ConstantShape:
        """What every microbatch fits, whichever packs it holds, with its slack as segments."""
        sizes = np.diff(self.pack_offsets.astype(np.int64))
        read = sizes if self.schedule is None else sizes[self.schedule]  # a mixture may read one pack twice in a step
        counts = np.sort(read)[-self.packs_per_microbatch :]
        num_tokens = self.packs_per_microbatch * self.capacity
        return ConstantShape(
            num_tokens=num_tokens,
            num_segments=int(counts.sum()) + -(-num_tokens // self.max_seq_len),
            max_seqlen=self.max_seq_len,
        )

    @cached_property
    def num_targets(self) -> int:
        """Next-token pairs in all packs, each pack counted once."""
        return int(self.pack_targets.sum())

    @cached_property
    def num_repeated(self) -> int:
        """Inputs of all packs that overlap repeats: computed, not trained."""
        num_documents = int((self.planned_lengths > 1).sum())
        return self.overlap * (self.num_segments - num_documents)

    @property
    def num_inputs(self) -> int:
        """Tokens that all packs take room for and the model reads."""
        return self.num_targets + self.num_repeated

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
            **({} if self.schedule is None else {"schedule": self.schedule}),
        }

    @cached_property
    def token_shards(self) -> tuple[Tokens, ...]:
        """The split's shards in order, memory-mapped when first asked for."""
        return tuple(read_shard(self.shards.path / file) for file in self.index.shard_files)

    @cached_property
    def planned_lengths(self) -> npt.NDArray[np.integer]:
        """Tokens of each document, 1 for one that is diverted."""
        return keep_whole(self.index.lengths, self.max_seq_len, self.long_documents)

    @property
    def diverted(self) -> I64:
        """Numbers of the documents that the plan leaves out because they are longer than max_seq_len."""
        return np.flatnonzero(self.planned_lengths != self.index.lengths)

    @cached_property
    def segments(self) -> Segments:
        """The segments of the documents, by number."""
        return Segments(self.planned_lengths, self.max_seq_len, self.overlap)

    def locate(self, numbers: npt.NDArray[np.integer[Any]]) -> tuple[I64, I64, I64]:
        """Document, start and end of the given segments: three int64[k]."""
        return self.segments.locate(numbers)

    def segments_of(self, packs: I64) -> npt.NDArray[Any]:
        """Segment numbers of the given packs, one pack after another."""
        bounds = zip(self.pack_offsets[packs].tolist(), self.pack_offsets[packs + 1].tolist(), strict=True)
        order = self.order.data
        return joined([order[start:end] for start, end in bounds], self.order.dtype)

    def pack_inputs(self, packs: I64) -> I64:
        """Inputs of each of the given packs: its targets and what it repeats."""
        targets = self.pack_targets[packs].astype(np.int64)
        if self.overlap == 0:
            return targets
        counts = self.pack_offsets[packs + 1].astype(np.int64) - self.pack_offsets[packs]
        _, start, _ = self.locate(self.segments_of(packs))
        return targets + pack_sums(repeated_inputs(start, self.overlap), offsets_of(counts))

    def step_packs(self, epoch: int, step: int) -> I64:
        """Pack numbers of a global step: the plan's order in epoch 0, a keyed permutation of it in each later one.

        The schedule of a mixture holds its passes already: every epoch reads it as it stands.
        """
        assert 0 <= step < self.num_steps, (step, self.num_steps)
        first, last = step * self.packs_per_step, min((step + 1) * self.packs_per_step, self.num_scheduled)
        if self.schedule is not None:
            return self.schedule[first:last].astype(np.int64)
        return epoch_packs(np.arange(first, last, dtype=np.int64), self.num_packs, self.epoch_seed, epoch)

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
            "long_documents": self.long_documents,
            "overlap": self.overlap,
            "capacity": self.capacity,
            "strategy": self.strategy,
            "buffer": self.buffer,
            "packs_per_microbatch": self.packs_per_microbatch,
            "microbatches_per_step": self.microbatches_per_step,
            "epoch_seed": self.epoch_seed,
            "num_documents": self.index.num_documents,
            "num_diverted": len(self.diverted),
            "num_segments": self.num_segments,
            "num_packs": self.num_packs,
            "num_targets": self.num_targets,
            "num_steps": self.num_steps,
            "stages": [asdict(stage) for stage in self.stages],
            "num_scheduled": self.num_scheduled,
        }


def write_plan(folder: Path, plan: Plan, shards_path: Path) -> None:
    """Write a plan into a split folder, which is made; shards_path is the token_shards artifact.

    The path is stored relative to the folder, so both must stand where they will stand to each other when read.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, column in plan.columns.items():
        write_column(folder, name, column)
    relative = Path(os.path.relpath(shards_path, folder)).as_posix()
    write_fields(folder / SNAPSHOTS_NAME, {"format": SNAPSHOTS_FORMAT, "snapshots": list(plan.snapshots)})
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
    path = Path(os.path.normpath(folder.resolve() / stored["path"]))  # a link to a plan is not beside its shards
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
    stages = _stages_of(folder, fields["stages"])
    return Plan(
        index=index,
        shards=shards,
        max_seq_len=int(fields["max_seq_len"]),
        long_documents=str(fields["long_documents"]),
        overlap=int(fields["overlap"]),
        capacity=int(fields["capacity"]),
        strategy=str(fields["strategy"]),
        buffer=int(fields["buffer"]),
        packs_per_microbatch=int(fields["packs_per_microbatch"]),
        microbatches_per_step=int(fields["microbatches_per_step"]),
        epoch_seed=int(fields["epoch_seed"]),
        order=read_column(folder, "order", WIDTHS, (num_segments,)),
        pack_offsets=read_column(folder, "pack_offsets", WIDTHS, (num_packs + 1,)),
        pack_targets=read_column(folder, "pack_targets", WIDTHS, (num_packs,)),
        pack_sum_squares=read_column(folder, "pack_sum_squares", WIDTHS, (num_packs,)),
        snapshots=tuple(read_fields(folder / SNAPSHOTS_NAME, SNAPSHOTS_FORMAT, ["snapshots"])["snapshots"]),
        stages=stages,
        schedule=read_column(folder, "schedule", WIDTHS, (int(fields["num_scheduled"]),)) if stages else None,
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
    num_segments = len(plan.segments)
    ends_at = int(plan.pack_offsets[-1])
    if plan.pack_offsets[0] != 0 or ends_at != plan.num_segments or plan.num_segments != num_segments:
        raise FormatError(
            f"{folder}: expected packs over the {num_segments:,} segments of its documents, found"
            f" {plan.num_segments:,} in order.npy and offsets that end at {ends_at:,}."
            " Materialize packing_plan again."
        )
    if plan.schedule is not None and len(plan.schedule):
        least, most = int(plan.schedule.min()), int(plan.schedule.max())
        if least < 0 or most >= plan.num_packs:
            raise FormatError(
                f"{folder}: expected a schedule of packs below {plan.num_packs:,}, found {least:,} to {most:,}."
                " Materialize packing_plan again."
            )


def _stages_of(folder: Path, stored: Any) -> tuple[PlannedStage, ...]:
    """The stages of plan.json; FormatError for what is none."""
    kinds = {"name": str, "first_step": int, "first_token": int, "quotas": dict}
    for stage in stored if isinstance(stored, list) else [stored]:
        found = {name: type(value) for name, value in stage.items()} if isinstance(stage, dict) else type(stage)
        if found != kinds:
            raise FormatError(
                f"{folder / PLAN_NAME}: expected stages of {', '.join(kinds)}, found {str(stage)[:80]!r}."
                " Materialize packing_plan again."
            )
    return tuple(PlannedStage(**stage) for stage in stored)


def pack_sums(values: I64, pack_offsets: I64) -> I64:
    """The values of each pack added up: int64[s] in pack order and offsets [p + 1] -> int64[p]."""
    return np.diff(offsets_of(values)[pack_offsets])
