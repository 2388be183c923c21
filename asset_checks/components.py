"""Components by another route than the stage's: no band keys and no buckets, but the raw bytes of the bands.

In: signatures and doc_ids. Out: labels of connected components, by scipy. Cost: the values of one band of all rows at a
time.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from asset_checks.columns import I64, U8, Flags, Numbers, run_starts, sorted_rows, whole
from pipeline_assets.signatures import SIGNATURES
from pipeline_assets.stripes import Stage
from resources.artifact_store import ArtifactRef

Signatures = Sequence[npt.NDArray[np.uint32]]  # of each unit, [rows, num_perm]
NO_VALUE = 0xFFFFFFFF  # all values of the signature of a text without words


def all_signatures(stage: Stage, signed: list[ArtifactRef]) -> Signatures:
    """The signatures of each unit, mapped where they are large."""
    return [stage.array(unit, SIGNATURES) for unit in signed]


def have_words(signatures: npt.NDArray[np.uint32]) -> Flags:
    """Whether each text has words; without any all values are the largest one, so the least of them is."""
    return signatures.min(axis=1) != NO_VALUE


def band_values(band: npt.NDArray[np.uint32]) -> npt.NDArray[np.void]:
    """The bytes of each row's values as one: uint32[n, rows_per_band] -> void[n]."""
    return whole(np.ascontiguousarray(band).view(np.uint8))


def near_components(doc_ids: U8, signatures: Signatures, rows_per_band: int, apart: U8 | None = None) -> Numbers:
    """Components of rows of equal text, or equal in a band; with `apart` (bytes a row), of rows equal in those too.

    Bands unite the components that those before them left, so the values of one at a time are held.
    """
    texts = doc_ids if apart is None else np.hstack([doc_ids, apart])
    labels = components_of(len(texts), equal_rows(texts))
    del texts
    for edges in edges_of_bands(signatures, rows_per_band, apart):
        labels = components_of(int(labels.max()) + 1, labels[edges])[labels]
    return labels


def edges_of_bands(signatures: Signatures, rows_per_band: int, apart: U8 | None = None) -> Iterator[I64]:
    """For each band, edges between the rows with words that are equal there (and in `apart`): int64[m, 2]."""
    worded_rows = [have_words(unit) for unit in signatures]
    worded = np.flatnonzero(np.concatenate(worded_rows))
    width = rows_per_band * signatures[0].itemsize
    for start in range(0, signatures[0].shape[1], rows_per_band):
        values = np.empty((len(worded), width + (0 if apart is None else apart.shape[1])), np.uint8)
        first = 0
        for unit, rows in zip(signatures, worded_rows, strict=True):
            band = np.ascontiguousarray(unit[:, start : start + rows_per_band][rows])
            values[first : first + len(band), :width] = band.view(np.uint8)
            first += len(band)
        if apart is not None:
            values[:, width:] = apart[worded]
        yield worded[equal_rows(values)]


def equal_rows(rows: U8) -> I64:
    """Edges between rows of equal bytes, neighbours in sorted order: int64[m, 2]."""
    order = sorted_rows(rows)
    same = np.flatnonzero(~run_starts(rows, order))
    return np.column_stack([order[same - 1], order[same]])


def components_of(num_nodes: int, edges: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """The component of each node, by edges int64[m, 2]: int32[num_nodes]."""
    from scipy.sparse import coo_array  # half a second: not with the code location
    from scipy.sparse.csgraph import connected_components

    graph = coo_array((np.ones(len(edges), np.int8), (edges[:, 0], edges[:, 1])), shape=(num_nodes, num_nodes))
    labels: npt.NDArray[np.int32] = connected_components(graph, directed=False)[1]
    return labels


def shares_a_band(first: npt.NDArray[np.uint32], second: npt.NDArray[np.uint32], rows_per_band: int) -> bool:
    """Whether two signatures agree in all values of a band; without words they agree in nothing."""
    equal = (first == second) & (first != NO_VALUE)
    return bool(equal.reshape(-1, rows_per_band).all(axis=1).any())
