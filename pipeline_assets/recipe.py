"""The recipe: what to build, as one typed and validated YAML file.

In: a built-in name or a path. Out: a frozen `Recipe`. The promise: an unknown key, a wrong type or an impossible
number is refused with what was expected, what was found, and where; nothing has a silent default that changes data.
"""

import os
from collections.abc import Mapping
from decimal import Decimal
from functools import lru_cache
from importlib import resources as package_resources
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import SplitResult, urlsplit

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from resources import package_corpus
from resources.listings import names_of_urls
from training_io.errors import RecipeError
from training_io.hashing import identity_of
from training_io.limits import MAX_LAYERS, MAX_STEPS, MAX_THREADS, MAX_WIDTH
from training_io.mixture import token_quotas
from training_io.model_presets import MODEL_PRESETS
from training_io.packing import STRATEGIES

BUILT_IN = ("sample", "fineweb-lab", "fineweb-edu", "mixture")
DEFAULT_RECIPE = "sample"
MAX_STEPS_PER_FAN_OUT = 128
MAX_NAMES = 64  # pools, and reference sets: each is one bit of a 64-bit tag
MAX_SIGNATURE = 4096  # values: 16 KiB a document
MAX_STEP_TOKENS = 2**31 - 1  # of one flat batch, whose cu_seqlens are int32
MAX_CANDIDATES = 7  # with the chosen tokenizer, as many as a picture has colours
CHOSEN = "chosen"  # the recipe's tokenizer among the candidates
SHOWN_CHARACTERS = 200  # of a wrong value

Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,31}$")]
Positive = Annotated[int, Field(gt=0, lt=2**63)]  # manifests are JSON, whose readers hold integers in 64 bits
NonNegative = Annotated[int, Field(ge=0, lt=2**63)]
Length = Annotated[int, Field(ge=2, le=MAX_STEP_TOKENS)]
BatchTokens = Annotated[int, Field(gt=0, le=MAX_STEP_TOKENS)]
Width = Annotated[int, Field(gt=0, le=MAX_WIDTH)]
Share = Annotated[float, Field(ge=0, lt=1)]
Repository = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?$")]
Commit = Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")]
Revision = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,199}$")]  # a commit, a tag or a branch
MAX_URLS = 10_000
ALL_PARQUET = "**/*.parquet"
MAX_FACTOR = 1e15  # the product of two factors is still a float32


class Section(BaseModel):
    """Base of all sections: unknown keys are refused, values never change."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class LocalPool(Section):
    """Parquet files of one pool in a local folder."""

    name: Name
    path: str
    glob: str = ALL_PARQUET


class PackagesSource(Section):
    """The text of corpusmill's installed runtime requirements, written as Parquet first: pools `prose` and `code`."""

    kind: Literal["packages"]
    max_prose_bytes: Positive
    max_code_bytes: Positive


class LocalSource(Section):
    """Local folders of Parquet files, one pool each; the order of the pools is their priority."""

    kind: Literal["local"]
    pools: Annotated[tuple[LocalPool, ...], Field(min_length=1, max_length=MAX_NAMES, strict=False)]

    @model_validator(mode="after")
    def _pool_names_are_unique(self) -> "LocalSource":
        names = [pool.name for pool in self.pools]
        if len(set(names)) != len(names):
            raise ValueError(f"expected each pool name once, found {names}; rename one of them")
        return self


class FolderSource(Section):
    """One pool in a local folder of Parquet files."""

    kind: Literal["folder"]
    pool: Name
    path: str
    glob: str = ALL_PARQUET


class HubSource(Section):
    """One pool in a data set of the Hugging Face Hub, at a commit or at the one that a tag or a branch names now.

    `branch` is where a commit was taken from: what it has come to since is reported, and never read. `local_path` holds
    the pool's files: all of them, and the Hub is not asked; or some, and what is whole there, by size and SHA-256, is
    not fetched.
    """

    kind: Literal["hub"]
    repository: Repository
    path: str = ""
    glob: str = ALL_PARQUET
    revision: Revision
    branch: Revision = "main"  # the one that every repository of the Hub has
    pool: Name
    local_path: str | None = None
    local_copy: Literal["complete", "partial"] = "complete"

    @model_validator(mode="after")
    def _a_part_is_somewhere(self) -> "HubSource":
        if self.local_copy == "partial" and self.local_path is None:
            raise ValueError("expected a local_path with local_copy partial, found none; name it or remove local_copy")
        return self


class S3Source(Section):
    """One pool in a bucket; credentials come from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or it needs none."""

    kind: Literal["s3"]
    pool: Name
    bucket: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{1,254}$")]
    prefix: str = ""
    glob: str = ALL_PARQUET
    endpoint: str
    region: str = "us-east-1"
    credentials: Literal["environment", "anonymous"] = "environment"

    @model_validator(mode="after")
    def _endpoint_is_a_host(self) -> "S3Source":
        if _plain_url(self.endpoint).path.strip("/"):
            raise ValueError("expected an endpoint without a path; the bucket and the prefix have keys of their own")
        return self


class HttpsSource(Section):
    """One pool of files behind URLs that everyone may read, at a server that gives ranges."""

    kind: Literal["https"]
    pool: Name
    urls: Annotated[tuple[str, ...], Field(min_length=1, max_length=MAX_URLS, strict=False)]

    @model_validator(mode="after")
    def _urls_are_plain(self) -> "HttpsSource":
        for url in self.urls:
            _plain_url(url)
        if len(set(self.urls)) != len(self.urls):
            raise ValueError("expected each URL once, found one twice; remove it")
        names_of_urls(self.urls)  # ValueError where two of them name one file
        return self


def _plain_url(url: str) -> SplitResult:
    """Its parts; ValueError, without it, where it could hold a secret: recipes are shown on pages."""
    is_plain = url.isascii() and url.isprintable() and not set(url) & set(" <>[]")
    parts = urlsplit(url if is_plain else "")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("expected a URL with http or https and a host; mend it")
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ValueError("expected a URL without user name, query and fragment, since recipes are shown; shorten it")
    port = parts.netloc.partition(":")[2]
    if port and not port.isdecimal():  # a user name and password whose host was forgotten
        raise ValueError("expected a port in digits after the host's colon; mend the URL")
    return parts


PoolSource = FolderSource | HubSource | S3Source | HttpsSource


def _place(pool: PoolSource) -> str:
    """Where a pool's files come from, told apart from every other such place."""
    if isinstance(pool, FolderSource):
        return pool.path
    if isinstance(pool, HttpsSource):
        return f"URLs of digest {identity_of(sorted(pool.urls))[:16]}"
    if isinstance(pool, S3Source):
        return f"s3://{pool.bucket}/{pool.prefix} at {pool.endpoint}"
    if pool.local_path is not None and pool.local_copy == "complete":
        return pool.local_path
    # A partial copy is no place: what is read there is, by its SHA-256, what the Hub would send.
    return f"{pool.repository}/{pool.path} on the Hub"


class PoolsSource(Section):
    """Several pools, each in a place of its own kind; their order is their priority."""

    kind: Literal["pools"]
    pools: Annotated[
        tuple[Annotated[PoolSource, Field(discriminator="kind")], ...], Field(max_length=MAX_NAMES, strict=False)
    ]

    @model_validator(mode="after")
    def _pool_names_are_unique(self) -> "PoolsSource":
        if not self.pools:
            raise ValueError("expected at least one pool, found none; add one")
        names = [pool.pool for pool in self.pools]
        if len(set(names)) != len(names):
            raise ValueError(f"expected each pool name once, found {names}; rename one of them")
        return self


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


class Shards(Section):
    """How the token files are cut."""

    max_shard_tokens: Annotated[int, Field(gt=0, lt=2**31)] = 100_000_000


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


class ModelShape(Section):
    """The decoder to train: its numbers, or `preset` for those of a named shape."""

    d_model: Width
    num_layers: Annotated[int, Field(gt=0, le=MAX_LAYERS)]
    num_heads: Width
    num_kv_heads: Width
    d_ff: Width
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    positions: Literal["rotary", "learned"] = "rotary"

    @model_validator(mode="before")
    @classmethod
    def _numbers_of_a_preset(cls, shape: Any) -> Any:
        """`preset: 124m` stands for the numbers of that shape, of which the other keys change some."""
        if not isinstance(shape, Mapping) or "preset" not in shape:
            return shape
        name, others = shape["preset"], {key: value for key, value in shape.items() if key != "preset"}
        if name not in list(MODEL_PRESETS):
            raise ValueError(f"expected a preset among {', '.join(MODEL_PRESETS)}, found {name!r}")
        return {**MODEL_PRESETS[name], **others}

    @model_validator(mode="after")
    def _heads_divide_the_width(self) -> "ModelShape":
        if self.d_model % self.num_heads or self.num_heads % self.num_kv_heads:
            raise ValueError(
                "expected num_heads to divide d_model and num_kv_heads to divide num_heads, found"
                f" d_model={self.d_model:,}, num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}"
            )
        if self.positions == "rotary" and self.d_model // self.num_heads % 2:
            raise ValueError(
                "expected an even d_model / num_heads for rotary positions, found"
                f" {self.d_model:,} / {self.num_heads} = {self.d_model // self.num_heads}"
            )
        return self


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


class Recipe(Section):
    """Everything that decides which bytes are built."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")]
    seed: NonNegative
    source: Annotated[PackagesSource | LocalSource | PoolSource | PoolsSource, Field(discriminator="kind")]
    reading: Reading
    references: Annotated[
        tuple[Annotated[TokenizerSample | ReferenceFile, Field(discriminator="kind")], ...],
        Field(max_length=MAX_NAMES, strict=False),
    ] = ()
    dedup: Dedup
    tokenizer: Annotated[TokenizerFile | TrainedTokenizer, Field(discriminator="kind")]
    tokenizer_report: TokenizerReport = TokenizerReport()
    splits: Splits
    shards: Shards = Shards()
    mixture: Mixture | None = None
    packs: Packs
    training: Training

    @model_validator(mode="after")
    def _sections_agree(self) -> "Recipe":
        names = [reference.name for reference in self.references]
        if len(set(names)) != len(names):
            raise ValueError(f"references: expected each name once, found {names}; rename one of them")
        samples = [reference.name for reference in self.references if reference.kind == "tokenizer_sample"]
        if self.tokenizer.kind == "trained" and self.tokenizer.sample not in samples:
            raise ValueError(
                f"tokenizer.sample: expected a reference of kind tokenizer_sample, {samples or 'none is there'},"
                f" found {self.tokenizer.sample!r}"
            )
        unknown = sorted(set(self.reading.filters) - set(self.pool_names))
        if unknown:
            raise ValueError(
                f"reading.filters: expected filters of the pools {', '.join(self.pool_names)}, found some of"
                f" {unknown[0]}; correct its name, or add the pool to the source"
            )
        if self.mixture is not None:
            self._mixture_is_of_its_pools(self.mixture)
        if self.reading.until == "budgets":
            self._first_documents_are_enough()
        unfilled = sorted(set(self.splits.budgets) - set(self.splits.names))
        if unfilled:
            raise ValueError(
                f"splits.budgets: expected budgets of {', '.join(self.splits.names)}, found one of {unfilled[0]};"
                " remove it, or give the split a share or tokens in splits.assignment"
            )
        return self

    @property
    def pool_names(self) -> list[str]:
        """The source's pools in order of priority."""
        return [pool.pool for pool in self.pools] or list(package_corpus.POOLS)

    @property
    def pools(self) -> tuple[PoolSource, ...]:
        """Where each pool's files are, in order of priority; none for text that corpusmill writes itself."""
        source = self.source
        if isinstance(source, LocalSource):
            return tuple(
                FolderSource(kind="folder", pool=pool.name, path=pool.path, glob=pool.glob) for pool in source.pools
            )
        if isinstance(source, PoolsSource):
            return source.pools
        return () if isinstance(source, PackagesSource) else (source,)

    @property
    def source_places(self) -> dict[str, str]:
        """Where each pool's files come from, whatever they hold: shown in refusals, so URLs are a digest."""
        return {pool.pool: _place(pool) for pool in self.pools}

    def _mixture_is_of_its_pools(self, mixture: Mixture) -> None:
        unknown = sorted({pool for stage in mixture.stages for pool in stage.shares} - set(self.pool_names))
        if unknown:
            raise ValueError(
                f"mixture: expected shares of the pools {', '.join(self.pool_names)}, found one of {unknown[0]};"
                " correct its name, or add the pool to the source"
            )
        if self.training.layout == "windows":
            raise ValueError("mixture: expected training.layout packs, found windows, which read all pools in order")

    def _first_documents_are_enough(self) -> None:
        """Reading may stop early only where no later row can change what becomes of an earlier one."""
        has_open_split = bool(set(self.splits.given) - set(self.splits.budgets_to_fill))
        wanted = {
            "splits.order source": self.splits.order == "source",
            "dedup.mode exact": self.dedup.mode == "exact",
            "a dedup.keep other than highest_score": self.dedup.keep != "highest_score",
            "no references": not self.references,
            "a tokenizer of kind file": self.tokenizer.kind == "file",
            "reading.stripes_read 1": self.reading.stripes_read == 1,
            f"splits.budgets of {', '.join(self.splits.given)}": not has_open_split,
        }
        missing = [name for name, holds in wanted.items() if not holds]
        if missing:
            raise ValueError(
                f"reading.until: expected, to stop at full budgets, {', '.join(missing)};"
                " change that, or set reading.until to end"
            )


def load_recipe(name_or_path: str | None = None) -> Recipe:
    """The recipe of a built-in name or a YAML file; RecipeError says what is wrong and where.

    Without an argument it is `CORPUSMILL_RECIPE`, or the built-in `sample`.
    """
    chosen = name_or_path or os.environ.get("CORPUSMILL_RECIPE") or DEFAULT_RECIPE
    if chosen in BUILT_IN:
        text = (package_resources.files("pipeline_assets.recipes") / f"{chosen}.yaml").read_text(encoding="utf-8")
        return parse_recipe(text, where=f"built-in recipe {chosen}", folder=Path.cwd())
    path = Path(chosen)
    if not path.is_file():
        raise RecipeError(
            f"recipe: expected a built-in name ({', '.join(BUILT_IN)}) or the path of a YAML file, found {chosen!r}."
            " Set CORPUSMILL_RECIPE to one of them."
        )
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: expected UTF-8 text, found {error}. Save the file as UTF-8.") from error
    return parse_recipe(text, where=str(path), folder=path.resolve().parent)


@lru_cache(maxsize=8)  # every step asks for it, and PyYAML is slow
def parse_recipe(text: str, where: str, folder: Path) -> Recipe:
    """A recipe from YAML text; relative paths in it are taken from `folder`."""
    try:
        value = yaml.load(text, Loader=_UniqueKeys)
    except (yaml.YAMLError, RecursionError) as error:
        raise RecipeError(f"{where}: expected YAML, found {_without_lines(error)}. Mend the file.") from error
    if not isinstance(value, dict):
        raise RecipeError(
            f"{where}: expected a mapping of sections, found {type(value).__name__}. The built-in recipes are examples."
        )
    try:
        return Recipe.model_validate(_absolute_paths(value, folder))
    except (RecursionError, RuntimeError) as error:  # an alias of its own parent; the home of an unknown user
        raise RecipeError(f"{where}: expected plain sections and paths, found {error}. Mend the file.") from error
    except ValidationError as error:  # left out of tracebacks: it shows every value
        raise RecipeError("\n".join(_one_line(where, problem) for problem in error.errors())) from None


class _UniqueKeys(yaml.SafeLoader):
    """YAML in which a key may be written once: PyYAML would keep the last one and say nothing."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """The mapping of a node; ConstructorError, with the line, for a key that is there twice."""
        seen: set[str] = set()
        for key, _ in node.value:
            name = str(key.value)
            if name in seen:
                raise yaml.constructor.ConstructorError(problem=f"the key {name!r} twice", problem_mark=key.start_mark)
            seen.add(name)
        return super().construct_mapping(node, deep)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """The value of a node; ConstructorError, with the line, for a number or a date that is none."""
        try:
            return super().construct_object(node, deep)
        except (ValueError, AttributeError) as error:  # PyYAML lets what int() and the like raise pass
            raise yaml.constructor.ConstructorError(
                problem=f"{_shown(node.value)}, which is no {node.tag.rpartition(':')[2]}", problem_mark=node.start_mark
            ) from error


def _one_line(where: str, problem: Any) -> str:
    location = ".".join(str(part) for part in problem["loc"]) or "recipe"
    value = problem.get("ctx", {}).get("tag", problem["input"])  # of sections of several kinds, the kind
    is_hidden = isinstance(value, dict) or _may_be_secret(problem)
    found = "" if is_hidden else f", found {_shown(value)}"
    advice = "Mend the recipe; pipeline_assets/recipe.py lists its keys."
    return f"{where}: {location}: {_expected(problem)}{found}. {advice}"


def _may_be_secret(problem: Any) -> bool:
    """Whether a value may be a key, a token or a URL that holds one: those of a source, or of who knows what."""
    return problem["loc"][:1] == ("source",) or problem["type"] == "extra_forbidden"


def _expected(problem: Any) -> str:
    """What should have been there, without what was."""
    if problem["type"] == "union_tag_invalid":
        return f"expected {problem['ctx']['discriminator']} among {problem['ctx']['expected_tags']}"
    said = problem["msg"].removeprefix("Value error, ").replace("Input should be", "expected")
    return {"extra_forbidden": "unknown key", "missing": "required key is missing"}.get(problem["type"], said)


def _without_lines(error: Exception) -> Exception:
    """The same error, with the numbers of the lines that it is about and not their text, which may hold a secret."""
    if isinstance(error, yaml.MarkedYAMLError):
        for mark in (error.context_mark, error.problem_mark):
            if mark is not None:
                mark.buffer = None
    return error


def _shown(value: Any) -> str:
    """A value as a message shows it: not every number has few digits, or may be written out at all."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"a number of {value.bit_length():,} bits"
    shown = repr(value)
    return shown if len(shown) <= SHOWN_CHARACTERS else shown[:SHOWN_CHARACTERS] + "…"


def _absolute_paths(value: Any, folder: Path) -> Any:
    """The same tree with every relative `path` and `local_path` taken from the recipe's own folder."""
    if isinstance(value, list):
        return [_absolute_paths(item, folder) for item in value]
    if not isinstance(value, dict):
        return value
    is_hub = value.get("kind") == "hub"
    return {
        key: str(folder / Path(item).expanduser())
        if isinstance(item, str) and (key == "local_path" or (key == "path" and not is_hub))
        else _absolute_paths(item, folder)
        for key, item in value.items()
    }


UPSTREAM: Mapping[str, tuple[str, ...]] = {
    "raw_row_groups": (),
    "reference_sets": ("raw_row_groups",),
    "minhash_signatures": ("raw_row_groups", "reference_sets"),
    "lsh_clusters": ("raw_row_groups", "reference_sets", "minhash_signatures"),
    "tokenizer": ("reference_sets",),
    "document_tokens": ("raw_row_groups", "lsh_clusters", "tokenizer"),
    "tokenizer_report": ("raw_row_groups", "tokenizer", "document_tokens"),
    "split_documents": ("raw_row_groups", "lsh_clusters", "document_tokens"),
    "token_shards": ("document_tokens", "split_documents", "tokenizer"),
    "packing_plan": ("token_shards",),
    "packing_stats": ("token_shards", "packing_plan"),
    "mixture_ledger": ("token_shards", "packing_plan"),
    "handoff_package": ("raw_row_groups", "split_documents", "tokenizer", "token_shards", "packing_plan"),
    "varlen_training_run": ("token_shards", "packing_plan"),
    "quality_report": (
        "raw_row_groups",
        "reference_sets",
        "minhash_signatures",
        "lsh_clusters",
        "tokenizer",
        "document_tokens",
        "tokenizer_report",
        "split_documents",
        "token_shards",
        "packing_plan",
        "packing_stats",
        "mixture_ledger",
        "handoff_package",
        "varlen_training_run",
    ),
}
"""What each asset reads. The definitions' graph is compared with it by a test."""


STAGES: Mapping[str, str] = {
    "raw_row_groups": "source",
    "reference_sets": "source",
    "minhash_signatures": "signatures",
    "lsh_clusters": "clusters",
    "tokenizer": "tokens",
    "document_tokens": "tokens",
    "tokenizer_report": "tokens",
    "split_documents": "splits",
    "token_shards": "shards",
    "packing_plan": "packs",
    "packing_stats": "packs",
    "mixture_ledger": "packs",
    "handoff_package": "training",
    "varlen_training_run": "training",
    "quality_report": "training",
}
"""The stage that each asset belongs to, in the order of the flow."""


def own_parameters(recipe: Recipe, asset: str) -> dict[str, Any]:
    """The recipe's values that an asset itself depends on, as plain JSON."""
    sections: dict[str, dict[str, Any]] = {
        # Where the files lie is not what they hold: their identity is in the units' inputs.
        "raw_row_groups": {
            **({"splits": recipe.splits, "tokenizer": recipe.tokenizer} if recipe.reading.until == "budgets" else {}),
            "source": _without_places(recipe.source),
            "reading": recipe.reading,
        },
        "reference_sets": {"references": recipe.references, "seed": recipe.seed},
        "minhash_signatures": {"dedup": _signature_parameters(recipe)},
        "lsh_clusters": {"dedup": recipe.dedup, "seed": recipe.seed, "references": recipe.references},
        "tokenizer": {"tokenizer": recipe.tokenizer},
        "document_tokens": {"order": recipe.splits.order, "seed": recipe.seed},
        "tokenizer_report": _report_parameters(recipe),
        "split_documents": {"splits": recipe.splits, "by_cluster": recipe.dedup.splits_by_cluster},
        "token_shards": {"shards": recipe.shards},
        "packing_plan": {"packs": recipe.packs, "mixture": recipe.mixture, "seed": recipe.seed},
        "mixture_ledger": {"mixture": recipe.mixture},
        "packing_stats": {"packs": recipe.packs},
        "handoff_package": {"name": recipe.name},
        "varlen_training_run": {"training": recipe.training},
        "quality_report": {"name": recipe.name},
    }
    return {key: _plain(value) for key, value in sections[asset].items()}


def _without_places(source: Section) -> dict[str, Any]:
    if isinstance(source, PoolsSource):
        return {"kind": source.kind, "pools": [_without_places(pool) for pool in source.pools]}
    places: dict[type[Section], Any] = {
        LocalSource: {"pools": {"__all__": {"path"}}},
        FolderSource: {"path"},
        HubSource: {"local_path", "local_copy", "branch"},
        S3Source: {"endpoint", "region", "credentials"},
    }
    return source.model_dump(mode="json", exclude=places.get(type(source)))


def _signature_parameters(recipe: Recipe) -> dict[str, int]:
    dedup = recipe.dedup
    return {
        "ngram": dedup.ngram,
        "num_bands": dedup.num_bands,
        "rows_per_band": dedup.rows_per_band,
        "seed": dedup.seed,
    }


def _report_parameters(recipe: Recipe) -> dict[str, Any]:
    report = recipe.tokenizer_report
    return {
        "candidates": [candidate.model_dump(mode="json", exclude={"path"}) for candidate in report.candidates],
        "documents_per_pool": report.documents_per_pool,
        "model": report.model or recipe.training.model,
        "seed": recipe.seed,
    }


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


def ancestors(asset: str) -> tuple[str, ...]:
    """Every asset that an asset depends on, itself included, sorted."""
    found = {asset}
    for upstream in UPSTREAM[asset]:
        found.update(ancestors(upstream))
    return tuple(sorted(found))


def parameters_that_matter(recipe: Recipe, asset: str) -> dict[str, Any]:
    """The recipe's values that decide an asset's bytes: its own and those of everything upstream of it."""
    return {name: own_parameters(recipe, name) for name in ancestors(asset)}


def recipe_digest(recipe: Recipe) -> str:
    """SHA-256 of the whole recipe, in hex."""
    return identity_of(recipe.model_dump(mode="json"))
