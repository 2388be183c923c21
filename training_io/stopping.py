"""Stopping: a signal is noted while a block runs, so that the block can end where it is sound to end.

In: SIGTERM or SIGINT, from a scheduler, a terminal or Dagster. Out: its number, for whoever asks between two steps.
Promise: nothing is interrupted, the handlers from before are back afterwards, and a signal can be delivered to them
once more. Cost: none.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT)


@dataclass
class Noted:
    """The first signal that came; None before one did."""

    signal: int | None = None


@contextmanager
def noted_signals() -> Iterator[Noted]:
    """Note SIGTERM and SIGINT instead of what they did before; later ones change nothing.

    Python lets the main thread alone handle signals: elsewhere nothing is noted and all stays as it was.
    """
    noted = Noted()
    if threading.current_thread() is not threading.main_thread():
        yield noted
        return

    def note(number: int, frame: FrameType | None) -> None:
        noted.signal = noted.signal or number

    before = {number: signal.getsignal(number) for number in SIGNALS}
    ours = [number for number, handler in before.items() if handler is not None]  # None: not Python's to give back
    for number in ours:
        signal.signal(number, note)
    try:
        yield noted
    finally:
        for number in ours:
            signal.signal(number, before[number])


def deliver_again(number: int) -> None:
    """Send this process a signal that was noted, now that what had to be saved is saved."""
    os.kill(os.getpid(), number)
