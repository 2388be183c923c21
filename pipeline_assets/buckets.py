"""Buckets: sorted band keys -> edges between documents that share a bucket, and the references that do.

A bucket is a range of band keys by their top bits; its step sorts it alone, in bounded memory. Promise: what is found
does not depend on how many buckets there are. Where pairs are verified, edges are of pairs that are alike.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline_assets.corpus import Corpus
from pipeline_assets.reference_hits import is_among, plan_searches, reference_texts, search_unit
from pipeline_assets.sections.reading import MAX_STEPS_PER_FAN_OUT
from pipeline_assets.signatures import DOC_IDS, KEY_ROWS, KEYS, split_units
from pipeline_assets.stripes import Stage, Task, build_each, tasks_of, units_in
from pipeline_assets.transforms.clusters import match_all_references, match_references
from pipeline_assets.transforms.duplicates import keys_within
from pipeline_assets.transforms.lsh import NO_KEY, bucket_bounds, star_edges
from pipeline_assets.transforms.verify import verified_edges
from resources.artifact_store import ArtifactRef
from resources.tables import write_array

CLUSTERS_VERSION = 8
EDGES, DUMP_EDGES, HITS = "edges.npy", "edges_within_dumps.npy", "reference_hits.npy"
BUCKET_PREFIX = "bucket-"
LEFT = "documents_left_unverified"  # counted once for each band that they share with too many
VERIFIED = ("pairs_compared", "pairs_verified", LEFT)
MAX_CANDIDATES = 1 << 20  # pairs of a reference and a document that are compared at once

I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """One bucket of band keys, and what it is made from."""

    number: int
    raw_row_groups: ArtifactRef
    reference_sets: ArtifactRef
    minhash_signatures: ArtifactRef


def plan_buckets(
    stage: Stage, raw_row_groups: ArtifactRef, reference_sets: ArtifactRef, minhash_signatures: ArtifactRef
) -> list[Task]:
    """One unit a bucket (a small corpus has one), and the searches for the reference sets' runs of words."""
    buckets = [
        Bucket(
            number=number,
            raw_row_groups=raw_row_groups,
            reference_sets=reference_sets,
            minhash_signatures=minhash_signatures,
        )
        for number in range(stage.recipe.dedup.num_buckets)
    ]
    most = MAX_STEPS_PER_FAN_OUT // 2
    return tasks_of(buckets, "buckets", most) + plan_searches(stage, raw_row_groups, reference_sets, most)


def build_buckets(stage: Stage, task: Task) -> list[ArtifactRef]:
    """Sort each bucket and write its edges and reference hits; search units for runs of words."""

    def build_unit(unit: Any) -> ArtifactRef:
        return _build_bucket(stage, unit) if isinstance(unit, Bucket) else search_unit(stage, unit)

    return build_each(stage, task, build_unit)


def _build_bucket(stage: Stage, bucket: Bucket) -> ArtifactRef:
    dedup = stage.recipe.dedup
    reads_texts = dedup.verify_jaccard is not None
    reads_rows = reads_texts or dedup.scope == "dump"
    return stage.materialize(
        asset="lsh_clusters",
        unit=f"{BUCKET_PREFIX}{bucket.number:05d}-of-{dedup.num_buckets:05d}",
        inputs={
            "signatures": bucket.minhash_signatures.digest,
            **({"rows": bucket.raw_row_groups.digest} if reads_rows else {}),
            **({"references": bucket.reference_sets.digest} if reads_texts else {}),
        },
        parameters={
            "bucket": bucket.number,
            "num_buckets": dedup.num_buckets,
            "scope": dedup.scope,
            "verify_jaccard": dedup.verify_jaccard,
        },
        version=CLUSTERS_VERSION,
        write=lambda folder: _write_bucket(stage, folder, bucket),
    )


def _write_bucket(stage: Stage, folder: Path, bucket: Bucket) -> dict[str, Any]:
    signed, references = split_units(units_in(stage, bucket.minhash_signatures))
    corpus = Corpus(stage, units_in(stage, bucket.raw_row_groups), signed)
    keys, nodes = _bucket_of(stage, signed, bucket.number)
    edges, counts = _edges(corpus, keys, nodes)
    write_array(edges, folder / EDGES)
    is_explored = not counts.get(LEFT)
    if stage.recipe.dedup.scope == "dump":
        inside, more = _edges(corpus, keys_within(keys, corpus.codes("dump")[0][nodes], NO_KEY), nodes)
        write_array(inside, folder / DUMP_EDGES)
        counts = {name: counts[name] + more[name] for name in counts}
    hits = _hits(corpus, bucket, keys, nodes, references, is_explored)
    write_array(hits, folder / HITS)
    return {"band_keys": len(keys), "edges": len(edges), "reference_hits": len(hits), **counts}


def _edges(corpus: Corpus, keys: U64, nodes: I64) -> tuple[I64, dict[str, int]]:
    threshold = corpus.stage.recipe.dedup.verify_jaccard
    if threshold is None:
        return star_edges(keys, nodes), {}
    # Documents are numbered by their ids here: which are compared must not depend on the order of rows.
    documents, places = np.unique(nodes, return_inverse=True)
    order = np.argsort(corpus.order_keys[documents], kind="stable")
    ranks = np.empty(len(order), np.int64)
    ranks[order] = np.arange(len(order))
    ordered = documents[order]
    edges, stats = verified_edges(keys, ranks[places], lambda pairs: corpus.similarities(ordered[pairs]), threshold)
    return ordered[edges], dict(zip(VERIFIED, (stats.num_compared, stats.num_verified, stats.num_left), strict=True))


def _hits(
    corpus: Corpus, bucket: Bucket, keys: U64, nodes: I64, references: list[ArtifactRef], is_explored: bool
) -> I64:
    """Which references share a bucket with which documents; verified edges connect no whole bucket, so all of it.

    Then a reference that is in the corpus is left out where all of the bucket was compared: it hits its own text, and
    what is alike is in its cluster.
    """
    stage = corpus.stage
    reference_keys, reference_nodes = _bucket_of(stage, references, bucket.number)
    threshold = stage.recipe.dedup.verify_jaccard
    if threshold is None:
        return match_references(keys, nodes, reference_keys, reference_nodes, corpus.order_keys)
    doc_ids = np.concatenate([np.empty((0, 32), np.uint8), *(stage.array(unit, DOC_IDS) for unit in references)])
    is_outside = ~(is_among(doc_ids, corpus.doc_ids) & is_explored)[reference_nodes]
    texts = reference_texts(stage, bucket.reference_sets)
    found = [np.empty((0, 2), np.int64)]
    outside = (reference_keys[is_outside], reference_nodes[is_outside])
    blocks = match_all_references(keys, nodes, *outside, MAX_CANDIDATES)
    found += [block[corpus.similarities_to(texts, block) >= threshold] for block in blocks]
    return np.concatenate(found)


def _bucket_of(stage: Stage, units: list[ArtifactRef], bucket: int) -> tuple[U64, I64]:
    """The bucket's band keys over all units, and for each the number of its text in unit order."""
    keys: list[U64] = [np.empty(0, np.uint64)]
    nodes: list[I64] = [np.empty(0, np.int64)]
    first = 0
    for unit in units:
        unit_keys = stage.array(unit, KEYS)
        start, end = bucket_bounds(unit_keys, stage.recipe.dedup.num_buckets)[bucket : bucket + 2]
        keys.append(unit_keys[start:end])
        nodes.append(stage.array(unit, KEY_ROWS)[start:end].astype(np.int64) + first)
        first += unit.counts["documents"]
    return np.concatenate(keys), np.concatenate(nodes)
