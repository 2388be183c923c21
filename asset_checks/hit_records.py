"""What is recorded of reference texts: the sets, the corpus, and the hits of one on the other.

In: sealed artifacts. Out: columns, texts and signatures. The promise: nothing here judges. Cost: what is asked for, of
all rows, each column once; of signatures the values of one band.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from asset_checks.columns import I64, U8, Numbers, find_rows, id_rows, named, run_starts, sorted_rows, whole
from asset_checks.components import all_signatures, band_values, have_words
from asset_checks.decisions import Decided, ids_in
from asset_checks.similarity import texts_of
from pipeline_assets.corpus import Corpus
from pipeline_assets.reference_hits import HITS_NAME
from pipeline_assets.signatures import SIGNATURES, TEXT_BYTES, minhash_params, split_units
from pipeline_assets.stripes import Stage, units_in
from resources.artifact_store import ArtifactRef

Hit = dict[str, Any]


@dataclass(frozen=True)
class HitRecords:
    """The reference sets, the corpus, and what is recorded of both; documents by number, unit after unit."""

    stage: Stage
    lsh_clusters: ArtifactRef
    reference_sets: ArtifactRef
    raw_row_groups: ArtifactRef
    minhash_signatures: ArtifactRef

    @cached_property
    def hits(self) -> list[Hit]:
        return list(self.stage.table(self.lsh_clusters, HITS_NAME).to_pylist())

    @cached_property
    def sets(self) -> dict[str, dict[bytes, str]]:
        """Each set's texts by doc_id, in the stored order."""
        found = {}
        for reference in self.stage.recipe.references:
            table = self.stage.table(self.reference_sets, f"{reference.name}.parquet", ["doc_id", "text"])
            found[reference.name] = dict(
                zip(*(table.column(name).to_pylist() for name in table.column_names), strict=True)
            )
        return found

    @cached_property
    def table(self) -> pa.Table:
        """Whether each row is kept, and barred."""
        return pa.concat_tables(self._columns("kept", "barred"))

    def _columns(self, *names: str) -> Iterator[pa.Table]:
        return Decided(self.stage, self.lsh_clusters, self.raw_row_groups).read(*names)

    def named(self, column: str) -> tuple[Numbers, list[str]]:
        """A column of names as numbers int32[n], and the names."""
        return named(table.column(column) for table in self._columns(column))

    def ids(self, column: str) -> U8:
        """A column of doc_ids of all rows: uint8[n, 32]."""
        return ids_in(self._columns(column))

    @cached_property
    def doc_ids(self) -> U8:
        return self.ids("doc_id")

    @cached_property
    def by_doc_id(self) -> I64:
        return sorted_rows(self.doc_ids)

    @cached_property
    def row_of(self) -> dict[bytes, int]:
        """A row of each text of the corpus that a set or a hit names."""
        named = {text for texts in self.sets.values() for text in texts}
        return self.rows_of(named | {hit["doc_id"] for hit in self.hits})

    def rows_of(self, doc_ids: Iterable[bytes]) -> dict[bytes, int]:
        """A row of each of some texts that are in the corpus."""
        names = sorted(set(doc_ids))
        rows = find_rows(self.doc_ids, self.by_doc_id, id_rows(names)).tolist()
        return {name: row for name, row in zip(names, rows, strict=True) if row >= 0}

    def first_texts(self, num_texts: int) -> list[bytes]:
        """The smallest doc_ids of the corpus."""
        starts = np.flatnonzero(run_starts(self.doc_ids, self.by_doc_id))[:num_texts]
        return [doc_id.tobytes() for doc_id in self.doc_ids[self.by_doc_id[starts]]]

    @cached_property
    def units(self) -> tuple[list[ArtifactRef], list[ArtifactRef]]:
        return split_units(units_in(self.stage, self.minhash_signatures))

    @cached_property
    def rows_per_band(self) -> int:
        return minhash_params(self.stage.recipe).rows_per_band

    def texts(self, doc_ids: set[bytes]) -> dict[bytes, str]:
        return texts_of(self.stage, self.raw_row_groups, doc_ids)

    def text_bytes(self) -> I64:
        return np.concatenate([self.stage.array(unit, TEXT_BYTES) for unit in self.units[0]])

    def references(self) -> tuple[list[tuple[str, bytes]], npt.NDArray[np.uint32]]:
        """Set and doc_id of each reference text that has words, and their signatures."""
        names = [(name, doc_id) for name, texts in self.sets.items() for doc_id in texts]
        empty = np.empty((0, minhash_params(self.stage.recipe).num_perm), np.uint32)
        signatures = np.concatenate(all_signatures(self.stage, self.units[1])) if names else empty
        worded = np.flatnonzero(have_words(signatures))
        return [names[number] for number in worded.tolist()], signatures[worded]

    def signatures_of(self, rows: Iterable[int]) -> dict[int, npt.NDArray[np.uint32]]:
        """The signatures of some rows."""
        wanted = np.array(sorted(set(rows)), np.int64)
        corpus = Corpus(self.stage, units_in(self.stage, self.raw_row_groups), self.units[0])
        return dict(zip(wanted.tolist(), corpus.signatures(wanted), strict=True))

    def in_bands_of(self, signatures: npt.NDArray[np.uint32], most: int) -> Iterator[list[list[int]]]:
        """For each band, the first documents by doc_id with the values of each of the given signatures there."""
        stored = [self.stage.array(unit, SIGNATURES) for unit in self.units[0]]
        for start in range(0, signatures.shape[1], self.rows_per_band):
            band = slice(start, start + self.rows_per_band)
            names = band_values(signatures[:, band])
            rows, values = _holders(stored, band, names)
            holders: dict[bytes, list[int]] = {name.tobytes(): [] for name in names}
            for at in np.argsort(whole(self.doc_ids[rows]), kind="stable"):
                if len(some := holders[values[at].tobytes()]) < most:
                    some.append(int(rows[at]))
            yield [holders[name.tobytes()] for name in names]


def _holders(
    stored: list[npt.NDArray[np.uint32]], band: slice, names: npt.NDArray[np.void]
) -> tuple[I64, npt.NDArray[np.void]]:
    """The rows that have words and one of the named values in a band, over all units, and their values."""
    found, values, first = [np.empty(0, np.int64)], [names[:0]], 0
    for signatures in stored:
        some = band_values(signatures[:, band])
        rows = np.flatnonzero(np.isin(some, names))
        rows = rows[have_words(signatures[rows])]
        found.append(first + rows)
        values.append(some[rows])
        first += len(signatures)
    return np.concatenate(found), np.concatenate(values)
