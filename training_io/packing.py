"""Packing: which whole segments share a pack of a given capacity.

In: segment lengths in arrival order. Out: segment numbers in pack order and where packs end. The promise: every segment
once, none cut, no pack over capacity, and a stored plan is the recording of the same streaming packer, which can be
stopped between two packs and goes on from a small state. Packing reads lengths only. Cost: each strategy states its
own; the default is about half a microsecond a segment.

A segment's wait is counted in packs, alike for every streaming strategy: from the one in whose making it was read (the
first, where it was read before that) to its own. None is more than `buffer` packs later. Offline strategies have no
bound: they read every segment before the first pack.
"""

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from heapq import heappop, heappush
from itertools import chain, count, islice

import numpy as np
import numpy.typing as npt

from training_io.carry import Carry
from training_io.errors import RecipeError
from training_io.pack_spaces import Kinds, Spaces
from training_io.segments import offsets_of

I64 = npt.NDArray[np.int64]

# Lengths still to come in arrival order, capacity, buffer, carry -> packs, each a list of segment numbers.
Strategy = Callable[[Iterator[int], int, int, Carry], Iterator[list[int]]]

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
    pack_offsets = offsets_of(np.array([len(one) for one in packs], dtype=np.int64))
    return np.fromiter(chain.from_iterable(packs), dtype=np.int64, count=int(pack_offsets[-1])), pack_offsets


def pack_stream(
    lengths: Iterable[int],
    capacity: int,
    strategy: str = "oldest_first",
    buffer: int = 256,
    carry: Carry | None = None,
) -> Iterator[list[int]]:
    """Packs one at a time, each a list of segment numbers (arrival positions), reading little more than the buffer.

    The buffer counts candidates; first_fit's counts open packs. Strategies outside STREAMING read everything first.
    With a carry, the packer goes on from it, lengths begin with segment number carry.arrived, and the carry is kept up
    to date. Raises as pack() does.
    """
    if strategy not in STRATEGIES:
        raise RecipeError(
            f"strategy: expected one of {', '.join(STRATEGIES)}, found {strategy!r}. Choose a known strategy."
        )
    if buffer < 1:
        raise RecipeError(f"buffer: expected at least 1 candidate, found {buffer:,}. Raise the packing buffer.")
    carry = Carry() if carry is None else carry
    coming = chain.from_iterable(_checked(lengths, capacity, buffer, carry.arrived))
    return STRATEGIES[strategy](coming, capacity, buffer, carry)


def best_fit(lengths: Iterator[int], capacity: int, buffer: int, carry: Carry) -> Iterator[list[int]]:
    """The oldest buffered candidate opens a pack; then always the longest that fits, ties to the oldest.

    The buffer is refilled after each choice, and a pack is closed when nothing fits. The bound: since the oldest
    candidate opens the pack, every segment is in one of the first `buffer` packs that open after it arrived. (To open
    with the longest needs another rule against starving short segments, and was measured too: as much waste on web
    lengths.)

    The price: two binary searches and four moves within the buffer a segment; 0.1 % waste on web lengths at 4,096
    with 256 candidates, and segments some fifty packs from where they arrived.
    """
    waiting = {number: carry.sizes[number] for number in carry.waiting}  # their lengths, in arrival order
    fresh = list(islice(lengths, buffer - len(waiting)))
    waiting |= enumerate(fresh, carry.arrived)
    carry.waiting = waiting
    arrived = carry.arrived + len(fresh)
    # Sorted by length, the youngest first among equals: bisection finds the longest that fits and of those the oldest.
    by_length = sorted((size, -number) for number, size in waiting.items())
    sizes, numbers = [size for size, _ in by_length], [-number for _, number in by_length]
    while waiting:
        remaining = capacity
        chosen = []
        oldest = next(iter(waiting))
        at = bisect_right(sizes, waiting[oldest]) - 1
        while at >= 0:
            number = numbers.pop(at)
            chosen.append(number)
            del sizes[at]
            remaining -= waiting.pop(number)
            if length := next(lengths, 0):
                at = bisect_left(sizes, length)
                sizes.insert(at, length)
                numbers.insert(at, arrived)
                waiting[arrived] = length
                arrived += 1
            at = bisect_right(sizes, remaining) - 1
        carry.arrived = arrived
        yield chosen


def oldest_first(lengths: Iterator[int], capacity: int, buffer: int, carry: Carry) -> Iterator[list[int]]:
    """Arrival order until less than the longest segment seen is left, then the subset of old candidates that fills it
    best.

    The subset sum is exact over the 32 oldest candidates that fit; where more than 30 % of the buffer is longer than
    half the capacity, best fit closes the pack instead. The bound: the oldest candidate opens the pack, so every
    segment is in one of the first `buffer` packs that open after it arrived.

    The price: up to 32 shifts of a number as wide as the space that is left, a pack. In return next to no waste, and
    segments stay within a few packs of where they arrived.
    """
    numbers = list(carry.waiting)  # candidates in arrival order, and their lengths
    sizes = [carry.sizes[number] for number in numbers]
    carry.waiting = numbers
    counter = count(carry.arrived)
    num_large = _num_large(sizes, capacity)
    while True:
        chosen: list[int] = []
        remaining, taken = capacity, 1
        while taken:
            fresh = list(islice(lengths, buffer - len(sizes)))
            if fresh:
                sizes += fresh
                numbers += islice(counter, len(fresh))
                num_large += _num_large(fresh, capacity)
                carry.longest = max(carry.longest, max(fresh))
                carry.arrived += len(fresh)
            taken, remaining = _leading(sizes, remaining, carry.longest)
            chosen += numbers[:taken]
            num_large -= _num_large(sizes[:taken], capacity)
            del numbers[:taken], sizes[:taken]
        if not chosen:
            return
        close = _best_fit_closing if num_large > _LARGE_SHARE * len(sizes) else _exact_closing
        closing = close(sizes, remaining)
        num_large -= _num_large([sizes[at] for at in closing], capacity)
        for at in closing:
            chosen.append(numbers.pop(at))
            del sizes[at]
        yield chosen


def first_fit(lengths: Iterator[int], capacity: int, buffer: int, carry: Carry) -> Iterator[list[int]]:
    """Each segment into the oldest open pack with room; where more than `buffer` are open, the oldest closes.

    The bound: packs close in the order in which they opened, so a segment is in one of the first `buffer` + 1 packs
    that close after it arrived.

    The price: a search among the open packs, 2 x log2(buffer) steps, a segment; `buffer` packs are held rather than
    `buffer` segments; 0.3 % waste on web lengths at 4,096 with 256 packs, since nothing is chosen.
    """
    packs = deque(list(numbers) for numbers in carry.packs)
    carry.packs = packs
    spaces = Spaces([capacity - sum(carry.sizes[number] for number in numbers) for numbers in packs])
    num_closed = 0
    for size in lengths:
        at = spaces.first_with(size)
        if at is None:
            packs.append([])
            at = spaces.append(capacity)
        packs[at - num_closed].append(carry.arrived)
        spaces.take(at, size)
        carry.arrived += 1
        if len(packs) > buffer:
            spaces.close(num_closed)
            num_closed += 1
            yield packs.popleft()
    while packs:
        yield packs.popleft()


def concat(lengths: Iterator[int], capacity: int, buffer: int, carry: Carry) -> Iterator[list[int]]:
    """Arrival order; a pack closes when the next segment does not fit, which waits for that one, whatever the buffer.

    The price: what the segment that did not fit leaves open, 16 % of web lengths at 4,096. (A stream cut at every
    row's end fills its rows, but it cuts segments, so that it is no packing.)
    """
    numbers = [number for held in carry.packs for number in held]
    remaining = capacity - sum(carry.sizes[number] for number in numbers)
    for size in lengths:
        number = carry.arrived
        carry.arrived += 1
        if size > remaining:
            carry.packs = [[number]]
            yield numbers
            numbers, remaining = [], capacity
        numbers.append(number)
        remaining -= size
    carry.packs = []
    if numbers:
        yield numbers


def padded(lengths: Iterator[int], capacity: int, buffer: int, carry: Carry) -> Iterator[list[int]]:
    """A pack for each segment: what padding a row a document costs. No segment waits, whatever the buffer.

    The price: everything that a segment leaves of the capacity, 84 % of web lengths at 4,096.
    """
    for _ in lengths:
        carry.arrived += 1
        yield [carry.arrived - 1]


def best_fit_decreasing(lengths: Iterator[int], capacity: int, buffer: int, carry: Carry) -> Iterator[list[int]]:
    """Offline: the longest segment first, each into the fullest pack that still has room (ties to the oldest of both).

    The price: it reads every length before the first pack, takes no notice of the buffer, and leaves packs sorted by
    their longest segment, so that the order of arrival is lost; a sort, and a binary search and a heap's move a
    segment; 0.02 % waste on web lengths at 4,096, four times that of oldest_first.
    """
    sizes = list(lengths)
    packs: list[list[int]] = []
    spaces: list[int] = []  # distinct remaining spaces of the packs, sorted
    packs_with: dict[int, list[int]] = {}  # space -> heap of packs: the oldest comes first
    for number in _longest_first(sizes):
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


def first_fit_decreasing(lengths: Iterator[int], capacity: int, buffer: int, carry: Carry) -> Iterator[list[int]]:
    """Offline: the longest segment first, each into the oldest pack with room.

    The price: as best_fit_decreasing, with a search among all packs, 2 x log2(packs) steps, a segment.
    """
    sizes = list(lengths)
    packs: list[list[int]] = []
    spaces = Spaces([])
    for number in _longest_first(sizes):
        at = spaces.first_with(sizes[number])
        if at is None:
            packs.append([])
            at = spaces.append(capacity)
        packs[at].append(number)
        spaces.take(at, sizes[number])
    yield from packs


def histogram(lengths: Iterator[int], capacity: int, buffer: int, carry: Carry) -> Iterator[list[int]]:
    """Offline: shortest pack first on the histogram of lengths, the longest length first (Krell et al.,
    arXiv:2107.02027).

    All segments of a length go at once into the packs with the most room. Where they do not fit, new packs take as many
    of them as they hold; the paper opens one for each, which packs nothing where lengths are alike. Packs of a kind
    hold the same lengths; of a length, segments go in in arrival order.

    The price: it reads every length before the first pack, takes no notice of the buffer and loses the order of
    arrival; a few steps a distinct length, then one a segment; 0.02 % waste on web lengths at 4,096.
    """
    numbers_of: dict[int, deque[int]] = {}
    for number, size in enumerate(lengths):
        numbers_of.setdefault(size, deque()).append(number)
    kinds = Kinds()
    for size in sorted(numbers_of, reverse=True):
        left = len(numbers_of[size])
        while left and (kind := kinds.pop_roomiest(size)):
            space, num, held = kind
            taken = min(num, left)
            kinds.add(space, num - taken, held)
            kinds.add(space - size, taken, (*held, size))
            left -= taken
        num_full, rest = divmod(left, capacity // size)
        kinds.add(capacity % size, num_full, (size,) * (capacity // size))
        kinds.add(capacity - rest * size, min(rest, 1), (size,) * rest)
    for num, held in kinds:
        for _ in range(num):
            yield [numbers_of[size].popleft() for size in held]


STREAMING: Mapping[str, Strategy] = {
    "best_fit": best_fit,
    "oldest_first": oldest_first,
    "first_fit": first_fit,
    "concat": concat,
    "padded": padded,
}
STRATEGIES: Mapping[str, Strategy] = {
    **STREAMING,
    "best_fit_decreasing": best_fit_decreasing,
    "first_fit_decreasing": first_fit_decreasing,
    "histogram": histogram,
}


def _checked(lengths: Iterable[int], capacity: int, buffer: int, seen: int) -> Iterator[list[int]]:
    """The lengths a buffer at a time, each at least 1 and at most the capacity."""
    source = iter(lengths)
    while run := list(islice(source, buffer)):
        if min(run) < 1 or max(run) > capacity:
            number, length = next((seen + at, length) for at, length in enumerate(run) if not 1 <= length <= capacity)
            raise RecipeError(
                f"segment {number:,}: expected 1 to {capacity:,} tokens (the capacity of a pack), found {length:,}."
                " Raise the capacity to max_seq_len or more, and leave empty segments out."
            )
        seen += len(run)
        yield run


def _longest_first(sizes: list[int]) -> list[int]:
    """Segment numbers by length, the oldest first among equals."""
    return sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True)


def _num_large(sizes: list[int], capacity: int) -> int:
    """How many are longer than half a pack and leave room in it."""
    return sum([capacity < 2 * size < 2 * capacity for size in sizes])


def _leading(sizes: list[int], remaining: int, longest: int) -> tuple[int, int]:
    """How many candidates go in in arrival order while even the longest would fit, and the space that they leave."""
    taken = 0
    while taken < len(sizes) and remaining >= longest:
        remaining -= sizes[taken]
        taken += 1
    return taken, remaining


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
    """Positions, last first, of the subset of old candidates that leaves the least of the remaining space.

    Bit t of `spaces` says that some subset of the candidates looked at leaves t; the walk back leaves a candidate out
    wherever the earlier ones leave the same, so that old ones go first. (To take large ones first was measured too:
    the same waste on web lengths, segments three to seven times as far from where they arrived, half the speed.)
    """
    spaces = 1 << remaining
    looked_at: list[int] = []
    before: list[int] = []
    for at, size in enumerate(sizes):
        if size <= remaining:
            looked_at.append(at)
            before.append(spaces)
            spaces |= spaces >> size
            if spaces & 1 or len(looked_at) == _EXACT_CANDIDATES:
                break
    left = (spaces & -spaces).bit_length() - 1
    chosen = []
    for at, earlier in zip(reversed(looked_at), reversed(before), strict=True):
        if not earlier >> left & 1:
            chosen.append(at)
            left += sizes[at]
    return chosen
