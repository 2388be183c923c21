"""packing: segments into packs of 4,096 tokens, tokens a second, waste and displacement, against TRL's and OLMo-core's.

Lengths are web-like: lognormal with median 403 and mean 690, at least 32, longer ones cut to the capacity. That each
segment is in one pack and no pack is over capacity is asserted first. Displacement is how many packs a segment is from
where its tokens would be if every pack took its share in order of arrival; the mean is over segments.

The peers pack best fit decreasing, as many packs as our best_fit_decreasing, counted first. TRL's is called below
`datasets.map` on all lengths at once, with one byte a token to move; in batches of 1,000, as `map` calls it, it wastes
more. OLMo-core's is its InstancePacker on the segments' ranges, below the scan for their ends; it moves no token, as
ours.
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
MAX_RUNS = 3  # TRL takes about ten seconds
TRL, OLMO_CORE = "trl_packing.py", "olmo_packing.py"
BESIDE_OLMO_CORE = ("best_fit", "oldest_first", "best_fit_decreasing")

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
    """What a peer packed: its script, name and version, how many packs at once and, if it has them, in batches."""

    script: str
    name: str
    num_packs: int
    num_packs_in_batches: int | None = None


def measure(bench: Bench) -> list[Row]:
    """One row a strategy beside TRL, some beside OLMo-core: M tokens a second."""
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
    python = bench.peer_python
    with running_peer(python, TRL, folder) as ask_trl, running_peer(python, OLMO_CORE, folder) as ask_olmo_core:
        trl = Peer(
            script=TRL,
            name=f"{ask_trl('versions')['versions']} bfd_split",
            num_packs=ask_trl("run")["num_packs"],
            num_packs_in_batches=ask_trl("batches")["num_packs"],
        )
        olmo_core = Peer(
            script=OLMO_CORE,
            name=f"{ask_olmo_core('versions')['versions']} InstancePacker",
            num_packs=ask_olmo_core("run")["num_packs"],
        )
        found = len(packed["best_fit_decreasing"][1]) - 1
        for peer in (trl, olmo_core):
            require_same(f"packing: packs of best_fit_decreasing and of {peer.name}", found, peer.num_packs)
        contenders[TRL] = lambda: float(ask_trl("run")["seconds"])
        contenders[OLMO_CORE] = lambda: float(ask_olmo_core("run")["seconds"])
        seconds = alternate(min(bench.runs, MAX_RUNS), contenders)
    beside = [(strategy, trl) for strategy in STRATEGIES] + [(strategy, olmo_core) for strategy in BESIDE_OLMO_CORE]
    return [row_of(strategy, lengths, packed[strategy], seconds, peer) for strategy, peer in beside]


def row_of(
    strategy: str, lengths: I64, packed: tuple[I64, I64], seconds: Mapping[str, Sequence[float]], peer: Peer
) -> Row:
    """One strategy beside a peer."""
    order, pack_offsets = packed
    num_tokens = int(lengths.sum())
    extra = {
        "waste_percent": waste_percent(num_tokens, len(pack_offsets) - 1),
        "displacement": mean_displacement(lengths, order, pack_offsets),
        "peer_waste_percent": waste_percent(num_tokens, peer.num_packs),
    }
    if peer.num_packs_in_batches is not None:
        extra["peer_waste_percent_in_batches"] = waste_percent(num_tokens, peer.num_packs_in_batches)
    return Row(
        name=f"packing {strategy}",
        amount=num_tokens / 1e6,
        unit="M tokens",
        ours_seconds=seconds[strategy],
        peer=peer.name,
        peer_seconds=seconds[peer.script],
        extra=extra,
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
