"""What needs attention, for the top of the report: checks that did not pass or count, warnings, what cannot be read.

In: findings, and what the rest of the page could not read. Out: one section, in which each thing takes a row or a line.
Promise: it says "nothing" only where every check passed and all was read; what is one fault is told once.
"""

from collections.abc import Iterator, Mapping, Sequence

from pipeline_assets.findings import NOT_COUNTED, FoundAsset, FoundVerdict, tally
from pipeline_assets.quality_page import Block, Note, Section, table_of
from pipeline_assets.quality_tables import readable
from pipeline_assets.stripes import Stage, number_in_words
from pipeline_assets.tokenizer import fewer_ids
from resources.artifact_store import ArtifactRef
from resources.shapes import expect_fields
from training_io.manifest import MANIFEST_NAME

MAX_UNREAD = 20  # shown, of what could not be read
MEANING_CHARACTERS = 400


def attention(
    stage: Stage, assets: Mapping[str, FoundAsset], verdicts: Sequence[FoundVerdict], unread: Sequence[str]
) -> Section:
    """The section; `unread`: what the others say that could not be read."""
    blocks: list[Block] = [*_did_not_pass(verdicts)]
    blocks += map(_line, _not_counted(assets, verdicts))
    blocks += readable(stage, lambda: _warnings(stage, assets["tokenizer"].ref))
    blocks += map(_line, _first(unread))
    blocks = blocks or [_line("Nothing: every check passed.")]
    return Section(heading="What needs attention", anchor="attention", blocks=blocks)


def _line(text: str) -> Note:
    return Note(text=text)


def _did_not_pass(verdicts: Sequence[FoundVerdict]) -> Iterator[Block]:
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
        if verdict.outcome == outcome and outcome not in ("passed", NOT_COUNTED)
    ]
    if rows:
        yield table_of("Checks that did not pass", rows, max_characters=MEANING_CHARACTERS)


def _not_counted(assets: Mapping[str, FoundAsset], verdicts: Sequence[FoundVerdict]) -> Iterator[str]:
    """A line for all checks of one asset that say nothing for one reason, and for an asset that is not there."""
    names: dict[tuple[str, str], list[str]] = {}
    for verdict in verdicts:
        if verdict.outcome == NOT_COUNTED:
            names.setdefault((verdict.check.asset, verdict.reason), []).append(verdict.check.name)
    for (asset, reason), checks in names.items():
        number = number_in_words(len(checks), "check")
        if assets[asset].ref is None:
            yield f"{asset}: {assets[asset].state}; {number} not counted."
        elif len(checks) == sum(verdict.check.asset == asset for verdict in verdicts):
            yield f"{asset}: {'all ' if len(checks) > 1 else ''}{number} not counted. {reason}"
        else:
            yield f"{asset}: {number} not counted ({', '.join(checks)}). {reason}"
    checked = {verdict.check.asset for verdict in verdicts}
    yield from (
        f"{name}: {found.state}." for name, found in assets.items() if found.ref is None and name not in checked
    )


def _warnings(stage: Stage, tokenizer: ArtifactRef | None) -> Iterator[Block]:
    """What building an asset warned of, as far as its manifest tells it."""
    if tokenizer is None:
        return
    counts = expect_fields(tokenizer.counts, {"vocab_size": int}, f"{MANIFEST_NAME} of tokenizer, counts")
    if warning := fewer_ids(stage.recipe, counts):
        yield _line(f"tokenizer: {warning}.")


def _first(unread: Sequence[str]) -> Iterator[str]:
    yield from unread[:MAX_UNREAD]
    if len(unread) > MAX_UNREAD:
        yield f"{MAX_UNREAD:,} of {len(unread):,} things that could not be read are shown; the rest is below."
