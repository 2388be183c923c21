"""What a user can get wrong: one clear error each, which says what to do, and nothing half-written behind it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
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


def test_other_columns_than_the_text_stop_no_run(folder: Path) -> None:
    texts = [small_corpus.sentences(9_000 + row) for row in range(4)]
    columns = [
        pa.array(texts),
        pa.array([b"http://a", b"\xff\xfe", None, b"http://b"]),
        pa.array([["crawl"], ["crawl"], None, []]),
        pa.array(["0.5", "high", None, "0.7"]),
        pa.array(texts, pa.string_view()),
        pa.array(["once"] * 4),
        pa.array(["twice"] * 4),
    ]
    names = ["text", "url", "dump", "score", "language", "id", "id"]
    pq.write_table(pa.Table.from_arrays(columns, names=names), folder / "alpha" / "odd.parquet")
    recipe, home = small_corpus.write_recipe(folder), folder / "home"
    result = small_corpus.materialize(recipe, home, "raw_row_groups")
    assert result.success, small_corpus.failures(result)
    assert small_corpus.materialized_metadata(result)["raw_row_groups"]["invalid_values"] == 1 + 3 + 1
    built = small_corpus.build(recipe, home, "raw_row_groups")
    units = units_in(built.stage, built.refs["raw_row_groups"])
    (unit,) = [unit for unit in units if unit.counts["file"] == "odd.parquet"]
    assert (unit.counts["documents"], unit.counts["missing_columns"]) == (4, ["id", "language_score"])
    rows = built.stage.table(unit, "rows.parquet", ["url", "dump", "score", "language", "id"]).to_pydict()
    assert rows == {
        "url": ["http://a", None, None, "http://b"],
        "dump": [None] * 4,
        "score": [0.5, None, None, 0.7],
        "language": texts,
        "id": [None] * 4,
    }


def with_reference(path: Path, **more: Any) -> dict[str, Any]:
    held_out = {"name": "held_out", "kind": "file", "path": str(path), "action": "train_only", **more}
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


def test_a_reference_file_that_cannot_be_read_is_named_with_its_set_and_line(clean: Built, tmp_path: Path) -> None:
    home = small_corpus.copy_home(clean, tmp_path / "home").home
    for name, content, parts in (
        ("exam.txt", b"one\ncaf\xe9\n", ("line 2", "UTF-8 text", "Save the file as UTF-8")),
        ("exam.jsonl", b'{"text": "one"}\n{"question": "two"}\n', ("line 2", "'text'", "'question'", "Mend the line")),
        ("exam.csv", b"text\none\n", (".parquet, .jsonl or .txt", "Rename or convert")),
        ("exam.parquet", b"PAR1", ("a Parquet file", "fetch it again")),
    ):
        (tmp_path / name).write_bytes(content)
        recipe = small_corpus.write_recipe(clean.recipe.parent, with_reference(tmp_path / name), "references.yaml")
        (refusal,) = refusals(recipe, home, "reference_sets").values()
        assert_says(refusal, "SourceError", "reference set held_out: ", str(tmp_path / name), *parts)


def test_a_reference_set_is_the_same_from_each_kind_of_file(clean: Built, tmp_path: Path) -> None:
    home = small_corpus.copy_home(clean, tmp_path / "home").home
    texts = [small_corpus.HELD_OUT, small_corpus.sentences(2_000)]
    pq.write_table(pa.table({"text": texts}), tmp_path / "exam.PARQUET")
    (tmp_path / "exam.txt").write_bytes(b"\xef\xbb\xbf" + "\r\n".join(texts).encode())
    (tmp_path / "exam.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    found = []
    for name in ("exam.PARQUET", "exam.txt", "exam.jsonl"):
        recipe = small_corpus.write_recipe(clean.recipe.parent, with_reference(tmp_path / name), "references.yaml")
        built = small_corpus.build(recipe, home, "reference_sets")
        table = built.stage.table(built.refs["reference_sets"], "held_out.parquet")
        assert sorted(table.column("text").to_pylist()) == sorted(texts)
        found.append(built.refs["reference_sets"].digest)
    assert found == found[:1] * 3


def test_a_universe_that_is_smaller_than_what_was_drawn_from_it(clean: Built, tmp_path: Path) -> None:
    home = small_corpus.copy_home(clean, tmp_path / "home").home
    path = tmp_path / "exam.txt"
    num_documents = clean.refs["raw_row_groups"].counts["documents"]
    for num_texts, drawn in ((1, num_documents), (2 * num_documents, 2 * num_documents)):
        path.write_text("\n".join(map(str, range(num_texts))))
        changes = with_reference(path, universe_documents=drawn - 1)
        recipe = small_corpus.write_recipe(clean.recipe.parent, changes, "references.yaml")
        (refusal,) = refusals(recipe, home, "reference_sets").values()
        parts = (
            f"{num_documents} documents of the corpus",
            f"{num_texts} texts of the set",
            f"found {drawn - 1}. Mend",
        )
        assert_says(refusal, "RecipeError", f"set held_out: expected universe_documents of at least {drawn}", *parts)


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


def test_a_training_split_of_which_every_document_is_too_long(clean: Built, tmp_path: Path) -> None:
    changes = {"packs.long_documents": "divert", "packs.overlap": 0, "packs.max_seq_len": 4, "training.steps": 1}
    recipe = small_corpus.write_recipe(clean.recipe.parent, changes, "too_long.yaml")
    home = small_corpus.copy_home(clean, tmp_path / "home").home
    result = small_corpus.materialize(recipe, home, "packing_plan", "varlen_training_run")
    refusal = small_corpus.failures(result)["varlen_training_run"]
    assert "expected packs of the training split, found none" in refusal
    assert "Raise packs.max_seq_len, which is 4" in refusal


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
    # A million times the same letter is a token a byte with 300 ids: worth its warning, and no more.
    changes = {"reading.stripes": 1, "reading.stripes_read": 1, "tokenizer_report": {"min_bytes_a_token": 0.5}}
    recipe, home = small_corpus.write_recipe(folder, changes), folder / "home"
    before = {path for path in folder.parent.rglob("*") if home not in path.parents}
    result = small_corpus.materialize(recipe, home, "raw_row_groups")
    assert result.success, small_corpus.failures(result)
    built = small_corpus.build(recipe, home)
    for name in CHECK_NAMES:
        if not {*small_corpus.LAST} & {*small_corpus.assets_read_by(name)}:
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
        for arguments in (("run", "--without-training"), ("instance",)):  # the UI starts with the second
            done = small_corpus.run_command(recipe, tmp_path / "home", *arguments, **more)
            assert done.returncode == 1
            assert "Traceback" not in done.stdout + done.stderr
            assert any("RecipeError" in line and part in line for line in done.stderr.splitlines()[-4:]), done.stderr
