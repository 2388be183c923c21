"""What can go wrong, as a small tree of exceptions.

Every message says what was checked, what was expected, what was found, where, and what to do. Numbers carry thousands
separators. Nothing here is caught and hidden: a command prints the message and exits with status 1.
"""

from collections.abc import Mapping
from typing import Any


class CorpusmillError(Exception):
    """Base of the errors that a user can act on."""


class FormatError(CorpusmillError):
    """A file or artifact is not what its header, manifest or schema says."""


class StateMismatch(CorpusmillError):
    """Saved state (sampler, checkpoint, upstream artifact) belongs to another plan, tokenizer or recipe."""


class RecipeError(CorpusmillError):
    """A recipe has an unknown key, an impossible number, or contradicts itself."""


class SourceError(CorpusmillError):
    """A source is missing, empty, unreadable or lacks a needed column."""


class InvariantBroken(AssertionError):
    """A law that our own code must keep was found broken: a defect of corpusmill, not of the input."""


def differences(state: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    """Names and both values of the facts of this run that a state says otherwise; states of old say none."""
    return "".join(
        f"; {name}: saved for {state[name]}, this run has {value}"
        for name, value in facts.items()
        if name in state and state[name] != value
    )
