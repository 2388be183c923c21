"""Exact similarity and overlap by another route than the kernels': Python's words, their runs, the formula's hashes."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pipeline_assets.reference_hits import BOILERPLATE_NAME, overlaps_of
from pipeline_assets.sections.references import Overlap
from pipeline_assets.source import ROWS_NAME
from pipeline_assets.stripes import Stage, units_in
from pipeline_assets.transforms.words import words
from resources.artifact_store import ArtifactRef
from training_io.hashing import derive_seed, keyed_hash, mix64

Run = tuple[str, ...]
Runs = set[Run]
ItemsByRun = dict[Run, set[bytes]]
Hashes = npt.NDArray[np.uint32]

BASE, COUNT = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93
MASK_64 = (1 << 64) - 1
MAX_COMPARED_BYTES = 4_000_000  # of texts that one law compares: about a second


def runs_in_order(text: str, ngram: int) -> list[Run]:
    """The runs of `ngram` words of a text, all words as one run where there are fewer, none without words."""
    found = words(text)
    return [tuple(found[at : at + ngram]) for at in range(max(1, len(found) - ngram + 1))] if found else []


def word_runs(text: str, ngram: int) -> Runs:
    """The distinct ones of `runs_in_order`."""
    return set(runs_in_order(text, ngram))


def shingle_hashes(text: str, ngram: int) -> Hashes:
    """The distinct 32-bit hashes of a text's shingles, ascending, from their formula: uint32[k].

    What the similarity of two texts is counted from: two shingles of one hash are one.
    """
    hashes = np.array([_word_hash(word) for word in words(text)], np.uint64)
    size = min(ngram, len(hashes))
    if not size:
        return np.empty(0, np.uint32)
    weights = np.array([pow(BASE, size - 1 - place, 1 << 64) for place in range(size)], np.uint64)
    sums = (np.lib.stride_tricks.sliding_window_view(hashes, size) * weights).sum(axis=1, dtype=np.uint64)
    mixed = mix64(sums + np.uint64(size * COUNT & MASK_64))
    return np.unique(mixed >> np.uint64(32)).astype(np.uint32)


@lru_cache(maxsize=1 << 16)
def _word_hash(word: str) -> int:
    value = 0xCBF29CE484222325
    for character in word:
        value = (value ^ ord(character)) * 0x100000001B3 & MASK_64
    value = (value ^ value >> 33) * 0xFF51AFD7ED558CCD & MASK_64
    value = (value ^ value >> 33) * 0xC4CEB9FE1A85EC53 & MASK_64
    return value ^ value >> 33


def jaccard(left: Hashes, right: Hashes) -> float:
    """Shared of all hashes of two texts; 0 where neither has any.

    >>> jaccard(np.array([1, 2, 3], np.uint32), np.array([2, 3, 4], np.uint32))
    0.5
    """
    shared = len(np.intersect1d(left, right, assume_unique=True))
    return shared / max(1, len(left) + len(right) - shared)


def within_budget(sizes: Sequence[int], keys: Sequence[int]) -> Iterator[int]:
    """Which items are looked at, by their keys, lowest first, while they come to so many bytes; larger ones are not.

    >>> list(within_budget([9, 3_000_000, 2_000_000], [7, 5, 6]))
    [1, 0]
    """
    left = MAX_COMPARED_BYTES
    for item in map(int, np.argsort(np.asarray(keys, np.uint64), kind="stable")):
        if sizes[item] <= left:
            left -= sizes[item]
            yield item


def sampling_keys(doc_ids: Sequence[bytes], seed: int) -> list[int]:
    """A keyed hash of each doc_id, by which a sample is drawn."""
    rows = np.frombuffer(b"".join(doc_ids), np.uint8).reshape(-1, 32)
    return [int(key) for key in keyed_hash(rows, derive_seed(seed, "judged")).tolist()]


def are_alike(left: Runs, right: Runs, threshold: float) -> bool:
    """Whether the Jaccard similarity of two sets is at least the threshold; without a run nothing is alike.

    >>> are_alike({("a",), ("b",)}, {("b",)}, 0.5)
    True
    """
    union = len(left | right)
    return bool(union) and len(left & right) / union >= threshold


def runs_of_items(items: Mapping[bytes, str], overlap: Overlap) -> ItemsByRun:
    """Which items hold each run of words that overlap looks for: runs of `ngram`, or a shorter item's words as one."""
    found: ItemsByRun = {}
    for item, text in items.items():
        if len(words(text)) >= overlap.min_words:
            for run in word_runs(text, overlap.ngram):
                found.setdefault(run, set()).add(item)
    return found


def searched_runs(stage: Stage, lsh_clusters: ArtifactRef, reference_sets: ArtifactRef) -> dict[str, ItemsByRun]:
    """Of each set that is searched by overlap, the runs of words that are not written down as boilerplate."""
    common = stage.table(lsh_clusters, BOILERPLATE_NAME).to_pylist()
    found = {}
    for name, overlap in overlaps_of(stage.recipe).items():
        items = stage.table(reference_sets, f"{name}.parquet")
        texts = dict(zip(items.column("doc_id").to_pylist(), items.column("text").to_pylist(), strict=True))
        boilerplate = {tuple(row["ngram"].split(" ")) for row in common if row["reference_set"] == name}
        runs = runs_of_items(texts, overlap)
        found[name] = {run: holders for run, holders in runs.items() if run not in boilerplate}
    return found


def items_in(text: str, runs: ItemsByRun) -> dict[bytes, set[tuple[str, ...]]]:
    """The items of which a text holds a run, with those runs."""
    found: dict[bytes, set[tuple[str, ...]]] = {}
    for length in {len(run) for run in runs}:
        for run in word_runs(text, length) & runs.keys():
            for item in runs[run]:
                found.setdefault(item, set()).add(run)
    return found


def texts_of(stage: Stage, raw_row_groups: ArtifactRef, doc_ids: Iterable[bytes]) -> dict[bytes, str]:
    """The texts of some documents."""
    wanted = pa.array(sorted(set(doc_ids)), pa.binary())
    found: dict[bytes, str] = {}
    for unit in units_in(stage, raw_row_groups):
        table = stage.table(unit, ROWS_NAME, ["doc_id", "text"])
        rows = table.filter(pc.is_in(table.column("doc_id"), wanted))
        found.update(zip(rows.column("doc_id").to_pylist(), rows.column("text").to_pylist(), strict=True))
    return found


def documents_with_run(stage: Stage, raw_row_groups: ArtifactRef, run: str, enough: int) -> tuple[int, int]:
    """How many texts hold a run of words, and how many documents, copies counted; counted until there are enough."""
    wanted = tuple(run.split(" "))
    longest = max(wanted, key=len)
    found: list[bytes] = []
    for unit in units_in(stage, raw_row_groups):
        rows = stage.table(unit, ROWS_NAME, ["doc_id", "text"])
        likely = rows.filter(pc.match_substring(rows.column("text"), longest, ignore_case=True))
        for doc_id, text in zip(likely.column("doc_id").to_pylist(), likely.column("text").to_pylist(), strict=True):
            found += [doc_id] * (wanted in word_runs(text, len(wanted)))
            if len(found) == enough:
                return len(set(found)), enough
    return len(set(found)), len(found)
