"""What a look-up answers: matches with their evidence, as JSON for programs and as lines for people.

Promise: no text of the corpus reaches a terminal raw; what could move a cursor or hide words is spelled out.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from pipeline_assets.transforms.lookup import excerpt, printable

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
    from_the_web = [excerpt(part) for part in (match.url, match.dump) if part]
    where = [match.pool, *from_the_web, f"{match.file} row group {match.row_group:,} row {match.row:,}"]
    yield "  " + "  ".join(printable(part) for part in where)
    yield f"  {printable(match.excerpt)}"


def _decision(match: Match) -> str:
    if match.kept:
        return "kept"
    if match.excluded_by:
        return f"removed: its cluster matches the reference sets that exclude, {', '.join(match.excluded_by)}"
    return f"removed: {match.reason}, kept is {match.kept_doc_id}"
