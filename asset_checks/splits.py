"""Promise: no document, cluster or reference text in two splits, and nothing lost on the way."""

from collections import Counter, defaultdict
from collections.abc import Iterable

import pyarrow as pa

from asset_checks.verdicts import Verdict, law, verdict_of
from pipeline_assets.clusters import HITS_NAME, slice_name
from pipeline_assets.splits import TABLE_NAME
from pipeline_assets.stripes import Stage, units_in
from pipeline_assets.tokens import DOC_IDS
from pipeline_assets.transforms.split import SPLITS
from resources.artifact_store import ArtifactRef

USED_REASON = "used"


def no_document_is_in_two_splits(stage: Stage, split_documents: ArtifactRef) -> Verdict:
    """Each doc_id has one split, over all units."""
    rows = _rows(stage, split_documents, "doc_id")
    return verdict_of("one split a document", _in_two_splits("document", rows), f"{len(rows):,} documents")


def no_cluster_is_in_two_splits(stage: Stage, split_documents: ArtifactRef) -> Verdict:
    """Each cluster has one split, over all units."""
    rows = _rows(stage, split_documents, "cluster_id")
    clusters = len({cluster for cluster, _ in rows})
    return verdict_of("one split a cluster", _in_two_splits("cluster", rows), f"{clusters:,} clusters")


def no_reference_text_is_in_validation(
    stage: Stage, split_documents: ArtifactRef, reference_sets: ArtifactRef, lsh_clusters: ArtifactRef
) -> Verdict:
    """Neither a reference text nor a document of a cluster that one matched is in validation or test."""
    texts = {
        text
        for reference in stage.recipe.references
        for text in stage.table(reference_sets, f"{reference.name}.parquet", ["doc_id"]).column("doc_id").to_pylist()
    }
    matched = set(stage.table(lsh_clusters, HITS_NAME, ["doc_id"]).column("doc_id").to_pylist())
    held_out: set[bytes] = set()
    for unit in units_in(stage, split_documents):
        slices = stage.table(lsh_clusters, slice_name(unit.unit), ["doc_id", "cluster_id"])
        pairs = zip(slices.column("doc_id").to_pylist(), slices.column("cluster_id").to_pylist(), strict=True)
        held_out |= {cluster for doc_id, cluster in pairs if doc_id in matched or doc_id in texts}
    violations, judged = [], 0
    for unit in units_in(stage, split_documents):
        table = stage.table(unit, TABLE_NAME, ["doc_id", "cluster_id", "split"])
        for doc_id, cluster, split in zip(
            *(table.column(name).to_pylist() for name in table.column_names), strict=True
        ):
            judged += split in SPLITS[1:]
            if split in SPLITS[1:] and (doc_id in texts or cluster in held_out):
                violations.append(f"{doc_id.hex()[:16]} of a held-out cluster is in {split}")
    return verdict_of("no reference text or near copy in validation or test", violations, f"{judged:,} documents")


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


def _rows(stage: Stage, split_documents: ArtifactRef, key: str) -> list[tuple[bytes, str]]:
    tables = [stage.table(unit, TABLE_NAME, [key, "split"]) for unit in units_in(stage, split_documents)]
    table = pa.concat_tables(tables)
    pairs = zip(table.column(key).to_pylist(), table.column("split").to_pylist(), strict=True)
    return [(value, split) for value, split in pairs if split in SPLITS]


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
]
