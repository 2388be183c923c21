"""Overlap of short texts with documents: the n-grams of benchmark items in, the documents that repeat them out.

GPT-3's way (Brown et al. 2020, appendix C): an item is known from the documents that hold one of its n-grams, runs of
13 words. An item of fewer words is one n-gram of all of them, from a smallest number of words on. An n-gram that many
distinct texts hold is boilerplate and matches none; a page that was copied often is one text. Words are those of
shingles; an n-gram is found by a 64-bit hash and then compared word by word, so no collision is a hit.

    items -> index_items -> find_overlap (a unit's texts at a time) -> overlap_hits (all units)

The index depends on the items alone, and what is found on the documents, whatever the units. Cost: one compiled pass
over the texts a unit; about 100 bytes a distinct n-gram, and up to `max_documents` hits of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from pipeline_assets.transforms.arrays import I64, U8, U32, U64, is_run_start, positions, utf8_blocks, whole_rows
from pipeline_assets.transforms.words import fold_table
from training_io.errors import RecipeError
from training_io.hashing import DOC_ID_BYTES

BLOCK_BYTES = 1 << 22
WORD_BUFFER = 4096
HIT_BUFFER = 1 << 16
SIEVE_BITS = 32  # for each n-gram, so that what no item holds is looked up once in 32 times


@dataclass(frozen=True, kw_only=True)
class OverlapIndex:
    """The distinct n-grams of some items, numbered by ascending hash, and the items that hold each.

    N-gram i has `lengths[i]` words, spelled by points[starts[i]:ends[i]], code points with a 0 between words. Its items
    are items[owners[i]:owners[i + 1]], and `places` says at which word of the item it first begins.
    """

    hashes: U64  # uint64[g]
    lengths: I64  # int64[g]
    starts: I64  # int64[g]
    ends: I64  # int64[g]
    points: U32  # uint32[...]
    sieve: U64  # uint64[a power of two]: a bit for each possible top of a hash, set where an n-gram has it
    owners: I64  # int64[g + 1]
    items: I64  # int64[o]
    places: I64  # int64[o]
    hash_bits: int

    @property
    def num_ngrams(self) -> int:
        """Distinct n-grams."""
        return len(self.hashes)


@dataclass(frozen=True, kw_only=True)
class IndexStats:
    """What became of the items."""

    num_items: int
    num_words: int
    num_ngrams: int
    num_whole: int  # items that are one n-gram of all their words
    num_too_short: int  # items that no n-gram stands for: overlap cannot match them


@dataclass(frozen=True, kw_only=True)
class UnitOverlap:
    """What one unit's rows hold: how many texts and rows hold each n-gram, and which texts, unless they are too many.

    Rows of the same text are one text, and its first row stands for it.
    """

    found: I64  # int64[k, 3] of (n-gram, number of texts, number of rows), ascending
    hits: I64  # int64[h, 2] of (n-gram, row), ascending; none of an n-gram that more than max_documents texts hold


@dataclass(frozen=True, kw_only=True)
class UnitStats:
    """What was looked at, and how many distinct n-grams were found in it."""

    num_documents: int
    num_bytes: int
    num_ngrams_found: int


@dataclass(frozen=True, kw_only=True)
class OverlapHits:
    """What all units hold, as tables.

    hits: item, document, num_ngrams (the item's n-grams that the document holds), item_ngrams (all that it has),
    excerpt (the words of the first one in the item); by item and document, of copies the first one alone.
    boilerplate: ngram (its words), num_documents (copies counted), num_items; by falling number of documents.
    """

    hits: pa.Table
    boilerplate: pa.Table


@dataclass(frozen=True, kw_only=True)
class HitStats:
    """What was found: distinct n-grams, items and documents."""

    num_ngrams_found: int
    num_boilerplate: int
    num_items: int
    num_documents: int
    num_left_out: int  # items that documents hold, but only by boilerplate


def index_items(
    items: pa.Array | pa.ChunkedArray, *, ngram: int = 13, min_words: int = 8, hash_bits: int = 64
) -> tuple[OverlapIndex, IndexStats]:
    """The n-grams of `ngram` words of each text; a text of fewer is one n-gram, if it has `min_words`.

    Texts are string, large_string or dictionary, without nulls. Fewer `hash_bits` make collisions, and no other result.

    >>> index, stats = index_items(pa.array(["one two three four", "three", "one two"]), ngram=3, min_words=2)
    >>> sorted(spelled(index, np.arange(index.num_ngrams)).to_pylist()), stats.num_too_short
    (['one two', 'one two three', 'two three four'], 1)
    """
    from pipeline_assets.transforms import overlap_kernels  # numba takes a second to import

    assert 1 <= min_words <= ngram, (min_words, ngram)
    assert 1 <= hash_bits <= 64, hash_bits
    points, bounds, words, num_words = _spelled_words(items)
    lengths = np.where(num_words >= ngram, ngram, np.where(num_words >= min_words, num_words, 0))
    num_ngrams = np.where(lengths > 0, num_words - lengths + 1, 0)
    item, place = positions(num_ngrams)
    first, length = (np.cumsum(num_words) - num_words)[item] + place, lengths[item]
    hashes = np.empty(len(first), np.uint64)
    overlap_kernels.hash_ngrams(words, first, length, _mask(hash_bits), hashes)
    order = np.argsort(hashes, kind="stable")
    hashes, first, length = hashes[order], first[order], length[order]
    starts, ends = bounds[first], bounds[first + length] - 1  # without the separator after the last word
    numbers = np.empty(len(order), np.int64)
    overlap_kernels.number_ngrams(hashes, starts, ends, points, numbers)
    distinct, number = np.unique(numbers, return_inverse=True)
    owned, owners, places = _first_places(number, item[order], place[order])
    index = OverlapIndex(
        hashes=hashes[distinct],
        lengths=length[distinct],
        starts=starts[distinct],
        ends=ends[distinct],
        points=points,
        sieve=_sieve(hashes[distinct]),
        owners=np.searchsorted(owned, np.arange(len(distinct) + 1)).astype(np.int64),
        items=owners,
        places=places,
        hash_bits=hash_bits,
    )
    return index, IndexStats(
        num_items=len(num_words),
        num_words=int(num_words.sum()),
        num_ngrams=index.num_ngrams,
        num_whole=int(((lengths > 0) & (num_words < ngram)).sum()),
        num_too_short=int((lengths == 0).sum()),
    )


def _mask(hash_bits: int) -> np.uint64:
    """The top bits of a hash that are used."""
    return np.uint64((1 << 64) - (1 << (64 - hash_bits)))


def _first_places(numbers: I64, items: I64, places: I64) -> tuple[I64, I64, I64]:
    """Of (n-gram, item, place) the first place of each n-gram in each item, by n-gram and item.

    Those of one n-gram are given by item and place; n-grams of equal hash are mixed.
    """
    order = np.argsort(numbers, kind="stable")
    numbers, items = numbers[order], items[order]
    is_first = is_run_start(numbers, items)
    return numbers[is_first], items[is_first], places[order][is_first]


def _sieve(ascending: U64) -> U64:
    bits = max(6, (SIEVE_BITS * len(ascending) - 1).bit_length())
    slots = ascending >> np.uint64(64 - bits)
    sieve = np.zeros(1 << (bits - 6), np.uint64)
    place, starts = np.unique(slots >> np.uint64(6), return_index=True)
    if len(place):
        sieve[place] = np.bitwise_or.reduceat(np.left_shift(np.uint64(1), slots & np.uint64(63)), starts)
    return sieve


def _spelled_words(items: pa.Array | pa.ChunkedArray) -> tuple[U32, I64, U64, I64]:
    """All items' words: code points, where each word begins among them (and the end), hashes; words an item."""
    from pipeline_assets.transforms import overlap_kernels  # numba takes a second to import

    points, bounds, hashes = [np.empty(0, np.uint32)], [np.zeros(1, np.int64)], [np.empty(0, np.uint64)]
    counts, num_points = [np.empty(0, np.int64)], 0
    for data, offsets in utf8_blocks(items, BLOCK_BYTES):
        num_bytes, num_texts = int(offsets[-1] - offsets[0]), len(offsets) - 1
        some_points = np.empty(2 * num_bytes + num_texts, np.uint32)
        some_bounds = np.empty(num_bytes + 1, np.int64)
        some_hashes = np.empty(num_bytes, np.uint64)
        num_words = np.empty(num_texts, np.int64)
        total = overlap_kernels.spell_words(
            data, offsets, fold_table(), some_points, some_bounds, some_hashes, num_words
        )
        points.append(some_points[: some_bounds[total]].copy())
        bounds.append(some_bounds[1 : total + 1] + num_points)
        hashes.append(some_hashes[:total].copy())
        counts.append(num_words)
        num_points += int(some_bounds[total])
    return np.concatenate(points), np.concatenate(bounds), np.concatenate(hashes), np.concatenate(counts)


def find_overlap(
    texts: pa.Array | pa.ChunkedArray, doc_ids: U8, index: OverlapIndex, *, max_documents: int = 10
) -> tuple[UnitOverlap, UnitStats]:
    """The index's n-grams that a unit's texts (no nulls) hold; rows count from 0 within the unit.

    doc_ids is uint8[n, 32], equal where texts are. A text that holds an n-gram several times counts once. Of an n-gram
    that more than `max_documents` texts hold only their number is kept: that many are boilerplate, whatever other units
    hold.
    """
    assert doc_ids.shape == (len(texts), DOC_ID_BYTES), (len(texts), doc_ids.shape)
    counts = np.zeros((index.num_ngrams, 2), np.int64)
    hits, num_bytes = _search(texts, _copies(doc_ids), index, max_documents, counts)
    hits = hits[counts[hits[:, 0], 0] <= max_documents]
    found = np.flatnonzero(counts[:, 0])
    overlap = UnitOverlap(
        found=np.column_stack([found, counts[found]]), hits=hits[np.lexsort((hits[:, 1], hits[:, 0]))]
    )
    return overlap, UnitStats(num_documents=len(texts), num_bytes=num_bytes, num_ngrams_found=len(found))


def _copies(doc_ids: U8) -> I64:
    """How many rows have each row's text, told of its first row alone: uint8[n, 32] -> int64[n], else 0."""
    _, first, count = np.unique(whole_rows(doc_ids), return_index=True, return_counts=True)
    copies = np.zeros(len(doc_ids), np.int64)
    copies[first] = count
    return copies


def _search(
    texts: pa.Array | pa.ChunkedArray, copies: I64, index: OverlapIndex, max_documents: int, counts: I64
) -> tuple[I64, int]:
    """The first `max_documents` texts' rows of each n-gram, and the bytes read; all go into `counts` int64[g, 2].

    A row of no copies is one that an earlier row stands for.
    """
    from pipeline_assets.transforms import overlap_kernels  # numba takes a second to import

    kinds = np.unique(index.lengths)
    last_row = np.full(index.num_ngrams, -1, np.int64)
    hits, found = np.empty((HIT_BUFFER, 2), np.int64), [np.empty((0, 2), np.int64)]
    row = num_bytes = 0
    for data, offsets in utf8_blocks(texts, BLOCK_BYTES):
        cursor = np.zeros(1, np.int64)
        while len(kinds) and cursor[0] < len(offsets) - 1:
            num_hits = overlap_kernels.find_ngrams(
                data,
                offsets,
                fold_table(),
                index.hashes,
                index.lengths,
                index.starts,
                index.ends,
                index.points,
                index.sieve,
                np.uint64(64 - 6 - (len(index.sieve).bit_length() - 1)),
                kinds,
                _mask(index.hash_bits),
                row,
                copies,
                max_documents,
                last_row,
                counts,
                cursor,
                hits,
            )
            found.append(hits[:num_hits].copy())
        row += len(offsets) - 1
        num_bytes += int(offsets[-1] - offsets[0])
    return np.concatenate(found), num_bytes


def overlap_hits(
    index: OverlapIndex,
    units: Sequence[UnitOverlap],
    first_documents: Sequence[int],
    doc_ids: U8,
    *,
    max_documents: int = 10,
) -> tuple[OverlapHits, HitStats]:
    """Which documents hold which items, over all units, boilerplate left out.

    `first_documents` numbers each unit's first row, `doc_ids` uint8[n, 32] are those of all rows, and `max_documents`
    is what the units were searched with. The order of the units and their cuts change nothing.
    """
    num_documents = np.zeros(index.num_ngrams, np.int64)
    is_boilerplate = np.zeros(index.num_ngrams, np.bool_)
    for unit in units:
        num_documents[unit.found[:, 0]] += unit.found[:, 2]
        is_boilerplate[unit.found[unit.found[:, 1] > max_documents, 0]] = True
    found_hits = [unit.hits + np.array([0, first]) for unit, first in zip(units, first_documents, strict=True)]
    hits = _one_a_text(np.concatenate([np.empty((0, 2), np.int64), *found_hits]), doc_ids)
    is_boilerplate |= np.bincount(hits[:, 0], minlength=index.num_ngrams) > max_documents
    table = _hit_table(index, hits[~is_boilerplate[hits[:, 0]]])
    found, common = np.flatnonzero(num_documents), np.flatnonzero(is_boilerplate)
    common = common[np.argsort(-num_documents[common], kind="stable")]
    boilerplate = {
        "ngram": spelled(index, common),
        "num_documents": pa.array(num_documents[common]),
        "num_items": pa.array(np.diff(index.owners)[common]),
    }
    matched = np.unique(table.column("item"))
    return OverlapHits(hits=table, boilerplate=pa.table(boilerplate)), HitStats(
        num_ngrams_found=len(found),
        num_boilerplate=len(common),
        num_items=len(matched),
        num_documents=len(np.unique(table.column("document"))),
        num_left_out=len(np.setdiff1d(index.items[_owners_of(index, found)[1]], matched)),
    )


def _one_a_text(hits: I64, doc_ids: U8) -> I64:
    """Of (n-gram, document) the first document of each text that holds the n-gram, by n-gram."""
    documents, place = np.unique(hits[:, 1], return_inverse=True)
    text = np.unique(whole_rows(doc_ids[documents]), return_inverse=True)[1][place]
    order = np.lexsort((hits[:, 1], text, hits[:, 0]))
    hits, text = hits[order], text[order]
    return hits[is_run_start(hits[:, 0], text)]


def _hit_table(index: OverlapIndex, hits: I64) -> pa.Table:
    hit, owner = _owners_of(index, hits[:, 0])
    ngram, document, item = hits[hit, 0], hits[hit, 1], index.items[owner]
    order = np.lexsort((index.places[owner], document, item))
    ngram, document, item = ngram[order], document[order], item[order]
    starts = np.flatnonzero(is_run_start(item, document))
    return pa.table(
        {
            "item": pa.array(item[starts], pa.int64()),
            "document": pa.array(document[starts], pa.int64()),
            "num_ngrams": pa.array(np.diff(starts, append=len(order)), pa.int64()),
            "item_ngrams": pa.array(np.bincount(index.items)[item[starts]], pa.int64()),
            "excerpt": spelled(index, ngram[starts]),
        }
    )


def _owners_of(index: OverlapIndex, ngrams: I64) -> tuple[I64, I64]:
    """Every item of every n-gram: the number within `ngrams`, and the place in the index's `items`."""
    number, place = positions(np.diff(index.owners)[ngrams])
    return number, index.owners[ngrams][number] + place


def spelled(index: OverlapIndex, ngrams: I64) -> pa.Array:
    """The words of n-grams, with a space between: int64[m] -> large_string[m]."""
    ranges = zip(index.starts[ngrams].tolist(), index.ends[ngrams].tolist(), strict=True)
    spellings = [index.points[start:end].astype("<u4").tobytes().decode("utf-32-le") for start, end in ranges]
    return pa.array([spelling.replace("\0", " ") for spelling in spellings], pa.large_string())


def check_universe(
    reference_set: str, num_reference_texts: int, num_corpus_documents: int, universe_documents: int
) -> None:
    """RecipeError for a universe that is smaller than the corpus or the set, which were drawn from it."""
    drawn = max(num_reference_texts, num_corpus_documents)
    if universe_documents < drawn:
        raise RecipeError(
            f"reference set {reference_set}: expected universe_documents of at least {drawn:,}, since"
            f" {num_corpus_documents:,} documents of the corpus and {num_reference_texts:,} texts of the set come from"
            f" it, found {universe_documents:,}. Mend references in the recipe."
        )


def expected_by_chance(num_reference_texts: int, num_corpus_documents: int, universe_documents: int) -> float:
    """Documents that a corpus and a reference set share if both are independent draws from one universe: n K / N.

    The mean of the hypergeometric distribution; many more found than expected means that the draws were not
    independent. Both are in the universe: see `check_universe`.

    >>> round(expected_by_chance(88_000, 2_424_000, 1_300_000_000))
    164
    """
    return num_reference_texts * num_corpus_documents / universe_documents
