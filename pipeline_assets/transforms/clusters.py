"""Candidate edges -> clusters, the kept document of each, and what the reference sets bar.

In: documents as arrays in any order, the edges that the buckets found, and reference hits. Out: one decision a
document. Documents are first put into canonical order, by doc_id and then by source coordinate, so labels and choices
depend on content alone: not on row order, stripes, buckets or workers.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pipeline_assets.transforms.arrays import blocks_of, positions
from pipeline_assets.transforms.components import connected_components
from pipeline_assets.transforms.keep import Preferences, choose_kept
from pipeline_assets.transforms.lsh import unique_pairs

I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]
Bools = npt.NDArray[np.bool_]

Mode = Literal["near", "exact", "off"]
REASONS = ("kept", "exact_duplicate", "near_duplicate", "reference")
KEPT, EXACT_DUPLICATE, NEAR_DUPLICATE, REFERENCE = range(4)


@dataclass(frozen=True, kw_only=True)
class Documents:
    """All documents of a corpus, one entry a row of the source, in any order."""

    doc_ids: U8  # uint8[n, 32]
    coordinates: I64  # int64[n, 4]: pool priority, file number, row group, row


@dataclass(frozen=True, kw_only=True)
class DumpScope:
    """Near-copies are removed within a crawl only: each document's crawl, and edges inside crawls."""

    dumps: I64  # int64[n], a number a crawl
    edges: I64  # int64[m, 2] of documents of one crawl that share a bucket


@dataclass(frozen=True, kw_only=True)
class Decisions:
    """What was decided, one entry a document, in the order of `Documents`."""

    cluster: I64  # the document with the cluster's smallest doc_id
    kept: I64  # the document that is used for this one (in mode off: itself)
    cluster_size: I64
    reason: U8  # index into REASONS
    barred: Bools
    matched_sets: npt.NDArray[np.uint64]  # bit i: reference set i matches the cluster
    pool_tags: npt.NDArray[np.uint64]  # bit i: the same text is in the pool of priority i


def decide(
    documents: Documents,
    edges: I64,
    reference_hits: I64,
    *,
    mode: Mode,
    excluding_sets: frozenset[int],
    preferred: Preferences,
    within: DumpScope | None = None,
) -> Decisions:
    """Cluster the documents and choose which are used.

    edges is int64[m, 2] of documents that share a bucket; reference_hits is int64[h, 2] of (reference set, document);
    `preferred` (see `keep.preferences`) has one entry a document. In mode `exact` a cluster is one text; in mode `off`
    every document is used and clusters only decide splits; with `within` a near-copy is removed only for one of its own
    crawl, and clusters decide splits too. In every mode a reference bars all that the edges connect to a document it
    hit, so near copies of it are barred too.
    """
    order = canonical_order(documents)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    doc_ids = documents.doc_ids[order]
    same_text = _runs_of_equal_rows(doc_ids)
    text = connected_components(len(order), same_text)
    inside = np.empty((0, 2), np.int64) if within is None else within.edges
    near = connected_components(len(order), np.concatenate([same_text, rank[edges], rank[inside]]))
    labels = text if mode == "exact" else near
    groups = labels if within is None else _groups_within(within, order, rank, text)
    kept = np.arange(len(order))
    if mode != "off":
        kept = _kept(text, groups, [column[order] for column in preferred])
    sizes = np.bincount(labels, minlength=len(order))[labels]
    matched = np.zeros(len(order), np.uint64)
    np.bitwise_or.at(matched, near[rank[reference_hits[:, 1]]], _bits(reference_hits[:, 0]))
    matched = matched[near]
    excluded = (matched & np.bitwise_or.reduce(_bits(np.array(sorted(excluding_sets), np.int64)))) > 0
    reason = np.full(len(order), NEAR_DUPLICATE, np.uint8)
    reason[(doc_ids == doc_ids[kept]).all(axis=1)] = EXACT_DUPLICATE
    reason[kept == np.arange(len(order))] = KEPT
    reason[excluded] = REFERENCE
    tags = np.zeros(len(order), np.uint64)
    np.bitwise_or.at(tags, text, _bits(documents.coordinates[order, 0]))
    return Decisions(
        cluster=order[labels][rank],
        kept=order[kept][rank],
        cluster_size=sizes[rank],
        reason=reason[rank],
        barred=(matched > 0)[rank],
        matched_sets=matched[rank],
        pool_tags=tags[text][rank],
    )


def _groups_within(scope: DumpScope, order: I64, rank: I64, text: I64) -> I64:
    """Components of the edges that stay within one crawl; equal texts of a crawl are connected, wordless ones too."""
    dumps = scope.dumps[order]
    by_crawl = np.lexsort((dumps, text))
    is_same = (text[by_crawl][1:] == text[by_crawl][:-1]) & (dumps[by_crawl][1:] == dumps[by_crawl][:-1])
    same = np.column_stack([by_crawl[:-1][is_same], by_crawl[1:][is_same]])
    return connected_components(len(order), np.concatenate([same, rank[scope.edges]]))


def _kept(text: I64, groups: I64, preferred: list[npt.NDArray[Any]]) -> I64:
    """One document of each group, then one of each text among those; a removed one points to what stands for it."""
    survivor = choose_kept(groups, preferred)
    is_lost = survivor != np.arange(len(text))
    return choose_kept(text, [is_lost, *preferred])[survivor]


def canonical_order(documents: Documents) -> I64:
    """The documents by doc_id, equal ones by source coordinate: int64[n]."""
    words = np.ascontiguousarray(documents.doc_ids).view(">u8")
    keys: list[npt.NDArray[Any]] = [*documents.coordinates.T[::-1], *words.T[::-1]]
    return np.lexsort(keys).astype(np.int64)


def _runs_of_equal_rows(doc_ids: U8) -> I64:
    """Edges from each row to the next one that is equal: int64[m, 2]."""
    same = np.flatnonzero((doc_ids[1:] == doc_ids[:-1]).all(axis=1))
    return np.stack([same, same + 1], axis=1).astype(np.int64)


def _bits(numbers: I64) -> npt.NDArray[np.uint64]:
    assert not len(numbers) or numbers.max() < 64, "at most 64 pools and 64 reference sets"
    return np.left_shift(np.uint64(1), numbers.astype(np.uint64))


def match_references(
    corpus_keys: npt.NDArray[np.uint64],
    corpus_nodes: I64,
    reference_keys: npt.NDArray[np.uint64],
    reference_nodes: I64,
    order_of: npt.NDArray[np.uint64],
) -> I64:
    """Which references share a bucket with the corpus: int64[h, 2] of (reference, one document of the bucket).

    One stands for all, the smallest by `order_of` (uint64, by node): the bucket's star edges connect the others to it.
    Unique and sorted.
    """
    order = np.lexsort((corpus_nodes, order_of[corpus_nodes], corpus_keys))
    keys, nodes = corpus_keys[order], corpus_nodes[order]
    at = np.searchsorted(keys, reference_keys)
    inside = np.flatnonzero(at < len(keys))
    hit = inside[keys[at[inside]] == reference_keys[inside]]
    return unique_pairs(np.stack([reference_nodes[hit], nodes[at[hit]]], axis=1).reshape(-1, 2))


def match_all_references(
    corpus_keys: npt.NDArray[np.uint64],
    corpus_nodes: I64,
    reference_keys: npt.NDArray[np.uint64],
    reference_nodes: I64,
    max_pairs: int,
) -> Iterator[I64]:
    """Every reference with every document of each bucket that they share, in blocks: int64[h, 2], unique and sorted.

    A block holds about `max_pairs`, so that a bucket of a template and many references of it take time, not memory.
    """
    order = np.argsort(corpus_keys, kind="stable")
    keys = corpus_keys[order]
    start, end = (np.searchsorted(keys, reference_keys, side=side) for side in ("left", "right"))
    for first, last in blocks_of(end - start, max_pairs):
        key, place = positions((end - start)[first:last])
        nodes = corpus_nodes[order[start[first:last][key] + place]]
        yield unique_pairs(np.column_stack([reference_nodes[first:last][key], nodes]))


def names_of_bits(bits: npt.NDArray[np.uint64], names: list[str]) -> pa.Array:
    """The names that each number's bits stand for, with commas: uint64[n] -> string[n]."""
    values, inverse = np.unique(bits, return_inverse=True)
    labels = [",".join(name for number, name in enumerate(names) if value >> number & 1) for value in values.tolist()]
    return pa.array(labels, pa.string()).take(pa.array(inverse))


def size_table(sizes: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]) -> dict[str, int]:
    """Number of clusters by size: 1, 2, 3, 4, then powers of two."""
    table: dict[str, int] = {}
    for size, count in zip(sizes.tolist(), counts.tolist(), strict=True):
        low = 1 << (size.bit_length() - 1)
        label = str(size) if size <= 4 else f"{max(5, low)} to {2 * low - 1}"
        table[label] = table.get(label, 0) + count
    return table
