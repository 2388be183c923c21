"""What asset pages say of stored data: the files hold what is stated, all of it; lineage names values that carry over."""

import fnmatch
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import small_corpus
from hypothesis import example, given
from hypothesis import strategies as st
from small_corpus import Built

from pipeline_assets.columns import LINEAGE, STORED
from pipeline_assets.flow import STAGES, UPSTREAM
from pipeline_assets.report import spread_rows
from pipeline_assets.stored import StoredColumn, find_splits
from pipeline_assets.stored_batches import TRAINING
from pipeline_assets.stored_documents import sample_vocabulary

TABLES = {
    "raw_row_groups": "rows.parquet",
    "reference_sets": "*.parquet",
    "lsh_clusters": "clusters/*.parquet",
    "split_documents": "documents.parquet",
    "mixture_ledger": "ledger.parquet",
}
"""Where the rows of the assets under a contract are."""
UNITS = ("raw_row_groups", "minhash_signatures", "document_tokens", "split_documents")
"""Assets whose rows lie in their units' folders, the others' in their own."""
ON_THE_PAGE = ("*.png",)
HEADER_BYTES = 1024
JSON_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


@pytest.fixture(scope="module")
def pages(clean: Built) -> dict[str, dict[str, Any]]:
    assert clean.result is not None
    return small_corpus.materialized_metadata(clean.result)


def folders(built: Built, asset: str) -> list[Path]:
    """The folders that hold an asset's rows, of units those that its manifest lists."""
    folder = built.folder(asset)
    if asset not in UNITS:
        return [folder]
    units = json.loads((folder / "manifest.json").read_bytes())["inputs"]["units"]
    return [folder.parents[1] / unit["unit"] / unit["identity"] for unit in units]


def files_in(folder: Path) -> list[str]:
    names = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]
    return [name for name in names if name not in ("manifest.json", "run.json")]


def found(folder: Path, pattern: str) -> list[Path]:
    depth = pattern.count("/")
    return [folder / name for name in files_in(folder) if name.count("/") == depth and fnmatch.fnmatch(name, pattern)]


def fields_at(value: Any, steps: list[str]) -> Iterator[Any]:
    """The values that a key leads to."""
    if not steps:
        yield value
        return
    step, *rest = steps
    if step.endswith("[]"):
        for element in value[step.removesuffix("[]")]:
            yield from fields_at(element, rest)
    else:
        yield from fields_at(value[step], rest)


def type_of(value: Any) -> str:
    return "null" if value is None else JSON_TYPES[type(value)]


@pytest.mark.parametrize("asset", STAGES)
def test_every_page_has_columns_a_row_count_and_rows(asset: str, pages: dict[str, dict[str, Any]]) -> None:
    page = pages[asset]
    assert page["dagster/row_count"] > 0
    columns = page["dagster/column_schema"].columns
    assert len({column.name for column in columns}) == len(columns) > 0
    assert all(column.type and column.description for column in columns)
    rows = [record.data for record in page["sample_rows"].records]
    assert 0 < len(rows) <= 5
    cells = [cell for row in rows for cell in row.values()]
    assert all(len(str(cell)) <= 161 for cell in cells)
    assert any(cell != "" for cell in cells)


@pytest.mark.parametrize("asset", TABLES)
def test_contracts_state_the_columns_of_their_files(asset: str, clean: Built, pages: dict[str, Any]) -> None:
    columns = [(column.name, column.type) for column in pages[asset]["dagster/column_schema"].columns]
    tables = [path for folder in folders(clean, asset) for path in found(folder, TABLES[asset])]
    assert tables
    for path in tables:
        assert [(field.name, str(field.type)) for field in pq.read_schema(path)] == columns, path


def test_every_asset_states_its_columns_in_one_place() -> None:
    assert set(STORED) | set(TABLES) == set(STAGES)
    assert not set(STORED) & set(TABLES)


@pytest.mark.parametrize("asset", STORED)
def test_pages_show_the_columns_that_are_stated(asset: str, pages: dict[str, Any]) -> None:
    shown = {column.name: column for column in pages[asset]["dagster/column_schema"].columns}
    assert list(shown) == [column.name for column in STORED[asset].columns]
    for column in STORED[asset].columns:
        assert shown[column.name].type == column.type
        assert column.description in (shown[column.name].description or "")
        assert (shown[column.name].tags or {}).get("unit", "") == column.unit


@pytest.mark.parametrize("asset", STORED)
def test_every_stored_file_is_stated(asset: str, clean: Built) -> None:
    patterns = [column.file for column in STORED[asset].columns]
    for folder in folders(clean, asset):
        known = {path for pattern in (*patterns, *ON_THE_PAGE) for path in found(folder, pattern)}
        assert {folder / name for name in files_in(folder)} == known
        for column in STORED[asset].columns:
            assert found(folder, column.file) or column.is_optional, column.name


def stated(asset: str, kind: str) -> list[StoredColumn]:
    return [column for column in STORED[asset].columns if column.file.endswith(kind)]


@pytest.mark.parametrize("asset", [asset for asset in STORED if stated(asset, ".npy")])
def test_arrays_have_the_stated_dtypes_and_shapes(asset: str, clean: Built) -> None:
    for folder in folders(clean, asset):
        rows: dict[Path, int] = {}  # of the arrays of one folder, which have one number of rows
        for column in stated(asset, ".npy"):
            dtypes, _, shape = column.type.removesuffix("]").partition("[")
            for path in found(folder, column.file):
                array = np.load(path, mmap_mode="r")
                assert array.dtype.name in dtypes.split("|"), path
                for size, letter in zip(array.shape, shape.split(", "), strict=True):
                    if letter.isdigit():
                        assert size == int(letter), path
                    elif letter == "num_perm":
                        assert size == 14 * 8, path
                    elif letter in ("n", "n + 1"):
                        size -= letter == "n + 1"
                        assert rows.setdefault(path.parent, size) == size, path
        assert rows


@pytest.mark.parametrize("asset", [asset for asset in STORED if stated(asset, ".json")])
def test_json_fields_have_the_stated_types_and_none_is_left_out(asset: str, clean: Built) -> None:
    for folder in folders(clean, asset):
        told: dict[tuple[Path, str], set[str]] = {}
        for column in stated(asset, ".json"):
            if not column.key:
                continue  # the file as a whole
            for path in found(folder, column.file):
                values = list(fields_at(json.loads(path.read_bytes()), column.key.split(".")))
                assert values, column.name
                assert {type_of(value) for value in values} <= set(column.type.split("|")), column.name
                parent, _, field = column.key.rpartition(".")
                told.setdefault((path, parent), set()).add(field)
        for (path, parent), names in told.items():
            value = json.loads(path.read_bytes())
            if not parent:  # a table whose rows are told stands for itself
                lists = {key.removesuffix("[]") for other, key in told if other == path and key.endswith("[]")}
                assert names | lists == set(value), path
            elif parent.endswith("[]"):
                assert all(set(row) == names for row in fields_at(value, parent.split("."))), path


@pytest.mark.parametrize("asset", ["token_shards", "handoff_package"])
def test_shards_have_the_stated_header_and_tokens(asset: str, clean: Built) -> None:
    (column,) = stated(asset, ".bin")
    paths = [path for folder in folders(clean, asset) for path in found(folder, column.file)]
    assert len(paths) == 3
    for path in paths:
        magic, version, num_tokens, *zeros = np.fromfile(path, "<i4", HEADER_BYTES // 4).tolist()
        dtype = {(20240520, 1): "uint16", (20240801, 7): "uint32"}[magic, version]
        assert dtype in column.type.partition("[")[0].split("|")
        assert not any(zeros)
        assert path.stat().st_size == HEADER_BYTES + num_tokens * np.dtype(dtype).itemsize


def parquet_rows(built: Built, asset: str) -> int:
    paths = [path for folder in folders(built, asset) for path in found(folder, TABLES[asset])]
    return sum(pq.read_metadata(path).num_rows for path in paths)


def array_rows(built: Built, asset: str, pattern: str, left_out: str = "no such") -> int:
    paths = [path for folder in folders(built, asset) for path in found(folder, pattern)]
    return sum(len(np.load(path)) for path in paths if left_out not in str(path))


def json_of(built: Built, asset: str, name: str) -> Any:
    return json.loads((built.folder(asset) / name).read_bytes())


RECOUNTS: dict[str, Callable[[Built], int]] = {
    **{asset: lambda built, asset=asset: parquet_rows(built, asset) for asset in TABLES},  # type: ignore[misc]
    "minhash_signatures": lambda built: array_rows(built, "minhash_signatures", "signatures.npy", "references."),
    "document_tokens": lambda built: array_rows(built, "document_tokens", "doc_id.npy"),
    "tokenizer": lambda built: len(json_of(built, "tokenizer", "tokenizer.json")["model"]["vocab"]),
    "tokenizer_report": lambda built: len(json_of(built, "tokenizer_report", "report.json")["tokenizers"]),
    "token_shards": lambda built: array_rows(built, "token_shards", "*_index/doc_id.npy"),
    "packing_plan": lambda built: array_rows(built, "packing_plan", "*/pack_targets.npy"),
    "packing_stats": lambda built: len(json_of(built, "packing_stats", "stats.json")["all_layouts"]),
    "handoff_package": lambda built: array_rows(built, "handoff_package", "token_shards/*/*/*_index/length.npy"),
    "varlen_training_run": lambda built: len(json_of(built, "varlen_training_run", "curves.json")["train"]),
    "quality_report": lambda built: len(json_of(built, "quality_report", "report.json")),
}


@pytest.mark.parametrize("asset", STAGES)
def test_row_counts_are_those_of_the_files(asset: str, clean: Built, pages: dict[str, Any]) -> None:
    assert pages[asset]["dagster/row_count"] == RECOUNTS[asset](clean)


def test_sample_rows_are_the_files_rows(clean: Built, pages: dict[str, Any]) -> None:
    rows = {asset: [dict(record.data) for record in pages[asset]["sample_rows"].records] for asset in STORED}
    first = folders(clean, "document_tokens")[0]
    doc_ids, lengths, tokens = (np.load(first / f"{name}.npy") for name in ("doc_id", "length", "tokens"))
    ends = np.cumsum(lengths)
    for number, row in enumerate(rows["document_tokens"]):
        assert row["doc_id"] == doc_ids[number].tobytes().hex()[:16]
        of_document = tokens[ends[number] - lengths[number] : ends[number]].tolist()
        assert row["tokens"].startswith(", ".join(map(str, of_document[:8])))
        assert row["tokens"].endswith(f"({len(of_document):,})")
    vocabulary = json_of(clean, "tokenizer", "tokenizer.json")["model"]["vocab"]
    assert [vocabulary[row["token"]] for row in rows["tokenizer"]] == [row["id"] for row in rows["tokenizer"]]
    assert [row["id"] for row in rows["tokenizer"]] == [0, 95, 191, 287, 383]
    plan = clean.folder("packing_plan") / "train"
    offsets, order = np.load(plan / "pack_offsets.npy"), np.load(plan / "order.npy")
    for row in rows["packing_plan"]:
        pack = row["pack"]
        assert row["segments"] == ", ".join(map(str, order[offsets[pack] : offsets[pack + 1]].tolist()))
    assert rows["token_shards"] == rows["handoff_package"]
    losses = json_of(clean, "varlen_training_run", "curves.json")["train"]
    assert [(row["step"], row["train"]) for row in rows["varlen_training_run"]] == list(enumerate(losses, 1))


def test_a_vocabulary_is_an_object_or_a_list_in_the_order_of_ids(tmp_path: Path) -> None:
    tokens = ["<unk>", "\u202e", "a", "b\n", "\\"]
    shown = ["<unk>", "\\u202e", "a", "b\\n", "\\\\"]
    for form in (
        {token: number for number, token in reversed(list(enumerate(tokens)))},
        [[one, -1.5] for one in tokens],
    ):
        path = tmp_path / "tokenizer.json"
        path.write_text(json.dumps({"model": {"vocab": form}}), encoding="utf-8")
        rows = sample_vocabulary(path)
        assert rows.num_rows == 5
        assert rows.sample == [{"token": token, "id": number} for number, token in enumerate(shown)]


@given(st.integers(0, 400), st.integers(2, 60))
@example(21, 20)
def test_a_spread_sample_is_as_large_as_it_may_be_and_has_both_ends(num_rows: int, most: int) -> None:
    spread = [row["n"] for row in spread_rows(pa.table({"n": pa.array(range(num_rows), pa.int64())}), most)]
    assert len(spread) == min(num_rows, most)
    assert spread[:1] + spread[-1:] == ([0, num_rows - 1] if num_rows else [])
    gaps = np.diff(spread)
    assert not len(gaps) or 0 < gaps.min() <= gaps.max() <= gaps.min() + 1


@pytest.mark.parametrize("num_rows", [1, 5, 6, 384])
def test_steps_and_vocabularies_are_sampled_from_the_first_to_the_last(tmp_path: Path, num_rows: int) -> None:
    expected = sorted({0, num_rows - 1, *(at * (num_rows - 1) // 4 for at in (1, 2, 3))})
    path = tmp_path / "tokenizer.json"
    vocabulary = {str(number): number for number in range(num_rows)}
    path.write_text(json.dumps({"model": {"vocab": vocabulary}}), encoding="utf-8")
    assert [row["id"] for row in sample_vocabulary(path).sample] == expected
    numbers = list(range(num_rows))
    curves = {"train": numbers, "gradient_norms": numbers, "validation": [[num_rows, 2.5]], "validation_by_pool": {}}
    stage = small_corpus.open_stage(small_corpus.write_recipe(tmp_path), tmp_path / "home")

    def write(folder: Path) -> dict[str, Any]:
        (folder / "curves.json").write_text(json.dumps(curves), encoding="utf-8")
        return {}

    ref = stage.materialize(asset="varlen_training_run", inputs={}, parameters={}, version=1, write=write)
    rows = TRAINING.rows(stage, ref, ())
    assert rows.num_rows == num_rows
    assert [(row["step"], row["train"], row["gradient_norms"]) for row in rows.sample] == [
        (at + 1, at, at) for at in expected
    ]
    assert [row["validation"] for row in rows.sample] == [None] * (len(expected) - 1) + [2.5]


def test_rows_are_of_the_training_split_where_it_holds_any() -> None:
    counts = {name: {"packs": 1, "documents": 0} for name in ("validation", "test", "train")}
    assert find_splits(counts, "packs") == ["train", "validation", "test"]
    assert find_splits(counts | {"train": {"packs": 0}}, "packs") == ["validation", "test"]
    assert find_splits(counts, "documents") == []


Values = dict[bytes, list[dict[str, Any]]]


def add_rows(values: Values, columns: dict[str, list[Any]]) -> None:
    for doc_id, row in zip(columns["doc_id"], zip(*columns.values(), strict=True), strict=True):
        values.setdefault(doc_id, []).append(dict(zip(columns, row, strict=True)))


def table_values(built: Built, asset: str) -> Values:
    values: Values = {}
    for folder in folders(built, asset):
        for path in found(folder, TABLES[asset]):
            add_rows(values, pq.read_table(path).to_pydict())
    return values


def array_values(built: Built, asset: str, names: list[str]) -> Values:
    values: Values = {}
    for folder in folders(built, asset):
        columns: dict[str, list[Any]] = {name: np.load(folder / f"{name}.npy").tolist() for name in names}
        columns["doc_id"] = [bytes(row) for row in columns["doc_id"]]
        if (folder / "tokens.npy").exists():
            tokens, ends = np.load(folder / "tokens.npy"), np.cumsum(columns["length"])
            columns["tokens"] = [part.tolist() for part in np.split(tokens, ends[:-1])]
        add_rows(values, columns)
    return values


def index_values(folder: Path) -> Values:
    values: Values = {}
    for index in sorted(folder.glob("*_index")):
        fields = json.loads((index / "index.json").read_bytes())
        names = ["doc_id", "pool", "shard", "offset", "length"]
        columns: dict[str, list[Any]] = {name: np.load(index / f"{name}.npy").tolist() for name in names}
        columns["doc_id"] = [bytes(row) for row in columns["doc_id"]]
        shards = [
            np.fromfile(folder / one["file"], fields["token_dtype"], offset=HEADER_BYTES) for one in fields["shards"]
        ]
        columns["tokens"] = [
            shards[shard][offset : offset + length].tolist()
            for shard, offset, length in zip(columns["shard"], columns["offset"], columns["length"], strict=True)
        ]
        columns["pool"] = [fields["pools"][number] for number in columns["pool"]]
        add_rows(values, columns)
    return values


def values_of(built: Built, asset: str) -> Values:
    """An asset's rows by their doc_id, which copies share, read without our code; a pool by its name."""
    if asset in TABLES:
        return table_values(built, asset)
    if asset == "minhash_signatures":
        return array_values(built, asset, ["doc_id", "text_bytes"])
    if asset == "document_tokens":
        return array_values(built, asset, ["doc_id", "length", "place"])
    folder = built.folder(asset)
    return index_values(folder if asset == "token_shards" else next(folder.glob("token_shards/*/*")))


def ancestors(asset: str) -> set[str]:
    return {name for upstream in UPSTREAM[asset] for name in (upstream, *ancestors(upstream))}


@pytest.mark.parametrize("asset", LINEAGE)
def test_lineage_names_columns_that_are_there(asset: str, pages: dict[str, Any]) -> None:
    names = {name: {column.name for column in pages[name]["dagster/column_schema"].columns} for name in STAGES}
    shown = pages[asset]["dagster/column_lineage"].deps_by_column
    assert set(shown) == set(LINEAGE[asset]) <= names[asset]
    for column, deps in shown.items():
        sources = [(dep.asset_key.path[-1], dep.column_name) for dep in deps]
        assert sorted(sources) == sorted(LINEAGE[asset][column])
        assert sources
        for upstream, name in sources:
            assert upstream in ancestors(asset)
            assert name in names[upstream], (upstream, name)


@pytest.mark.parametrize(("asset", "column"), [(asset, column) for asset in LINEAGE for column in LINEAGE[asset]])
def test_columns_carry_the_values_of_their_sources(asset: str, column: str, clean: Built) -> None:
    sources = LINEAGE[asset][column]
    (upstream,) = {name for name, _ in sources}
    here, there = values_of(clean, asset), values_of(clean, upstream)
    joined = [doc_id for doc_id in here if doc_id in there]
    assert len(joined) > 20
    if asset not in ("reference_sets", "minhash_signatures"):  # they hold texts from outside, too
        assert len(joined) == len(here)
    for doc_id in joined:
        carried = [[row[name] for _, name in sources] for row in there[doc_id]]
        values = [row[column] if len(sources) > 1 else [row[column]] for row in here[doc_id]]
        assert all(value in carried for value in values), doc_id.hex()
    assert sum(len(there[doc_id]) == 1 for doc_id in joined) > 20  # whose value can be no other's


def test_speed_is_told_of_what_was_built_whole(pages: dict[str, Any], tmp_path: Path) -> None:
    with_text = {"raw_row_groups", "minhash_signatures", "lsh_clusters", "document_tokens", "split_documents"}
    with_text.add("tokenizer_report")
    assert {asset for asset, page in pages.items() if "megabytes_per_second" in page} == with_text
    for page in map(pages.__getitem__, with_text):
        low, high = (page["text_bytes"] / 1e6 / (page["seconds"] + rounded) for rounded in (0.0006, -0.0006))
        assert low - 1e-6 < page["megabytes_per_second"] < high + 1e-6
    recipe = small_corpus.write_recipe(small_corpus.write_corpus(tmp_path / "corpus"))
    home = tmp_path / "home"
    first, second = (
        small_corpus.materialized_metadata(small_corpus.materialize(recipe, home, "raw_row_groups"))["raw_row_groups"]
        for _ in range(2)
    )
    assert "megabytes_per_second" in first
    assert "megabytes_per_second" not in second
    assert first["data_version"] == second["data_version"]
