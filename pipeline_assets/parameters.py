"""Which of a recipe's values an asset is made of: what identities are counted from.

In: a recipe and an asset's name. Out: plain JSON. The promise: a value that decides an asset's bytes is among that
asset's parameters or those of what it reads, and where the source's files lie is among none.
"""

from typing import Any

from pydantic import BaseModel

from pipeline_assets.flow import ancestors
from pipeline_assets.recipe import Recipe
from pipeline_assets.sections.section import Section
from pipeline_assets.sections.source import FolderSource, HubSource, LocalSource, PoolsSource, S3Source
from training_io.hashing import identity_of


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


def parameters_that_matter(recipe: Recipe, asset: str) -> dict[str, Any]:
    """The recipe's values that decide an asset's bytes: its own and those of everything upstream of it."""
    return {name: own_parameters(recipe, name) for name in ancestors(asset)}


def recipe_digest(recipe: Recipe) -> str:
    """SHA-256 of the whole recipe, in hex."""
    return identity_of(recipe.model_dump(mode="json"))
