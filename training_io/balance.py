"""Balance: which ranks train on which packs of a step.

In: inputs and sums of squared lengths of a step's packs. Out: the packs of each rank. The promise: every pack of the
step goes to exactly one rank, ranks differ by at most one pack, and both sums are about even, since the slowest rank
is what a step takes. Cost: one sort of the packs and one of the ranks for each pack a rank gets.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from training_io.places import spread_places
from training_io.plan import Plan

MAX_STEPS = 1_000

I64 = npt.NDArray[np.int64]
AnyInts = npt.NDArray[np.integer]


def share_packs(inputs: AnyInts, sum_squares: AnyInts, num_ranks: int) -> list[I64]:
    """Positions of each rank's packs within the step, in step order.

    The costliest packs are dealt first, a round at a time: one to each rank, the costliest to the rank that has the
    least so far (ties to the lower position and rank). A pack's cost is its share of the step's inputs plus its share
    of the step's squares.

    >>> [share.tolist() for share in share_packs(np.array([4, 4, 4, 4]), np.array([16, 8, 10, 4]), 2)]
    [[0, 3], [1, 2]]
    """
    if num_ranks == 1:
        return [np.arange(len(inputs), dtype=np.int64)]
    costs = _shares(inputs) + _shares(sum_squares)
    dealt = np.argsort(-costs, kind="stable")
    loads = np.zeros(num_ranks)
    ranks = np.empty(len(dealt), dtype=np.int64)
    for first in range(0, len(dealt), num_ranks):
        packs = dealt[first : first + num_ranks]
        lightest = np.argsort(loads, kind="stable")[: len(packs)]
        ranks[packs] = lightest
        loads[lightest] += costs[packs]
    return [np.flatnonzero(ranks == rank) for rank in range(num_ranks)]


def deal_in_turn(num_packs: int, num_ranks: int) -> list[I64]:
    """Round robin: every num_ranks-th pack of the step, what balance is compared with."""
    return [np.arange(rank, num_packs, num_ranks, dtype=np.int64) for rank in range(num_ranks)]


@dataclass(frozen=True, kw_only=True)
class Overhead:
    """How much more than the mean the fullest rank has, 0 for even ranks, of a step's inputs and squared lengths."""

    inputs: float
    sum_squares: float


def overhead_of(shares: Sequence[I64], inputs: AnyInts, sum_squares: AnyInts) -> Overhead:
    """The overhead of one way of sharing a step; 0 for a step without packs."""
    return Overhead(inputs=_excess(shares, inputs), sum_squares=_excess(shares, sum_squares))


def mean_overheads(plan: Plan, num_ranks: int) -> dict[str, float]:
    """Means over steps of the first epoch, balanced and dealt in turn: what a step waits for its fullest rank.

    Of more than MAX_STEPS steps, so many evenly spread ones.
    """
    rows = []
    for step in spread_places(plan.num_steps, MAX_STEPS):
        packs = plan.step_packs(0, step)
        inputs, sum_squares = plan.pack_inputs(packs), plan.pack_sum_squares[packs]
        balanced = overhead_of(share_packs(inputs, sum_squares, num_ranks), inputs, sum_squares)
        in_turn = overhead_of(deal_in_turn(len(packs), num_ranks), inputs, sum_squares)
        rows.append((balanced.inputs, balanced.sum_squares, in_turn.inputs, in_turn.sum_squares))
    names = ("inputs", "squares", "inputs_in_turn", "squares_in_turn")
    means = np.array(rows).mean(axis=0).tolist() if rows else [0.0] * len(names)
    return dict(zip(names, means, strict=True))


def _shares(values: AnyInts) -> npt.NDArray[np.float64]:
    """Of their sum; exactly rounded divisions of exact integers, so the same on every machine."""
    return values / max(int(values.sum()), 1)


def _excess(shares: Sequence[I64], values: AnyInts) -> float:
    total = int(values.sum())
    return max(int(values[share].sum()) for share in shares) * len(shares) / total - 1 if total else 0.0
