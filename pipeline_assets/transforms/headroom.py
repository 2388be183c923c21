"""Headroom: the tokens that there are against the tokens that a plan reads, before anything is trained.

In: numbers of tokens. Out: how many passes over them that is, and what is read more than once. The promise: whole
tokens are compared as whole numbers. Cost: none.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

from training_io.errors import RecipeError


@dataclass(frozen=True, kw_only=True)
class Headroom:
    """Unique tokens and the tokens that are to be read, of a run or of one of its pools.

    >>> run = Headroom(available=2_469_151_566, needed=1_761_607_680)
    >>> round(run.ratio, 2), run.num_repeated
    (1.4, 0)
    """

    available: int
    needed: int

    @property
    def ratio(self) -> float:
        """Available over needed: at 1 and above nothing repeats."""
        return self.available / self.needed if self.needed else inf

    @property
    def passes(self) -> float:
        """How often an average token is read: needed over available."""
        if not self.needed:
            return 0.0
        return self.needed / self.available if self.available else inf

    @property
    def num_repeated(self) -> int:
        """Tokens that are read beyond the first pass."""
        return max(0, self.needed - self.available)


def pool_headroom(inventory: Mapping[str, int], planned: Mapping[str, int]) -> dict[str, Headroom]:
    """Headroom of each planned pool, from its unique tokens and its cumulative tokens in the whole plan.

    RecipeError for a pool that is planned but has no tokens.

    >>> pool_headroom({"chinese": 500}, {"chinese": 1_400})["chinese"].passes
    2.8
    """
    empty = [name for name, tokens in planned.items() if tokens and not inventory.get(name)]
    if empty:
        raise RecipeError(
            f"pool {empty[0]}: expected unique tokens for the {planned[empty[0]]:,} that the plan reads, found none."
            " Give the pool documents, or take it out of the mixture."
        )
    return {name: Headroom(available=inventory.get(name, 0), needed=tokens) for name, tokens in planned.items()}
