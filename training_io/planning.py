"""Planning: a split's documents cut into segments, and those packed; or packed once more, to compare.

In: a document index and the packing parameters. Out: a `Plan`, or the packs that it should have. The promise: a plan is
what the streaming packer makes of the same segments in the same order, with its state every SNAPSHOT_PACKS packs, so
that any part of it can be made anew alone. Cost: linear in the segments.
"""

from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Any

import numpy as np
import numpy.typing as npt

from training_io.carry import Carry
from training_io.document_index import DocumentIndex
from training_io.errors import RecipeError
from training_io.mixture import MixtureStage, PlannedStage, schedule_packs
from training_io.packing import STREAMING, pack, pack_stream
from training_io.plan import I64, Plan, ShardsReference, pack_sums
from training_io.segments import Segments, keep_whole, repeated_inputs

SNAPSHOT_PACKS = 4096  # from one snapshot to the next


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
    _refuse_empty_steps(packs_per_microbatch, microbatches_per_step)
    segments = Segments(keep_whole(index.lengths, max_seq_len, long_documents), max_seq_len, overlap)
    if mixture:
        order, pack_offsets, pool_packs = _pack_pools(index, segments, capacity, strategy, buffer)
        snapshots: list[dict[str, Any]] = []
    else:
        order, pack_offsets, snapshots = _record(segments, capacity, strategy, buffer)
    _, start, end = segments.locate(order)
    packed = end - start
    schedule: I64 | None = None
    stages: tuple[PlannedStage, ...] = ()
    if mixture:
        packs_per_step = packs_per_microbatch * microbatches_per_step
        pack_inputs = pack_sums(packed, pack_offsets)
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
        pack_targets=_narrowed(pack_sums(packed - repeated_inputs(start, overlap), pack_offsets)),
        pack_sum_squares=_narrowed(pack_sums(packed * packed, pack_offsets)),
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


def _refuse_empty_steps(packs_per_microbatch: int, microbatches_per_step: int) -> None:
    if packs_per_microbatch < 1 or microbatches_per_step < 1:
        raise RecipeError(
            "packs: expected at least 1 pack a microbatch and 1 microbatch a step, found"
            f" {packs_per_microbatch:,} and {microbatches_per_step:,}. Raise them."
        )


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
