"""How much of the source each step passed on and left out, and what each split holds, for the report's first table.

In: what was found of each asset. Out: two tables of the counts in the assets' own manifests, and a note where they do
not follow from each other. Promise: nothing is counted here; a step that is not there is a row that says so.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pipeline_assets.findings import FoundAsset
from pipeline_assets.quality_page import Block, Note, table_of

Counts = Mapping[str, Any]

NOT_USED = {
    "null_text": "without a text",
    "empty_text": "with an empty text",
    "invalid_utf8": "not UTF-8",
    "rows_filtered": "failed a filter",
    "rows_excluded": "in row groups that no filter lets pass",
}
REMOVED = {
    "exact_duplicate": "exact duplicates",
    "near_duplicate": "near duplicates",
    "reference": "like a reference text",
}
UNUSED = {"below_min_tokens": "below the token floor", "over_budget": "over the budgets"}
"""Why rows of the source are not used, and documents removed or in no split: as manifests count it, and in words."""
DIVERTED = "longer than a segment may be"


def _rows_chosen(counts: Counts) -> Counts:
    return {"documents": counts["rows_read"] + counts.get("rows_excluded", 0)}


def _used(counts: Counts) -> Counts:
    left_out = {words: counts.get(name, 0) for name, words in NOT_USED.items()}
    return {"documents": counts["rows_used"], "text_bytes": counts["text_bytes"], "left_out": left_out}


def _kept(counts: Counts) -> Counts:
    return {"documents": counts["kept"], "left_out": {words: counts[name] for name, words in REMOVED.items()}}


def _plain(counts: Counts) -> Counts:
    return {name: counts.get(name) for name in ("documents", "text_bytes", "tokens")}


def _split(counts: Counts) -> Counts:
    return {
        "documents": counts["documents"] - counts["unused_documents"],
        "text_bytes": counts["text_bytes"] - sum(counts[f"unused_{name}_bytes"] for name in UNUSED),
        "tokens": counts["tokens"] - counts["unused_tokens"],
        "left_out": {words: counts[f"unused_{name}"] for name, words in UNUSED.items()},
    }


def _packed(counts: Counts) -> Counts:
    splits = counts["splits"].values()
    diverted = sum(split["diverted"] for split in splits)
    return {"documents": sum(split["documents"] for split in splits) - diverted, "left_out": {DIVERTED: diverted}}


STEPS: tuple[tuple[str, str, Callable[[Counts], Counts]], ...] = (
    ("rows of the source, as chosen", "raw_row_groups", _rows_chosen),
    ("read and used", "raw_row_groups", _used),
    ("kept by deduplication", "lsh_clusters", _kept),
    ("tokenized", "document_tokens", _plain),
    ("in a split", "split_documents", _split),
    ("in token shards", "token_shards", _plain),
    ("packed", "packing_plan", _packed),
)
"""What each row of the funnel is called, whose counts it shows, and how they are read."""


def funnel(assets: Mapping[str, FoundAsset]) -> Iterator[Block]:
    """Documents, text and tokens that each step passed on, what it left out and why; then the same by split."""
    rows: list[dict[str, Any]] = []
    for step, asset, read in STEPS:
        ref = assets[asset].ref
        counts = read(ref.counts) if ref else {}
        rows.append(_row(step, asset, counts, assets[asset].state if ref is None else _listed(counts), rows))
    yield table_of("From rows of the source to packs", rows)
    yield from _by_split(assets["token_shards"], assets["packing_plan"])
    for _, asset, _ in STEPS[2:]:
        if older := inputs_not_shown(assets[asset], assets):
            yield Note(
                text=f"Counts may not follow from each other: {asset} was made from another"
                f" {', '.join(older)} than is shown. Materialize it again."
            )


def _row(step: str, asset: str, counts: Counts, left_out: str, before: list[dict[str, Any]]) -> dict[str, Any]:
    documents, text_bytes = counts.get("documents"), counts.get("text_bytes")
    whole = before[0]["documents"] if before else documents
    return {
        "step": step,
        "asset": asset,
        "documents": documents,
        "of the rows (%)": None if documents is None or not whole else round(100 * documents / whole, 2),
        "text (MB)": None if text_bytes is None else round(text_bytes / 1e6, 2),
        "tokens": counts.get("tokens"),
        "left out here": left_out,
    }


def _listed(counts: Counts) -> str:
    """Reasons and their documents, those of none left out."""
    reasons = counts.get("left_out", {})
    return ", ".join(f"{number:,} {reason}" for reason, number in reasons.items() if number) or "none"


def _by_split(token_shards: FoundAsset, packing_plan: FoundAsset) -> Iterator[Block]:
    if token_shards.ref is None:
        return
    shards, total = token_shards.ref.counts["splits"], token_shards.ref.counts["tokens"]
    packed = packing_plan.ref.counts["splits"] if packing_plan.ref else {}
    rows = [
        {
            "split": name,
            "documents": split["documents"],
            "tokens": split["tokens"],
            "of all tokens (%)": round(100 * split["tokens"] / total, 2) if total else None,
            "shards (files)": split["shards"],
            **_packs(packed.get(name)),
        }
        for name, split in sorted(shards.items(), key=lambda item: -item[1]["tokens"])
    ]
    yield table_of("Tokens and packs of each split", rows)


def _packs(plan: Counts | None) -> dict[str, Any]:
    if plan is None:
        return {}
    numbers = {name: plan[name] for name in ("segments", "packs")}
    return {
        **numbers,
        "filled (%)": round(100 * plan["utilisation"], 2) if plan["packs"] else None,
        "next-token pairs": plan["targets"],
        "steps a pass": plan["steps"],
    }


def inputs_not_shown(found: FoundAsset, assets: Mapping[str, FoundAsset]) -> list[str]:
    """The assets that this one was made from of which other bytes are shown, by name; not those that are not there."""
    if found.ref is None:
        return []
    shown = {name: asset.ref.digest for name, asset in assets.items() if asset.ref is not None}
    return sorted(name for name, digest in found.ref.lineage.items() if shown.get(name, digest) != digest)
