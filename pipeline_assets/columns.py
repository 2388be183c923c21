"""Which assets store columns beside their contracts, and which columns carry through from one asset to another.

In: an asset's name. Out: what it stores, its rows, and where its columns come from. The promise: every asset whose rows
are under no contract is here.
"""

from collections.abc import Mapping, Sequence

from pipeline_assets.stored import StoredAsset, StoredRows
from pipeline_assets.stored_batches import PACKAGE, PLAN, QUALITY, STATS, TRAINING
from pipeline_assets.stored_documents import SHARDS, SIGNATURES, TOKENIZER, TOKENIZER_REPORT, TOKENS
from pipeline_assets.stripes import Stage
from resources.artifact_store import ArtifactRef

STORED: Mapping[str, StoredAsset] = {
    "minhash_signatures": SIGNATURES,
    "document_tokens": TOKENS,
    "tokenizer": TOKENIZER,
    "tokenizer_report": TOKENIZER_REPORT,
    "token_shards": SHARDS,
    "packing_plan": PLAN,
    "packing_stats": STATS,
    "handoff_package": PACKAGE,
    "varlen_training_run": TRAINING,
    "quality_report": QUALITY,
}
"""Every asset whose rows are in no table under a contract."""


def rows_of(stage: Stage, ref: ArtifactRef, parts: Sequence[ArtifactRef]) -> StoredRows:
    """The rows of an asset that is in STORED."""
    return STORED[ref.asset].rows(stage, ref, parts)


Source = tuple[str, str]  # an asset upstream, and its column

LINEAGE: Mapping[str, Mapping[str, tuple[Source, ...]]] = {
    "reference_sets": {
        "doc_id": (("raw_row_groups", "doc_id"),),
        "text": (("raw_row_groups", "text"),),
    },
    "minhash_signatures": {"doc_id": (("raw_row_groups", "doc_id"),)},
    "lsh_clusters": {"doc_id": (("minhash_signatures", "doc_id"),)},
    "document_tokens": {
        "doc_id": (("raw_row_groups", "doc_id"),),
        "place": (("raw_row_groups", "row_group"), ("raw_row_groups", "row")),
    },
    "split_documents": {
        "doc_id": (("document_tokens", "doc_id"),),
        "text": (("raw_row_groups", "text"),),
        "num_tokens": (("document_tokens", "length"),),
        "cluster_id": (("lsh_clusters", "cluster_id"),),
        "pool": (("raw_row_groups", "pool"),),
    },
    "token_shards": {
        "doc_id": (("document_tokens", "doc_id"),),
        "length": (("document_tokens", "length"),),
        "tokens": (("document_tokens", "tokens"),),
        "pool": (("split_documents", "pool"),),
    },
    "handoff_package": {
        name: (("token_shards", name),) for name in ("doc_id", "pool", "shard", "offset", "length", "tokens")
    },
}
"""Columns that carry through: a document has the same value in the asset and upstream. One that has several sources
holds their values side by side; a pool is a name or its number among the recipe's.
"""
