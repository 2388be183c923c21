"""The carry: what a streaming packer keeps from one pack to the next, in memory and in a plan's snapshots.

In: what a packer has read and not handed out. Out: plain numbers, and the same carry of them again. The promise: the
packs behind it are those of a packer that was never stopped. Cost: the segments that wait and those of open packs.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any


@dataclass(kw_only=True)
class Carry:
    """What a streaming packer carries from one pack to the next: with it and the lengths to come it goes on.

    It is right whenever the packer has handed out a pack. Offline strategies leave it empty.
    """

    arrived: int = 0  # segments read so far: the next one's number
    sizes: dict[int, int] = field(default_factory=dict)  # of the segments below, where a packer is to go on with them
    waiting: Iterable[int] = ()  # segments read and in no pack yet, in arrival order
    packs: Iterable[list[int]] = ()  # packs that may still grow, in opening order
    longest: int = 0  # length seen

    @property
    def is_empty(self) -> bool:
        """Whether every segment read is in a pack that was handed out."""
        return not list(self.waiting) and not list(self.packs)

    def to_state(self) -> dict[str, Any]:
        """Plain numbers for JSON; the sizes are left out, since whoever goes on has the lengths."""
        return {
            "arrived": self.arrived,
            "waiting": list(self.waiting),
            "packs": [list(numbers) for numbers in self.packs],
            "longest": self.longest,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any], length_of: Callable[[int], int]) -> "Carry":
        """The carry that was saved, with the lengths of its segments looked up."""
        held = [*state["waiting"], *chain.from_iterable(state["packs"])]
        return cls(**state, sizes={number: length_of(number) for number in held})
