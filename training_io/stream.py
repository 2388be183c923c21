"""Steps of microbatches on a device, from a plan's packs or from windows over the shards.

In: a frozen, picklable specification that says which artifact, split, device and rank, and where to go on. Out: an
iterator of steps, each the list of this rank's microbatches. Promise: the same steps on any device; the state counts
the steps that were handed out, not those staged ahead. Cost: the sampler's, and the transfer's (see staging).

    sampler or windows ─▶ PackedBatch ─▶ checked, counted ─▶ in constant shape, if asked ─▶ staged ahead ─▶ DeviceBatch
"""

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from training_io.batch import ConstantShape, PackedBatch, check_cu_seqlens, in_constant_shape
from training_io.document_index import DocumentIndex, read_index
from training_io.errors import FormatError, RecipeError
from training_io.hashing import identity_of
from training_io.manifest import Manifest, open_artifact
from training_io.plan import Plan, load_plan
from training_io.sampler import Sampler
from training_io.segments import offsets_of
from training_io.staging import Arrival, DeviceBatch, HostBatch, Stage, resolve_device, stage_for
from training_io.window_source import WindowSource
from training_io.windows import WindowLoader

I64 = npt.NDArray[np.int64]
U16 = npt.NDArray[np.uint16]

TokenPools = Callable[[PackedBatch, int], U16]  # of a step's microbatch and its place in this rank's share


@dataclass(frozen=True, kw_only=True)
class StreamSpec:
    """Which packs to stream where: all that another process needs to open the same stream.

    `prefetch_depth` is how many steps stage_ahead() stages; ids at or above `vocab_size` are refused on the host, since
    on the device they would end in a failed assertion without a name. With `constant_shape` every microbatch, an empty
    one as well, has the plan's constant shape, so that one compiled graph serves all: its slack is computed, not
    trained. `with_pools` adds each token's pool.
    """

    plan_path: str
    split: str = "train"
    device: str = "auto"
    prefetch_depth: int = 1
    rank: int = 0
    world_size: int = 1
    sampler_state: Mapping[str, Any] | None = None
    vocab_size: int | None = None
    constant_shape: bool = False
    with_pools: bool = False


@dataclass(frozen=True, kw_only=True)
class WindowSpec:
    """Which windows to stream where: rows of `max_seq_len` tokens that may hold several documents.

    A step is `accumulation` microbatches of `batch_size` rows, over all ranks. With `document_mask` each document in a
    row is a segment of its own with restarted positions, else the row is one; the targets are the same. `with_pools`
    adds each token's pool: that of the document which holds the input.
    """

    shards_path: str
    batch_size: int
    max_seq_len: int
    accumulation: int
    document_mask: bool = False
    split: str = "train"
    device: str = "auto"
    prefetch_depth: int = 1
    rank: int = 0
    world_size: int = 1
    sampler_state: Mapping[str, Any] | None = None
    vocab_size: int | None = None
    with_pools: bool = False


@dataclass(frozen=True, kw_only=True)
class StreamFacts:
    """What a stream draws from, as a model and a checkpoint need to know it."""

    identity: str
    tokenizer_fingerprint: str
    token_dtype: str
    eos_id: int
    max_seq_len: int
    capacity: int  # inputs in a pack, or in a window's row
    overlap: int
    num_steps: int  # of one epoch
    pool_names: tuple[str, ...]
    slots_of: Callable[[int], int]  # room for inputs, over all ranks, in a step of the run, counted from 0
    digest_of: Callable[[int], bytes]  # SHA-256 over which tokens such a step reads, equal for equal steps of two plans


class StepSource(Protocol):
    """Steps of microbatches on the host, with a state that says which step comes next."""

    def next_step(self) -> list[PackedBatch]:
        """This rank's microbatches of the next step."""

    def state_dict(self) -> dict[str, Any]:
        """Where the next step is."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved step; StateMismatch for the state of other data."""


class BatchStream:
    """Iterator of steps on a device, with a state to resume from; every microbatch in one shape where one is given."""

    def __init__(
        self,
        source: StepSource,
        facts: StreamFacts,
        stage: Stage,
        *,
        prefetch_depth: int,
        vocab_size: int | None,
        shape: ConstantShape | None = None,
        pools_of: TokenPools | None = None,
    ) -> None:
        if prefetch_depth < 0:
            raise RecipeError(f"prefetch_depth: expected 0 or more steps, found {prefetch_depth:,}.")
        self.facts = facts
        self._source = source
        self._stage = stage
        self._shape = shape
        self._pools_of = pools_of
        self._prefetch_depth = prefetch_depth
        self._max_id = np.iinfo(facts.token_dtype).max if vocab_size is None else vocab_size - 1
        self._state = source.state_dict()
        self._ahead: deque[tuple[list[Arrival], dict[str, Any]]] = deque()

    def __iter__(self) -> Iterator[list[DeviceBatch]]:
        return self

    def __next__(self) -> list[DeviceBatch]:
        """This rank's microbatches of the next step; epochs follow each other without end."""
        if not self._ahead:
            self._stage_step()
        arrivals, self._state = self._ahead.popleft()
        return [arrive() for arrive in arrivals]

    def stage_ahead(self) -> None:
        """Stage until prefetch_depth steps are ready.

        Call it once the device has work queued and before waiting for any of it: assembly on the host then costs the
        device nothing. A step that was not staged ahead is staged when it is asked for.
        """
        while len(self._ahead) < self._prefetch_depth:
            self._stage_step()

    def state_dict(self) -> dict[str, Any]:
        """State behind the last step handed out, whatever is staged ahead of it."""
        return dict(self._state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on behind a saved step; StateMismatch for the state of other data."""
        self._source.load_state_dict(state)
        self._state = self._source.state_dict()
        self._ahead.clear()

    def _stage_step(self) -> None:
        arrivals = [self._stage(self._host_batch(batch, i)) for i, batch in enumerate(self._source.next_step())]
        self._ahead.append((arrivals, self._source.state_dict()))

    def _host_batch(self, batch: PackedBatch, number: int) -> HostBatch:
        self._check(batch)
        lengths = np.diff(batch.cu_seqlens).astype(np.int64)
        packed = batch if self._shape is None else in_constant_shape(batch, self._shape)
        pools = None if self._pools_of is None else self._pools_of(batch, number)
        if pools is not None:
            pools = np.pad(pools, (0, len(packed.inputs) - len(pools)))
        return HostBatch(
            packed=packed,
            num_inputs=len(batch.inputs),
            num_eos=int(np.count_nonzero(batch.targets == self.facts.eos_id)),
            sum_squares=int(lengths @ lengths),
            pools=pools,
        )

    def _check(self, batch: PackedBatch) -> None:
        check_cu_seqlens(batch.cu_seqlens, len(batch.inputs), batch.max_seqlen)
        largest = max(int(batch.inputs.max(initial=0)), int(batch.targets.max(initial=0)))
        if largest > self._max_id:
            raise FormatError(
                f"step {batch.step:,}: expected token ids below the vocabulary's {self._max_id + 1:,}, found"
                f" {largest:,}. The shards were made with another tokenizer, or vocab_size is too small."
            )


def open_stream(spec: StreamSpec | WindowSpec) -> BatchStream:
    """Open what a specification describes, at its state; errors are the plan's, the shards' and the sampler's."""
    if isinstance(spec, WindowSpec):
        return open_windows(spec)
    plan = load_plan(Path(spec.plan_path), spec.split)
    if plan.split != spec.split:
        raise RecipeError(
            f"{spec.plan_path}: expected split {spec.split}, found the folder of {plan.split}."
            " Give the artifact's folder."
        )
    return open_packs(plan, spec)


def open_packs(plan: Plan, spec: StreamSpec) -> BatchStream:
    """Open a plan that is loaded already."""
    sampler = Sampler(plan, spec.rank, spec.world_size)
    facts = StreamFacts(
        identity=plan.identity,
        tokenizer_fingerprint=plan.index.tokenizer_fingerprint,
        token_dtype=plan.index.token_dtype,
        eos_id=plan.index.eos_id,
        max_seq_len=plan.max_seq_len,
        capacity=plan.capacity,
        overlap=plan.overlap,
        num_steps=plan.num_steps,
        pool_names=plan.index.pool_names,
        slots_of=partial(_pack_slots, plan),
        digest_of=partial(_pack_digest, plan),
    )
    return _batch_stream(
        sampler,
        facts,
        spec,
        partial(_pack_pools, plan.index),
        plan.constant_shape if spec.constant_shape else None,
    )


def open_windows(spec: WindowSpec) -> BatchStream:
    """Open windows over a token_shards artifact; FormatError for less than a step of tokens."""
    if not 0 <= spec.rank < spec.world_size <= spec.accumulation:
        raise RecipeError(
            f"windows: expected 0 <= rank < world_size <= accumulation, found {spec.rank:,}, {spec.world_size:,} and"
            f" {spec.accumulation:,}. Each rank needs a microbatch in each step; raise accumulation."
        )
    artifact = Path(spec.shards_path)
    manifest = open_artifact(artifact)
    index = read_index(artifact / f"{spec.split}_index")
    loader = WindowLoader([artifact / name for name in index.shard_files], spec.batch_size, spec.max_seq_len)
    if loader.n_batches < spec.accumulation:
        raise FormatError(
            f"{artifact}: expected a step of {spec.accumulation:,} microbatches, found {loader.n_batches:,} in the"
            f" {loader.n_tokens:,} {spec.split} tokens. Lower accumulation or batch_size, or make more tokens."
        )
    identity = _windows_identity(manifest, spec)
    offsets = offsets_of(index.lengths)
    source = WindowSource(
        loader,
        identity,
        accumulation=spec.accumulation,
        rank=spec.rank,
        world_size=spec.world_size,
        document_offsets=offsets if spec.document_mask else None,
    )

    pools_of = partial(_window_pools, loader, index, offsets, spec)
    return _batch_stream(source, _windows_facts(identity, loader, index, spec), spec, pools_of)


def _windows_identity(manifest: Manifest, spec: WindowSpec) -> str:
    return identity_of(
        {
            "shards": [manifest.identity, manifest.digest],
            "split": spec.split,
            "windows": [spec.batch_size, spec.max_seq_len, spec.accumulation],
            **({"document_mask": True} if spec.document_mask else {}),
        }
    )


def _windows_facts(identity: str, loader: WindowLoader, index: DocumentIndex, spec: WindowSpec) -> StreamFacts:
    step_tokens = spec.accumulation * spec.batch_size * spec.max_seq_len
    return StreamFacts(
        identity=identity,
        tokenizer_fingerprint=index.tokenizer_fingerprint,
        token_dtype=index.token_dtype,
        eos_id=index.eos_id,
        max_seq_len=spec.max_seq_len,
        capacity=spec.max_seq_len,
        overlap=0,
        num_steps=loader.n_batches // spec.accumulation,
        pool_names=index.pool_names,
        slots_of=lambda step: step_tokens,
        digest_of=lambda step: hashlib.sha256(f"{identity} {step}".encode()).digest(),
    )


def _window_pools(
    loader: WindowLoader, index: DocumentIndex, offsets: I64, spec: WindowSpec, batch: PackedBatch, number: int
) -> U16:
    i = batch.step * spec.accumulation + spec.rank + number * spec.world_size
    owners_BT, _ = loader.batch_documents(i, offsets)
    return index.pools[owners_BT.reshape(-1)]


def _pack_slots(plan: Plan, step: int) -> int:
    return len(plan.step_packs(*divmod(step, plan.num_steps))) * plan.capacity


def _pack_digest(plan: Plan, step: int) -> bytes:
    packs = plan.step_packs(*divmod(step, plan.num_steps))
    sizes = plan.pack_offsets[packs + 1].astype(np.int64) - plan.pack_offsets[packs]
    digest = hashlib.sha256(plan.shards.digest.encode())
    for column in (sizes, *plan.locate(plan.segments_of(packs))):
        digest.update(np.ascontiguousarray(column, dtype="<i8").data)
    return digest.digest()


def _pack_pools(index: DocumentIndex, batch: PackedBatch, number: int) -> U16:
    return np.repeat(index.pools[batch.segment_doc], np.diff(batch.cu_seqlens))


def _batch_stream(
    source: StepSource,
    facts: StreamFacts,
    spec: StreamSpec | WindowSpec,
    pools_of: TokenPools,
    shape: ConstantShape | None = None,
) -> BatchStream:
    stage = stage_for(resolve_device(spec.device), facts.token_dtype)
    stream = BatchStream(
        source,
        facts,
        stage,
        prefetch_depth=spec.prefetch_depth,
        vocab_size=spec.vocab_size,
        shape=shape,
        pools_of=pools_of if spec.with_pools else None,
    )
    if spec.sampler_state is not None:
        stream.load_state_dict(dict(spec.sampler_state))
    return stream
