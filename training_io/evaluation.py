"""Evaluation: the loss on a fixed set of held-out batches, over all of it and by pool.

In: a model and the specification of a validation stream. Out: cross-entropy per target in nats. Promise: the same first
steps of the first epoch each time, whatever the number of ranks; no mean of means. Cost: every rank reads the whole set
and computes its share of it.

Shape letters: T tokens, P pools, V vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from training_io.batch import IGNORED
from training_io.document_index import read_index
from training_io.errors import RecipeError
from training_io.ranks import current_ranks, sum_over_ranks
from training_io.staging import DeviceBatch
from training_io.stream import BatchStream, StreamSpec, WindowSpec, open_stream


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Cross-entropy in nats per target; by_pool leaves out pools without a target in the set."""

    loss: float
    by_pool: Mapping[str, float]


def evaluation_windows(spec: WindowSpec, split: str, batch_size: int) -> WindowSpec:
    """The windows of a split to evaluate on while `spec` is trained: a step is one microbatch of batch_size rows."""
    return replace(spec, split=split, batch_size=batch_size, accumulation=1)


def check_fills_one(spec: StreamSpec | WindowSpec) -> None:
    """RecipeError for a split that does not fill one microbatch of windows; packs are as full as they are."""
    if not isinstance(spec, WindowSpec):
        return
    num_tokens = read_index(Path(spec.shards_path) / f"{spec.split}_index").num_tokens
    num_needed = spec.batch_size * spec.max_seq_len + 1  # the last one is a target only
    if num_tokens < num_needed:
        raise RecipeError(
            f"evaluation: expected {num_needed:,} tokens of split {spec.split} for one microbatch of"
            f" {spec.batch_size:,} x {spec.max_seq_len:,}, found {num_tokens:,} in {spec.shards_path}. Lower its rows"
            " (--eval-batch-size; in a recipe packs.eval_microbatch_tokens) or the windows' length, or hold out more."
        )


def open_evaluation(spec: StreamSpec | WindowSpec) -> BatchStream:
    """The stream that an evaluation reads, from its beginning: the same on every rank, with pools."""
    return open_stream(replace(spec, sampler_state=None, rank=0, world_size=1, with_pools=True))


@torch.no_grad()
def evaluate(model: nn.Module, spec: StreamSpec | WindowSpec, eval_steps: int, dtype: torch.dtype) -> Evaluation:
    """Loss over the first steps of a stream's first epoch; opens its own stream.

    The ranks take its microbatches in turns, so that the set is the same for any number of ranks, also where a step has
    one microbatch only.
    """
    rank, world_size = current_ranks()
    stream = open_evaluation(spec)
    names = stream.facts.pool_names
    sums_2P = torch.zeros(2, len(names), dtype=torch.float64, device=next(model.parameters()).device)
    turns = cycle(range(world_size))
    for microbatches in islice(stream, min(eval_steps, stream.facts.num_steps)):
        for batch in microbatches:
            if next(turns) == rank:
                sums_2P += _sums_by_pool(model, batch, dtype, len(names))
        stream.stage_ahead()
    sum_over_ranks(sums_2P)
    losses, counts = sums_2P.tolist()
    by_pool = {name: loss / num for name, loss, num in zip(names, losses, counts, strict=True) if num}
    return Evaluation(loss=sum(losses) / sum(counts), by_pool=by_pool)


def logits_of(module: nn.Module, batch: DeviceBatch, dtype: torch.dtype) -> Tensor:
    """Logits of a microbatch, computed in the dtype: [T, V]."""
    with torch.autocast(batch.inputs.device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        logits_TV: Tensor = module(batch.inputs, batch.position_ids, batch.cu_seqlens, batch.max_seqlen)
    return logits_TV


def _sums_by_pool(model: nn.Module, batch: DeviceBatch, dtype: torch.dtype, num_pools: int) -> Tensor:
    """Summed cross-entropy and number of targets of each pool: float64[2, P]."""
    assert batch.pools is not None
    logits_TV = logits_of(model, batch, dtype)
    wide_TV = logits_TV if logits_TV.dtype == torch.float64 else logits_TV.float()
    losses_T = cross_entropy(wide_TV, batch.targets, ignore_index=IGNORED, reduction="none").double()
    pools_P = torch.arange(num_pools, device=batch.pools.device)
    is_of_PT = (batch.pools == pools_P[:, None]) & (batch.targets != IGNORED)
    return torch.stack([is_of_PT.double() @ losses_T, is_of_PT.sum(dim=1).double()])
