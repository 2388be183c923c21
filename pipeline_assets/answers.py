"""What a look-up answers: matches with their evidence, as JSON for programs and as lines for people.

In: what was found, and what was decided of it. Promise: no text of the corpus reaches a terminal raw; what could move a
cursor or hide words is spelled out.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa

from pipeline_assets.recipe import Recipe
from pipeline_assets.transforms.lookup import beginning, printable

LIKELY = 0.8  # the Jaccard similarity at which an answer states its chance of finding


@dataclass(frozen=True, kw_only=True)
class Match:
    """A row of the corpus that holds the text, or a kept row that shares a band with it."""

    is_identical: bool
    jaccard: float  # exact, of the two shingle sets; 0 where there is no word
    estimated_jaccard: float  # share of equal signature values
    shared_bands: int
    doc_id: str
    kept: bool
    reason: str
    kept_doc_id: str | None  # the document that is used in its place; none where reference sets exclude it
    excluded_by: list[str]
    pool: str
    url: str | None
    dump: str | None
    file: str
    row_group: int
    row: int
    excerpt: str


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What was found of one text, best first."""

    doc_id: str
    is_wordless: bool
    num_documents: int  # rows of the whole corpus
    chance: float  # of finding a text whose similarity is LIKELY
    note: str  # why this is not the newest corpus; empty where it is
    matches: tuple[Match, ...]

    @property
    def is_identical(self) -> bool:
        """Whether the very text is in the corpus."""
        return any(match.is_identical for match in self.matches)

    def to_json(self, limit: int) -> str:
        """As a JSON object with at most so many of the matches; all but printable ASCII is escaped."""
        best = [asdict(match) for match in self.matches[:limit]]
        values = {**vars(self), "is_identical": self.is_identical, "num_matches": len(self.matches), "matches": best}
        return json.dumps(values, indent=1)


def decided(decisions: pa.Table, recipe: Recipe) -> dict[str, Any]:
    """Each row's decision, as columns of matches: what reference sets exclude has no document in its place."""
    excluding = {reference.name for reference in recipe.references if reference.action == "exclude"}
    matching = [names.split(",") for names in decisions.column("references").to_pylist()]
    excluded_by = [[name for name in names if name in excluding] for names in matching]
    kept_doc_ids = [doc_id.hex() for doc_id in decisions.column("kept_doc_id").to_pylist()]
    return {
        "kept": decisions.column("kept"),
        "reason": decisions.column("reason"),
        "kept_doc_id": [None if sets else doc_id for sets, doc_id in zip(excluded_by, kept_doc_ids, strict=True)],
        "excluded_by": excluded_by,
    }


def answer_lines(answer: Answer, limit: int) -> Iterator[str]:
    """An answer for a person, safe for a terminal whatever the corpus holds."""
    if not answer.matches:
        yield f"Not found among {answer.num_documents:,} documents: {answer.doc_id}"
        yield "Whole documents are compared: a passage of a longer document is not found."
        if answer.is_wordless:
            yield "It has no words, so only an identical text could be found."
        else:
            yield f"A near text, of Jaccard similarity {LIKELY}, would be found with a chance of {answer.chance:.0%}."
        return
    what = "The very text is in the corpus" if answer.is_identical else "Not this text but near ones are in the corpus"
    yield f"{what}: {len(answer.matches):,} found among {answer.num_documents:,} documents, best first."
    for match in answer.matches[:limit]:
        yield from ("", *_match_lines(match))
    if len(answer.matches) > limit:
        yield f"\n{len(answer.matches) - limit:,} more; raise --limit to see them."


def _match_lines(match: Match) -> Iterator[str]:
    likeness = "identical" if match.is_identical else f"Jaccard {match.jaccard:.3f}"
    evidence = f"estimated {match.estimated_jaccard:.3f}, {match.shared_bands:,} bands shared"
    yield f"{likeness} ({evidence})  {match.doc_id}"
    yield f"  {_decision(match)}"
    from_the_web = [beginning(part) for part in (match.url, match.dump) if part]
    where = [match.pool, *from_the_web, f"{match.file} row group {match.row_group:,} row {match.row:,}"]
    yield "  " + "  ".join(printable(part) for part in where)
    yield f"  {printable(match.excerpt)}"


def _decision(match: Match) -> str:
    if match.kept:
        return "kept"
    if match.excluded_by:
        return f"removed: its cluster matches the reference sets that exclude, {', '.join(match.excluded_by)}"
    return f"removed: {match.reason}, kept is {match.kept_doc_id}"
