"""Tokenizers of public models without a download: ranks of byte strings in, a tokenizer.json out.

quicktok ships ranks with its wheel. What merges they stand for is worked out as converters do it: each way of putting
a token together from two others is a merge, those of the lower rank first. A token that is a whole word is taken
whole, as by ranks (`ignore_merges`).
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from pipeline_assets.transforms.byte_pairs import byte_characters
from pipeline_assets.transforms.word_patterns import SPLIT_PATTERNS

EOS = "<|endoftext|>"

# By quicktok's name: the pattern, and whether texts are normalized.
ENCODINGS = {"qwen3": ("Qwen", True), "cl100k_base": ("Llama 3", False), "o200k_base": ("GPT-4o", False)}


def write_tokenizer(path: Path, name: str, ranks: Mapping[str, int]) -> None:
    """A tokenizer.json of an encoding, from ranks of bytes in Latin-1."""
    pattern, is_normalizing = ENCODINGS[name]
    library = Tokenizer(models.BPE(vocab=vocabulary_of(ranks), merges=[*merges_of(ranks)], ignore_merges=True))
    regex = next(regex for regex, known in SPLIT_PATTERNS.items() if known.name == pattern)
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(regex), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    if is_normalizing:
        library.normalizer = normalizers.NFC()
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([EOS])
    library.save(str(path))


def vocabulary_of(ranks: Mapping[str, int]) -> dict[str, int]:
    """Ids of tokens, spelled in byte characters.

    >>> vocabulary_of({" a": 7})
    {'Ġa': 7}
    """
    return {spelled(token): rank for token, rank in ranks.items()}


def merges_of(ranks: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Merges, spelled in byte characters.

    >>> [*merges_of({"a": 0, "b": 1, "ab": 2, "ba": 3, "aba": 4})]
    [('a', 'b'), ('b', 'a'), ('a', 'ba'), ('ab', 'a')]
    """
    merges = [
        (rank, ranks[token[:cut]], ranks[token[cut:]], token[:cut], token[cut:])
        for token, rank in ranks.items()
        for cut in range(1, len(token))
        if token[:cut] in ranks and token[cut:] in ranks
    ]
    for *_, left, right in sorted(merges):
        yield spelled(left), spelled(right)


def spelled(token: str) -> str:
    """Latin-1 in byte characters."""
    alphabet = byte_characters()
    return "".join(alphabet[byte] for byte in token.encode("latin-1"))
