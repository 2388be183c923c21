"""What a floor on the number of tokens would remove: lengths and quality scores in, a few numbers a floor out.

A filter is looked at before it is applied: how many documents and tokens go, and whether they are worse than the rest.
Sums of scores are exact, so that no number depends on the order of the documents. Cost: a pass a floor.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import fsum

import numpy as np

from pipeline_assets.transforms.arrays import F64, I64

FLOORS = (32, 64, 128, 256)
SCALE = 64


@dataclass(frozen=True, kw_only=True)
class FloorEffect:
    """Documents with fewer tokens than a floor, EOS included; the mean score of documents without one is None."""

    floor: int
    is_chosen: bool
    documents: int
    tokens: int
    share_of_documents: float
    share_of_tokens: float
    mean_score: float | None
    mean_score_of_all: float | None


def measure_floors(num_tokens: I64, scores: F64, chosen: int) -> Iterator[FloorEffect]:
    """The effect of each of FLOORS and of the chosen one, ascending: int64[n], float64[n], NaN where there is none.

    >>> [effect.documents for effect in measure_floors(np.array([31, 64, 70]), np.full(3, np.nan), chosen=65)]
    [1, 1, 2, 3, 3]
    """
    mean_of_all, all_tokens = _mean(scores), int(num_tokens.sum())
    for floor in sorted({*FLOORS, chosen}):
        is_below = num_tokens < floor
        documents, tokens = int(is_below.sum()), int(num_tokens[is_below].sum())
        yield FloorEffect(
            floor=floor,
            is_chosen=floor == chosen,
            documents=documents,
            tokens=tokens,
            share_of_documents=documents / max(len(num_tokens), 1),
            share_of_tokens=tokens / max(all_tokens, 1),
            mean_score=_mean(scores[is_below]),
            mean_score_of_all=mean_of_all,
        )


def shortest_documents(num_tokens: I64, most: int) -> I64:
    """Rows of the documents of fewest tokens, the first of those of equal length first: int64[n] -> int64[most].

    >>> shortest_documents(np.array([9, 2, 5, 2]), most=3).tolist()
    [1, 3, 2]
    """
    return np.argsort(num_tokens, kind="stable")[:most]


def _mean(scores: F64) -> float | None:
    known = scores[np.isfinite(scores)]
    # Scaled by a power of two, which is exact, so that no sum of finite scores overflows.
    return float(np.ldexp(fsum(np.ldexp(known, -SCALE)) / len(known), SCALE)) if len(known) else None
