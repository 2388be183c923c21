"""Classes of characters, for cutting texts into words: a pre-tokenizer of the `tokenizers` library in, a table out.

Which characters are letters, numbers and spaces depends on the Unicode version, and the library has its own: its
pre-tokenizer is shown each character between others and tells by where it cuts. A page of characters is asked when a
text first has one of them. Cost: a megabyte a pattern, a millisecond or two a page.
"""

import unicodedata
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline_assets.transforms.arrays import U8

# Classes of characters; each known one is of one kind.
LETTER, NUMBER, SPACE, OTHER = np.uint8(1), np.uint8(2), np.uint8(4), np.uint8(8)
KIND = np.uint8(15)
CONTRACTION = np.uint8(16)  # an apostrophe and it are a word, whatever follows
UNKNOWN = np.uint8(32)  # not asked yet
INVALID = np.uint8(64)  # surrogates, and bytes that are not UTF-8
PAGE = 128  # code points asked at once: a millisecond

NUM_CODE_POINTS = 0x110000
GPT2 = 0  # in place of a number of digits


@cache
def class_table(max_digits: int) -> U8:
    """Classes of characters under one pattern, uint8[NUM_CODE_POINTS]: asked when a text first has them, then kept.

    Two threads may ask the same page at once: both write the same.
    """
    classes = np.full(NUM_CODE_POINTS, UNKNOWN, dtype=np.uint8)
    classes[0xD800:0xE000] = INVALID
    return classes


def ask_classes(pre_tokenizer: Any, classes: U8, max_digits: int, code_point: int) -> None:
    """Ask the pre-tokenizer for the classes of a code point's page."""
    start = code_point // PAGE * PAGE
    page = [chr(number) for number in range(start, start + PAGE)]
    classes[start : start + PAGE] = _kinds(pre_tokenizer, page) | _contractions(pre_tokenizer, page, max_digits)


def _kinds(pre_tokenizer: Any, page: Sequence[str]) -> U8:
    if len(pre_tokenizer.pre_tokenize_str("A" + "".join(page))) == 1:
        return np.full(len(page), LETTER)  # whole pages of ideographs and syllables
    is_letter = ~_begins_word(pre_tokenizer, "A", page, "\n")[0]
    is_space = ~_begins_word(pre_tokenizer, "\t", page, "\n")[0] & ~is_letter
    is_other = ~_begins_word(pre_tokenizer, "!!", page, "\n")[0] & ~is_letter & ~is_space
    return np.select([is_letter, is_space, is_other], [LETTER, SPACE, OTHER], NUMBER)


def _contractions(pre_tokenizer: Any, page: Sequence[str], max_digits: int) -> U8:
    if max_digits == GPT2:
        return np.zeros(len(page), dtype=np.uint8)
    is_letter = ~_begins_word(pre_tokenizer, "A", page, "\n")[0]
    begins, next_begins = _begins_word(pre_tokenizer, "'", page, "a\n")
    return np.where(is_letter & ~begins & next_begins, CONTRACTION, np.uint8(0))


def _begins_word(
    pre_tokenizer: Any, before: str, page: Sequence[str], after: str
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Whether each character, between `before` and `after`, begins a word; and whether what follows it does."""
    width = len(before) + 1 + len(after)
    is_start = np.zeros(width * len(page), dtype=np.bool_)
    for _, (start, _) in pre_tokenizer.pre_tokenize_str("".join(before + character + after for character in page)):
        is_start[start] = True
    by_character = is_start.reshape(len(page), width)
    return by_character[:, len(before)], by_character[:, len(before) + 1]


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
