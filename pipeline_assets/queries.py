"""The commands that ask a corpus: `find`, is this text in it, and `removals`, which rows of it are not used.

In: what argparse read. Out: an answer on stdout, what else there is to know on stderr, an exit status. Promise: no text
of the corpus reaches a terminal raw. Cost: that of `lookup` and `removals`, which are loaded when they are asked.
"""

import argparse
import sys
import traceback
from pathlib import Path
from typing import Any

from pipeline_assets.references import PipelineResource
from pipeline_assets.transforms.lookup import printable, printable_lines
from training_io.command_line import complain, say
from training_io.errors import CorpusmillError, SourceError

FIND_IN_WORDS = (
    "is this text in the corpus, or one near it? Whole documents are compared: a passage of a longer document is not"
    " found. Exit status 0 when found, 1 when not, 2 on an error"
)
REMOVED = ("exact_duplicate", "near_duplicate", "reference")
REMOVED_IN_WORDS = "which rows the last lsh_clusters removed, where each lies, why, and which is used in its place"


def add_find(commands: Any) -> None:
    """The command `find` and its options."""
    finding = commands.add_parser("find", help=FIND_IN_WORDS, description=FIND_IN_WORDS)
    texts = finding.add_mutually_exclusive_group(required=True)
    texts.add_argument("text", nargs="?", metavar="TEXT", help="the text; - reads it from standard input")
    texts.add_argument("--file", type=Path, metavar="FILE", help="a UTF-8 file that holds the text")
    finding.add_argument("--json", action="store_true", help="print the answer as JSON")
    finding.add_argument("--limit", type=_positive, default=10, metavar="N", help="how many to print (default 10)")
    finding.add_argument("--redis", metavar="HOST:PORT", help="look in an index in Redis (default: CORPUSMILL_REDIS)")


def _positive(value: str) -> int:
    if not value.isdecimal() or int(value) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, found {value!r}")
    return int(value)


def find(parsed: argparse.Namespace) -> int:
    """Say whether a text is in the corpus; an error is told here, since its status is not that of other commands."""
    try:
        from pipeline_assets.answers import answer_lines
        from pipeline_assets.lookup import look_up
        from resources.redis_index import redis_address

        pipeline = PipelineResource().open()
        answers = look_up(pipeline, _given_texts(parsed), redis_address(parsed.redis))
        answer = next((answer for answer in answers if answer.is_identical), answers[0])
        text = answer.to_json(parsed.limit) if parsed.json else "\n".join(answer_lines(answer, parsed.limit))
    except (CorpusmillError, OSError) as error:
        complain(printable_lines(f"{type(error).__name__}: {error}"))
        return 2
    except Exception:  # noqa: BLE001 - Python's own exit status, 1, would say that nothing was found
        complain(printable_lines(traceback.format_exc()))
        return 2
    if answer.note:
        complain(printable(f"Note: {answer.note}"))
    say(text)
    return 0 if answer.matches else 1


def add_removals(commands: Any) -> None:
    """The command `removals` and its options."""
    listing = commands.add_parser("removals", help=REMOVED_IN_WORDS, description=REMOVED_IN_WORDS)
    listing.add_argument("--reason", choices=REMOVED, help="only those removed for this reason")
    listing.add_argument("--pool", metavar="NAME", help="only those of this pool")
    listing.add_argument("--json", action="store_true", help="print a JSON object a line for each")
    listing.add_argument("--limit", type=_positive, default=20, metavar="N", help="how many to print (default 20)")


def list_removals(parsed: argparse.Namespace) -> int:
    """Print the first removed rows, and of how many."""
    from pipeline_assets.lookup import open_lookup
    from pipeline_assets.removals import count_removals, removal_lines

    lookup = open_lookup(PipelineResource().open())
    removals = count_removals(lookup, parsed.reason, parsed.pool)
    if lookup.note:
        complain(printable_lines(f"Note: {lookup.note}"))
    num_shown = min(parsed.limit, removals.number)
    more = "; raise --limit to see more" if num_shown < removals.number else ""
    tell = complain if parsed.json else say
    tell(f"{num_shown:,} of {removals.number:,} removed rows, in the order of reading{more}.")
    for batch in removals.first(parsed.limit):
        lines = (removal.to_json() if parsed.json else "\n".join(("", *removal_lines(removal))) for removal in batch)
        say("\n".join(lines))
    return 0


def _given_texts(parsed: argparse.Namespace) -> list[str]:
    """The text; one from a file also without its last line end, which editors and `echo` add."""
    if parsed.file is None and parsed.text != "-":
        return _not_empty([parsed.text], "TEXT")
    if parsed.file is None and sys.stdin is None:
        raise SourceError("standard input: expected the text there, found it closed. Give a text or a --file.")
    try:
        content = sys.stdin.buffer.read() if parsed.file is None else parsed.file.read_bytes()
    except OSError as error:
        raise SourceError(
            f"{parsed.file or 'standard input'}: expected a text to look up, found {error.strerror}. Correct --file."
        ) from error
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise SourceError(
            f"{parsed.file or 'standard input'}: expected UTF-8 text, found {error}. Convert it first."
        ) from error
    texts = list(dict.fromkeys([text, text.removesuffix("\n").removesuffix("\r")]))
    return _not_empty(texts, str(parsed.file or "standard input"))


def _not_empty(texts: list[str], where: str) -> list[str]:
    if not texts[-1]:
        raise SourceError(f"{where}: expected a text to look up, found it empty. No document of a corpus is empty.")
    return texts
