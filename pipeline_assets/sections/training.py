"""The training run: its layout, its model and how long it goes on."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from pipeline_assets.sections.model import ModelShape
from pipeline_assets.sections.section import MAX_FACTOR, MAX_STEP_TOKENS, Length, NonNegative, Positive, Section
from training_io.limits import MAX_STEPS, MAX_THREADS


class Windows(Section):
    """Fixed windows over the shards instead of packs; without the mask, tokens see the documents before theirs."""

    length: Length
    batch_size: Positive
    accumulation: Positive = 1
    document_mask: bool = False

    @model_validator(mode="after")
    def _rows_are_one_batch(self) -> "Windows":
        if self.batch_size * self.length > MAX_STEP_TOKENS:
            raise ValueError(
                f"expected batch_size × length of at most {MAX_STEP_TOKENS:,} tokens, found {self.batch_size:,} ×"
                f" {self.length:,}"
            )
        return self


class Training(Section):
    """The training run."""

    layout: Literal["packs", "windows"]
    windows: Windows | None = None
    model: ModelShape
    steps: Annotated[int, Field(gt=0, lt=MAX_STEPS + 1)]
    learning_rate: Annotated[float, Field(gt=0, le=MAX_FACTOR)]
    warmup_steps: NonNegative
    weight_decay: Annotated[float, Field(ge=0, le=MAX_FACTOR)] = 0.1
    grad_clip: Annotated[float, Field(gt=0)] = 1.0
    seed: NonNegative
    eval_every: Positive
    eval_microbatches: Positive
    checkpoint_every: Positive
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # auto: bfloat16 on a GPU, float32 on the CPU
    num_threads: Annotated[int, Field(gt=0, le=MAX_THREADS)] = 1  # on the CPU; the bytes depend on it
    attention: Literal["auto", "varlen", "flex", "sdpa"] = "auto"  # auto: varlen on a GPU in bfloat16, else sdpa
    compile: bool = False  # one graph for all microbatches, which then have one shape; not with sdpa
    num_ranks: Annotated[int, Field(gt=0, le=1024)] = 1  # processes that share each step, on a GPU each where there are

    @model_validator(mode="after")
    def _windows_are_described(self) -> "Training":
        if (self.layout == "windows") != (self.windows is not None):
            raise ValueError("expected the section windows exactly when layout is windows")
        if self.warmup_steps > self.steps:
            raise ValueError(f"expected warmup_steps of at most steps, {self.steps:,}, found {self.warmup_steps:,}")
        return self

    @model_validator(mode="after")
    def _ranks_and_graphs_are_possible(self) -> "Training":
        if self.compile and self.attention == "sdpa":
            raise ValueError(
                "expected attention varlen or flex with compile (sdpa takes segments one by one, so that every"
                " microbatch is another graph), found sdpa; change attention, or remove compile"
            )
        if self.windows is not None and self.windows.accumulation < self.num_ranks:
            raise ValueError(
                f"expected num_ranks of at most windows.accumulation, {self.windows.accumulation:,}, so that each rank"
                f" has a microbatch in each step, found {self.num_ranks:,}"
            )
        return self
