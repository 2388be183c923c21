"""packing: segments into packs of 4,096 tokens, tokens a second and waste. No peer: the bars are absolute.

Lengths are web-like: lognormal with median 403 and mean 690, at least 32, longer ones cut to the capacity. That each
segment is in one pack and no pack is over capacity is asserted first.
"""

import numpy as np
import numpy.typing as npt
from bench import Bench
from measure import Bar, Row, alternate, require_same, seconds_of

from training_io.packing import pack

I64 = npt.NDArray[np.int64]

MEDIAN, MEAN, SHORTEST, CAPACITY, BUFFER = 403, 690, 32, 4096, 256
NUM_SEGMENTS = 200_000

BARS = {
    "oldest_first": (Bar(figure="rate", at_least=100), Bar(figure="waste_percent", at_most=0.01)),
    "best_fit": (Bar(figure="rate", at_least=500),),
}


def measure(bench: Bench) -> list[Row]:
    """One row a strategy: M tokens a second."""
    lengths = np.minimum(web_lengths(NUM_SEGMENTS), CAPACITY)
    return [row_of(strategy, lengths, bench.runs) for strategy in BARS]


def web_lengths(num: int) -> I64:
    """Document lengths in tokens, always the same ones: exp(N(ln median, 2 ln(mean / median)))."""
    sigma = np.sqrt(2 * np.log(MEAN / MEDIAN))
    drawn = np.random.default_rng(0).lognormal(np.log(MEDIAN), sigma, num)
    return np.maximum(SHORTEST, np.rint(drawn)).astype(np.int64)


def row_of(strategy: str, lengths: I64, runs: int) -> Row:
    """Time one strategy on the lengths."""
    order, pack_offsets = pack(lengths, CAPACITY, strategy, BUFFER)
    require_sound(strategy, lengths, order, pack_offsets)
    seconds = alternate(runs, {"ours": lambda: seconds_of(lambda: pack(lengths, CAPACITY, strategy, BUFFER))})
    num_packs = len(pack_offsets) - 1
    return Row(
        name=f"packing {strategy}",
        amount=int(lengths.sum()) / 1e6,
        unit="M tokens",
        ours_seconds=seconds["ours"],
        extra={"waste_percent": 100 * (1 - int(lengths.sum()) / (num_packs * CAPACITY)), "num_packs": num_packs},
        bars=BARS[strategy],
    )


def require_sound(strategy: str, lengths: I64, order: I64, pack_offsets: I64) -> None:
    """Refuse to time a packing that loses or repeats a segment, or overfills a pack."""
    is_permutation = np.array_equal(np.sort(order), np.arange(len(lengths)))
    require_same(f"packing {strategy}: each segment once", is_permutation, True)
    fullest = int(np.add.reduceat(lengths[order], pack_offsets[:-1]).max())
    require_same(f"packing {strategy}: fullest pack", min(fullest, CAPACITY), fullest)
