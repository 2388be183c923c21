"""Each option of deduplication on the small corpus: what it keeps, what it shows, and that every law holds."""

import random
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import naive_clusters
import naive_text
import pyarrow.parquet as pq
import pytest
import small_corpus
from small_corpus import (
    CHECK_NAMES,
    Built,
    assets_read_by,
    build,
    build_beside,
    copy_home,
    doc_id,
    judged,
    write_recipe,
)

from pipeline_assets.buckets import build_buckets, plan_buckets
from pipeline_assets.clusters import seal_clusters, slice_name
from pipeline_assets.duplicates import BY_PAIR_NAME, EVIDENCE_NAME, EXAMPLES_NAME, LARGEST_NAME
from pipeline_assets.reference_hits import BOILERPLATE_NAME, HITS_NAME
from pipeline_assets.stripes import Sealed, units_in
from resources.tables import read_json

UPTO = "split_documents"
LAWS = [
    name
    for name in CHECK_NAMES
    if not set(assets_read_by(name)) & {"token_shards", "packing_plan", "handoff_package", *small_corpus.LAST}
]
CRAWLS = ("crawl-0", "crawl-1")
STEM = small_corpus.sentences(3_000, 200)
NEAR = [STEM, STEM.rsplit(" ", 1)[0] + " one", STEM.rsplit(" ", 1)[0] + " two"]
CHAIN = [  # neighbours are alike, the ends are not
    small_corpus.sentences(3_001, 12 * step) + " " + " ".join(STEM.split()[12 * step :]) for step in range(12)
]


TEMPLATES = [  # more than are compared in full: a template, and every second text with a tail of its own
    " ".join(small_corpus.sentences(3_100, 150).split()[: 150 - 3 * row])
    + " "
    + small_corpus.sentences(3_200 + row, 9 * (row % 2) + 5)
    for row in range(24)
]
VERIFIED_DUMPS = {"dedup.scope": "dump", "dedup.verify_jaccard": 0.8}
KEEP_COPIES = {"long": STEM + " " + "end " * 3, "scored": STEM + " x", "plain": STEM}
EXCLUDING = [small_corpus.RECIPE["references"][0], {**small_corpus.RECIPE["references"][1], "action": "exclude"}]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """The small corpus, free to be added to."""
    return small_corpus.write_corpus(tmp_path)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small corpus as it is, and a home beside it that tests share: to build in, not to change."""
    return small_corpus.write_corpus(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def near_crawls(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with near copies in two crawls."""
    corpus = small_corpus.write_corpus(tmp_path_factory.mktemp("near_crawls"))
    plant(corpus, [{"text": text, "dump": dump} for text, dump in zip(NEAR, ("c1", "c1", "c2"), strict=True)])
    return corpus


@pytest.fixture(scope="module")
def chained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a chain."""
    corpus = small_corpus.write_corpus(tmp_path_factory.mktemp("chained"))
    plant(corpus, [{"text": text} for text in CHAIN])
    return corpus


@pytest.fixture(scope="module")
def crawled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a chain and a template, over two crawls."""
    corpus = small_corpus.write_corpus(tmp_path_factory.mktemp("crawled"))
    plant(corpus, [{"text": text, "dump": f"c{row % 3 // 2}"} for row, text in enumerate([*CHAIN, *TEMPLATES])])
    return corpus


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with near copies of which two have a score."""
    corpus = small_corpus.write_corpus(tmp_path_factory.mktemp("scored"))
    scores = small_corpus.pa.array([1.0, 4.5, None], small_corpus.pa.float64())
    table = small_corpus.pa.table({"text": [*KEEP_COPIES.values()], "score": scores})
    pq.write_table(table, corpus / "beta" / "planted.parquet")
    return corpus


def plant(corpus: Path, rows: list[dict[str, str | None]]) -> None:
    """One more file in pool alpha."""
    names = ("text", "id", "dump", "url")
    small_corpus.write_rows(
        corpus / "alpha" / "planted.parquet", [{name: row.get(name) for name in names} for row in rows]
    )


def rows_of(built: Built) -> list[dict]:
    """Every raw row with what was decided about it."""
    found = []
    for unit in units_in(built.stage, built.refs["raw_row_groups"]):
        rows = built.stage.table(unit, "rows.parquet").to_pylist()
        decided = built.stage.table(built.refs["lsh_clusters"], slice_name(unit.unit)).to_pylist()
        found += [{**row, **decision} for row, decision in zip(rows, decided, strict=True)]
    return found


def table(built: Built, name: str) -> list[dict]:
    return pq.read_table(built.folder("lsh_clusters") / name).to_pylist()


def assert_laws_hold(built: Built) -> None:
    broken = {name: verdict.found for name in LAWS if (verdict := judged(name, built)).num_violations}
    assert broken == {}


@cache
def shingles(text: str) -> frozenset[tuple[str, ...]]:
    return frozenset(naive_text.shingles(text, 5))


def jaccard(left: str, right: str) -> float:
    return len(shingles(left) & shingles(right)) / len(shingles(left) | shingles(right))


def test_within_dumps_near_copies_of_other_crawls_stay_in_one_split(near_crawls: Path) -> None:
    built = build_beside(near_crawls, {"dedup.scope": "dump"}, UPTO)
    rows = [row for row in rows_of(built) if row["text"] in NEAR]
    assert len({row["cluster_id"] for row in rows}) == 1
    assert Counter((row["dump"], row["kept"]) for row in rows) == {("c1", True): 1, ("c1", False): 1, ("c2", True): 1}
    kept = [row["text"] for row in rows_of(built) if row["kept"]]
    assert len(kept) == len(set(kept))
    assert_laws_hold(built)
    same = build_beside(near_crawls, {}, "lsh_clusters")
    assert Counter(row["kept"] for row in rows_of(same) if row["text"] in NEAR) == {True: 1, False: 2}


def test_verified_edges_break_a_chain_and_keep_what_is_alike(chained: Path) -> None:
    ends = jaccard(CHAIN[0], CHAIN[-1])
    assert ends < 0.2
    loose = build_beside(chained, {}, "lsh_clusters")
    strict = build_beside(chained, {"dedup.verify_jaccard": 0.85}, UPTO)
    clusters = [{row["text"]: row["cluster_id"] for row in rows_of(built)} for built in (loose, strict)]
    assert len({clusters[0][text] for text in CHAIN}) < len({clusters[1][text] for text in CHAIN})
    texts = sorted(set(clusters[1]))
    alike = [
        (a, b) for a, left in enumerate(texts) for b, right in enumerate(texts[:a]) if jaccard(left, right) >= 0.85
    ]
    assert alike
    components = naive_clusters.components(len(texts), alike)
    for number, text in enumerate(texts):
        joined = {other for other, name in enumerate(texts) if clusters[1][name] == clusters[1][text]}
        assert joined <= components[number], text  # recall is a matter of bands; no verified cluster is too large
    assert clusters[1][small_corpus.NEAR_ORIGINAL] == clusters[1][small_corpus.NEAR_COPY]
    counts = strict.refs["lsh_clusters"].counts
    assert counts["pairs_compared"] > counts["pairs_verified"] > 0
    assert counts["documents_left_unverified"] == 0
    assert_laws_hold(strict)


def test_removed_documents_that_a_chain_alone_connects_to_the_one_kept_are_counted(corpus: Path) -> None:
    words, others = STEM.split(), small_corpus.sentences(3_001, 200).split()
    plant(corpus, [{"text": " ".join([*others[:step], *words[step:]])} for step in range(0, 200, 4)])
    built = build(write_recipe(corpus), corpus / "home", "lsh_clusters")
    texts = {doc_id(row["text"]): row["text"] for row in rows_of(built)}
    pairs = [(row["text"], texts[row["kept_doc_id"]]) for row in rows_of(built) if not row["kept"]]
    similar = [1.0 if left == right else jaccard(left, right) for left, right in pairs]
    unlike = sum(one < 0.3595 for one in similar)  # half of (1/14)^(1/8) = 0.71902
    assert 0 < unlike < len(similar)
    verdict = judged("removal_is_plausible", built)
    assert verdict.numbers["removed_unlike_kept"] == unlike
    assert verdict.numbers["lowest_similarity_to_kept"] == min(similar) < 0.2
    assert verdict.numbers["removed_doubtfully_like_kept"] == sum(one < 0.8 for one in similar) > unlike
    assert f"of {len(similar)} compared, " in verdict.found
    assert f" {unlike} less than 0.360, the lowest" in verdict.found
    strict = write_recipe(corpus, {"dedup.verify_jaccard": 0.95}, "strict.yaml")  # neighbours share 188 of 204 shingles
    verified = judged("removal_is_plausible", build(strict, corpus / "home", "lsh_clusters"))
    assert verified.numbers["removed_unlike_kept"] == 0


def change_decision(built: Built, text: str, **values: object) -> None:
    """Write other values into the decision about a text, and nothing else."""
    for unit in units_in(built.stage, built.refs["raw_row_groups"]):
        texts = built.stage.table(unit, "rows.parquet", ["text"]).column("text").to_pylist()
        if text in texts:
            path = built.folder("lsh_clusters") / slice_name(unit.unit)
            decided = pq.read_table(path)
            rows = decided.to_pylist()
            rows[texts.index(text)] |= values
            pq.write_table(small_corpus.pa.Table.from_pylist(rows, schema=decided.schema), path)
            return
    raise AssertionError(text)


def test_a_removal_across_crawls_breaks_the_law(near_crawls: Path, tmp_path: Path) -> None:
    shared = build_beside(near_crawls, {"dedup.scope": "dump"}, "lsh_clusters")
    built, near = copy_home(shared, tmp_path / "home"), (NEAR[0], NEAR[2])
    assert judged("clusters_are_connected_components", built).num_violations == 0
    change_decision(built, near[1], kept=False, kept_doc_id=doc_id(near[0]), reason="near_duplicate")
    verdict = judged("clusters_are_connected_components", built)
    assert verdict.num_violations == 1
    assert "to which nothing of its crawl connects it" in verdict.examples[0]["violation"]


def test_verified_clusters_that_are_joined_or_torn_break_the_law(chained: Path, tmp_path: Path) -> None:
    shared = build_beside(chained, {"dedup.verify_jaccard": 0.85}, "lsh_clusters")
    built = copy_home(shared, tmp_path / "home")
    cluster_of = {row["text"]: row["cluster_id"] for row in rows_of(built)}
    change_decision(built, CHAIN[-1], cluster_id=cluster_of[small_corpus.NEAR_ORIGINAL])
    assert "joins texts that are not alike" in str(judged("clusters_are_connected_components", built).examples)
    change_decision(built, CHAIN[-1], cluster_id=cluster_of[CHAIN[-1]])
    assert judged("clusters_are_connected_components", built).num_violations == 0
    change_decision(built, small_corpus.NEAR_COPY, cluster_id=bytes(32))
    assert "alike, share a band and are in two clusters" in str(
        judged("clusters_are_connected_components", built).examples
    )


def test_an_exclusion_without_a_hit_breaks_the_law(plain: Path, tmp_path: Path) -> None:
    built = copy_home(build_beside(plain, {"references": EXCLUDING}, "lsh_clusters"), tmp_path / "home")
    assert judged("every_removal_has_evidence", built).num_violations == 0
    path = built.folder("lsh_clusters") / HITS_NAME
    hits = pq.read_table(path)
    lost = [row["doc_id"] == doc_id(small_corpus.LIKE_A_REFERENCE) for row in hits.to_pylist()]
    assert any(lost)
    pq.write_table(hits.filter(small_corpus.pa.array([not one for one in lost])), path)
    assert "no document of its cluster is a hit" in str(judged("every_removal_has_evidence", built).examples)


@pytest.mark.parametrize(
    ("rule", "kept"), [("longest", "long"), ("highest_score", "scored"), ("random", None), ("pool_priority", None)]
)
def test_the_keep_rule_chooses_among_near_copies(scored: Path, rule: str, kept: str | None) -> None:
    built = build_beside(scored, {"dedup.keep": rule}, "lsh_clusters")
    chosen = [row["text"] for row in rows_of(built) if row["text"] in KEEP_COPIES.values() and row["kept"]]
    assert len(chosen) == 1
    if kept is not None:
        assert chosen == [KEEP_COPIES[kept]]


def test_random_and_pool_priority_differ_across_pools_only(plain: Path) -> None:
    chosen = {}
    for rule in ("random", "pool_priority"):
        built = build_beside(plain, {"dedup.keep": rule}, "lsh_clusters")
        chosen[rule] = {row["cluster_id"]: (row["pool"], row["text"]) for row in rows_of(built) if row["kept"]}
    assert chosen["random"].keys() == chosen["pool_priority"].keys()
    alpha_first = chosen["pool_priority"][min(doc_id(small_corpus.NEAR_ORIGINAL), doc_id(small_corpus.NEAR_COPY))]
    assert alpha_first == ("alpha", small_corpus.NEAR_ORIGINAL)


def test_what_was_removed_is_counted_by_pool_and_crawl_and_shown(plain: Path) -> None:
    built = build_beside(plain, {}, "document_tokens")
    rows, counts = rows_of(built), built.refs["lsh_clusters"].counts
    removed = [row for row in rows if row["reason"].endswith("duplicate")]
    text_of = {row["doc_id"]: row["text"] for row in rows}
    kept = {row["doc_id"]: row for row in rows if row["kept"]}
    assert counts["text_bytes"] == sum(len(row["text"].encode()) for row in rows)
    assert counts["removed_bytes"] == sum(len(row["text"].encode()) for row in removed) > 0
    for by in ("pool", "dump"):
        expected = Counter((row[by], kept[row["kept_doc_id"]][by]) for row in removed)
        found = {
            (row["removed"], row["kept"]): row["documents"] for row in table(built, BY_PAIR_NAME) if row["by"] == by
        }
        assert found == expected
    for row in table(built, EVIDENCE_NAME):
        assert row["jaccard"] == pytest.approx(jaccard(text_of[row["removed_doc_id"]], text_of[row["kept_doc_id"]]))
    examples = table(built, EXAMPLES_NAME)
    assert [row["jaccard"] for row in examples] == sorted((row["jaccard"] for row in examples), reverse=True)
    assert {row["jaccard"] == 1 for row in examples} == {True, False}
    for row in examples:
        assert text_of[row["removed_doc_id"]].startswith(row["removed_text"])
        assert text_of[row["kept_doc_id"]].startswith(row["kept_text"])
    sizes = Counter(row["cluster_id"] for row in rows)
    dumps = {cluster: {row["dump"] for row in rows if row["cluster_id"] == cluster} for cluster in sizes}
    shared = [cluster for cluster, size in sizes.items() if size > 1]
    assert counts["clusters_within_one_dump"] == sum(len(dumps[cluster]) == 1 for cluster in shared)
    assert counts["clusters_over_several_dumps"] == sum(len(dumps[cluster]) > 1 for cluster in shared)
    largest = table(built, LARGEST_NAME)
    assert [row["documents"] for row in largest] == sorted((sizes[cluster] for cluster in shared), reverse=True)[:20]
    for row in largest:
        texts = [other["text"] for other in rows if other["cluster_id"] == row["cluster_id"]]
        found = [jaccard(left, right) for number, left in enumerate(texts) for right in texts[:number]]
        assert (row["min_jaccard"], row["mean_jaccard"]) == pytest.approx((min(found), sum(found) / len(found)))
        assert kept_text(rows, row["cluster_id"]).startswith(row["first_words"])
        members = [other for other in rows if other["cluster_id"] == row["cluster_id"]]  # few enough: all are compared
        for column, name in (("pools", "pool"), ("dumps", "dump"), ("files", "file")):
            assert row[column] == naive_tally(other[name] or "" for other in members)
    tokens = built.refs["document_tokens"].counts
    assert 0 < tokens["removed_tokens"] < tokens["tokens"]


def test_a_cluster_of_more_than_are_compared_keeps_the_laws(corpus: Path) -> None:
    plant(corpus, [{"text": f"{small_corpus.sentences(9_000, 200)} ending {number}"} for number in range(45)])
    built = build(write_recipe(corpus), corpus / "home", "lsh_clusters")
    largest = table(built, LARGEST_NAME)[0]
    assert (largest["documents"], largest["compared"]) == (45, 32)
    for column in ("pools", "files"):  # of those that are compared, as their similarities are
        assert sum(int(part.rpartition(" × ")[2]) for part in largest[column].split(", ")) == 32
    verdict = judged("every_removal_has_evidence", built)
    assert verdict.num_violations == 0, verdict.examples


def naive_tally(names) -> str:
    counted = sorted(Counter(names).items(), key=lambda item: (-item[1], item[0]))
    others = [f"and {len(counted) - 3} others"] if len(counted) > 3 else []
    return ", ".join([f"{name} × {count}" for name, count in counted[:3]] + others)


def kept_text(rows: list[dict], cluster: bytes) -> str:
    (text,) = [row["text"] for row in rows if row["cluster_id"] == cluster and row["kept"]]
    return text


def test_references_are_counted_as_documents_and_as_clusters(plain: Path) -> None:
    built = build_beside(plain, {}, "lsh_clusters")
    rows, sets = rows_of(built), built.refs["lsh_clusters"].counts["references"]
    held_out = [row for row in rows if "held_out" in row["references"].split(",")]
    assert sets["held_out"]["texts"] == 3
    assert sets["held_out"]["exact_documents"] == 1
    assert sets["held_out"]["matched_documents"] == len(held_out) >= 3
    assert sets["held_out"]["kept_out_of_validation"] == sum(row["kept"] for row in held_out)
    hits = [row for row in table(built, HITS_NAME) if row["reference_set"] == "held_out"]
    assert Counter(row["kind"] for row in hits)["exact"] == 1
    text_of = {row["doc_id"]: row["text"] for row in rows}
    texts = {doc_id(text): text for text in (plain / "held_out.txt").read_text().splitlines()}
    for row in hits:
        assert row["jaccard"] == pytest.approx(jaccard(texts[row["reference_doc_id"]], text_of[row["doc_id"]]))


QUESTION = "Which river did the old surveyors of the northern province follow when they drew its border"
SHORT_QUESTION = "How many moons had the sixth planet then"
TINY_QUESTION = "Who wrote it"
PHRASE = "all rights reserved by the owners of this site and of its several pages"


def benchmark_recipe(corpus: Path, action: str = "train_only", **overlap: int) -> Path:
    (corpus / "exam.txt").write_text("\n".join([QUESTION, SHORT_QUESTION, TINY_QUESTION, PHRASE]), encoding="utf-8")
    exam = {"name": "exam", "kind": "file", "path": "exam.txt", "action": action, "overlap": overlap}
    references = [*small_corpus.RECIPE["references"], {**exam, "universe_documents": 1_000_000}]
    return write_recipe(corpus, {"references": references}, f"{action}.yaml")


def plant_questions(corpus: Path) -> dict[str, str]:
    texts = {
        "whole": f"{small_corpus.sentences(5070)} {QUESTION}? {small_corpus.sentences(5071)}",
        "part": f"{small_corpus.sentences(5072)} {' '.join(QUESTION.upper().split()[:13])} {small_corpus.sentences(5073)}",
        "too little": f"{small_corpus.sentences(5074)} {' '.join(QUESTION.split()[:12])} {small_corpus.sentences(5075)}",
        "short": f"{small_corpus.sentences(5076)} {SHORT_QUESTION}. {small_corpus.sentences(5077)}",
        "tiny": f"{small_corpus.sentences(5078)} {TINY_QUESTION}. {small_corpus.sentences(5079)}",
    }
    common = [f"{small_corpus.sentences(number)} {PHRASE}" for number in range(5_100, 5_112)]
    plant(corpus, [{"text": text} for text in [*texts.values(), *common]])
    return texts


@pytest.fixture(scope="module")
def examined(tmp_path_factory: pytest.TempPathFactory) -> tuple[Built, dict[str, str]]:
    """The corpus with a benchmark's questions planted, and their texts: to read, not to change."""
    corpus = small_corpus.write_corpus(tmp_path_factory.mktemp("examined"))
    texts = plant_questions(corpus)
    return build(benchmark_recipe(corpus), corpus / "home", UPTO), texts


def test_benchmark_items_are_found_by_their_runs_of_words(examined: tuple[Built, dict[str, str]]) -> None:
    built, texts = examined
    rows = {row["text"]: row for row in rows_of(built)}
    hits = {
        (row["doc_id"], row["num_ngrams"], row["excerpt"])
        for row in table(built, HITS_NAME)
        if row["kind"] == "overlap"
    }
    first = " ".join(QUESTION.lower().split()[:13])
    assert hits == {
        (doc_id(texts["whole"]), 4, first),
        (doc_id(texts["part"]), 1, first),
        (doc_id(texts["short"]), 1, SHORT_QUESTION.lower()),
    }
    assert {name for name, text in texts.items() if "exam" in rows[text]["references"]} == {"whole", "part", "short"}
    boilerplate = table(built, BOILERPLATE_NAME)
    assert {(row["reference_set"], row["num_documents"]) for row in boilerplate} == {("exam", 12)}
    assert not any("exam" in row["references"] for row in rows.values() if row["text"].endswith(PHRASE))
    assert all(rows[texts[name]]["barred"] for name in ("whole", "part", "short"))
    counts = built.refs["lsh_clusters"].counts["references"]["exam"]
    assert (counts["texts"], counts["overlap_hits"], counts["matched_documents"]) == (4, 3, 3)
    assert counts["exact_by_chance"] == pytest.approx(4 * len(rows_of(built)) / 1_000_000)
    assert_laws_hold(built)


def test_copies_of_a_page_hide_no_question(corpus: Path) -> None:
    page = plant_questions(corpus)["whole"]
    small_corpus.write_rows(corpus / "beta" / "copies.parquet", [{"text": page}] * 30)
    built = build(benchmark_recipe(corpus), corpus / "home", UPTO)
    rows = [row for row in rows_of(built) if row["text"] == page]
    assert len({(row["row_group"], row["file"]) for row in rows}) == 4  # in both stripes
    assert all("exam" in row["references"] and row["barred"] for row in rows)
    hits = Counter(row["doc_id"] for row in table(built, HITS_NAME) if row["kind"] == "overlap")
    assert (hits[doc_id(page)], len(rows)) == (1, 31)
    assert {row["num_documents"] for row in table(built, BOILERPLATE_NAME)} == {12}
    assert_laws_hold(built)


def test_excluded_items_take_their_documents_out(examined: tuple[Built, dict[str, str]]) -> None:
    corpus = examined[0].recipe.parent
    built = build(benchmark_recipe(corpus, "exclude", max_documents=50), corpus / "home", UPTO)
    reasons = Counter(row["reason"] for row in rows_of(built) if "exam" in row["references"])
    assert reasons == {"reference": 15}
    assert table(built, BOILERPLATE_NAME) == []
    assert_laws_hold(built)


@pytest.mark.parametrize("lost", ["hit", "runs"])
def test_an_overlap_that_is_not_recorded_breaks_the_law(
    examined: tuple[Built, dict[str, str]], tmp_path: Path, lost: str
) -> None:
    built, texts = copy_home(examined[0], tmp_path / "home"), examined[1]
    path = built.folder("lsh_clusters") / HITS_NAME
    hits = pq.read_table(path)
    rows = hits.to_pylist()
    (at,) = [number for number, row in enumerate(rows) if row["doc_id"] == doc_id(texts["whole"])]
    if lost == "hit":
        del rows[at]
    else:
        rows[at]["num_ngrams"] += 1
    pq.write_table(small_corpus.pa.Table.from_pylist(rows, schema=hits.schema), path)
    verdict = judged("reference_texts_are_found", built)
    assert verdict.num_violations == {"hit": 3, "runs": 1}[lost]  # without a hit, its count and its bar are wrong too
    assert doc_id(texts["whole"]).hex()[:16] in verdict.examples[0]["violation"]


def test_a_benchmark_question_in_validation_breaks_the_law(
    examined: tuple[Built, dict[str, str]], tmp_path: Path
) -> None:
    built, texts = copy_home(examined[0], tmp_path / "home"), examined[1]
    for unit in units_in(built.stage, built.refs["split_documents"]):
        path = built.stage.store.folder(unit) / "documents.parquet"
        documents = pq.read_table(path)
        rows = documents.to_pylist()
        for row in rows:
            if row["text"] == texts["part"]:
                assert row["split"] == "train"
                row["split"] = "validation"
        pq.write_table(small_corpus.pa.Table.from_pylist(rows, schema=documents.schema), path)
    assert judged("no_reference_text_is_in_validation", built).num_violations == 1


def test_deduplicating_what_is_kept_removes_nothing(plain: Path, tmp_path: Path) -> None:
    first = build_beside(plain, {}, "lsh_clusters")
    kept = [row for row in rows_of(first) if row["kept"]]
    again = tmp_path / "again"
    for pool in ("alpha", "beta"):
        small_corpus.write_rows(again / pool / "kept.parquet", [
            {"text": row["text"], "id": row["id"], "dump": row["dump"], "url": row["url"]}
            for row in kept if row["pool"] == pool
        ])  # fmt: skip
    (again / "held_out.txt").write_text((plain / "held_out.txt").read_text())
    second = build(write_recipe(again), again / "home", "lsh_clusters")
    assert {row["reason"] for row in rows_of(second)} == {"kept"}
    assert second.refs["lsh_clusters"].counts["documents"] == len(kept)


@pytest.mark.parametrize(
    "options", [{}, {"dedup.verify_jaccard": 0.8}, {"dedup.scope": "dump"}, {**VERIFIED_DUMPS, "dedup.keep": "longest"}]
)
def test_buckets_and_stripes_change_no_decision_and_no_table(crawled: Path, options: dict) -> None:
    changes = {"dedup.num_buckets": 8, "reading.stripes": 5, "reading.stripes_read": 5}
    one = build_beside(crawled, options, "lsh_clusters")
    other = build(write_recipe(crawled, {**options, **changes}, "other.yaml"), crawled / "other", "lsh_clusters")
    columns = ("doc_id", "pool", "file", "row_group", "row", "cluster_id", "kept", "kept_doc_id", "reason", "barred")
    found = [sorted(tuple(row[name] for name in columns) for row in rows_of(built)) for built in (one, other)]
    assert found[0] == found[1]
    for name in (EVIDENCE_NAME, HITS_NAME, LARGEST_NAME, EXAMPLES_NAME, BY_PAIR_NAME, BOILERPLATE_NAME):
        rows = [sorted(map(str, table(built, name))) for built in (one, other)]
        assert rows[0] == rows[1], name


def test_verified_edges_within_crawls_keep_every_law(crawled: Path) -> None:
    built = build_beside(crawled, VERIFIED_DUMPS, UPTO)
    assert built.refs["lsh_clusters"].counts["largest_cluster"] > 4
    assert_laws_hold(built)


def test_near_copies_of_references_are_barred_in_buckets_that_were_not_compared_in_full(corpus: Path) -> None:
    generator, template = random.Random(27), [f"shared{number}" for number in range(160)]
    texts = []
    for number in range(320):
        own = [f"own{number}x{place}" for place in range(30)]
        changed = [*template[:50], f"changed{number}", *template[51:]]
        texts += [" ".join(template + own), " ".join(changed + own)]
    generator.shuffle(texts)
    plant(corpus, [{"text": text} for text in texts])
    references = [{"name": "sample", "kind": "tokenizer_sample", "documents_per_pool": 200}]
    changes = {
        "references": references,
        "dedup.verify_jaccard": 0.8,
        "dedup.num_bands": 4,
        "dedup.rows_per_band": 4,
        "splits.assignment": {"policy": "fraction", "seed": 5, "validation_fraction": 0.5},
    }
    built = build(write_recipe(corpus, changes), corpus / "home", UPTO)
    assert built.refs["lsh_clusters"].counts["documents_left_unverified"] > 0
    assert judged("no_reference_text_is_in_validation", built).num_violations == 0


def sealed_clusters(built: Built, warnings: list[str]) -> tuple[Sealed, set[str]]:
    """The clusters of what a home holds, with what the stage warned of, and what became of the buckets."""
    stage = replace(small_corpus.open_stage(built.recipe, built.home), warn=warnings.append)
    inputs = {name: built.refs[name] for name in ("raw_row_groups", "reference_sets", "minhash_signatures")}
    parts = [ref for task in plan_buckets(stage, **inputs) for ref in build_buckets(stage, task)]
    return seal_clusters(stage, parts, **inputs), {part.outcome for part in parts}


def test_documents_that_were_not_compared_in_full_are_warned_of_each_time_they_are_used(corpus: Path) -> None:
    generator, template = random.Random(28), [f"shared{number}" for number in range(160)]
    changed = [[*template] for _ in range(400)]
    for number, words in enumerate(changed):  # alike to the template and not to each other
        for place in generator.sample(range(2, 158, 6), 4):
            words[place] = f"own{number}x{place}"
    rows = [{"text": " ".join(words), "dump": "one"} for words in changed]
    plant(corpus, [*rows, {"text": " ".join(template), "dump": "other"}])
    options = {"dedup.verify_jaccard": 0.7, "dedup.num_bands": 4, "dedup.rows_per_band": 4, "dedup.num_buckets": 4}
    whole = build(write_recipe(corpus, options, "whole.yaml"), corpus / "home", "lsh_clusters")
    assert whole.refs["lsh_clusters"].counts["documents_left_unverified"] == 0  # the template connects them
    recipe = write_recipe(corpus, {**options, "dedup.scope": "dump"})
    inside = build(recipe, corpus / "home", "minhash_signatures")  # their crawl alone has no template
    warnings: list[str] = []
    for expected in ("built", "reused"):
        warnings.clear()
        sealed, outcomes = sealed_clusters(inside, warnings)
        assert {sealed.ref.outcome} == outcomes == {expected}
        left = sealed.ref.counts["documents_left_unverified"]
        (warning,) = warnings
        assert warning.startswith(f"lsh_clusters: {left:,} documents, counted once a band, share a band with more")
        assert "raise dedup.rows_per_band" in warning
        assert left > 0
    warnings.clear()
    sealed_clusters(whole, warnings)
    assert warnings == []


def test_exact_copies_of_near_copies_of_what_is_excluded_go_too(plain: Path) -> None:
    built = build_beside(plain, {"dedup.mode": "exact", "references": EXCLUDING}, UPTO)
    reasons = {row["text"]: row["reason"] for row in rows_of(built)}
    assert reasons[small_corpus.HELD_OUT] == reasons[small_corpus.HELD_OUT_NEAR_COPY] == "reference"
    assert_laws_hold(built)


def test_texts_without_words_are_one_document_when_edges_are_verified(corpus: Path) -> None:
    plant(corpus, [{"text": text} for text in ("!!! ???", "...", "!!! ???", "...")])
    built = build(write_recipe(corpus, {"dedup.verify_jaccard": 0.8}), corpus / "home", UPTO)
    wordless = [row for row in rows_of(built) if row["text"] in ("!!! ???", "...")]
    assert Counter((row["text"], row["kept"]) for row in wordless)["...", True] == 1
    assert_laws_hold(built)


def test_runs_that_few_documents_hold_are_no_boilerplate(
    examined: tuple[Built, dict[str, str]], tmp_path: Path
) -> None:
    built = copy_home(examined[0], tmp_path / "home")
    path = built.folder("lsh_clusters") / BOILERPLATE_NAME
    rows = pq.read_table(path)
    false = {"reference_set": "exam", "ngram": SHORT_QUESTION.lower(), "num_documents": 11, "num_items": 1}
    written = small_corpus.pa.Table.from_pylist([*rows.to_pylist(), false], schema=rows.schema)
    pq.write_table(written, path)
    found = str(judged("reference_texts_are_found", built).examples)
    assert f"{SHORT_QUESTION.lower()!r} is called boilerplate, and 1 documents hold it" in found.replace("\\", "")


def test_a_changed_file_costs_its_own_signatures_only(corpus: Path) -> None:
    recipe = write_recipe(corpus)
    before = build(recipe, corpus / "home", "lsh_clusters")
    rows = small_corpus.corpus_rows()["beta"]["b_000"]
    rows[0]["text"] = small_corpus.sentences(8_888)
    small_corpus.write_rows(corpus / "beta" / "b_000.parquet", rows)
    after = build(recipe, corpus / "home", "lsh_clusters")
    digests = [
        {unit.unit: unit.digest for unit in units_in(built.stage, built.refs["minhash_signatures"])}
        for built in (before, after)
    ]
    changed = {unit for unit in digests[0] if digests[0][unit] != digests[1][unit] and "references" not in unit}
    assert len(changed) == 1
    signed = Counter(path.parts[-3] for path in (corpus / "home" / "minhash_signatures").glob("*/*/manifest.json"))
    corpus_units = [unit for unit in digests[1] if "references" not in unit]
    assert {unit: signed[unit] for unit in corpus_units} == {unit: 1 + (unit in changed) for unit in corpus_units}
    assert after.refs["lsh_clusters"].identity != before.refs["lsh_clusters"].identity
    assert read_json(after.folder("minhash_signatures") / "units.json")
