"""Which texts count as the same document, and which of them stays."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from pipeline_assets.sections.section import Section

MAX_SIGNATURE = 4096  # values: 16 KiB a document


class Dedup(Section):
    """Which texts count as the same document."""

    mode: Literal["near", "exact", "off"]
    scope: Literal["global", "dump"] = "global"  # dump: near-copies are removed within each crawl only, as FineWeb does
    keep: Literal["pool_priority", "random", "longest", "highest_score"] = "pool_priority"
    verify_jaccard: Annotated[float, Field(gt=0, le=1)] | None = None  # edges below it do not count
    ngram: Annotated[int, Field(gt=0, le=64)] = 5
    num_bands: Annotated[int, Field(gt=0, le=1024)] = 14
    rows_per_band: Annotated[int, Field(gt=0, le=1024)] = 8
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 1
    num_buckets: Annotated[int, Field(gt=0, le=65_536)] = 1  # each is a folder, numbered in five digits

    @model_validator(mode="after")
    def _buckets_are_top_bits(self) -> "Dedup":
        if self.num_buckets & (self.num_buckets - 1):
            raise ValueError(f"expected num_buckets to be a power of two, found {self.num_buckets:,}")
        return self

    @model_validator(mode="after")
    def _signatures_are_small(self) -> "Dedup":
        values = self.num_bands * self.rows_per_band
        if values > MAX_SIGNATURE:
            raise ValueError(
                f"expected num_bands × rows_per_band of at most {MAX_SIGNATURE:,}, the values of a signature, found"
                f" {self.num_bands:,} × {self.rows_per_band:,} = {values:,}"
            )
        return self

    @model_validator(mode="after")
    def _options_have_an_effect(self) -> "Dedup":
        if self.mode != "near" and self.scope == "dump":
            raise ValueError(f"expected mode near with scope dump, found mode {self.mode}; change one of the two")
        if self.mode == "exact" and self.verify_jaccard is not None:
            raise ValueError("expected no verify_jaccard in mode exact, where no near-copy is removed; take it out")
        if self.mode == "off" and self.keep != "pool_priority":
            raise ValueError(
                f"expected no keep rule in mode off, where every copy stays, found {self.keep}; take it out"
            )
        return self

    @property
    def splits_by_cluster(self) -> bool:
        """Whether near-copies stay, so that the cluster is what is assigned to a split."""
        return self.mode == "off" or self.scope == "dump"
