"""What a user can get wrong: one clear error each, which says what to do, and nothing half-written behind it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import small_corpus
from small_corpus import CHECK_NAMES, Built, judged

from pipeline_assets.stripes import units_in
from training_io.manifest import load_manifest

ALPHA = Path("alpha") / "a_000.parquet"
HOSTILE_NAMES = (
    "<script>alert(1)<&>.parquet",
    "$(touch escaped); `touch escaped` | & \"quoted\" 'single'.parquet",
    "..%2f..%2fescape.parquet",
    "- 名前 \n with a line break.parquet",
    ".." + "a" * 200 + ".parquet",
)
HOSTILE_TEXTS = (
    "<script>alert('text')</script> " + small_corpus.sentences(7_000),
    "../../../etc/passwd $(rm -rf ~) `id` ; drop table documents; -- " + small_corpus.sentences(7_001),
    "x" * 1_000_000,
    "{{7*7}} ${7*7} %s %n \x00 \x1b[31m " + small_corpus.sentences(7_002),
    "\u202e right to left \ufeff\u200b " + small_corpus.sentences(7_003),
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A corpus of its own, free to be damaged."""
    return small_corpus.write_corpus(tmp_path)


def refusals(recipe: Path, home: Path, *assets: str) -> dict[str, str]:
    """Descriptions of the failed steps of a run that had to fail, after which nothing is half-written."""
    result = small_corpus.materialize(recipe, home, *assets)
    assert not result.success
    assert small_corpus.unfinished(home) == []
    return small_corpus.failures(result)


def assert_says(refusal: str, kind: str, *parts: str) -> None:
    assert refusal.startswith(f"{kind}: "), refusal
    for part in (*parts, "expected", "found"):
        assert part in refusal, refusal
    assert "Traceback" not in refusal


def write_text_column(folder: Path, name: str, texts: list[str | None]) -> None:
    """Every file of the corpus with one column of these texts."""
    for path in sorted(folder.rglob("*.parquet")):
        small_corpus.write_rows(path, [{name: text} for text in texts])


def remove_pool(folder: Path) -> None:
    (folder / "alpha").rename(folder / "elsewhere")


def empty_pool(folder: Path) -> None:
    remove_pool(folder)
    (folder / "alpha").mkdir()


def cut_short(folder: Path) -> None:
    path = folder / ALPHA
    path.write_bytes(path.read_bytes()[:-100])


SOURCES: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "missing folder": (remove_pool, ("pool alpha", "a folder of Parquet files", "Put the files there")),
    "empty folder": (empty_pool, ("pool alpha", "at least one file", "Put the files there")),
    "no text column": (lambda folder: write_text_column(folder, "body", ["a"]), ("a_000.parquet", "body", "Rename")),
    "cut short": (cut_short, ("a_000.parquet", "fetch it again")),
    "nothing to use": (
        lambda folder: write_text_column(folder, "text", [None, ""]),
        ("at least one usable document", "6 rows", "3 null", "3 empty", "Check the source's text column"),
    ),
}


@pytest.mark.parametrize("name", SOURCES)
def test_a_source_that_cannot_be_used(name: str, folder: Path) -> None:
    damage, parts = SOURCES[name]
    damage(folder)
    (refusal,) = refusals(small_corpus.write_recipe(folder), folder / "home", "raw_row_groups").values()
    assert_says(refusal, "SourceError", *parts)


def test_a_damaged_page_fails_its_own_stripe_alone(folder: Path) -> None:
    column = pq.read_metadata(folder / ALPHA).row_group(0).column(0)
    content = bytearray((folder / ALPHA).read_bytes())
    content[column.data_page_offset + column.total_compressed_size - 5] ^= 0xFF
    (folder / ALPHA).write_bytes(content)
    recipe, home = small_corpus.write_recipe(folder), folder / "home"
    found = refusals(recipe, home, "raw_row_groups")
    (failed,) = found
    assert "stripe_000_of_002" in failed
    assert_says(found[failed], "SourceError", "a_000.parquet", "fetch it again")
    sealed = sorted(load_manifest(path).unit for path in home.glob("raw_row_groups/*/*"))
    assert sum("-000001-by-2" in unit for unit in sealed) == 3  # the other stripe, of all three files
    small_corpus.write_corpus(folder)
    again = small_corpus.materialize(recipe, home, "raw_row_groups")
    metadata = small_corpus.materialized_metadata(again)["raw_row_groups"]
    assert metadata["artifacts_reused"] >= 3


def with_reference(path: Path) -> dict[str, Any]:
    held_out = {"name": "held_out", "kind": "file", "path": str(path), "action": "train_only"}
    return {"references": [small_corpus.RECIPE["references"][0], held_out]}


def test_a_reference_file_that_is_missing_or_empty(clean: Built, tmp_path: Path) -> None:
    home = small_corpus.copy_home(clean, tmp_path / "home").home
    path = tmp_path / "references.txt"
    recipe = small_corpus.write_recipe(clean.recipe.parent, with_reference(path), "references.yaml")
    (refusal,) = refusals(recipe, home, "reference_sets").values()
    assert_says(refusal, "SourceError", "reference set held_out", str(path), "Put the file there")
    path.write_text("\n \n", encoding="utf-8")
    (refusal,) = refusals(recipe, home, "reference_sets").values()
    assert_says(refusal, "SourceError", "reference set held_out", "at least one text", "mend references")


def test_a_tokenizer_that_is_missing_broken_or_without_the_named_eos(clean: Built, tmp_path: Path) -> None:
    home = small_corpus.copy_home(clean, tmp_path / "home").home
    path = tmp_path / "tokenizer.json"
    tokenizer = {"kind": "file", "path": str(path), "eos": "<|end|>"}
    recipe = small_corpus.write_recipe(clean.recipe.parent, {"tokenizer": tokenizer}, "tokenizer.yaml")
    (refusal,) = refusals(recipe, home, "tokenizer").values()
    assert_says(refusal, "SourceError", str(path), "Mend tokenizer.path")
    path.write_text("{}")
    (refusal,) = refusals(recipe, home, "tokenizer").values()
    assert_says(refusal, "FormatError", str(path), "Fetch the file again")
    path.write_bytes((clean.folder("tokenizer") / "tokenizer.json").read_bytes())
    (refusal,) = refusals(recipe, home, "tokenizer").values()
    assert_says(refusal, "RecipeError", "'<|end|>'", small_corpus.EOS, "Name the tokenizer's EOS")


def test_a_floor_above_every_document(clean: Built, tmp_path: Path) -> None:
    home = small_corpus.copy_home(clean, tmp_path / "home").home
    recipe = small_corpus.write_recipe(clean.recipe.parent, {"splits.min_tokens": 1_000_000}, "floor.yaml")
    (refusal,) = refusals(recipe, home, "split_documents").values()
    assert_says(refusal, "RecipeError", "at least one training document", "1,000,000 tokens", "Lower splits.min_tokens")


CONTRADICTIONS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "two batch sizes": ({"packs.microbatch_tokens": 128}, ("packs", "exactly one of batch_size", "remove or add one")),
    "capacity below length": ({"packs.capacity": 16}, ("packs", "a capacity of at least max_seq_len, 32", "found 16")),
    "unknown key": ({"dedup.mod": "near"}, ("dedup.mod", "unknown key")),
    "no sample": ({"references": []}, ("tokenizer.sample", "found 'sample'")),
    "nothing to train on": (
        {"splits.assignment": {"policy": "fraction", "seed": 1, "validation_fraction": 0.5, "test_fraction": 0.5}},
        ("splits.assignment", "below 1"),
    ),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_recipe_that_contradicts_itself(name: str, clean: Built, tmp_path: Path) -> None:
    changes, parts = CONTRADICTIONS[name]
    recipe = small_corpus.write_recipe(tmp_path, changes)
    (refusal,) = refusals(recipe, tmp_path / "home", "raw_row_groups").values()
    assert refusal.startswith("RecipeError: ")
    for part in (*parts, str(recipe), "Mend the recipe"):
        assert part in refusal, refusal
    assert not list((tmp_path / "home").glob("*"))


def test_hostile_names_and_texts_are_data_like_any_other(folder: Path) -> None:
    for number, name in enumerate(HOSTILE_NAMES):
        texts = [HOSTILE_TEXTS[number], *(small_corpus.sentences(8_000 + 10 * number + row) for row in range(4))]
        rows = [{"text": text, "id": name, "dump": f"<b>{name}</b>", "url": "javascript:alert(1)"} for text in texts]
        small_corpus.write_rows(folder / "beta" / name, rows)
    recipe, home = small_corpus.write_recipe(folder, {"reading.stripes": 1, "reading.stripes_read": 1}), folder / "home"
    before = {path for path in folder.parent.rglob("*") if home not in path.parents}
    result = small_corpus.materialize(recipe, home, "raw_row_groups")
    assert result.success, small_corpus.failures(result)
    built = small_corpus.build(recipe, home)
    for name in CHECK_NAMES:
        if "varlen_training_run" not in small_corpus.assets_read_by(name):
            assert judged(name, built).num_violations == 0, name
    units = units_in(built.stage, built.refs["raw_row_groups"])
    assert {unit.counts["file"] for unit in units} >= set(HOSTILE_NAMES)
    assert all(set(unit.unit) <= set("abcdefghijklmnopqrstuvwxyz0123456789-") for unit in units)
    texts = {text for unit in units for text in built.stage.table(unit, "rows.parquet").column("text").to_pylist()}
    assert texts >= set(HOSTILE_TEXTS)
    after = {path for path in folder.parent.rglob("*") if home not in path.parents}
    assert after - before == {home}
    assert small_corpus.unfinished(home) == []


def test_the_command_line_ends_with_the_reason_and_without_a_traceback(clean: Built, folder: Path) -> None:
    remove_pool(folder)
    recipe = small_corpus.write_recipe(folder)
    done = small_corpus.run_command(recipe, folder / "home", "run", "--without-training")
    assert done.returncode == 1
    assert "Traceback" not in done.stdout + done.stderr
    (reason,) = [line for line in done.stderr.splitlines()[-3:] if "SourceError" in line]
    assert "pool alpha: expected a folder of Parquet files" in reason
    assert "mend source.pools in the recipe" in reason


def test_the_command_line_refuses_a_wrong_recipe_or_home(clean: Built, tmp_path: Path) -> None:
    wrong = small_corpus.write_recipe(tmp_path, {"packs.capacity": 16})
    for recipe, more, part in (
        (wrong, {}, "a capacity of at least max_seq_len"),
        (clean.recipe, {"CORPUSMILL_HOME": "s3://bucket/home"}, "expected a local folder, found 's3://bucket/home'"),
    ):
        done = small_corpus.run_command(recipe, tmp_path / "home", "run", "--without-training", **more)
        assert done.returncode == 1
        assert "Traceback" not in done.stdout + done.stderr
        assert any("RecipeError" in line and part in line for line in done.stderr.splitlines()[-4:]), done.stderr
