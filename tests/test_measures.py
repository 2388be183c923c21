"""The numbers of asset pages: each one that a run shows is explained in its asset's definition, and no other one is."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import small_corpus
from file_server import serving_files
from small_corpus import Built

from pipeline_assets.definitions import definitions
from pipeline_assets.measures import MEASURES
from pipeline_assets.recipe import STAGES
from resources.tokenizer import train_tokenizer

OBSERVED = "dataset_revision"
Pages = Mapping[str, Mapping[str, Any]]


def numbers_of(page: Mapping[str, Any]) -> set[str]:
    """Keys of plain numbers."""
    return {key for key, value in page.items() if isinstance(value, int | float) and not isinstance(value, bool)}


def pages_of(recipe: Path, home: Path, *assets: str) -> Pages:
    result = small_corpus.materialize(recipe, home, *assets)
    assert result.success, small_corpus.failures(result)
    return small_corpus.materialized_metadata(result)


@pytest.fixture(scope="module")
def pages(clean: Built) -> Pages:
    """Pages of the small corpus, the source's among them."""
    assert clean.result is not None
    (source,) = [
        event.asset_observation_data.asset_observation.metadata
        for event in clean.result.all_events
        if event.event_type == dg.DagsterEventType.ASSET_OBSERVATION
    ]
    observed = {OBSERVED: {name: value.value for name, value in source.items()}}
    return observed | small_corpus.materialized_metadata(clean.result)


@pytest.fixture(scope="module")
def pages_with_options(tmp_path_factory: pytest.TempPathFactory) -> Pages:
    """Pages of a recipe with filters, a pool that is elsewhere, and verified edges."""
    corpus = small_corpus.write_corpus(tmp_path_factory.mktemp("options"))
    with serving_files(corpus) as server:
        alpha = {"kind": "folder", "pool": "alpha", "path": "alpha"}
        beta = {"kind": "https", "pool": "beta", "urls": [f"{server.url}/files/beta/b_000.parquet"]}
        changes = {
            "source": {"kind": "pools", "pools": [alpha, beta]},
            "reading.filters": {"beta": {"dumps": ["crawl-0"]}},
            "dedup.verify_jaccard": 0.5,
        }
        recipe = small_corpus.write_recipe(corpus, changes)
        upto = ("raw_row_groups", "reference_sets", "minhash_signatures", "lsh_clusters")
        return pages_of(recipe, corpus / "home", *upto)


@pytest.fixture(scope="module")
def pages_with_budgets(tmp_path_factory: pytest.TempPathFactory) -> Pages:
    """The page of rows that were read until budgets were full."""
    corpus = small_corpus.write_corpus(tmp_path_factory.mktemp("budgets"))
    (corpus / "tokenizer.json").write_bytes(
        train_tokenizer([small_corpus.sentences(number) for number in range(9)], 400)
    )
    changes = {
        "reading": {"stripes": 1, "stripes_read": 1, "unit_megabytes": 1, "until": "budgets"},
        "references": [],
        "dedup": {"mode": "exact"},
        "tokenizer": {"kind": "file", "path": "tokenizer.json", "eos": small_corpus.EOS},
        "splits.order": "source",
        "splits.budgets": {"train": 1_000, "validation": 100},
    }
    return pages_of(small_corpus.write_recipe(corpus, changes), corpus / "home", "raw_row_groups")


@pytest.fixture(scope="module")
def names(pages: Pages) -> Mapping[str, list[str]]:
    """What names in angle brackets stand for."""
    return {
        "pool": ["alpha", "beta"],
        "split": ["train", "validation", "test"],
        "reason": ["below_min_tokens", "over_budget"],
        "layout": [record.data["layout"] for record in pages["packing_stats"]["layouts"].records],
        "device": ["cpu", "cuda"],
    }


def explained(asset: str) -> dict[str, dict[str, Any]]:
    """The rows of an asset's table `numbers`, as its definition has them."""
    metadata = definitions.resolve_asset_graph().get(dg.AssetKey(asset)).metadata
    rows = [record.data for record in metadata["numbers"].value.records]
    assert [set(row) for row in rows] == [{"number", "unit", "meaning"}] * len(rows)
    return {row["number"]: row for row in rows}


def stands_for(number: str, names: Mapping[str, list[str]]) -> Iterator[str]:
    """The keys that a number is of."""
    if placeholder := re.search("<(.+)>", number):
        yield from (number.replace(placeholder[0], name) for name in names[placeholder[1]])
    else:
        yield number


@pytest.mark.parametrize("asset", [OBSERVED, *STAGES])
def test_every_number_is_explained_and_every_explained_one_occurs(
    asset: str, pages: Pages, pages_with_options: Pages, pages_with_budgets: Pages, names: Mapping[str, list[str]]
) -> None:
    shown: set[str] = set()
    for some in (pages, pages_with_options, pages_with_budgets):
        shown |= numbers_of(some.get(asset, {}))
    keys = {number: set(stands_for(number, names)) for number in explained(asset)}
    assert shown - set().union(*keys.values()) == set()
    assert [number for number, of in keys.items() if not of & shown] == []


@pytest.mark.parametrize("asset", [OBSERVED, *STAGES])
def test_what_is_not_always_there_says_where_it_is(asset: str, pages: Pages, names: Mapping[str, list[str]]) -> None:
    shown = numbers_of(pages[asset])
    for number, one in MEASURES[asset].items():
        assert one.where or shown & set(stands_for(number, names)), number


def test_numbers_are_described_in_words() -> None:
    for asset in (OBSERVED, *STAGES):
        for row in explained(asset).values():
            assert row["unit"], row
            assert row["meaning"][0].isupper() or row["meaning"].startswith("`"), row
            assert not row["meaning"].endswith("."), row


def test_events_hold_no_definition(pages: Pages) -> None:
    assert all("numbers" not in page for page in pages.values())
