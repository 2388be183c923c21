"""Ranks: one process a device, which together train one model.

In: torchrun's environment, or numbers and a meeting place. Out: a process group while a block runs, sums over its
ranks, and a model whose gradients are summed while the backward pass still computes. Promise: on the CPU a sum is taken
in the order of the ranks, so how PyTorch groups gradients into buckets, which changes after the first step of a
process, cannot show in a resumed run. Cost: on the CPU every rank receives every other's gradients; on GPUs NCCL's
all-reduce.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from training_io.errors import RecipeError
from training_io.staging import resolve_device

FROM_ENVIRONMENT = "env://"  # torchrun says where the ranks meet


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Which of how many processes this is; local_rank is its number on its machine."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0


def ranks_of_environment(environment: Mapping[str, str] | None = None) -> Ranks:
    """What torchrun set in RANK, WORLD_SIZE and LOCAL_RANK; one rank without it.

    >>> ranks_of_environment({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"})
    Ranks(rank=3, world_size=4, local_rank=1)
    """
    variables = os.environ if environment is None else environment
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    found = [variables.get(name) for name in names]
    if found == [None, None, None]:
        return Ranks()
    numbers = [int(value) for value in found if value is not None and value.isdecimal()]
    if len(numbers) < len(names) or numbers[0] >= numbers[1]:
        listed = ", ".join(f"{name}={value}" for name, value in zip(names, found, strict=True))
        raise RecipeError(
            f"ranks: expected RANK below WORLD_SIZE and LOCAL_RANK, as torchrun sets them, found {listed}."
            " Start with torchrun, or unset all three."
        )
    rank, world_size, local_rank = numbers
    return Ranks(rank=rank, world_size=world_size, local_rank=local_rank)


@contextmanager
def joined(ranks: Ranks, device: str, meeting: str = FROM_ENVIRONMENT) -> Iterator[str]:
    """The process group of several ranks while the block runs; gives this rank's device by name.

    `device` is auto, cpu or cuda; each rank takes the GPU of its local_rank. One rank needs no group and may name any
    device. RecipeError for a device that is not here.
    """
    if ranks.world_size == 1:
        yield str(resolve_device(device))
        return
    kind = resolve_device(device).type
    if device not in ("auto", kind):
        raise RecipeError(
            f"device: expected auto, cpu or cuda with {ranks.world_size:,} ranks (each takes its local rank's GPU),"
            f" found {device}. Choose with CUDA_VISIBLE_DEVICES, or train with one rank."
        )
    own = resolve_device(f"cuda:{ranks.local_rank}" if kind == "cuda" else "cpu")
    if own.type == "cuda":
        torch.cuda.set_device(own)
    backend = "nccl" if own.type == "cuda" else "gloo"
    distributed.init_process_group(backend, init_method=meeting, rank=ranks.rank, world_size=ranks.world_size)
    try:
        yield str(own)
    finally:
        distributed.destroy_process_group()


def current_ranks() -> tuple[int, int]:
    """Rank and number of ranks of the process group; (0, 1) without one."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1


def sum_over_ranks(tensor: Tensor) -> None:
    """Replace a tensor by its sum over all ranks; nothing to do for one."""
    if current_ranks()[1] > 1:
        distributed.all_reduce(tensor)


def wait_for_ranks() -> None:
    """Return when every rank has called it."""
    if current_ranks()[1] > 1:
        distributed.barrier()


def summing_gradients(module: nn.Module) -> nn.Module:
    """The module, its gradients summed over the ranks in each backward pass; itself for one rank.

    The sum, not PyTorch's mean: the shares of a loss are already divided by what the whole step has.
    """
    if current_ranks()[1] == 1:
        return module
    wrapped = DistributedDataParallel(module)
    is_on_cpu = next(module.parameters()).device.type == "cpu"
    wrapped.register_comm_hook(None, _sum_in_order if is_on_cpu else _sum)
    return wrapped


def not_yet_summing(module: nn.Module) -> AbstractContextManager[None]:
    """While it is open, backward passes only add up on this rank: for all but a step's last microbatch."""
    return module.no_sync() if isinstance(module, DistributedDataParallel) else nullcontext()


def _sum(_: None, bucket: distributed.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]  # compiled
    work = distributed.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    future: torch.futures.Future[Tensor] = work.get_future().then(lambda done: done.value()[0])
    return future


def _sum_in_order(_: None, bucket: distributed.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
    shares = [torch.empty_like(bucket.buffer()) for _ in range(distributed.get_world_size())]
    distributed.all_gather(shares, bucket.buffer())
    total = shares[0]
    for share in shares[1:]:
        total += share
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(total)
    return future
