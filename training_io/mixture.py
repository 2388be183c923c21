"""Mixture: token quotas over pools.

In: shares and a number of tokens. Out: whole tokens for each pool. The promise: the quotas add up exactly, counted in
tokens and never in documents. Cost: exact rational arithmetic over a handful of pools.
"""

from collections.abc import Sequence
from fractions import Fraction

from training_io.errors import RecipeError


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


def _exact(share: Fraction | str | int) -> Fraction:
    if not isinstance(share, Fraction | str | int):
        raise RecipeError(
            f"share: expected an exact number such as '61.6', found the float {share!r}. Put it in quotes."
        )
    try:
        exact = Fraction(share)
    except (ValueError, ZeroDivisionError) as error:
        raise RecipeError(f"share: expected a number such as '61.6', found {share!r}. Correct the share.") from error
    if exact < 0:
        raise RecipeError(f"share: expected 0 or more, found {share}. Correct the share.")
    return exact
