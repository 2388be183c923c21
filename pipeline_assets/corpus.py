"""All documents of a revision as one numbered sequence: unit after unit, row after row.

In: the raw units and the signature units of the same rows. Out: columns of all documents, and texts, signatures or
exact similarities of chosen ones, gathered in blocks cut by bytes. The cost: a narrow column is read whole; a wide one
for the units that hold a chosen document only.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pipeline_assets.signatures import DOC_IDS, SIGNATURES, TEXT_BYTES, minhash_params
from pipeline_assets.source import ROWS_NAME
from pipeline_assets.stripes import Stage
from pipeline_assets.transforms.jaccard import jaccard_of_sets, joined_sets, shingle_sets
from resources.artifact_store import ArtifactRef

I64 = npt.NDArray[np.int64]

BLOCK_BYTES = 256 << 20  # text held at once while pairs are compared


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
        return pa.chunked_array(
            [chunk for unit in self.units for chunk in self.stage.table(unit, ROWS_NAME, [name]).column(name).chunks],
            self.stage.table(self.units[0], ROWS_NAME, [name]).schema.field(name).type,
        )

    def codes(self, name: str) -> tuple[I64, list[str]]:
        """A column of names as numbers int64[n] into the sorted names; a missing name is the empty one."""
        encoded = self.column(name).combine_chunks().fill_null("").dictionary_encode()
        names = encoded.dictionary.to_pylist()
        order = sorted(range(len(names)), key=names.__getitem__)
        rank = np.empty(len(names), np.int64)
        rank[order] = np.arange(len(names))
        return rank[np.asarray(encoded.indices)], sorted(names)

    def rows(self, wanted: I64, columns: Sequence[str]) -> pa.Table:
        """Columns of chosen documents; `wanted` ascends."""
        parts = [self.stage.table(self.units[0], ROWS_NAME, columns).slice(0, 0)]
        for unit, chosen in self._by_unit(wanted):
            parts.append(self.stage.table(self.units[unit], ROWS_NAME, columns).take(pa.array(chosen)))
        return pa.concat_tables(parts)

    def signatures(self, wanted: I64) -> npt.NDArray[np.uint32]:
        """Signatures of chosen documents: uint32[len(wanted), num_perm]; `wanted` ascends."""
        empty = np.empty((0, minhash_params(self.stage.recipe).num_perm), np.uint32)
        parts = [self.stage.array(self.signed[unit], SIGNATURES)[chosen] for unit, chosen in self._by_unit(wanted)]
        return np.concatenate([empty, *parts])

    def similarities(self, pairs: I64) -> npt.NDArray[np.float64]:
        """Exact Jaccard similarity of pairs of documents: int64[m, 2] -> float64[m]."""
        return self._similarities(pairs, self.text_bytes[pairs].sum(axis=1), None)

    def similarities_to(self, texts: pa.Array | pa.ChunkedArray, pairs: I64) -> npt.NDArray[np.float64]:
        """The same of pairs of (number of a given text, document): int64[m, 2] -> float64[m]."""
        return self._similarities(pairs, self.text_bytes[pairs[:, 1]], shingle_sets(texts, self._ngram))

    def _similarities(self, pairs: I64, num_bytes: I64, given: Any) -> npt.NDArray[np.float64]:
        found = [np.empty(0, np.float64)]
        for start, end in blocks_of(num_bytes, BLOCK_BYTES):
            block = pairs[start:end]
            documents = block if given is None else block[:, 1:]
            wanted, positions = np.unique(documents, return_inverse=True)
            sets = shingle_sets(self.rows(wanted, ["text"]).column("text"), self._ngram)
            places = positions.reshape(documents.shape)
            if given is not None:
                places = np.column_stack([block[:, 0], places[:, 0] + len(given[1]) - 1])
                sets = joined_sets(given, sets)
            found.append(jaccard_of_sets(*sets, places))
        return np.concatenate(found)

    @property
    def _ngram(self) -> int:
        return self.stage.recipe.dedup.ngram

    def _by_unit(self, wanted: I64) -> Iterator[tuple[int, I64]]:
        """Units that hold wanted documents, and the rows of those in the unit."""
        bounds = np.searchsorted(wanted, self.firsts)
        for unit, (start, end) in enumerate(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)):
            if start < end:
                yield unit, wanted[start:end] - self.firsts[unit]


def blocks_of(num_bytes: I64, max_bytes: int) -> Iterator[tuple[int, int]]:
    """Half-open ranges of items of at most `max_bytes` together, one item at least.

    >>> list(blocks_of(np.array([3, 3, 9, 1]), 6))
    [(0, 2), (2, 3), (3, 4)]
    """
    ends = np.cumsum(num_bytes)
    start = 0
    while start < len(ends):
        before = int(ends[start - 1]) if start else 0
        end = max(start + 1, int(np.searchsorted(ends, before + max_bytes, side="right")))
        yield start, end
        start = end
