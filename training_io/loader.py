"""A plan's steps as a dataset for torch's DataLoader.

In: the folder of a packing_plan artifact, a rank and the number of ranks. Out: one item a global step, the rank's
microbatches as numpy arrays. The promise: any number of loader workers gives the same steps in the same order, and
state is that of what was consumed, not of what workers have made ahead. Cost: each worker maps the plan and its shards.

    loader = DataLoader(PlanSteps("PLAN"), batch_size=None, num_workers=2)
    for microbatches in loader:
        ...
    state = state_behind(plan, microbatches)  # PlanSteps("PLAN", state=state) goes on, with any workers and ranks

Where a loader saves its workers' datasets itself (torchdata's StatefulDataLoader), they have a state of their own.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from training_io.batch import PackedBatch
from training_io.plan import Plan, load_plan
from training_io.sampler import Sampler


class PlanSteps(IterableDataset[list[PackedBatch]]):
    """Endless steps of a plan, each the list of this rank's microbatches; errors are load_plan's and the sampler's."""

    def __init__(
        self,
        plan_path: Path | str,
        split: str = "train",
        *,
        rank: int = 0,
        world_size: int = 1,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self._where = plan_path, split, rank, world_size
        self._begin = None if state is None else dict(state)
        self._saved: dict[str, Any] | None = None
        self._sampler: Sampler | None = None

    def __iter__(self) -> Iterator[list[PackedBatch]]:
        """Worker w of n begins w steps later and leaves out n - 1 after each: loaders take from workers in turn."""
        plan_path, split, rank, world_size = self._where
        worker = get_worker_info()
        turn, num_workers = (worker.id, worker.num_workers) if worker else (0, 1)
        sampler = Sampler(load_plan(plan_path, split), rank, world_size)
        if self._saved is not None:
            sampler.load_state_dict(self._saved)
            self._saved = None
        else:
            if self._begin is not None:
                sampler.load_state_dict(self._begin)
            sampler.skip(turn)
        self._sampler = sampler
        while True:
            step = sampler.next_step()
            sampler.skip(num_workers - 1)
            yield step

    def state_dict(self) -> dict[str, Any] | None:
        """State of this worker's copy: where its own next step is, None before the first."""
        return self._sampler.state_dict() if self._sampler else self._saved

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Go on where a copy of the same worker was, among as many workers."""
        self._saved = state


def state_behind(plan: Plan, microbatches: Sequence[PackedBatch]) -> dict[str, Any]:
    """The sampler's state after a step that was consumed, for any number of workers and ranks."""
    sampler = Sampler(plan)
    last = microbatches[-1]
    sampler.skip(last.epoch * plan.num_steps + last.step + 1)
    return sampler.state_dict()
