"""Segments, packs and microbatches, and the sizes that they may have."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from pipeline_assets.sections.section import MAX_STEP_TOKENS, Length, NonNegative, Positive, Section
from training_io.packing import STRATEGIES

BatchTokens = Annotated[int, Field(gt=0, le=MAX_STEP_TOKENS)]


class Packs(Section):
    """Segments, packs and microbatches.

    A document of more than max_seq_len inputs is cut into segments; where documents stay whole, it is refused, or
    diverted: left out of the plan and counted. A segment may begin with the last inputs of the one before it, to be
    read again and not trained again.
    """

    max_seq_len: Length
    long_documents: Literal["cut", "refuse", "divert"] = "cut"
    overlap: NonNegative = 0
    capacity: Length
    strategy: str
    buffer: Annotated[int, Field(gt=0, le=1_000_000)]  # looked through for each pack
    batch_size: Positive | None = None
    microbatch_tokens: BatchTokens | None = None
    accumulation: Positive = 1
    eval_microbatch_tokens: BatchTokens

    @model_validator(mode="after")
    def _batch_is_stated_once(self) -> "Packs":
        if (self.batch_size is None) == (self.microbatch_tokens is None):
            raise ValueError(
                "expected exactly one of batch_size (packs a microbatch) and microbatch_tokens, found"
                f" batch_size={self.batch_size}, microbatch_tokens={self.microbatch_tokens}; remove or add one"
            )
        if self.capacity < self.max_seq_len:
            raise ValueError(
                f"expected a capacity of at least max_seq_len, {self.max_seq_len:,}, found {self.capacity:,}"
            )
        if self.microbatch_tokens is not None and self.microbatch_tokens < self.capacity:
            raise ValueError(
                f"expected microbatch_tokens of at least the capacity of one pack, {self.capacity:,},"
                f" found {self.microbatch_tokens:,}"
            )
        if self.eval_microbatch_tokens < self.capacity:
            raise ValueError(
                f"expected eval_microbatch_tokens of at least the capacity of one pack, {self.capacity:,},"
                f" found {self.eval_microbatch_tokens:,}"
            )
        if self.strategy not in STRATEGIES:
            raise ValueError(f"expected a strategy among {', '.join(STRATEGIES)}, found {self.strategy!r}")
        return self

    @model_validator(mode="after")
    def _overlap_is_of_cut_documents(self) -> "Packs":
        if self.overlap >= self.max_seq_len:
            raise ValueError(f"expected an overlap below max_seq_len, {self.max_seq_len:,}, found {self.overlap:,}")
        if self.overlap and self.long_documents != "cut":
            raise ValueError(
                f"expected long_documents cut with an overlap of {self.overlap:,}, found {self.long_documents}, which"
                " cuts none; let them be cut, or remove overlap"
            )
        return self

    @model_validator(mode="after")
    def _a_step_is_one_batch(self) -> "Packs":
        tokens = self.packs_per_microbatch("train") * self.accumulation * self.capacity
        if tokens > MAX_STEP_TOKENS:
            raise ValueError(
                f"expected a step of at most {MAX_STEP_TOKENS:,} tokens, found {self.accumulation:,} microbatches of"
                f" {self.packs_per_microbatch('train'):,} packs of {self.capacity:,}, {tokens:,} tokens"
            )
        return self

    def packs_per_microbatch(self, split: str) -> int:
        """Packs in one microbatch: `batch_size`, or as many as fit the tokens of a microbatch of the split."""
        if split != "train":
            return self.eval_microbatch_tokens // self.capacity
        return self.batch_size or (self.microbatch_tokens or 0) // self.capacity
