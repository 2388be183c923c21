"""assembly: batches from memory-mapped shards, against copying arrays of the same bytes.

The sampler runs twenty times through one epoch of batches of 35 packs of 4,096, since one is over too soon to time
beside other programs. The peer copies the arrays of those same batches, kept in memory: once into fresh memory, as a
batch is, and once into a buffer that is used again and again, which a sampler that hands out new arrays cannot have. A
ratio of 1 would be as fast as memcpy of what no cache holds. Tokens count up through the shard, so that each target is
known from its input; that all are right is asserted first.
"""

from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt
from bench import Bench
from measure import Bar, Row, alternate, require_same, seconds_of
from packing import BUFFER, CAPACITY, web_lengths

from training_io.batch import PackedBatch
from training_io.document_index import cut_shards, index_of
from training_io.plan import ShardsReference
from training_io.planning import plan_packs
from training_io.sampler import Sampler
from training_io.shard_format import write_shard

NUM_DOCUMENTS = 12_000
PACKS_PER_BATCH = 35
NUM_PASSES = 20
MODULUS = 65_521
BAR = Bar(figure="ratio", at_least=0.5)

Arrays = list[npt.NDArray[np.generic]]


def measure(bench: Bench) -> list[Row]:
    """Two rows: M tokens a second against two ways of copying."""
    sampler = open_sampler(bench.scratch / "assembly", web_lengths(NUM_DOCUMENTS))
    start = sampler.state_dict()
    batches = list(islice(sampler, sampler.plan.num_steps))
    require_right_tokens(batches, sampler.plan.index.num_tokens - NUM_DOCUMENTS)
    outputs = [arrays_of(batch) for batch in batches]
    buffers = [np.zeros_like(array) for array in max(outputs, key=lambda arrays: sum(map(len, arrays)))]

    def one_epoch() -> None:
        sampler.load_state_dict(start)
        for _ in range(sampler.plan.num_steps):
            next(sampler)

    contenders: dict[str, Callable[[], None]] = {
        "ours": one_epoch,
        "fresh": lambda: copy_to_fresh_memory(outputs),
        "reused": lambda: copy_to_reused_memory(outputs, buffers),
    }
    seconds = alternate(
        bench.runs, {name: lambda work=work: seconds_of(lambda: again(work)) for name, work in contenders.items()}
    )
    return [
        Row(
            name=f"assembly, {kind} memory",
            amount=NUM_PASSES * sampler.plan.num_targets / 1e6,
            unit="M tokens",
            ours_seconds=seconds["ours"],
            peer=f"memcpy to {kind} memory",
            peer_seconds=seconds[kind],
            extra={"output_bytes": sum(array.nbytes for arrays in outputs for array in arrays)},
            bars=[BAR],
        )
        for kind in ("fresh", "reused")
    ]


def again(work: Callable[[], None]) -> None:
    """Do the work as often as is timed."""
    for _ in range(NUM_PASSES):
        work()


def open_sampler(folder: Path, lengths: npt.NDArray[np.int64]) -> Sampler:
    """A sampler over a shard of documents of these lengths, whose tokens count up modulo 65,521 through the shard."""
    index = index_of(
        split="train",
        doc_ids=np.zeros((len(lengths), 32), dtype=np.uint8),
        pools=np.zeros(len(lengths), dtype=np.uint16),
        pool_names=("web",),
        lengths=lengths,
        cuts=cut_shards(lengths, int(lengths.sum())),
        eos_id=0,
        token_dtype="uint16",
        tokenizer_fingerprint="",
    )
    folder.mkdir(parents=True)
    write_shard(folder / index.shard_files[0], (np.arange(index.num_tokens) % MODULUS).astype(np.uint16))
    plan = plan_packs(
        index,
        shards=ShardsReference(path=folder, identity="", digest=""),
        max_seq_len=CAPACITY,
        capacity=CAPACITY,
        strategy="oldest_first",
        buffer=BUFFER,
        packs_per_microbatch=PACKS_PER_BATCH,
        microbatches_per_step=1,
        epoch_seed=1,
    )
    return Sampler(plan)


def require_right_tokens(batches: Sequence[PackedBatch], num_pairs: int) -> None:
    """Refuse to time batches that miss a pair, or whose targets do not follow their inputs."""
    require_same("assembly: pairs in an epoch", sum(batch.num_targets for batch in batches), num_pairs)
    for batch in batches:
        is_next = np.array_equal(batch.targets, (batch.inputs + 1) % MODULUS)
        require_same(f"assembly: targets of step {batch.step:,} follow their inputs", is_next, True)


def arrays_of(batch: PackedBatch) -> Arrays:
    """The arrays that a batch consists of."""
    return [batch.inputs, batch.targets, batch.position_ids, batch.cu_seqlens, batch.segment_doc]


def copy_to_fresh_memory(outputs: Sequence[Arrays]) -> None:
    """Copy batch after batch, each into new arrays that live until the next."""
    for arrays in outputs:
        copied = [array.copy() for array in arrays]
    del copied


def copy_to_reused_memory(outputs: Sequence[Arrays], buffers: Arrays) -> None:
    """Copy batch after batch into the same arrays."""
    for arrays in outputs:
        for buffer, array in zip(buffers, arrays, strict=True):
            num = min(len(buffer), len(array))
            np.copyto(buffer[:num], array[:num])
