"""Room in packs while they are filled: by position for first fit, by what they hold for the histogram.

In: packs as they open, and the lengths that go into them. Out: the first pack with room, or the kind of packs with the
most. The promise: nothing but the room is kept, and equal questions have equal answers. Cost: a few steps each, of the
logarithm of the open packs or of the distinct spaces.
"""

from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import chain


class Spaces:
    """Space left in each pack by position, and the first pack with room for a size: a tree of largest spaces.

    Cost: a lookup or a change takes as many steps as the tree has levels; laying it out anew is paid by the packs
    appended since.
    """

    def __init__(self, spaces: list[int]) -> None:
        self._base = 0  # position of the first leaf: the packs before have no space
        self._lay_out(spaces)

    def first_with(self, size: int) -> int | None:
        """Position of the first pack with room, None where there is none."""
        if self._largest[1] < size:
            return None
        node = 1
        while node < self._width:
            node *= 2
            node += self._largest[node] < size
        return self._base + node - self._width

    def append(self, space: int) -> int:
        """Position of a new pack with so much space."""
        if self._num == self._width:
            spaces = self._largest[self._width :]
            num_gone = next((at for at, left in enumerate(spaces) if left), len(spaces))
            self._base += num_gone
            self._lay_out(spaces[num_gone:])
        self._num += 1
        position = self._base + self._num - 1
        self.take(position, -space)
        return position

    def take(self, position: int, size: int) -> None:
        """Lower the space of a pack."""
        node = self._width + position - self._base
        self._largest[node] -= size
        while node > 1:
            node //= 2
            self._largest[node] = max(self._largest[2 * node], self._largest[2 * node + 1])

    def close(self, position: int) -> None:
        """Leave a pack no space."""
        if position >= self._base:
            self.take(position, self._largest[self._width + position - self._base])

    def _lay_out(self, spaces: list[int]) -> None:
        self._num = len(spaces)
        self._width = 2 << self._num.bit_length()
        leaves = spaces + [0] * (self._width - self._num)
        self._largest = [0] * self._width + leaves
        for node in range(self._width - 1, 0, -1):
            self._largest[node] = max(self._largest[2 * node], self._largest[2 * node + 1])


class Kinds:
    """Packs that hold the same lengths, counted together, by the space left in them."""

    def __init__(self) -> None:
        self._with: dict[int, list[tuple[int, tuple[int, ...]]]] = {}  # space -> (how many packs, lengths in each)
        self._roomiest: list[int] = []  # heap of the spaces, negated

    def __iter__(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        """How many packs of each kind, and the lengths in one, the fullest first."""
        return chain.from_iterable(self._with[space] for space in sorted(self._with))

    def add(self, space: int, num: int, held: tuple[int, ...]) -> None:
        """Add packs of a kind."""
        if num == 0:
            return
        if space not in self._with:
            self._with[space] = []
            heappush(self._roomiest, -space)
        self._with[space].append((num, held))

    def pop_roomiest(self, size: int) -> tuple[int, int, tuple[int, ...]] | None:
        """Take out the kind with the most space, of those alike the last; None where even that has no room."""
        if not self._roomiest or -self._roomiest[0] < size:
            return None
        space = -self._roomiest[0]
        num, held = self._with[space].pop()
        if not self._with[space]:
            del self._with[space]
            heappop(self._roomiest)
        return space, num, held
