"""Windows: fixed batches of B rows of T tokens over a split's shards read as one stream.

In: shard files in order, B and T. Out: batch i, a pure function of i, that starts at token i x B x T. The promise:
every window equals the same slice of the concatenated shards, and x[:, 1:] == y[:, :-1]. No document mask: rows hold
several documents, whose owners and restarted positions window_documents() gives. Cost: one copy of B x T + 1 tokens.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from training_io.errors import FormatError, RecipeError
from training_io.shard_format import Tokens, read_shard

I64 = npt.NDArray[np.int64]


class WindowLoader:
    """Serves (x, y) windows of int64[B, T]; y is x one token later in the stream.

    Raises FormatError when the shards differ in dtype or hold fewer than B x T + 1 tokens, RecipeError for B or T
    below 1.
    """

    def __init__(self, shard_paths: Sequence[Path | str], B: int, T: int) -> None:
        if B < 1 or T < 1:
            raise RecipeError(f"windows: expected B and T of at least 1, found {B:,} and {T:,}. Raise them.")
        self.B, self.T = B, T
        self.shards: list[Tokens] = [read_shard(path) for path in shard_paths]
        self.ends: I64 = np.cumsum([len(shard) for shard in self.shards], dtype=np.int64)
        dtypes = sorted({shard.dtype.name for shard in self.shards})
        if len(dtypes) > 1:
            raise FormatError(
                f"{shard_paths[0]} and {len(self.shards) - 1:,} more: expected shards of one dtype, found"
                f" {' and '.join(dtypes)}. Give the shards of one split of one token_shards artifact."
            )
        if self.n_tokens < B * T + 1:
            raise FormatError(
                f"{len(self.shards):,} shards: expected at least B x T + 1 = {B * T + 1:,} tokens,"
                f" found {self.n_tokens:,}. Lower B or T, or give more shards."
            )

    @property
    def n_tokens(self) -> int:
        """Tokens in the stream."""
        return int(self.ends[-1]) if len(self.ends) else 0

    @property
    def n_batches(self) -> int:
        """Different batches before the index wraps: (n_tokens - 1) // (B x T)."""
        return (self.n_tokens - 1) // (self.B * self.T)

    def batch(self, i: int) -> tuple[I64, I64]:
        """Batch i, which wraps after n_batches: inputs and targets, int64[B, T] each."""
        size = self.B * self.T
        tokens = self._window((i % self.n_batches) * size, size + 1)
        return tokens[:-1].reshape(self.B, self.T), tokens[1:].reshape(self.B, self.T).copy()

    def batches(self, step: int, accum: int) -> Iterator[tuple[I64, I64]]:
        """Batches for ever from optimizer step `step` on, accum of them a step."""
        i = step * accum
        while True:
            yield self.batch(i)
            i += 1

    def _window(self, start: int, num: int) -> I64:
        """Tokens [start, start + num) of the stream, stitched across shards."""
        tokens = np.empty(num, dtype=np.int64)
        filled = 0
        shard = int(np.searchsorted(self.ends, start, side="right"))
        while filled < num:
            offset = start + filled - int(self.ends[shard]) + len(self.shards[shard])
            part = self.shards[shard][offset : offset + num - filled]
            tokens[filled : filled + len(part)] = part
            filled += len(part)
            shard += 1
        return tokens


def window_documents(document_offsets: I64, start: int, B: int, T: int) -> tuple[I64, I64]:
    """Owner and restarted position of each token of the window at stream position `start`: int64[B, T] each.

    document_offsets are the running sums of the lengths, int64[n + 1]. A row is a context of its own: positions
    restart at each document and at each row.

    >>> owners, positions = window_documents(np.array([0, 4, 13]), 0, 1, 8)
    >>> owners.tolist(), positions.tolist()
    ([[0, 0, 0, 0, 1, 1, 1, 1]], [[0, 1, 2, 3, 0, 1, 2, 3]])
    """
    stream = start + np.arange(B * T, dtype=np.int64).reshape(B, T)
    assert stream[-1, -1] < document_offsets[-1], (start, B, T, int(document_offsets[-1]))
    owners = np.searchsorted(document_offsets, stream, side="right") - 1
    return owners, stream - np.maximum(document_offsets[owners], stream[:, :1])
