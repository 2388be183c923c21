"""The FineWeb recipes on a local copy of files with FineWeb's schema, scaled down but otherwise as they are."""

import shutil
from pathlib import Path

import pytest
import small_corpus
import yaml
from file_server import serving_files

from training_io.errors import StateMismatch

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


def test_without_a_local_copy_the_hub_is_read_at_the_pinned_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools = small_corpus.write_corpus(tmp_path)
    (tmp_path / "files" / "sample").mkdir(parents=True)
    (pools / "alpha").rename(tmp_path / "files" / "sample" / "10BT")
    with serving_files(tmp_path / "files") as server:
        server.commits = {"main": "f" * 40, "pinned": "87f09149ef4734204d70ed1d046ddc9ca3f2b8f9"}
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        built = small_corpus.build(RECIPES / "fineweb-edu.yaml", tmp_path / "home", upto="raw_row_groups")
    # Of each file's five row groups the first, of 12 rows, and the last, of 2.
    assert built.refs["raw_row_groups"].counts["rows_read"] == 2 * (12 + 2)
    paths = {one.path.partition("?")[0] for one in server.log if "/datasets/" in one.path}
    assert paths == {
        "/api/datasets/HuggingFaceFW/fineweb-edu/tree/87f09149ef4734204d70ed1d046ddc9ca3f2b8f9/sample/10BT",
        *(
            f"/datasets/HuggingFaceFW/fineweb-edu/resolve/87f09149ef4734204d70ed1d046ddc9ca3f2b8f9/sample/10BT/{name}"
            for name in ("a_000.parquet", "deep/a_001.parquet")
        ),
    }


def test_the_hub_is_read_until_the_budgets_are_full(
    tmp_path: Path, sample_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {
        "source.local_path": None,
        "reading.unit_megabytes": 1,
        "tokenizer.path": str(sample_data / "tokenizers" / "gpt2.tokenizer.json"),
        "splits.budgets": {"train": 200_000, "validation": 1_000},
    }
    folder = tmp_path / "files" / "sample" / "10BT"
    folder.parent.mkdir(parents=True)
    shutil.copytree(sample_data / "sample" / "english", folder)
    recipe = scaled_down("fineweb-lab", tmp_path, sample_data, changes)
    with serving_files(tmp_path / "files") as server:
        server.commits = {"pinned": "9bb295ddab0e05d785b879661af7260fed5140fc"}
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        built = small_corpus.build(recipe, tmp_path / "home", upto="token_shards")
    assert built.refs["token_shards"].counts["splits"]["train"]["tokens"] >= 200_000
    sent = sum(one.sent for one in server.data())
    assert 0 < sent < 0.6 * sum(path.stat().st_size for path in folder.rglob("*.parquet"))
