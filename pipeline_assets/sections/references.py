"""The texts that are held out, or that the tokenizer learns from."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from pipeline_assets.sections.section import Name, Positive, Section


class TokenizerSample(Section):
    """A reference set drawn from the source: the texts that the tokenizer is trained on."""

    name: Name
    kind: Literal["tokenizer_sample"]
    documents_per_pool: Positive | None = None
    documents_per_dump: Positive | None = None
    action: Literal["train_only"] = "train_only"

    @model_validator(mode="after")
    def _one_way_of_counting(self) -> "TokenizerSample":
        if (self.documents_per_pool is None) == (self.documents_per_dump is None):
            raise ValueError("expected exactly one of documents_per_pool and documents_per_dump; remove or add one")
        return self


class Overlap(Section):
    """Matching short texts, such as the questions of a benchmark, by the runs of words that a document repeats."""

    ngram: Annotated[int, Field(ge=1, le=64)] = 13  # words in a run
    min_words: Annotated[int, Field(ge=1, le=64)] = 8  # a text shorter than a run is one run of all its words from here
    # A run in more texts is boilerplate and matches none; copies are one text. So many hits of each run are held.
    max_documents: Annotated[int, Field(gt=0, lt=2**31)] = 10

    @model_validator(mode="after")
    def _short_texts_are_shorter_than_a_run(self) -> "Overlap":
        if self.min_words > self.ngram:
            raise ValueError(f"expected min_words of at most ngram, {self.ngram}, found {self.min_words}")
        return self


class ReferenceFile(Section):
    """A reference set from a file .parquet (column `text`), .jsonl (field `text`) or .txt (one text a line).

    The latter two may be compressed (.gz). `universe_documents`: how many documents both the corpus and the set could
    have been drawn from.
    """

    name: Name
    kind: Literal["file"]
    path: str
    action: Literal["train_only", "exclude"]
    overlap: Overlap | None = None
    universe_documents: Positive | None = None
