"""Five-word shingles made in Python, for peers that take shingles rather than texts."""

import re

NGRAM = 5
WORD = re.compile(r"\w+")


def shingles(text: str) -> list[str]:
    """Runs of five words of the lower-cased text, joined, or all words of a shorter one."""
    words = WORD.findall(text.lower())
    return [" ".join(words[start : start + NGRAM]) for start in range(max(len(words) - NGRAM + 1, 1))]
