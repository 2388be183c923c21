"""How much of the source each step passed on and left out, and what each split holds, for the report's first table.

In: what was found of each asset. Out: two tables of the counts in the assets' own manifests, and a note where they do
not follow from each other. Promise: nothing is counted here; a step that is not there is a row that says so.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pipeline_assets.findings import FoundAsset
from pipeline_assets.quality_page import Block, Note, table_of
from training_io.errors import FormatError
from training_io.manifest import MANIFEST_NAME

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
    return {"documents": counts["documents"], "text_bytes": counts.get("text_bytes"), "tokens": counts["tokens"]}


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


MEANINGS: Mapping[str, str] = {
    "documents": "Documents that the step passed on; of the source, rows",
    "of the rows (%)": "Those over the rows of the source",
    "text (MB)": "Million UTF-8 bytes of their texts, where the step knows them",
    "tokens": "Their tokens, one end-of-document token each included",
    "left out here": "Documents that the step before passed on and this one did not, by reason",
}
OF_SPLITS: Mapping[str, str] = {
    "documents": "Documents in the split",
    "tokens": "Their tokens, one end-of-document token each included",
    "of all tokens (%)": "Those over the tokens of all splits",
    "shards (files)": "Token files of the split",
    "segments": "Parts of documents that are trained on their own",
    "packs": "Rows of whole segments, up to the capacity",
    "filled (%)": "Room of the packs that tokens fill",
    "next-token pairs": "Tokens with a loss when each pack is read once",
    "steps a pass": "Training steps that read what the plan schedules once",
}
"""What the columns of the two tables mean."""


def funnel(assets: Mapping[str, FoundAsset]) -> Iterator[Block]:
    """Documents, text and tokens that each step passed on, what it left out and why; then the same by split."""
    rows: list[dict[str, Any]] = []
    unread: dict[str, None] = {}
    for step, asset, read in STEPS:
        counts, left_out = {}, assets[asset].state
        try:
            if assets[asset].ref is not None:
                counts = _counts_of(assets[asset], read)
                left_out = _listed(counts)
        except FormatError as error:
            left_out = "not known"
            unread[str(error)] = None
        rows.append(_row(step, asset, counts, left_out, rows))
    yield table_of("From rows of the source to packs", rows, meanings=MEANINGS)
    try:
        yield from _by_split(assets["token_shards"], assets["packing_plan"])
    except FormatError as error:
        unread[str(error)] = None
    yield from (Note(text=f"Not shown: {said}", is_unread=True) for said in unread)
    for _, asset, _ in STEPS[2:]:
        if older := inputs_not_shown(assets[asset], assets):
            yield Note(
                text=f"Counts may not follow from each other: {asset} was made from another"
                f" {', '.join(older)} than is shown. Materialize it again."
            )


def _counts_of(found: FoundAsset, read: Callable[[Counts], Counts]) -> Counts:
    """What the manifest of an asset that is there counts, as `read` has it; FormatError for other counts."""
    assert found.ref is not None
    try:
        counts = read(found.ref.counts)
        wrong = [name for name, one in counts.items() if not isinstance(one, int | dict | None)]
        wrong += [name for name, one in counts.get("left_out", {}).items() if not isinstance(one, int)]
        if wrong:
            raise TypeError(f"no count of {wrong[0]}")
    except (KeyError, TypeError, AttributeError) as error:
        raise FormatError(
            f"{MANIFEST_NAME} of {found.asset}, counts: expected those that this version writes, found {error!r}."
            f" It is damaged or of another version; materialize {found.asset} again."
        ) from error
    return counts


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
    shards = _counts_of(token_shards, _shards_by_split)
    packs = {} if packing_plan.ref is None else _counts_of(packing_plan, _packs_by_split)
    rows = [{"split": name, **row, **packs.get(name, {})} for name, row in shards.items()]
    yield table_of("Tokens and packs of each split", rows, meanings=OF_SPLITS)


def _shards_by_split(counts: Counts) -> Counts:
    """Splits by tokens, the most first."""
    total = counts["tokens"]
    return {
        name: {
            "documents": split["documents"],
            "tokens": split["tokens"],
            "of all tokens (%)": round(100 * split["tokens"] / total, 2) if total else None,
            "shards (files)": split["shards"],
        }
        for name, split in sorted(counts["splits"].items(), key=lambda item: -item[1]["tokens"])
    }


def _packs_by_split(counts: Counts) -> Counts:
    return {
        name: {
            **{column: split[column] for column in ("segments", "packs")},
            "filled (%)": round(100 * split["utilisation"], 2) if split["packs"] else None,
            "next-token pairs": split["targets"],
            "steps a pass": split["steps"],
        }
        for name, split in counts["splits"].items()
    }


def inputs_not_shown(found: FoundAsset, assets: Mapping[str, FoundAsset]) -> list[str]:
    """The assets that this one was made from of which other bytes are shown, by name; not those that are not there."""
    if found.ref is None:
        return []
    shown = {name: asset.ref.digest for name, asset in assets.items() if asset.ref is not None}
    return sorted(name for name, digest in found.ref.lineage.items() if shown.get(name, digest) != digest)
