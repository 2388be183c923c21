"""Windows as a source of steps: rows over a split's token stream, in the shape of packed batches.

In: a loader of windows, and where the documents begin if they are to be segments. Out: a rank's microbatches of each
step on the host. The promise: the ranks' microbatches together are the step's, and a state goes back to its step.
Cost: the loader's, and with documents as segments a search for those of each window.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from training_io.batch import PackedBatch
from training_io.errors import StateMismatch
from training_io.windows import WindowLoader, context_offsets

I64 = npt.NDArray[np.int64]


class WindowSource:
    """Steps of windows: microbatch i of the run starts at token i x rows x row length.

    Where document_offsets are given, of the split's stream, each document in a row is a segment of its own.
    """

    def __init__(
        self,
        loader: WindowLoader,
        identity: str,
        *,
        accumulation: int,
        rank: int,
        world_size: int,
        document_offsets: I64 | None = None,
    ) -> None:
        self._loader = loader
        self._identity = identity
        self._accumulation = accumulation
        self._rank = rank
        self._world_size = world_size
        self._document_offsets = document_offsets
        self._next_step = 0

    def next_step(self) -> list[PackedBatch]:
        """This rank's share of the step's microbatches: every world_size-th."""
        first = self._next_step * self._accumulation
        self._next_step += 1
        return [self._flat(i) for i in range(first + self._rank, first + self._accumulation, self._world_size)]

    def state_dict(self) -> dict[str, Any]:
        """Identity of shards and window shape, and the next step."""
        return {"plan": self._identity, "next_step": self._next_step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved step; StateMismatch for other shards or another window shape."""
        if state["plan"] != self._identity:
            raise StateMismatch(
                f"window state was saved for {state['plan'][:12]}…, this run has {self._identity[:12]}…."
                " Resume with the same shards, batch_size, max_seq_len, accumulation and mask, or start a new run."
            )
        self._next_step = int(state["next_step"])

    def _flat(self, i: int) -> PackedBatch:
        x_BT, y_BT = self._loader.batch(i)
        position_ids, cu_seqlens, segment_doc = self._segments(i)
        return PackedBatch(
            inputs=np.ascontiguousarray(x_BT).reshape(-1),
            targets=np.ascontiguousarray(y_BT).reshape(-1),
            position_ids=position_ids,
            cu_seqlens=cu_seqlens,
            max_seqlen=int(np.diff(cu_seqlens).max()),
            num_targets=x_BT.size,
            segment_doc=segment_doc,
            step_targets=x_BT.size * self._accumulation,
            epoch=i // self._loader.n_batches,
            step=i // self._accumulation,
        )

    def _segments(self, i: int) -> tuple[I64, npt.NDArray[np.int32], I64]:
        """Positions, cu_seqlens and documents of batch i: rows are segments, or the documents in them are."""
        rows, length = self._loader.B, self._loader.T
        if self._document_offsets is None:
            whole = np.arange(rows + 1, dtype=np.int32) * np.int32(length)
            no_document = np.full(rows, -1, dtype=np.int64)  # such a window belongs to no one document
            return np.tile(np.arange(length, dtype=np.int64), rows), whole, no_document
        owners_BT, positions_BT = self._loader.batch_documents(i, self._document_offsets)
        cu_seqlens = context_offsets(owners_BT)
        return positions_BT.reshape(-1), cu_seqlens, owners_BT.reshape(-1)[cu_seqlens[:-1]]
