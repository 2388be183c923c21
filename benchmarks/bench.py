"""What every entry is given: how many runs, the text, the peers' interpreter, a scratch folder."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from corpus import Text, load_text
from peer_environment import peer_python


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Settings of one run of the harness; text and peers are made when an entry first asks for them."""

    runs: int
    max_bytes: int
    peers_dir: Path
    tokenizer_path: Path | None
    scratch: Path

    @cached_property
    def text(self) -> Text:
        """The text to measure on."""
        return load_text(self.max_bytes)

    @cached_property
    def peer_python(self) -> Path:
        """The interpreter of the peers' environment."""
        return peer_python(self.peers_dir)
