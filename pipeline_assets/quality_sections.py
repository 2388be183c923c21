"""What the report shows, section by section: what needs attention, suspicious examples, checks, assets.

In: findings, and the stage that opens the artifacts that are there. Out: a page of plain values. Promise: nothing here
decides anything; an artifact that cannot be read in full is said to be so in its place, and the rest is drawn.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any

from pipeline_assets.findings import FoundAsset, FoundVerdict, tally
from pipeline_assets.flow import STAGES
from pipeline_assets.quality_attention import attention
from pipeline_assets.quality_funnel import funnel, inputs_not_shown
from pipeline_assets.quality_page import Block, CheckEntry, Note, Page, Section, Table, in_words, table_of, unread_in
from pipeline_assets.quality_tables import asset_blocks, readable, require_sealed
from pipeline_assets.run_tags import SHOWN_DIGITS
from pipeline_assets.stripes import Stage
from pipeline_assets.suspicious import (
    cut_examples,
    drawn_packs,
    largest_clusters,
    longest_documents,
    near_pairs,
    shortest_documents,
)
from pipeline_assets.verdict_records import VerdictRecord
from resources.artifact_store import ArtifactRef
from training_io.manifest import QUARANTINE_NAME

Assets = Mapping[str, FoundAsset]

MAX_REASONS = 10  # shown, of those for which one asset is held back


def page_of(stage: Stage, assets: Assets, verdicts: Sequence[FoundVerdict], recipe: str, revision: str) -> Page:
    """The whole report; `recipe`: its digest, `revision`: the source's."""
    sections = [
        Section(heading="How much is left after each step", anchor="funnel", blocks=list(funnel(assets))),
        Section(heading="What is there", anchor="assets", blocks=[_states(assets)]),
        *_suspicious(stage, assets),
        *_checks_by_stage(verdicts),
        *(_asset_section(stage, found) for found in assets.values() if found.ref is not None),
    ]
    return Page(
        title=f"Quality report of recipe {stage.recipe.name}",
        summary=[
            f"Recipe {recipe[:SHOWN_DIGITS]}, source revision {revision[:SHOWN_DIGITS]}.",
            *_summary(assets, verdicts),
        ],
        sections=[attention(stage, assets, verdicts, unread_in(sections)), *sections],
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
    refs = [ref for name in needed if (ref := assets[name].ref) is not None]
    more = [split] if "packing_plan" in needed else []

    def drawn() -> Iterator[Block]:
        for ref in refs:
            folder, manifest = stage.open(ref)
            require_sealed(folder, manifest, [name for name in manifest.files if name.endswith(".json")])
        yield from draw(stage, *refs, *more)

    return readable(stage, drawn)


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
        examples=_examples(f"{caption}: {check.name}", record) if record and record.examples else None,
    )


def _examples(caption: str, record: VerdictRecord) -> Table:
    return table_of(caption, record.examples, total=max(record.num_violations, len(record.examples)))


def _asset_section(stage: Stage, found: FoundAsset) -> Section:
    ref = found.ref
    assert ref is not None
    blocks = [*_held_back(found, ref), *asset_blocks(stage, ref)]
    return Section(heading=ref.asset, anchor=f"asset-{ref.asset}", blocks=blocks)


def _held_back(found: FoundAsset, ref: ArtifactRef) -> Iterator[Block]:
    """The first reasons for which an asset is held back."""
    for name, said in islice(found.held_back_by.items(), MAX_REASONS):
        yield Note(text=f"Held back by {name}: {said}")
    if (number := len(found.held_back_by)) > MAX_REASONS:
        place = f"CORPUSMILL_HOME/{ref.asset}/{ref.unit}/{ref.identity}/{QUARANTINE_NAME}"
        yield Note(text=f"{MAX_REASONS:,} of {number:,} reasons are shown; the rest is in {place}.")
