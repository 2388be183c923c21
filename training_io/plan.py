"""The packing plan: which segments share which pack, and which packs a step trains on.

In: a document index and the packing parameters. Out: `plan.json`, `.npy` columns and snapshots of the packer, one
folder a split. The promise: the plan is the recorded output of the streaming packer, every segment once an epoch, and
each step's loss denominator is known before the step. Cost: planning is linear in the segments; a segment takes 4 bytes
and a pack 12 (more only where numbers do not fit 32 bits); loading maps the columns.
"""

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from training_io.batch import ConstantShape, joined
from training_io.carry import Carry
from training_io.columns import read_column, read_fields, write_column, write_fields
from training_io.document_index import DocumentIndex, read_index
from training_io.epochs import epoch_packs
from training_io.errors import FormatError, RecipeError, StateMismatch
from training_io.hashing import identity_of
from training_io.manifest import Manifest, open_artifact
from training_io.mixture import MixtureStage, PlannedStage, schedule_packs
from training_io.packing import STREAMING, pack, pack_stream
from training_io.segments import Segments, keep_whole, offsets_of, repeated_inputs
from training_io.shard_format import Tokens, read_shard

I64 = npt.NDArray[np.int64]

PLAN_FORMAT = "corpusmill-plan/3"
SNAPSHOTS_FORMAT = "corpusmill-snapshots/1"
PLAN_NAME, SNAPSHOTS_NAME = "plan.json", "snapshots.json"
SNAPSHOT_PACKS = 4096  # from one snapshot to the next
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

    snapshots[i] is the packer's state before pack i x SNAPSHOT_PACKS; there is none for a strategy that cannot stream.
    A mixture packs each pool by itself, one after another and without snapshots; its stages say what the schedule
    reads, pack by pack, some of them often and some never.
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
        return targets + _pack_sums(repeated_inputs(start, self.overlap), offsets_of(counts))

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
    long_documents: str = "cut",
    overlap: int = 0,
    mixture: Sequence[MixtureStage] = (),
) -> Plan:
    """Cut a split's documents into segments and pack them, each pool by itself where a mixture is given.

    RecipeError for impossible numbers, for documents that are too long where those are refused, and for a mixture that
    the split's pools cannot fill.
    """
    if packs_per_microbatch < 1 or microbatches_per_step < 1:
        raise RecipeError(
            "packs: expected at least 1 pack a microbatch and 1 microbatch a step, found"
            f" {packs_per_microbatch:,} and {microbatches_per_step:,}. Raise them."
        )
    segments = Segments(keep_whole(index.lengths, max_seq_len, long_documents), max_seq_len, overlap)
    if mixture:
        order, pack_offsets, pool_packs = _pack_pools(index, segments, capacity, strategy, buffer)
        snapshots: list[dict[str, Any]] = []
    else:
        order, pack_offsets, snapshots = _record(segments, capacity, strategy, buffer)
    _, start, end = segments.locate(order)
    packed = end - start
    stages: tuple[PlannedStage, ...] = ()
    schedule = None
    if mixture:
        packs_per_step = packs_per_microbatch * microbatches_per_step
        pack_inputs = _pack_sums(packed, pack_offsets)
        schedule, stages = schedule_packs(pool_packs, pack_inputs, mixture, packs_per_step, epoch_seed)
    return Plan(
        index=index,
        shards=shards,
        max_seq_len=max_seq_len,
        long_documents=long_documents,
        overlap=overlap,
        capacity=capacity,
        strategy=strategy,
        buffer=buffer,
        packs_per_microbatch=packs_per_microbatch,
        microbatches_per_step=microbatches_per_step,
        epoch_seed=epoch_seed,
        order=_narrowed(order),
        pack_offsets=_narrowed(pack_offsets),
        pack_targets=_narrowed(_pack_sums(packed - repeated_inputs(start, overlap), pack_offsets)),
        pack_sum_squares=_narrowed(_pack_sums(packed * packed, pack_offsets)),
        snapshots=tuple(snapshots),
        stages=stages,
        schedule=None if schedule is None else _narrowed(schedule),
    )


def replay(plan: Plan, first_pack: int) -> Iterator[list[int]]:
    """The packs from first_pack on as the packer makes them anew, not as they are stored: lists of segment numbers.

    It begins at the nearest snapshot, so that it costs at most SNAPSHOT_PACKS packs to begin anywhere; a strategy that
    cannot stream and a mixture pack everything first.
    """
    if plan.stages:
        order, pack_offsets, _ = _pack_pools(plan.index, plan.segments, plan.capacity, plan.strategy, plan.buffer)
        return iter([packed.tolist() for packed in np.split(order, pack_offsets[1:-1])][first_pack:])
    snapshot = first_pack // SNAPSHOT_PACKS if plan.snapshots else 0
    carry = Carry()
    if plan.snapshots:
        carry = Carry.from_state(plan.snapshots[snapshot], plan.segments.length_of)
    packs = pack_stream(plan.segments.lengths_from(carry.arrived), plan.capacity, plan.strategy, plan.buffer, carry)
    return islice(packs, first_pack - snapshot * SNAPSHOT_PACKS, None)


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


def _record(segments: Segments, capacity: int, strategy: str, buffer: int) -> tuple[I64, I64, list[dict[str, Any]]]:
    """Segment numbers in pack order, where packs start and end in it, and the packer's state every so many packs."""
    carry = Carry()
    stream = pack_stream(segments.lengths_from(0), capacity, strategy, buffer, carry)
    snapshots = [carry.to_state()] if strategy in STREAMING else []
    orders, sizes = [np.zeros(0, dtype=np.int64)], [np.zeros(1, dtype=np.int64)]
    while run := list(islice(stream, SNAPSHOT_PACKS)):
        orders.append(np.fromiter(chain.from_iterable(run), dtype=np.int64))
        sizes.append(np.fromiter(map(len, run), dtype=np.int64, count=len(run)))
        if strategy in STREAMING and len(run) == SNAPSHOT_PACKS:
            snapshots.append(carry.to_state())
    return np.concatenate(orders), np.cumsum(np.concatenate(sizes)), snapshots


def _pack_pools(
    index: DocumentIndex, segments: Segments, capacity: int, strategy: str, buffer: int
) -> tuple[I64, I64, dict[str, range]]:
    """Segment numbers in pack order and pack offsets, pool after pool, and which packs are a pool's."""
    orders, sizes = [np.zeros(0, dtype=np.int64)], [np.zeros(1, dtype=np.int64)]
    pool_packs: dict[str, range] = {}
    num_packs = 0
    for number, pool in enumerate(index.pool_names):
        numbers = segments.numbers_of(np.flatnonzero(index.pools == number))
        _, start, end = segments.locate(numbers)
        order, pack_offsets = pack(end - start, capacity, strategy, buffer)
        orders.append(numbers[order])
        sizes.append(np.diff(pack_offsets))
        pool_packs[pool] = range(num_packs, num_packs + len(pack_offsets) - 1)
        num_packs = pool_packs[pool].stop
    return np.concatenate(orders), np.cumsum(np.concatenate(sizes)), pool_packs


def _narrowed(column: I64) -> npt.NDArray[Any]:
    """As uint32 where every value fits."""
    return column.astype(np.uint32) if int(column.max(initial=0)) < 2**32 else column


def _pack_sums(values: I64, pack_offsets: I64) -> I64:
    return np.diff(offsets_of(values)[pack_offsets])
