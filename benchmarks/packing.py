"""packing: segments into packs of 4,096 tokens, tokens a second, waste and displacement, against TRL's packing.

Lengths are web-like: lognormal with median 403 and mean 690, at least 32, longer ones cut to the capacity. That each
segment is in one pack and no pack is over capacity is asserted first. Displacement is how many packs a segment is from
where its tokens would be if every pack took its share in order of arrival; the mean is over segments.

The peer is TRL's best fit decreasing, called below `datasets.map` on all lengths at once, with one byte a token to
move: the same packs as our best_fit_decreasing, counted first. In batches of 1,000, as `map` calls it, it wastes more.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from bench import Bench
from measure import Bar, Row, alternate, require_same, seconds_of
from peer_environment import running_peer

from training_io.packing import STRATEGIES, pack

I64 = npt.NDArray[np.int64]

MEDIAN, MEAN, SHORTEST, CAPACITY, BUFFER = 403, 690, 32, 4096, 256
NUM_SEGMENTS = 200_000
MAX_RUNS = 3  # the peer takes about ten seconds

BARS = {
    "oldest_first": (
        Bar(figure="rate", at_least=100),
        Bar(figure="waste_percent", at_most=0.01),
        Bar(figure="displacement", at_most=20),
    ),
    "best_fit": (Bar(figure="rate", at_least=500),),
}


@dataclass(frozen=True, kw_only=True)
class Peer:
    """What the peer packed: its name and versions, how many packs at once and in its own batches."""

    name: str
    num_packs: int
    num_packs_in_batches: int


def measure(bench: Bench) -> list[Row]:
    """One row a strategy: M tokens a second."""
    lengths = np.minimum(web_lengths(NUM_SEGMENTS), CAPACITY)
    packed = {strategy: pack(lengths, CAPACITY, strategy, BUFFER) for strategy in STRATEGIES}
    for strategy, (order, pack_offsets) in packed.items():
        require_sound(strategy, lengths, order, pack_offsets)
    folder = bench.scratch / "packing"
    save_lengths(folder, lengths)
    contenders = {
        strategy: lambda strategy=strategy: seconds_of(lambda: pack(lengths, CAPACITY, strategy, BUFFER))
        for strategy in STRATEGIES
    }
    with running_peer(bench.peer_python, "trl_packing.py", folder) as ask:
        peer = Peer(
            name=f"{ask('versions')['versions']} bfd_split",
            num_packs=ask("run")["num_packs"],
            num_packs_in_batches=ask("batches")["num_packs"],
        )
        found = len(packed["best_fit_decreasing"][1]) - 1
        require_same("packing: packs of best_fit_decreasing", found, peer.num_packs)
        seconds = alternate(min(bench.runs, MAX_RUNS), contenders | {"peer": lambda: float(ask("run")["seconds"])})
    return [row_of(strategy, lengths, packed[strategy], seconds, peer) for strategy in STRATEGIES]


def row_of(
    strategy: str, lengths: I64, packed: tuple[I64, I64], seconds: Mapping[str, Sequence[float]], peer: Peer
) -> Row:
    """One strategy beside the peer."""
    order, pack_offsets = packed
    num_tokens = int(lengths.sum())
    return Row(
        name=f"packing {strategy}",
        amount=num_tokens / 1e6,
        unit="M tokens",
        ours_seconds=seconds[strategy],
        peer=peer.name,
        peer_seconds=seconds["peer"],
        extra={
            "waste_percent": waste_percent(num_tokens, len(pack_offsets) - 1),
            "displacement": mean_displacement(lengths, order, pack_offsets),
            "peer_waste_percent": waste_percent(num_tokens, peer.num_packs),
            "peer_waste_percent_in_batches": waste_percent(num_tokens, peer.num_packs_in_batches),
        },
        bars=BARS.get(strategy, ()),
    )


def web_lengths(num: int) -> I64:
    """Document lengths in tokens, always the same ones: exp(N(ln median, 2 ln(mean / median)))."""
    sigma = np.sqrt(2 * np.log(MEAN / MEDIAN))
    drawn = np.random.default_rng(0).lognormal(np.log(MEDIAN), sigma, num)
    return np.maximum(SHORTEST, np.rint(drawn)).astype(np.int64)


def waste_percent(num_tokens: int, num_packs: int) -> float:
    """Share of the packs' room that holds no token."""
    return 100 * (1 - num_tokens / (num_packs * CAPACITY))


def mean_displacement(lengths: I64, order: I64, pack_offsets: I64) -> float:
    """Mean distance, in packs, of a segment from where it would be if packs shared all tokens in order of arrival."""
    num_packs = len(pack_offsets) - 1
    ends = np.cumsum(lengths)
    in_order = (ends - lengths) * num_packs // ends[-1]
    found = np.empty_like(order)
    found[order] = np.repeat(np.arange(num_packs), np.diff(pack_offsets))
    return float(np.abs(found - in_order).mean())


def save_lengths(folder: Path, lengths: I64) -> None:
    """What the peer reads."""
    folder.mkdir(parents=True)
    np.save(folder / "lengths.npy", lengths)
    np.save(folder / "capacity.npy", CAPACITY)


def require_sound(strategy: str, lengths: I64, order: I64, pack_offsets: I64) -> None:
    """Refuse to time a packing that loses or repeats a segment, or overfills a pack."""
    is_permutation = np.array_equal(np.sort(order), np.arange(len(lengths)))
    require_same(f"packing {strategy}: each segment once", is_permutation, True)
    fullest = int(np.add.reduceat(lengths[order], pack_offsets[:-1]).max())
    require_same(f"packing {strategy}: fullest pack", min(fullest, CAPACITY), fullest)
