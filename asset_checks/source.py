"""Promise: every row read is used or counted with a reason, and a doc_id is its text's hash."""

import hashlib

import pyarrow.parquet as pq

from asset_checks.row_filters import filter_violations, num_excluded, num_filtered, num_looked_at
from asset_checks.verdicts import Verdict, law, verdict_of
from pipeline_assets.source import ROWS_NAME
from pipeline_assets.stripes import Stage, units_in
from resources.artifact_store import ArtifactRef

LEFT_OUT = ("null_text", "empty_text", "invalid_utf8")


def every_source_row_is_used_or_counted(stage: Stage, raw_row_groups: ArtifactRef) -> Verdict:
    """Rows that the source's footers promise = rows in the written table + rows left out, unit by unit.

    What a filter removed is recounted from the removed rows, which must fail it, as no used row may. And the units
    together hold each row group of the selected stripes of each file, once; where reading stopped at full budgets, the
    last file may end early.
    """
    units, filled = units_in(stage, raw_row_groups), stage.open(raw_row_groups)[1].counts.get("budgets_filled")
    violations, promised = _row_groups_left_out(stage, units, may_end_early=bool(filled) and all(filled.values())), 0
    for unit in units:
        written = pq.read_metadata(stage.folder(unit) / ROWS_NAME).num_rows
        filtered = num_filtered(stage, unit)
        left_out = sum(unit.counts[reason] for reason in LEFT_OUT) + filtered + num_excluded(unit)
        promised += unit.counts["rows_in_footer"]
        if written + left_out != unit.counts["rows_in_footer"]:
            violations.append(
                f"{unit.unit}: expected {unit.counts['rows_in_footer']:,} rows, found {written:,} used"
                f" and {left_out:,} left out"
            )
        elif (looked_at := num_looked_at(stage, unit)) != written + filtered:
            violations.append(
                f"{unit.unit}: expected {written + filtered:,} rows, used or filtered, in what was sampled,"
                f" found {looked_at:,}"
            )
        violations += filter_violations(stage, unit)
    return verdict_of(
        "rows in the source's footers = rows used + rows left out with a reason", violations, f"{promised:,} rows"
    )


def _row_groups_left_out(stage: Stage, units: list[ArtifactRef], *, may_end_early: bool) -> list[str]:
    reading = stage.recipe.reading
    read: dict[tuple[str, str], list[int]] = {}
    sizes: dict[tuple[str, str], int] = {}
    for unit in units:
        key = (unit.counts["pool"], unit.counts["file"])
        read.setdefault(key, []).extend(stage.open(unit)[1].inputs["row_groups"])
        sizes[key] = unit.counts["row_groups_in_file"]
    wanted = {
        key: [number for number in range(size) if number % reading.stripes < reading.stripes_read]
        for key, size in sizes.items()
    }
    if may_end_early:
        last = (units[-1].counts["pool"], units[-1].counts["file"])
        wanted[last] = wanted[last][: len(read[last])]
    return [
        f"{pool}/{file}: expected {len(wanted[pool, file]):,} row groups of {sizes[pool, file]:,}, found {len(found):,}"
        for (pool, file), found in read.items()
        if sorted(found) != wanted[pool, file]
    ]


def doc_ids_are_hashes_of_texts(stage: Stage, raw_row_groups: ArtifactRef) -> Verdict:
    """SHA-256 of each text, computed again from the decoded text, is its doc_id."""
    violations, documents = [], 0
    for unit in units_in(stage, raw_row_groups):
        table = stage.table(unit, ROWS_NAME, ["doc_id", "text"])
        documents += table.num_rows
        for doc_id, text in zip(table.column("doc_id").to_pylist(), table.column("text").to_pylist(), strict=True):
            if hashlib.sha256(text.encode()).digest() != doc_id:
                violations.append(f"{unit.unit}: doc_id {doc_id.hex()[:16]} is not the hash of its text")
    return verdict_of("doc_id = SHA-256 of the text's UTF-8 bytes", violations, f"{documents:,} documents")


CHECKS = [
    law(
        every_source_row_is_used_or_counted,
        blocking=True,
        description="Fails when rows were lost or invented while reading. Materialize raw_row_groups again; if it "
        "fails again, the source file contradicts its own footer.",
    ),
    law(
        doc_ids_are_hashes_of_texts,
        blocking=True,
        description="Fails when a stored text or its doc_id was changed after reading: splits and duplicates would be "
        "decided on wrong ids. Materialize raw_row_groups again.",
    ),
]
