"""Mixture: token quotas over pools, in stages, and the order of packs that keeps them.

In: each pool's packs, shares, tokens a stage. Out: which pack is read when. The promise: quotas add up exactly, counted
in tokens and never in documents; after any number of packs of a stage each pool is within one pack of its share; what
was spent before a stage is never touched by it, so that mixtures that part at a step agree up to there. Cost: integer
arithmetic over a handful of pools for each pack.
"""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import count, repeat

import numpy as np
import numpy.typing as npt

from training_io.epochs import epoch_packs
from training_io.errors import RecipeError
from training_io.hashing import derive_seed

I64 = npt.NDArray[np.int64]

MAX_SCHEDULED_PACKS = 2**27  # 550 billion tokens in packs of 4,096: a gigabyte of memory, ten minutes of planning
MAX_SHARE_CHARACTERS = 40


@dataclass(frozen=True, kw_only=True)
class MixtureStage:
    """A version of the mixture: it reads about so many tokens, divided among pools by shares such as "61.6"."""

    name: str
    tokens: int
    shares: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class PlannedStage:
    """A stage as planned: the step and the cumulative tokens at which it takes effect, and each pool's tokens in it."""

    name: str
    first_step: int
    first_token: int
    quotas: Mapping[str, int]


def token_quotas(shares: Sequence[Fraction | str | int], total: int) -> list[int]:
    """Tokens for each pool in proportion to its share, adding up to total: the method of largest remainders.

    Each pool gets the whole part of total x share / sum of shares; what is left goes one by one to the largest
    remainders, ties to the earlier pool. Shares are exact ("61.6", Fraction(1, 3), 7); RecipeError for a float, which
    is not, for one that is no number or negative, for none above zero, and for a negative total.

    >>> token_quotas(["61.6", "7.9", "30.5"], 1_000)
    [616, 79, 305]
    """
    exact = [_exact(share) for share in shares]
    whole = sum(exact, Fraction(0))
    if whole == 0 or total < 0:
        raise RecipeError(
            f"shares: expected at least one above zero and a total of 0 or more, found {list(shares)} and {total:,}."
            " Give each pool its share."
        )
    claims = [total * share / whole for share in exact]
    quotas = [claim.numerator // claim.denominator for claim in claims]
    by_remainder = sorted(range(len(claims)), key=lambda pool: (quotas[pool] - claims[pool], pool))
    for pool in by_remainder[: total - sum(quotas)]:
        quotas[pool] += 1
    return quotas


def schedule_packs(
    pool_packs: Mapping[str, range],
    pack_tokens: npt.NDArray[np.integer],
    stages: Sequence[MixtureStage],
    packs_per_step: int,
    seed: int,
) -> tuple[I64, tuple[PlannedStage, ...]]:
    """Which pack is read when, int64[k], and what each stage came to.

    A stage takes effect at a step's start and ends with the first step that spends its tokens; its quotas divide what
    the stages up to it have in all, less what was spent. A pool's packs are read by a keyed permutation, another in
    each pass, so that the segments of one long document do not follow each other. RecipeError for a pool without packs,
    for a stage that the steps before it already spent, and for more than MAX_SCHEDULED_PACKS.
    """
    largest = max(
        (int(pack_tokens[packs.start : packs.stop].max()) for packs in pool_packs.values() if packs), default=0
    )
    readers = {pool: _passes(packs, derive_seed(seed, f"pool {pool}")) for pool, packs in pool_packs.items()}
    schedule = array("q")
    planned: list[PlannedStage] = []
    budget = spent = 0
    for stage in stages:
        budget += stage.tokens
        quotas = _stage_quotas(stage, budget - spent, pool_packs)
        first_step = len(schedule) // packs_per_step
        planned.append(PlannedStage(name=stage.name, first_step=first_step, first_token=spent, quotas=quotas))
        used = dict.fromkeys(quotas, 0)
        _refuse_too_many(stage, len(schedule) + (budget - spent) // largest)
        while spent < budget:
            _refuse_too_many(stage, len(schedule))
            for _ in range(packs_per_step):
                pool = next_pool(quotas, used, largest)
                pack = next(readers[pool])
                schedule.append(pack)
                used[pool] += int(pack_tokens[pack])
                spent += int(pack_tokens[pack])
    return np.array(schedule, dtype=np.int64), tuple(planned)


def _refuse_too_many(stage: MixtureStage, num_packs: int) -> None:
    if num_packs > MAX_SCHEDULED_PACKS:
        raise RecipeError(
            f"mixture stage {stage.name}: expected a schedule of at most {MAX_SCHEDULED_PACKS:,} packs, found"
            f" {num_packs:,} or more for its {stage.tokens:,} tokens. Lower its tokens, or raise packs.capacity; packs"
            " that are nearly empty, of a pool of a few short documents, count like full ones."
        )


def next_pool(quotas: Mapping[str, int], used: Mapping[str, int], largest: int) -> str:
    """Of the pools that are below their quota of the tokens used and a pack more, the one that would first be a pack
    behind; ties to the earlier pool. largest: the most tokens that one pack has.

    With n tokens used in all and q a pool's part of all quotas, it may be read while used < q (n + largest), and would
    be a pack behind at n = (used + largest) / q. So read, no pool is ever a largest pack away from q n: never ahead,
    since it is read only below q (n + largest); never behind, since packs with earlier deadlines since it could last be
    read would have to hold more tokens than were used (Tijdeman, The chairman assignment problem, 1980, with packs of
    unequal size). Reading the pool that is furthest below its quota keeps this only for two pools.

    >>> next_pool({"prose": 3, "code": 1}, {"prose": 10, "code": 0}, 10)
    'prose'
    """
    whole, ahead = sum(quotas.values()), sum(used.values()) + largest
    best, best_quota = "", 0
    for pool, quota in quotas.items():
        may_be_read = used[pool] * whole < quota * ahead
        if may_be_read and (not best or (used[pool] + largest) * best_quota < (used[best] + largest) * quota):
            best, best_quota = pool, quota
    return best


def _stage_quotas(stage: MixtureStage, tokens: int, pool_packs: Mapping[str, range]) -> dict[str, int]:
    """Tokens of each pool that the stage reads; RecipeError where there are none to divide or to read."""
    if tokens <= 0:
        raise RecipeError(
            f"mixture stage {stage.name}: expected tokens left for it, found that the steps before it spent"
            f" {-tokens:,} more than all stages up to it have. A stage ends with a whole step; raise its tokens."
        )
    quotas = dict(zip(stage.shares, token_quotas(list(stage.shares.values()), tokens), strict=True))
    for pool, quota in quotas.items():
        if quota and not pool_packs.get(pool):
            raise RecipeError(
                f"mixture stage {stage.name}: expected documents in pool {pool} for its {quota:,} tokens, found none in"
                " the split that is planned, since diverted ones are not. Give the pool documents, or take it out of"
                " the stage's shares."
            )
        if not quota and _exact(stage.shares[pool]):
            raise RecipeError(
                f"mixture stage {stage.name}: expected a token or more for pool {pool}, found none of {tokens:,} for"
                f" its share {stage.shares[pool]}. Raise the share or the stage's tokens, or take the pool out."
            )
    return {pool: quota for pool, quota in quotas.items() if quota}


def _passes(packs: range, seed: int) -> Iterator[int]:
    """A pool's packs, pass after pass without end, permuted."""
    if len(packs) == 1:
        yield from repeat(packs.start)
    positions = np.arange(len(packs), dtype=np.int64)
    for number in count(1):  # epoch 0 is the order as it stands
        yield from (packs.start + epoch_packs(positions, len(packs), seed, number)).tolist()


def _exact(share: Fraction | str | int) -> Fraction:
    if not isinstance(share, Fraction | str | int):
        raise RecipeError(
            f"share: expected an exact number such as '61.6', found the float {share!r}. Put it in quotes."
        )
    if isinstance(share, str) and (len(share) > MAX_SHARE_CHARACTERS or "e" in share.lower()):
        raise RecipeError(
            f"share: expected a number such as '61.6' of at most {MAX_SHARE_CHARACTERS} characters, without an"
            f" exponent, found {share[:MAX_SHARE_CHARACTERS]!r}. Correct the share."
        )
    try:
        exact = Fraction(share)
    except (ValueError, ZeroDivisionError) as error:
        raise RecipeError(f"share: expected a number such as '61.6', found {share!r}. Correct the share.") from error
    if exact < 0:
        raise RecipeError(f"share: expected 0 or more, found {share}. Correct the share.")
    return exact
