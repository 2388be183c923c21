"""What JSON must be, once it was read: objects with certain fields, each of a kind, and lists of them.

In: plain values, and where they were found. Out: the same values, to be used without more questions. Promise: whatever
else JSON can hold is a FormatError that says what was expected, what was found, where, and what to do.
"""

from collections.abc import Mapping
from typing import Any, NoReturn

from training_io.errors import FormatError

KINDS: Mapping[type, str] = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    list: "a list",
    dict: "an object",
}
"""The kinds of values, in words; a whole number is a number too, and yes or no is neither."""
MAX_SHOWN = 60  # characters of what was found
REMEDY = "The file is damaged or of another version; materialize its asset again."


def expect_fields(value: Any, kinds: Mapping[str, type], where: str, remedy: str = REMEDY) -> dict[str, Any]:
    """An object with fields of these kinds, and maybe others.

    >>> expect_fields({"unit": "-", "rows": 2}, {"rows": int}, "units.json")
    {'unit': '-', 'rows': 2}
    >>> expect_fields([], {"rows": int}, "units.json", "Build it again.")
    Traceback (most recent call last):
    training_io.errors.FormatError: units.json: expected an object of rows, found []. Build it again.
    """
    if not isinstance(value, dict):
        _refuse(where, f"an object of {', '.join(kinds) or 'named values'}", value, remedy)
    for name, kind in kinds.items():
        if name not in value:
            _refuse(where, f"{KINDS[kind]} {name!r}", sorted(value), remedy)
        if not _is_of(value[name], kind):
            _refuse(f"{where}, {name}", KINDS[kind], value[name], remedy)
    return value


def expect_rows(value: Any, kinds: Mapping[str, type], where: str, remedy: str = REMEDY) -> list[dict[str, Any]]:
    """A list of objects with fields of these kinds each."""
    if not isinstance(value, list):
        _refuse(where, "a list of rows", value, remedy)
    return [expect_fields(row, kinds, f"{where}, row {number:,}", remedy) for number, row in enumerate(value)]


def _is_of(value: Any, kind: type) -> bool:
    if isinstance(value, bool):
        return False
    return isinstance(value, int | float) if kind is float else isinstance(value, kind)


def _refuse(where: str, expected: str, found: Any, remedy: str) -> NoReturn:
    raise FormatError(f"{where}: expected {expected}, found {shown_value(found, MAX_SHOWN)}. {remedy}")


def shown_value(value: Any, max_characters: int) -> str:
    """A value as a message shows it, cut where it is long.

    >>> shown_value(["web", "code"], 8)
    "['web', …"
    """
    text = repr(value)
    return text if len(text) <= max_characters else text[:max_characters] + "…"
