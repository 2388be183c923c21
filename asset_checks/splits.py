"""Promise: no document, cluster or reference text in two splits, and nothing lost on the way."""

from collections import Counter, defaultdict
from collections.abc import Iterable

import numpy as np
import pyarrow as pa

from asset_checks.verdicts import Verdict, law, verdict_of
from pipeline_assets.clusters import slice_name, split_units
from pipeline_assets.signatures import DOC_IDS as CORPUS_DOC_IDS
from pipeline_assets.signatures import SIGNATURES, minhash_params
from pipeline_assets.splits import TABLE_NAME
from pipeline_assets.stripes import Stage, units_in
from pipeline_assets.tokens import DOC_IDS
from pipeline_assets.transforms.split import SPLITS
from resources.artifact_store import ArtifactRef

USED_REASON = "used"


def no_document_is_in_two_splits(stage: Stage, split_documents: ArtifactRef) -> Verdict:
    """Each doc_id has one split, over all units."""
    rows = _split_of_documents(stage, split_documents)
    return verdict_of("one split a document", _in_two_splits("document", rows), f"{len(rows):,} documents")


def no_cluster_is_in_two_splits(stage: Stage, split_documents: ArtifactRef, lsh_clusters: ArtifactRef) -> Verdict:
    """Each cluster, as clustering decided it, has one split over all units."""
    cluster_of = _cluster_of_documents(stage, split_documents, lsh_clusters)
    rows = [(cluster_of[doc_id], split) for doc_id, split in _split_of_documents(stage, split_documents)]
    clusters = len({cluster for cluster, _ in rows})
    return verdict_of("one split a cluster", _in_two_splits("cluster", rows), f"{clusters:,} clusters")


def no_reference_text_is_in_validation(
    stage: Stage,
    split_documents: ArtifactRef,
    reference_sets: ArtifactRef,
    lsh_clusters: ArtifactRef,
    minhash_signatures: ArtifactRef,
) -> Verdict:
    """Neither a reference text, nor a text with a band of one, nor another of such a text's cluster, is in validation.

    Bands are compared again as the signatures' raw bytes; the hits that clustering recorded are not believed.
    """
    cluster_of = _cluster_of_documents(stage, split_documents, lsh_clusters)
    near = _documents_near_references(stage, minhash_signatures)
    for reference in stage.recipe.references:
        near |= set(stage.table(reference_sets, f"{reference.name}.parquet", ["doc_id"]).column("doc_id").to_pylist())
    held_out = {cluster_of[doc_id] for doc_id in near & cluster_of.keys()}
    judged = [row for row in _split_of_documents(stage, split_documents) if row[1] != SPLITS[0]]
    violations = [
        f"{doc_id.hex()[:16]} of a held-out cluster is in {split}"
        for doc_id, split in judged
        if doc_id in near or cluster_of[doc_id] in held_out
    ]
    return verdict_of("no reference text or near copy in validation or test", violations, f"{len(judged):,} documents")


def _documents_near_references(stage: Stage, minhash_signatures: ArtifactRef) -> set[bytes]:
    """Documents of the corpus that agree with a reference text in all values of some band."""
    corpus, references = split_units(units_in(stage, minhash_signatures))
    if not references:
        return set()
    rows_per_band = minhash_params(stage.recipe).rows_per_band
    wanted = np.concatenate([stage.array(unit, SIGNATURES) for unit in references])
    wanted = wanted[(wanted != 0xFFFFFFFF).any(axis=1)]
    found: set[bytes] = set()
    for unit in corpus:
        signatures, doc_ids = stage.array(unit, SIGNATURES), stage.array(unit, CORPUS_DOC_IDS)
        for start in range(0, signatures.shape[1], rows_per_band):
            texts, banned = (
                np.ascontiguousarray(values[:, start : start + rows_per_band]).view(f"V{4 * rows_per_band}").ravel()
                for values in (signatures, wanted)
            )
            found |= {doc_ids[row].tobytes() for row in np.flatnonzero(np.isin(texts, banned))}
    return found


def _cluster_of_documents(stage: Stage, split_documents: ArtifactRef, lsh_clusters: ArtifactRef) -> dict[bytes, bytes]:
    slices = [
        stage.table(lsh_clusters, slice_name(unit.unit), ["doc_id", "cluster_id"])
        for unit in units_in(stage, split_documents)
    ]
    table = pa.concat_tables(slices)
    return dict(zip(table.column("doc_id").to_pylist(), table.column("cluster_id").to_pylist(), strict=True))


def every_kept_document_has_a_split_or_a_reason(
    stage: Stage, split_documents: ArtifactRef, document_tokens: ArtifactRef
) -> Verdict:
    """The split tables hold the tokenized documents, each once; used ones have a split, unused ones a reason."""
    violations, documents = [], 0
    tokens = {unit.unit: unit for unit in units_in(stage, document_tokens)}
    for unit in units_in(stage, split_documents):
        table = stage.table(unit, TABLE_NAME, ["doc_id", "split", "reason"])
        doc_ids, splits, reasons = (table.column(name).to_pylist() for name in table.column_names)
        documents += len(doc_ids)
        expected = Counter(doc_id.tobytes() for doc_id in stage.array(tokens[unit.unit], DOC_IDS))
        found = Counter(doc_ids)
        violations += [
            f"{unit.unit}: {doc_id.hex()[:16]} tokenized {expected[doc_id]} times, in the table {found[doc_id]} times"
            for doc_id in (expected - found) | (found - expected)
        ]
        violations += [
            f"{unit.unit}: {doc_id.hex()[:16]} is in {split} with reason {reason}"
            for doc_id, split, reason in zip(doc_ids, splits, reasons, strict=True)
            if (split in SPLITS) != (reason == USED_REASON)
        ]
    return verdict_of(
        "tokenized documents = documents with a split + unused with a reason", violations, f"{documents:,} documents"
    )


def every_pool_is_in_every_split(stage: Stage, split_documents: ArtifactRef) -> Verdict:
    """Each pool with training documents has documents in each other split that the recipe asks for."""
    found: Counter[tuple[str, str]] = Counter()
    for unit in units_in(stage, split_documents):
        table = stage.table(unit, TABLE_NAME, ["pool", "split"])
        found.update(zip(table.column("pool").to_pylist(), table.column("split").to_pylist(), strict=True))
    pools = sorted({pool for pool, split in found if split == SPLITS[0]})
    wanted = [name for name in stage.recipe.splits.names if name != SPLITS[0] and _is_asked_for(stage, name)]
    violations = [
        f"pool {pool}: no document is in {split}, {found[pool, SPLITS[0]]:,} are in {SPLITS[0]}"
        for pool in pools
        for split in wanted
        if not found[pool, split]
    ]
    return verdict_of("documents of every pool in every split", violations, f"{len(pools):,} pools")


def _is_asked_for(stage: Stage, split: str) -> bool:
    assignment = stage.recipe.splits.assignment
    return any(getattr(assignment, f"{split}_{kind}", 0) for kind in ("fraction", "tokens"))


def _split_of_documents(stage: Stage, split_documents: ArtifactRef) -> list[tuple[bytes, str]]:
    """doc_id and split of every document that is in a split."""
    tables = [stage.table(unit, TABLE_NAME, ["doc_id", "split"]) for unit in units_in(stage, split_documents)]
    table = pa.concat_tables(tables)
    pairs = zip(table.column("doc_id").to_pylist(), table.column("split").to_pylist(), strict=True)
    return [(doc_id, split) for doc_id, split in pairs if split in SPLITS]


def _in_two_splits(what: str, rows: Iterable[tuple[bytes, str]]) -> list[str]:
    splits: defaultdict[bytes, set[str]] = defaultdict(set)
    for value, split in rows:
        splits[value].add(split)
    return [
        f"{what} {value.hex()[:16]} is in {' and '.join(sorted(names))}"
        for value, names in splits.items()
        if len(names) > 1
    ]


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
    law(
        every_kept_document_has_a_split_or_a_reason,
        blocking=True,
        description="Fails when a document was lost while splitting, or is unused without a reason. Materialize "
        "split_documents again.",
    ),
    law(
        every_pool_is_in_every_split,
        blocking=False,
        description="Warns when a pool is trained on but never validated on. Often the tokenizer's sample holds the "
        "whole pool, which bars it: lower documents_per_pool, or raise the validation share.",
    ),
]
