"""What is read of a source: which row groups, in which units, and which of their rows."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from pipeline_assets.sections.section import MAX_FACTOR, Name, Positive, Section

MAX_STEPS_PER_FAN_OUT = 128

SourceNames = Annotated[
    tuple[Annotated[str, Field(min_length=1, max_length=200)], ...],
    Field(min_length=1, max_length=1_000, strict=False),
]


class RowFilters(Section):
    """Which rows of a pool are used, by what the source says of them: a row fails where it says nothing.

    In the order in which a row's first failure is counted; every file of the pool must have the columns looked at.
    """

    dumps: SourceNames | None = None  # of column dump
    languages: SourceNames | None = None  # of column language
    min_language_score: Annotated[float, Field(ge=0, le=1)] | None = None
    min_score: Annotated[float, Field(ge=-MAX_FACTOR, le=MAX_FACTOR)] | None = None
    min_int_score: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None

    @property
    def limits(self) -> dict[str, Any]:
        """The filters that there are, by name."""
        return {name: limit for name in type(self).model_fields if (limit := getattr(self, name)) is not None}

    @model_validator(mode="after")
    def _something_is_filtered(self) -> "RowFilters":
        if not self.limits:
            raise ValueError(
                f"expected at least one of {', '.join(type(self).model_fields)}; add one, or remove the pool"
            )
        return self


class Reading(Section):
    """Which row groups are read: stripes of every n-th row group, in units of about one size; of them, which rows."""

    stripes: Annotated[int, Field(ge=1, le=MAX_STEPS_PER_FAN_OUT)]
    stripes_read: Positive
    unit_megabytes: Annotated[int, Field(gt=0, le=2_000)] = 64  # held in memory whole, its doc_ids in one 2 GiB array
    until: Literal["end", "budgets"] = "end"  # budgets: a unit at a time in source order, until splits.budgets are full
    filters: Mapping[Name, RowFilters] = Field(default_factory=dict)  # by pool

    @model_validator(mode="after")
    def _reads_no_more_than_there_is(self) -> "Reading":
        if self.stripes_read > self.stripes:
            raise ValueError(
                f"expected stripes_read of at most stripes, {self.stripes:,}, found {self.stripes_read:,};"
                " lower stripes_read or raise stripes"
            )
        return self
