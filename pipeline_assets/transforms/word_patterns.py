"""Patterns by which tokenizers cut texts into words: a pre-tokenizer of the `tokenizers` library in, a known one out.

A pattern is known by its very spelling, as tokenizer.json files carry it. Any other is none of ours: two spellings that
look alike may differ where nobody looked.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Shapes of patterns: how their words are found (`word_kernels`).
GPT2, SPLIT, CASED, CASED_CONTRACTED = 0, 1, 2, 3


@dataclass(frozen=True, kw_only=True)
class WordPattern:
    """A way to cut: its shape, the most digits of a word (0: any number), whether each digit is cut out first."""

    name: str
    shape: int
    max_digits: int = 0
    digits_alone: bool = False


GPT2_PATTERN = WordPattern(name="GPT-2", shape=GPT2)
DIGITS_PATTERN = WordPattern(name="SmolLM", shape=GPT2, digits_alone=True)

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2_REGEX = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
SPLIT_REGEX = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|%s| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{SPACES}"
MARKS_REGEX = (
    rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{SPACES}"
)
CASED_REGEX = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s"
    r"|%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + SPACES
)

# By the regular expression of a Split before a ByteLevel that has none.
SPLIT_PATTERNS: Mapping[str, WordPattern] = {
    GPT2_REGEX: GPT2_PATTERN,
    SPLIT_REGEX % r"\p{N}": WordPattern(name="Qwen", shape=SPLIT, max_digits=1),
    SPLIT_REGEX % r"\p{N}{1,3}": WordPattern(name="Llama 3", shape=SPLIT, max_digits=3),  # and cl100k
    MARKS_REGEX: WordPattern(name="Qwen 3.5", shape=SPLIT, max_digits=1),
    CASED_REGEX % ("", "", r"\p{N}"): WordPattern(name="Tekken", shape=CASED, max_digits=1),
    CASED_REGEX % (f"{CONTRACTIONS}?", f"{CONTRACTIONS}?", r"\p{N}{1,3}"): WordPattern(
        name="GPT-4o", shape=CASED_CONTRACTED, max_digits=3
    ),
}


def known_pattern(pre_tokenizer: bytes | None) -> WordPattern | None:
    """The pattern of a pre-tokenizer's state, as JSON; None for one that is not known."""
    found = json.loads(pre_tokenizer or b"null") or {}
    parts = _parts_of(found)
    if len(parts) == 1 and _is_byte_level(parts[0], use_regex=True):
        return GPT2_PATTERN
    if len(parts) != 2:
        return None
    if parts[0] == {"type": "Digits", "individual_digits": True} and _is_byte_level(parts[1], use_regex=True):
        return DIGITS_PATTERN
    return _split_pattern(parts[0]) if _is_byte_level(parts[1], use_regex=False) else None


def _parts_of(found: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    parts: Sequence[Mapping[str, Any]] = found.get("pretokenizers", []) if found.get("type") == "Sequence" else [found]
    return parts


def _split_pattern(found: Mapping[str, Any]) -> WordPattern | None:
    split = dict(found)
    regex = split.pop("pattern", {}).get("Regex")
    is_plain = split == {"type": "Split", "behavior": "Isolated", "invert": False}
    return SPLIT_PATTERNS.get(regex) if is_plain else None


def _is_byte_level(found: Mapping[str, Any], use_regex: bool) -> bool:
    return (found.get("type"), found.get("add_prefix_space"), found.get("use_regex", True)) == (
        "ByteLevel",
        False,
        use_regex,
    )
