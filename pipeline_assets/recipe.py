"""The recipe: what to build, as one typed and validated YAML file.

In: a built-in name or a path. Out: a frozen `Recipe`. The promise: an unknown key, a wrong type or an impossible
number is refused with what was expected, what was found, and where; nothing has a silent default that changes data.
"""

import os
from collections.abc import Mapping
from functools import lru_cache
from importlib import resources as package_resources
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from training_io.errors import RecipeError
from training_io.hashing import identity_of
from training_io.packing import STRATEGIES

BUILT_IN = ("sample", "fineweb-lab", "fineweb-edu", "mixture")
DEFAULT_RECIPE = "sample"
MAX_STEPS_PER_FAN_OUT = 128
MAX_NAMES = 64  # pools, and reference sets: each is one bit of a 64-bit tag

Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,31}$")]
Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """Base of all sections: unknown keys are refused, values never change."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class LocalPool(Section):
    """Parquet files of one pool in a local folder."""

    name: Name
    path: str
    glob: str = "**/*.parquet"


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


class HubSource(Section):
    """A Hugging Face data set at a pinned commit, and the local folder that holds its files."""

    kind: Literal["hub"]
    repository: str
    path: str
    revision: Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")]
    pool: Name
    local_path: str | None = None


class Reading(Section):
    """Which row groups are read: stripes of every n-th row group, in units of about one size."""

    stripes: Annotated[int, Field(ge=1, le=MAX_STEPS_PER_FAN_OUT)]
    stripes_read: Positive
    unit_megabytes: Positive = 64

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
    max_documents: Positive = 10  # a run in more documents is boilerplate and matches none

    @model_validator(mode="after")
    def _short_texts_are_shorter_than_a_run(self) -> "Overlap":
        if self.min_words > self.ngram:
            raise ValueError(f"expected min_words of at most ngram, {self.ngram}, found {self.min_words}")
        return self


class ReferenceFile(Section):
    """A reference set from a Parquet file (column `text`) or a text file (one text a line).

    `universe_documents`: how many documents both the corpus and the set could have been drawn from.
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
    num_buckets: Positive = 1

    @model_validator(mode="after")
    def _buckets_are_top_bits(self) -> "Dedup":
        if self.num_buckets & (self.num_buckets - 1):
            raise ValueError(f"expected num_buckets to be a power of two, found {self.num_buckets:,}")
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
    """A given tokenizer.json (or .json.gz) and the fingerprint that it must have."""

    kind: Literal["file"]
    path: str | None = None
    repository: str | None = None
    revision: str | None = None
    fingerprint: str | None = None
    eos: Annotated[str, Field(min_length=1)]

    @model_validator(mode="after")
    def _file_is_named(self) -> "TokenizerFile":
        if self.path is None and self.repository is None:
            raise ValueError("expected a path or a repository of the tokenizer; name one")
        return self


class TrainedTokenizer(Section):
    """A byte-level BPE trained on a reference set of kind `tokenizer_sample`."""

    kind: Literal["trained"]
    sample: Name
    vocab_size: Annotated[int, Field(gt=256, le=10_000_000)]
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


class Shards(Section):
    """How the token files are cut."""

    max_shard_tokens: Annotated[int, Field(gt=0, lt=2**31)] = 100_000_000


class Packs(Section):
    """Segments, packs and microbatches."""

    max_seq_len: Annotated[int, Field(ge=2)]
    capacity: Annotated[int, Field(ge=2)]
    strategy: str
    buffer: Annotated[int, Field(gt=0, le=1_000_000)]
    batch_size: Positive | None = None
    microbatch_tokens: Positive | None = None
    accumulation: Positive = 1
    eval_microbatch_tokens: Positive

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

    def packs_per_microbatch(self, split: str) -> int:
        """Packs in one microbatch: `batch_size`, or as many as fit the tokens of a microbatch of the split."""
        if split != "train":
            return self.eval_microbatch_tokens // self.capacity
        return self.batch_size or (self.microbatch_tokens or 0) // self.capacity


class ModelShape(Section):
    """The decoder to train."""

    d_model: Positive
    num_layers: Positive
    num_heads: Positive
    num_kv_heads: Positive
    d_ff: Positive
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    positions: Literal["rotary", "learned"] = "rotary"


class Windows(Section):
    """Fixed windows over the shards without a document mask, instead of packs."""

    length: Annotated[int, Field(ge=2)]
    batch_size: Positive
    accumulation: Positive = 1


class Training(Section):
    """The training run."""

    layout: Literal["packs", "windows"]
    windows: Windows | None = None
    model: ModelShape
    steps: Positive
    learning_rate: Annotated[float, Field(gt=0)]
    warmup_steps: NonNegative
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    grad_clip: Annotated[float, Field(gt=0)] = 1.0
    seed: NonNegative
    eval_every: Positive
    eval_microbatches: Positive
    checkpoint_every: Positive
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # auto: bfloat16 on a GPU, float32 on the CPU
    num_threads: Annotated[int, Field(gt=0, le=1024)] = 1  # on the CPU; the sums' order, and so the bytes, depend on it

    @model_validator(mode="after")
    def _windows_are_described(self) -> "Training":
        if (self.layout == "windows") != (self.windows is not None):
            raise ValueError("expected the section windows exactly when layout is windows")
        if self.warmup_steps > self.steps:
            raise ValueError(f"expected warmup_steps of at most steps, {self.steps:,}, found {self.warmup_steps:,}")
        return self


class Recipe(Section):
    """Everything that decides which bytes are built."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")]
    seed: NonNegative
    source: Annotated[PackagesSource | LocalSource | HubSource, Field(discriminator="kind")]
    reading: Reading
    references: Annotated[
        tuple[Annotated[TokenizerSample | ReferenceFile, Field(discriminator="kind")], ...],
        Field(max_length=MAX_NAMES, strict=False),
    ] = ()
    dedup: Dedup
    tokenizer: Annotated[TokenizerFile | TrainedTokenizer, Field(discriminator="kind")]
    splits: Splits
    shards: Shards = Shards()
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
        model = self.training.model
        if model.d_model % model.num_heads or model.num_heads % model.num_kv_heads:
            raise ValueError(
                "training.model: expected num_heads to divide d_model and num_kv_heads to divide num_heads, found"
                f" d_model={model.d_model:,}, num_heads={model.num_heads}, num_kv_heads={model.num_kv_heads}"
            )
        if model.positions == "rotary" and model.d_model // model.num_heads % 2:
            raise ValueError(
                "training.model: expected an even d_model / num_heads for rotary positions, found"
                f" {model.d_model:,} / {model.num_heads} = {model.d_model // model.num_heads}"
            )
        unfilled = sorted(set(self.splits.budgets) - set(self.splits.names))
        if unfilled:
            raise ValueError(
                f"splits.budgets: expected budgets of {', '.join(self.splits.names)}, found one of {unfilled[0]};"
                " remove it, or give the split a share or tokens in splits.assignment"
            )
        return self


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
        raise RecipeError(f"{where}: expected YAML, found {error}. Mend the file.") from error
    if not isinstance(value, dict):
        raise RecipeError(
            f"{where}: expected a mapping of sections, found {type(value).__name__}. The built-in recipes are examples."
        )
    try:
        return Recipe.model_validate(_absolute_paths(value, folder))
    except (RecursionError, RuntimeError) as error:  # an alias of its own parent; the home of an unknown user
        raise RecipeError(f"{where}: expected plain sections and paths, found {error}. Mend the file.") from error
    except ValidationError as error:
        raise RecipeError("\n".join(_one_line(where, problem) for problem in error.errors())) from error


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


def _one_line(where: str, problem: Any) -> str:
    location = ".".join(str(part) for part in problem["loc"]) or "recipe"
    found = "" if isinstance(problem["input"], dict) else f", found {problem['input']!r}"
    expected = {"extra_forbidden": "unknown key", "missing": "required key is missing"}.get(
        problem["type"], problem["msg"].removeprefix("Value error, ").replace("Input should be", "expected")
    )
    return f"{where}: {location}: {expected}{found}. Mend the recipe; pipeline_assets/recipe.py lists its keys."


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
    "split_documents": ("raw_row_groups", "lsh_clusters", "document_tokens"),
    "token_shards": ("document_tokens", "split_documents", "tokenizer"),
    "packing_plan": ("token_shards",),
    "packing_stats": ("token_shards", "packing_plan"),
    "handoff_package": ("raw_row_groups", "split_documents", "tokenizer", "token_shards", "packing_plan"),
    "varlen_training_run": ("token_shards", "packing_plan"),
}
"""What each asset reads. The definitions' graph is compared with it by a test."""


STAGES: Mapping[str, str] = {
    "raw_row_groups": "source",
    "reference_sets": "source",
    "minhash_signatures": "signatures",
    "lsh_clusters": "clusters",
    "tokenizer": "tokens",
    "document_tokens": "tokens",
    "split_documents": "splits",
    "token_shards": "shards",
    "packing_plan": "packs",
    "packing_stats": "packs",
    "handoff_package": "training",
    "varlen_training_run": "training",
}
"""The stage that each asset belongs to, in the order of the flow."""


def own_parameters(recipe: Recipe, asset: str) -> dict[str, Any]:
    """The recipe's values that an asset itself depends on, as plain JSON."""
    sections: dict[str, dict[str, Any]] = {
        # Where the files lie is not what they hold: their identity is in the units' inputs.
        "raw_row_groups": {
            "source": recipe.source.model_dump(
                mode="json", exclude={"local_path": True, "pools": {"__all__": {"path"}}}
            ),
            "reading": recipe.reading,
        },
        "reference_sets": {"references": recipe.references, "seed": recipe.seed},
        "minhash_signatures": {"dedup": _signature_parameters(recipe)},
        "lsh_clusters": {"dedup": recipe.dedup, "seed": recipe.seed, "references": recipe.references},
        "tokenizer": {"tokenizer": recipe.tokenizer},
        "document_tokens": {"order": recipe.splits.order, "seed": recipe.seed},
        "split_documents": {"splits": recipe.splits, "by_cluster": recipe.dedup.splits_by_cluster},
        "token_shards": {"shards": recipe.shards},
        "packing_plan": {"packs": recipe.packs, "seed": recipe.seed},
        "packing_stats": {"packs": recipe.packs},
        "handoff_package": {"name": recipe.name},
        "varlen_training_run": {"training": recipe.training},
    }
    return {key: _plain(value) for key, value in sections[asset].items()}


def _signature_parameters(recipe: Recipe) -> dict[str, int]:
    dedup = recipe.dedup
    return {
        "ngram": dedup.ngram,
        "num_bands": dedup.num_bands,
        "rows_per_band": dedup.rows_per_band,
        "seed": dedup.seed,
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
