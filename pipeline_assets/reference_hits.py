"""Which documents the reference sets match: by the same text, by a shared band, by a run of words.

In: the buckets' hits by bands, the units' hits by runs of words, the reference texts. Out: one row of evidence a hit,
and counts for each set. Promise: a text of a set that is in the corpus is found; what runs of words are boilerplate is
written down. A set is searched by runs of words where the recipe asks for it, one raw unit at a time.
"""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pipeline_assets.conformance import validated
from pipeline_assets.corpus import Corpus
from pipeline_assets.recipe import Recipe
from pipeline_assets.schemas import BoilerplateNgrams, ReferenceHits, arrow_schema
from pipeline_assets.sections.references import Overlap, ReferenceFile, TokenizerSample
from pipeline_assets.signatures import DOC_IDS
from pipeline_assets.source import ROWS_NAME
from pipeline_assets.stripes import Stage, Task, tasks_of, units_in
from pipeline_assets.transforms.arrays import whole_rows
from pipeline_assets.transforms.clusters import KEPT, REFERENCE, Decisions
from pipeline_assets.transforms.overlap import (
    OverlapHits,
    UnitOverlap,
    check_universe,
    expected_by_chance,
    find_overlap,
    index_items,
    overlap_hits,
)
from pipeline_assets.transforms.rows import doc_id_array, doc_id_matrix
from pipeline_assets.transforms.words import UNICODE_VERSION
from resources.artifact_store import ArtifactRef
from resources.tables import write_array, write_table

OVERLAP_VERSION = 2
FOUND, ROW_HITS = "found.npy", "hits.npy"
HITS_NAME, BOILERPLATE_NAME = "reference_hits.parquet", "boilerplate_ngrams.parquet"
KINDS = ("exact", "near", "overlap")

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Search:
    """One raw unit to be searched for the texts of one set."""

    reference: str
    unit: ArtifactRef
    reference_sets: ArtifactRef


def overlaps_of(recipe: Recipe) -> dict[str, Overlap]:
    """The sets that are searched by runs of words, with their settings."""
    return {
        reference.name: reference.overlap
        for reference in recipe.references
        if isinstance(reference, ReferenceFile) and reference.overlap is not None
    }


def plan_searches(stage: Stage, raw_row_groups: ArtifactRef, reference_sets: ArtifactRef, max_tasks: int) -> list[Task]:
    """Each raw unit once for each set that is searched by runs of words."""
    searches = [
        Search(reference=name, unit=unit, reference_sets=reference_sets)
        for name in overlaps_of(stage.recipe)
        for unit in units_in(stage, raw_row_groups)
    ]
    return tasks_of(searches, "searches", max_tasks)


def search_unit(stage: Stage, search: Search) -> ArtifactRef:
    """Search one unit's texts for one set's runs of words."""
    overlap = overlaps_of(stage.recipe)[search.reference]
    table = f"{search.reference}.parquet"

    def write(folder: Path) -> dict[str, Any]:
        rows = stage.table(search.unit, ROWS_NAME, ["doc_id", "text"])
        index, _ = index_items(_texts(stage, search.reference_sets, search.reference), **_lengths(overlap))
        doc_ids = doc_id_matrix(rows.column("doc_id"))
        found, stats = find_overlap(rows.column("text"), doc_ids, index, max_documents=overlap.max_documents)
        write_array(found.found, folder / FOUND)
        write_array(found.hits, folder / ROW_HITS)
        return {"documents": stats.num_documents, "text_bytes": stats.num_bytes, "ngrams": stats.num_ngrams_found}

    return stage.materialize(
        asset="lsh_clusters",
        unit=search_name(search.reference, search.unit.unit),
        inputs={
            "rows": search.unit.digest,
            "references": stage.open(search.reference_sets)[1].files[table]["sha256"],
        },
        parameters={**overlap.model_dump(mode="json"), "unicode": UNICODE_VERSION},
        version=OVERLAP_VERSION,
        write=write,
    )


def search_name(reference: str, unit: str) -> str:
    """Unit name of one search."""
    return f"overlap-{reference}-{unit}"


def _lengths(overlap: Overlap) -> dict[str, int]:
    return {"ngram": overlap.ngram, "min_words": overlap.min_words}


def _texts(stage: Stage, reference_sets: ArtifactRef, name: str) -> pa.ChunkedArray:
    return stage.table(reference_sets, f"{name}.parquet", ["text"]).column("text")


def reference_texts(stage: Stage, reference_sets: ArtifactRef) -> pa.ChunkedArray:
    """The texts of all sets in the recipe's order, as hits number them."""
    chunks = [
        chunk for reference in stage.recipe.references for chunk in _texts(stage, reference_sets, reference.name).chunks
    ]
    return pa.chunked_array(chunks, pa.large_string())


@dataclass(frozen=True, kw_only=True)
class Hits:
    """Every hit, by text and document.

    Columns of `table`: reference and document (numbers), kind, num_ngrams, excerpt. `doc_ids` uint8[r, 32] and `set_of`
    int64[r] are those of all reference texts.
    """

    table: pa.Table
    doc_ids: npt.NDArray[np.uint8]
    set_of: I64

    @property
    def pairs(self) -> I64:
        """int64[h, 2] of (reference text, document)."""
        return np.column_stack([np.asarray(self.table.column(name)) for name in ("reference", "document")])

    @property
    def of_sets(self) -> I64:
        """int64[h, 2] of (set, document)."""
        pairs = self.pairs
        return np.column_stack([self.set_of[pairs[:, 0]], pairs[:, 1]])


def all_hits(
    corpus: Corpus,
    by_bands: I64,
    searches: dict[str, ArtifactRef],
    reference_sets: ArtifactRef,
    signed_sets: list[ArtifactRef],
    folder: Path,
) -> Hits:
    """Unite the hits by bands, by identical text and by runs of words; write the boilerplate table below the folder.

    `searches` holds the searched units by name, `signed_sets` the signature units of the sets in the recipe's order.
    """
    ids = [corpus.stage.array(unit, DOC_IDS) for unit in signed_sets]
    firsts = np.cumsum([0, *map(len, ids)])
    doc_ids = np.concatenate([np.empty((0, 32), np.uint8), *ids])
    numbers = {reference.name: number for number, reference in enumerate(corpus.stage.recipe.references)}
    tables = [_whole_text_hits(corpus, by_bands, doc_ids)]
    boilerplate = [arrow_schema(BoilerplateNgrams).empty_table()]
    for name, overlap in overlaps_of(corpus.stage.recipe).items():
        found = _overlaps(corpus, name, overlap, searches, reference_sets)
        tables.append(_overlap_hits(found.hits, int(firsts[numbers[name]])))
        names = pa.array([name] * found.boilerplate.num_rows, pa.string())
        boilerplate.append(found.boilerplate.add_column(0, "reference_set", names))
    write_table(validated(BoilerplateNgrams, pa.concat_tables(boilerplate)), folder / BOILERPLATE_NAME)
    order = [(name, "ascending") for name in ("reference", "document", "kind")]
    table = pa.concat_tables(tables).sort_by(order).combine_chunks()
    return Hits(table=table, doc_ids=doc_ids, set_of=np.repeat(np.arange(len(ids)), np.diff(firsts)))


def _whole_text_hits(corpus: Corpus, by_bands: I64, doc_ids: npt.NDArray[np.uint8]) -> pa.Table:
    pairs = np.unique(np.concatenate([by_bands, _same_texts(corpus.doc_ids, doc_ids)]), axis=0)
    is_same = (doc_ids[pairs[:, 0]] == corpus.doc_ids[pairs[:, 1]]).all(axis=1)
    kinds = pa.array(["near", "exact"]).take(pa.array(is_same.astype(np.int8)))
    return _hits(pairs[:, 0], pairs[:, 1], kinds, np.zeros(len(pairs), np.int64), [""] * len(pairs))


def _overlap_hits(found: pa.Table, first_text: int) -> pa.Table:
    kinds = ["overlap"] * found.num_rows
    texts = np.asarray(found.column("item")) + first_text
    return _hits(texts, found.column("document"), kinds, found.column("num_ngrams"), found.column("excerpt"))


def _hits(references: Any, documents: Any, kinds: Any, num_ngrams: Any, excerpts: Any) -> pa.Table:
    columns = (references, documents, kinds, num_ngrams, excerpts)
    types = (pa.int64(), pa.int64(), pa.string(), pa.int64(), pa.string())
    names = ("reference", "document", "kind", "num_ngrams", "excerpt")
    return pa.table(columns, schema=pa.schema(list(zip(names, types, strict=True))))


def _overlaps(
    corpus: Corpus, name: str, overlap: Overlap, searches: dict[str, ArtifactRef], reference_sets: ArtifactRef
) -> OverlapHits:
    stage = corpus.stage
    index, stats = index_items(_texts(stage, reference_sets, name), **_lengths(overlap))
    if stats.num_too_short:
        stage.say(
            f"lsh_clusters: {name}: {stats.num_too_short:,} of {stats.num_items:,} texts have fewer than"
            f" {overlap.min_words} words and are matched by bands and as a whole only"
        )
    parts = [searches[search_name(name, unit.unit)] for unit in corpus.units]
    units = [UnitOverlap(found=stage.array(part, FOUND), hits=stage.array(part, ROW_HITS)) for part in parts]
    firsts = corpus.firsts[:-1].tolist()
    hits, counts = overlap_hits(index, units, firsts, corpus.doc_ids, max_documents=overlap.max_documents)
    if counts.num_left_out:
        stage.say(
            f"lsh_clusters: {name}: {counts.num_left_out:,} texts share no more with documents than runs of words that"
            f" more than {overlap.max_documents:,} different texts hold, and match nothing: see {BOILERPLATE_NAME}"
        )
    return hits


def _same_texts(doc_ids: npt.NDArray[np.uint8], wanted: npt.NDArray[np.uint8]) -> I64:
    """(Reference text, document) of identical texts; the smallest document stands for its copies."""
    texts, corpus = whole_rows(wanted), whole_rows(doc_ids)
    order = np.argsort(corpus, kind="stable")
    at = np.minimum(np.searchsorted(corpus, texts, sorter=order), len(corpus) - 1)
    exact = np.flatnonzero(corpus[order[at]] == texts)
    return np.column_stack([exact, order[at[exact]]]).astype(np.int64)


def hit_table(corpus: Corpus, hits: Hits, reference_sets: ArtifactRef) -> pa.Table:
    """One row of evidence a hit, with the exact similarity of the two texts."""
    recipe = corpus.stage.recipe
    sets = pa.array([reference.name for reference in recipe.references], pa.string())
    pairs, jaccard = hits.pairs, np.empty(0)
    if len(pairs):
        jaccard = corpus.similarities_to(reference_texts(corpus.stage, reference_sets), pairs)
    return pa.table(
        {
            "reference_set": sets.take(pa.array(hits.set_of[pairs[:, 0]])),
            "reference_doc_id": doc_id_array(hits.doc_ids[pairs[:, 0]]),
            "doc_id": doc_id_array(corpus.doc_ids[pairs[:, 1]]),
            "kind": hits.table.column("kind"),
            "jaccard": pa.array(jaccard),
            "num_ngrams": hits.table.column("num_ngrams"),
            "excerpt": hits.table.column("excerpt"),
        },
        schema=arrow_schema(ReferenceHits),
    )


def is_among(doc_ids: npt.NDArray[np.uint8], wanted: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
    """Which documents are among the wanted ones: uint8[n, 32], uint8[m, 32] -> bool[n]."""
    return np.isin(whole_rows(doc_ids), whole_rows(wanted))


def some_of_each_set(hits: pa.Table, num_hits: int) -> list[dict[str, Any]]:
    """The first hits of each set and kind, as rows for the asset's page."""
    seen: Counter[tuple[str, str]] = Counter()
    rows = []
    for row in hits.to_pylist():
        group = (row["reference_set"], row["kind"])
        seen[group] += 1
        if seen[group] <= num_hits:
            rows.append(row)
    return rows


def reference_counts(corpus: Corpus, decisions: Decisions, hits: Hits) -> dict[str, dict[str, Any]]:
    """For each set: documents with a text of it, documents of clusters that it matches, and what chance would give."""
    return {
        reference.name: _counts_of_set(corpus, decisions, hits, number)
        for number, reference in enumerate(corpus.stage.recipe.references)
    }


def _counts_of_set(corpus: Corpus, decisions: Decisions, hits: Hits, number: int) -> dict[str, Any]:
    texts = hits.doc_ids[hits.set_of == number]
    is_matched = (decisions.matched_sets >> np.uint64(number) & np.uint64(1)).astype(np.bool_)
    is_of_set = pa.array(hits.of_sets[:, 0] == number)
    kinds = Counter(hits.table.column("kind").filter(is_of_set).to_pylist())
    return {
        "texts": len(texts),
        "exact_documents": int(is_among(corpus.doc_ids, texts).sum()),
        "exact_by_chance": _by_chance(corpus.stage.recipe.references[number], len(texts), len(corpus.doc_ids)),
        "matched_documents": int(is_matched.sum()),
        "kept_out_of_validation": int((is_matched & (decisions.reason == KEPT)).sum()),
        "removed": int((is_matched & (decisions.reason == REFERENCE)).sum()),
        **{f"{kind}_hits": kinds[kind] for kind in KINDS},
    }


def _by_chance(reference: TokenizerSample | ReferenceFile, num_texts: int, num_documents: int) -> float | None:
    if not isinstance(reference, ReferenceFile) or reference.universe_documents is None:
        return None
    check_universe(reference.name, num_texts, num_documents, reference.universe_documents)
    return expected_by_chance(num_texts, num_documents, reference.universe_documents)
