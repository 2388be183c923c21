"""What all sections of a recipe share: their base, and the kinds of values that several of them hold."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

MAX_NAMES = 64  # pools, and reference sets: each is one bit of a 64-bit tag
MAX_STEP_TOKENS = 2**31 - 1  # of one flat batch, whose cu_seqlens are int32
MAX_FACTOR = 1e15  # the product of two factors is still a float32

Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,31}$")]
Positive = Annotated[int, Field(gt=0, lt=2**63)]  # manifests are JSON, whose readers hold integers in 64 bits
NonNegative = Annotated[int, Field(ge=0, lt=2**63)]
Length = Annotated[int, Field(ge=2, le=MAX_STEP_TOKENS)]


class Section(BaseModel):
    """Base of all sections: unknown keys are refused, values never change."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
