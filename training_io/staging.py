"""Host batches become device batches.

In: a PackedBatch of numpy arrays. Out: the same as tensors on a device. On the CPU the tensors share their memory.
On CUDA each batch goes through a slot of a ring of pinned buffers, in the shards' own token width, and over a side
stream. Promise: a slot is never rewritten while a copy out of it is in flight, no batch is used before it arrived, and
every id and every IGNORED target arrives as it was. Cost: one narrowing copy on the host, one transfer, one widening on
the device; the host waits only when every slot is in flight.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from training_io.batch import IGNORED, PackedBatch
from training_io.errors import RecipeError

MIN_SLOTS = 3  # one being filled, one in flight, one in use


@dataclass(frozen=True, kw_only=True, eq=False)
class HostBatch:
    """A microbatch to be staged, with what was counted in it before it was given a constant shape."""

    packed: PackedBatch
    num_inputs: int
    num_eos: int
    sum_squares: int
    pools: npt.NDArray[np.uint16] | None = None  # [T]


@dataclass(frozen=True, kw_only=True, eq=False)
class DeviceBatch:
    """One microbatch on the device, one row a token.

    `max_seqlen` and the counts are Python ints, so that nobody waits for the device to learn them. `num_inputs` counts
    the segments' tokens: T without slack, `num_targets` the targets that are not IGNORED, `num_eos` those of them that
    end a document, `step_targets` the targets of the whole step, over all microbatches and ranks: the loss's
    denominator. `sum_squares` adds up the squared lengths of the segments, without slack: attention costs half of that,
    times the width. `pools` is there where the stream was asked for it, 0 in slack, whose targets are IGNORED.
    """

    inputs: Tensor  # int64[T]
    targets: Tensor  # int64[T], IGNORED where nothing is trained
    position_ids: Tensor  # int64[T]
    cu_seqlens: Tensor  # int32[S + 1]
    max_seqlen: int
    num_inputs: int
    num_targets: int
    num_eos: int
    sum_squares: int
    step_targets: int
    epoch: int
    step: int
    pools: Tensor | None = None  # int64[T], positions in the stream's pool_names


class Copy(Protocol):
    """A copy out of host memory that may still be in flight."""

    def synchronize(self) -> None:
        """Block the host until the copy has completed."""

    def arrived(self) -> Tensor:
        """The copied bytes, ordered before whatever the current stream does next."""


StartCopy = Callable[[Tensor], Copy]
Arrival = Callable[[], DeviceBatch]
Stage = Callable[[HostBatch], Arrival]


@dataclass(kw_only=True)
class Slot:
    """A host buffer and the last copy out of it, whose event says when the buffer is free."""

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
    """Where the arrays of one microbatch lie in one buffer: the 32-bit ones first, so that all are aligned.

    An IGNORED target has no place among unsigned ids, all of which may be in use. Its position says so instead: it is
    stored as its complement, which is negative as no position is, and costs no byte.
    """

    num_tokens: int
    num_offsets: int
    token_bytes: int  # 2 or 4
    has_ignored: bool  # whether any target is IGNORED
    has_pools: bool = False  # two bytes a token

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole microbatch."""
        return sum(self._sizes)

    @property
    def _sizes(self) -> list[int]:
        tokens = self.token_bytes * self.num_tokens
        return [4 * self.num_offsets, 4 * self.num_tokens, tokens, tokens, 2 * self.num_tokens * self.has_pools]

    def parts(self, buffer: Tensor) -> tuple[Tensor, ...]:
        """The bytes of cu_seqlens, position_ids, inputs, targets and pools."""
        return torch.split(buffer[: self.num_bytes], self._sizes)

    def write(self, buffer: Tensor, batch: HostBatch) -> None:
        """Copy a microbatch into a host buffer, narrowed."""
        packed, token_dtype = batch.packed, np.dtype(f"uint{8 * self.token_bytes}")
        positions = packed.position_ids
        if self.has_ignored:
            positions = np.where(packed.targets == IGNORED, ~positions, positions)
        pools = () if batch.pools is None else batch.pools
        arrays = (packed.cu_seqlens, positions, packed.inputs, packed.targets, pools)
        dtypes: list[npt.DTypeLike] = [np.int32, np.int32, token_dtype, token_dtype, np.uint16]
        for part, values, dtype in zip(self.parts(buffer), arrays, dtypes, strict=True):
            part.numpy().view(np.dtype(dtype))[:] = values

    def read(self, buffer: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """cu_seqlens as int32, the others as int64, widened on the buffer's own device."""
        cu_seqlens, positions, inputs, targets, pools = self.parts(buffer)
        position_ids, target_ids = positions.view(torch.int32).long(), _widened(targets, self.token_bytes)
        if self.has_ignored:
            is_ignored = position_ids < 0
            position_ids = torch.where(is_ignored, ~position_ids, position_ids)
            target_ids = target_ids.masked_fill(is_ignored, IGNORED)
        pool_ids = _widened(pools, 2) if self.has_pools else None
        return cu_seqlens.view(torch.int32), position_ids, _widened(inputs, self.token_bytes), target_ids, pool_ids


def stage_shared(batch: HostBatch) -> Arrival:
    """Tensors over the host arrays themselves: what the CPU trains on; pools alone are widened."""
    packed = batch.packed
    device_batch = _device_batch(
        batch,
        torch.from_numpy(packed.cu_seqlens),
        torch.from_numpy(packed.position_ids),
        torch.from_numpy(packed.inputs),
        torch.from_numpy(packed.targets),
        None if batch.pools is None else torch.from_numpy(batch.pools.astype(np.int64)),
    )
    return lambda: device_batch


def stage_through(ring: Ring, start_copy: StartCopy, token_dtype: str) -> Stage:
    """A function that starts a microbatch's copy through a ring's next slot and returns at once."""
    token_bytes = np.dtype(token_dtype).itemsize

    def stage(batch: HostBatch) -> Arrival:
        packed = batch.packed
        layout = ByteLayout(
            num_tokens=len(packed.inputs),
            num_offsets=len(packed.cu_seqlens),
            token_bytes=token_bytes,
            has_ignored=packed.num_targets < len(packed.inputs),
            has_pools=batch.pools is not None,
        )
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
    batch: HostBatch,
    cu_seqlens: Tensor,
    position_ids: Tensor,
    inputs: Tensor,
    targets: Tensor,
    pools: Tensor | None,
) -> DeviceBatch:
    packed = batch.packed
    return DeviceBatch(
        inputs=inputs,
        targets=targets,
        position_ids=position_ids,
        cu_seqlens=cu_seqlens,
        max_seqlen=packed.max_seqlen,
        num_inputs=batch.num_inputs,
        num_targets=packed.num_targets,
        num_eos=batch.num_eos,
        sum_squares=batch.sum_squares,
        step_targets=packed.step_targets,
        epoch=packed.epoch,
        step=packed.step,
        pools=pools,
    )


def _widened(ids: Tensor, token_bytes: int) -> Tensor:
    # PyTorch's unsigned dtypes lack kernels: widen the signed reading and mask the sign's extension off
    signed: Tensor = ids.view(torch.int16 if token_bytes == 2 else torch.int32).long()
    return torch.bitwise_and(signed, 2 ** (8 * token_bytes) - 1)
