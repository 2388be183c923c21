"""The sampler: an endless sequence of batches of a plan, for one rank, that resumes exactly.

In: a plan, a rank and the number of ranks. Out: this rank's share of each global step, as even as the others' in
tokens and in attention work. The promise: the union over the ranks is the step, whatever their number, and a restored
state continues with the identical next batch. Cost: no state but two numbers and what they are of; a step's packs are
looked up, not searched.
"""

from collections.abc import Iterator
from typing import Any

from training_io.balance import share_packs
from training_io.batch import I64, PackedBatch, assemble_batch, check_cu_seqlens
from training_io.document_index import DocumentIndex
from training_io.errors import RecipeError, StateMismatch, differences
from training_io.plan import Plan


class Sampler:
    """Iterates over a plan's global steps for ever, epoch after epoch; its state counts the steps handed out.

    Raises RecipeError for a rank outside the world and for a plan without packs.
    """

    def __init__(self, plan: Plan, rank: int = 0, world_size: int = 1) -> None:
        refuse_bad_rank(rank, world_size)
        if plan.num_packs == 0:
            raise RecipeError(
                f"split {plan.split}: expected a plan with at least 1 pack, found none."
                " Every document of the split is empty; use another split or add documents."
            )
        self.plan = plan
        self.rank = rank
        self.world_size = world_size
        self.epoch = 0
        self.step = 0

    def __iter__(self) -> Iterator[PackedBatch]:
        return self

    def __next__(self) -> PackedBatch:
        """This rank's packs of the next global step as one flat batch, which is empty when the step has too few."""
        batch = self._assemble(self._share())
        self.skip(1)
        return batch

    def next_step(self) -> list[PackedBatch]:
        """The same packs as next(), in microbatches of at most packs_per_microbatch; at least one, though it be
        empty.
        """
        share = self._share()
        size = self.plan.packs_per_microbatch
        batches = [self._assemble(share[first : first + size]) for first in range(0, max(len(share), 1), size)]
        self.skip(1)
        return batches

    def skip(self, num_steps: int) -> None:
        """Leave out the next steps, however many epochs they reach."""
        self.epoch, self.step = divmod(self.epoch * self.plan.num_steps + self.step + num_steps, self.plan.num_steps)

    def state_dict(self) -> dict[str, Any]:
        """The plan's identity, the epoch, the next step, and for who must refuse it what the plan is of: JSON below 200
        bytes, the same on every rank.
        """
        return {"plan": self.plan.identity, "epoch": self.epoch, "next_step": self.step, **self._facts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where a state was taken, with any number of ranks; StateMismatch for another plan's state, naming
        what differs where the state says it.
        """
        try:
            identity, epoch, step = state["plan"], int(state["epoch"]), int(state["next_step"])
        except (KeyError, TypeError, ValueError) as error:
            raise StateMismatch(
                f"sampler state: expected plan, epoch and next_step, found {error!r}. Give a state_dict of a sampler."
            ) from error
        if identity != self.plan.identity:
            raise StateMismatch(
                f"sampler state was saved for plan {str(identity)[:12]}…, this run has {self.plan.identity[:12]}…"
                f"{differences(state, self._facts)}. Resume with the same plan, or start a new run."
            )
        if epoch < 0 or not 0 <= step <= self.plan.num_steps:
            raise StateMismatch(
                f"sampler state: expected epoch >= 0 and next_step of 0 to {self.plan.num_steps:,},"
                f" found {epoch:,} and {step:,}. Give an unedited state."
            )
        self.epoch, self.step = divmod(epoch * self.plan.num_steps + step, self.plan.num_steps)

    @property
    def _facts(self) -> dict[str, Any]:
        return token_facts(self.plan.index) | {"capacity": self.plan.capacity}

    def _share(self) -> I64:
        packs = self.plan.step_packs(self.epoch, self.step)
        inputs, sum_squares = self.plan.pack_inputs(packs), self.plan.pack_sum_squares[packs]
        return packs[share_packs(inputs, sum_squares, self.world_size)[self.rank]]

    def _assemble(self, packs: I64) -> PackedBatch:
        doc, start, end = self.plan.locate(self.plan.segments_of(packs))
        batch = assemble_batch(
            self.plan.index,
            self.plan.token_shards,
            doc,
            start,
            end,
            step_targets=self.plan.step_targets(self.epoch, self.step),
            epoch=self.epoch,
            step=self.step,
            overlap=self.plan.overlap,
        )
        check_cu_seqlens(batch.cu_seqlens, len(batch.inputs), batch.max_seqlen)
        return batch


def token_facts(index: DocumentIndex) -> dict[str, str]:
    """What a state says of the tokens that it is of, in few bytes."""
    return {"tokenizer": index.tokenizer_fingerprint[:12], "dtype": index.token_dtype}


def refuse_bad_rank(rank: int, world_size: int) -> None:
    """RecipeError for a rank outside the world."""
    if not 0 <= rank < world_size:
        raise RecipeError(
            f"rank: expected 0 <= rank < world_size ({world_size:,}), found {rank:,}. Check the launcher."
        )
