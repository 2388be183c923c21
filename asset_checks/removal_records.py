"""What is recorded of removals: all decisions beside the rows that they are about, and the tables of `lsh_clusters`.

In: sealed artifacts. Out: columns, rows and texts. The promise: nothing here judges. Cost: what is asked for, of all
rows, each column once.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from asset_checks.columns import I64, U8, Numbers, find_rows, group_numbers, joined, named, places_in, sorted_rows
from asset_checks.decisions import DUPLICATES, Decided, ids_in, rows_of, rows_read, text_bytes
from asset_checks.similarity import texts_of
from pipeline_assets.corpus import PAIRS_AT_ONCE, Corpus
from pipeline_assets.duplicates import EVIDENCE_NAME
from pipeline_assets.signatures import minhash_params, split_units
from pipeline_assets.stripes import Stage, units_in
from pipeline_assets.transforms.rows import doc_id_matrix
from resources.artifact_store import ArtifactRef
from training_io.hashing import derive_seed, keyed_hash

Row = dict[str, Any]


@dataclass(frozen=True)
class RemovalRecords:
    """All decisions beside the rows that they are about, and what is recorded of them; rows by number."""

    stage: Stage
    lsh_clusters: ArtifactRef
    raw_row_groups: ArtifactRef
    minhash_signatures: ArtifactRef

    @cached_property
    def units(self) -> list[ArtifactRef]:
        return units_in(self.stage, self.raw_row_groups)

    @cached_property
    def corpus(self) -> Corpus:
        return Corpus(self.stage, self.units, split_units(units_in(self.stage, self.minhash_signatures))[0])

    def decided(self, *columns: str) -> Iterator[pa.Table]:
        """Columns of the decisions, unit after unit."""
        return Decided(self.stage, self.lsh_clusters, self.raw_row_groups).read(*columns)

    def read(self, *columns: str) -> Iterator[pa.Table]:
        """Columns of the rows that were decided about, unit after unit."""
        return rows_read(self.stage, self.raw_row_groups, *columns)

    def ids(self, column: str) -> U8:
        """A column of doc_ids of all decisions: uint8[n, 32]; not kept, for there are several."""
        return ids_in(self.decided(column))

    @cached_property
    def table(self) -> pa.Table:
        """Whether each row is kept, and barred."""
        return pa.concat_tables(self.decided("kept", "barred"))

    @cached_property
    def reasons(self) -> tuple[Numbers, list[str]]:
        return named(table.column("reason") for table in self.decided("reason"))

    @cached_property
    def names(self) -> dict[str, tuple[Numbers, list[str]]]:
        """Number of each row's pool and crawl, and their names, sorted."""
        return {by: named(table.column(by) for table in self.read(by)) for by in ("pool", "dump")}

    def rows(self, numbers: Sequence[int] | I64, *columns: str) -> list[Row]:
        """Some rows, as the source has them."""
        wanted, places = np.unique(np.asarray(numbers, np.int64), return_inverse=True)
        found = self.corpus.rows(wanted, columns).take(pa.array(places))
        rows: list[Row] = pa.table({name: found.column(name).fill_null("") for name in columns}).to_pylist()
        return rows

    def stored(self, name: str) -> list[Row]:
        found: list[Row] = self.stage.table(self.lsh_clusters, name).to_pylist()
        return found

    @cached_property
    def evidence(self) -> pa.Table:
        return self.stage.table(self.lsh_clusters, EVIDENCE_NAME)

    @cached_property
    def num_bytes(self) -> I64:
        return text_bytes(self.stage, self.raw_row_groups)

    @cached_property
    def clusters(self) -> I64:
        """Number of each row's cluster."""
        return group_numbers(self.ids("cluster_id"))

    @cached_property
    def removed(self) -> I64:
        """The rows that were removed for another one."""
        numbers, names = self.reasons
        return np.flatnonzero(np.isin(numbers, places_in(names, pa.array(DUPLICATES))))

    @cached_property
    def removed_ids(self) -> U8:
        """Their doc_ids: uint8[r, 32]."""
        return ids_of_rows(self.read("doc_id"), self.removed)

    @cached_property
    def named_ids(self) -> U8:
        """The doc_ids for which they were removed: uint8[r, 32]."""
        return ids_of_rows(self.decided("kept_doc_id"), self.removed)

    @cached_property
    def kept(self) -> I64:
        """For each of those, the row that is kept in its place (itself where there is none)."""
        kept = np.flatnonzero(self.table.column("kept"))
        doc_ids = ids_of_rows(self.decided("doc_id"), kept)
        found = find_rows(doc_ids, sorted_rows(doc_ids), self.named_ids)
        return np.where(found < 0, self.removed, np.append(kept, -1)[found])

    @cached_property
    def pairs(self) -> tuple[I64, I64]:
        """Numbers of the pairs of removed and kept texts, ascending with them: of the removals, of the evidence."""
        stated = (doc_id_matrix(self.evidence.column(f"{side}_doc_id")) for side in ("removed", "kept"))
        both = [np.hstack([self.removed_ids, self.named_ids]), np.hstack([*stated])]
        numbers = group_numbers(joined(both, 64))
        return numbers[: len(self.removed)], numbers[len(self.removed) :]

    def shared_bands(self) -> I64:
        """In how many bands each removed row's signature has the values of the kept one's."""
        rows_per_band = minhash_params(self.stage.recipe).rows_per_band
        found = np.empty(len(self.removed), np.int64)
        for start in range(0, len(found), PAIRS_AT_ONCE):
            some = slice(start, start + PAIRS_AT_ONCE)
            wanted, places = np.unique(np.stack([self.removed[some], self.kept[some]]), return_inverse=True)
            signatures = self.corpus.signatures(wanted)
            removed, kept = (signatures[rows] for rows in places.reshape(2, -1))
            equal = (removed == kept).reshape(len(removed), -1, rows_per_band)
            found[some] = equal.all(axis=2).sum(axis=1)
        return found

    def keys(self, doc_ids: U8, purpose: str) -> npt.NDArray[np.uint64]:
        """The keyed hashes by which the stage chose what to show, and those by which a sample is drawn here."""
        return keyed_hash(doc_ids, derive_seed(self.stage.recipe.seed, purpose))

    def texts(self, doc_ids: set[bytes]) -> dict[bytes, str]:
        return texts_of(self.stage, self.raw_row_groups, doc_ids)


def ids_of_rows(tables: Iterable[pa.Table], rows: I64) -> U8:
    """The doc_ids in the only column of some rows, which ascend, of tables one after another: uint8[len(rows), 32]."""
    return doc_id_matrix(rows_of(tables, rows).column(0))
