"""Classes of characters, for cutting texts into words: a pre-tokenizer of the `tokenizers` library in, a table out.

Which characters are letters, marks, numbers and spaces, and which letters are of which case, depends on the Unicode
version, and the library has its own: its pre-tokenizer is shown each character between others and tells by where it
cuts. A page of characters is asked when a text first has one of them. Cost: a megabyte a pattern, a millisecond or two
a page.
"""

import unicodedata
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline_assets.transforms.arrays import U8
from pipeline_assets.transforms.word_patterns import CASED, CASED_CONTRACTED, SPLIT, WordPattern

# Classes of characters; each known one is of one kind, but for those that are cut out alone.
LETTER, NUMBER, SPACE, OTHER = np.uint8(1), np.uint8(2), np.uint8(4), np.uint8(8)
KIND = np.uint8(15)
ALONE = np.uint8(0)  # of no kind: cut out by itself before the pattern sees the text
CONTRACTION = np.uint8(16)  # an apostrophe and it are a contraction, whatever follows
UNKNOWN = np.uint8(32)  # not asked yet
INVALID = np.uint8(48)  # unknown for good: surrogates, and bytes that are not UTF-8
UPPER, LOWER = np.uint8(64), np.uint8(128)  # where it may stand in a cased word; marks may, and are of kind OTHER

PAGE = 128  # code points asked at once: a millisecond

NUM_CODE_POINTS = 0x110000


@cache
def class_table(pattern: WordPattern) -> U8:
    """Classes of characters under one pattern, uint8[NUM_CODE_POINTS]: asked when a text first has them, then kept.

    Two threads may ask the same page at once: both write the same.
    """
    classes = np.full(NUM_CODE_POINTS, UNKNOWN, dtype=np.uint8)
    classes[0xD800:0xE000] = INVALID
    return classes


def ask_classes(pre_tokenizer: Any, classes: U8, pattern: WordPattern, code_point: int) -> None:
    """Ask the pre-tokenizer for the classes of a code point's page."""
    start = code_point // PAGE * PAGE
    page = [chr(number) for number in range(start, start + PAGE)]
    kinds = _cased_kinds if pattern.shape in (CASED, CASED_CONTRACTED) else _kinds
    flags = kinds(pre_tokenizer, page)
    if pattern.digits_alone:
        flags[_starts(pre_tokenizer, "@@\n", page)[1]] = ALONE
    if pattern.shape in (SPLIT, CASED_CONTRACTED):
        flags[_is_contraction(pre_tokenizer, page)] |= CONTRACTION
    classes[start : start + PAGE] = flags


def _kinds(pre_tokenizer: Any, page: Sequence[str]) -> U8:
    if len(pre_tokenizer.pre_tokenize_str("A" + "".join(page))) == 1:
        return np.full(len(page), LETTER)  # whole pages of ideographs and syllables
    is_letter = ~_starts(pre_tokenizer, "A@\n", page)[1]
    is_space = ~_starts(pre_tokenizer, "\t@\n", page)[1] & ~is_letter
    is_other = ~_starts(pre_tokenizer, "!!@\n", page)[2] & ~is_letter & ~is_space
    return np.select([is_letter, is_space, is_other], [LETTER, SPACE, OTHER], NUMBER)


def _cased_kinds(pre_tokenizer: Any, page: Sequence[str]) -> U8:
    """Of characters that go on after "A", those with which more capitals go on are upper; after "a", lower."""
    _, begins, next_begins, *_ = _starts(pre_tokenizer, "A@Aa\n", page)
    is_part = ~begins
    is_lower = is_part & ~_starts(pre_tokenizer, "a@\n", page)[1]
    is_space = ~_starts(pre_tokenizer, "\t@\n", page)[1] & ~is_part
    is_other = ~_starts(pre_tokenizer, "!!@\n", page)[2] & ~is_space
    flags: U8 = np.select([is_space, is_other, is_part], [SPACE, OTHER, LETTER], NUMBER)
    flags[is_part & ~next_begins] |= UPPER
    flags[is_lower] |= LOWER
    return flags


def _is_contraction(pre_tokenizer: Any, page: Sequence[str]) -> npt.NDArray[np.bool_]:
    """Letters that go on after an apostrophe, and with which no further letter goes on."""
    is_letter = ~_starts(pre_tokenizer, "A@\n", page)[1]
    _, _, begins, next_begins, _ = _starts(pre_tokenizer, "a'@b\n", page)
    is_contraction: npt.NDArray[np.bool_] = is_letter & ~begins & next_begins
    return is_contraction


def _starts(pre_tokenizer: Any, frame: str, page: Sequence[str]) -> npt.NDArray[np.bool_]:
    """Where words start in a frame around each character, which takes the place of "@": bool[len(frame), len(page)]."""
    is_start = np.zeros(len(frame) * len(page), dtype=np.bool_)
    for _, (start, _) in pre_tokenizer.pre_tokenize_str("".join(frame.replace("@", one) for one in page)):
        is_start[start] = True
    return is_start.reshape(len(page), len(frame)).T


@cache
def settled_by_nfc() -> npt.NDArray[np.bool_]:
    """Characters that NFC leaves as they are whatever stands beside them, bool[NUM_CODE_POINTS].

    Those not assigned in this Python's Unicode are not: the library's may know them. What is assigned never changes
    (Unicode's stability policy).
    """
    is_settled = np.zeros(NUM_CODE_POINTS, dtype=np.bool_)
    follow = {*range(0x1161, 0x1176), *range(0x11A8, 0x11C3)}  # Hangul is composed by a rule, not by the table
    for code_point in range(NUM_CODE_POINTS):
        character = chr(code_point)
        if unicodedata.category(character) in ("Cn", "Cs"):
            continue
        parts = unicodedata.decomposition(character).split()
        if len(parts) == 2 and not parts[0].startswith("<"):
            follow.add(int(parts[1], 16))
        is_settled[code_point] = not unicodedata.combining(character) and unicodedata.is_normalized("NFC", character)
    is_settled[[*follow]] = False
    return is_settled
