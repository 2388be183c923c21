"""Promise: clusters are the components of documents that share a bucket, and few documents are removed.

Cost: columns of all rows, of which doc_ids are the widest, and the values of one band at a time.
"""

import itertools
from collections import Counter

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from asset_checks.columns import I64, U8, Numbers, find_rows, group_numbers, named, sorted_rows, whole
from asset_checks.components import (
    Signatures,
    all_signatures,
    components_of,
    edges_of_bands,
    equal_rows,
    near_components,
    shares_a_band,
)
from asset_checks.decisions import (
    AGAIN,
    DUPLICATES,
    EXACT,
    NEAR,
    Decided,
    first_rows,
    ids_in,
    other_rows,
    rows_of,
    rows_read,
    side_by_side,
)
from asset_checks.likeness import likeness_to_kept
from asset_checks.similarity import Runs, are_alike, word_runs
from asset_checks.verdicts import MAX_EXAMPLES, Verdict, law, verdict_of
from pipeline_assets.buckets import LEFT
from pipeline_assets.corpus import Corpus
from pipeline_assets.signatures import minhash_params, split_units
from pipeline_assets.stripes import Stage, units_in
from pipeline_assets.transforms.rows import doc_id_matrix
from pipeline_assets.transforms.verify import MAX_COMPARED
from resources.artifact_store import ArtifactRef

MAX_REMOVED_SHARE = 0.5
MAX_CLUSTER_SHARE = 0.05
SMALL_CLUSTER = 100
MAX_VERIFIED_CLUSTERS = 100  # recounted with Python sets, and of so many members at most
MAX_VERIFIED_CLUSTER = 64
MAX_VERIFIED_PAIRS = 200


def clusters_are_connected_components(
    stage: Stage, lsh_clusters: ArtifactRef, raw_row_groups: ArtifactRef, minhash_signatures: ArtifactRef
) -> Verdict:
    """Recounted from the whole signatures: rows with 8 equal values in a band, or equal texts, are in one component.

    The route is another one: no band keys and no buckets, but the bands' raw bytes, and scipy's components. Verified
    edges are recounted on a sample, with Python sets of words. A cluster is named after its smallest doc_id and says
    how many rows it has.
    """
    decided = Decided(stage, lsh_clusters, raw_row_groups)
    claimed = group_numbers(ids_in(decided.read("cluster_id")))
    if violations := other_rows(stage, pa.concat_tables(decided.read("kept")), raw_row_groups):
        return verdict_of("clusters = components of the bucket graph", violations, f"{len(claimed):,} decisions")
    doc_ids = ids_in(decided.read("doc_id"))
    dedup = stage.recipe.dedup
    signed, _ = split_units(units_in(stage, minhash_signatures))
    corpus = Corpus(stage, units_in(stage, raw_row_groups), signed)
    signatures = all_signatures(stage, signed)
    rows_per_band = minhash_params(stage.recipe).rows_per_band
    if dedup.verify_jaccard is not None:
        violations = verified_differently(corpus, signatures, claimed)
    elif dedup.mode == "exact":
        violations = _other_partition(doc_ids, components_of(len(doc_ids), equal_rows(doc_ids)), claimed)
    else:
        violations = _other_partition(doc_ids, near_components(doc_ids, signatures, rows_per_band), claimed)
    if dedup.scope == "dump":
        violations += _removed_across_dumps(decided, doc_ids, signatures)
    violations += _misnamed(decided, doc_ids, claimed)
    return verdict_of("clusters = components of the bucket graph", violations, f"{claimed.max() + 1:,} clusters")


def _misnamed(decided: Decided, doc_ids: U8, claimed: I64) -> list[str]:
    """Rows whose cluster is not named after its smallest doc_id, or that state another size of it."""
    by_id = sorted_rows(doc_ids)
    smallest = by_id[np.unique(claimed[by_id], return_index=True)[1]]
    del by_id
    sizes = np.bincount(claimed)
    violations, first = [], 0
    for table in decided.read("cluster_id", "cluster_size"):
        clusters = claimed[first : first + table.num_rows]
        found, stated = doc_id_matrix(table.column("cluster_id")), np.asarray(table.column("cluster_size"))
        names = doc_ids[smallest[clusters]]
        violations += [
            f"{doc_ids[first + row].tobytes().hex()[:16]}: expected cluster {names[row].tobytes().hex()[:16]}"
            f" of {sizes[clusters[row]]:,} rows, found {found[row].tobytes().hex()[:16]} of {stated[row]:,}"
            for row in np.flatnonzero((whole(found) != whole(names)) | (stated != sizes[clusters])).tolist()
        ]
        first += table.num_rows
    return violations


def _other_partition(doc_ids: U8, labels: Numbers, claimed: I64) -> list[str]:
    num_clusters = claimed.max() + 1
    pairs = np.unique(labels.astype(np.int64) * num_clusters + claimed)
    spread, joining = (np.flatnonzero(np.bincount(side) > 1) for side in (pairs // num_clusters, pairs % num_clusters))
    violations = [
        f"the component of document {doc_ids[row].tobytes().hex()[:16]} is spread over clusters"
        for row in first_rows(labels, spread).tolist()
    ]
    return violations + [
        f"the cluster of document {doc_ids[row].tobytes().hex()[:16]} joins components"
        for row in first_rows(claimed, joining).tolist()
    ]


def _removed_across_dumps(decided: Decided, doc_ids: U8, signatures: Signatures) -> list[str]:
    """Removed rows whose component within their own crawl does not hold the text that is kept in their place."""
    crawls, _ = named(table.column("dump") for table in rows_read(decided.stage, decided.raw_row_groups, "dump"))
    rows_per_band = minhash_params(decided.stage.recipe).rows_per_band
    labels = near_components(doc_ids, signatures, rows_per_band, side_by_side(crawls))
    removed = np.flatnonzero(np.isin(decided.reasons, (EXACT, NEAR)))
    kept = doc_id_matrix(rows_of(decided.read("kept_doc_id"), removed).column(0))
    held = side_by_side(labels, doc_ids)
    is_lost = find_rows(held, sorted_rows(held), side_by_side(labels[removed], kept)) < 0
    return [
        f"{doc_ids[removed[place]].tobytes().hex()[:16]} was removed for {kept[place].tobytes().hex()[:16]}, to which"
        " nothing of its crawl connects it"
        for place in np.flatnonzero(is_lost).tolist()
    ]


def verified_differently(corpus: Corpus, signatures: Signatures, claimed: I64) -> list[str]:
    """A sample of clusters that verified pairs do not connect, and of verified pairs that lie in two clusters."""
    groups = [members for members in _sampled_groups(claimed) if len(members) <= MAX_VERIFIED_CLUSTER]
    torn = _split_neighbours(corpus, signatures, claimed)
    runs = _runs_of(corpus, {*itertools.chain(*groups), *itertools.chain(*torn)})
    wanted = np.array(sorted(runs), np.int64)
    signed = dict(zip(wanted.tolist(), corpus.signatures(wanted), strict=True))
    names = {number: corpus.doc_ids[number].tobytes().hex()[:16] for number in runs}
    rows_per_band = minhash_params(corpus.stage.recipe).rows_per_band
    threshold = corpus.stage.recipe.dedup.verify_jaccard
    assert threshold is not None

    def are_joined(first: int, second: int) -> bool:
        if bool((corpus.doc_ids[first] == corpus.doc_ids[second]).all()):
            return True
        shares = shares_a_band(signed[first], signed[second], rows_per_band)
        return shares and are_alike(runs[first], runs[second], threshold)

    violations = []
    for members in groups:
        places = range(len(members))
        edges = [(a, b) for a, b in itertools.combinations(places, 2) if are_joined(members[a], members[b])]
        if components_of(len(members), np.array(edges, np.int64).reshape(-1, 2)).any():
            violations.append(f"the cluster of {names[members[0]]} joins texts that are not alike")
    return violations + [
        f"{names[first]} and {names[second]} are alike, share a band and are in two clusters"
        for first, second in torn
        if are_joined(first, second)
    ]


def _runs_of(corpus: Corpus, numbers: set[int]) -> dict[int, Runs]:
    """The word runs of some documents."""
    wanted = sorted(numbers)
    texts = corpus.rows(np.array(wanted, np.int64), ["text"]).column("text").to_pylist()
    ngram = corpus.stage.recipe.dedup.ngram
    return {number: word_runs(text, ngram) for number, text in zip(wanted, texts, strict=True)}


def _sampled_groups(claimed: npt.NDArray[np.int64]) -> list[list[int]]:
    """The members of the first clusters of two or more: clusters are numbered by their ids, which are hashes."""
    shared = np.flatnonzero(np.bincount(claimed) > 1)[:MAX_VERIFIED_CLUSTERS]
    return [np.flatnonzero(claimed == cluster).tolist() for cluster in shared.tolist()]


def _split_neighbours(corpus: Corpus, signatures: Signatures, claimed: I64) -> list[tuple[int, int]]:
    """Neighbours of two clusters in small groups of equal bands: larger groups are not compared in full."""
    found = np.empty((0, 2), np.int64)
    for pairs in edges_of_bands(signatures, minhash_params(corpus.stage.recipe).rows_per_band):
        labels = components_of(len(claimed), pairs)
        is_small = np.bincount(labels)[labels[pairs[:, 0]]] <= MAX_COMPARED
        pairs = pairs[is_small & (claimed[pairs[:, 0]] != claimed[pairs[:, 1]])]
        found = np.unique(np.concatenate([found, np.sort(pairs, axis=1)]), axis=0)[:MAX_VERIFIED_PAIRS]
    return [(first, second) for first, second in found.tolist()]


def removal_is_plausible(stage: Stage, lsh_clusters: ArtifactRef, raw_row_groups: ArtifactRef) -> Verdict:
    """No pool loses half of its documents, no cluster holds a twentieth of the corpus, and no document was left out.

    Left out are documents of buckets so large that not all of them were compared, where pairs are verified. Nor are
    most of a pool's removed documents unlike the ones kept in their place, as the ends of a chain are, and of each copy
    that was removed the evidence says how similar it is.
    """
    decided = Decided(stage, lsh_clusters, raw_row_groups)
    documents, removed, copies = _counts_by_pool(decided)
    shares = {name: removed[name] / count for name, count in documents.items() if count}
    violations = [
        f"pool {name} loses {share:.1%} of its documents" for name, share in shares.items() if share > MAX_REMOVED_SHARE
    ]
    largest = int(np.bincount(group_numbers(ids_in(decided.read("cluster_id")))).max())
    limit = max(SMALL_CLUSTER, MAX_CLUSTER_SHARE * documents.total())
    if largest > limit:
        violations.append(f"the largest cluster holds {largest:,} of {documents.total():,} documents")
    if left := stage.open(lsh_clusters)[1].counts.get(LEFT, 0):
        violations.append(
            f"expected 0 documents left unverified, found {left:,}, once for each band that they share with too many:"
            " near copies among them may stay; raise dedup.rows_per_band (and dedup.num_bands with it), or take"
            " dedup.verify_jaccard out"
        )
    likeness = likeness_to_kept(stage, lsh_clusters, copies)
    violations += likeness.violations
    listed = ", ".join(f"{name} {share:.1%}" for name, share in shares.items())
    return Verdict(
        expected=f"less than {MAX_REMOVED_SHARE:.0%} of each pool removed, no cluster above {limit:,.0f} documents,"
        f" none left unverified, most of a pool's removed at least {likeness.limit:.3f} similar to the document kept",
        found=f"removed: {listed}; largest cluster {largest:,}; left unverified {left:,}; {likeness.found}",
        num_violations=len(violations),
        examples=[{"violation": violation} for violation in violations[:MAX_EXAMPLES]],
        numbers={
            "largest_cluster": largest,
            LEFT: left,
            **likeness.numbers,
            **{f"removed_share_{name}": share for name, share in shares.items()},
        },
    )


def _counts_by_pool(decided: Decided) -> tuple[Counter[str], Counter[str], Counter[str]]:
    """Documents of each pool, those of them that are not kept, and those that were removed as copies."""
    documents: Counter[str] = Counter()
    removed: Counter[str] = Counter()
    copies: Counter[str] = Counter()
    units = units_in(decided.stage, decided.raw_row_groups)
    for unit, table in zip(units, decided.read("kept", "reason"), strict=True):
        documents[unit.counts["pool"]] += table.num_rows
        removed[unit.counts["pool"]] += int((~np.asarray(table.column("kept"))).sum())
        is_copy = pc.is_in(table.column("reason"), pa.array(DUPLICATES))
        copies[unit.counts["pool"]] += int(np.count_nonzero(is_copy))
    return documents, removed, copies


CHECKS = [
    law(
        clusters_are_connected_components,
        blocking=True,
        description="Fails when near-copies are in two clusters, unrelated texts in one, or a cluster's name or size "
        f"is another. Where pairs are verified, {MAX_VERIFIED_CLUSTERS} clusters and {MAX_VERIFIED_PAIRS} pairs are "
        f"recounted. {AGAIN}",
    ),
    law(
        removal_is_plausible,
        blocking=False,
        description="Warns when deduplication removes an unlikely share (a template, a wrong word rule or a broken "
        "source), leaves documents unverified, does not say how similar a removed document is to the one kept, or "
        "chains documents together that are unlike. Look at the largest clusters and the evidence before you train.",
    ),
]
