"""Windows: fixed batches of B rows of T tokens over a split's shards read as one stream.

In: shard files in order, B and T. Out: batch i, a pure function of i, that starts at token i x B x T, or rows at
random offsets. The promise: every window equals the same slice of the concatenated shards, and x[:, 1:] == y[:, :-1].
Rows hold several documents and are served without a mask; who wants one gets it from window_documents(). Either way
the EOS of a document has the next document's first token as its target. Cost: one copy of B x T + 1 tokens.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from training_io.errors import FormatError, RecipeError, StateMismatch, differences
from training_io.hashing import identity_of
from training_io.places import spread_places
from training_io.shard_format import Tokens, read_shard

I64 = npt.NDArray[np.int64]

SAMPLED_TOKENS = 32  # of each shard, to tell its bytes from those of another artifact


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

    def batches(self, step: int, accum: int, rank: int = 0, world_size: int = 1) -> Iterator[tuple[I64, I64]]:
        """Batches for ever from optimizer step `step` on, accum of them a step over all ranks.

        A rank gets every world_size-th batch of each step, accum / world_size of them, so that the ranks' batches
        together are the step. Raises RecipeError where world_size does not divide accum.
        """
        if not 0 <= rank < world_size or accum < 1 or accum % world_size:
            raise RecipeError(
                "windows: expected 0 <= rank < world_size and an accumulation that world_size divides, found"
                f" {rank:,}, {world_size:,} and {accum:,}. Each rank takes as many batches of a step as the others;"
                " change accum."
            )
        i = step * accum + rank
        while True:
            yield self.batch(i)
            i += world_size

    def batch_documents(self, i: int, document_offsets: I64) -> tuple[I64, I64]:
        """Owners and restarted positions of batch i, as window_documents() gives them."""
        return window_documents(document_offsets, (i % self.n_batches) * self.B * self.T, self.B, self.T)

    def rows_at(self, offsets: I64) -> tuple[I64, I64]:
        """Rows of T tokens from each of the given stream positions: inputs and targets, int64[n, T] each."""
        tokens = np.stack([self._window(start, self.T + 1) for start in offsets.tolist()])
        return tokens[:, :-1].copy(), tokens[:, 1:].copy()

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

    document_offsets are the documents' offsets in the split. A row is a context of its own: positions
    restart at each document and at each row.

    >>> owners, positions = window_documents(np.array([0, 4, 13]), 0, 1, 8)
    >>> owners.tolist(), positions.tolist()
    ([[0, 0, 0, 0, 1, 1, 1, 1]], [[0, 1, 2, 3, 0, 1, 2, 3]])
    """
    stream = start + np.arange(B * T, dtype=np.int64).reshape(B, T)
    assert stream[-1, -1] < document_offsets[-1], (start, B, T, int(document_offsets[-1]))
    owners = np.searchsorted(document_offsets, stream, side="right") - 1
    return owners, stream - np.maximum(document_offsets[owners], stream[:, :1])


def document_mask(owners_BT: I64) -> npt.NDArray[np.bool_]:
    """Which token may attend to which, bool[B, T, T]: earlier ones of its own document and itself.

    Kernels do not need it, see context_offsets(); it is T times as large as the batch.

    >>> document_mask(np.array([[4, 4, 5]]))[0].astype(int).tolist()
    [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
    """
    mask_BTT: npt.NDArray[np.bool_] = owners_BT[:, :, None] == owners_BT[:, None, :]
    return mask_BTT & np.tri(owners_BT.shape[1], dtype=np.bool_)


def context_offsets(owners_BT: I64) -> npt.NDArray[np.int32]:
    """The same mask as running sums over the flattened batch, as varlen kernels take it: cu_seqlens, int32[s + 1].

    A context is a run of one document in one row.

    >>> context_offsets(np.array([[0, 0, 1], [1, 1, 2]])).tolist()
    [0, 2, 3, 5, 6]
    """
    begins = np.ones(owners_BT.shape, dtype=np.bool_)
    begins[:, 1:] = owners_BT[:, 1:] != owners_BT[:, :-1]
    return np.append(np.flatnonzero(begins), owners_BT.size).astype(np.int32)


class RandomWindows:
    """Endless batches of the loader's B rows at random offsets, each drawn alike, with a state to resume from.

    All ranks draw the offsets of the whole batch from one seed and take their own rows of it, so the ranks' rows
    together are the batch, whatever their number. A state names the shards by their lengths, their dtype and a hash of
    a few tokens of each: other documents or another tokenizer are refused, a change between those tokens goes unseen
    (verify the artifact for that). Raises RecipeError for a rank outside the world.
    """

    def __init__(self, loader: WindowLoader, seed: int, rank: int = 0, world_size: int = 1) -> None:
        if not 0 <= rank < world_size <= loader.B:
            raise RecipeError(
                f"windows: expected 0 <= rank < world_size <= B, found {rank:,}, {world_size:,} and {loader.B:,}."
                " Each rank needs a row of each batch; raise B."
            )
        self._loader = loader
        self._rows = slice(loader.B * rank // world_size, loader.B * (rank + 1) // world_size)
        self._rng = np.random.default_rng(seed)
        self._stream = identity_of({"shards": np.diff(loader.ends, prepend=0).tolist(), "rows": [loader.B, loader.T]})
        self._facts = {
            "B": loader.B,
            "T": loader.T,
            "tokens": loader.n_tokens,
            "dtype": loader.shards[0].dtype.name,
            "sampled": identity_of({"tokens": [_sampled(shard) for shard in loader.shards]})[:12],
        }

    def __iter__(self) -> Iterator[tuple[I64, I64]]:
        return self

    def __next__(self) -> tuple[I64, I64]:
        """This rank's rows of the next batch: inputs and targets, int64[rows, T] each."""
        offsets = self._rng.integers(0, self._loader.n_tokens - self._loader.T, size=self._loader.B)
        return self._loader.rows_at(offsets[self._rows])

    def state_dict(self) -> dict[str, Any]:
        """The generator's state and what it draws from, as JSON; the same on every rank."""
        return {"stream": self._stream, "rng": self._rng.bit_generator.state, **self._facts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the batch that came after the state; StateMismatch for other shards or another B or T, naming
        what differs where the state says it.
        """
        stream, rng = state.get("stream"), state.get("rng", {})
        differing = differences(state, self._facts)
        if stream != self._stream or differing:
            raise StateMismatch(
                f"window state was saved for stream {str(stream)[:12]}…, this run has {self._stream[:12]}…{differing}."
                " Resume with the same shards and the same B and T, or start a new run."
            )
        try:
            self._rng.bit_generator.state = rng
        except (KeyError, TypeError, ValueError) as error:
            raise StateMismatch(
                f"window state: expected the state of a PCG64 generator, found {error!r}. Give an unedited state."
            ) from error


def _sampled(shard: Tokens) -> list[int]:
    """Tokens at even distances, the first and the last among them."""
    return [int(token) for token in shard[spread_places(len(shard), SAMPLED_TOKENS)]]
