"""What a word is: text in, words out, and the table by which the shingle kernel finds the same words in UTF-8 bytes.

The rule. Each code point is lower-cased on its own: where its lower-case form is one code point, that one is taken,
else it stays (so no rule looks at neighbours and no text grows). A word is a maximal run of letters, marks and numbers
(Unicode categories L*, M*, N*), except that each letter or number of the Han, Hiragana and Katakana ranges below is a
word of its own. Everything else separates words. Hangul syllables form runs, as letters do.

The categories and lower-case forms are those of Python's `unicodedata`, so UNICODE_VERSION belongs to the parameters of
whatever is computed from words. Cost: the table is 4.5 MB and takes about half a second to build, once a process.
"""

import unicodedata
from functools import cache

import numpy as np
import numpy.typing as npt

UNICODE_VERSION = unicodedata.unidata_version

NUM_CODE_POINTS = 0x110000

# Scripts written without spaces, as inclusive ranges. `unicodedata` knows no scripts; these follow Unicode's blocks.
SINGLE_RANGES = (
    (0x3005, 0x3007),  # ideographic iteration mark, closing mark, zero
    (0x3021, 0x3029),  # Hangzhou numerals
    (0x3031, 0x3035),  # kana repeat marks
    (0x3038, 0x303B),  # Hangzhou numerals, iteration marks
    (0x3041, 0x30FF),  # Hiragana, Katakana
    (0x31F0, 0x31FF),  # Katakana phonetic extensions
    (0x3400, 0x4DBF),  # CJK extension A
    (0x4E00, 0x9FFF),  # CJK unified ideographs
    (0xF900, 0xFAFF),  # CJK compatibility ideographs
    (0xFF66, 0xFF9F),  # half-width Katakana
    (0x16FF0, 0x16FFF),  # ideographic reading and iteration marks
    (0x1AFF0, 0x1B16F),  # Kana extensions and supplement
    (0x20000, 0x3FFFF),  # the ideographic planes
)

# Table entries: 0 separates, else the lower-case code point, with this bit where it is a word of its own.
SINGLE = np.uint32(1 << 31)


def words(text: str) -> list[str]:
    """The words of a text, lower-cased, in order.

    >>> words("Don't stop: naïve CAFÉ 42 東京")
    ['don', 't', 'stop', 'naïve', 'café', '42', '東', '京']
    """
    code_points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
    entries = fold_table()[code_points]
    is_single = entries >= SINGLE
    ends = np.cumsum(np.where(is_single, 3, 1))  # a word of its own stands between spaces
    spaced = np.full(ends[-1] if len(ends) else 0, ord(" "), dtype="<u4")
    is_word = entries > 0
    spaced[(ends - 1 - is_single)[is_word]] = entries[is_word] & ~SINGLE
    return spaced.tobytes().decode("utf-32-le").split()


@cache
def fold_table() -> npt.NDArray[np.uint32]:
    """What each code point means: uint32[0x110000], read-only; 0 separates, else its lower-case code point, SINGLE set
    where it is a word of its own."""
    categories = "".join(map(unicodedata.category, map(chr, range(NUM_CODE_POINTS))))
    major = np.frombuffer(categories.encode("ascii"), dtype=np.uint8)[::2]
    is_word = np.isin(major, np.frombuffer(b"LMN", dtype=np.uint8))
    table = np.zeros(NUM_CODE_POINTS, dtype=np.uint32)
    table[is_word] = [_lower(code_point) for code_point in np.flatnonzero(is_word).tolist()]
    is_mark = major == ord("M")
    for first, last in SINGLE_RANGES:
        table[first : last + 1] |= np.where(is_word & ~is_mark, SINGLE, np.uint32(0))[first : last + 1]
    table.flags.writeable = False
    return table


def _lower(code_point: int) -> int:
    lower = chr(code_point).lower()
    return ord(lower) if len(lower) == 1 else code_point
