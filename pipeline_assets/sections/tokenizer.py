"""The tokenizer, given or trained, and what it is compared with."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from pipeline_assets.sections.model import ModelShape
from pipeline_assets.sections.section import Name, Section
from pipeline_assets.sections.source import Repository

MAX_CANDIDATES = 7  # with the chosen tokenizer, as many as a picture has colours
CHOSEN = "chosen"  # the recipe's tokenizer among the candidates

Commit = Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")]


class TokenizerFile(Section):
    """A given tokenizer.json: a local file (or .json.gz), else the one of a Hub repository at a commit.

    `fingerprint` is what it must have.
    """

    kind: Literal["file"]
    path: str | None = None
    repository: Repository | None = None
    revision: Commit | None = None
    fingerprint: str | None = None
    eos: Annotated[str, Field(min_length=1)]

    @model_validator(mode="after")
    def _file_is_named(self) -> "TokenizerFile":
        if self.path is None and self.repository is None:
            raise ValueError("expected a path or a repository of the tokenizer; name one")
        if (self.repository is None) != (self.revision is None):
            raise ValueError(
                "expected a repository and its revision, a commit of 40 hexadecimal digits, together, found"
                f" repository={self.repository}, revision={self.revision}; add or remove one"
            )
        return self


class TokenizerCandidate(TokenizerFile):
    """A further tokenizer to compare with the chosen one."""

    kind: Literal["file"] = "file"
    name: Name


class TrainedTokenizer(Section):
    """A byte-level BPE trained on a reference set of kind `tokenizer_sample`."""

    kind: Literal["trained"]
    sample: Name
    vocab_size: Annotated[int, Field(gt=256, le=10_000_000)]  # the trainer makes room for all of them at once
    eos: Annotated[str, Field(min_length=1)]


class TokenizerReport(Section):
    """What the chosen tokenizer is compared with, and how many bytes a token may stand for in a pool.

    `model` is what a vocabulary's table is a part of; without one, it is that of the training run.
    """

    candidates: Annotated[tuple[TokenizerCandidate, ...], Field(max_length=MAX_CANDIDATES, strict=False)] = ()
    documents_per_pool: Annotated[int, Field(gt=0, le=1_000_000)] = 500
    model: ModelShape | None = None
    min_bytes_a_token: Annotated[float, Field(gt=0)] = 2.0  # below: letter by letter, as GPT-2 takes Chinese
    max_bytes_a_token: Annotated[float, Field(gt=0)] = 8.0  # above: whole runs of what repeats, no prose or code

    @model_validator(mode="after")
    def _names_and_limits_differ(self) -> "TokenizerReport":
        names = [CHOSEN, *(candidate.name for candidate in self.candidates)]
        if len(set(names)) != len(names):
            raise ValueError(
                f"expected each candidate's name once and none called {CHOSEN}, found {names[1:]}; rename one of them"
            )
        if self.min_bytes_a_token >= self.max_bytes_a_token:
            raise ValueError(
                f"expected min_bytes_a_token below max_bytes_a_token, found {self.min_bytes_a_token:g} and"
                f" {self.max_bytes_a_token:g}"
            )
        return self
