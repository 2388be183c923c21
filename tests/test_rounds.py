"""Reading that stops when the token budgets are full: the same shards as reading everything, and less read."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import small_corpus
from small_corpus import Built, judged

from pipeline_assets import source
from pipeline_assets.stripes import units_in
from resources.tokenizer import train_tokenizer
from training_io.hashing import identity_of
from training_io.manifest import MANIFEST_NAME, load_manifest

BUDGETS = {"train": 3_000, "validation": 700}
UNFILLED = {"splits.budgets": {"train": 10**6, "validation": 10**6}}
NUM_FILES = 9


def write_files(folder: Path) -> Path:
    """Two pools of small files; a text of the first file comes again in the second and in the last."""
    number = 0
    repeated = small_corpus.sentences(9_000)
    for file in range(NUM_FILES):
        texts = [small_corpus.sentences(number + row, 20 + 3 * row) for row in range(12)]
        number += len(texts)
        if file in (0, 1, NUM_FILES - 1):
            texts.insert(5, repeated)
        pool = "alpha" if file < 6 else "beta"
        small_corpus.write_rows(folder / pool / f"{file:03d}.parquet", [{"text": text} for text in texts], 5)
    content = train_tokenizer([small_corpus.sentences(number) for number in range(50)], 400)
    (folder / "tokenizer.json").write_bytes(content)
    return folder


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Those files, free to be added to and damaged."""
    return write_files(tmp_path)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, and homes beside them that tests share: to build in, not to change."""
    return write_files(tmp_path_factory.mktemp("shared"))


@pytest.fixture(scope="module")
def bounded(shared: Path) -> Built:
    """Read until the budgets were full: to read, not to change."""
    return build(shared, "budgets", "bounded")


def recipe_of(corpus: Path, until: str, changes: Mapping[str, Any]) -> Path:
    """A recipe file of its own for each of its values."""
    return small_corpus.write_recipe(
        corpus,
        {
            "reading": {"stripes": 1, "stripes_read": 1, "unit_megabytes": 1, "until": until},
            "references": [],
            "dedup": {"mode": "exact"},
            "tokenizer": {"kind": "file", "path": "tokenizer.json", "eos": "<|endoftext|>"},
            "splits.order": "source",
            "splits.min_tokens": 60,
            "splits.assignment": {"policy": "fraction", "seed": 5, "validation_fraction": 0.3},
            "splits.budgets": BUDGETS,
            **changes,
        },
        f"{until}-{identity_of(changes)[:16]}.yaml",
    )


def build(corpus: Path, until: str, home: str, changes: Mapping[str, Any] | None = None) -> Built:
    return small_corpus.build(recipe_of(corpus, until, changes or {}), corpus / home, upto="packing_plan")


def bytes_of(built: Built, asset: str, pattern: str) -> dict[str, bytes]:
    folder = built.folder(asset)
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob(pattern))}


def trained_on(built: Built) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """Every byte of the shards and of the plan's columns."""
    return bytes_of(built, "token_shards", "*.bin"), bytes_of(built, "packing_plan", "*.npy")


@pytest.mark.parametrize(
    "assignment",
    [
        {"policy": "fraction", "seed": 5, "validation_fraction": 0.3},
        {"policy": "fraction", "seed": 6, "validation_fraction": 0.2, "test_fraction": 0.2},
        {"policy": "budget", "validation_tokens": 900},
        {"policy": "budget", "validation_tokens": 300},
    ],
)
def test_the_shards_are_those_of_reading_everything(shared: Path, assignment: Mapping[str, Any]) -> None:
    budgets = {**BUDGETS, **({"test": 500} if "test_fraction" in assignment else {})}
    changes = {"splits.assignment": assignment, "splits.budgets": budgets}
    bounded, whole = build(shared, "budgets", "bounded", changes), build(shared, "end", "whole", changes)
    assert trained_on(bounded) == trained_on(whole)
    rounds = bounded.refs["raw_row_groups"].counts["rounds"]
    assert rounds == len(units_in(bounded.stage, bounded.refs["raw_row_groups"])) < NUM_FILES
    assert all(bounded.refs["raw_row_groups"].counts["budgets_filled"].values())
    assert bounded.refs["split_documents"].counts["train_tokens"] >= budgets["train"]


def test_files_are_read_in_the_order_of_their_names(corpus: Path) -> None:
    """A folder whose name begins another's comes at another place by its path's parts than by its name."""
    for number, name in enumerate(("000/x", "000-er/y")):
        texts = [small_corpus.sentences(7_000 + 20 * number + row, 60) for row in range(12)]
        small_corpus.write_rows(corpus / "alpha" / f"{name}.parquet", [{"text": text} for text in texts], 5)
    budgets = {"splits.budgets": {"train": 1_500, "validation": 300}}
    bounded, whole = build(corpus, "budgets", "bounded", budgets), build(corpus, "end", "whole", budgets)
    assert trained_on(bounded) == trained_on(whole)
    assert bounded.refs["raw_row_groups"].counts["rounds"] < NUM_FILES


def test_a_split_of_no_share_has_no_budget_to_fill(shared: Path) -> None:
    changes = {
        "splits.assignment": {"policy": "fraction", "seed": 5, "validation_fraction": 0.0},
        "splits.budgets": {"train": 3_000, "validation": 700},
    }
    bounded = build(shared, "budgets", "bounded", changes)
    assert bounded.refs["raw_row_groups"].counts["budgets_filled"] == {"train": True}
    assert bounded.refs["raw_row_groups"].counts["rounds"] < NUM_FILES


def test_the_last_round_was_needed(bounded: Built) -> None:
    *_, last = units_in(bounded.stage, bounded.refs["split_documents"])
    used = {split: last.counts[f"{split}_tokens"] for split in BUDGETS}
    assert any(used.values()), "a round that adds nothing was read"


def test_files_behind_the_last_round_are_not_opened(corpus: Path, bounded: Built) -> None:
    damaged = sorted(corpus.rglob("*.parquet"))[-1]
    content = damaged.read_bytes()
    damaged.write_bytes(content[:4] + bytes(len(content) // 2) + content[4 + len(content) // 2 :])
    again = build(corpus, "budgets", "again")
    assert again.refs["raw_row_groups"].counts["rounds"] == bounded.refs["raw_row_groups"].counts["rounds"]
    assert trained_on(again) == trained_on(bounded)


def test_the_checks_recount_the_rounds(bounded: Built, tmp_path: Path) -> None:
    built = small_corpus.copy_home(bounded, tmp_path / "home")
    names = ("every_source_row_is_used_or_counted", "every_kept_document_has_a_split_or_a_reason")
    assert [judged(name, built).num_violations for name in names] == [0, 0]
    for key, wrong in (("rounds", 1), ("budgets_filled", {"train": True, "validation": False})):
        folder = built.folder("raw_row_groups")
        manifest = load_manifest(folder)
        misstated = replace(manifest, counts={**manifest.counts, key: wrong})
        (folder / MANIFEST_NAME).write_text(json.dumps(misstated.to_json()), encoding="utf-8")
        (example,) = judged(names[1], built).examples
        assert f"{key}: counted" in example["violation"]
        (folder / MANIFEST_NAME).write_text(json.dumps(manifest.to_json()), encoding="utf-8")


def test_a_round_too_many_is_noticed(shared: Path) -> None:
    """The whole source, sealed as if its reading had stopped where the budgets were full."""
    built = build(shared, "budgets", "unfilled", UNFILLED)
    assert built.refs["raw_row_groups"].counts["budgets_filled"] == {"train": False, "validation": False}
    assert built.refs["raw_row_groups"].counts["rounds"] == NUM_FILES
    name = "every_kept_document_has_a_split_or_a_reason"
    stage = small_corpus.open_stage(recipe_of(shared, "budgets", {}), built.home, is_judging=True)
    read = [built.refs[asset] for asset in small_corpus.assets_read_by(name)]
    examples = small_corpus.judge_of(name)(stage, *read).examples
    assert f"round {NUM_FILES} was read though the budgets were full before it" in str(examples)


def test_a_source_that_ends_too_early_is_said(shared: Path, tmp_path: Path) -> None:
    warnings: list[str] = []
    recipe = recipe_of(shared, "budgets", UNFILLED)
    stage = replace(small_corpus.open_stage(recipe, tmp_path / "home"), warn=warnings.append)
    parts = [ref for task in source.plan_rows(stage) for ref in source.build_rows(stage, task)]
    source.seal_rows(stage, parts)
    (warning,) = warnings
    assert "expected the token budgets to be filled, found the source's end after 9 rounds: train" in warning
