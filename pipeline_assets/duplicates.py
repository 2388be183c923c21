"""What deduplication removed and why, as tables beside the clusters: evidence, examples, statistics, largest clusters.

In: the documents, the decisions, the recipe's names. Out: tables under contracts, and counts for the manifest. The
promise: every removal has a row; nothing here decides anything. The cost: the removed texts and those kept in their
place are read again for their exact similarity.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from math import fsum
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pipeline_assets.conformance import validated
from pipeline_assets.corpus import Corpus
from pipeline_assets.pictures import MAX_CELLS, heatmap_picture, histogram_picture
from pipeline_assets.report import spread_rows
from pipeline_assets.schemas import (
    Contract,
    Evidence,
    ExamplePairs,
    LargestClusters,
    RemovedByPair,
    arrow_schema,
)
from pipeline_assets.shown_columns import EXAMPLE_COLUMNS
from pipeline_assets.transforms.clusters import EXACT_DUPLICATE, NEAR_DUPLICATE, Decisions
from pipeline_assets.transforms.duplicates import (
    all_pairs,
    clusters_by_spread,
    cross_table,
    example_pairs,
    largest_clusters,
    members_by_cluster,
    pair_table,
)
from pipeline_assets.transforms.lookup import beginning
from pipeline_assets.transforms.lsh import steepest_similarity
from pipeline_assets.transforms.rows import doc_id_array
from resources.tables import write_table
from training_io.hashing import derive_seed, keyed_hash

EVIDENCE_NAME = "evidence.parquet"
EXAMPLES_NAME = "example_pairs.parquet"
LARGEST_NAME = "largest_clusters.parquet"
BY_PAIR_NAME = "removed_by_pair.parquet"
DUPLICATES_PICTURES = {
    "duplicates_by_pool": "documents removed, by their pool and that of the document kept",
    "duplicates_by_dump": "documents removed, by their crawl and that of the document kept",
    "removed_by_similarity": "near duplicates removed, by their similarity to the document kept",
}

I64 = npt.NDArray[np.int64]

NUM_LARGEST = 20
MAX_COMPARED_MEMBERS = 32
EXAMPLES_PER_RANGE = 3
EXCERPT_CHARACTERS = 200
NUM_NAMED = 3
SIMILARITY_BINS = 20
SHOWN_CHARACTERS = 32  # of each text of a pair, side by side in a narrow column


def write_duplicates(
    corpus: Corpus, decisions: Decisions, pool_of: I64, pools: list[str], folder: Path
) -> dict[str, Any]:
    """Write the four tables below a folder, and pictures of them; the counts that they come to.

    `pool_of` numbers each document's pool.
    """
    removed = np.flatnonzero(np.isin(decisions.reason, [EXACT_DUPLICATE, NEAR_DUPLICATE]))
    pairs = np.column_stack([removed, decisions.kept[removed]])
    jaccard, bands = corpus.similarities(pairs), corpus.shared_bands(pairs)
    num_bytes = corpus.text_bytes[removed]
    dumps, dump_names = corpus.codes("dump")
    names = {"pool": (pool_of, pools), "dump": (dumps, dump_names)}
    evidence = _evidence(corpus, pairs, names, jaccard, bands)
    _write(Evidence, evidence, folder / EVIDENCE_NAME)
    by_pair = [
        (by, *row) for by, (codes, listed) in names.items() for row in pair_table(*codes[pairs].T, num_bytes, listed)
    ]
    _write_rows(RemovedByPair, by_pair, folder / BY_PAIR_NAME)
    for by, what in (("pool", "pool"), ("dump", "crawl")):
        if picture := duplicates_picture([row[1:4] for row in by_pair if row[0] == by], what):
            (folder / f"duplicates_by_{by}.png").write_bytes(picture)
    is_near = decisions.reason[removed] == NEAR_DUPLICATE
    if picture := similarity_picture(jaccard[is_near], _similarity_marks(corpus)):
        (folder / "removed_by_similarity.png").write_bytes(picture)
    keys = keyed_hash(corpus.doc_ids[removed], derive_seed(corpus.stage.recipe.seed, "examples"))
    chosen = example_pairs(jaccard, keys, EXAMPLES_PER_RANGE)
    _write(ExamplePairs, _examples(corpus, pairs[chosen], jaccard[chosen], bands[chosen]), folder / EXAMPLES_NAME)
    _write(LargestClusters, _largest(corpus, decisions), folder / LARGEST_NAME)
    within, over = clusters_by_spread(decisions.cluster, dumps)
    return {
        "text_bytes": int(corpus.text_bytes.sum()),
        "removed_bytes": int(num_bytes.sum()),
        "clusters_within_one_dump": within,
        "clusters_over_several_dumps": over,
        "removed_by_pool": _by_pool(removed, pool_of, corpus.text_bytes, pools),
    }


def duplicates_picture(counted: Sequence[tuple[str, str, int]], what: str) -> bytes | None:
    """PNG of (name of the document removed, name of the one kept, documents); None where all have one name."""
    names, table = cross_table(counted, MAX_CELLS)
    if len(names) < 2:
        return None
    shown = [name or "(none)" for name in names]
    title = f"Duplicates removed, by {what}"
    return heatmap_picture(title, f"{what} of the document kept", f"{what} of the one removed", shown, shown, table)


def similarity_picture(jaccard: npt.NDArray[np.float64], marks: Mapping[str, float]) -> bytes | None:
    """PNG of how similar near duplicates are to what was kept: float64[m]; None where there are none.

    Documents of a chain may be far less alike than those next to each other in it: they show left of the threshold.
    """
    if not len(jaccard):
        return None
    edges = [number / SIMILARITY_BINS for number in range(SIMILARITY_BINS + 1)]
    counts = np.histogram(jaccard, edges)[0].tolist()
    title, of = "Near duplicates removed, by similarity to the document kept", "Jaccard similarity of the two"
    return histogram_picture(title, of, "documents removed", edges, counts, marks, log_x=False)


def _similarity_marks(corpus: Corpus) -> dict[str, float]:
    dedup = corpus.stage.recipe.dedup
    verified = {} if dedup.verify_jaccard is None else {"dedup.verify_jaccard": dedup.verify_jaccard}
    return {"S-curve's threshold": steepest_similarity(dedup.num_bands, dedup.rows_per_band), **verified}


def shown_examples(examples: pa.Table, most: int) -> list[dict[str, Any]]:
    """Some of the example pairs, from the most alike to the least, narrow enough to be read side by side."""
    narrow = examples.select([*EXAMPLE_COLUMNS]).rename_columns([*EXAMPLE_COLUMNS.values()])
    rows = spread_rows(narrow, most)
    return [{**row, **{side: beginning(row[side], SHOWN_CHARACTERS) for side in ("removed", "kept")}} for row in rows]


def _evidence(
    corpus: Corpus,
    pairs: I64,
    names: dict[str, tuple[I64, list[str]]],
    jaccard: npt.NDArray[np.float64],
    bands: I64,
) -> pa.Table:
    columns: dict[str, Any] = {"shared_bands": pa.array(bands), "jaccard": pa.array(jaccard)}
    for side, documents in zip(("removed", "kept"), pairs.T, strict=True):
        columns[f"{side}_doc_id"] = doc_id_array(corpus.doc_ids[documents])
        for by, (codes, listed) in names.items():
            columns[f"{side}_{by}"] = _named(codes[documents], listed)
    columns["removed_bytes"] = pa.array(corpus.text_bytes[pairs[:, 0]])
    return pa.table(columns).select(arrow_schema(Evidence).names).cast(arrow_schema(Evidence))


def _write(contract: type[Contract], table: pa.Table, path: Path) -> None:
    write_table(validated(contract, table), path)


def _write_rows(contract: type[Contract], rows: list[tuple[Any, ...]], path: Path) -> None:
    schema = arrow_schema(contract)
    records = [dict(zip(schema.names, row, strict=True)) for row in rows]
    _write(contract, pa.Table.from_pylist(records, schema=schema), path)


def _named(codes: I64, names: list[str]) -> pa.Array:
    return pa.array(names, pa.string()).take(pa.array(codes))


def _examples(corpus: Corpus, pairs: I64, jaccard: npt.NDArray[np.float64], bands: I64) -> pa.Table:
    wanted, places = np.unique(pairs, return_inverse=True)
    rows = corpus.rows(wanted, ["text", "dump", "url"]).to_pylist()
    removed, kept = places.reshape(pairs.shape).T.tolist()
    columns: dict[str, Any] = {"jaccard": jaccard, "shared_bands": bands}
    for side, numbers, documents in (("removed", removed, pairs[:, 0]), ("kept", kept, pairs[:, 1])):
        columns[f"{side}_doc_id"] = doc_id_array(corpus.doc_ids[documents])
        columns[f"{side}_dump"] = [rows[number]["dump"] or "" for number in numbers]
        columns[f"{side}_url"] = [rows[number]["url"] or "" for number in numbers]
        columns[f"{side}_text"] = [rows[number]["text"][:EXCERPT_CHARACTERS] for number in numbers]
    return pa.table(columns, schema=arrow_schema(ExamplePairs))


def _largest(corpus: Corpus, decisions: Decisions) -> pa.Table:
    keys = keyed_hash(corpus.doc_ids, derive_seed(corpus.stage.recipe.seed, "members"))
    wanted = largest_clusters(decisions.cluster, decisions.cluster_size, keys, NUM_LARGEST)
    members = members_by_cluster(decisions.cluster, wanted, keys, MAX_COMPARED_MEMBERS)
    pairs = [all_pairs(some) for some in members]
    jaccard = corpus.similarities(np.concatenate([np.empty((0, 2), np.int64), *pairs]))
    firsts = np.cumsum([0, *map(len, pairs)])
    shown, places = np.unique(np.concatenate([decisions.kept[wanted], *members]), return_inverse=True)
    sources = corpus.rows(shown, ["pool", "dump", "file", "text"]).to_pylist()
    of_member = np.split(places[len(wanted) :], np.cumsum([len(some) for some in members])[:-1])
    rows = [
        _cluster_row(
            corpus.doc_ids[cluster].tobytes(),
            int(decisions.cluster_size[cluster]),
            jaccard[firsts[number] : firsts[number + 1]],
            [sources[place] for place in of_member[number].tolist()],
            sources[places[number]]["text"],
        )
        for number, cluster in enumerate(wanted.tolist())
    ]
    return pa.Table.from_pylist(rows, schema=arrow_schema(LargestClusters))


def _cluster_row(
    cluster_id: bytes, size: int, jaccard: npt.NDArray[np.float64], members: list[dict[str, Any]], kept_text: str
) -> dict[str, Any]:
    return {
        "cluster_id": cluster_id,
        "documents": size,
        "min_jaccard": float(jaccard.min()),
        "mean_jaccard": fsum(jaccard) / len(jaccard),  # whatever the order of the pairs
        "compared": len(members),
        "pools": _tally(row["pool"] for row in members),
        "dumps": _tally(row["dump"] or "" for row in members),
        "files": _tally(row["file"] for row in members),
        "first_words": kept_text[:EXCERPT_CHARACTERS],
    }


def _tally(names: Any) -> str:
    """The commonest names with counts, and how many others there are."""
    counted = sorted(Counter(names).items(), key=lambda item: (-item[1], item[0]))
    listed = ", ".join(f"{name} × {count}" for name, count in counted[:NUM_NAMED])
    return listed if len(counted) <= NUM_NAMED else f"{listed}, and {len(counted) - NUM_NAMED} others"


def _by_pool(removed: I64, pool_of: I64, text_bytes: I64, pools: list[str]) -> dict[str, dict[str, int]]:
    def counted(documents: I64 | slice, weights: I64 | None) -> list[int]:
        return np.bincount(pool_of[documents], weights=weights, minlength=len(pools)).astype(np.int64).tolist()

    columns = {
        "documents": counted(slice(None), None),
        "removed": counted(removed, None),
        "bytes": counted(slice(None), text_bytes),
        "removed_bytes": counted(removed, text_bytes[removed]),
    }
    return {name: {column: numbers[number] for column, numbers in columns.items()} for number, name in enumerate(pools)}
