"""deduplication: which alike documents end in one cluster, and what else does; against text-dedup.

Documents are the measured text's, and near copies of them with a random share of the words replaced. The truth is the
exact Jaccard similarity of sets of 5 lower-cased words, over all pairs. Of the pairs that are at least so alike,
`recall` is the share that is in one cluster, `band_recall` the share that has a band in common, and `expected_recall`
what the latter should be, the mean of 1 - (1 - s^r)^b. `precision` is the share of all pairs in one cluster that are at
least so alike: a cluster is closed, so a chain joins its ends.

text-dedup runs its own functions with its published defaults: 250 permutations, 5-grams, and the bands that it finds
best for the threshold 0.7, 25 of 10. It splits words at each single character that is none, so that empty words stand
between some, and near copies are more alike in its sets than in the judge's. Both sides start from texts in memory,
ours in Arrow, and end with a cluster a document. That a second pass over the kept documents removes nothing is asserted
of ours.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from bench import Bench
from corpus import limited, write_plain
from measure import Row, alternate, require_same, seconds_of
from peer_environment import running_peer
from scipy.sparse import csr_array

from pipeline_assets.transforms.components import connected_components
from pipeline_assets.transforms.jaccard import jaccard_of_pairs, shingle_sets
from pipeline_assets.transforms.lsh import band_keys, candidate_pairs, collision_probability, shared_bands
from pipeline_assets.transforms.minhash import MinHashParams, sign_documents

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

WORD = re.compile(r"\w+")
THRESHOLDS = (0.7, 0.8, 0.9)
MAX_BYTES = 4_000_000  # of originals
MIN_WORDS, MAX_WORDS = 50, 2_000  # the peer takes tens of microseconds a word
COPIES, MAX_REPLACED_SHARE = 2, 0.08
MAX_RUNS = 3


@dataclass(frozen=True, kw_only=True)
class Alike:
    """All pairs of documents that are at least as alike as the lowest threshold, i < j, and their similarity."""

    pairs: I64
    similarities: F64


@dataclass(frozen=True, kw_only=True)
class Found:
    """What one side found: a cluster a document, which of the alike pairs share a band, and its bands."""

    labels: I64
    shares_band: Bools
    num_bands: int
    rows_per_band: int


def measure(bench: Bench) -> list[Row]:
    """One row: documents a second, with recall and precision of both sides."""
    texts, planted = with_copies(limited(bench.text.texts, MAX_BYTES))
    params = MinHashParams()
    alike = alike_pairs(texts, params.ngram)
    require_planted(texts, planted, alike)
    require_same("deduplication: documents that a second pass removes", num_removed_again(texts, params), 0)
    folder = bench.scratch / "deduplication"
    write_plain(folder, "texts", texts)
    np.save(folder / "pairs.npy", alike.pairs)
    answers: list[dict[str, Any]] = []
    with running_peer(bench.peer_python, "text_dedup_minhash.py", folder) as ask:

        def peer_seconds() -> float:
            answers.append(ask("run"))
            return float(answers[-1]["seconds"])

        contenders = {"ours": lambda: seconds_of(lambda: cluster(texts, params)), "peer": peer_seconds}
        seconds = alternate(min(bench.runs, MAX_RUNS), contenders)
        peer = ask("versions")["versions"]
    ours = quality_of(found_by_us(texts, params, alike), alike)
    return [row_of(len(texts), seconds, peer, ours, quality_of(found_by_peer(answers[-1]), alike))]


def with_copies(texts: pa.LargeStringArray) -> tuple[pa.LargeStringArray, I64]:
    """Texts of 50 to 2,000 words and two near copies of each, and int64[m, 2] of an original and its copy."""
    generator = np.random.default_rng(0)
    originals = [text for text in texts.to_pylist() if MIN_WORDS <= len(WORD.findall(text)) <= MAX_WORDS]
    shares = generator.uniform(0, MAX_REPLACED_SHARE, (COPIES, len(originals)))
    copies = [
        near_copy(text, share, generator) for row in shares for text, share in zip(originals, row.tolist(), strict=True)
    ]
    pairs = np.column_stack([np.tile(np.arange(len(originals)), COPIES), len(originals) + np.arange(len(copies))])
    return pa.array(originals + copies, pa.large_string()), pairs


def near_copy(text: str, share: float, generator: np.random.Generator) -> str:
    """The text with about a share of its words replaced by random numbers, everything else as it was."""
    return WORD.sub(lambda word: str(generator.integers(1 << 60)) if generator.random() < share else word.group(), text)


def alike_pairs(texts: pa.LargeStringArray, ngram: int) -> Alike:
    """Every pair that is alike: a product of the matrix of sets with itself counts what each two have in common."""
    hashes, offsets = shingle_sets(texts, ngram)
    distinct, columns = np.unique(hashes, return_inverse=True)
    sets = csr_array((np.ones(len(columns), dtype=np.int32), columns, offsets), shape=(len(texts), len(distinct)))
    shared = (sets @ sets.T).tocoo()
    pairs, sizes = np.column_stack(shared.coords).astype(np.int64), np.diff(offsets)
    similarities = shared.data / (sizes[pairs].sum(axis=1) - shared.data)
    is_alike = (pairs[:, 0] < pairs[:, 1]) & (similarities >= min(THRESHOLDS))
    return Alike(pairs=pairs[is_alike], similarities=similarities[is_alike])


def require_planted(texts: pa.LargeStringArray, planted: I64, alike: Alike) -> None:
    """Refuse to judge unless the planted pairs have the similarity that the evidence of a removal would state."""
    found = dict(zip(map(tuple, alike.pairs.tolist()), alike.similarities.tolist(), strict=True))
    similarities = zip(map(tuple, planted.tolist()), jaccard_of_pairs(texts, planted).tolist(), strict=True)
    expected = {pair: similarity for pair, similarity in similarities if similarity >= min(THRESHOLDS)}
    is_same = {pair: found.get(pair) for pair in expected} == expected
    require_same("deduplication: similarity of planted pairs", is_same, True)


def cluster(texts: pa.LargeStringArray, params: MinHashParams) -> I64:
    """What is timed of ours: a label a document."""
    signatures, _ = sign_documents(texts, params)
    return connected_components(len(texts), candidate_pairs(band_keys(signatures, params)))


def num_removed_again(texts: pa.LargeStringArray, params: MinHashParams) -> int:
    """Documents that are removed from those that were kept."""
    labels = cluster(texts, params)
    kept = texts.filter(pa.array(labels == np.arange(len(labels))))
    return int((cluster(kept, params) != np.arange(len(kept))).sum())


def found_by_us(texts: pa.LargeStringArray, params: MinHashParams, alike: Alike) -> Found:
    """Our clusters, and which alike pairs share a band."""
    signatures, _ = sign_documents(texts, params)
    num_shared = shared_bands(signatures[alike.pairs[:, 0]], signatures[alike.pairs[:, 1]], params)
    return Found(
        labels=cluster(texts, params),
        shares_band=num_shared > 0,
        num_bands=params.num_bands,
        rows_per_band=params.rows_per_band,
    )


def found_by_peer(answer: Mapping[str, Any]) -> Found:
    """The same of the peer."""
    return Found(
        labels=np.array(answer["labels"], dtype=np.int64),
        shares_band=np.array(answer["shares_band"], dtype=np.bool_),
        num_bands=answer["num_bands"],
        rows_per_band=answer["rows_per_band"],
    )


def quality_of(found: Found, alike: Alike) -> dict[str, float]:
    """Recall, band recall, expected recall and precision at each threshold; 1 where there is nothing to find."""
    expected = collision_probability(alike.similarities, found.num_bands, found.rows_per_band)
    assert isinstance(expected, np.ndarray)
    is_clustered = found.labels[alike.pairs[:, 0]] == found.labels[alike.pairs[:, 1]]
    sizes = np.unique(found.labels, return_counts=True)[1]
    num_clustered = int((sizes * (sizes - 1) // 2).sum())
    figures: dict[str, float] = {}
    for threshold in THRESHOLDS:
        is_wanted = alike.similarities >= threshold
        figures[f"pairs_{threshold}"] = int(is_wanted.sum())
        figures[f"recall_{threshold}"] = share_of(is_clustered[is_wanted])
        figures[f"band_recall_{threshold}"] = share_of(found.shares_band[is_wanted])
        figures[f"expected_recall_{threshold}"] = share_of(expected[is_wanted])
        figures[f"precision_{threshold}"] = (
            float((is_clustered & is_wanted).sum() / num_clustered) if num_clustered else 1.0
        )
    return figures


def share_of(values: Bools | F64) -> float:
    """The mean, 1 of nothing."""
    return float(values.mean()) if len(values) else 1.0


def row_of(
    num_documents: int, seconds: Mapping[str, Any], peer: str, ours: Mapping[str, float], theirs: Mapping[str, float]
) -> Row:
    """Times and both sides' figures; the note says most of them in words."""
    return Row(
        name="deduplication",
        amount=num_documents,
        unit="documents",
        ours_seconds=seconds["ours"],
        peer=f"{peer}, its defaults",
        peer_seconds=seconds["peer"],
        extra={**ours, **{f"peer_{name}": figure for name, figure in theirs.items()}},
        note="; ".join(_compared(threshold, ours, theirs) for threshold in THRESHOLDS),
    )


def _compared(threshold: float, ours: Mapping[str, float], theirs: Mapping[str, float]) -> str:
    figures = (
        f"{name} {ours[f'{key}_{threshold}']:.3f}, peer {theirs[f'{key}_{threshold}']:.3f}"
        for name, key in (
            ("recall", "recall"),
            ("by bands", "band_recall"),
            ("expected", "expected_recall"),
            ("precision", "precision"),
        )
    )
    return f"J ≥ {threshold} ({ours[f'pairs_{threshold}']:,} pairs): {'; '.join(figures)}"
