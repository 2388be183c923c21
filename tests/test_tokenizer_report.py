"""Tokenizers side by side: the numbers are those of a slow count, on documents that no cut of the corpus changes."""

import hashlib
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import small_corpus
import tokenizers
import torch
from small_corpus import EOS, Built, judged
from tokenizers import normalizers

from pipeline_assets.parameters import own_parameters
from pipeline_assets.pictures import grouped_bar_picture
from pipeline_assets.recipe_file import load_recipe
from pipeline_assets.sections.model import ModelShape
from pipeline_assets.sections.tokenizer import MAX_CANDIDATES
from pipeline_assets.stripes import units_in
from pipeline_assets.tokenizer_report import MAX_BARS, PICTURE_NAME, PICTURED_POOLS, REPORT_NAME
from pipeline_assets.transforms.tokenizer_comparison import choose_documents, measure_texts, table_cost
from resources.tokenizer import load_tokenizer, train_tokenizer
from training_io.errors import SourceError, StateMismatch
from training_io.model import Model, ModelConfig

CHECK = "bytes_a_token_is_in_the_recipe_range"
TEXTS = [small_corpus.sentences(number, 10 + number) for number in range(40)] + ["ß 東京\r\n", "\ufeffNaïve"]
OTHER_EOS = "<eos>"


def ids_of(number: int) -> np.ndarray:
    return np.frombuffer(b"".join(hashlib.sha256(b"%d" % n).digest() for n in range(number)), np.uint8).reshape(-1, 32)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with another vocabulary and another EOS."""
    path = tmp_path_factory.mktemp("other") / "tokenizer.json"
    path.write_bytes(train_tokenizer(TEXTS, 300, OTHER_EOS))
    return path


def report_of(built: Built) -> dict[str, Any]:
    return json.loads((built.folder("tokenizer_report") / REPORT_NAME).read_bytes())


def build(folder: Path, home: str, changes: Mapping[str, Any]) -> Built:
    recipe = small_corpus.write_recipe(folder, changes, f"{home}.yaml")
    return small_corpus.build(recipe, folder / home, upto="tokenizer_report")


def compared_with(path: Path, **changes: Any) -> dict[str, Any]:
    candidate = {"name": "other", "path": str(path), "eos": OTHER_EOS}
    return {"tokenizer_report": {"candidates": [candidate], "documents_per_pool": 20, **changes}}


def kept_texts(built: Built) -> dict[str, dict[bytes, str]]:
    """Kept texts by pool and doc_id, from the raw rows and the decisions of deduplication."""
    stage, found = built.stage, {"alpha": {}, "beta": {}}
    for unit in units_in(stage, built.refs["raw_row_groups"]):
        rows = stage.table(unit, "rows.parquet", ["text", "doc_id", "pool"]).to_pylist()
        kept = stage.table(built.refs["lsh_clusters"], f"clusters/{unit.unit}.parquet", ["kept"]).to_pylist()
        for row, decision in zip(rows, kept, strict=True):
            if decision["kept"]:
                found[row["pool"]][row["doc_id"]] = row["text"]
    return found


class TestChoosing:
    def test_what_is_chosen_of_parts_is_what_is_chosen_of_all(self) -> None:
        doc_ids = ids_of(300)
        whole = doc_ids[choose_documents(doc_ids, 20, key=5)]
        generator = random.Random(1)
        for _ in range(5):
            order = generator.sample(range(300), 300)
            parts = [doc_ids[order[start : start + 70]] for start in range(0, 300, 70)]
            chosen = np.concatenate([part[choose_documents(part, 20, key=5)] for part in parts])
            assert np.array_equal(chosen[choose_documents(chosen, 20, key=5)], whole)

    def test_copies_are_chosen_once_and_keys_differ(self) -> None:
        doc_ids = ids_of(50)
        rows = choose_documents(np.concatenate([doc_ids, doc_ids]), 1_000, key=5)
        assert sorted(rows.tolist()) == list(range(50))
        assert set(choose_documents(doc_ids, 10, key=5)) != set(choose_documents(doc_ids, 10, key=6))
        assert choose_documents(doc_ids[:0], 10, key=5).tolist() == []


class TestMeasuring:
    def test_counts_are_those_of_the_library(self, other: Path) -> None:
        library = tokenizers.Tokenizer.from_file(str(other))
        lengths = sorted(len(library.encode(text).ids) + 1 for text in TEXTS)
        measure = measure_texts(
            load_tokenizer(other, OTHER_EOS), pa.chunked_array([TEXTS[:5], TEXTS[5:]], pa.large_string())
        )
        assert measure.num_documents == measure.num_round_trips == len(TEXTS)
        assert measure.num_tokens == sum(lengths)
        assert measure.text_bytes == sum(len(text.encode()) for text in TEXTS)
        assert measure.bytes_a_token == measure.text_bytes / sum(lengths)
        assert measure.length_quantiles[1] == (lengths[20] + lengths[21]) / 2
        assert measure.longest == lengths[-1]

    def test_texts_that_do_not_come_back_as_they_were_are_counted(self, other: Path, tmp_path: Path) -> None:
        library = tokenizers.Tokenizer.from_file(str(other))
        library.normalizer = normalizers.Lowercase()
        library.save(str(tmp_path / "lower.json"))
        measure = measure_texts(
            load_tokenizer(tmp_path / "lower.json", OTHER_EOS), pa.array(["same", "Other", "Às", "ß"])
        )
        assert (measure.num_documents, measure.num_round_trips) == (4, 2)

    @pytest.mark.parametrize(
        ("norm", "heads", "kv_heads"), [("rmsnorm", 4, 2), ("layernorm", 4, 4), ("layernorm", 8, 1)]
    )
    def test_a_tables_cost_is_that_of_the_model_that_is_trained(self, norm: str, heads: int, kv_heads: int) -> None:
        shape = ModelShape(d_model=32, num_layers=3, num_heads=heads, num_kv_heads=kv_heads, d_ff=40, norm=norm)
        config = ModelConfig(vocab_size=301, max_positions=8, **shape.model_dump())
        model = Model(config, torch.Generator().manual_seed(1))
        cost = table_cost(300, shape)
        assert cost.table_parameters == model.tokens.weight.numel() == 301 * 32
        assert cost.table_parameters + cost.other_parameters == sum(one.numel() for one in model.parameters())
        assert cost.share == pytest.approx(301 * 32 / sum(one.numel() for one in model.parameters()))
        assert cost.multiply_adds_a_byte(4.0) == (cost.table_parameters + cost.other_parameters) / 4


class TestReport:
    def test_alone_the_chosen_tokenizer_is_reported_and_the_inventory_recounted(self, clean: Built) -> None:
        report, texts = report_of(clean), kept_texts(clean)
        library = tokenizers.Tokenizer.from_file(str(clean.folder("tokenizer") / "tokenizer.json"))
        library.encode_special_tokens = True
        assert [row["tokenizer"] for row in report["tokenizers"]] == ["chosen"]
        assert [row["pool"] for row in report["inventory"]] == ["alpha", "beta"]
        for row in report["inventory"]:
            of = list(texts[row["pool"]].values())
            assert row["documents"] == len(of)
            assert row["text_bytes"] == sum(len(text.encode()) for text in of)
            assert row["tokens"] == sum(len(library.encode(text, add_special_tokens=False).ids) + 1 for text in of)
            assert row["bytes_a_token"] == row["text_bytes"] / row["tokens"]
        totals = clean.refs["document_tokens"].counts
        counts = clean.refs["tokenizer_report"].counts
        assert all(counts[name] == totals[name] for name in ("documents", "text_bytes", "tokens"))
        # All documents are in the sample, so that nothing is left to estimate.
        (chosen,) = report["tokenizers"]
        assert chosen["tokens_estimated"] == totals["tokens"]
        assert chosen["round_trip_share"] == chosen["tokens_to_chosen"] == 1
        assert (chosen["vocabulary"], chosen["encoder"]) == (384, "words")
        assert chosen["because"]

    def test_candidates_get_the_same_documents(self, tmp_path: Path, other: Path) -> None:
        small_corpus.write_corpus(tmp_path)
        built = build(tmp_path, "home", compared_with(other))
        report, texts = report_of(built), kept_texts(built)
        rows = {(row["tokenizer"], row["pool"]): row for row in report["pools"]}
        assert list(rows) == [(name, pool) for name in ("chosen", "other") for pool in ("alpha", "beta")]
        for pool in ("alpha", "beta"):
            sampled = {(row["documents"], row["text_bytes"]) for name, row in rows.items() if name[1] == pool}
            assert len(sampled) == 1
            assert next(iter(sampled))[0] == 20 < len(texts[pool])
        by_name = {row["tokenizer"]: row for row in report["tokenizers"]}
        assert by_name["other"]["vocabulary"] == 300
        assert by_name["other"]["eos"] == OTHER_EOS
        ratio = by_name["other"]["tokens_estimated"] / by_name["chosen"]["tokens_estimated"]
        assert by_name["other"]["tokens_to_chosen"] == pytest.approx(ratio, rel=1e-4)
        assert by_name["other"]["tokens_to_chosen"] != 1
        picture = (built.folder("tokenizer_report") / PICTURE_NAME).read_bytes()
        assert picture.startswith(b"\x89PNG")

    def test_the_sample_does_not_depend_on_how_the_corpus_is_cut(self, tmp_path: Path, other: Path) -> None:
        small_corpus.write_corpus(tmp_path)
        reports = [
            build(
                tmp_path,
                f"home_{stripes}",
                {**compared_with(other), "reading.stripes": stripes, "reading.stripes_read": stripes},
            )
            for stripes in (1, 3)
        ]
        units = [len(units_in(built.stage, built.refs["document_tokens"])) for built in reports]
        assert units[0] != units[1]
        assert report_of(reports[0]) == report_of(reports[1])

    def test_a_pool_of_which_nothing_is_kept_is_left_out(self, tmp_path: Path) -> None:
        small_corpus.write_corpus(tmp_path)
        pools = [{"name": name, "path": path} for name, path in (("alpha", "alpha"), ("again", "alpha"))]
        report = report_of(build(tmp_path, "home", {"source.pools": pools}))
        assert {row["pool"] for rows in (report["pools"], report["inventory"]) for row in rows} == {"alpha"}

    def test_it_is_reused_until_a_candidate_or_its_settings_change(self, tmp_path: Path, other: Path) -> None:
        small_corpus.write_corpus(tmp_path)
        path = tmp_path / "candidate.json"
        path.write_bytes(other.read_bytes())
        outcomes = [
            build(tmp_path, "home", compared_with(path, **changes)).refs["tokenizer_report"].outcome
            for changes in ({}, {}, {"min_bytes_a_token": 1.0}, {"documents_per_pool": 5})
        ]
        path.write_bytes(train_tokenizer(TEXTS, 290, OTHER_EOS))
        outcomes.append(build(tmp_path, "home", compared_with(path)).refs["tokenizer_report"].outcome)
        assert outcomes == ["built", "reused", "reused", "built", "built"]

    def test_a_missing_or_another_candidate_is_named(self, tmp_path: Path, other: Path) -> None:
        small_corpus.write_corpus(tmp_path)
        with pytest.raises(SourceError, match=r"tokenizer_report\.candidates\.other: expected a file at .*absent"):
            build(tmp_path, "home", compared_with(tmp_path / "absent.json"))
        changes = compared_with(other)
        changes["tokenizer_report"]["candidates"][0]["fingerprint"] = "0" * 64
        with pytest.raises(StateMismatch, match=r"mend tokenizer_report\.candidates\.other\.fingerprint"):
            build(tmp_path, "home", changes)

    def test_the_model_and_the_candidates_are_among_its_values_and_their_places_are_not(self, tmp_path: Path) -> None:
        values = []
        for path in ("/one.json", "/two.json"):
            recipe = load_recipe(str(small_corpus.write_recipe(tmp_path, compared_with(Path(path)))))
            values.append(own_parameters(recipe, "tokenizer_report"))
        assert values[0] == values[1]
        assert values[0]["candidates"][0]["eos"] == OTHER_EOS
        assert values[0]["model"]["d_model"] == 16

    def test_its_page_shows_tables_and_a_picture(self, clean: Built) -> None:
        assert clean.result is not None
        metadata = small_corpus.materialized_metadata(clean.result)["tokenizer_report"]
        assert len(metadata["comparison_by_pool"]) == 2
        assert "![bytes a token by pool](data:image/png;base64," in metadata["bytes_a_token"]


class TestRange:
    @pytest.mark.parametrize(
        ("limits", "outside"),
        [
            ({}, []),
            ({"min_bytes_a_token": 6.0}, ["alpha", "beta"]),
            ({"min_bytes_a_token": 0.1, "max_bytes_a_token": 0.2}, ["alpha", "beta"]),
        ],
    )
    def test_pools_outside_the_recipes_limits_are_warned_of(
        self, copy: Built, limits: dict[str, float], outside: list[str]
    ) -> None:
        recipe = small_corpus.write_recipe(copy.recipe.parent, {"tokenizer_report": limits}, "limits.yaml")
        verdict = judged(CHECK, Built(recipe=recipe, home=copy.home, refs=copy.refs))
        assert [str(row["violation"]).partition(":")[0] for row in verdict.examples] == outside
        assert set(verdict.numbers) == {"alpha_bytes_a_token", "beta_bytes_a_token"}
        assert all(2 < value < 4 for value in verdict.numbers.values())


@pytest.mark.parametrize("num_tokenizers", range(1, MAX_CANDIDATES + 2))
def test_the_largest_picture_is_small(num_tokenizers: int) -> None:
    value, num_pools = random.Random(num_tokenizers).uniform, min(PICTURED_POOLS, MAX_BARS // num_tokenizers)
    groups = [f"a_pool_with_the_longest_name_{n:03d}" for n in range(num_pools)]
    series = {f"the_tokenizer_with_a_long_name_{n}": [value(1, 5) for _ in groups] for n in range(num_tokenizers)}
    assert grouped_bar_picture("title", "label", groups, series).startswith(b"\x89PNG")


def test_real_text_in_four_pools(sample_data: Path, tmp_path: Path) -> None:
    """GPT-2 spells Chinese out byte by byte; Qwen's larger vocabulary does not, and every text comes back."""
    pools = [{"name": name, "path": str(sample_data / "sample" / name)} for name in ("english", "chinese")]
    files = sample_data / "tokenizers"
    candidates = [{"name": "qwen3", "path": str(files / "qwen3.tokenizer.json.gz"), "eos": EOS}]
    changes = {
        "source": {"kind": "local", "pools": pools},
        "references": [],
        "dedup": {"mode": "exact"},
        "tokenizer": {"kind": "file", "path": str(files / "gpt2.tokenizer.json"), "eos": EOS},
        "tokenizer_report": {"candidates": candidates, "documents_per_pool": 100},
    }
    built = build(tmp_path, "home", changes)
    rows = {(row["tokenizer"], row["pool"]): row["bytes_a_token"] for row in report_of(built)["pools"]}
    assert rows["chosen", "chinese"] < 2 < 3 < rows["qwen3", "chinese"]
    assert 4 < rows["chosen", "english"] < 5
    assert {row["round_trip_share"] for row in report_of(built)["tokenizers"]} == {1.0}
    verdict = judged(CHECK, built)
    assert [row["violation"].partition(":")[0] for row in verdict.examples] == ["chinese"]
