"""Laws of a mixture's schedule, recounted by a second route.

In: a plan as read from disk. Out: a list of violations for each law, empty where it holds; a violation is never
raised. No law calls the code that it judges: pools and tokens are counted on documents and positions. Cost: a pass over
the schedule for each pool, and the counting of the packs, which several laws may share.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from training_io.invariants import MAX_EXAMPLES, order_is_permutation, packs_within_capacity
from training_io.plan import Plan

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class CountedPacks:
    """Pool and inputs of each pack, int64[p] both; or why packs cannot be counted."""

    pools: I64
    tokens: I64
    fault: str = ""


def count_packs(plan: Plan) -> CountedPacks:
    """Count a mixture's packs by their segments' documents and positions."""
    nothing = np.zeros(0, dtype=np.int64)
    if order_is_permutation(plan) or packs_within_capacity(plan):
        return CountedPacks(pools=nothing, tokens=nothing, fault="order or packs are broken")
    document, start, end = plan.locate(plan.order)
    starts = plan.pack_offsets[:-1].astype(np.int64)
    pools = plan.index.pools[document].astype(np.int64)
    if (np.maximum.reduceat(pools, starts) != np.minimum.reduceat(pools, starts)).any():
        return CountedPacks(pools=nothing, tokens=nothing, fault="a pack holds several pools")
    return CountedPacks(pools=pools[starts], tokens=np.add.reduceat(end - start, starts))


def every_window_keeps_its_quotas(plan: Plan, counted: CountedPacks | None = None) -> list[str]:
    """From a stage's start to any pack of it, each pool's tokens are within one pack of its part of all tokens so far.

    A stage starts where it says, in steps and in tokens, and ends with the step that spends its quotas; a pool without
    a quota is not read. `counted` is what count_packs gave, where that was asked before.
    """
    if plan.schedule is None:
        return []
    packs = counted or count_packs(plan)
    if packs.fault:
        return [f"split {plan.split}: quotas not recounted: {packs.fault}"]
    if malformed := _malformed_stages(plan):
        return malformed
    largest = int(packs.tokens.max(initial=0))
    violations = _ends_are_wrong(plan, packs.tokens)
    for stage, pool, used, total, quota, whole in _shares(plan, packs):
        errors = _errors(used, total, quota, whole)
        for at in np.flatnonzero(errors > largest - 1)[:MAX_EXAMPLES].tolist():
            exact = abs(Fraction(quota * int(total[at]), whole) - int(used[at]))
            if exact > largest or (quota == 0 and used[at]):
                violations.append(
                    f"split {plan.split}: stage {stage}, pack {at:,} of it: expected {pool} within {largest:,} tokens"
                    f" of {quota / whole:.2%} of {int(total[at]):,}, found {int(used[at]):,}, {float(exact):,.0f} off"
                )
    return violations[: 2 * MAX_EXAMPLES]


def largest_quota_errors(plan: Plan, counted: CountedPacks | None = None) -> dict[str, float]:
    """For each stage how far any pool ever is from its part of the stage's tokens so far, in tokens."""
    if plan.schedule is None:
        return {}
    packs = counted or count_packs(plan)
    if packs.fault or _malformed_stages(plan):
        return {}
    largest: dict[str, float] = {}
    for stage, _, used, total, quota, whole in _shares(plan, packs):
        found = float(_errors(used, total, quota, whole).max(initial=0.0))
        largest[stage] = max(largest.get(stage, 0.0), found)
    return largest


def pools_are_read_in_passes(plan: Plan, counted: CountedPacks | None = None) -> list[str]:
    """A pool's packs come once each before any of them comes again, so that no document is ever a pass ahead."""
    if plan.schedule is None:
        return []
    packs = counted or count_packs(plan)
    if packs.fault:
        return [f"split {plan.split}: passes not recounted: {packs.fault}"]
    schedule = np.asarray(plan.schedule, dtype=np.int64)
    violations = []
    for number, pool in enumerate(plan.index.pool_names):
        num_packs = int((packs.pools == number).sum())
        read = schedule[packs.pools[schedule] == number]
        for first in range(0, len(read), max(num_packs, 1)):
            numbers, times = np.unique(read[first : first + num_packs], return_counts=True)
            violations += [
                f"split {plan.split}: pool {pool}, pass {first // num_packs + 1:,}: expected pack {pack:,} at most"
                f" once, found {count:,} times"
                for pack, count in zip(numbers[times > 1].tolist(), times[times > 1].tolist(), strict=True)
            ][:MAX_EXAMPLES]
    return violations[:MAX_EXAMPLES]


def _malformed_stages(plan: Plan) -> list[str]:
    """What keeps stages from being counted: names, first steps, quotas of unknown pools or of no tokens."""
    names = [stage.name for stage in plan.stages]
    firsts = [stage.first_step for stage in plan.stages]
    violations = []
    if len(set(names)) != len(names):
        violations.append(f"split {plan.split}: expected each stage's name once, found {', '.join(names)}")
    if firsts[:1] != [0] or any(a >= b for a, b in pairwise([*firsts, plan.num_steps])):
        violations.append(f"split {plan.split}: expected stages to start one after another from step 0, found {firsts}")
    for stage in plan.stages:
        wrong = {
            pool: quota
            for pool, quota in stage.quotas.items()
            if pool not in plan.index.pool_names or type(quota) is not int or quota < 1
        }
        if wrong or not stage.quotas:
            violations.append(
                f"split {plan.split}: stage {stage.name}: expected tokens of the pools"
                f" {', '.join(plan.index.pool_names)}, found {wrong or 'none'}"
            )
    return violations


def _ends_are_wrong(plan: Plan, tokens: I64) -> list[str]:
    """Stages that do not start at the token they say, or end before or after the step that spends their quotas."""
    assert plan.schedule is not None
    size = plan.packs_per_step
    read = np.concatenate([[0], np.cumsum(tokens[plan.schedule])])
    ends = [*(stage.first_step for stage in plan.stages[1:]), plan.num_steps]
    violations = []
    if len(plan.schedule) % size:
        violations.append(f"split {plan.split}: expected whole steps of {size:,} packs, found {len(plan.schedule):,}")
    for stage, end in zip(plan.stages, ends, strict=True):
        if int(read[stage.first_step * size]) != stage.first_token:
            violations.append(
                f"split {plan.split}: stage {stage.name}: expected to start at token"
                f" {int(read[stage.first_step * size]):,}, where step {stage.first_step:,} does, found"
                f" {stage.first_token:,}"
            )
        whole = sum(stage.quotas.values())
        before, after = (int(read[min(at * size, len(plan.schedule))]) - stage.first_token for at in (end - 1, end))
        if not before < whole <= after:
            violations.append(
                f"split {plan.split}: stage {stage.name}: expected to end with the step that spends its {whole:,}"
                f" tokens, found {before:,} before its last step and {after:,} after it"
            )
    return violations


def _shares(plan: Plan, counted: CountedPacks) -> Iterator[tuple[str, str, I64, I64, int, int]]:
    """For each stage and pool: tokens used of the pool and of all after each pack, the pool's quota and all quotas."""
    assert plan.schedule is not None
    firsts = [stage.first_step * plan.packs_per_step for stage in plan.stages]
    for stage, packs in zip(plan.stages, np.split(plan.schedule, firsts[1:]), strict=True):
        total = np.cumsum(counted.tokens[packs])
        for number, pool in enumerate(plan.index.pool_names):
            used = np.cumsum(np.where(counted.pools[packs] == number, counted.tokens[packs], 0))
            yield stage.name, pool, used, total, stage.quotas.get(pool, 0), sum(stage.quotas.values())


def _errors(used: I64, total: I64, quota: int, whole: int) -> npt.NDArray[np.float64]:
    """How far a pool is from its part of all tokens, in tokens, to well below one token."""
    share = np.longdouble(quota) / np.longdouble(whole)
    return np.abs(used.astype(np.longdouble) - total * share).astype(np.float64)
