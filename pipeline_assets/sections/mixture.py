"""What a training run reads of each pool, stage by stage."""

from collections.abc import Mapping
from decimal import Decimal
from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from pipeline_assets.sections.section import MAX_NAMES, Name, Positive, Section
from training_io.errors import RecipeError
from training_io.mixture import token_quotas


class MixtureStage(Section):
    """A version of the mixture: about so many tokens, divided among the pools in proportion to their shares.

    A share is taken as it is written: 61.6 is 616 tenths, not the nearest binary fraction.
    """

    name: Name
    tokens: Positive
    shares: Annotated[Mapping[Name, str], Field(min_length=1, max_length=MAX_NAMES)]

    @field_validator("shares", mode="before")
    @classmethod
    def _numbers_as_written(cls, shares: Any) -> Any:
        if not isinstance(shares, Mapping):
            return shares
        if slips := [pool for pool, share in shares.items() if share is None or not isinstance(pool, str)]:
            raise ValueError(
                f"expected a pool's name and a number each, such as `web: 80`, found {', '.join(map(repr, slips))}:"
                " YAML needs a space behind the colon, and a decimal is written with a point"
            )
        return {
            pool: f"{Decimal(str(share)):f}" if type(share) in (int, float) else share for pool, share in shares.items()
        }

    @model_validator(mode="after")
    def _shares_are_numbers(self) -> "MixtureStage":
        try:
            token_quotas(list(self.shares.values()), self.tokens)
        except RecipeError as error:
            raise ValueError(str(error)) from error
        return self


class Mixture(Section):
    """What a training run reads of each pool, stage by stage; without it every document is read once a pass."""

    stages: Annotated[tuple[MixtureStage, ...], Field(min_length=1, max_length=MAX_NAMES, strict=False)]

    @model_validator(mode="after")
    def _stage_names_are_unique(self) -> "Mixture":
        names = [stage.name for stage in self.stages]
        if len(set(names)) != len(names):
            raise ValueError(f"expected each stage's name once, found {names}; rename one of them")
        return self
