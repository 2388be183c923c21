"""Packing: which whole segments share a pack of a given capacity.

In: segment lengths in arrival order. Out: segment numbers in pack order and where packs end. The promise: every segment
once, none cut, no pack over capacity, and a stored plan is the recording of the same streaming packer. Packing reads
lengths only. Cost: linear, about a microsecond a segment; the state is the buffer.
"""

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from heapq import heappop, heappush
from itertools import chain, count, islice

import numpy as np
import numpy.typing as npt

from training_io.errors import RecipeError

I64 = npt.NDArray[np.int64]

# Lengths in arrival order, capacity, buffer -> packs, each a list of segment numbers.
Strategy = Callable[[Iterator[int], int, int], Iterator[list[int]]]

# A best-fit candidate is (length << 48) + (2^48 - 1 - arrival number).
_AGE_BITS = 48
_YOUNGEST = (1 << _AGE_BITS) - 1

# Subset sums over this many segments reach nearly every total: 2^32 subsets against a few thousand totals.
_EXACT_CANDIDATES = 32
# Where more candidates than this are longer than half a pack without filling it, pairs decide the waste, and exact
# sums would use up the short ones.
_LARGE_SHARE = 0.3


def pack(lengths: npt.ArrayLike, capacity: int, strategy: str = "oldest_first", buffer: int = 256) -> tuple[I64, I64]:
    """Segment numbers in pack order, int64[s], and where packs start and end in it, int64[p + 1].

    Raises RecipeError for an unknown strategy, a buffer below 1, a length below 1 or one above the capacity.

    >>> order, pack_offsets = pack([6, 4, 3, 2], capacity=8, strategy="best_fit")
    >>> order.tolist(), pack_offsets.tolist()
    ([0, 3, 1, 2], [0, 2, 4])
    """
    array = np.asarray(lengths, dtype=np.int64)
    packs = list(pack_stream(array.tolist(), capacity, strategy, buffer))
    pack_offsets = np.zeros(len(packs) + 1, dtype=np.int64)
    np.cumsum([len(numbers) for numbers in packs], out=pack_offsets[1:])
    return np.fromiter(chain.from_iterable(packs), dtype=np.int64, count=int(pack_offsets[-1])), pack_offsets


def pack_stream(
    lengths: Iterable[int], capacity: int, strategy: str = "oldest_first", buffer: int = 256
) -> Iterator[list[int]]:
    """Packs one at a time, each a list of segment numbers (arrival positions), reading at most 2 x buffer ahead.

    best_fit_decreasing is the exception: it sorts, so it reads everything first. Raises as pack() does.
    """
    if strategy not in STRATEGIES:
        raise RecipeError(
            f"strategy: expected one of {', '.join(STRATEGIES)}, found {strategy!r}. Choose a known strategy."
        )
    if buffer < 1:
        raise RecipeError(f"buffer: expected at least 1 candidate, found {buffer:,}. Raise the packing buffer.")
    return STRATEGIES[strategy](chain.from_iterable(_checked(lengths, capacity, buffer)), capacity, buffer)


def best_fit(lengths: Iterator[int], capacity: int, buffer: int) -> Iterator[list[int]]:
    """The longest buffered candidate that fits, ties to the oldest, the buffer refilled after each choice.

    A pack is closed when nothing fits. So that short or awkward segments do not starve, a pack opens with the oldest
    candidate instead once that one was passed over by `buffer - 1` packs. The bound: every
    segment is in one of the first 2 x buffer - 1 packs that open after it arrived, and in one of the first `buffer` if
    it is the oldest by then.
    """
    # Length and age in one integer, sorted: bisection finds the longest that fits and, among equals, the oldest.
    waiting: dict[int, int] = {}  # arrival number -> entry, in arrival order
    opened_at: deque[int] = deque(maxlen=buffer)  # arrivals so far when each of the last packs opened
    arrived = 0
    for length in islice(lengths, buffer):
        waiting[arrived] = (length << _AGE_BITS) + _YOUNGEST - arrived
        arrived += 1
    entries = sorted(waiting.values())
    while entries:
        opened_at.append(arrived)
        oldest = next(iter(waiting))
        at = len(entries) - 1
        if len(opened_at) == buffer and oldest < opened_at[0]:
            at = bisect_left(entries, waiting[oldest])
        remaining = capacity
        numbers = []
        while at >= 0:
            entry = entries.pop(at)
            number = _YOUNGEST - (entry & _YOUNGEST)
            numbers.append(number)
            del waiting[number]
            remaining -= entry >> _AGE_BITS
            if length := next(lengths, 0):
                entry = (length << _AGE_BITS) + _YOUNGEST - arrived
                waiting[arrived] = entry
                insort(entries, entry)
                arrived += 1
            at = bisect_right(entries, (remaining << _AGE_BITS) + _YOUNGEST) - 1
        yield numbers


def oldest_first(lengths: Iterator[int], capacity: int, buffer: int) -> Iterator[list[int]]:
    """Arrival order until less than the longest segment seen is left, then the subset of old candidates that fills it
    best.

    The subset sum is exact over the 32 oldest candidates that fit; where more than 30 % of the buffer is longer than
    half the capacity, best fit closes the pack instead. The bound: the oldest candidate opens the pack, so every
    segment is in one of the first `buffer` packs that open after it arrived.
    """
    counter = count()
    numbers: list[int] = []  # candidates in arrival order, and their lengths
    sizes: list[int] = []
    num_large = longest = 0
    while True:
        chosen: list[int] = []
        remaining, taken = capacity, 1
        while taken:
            fresh = list(islice(lengths, buffer - len(sizes)))
            sizes += fresh
            numbers += islice(counter, len(fresh))
            num_large += _num_large(fresh, capacity)
            longest = max([longest, *fresh])
            taken = _leading(sizes, remaining, longest)
            remaining -= sum(sizes[:taken])
            num_large -= _num_large(sizes[:taken], capacity)
            chosen += numbers[:taken]
            del numbers[:taken], sizes[:taken]
        if not chosen:
            return
        close = _best_fit_closing if num_large > _LARGE_SHARE * len(sizes) else _exact_closing
        for at in close(sizes, remaining):
            chosen.append(numbers.pop(at))
            num_large -= _num_large([sizes.pop(at)], capacity)
        yield chosen


def best_fit_decreasing(lengths: Iterator[int], capacity: int, buffer: int) -> Iterator[list[int]]:
    """Offline: the longest segment first, each into the fullest pack that still has room (ties to the oldest of both).

    It reads every length before the first pack and takes no notice of the buffer.
    """
    sizes = list(lengths)
    packs: list[list[int]] = []
    spaces: list[int] = []  # distinct remaining spaces of the packs, sorted
    packs_with: dict[int, list[int]] = {}  # space -> heap of packs: the oldest comes first
    for number in sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True):
        at = bisect_left(spaces, sizes[number])
        if at == len(spaces):
            chosen, space = len(packs), capacity
            packs.append([])
        else:
            space = spaces[at]
            chosen = heappop(packs_with[space])
            if not packs_with[space]:
                del packs_with[space], spaces[at]
        packs[chosen].append(number)
        space -= sizes[number]
        if space not in packs_with:
            packs_with[space] = []
            insort(spaces, space)
        heappush(packs_with[space], chosen)
    yield from packs


STRATEGIES: Mapping[str, Strategy] = {
    "best_fit": best_fit,
    "oldest_first": oldest_first,
    "best_fit_decreasing": best_fit_decreasing,
}


def _checked(lengths: Iterable[int], capacity: int, buffer: int) -> Iterator[list[int]]:
    """The lengths a buffer at a time, each at least 1 and at most the capacity."""
    source = iter(lengths)
    seen = 0
    while run := list(islice(source, buffer)):
        if min(run) < 1 or max(run) > capacity:
            number, length = next((seen + at, length) for at, length in enumerate(run) if not 1 <= length <= capacity)
            raise RecipeError(
                f"segment {number:,}: expected 1 to {capacity:,} tokens (the capacity of a pack), found {length:,}."
                " Raise the capacity to max_seq_len or more, and leave empty segments out."
            )
        seen += len(run)
        yield run


def _num_large(sizes: list[int], capacity: int) -> int:
    """How many are longer than half a pack and leave room in it."""
    return sum(capacity < 2 * size < 2 * capacity for size in sizes)


def _leading(sizes: list[int], remaining: int, longest: int) -> int:
    """How many candidates go in in arrival order while even the longest would fit."""
    taken = 0
    while taken < len(sizes) and remaining >= longest:
        remaining -= sizes[taken]
        taken += 1
    return taken


def _best_fit_closing(sizes: list[int], remaining: int) -> list[int]:
    """Positions, last first, of candidates taken one after another: each time the longest that fits, ties to the
    oldest.
    """
    left, gone = list(sizes), remaining + 1
    chosen = []
    while fitting := [size for size in left if size <= remaining]:
        at = left.index(max(fitting))
        remaining -= left[at]
        left[at] = gone
        chosen.append(at)
    return sorted(chosen, reverse=True)


def _exact_closing(sizes: list[int], remaining: int) -> list[int]:
    """Positions, last first, of the subset of old candidates whose sum comes closest to the remaining space.

    Bit t of `sums` says that some subset of the candidates looked at adds up to t; the walk back leaves a candidate out
    wherever the earlier ones reach the same sum, so that old ones go first.
    """
    full, mask = 1 << remaining, (2 << remaining) - 1
    positions: list[int] = []
    reached: list[int] = []
    sums = 1
    for at, size in enumerate(sizes):
        if size <= remaining:
            positions.append(at)
            reached.append(sums)
            sums |= (sums << size) & mask
            if sums >= full or len(positions) == _EXACT_CANDIDATES:
                break
    total = sums.bit_length() - 1
    chosen = []
    for at, before in zip(reversed(positions), reversed(reached), strict=True):
        if not before >> total & 1:
            chosen.append(at)
            total -= sizes[at]
    return chosen
