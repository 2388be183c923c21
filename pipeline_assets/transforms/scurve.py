"""The measured S-curve: texts in, near-copies of known similarity planted, the share that signatures flag out.

A hash family whose members are correlated crashes nothing and still signs; only the share of flagged pairs at each
similarity shows it. The pairs are planted by their own random generator: pairs that were found by the signatures under
test read high at low similarity. Each pair has words of its own, so that no two pairs share a shingle: texts of one
template would err alike, and their pairs would not be as many observations as they seem. Cost: as signing and exact
Jaccard of the planted texts; 600 texts of 150 words with 20 copies each take about a second.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, inf, lgamma, log, log1p, sqrt
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
MAX_FALSE_ALARMS = 0.001  # of sound families, over all bins of a curve together
MAX_ERROR_DEVIATION = 0.25  # of the observed from the expected error, as a share of it
MAX_ERROR_Z = 5.0  # standard deviations that chance explains: a few pairs err by more than that share


@dataclass(frozen=True, kw_only=True)
class PlantedPairs:
    """Originals and their near-copies; each row of `pairs` (int64[m, 2]) is an original and its copy, of no other."""

    texts: tuple[str, ...]
    pairs: I64


@dataclass(frozen=True, kw_only=True)
class MeasuredPairs:
    """What was seen of each planted pair, in the order of its planting: the counts that all else follows from."""

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
    chance: float  # at most that of so many flagged, or as few, by a sound family

    @property
    def flagged(self) -> float:
        """Share of the bin's pairs that share a band."""
        return self.num_flagged / self.num_pairs


@dataclass(frozen=True, kw_only=True)
class ScurveMeasurement:
    """The curve by bins, and how far signatures miss the exact similarity.

    `signature_error` is the root mean square of (share of equal values - s), `expected_error` that of
    sqrt(s (1 - s) / num_perm), `error_z` the distance of their squares in standard deviations (0 where every pair is
    equal, or shares nothing); `mean_bias` is the mean miss with its sign.
    """

    bins: tuple[ScurveBin, ...]
    num_pairs: int
    num_flagged: int
    signature_error: float
    expected_error: float
    error_z: float
    mean_bias: float

    @property
    def max_abs_z(self) -> float:
        """Largest distance of a bin from the formula, in standard deviations; 0 where nothing was measured."""
        return max((abs(one.z) for one in self.bins), default=0.0)

    @property
    def chance(self) -> float:
        """At most the chance that some bin of a sound family is as far off as the farthest one: Bonferroni's bound."""
        return min([1.0, *(len(self.bins) * one.chance for one in self.bins)])

    @property
    def error_ratio(self) -> float:
        """Observed over expected error of the signatures; correlated hash functions make it large."""
        if not self.expected_error:  # every pair is equal, or shares nothing: there is nothing to err about
            return inf if self.signature_error else 1.0
        return self.signature_error / self.expected_error

    @property
    def agrees(self) -> bool:
        """Whether the curve and the error are those of independent hash functions."""
        is_near = abs(self.error_ratio - 1) <= MAX_ERROR_DEVIATION or 0 < abs(self.error_z) <= MAX_ERROR_Z
        return self.num_pairs > 0 and self.chance >= MAX_FALSE_ALARMS and is_near


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
    """Texts, and copies in which a random share of the words, 0 to the maximum, became words that occur nowhere.

    Each pair has its own words for the text's, equal ones for equal ones, and none that another pair has.

    >>> plant_pairs(["To be or not to be"], copies_per_text=2, max_replaced_share=0.0, seed=1).texts[:2]
    ('0w0 1w0 2w0 3w0 0w0 1w0', '0w1 1w1 2w1 3w1 0w1 1w1')
    """
    assert 0 <= max_replaced_share <= 1, max_replaced_share
    generator = np.random.default_rng(seed)
    originals: list[str] = []
    copies: list[str] = []
    for text in texts:
        found = words(text)
        numbers = {word: number for number, word in enumerate(dict.fromkeys(found))}
        spelled = [f"{numbers[word]}w" for word in found]
        shares = generator.uniform(0, max_replaced_share, copies_per_text)
        for is_replaced in generator.random((copies_per_text, len(found))) < shares[:, None]:
            pair, changed = len(copies), spelled.copy()
            for position in np.flatnonzero(is_replaced).tolist():
                changed[position] = f"{position}n"
            originals.append(_said_by(spelled, pair))
            copies.append(_said_by(changed, pair))
    first = np.arange(len(copies), dtype=np.int64)
    return PlantedPairs(texts=(*originals, *copies), pairs=np.column_stack([first, first + len(copies)]))


def _said_by(some_words: Sequence[str], pair: int) -> str:
    return f"{pair} ".join([*some_words, ""]).rstrip()


def measure_scurve(
    texts: Sequence[str], pairs: I64, params: MinHashParams, *, num_bins: int = 20, sign: Signer = sign_documents
) -> tuple[MeasuredPairs, ScurveMeasurement]:
    """Flagged pairs by exact similarity against 1 - (1 - s^r)^b, with 95 % Wilson intervals (Wilson 1927).

    A bin's z is (flagged - sum of p) / sqrt(sum of p (1 - p)), p taken at each pair's own similarity; a variance below
    one counts as one. Pairs must share no shingle with others, as those of `plant_pairs`: then each is flagged or not
    whatever the others are, and a bin's `chance` is a bound. `sign` is the family under test.
    """
    texts_array = pa.array(texts, type=pa.large_string())
    signatures, _ = sign(texts_array, params)
    left, right = signatures[pairs[:, 0]], signatures[pairs[:, 1]]
    measured = MeasuredPairs(
        similarity=jaccard_of_pairs(texts_array, pairs, params.ngram),
        num_equal=(left == right).sum(axis=1, dtype=np.int64),
        is_flagged=shared_bands(left, right, params) > 0,
    )
    return measured, _summarized(measured, params, num_bins)


def _summarized(measured: MeasuredPairs, params: MinHashParams, num_bins: int) -> ScurveMeasurement:
    similarity = measured.similarity
    miss = measured.num_equal / params.num_perm - similarity
    variance = similarity * (1 - similarity) / params.num_perm  # of the share of equal values
    predicted = collision_probability(similarity, params.num_bands, params.rows_per_band)
    assert isinstance(predicted, np.ndarray)
    num_pairs = max(1, len(similarity))  # nothing measured: every mean is 0
    return ScurveMeasurement(
        bins=_bins(measured, predicted, num_bins),
        num_pairs=len(similarity),
        num_flagged=int(measured.is_flagged.sum()),
        signature_error=sqrt(float((miss**2).sum()) / num_pairs),
        expected_error=sqrt(float(variance.sum()) / num_pairs),
        error_z=_error_z(miss, variance, params.num_perm),
        mean_bias=float(miss.sum()) / num_pairs,
    )


def _error_z(miss: F64, variance: F64, num_perm: int) -> float:
    """How far the squared misses of binomial shares are from their variances, in standard deviations of their sum."""
    off = float((miss**2 - variance).sum())
    # A binomial share's fourth central moment is v² (3 - 6 / n) + v / n²; less v² it is the variance of squared misses.
    spread = float((variance**2 * (2 - 6 / num_perm) + variance / num_perm**2).sum())
    return off / sqrt(spread) if spread > 0 else 0.0


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
        chance=chance_of_share(num_flagged, num_pairs, float(due.mean())),
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


def chance_of_share(num_hits: int, num_trials: int, expected: float) -> float:
    """At most the chance that independent trials, expected to hit that share in the mean, are as far off or farther.

    Twice the tail of a binomial count, which is no less than that of unequal chances (Hoeffding 1956, theorem 4).

    >>> round(chance_of_share(70, 100, 0.5), 6), chance_of_share(50, 100, 0.5)
    (7.9e-05, 1.0)
    """
    off = num_hits - num_trials * expected
    if abs(off) < 1:
        return 1.0
    if off < 0:
        num_hits, expected = num_trials - num_hits, 1 - expected
    if expected <= 0:
        return 0.0
    ways = lgamma(num_trials + 1) - lgamma(num_hits + 1) - lgamma(num_trials - num_hits + 1)
    term = exp(ways + num_hits * log(expected) + (num_trials - num_hits) * log1p(-expected))
    tail = 0.0
    for hits in range(num_hits, num_trials + 1):
        tail += term
        term *= (num_trials - hits) / (hits + 1) * expected / (1 - expected)
    return min(1.0, 2 * tail)
