"""The sampler without a stored plan: packs are made while they are trained on.

In: a document index and the packing parameters. Out: the very batches that a Sampler gives of the plan that would be
made of them. The promise: the first epoch begins at once, with a buffer of segments in memory; its state carries the
packer, so that it resumes exactly, for any number of ranks. Cost: every rank packs every step, about a microsecond a
segment; where a second epoch is asked for, the plan is made in memory, since its packs come in another order.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np

from training_io.balance import share_packs
from training_io.batch import I64, PackedBatch, assemble_batch, check_cu_seqlens
from training_io.carry import Carry
from training_io.document_index import DocumentIndex
from training_io.errors import RecipeError, StateMismatch, differences
from training_io.hashing import identity_of
from training_io.packing import STREAMING, pack_stream
from training_io.plan import Plan, ShardsReference
from training_io.planning import plan_packs
from training_io.sampler import Sampler, refuse_bad_rank, token_facts
from training_io.segments import Segments, keep_whole, repeated_inputs
from training_io.shard_format import Tokens, read_shard


@dataclass(frozen=True, kw_only=True, eq=False)
class Unplanned:
    """All that a plan of one split is made from."""

    index: DocumentIndex
    shards: ShardsReference
    max_seq_len: int
    capacity: int
    strategy: str
    buffer: int
    packs_per_microbatch: int
    microbatches_per_step: int
    epoch_seed: int
    long_documents: str = "cut"
    overlap: int = 0

    @property
    def packs_per_step(self) -> int:
        """Packs that one global step trains on, over all ranks and microbatches."""
        return self.packs_per_microbatch * self.microbatches_per_step

    @cached_property
    def segments(self) -> Segments:
        """The segments of the documents, by number."""
        lengths = keep_whole(self.index.lengths, self.max_seq_len, self.long_documents)
        return Segments(lengths, self.max_seq_len, self.overlap)

    @cached_property
    def token_shards(self) -> tuple[Tokens, ...]:
        """The split's shards in order, memory-mapped when first asked for."""
        return tuple(read_shard(self.shards.path / file) for file in self.index.shard_files)

    @cached_property
    def identity(self) -> str:
        """SHA-256 over the shards, their tokenizer and dtype, and the parameters, an overlap where there is one."""
        return identity_of(
            {
                "stream": {name: value for name, value in self.parameters.items() if name != "overlap" or value},
                "shards": [self.shards.identity, self.shards.digest],
                "split": self.index.split,
                "tokenizer_fingerprint": self.index.tokenizer_fingerprint,
                "token_dtype": self.index.token_dtype,
                "eos_id": self.index.eos_id,
            }
        )

    def planned(self) -> Plan:
        """The plan."""
        return plan_packs(
            self.index,
            shards=self.shards,
            **self.parameters,
        )

    @property
    def parameters(self) -> dict[str, Any]:
        """How it is packed: every field but what is packed."""
        return {one.name: getattr(self, one.name) for one in fields(self) if one.name not in ("index", "shards")}


class StreamingSampler:
    """Iterates over global steps for ever, as Sampler does, and packs the first epoch as it goes.

    Raises RecipeError for a rank outside the world, a strategy that cannot stream, and documents without segments.
    """

    def __init__(self, source: Unplanned, rank: int = 0, world_size: int = 1) -> None:
        refuse_bad_rank(rank, world_size)
        if source.strategy not in STREAMING:
            raise RecipeError(
                f"strategy: expected one that packs as it reads, {', '.join(STREAMING)}, found {source.strategy!r}."
                " Choose another strategy, or make a plan."
            )
        if len(source.segments) == 0:
            raise RecipeError(
                f"split {source.index.split}: expected at least 1 segment, found none."
                " Every document of the split is empty; use another split or add documents."
            )
        self.source = source
        self.rank = rank
        self.world_size = world_size
        self._go_to(0, Carry())

    @property
    def epoch(self) -> int:
        """Epoch of the next step."""
        return self._later.epoch if self._later else 0

    @property
    def step(self) -> int:
        """Number of the next step in its epoch."""
        return self._later.step if self._later else self._step

    def __iter__(self) -> Iterator[PackedBatch]:
        return self

    def __next__(self) -> PackedBatch:
        """This rank's packs of the next global step as one flat batch, which is empty when the step has too few."""
        return self._later.__next__() if self._later else self._next(self.source.packs_per_step)[0]

    def next_step(self) -> list[PackedBatch]:
        """The same packs as next(), in microbatches of at most packs_per_microbatch; at least one, though it be
        empty.
        """
        return self._later.next_step() if self._later else self._next(self.source.packs_per_microbatch)

    def state_dict(self) -> dict[str, Any]:
        """Identity of the source, epoch, next step, in the first epoch the packer's cursor and buffer, and for who must
        refuse it what the source is.
        """
        return {
            "stream": self.source.identity,
            "epoch": self.epoch,
            "next_step": self.step,
            "carry": None if self._later else self._carry.to_state(),
            **self._facts,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where a state was taken, with any number of ranks; StateMismatch for another source's state, naming
        what differs where the state says it.
        """
        if state.get("stream") != self.source.identity:
            raise StateMismatch(
                f"sampler state was saved for stream {str(state.get('stream'))[:12]}…, this run has"
                f" {self.source.identity[:12]}…{differences(state, self._facts)}."
                " Resume with the same shards and packing, or start a new run."
            )
        try:
            epoch, step, carry = int(state["epoch"]), int(state["next_step"]), state["carry"]
            if epoch == 0:
                self._go_to(step, Carry.from_state(carry, self.source.segments.length_of))
            else:
                self._continue_planned(epoch, step)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise StateMismatch(
                f"sampler state: expected epoch, next_step and carry, found {error!r}."
                " Give a state_dict of a streaming sampler."
            ) from error

    @property
    def _facts(self) -> dict[str, Any]:
        return token_facts(self.source.index) | self.source.parameters

    def _go_to(self, step: int, carry: Carry) -> None:
        source = self.source
        self._later: Sampler | None = None
        self._step = step
        self._carry = carry
        self._packs = pack_stream(
            source.segments.lengths_from(carry.arrived), source.capacity, source.strategy, source.buffer, carry
        )

    def _continue_planned(self, epoch: int, step: int) -> None:
        plan = self.source.planned()
        self._later = Sampler(plan, self.rank, self.world_size)
        self._later.load_state_dict({"plan": plan.identity, "epoch": epoch, "next_step": step})

    def _next(self, packs_per_batch: int) -> list[PackedBatch]:
        packs = list(islice(self._packs, self.source.packs_per_step))
        counts = [len(numbers) for numbers in packs]
        doc, start, end = self.source.segments.locate(np.concatenate(packs))
        firsts = np.cumsum([0, *counts[:-1]])
        inputs = np.add.reduceat(end - start, firsts)
        share = share_packs(inputs, np.add.reduceat((end - start) ** 2, firsts), self.world_size)[self.rank]
        step_targets = int(inputs.sum() - repeated_inputs(start, self.source.overlap).sum())
        batches = []
        for first in range(0, max(len(share), 1), packs_per_batch):
            chosen = np.isin(np.repeat(np.arange(len(packs)), counts), share[first : first + packs_per_batch])
            batches.append(self._assemble(doc[chosen], start[chosen], end[chosen], step_targets))
        self._step += 1
        if self._carry.arrived == len(self.source.segments) and self._carry.is_empty:
            self._continue_planned(1, 0)
        return batches

    def _assemble(self, doc: I64, start: I64, end: I64, step_targets: int) -> PackedBatch:
        source = self.source
        batch = assemble_batch(
            source.index,
            source.token_shards,
            doc,
            start,
            end,
            step_targets=step_targets,
            epoch=0,
            step=self._step,
            overlap=source.overlap,
        )
        check_cu_seqlens(batch.cu_seqlens, len(batch.inputs), batch.max_seqlen)
        return batch
