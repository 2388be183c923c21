"""The tables of packing_stats, each number recounted on rows written out cell by cell, and the page that shows them."""

import dataclasses
import json

import naive_batches as naive
import naive_layouts
import numpy as np
import pytest
import small_corpus
import tiny_artifacts
from small_corpus import Built

from pipeline_assets import layouts
from pipeline_assets.layouts import TABLES_NAME, compared_strategies, layouts_at, layouts_metadata, write_layouts
from training_io.packing import STRATEGIES
from training_io.plan import load_plan

TEXT_LENGTHS = [5, 30, 0, 9, 14, 3, 22, 8, 8, 2, 17, 40, 6, 1, 1]
MAX_SEQ_LEN, CAPACITY = 8, 16


def plans_of(root, strategy, capacity=CAPACITY, **more):
    docs = {"train": tiny_artifacts.address_docs(TEXT_LENGTHS), "validation": tiny_artifacts.address_docs([7, 12, 9])}
    shards = tiny_artifacts.make_token_shards(root, docs)
    options = {"strategy": strategy, "max_seq_len": MAX_SEQ_LEN, "capacity": capacity, "buffer": 4, **more}
    artifact = tiny_artifacts.make_plan(root, shards, splits=("train", "validation"), **options)
    return [load_plan(artifact, split) for split in ("train", "validation")]


def written(folder, plans):
    counts = write_layouts(folder, plans)
    return counts, json.loads((folder / TABLES_NAME).read_bytes())


@pytest.fixture(scope="module")
def stats(tmp_path_factory):
    root = tmp_path_factory.mktemp("stats")
    plans = plans_of(root, "oldest_first")
    return (*written(root, plans), plans, root)


def packs_of(plan):
    """Lengths of the segments of each pack."""
    _, start, end = plan.locate(plan.order)
    lengths = (end - start).tolist()
    return [lengths[a:b] for a, b in zip(plan.pack_offsets[:-1], plan.pack_offsets[1:], strict=True)]


def test_the_plans_own_row_is_the_plan(stats):
    counts, tables, plans, _ = stats
    row = next(row for row in tables["layouts"] if row["layout"] == "oldest_first")
    packs = packs_of(plans[0])
    assert row["rows"] == len(packs)
    assert row["segments"] == sum(map(len, packs))
    assert row["tokens"] == sum(map(sum, packs)) == sum(TEXT_LENGTHS)
    assert row["utilisation"] == counts["oldest_first_utilisation"] == sum(TEXT_LENGTHS) / (len(packs) * CAPACITY)
    assert row["rows_above_minimum"] == len(packs) - -(-sum(TEXT_LENGTHS) // CAPACITY)
    assert row["causal_pairs"] == len(packs) * sum(range(1, CAPACITY + 1))
    assert row["varlen_pairs"] == sum(sum(range(1, length + 1)) for pack in packs for length in pack)
    assert row["documents"] == sum(length > 0 for length in TEXT_LENGTHS)
    assert row["documents_cut"] == sum(length > MAX_SEQ_LEN for length in TEXT_LENGTHS)


def test_the_plans_own_row_is_not_packed_again(tmp_path):
    (plan, validation), (tight, _) = plans_of(tmp_path / "one", "padded"), plans_of(tmp_path / "other", "oldest_first")
    assert plan.num_packs > tight.num_packs
    (tmp_path / "out").mkdir()
    _, tables = written(tmp_path / "out", [dataclasses.replace(plan, strategy="oldest_first"), validation])
    row = next(row for row in tables["layouts"] if row["layout"] == "oldest_first")
    assert (row["rows"], row["tokens"]) == (plan.num_packs, plan.num_targets)


def test_documents_that_the_plan_diverts_are_in_no_layout(tmp_path):
    _, tables = written(tmp_path, plans_of(tmp_path, "oldest_first", long_documents="divert"))
    planned = [length for length in TEXT_LENGTHS if length <= MAX_SEQ_LEN]
    assert len(planned) < len(TEXT_LENGTHS)
    for row in tables["layouts"]:
        if row["layout"] != "concatenated":
            assert (row["tokens"], row["documents"]) == (sum(planned), sum(length > 0 for length in planned)), row
    concatenated = next(row for row in tables["layouts"] if row["layout"] == "concatenated")
    assert concatenated["tokens"] + concatenated["tokens_left_out"] == sum(planned) + len(planned)


def test_what_an_overlap_repeats_fills_slots_and_is_counted_apart(tmp_path):
    overlap = 3
    plans = plans_of(tmp_path, "oldest_first", overlap=overlap)
    _, tables = written(tmp_path, plans)
    walked = [row for n in TEXT_LENGTHS for row in naive.overlapping_segments(n + 1, MAX_SEQ_LEN, overlap)]
    inputs, repeated = sum(end - start for start, end, _ in walked), sum(twice for *_, twice in walked)
    assert repeated > 0
    counted = tables["counted_apart"][0]
    assert (counted["targets"], counted["repeated"]) == (sum(TEXT_LENGTHS), repeated)
    assert counted["free_slots"] == plans[0].num_packs * CAPACITY - inputs
    assert counted["packs_above_minimum"] == plans[0].num_packs - -(-inputs // CAPACITY)
    assert next(row for row in tables["layouts"] if row["layout"] == "oldest_first")["tokens"] == inputs


def test_every_layout_and_row_length_is_there(stats):
    counts, tables, plans, _ = stats
    names = ["padded", "truncated", "concatenated", *compared_strategies("oldest_first")]
    assert set(compared_strategies("oldest_first")) == set(STRATEGIES) - {"padded"}
    assert [row["layout"] for row in tables["layouts"]] == names
    assert set(counts) == {f"{name}_utilisation" for name in names}
    lengths = [MAX_SEQ_LEN, 1_024, 2_048, 4_096, 8_192]
    for name in ("utilisation_by_row_length", "rows_by_row_length", "windows", "attention_work"):
        assert [row["row_length"] for row in tables[name]] == lengths
    assert len(tables["all_layouts"]) == len(lengths) * len(names)
    for row in tables["all_layouts"]:
        (by_length,) = [
            pivot
            for pivot in tables["rows_by_row_length"]
            if row["layout"] in pivot and _length_of(row) == pivot["row_length"]
        ]
        assert by_length[row["layout"]] == row["rows"]
    assert [row["split"] for row in tables["counted_apart"]] == ["train", "validation"]
    for row, plan in zip(tables["counted_apart"], plans, strict=True):
        packs = packs_of(plan)
        assert (row["packs"], row["segments"], row["targets"]) == (
            len(packs),
            sum(map(len, packs)),
            sum(map(sum, packs)),
        )
        assert row["tokens"] == row["targets"] + row["documents"]
        assert row["free_slots"] == len(packs) * CAPACITY - row["targets"]


def _length_of(row):
    """The row length that a layout stands for; packs at the plan's limits are longer than its rows."""
    return MAX_SEQ_LEN if row["row_length"] == CAPACITY else row["row_length"]


def test_windows_are_counted_on_the_stream(stats):
    row = stats[1]["windows"][0]
    rows = naive.concatenated_rows([[0] * (length + 1) for length in TEXT_LENGTHS], MAX_SEQ_LEN)
    cells = [(row, owner) for row in rows for owner in row]
    assert row["windows"] == len(rows)
    assert row["share_with_boundary"] == sum(len(set(row)) > 1 for row in rows) / len(rows)
    assert row["documents_a_window"] == pytest.approx(sum(len(set(row)) for row in rows) / len(rows))
    assert row["share_of_tokens_after_unrelated"] == sum(owner != row[0] for row, owner in cells) / len(cells)
    assert row["tail_left_out"] == sum(length + 1 for length in TEXT_LENGTHS) - len(cells)


def test_attention_work_is_counted_pair_by_pair(stats):
    row, plan = stats[1]["attention_work"][0], stats[2][0]
    num_pairs = sum(TEXT_LENGTHS)
    padded = naive.padded_grid([[0] * length for length in TEXT_LENGTHS], MAX_SEQ_LEN)
    every_cell = [[0] * MAX_SEQ_LEN for _ in padded]
    packs = packs_of(plan)
    varlen = sum(naive.causal_pairs([0] * length) for pack in packs for length in pack)
    masked = sum(naive.causal_pairs([0] * CAPACITY) for _ in packs)
    assert row["padded_pairs_a_token"] * num_pairs == pytest.approx(sum(map(naive.causal_pairs, every_cell)))
    assert row["masked_pairs_a_token"] * num_pairs == pytest.approx(masked)
    assert row["varlen_pairs_a_token"] * num_pairs == pytest.approx(varlen)
    assert row["padded_over_varlen"] == pytest.approx(sum(map(naive.causal_pairs, every_cell)) / varlen)
    assert row["masked_over_varlen"] == pytest.approx(masked / varlen)


def test_strategies_say_what_they_waste_and_how_far_they_move(stats):
    tables, plan = stats[1], stats[2][0]
    row = next(row for row in tables["strategies"] if row["strategy"] == "oldest_first")
    _, start, end = plan.locate(np.arange(plan.num_segments))
    order = plan.order.tolist()
    packs = [order[a:b] for a, b in zip(plan.pack_offsets[:-1], plan.pack_offsets[1:], strict=True)]
    moved = naive_layouts.displacements(packs, (end - start).tolist())
    assert row["mean_displacement"] == pytest.approx(sum(moved) / len(moved))
    assert row["max_displacement"] == max(moved) > 0
    assert row["waste"] == pytest.approx(1 - sum(TEXT_LENGTHS) / (len(packs) * CAPACITY))
    assert row["segments_a_pack"] == len(moved) / len(packs)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_choices_name_a_strategy_of_either_kind(tmp_path, strategy):
    _, tables = written(tmp_path, plans_of(tmp_path, strategy, capacity=MAX_SEQ_LEN))
    choices = [row["choice"] for row in tables["choices"]]
    assert len(choices) == 4
    assert strategy in choices[2] + choices[3]
    assert all(len(cell) <= 160 and "%" in row["here"] for row in tables["choices"] for cell in row.values())
    (padded,) = [row for row in tables["choices"] if "padded" in row["choice"] and "row" in row["choice"]]
    grid = naive.padded_grid([[0] * length for length in TEXT_LENGTHS], MAX_SEQ_LEN)
    empty = sum(cell is None for row in grid for cell in row) / (len(grid) * MAX_SEQ_LEN)
    assert padded["here"].startswith(f"{empty:.1%} of cells empty, {len(grid)} rows for ")


def test_of_very_many_documents_some_are_packed(monkeypatch):
    monkeypatch.setattr(layouts, "MAX_PACKED_DOCUMENTS", 4)
    lengths = np.array(TEXT_LENGTHS, dtype=np.int64) + 1
    padded, truncated, concatenated, packed = layouts_at(lengths, 8, ["best_fit"], 4)
    assert packed.num_documents == sum(length > 0 for length in TEXT_LENGTHS[::4])
    assert packed.num_real == sum(TEXT_LENGTHS[::4])
    assert padded.num_real == sum(TEXT_LENGTHS)
    assert concatenated.num_documents == len(TEXT_LENGTHS)
    assert truncated.num_documents == sum(length > 0 for length in TEXT_LENGTHS)


def test_no_documents_are_empty_tables(tmp_path):
    shards = tiny_artifacts.make_token_shards(tmp_path, {"train": [[]]})
    (tmp_path / "out").mkdir()
    _, tables = written(tmp_path / "out", [load_plan(tiny_artifacts.make_plan(tmp_path, shards))])
    assert (tables["lengths"][1]["number"], tables["lengths"][1]["longest"]) == (0, 0)
    assert tables["layouts"][0]["utilisation"] == 1
    assert layouts_metadata(tmp_path / "out")


def test_the_page_has_tables_and_pictures(clean: Built) -> None:
    assert clean.result is not None
    metadata = small_corpus.materialized_metadata(clean.result)
    page = layouts_metadata(clean.folder("packing_stats"))
    assert set(page) <= set(metadata["packing_stats"])
    pictures = [name for name, value in page.items() if "data:image/png;base64," in str(getattr(value, "value", ""))]
    assert pictures == list(layouts.PICTURES)
    linked = {name.removesuffix("_file") for name in page if name.endswith("_file")}
    assert linked == {*pictures, "stats"}
    assert next(iter(page["choices"].records[0].data)) == "choice"
    assert "proves nothing about meaning" in page["note"]
    trained = metadata["varlen_training_run"]
    padded = next(r.data for r in page["layouts"].records if r.data["layout"] == "padded")
    seconds = trained["tokens"] / trained["tokens_per_second"]
    more = padded["cells"] / padded["tokens"] - 1
    assert trained["hours_that_padding_would_add"] == pytest.approx(seconds * more / 3_600)
