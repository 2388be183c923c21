"""A run's inputs agree with each other, and an identity covers whatever changes bytes."""

from pathlib import Path

import pytest
import small_corpus
from small_corpus import Built, artifact_files, build, evaluations, failures, materialize, write_recipe

from pipeline_assets.flow import STAGES

DATA_ASSETS = tuple(name for name in STAGES if name != "varlen_training_run")
UPTO_TOKENS = DATA_ASSETS[: DATA_ASSETS.index("document_tokens") + 1]

OF_CRAWLS = {
    "references": [{"name": "sample", "kind": "tokenizer_sample", "documents_per_dump": 7}],
    "tokenizer.sample": "sample",
}


def striped(stripes: int) -> dict[str, int]:
    return {"reading.stripes": stripes, "reading.stripes_read": stripes}


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return small_corpus.write_corpus(tmp_path)


@pytest.fixture(scope="module")
def in_two_stripes(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """With a sample of each crawl's first documents: to read, not to change."""
    corpus = small_corpus.write_corpus(tmp_path_factory.mktemp("in_two_stripes"))
    return build(write_recipe(corpus, {**OF_CRAWLS, **striped(2)}), corpus / "home", upto="tokenizer")


def test_an_asset_alone_refuses_upstream_assets_of_different_revisions(corpus: Path) -> None:
    recipe, home = write_recipe(corpus), corpus / "home"
    assert materialize(recipe, home, *UPTO_TOKENS).success
    rows = small_corpus.corpus_rows()["alpha"]["a_000"]
    rows[3]["text"] = small_corpus.sentences(9_999)
    small_corpus.write_rows(corpus / "alpha" / "a_000.parquet", rows)
    assert materialize(recipe, home, "raw_row_groups").success
    result = materialize(recipe, home, "document_tokens")
    assert not result.success
    (reason,) = failures(result).values()
    assert reason.startswith("StateMismatch: ")
    assert "lsh_clusters was made from raw_row_groups" in reason
    assert "raw_row_groups is" in reason
    assert "Materialize what lies between raw_row_groups and here in one run." in reason
    assert materialize(recipe, home, *DATA_ASSETS).success


def test_pools_in_another_order_give_the_bytes_of_a_fresh_home(corpus: Path) -> None:
    swapped = {
        "source.pools": [{"name": "beta", "path": "beta"}, {"name": "alpha", "path": "alpha"}],
        "splits.order": "source",
    }
    used = corpus / "used"
    build(write_recipe(corpus, {"splits.order": "source"}), used, upto="packing_plan")
    after = build(write_recipe(corpus, swapped, "swapped.yaml"), used, upto="packing_plan")
    fresh = build(write_recipe(corpus, swapped, "swapped.yaml"), corpus / "fresh", upto="packing_plan")
    assert {name: ref.digest for name, ref in after.refs.items()} == {
        name: ref.digest for name, ref in fresh.refs.items()
    }
    assert artifact_files(corpus / "fresh").items() <= artifact_files(used).items()


def test_copies_that_stay_keep_every_law(corpus: Path) -> None:
    result = materialize(write_recipe(corpus, {"dedup.mode": "off"}), corpus / "home", *DATA_ASSETS)
    assert result.success, failures(result)
    assert {name for name, evaluation in evaluations(result).items() if not evaluation.passed} == set()


@pytest.mark.parametrize("stripes", [1, 3])
def test_the_first_documents_of_a_crawl_do_not_depend_on_the_stripes(
    in_two_stripes: Built, tmp_path: Path, stripes: int
) -> None:
    recipe = write_recipe(in_two_stripes.recipe.parent, {**OF_CRAWLS, **striped(stripes)}, "other.yaml")
    found = build(recipe, tmp_path / "home", upto="tokenizer").refs["tokenizer"]
    assert found.digest == in_two_stripes.refs["tokenizer"].digest
