"""The whole graph over the small corpus: what comes out, that it is the same bytes again, and what each setting changes."""

import gzip
import json
import random
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import dagster as dg
import numpy as np
import pyarrow as pa
import pytest
import small_corpus
from small_corpus import CHECK_NAMES, EXACT, REPORT, TRAINING, Built, doc_id, judged
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from pipeline_assets.flow import STAGES
from pipeline_assets.pictures import MAX_PICTURE_BYTES
from pipeline_assets.stripes import units_in
from pipeline_assets.training import CHECKPOINTS_FOLDER, UNFINISHED_FOLDER, training_options
from resources.tables import read_json, read_table
from training_io.document_index import DocumentIndex, read_index
from training_io.errors import RecipeError
from training_io.manifest import load_manifest
from training_io.plan import load_plan
from training_io.progress import Positions, Progress, progress_line
from training_io.shard_format import read_shard

ISOLATION = "no_token_sees_another_document"
DATA_CHECKS = [name for name in CHECK_NAMES if not {*small_corpus.LAST} & {*small_corpus.assets_read_by(name)}]
CHECKS_OF_SPLITS = ("no_document_is_in_two_splits", "no_cluster_is_in_two_splits", "no_reference_text_is_in_validation")


def not_passed(result: dg.ExecuteInProcessResult) -> set[str]:
    """Names of the checks that failed or warned."""
    return {name for name, evaluation in small_corpus.evaluations(result).items() if not evaluation.passed}


def another_recipe(built: Built, name: str, changes: dict[str, Any]) -> Path:
    """The small recipe with some changes, over the same corpus."""
    return small_corpus.write_recipe(built.recipe.parent, changes, f"{name}.yaml")


def rebuilt(copy: Built, name: str, changes: dict[str, Any], upto: str = "token_shards") -> Built:
    """What a changed recipe makes in a home that already holds what the unchanged one made."""
    return small_corpus.build(another_recipe(copy, name, changes), copy.home, upto)


def assert_laws_hold(built: Built, names: Iterable[str]) -> None:
    assert {name: judged(name, built).num_violations for name in names} == dict.fromkeys(names, 0)


def decisions(built: Built) -> list[dict[str, Any]]:
    """Every raw row with what deduplication decided about it."""
    stage, clusters = built.stage, built.refs["lsh_clusters"]
    found = []
    for unit in units_in(stage, built.refs["raw_row_groups"]):
        rows = stage.table(unit, "rows.parquet", ["text", "pool"]).to_pylist()
        decided = stage.table(clusters, f"clusters/{unit.unit}.parquet").to_pylist()
        found += [{**row, **decision} for row, decision in zip(rows, decided, strict=True)]
    return found


def decided(built: Built, text: str) -> list[tuple[str, str]]:
    """Pool and reason of every row with this text."""
    return sorted((row["pool"], row["reason"]) for row in decisions(built) if row["text"] == text)


def split_rows(built: Built) -> list[dict[str, Any]]:
    tables = [
        built.stage.table(unit, "documents.parquet") for unit in units_in(built.stage, built.refs["split_documents"])
    ]
    return pa.concat_tables(tables).to_pylist()


def indexes(built: Built) -> dict[str, DocumentIndex]:
    folder = built.folder("token_shards")
    return {path.name.removesuffix("_index"): read_index(path) for path in sorted(folder.glob("*_index"))}


class TestCleanRun:
    def test_everything_materializes_and_every_check_passes(self, clean: Built) -> None:
        assert clean.result is not None
        assert clean.result.success
        evaluations = small_corpus.evaluations(clean.result)
        assert sorted(evaluations) == sorted(CHECK_NAMES)
        assert {name: evaluation.description for name, evaluation in evaluations.items() if not evaluation.passed} == {}
        assert set(small_corpus.materialized_metadata(clean.result)) == set(STAGES)

    def test_data_versions_are_identities(self, clean: Built) -> None:
        assert clean.result is not None
        metadata = small_corpus.materialized_metadata(clean.result)
        for asset, ref in clean.refs.items():
            assert metadata[asset]["data_version"] == metadata[asset]["identity"] == ref.identity
            assert metadata[asset]["folder"] == str(clean.folder(asset))
            assert load_manifest(clean.folder(asset)).identity == ref.identity == clean.folder(asset).name

    def test_the_stages_alone_give_the_same_bytes(self, clean: Built, tmp_path: Path) -> None:
        alone = small_corpus.build(clean.recipe, tmp_path / "home")
        expected = small_corpus.artifact_files(clean.home, leave_out=[TRAINING, REPORT])
        assert small_corpus.artifact_files(alone.home) == expected

    def test_rows_are_counted_with_reasons(self, clean: Built) -> None:
        counts = clean.refs["raw_row_groups"].counts
        assert counts["rows_read"] == small_corpus.NUM_ROWS
        assert (counts["null_text"], counts["empty_text"]) == (1, 1)
        assert counts["rows_used"] == small_corpus.NUM_ROWS - 2
        assert (counts["with_crlf"], counts["with_byte_order_mark"]) == (1, 1)

    def test_planted_copies_and_unique_texts_come_out_as_expected(self, clean: Built) -> None:
        assert decided(clean, EXACT) == [("alpha", "exact_duplicate"), ("alpha", "kept")]
        assert decided(clean, small_corpus.CROSS_POOL) == [("alpha", "kept"), ("beta", "exact_duplicate")]
        assert decided(clean, small_corpus.NEAR_ORIGINAL) == [("alpha", "kept")]
        assert decided(clean, small_corpus.NEAR_COPY) == [("beta", "near_duplicate")]
        assert decided(clean, small_corpus.HELD_OUT_NEAR_COPY) == [("beta", "near_duplicate")]
        assert decided(clean, small_corpus.UNIQUE) == [("beta", "kept")]
        assert decided(clean, small_corpus.WORDLESS) == [("beta", "kept")]
        kept = [row for row in decisions(clean) if row["kept"]]
        assert len({row["text"] for row in kept}) == len(kept) == small_corpus.NUM_ROWS - 2 - 4
        (cross,) = [row for row in kept if row["text"] == small_corpus.CROSS_POOL]
        assert cross["pools"] == "alpha,beta"

    def test_evidence_names_the_kept_text_and_its_similarity(self, clean: Built) -> None:
        evidence = {
            row["removed_doc_id"]: row
            for row in read_table(clean.folder("lsh_clusters") / "evidence.parquet").to_pylist()
        }
        near = evidence[doc_id(small_corpus.NEAR_COPY)]
        assert near["kept_doc_id"] == doc_id(small_corpus.NEAR_ORIGINAL)
        assert (near["removed_pool"], near["kept_pool"]) == ("beta", "alpha")
        # 146 five-word shingles each, the last two of which differ
        assert near["jaccard"] == pytest.approx(144 / 148)
        assert evidence[doc_id(EXACT)]["jaccard"] == 1

    def test_held_out_texts_and_their_near_copies_never_leave_training(self, clean: Built) -> None:
        rows = {row["doc_id"]: row for row in split_rows(clean)}
        for text in (small_corpus.HELD_OUT, small_corpus.LIKE_A_REFERENCE):
            assert rows[doc_id(text)]["split"] == "train"
        sample = read_table(clean.folder("reference_sets") / "sample.parquet").column("doc_id").to_pylist()
        assert {rows[text]["split"] for text in sample if text in rows} <= {"train", "unused"}
        assert sum(row["split"] == "validation" for row in rows.values()) > 10

    def test_every_text_survives_unaltered_as_tokens(self, clean: Built) -> None:
        import tokenizers

        library = tokenizers.Tokenizer.from_file(str(clean.folder("tokenizer") / "tokenizer.json"))
        texts = {row["doc_id"]: row["text"] for row in split_rows(clean) if row["split"] in ("train", "validation")}
        seen = {}
        for index in indexes(clean).values():
            shards = [read_shard(clean.folder("token_shards") / file) for file in index.shard_files]
            for row in range(index.num_documents):
                start, end = int(index.offsets[row]), int(index.offsets[row] + index.lengths[row])
                *ids, end_of_document = shards[int(index.shards[row])][start:end].tolist()
                assert end_of_document == 0
                assert 0 not in ids
                seen[index.doc_ids[row].tobytes()] = library.decode(ids, skip_special_tokens=False)
        assert seen == texts
        for text in (
            small_corpus.CANARY,
            small_corpus.CRLF,
            small_corpus.BYTE_ORDER_MARK,
            small_corpus.CJK,
            small_corpus.LONG,
        ):
            assert seen[doc_id(text)] == text

    def test_what_is_too_short_is_unused_with_the_reason(self, clean: Built) -> None:
        (short,) = [row for row in split_rows(clean) if row["text"] == small_corpus.WORDLESS]
        assert (short["split"], short["reason"]) == ("unused", "below_min_tokens")
        assert short["num_tokens"] < 12

    def test_shards_have_the_layout_that_was_asked_for(self, clean: Built) -> None:
        index = indexes(clean)["train"]
        assert len(index.shard_files) > 1
        assert max(index.shard_tokens) <= 12_000
        assert index.token_dtype == "uint16"
        header = np.fromfile(clean.folder("token_shards") / index.shard_files[0], "<i4", 3)
        assert header.tolist() == [20240520, 1, index.shard_tokens[0]]


class TestTraining:
    def test_its_page_shows_curves_and_where_its_positions_went(self, clean: Built) -> None:
        assert clean.result is not None
        page = small_corpus.materialized_metadata(clean.result)[TRAINING]
        for picture in ("loss_curve", "gradient_norms", "speed"):
            assert 1_000 < len(page[picture]) < 1.4 * MAX_PICTURE_BYTES, picture
        plan = load_plan(clean.folder("packing_plan"), "train")
        packs = np.arange(3 * plan.packs_per_step)
        assert plan.num_steps > 3, "the three steps are of one epoch"
        documents, _, ends = plan.locate(plan.segments_of(packs))
        num_eos = int((ends == plan.index.lengths[documents] - 1).sum())
        assert num_eos > 0
        assert page["eos_positions"] == num_eos
        assert page["body_positions"] + num_eos == page["tokens"] == int(plan.pack_targets[packs].sum())
        assert page["slack_positions"] == len(packs) * plan.capacity - page["tokens"]
        assert (page["overlap_positions"], page["padding_positions"]) == (0, 0)
        assert {name for name in page if name.startswith("final_validation_loss")} == {
            "final_validation_loss",
            "final_validation_loss_of_alpha",
            "final_validation_loss_of_beta",
        }

    def test_its_log_says_where_it_is(self) -> None:
        progress = Progress(
            step=20,
            steps=100,
            loss=7.25,
            gradient_norm=1.5,
            learning_rate=0.1,
            validation_loss=8.0,
            evaluations=(),
            tokens=1_024,
            positions=Positions(body=1_000, eos=24, overlap=5, slack=7),
            tokens_per_second=2_500.0,
            mfu=0.456,
            eta_seconds=30.0,
        )
        assert progress_line(progress) == (
            "step 20 of 100: loss 7.250, validation 8.000, gradient 1.50, 2,500 tokens/s, MFU 45.6%, 30 s left;"
            " loss over 1,024 = 1,000 body + 24 EOS, overlap 5, slack 7, padding 0"
        )

    def test_a_context_of_two_tokens_is_trained_and_judged(self, copy: Built) -> None:
        packs = {"max_seq_len": 2, "capacity": 2, "batch_size": 1, "eval_microbatch_tokens": 64}
        recipe = another_recipe(copy, "two", {"packs": {**small_corpus.RECIPE["packs"], **packs}})
        result = small_corpus.materialize(recipe, copy.home, "packing_plan", TRAINING)
        assert result.success, small_corpus.failures(result)
        assert not_passed(result) <= {"one_pack_can_be_overfitted", "validation_loss_falls"}, "6 targets in 3 steps"

    def test_tensorboard_reads_its_losses(self, clean: Built) -> None:
        assert clean.result is not None
        events = Path(small_corpus.materialized_metadata(clean.result)[TRAINING]["event_files"])
        assert not events.is_relative_to(clean.folder(TRAINING)), "they hold times: no two runs write the same"
        (path,) = events.iterdir()
        losses = {
            event.step: value.tensor.float_val[0]
            for event in EventFileLoader(str(path)).Load()
            for value in event.summary.value
            if value.tag == "loss"
        }
        recorded = read_json(clean.folder(TRAINING) / "curves.json")["train"]
        assert losses == {3: np.float32(recorded[2])}

    def test_the_command_trains_like_the_asset(self, clean: Built, copy: Built) -> None:
        output, report = copy.home.parent / "by hand", copy.home.parent / "result.json"
        arguments = ("train", "--output", str(output), "--json", str(report))
        done = small_corpus.run_command(copy.recipe, copy.home, *arguments)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("python -m training_io.train --plan ")
        curves, result = read_json(clean.folder(TRAINING) / "curves.json"), read_json(report)
        assert result["losses"] == curves["train"]
        assert result["validation"] == curves["validation"]
        again = small_corpus.run_command(copy.recipe, copy.home, *arguments)
        assert again.returncode == 1
        assert "Give --resume" in again.stderr

    def test_the_command_takes_the_windows_of_the_recipe(self, copy: Built) -> None:
        windows = {**small_corpus.WINDOWS["training.windows"], "document_mask": True}
        recipe = another_recipe(copy, "masked", {**small_corpus.WINDOWS, "training.windows": windows})
        pipeline, plan = small_corpus.open_stage(recipe, copy.home).pipeline, copy.folder("packing_plan")
        options = training_options(pipeline)
        assert options[:2] == ["--shards", str(copy.folder("token_shards"))]
        assert options[2:8] == ["--window-length", "32", "--batch-size", "2", "--accumulation", "1"]
        assert options[8:10] == ["--eval-batch-size", str(small_corpus.RECIPE["packs"]["eval_microbatch_tokens"] // 32)]
        assert options[-1] == "--document-mask"
        options = training_options(pipeline, plan)
        assert options[:2] == ["--plan", str(plan)]
        assert "--document-mask" not in options

    def test_a_recipe_of_several_ranks_is_told_the_launcher(self, copy: Built) -> None:
        recipe = another_recipe(copy, "ranks", {"training.num_ranks": 2})
        pipeline, plan = small_corpus.open_stage(recipe, copy.home).pipeline, copy.folder("packing_plan")
        expected = rf"found 2[.] Start .*torchrun --nproc_per_node 2 -m training_io[.]train --plan {plan} --model "
        with pytest.raises(RecipeError, match=expected):
            training_options(pipeline, plan)

    def test_checkpoints_that_cannot_be_removed_are_an_error(self, copy: Built) -> None:
        unfinished = copy.home / UNFINISHED_FOLDER / copy.refs[TRAINING].identity
        unfinished.mkdir(parents=True, exist_ok=True)
        (unfinished / CHECKPOINTS_FOLDER).write_text("no folder")
        result = small_corpus.materialize(copy.recipe, copy.home, TRAINING)
        assert not result.success
        assert "NotADirectoryError" in str(small_corpus.failures(result))


class TestSecondRun:
    def test_everything_is_reused_with_the_same_data_versions(self, clean: Built, copy: Built) -> None:
        assert clean.result is not None
        before = small_corpus.artifact_files(copy.home)
        result = small_corpus.materialize(copy.recipe, copy.home)
        assert result.success
        first, second = (small_corpus.materialized_metadata(run) for run in (clean.result, result))
        for asset in STAGES:
            assert first[asset]["artifacts_built"] >= 1
            assert (second[asset]["artifacts_built"], second[asset]["artifacts_rebuilt"]) == (0, 0), asset
            assert second[asset]["data_version"] == first[asset]["data_version"]
        assert second[TRAINING]["speed"] == first[TRAINING]["speed"]  # measured when it was trained
        assert small_corpus.artifact_files(copy.home) == before

    def test_one_asset_alone_reads_the_latest_of_the_same_parameters(self, clean: Built, copy: Built) -> None:
        other = another_recipe(copy, "longer", {"packs.max_seq_len": 48})
        assert small_corpus.materialize(other, copy.home, "packing_plan").success
        assert small_corpus.recorded(other, copy.home)["packing_plan"] != clean.refs["packing_plan"]
        result = small_corpus.materialize(copy.recipe, copy.home, "packing_stats")
        assert result.success
        (metadata,) = small_corpus.materialized_metadata(result).values()
        assert metadata["data_version"] == clean.refs["packing_stats"].identity

    def test_one_asset_alone_refuses_what_other_parameters_made(self, copy: Built) -> None:
        other = another_recipe(copy, "floor", {"splits.min_tokens": 77})
        (refusal,) = small_corpus.failures(small_corpus.materialize(other, copy.home, "token_shards")).values()
        assert refusal.startswith("StateMismatch: split_documents")
        assert "split_documents.splits.min_tokens: this recipe says 77, it was built with 12." in refusal
        assert "materialize split_documents with this one" in refusal

    def test_one_asset_alone_in_an_empty_home_says_what_to_materialize(self, clean: Built, tmp_path: Path) -> None:
        (refusal,) = small_corpus.failures(
            small_corpus.materialize(clean.recipe, tmp_path / "home", "packing_stats")
        ).values()
        assert "Materialize token_shards first" in refusal or "Materialize packing_plan first" in refusal


class TestSameBytes:
    def test_stripes_change_no_token_and_no_plan(self, clean: Built, tmp_path: Path) -> None:
        changes = {"reading.stripes": 3, "reading.stripes_read": 3}
        other = small_corpus.build(another_recipe(clean, "striped", changes), tmp_path / "home", upto="packing_plan")
        assert len(units_in(other.stage, other.refs["raw_row_groups"])) != len(
            units_in(clean.stage, clean.refs["raw_row_groups"])
        )
        assert_same_training_bytes(clean, other)

    def test_buckets_change_no_decision(self, clean: Built, copy: Built) -> None:
        other = rebuilt(copy, "buckets", {"dedup.num_buckets": 4}, upto="packing_plan")
        assert other.refs["lsh_clusters"].identity != clean.refs["lsh_clusters"].identity
        assert other.refs["lsh_clusters"].digest == clean.refs["lsh_clusters"].digest
        assert other.refs["packing_plan"].identity == clean.refs["packing_plan"].identity

    def test_rows_shuffled_over_a_pools_files_give_the_same_tokens_in_the_same_order(
        self, clean: Built, tmp_path: Path
    ) -> None:
        small_corpus.write_corpus(tmp_path)
        generator = random.Random(3)
        for pool, files in small_corpus.corpus_rows().items():
            rows = [row for file in files.values() for row in file]
            generator.shuffle(rows)
            bounds = np.linspace(0, len(rows), len(files) + 1).astype(int).tolist()
            for file, start, end in zip(files, bounds, bounds[1:], strict=False):
                small_corpus.write_rows(tmp_path / pool / f"{file}.parquet", rows[start:end], rows_per_group=7)
        other = small_corpus.build(small_corpus.write_recipe(tmp_path), tmp_path / "home", upto="packing_plan")
        assert other.refs["raw_row_groups"].digest != clean.refs["raw_row_groups"].digest
        assert_same_training_bytes(clean, other)

    def test_processes_give_the_same_bytes(self, clean: Built, tmp_path: Path) -> None:
        recipe = another_recipe(clean, "unstriped", {"reading.stripes": 1, "reading.stripes_read": 1})
        done = small_corpus.run_command(
            recipe, tmp_path / "home", "run", "--without-training", CORPUSMILL_PROFILE="processes"
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert_every_step_had_its_process(tmp_path / "home")
        small_corpus.build(recipe, tmp_path / "alone")
        found = small_corpus.artifact_files(tmp_path / "home", leave_out=[REPORT])  # which tells of checks
        assert found == small_corpus.artifact_files(tmp_path / "alone")

    def test_a_new_sequence_length_leaves_the_shards_alone(self, clean: Built, copy: Built) -> None:
        changes = {"packs.max_seq_len": 64, "packs.capacity": 128, "packs.batch_size": 2}
        other = rebuilt(copy, "longer", changes, upto="packing_plan")
        assert other.refs["token_shards"].identity == clean.refs["token_shards"].identity
        assert other.refs["token_shards"].outcome == "reused"
        assert other.refs["packing_plan"].identity != clean.refs["packing_plan"].identity
        assert load_plan(other.folder("packing_plan"), "train").capacity == 128


def assert_every_step_had_its_process(home: Path) -> None:
    """The only run of this home is a success, and no two of its steps name the same process."""
    with dg.DagsterInstance.from_config(str(home / "dagster")) as instance:
        (run,) = instance.get_runs()
        records = instance.all_logs(run.run_id, of_type=dg.DagsterEventType.STEP_SUCCESS)
    assert run.status == dg.DagsterRunStatus.SUCCESS
    processes = [record.get_dagster_event().pid for record in records]
    assert len(set(processes)) == len(processes) > 1


def assert_same_training_bytes(one: Built, other: Built) -> None:
    """Equal shards, indexes and plans, whatever units they were made from."""
    assert other.refs["token_shards"].digest == one.refs["token_shards"].digest
    for split in ("train", "validation"):
        plans = [load_plan(built.folder("packing_plan"), split) for built in (one, other)]
        for name, column in plans[0].columns.items():
            assert np.array_equal(column, plans[1].columns[name]), (split, name)


class TestSettings:
    def test_exact_mode_keeps_near_copies_and_no_exact_ones(self, copy: Built) -> None:
        other = rebuilt(copy, "exact", {"dedup.mode": "exact"})
        assert decided(other, EXACT) == [("alpha", "exact_duplicate"), ("alpha", "kept")]
        assert decided(other, small_corpus.NEAR_COPY) == [("beta", "kept")]
        assert_laws_hold(
            other,
            [
                name
                for name in DATA_CHECKS
                if not set(small_corpus.assets_read_by(name)) & {"packing_plan", "handoff_package"}
            ],
        )

    def test_off_mode_keeps_every_row_and_splits_by_cluster(self, copy: Built) -> None:
        other = rebuilt(copy, "off", {"dedup.mode": "off"})
        assert {row["reason"] for row in decisions(other)} == {"kept"}
        assert decided(other, EXACT) == [("alpha", "kept")] * 2
        rows = split_rows(other)
        assert len(rows) == small_corpus.NUM_ROWS - 2
        assert Counter(row["doc_id"] for row in rows)[doc_id(EXACT)] == 2
        near = {row["split"] for row in rows if row["text"] in (small_corpus.NEAR_ORIGINAL, small_corpus.NEAR_COPY)}
        assert len(near) == 1
        assert_laws_hold(other, ["one_document_is_kept_per_cluster", "every_removal_has_evidence", *CHECKS_OF_SPLITS])

    def test_budgets_fill_splits_in_order_and_the_rest_is_unused(self, copy: Built) -> None:
        changes = {
            "splits.assignment": {"policy": "budget", "validation_tokens": 2_000, "test_tokens": 1_000},
            "splits.budgets": {"train": 5_000},
        }
        other = rebuilt(copy, "budget", changes, upto="packing_plan")
        tokens, documents = Counter(), Counter()
        for row in split_rows(other):
            tokens[row["split"], row["reason"]] += row["num_tokens"]
            documents[row["split"], row["reason"]] += 1
        longest = max(row["num_tokens"] for row in split_rows(other))
        for split, budget in (("validation", 2_000), ("test", 1_000), ("train", 5_000)):
            assert budget <= tokens[split, "used"] < budget + longest
        assert documents["unused", "over_budget"] > 0
        assert documents["unused", "below_min_tokens"] == 1
        assert sum(documents.values()) == other.refs["document_tokens"].counts["documents"]
        assert set(indexes(other)) == {"train", "validation", "test"}
        assert load_plan(other.folder("packing_plan"), "test").index.num_documents == documents["test", "used"]
        assert_laws_hold(
            other, [*CHECKS_OF_SPLITS, "every_kept_document_has_a_split_or_a_reason", "shards_hold_every_document_once"]
        )

    def test_a_fraction_may_have_a_test_split_too(self, clean: Built, copy: Built) -> None:
        assignment = {"policy": "fraction", "seed": 5, "validation_fraction": 0.2, "test_fraction": 0.2}
        other = rebuilt(copy, "fractions", {"splits.assignment": assignment})
        before = {row["doc_id"]: row["split"] for row in split_rows(clean)}
        after = {row["doc_id"]: row["split"] for row in split_rows(other)}
        moved = {(before[key], after[key]) for key in before if before[key] != after[key]}
        assert moved == {("train", "test")}
        assert_laws_hold(other, CHECKS_OF_SPLITS)

    def test_source_order_is_the_order_of_pools_files_and_rows(self, copy: Built) -> None:
        other = rebuilt(copy, "source_order", {"splits.order": "source"})
        texts = [
            row["text"]
            for files in small_corpus.corpus_rows().values()
            for rows in files.values()
            for row in rows
            if row["text"]
        ]
        position = {doc_id(text): number for number, text in reversed(list(enumerate(texts)))}
        for index in indexes(other).values():
            order = [position[row.tobytes()] for row in index.doc_ids]
            kept_later = {position[doc_id(EXACT)]}
            assert [at for at in order if at not in kept_later] == sorted(at for at in order if at not in kept_later)
            assert index.num_documents > 10

    def test_shuffled_order_is_neither_source_order_nor_by_pool(self, clean: Built) -> None:
        index = indexes(clean)["train"]
        assert (np.diff(index.pools.astype(int)) != 0).sum() > 10

    def test_a_given_tokenizer_is_used_as_it_is(self, clean: Built, copy: Built) -> None:
        path = copy.home.parent / "given.json.gz"
        path.write_bytes(gzip.compress((clean.folder("tokenizer") / "tokenizer.json").read_bytes()))
        other = rebuilt(copy, "given", {"tokenizer": {"kind": "file", "path": str(path), "eos": small_corpus.EOS}})
        assert other.refs["tokenizer"].counts == clean.refs["tokenizer"].counts
        shards = [sorted(built.folder("token_shards").glob("*.bin")) for built in (clean, other)]
        assert [one.read_bytes() for one in shards[0]] == [one.read_bytes() for one in shards[1]]

    def test_an_excluding_reference_removes_the_whole_cluster(self, copy: Built) -> None:
        references = json.loads(json.dumps(small_corpus.RECIPE["references"]))
        references[1]["action"] = "exclude"
        other = rebuilt(copy, "excluding", {"references": references})
        for text in (small_corpus.HELD_OUT, small_corpus.HELD_OUT_NEAR_COPY, small_corpus.LIKE_A_REFERENCE):
            assert {reason for _, reason in decided(other, text)} == {"reference"}
        assert doc_id(small_corpus.HELD_OUT) not in {row["doc_id"] for row in split_rows(other)}
        assert_laws_hold(other, ["one_document_is_kept_per_cluster", "every_removal_has_evidence", *CHECKS_OF_SPLITS])

    def test_an_overlap_is_planned_judged_and_trained_on(self, clean: Built, copy: Built) -> None:
        other = rebuilt(copy, "overlap", {"packs.overlap": 8}, upto="packing_plan")
        assert other.refs["token_shards"].digest == clean.refs["token_shards"].digest
        counts = other.refs["packing_plan"].counts["splits"]["train"]
        assert counts["targets"] == clean.refs["packing_plan"].counts["splits"]["train"]["targets"]
        assert counts["repeated"] > 0
        plan = load_plan(other.folder("packing_plan"))
        assert counts["utilisation"] == plan.num_inputs / (plan.num_packs * plan.capacity) <= 1
        result = small_corpus.materialize(other.recipe, copy.home, "packing_plan", "packing_stats", TRAINING)
        assert result.success, small_corpus.failures(result)
        assert all(evaluation.passed for evaluation in small_corpus.evaluations(result).values())

    def test_windows_are_trained_on_and_the_isolation_check_says_so(self, copy: Built) -> None:
        recipe = another_recipe(copy, "windows", small_corpus.WINDOWS)
        result = small_corpus.materialize(recipe, copy.home, TRAINING)
        assert result.success, small_corpus.failures(result)
        evaluation = small_corpus.evaluations(result)[ISOLATION]
        assert not evaluation.passed
        assert evaluation.severity.value == "WARN"
        assert "the recipe chose windows of 32 tokens without a document mask" in str(evaluation.description)
        assert not_passed(result) == {ISOLATION, "positions_restart_with_each_document"}

    def test_windows_with_a_mask_are_judged_like_packs(self, copy: Built) -> None:
        windows = {**small_corpus.WINDOWS["training.windows"], "document_mask": True}
        recipe = another_recipe(copy, "masked", {**small_corpus.WINDOWS, "training.windows": windows})
        result = small_corpus.materialize(recipe, copy.home, TRAINING)
        assert result.success, small_corpus.failures(result)
        evaluation = small_corpus.evaluations(result)[ISOLATION]
        assert evaluation.passed
        assert "0 of " in str(evaluation.description)
        assert "0 of 0" not in str(evaluation.description)
        assert not_passed(result) == set()


class TestRealText:
    def test_four_pools_with_the_real_gpt2_tokenizer(self, sample_data: Path, tmp_path: Path) -> None:
        pools = ["english", "chinese", "code", "math"]
        recipe = small_corpus.write_recipe(
            tmp_path,
            {
                "source": {
                    "kind": "local",
                    "pools": [{"name": name, "path": str(sample_data / "sample" / name)} for name in pools],
                },
                "references": [{"name": "sample", "kind": "tokenizer_sample", "documents_per_pool": 20}],
                "tokenizer": {
                    "kind": "file",
                    "path": str(sample_data / "tokenizers" / "gpt2.tokenizer.json"),
                    "eos": small_corpus.EOS,
                },
                "splits.min_tokens": 0,
                "shards.max_shard_tokens": 2_000_000,
                "packs": {
                    "max_seq_len": 4_096,
                    "capacity": 4_096,
                    "strategy": "oldest_first",
                    "buffer": 256,
                    "batch_size": 8,
                    "eval_microbatch_tokens": 8_192,
                },
            },
        )
        built = small_corpus.build(recipe, tmp_path / "home")
        tokenizer, clusters = built.refs["tokenizer"].counts, built.refs["lsh_clusters"].counts
        assert (tokenizer["eos_id"], tokenizer["token_dtype"], tokenizer["max_id"]) == (50_256, "uint16", 50_256)
        assert clusters["documents"] == 1_705 + 983 + 437 + 895
        rows = decisions(built)
        assert len(rows) - len({row["doc_id"] for row in rows}) == 134
        assert 440 <= clusters["duplicate_clusters"] <= 500
        train = indexes(built)["train"]
        assert train.eos_id == 50_256
        assert train.pool_names == tuple(pools)
        assert np.bincount(train.pools, minlength=4).min() > 100
        quotas = read_json(built.folder("handoff_package") / "package.json")["quotas"]["train"]
        assert quotas["chinese"]["documents"] > 500
        assert built.refs["packing_plan"].counts["splits"]["train"]["utilisation"] > 0.998
        spelled_out = judged("bytes_a_token_is_in_the_recipe_range", built)
        assert spelled_out.num_violations == 1, spelled_out
        assert "chinese" in str(spelled_out.examples), "GPT-2 takes Chinese almost byte by byte"
        others = {"clusters_are_connected_components", "bytes_a_token_is_in_the_recipe_range"}
        assert_laws_hold(built, [name for name in DATA_CHECKS if name not in others])
