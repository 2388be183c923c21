"""Host batches become device batches.

In: a PackedBatch of numpy arrays. Out: the same as tensors on a device. On the CPU the tensors share their memory.
On CUDA each batch goes through a slot of a ring of pinned buffers, in the shards' own token width, and over a side
stream. Promise: a slot is never rewritten while a copy out of it is in flight, and no batch is used before it arrived.
Cost: one narrowing copy on the host, one transfer, one widening on the device; the host waits only when every slot is
in flight.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from training_io.batch import PackedBatch
from training_io.errors import RecipeError

MIN_SLOTS = 3  # one being filled, one in flight, one in use


@dataclass(frozen=True, kw_only=True, eq=False)
class DeviceBatch:
    """One microbatch on the device, one row a token.

    `max_seqlen` and the counts are Python ints, so that nobody waits for the device to learn them. `step_targets` is
    the number of targets in the whole step, over all microbatches and ranks: the loss's denominator.
    """

    inputs: Tensor  # int64[T]
    targets: Tensor  # int64[T]
    position_ids: Tensor  # int64[T]
    cu_seqlens: Tensor  # int32[S + 1]
    max_seqlen: int
    num_targets: int
    step_targets: int
    epoch: int
    step: int


class Copy(Protocol):
    """A copy out of host memory that may still be in flight."""

    def synchronize(self) -> None:
        """Block the host until the copy has completed."""

    def arrived(self) -> Tensor:
        """The copied bytes, ordered before whatever the current stream does next."""


StartCopy = Callable[[Tensor], Copy]
Arrival = Callable[[], DeviceBatch]
Stage = Callable[[PackedBatch], Arrival]


@dataclass(kw_only=True)
class Slot:
    """A host buffer and the last copy out of it."""

    buffer: Tensor
    copy: Copy | None = None


class Ring:
    """Host buffers used in turn; one is handed out for writing only after its last copy has completed."""

    def __init__(self, allocate: Callable[[int], Tensor], num_slots: int = MIN_SLOTS) -> None:
        assert num_slots >= MIN_SLOTS, num_slots
        self._allocate = allocate
        self._slots = [Slot(buffer=allocate(0)) for _ in range(num_slots)]
        self._turn = 0

    def writable_slot(self, num_bytes: int) -> Slot:
        """The next slot in turn, with room for so many bytes; waits until its last copy has completed."""
        slot = self._slots[self._turn]
        self._turn = (self._turn + 1) % len(self._slots)
        if slot.copy is not None:
            slot.copy.synchronize()
            slot.copy = None
        if len(slot.buffer) < num_bytes:
            slot.buffer = self._allocate(num_bytes)
        return slot


@dataclass(frozen=True, kw_only=True)
class ByteLayout:
    """Where the arrays of one microbatch lie in one buffer: the 32-bit ones first, so that all are aligned."""

    num_tokens: int
    num_offsets: int
    token_bytes: int  # 2 or 4

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole microbatch."""
        return 4 * (self.num_offsets + self.num_tokens) + 2 * self.token_bytes * self.num_tokens

    def parts(self, buffer: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The bytes of cu_seqlens, position_ids, inputs and targets."""
        positions = 4 * self.num_offsets
        inputs = positions + 4 * self.num_tokens
        targets = inputs + self.token_bytes * self.num_tokens
        return buffer[:positions], buffer[positions:inputs], buffer[inputs:targets], buffer[targets : self.num_bytes]

    def write(self, buffer: Tensor, batch: PackedBatch) -> None:
        """Copy a microbatch into a host buffer, narrowed."""
        token_dtype = np.dtype(f"uint{8 * self.token_bytes}")
        arrays = (batch.cu_seqlens, batch.position_ids, batch.inputs, batch.targets)
        dtypes = (np.dtype(np.int32), np.dtype(np.int32), token_dtype, token_dtype)
        for part, values, dtype in zip(self.parts(buffer), arrays, dtypes, strict=True):
            part.numpy().view(dtype)[:] = values

    def read(self, buffer: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """cu_seqlens as int32, position_ids, inputs and targets as int64, widened on the buffer's own device."""
        cu_seqlens, position_ids, inputs, targets = self.parts(buffer)
        return (
            cu_seqlens.view(torch.int32),
            position_ids.view(torch.int32).long(),
            _widened(inputs, self.token_bytes),
            _widened(targets, self.token_bytes),
        )


def stage_shared(batch: PackedBatch) -> Arrival:
    """Tensors over the host arrays themselves: what the CPU trains on."""
    device_batch = _device_batch(
        batch, *map(torch.from_numpy, (batch.cu_seqlens, batch.position_ids, batch.inputs, batch.targets))
    )
    return lambda: device_batch


def stage_through(ring: Ring, start_copy: StartCopy, token_dtype: str) -> Stage:
    """A function that starts a microbatch's copy through a ring's next slot and returns at once."""
    token_bytes = np.dtype(token_dtype).itemsize

    def stage(batch: PackedBatch) -> Arrival:
        layout = ByteLayout(num_tokens=batch.num_targets, num_offsets=len(batch.cu_seqlens), token_bytes=token_bytes)
        slot = ring.writable_slot(layout.num_bytes)
        used = slot.buffer[: layout.num_bytes]
        layout.write(used, batch)
        copy = slot.copy = start_copy(used)
        return lambda: _device_batch(batch, *layout.read(copy.arrived()))

    return stage


def stage_for(device: torch.device, token_dtype: str) -> Stage:
    """How microbatches get onto a device; token_dtype is the shards' (uint16 or uint32)."""
    if device.type == "cpu":
        return stage_shared
    return stage_through(Ring(_pinned_bytes), _side_stream(device), token_dtype)


def resolve_device(name: str) -> torch.device:
    """The device of a name (`auto`: CUDA where there is one, else the CPU); RecipeError for one that is not here."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, number = name.partition(":")
    if kind not in ("cpu", "cuda") or not (number.isdecimal() or number == ""):
        raise RecipeError(f"device: expected auto, cpu, cuda or cuda:<number>, found {name!r}. Change the recipe.")
    num_devices = torch.cuda.device_count() if kind == "cuda" else 1
    if int(number or 0) >= num_devices:
        raise RecipeError(
            f"device {name}: expected a CUDA device, found {num_devices:,}. Use cpu, or a machine with one."
        )
    return torch.device(name)


@dataclass(frozen=True, kw_only=True, eq=False)
class SideStreamCopy:
    """A transfer on a side stream and the event recorded behind it."""

    on_device: Tensor
    event: torch.cuda.Event

    def synchronize(self) -> None:
        """Block the host until the transfer has completed."""
        self.event.synchronize()

    def arrived(self) -> Tensor:
        """The bytes; the current stream waits for the transfer, the host does not."""
        current = torch.cuda.current_stream(self.on_device.device)
        current.wait_event(self.event)
        self.on_device.record_stream(current)  # the allocator must not reuse the bytes under the current stream's work
        return self.on_device


def _side_stream(device: torch.device) -> StartCopy:
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # PyTorch leaves it unannotated

    def start_copy(host_bytes: Tensor) -> Copy:
        with torch.cuda.stream(side):
            on_device = host_bytes.to(device, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # likewise
            event.record(side)
        return SideStreamCopy(on_device=on_device, event=event)

    return start_copy


def _pinned_bytes(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


def _device_batch(
    batch: PackedBatch, cu_seqlens: Tensor, position_ids: Tensor, inputs: Tensor, targets: Tensor
) -> DeviceBatch:
    return DeviceBatch(
        inputs=inputs,
        targets=targets,
        position_ids=position_ids,
        cu_seqlens=cu_seqlens,
        max_seqlen=batch.max_seqlen,
        num_targets=batch.num_targets,
        step_targets=batch.step_targets,
        epoch=batch.epoch,
        step=batch.step,
    )


def _widened(ids: Tensor, token_bytes: int) -> Tensor:
    # PyTorch's unsigned dtypes lack kernels: widen the signed reading and mask the sign's extension off
    signed: Tensor = ids.view(torch.int16 if token_bytes == 2 else torch.int32).long()
    return torch.bitwise_and(signed, 2 ** (8 * token_bytes) - 1)
