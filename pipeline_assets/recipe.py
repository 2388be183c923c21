"""The recipe: what to build. Its keys are listed section by section in `pipeline_assets/sections/`.

In: the values of a file (`recipe_file.py`). Out: a frozen `Recipe`. The promise: an unknown key, a wrong type or an
impossible number is refused, alone or beside the other sections; nothing has a silent default that changes data.
"""

from typing import Annotated

from pydantic import Field, model_validator

from pipeline_assets.sections.dedup import Dedup
from pipeline_assets.sections.mixture import Mixture
from pipeline_assets.sections.packs import Packs
from pipeline_assets.sections.reading import Reading
from pipeline_assets.sections.references import ReferenceFile, TokenizerSample
from pipeline_assets.sections.section import MAX_NAMES, NonNegative, Section
from pipeline_assets.sections.shards import Shards
from pipeline_assets.sections.source import FolderSource, LocalSource, PackagesSource, PoolSource, PoolsSource, place_of
from pipeline_assets.sections.splits import Splits
from pipeline_assets.sections.tokenizer import TokenizerFile, TokenizerReport, TrainedTokenizer
from pipeline_assets.sections.training import Training
from resources import package_corpus


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
                f" {', '.join(unknown)}; correct the names, or add the pools to the source"
            )
        if self.mixture is not None:
            self._mixture_is_of_its_pools(self.mixture)
        if self.reading.until == "budgets":
            self._first_documents_are_enough()
        unfilled = sorted(set(self.splits.budgets) - set(self.splits.names))
        if unfilled:
            raise ValueError(
                f"splits.budgets: expected budgets of {', '.join(self.splits.names)}, found some of"
                f" {', '.join(unfilled)}; remove them, or give the splits a share or tokens in splits.assignment"
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
        return {pool.pool: place_of(pool) for pool in self.pools}

    def _mixture_is_of_its_pools(self, mixture: Mixture) -> None:
        stages: dict[str, list[str]] = {}
        for stage in mixture.stages:
            for pool in stage.shares.keys() - set(self.pool_names):
                stages.setdefault(pool, []).append(stage.name)
        if stages:
            unknown = ", ".join(f"{pool} (in {', '.join(stages[pool])})" for pool in sorted(stages))
            raise ValueError(
                f"mixture.stages: expected shares of the pools {', '.join(self.pool_names)}, found some of {unknown};"
                " correct the names, or add the pools to the source"
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
