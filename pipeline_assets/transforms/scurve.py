"""The measured S-curve: texts in, near-copies of known similarity planted, the share that signatures flag out.

A hash family whose members are correlated crashes nothing and still signs; only the share of flagged pairs at each
similarity shows it. The pairs are planted by their own random generator: pairs that were found by the signatures under
test read high at low similarity. Cost: as signing and exact Jaccard of the planted texts; 600 texts of 300 words with
20 copies each take about a second.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, sqrt
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pipeline_assets.transforms.arrays import F64, I64, U8
from pipeline_assets.transforms.jaccard import jaccard_of_pairs
from pipeline_assets.transforms.lsh import collision_probability, shared_bands
from pipeline_assets.transforms.minhash import MinHashParams, sign_documents
from pipeline_assets.transforms.words import words
from training_io.hashing import keyed_hash

Signer = Callable[[pa.Array, MinHashParams], tuple[npt.NDArray[Any], Any]]

CHARACTERS_PER_WORD = 10  # looked at for each word that is wanted; most texts have shorter words
NORMAL_95 = 1.959963984540054  # the 97.5 % point of the normal distribution
MAX_ABS_Z = 4.0  # chance that a sound family exceeds it in one of 20 bins: 0.1 %
MAX_ERROR_DEVIATION = 0.25  # of the observed from the expected error, as a share of it
FEW_TEXTS = 16  # the copies of one text err alike: with fewer texts than this, both limits are wider


@dataclass(frozen=True, kw_only=True)
class PlantedPairs:
    """Originals and their near-copies; each row of `pairs` (int64[m, 2]) is an original and one copy."""

    texts: tuple[str, ...]
    pairs: I64


@dataclass(frozen=True, kw_only=True)
class MeasuredPairs:
    """What was seen of each planted pair, in the order of its planting: the counts that all else follows from."""

    original: I64  # number of the text that was copied
    similarity: F64  # exact Jaccard similarity of the two shingle sets
    num_equal: I64  # of the signatures' values
    is_flagged: npt.NDArray[np.bool_]  # whether the pair shares a band


@dataclass(frozen=True, kw_only=True)
class ScurveBin:
    """Pairs whose exact similarity lies in [start, end): how many were flagged, how many the formula expects."""

    start: float
    end: float
    similarity: float  # mean of the pairs' own
    num_pairs: int
    num_flagged: int
    predicted: float
    low: float
    high: float
    z: float

    @property
    def flagged(self) -> float:
        """Share of the bin's pairs that share a band."""
        return self.num_flagged / self.num_pairs


@dataclass(frozen=True, kw_only=True)
class ScurveMeasurement:
    """The curve by bins, and how far signatures miss the exact similarity, over the copies of `num_texts` texts.

    `signature_error` is the root mean square of (share of equal values - s), `expected_error` that of
    sqrt(s (1 - s) / num_perm); `mean_bias` is the mean miss with its sign.
    """

    bins: tuple[ScurveBin, ...]
    num_texts: int
    num_pairs: int
    num_flagged: int
    signature_error: float
    expected_error: float
    mean_bias: float

    @property
    def max_abs_z(self) -> float:
        """Largest distance of a bin from the formula, in standard deviations; 0 where nothing was measured."""
        return max((abs(one.z) for one in self.bins), default=0.0)

    @property
    def error_ratio(self) -> float:
        """Observed over expected error of the signatures; correlated hash functions make it large."""
        if not self.expected_error:  # every pair is equal, or shares nothing: there is nothing to err about
            return inf if self.signature_error else 1.0
        return self.signature_error / self.expected_error

    @property
    def agrees(self) -> bool:
        """Whether the curve and the error are those of independent hash functions."""
        slack = sqrt(max(1.0, FEW_TEXTS / max(1, self.num_texts)))
        is_near = abs(self.error_ratio - 1) <= slack * MAX_ERROR_DEVIATION
        return self.num_pairs > 0 and self.max_abs_z <= slack * MAX_ABS_Z and is_near


def draw_order(doc_ids: U8, key: int) -> I64:
    """Rows by the keyed hash of their doc_id, each doc_id once: uint8[n, 32] -> int64[k]; the first ones are a sample.

    Depends on which documents there are, not on where they stand.
    """
    _, rows = np.unique(keyed_hash(doc_ids, key), return_index=True)
    return rows.astype(np.int64)


def middle_words(text: str, max_words: int) -> list[str]:
    """At most so many words from the middle of a text: many texts begin alike, with a licence or a menu.

    >>> middle_words("One, two, three, four, five.", 3)
    ['two', 'three', 'four']
    """
    start = max(0, (len(text) - CHARACTERS_PER_WORD * max_words) // 2)
    found = words(text[start : start + CHARACTERS_PER_WORD * max_words])
    first = max(0, (len(found) - max_words) // 2)
    return found[first : first + max_words]


def plant_pairs(texts: Sequence[str], *, copies_per_text: int, max_replaced_share: float, seed: int) -> PlantedPairs:
    """Copies of texts in which a random share of the words, 0 to the maximum, became words that occur nowhere.

    >>> plant_pairs(["a b c d"], copies_per_text=1, max_replaced_share=0.0, seed=1).texts
    ('a b c d', 'a b c d')
    """
    assert 0 <= max_replaced_share <= 1, max_replaced_share
    generator = np.random.default_rng(seed)
    prefix = _absent_prefix(texts)
    copies: list[str] = []
    for text in texts:
        originals = words(text)
        shares = generator.uniform(0, max_replaced_share, copies_per_text)
        for is_replaced in generator.random((copies_per_text, len(originals))) < shares[:, None]:
            copy = originals.copy()
            for position in np.flatnonzero(is_replaced).tolist():
                copy[position] = f"{prefix}{len(copies)}n{position}"
            copies.append(" ".join(copy))
    first = np.repeat(np.arange(len(texts)), copies_per_text)
    second = np.arange(len(texts), len(texts) + len(copies))
    return PlantedPairs(texts=(*texts, *copies), pairs=np.column_stack([first, second]).astype(np.int64))


def measure_scurve(
    texts: Sequence[str], pairs: I64, params: MinHashParams, *, num_bins: int = 20, sign: Signer = sign_documents
) -> tuple[MeasuredPairs, ScurveMeasurement]:
    """Flagged pairs by exact similarity against 1 - (1 - s^r)^b, with 95 % Wilson intervals (Wilson 1927).

    A bin's z is (flagged - sum of p) / sqrt(sum of p (1 - p)), p taken at each pair's own similarity; a variance below
    one counts as one, so that a single rare event condemns nobody. Pairs that have a text in common are not quite
    independent: few copies of many texts measure more than many copies of few. `sign` is the family under test.
    """
    texts_array = pa.array(texts, type=pa.large_string())
    signatures, _ = sign(texts_array, params)
    left, right = signatures[pairs[:, 0]], signatures[pairs[:, 1]]
    measured = MeasuredPairs(
        original=pairs[:, 0],
        similarity=jaccard_of_pairs(texts_array, pairs, params.ngram),
        num_equal=(left == right).sum(axis=1, dtype=np.int64),
        is_flagged=shared_bands(left, right, params) > 0,
    )
    return measured, _summarized(measured, params, num_bins)


def _summarized(measured: MeasuredPairs, params: MinHashParams, num_bins: int) -> ScurveMeasurement:
    similarity = measured.similarity
    miss = measured.num_equal / params.num_perm - similarity
    predicted = collision_probability(similarity, params.num_bands, params.rows_per_band)
    assert isinstance(predicted, np.ndarray)
    num_pairs = max(1, len(similarity))  # nothing measured: every mean is 0
    return ScurveMeasurement(
        bins=_bins(measured, predicted, num_bins),
        num_texts=len(np.unique(measured.original)),
        num_pairs=len(similarity),
        num_flagged=int(measured.is_flagged.sum()),
        signature_error=sqrt(float((miss**2).sum()) / num_pairs),
        expected_error=sqrt(float((similarity * (1 - similarity)).sum()) / num_pairs / params.num_perm),
        mean_bias=float(miss.sum()) / num_pairs,
    )


def _bins(measured: MeasuredPairs, predicted: F64, num_bins: int) -> tuple[ScurveBin, ...]:
    bin_of = np.minimum((measured.similarity * num_bins).astype(np.int64), num_bins - 1)
    return tuple(
        _bin(number / num_bins, (number + 1) / num_bins, measured, predicted, np.flatnonzero(bin_of == number))
        for number in np.unique(bin_of).tolist()
    )


def _bin(start: float, end: float, measured: MeasuredPairs, predicted: F64, inside: I64) -> ScurveBin:
    num_pairs, num_flagged = len(inside), int(measured.is_flagged[inside].sum())
    low, high = wilson_interval(num_flagged, num_pairs)
    due = predicted[inside]
    return ScurveBin(
        start=start,
        end=end,
        similarity=float(measured.similarity[inside].mean()),
        num_pairs=num_pairs,
        num_flagged=num_flagged,
        predicted=float(due.mean()),
        low=low,
        high=high,
        z=(num_flagged - float(due.sum())) / sqrt(max(float((due * (1 - due)).sum()), 1.0)),
    )


def wilson_interval(num_hits: int, num_trials: int) -> tuple[float, float]:
    """95 % interval of a share that was observed as hits of trials (Wilson 1927).

    >>> [round(limit, 3) for limit in wilson_interval(26, 100)]
    [0.184, 0.354]
    """
    share, weight = num_hits / num_trials, NORMAL_95**2 / num_trials
    centre = (share + weight / 2) / (1 + weight)
    spread = sqrt(weight * (share * (1 - share) + weight / 4)) / (1 + weight)
    return max(0.0, centre - spread), min(1.0, centre + spread)


def _absent_prefix(texts: Sequence[str]) -> str:
    prefix = "planted"
    while any(prefix in text.lower() for text in texts):
        prefix += "x"
    return prefix
