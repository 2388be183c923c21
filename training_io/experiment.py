"""Experiments: what a model computes on batches of the host, away from the training loop.

In: a model of any dtype on any device, and batches as the host has them. Out: logits, loss and gradients. The promise:
the model's weights stay as they are, and no gradient is left behind. Cost: a forward pass a batch, and a backward pass
where gradients are asked for.
"""

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from training_io.batch import PackedBatch, end_to_end
from training_io.loss import summed_cross_entropy
from training_io.model import Model
from training_io.staging import DeviceBatch

Accumulate = Callable[[Model, list[DeviceBatch]], Tensor]


@dataclass(frozen=True, kw_only=True, eq=False)
class Pass:
    """What a forward and a backward pass came to; the loss is the step's."""

    loss: Tensor
    gradients: list[Tensor]
    logits: Tensor  # [T, V]


def compute_step(model: Model, batches: Iterable[PackedBatch]) -> Pass:
    """Logits, loss and gradients of a step, without the training loop."""
    rows: list[Tensor] = []

    def accumulate(model: Model, microbatches: list[DeviceBatch]) -> Tensor:
        loss = torch.zeros((), dtype=torch.float64)
        for batch in microbatches:
            logits_TV = model(batch.inputs, batch.position_ids, batch.cu_seqlens, batch.max_seqlen)
            share = summed_cross_entropy(logits_TV, batch.targets) / batch.step_targets
            share.backward()  # type: ignore[no-untyped-call]  # PyTorch leaves it unannotated
            loss += share.detach().cpu()
            rows.append(logits_TV.detach())
        return loss

    found = accumulate_step(model, batches, accumulate)
    return replace(found, logits=torch.cat(rows))


def accumulate_step(model: Model, batches: Iterable[PackedBatch], accumulate: Accumulate) -> Pass:
    """Loss and gradients of a step by a given way of adding them up; the logits are left out."""
    model.zero_grad()
    loss = accumulate(model, [on_device(batch, model) for batch in batches])
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()  # sets them to None: what was found stays
    return Pass(loss=loss, gradients=gradients, logits=torch.empty(0))


def with_backend(model: Model, backend: str, device: torch.device, dtype: torch.dtype, *, exact: bool = False) -> Model:
    """The same weights under another backend."""
    copy = type(model)(model.config, torch.Generator().manual_seed(0), backend=backend, exact=exact)
    copy.load_state_dict(model.state_dict())
    return copy.to(device, dtype)


def logits_of(model: Model, batch: PackedBatch) -> Tensor:
    """Logits of a batch, [T, V], with their graph where gradients are on."""
    staged = on_device(batch, model)
    logits_TV: Tensor = model(staged.inputs, staged.position_ids, staged.cu_seqlens, staged.max_seqlen)
    return logits_TV


def eager_logits(model: Model, batch: PackedBatch) -> Tensor:
    """The same without a graph, and without PyTorch's advice to compile flex attention."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile")  # a few tokens, once
        return logits_of(model, batch)


def loss_of(model: Model, batch: PackedBatch) -> Tensor:
    """Mean cross-entropy over a batch's own targets, in nats."""
    logits_TV = logits_of(model, batch)
    return summed_cross_entropy(logits_TV, torch.from_numpy(batch.targets).to(logits_TV.device)) / batch.num_targets


def on_device(batch: PackedBatch, model: Model) -> DeviceBatch:
    """The batch where the model is."""
    arrays = (batch.inputs, batch.targets, batch.position_ids, batch.cu_seqlens)
    inputs, targets, position_ids, cu_seqlens = (
        torch.from_numpy(array).to(model.tokens.weight.device) for array in arrays
    )
    return DeviceBatch(
        inputs=inputs,
        targets=targets,
        position_ids=position_ids,
        cu_seqlens=cu_seqlens,
        max_seqlen=batch.max_seqlen,
        num_inputs=len(inputs),
        num_targets=batch.num_targets,
        num_eos=0,  # nobody counts them here
        sum_squares=int(np.square(np.diff(batch.cu_seqlens).astype(np.int64)).sum()),
        step_targets=batch.step_targets,
        epoch=batch.epoch,
        step=batch.step,
    )


def on_host(batch: DeviceBatch) -> PackedBatch:
    """A batch of the CPU's stream, back as arrays that share its memory; which documents it is of is not known."""
    lengths = np.diff(batch.cu_seqlens.numpy()).astype(np.int64)
    flat = end_to_end(batch.inputs.numpy(), batch.targets.numpy(), lengths, batch.step_targets)
    return replace(flat, position_ids=batch.position_ids.numpy(), epoch=batch.epoch, step=batch.step)
