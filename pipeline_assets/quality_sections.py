"""What the report shows, section by section: what needs attention, suspicious examples, checks, assets.

In: findings, and the stage that opens the artifacts that are there. Out: a page of plain values. Promise: nothing here
decides anything; an artifact that cannot be read in full is said to be so in its place, and the rest is drawn.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from pipeline_assets.duplicates import BY_PAIR_NAME
from pipeline_assets.findings import FoundAsset, FoundVerdict, tally, without_home
from pipeline_assets.floors import FLOORS_NAME
from pipeline_assets.layouts import TABLES_NAME
from pipeline_assets.ledger import LEDGER_NAME
from pipeline_assets.quality_funnel import funnel, inputs_not_shown
from pipeline_assets.quality_page import MAX_ROWS, Block, CheckEntry, Note, Page, Picture, Section, in_words, table_of
from pipeline_assets.recipe import STAGES
from pipeline_assets.run_tags import SHOWN_DIGITS
from pipeline_assets.scurve import BINS_NAME, curve_row
from pipeline_assets.stripes import Stage
from pipeline_assets.suspicious import (
    cut_examples,
    drawn_packs,
    largest_clusters,
    longest_documents,
    near_pairs,
    shortest_documents,
)
from pipeline_assets.tokenizer_report import REPORT_NAME
from pipeline_assets.verdict_records import clipped
from resources.artifact_store import ArtifactRef
from resources.tables import read_first_rows, read_json
from training_io.errors import CorpusmillError

Assets = Mapping[str, FoundAsset]

TABLES: Mapping[str, tuple[str, ...]] = {
    "raw_row_groups": ("sampled_files.parquet", "filter_effects.parquet", "sampled_thresholds.parquet"),
    "minhash_signatures": (BINS_NAME,),
    "lsh_clusters": (BY_PAIR_NAME,),
    "split_documents": (FLOORS_NAME,),
    "tokenizer_report": (REPORT_NAME,),
    "packing_stats": (TABLES_NAME,),
    "mixture_ledger": (LEDGER_NAME,),
}
"""Files of each asset, and of the plans that it lists, that are tables for people."""
NOT_SHOWN = {"all_layouts"}  # it repeats others, for machines
NAMING = {"row_length", "ranks"}  # numbers that say what a row is of
MEANINGS: Mapping[str, str] = {
    "balance": "how much more than the mean the fullest rank has, as a share",
}
"""What a table of a manifest means, where its name and columns leave that open."""


def page_of(stage: Stage, assets: Assets, verdicts: Sequence[FoundVerdict], recipe: str, revision: str) -> Page:
    """The whole report; `recipe`: its digest, `revision`: the source's."""
    return Page(
        title=f"Quality report of recipe {stage.recipe.name}",
        summary=[
            f"Recipe {recipe[:SHOWN_DIGITS]}, source revision {revision[:SHOWN_DIGITS]}.",
            *_summary(assets, verdicts),
        ],
        sections=[
            _attention(verdicts),
            Section(heading="How much is left after each step", anchor="funnel", blocks=list(funnel(assets))),
            Section(heading="What is there", anchor="assets", blocks=[_states(assets)]),
            *_suspicious(stage, assets),
            *_checks_by_stage(verdicts),
            *(_asset_section(stage, found) for found in assets.values() if found.ref is not None),
        ],
    )


def _summary(assets: Assets, verdicts: Sequence[FoundVerdict]) -> Iterator[str]:
    counted = ", ".join(f"{number:,} {outcome}" for outcome, number in tally(verdicts).items())
    yield f"{len(verdicts):,} checks: {counted}."
    held_back = [found.asset for found in assets.values() if found.held_back_by]
    missing = [found.asset for found in assets.values() if found.ref is None]
    if held_back:
        yield f"Held back by checks, so that nothing is built from it: {', '.join(held_back)}."
    if missing:
        yield f"Not there: {', '.join(missing)}."
    yield (
        "A check recounts its law from the stored bytes by a second route; shown is what each said last of the bytes"
        " that are there. The page itself is judged by report_is_self_contained."
    )


def _attention(verdicts: Sequence[FoundVerdict]) -> Section:
    rows = [
        {
            "outcome": outcome,
            "check": verdict.check.name,
            "asset": verdict.check.asset,
            "found": verdict.found,
            "meaning_and_what_to_do": verdict.check.description,
        }
        for outcome in tally(verdicts)
        for verdict in verdicts
        if verdict.outcome == outcome != "passed"
    ]
    blocks = (
        [table_of("Checks that did not pass", rows, max_characters=400)]
        if rows
        else [Note(text="Nothing: every check passed.")]
    )
    return Section(heading="What needs attention", anchor="attention", blocks=blocks)


def _states(assets: Assets) -> Block:
    return table_of("Every asset, in the order of the flow", [_state_row(found, assets) for found in assets.values()])


def _state_row(found: FoundAsset, assets: Assets) -> dict[str, Any]:
    row = {"stage": STAGES[found.asset], "asset": found.asset, "state": found.state}
    if found.ref is None:
        return row
    older = inputs_not_shown(found, assets)
    return {
        **row,
        "documents": found.ref.counts.get("documents"),
        "tokens": found.ref.counts.get("tokens"),
        "content": found.ref.digest[:SHOWN_DIGITS],
        **({"made_from_others_than_shown": ", ".join(older)} if older else {}),
    }


def _suspicious(stage: Stage, assets: Assets) -> Iterator[Section]:
    """Examples from the ends of the distributions, and one pack, each from the assets that it is drawn from."""
    split = "train"
    shown: list[tuple[str, str, list[tuple[Callable[..., Iterator[Block]], list[str]]]]] = [
        (
            "Suspicious duplicates",
            "duplicates",
            [(largest_clusters, ["lsh_clusters"]), (near_pairs, ["lsh_clusters"])],
        ),
        (
            "Shortest and longest documents",
            "lengths",
            [(shortest_documents, ["split_documents"]), (longest_documents, ["split_documents"])],
        ),
        ("Cut documents", "cuts", [(cut_examples, ["packing_plan", "tokenizer"])]),
        ("A pack, and who attends to whom in it", "pack", [(drawn_packs, ["packing_plan", "tokenizer"])]),
    ]
    for heading, anchor, parts in shown:
        blocks = [_drawn(stage, assets, draw, needed, split) for draw, needed in parts]
        yield Section(heading=heading, anchor=anchor, blocks=list(chain.from_iterable(blocks)))


def _drawn(
    stage: Stage, assets: Assets, draw: Callable[..., Iterator[Block]], needed: Sequence[str], split: str
) -> list[Block]:
    missing = [assets[name] for name in needed if assets[name].ref is None]
    if missing:
        return [Note(text=f"Not drawn: {missing[0].asset} is {missing[0].state}.")]
    more = [split] if "packing_plan" in needed else []
    return _readable(stage, lambda: draw(stage, *(assets[name].ref for name in needed), *more))


def _readable(stage: Stage, draw: Callable[[], Iterator[Block]]) -> list[Block]:
    """What is drawn; where an artifact turns out to be damaged, what its reader says of it."""
    try:
        return list(draw())
    except CorpusmillError as error:
        return [Note(text=clipped(f"Not drawn: {without_home(stage, str(error))}"), is_unread=True)]


def _checks_by_stage(verdicts: Sequence[FoundVerdict]) -> Iterator[Section]:
    for name in dict.fromkeys(STAGES.values()):
        blocks = [_entry(verdict) for verdict in verdicts if STAGES[verdict.check.asset] == name]
        yield Section(heading=f"Checks of {name}", anchor=f"checks-{name}", blocks=blocks)


def _entry(verdict: FoundVerdict) -> CheckEntry:
    check, record = verdict.check, verdict.record
    caption = "Counter-examples" if verdict.outcome in ("failed", "warned") else "What was looked at"
    return CheckEntry(
        name=check.name,
        asset=check.asset,
        outcome=verdict.outcome,
        severity="holds its asset back when it fails" if check.is_blocking else "only warns",
        expected=record.expected if record else "",
        found=verdict.found,
        description=check.description,
        numbers={in_words(name): number for name, number in record.numbers.items()} if record else {},
        examples=table_of(f"{caption}: {check.name}", record.examples) if record and record.examples else None,
    )


def _asset_section(stage: Stage, found: FoundAsset) -> Section:
    ref = found.ref
    assert ref is not None
    blocks: list[Block] = [Note(text=f"Held back by {name}: {said}") for name, said in found.held_back_by.items()]
    blocks += _readable(stage, lambda: _pictures(stage, ref))
    blocks += _numbers(ref.asset, ref.counts)
    blocks += _readable(stage, lambda: _tables(stage, ref))
    return Section(heading=ref.asset, anchor=f"asset-{ref.asset}", blocks=blocks)


def _numbers(asset: str, counts: Mapping[str, Any]) -> Iterator[Block]:
    """What the manifest counts: plain values in one table, and a table for each list or mapping of rows."""
    plain = {name: value for name, value in counts.items() if not isinstance(value, dict | list)}
    yield table_of(f"Counts of {asset}", [{"count": in_words(name), "value": plain[name]} for name in plain])
    for name, value in counts.items():
        if (rows := _rows_of(value)) is not None:
            meaning = f", {MEANINGS[name]}" if name in MEANINGS else ""
            yield table_of(f"{asset}: {in_words(name)}{meaning}", rows)


def _rows_of(value: Any) -> list[Mapping[str, Any]] | None:
    """A list of mappings, or a mapping of them, as rows; None for what is no table."""
    if isinstance(value, dict) and value and all(isinstance(row, dict) for row in value.values()):
        return [{"name": name, **row} for name, row in value.items()]
    if isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
        return [_names_first(row) for row in value]
    return None


def _names_first(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row of a JSON file, whose keys are sorted, with what names it in front."""
    return dict(sorted(row.items(), key=lambda item: not isinstance(item[1], str) and item[0] not in NAMING))


def _pictures(stage: Stage, ref: ArtifactRef) -> Iterator[Block]:
    for path in _files_of(stage, ref):
        if path.suffix == ".png":
            yield Picture(png=path.read_bytes(), alternative=f"{ref.asset}: {in_words(path.stem)}")


def _tables(stage: Stage, ref: ArtifactRef) -> Iterator[Block]:
    for path in _files_of(stage, ref):
        if path.name not in TABLES.get(ref.asset, ()):
            continue
        if path.suffix == ".parquet":
            tables = {path.stem: read_first_rows(path, MAX_ROWS).to_pylist()}
        elif path.name == BINS_NAME:
            tables = {"s-curve": [curve_row(one) for one in read_json(path)]}
        else:
            tables = {name: _rows_of(rows) or [] for name, rows in read_json(path).items() if name not in NOT_SHOWN}
        for name, rows in tables.items():
            yield table_of(f"{ref.asset}: {in_words(name)}", rows)


def _files_of(stage: Stage, ref: ArtifactRef) -> Iterator[Path]:
    """The files at the top of an artifact's folder and of the plans that it lists, by name."""
    folder, manifest = stage.open(ref)
    listed = manifest.inputs.get("plans", ())
    for place in (folder, *(stage.store.root / ref.asset / plan["unit"] / plan["identity"] for plan in listed)):
        yield from sorted(path for path in place.iterdir() if path.is_file())
