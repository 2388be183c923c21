"""The law of a plan's snapshots, recounted.

In: a plan as read from disk. Out: a list of violations, empty where it holds; a violation is never raised. What a
snapshot holds is counted on the stored packs; what the packer makes of it is compared with them. Cost: linear in the
segments, and packing for a few packs a snapshot and for all that follow the last one.
"""

from collections.abc import Sequence
from itertools import chain, islice, zip_longest

import numpy as np

from training_io.invariants import MAX_EXAMPLES, order_is_permutation, packs_within_capacity
from training_io.packing import STREAMING
from training_io.plan import Plan
from training_io.planning import SNAPSHOT_PACKS, replay

REPLAYED_PACKS = 16  # from each snapshot but the last


def snapshots_give_the_packs(plan: Plan) -> list[str]:
    """Each snapshot holds the segments that were read and are in no pack before it, and the packer goes on from it
    with the stored packs.
    """
    streams = plan.strategy in STREAMING and not plan.stages
    num_expected = 1 + plan.num_packs // SNAPSHOT_PACKS if streams else 0
    if len(plan.snapshots) != num_expected:
        return [
            f"split {plan.split}: expected {num_expected:,} snapshots of {plan.num_packs:,} packs by {plan.strategy},"
            f" found {len(plan.snapshots):,}"
        ]
    if order_is_permutation(plan) or packs_within_capacity(plan):
        return [f"split {plan.split}: snapshots not replayed: order or packs are broken"]
    return (_held_otherwise(plan) or _replayed_otherwise(plan))[:MAX_EXAMPLES]


def _held_otherwise(plan: Plan) -> list[str]:
    place = np.empty(plan.num_segments, dtype=np.int64)  # of each segment in the order of the packs
    place[plan.order] = np.arange(plan.num_segments)
    held, num_read = np.zeros(0, dtype=np.int64), 0
    violations: list[str] = []
    for number, snapshot in enumerate(plan.snapshots):
        where, arrived = f"split {plan.split}: snapshot {number:,}", int(snapshot["arrived"])
        if not num_read <= arrived <= plan.num_segments:
            return [*violations, f"{where}: expected {num_read:,} to {plan.num_segments:,} read, found {arrived:,}"]
        read = np.concatenate([held, np.arange(num_read, arrived, dtype=np.int64)])
        held, num_read = read[place[read] >= plan.pack_offsets[number * SNAPSHOT_PACKS]], arrived
        found = sorted([*snapshot["waiting"], *chain.from_iterable(snapshot["packs"])])
        if found != held.tolist():
            first = min({*found} ^ {*held.tolist()}, default=None)
            violations.append(
                f"{where}: expected the {len(held):,} segments that were read and are in no pack before it, found"
                f" {len(found):,}; the first that differs is {first}"
            )
    return violations


def _replayed_otherwise(plan: Plan) -> list[str]:
    violations: list[str] = []
    for number in range(len(plan.snapshots)):
        first = number * SNAPSHOT_PACKS
        is_last = number == len(plan.snapshots) - 1
        end = plan.num_packs if is_last else first + REPLAYED_PACKS
        made = list(islice(replay(plan, first), None if is_last else REPLAYED_PACKS))
        stored = [plan.segments_of(np.array([pack])).tolist() for pack in range(first, end)]
        violations += [
            f"split {plan.split}: pack {first + at:,}, replayed from snapshot {number:,}: expected segments"
            f" {_shown(expected)}, as stored, found {_shown(found)}"
            for at, (expected, found) in enumerate(zip_longest(stored, made, fillvalue=()))
            if expected != found
        ][:1]  # those after it follow from it
    return violations


def _shown(numbers: Sequence[int]) -> str:
    """The first segments of a pack, and how many there are."""
    return f"{', '.join(map(str, numbers[:8]))} ({len(numbers):,} in all)"
