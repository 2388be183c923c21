"""The tokenizer: a tokenizer.json (or .json.gz) in, an object that encodes as this project needs it out; training one.

A loaded tokenizer adds no special tokens, spells out literal ones (except its own non-special added tokens), never
cuts or pads, and knows its EOS id, its largest id and its fingerprint. The fingerprint is of the canonical form: a
tokenizer that was loaded and saved again has the same one, another with two ids swapped has not.
"""

import gzip
import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from resources.hub import Hub, read_hub_file
from training_io.errors import FormatError, RecipeError, SourceError
from training_io.handoff import TOKENIZER_NAME
from training_io.hashing import canonical_json

if TYPE_CHECKING:
    import tokenizers  # loaded where it is used: the code location only names it

DEFAULT_EOS = "<|endoftext|>"
NUM_BYTES = 256
MAX_FILE_BYTES = 1 << 28  # the largest in use are some 35 MB
MAX_QUOTED = 200
UNUSUAL = "a 1 é 語 \U0010fffd"  # text that a small vocabulary does not have


@dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """A loaded tokenizer and what is written into manifests about it.

    `vocab_size` counts the model's own vocabulary; added tokens may have larger ids, up to `max_id`.
    """

    library: "tokenizers.Tokenizer"
    eos: str
    eos_id: int
    fingerprint: str
    vocab_size: int
    max_id: int

    @property
    def token_dtype(self) -> np.dtype[np.uint16] | np.dtype[np.uint32]:
        """uint16 iff the largest id fits, else uint32."""
        return np.dtype(np.uint16) if self.max_id <= np.iinfo(np.uint16).max else np.dtype(np.uint32)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each whole text, nothing added."""
        return [one.ids for one in self.library.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode_batch(self, ids: Sequence[Sequence[int]]) -> list[str]:
        """Text of each row of ids."""
        texts: list[str] = self.library.decode_batch([list(row) for row in ids], skip_special_tokens=False)
        return texts

    def normalize(self, text: str) -> str:
        """A text as the tokenizer sees it (Qwen3's, say, is NFC): what decoding gives back."""
        normalizer = self.library.normalizer
        return text if normalizer is None else str(normalizer.normalize_str(text))


def load_tokenizer(path: str | Path, eos: str = DEFAULT_EOS) -> Tokenizer:
    """Read a tokenizer.json or tokenizer.json.gz.

    SourceError for a missing file, FormatError for a broken one, one that gives two words the same id or one that
    cannot encode text, RecipeError where the EOS is not in it or where literal EOS text would become a real EOS.
    """
    path = Path(path)
    library = _parse(_read(path), str(path))
    library.no_truncation()
    library.no_padding()
    library.encode_special_tokens = True
    vocabulary: dict[str, int] = library.get_vocab(with_added_tokens=True)
    _require_distinct_ids(vocabulary, path)
    if eos not in vocabulary:
        raise RecipeError(
            f"{path}: expected the EOS token {eos!r} in the vocabulary of {len(vocabulary):,}, found it absent,"
            f" near names: {', '.join(_near_names(eos, library)) or 'none'}. Name the tokenizer's EOS in the recipe."
        )
    eos_id = vocabulary[eos]
    with _naming(str(path), "a tokenizer that encodes any text", "Give its model an unknown token, or name another."):
        library.encode(UNUSUAL, add_special_tokens=False)
        spelled_out = library.encode(eos, add_special_tokens=False).ids
    if eos_id in spelled_out:
        raise RecipeError(
            f"{path}: expected the text {eos!r} to be spelled out, found it encoded as the EOS id {eos_id:,}."
            ' Mark the added token as "special" in the file, or name another EOS.'
        )
    return Tokenizer(
        library=library,
        eos=eos,
        eos_id=eos_id,
        fingerprint=_fingerprint(library),
        vocab_size=library.get_vocab_size(with_added_tokens=False),
        max_id=max(vocabulary.values()),
    )


def fetch_tokenizer(hub: Hub, repository: str, revision: str) -> bytes:
    """A model repository's tokenizer.json at a commit.

    SourceError where the Hub does not give it, FormatError for what is no tokenizer, such as a proxy's page.
    """
    content = read_hub_file(
        hub, repository=repository, revision=revision, name=TOKENIZER_NAME, max_bytes=MAX_FILE_BYTES
    )
    _parse(content, f"{TOKENIZER_NAME} of {repository} at {revision[:12]}, from {hub.endpoint}")
    return content


def train_tokenizer(texts: Iterable[str], vocab_size: int, eos: str = DEFAULT_EOS) -> bytes:
    """A byte-level BPE trained on texts, as the bytes of its tokenizer.json; the EOS has id 0.

    The same texts in the same order give the same bytes. A small sample gives fewer ids than asked. RecipeError for a
    vocabulary too small for the EOS and the 256 bytes, SourceError where there is no text to learn from.
    """
    texts = list(texts)
    if not any(texts):
        raise SourceError(
            f"tokenizer: expected texts to train on, found none in {len(texts):,} of the sample."
            " Mend the tokenizer's sample in the recipe."
        )
    least = NUM_BYTES + 1
    if vocab_size < least:
        raise RecipeError(
            f"tokenizer vocab_size: expected at least {least:,} (the EOS and 256 bytes), found {vocab_size:,}."
        )
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[eos],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(texts, trainer=trainer)
    assert library.token_to_id(eos) == 0, library.token_to_id(eos)
    return canonical_json(json.loads(library.to_str()))


def _read(path: Path) -> bytes:
    try:
        content = path.read_bytes()
        return gzip.decompress(content) if path.suffix == ".gz" else content
    except FileNotFoundError as error:
        raise SourceError(f"{path}: expected a tokenizer.json, found no file. Correct the tokenizer's path.") from error
    except (gzip.BadGzipFile, EOFError) as error:
        raise FormatError(f"{path}: expected gzip data, found {error}. Fetch the file again.") from error


def _parse(content: bytes, where: str) -> "tokenizers.Tokenizer":
    import tokenizers

    with _naming(where, "a tokenizer.json", "Fetch the file again."):
        return tokenizers.Tokenizer.from_str(content.decode())


@contextmanager
def _naming(where: str, expected: str, advice: str) -> Iterator[None]:
    """Whatever the library has against a file as a FormatError."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # it raises bare Exception, and its panics are not even that
        raise FormatError(f"{where}: expected {expected}, found {_quoted(str(error))}. {advice}") from error


def _quoted(text: str) -> str:
    return repr(text)[:MAX_QUOTED]


def _require_distinct_ids(vocabulary: Mapping[str, int], path: Path) -> None:
    """The library keeps one word of an id when it writes, not always the same one."""
    if len({*vocabulary.values()}) == len(vocabulary):
        return
    words_of: defaultdict[int, list[str]] = defaultdict(list)
    for word, number in vocabulary.items():
        words_of[number].append(word)
    number = min(number for number, words in words_of.items() if len(words) > 1)
    one, other, *_ = sorted(words_of[number])
    raise FormatError(
        f"{path}: expected one word for each id, found id {number:,} of both {_quoted(one)} and {_quoted(other)}."
        " Give one of them another id."
    )


def _fingerprint(library: "tokenizers.Tokenizer") -> str:
    form = json.loads(library.to_str())
    form.pop("truncation", None)
    form.pop("padding", None)
    return hashlib.sha256(canonical_json(form)).hexdigest()


def _near_names(eos: str, library: "tokenizers.Tokenizer") -> list[str]:
    added = [token.content for token in library.get_added_tokens_decoder().values()]
    return get_close_matches(eos, added, n=3, cutoff=0.3) or sorted(added)[:3]
