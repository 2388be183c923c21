"""The final order of documents: doc_ids and source coordinates in, a permutation out.

`shuffled` orders by a keyed hash of the doc_id, which one machine can compute for one document, so sorted runs of
several units merge into the same order that a sort of everything gives; `source` orders by the source coordinate. Both
depend on content, coordinates and the seed alone. Cost: 8 bytes a document and one sort.
"""

from collections.abc import Callable

import numpy as np

from pipeline_assets.transforms.arrays import I64, U8, U64
from training_io.errors import RecipeError
from training_io.hashing import derive_seed, keyed_hash

ORDERS = ("shuffled", "source")


def order_documents(doc_ids: U8, coordinates: I64, order: str = "shuffled", seed: int = 0) -> I64:
    """Rows in their final order: uint8[n, 32], int64[n, k] (pool priority, file, row group, row) -> int64[n].

    `shuffled` is ascending by keyed hash of the doc_id, then by doc_id, then by coordinate. RecipeError for another
    order than ORDERS.

    >>> order_documents(np.zeros((2, 32), np.uint8), np.array([[0, 1], [0, 0]])).tolist()
    [1, 0]
    """
    keys = order_keys(doc_ids, coordinates, order, seed)
    return order_by_keys(keys[:, 0], lambda rows: keys[rows])


def order_by_keys(first: U64, keys_of: Callable[[I64], U64]) -> I64:
    """Rows ascending by their keys: uint64[n] of every row's first key, and whole keys for the rows that are asked for.

    Only those of equal first keys are: of hashes next to none, so that a planning step holds 8 bytes a document.
    """
    permutation = np.argsort(first, kind="stable")
    is_tied = np.zeros(len(first), dtype=np.bool_)
    is_tied[1:] = first[permutation[1:]] == first[permutation[:-1]]
    is_tied[:-1] |= is_tied[1:]
    # Rows of one first key lie together, and so they do after this: only the ties need the other columns.
    tied = permutation[is_tied]
    permutation[is_tied] = tied[np.lexsort(keys_of(tied).T[::-1])]
    return permutation


def order_keys(doc_ids: U8, coordinates: I64, order: str = "shuffled", seed: int = 0) -> U64:
    """What `order_documents` sorts by, a row a document, compared from left to right: uint64[n, columns].

    `shuffled` has keyed hash, doc_id as four big-endian words, coordinate; `source` the coordinate. Runs of several
    units that are sorted by these rows merge into the whole order, one row of each run in memory.
    """
    assert len(doc_ids) == len(coordinates), (len(doc_ids), len(coordinates))
    assert coordinates.min(initial=0) >= 0, "coordinates must not be negative"
    position = coordinates.astype(np.uint64)
    if order == "source":
        return position
    if order != "shuffled":
        raise RecipeError(f"order of documents: expected one of {', '.join(ORDERS)}, found {order!r}.")
    hashes = keyed_hash(doc_ids, derive_seed(seed, "shuffle"))
    id_words = np.ascontiguousarray(doc_ids).view(">u8").astype(np.uint64)
    return np.column_stack([hashes, id_words, position])
