"""Promise: the held-out texts are those that were drawn or given."""

import hashlib

from asset_checks.verdicts import Verdict, law, verdict_of
from pipeline_assets.stripes import Stage
from resources.artifact_store import ArtifactRef


def reference_texts_are_as_they_were_read(stage: Stage, reference_sets: ArtifactRef) -> Verdict:
    """Each doc_id is its text's hash, and each set's doc_ids are those that its identity was made of."""
    recorded = dict(stage.open(reference_sets)[1].inputs["texts"])
    violations, texts = [], 0
    for reference in stage.recipe.references:
        table = stage.table(reference_sets, f"{reference.name}.parquet", ["doc_id", "text"])
        doc_ids = table.column("doc_id").to_pylist()
        texts += len(doc_ids)
        violations += [
            f"{reference.name}: doc_id {doc_id.hex()[:16]} is not the hash of its text"
            for doc_id, text in zip(doc_ids, table.column("text").to_pylist(), strict=True)
            if hashlib.sha256(text.encode()).digest() != doc_id
        ]
        if hashlib.sha256(b"".join(doc_ids)).hexdigest() != recorded.get(reference.name):
            violations.append(f"{reference.name}: expected the texts it was made of, found {len(doc_ids):,} others")
    return verdict_of("reference texts as they were drawn or given", violations, f"{texts:,} texts")


CHECKS = [
    law(
        reference_texts_are_as_they_were_read,
        blocking=True,
        description="Fails when a held-out text was lost or altered: it, or a near copy, could be validated on. "
        "Materialize reference_sets again.",
    ),
]
