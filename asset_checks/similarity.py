"""Exact similarity and overlap by another route than the kernels': Python sets of word runs."""

from collections.abc import Iterable, Mapping

import pyarrow as pa
import pyarrow.compute as pc

from pipeline_assets.recipe import Overlap
from pipeline_assets.reference_hits import BOILERPLATE_NAME, overlaps_of
from pipeline_assets.source import ROWS_NAME
from pipeline_assets.stripes import Stage, units_in
from pipeline_assets.transforms.words import words
from resources.artifact_store import ArtifactRef

Runs = set[tuple[str, ...]]
ItemsByRun = dict[tuple[str, ...], set[bytes]]


def word_runs(text: str, ngram: int) -> Runs:
    """The distinct runs of `ngram` words of a text, all words as one run where there are fewer, none without words."""
    found = words(text)
    return {tuple(found[at : at + ngram]) for at in range(max(1, len(found) - ngram + 1))} if found else set()


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


def documents_with_run(stage: Stage, raw_row_groups: ArtifactRef, run: str, enough: int) -> int:
    """How many documents hold a run of words, counted until there are enough."""
    wanted = run.split(" ")
    longest = max(wanted, key=len)
    found = 0
    for unit in units_in(stage, raw_row_groups):
        texts = stage.table(unit, ROWS_NAME, ["text"]).column("text")
        likely = texts.filter(pc.match_substring(texts, longest, ignore_case=True))
        for text in likely.to_pylist():
            found += tuple(wanted) in word_runs(text, len(wanted))
            if found == enough:
                return found
    return found
