"""The flow: every asset, what it reads, and the stage that it belongs to."""

from collections.abc import Mapping

UPSTREAM: Mapping[str, tuple[str, ...]] = {
    "raw_row_groups": (),
    "reference_sets": ("raw_row_groups",),
    "minhash_signatures": ("raw_row_groups", "reference_sets"),
    "lsh_clusters": ("raw_row_groups", "reference_sets", "minhash_signatures"),
    "tokenizer": ("reference_sets",),
    "document_tokens": ("raw_row_groups", "lsh_clusters", "tokenizer"),
    "tokenizer_report": ("raw_row_groups", "tokenizer", "document_tokens"),
    "split_documents": ("raw_row_groups", "lsh_clusters", "document_tokens"),
    "token_shards": ("document_tokens", "split_documents", "tokenizer"),
    "packing_plan": ("token_shards",),
    "packing_stats": ("token_shards", "packing_plan"),
    "mixture_ledger": ("token_shards", "packing_plan"),
    "handoff_package": ("raw_row_groups", "split_documents", "tokenizer", "token_shards", "packing_plan"),
    "varlen_training_run": ("token_shards", "packing_plan"),
    "quality_report": (
        "raw_row_groups",
        "reference_sets",
        "minhash_signatures",
        "lsh_clusters",
        "tokenizer",
        "document_tokens",
        "tokenizer_report",
        "split_documents",
        "token_shards",
        "packing_plan",
        "packing_stats",
        "mixture_ledger",
        "handoff_package",
        "varlen_training_run",
    ),
}
"""What each asset reads. The definitions' graph is compared with it by a test."""


STAGES: Mapping[str, str] = {
    "raw_row_groups": "source",
    "reference_sets": "source",
    "minhash_signatures": "signatures",
    "lsh_clusters": "clusters",
    "tokenizer": "tokens",
    "document_tokens": "tokens",
    "tokenizer_report": "tokens",
    "split_documents": "splits",
    "token_shards": "shards",
    "packing_plan": "packs",
    "packing_stats": "packs",
    "mixture_ledger": "packs",
    "handoff_package": "training",
    "varlen_training_run": "training",
    "quality_report": "training",
}
"""The stage that each asset belongs to, in the order of the flow."""


def ancestors(asset: str) -> tuple[str, ...]:
    """Every asset that an asset depends on, itself included, sorted."""
    found = {asset}
    for upstream in UPSTREAM[asset]:
        found.update(ancestors(upstream))
    return tuple(sorted(found))
