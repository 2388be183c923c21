"""Asset pages: each number and each column of a table that a run shows is explained, and no other one is."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import dagster as dg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import small_corpus
from file_server import serving_files
from small_corpus import TRAINING, Built, sentences

from pipeline_assets.clusters import slice_name
from pipeline_assets.definitions import definitions
from pipeline_assets.flow import STAGES
from pipeline_assets.launch import TrainingOverrides
from pipeline_assets.measures import MEASURES, OF_FANNED_OUT
from pipeline_assets.shown_columns import SAMPLES, TABLES, UNITS, columns_of_sample
from pipeline_assets.stripes import units_in
from pipeline_assets.training import build_training_run
from resources.tokenizer import train_tokenizer
from training_io.gpu_io_manager import DeviceInput

OBSERVED = "dataset_revision"
Pages = Mapping[str, Mapping[str, Any]]


def numbers_of(page: Mapping[str, Any]) -> set[str]:
    """Keys of plain numbers."""
    return {key for key, value in page.items() if isinstance(value, int | float) and not isinstance(value, bool)}


def trained_page(built: Built) -> Mapping[str, Any]:
    """The page of a training run on what was built, by its stage's own function."""
    inputs = {}
    for name in ("token_shards", "packing_plan"):
        ref = built.refs[name]
        place = {"folder": built.folder(name), "device": "cpu", "dtype": "auto", "prefetch_depth": 1}
        inputs[name] = DeviceInput(
            asset=name, identity=ref.identity, digest=ref.digest, lineage=dict(ref.lineage), **place
        )
    return build_training_run(built.stage, **inputs, overrides=TrainingOverrides()).metadata


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
def pages_with_options(tmp_path_factory: pytest.TempPathFactory) -> list[Pages]:
    """Pages of a recipe with filters, a pool that is elsewhere, verified edges and no validation; then of all reused."""
    corpus = small_corpus.write_corpus(tmp_path_factory.mktemp("options"))
    with serving_files(corpus) as server:
        alpha = {"kind": "folder", "pool": "alpha", "path": "alpha"}
        beta = {"kind": "https", "pool": "beta", "urls": [f"{server.url}/files/beta/b_000.parquet"]}
        changes = {
            "source": {"kind": "pools", "pools": [alpha, beta]},
            "reading.filters": {"beta": {"dumps": ["crawl-0"]}},
            "dedup.verify_jaccard": 0.5,
            "splits.assignment": {"policy": "fraction", "seed": 5, "validation_fraction": 0},
        }
        recipe = small_corpus.write_recipe(corpus, changes)
        runs = []
        for _ in range(2):
            built = small_corpus.build(recipe, corpus / "home")
            runs.append({**built.pages, TRAINING: trained_page(built)})
        return runs


@pytest.fixture(scope="module")
def pages_with_budgets(tmp_path_factory: pytest.TempPathFactory) -> Pages:
    """The page of rows that were read until budgets were full, from files that name no crawl."""
    corpus = tmp_path_factory.mktemp("budgets")
    for pool, files in small_corpus.corpus_rows().items():
        for file, rows in files.items():
            small_corpus.write_rows(corpus / pool / f"{file}.parquet", [{"text": row["text"]} for row in rows])
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
    return small_corpus.build(small_corpus.write_recipe(corpus, changes), corpus / "home", "raw_row_groups").pages


@pytest.fixture(scope="module")
def examined(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Rows with scores, and a benchmark that is kept out, with a phrase that many documents hold."""
    corpus = small_corpus.write_corpus(tmp_path_factory.mktemp("examined"))
    phrase = "all rights reserved by the owners of this site and of its several pages"
    texts = [f"{sentences(4_200 + number)} {phrase}" for number in range(13)]
    scores = {"score": [2 + number / 4 for number in range(13)], "int_score": [2 + number // 4 for number in range(13)]}
    pq.write_table(pa.table({"text": texts, "language": ["en"] * 13, **scores}), corpus / "alpha" / "scored.parquet")
    (corpus / "exam.txt").write_text(f"{small_corpus.UNIQUE}\n{phrase}\n{phrase} too", encoding="utf-8")
    exam = {"name": "exam", "kind": "file", "path": "exam.txt", "action": "exclude", "overlap": {}}
    changes = {"references": [*small_corpus.RECIPE["references"], exam]}
    return small_corpus.build(small_corpus.write_recipe(corpus, changes), corpus / "home", "lsh_clusters")


@pytest.fixture(scope="module")
def all_pages(pages: Pages, pages_with_options: list[Pages], pages_with_budgets: Pages, examined: Built) -> list[Pages]:
    return [pages, *pages_with_options, pages_with_budgets, examined.pages]


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
    asset: str, all_pages: list[Pages], names: Mapping[str, list[str]]
) -> None:
    shown = set().union(*(numbers_of(some.get(asset, {})) for some in all_pages))
    keys = {number: set(stands_for(number, names)) for number in explained(asset)}
    assert shown - set().union(*keys.values()) == set()
    assert [number for number, of in keys.items() if not of & shown] == []


@pytest.mark.parametrize("asset", [OBSERVED, *STAGES])
def test_what_is_not_always_there_and_nothing_else_says_where_it_is(
    asset: str, all_pages: list[Pages], names: Mapping[str, list[str]]
) -> None:
    shown = [numbers_of(some[asset]) for some in all_pages if asset in some]
    for number, one in MEASURES[asset].items():
        keys = set(stands_for(number, names))
        some = shown[:1] if number in OF_FANNED_OUT else shown  # it is Dagster's run that tells of its steps
        assert all(of & keys for of in some) != bool(one.where), number


def test_numbers_are_described_in_words() -> None:
    for asset in (OBSERVED, *STAGES):
        for row in explained(asset).values():
            assert row["unit"], row
            assert row["meaning"][0].isupper() or row["meaning"].startswith("`"), row
            assert not row["meaning"].endswith("."), row


def test_events_hold_no_definition(pages: Pages) -> None:
    assert all("numbers" not in page for page in pages.values())


def tables_of(pages: list[Pages], asset: str) -> Iterator[tuple[str, dg.TableMetadataValue]]:
    """The tables of an asset's pages, by name."""
    for some in pages:
        for name, value in some.get(asset, {}).items():
            if isinstance(value, dg.TableMetadataValue):
                yield name, value


@pytest.mark.parametrize("asset", STAGES)
def test_every_column_of_a_table_is_explained_and_every_number_has_a_unit(asset: str, all_pages: list[Pages]) -> None:
    seen = 0
    for name, table in tables_of(all_pages, asset):
        assert {column.name for column in table.schema.columns} == set().union(*(row.data for row in table.records))
        for column in table.schema.columns:
            seen += 1
            assert column.description, f"{name}: {column.name}"
            cells = [row.data[column.name] for row in table.records]
            numbers = [cell for cell in cells if isinstance(cell, int | float) and not isinstance(cell, bool)]
            assert not numbers or (column.tags or {}).get("unit"), f"{name}: {column.name}"
    assert seen


def test_every_explained_column_of_a_table_occurs(all_pages: list[Pages]) -> None:
    shown: dict[str, set[str]] = {}
    for asset in STAGES:
        for name, table in tables_of(all_pages, asset):
            key = asset if name == "sample_rows" else name
            shown.setdefault(key, set()).update(column.name for column in table.schema.columns)
    explained = {**TABLES, **SAMPLES}
    missing = {name: set(columns) - shown.get(name, set()) for name, columns in explained.items()}
    assert {name: columns for name, columns in missing.items() if columns} == {}


def test_units_are_of_columns_that_the_contract_has() -> None:
    for contract, units in UNITS.items():
        assert units.keys() <= contract.__annotations__.keys(), contract.__name__


def test_columns_are_described_in_words() -> None:
    explained = [*TABLES.values(), *map(columns_of_sample, SAMPLES)]
    for one in (one for columns in explained for one in columns.values()):
        assert one.meaning[0].isupper() or one.meaning.startswith(("`", "kept,")), one
        assert not one.meaning.endswith("."), one


@pytest.mark.parametrize("asset", [OBSERVED, *STAGES])
def test_the_table_of_numbers_is_explained_too(asset: str) -> None:
    schema = definitions.resolve_asset_graph().get(dg.AssetKey(asset)).metadata["numbers"].value.schema
    assert [column.name for column in schema.columns] == ["number", "unit", "meaning"]
    assert all(column.description for column in schema.columns)


def test_removed_are_the_documents_that_do_not_stay(examined: Built) -> None:
    ref, units = examined.refs["lsh_clusters"], units_in(examined.stage, examined.refs["raw_row_groups"])
    kept = [
        one for unit in units for one in examined.stage.table(ref, slice_name(unit.unit)).column("kept").to_pylist()
    ]
    assert ref.counts["reference"] > 0
    assert examined.pages["lsh_clusters"]["removed"] == kept.count(False) > ref.counts["near_duplicate"] > 0
