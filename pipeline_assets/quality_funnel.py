"""How much of the source each step passed on and left out, and what each split holds, for the report's first table.

In: what was found of each asset. Out: two tables of the counts in the assets' own manifests, and a note where they do
not follow from each other. Promise: nothing is counted here; a step that is not there, or of which the manifest counts
something else than this version does, is a row that says so.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from pipeline_assets.findings import FoundAsset
from pipeline_assets.quality_page import Block, Note, table_of
from pipeline_assets.shown_columns import OF_A_SPLIT, TABLES, TOKENS
from pipeline_assets.verdict_records import clipped
from resources.shapes import REMEDY, expect_fields
from training_io.errors import FormatError
from training_io.manifest import MANIFEST_NAME

Counts = Mapping[str, Any]
Reader = Callable[[Counts, str], Counts]
"""From what a manifest counts, and where that is, to what is shown; FormatError for other counts than are expected."""

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
TOO_MANY = 2**63  # of anything
NAME_CHARACTERS = 60  # of what a message repeats


def _rows_chosen(counts: Counts, where: str) -> Counts:
    found = _numbers(counts, where, ["rows_read"], ["rows_excluded"])
    return {"documents": sum(found.values())}


def _used(counts: Counts, where: str) -> Counts:
    found = _numbers(counts, where, ["rows_used", "text_bytes"], NOT_USED)
    left_out = {words: found.get(name, 0) for name, words in NOT_USED.items()}
    return {"documents": found["rows_used"], "text_bytes": found["text_bytes"], "left_out": left_out}


def _kept(counts: Counts, where: str) -> Counts:
    found = _numbers(counts, where, ["kept", *REMOVED])
    return {"documents": found["kept"], "left_out": {words: found[name] for name, words in REMOVED.items()}}


def _plain(counts: Counts, where: str) -> Counts:
    return _numbers(counts, where, ["documents", "tokens"], ["text_bytes"])


def _split(counts: Counts, where: str) -> Counts:
    unused = {name: f"unused_{name}" for name in ("documents", "tokens", *UNUSED)}
    unused_bytes = [f"unused_{name}_bytes" for name in UNUSED]
    found = _numbers(counts, where, ["documents", "text_bytes", "tokens", *unused.values(), *unused_bytes])
    return {
        "documents": found["documents"] - found[unused["documents"]],
        "text_bytes": found["text_bytes"] - sum(found[name] for name in unused_bytes),
        "tokens": found["tokens"] - found[unused["tokens"]],
        "left_out": {words: found[unused[name]] for name, words in UNUSED.items()},
    }


def _packed(counts: Counts, where: str) -> Counts:
    splits = _of_splits(counts, where, ["documents", "diverted"]).values()
    diverted = sum(split["diverted"] for split in splits)
    return {"documents": sum(split["documents"] for split in splits) - diverted, "left_out": {DIVERTED: diverted}}


def _numbers(
    counts: Any, where: str, needed: Iterable[str], others: Iterable[str] = (), kind: type = int
) -> dict[str, Any]:
    """Counts by name: those needed, and those of `others` that are there. FormatError for what can be no count."""
    named = expect_fields(counts, {}, where)
    kinds = dict.fromkeys([*needed, *(name for name in others if name in named)], kind)
    expect_fields(counts, kinds, where)
    for name in kinds:
        if not 0 <= named[name] < TOO_MANY:
            found = clipped(str(named[name]), NAME_CHARACTERS)
            raise FormatError(f"{where}, {name}: expected 0 or more, below {TOO_MANY:,}, found {found}. {REMEDY}")
    return {name: named[name] for name in kinds}


def _of_splits(counts: Counts, where: str, needed: Iterable[str], kind: type = int) -> dict[str, dict[str, Any]]:
    """The counts needed of each split."""
    splits = expect_fields(counts, {"splits": dict}, where)["splits"]
    return {
        name: _numbers(split, f"{where}, splits, {clipped(name, NAME_CHARACTERS)}", needed, kind=kind)
        for name, split in splits.items()
    }


STEPS: tuple[tuple[str, str, Reader], ...] = (
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
    "tokens": TOKENS.meaning,
    "left out here": "Documents that the step before passed on and this one did not, by reason",
}
OF_SPLITS: Mapping[str, str] = {
    "documents": OF_A_SPLIT["documents"].meaning,
    "tokens": TOKENS.meaning,
    "of all tokens (%)": "Those over the tokens of all splits",
    "shards (files)": TABLES["splits"]["shards"].meaning,
    "segments": "Parts of documents that are trained on their own",
    "packs": "Rows of whole segments, up to the capacity",
    "filled (%)": TABLES["splits"]["utilisation"].meaning,
    "next-token pairs": OF_A_SPLIT["targets"].meaning,
    "steps a pass": OF_A_SPLIT["steps"].meaning,
}
"""What the columns of the two tables mean."""


def funnel(assets: Mapping[str, FoundAsset]) -> Iterator[Block]:
    """Documents, text and tokens that each step passed on, what it left out and why; then the same by split."""
    rows: list[dict[str, Any]] = []
    unread: dict[str, str] = {}
    for step, asset, read in STEPS:
        rows.append(_row(step, assets[asset], _counts_of(assets[asset], read, unread), rows))
    yield table_of("From rows of the source to packs", rows, meanings=MEANINGS)
    yield from _by_split(assets["token_shards"], assets["packing_plan"], unread)
    yield from (Note(text=clipped(f"Not shown: {said}"), is_unread=True) for said in unread.values())
    for _, asset, _ in STEPS[2:]:
        if older := inputs_not_shown(assets[asset], assets):
            yield Note(
                text=f"Counts may not follow from each other: {asset} was made from another"
                f" {', '.join(older)} than is shown. Materialize it again."
            )


def _counts_of(found: FoundAsset, read: Reader, unread: dict[str, str]) -> Counts | None:
    """What the manifest of an asset counts, as `read` has it; None where it cannot be read, as `unread` says then."""
    if found.ref is None:
        return None
    try:
        return read(found.ref.counts, f"{MANIFEST_NAME} of {found.asset}, counts")
    except FormatError as error:
        unread.setdefault(found.asset, str(error))
        return None


def _row(step: str, found: FoundAsset, counts: Counts | None, before: list[dict[str, Any]]) -> dict[str, Any]:
    known = counts or {}
    documents, text_bytes = known.get("documents"), known.get("text_bytes")
    whole = before[0]["documents"] if before else documents
    return {
        "step": step,
        "asset": found.asset,
        "documents": documents,
        "of the rows (%)": None if documents is None or not whole else round(100 * documents / whole, 2),
        "text (MB)": None if text_bytes is None else round(text_bytes / 1e6, 2),
        "tokens": known.get("tokens"),
        "left out here": _left_out(found, counts),
    }


def _left_out(found: FoundAsset, counts: Counts | None) -> str:
    """Reasons and their documents, those of none left out; of an asset that is not there, its state."""
    if found.ref is None or counts is None:
        return found.state if found.ref is None else "not known"
    reasons = counts.get("left_out", {})
    return ", ".join(f"{number:,} {reason}" for reason, number in reasons.items() if number) or "none"


def _by_split(token_shards: FoundAsset, packing_plan: FoundAsset, unread: dict[str, str]) -> Iterator[Block]:
    shards = _counts_of(token_shards, _shards_by_split, unread)
    packs = _counts_of(packing_plan, _packs_by_split, unread) or {}
    if shards is not None:
        rows = [{"split": name, **row, **packs.get(name, {})} for name, row in shards.items()]
        yield table_of("Tokens and packs of each split", rows, meanings=OF_SPLITS)


def _shards_by_split(counts: Counts, where: str) -> Counts:
    """Splits by tokens, the most first."""
    total = _numbers(counts, where, ["documents", "tokens"])["tokens"]
    splits = _of_splits(counts, where, ["documents", "tokens", "shards"])
    return {
        name: {
            "documents": split["documents"],
            "tokens": split["tokens"],
            "of all tokens (%)": round(100 * split["tokens"] / total, 2) if total else None,
            "shards (files)": split["shards"],
        }
        for name, split in sorted(splits.items(), key=lambda item: -item[1]["tokens"])
    }


def _packs_by_split(counts: Counts, where: str) -> Counts:
    shares = _of_splits(counts, where, ["utilisation"], float)
    return {
        name: {
            "segments": split["segments"],
            "packs": split["packs"],
            "filled (%)": round(100 * shares[name]["utilisation"], 2) if split["packs"] else None,
            "next-token pairs": split["targets"],
            "steps a pass": split["steps"],
        }
        for name, split in _of_splits(counts, where, ["segments", "packs", "targets", "steps"]).items()
    }


def inputs_not_shown(found: FoundAsset, assets: Mapping[str, FoundAsset]) -> list[str]:
    """The assets that this one was made from of which other bytes are shown, by name; not those that are not there."""
    if found.ref is None:
        return []
    shown = {name: asset.ref.digest for name, asset in assets.items() if asset.ref is not None}
    return sorted(name for name, digest in found.ref.lineage.items() if shown.get(name, digest) != digest)
