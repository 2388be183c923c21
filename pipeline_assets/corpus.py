"""All documents of a revision as one numbered sequence: unit after unit, row after row.

In: the raw units and the signature units of the same rows. Out: columns of all documents, and texts, signatures or
exact similarities of chosen ones. The cost: a narrow column is read whole; texts are read once, one unit at a time, of
the units that hold a chosen document. Their shingle hashes lie in an unnamed temporary file while pairs are compared.
"""

import itertools
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pipeline_assets.schemas import RawRows, arrow_schema
from pipeline_assets.signatures import DOC_IDS, SIGNATURES, TEXT_BYTES, minhash_params
from pipeline_assets.source import ROWS_NAME
from pipeline_assets.stripes import Stage
from pipeline_assets.transforms.jaccard import jaccard_of_sets, shingle_sets
from pipeline_assets.transforms.lsh import shared_bands
from resources.artifact_store import ArtifactRef
from resources.tables import read_rows

I64 = npt.NDArray[np.int64]

PAIRS_AT_ONCE = 1 << 16  # whose signatures are held at once


@dataclass(frozen=True)
class Corpus:
    """Documents by number; `units` are the raw units, `signed` their signature units in the same order."""

    stage: Stage
    units: Sequence[ArtifactRef]
    signed: Sequence[ArtifactRef]

    @cached_property
    def firsts(self) -> I64:
        """Number of each unit's first document, and the number of all: int64[units + 1]."""
        return np.cumsum([0, *(unit.counts["documents"] for unit in self.units)])

    @cached_property
    def doc_ids(self) -> npt.NDArray[np.uint8]:
        """uint8[n, 32]."""
        return np.concatenate([self.stage.array(unit, DOC_IDS) for unit in self.signed])

    @cached_property
    def text_bytes(self) -> I64:
        """UTF-8 bytes of each text: int64[n]."""
        return np.concatenate([self.stage.array(unit, TEXT_BYTES) for unit in self.signed])

    def column(self, name: str) -> pa.ChunkedArray:
        """One narrow column of all documents."""
        return pa.concat_tables([self.stage.table(unit, ROWS_NAME, [name]) for unit in self.units]).column(name)

    @cached_property
    def order_keys(self) -> npt.NDArray[np.uint64]:
        """The first 8 bytes of each doc_id as a number: uint64[n], an order that depends on content alone."""
        return self.doc_ids[:, :8].copy().view(">u8")[:, 0].astype(np.uint64)

    def codes(self, name: str) -> tuple[I64, list[str]]:
        """A column of names as numbers int64[n] into the sorted names; a missing name is the empty one."""
        chunks = [chunk.fill_null("").dictionary_encode() for chunk in self.column(name).chunks]
        names = sorted({value for chunk in chunks for value in chunk.dictionary.to_pylist()})
        numbers = {value: number for number, value in enumerate(names)}
        parts = [
            np.array([numbers[value] for value in chunk.dictionary.to_pylist()], np.int64)[np.asarray(chunk.indices)]
            for chunk in chunks
        ]
        return np.concatenate([np.empty(0, np.int64), *parts]), names

    def rows(self, wanted: I64, columns: Sequence[str]) -> pa.Table:
        """Columns of chosen documents; `wanted` ascends."""
        none = arrow_schema(RawRows).empty_table().select(columns)
        return pa.concat_tables([none, *(self._rows(*part, columns) for part in self._by_unit(wanted))])

    def signatures(self, wanted: I64) -> npt.NDArray[np.uint32]:
        """Signatures of chosen documents: uint32[len(wanted), num_perm]; `wanted` ascends."""
        empty = np.empty((0, minhash_params(self.stage.recipe).num_perm), np.uint32)
        parts = [self.stage.array(self.signed[unit], SIGNATURES)[chosen] for unit, chosen in self._by_unit(wanted)]
        return np.concatenate([empty, *parts])

    def shared_bands(self, pairs: I64) -> I64:
        """In how many bands the signatures of each pair agree: int64[m, 2] -> int64[m]."""
        params = minhash_params(self.stage.recipe)
        found = [np.empty(0, np.int64)]
        for start in range(0, len(pairs), PAIRS_AT_ONCE):
            wanted, places = np.unique(pairs[start : start + PAIRS_AT_ONCE], return_inverse=True)
            signatures = self.signatures(wanted)
            left, right = places.reshape(-1, 2).T
            found.append(shared_bands(signatures[left], signatures[right], params))
        return np.concatenate(found)

    def similarities(self, pairs: I64) -> npt.NDArray[np.float64]:
        """Exact Jaccard similarity of pairs of documents: int64[m, 2] -> float64[m]."""
        wanted, places = np.unique(pairs, return_inverse=True)
        return self._compared(wanted, places.reshape(-1, 2), pa.chunked_array([], pa.large_string()))

    def similarities_to(self, texts: pa.ChunkedArray, pairs: I64) -> npt.NDArray[np.float64]:
        """The same of pairs of (number of a given text, document): int64[m, 2] -> float64[m]."""
        wanted, places = np.unique(pairs[:, 1], return_inverse=True)
        return self._compared(wanted, np.column_stack([pairs[:, 0], places + len(texts)]), texts)

    def _compared(self, wanted: I64, places: I64, given: pa.ChunkedArray) -> npt.NDArray[np.float64]:
        """Similarity of pairs of places among the given texts and, after them, the wanted documents."""
        lengths = [np.empty(0, np.int64)]
        with tempfile.TemporaryFile(dir=self.stage.store.root) as file:
            for texts in itertools.chain([given], self._texts(wanted)):
                hashes, offsets = shingle_sets(texts, self.stage.recipe.dedup.ngram)
                file.write(hashes.tobytes())
                lengths.append(np.diff(offsets))
            file.flush()
            offsets = np.concatenate([[0], np.cumsum(np.concatenate(lengths))])
            stored = np.memmap(file, np.uint32, "r") if offsets[-1] else np.empty(0, np.uint32)
            return jaccard_of_sets(np.asarray(stored), offsets, places)

    def _rows(self, unit: int, rows: I64, columns: Sequence[str]) -> pa.Table:
        return read_rows(self.stage.folder(self.units[unit]) / ROWS_NAME, rows, columns)

    def _texts(self, wanted: I64) -> Iterator[pa.ChunkedArray]:
        """Texts of wanted documents, a unit's at a time."""
        return (self._rows(*part, ["text"]).column("text") for part in self._by_unit(wanted))

    def _by_unit(self, wanted: I64) -> Iterator[tuple[int, I64]]:
        """Units that hold wanted documents, and the rows of those in the unit."""
        bounds = np.searchsorted(wanted, self.firsts)
        for unit, (start, end) in enumerate(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)):
            if start < end:
                yield unit, wanted[start:end] - self.firsts[unit]
