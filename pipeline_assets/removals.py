"""Removals: which rows the last clusters do not use, why, and what is used in their place.

    decisions, unit after unit ─▶ how many are removed ─▶ the first of them: source coordinate, evidence, the kept one

In: what is looked into, and which reason or pool alone is asked for. Out: a count, and removed rows in the order of
reading. Promise: each file that a line rests on is held once against its SHA-256 before; memory holds a unit's
decisions and BATCH_ROWS removed rows. Cost: hashing all decisions, the evidence, and each unit of which a row is told;
the reasons of all rows are read, then a batch's rows, their evidence, and doc_ids unit after unit until the batch's
kept ones are met.
"""

import itertools
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pipeline_assets.answers import decided
from pipeline_assets.duplicates import EVIDENCE_NAME
from pipeline_assets.lookup import Lookup
from pipeline_assets.schemas import PLACE
from pipeline_assets.transforms.clusters import EXACT_DUPLICATE, NEAR_DUPLICATE, REASONS
from pipeline_assets.transforms.lookup import printable, rows_of_doc_ids
from pipeline_assets.transforms.rows import doc_id_matrix
from resources.tables import read_rows
from training_io.errors import FormatError, SourceError

I64 = npt.NDArray[np.int64]
Place = tuple[str, str, int, int]  # pool, file, row group, row

BATCH_ROWS = 50_000
COPIES = (REASONS[EXACT_DUPLICATE], REASONS[NEAR_DUPLICATE])  # what has evidence


@dataclass(frozen=True, kw_only=True)
class Removal:
    """A row that is not used; without a kept document where reference sets exclude it, and then without evidence."""

    pool: str
    file: str
    row_group: int
    row: int
    reason: str
    doc_id: str
    excluded_by: list[str]
    kept_doc_id: str | None
    kept_pool: str | None
    kept_file: str | None
    kept_row_group: int | None
    kept_row: int | None
    jaccard: float | None  # exact, of the two shingle sets
    shared_bands: int | None

    def to_json(self) -> str:
        """As a JSON object on one line; all but printable ASCII is escaped."""
        return json.dumps(asdict(self))


@dataclass(frozen=True, kw_only=True)
class Removals:
    """The removed rows of a corpus that were asked for: how many each unit has, and how many copies of any kind."""

    lookup: Lookup
    reasons: tuple[str, ...]
    wanted: tuple[int, ...]
    copies: tuple[int, ...]

    @property
    def number(self) -> int:
        """How many rows were asked for."""
        return sum(self.wanted)

    def first(self, limit: int) -> Iterator[list[Removal]]:
        """So many of them, a batch at a time."""
        parts: list[_Part] = []
        for part in _parts(self, limit):
            if sum(len(one.rows) for one in (*parts, part)) > BATCH_ROWS:
                yield _told(self.lookup, parts)
                parts = []
            parts.append(part)
        if parts:
            yield _told(self.lookup, parts)


def count_removals(lookup: Lookup, reason: str | None, pool: str | None) -> Removals:
    """The removed rows of one reason and one pool, or of all; SourceError for a pool that the corpus does not have."""
    pools = list(dict.fromkeys(str(unit.counts["pool"]) for unit in lookup.rows))
    if pool is not None and pool not in pools:
        raise SourceError(
            f"--pool: expected one of the corpus's pools, {', '.join(pools)}, found {pool!r}. Correct the name."
        )
    reasons = tuple(REASONS[1:]) if reason is None else (reason,)
    wanted, copies = [], []
    for number, unit in enumerate(lookup.rows):
        found = np.asarray(lookup.decisions(number, ["reason"]).column("reason"))
        is_asked = pool is None or unit.counts["pool"] == pool
        wanted.append(int(np.isin(found, reasons).sum()) if is_asked else 0)
        copies.append(int(np.isin(found, COPIES).sum()))
    return Removals(lookup=lookup, reasons=reasons, wanted=tuple(wanted), copies=tuple(copies))


@dataclass(frozen=True)
class _Part:
    """Removed rows of one unit, and where the evidence of each lies, -1 where it has none: int64[n] twice."""

    unit: int
    rows: I64
    evidence: I64


def _parts(removals: Removals, limit: int) -> Iterator[_Part]:
    firsts = itertools.accumulate(removals.copies, initial=0)
    for unit, (num_wanted, first) in enumerate(zip(removals.wanted, firsts, strict=False)):
        if not num_wanted or not limit:
            continue
        reasons = np.asarray(removals.lookup.decisions(unit, ["reason"]).column("reason"))
        is_copy = np.isin(reasons, COPIES)
        evidence = np.where(is_copy, first + np.cumsum(is_copy) - 1, -1)
        rows = np.flatnonzero(np.isin(reasons, removals.reasons))[:limit]
        limit -= len(rows)
        for start in range(0, len(rows), BATCH_ROWS):
            some = rows[start : start + BATCH_ROWS]
            yield _Part(unit, some, evidence[some])


def _told(lookup: Lookup, parts: list[_Part]) -> list[Removal]:
    columns = ("doc_id", "reason", "kept_doc_id", "kept", "references")
    decisions = pa.concat_tables(lookup.decisions(part.unit, columns).take(pa.array(part.rows)) for part in parts)
    told = decided(decisions, lookup.stage.recipe)
    doc_ids = [doc_id.hex() for doc_id in decisions.column("doc_id").to_pylist()]
    places = [place for part in parts for place in _places(lookup, part.unit, part.rows)]
    evidence = _evidence(lookup, np.concatenate([part.evidence for part in parts]), doc_ids)
    kept_at = _kept_places(lookup, sorted({doc_id for doc_id in told["kept_doc_id"] if doc_id is not None}))
    rows = zip(
        places, told["reason"].to_pylist(), doc_ids, told["excluded_by"], told["kept_doc_id"], evidence, strict=True
    )
    return [
        Removal(
            **dict(zip(PLACE, place, strict=True)),
            reason=reason,
            doc_id=doc_id,
            excluded_by=excluded_by,
            kept_doc_id=kept,
            **_kept_columns(kept_at.get(kept)),
            jaccard=jaccard,
            shared_bands=bands,
        )
        for place, reason, doc_id, excluded_by, kept, (jaccard, bands) in rows
    ]


def _kept_columns(place: Place | None) -> dict[str, str | int | None]:
    return {f"kept_{name}": value for name, value in zip(PLACE, place or (None,) * 4, strict=True)}


def _places(lookup: Lookup, unit: int, rows: I64) -> Iterator[Place]:
    table = lookup.texts(unit, rows, PLACE)
    return zip(*(table.column(name).to_pylist() for name in PLACE), strict=True)


def _evidence(lookup: Lookup, places: I64, doc_ids: list[str]) -> list[tuple[float | None, int | None]]:
    """Similarity and shared bands of each removed row; FormatError where a row of evidence is about another document.

    The evidence has a row for each copy that was removed, in the order of reading.
    """
    has_evidence = np.flatnonzero(places >= 0)
    told: list[tuple[float | None, int | None]] = [(None, None)] * len(places)
    if not len(has_evidence):
        return told
    path = lookup.verified(lookup.clusters, EVIDENCE_NAME)
    table = read_rows(path, places[has_evidence], ["removed_doc_id", "jaccard", "shared_bands"])
    for number, row in zip(has_evidence.tolist(), table.to_pylist(), strict=True):
        if row["removed_doc_id"].hex() != doc_ids[number]:
            raise FormatError(
                f"{path}: expected evidence of the removed document {doc_ids[number]}, found that of"
                f" {row['removed_doc_id'].hex()} in its place. Materialize lsh_clusters again."
            )
        told[number] = (row["jaccard"], row["shared_bands"])
    return told


def _kept_places(lookup: Lookup, doc_ids: list[str]) -> dict[str | None, Place]:
    """Where the kept row of each document lies: where copies are removed one row of a text is kept, over all crawls."""
    places: dict[str | None, Place] = {}
    wanted = np.frombuffer(bytes.fromhex("".join(doc_ids)), np.uint8).reshape(-1, 32)
    for unit in range(len(lookup.rows)):
        if len(places) == len(doc_ids):
            break
        table = lookup.decisions(unit, ["doc_id", "kept"])
        kept = np.flatnonzero(np.asarray(table.column("kept")))
        found = rows_of_doc_ids(doc_id_matrix(table.column("doc_id"))[kept], wanted)
        if len(found):
            numbers = found[:, 0].tolist()
            of_unit = _places(lookup, unit, kept[found[:, 1]])
            places |= {doc_ids[number]: place for number, place in zip(numbers, of_unit, strict=True)}
    return places


def removal_lines(removal: Removal) -> Iterator[str]:
    """A removed row for a person, safe for a terminal whatever the corpus holds."""
    likeness = ""
    if removal.jaccard is not None:
        likeness = f"  Jaccard {removal.jaccard:.3f} to the kept one ({removal.shared_bands:,} bands shared)"
    yield f"{removal.reason}{likeness}  {removal.doc_id}"
    yield f"  of {_where(removal.pool, removal.file, removal.row_group, removal.row)}"
    if removal.kept_doc_id is None:
        yield f"  its cluster matches the reference sets that exclude, {', '.join(removal.excluded_by)}"
        return
    yield f"  kept is {removal.kept_doc_id}"
    if removal.kept_file is not None:
        yield f"  of {_where(removal.kept_pool, removal.kept_file, removal.kept_row_group, removal.kept_row)}"


def _where(pool: str | None, file: str, row_group: int | None, row: int | None) -> str:
    return printable(f"{pool}  {file} row group {row_group:,} row {row:,}")
