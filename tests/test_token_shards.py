"""From token units to shards: the same tokens whatever the shards' size, and next to nothing in memory while planning."""

import hashlib
import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import small_corpus
from small_corpus import Built, build, judged, open_stage, sentences, write_recipe, write_rows

from pipeline_assets.schemas import SplitDocuments, arrow_schema
from pipeline_assets.shards import shard_plan
from pipeline_assets.splits import TABLE_NAME
from pipeline_assets.stripes import Stage, seal_units, units_in
from pipeline_assets.tokens import DOC_IDS, LENGTHS, PLACES, TOKENS, ordered_documents
from resources.artifact_store import ArtifactRef
from resources.tables import write_array, write_table

MAX_SHARD_TOKENS = 200
CHECKS = (
    "shards_match_their_headers_and_hashes",
    "shards_end_every_document_once",
    "shards_hold_every_document_once",
)


@pytest.fixture(scope="module", params=["shuffled", "source"])
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    """A small corpus with copies that all stay, cut into shards that its longest documents do not fit."""
    folder = tmp_path_factory.mktemp(request.param)
    texts = [sentences(number, 20 + 5 * (number % 7)) for number in range(40)]
    texts += [small_corpus.LONG, texts[3], texts[3]]
    for pool, some in (("alpha", texts), ("beta", [texts[3], *(sentences(number, 40) for number in range(50, 62))])):
        write_rows(folder / pool / "a.parquet", [{"text": text, "dump": "x"} for text in some], rows_per_group=5)
    changes = {
        "dedup.mode": "off",
        "splits.order": request.param,
        "references": [{"name": "sample", "kind": "tokenizer_sample", "documents_per_pool": 6}],
        "shards.max_shard_tokens": MAX_SHARD_TOKENS,
    }
    return build(write_recipe(folder, changes), folder / "home", "token_shards")


def documents_in_order(built: Built, split: str) -> list[tuple[bytes, list[int]]]:
    """doc_id and tokens of a split's documents, sorted here by the plain rule."""
    stage, found = built.stage, []
    units = (units_in(stage, built.refs[name]) for name in ("document_tokens", "split_documents", "raw_row_groups"))
    for tokens, table, raw in zip(*units, strict=True):
        splits = stage.table(table, TABLE_NAME, ["split"]).column("split").to_pylist()
        ids, stored, ends = stage.array(tokens, DOC_IDS), stage.array(tokens, TOKENS), stage.array(tokens, LENGTHS)
        start = 0
        for row, length in enumerate(ends.tolist()):
            if splits[row] == split:
                place = (raw.counts["pool"], raw.counts["file"], *stage.array(tokens, PLACES)[row].tolist())
                found.append((place, ids[row].tobytes(), stored[start : start + length].tolist()))
            start += length
    order = [document[1] for document in sorted(found)]
    if stage.recipe.splits.order == "shuffled":
        order = [row.tobytes() for row in np.load(built.folder("token_shards") / f"{split}_index" / "doc_id.npy")]
        assert sorted(order) == sorted(document[1] for document in found)
    by_id = {doc_id: tokens for _, doc_id, tokens in found}
    return [(doc_id, by_id[doc_id]) for doc_id in order]


@pytest.mark.parametrize("split", ["train", "validation"])
def test_shards_are_the_documents_in_order_and_a_long_one_has_its_own(built: Built, split: str) -> None:
    folder = built.folder("token_shards")
    files = sorted(folder.glob(f"{split}_*.bin"))
    shards = [np.frombuffer(file.read_bytes()[1024:], "<u2").tolist() for file in files]
    documents = documents_in_order(built, split)
    assert [token for shard in shards for token in shard] == [token for _, tokens in documents for token in tokens]
    assert [row.tobytes() for row in np.load(folder / f"{split}_index" / "doc_id.npy")] == [one[0] for one in documents]
    ends = [shard.count(0) for shard in shards]  # the EOS has id 0
    assert all(len(shard) <= MAX_SHARD_TOKENS or count == 1 for shard, count in zip(shards, ends, strict=True))
    if split == "train":
        assert len(shards) > 5
        assert max(map(len, shards)) > MAX_SHARD_TOKENS


@pytest.mark.parametrize("name", CHECKS)
def test_checks_pass_on_shards_of_one_document(built: Built, name: str) -> None:
    assert judged(name, built).num_violations == 0


def test_the_metadata_says_how_tokens_were_encoded(built: Built) -> None:
    (way,) = {unit.counts["encoded_by"] for unit in units_in(built.stage, built.refs["document_tokens"])}
    assert way == "a table of words: byte-level BPE over words of GPT-2's pattern"


def synthetic(stage: Stage, num_units: int, documents_a_unit: int) -> tuple[ArtifactRef, ArtifactRef]:
    """Sealed token units and split tables of made-up documents of one token."""
    tokens, tables = [], []
    for unit in range(num_units):
        names = [hashlib.sha256(f"{unit} {number}".encode()).digest() for number in range(documents_a_unit)]
        doc_ids = np.frombuffer(b"".join(names), np.uint8).reshape(-1, 32)

        def write_tokens(folder: Path, name: str = str(unit), doc_ids: np.ndarray = doc_ids) -> dict[str, object]:
            n = len(doc_ids)
            write_array(np.zeros(n, np.uint16), folder / TOKENS)
            write_array(np.ones(n, np.int64), folder / LENGTHS)
            write_array(doc_ids, folder / DOC_IDS)
            write_array(np.column_stack([np.zeros(n, np.int64), np.arange(n)]), folder / PLACES)
            return {"pool": "alpha", "file": name, "documents": n, "tokens": n}

        def write_splits(folder: Path, names: list[bytes] = names) -> dict[str, object]:
            columns = {
                "doc_id": names,
                "text": [""] * len(names),
                "num_tokens": [1] * len(names),
                "cluster_id": names,
                "pool": ["alpha"] * len(names),
                "split": ["train"] * len(names),
                "reason": ["used"] * len(names),
            }
            write_table(pa.table(columns, schema=arrow_schema(SplitDocuments)), folder / TABLE_NAME)
            return {"documents": len(names)}

        own = {"unit": f"{unit}", "inputs": {"n": documents_a_unit}, "parameters": {}, "version": 1}
        tokens.append(stage.materialize(asset="document_tokens", write=write_tokens, **own))
        tables.append(stage.materialize(asset="split_documents", write=write_splits, **own))
    return seal_units(stage, "document_tokens", tokens, {}, 1), seal_units(stage, "split_documents", tables, {}, 1)


def peak_of_planning(stage: Stage, num_units: int, documents_a_unit: int) -> int:
    assets = synthetic(stage, num_units, documents_a_unit)
    tracemalloc.start()
    try:
        shard_plan(stage, *assets)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_planning_shards_holds_tens_of_bytes_a_document(tmp_path: Path) -> None:
    stage = open_stage(write_recipe(tmp_path), tmp_path / "home")
    few, many, a_unit = 5, 25, 2_000
    peaks = [peak_of_planning(stage, number, a_unit) for number in (few, many)]
    assert (peaks[1] - peaks[0]) / ((many - few) * a_unit) < 100


def test_documents_of_many_units_are_ordered_as_all_at_once(built: Built) -> None:
    stage = built.stage
    units = units_in(stage, built.refs["document_tokens"])
    keys = []
    for unit in units:
        pool = ["alpha", "beta"].index(unit.counts["pool"])
        for doc_id, place in zip(stage.array(unit, DOC_IDS), stage.array(unit, PLACES).tolist(), strict=True):
            keys.append((doc_id.tobytes(), (pool, unit.counts["file"], *place)))
    order = ordered_documents(stage, units).tolist()
    assert sorted(order) == list(range(len(keys)))
    if stage.recipe.splits.order == "source":
        assert [keys[number][1] for number in order] == sorted(place for _, place in keys)
    places: dict[bytes, list[object]] = {}
    for number in order:
        places.setdefault(keys[number][0], []).append(keys[number][1])
    assert all(some == sorted(some) for some in places.values())
    assert max(map(len, places.values())) == 4
