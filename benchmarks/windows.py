"""windows: micro-batches of 16 rows of 1,024 tokens from memory-mapped shards, against what training consumes.

320 micro-batches, ten optimizer steps, from each of four places in three shards of 16 M tokens; the second crosses the
first border between shards. Warm: the files are in the page cache. Cold: nothing maps them and the system was asked to
drop them before the loader opened them; file systems in memory ignore that, and a virtual machine's host may not.
Random: rows at random offsets, warm. Each contender opens its own loader, outside the time. No peer: `times_training`
compares with a run that consumes 28,296 tokens a second, a decoder of 88 million parameters on one GPU.

Tokens count up through the shards, so that each target is known from its input; that all are right is asserted first.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt
from bench import Bench
from measure import Row, alternate, require_same, seconds_of

from training_io.shard_format import write_shard
from training_io.windows import RandomWindows, WindowLoader

B, T, ACCUMULATION = 16, 1_024, 32
NUM_STEPS = 10
SHARD_TOKENS, NUM_SHARDS = 16_000_000, 3
MODULUS = 65_521
TRAINING_TOKENS_PER_SECOND = 28_296

Batch = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]
Open = Callable[[WindowLoader], Iterator[Batch]]


def measure(bench: Bench) -> list[Row]:
    """Three rows: micro-batches a second, warm, cold and at random offsets."""
    paths = write_shards(bench.scratch / "windows", SHARD_TOKENS, NUM_SHARDS)
    starts = starts_of(paths)
    opens: dict[str, Open] = {f"step {start}": from_step(start) for start in starts}
    opens["random"] = lambda loader: RandomWindows(loader, seed=1)
    for open_batches in opens.values():
        require_right_tokens(served(paths, open_batches))
    contenders = {
        name: lambda open_batches=open_batches: warm(paths, open_batches) for name, open_batches in opens.items()
    }
    for start in starts:
        contenders[f"cold {start}"] = lambda start=start: cold(paths, from_step(start))
    seconds = alternate(bench.runs, contenders)
    return [
        row_of("warm", {str(start): seconds[f"step {start}"] for start in starts}),
        row_of("cold", {str(start): seconds[f"cold {start}"] for start in starts}),
        row_of("random", {"any": seconds["random"]}),
    ]


def row_of(kind: str, runs: dict[str, Sequence[float]]) -> Row:
    """A row of the mean seconds over the starts, with the milliseconds a micro-batch from each."""
    num_batches = NUM_STEPS * ACCUMULATION
    means = [float(np.mean(of_one_round)) for of_one_round in zip(*runs.values(), strict=True)]
    milliseconds = {start: 1_000 * float(np.median(seconds)) / num_batches for start, seconds in runs.items()}
    times = num_batches * B * T / float(np.median(means)) / TRAINING_TOKENS_PER_SECOND
    return Row(
        name=f"windows {kind}",
        amount=num_batches,
        unit="micro-batches",
        ours_seconds=means,
        extra={f"milliseconds_from_step_{start}": value for start, value in milliseconds.items()}
        | {"times_training": times},
        note=f"{', '.join(f'{value:.3f}' for value in milliseconds.values())} ms a micro-batch,"
        f" {times:,.0f} × what training consumes",
    )


def write_shards(folder: Path, num_tokens: int, num_shards: int) -> list[Path]:
    """Shards whose tokens count up modulo 65,521 through all of them."""
    folder.mkdir(parents=True)
    paths = [folder / f"train_{number:06d}.bin" for number in range(num_shards)]
    for number, path in enumerate(paths):
        tokens = np.arange(number * num_tokens, (number + 1) * num_tokens) % MODULUS
        write_shard(path, tokens.astype(np.uint16))
    return paths


def starts_of(paths: Sequence[Path]) -> list[int]:
    """Four optimizer steps: the first, just before the first border between shards, halfway, and near the end."""
    loader = WindowLoader(paths, B, T)
    steps = loader.n_batches // ACCUMULATION
    border = int(loader.ends[0]) // (B * T * ACCUMULATION)
    return [0, border - NUM_STEPS // 2, steps // 2, steps - NUM_STEPS]


def from_step(start: int) -> Open:
    """Batches from an optimizer step on."""
    return lambda loader: loader.batches(start, ACCUMULATION)


def served(paths: Sequence[Path], open_batches: Open) -> Iterator[Batch]:
    """The batches of ten optimizer steps."""
    return islice(open_batches(WindowLoader(paths, B, T)), NUM_STEPS * ACCUMULATION)


def require_right_tokens(batches: Iterable[Batch]) -> None:
    """Refuse to time batches whose rows do not count up or whose targets do not follow their inputs."""
    for x, y in batches:
        counts_up = np.array_equal(x, (x[:, :1] + np.arange(T)) % MODULUS)
        require_same("windows: rows are runs of the stream", counts_up, True)
        require_same("windows: targets follow their inputs", np.array_equal(y, (x + 1) % MODULUS), True)


def warm(paths: Sequence[Path], open_batches: Open) -> float:
    """Seconds of serving ten optimizer steps that were served just before."""
    consume(served(paths, open_batches))
    return timed(paths, open_batches)


def cold(paths: Sequence[Path], open_batches: Open) -> float:
    """Seconds of serving ten optimizer steps after the page cache was asked to drop the files."""
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return timed(paths, open_batches)


def timed(paths: Sequence[Path], open_batches: Open) -> float:
    """Seconds of serving ten optimizer steps from shards that are open."""
    batches = served(paths, open_batches)
    return seconds_of(lambda: consume(batches))


def consume(batches: Iterator[Batch]) -> None:
    """Take all batches."""
    for _ in batches:
        pass
