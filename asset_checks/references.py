"""Promise: the held-out texts are those that were drawn or given."""

import hashlib
from collections import Counter

import numpy as np

from asset_checks.decisions import place_columns, source_rows
from asset_checks.verdicts import Verdict, law, verdict_of
from pipeline_assets.schemas import PLACE
from pipeline_assets.sections.references import TokenizerSample
from pipeline_assets.stripes import Stage
from pipeline_assets.transforms.rows import doc_id_matrix
from resources.artifact_store import ArtifactRef
from training_io.hashing import derive_seed, keyed_hash


def reference_texts_are_as_they_were_read(
    stage: Stage, reference_sets: ArtifactRef, raw_row_groups: ArtifactRef
) -> Verdict:
    """Each doc_id is its text's hash, each set's doc_ids are those that its identity was made of.

    And the samples are drawn again, by their rule.
    """
    manifest = stage.open(reference_sets)[1]
    recorded = dict(manifest.inputs["texts"])
    violations, sizes = [], {}
    for reference in stage.recipe.references:
        table = stage.table(reference_sets, f"{reference.name}.parquet", ["doc_id", "text"])
        doc_ids = table.column("doc_id").to_pylist()
        sizes[reference.name] = len(doc_ids)
        violations += [
            f"{reference.name}: doc_id {doc_id.hex()[:16]} is not the hash of its text"
            for doc_id, text in zip(doc_ids, table.column("text").to_pylist(), strict=True)
            if hashlib.sha256(text.encode()).digest() != doc_id
        ]
        if hashlib.sha256(b"".join(doc_ids)).hexdigest() != recorded.get(reference.name):
            violations.append(f"{reference.name}: expected the texts it was made of, found {len(doc_ids):,} others")
        if isinstance(reference, TokenizerSample):
            drawn = _drawn(stage, reference, raw_row_groups)
            violations += [
                f"{reference.name}: {doc_id.hex()[:16]} is {'not in the sample' if doc_id in drawn else 'not drawn'}"
                for doc_id in sorted(drawn.symmetric_difference(doc_ids))
            ]
    violations += [
        f"{name}: counted {number}, found {manifest.counts[name]} in the manifest"
        for name, number in (("sets", sizes), ("documents", sum(sizes.values())))
        if manifest.counts[name] != number
    ]
    return verdict_of("reference texts as they were drawn or given", violations, f"{sum(sizes.values()):,} texts")


def _drawn(stage: Stage, reference: TokenizerSample, raw_row_groups: ArtifactRef) -> set[bytes]:
    """The sample by its rule: of each pool the texts of the smallest keyed hash, of each crawl the first ones."""
    by_pool = reference.documents_per_pool is not None
    rows = source_rows(stage, raw_row_groups, [*PLACE, "doc_id", "dump"])
    keys = keyed_hash(doc_id_matrix(rows.column("doc_id")), derive_seed(stage.recipe.seed, reference.name))
    order = np.lexsort([*place_columns(stage, rows)[::-1], *([keys] if by_pool else [])]).tolist()
    doc_ids, groups = (rows.column(name).to_pylist() for name in ("doc_id", "pool" if by_pool else "dump"))
    limit = reference.documents_per_pool or reference.documents_per_dump or 0
    drawn: set[bytes] = set()
    taken: Counter[str | None] = Counter()
    for row in order:
        if doc_ids[row] not in drawn and taken[groups[row]] < limit:
            drawn.add(doc_ids[row])
            taken[groups[row]] += 1
    return drawn


CHECKS = [
    law(
        reference_texts_are_as_they_were_read,
        blocking=True,
        description="Fails when a held-out text was lost or altered, or a sample is not the one that its rule draws: a "
        "text, or a near copy, could be validated on. Materialize reference_sets again.",
    ),
]
