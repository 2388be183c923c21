"""Promise: no document, cluster or reference text is in two splits.

Cost: 72 bytes a row, and the signatures of one unit at a time.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from asset_checks.columns import I64, U8, Flags, find_rows, id_rows, joined, run_starts, sorted_rows, whole
from asset_checks.components import band_values, have_words
from asset_checks.similarity import Run, Runs, are_alike, items_in, searched_runs, texts_of, word_runs
from asset_checks.verdicts import Verdict, law, verdict_of
from pipeline_assets.clusters import slice_name
from pipeline_assets.corpus import Corpus
from pipeline_assets.reference_hits import reference_texts
from pipeline_assets.signatures import DOC_IDS as SIGNED_IDS
from pipeline_assets.signatures import SIGNATURES, minhash_params, split_units
from pipeline_assets.splits import TABLE_NAME
from pipeline_assets.stripes import Stage, units_in
from pipeline_assets.transforms.rows import doc_id_matrix
from pipeline_assets.transforms.split import SPLITS
from resources.artifact_store import ArtifactRef
from training_io.errors import InvariantBroken

MAX_SEARCHED = 1_000  # held-out documents whose runs of words are compared with those of references


def no_document_is_in_two_splits(stage: Stage, split_documents: ArtifactRef) -> Verdict:
    """Each doc_id has one split, over all units."""
    parts = list(_documents_in_splits(stage, split_documents))
    splits = np.concatenate([splits for _, splits in parts])
    doc_ids = joined(doc_ids for doc_ids, _ in parts)
    del parts
    violations, _ = _in_two_splits("document", doc_ids, splits)
    return verdict_of("one split a document", violations, f"{len(doc_ids):,} documents")


def no_cluster_is_in_two_splits(stage: Stage, split_documents: ArtifactRef, lsh_clusters: ArtifactRef) -> Verdict:
    """Each cluster, as clustering decided it, has one split over all units."""
    decided = _cluster_of_row(stage, split_documents, lsh_clusters)
    parts = [(decided.rows_of(doc_ids), splits) for doc_ids, splits in _documents_in_splits(stage, split_documents)]
    rows, splits = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    cluster_ids = decided.cluster_ids[rows]
    del decided
    violations, clusters = _in_two_splits("cluster", cluster_ids, splits)
    return verdict_of("one split a cluster", violations, f"{clusters:,} clusters")


def no_reference_text_is_in_validation(
    stage: Stage,
    split_documents: ArtifactRef,
    reference_sets: ArtifactRef,
    lsh_clusters: ArtifactRef,
    minhash_signatures: ArtifactRef,
    raw_row_groups: ArtifactRef,
) -> Verdict:
    """Neither a reference text, nor a text with a band of one, nor another of such a text's cluster, is in validation.

    Bands are compared again as the signatures' raw bytes; the hits that clustering recorded are not believed.
    """
    parts = list(_documents_in_splits(stage, split_documents, SPLITS[1:]))
    splits = np.concatenate([splits for _, splits in parts])
    judged = joined(doc_ids for doc_ids, _ in parts)
    near = _documents_near_references(stage, reference_sets, raw_row_groups, minhash_signatures)
    for reference in stage.recipe.references:
        near |= set(stage.table(reference_sets, f"{reference.name}.parquet", ["doc_id"]).column("doc_id").to_pylist())
    sample = [doc_id.tobytes() for doc_id in np.unique(whole(judged))[:MAX_SEARCHED]]
    near |= _documents_with_runs_of_references(stage, lsh_clusters, reference_sets, raw_row_groups, sample)
    held_out = np.isin(whole(judged), whole(id_rows(near)))
    held_out |= _of_their_clusters(_cluster_of_row(stage, split_documents, lsh_clusters), judged, near, held_out)
    violations = [
        f"{judged[row].tobytes().hex()[:16]} of a held-out cluster is in {SPLITS[splits[row]]}"
        for row in np.flatnonzero(held_out).tolist()
    ]
    return verdict_of("no reference text or near copy in validation or test", violations, f"{len(judged):,} documents")


def _documents_near_references(
    stage: Stage, reference_sets: ArtifactRef, raw_row_groups: ArtifactRef, minhash_signatures: ArtifactRef
) -> set[bytes]:
    """Documents of the corpus that agree with a reference text in all values of some band, and are alike if asked."""
    signed, references = split_units(units_in(stage, minhash_signatures))
    if not references:
        return set()
    wanted = np.concatenate([stage.array(unit, SIGNATURES) for unit in references])
    found = _sharing_a_band(stage, signed, wanted)
    threshold, ngram = stage.recipe.dedup.verify_jaccard, stage.recipe.dedup.ngram
    if threshold is not None:
        held_out = [word_runs(text, ngram) for text in reference_texts(stage, reference_sets).to_pylist()]
        corpus = Corpus(stage, units_in(stage, raw_row_groups), signed)
        texts = corpus.rows(np.array(list(found), np.int64), ["text"]).column("text").to_pylist()
        alike = _alike_to_some((word_runs(text, ngram) for text in texts), held_out, threshold)
        return {doc_id for doc_id, is_alike in zip(found.values(), alike, strict=True) if is_alike}
    return set(found.values())


def _alike_to_some(texts: Iterable[Runs], others: Sequence[Runs], threshold: float) -> Iterator[bool]:
    """Whether each text is alike to one of the others; compared with those alone that share a run of words with it."""
    holders: defaultdict[Run, list[int]] = defaultdict(list)
    for place, runs in enumerate(others):
        for run in runs:
            holders[run].append(place)
    for runs in texts:
        places = {place for run in runs & holders.keys() for place in holders[run]}
        yield any(are_alike(runs, others[place], threshold) for place in places)


def _sharing_a_band(stage: Stage, signed: list[ArtifactRef], wanted: npt.NDArray[np.uint32]) -> dict[int, bytes]:
    """Numbers and doc_ids of the documents that agree with one of the wanted signatures in a band, ascending."""
    rows_per_band = minhash_params(stage.recipe).rows_per_band
    wanted = wanted[have_words(wanted)]
    found: dict[int, bytes] = {}
    first = 0
    for unit in signed:
        signatures, doc_ids = stage.array(unit, SIGNATURES), stage.array(unit, SIGNED_IDS)
        shares = np.zeros(len(signatures), np.bool_)
        for start in range(0, signatures.shape[1], rows_per_band):
            texts, banned = (band_values(values[:, start : start + rows_per_band]) for values in (signatures, wanted))
            shares |= np.isin(texts, banned)
        found |= {first + row: doc_ids[row].tobytes() for row in np.flatnonzero(shares).tolist()}
        first += len(signatures)
    return found


def _documents_with_runs_of_references(
    stage: Stage,
    lsh_clusters: ArtifactRef,
    reference_sets: ArtifactRef,
    raw_row_groups: ArtifactRef,
    documents: Iterable[bytes],
) -> set[bytes]:
    """Of some documents, those that hold a run of words of a text that is searched for by overlap."""
    searched = list(searched_runs(stage, lsh_clusters, reference_sets).values())
    texts = texts_of(stage, raw_row_groups, documents if searched else ())
    return {doc_id for doc_id, text in texts.items() if any(items_in(text, runs) for runs in searched)}


@dataclass(frozen=True)
class _ClusterOfRow:
    """Every row's document and cluster, as clustering decided, and the rows by doc_id: 72 bytes a row."""

    doc_ids: U8  # [n, 32]
    by_doc_id: I64  # [n]
    cluster_ids: U8  # [n, 32]

    def rows_of(self, doc_ids: U8) -> I64:
        """The row of each document; InvariantBroken where there is none."""
        rows = find_rows(self.doc_ids, self.by_doc_id, doc_ids)
        if (rows < 0).any():
            lost = doc_ids[np.argmax(rows < 0)].tobytes().hex()[:16]
            raise InvariantBroken(
                f"split_documents: expected documents that lsh_clusters decided about, found {lost}, of which it says"
                " nothing. Materialize split_documents again."
            )
        return rows


def _cluster_of_row(stage: Stage, split_documents: ArtifactRef, lsh_clusters: ArtifactRef) -> _ClusterOfRow:
    names = [slice_name(unit.unit) for unit in units_in(stage, split_documents)]
    doc_ids, cluster_ids = (
        joined(doc_id_matrix(stage.table(lsh_clusters, name, [column]).column(column)) for name in names)
        for column in ("doc_id", "cluster_id")
    )
    return _ClusterOfRow(doc_ids, sorted_rows(doc_ids), cluster_ids)


def _of_their_clusters(clusters: _ClusterOfRow, judged: U8, near: Iterable[bytes], is_near: Flags) -> Flags:
    """Whether a judged document, if not near a reference itself, is of the cluster of one that is."""
    rows = find_rows(clusters.doc_ids, clusters.by_doc_id, id_rows(near))
    held_out = whole(clusters.cluster_ids[rows[rows >= 0]])
    found = np.zeros(len(judged), np.bool_)
    found[~is_near] = np.isin(whole(clusters.cluster_ids[clusters.rows_of(judged[~is_near])]), held_out)
    return found


def _documents_in_splits(
    stage: Stage, split_documents: ArtifactRef, names: Sequence[str] = SPLITS
) -> Iterator[tuple[U8, npt.NDArray[np.int8]]]:
    """Unit after unit, the doc_ids of the documents in some splits, uint8[n, 32], and the splits' places in SPLITS."""
    for unit in units_in(stage, split_documents):
        table = stage.table(unit, TABLE_NAME, ["doc_id", "split"])
        table = table.filter(pc.is_in(table.column("split"), pa.array(names)))
        splits = pc.index_in(table.column("split"), pa.array(SPLITS))
        yield doc_id_matrix(table.column("doc_id")), np.asarray(splits, np.int8)


def _in_two_splits(what: str, values: U8, splits: npt.NDArray[np.int8]) -> tuple[list[str], int]:
    """The values that are in several splits, in words, by their first rows; and how many values there are.

    Sorted, a value's rows lie together: one split is the smallest and the largest of them.
    """
    by_value = sorted_rows(values)
    starts = np.flatnonzero(run_starts(values, by_value))
    ordered = splits[by_value]
    torn = np.empty(0, np.int64)
    if len(starts):
        torn = np.flatnonzero(np.minimum.reduceat(ordered, starts) != np.maximum.reduceat(ordered, starts))
    torn = torn[np.argsort(by_value[starts[torn]])]
    ends = np.append(starts[1:], len(ordered))
    violations = [
        f"{what} {values[by_value[start]].tobytes().hex()[:16]} is in"
        f" {' and '.join(sorted(SPLITS[split] for split in np.unique(ordered[start:end])))}"
        for start, end in zip(starts[torn].tolist(), ends[torn].tolist(), strict=True)
    ]
    return violations, len(starts)


LEAK = "a validation loss would measure memory. Materialize split_documents again; nothing downstream may be used."

CHECKS = [
    law(
        no_document_is_in_two_splits,
        blocking=True,
        description=f"Fails when one text is both trained on and validated on: {LEAK}",
    ),
    law(
        no_cluster_is_in_two_splits,
        blocking=True,
        description=f"Fails when near copies are in two splits: {LEAK}",
    ),
    law(
        no_reference_text_is_in_validation,
        blocking=True,
        description=f"Fails when a held-out text, or a near copy of one, is validated on: {LEAK}",
    ),
]
