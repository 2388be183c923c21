"""What pages show: pictures redrawn from recounts, links to files, and events that stay small."""

import base64
import json
import re
from collections import Counter, defaultdict
from decimal import Decimal
from itertools import pairwise
from pathlib import Path

import dagster as dg
import numpy as np
import pyarrow.parquet as pq
import pytest
import small_corpus
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline_assets.clusters import slice_name
from pipeline_assets.duplicates import BY_PAIR_NAME, EVIDENCE_NAME, EXAMPLES_NAME
from pipeline_assets.event_size import EVENT_BYTES, PAGES_FOLDER, WRAPPING_BYTES, event_bytes, within_event
from pipeline_assets.layouts import length_histogram
from pipeline_assets.ops import asset_spec, graph_spec, materialized, sealing_op
from pipeline_assets.pictures import (
    MAX_PICTURE_BYTES,
    bar_picture,
    grouped_bar_picture,
    heatmap_picture,
    histogram_picture,
    scatter_picture,
)
from pipeline_assets.quality_tables import counts_blocks
from pipeline_assets.references import PipelineResource, ReferenceIOManager
from pipeline_assets.report import MAX_ROWS, picture_metadata, rounded, rows_metadata, shown_table
from pipeline_assets.stripes import Sealed, units_in
from training_io.document_index import read_index

EMBEDDED = re.compile(r"!\[[^\]]+\]\(data:image/png;base64,([^)]+)\)")
PICTURES = {
    "raw_row_groups": {"text_lengths", "documents_by_dump", "dumps_by_file"},
    "minhash_signatures": {"scurve"},
    "lsh_clusters": {"cluster_sizes", "duplicates_by_pool", "duplicates_by_dump", "removed_by_similarity"},
    "tokenizer_report": {"bytes_a_token"},
    "packing_stats": {"utilisation", "waste_and_displacement", "row_lengths", "mixed_windows", "document_lengths"},
    "mixture_ledger": {"cumulative_tokens", "quotas"},
    "varlen_training_run": {"loss_curve", "gradient_norms", "speed"},
}
LIMIT = EVENT_BYTES - WRAPPING_BYTES
SHOWN = {dg.DagsterEventType.ASSET_MATERIALIZATION, dg.DagsterEventType.STEP_OUTPUT}


def materializations(result):
    found = [event.step_materialization_data.materialization for event in result.get_asset_materialization_events()]
    return {one.asset_key.path[-1]: one.metadata for one in found}


@pytest.fixture(scope="module")
def pages(clean):
    return materializations(clean.result)


def stored(clean, asset, name):
    return (clean.folder(asset) / f"{name}.png").read_bytes()


def test_every_picture_is_embedded_saved_and_linked(pages):
    found = defaultdict(set)
    for asset, metadata in pages.items():
        for name, value in metadata.items():
            if match := EMBEDDED.fullmatch(str(value.value)):
                found[asset].add(name)
                picture = base64.b64decode(match[1])
                link = metadata[f"{name}_file"]
                assert isinstance(link, dg.PathMetadataValue)
                assert Path(link.path).read_bytes() == picture
                assert picture.startswith(b"\x89PNG")
                assert len(picture) <= MAX_PICTURE_BYTES
    assert {asset: names for asset, names in found.items() if asset in PICTURES} == PICTURES


@pytest.mark.parametrize(
    ("asset", "file"),
    [
        ("raw_row_groups", "sampled_files.parquet"),
        ("minhash_signatures", "pairs.parquet"),
        ("lsh_clusters", "evidence.parquet"),
        ("packing_stats", "stats.json"),
        ("mixture_ledger", "ledger.parquet"),
        ("varlen_training_run", "curves.json"),
    ],
)
def test_tables_and_numbers_are_linked(pages, asset, file):
    link = pages[asset][f"{file.partition('.')[0]}_file"]
    assert isinstance(link, dg.PathMetadataValue)
    assert link.path.endswith(f"/{file}")
    assert Path(link.path).stat().st_size > 0


@pytest.mark.parametrize(("by", "what"), [("pool", "pool"), ("dump", "crawl")])
def test_duplicates_are_drawn_as_the_evidence_counts_them(clean, by, what):
    evidence = pq.read_table(clean.folder("lsh_clusters") / EVIDENCE_NAME).to_pylist()
    counted = Counter((row[f"removed_{by}"], row[f"kept_{by}"]) for row in evidence)
    names = sorted({name for pair in counted for name in pair})
    assert len(names) > 1
    table = [[counted[removed, kept] for kept in names] for removed in names]
    axes = f"{what} of the document kept", f"{what} of the one removed"
    expected = heatmap_picture(f"Duplicates removed, by {what}", *axes, names, names, table)
    assert stored(clean, "lsh_clusters", f"duplicates_by_{by}") == expected
    by_pair = pq.read_table(clean.folder("lsh_clusters") / BY_PAIR_NAME).to_pylist()
    assert {(row["removed"], row["kept"]): row["documents"] for row in by_pair if row["by"] == by} == counted


def test_similarities_of_near_duplicates_are_drawn_as_the_evidence_has_them(clean):
    evidence = pq.read_table(clean.folder("lsh_clusters") / EVIDENCE_NAME).to_pylist()
    near = [row["jaccard"] for row in evidence if row["removed_doc_id"] != row["kept_doc_id"]]
    assert 0 < len(near) < len(evidence)
    edges = [number / 20 for number in range(21)]
    counts = [sum(low <= one < high for one in near) for low, high in pairwise([*edges[:-1], 1.01])]
    title, of = "Near duplicates removed, by similarity to the document kept", "Jaccard similarity of the two"
    marks = {"S-curve's threshold": (1 / 14) ** (1 / 8)}
    expected = histogram_picture(title, of, "documents removed", edges, counts, marks, log_x=False)
    assert stored(clean, "lsh_clusters", "removed_by_similarity") == expected


def test_example_pairs_are_narrow_and_those_of_the_file(clean, pages):
    rows = [record.data for record in pages["lsh_clusters"]["example_pairs"].records]
    assert all({*row} == {"jaccard", "bands", "removed", "kept"} for row in rows)
    assert all(0 < len(row[side]) <= 32 for row in rows for side in ("removed", "kept"))
    stored_rows = pq.read_table(clean.folder("lsh_clusters") / EXAMPLES_NAME).to_pylist()
    found = [
        next(
            number
            for number, one in enumerate(stored_rows)
            if (rounded(one["jaccard"]), one["shared_bands"]) == (row["jaccard"], row["bands"])
            and " ".join(one["removed_text"].split()).startswith(row["removed"].removesuffix("…"))
            and " ".join(one["kept_text"].split()).startswith(row["kept"].removesuffix("…"))
        )
        for row in rows
    ]
    assert found == sorted(found)


def test_cluster_sizes_are_drawn_as_a_recount_has_them(clean):
    folder = clean.folder("lsh_clusters")
    units = units_in(clean.stage, clean.refs["raw_row_groups"])
    members = Counter(
        cluster
        for unit in units
        for cluster in pq.read_table(folder / slice_name(unit.unit)).column("cluster_id").to_pylist()
    )
    sizes = Counter(members.values())
    assert 1 < max(sizes) <= 4  # larger ones share bars
    title, x_label = "Clusters by number of documents", "clusters of this size (logarithmic)"
    names, numbers = zip(*((str(size), number) for size, number in sorted(sizes.items())), strict=True)
    expected = bar_picture(title, x_label, "documents in a cluster", names, numbers, log_x=True)
    assert stored(clean, "lsh_clusters", "cluster_sizes") == expected


def test_crawls_of_each_file_are_drawn_as_its_rows_have_them(clean):
    dumps = defaultdict(set)
    for unit in units_in(clean.stage, clean.refs["raw_row_groups"]):
        for row in pq.read_table(
            clean.stage.folder(unit) / "rows.parquet", columns=["pool", "file", "dump"]
        ).to_pylist():
            dumps[row["pool"], row["file"]].add(row["dump"])
    ordered = sorted(dumps, key=lambda file: (-len(dumps[file]), file))
    names, numbers = (
        ["/".join(file).removesuffix(".parquet") for file in ordered],
        [len(dumps[file]) for file in ordered],
    )
    expected = bar_picture("Crawls in each file, the most first", "crawls", "file", names, numbers)
    assert stored(clean, "raw_row_groups", "dumps_by_file") == expected


def test_waste_and_displacement_are_drawn_as_the_table_has_them(clean):
    """test_layouts counts the table's numbers segment by segment."""
    rows = json.loads((clean.folder("packing_stats") / "stats.json").read_bytes())["strategies"]
    expected = scatter_picture(
        "Waste and displacement by strategy",
        "x: mean displacement, packs (logarithmic above 1)",
        "y: waste, % of slots (logarithmic above 0.1)",
        {row["strategy"]: (row["mean_displacement"], 100 * row["waste"]) for row in rows},
    )
    assert len(rows) > 3
    assert stored(clean, "packing_stats", "waste_and_displacement") == expected


def test_shares_of_a_balance_are_in_per_cent_on_the_page_and_in_the_report(clean, pages):
    rows = clean.refs["packing_plan"].counts["balance"]
    names = ["ranks", *(f"{name} %" for name in ("inputs", "squares", "inputs_in_turn", "squares_in_turn"))]
    expected = [[row["ranks"], *(100 * row[name.removesuffix(" %")] for name in names[1:])] for row in rows]
    assert any(share > 0 for row in expected for share in row[1:])
    on_page = [record.data for record in pages["packing_plan"]["balance"].records]
    assert [set(row) for row in on_page] == [set(names)] * len(rows)
    assert [[row[name] for name in names] for row in on_page] == [list(map(rounded, row)) for row in expected]
    blocks = counts_blocks("packing_plan", clean.refs["packing_plan"].counts)
    (table,) = [block for block in blocks if getattr(block, "caption", "") == "packing_plan: balance"]
    assert list(table.columns) == [name.replace("_", " ") for name in names]
    assert [list(row) for row in table.rows] == expected


def test_quotas_are_drawn_as_the_ledger_has_them(clean):
    rows = pq.read_table(clean.folder("mixture_ledger") / "ledger.parquet").to_pylist()
    series = {"quota": [row["quota_tokens"] for row in rows], "read": [row["tokens"] for row in rows]}
    names = [f"{row['stage']}, {row['pool']}" for row in rows]
    expected = grouped_bar_picture("Quota and what is read, by stage", "tokens", names, series, "stage, pool")
    assert stored(clean, "mixture_ledger", "quotas") == expected


def test_lengths_are_drawn_with_their_quantiles(clean):
    lengths = read_index(clean.folder("token_shards") / "train_index").lengths
    edges, shares, marks = length_histogram(np.asarray(lengths, dtype=np.int64))
    labels = "Lengths of documents", "tokens (logarithmic)", "% of documents"
    assert stored(clean, "packing_stats", "document_lengths") == histogram_picture(*labels, edges, shares, marks)


def quantile(ordered, share):
    """Between the two neighbours of the place, linearly."""
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


@given(st.lists(st.integers(0, 30) | st.integers(0, 10**7), min_size=1, max_size=60))
def test_each_document_is_in_one_bar_of_lengths(lengths):
    edges, shares, marks = length_histogram(np.array(lengths, dtype=np.int64))
    shown = sorted(max(length, 1) for length in lengths)
    assert edges == sorted(set(edges))
    assert edges[0] == shown[0]
    assert edges[-1] == shown[-1] + 1
    for start, end, share in zip(edges[:-1], edges[1:], shares, strict=True):
        assert share == pytest.approx(100 * sum(start <= length < end for length in shown) / len(shown))
    assert sum(shares) == pytest.approx(100)
    assert marks == pytest.approx({f"{share} %": quantile(shown, share / 100) for share in (10, 50, 90, 99)})


@given(st.integers(0, 2 * MAX_ROWS), st.integers(1, 2 * MAX_ROWS))
def test_a_table_that_is_cut_says_how_many_rows_it_has(num_rows, most):
    rows = [{"number": number} for number in range(num_rows)]
    shown = shown_table("some", rows, most=most)
    cut = min(num_rows, most, 50)
    found = [record.data for record in getattr(shown["some"], "records", [])]
    assert found == rows[:cut]
    assert shown.get("some_rows") == (f"{cut} of {num_rows}" if cut < num_rows else None)


def test_rows_that_were_left_out_before_count_too():
    assert shown_table("some", [{"number": 1}], total=1_234)["some_rows"] == "1 of 1,234"


def rows_in_artifact(folder):
    """Rows of an artifact's tables by name: Parquet files, and lists of JSON files."""
    totals = {path.stem: pq.read_metadata(path).num_rows for path in folder.glob("*.parquet")}
    for path in folder.glob("*.json"):
        value = json.loads(path.read_bytes())
        if path.name != "manifest.json" and isinstance(value, dict):
            totals |= {name: len(rows) for name, rows in value.items() if isinstance(rows, list)}
    return totals


def test_every_table_that_the_artifact_has_more_rows_of_says_so(clean, pages):
    known, cut = set(), {}
    for asset, metadata in pages.items():
        totals = rows_in_artifact(clean.folder(asset))
        if asset == "split_documents":
            totals["shortest_documents"] = clean.refs[asset].counts["documents"]
        for name, value in metadata.items():
            if not isinstance(value, dg.TableMetadataValue) or name == "sample_rows":
                continue
            shown, said = len(value.records), getattr(metadata.get(f"{name}_rows"), "value", None)
            if name not in totals:
                assert shown < MAX_ROWS, f"{asset}: {name} may be cut"
                continue
            known.add((asset, name))
            assert said == (f"{shown} of {totals[name]}" if shown < totals[name] else None), f"{asset}: {name}"
            if said:
                cut[asset, name] = said
    assert len(known) > 10
    assert {("lsh_clusters", "reference_hits"), ("split_documents", "shortest_documents")} <= set(cut)


@given(st.floats(allow_nan=False, allow_infinity=False, min_value=-1e300, max_value=1e300))
def test_a_share_is_shown_to_six_digits(value):
    shown = rounded(value)
    assert shown == pytest.approx(value, rel=5.01e-6, abs=1e-300)
    assert len(Decimal(repr(shown)).normalize().as_tuple().digits) <= 6
    (record,) = shown_table("some", [{"share": value, "count": 12_345_678}])["some"].records
    assert record.data == {"share": shown, "count": 12_345_678}


def test_shares_of_a_page_are_rounded_and_those_of_the_manifest_are_not(clean, pages):
    counts = clean.refs["packing_stats"].counts
    exact = {name: value for name, value in counts.items() if isinstance(value, float)}
    assert any(value != rounded(value) for value in exact.values())
    assert {name: pages["packing_stats"][name].value for name in exact} == {
        name: rounded(value) for name, value in exact.items()
    }


def test_every_event_of_a_page_is_small(clean):
    sizes = {
        (event.event_type, event.step_key): len(dg.serialize_value(event))
        for event in clean.result.all_events
        if event.event_type in SHOWN
    }
    assert sum(kind == dg.DagsterEventType.ASSET_MATERIALIZATION for kind, _ in sizes) >= len(PICTURES)
    assert max(sizes.values()) < EVENT_BYTES
    assert max(sizes.values()) > 50_000  # pictures are in them
    assert not (clean.home / PAGES_FOLDER).exists()


def worst_metadata():
    """More than any page has: every picture at its limit, every table full of the widest letters."""
    row = {f"column_{number}": "漢" * 400 for number in range(8)}
    return {
        "documents": 10**15,
        **{f"picture_{number}": picture_metadata(bytes(MAX_PICTURE_BYTES), "a picture") for number in range(6)},
        "picture_0_file": dg.MetadataValue.path("/somewhere/picture_0.png"),
        **{f"table_{number}": rows_metadata([row] * 60) for number in range(8)},
        "parameters": dg.MetadataValue.json({f"key_{number}": "漢" * 90 for number in range(400)}),
        "note": "漢" * 40_000,
        "small": dg.MetadataValue.md("a word"),
    }


def sealed_by(kind, built):
    """An asset of one step, or of a planned fan-out's sealing step, whose page is the worst."""
    sealed = Sealed(ref=built.refs["raw_row_groups"], metadata=worst_metadata())
    if kind == "asset":

        @dg.asset(**asset_spec("raw_row_groups", 1, {"numpy"}, "The worst page."))
        def worst(context: dg.AssetExecutionContext) -> dg.MaterializeResult:
            return materialized(context, lambda stage: sealed)

        return worst

    def seal_worst(stage, parts):
        """Seal."""
        return sealed

    seal = sealing_op("raw_row_groups", seal_worst)

    @dg.op(name="no_parts")
    def no_parts():
        return []

    @dg.graph_asset(**graph_spec("raw_row_groups", 1, {"numpy"}, "The worst page."))
    def worst():
        return seal(parts=no_parts())

    return worst


@pytest.mark.parametrize("kind", ["asset", "graph"])
def test_the_worst_page_fits_and_its_previews_are_in_files(copy, kind):
    assert event_bytes(worst_metadata()) > 5 * EVENT_BYTES
    pipeline = PipelineResource(recipe=str(copy.recipe), home=str(copy.home))
    resources = {"pipeline": pipeline, "references": ReferenceIOManager(pipeline=pipeline)}
    with small_corpus.short_instance() as instance:
        result = dg.materialize([sealed_by(kind, copy)], resources=resources, instance=instance)
    events = [event for event in result.all_events if event.event_type in SHOWN and "no_parts" not in event.step_key]
    assert len(events) == 2
    assert all(len(dg.serialize_value(event)) < EVENT_BYTES for event in events)
    page = materializations(result)["raw_row_groups"]
    worst = worst_metadata()
    assert page["documents"].value == worst["documents"]
    assert page["small"].value == "a word"
    assert page["picture_0"].path == "/somewhere/picture_0.png"
    for name in ("table_0", "note", "parameters"):
        path = page[name].path
        assert path.startswith(str(copy.home / PAGES_FOLDER / "raw_row_groups"))
        value = worst[name]
        records = [record.data for record in value.records] if name == "table_0" else getattr(value, "value", value)
        assert json.loads(Path(path).read_bytes()) == records


@settings(max_examples=60)
@given(st.dictionaries(st.text("abcdef", min_size=1, max_size=6), st.integers(0, 90_000), max_size=8), st.booleans())
def test_only_the_largest_previews_go_and_only_as_many_as_must(tmp_path_factory, sizes, is_wide):
    letter = "漢" if is_wide else "x"  # six bytes in the log, or one
    metadata = {name: dg.MetadataValue.text(letter * size) for name, size in sizes.items()}
    shown = within_event(metadata, tmp_path_factory.mktemp("pages"))
    assert list(shown) == list(metadata)
    assert event_bytes(shown) <= LIMIT
    gone = [name for name in metadata if isinstance(shown[name], dg.PathMetadataValue)]
    assert all(shown[name] is metadata[name] for name in metadata if name not in gone)
    if gone:
        in_log = {name: event_bytes({name: value}) for name, value in metadata.items()}  # its name counts as well
        smallest = min(gone, key=in_log.__getitem__)
        assert all(in_log[smallest] >= in_log[name] for name in metadata if name not in gone)
        assert event_bytes({**shown, smallest: metadata[smallest]}) > LIMIT


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_json_does_not_have_is_shown_as_a_text(value):
    (row,) = rows_metadata([{"score": value}]).records
    assert json.loads(json.dumps(dict(row.data), allow_nan=False)) == {"score": str(value)}
