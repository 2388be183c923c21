"""The measured S-curve: texts in, near-copies of known similarity planted, the share that signatures flag out.

A hash family whose members are correlated crashes nothing and still signs; only the share of flagged pairs at each
similarity shows it. The pairs are planted by their own random generator: pairs that were found by the signatures under
test read high at low similarity. Cost: as signing and exact Jaccard of the planted texts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, sqrt
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pipeline_assets.transforms.arrays import F64, I64
from pipeline_assets.transforms.jaccard import jaccard_of_pairs
from pipeline_assets.transforms.lsh import collision_probability, shared_bands
from pipeline_assets.transforms.minhash import MinHashParams, sign_documents
from pipeline_assets.transforms.words import words

Signer = Callable[[pa.Array, MinHashParams], tuple[npt.NDArray[Any], Any]]

NORMAL_95 = 1.959964  # the 97.5 % point of the normal distribution
MAX_ABS_Z = 4.0  # chance that a sound family exceeds it in one of 20 bins: 0.1 %
ERROR_RATIO_RANGE = (0.8, 1.25)


@dataclass(frozen=True, kw_only=True)
class PlantedPairs:
    """Originals and their near-copies; each row of `pairs` (int64[m, 2]) is an original and one copy."""

    texts: tuple[str, ...]
    pairs: I64


@dataclass(frozen=True, kw_only=True)
class ScurveBin:
    """Pairs whose exact similarity lies in [start, end): how many were flagged, how many the formula expects."""

    start: float
    end: float
    num_pairs: int
    num_flagged: int
    predicted: float
    low: float
    high: float
    z: float

    @property
    def centre(self) -> float:
        """Middle of the bin's similarities."""
        return (self.start + self.end) / 2

    @property
    def flagged(self) -> float:
        """Share of the bin's pairs that share a band."""
        return self.num_flagged / self.num_pairs


@dataclass(frozen=True, kw_only=True)
class ScurveMeasurement:
    """The curve by bins, and how far signatures miss the exact similarity.

    `signature_error` is the root mean square of (share of equal values - s), `expected_error` that of
    sqrt(s (1 - s) / num_perm); `mean_bias` is the mean miss with its sign.
    """

    bins: tuple[ScurveBin, ...]
    num_pairs: int
    num_flagged: int
    signature_error: float
    expected_error: float
    mean_bias: float

    @property
    def max_abs_z(self) -> float:
        """Largest distance of a bin from the formula, in standard deviations."""
        return max(abs(one.z) for one in self.bins)

    @property
    def error_ratio(self) -> float:
        """Observed over expected error of the signatures; correlated hash functions make it large."""
        if not self.expected_error:  # every pair is equal, or shares nothing: there is nothing to err about
            return inf if self.signature_error else 1.0
        return self.signature_error / self.expected_error

    @property
    def agrees(self) -> bool:
        """Whether the curve and the error are those of independent hash functions."""
        least, most = ERROR_RATIO_RANGE
        return self.max_abs_z <= MAX_ABS_Z and least <= self.error_ratio <= most


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
        for _ in range(copies_per_text):
            share = generator.uniform(0, max_replaced_share)
            is_replaced = generator.random(len(originals)) < share
            copies.append(
                " ".join(
                    f"{prefix}{len(copies)}n{position}" if replaced else word
                    for position, (word, replaced) in enumerate(zip(originals, is_replaced, strict=True))
                )
            )
    first = np.repeat(np.arange(len(texts)), copies_per_text)
    second = np.arange(len(texts), len(texts) + len(copies))
    return PlantedPairs(texts=(*texts, *copies), pairs=np.column_stack([first, second]).astype(np.int64))


def measure_scurve(
    texts: Sequence[str], pairs: I64, params: MinHashParams, *, num_bins: int = 20, sign: Signer = sign_documents
) -> ScurveMeasurement:
    """Flagged pairs by exact similarity against 1 - (1 - s^r)^b, with 95 % Wilson intervals (Wilson 1927).

    A bin's z is (flagged - sum of p) / sqrt(sum of p (1 - p)), p taken at each pair's own similarity; a variance below
    one counts as one, so that a single rare event condemns nobody. Pairs that have a text in common are not quite
    independent: few copies of many texts measure more than many copies of few. `sign` is the family under test.
    """
    assert len(pairs), "no pairs to measure"
    texts_array = pa.array(texts, type=pa.large_string())
    signatures, _ = sign(texts_array, params)
    left, right = signatures[pairs[:, 0]], signatures[pairs[:, 1]]
    similarities = jaccard_of_pairs(texts_array, pairs, params.ngram)
    is_flagged = shared_bands(left, right, params) > 0
    miss = (left == right).mean(axis=1) - similarities
    predicted = collision_probability(similarities, params.num_bands, params.rows_per_band)
    assert isinstance(predicted, np.ndarray)
    return ScurveMeasurement(
        bins=_bins(similarities, is_flagged, predicted, num_bins),
        num_pairs=len(pairs),
        num_flagged=int(is_flagged.sum()),
        signature_error=sqrt(np.mean(miss**2)),
        expected_error=sqrt(np.mean(similarities * (1 - similarities)) / params.num_perm),
        mean_bias=float(np.mean(miss)),
    )


def _bins(similarities: F64, is_flagged: npt.NDArray[np.bool_], predicted: F64, num_bins: int) -> tuple[ScurveBin, ...]:
    bin_of = np.minimum((similarities * num_bins).astype(np.int64), num_bins - 1)
    return tuple(
        _bin(number / num_bins, (number + 1) / num_bins, is_flagged[bin_of == number], predicted[bin_of == number])
        for number in np.unique(bin_of).tolist()
    )


def _bin(start: float, end: float, is_flagged: npt.NDArray[np.bool_], predicted: F64) -> ScurveBin:
    num_pairs, num_flagged = len(is_flagged), int(is_flagged.sum())
    low, high = wilson_interval(num_flagged, num_pairs)
    variance = float((predicted * (1 - predicted)).sum())
    return ScurveBin(
        start=start,
        end=end,
        num_pairs=num_pairs,
        num_flagged=num_flagged,
        predicted=float(predicted.mean()),
        low=low,
        high=high,
        z=(num_flagged - float(predicted.sum())) / sqrt(max(variance, 1.0)),
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
