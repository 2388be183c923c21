"""What checks read of clustering: the decisions about all rows beside those rows, unit after unit.

In: sealed units and slices. Out: narrow columns, in the order of the units, and where rows are in the source. The
promise: nothing here judges. Cost: what is asked for, of all rows.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from asset_checks.columns import I64, U8, Numbers, joined, named, places_in
from pipeline_assets.clusters import slice_name
from pipeline_assets.source import ROWS_NAME, pool_names
from pipeline_assets.stripes import Stage, units_in
from pipeline_assets.transforms.rows import doc_id_matrix
from resources.artifact_store import ArtifactRef

DUPLICATES = ("exact_duplicate", "near_duplicate")
REASONS = (*DUPLICATES, "kept", "reference")
EXACT, NEAR, KEPT, REFERENCE = range(len(REASONS))
AGAIN = "Materialize lsh_clusters again; if it fails again, report it."


@dataclass(frozen=True)
class Decided:
    """What was decided about all rows; rows by number, unit after unit."""

    stage: Stage
    lsh_clusters: ArtifactRef
    raw_row_groups: ArtifactRef

    def read(self, *columns: str) -> Iterator[pa.Table]:
        """Columns of the decisions, unit after unit."""
        units = units_in(self.stage, self.raw_row_groups)
        return (self.stage.table(self.lsh_clusters, slice_name(unit.unit), columns) for unit in units)

    @property
    def reasons(self) -> Numbers:
        """Why each row is kept or not, as a place in REASONS, -1 for another reason: int32[n]."""
        return np.concatenate([places_in(REASONS, table.column("reason")) for table in self.read("reason")])


def rows_read(stage: Stage, raw_row_groups: ArtifactRef, *columns: str) -> Iterator[pa.Table]:
    """Columns of the rows, unit after unit."""
    return (stage.table(unit, ROWS_NAME, columns) for unit in units_in(stage, raw_row_groups))


def ids_in(tables: Iterable[pa.Table]) -> U8:
    """The doc_ids in the only column of tables one after another: uint8[n, 32]."""
    return joined(doc_id_matrix(table.column(0)) for table in tables)


def rows_of(tables: Iterable[pa.Table], rows: I64) -> pa.Table:
    """Some rows, which ascend, of tables one after another."""
    found, first = [], 0
    for table in tables:
        start, end = np.searchsorted(rows, [first, first + table.num_rows])
        found.append(table.take(pa.array(rows[start:end] - first)))
        first += table.num_rows
    return pa.concat_tables(found)


def first_rows(numbers: npt.NDArray[np.integer[Any]], wanted: I64) -> I64:
    """The first row of each wanted number, all of which are there; they ascend: int64[len(wanted)]."""
    rows = np.flatnonzero(np.isin(numbers, wanted))
    return rows[np.unique(numbers[rows], return_index=True)[1]]


def side_by_side(*columns: npt.NDArray[Any]) -> U8:
    """The bytes of each row's values, one column after another: uint8[n, w]."""
    tables = [one if one.ndim == 2 else one[:, None] for one in columns]
    return np.hstack([np.ascontiguousarray(one).view(np.uint8) for one in tables])


def source_rows(stage: Stage, raw_row_groups: ArtifactRef, columns: Sequence[str]) -> pa.Table:
    """Narrow columns of all rows, unit after unit."""
    return pa.concat_tables(rows_read(stage, raw_row_groups, *columns))


def text_bytes(stage: Stage, raw_row_groups: ArtifactRef) -> I64:
    """UTF-8 bytes of all rows' texts, unit after unit: int64[n]."""
    texts = rows_read(stage, raw_row_groups, "text")
    return np.concatenate([np.asarray(pc.binary_length(table.column("text")), np.int64) for table in texts])


def place_columns(stage: Stage, source: pa.Table) -> list[npt.NDArray[Any]]:
    """Where rows are in the source, as columns to sort by: pool by priority, file, row group, row."""
    pools, files = places_in(pool_names(stage.recipe), source.column("pool")), named([source.column("file")])[0]
    return [pools, files, *(np.asarray(source.column(name), np.int64) for name in ("row_group", "row"))]


def other_rows(stage: Stage, table: pa.Table, raw_row_groups: ArtifactRef) -> list[str]:
    """A violation where decisions cannot be laid beside the rows: `every_row_has_one_decision` says which are lost."""
    rows = sum(unit.counts["documents"] for unit in units_in(stage, raw_row_groups))
    return [] if table.num_rows == rows else [f"expected {rows:,} decisions, found {table.num_rows:,}"]
