"""The FineWeb recipes on a local copy of files with FineWeb's schema, scaled down but otherwise as they are."""

import re
from pathlib import Path

import pytest
import small_corpus
import yaml

from training_io.errors import SourceError, StateMismatch

RECIPES = Path(__file__).parents[1] / "pipeline_assets" / "recipes"


def scaled_down(name: str, folder: Path, local: Path, changes: dict[str, object]) -> Path:
    """A copy of a built-in recipe that reads a local folder, with some dotted keys set to smaller values."""
    recipe = yaml.safe_load((RECIPES / f"{name}.yaml").read_text(encoding="utf-8"))
    for dotted, value in {"source.local_path": str(local), **changes}.items():
        *sections, key = dotted.split(".")
        section = recipe
        for part in sections:
            section = section[part]
        section[key] = value
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return path


def test_fineweb_lab_takes_budgets_in_source_order(tmp_path: Path, sample_data: Path) -> None:
    changes = {
        "tokenizer.path": str(sample_data / "tokenizers" / "gpt2.tokenizer.json"),
        "splits.budgets": {"train": 6_000, "validation": 100},
    }
    recipe = scaled_down("fineweb-lab", tmp_path, sample_data / "fineweb_rows", changes)
    built = small_corpus.build(recipe, tmp_path / "home", upto="token_shards")
    splits = built.refs["token_shards"].counts["splits"]
    assert 6_000 <= splits["train"]["tokens"] < 12_000
    counts = built.refs["split_documents"].counts
    assert counts["unused_over_budget"] == counts["unused_documents"] > 0
    assert built.refs["tokenizer"].counts["eos_id"] == 50256


def test_another_tokenizer_file_is_not_taken_for_gpt2(tmp_path: Path, sample_data: Path) -> None:
    other = str(sample_data / "tokenizers" / "qwen3.tokenizer.json.gz")
    recipe = scaled_down("fineweb-lab", tmp_path, sample_data / "fineweb_rows", {"tokenizer.path": other})
    with pytest.raises(StateMismatch, match="expected the tokenizer with fingerprint daa6b0ec00ec, found"):
        small_corpus.build(recipe, tmp_path / "home", upto="tokenizer")


def test_fineweb_edu_trains_its_tokenizer_on_the_first_documents_of_each_crawl(tmp_path: Path) -> None:
    pools = small_corpus.write_corpus(tmp_path)
    sample = [{"name": "tokenizer_sample", "kind": "tokenizer_sample", "documents_per_dump": 4}]
    changes = {
        "references": sample,
        "tokenizer.vocab_size": 300,
        "splits.assignment.validation_tokens": 500,
        "splits.min_tokens": 16,
    }
    recipe = scaled_down("fineweb-edu", tmp_path, pools / "alpha", changes)
    built = small_corpus.build(recipe, tmp_path / "home", upto="packing_plan")
    counts = built.refs["split_documents"].counts
    assert counts["validation_tokens"] >= 500
    assert counts["train_documents"] > 0
    assert built.refs["tokenizer"].counts["eos_id"] == 0
    assert built.refs["reference_sets"].counts["sets"] == {"tokenizer_sample": 8}


@pytest.mark.parametrize("name", ["fineweb-lab", "fineweb-edu"])
def test_without_a_local_copy_the_error_says_what_to_fetch(tmp_path: Path, name: str) -> None:
    with pytest.raises(SourceError, match=re.escape("found no source.local_path in the recipe")):
        small_corpus.build(RECIPES / f"{name}.yaml", tmp_path / "home")
