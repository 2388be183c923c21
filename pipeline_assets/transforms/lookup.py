"""Looking texts up: their band keys and a unit's sorted ones in, the rows that share a band out; datasketch's objects.

The direct search and datasketch's MinHashLSH over the same signatures find the same documents. A text without words
shares a band with nothing, here as there. Cost: a binary search a band over what is on disk, against a Python object a
document and band in the library's index.
"""

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline_assets.transforms.arrays import I64, U8, U32, U64, positions
from pipeline_assets.transforms.lsh import NO_KEY
from pipeline_assets.transforms.minhash import SCHEME, MinHashParams, is_wordless
from training_io.errors import RecipeError

if TYPE_CHECKING:
    from datasketch import LeanMinHash, MinHashLSH

IN_MEMORY: Mapping[str, Any] = {"type": "dict"}

BLANKS = re.compile(r"[ \t\r\n]+")


def rows_sharing_a_band(sorted_keys: U64, key_rows: U32, query_keys: U64) -> I64:
    """Which rows have a band key of which query: uint64[k], uint32[k], uint64[q, num_bands] -> int64[m, 2].

    `sorted_keys` ascend and `key_rows` says whose they are; a result row is (query, row), unique and sorted.

    >>> keys, rows = np.array([5, 7, 7], np.uint64), np.array([0, 0, 4], np.uint32)
    >>> rows_sharing_a_band(keys, rows, np.array([[7, 8], [0, 9]], np.uint64)).tolist()
    [[0, 0], [0, 4]]
    """
    assert len(sorted_keys) == len(key_rows), (len(sorted_keys), len(key_rows))
    keys = query_keys.ravel()
    starts = np.searchsorted(sorted_keys, keys)
    lengths = np.where(keys == NO_KEY, 0, np.searchsorted(sorted_keys, keys, side="right") - starts)
    key, place = positions(lengths)
    rows = key_rows[starts[key] + place]
    return np.unique(np.column_stack([key // query_keys.shape[1], rows]).astype(np.int64), axis=0)


def rows_of_doc_ids(doc_ids: U8, wanted: U8) -> I64:
    """Which rows are which wanted document: uint8[n, 32], uint8[w, 32] -> int64[m, 2] of (number wanted, row), by row.

    >>> rows_of_doc_ids(np.repeat(np.uint8([[1], [2], [1]]), 32, axis=1), np.ones((1, 32), np.uint8)).tolist()
    [[0, 0], [0, 2]]
    """
    numbers: dict[bytes, list[int]] = {}
    for number, doc_id in enumerate(wanted):
        numbers.setdefault(doc_id.tobytes(), []).append(number)
    likely = np.flatnonzero(np.isin(_first_words(doc_ids), _first_words(wanted)))  # one pass over 8 bytes a document
    found = [(number, row) for row in likely.tolist() for number in numbers.get(doc_ids[row].tobytes(), [])]
    return np.array(found, dtype=np.int64).reshape(-1, 2)


def _first_words(doc_ids: U8) -> U64:
    words: U64 = np.ascontiguousarray(doc_ids).view(np.uint64)[:, 0]
    return words


def minhash_of(signature: U32, params: MinHashParams) -> "LeanMinHash":
    """A document's signature as datasketch's object: uint32[num_perm] -> LeanMinHash of its seed and scheme.

    It equals what `MinHash(num_perm, seed, scheme="affine32")` holds once fed the document's 32-bit shingle hashes.

    >>> minhash_of(np.arange(112, dtype=np.uint32), MinHashParams()).seed
    1
    """
    from datasketch import LeanMinHash  # with scipy behind it, a second to import: not with the code location

    assert signature.dtype == np.uint32, signature.dtype
    assert signature.shape == (params.num_perm,), (signature.shape, params.num_perm)
    return LeanMinHash(seed=params.seed, hashvalues=signature, scheme=SCHEME)


def empty_index(params: MinHashParams, storage: Mapping[str, Any] = IN_MEMORY) -> "MinHashLSH":
    """datasketch's index with our bands, in memory or in the storage that its configuration names.

    Keys are kept as they are, never pickled: what a server answers is not run. RecipeError for a single band, which the
    library does not take.
    """
    from datasketch import MinHashLSH

    if params.num_bands < 2:
        raise RecipeError(
            f"datasketch's MinHashLSH: expected at least 2 bands, found dedup.num_bands {params.num_bands:,} in the"
            " recipe. Look up without an index of datasketch."
        )
    return MinHashLSH(
        params=(params.num_bands, params.rows_per_band),
        num_perm=params.num_perm,
        storage_config=dict(storage),
        prepickle=False,
    )


def insert_documents(
    index: Any, doc_ids: U8, signatures: U32, params: MinHashParams, key_of: Callable[[str], Any]
) -> None:
    """Add documents to an index or its insertion session: uint8[n, 32], uint32[n, num_perm]; keys from hex doc_ids.

    Documents without words stay out: in the library all of them would be candidates of each other. A document that
    comes twice is one.
    """
    for row in np.flatnonzero(~is_wordless(signatures)).tolist():
        index.insert(key_of(doc_ids[row].tobytes().hex()), minhash_of(signatures[row], params), check_duplication=False)


def candidates_of(index: "MinHashLSH", signature: U32, params: MinHashParams) -> list[str]:
    """Hex doc_ids of the documents in an index that share a band with a signature, uint32[num_perm], sorted.

    What a damaged index holds instead comes as it is, spelled in ASCII.
    """
    if is_wordless(signature[np.newaxis]).any():
        return []
    keys = index.query(minhash_of(signature, params))
    return sorted(key.decode("ascii", "backslashreplace") if isinstance(key, bytes) else key for key in keys)


def lost_buckets(index: "MinHashLSH", signature: U32, params: MinHashParams) -> list[bytes]:
    """Keys of a signature's buckets, uint32[num_perm], that an index lists and that hold nothing.

    To be asked after `candidates_of`: the library takes a bucket that a server lost for one that never was.
    """
    if is_wordless(signature[np.newaxis]).any():
        return []
    values = minhash_of(signature, params).hashvalues
    buckets = [index._H(values[start:end]) for start, end in index.hashranges]
    tables = zip(index.hashtables, buckets, strict=True)
    return [table.redis_key(bucket) for table, bucket in tables if table.has_key(bucket) and not table.get(bucket)]


def beginning(text: str, max_characters: int = 160) -> str:
    """The beginning of a text on one line: blanks and line ends become single spaces.

    >>> beginning("one\\n  two three", 8)
    'one two…'
    """
    start = BLANKS.sub(" ", text[: 8 * max_characters]).strip(" ")
    is_whole = len(text) <= 8 * max_characters and len(start) <= max_characters
    return start if is_whole else start[: max_characters - 1].rstrip(" ") + "…"


def printable(text: str) -> str:
    """A text that a terminal can be given: backslashes and all that Python calls unprintable are spelled out.

    >>> print(printable("red \\x1b[31m, reversed \\u202e, C:\\\\"))
    red \\x1b[31m, reversed \\u202e, C:\\\\
    """
    return "".join(
        character if character.isprintable() and character != "\\" else character.encode("unicode_escape").decode()
        for character in text
    )


def printable_lines(message: str) -> str:
    """A message of several lines that a terminal can be given."""
    return "\n".join(map(printable, message.splitlines()))
