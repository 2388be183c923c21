"""What signatures, clusters and reference sets say is recounted: altered in one place, it fails the check that judges it.

Each test changes one value, as `test_asset_checks.py` does: a cell of a table, an array's element, a count.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import naive_text
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import small_corpus
from hypothesis import given
from hypothesis import strategies as st
from small_corpus import HELD_OUT, Built, build, build_beside, copy_home, doc_id, judged, sentences, write_recipe
from test_asset_checks import change_table, first_slice, row_where, seal_again, set_cell, set_value, units, whole

from asset_checks.similarity import jaccard, shingle_hashes
from pipeline_assets.clusters import slice_name
from pipeline_assets.duplicates import BY_PAIR_NAME, EVIDENCE_NAME, EXAMPLES_NAME, LARGEST_NAME
from pipeline_assets.reference_hits import BOILERPLATE_NAME, HITS_NAME
from pipeline_assets.stripes import UNITS_NAME, units_in
from pipeline_assets.transforms.lsh import band_keys
from pipeline_assets.transforms.minhash import MinHashParams
from training_io.manifest import MANIFEST_NAME, load_manifest

EVIDENCE, HITS = "every_removal_has_evidence", "reference_texts_are_found"
ROWS, KEPT, COMPONENTS = (
    "every_row_has_one_decision",
    "one_document_is_kept_per_cluster",
    "clusters_are_connected_components",
)
SIGNED, PLAUSIBLE = "signatures_are_those_of_the_texts", "removal_is_plausible"
DRAWN = "reference_texts_are_as_they_were_read"

Change = Callable[[Any], Any]


def other_text(_: Any) -> str:
    return "elsewhere"


def more(value: Any) -> Any:
    return value + 1


def less(value: Any) -> Any:
    return value * 0.999


def other_id(_: Any) -> bytes:
    return doc_id(small_corpus.UNIQUE)


def violations(name: str, built: Built) -> list[str]:
    return [str(example["violation"]) for example in judged(name, built).examples if "violation" in example]


def cluster_file(built: Built, name: str) -> Path:
    return whole(built, "lsh_clusters") / name


@pytest.mark.parametrize(
    ("check", "table", "column", "change"),
    [
        (EVIDENCE, EVIDENCE_NAME, "removed_doc_id", other_id),
        (EVIDENCE, EVIDENCE_NAME, "kept_doc_id", other_id),
        (EVIDENCE, EVIDENCE_NAME, "removed_pool", other_text),
        (EVIDENCE, EVIDENCE_NAME, "kept_pool", other_text),
        (EVIDENCE, EVIDENCE_NAME, "removed_dump", other_text),
        (EVIDENCE, EVIDENCE_NAME, "kept_dump", other_text),
        (EVIDENCE, EVIDENCE_NAME, "removed_bytes", more),
        (EVIDENCE, EVIDENCE_NAME, "shared_bands", lambda value: value - 1),
        (EVIDENCE, EVIDENCE_NAME, "jaccard", less),
        (EVIDENCE, BY_PAIR_NAME, "removed", other_text),
        (EVIDENCE, BY_PAIR_NAME, "kept", other_text),
        (EVIDENCE, BY_PAIR_NAME, "documents", more),
        (EVIDENCE, BY_PAIR_NAME, "bytes", more),
        (EVIDENCE, BY_PAIR_NAME, "by", lambda value: {"pool": "dump", "dump": "pool"}[value]),
        (EVIDENCE, LARGEST_NAME, "cluster_id", other_id),
        (EVIDENCE, LARGEST_NAME, "documents", more),
        (EVIDENCE, LARGEST_NAME, "min_jaccard", less),
        (EVIDENCE, LARGEST_NAME, "mean_jaccard", less),
        (EVIDENCE, LARGEST_NAME, "compared", more),
        (EVIDENCE, LARGEST_NAME, "pools", other_text),
        (EVIDENCE, LARGEST_NAME, "dumps", other_text),
        (EVIDENCE, LARGEST_NAME, "files", other_text),
        (EVIDENCE, LARGEST_NAME, "first_words", other_text),
        (EVIDENCE, EXAMPLES_NAME, "jaccard", less),
        (EVIDENCE, EXAMPLES_NAME, "shared_bands", more),
        (EVIDENCE, EXAMPLES_NAME, "removed_doc_id", other_id),
        (EVIDENCE, EXAMPLES_NAME, "removed_dump", other_text),
        (EVIDENCE, EXAMPLES_NAME, "removed_url", other_text),
        (EVIDENCE, EXAMPLES_NAME, "removed_text", other_text),
        (EVIDENCE, EXAMPLES_NAME, "kept_doc_id", other_id),
        (EVIDENCE, EXAMPLES_NAME, "kept_dump", other_text),
        (EVIDENCE, EXAMPLES_NAME, "kept_url", other_text),
        (EVIDENCE, EXAMPLES_NAME, "kept_text", other_text),
        (HITS, HITS_NAME, "reference_set", other_text),
        (HITS, HITS_NAME, "reference_doc_id", other_id),
        (HITS, HITS_NAME, "doc_id", other_id),
        (HITS, HITS_NAME, "kind", lambda value: {"exact": "near", "near": "exact"}[value]),
        (HITS, HITS_NAME, "jaccard", less),
        (HITS, HITS_NAME, "num_ngrams", more),
        (HITS, HITS_NAME, "excerpt", other_text),
    ],
)
def test_each_column_of_what_is_told_of_clusters_is_recounted(
    copy: Built, check: str, table: str, column: str, change: Change
) -> None:
    path = cluster_file(copy, table)
    row = pq.read_metadata(path).num_rows // 2
    set_cell(path, row, column, change(pq.read_table(path).column(column)[row].as_py()))
    seal_again(copy, path.parent)
    assert violations(check, copy)


@pytest.mark.parametrize("table", [BY_PAIR_NAME, LARGEST_NAME, EXAMPLES_NAME, HITS_NAME])
@pytest.mark.parametrize("change", [lambda rows: rows[1:], lambda rows: [*rows, rows[-1]]], ids=["lost", "twice"])
def test_no_row_of_what_is_told_of_clusters_is_lost_or_told_twice(copy: Built, table: str, change: Change) -> None:
    path = cluster_file(copy, table)
    change_table(path, change)
    seal_again(copy, path.parent)
    assert violations(HITS if table == HITS_NAME else EVIDENCE, copy)


def slice_with(built: Built, column: str, value: object) -> Path:
    """The first unit's decisions in which a column has a value somewhere."""
    paths = sorted(cluster_file(built, "clusters").glob("*.parquet"))
    return next(path for path in paths if value in pq.read_table(path).column(column).to_pylist())


@pytest.mark.parametrize(
    ("check", "where", "column", "value"),
    [
        (ROWS, ("reason", "kept"), "pools", "alpha,beta"),
        (KEPT, ("reason", "kept"), "kept_doc_id", doc_id(small_corpus.UNIQUE)),
        (KEPT, ("reason", "kept"), "reason", "near_duplicate"),
        (KEPT, ("reason", "exact_duplicate"), "reason", "near_duplicate"),
        (KEPT, ("reason", "exact_duplicate"), "kept_doc_id", doc_id(small_corpus.UNIQUE)),
        (KEPT, ("reason", "exact_duplicate"), "kept", True),
        (COMPONENTS, ("reason", "kept"), "cluster_size", 9),
        (COMPONENTS, ("cluster_size", 1), "cluster_id", bytes(32)),
        (HITS, ("barred", False), "barred", True),
        (HITS, ("barred", True), "barred", False),
        (HITS, ("references", ""), "references", "held_out"),
        (HITS, ("references", "sample"), "references", "sample,held_out"),
    ],
)
def test_each_column_of_the_decisions_is_recounted(
    copy: Built, check: str, where: tuple[str, Any], column: str, value: object
) -> None:
    path = slice_with(copy, *where)
    row = row_where(path, *where)
    decided = pq.read_table(path).column("doc_id")[row].as_py()
    set_cell(path, row, column, value)
    seal_again(copy, whole(copy, "lsh_clusters"))
    assert any(decided.hex()[:16] in one for one in violations(check, copy))


@pytest.mark.parametrize("check", [ROWS, KEPT, EVIDENCE, HITS])
def test_a_lost_decision_is_told_by_every_check_that_lays_them_beside_the_rows(copy: Built, check: str) -> None:
    _, path = first_slice(copy)
    change_table(path, lambda rows: rows[:-1])
    seal_again(copy, whole(copy, "lsh_clusters"))
    assert any("decisions" in one for one in violations(check, copy))


def test_a_cluster_is_named_after_its_smallest_document(copy: Built) -> None:
    original, copied = sorted([doc_id(small_corpus.NEAR_ORIGINAL), doc_id(small_corpus.NEAR_COPY)])
    for path in sorted(cluster_file(copy, "clusters").glob("*.parquet")):
        change_table(
            path,
            lambda rows: [
                {**row, "cluster_id": copied if row["cluster_id"] == original else row["cluster_id"]} for row in rows
            ],
        )
    seal_again(copy, whole(copy, "lsh_clusters"))
    found = violations(COMPONENTS, copy)
    assert len(found) == 2
    assert all(f"expected cluster {original.hex()[:16]}" in one for one in found)


def restate(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the counts of a manifest; what was counted stays."""
    manifest = load_manifest(folder)
    counts = json.loads(json.dumps(dict(manifest.counts)))
    change(counts)
    assert counts != manifest.counts
    (folder / MANIFEST_NAME).write_text(json.dumps(replace(manifest, counts=counts).to_json()), encoding="utf-8")


def add_one(*keys: Any) -> Callable[[dict[str, Any]], None]:
    def change(counts: Any) -> None:
        for key in keys[:-1]:
            counts = counts[key]
        counts[keys[-1]] += 1

    return change


@pytest.mark.parametrize(
    ("check", "asset", "keys"),
    [
        *[
            (EVIDENCE, "lsh_clusters", (name,))
            for name in (
                "documents",
                "clusters",
                "largest_cluster",
                "duplicate_clusters",
                "kept",
                "exact_duplicate",
                "near_duplicate",
                "reference",
                "barred",
                "text_bytes",
                "removed_bytes",
                "clusters_within_one_dump",
                "clusters_over_several_dumps",
            )
        ],
        (EVIDENCE, "lsh_clusters", ("cluster_sizes", 1, 1)),
        *[
            (EVIDENCE, "lsh_clusters", ("removed_by_pool", "beta", name))
            for name in ("documents", "removed", "bytes", "removed_bytes")
        ],
        *[
            (HITS, "lsh_clusters", ("references", "held_out", name))
            for name in (
                "texts",
                "exact_documents",
                "matched_documents",
                "kept_out_of_validation",
                "removed",
                "exact_hits",
                "near_hits",
                "overlap_hits",
            )
        ],
        *[
            (SIGNED, "minhash_signatures", (name,))
            for name in ("documents", "text_bytes", "wordless_documents", "reference_texts")
        ],
        (DRAWN, "reference_sets", ("documents",)),
        (DRAWN, "reference_sets", ("sets", "sample")),
    ],
)
def test_each_count_of_the_manifests_is_recounted(copy: Built, check: str, asset: str, keys: tuple[Any, ...]) -> None:
    restate(whole(copy, asset), add_one(*keys))
    (found,) = violations(check, copy)
    assert str([key for key in keys if isinstance(key, str)][-1]) in found or keys[0] in found


def test_documents_left_unverified_are_warned_of(copy: Built) -> None:
    restate(whole(copy, "lsh_clusters"), lambda counts: counts.update(documents_left_unverified=1_234))
    verdict = judged(PLAUSIBLE, copy)
    (found,) = [str(example["violation"]) for example in verdict.examples]
    assert found.startswith("expected 0 documents left unverified, found 1,234")
    assert "raise dedup.rows_per_band" in found
    assert verdict.numbers["documents_left_unverified"] == 1_234


@pytest.mark.parametrize(("unlike", "warned"), [(0, []), (1, []), (2, ["beta"])])
def test_a_pool_of_which_most_removed_are_unlike_the_kept_is_warned_of(
    copy: Built, unlike: int, warned: list[str]
) -> None:
    path = cluster_file(copy, EVIDENCE_NAME)
    lowest = {0: 0.36, 1: 0.359, 2: 0.1}[unlike]  # the limit: half of (1/14)^(1/8), 0.35951

    def change(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        beta = [row for row in rows if row["removed_pool"] == "beta"]
        assert len(beta) == 3
        assert len(rows) > 3
        for row in rows:
            row["jaccard"] = 0.9
        for row, similarity in zip(beta, (lowest, 0.3 if unlike == 2 else 0.37), strict=False):
            row["jaccard"], row["removed_doc_id"] = similarity, bytes(32)  # a copy would be like the text kept
        return rows

    change_table(path, change)
    seal_again(copy, path.parent)
    verdict = judged(PLAUSIBLE, copy)
    assert [one.split(":")[0] for one in violations(PLAUSIBLE, copy)] == [f"pool {name}" for name in warned]
    assert verdict.num_violations == len(warned)
    assert ("2 of 3 compared documents less than 0.360" in str(violations(PLAUSIBLE, copy))) == bool(warned)
    assert verdict.numbers["removed_unlike_kept"] == unlike
    assert verdict.numbers["lowest_similarity_to_kept"] == lowest
    assert "similar to the document kept" in verdict.found


def poison_none(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return []


def poison_null(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    near = next(row for row in rows if row["removed_pool"] == "beta" and row["removed_doc_id"] != row["kept_doc_id"])
    near["jaccard"] = None
    return rows


def poison_one(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if row is not next(row for row in rows if row["removed_pool"] == "beta")]


@pytest.mark.parametrize(
    ("poison", "found"),
    [(poison_none, {"alpha": 0, "beta": 0}), (poison_null, {"beta": 2}), (poison_one, {"beta": 2})],
)
def test_a_removal_whose_similarity_is_not_known_is_warned_of(
    copy: Built, poison: Change, found: dict[str, int]
) -> None:
    path = cluster_file(copy, EVIDENCE_NAME)
    removed = Counter(row["removed_pool"] for row in pq.read_table(path).to_pylist())
    assert removed["beta"] == 3
    assert removed["alpha"]
    change_table(path, poison)
    seal_again(copy, path.parent)
    assert violations(PLAUSIBLE, copy) == [
        f"pool {pool}: expected evidence with a similarity for {removed[pool]} removed"
        f" document{'s' if removed[pool] > 1 else ''}, found it for {number}; materialize lsh_clusters again"
        for pool, number in found.items()
    ]
    compared = sum({**removed, **found}.values())
    told = f"; of {compared} compared, " if compared else "; no removed document has a known similarity"
    assert told in judged(PLAUSIBLE, copy).found


def keep_all(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**row, "kept": True, "reason": "kept"} for row in rows]


def test_where_nothing_is_removed_nothing_is_unlike(copy: Built) -> None:
    path = cluster_file(copy, EVIDENCE_NAME)
    change_table(path, lambda rows: [])
    for unit in units_in(copy.stage, copy.refs["raw_row_groups"]):
        change_table(cluster_file(copy, slice_name(unit.unit)), keep_all)
    seal_again(copy, path.parent)
    verdict = judged(PLAUSIBLE, copy)
    assert violations(PLAUSIBLE, copy) == []
    assert verdict.numbers["removed_unlike_kept"] == 0
    assert "lowest_similarity_to_kept" not in verdict.numbers


@pytest.mark.parametrize("unit", [0, 1, -1], ids=["first unit", "second unit", "a reference set"])
@pytest.mark.parametrize(
    ("array", "element", "value", "needle"),
    [
        ("band_keys.npy", 5, 7, "band_keys.npy and band_rows.npy are not those of the signatures"),
        ("band_rows.npy", 5, 2, "band_keys.npy and band_rows.npy are not those of the signatures"),
        ("doc_id.npy", (1, 3), 0, "doc_id.npy holds other documents"),
        ("text_bytes.npy", 1, 7, "text_bytes.npy holds other lengths"),
    ],
)
def test_what_is_beside_the_signatures_is_recounted(
    copy: Built, unit: int, array: str, element: Any, value: int, needle: str
) -> None:
    name, folder = units(copy, "minhash_signatures")[unit]
    set_value(folder / array, element, value)
    seal_again(copy, folder)
    assert [one.startswith(f"{name}: {needle}") for one in violations(SIGNED, copy)] == [True]


@pytest.mark.parametrize("row", [0, 1, 2])
def test_signatures_are_signed_again_where_their_band_keys_agree_with_them(copy: Built, row: int) -> None:
    name, folder = units(copy, "minhash_signatures")[-1]
    signatures, doc_ids = (np.load(folder / array) for array in ("signatures.npy", "doc_id.npy"))
    assert len(signatures) == 3  # few enough to be signed again all
    signatures[row, 5] = 7
    keys = band_keys(signatures, MinHashParams())
    order = np.argsort(keys, axis=None, kind="stable")
    np.save(folder / "signatures.npy", signatures)
    np.save(folder / "band_keys.npy", keys.ravel()[order])
    np.save(folder / "band_rows.npy", np.repeat(np.arange(3, dtype=np.uint32), 14)[order])
    seal_again(copy, folder)
    signed = doc_ids[row].tobytes().hex()[:16]
    assert violations(SIGNED, copy) == [f"{name}: the stored signature of {signed} is another"]


def test_a_lost_band_key_is_noticed(copy: Built) -> None:
    _, folder = units(copy, "minhash_signatures")[0]
    for name in ("band_keys.npy", "band_rows.npy"):
        np.save(folder / name, np.load(folder / name)[1:])
    seal_again(copy, folder)
    assert len(violations(SIGNED, copy)) == 1


@pytest.mark.parametrize("name", ["documents", "text_bytes", "wordless_documents"])
def test_the_counts_of_a_signed_unit_are_recounted(copy: Built, name: str) -> None:
    folder = whole(copy, "minhash_signatures")
    listed = json.loads((folder / UNITS_NAME).read_bytes())
    listed[0]["counts"][name] += 1
    (folder / UNITS_NAME).write_text(json.dumps(listed), encoding="utf-8")
    seal_again(copy, folder)
    (found,) = violations(SIGNED, copy)
    assert f"says {name} = " in found


def test_a_sample_of_other_texts_of_the_corpus_is_noticed(copy: Built) -> None:
    """The set and its identity agree with each other, and not with the rule."""
    folder = whole(copy, "reference_sets")
    path = folder / "sample.parquet"
    drawn = pq.read_table(path).column("doc_id").to_pylist()
    lost, other = drawn[4], next(text for text in small_corpus.PLANTED["beta"] if doc_id(text) not in drawn)
    change_table(path, lambda rows: sorted([*rows[:4], *rows[5:], {"doc_id": doc_id(other), "text": other}], key=by_id))
    manifest = load_manifest(folder)
    content = hashlib.sha256(b"".join(pq.read_table(path).column("doc_id").to_pylist())).hexdigest()
    texts = [[name, content if name == "sample" else digest] for name, digest in manifest.inputs["texts"]]
    changed = replace(manifest, inputs={**manifest.inputs, "texts": texts})
    (folder / MANIFEST_NAME).write_text(json.dumps(changed.to_json()), encoding="utf-8")
    assert sorted(violations(DRAWN, copy)) == sorted(
        [f"sample: {lost.hex()[:16]} is not in the sample", f"sample: {doc_id(other).hex()[:16]} is not drawn"]
    )


def by_id(row: dict[str, Any]) -> bytes:
    found: bytes = row["doc_id"]
    return found


@given(st.text(alphabet="ab ,東京Éé", max_size=60), st.text(alphabet="ab ,東京Éé", max_size=60), st.integers(1, 6))
def test_similarities_are_those_of_the_formulas_hashes(left: str, right: str, ngram: int) -> None:
    sets = [sorted(set(naive_text.shingle_hashes(text, ngram))) for text in (left, right)]
    found = [shingle_hashes(text, ngram) for text in (left, right)]
    assert [one.tolist() for one in found] == sets
    assert jaccard(*found) == naive_text.jaccard(*sets)


STEM = sentences(4_000, 200)
NEAR = [f"{STEM.rsplit(' ', 1)[0]} {ending}" for ending in ("one", "two", "three and four", "five")]


def write_near_copies(folder: Path) -> Path:
    """The small corpus, with near copies in several crawls and with scores."""
    small_corpus.write_corpus(folder)
    rows = {
        "text": [*NEAR, NEAR[0], NEAR[3]],
        "dump": ["one", "two", "two", "one", "one", "two"],
        "score": pa.array([None, 3.5, 1.0, float("nan"), 2.0, None], pa.float64()),
    }
    pq.write_table(pa.table(rows), folder / "beta" / "planted.parquet")
    return folder


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """That corpus, and a home beside it that tests share: to build in, not to change."""
    return write_near_copies(tmp_path_factory.mktemp("corpus"))


EXCLUDING = [small_corpus.RECIPE["references"][0], {**small_corpus.RECIPE["references"][1], "action": "exclude"}]


@pytest.mark.parametrize(
    "options",
    [
        {"dedup.keep": "longest"},
        {"dedup.keep": "highest_score"},
        {"dedup.keep": "random"},
        {"dedup.mode": "exact"},
        {"dedup.mode": "off"},
        {"dedup.scope": "dump"},
        {"dedup.scope": "dump", "dedup.verify_jaccard": 0.8, "dedup.keep": "longest"},
        {"references": EXCLUDING},
        {"references": EXCLUDING, "dedup.mode": "exact"},
        {"references": EXCLUDING, "dedup.mode": "off"},
        {"references": EXCLUDING, "dedup.scope": "dump"},
        {"dedup.num_bands": 4, "dedup.rows_per_band": 4},
    ],
    ids=str,
)
def test_every_way_to_deduplicate_keeps_the_laws(corpus: Path, options: dict[str, Any]) -> None:
    built = build_beside(corpus, options, "lsh_clusters")
    assert {name: violations(name, built) for name in (ROWS, KEPT, COMPONENTS, EVIDENCE, HITS, SIGNED, DRAWN)} == {
        name: [] for name in (ROWS, KEPT, COMPONENTS, EVIDENCE, HITS, SIGNED, DRAWN)
    }


@pytest.mark.parametrize("rule", ["pool_priority", "longest", "highest_score", "random"])
def test_another_document_than_the_rules_is_noticed_even_where_all_tables_agree(
    corpus: Path, tmp_path: Path, rule: str
) -> None:
    built = copy_home(build_beside(corpus, {"dedup.keep": rule}, "lsh_clusters"), tmp_path / "home")
    cluster = min(map(doc_id, NEAR))
    for unit in units_in(built.stage, built.refs["raw_row_groups"]):
        path = built.folder("lsh_clusters") / slice_name(unit.unit)
        rows = pq.read_table(path).to_pylist()
        members = [row for row in rows if row["cluster_id"] == cluster]
        if not members:
            continue
        kept = next(row for row in members if row["kept"])
        other = next(row for row in members if row["doc_id"] != kept["doc_id"])
        for row in members:
            is_same = row["doc_id"] == other["doc_id"]
            row |= {"kept": row is other, "kept_doc_id": other["doc_id"]}
            row["reason"] = "kept" if row is other else "exact_duplicate" if is_same else "near_duplicate"
        change_table(path, lambda _, rows=rows: rows)
        found = violations(KEPT, built)
        assert len(found) == len(members)
        assert all(f"for {kept['doc_id'].hex()[:16]}, found" in one for one in found)
        return
    raise AssertionError(cluster)


QUESTION = "Which river did the old surveyors of the northern province follow when they drew its border"


@pytest.fixture(scope="module")
def with_an_exam(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """With a benchmark's question in two documents, and a phrase of it in many: to read, not to change."""
    corpus = write_near_copies(tmp_path_factory.mktemp("with_an_exam"))
    phrase = "all rights reserved by the owners of this site and of its several pages"
    texts = [f"{sentences(4_100)} {QUESTION}? {sentences(4_101)}", f"{sentences(4_102)} {QUESTION.upper()}"]
    texts += [f"{sentences(number)} {phrase}" for number in range(4_200, 4_212)]
    small_corpus.write_rows(corpus / "alpha" / "questions.parquet", [{"text": text} for text in [*texts, texts[-1]]])
    (corpus / "exam.txt").write_text(f"{QUESTION}\n{phrase}\n{phrase} too", encoding="utf-8")
    exam = {"name": "exam", "kind": "file", "path": "exam.txt", "action": "train_only", "overlap": {}}
    recipe = write_recipe(corpus, {"references": [*small_corpus.RECIPE["references"], exam]}, "exam.yaml")
    return build(recipe, corpus / "home", "lsh_clusters")


@pytest.fixture
def examined(with_an_exam: Built, tmp_path: Path) -> Built:
    """The same home under another folder, free to be damaged."""
    return copy_home(with_an_exam, tmp_path / "home")


def test_each_column_of_hits_by_runs_of_words_is_recounted(examined: Built) -> None:
    path = cluster_file(examined, HITS_NAME)
    pristine = path.read_bytes()
    assert violations(HITS, examined) == []
    row = row_where(path, "kind", "overlap")
    for column, change in {
        "doc_id": other_id,
        "reference_doc_id": lambda _: doc_id(HELD_OUT),
        "reference_set": lambda _: "held_out",
        "kind": lambda _: "near",
        "jaccard": lambda value: value + 0.001,
        "num_ngrams": more,
        "excerpt": lambda value: " ".join(value.split()[1:]),
    }.items():
        set_cell(path, row, column, change(pq.read_table(path).column(column)[row].as_py()))
        assert violations(HITS, examined), column
        path.write_bytes(pristine)


def test_each_column_of_the_boilerplate_is_recounted(examined: Built) -> None:
    path = cluster_file(examined, BOILERPLATE_NAME)
    pristine = path.read_bytes()
    assert pq.read_table(path).column("num_documents").to_pylist() == [13, 13]  # one text of them twice
    assert pq.read_table(path).column("num_items").to_pylist() == [2, 2]
    for column, change in {
        "reference_set": lambda _: "held_out",
        "ngram": lambda value: value.replace("rights", "writes"),
        "num_documents": more,
        "num_items": more,
    }.items():
        set_cell(path, 0, column, change(pq.read_table(path).column(column)[0].as_py()))
        assert violations(HITS, examined), column
        path.write_bytes(pristine)


def test_hits_of_verified_pairs_are_recounted(corpus: Path, tmp_path: Path) -> None:
    built = copy_home(build_beside(corpus, {"dedup.verify_jaccard": 0.8}, "lsh_clusters"), tmp_path / "home")
    path = cluster_file(built, HITS_NAME)
    pristine = path.read_bytes()
    assert violations(HITS, built) == []
    near = row_where(path, "kind", "near")
    document = pq.read_table(path).column("doc_id")[near].as_py()
    change_table(path, lambda rows: [*rows[:near], *rows[near + 1 :]])
    assert any(f"is near {document.hex()[:16]}, but no hit says so" in one for one in violations(HITS, built))
    path.write_bytes(pristine)
    set_cell(path, near, "doc_id", doc_id(small_corpus.UNIQUE))
    assert any(f"{doc_id(small_corpus.UNIQUE).hex()[:16]}, and it is not" in one for one in violations(HITS, built))
    path.write_bytes(pristine)
    change_table(path, lambda rows: [*rows, rows[near]])
    assert any("is told too often" in one for one in violations(HITS, built))


def test_what_a_crawl_keeps_is_of_the_same_cluster(corpus: Path, tmp_path: Path) -> None:
    built = copy_home(build_beside(corpus, {"dedup.scope": "dump"}, "lsh_clusters"), tmp_path / "home")
    path = slice_with(built, "reason", "near_duplicate")
    set_cell(path, row_where(path, "reason", "near_duplicate"), "kept_doc_id", doc_id(small_corpus.UNIQUE))
    assert len(violations(KEPT, built)) == 1
