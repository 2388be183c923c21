"""Which documents train, validate and test, and how many tokens of each are enough."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, model_validator

from pipeline_assets.sections.section import NonNegative, Positive, Section

Share = Annotated[float, Field(ge=0, lt=1)]


class FractionSplit(Section):
    """A document is validation iff its keyed hash is below the fraction."""

    policy: Literal["fraction"]
    seed: NonNegative
    validation_fraction: Share
    test_fraction: Share = 0.0

    @model_validator(mode="after")
    def _something_is_left_to_train_on(self) -> "FractionSplit":
        if self.validation_fraction + self.test_fraction >= 1:
            raise ValueError(
                "expected validation_fraction + test_fraction below 1,"
                f" found {self.validation_fraction + self.test_fraction:g}"
            )
        return self


class BudgetSplit(Section):
    """The first documents in order are validation until its token budget is full (then test); the rest train."""

    policy: Literal["budget"]
    validation_tokens: NonNegative
    test_tokens: NonNegative = 0


class Splits(Section):
    """Floor, order, policy and token budgets of the split plan."""

    order: Literal["shuffled", "source"]
    min_tokens: NonNegative = 0
    assignment: Annotated[FractionSplit | BudgetSplit, Field(discriminator="policy")]
    budgets: Mapping[Literal["train", "validation", "test"], Positive] = Field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """The splits: `test` only where the assignment asks for one."""
        has_test = getattr(self.assignment, "test_fraction", 0) or getattr(self.assignment, "test_tokens", 0)
        return ("train", "validation", "test") if has_test else ("train", "validation")

    @property
    def budgets_to_fill(self) -> dict[str, int]:
        """Tokens by split that are enough: the budgets, or what an assignment by budget asks for where that is less."""
        assigned = self.assignment.model_dump(include={"validation_tokens", "test_tokens"})
        asked = {name.removesuffix("_tokens"): tokens for name, tokens in assigned.items() if tokens}
        filled = asked | {name: min(tokens, asked.get(name, tokens)) for name, tokens in self.budgets.items()}
        return {name: tokens for name, tokens in filled.items() if name in self.given}

    @property
    def given(self) -> tuple[str, ...]:
        """The splits that the assignment gives documents to: all but those of share 0."""
        shares = self.assignment.model_dump(exclude={"policy", "seed"})
        shared = {name.split("_")[0] for name, share in shares.items() if share}
        return tuple(name for name in self.names if name == "train" or name in shared)
