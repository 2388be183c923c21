"""How a command line ends: what it printed is written out, or its exit status does not speak for it.

In: a command, which prints and returns its status. Out: that status; UNWRITTEN and one line on stderr when stdout is
closed or cannot be written; GONE, in silence, when the reader went away, as `head` does. The promise: neither of the
two is a status that a command gives for an answer.
"""

import contextlib
import io
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import TextIO

UNWRITTEN = 2
GONE = 128 + signal.SIGPIPE  # what a shell says of a tool that SIGPIPE ended


class OutputLost(Exception):
    """Standard output cannot be written; its cause says why."""


def exit_status_of(command: Callable[[], int]) -> int:
    """Run a command, which prints with `say` and `complain`, and return its exit status.

    Characters that the encoding of stdout lacks are spelled out.
    """
    if sys.stdout is None:  # so Python says that it is closed
        complain("standard output: expected it open, found it closed. Redirect it to a file or to /dev/null.")
        return UNWRITTEN
    if isinstance(sys.stdout, io.TextIOWrapper):  # else a program put its own in place
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            return command()
        finally:  # argparse prints its help itself
            with _writing():
                sys.stdout.flush()
    except OutputLost as lost:
        _discard(sys.stdout)
        if isinstance(lost.__cause__, BrokenPipeError):
            return GONE
        complain(f"standard output: expected to write to it, found {lost.__cause__}. Check where it goes.")
        return UNWRITTEN


def say(text: str) -> None:
    """Print a text on stdout at once; OutputLost when that fails."""
    with _writing():
        print(text, flush=True)  # noqa: T201 - a command line prints


def complain(message: str) -> None:
    """Print a message on stderr; where that is closed or cannot be written, the exit status alone tells."""
    if sys.stderr is None:  # print would take stdout instead
        return
    try:
        print(message, file=sys.stderr, flush=True)  # noqa: T201 - a command line prints
    except OSError:
        _discard(sys.stderr)


@contextlib.contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputLost from error


def _discard(stream: TextIO) -> None:
    """Let what is left in a stream's buffer go nowhere: Python writes it when it ends, and would fail again."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
