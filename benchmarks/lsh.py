"""lsh: clusters of signatures, against sorting each band's 32-byte rows in numpy and union-find in plain Python.

Both start from the same uint32 signatures in memory and end with a label a document, the smallest of its cluster; ours
includes the band keys. Signatures are random, with near copies of known similarity planted among them, copies of
copies, and one large cluster. That the labels are equal is asserted first.

The second row is the path of bounded memory at two sizes, `lsh_in_buckets.py` in a process of its own: stored units of
sorted keys, one bucket of all units at a time, edges linked as they come. Timed is all but starting Python. Memory is
what a document adds to the peak: the difference of the two peaks over that of the two sizes, buckets being as large in
both. That the labels are the planted ones is asserted with scipy.
"""

import hashlib
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
from bench import Bench
from measure import Bar, Row, alternate, require_same, seconds_of
from peer_environment import running_peer
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components as scipy_components

from pipeline_assets.transforms.components import connected_components
from pipeline_assets.transforms.lsh import band_keys, bucket_bounds, candidate_pairs
from pipeline_assets.transforms.minhash import MinHashParams

I64 = npt.NDArray[np.int64]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]

NUM_DOCUMENTS = 1_000_000
COPY_EVERY, CLUSTERED_EVERY = 50, 1000  # each 50th document is a near copy, each 1,000th belongs to one large cluster
LEAST_SIMILAR = 0.6
MAX_RUNS = 3  # the peer takes about half a minute
BARS = [Bar(figure="ratio", at_least=10)]


@dataclass(frozen=True, kw_only=True)
class Size:
    """Documents in the path of bounded memory; both sizes fill their buckets about equally."""

    num_documents: int
    num_buckets: int


SMALL, LARGE = Size(num_documents=200_000, num_buckets=8), Size(num_documents=2_000_000, num_buckets=64)
UNIT_DOCUMENTS = 50_000
STREAMING_BARS = [Bar(figure="bytes_per_document", at_most=64), Bar(figure="times_for_10_times", at_most=12)]


def measure(bench: Bench) -> list[Row]:
    """Two rows: documents a second in memory, and in bounded memory."""
    runs = min(bench.runs, MAX_RUNS)
    return [in_memory(bench, runs, NUM_DOCUMENTS), in_buckets(bench.scratch / "lsh_in_buckets", runs, SMALL, LARGE)]


def in_memory(bench: Bench, runs: int, num_documents: int) -> Row:
    """Signatures to labels, against the peer."""
    params, signatures = MinHashParams(), planted_signatures(num_documents)
    folder = bench.scratch / "lsh"
    folder.mkdir(parents=True)
    np.save(folder / "signatures.npy", signatures)

    def labels() -> I64:
        return connected_components(num_documents, candidate_pairs(band_keys(signatures, params)))

    found = labels()
    with running_peer(bench.peer_python, "sorted_bands.py", folder) as ask:
        require_same("lsh: labels", digest_of(found), ask("run")["digest"])
        contenders = {"ours": lambda: seconds_of(labels), "peer": lambda: float(ask("run")["seconds"])}
        seconds = alternate(runs, contenders)
        peer = ask("versions")["versions"]
    return Row(
        name="lsh",
        amount=num_documents / 1e3,
        unit="k documents",
        ours_seconds=seconds["ours"],
        peer=f"{peer}, 32-byte keys, Python union-find",
        peer_seconds=seconds["peer"],
        extra={"num_clustered": int((np.bincount(found, minlength=num_documents)[found] > 1).sum())},
        bars=BARS,
    )


def planted_signatures(num_documents: int) -> U32:
    """uint32[n, 112], always the same: a value of a copy is its original's with the pair's similarity as chance."""
    generator = np.random.default_rng(0)
    signatures = generator.integers(0, 1 << 32, (num_documents, MinHashParams().num_perm), dtype=np.uint32)
    documents = np.arange(num_documents)
    similarities = generator.uniform(LEAST_SIMILAR, 1, num_documents)
    # In ascending order, so that a copy of a copy is made of what the copy has become.
    for copy in documents[is_copy(documents)].tolist():
        is_equal = generator.random(signatures.shape[1]) < similarities[copy]
        signatures[copy, is_equal] = signatures[originals(np.array([copy]))[0], is_equal]
    return signatures


def is_copy(documents: I64) -> npt.NDArray[np.bool_]:
    """Which documents are near copies of an earlier one."""
    return (documents % COPY_EVERY == COPY_EVERY - 1) | (documents % CLUSTERED_EVERY == 1) & (documents > 1)


def originals(documents: I64) -> I64:
    """The earlier document that each copy is made of: document 1 for those of the large cluster, else any one."""
    drawn = (mixed(documents.astype(np.uint64)) % np.maximum(documents, 1).astype(np.uint64)).astype(np.int64)
    return np.where(documents % CLUSTERED_EVERY == 1, 1, drawn)


def mixed(numbers: U64) -> U64:
    """MurmurHash3's 64-bit finaliser: a number drawn for each number."""
    numbers = (numbers ^ (numbers >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    numbers = (numbers ^ (numbers >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return numbers ^ (numbers >> np.uint64(33))


def digest_of(labels: I64) -> str:
    """SHA-256 of int64 labels."""
    return hashlib.sha256(labels.tobytes()).hexdigest()


def in_buckets(folder: Path, runs: int, small: Size, large: Size) -> Row:
    """Stored keys to labels at two sizes: documents a second of the large one, and how time and memory grow."""
    answers: dict[Size, list[dict[str, Any]]] = {small: [], large: []}
    for size in answers:
        expected = digest_of(write_units(folder / str(size.num_documents), size))
        answers[size].append(run_in_buckets(folder, size))
        name = f"lsh in buckets: labels of {size.num_documents:,} documents"
        require_same(name, answers[size][0]["digest"], expected)

    def one_run(size: Size) -> float:
        answers[size].append(run_in_buckets(folder, size))
        return float(answers[size][-1]["seconds"])

    seconds = alternate(runs, {"small": lambda: one_run(small), "large": lambda: one_run(large)})
    small_peak, large_peak = (max(answer["peak_bytes"] for answer in answers[size]) for size in (small, large))
    return Row(
        name="lsh in buckets",
        amount=large.num_documents / 1e3,
        unit="k documents",
        ours_seconds=seconds["large"],
        extra={
            "bytes_per_document": (large_peak - small_peak) / (large.num_documents - small.num_documents),
            "times_for_10_times": median(seconds["large"]) / median(seconds["small"]),
            "peak_bytes": large_peak,
            "num_documents": large.num_documents,
        },
        bars=STREAMING_BARS,
    )


def write_units(folder: Path, size: Size) -> I64:
    """Write units of sorted keys, each with its rows and where its buckets begin; the labels that must come out."""
    folder.mkdir(parents=True)
    edges = []
    for number, first in enumerate(range(0, size.num_documents, UNIT_DOCUMENTS)):
        documents = np.arange(first, min(first + UNIT_DOCUMENTS, size.num_documents))
        sources = planted_sources(documents)
        keys = mixed((sources << 4 | np.arange(sources.shape[1])).astype(np.uint64))
        order = np.argsort(keys, axis=None, kind="stable")
        keys.ravel()[order].tofile(folder / f"{number:04d}.keys")
        np.repeat(documents, sources.shape[1])[order].astype(np.uint32).tofile(folder / f"{number:04d}.documents")
        np.save(folder / f"{number:04d}.npy", bucket_bounds(keys.ravel()[order], size.num_buckets))
        pairs = np.column_stack([np.repeat(documents, sources.shape[1]), sources.ravel()])
        edges.append(pairs[pairs[:, 0] != pairs[:, 1]])
    return labels_of(size.num_documents, np.concatenate(edges))


def planted_sources(documents: I64) -> I64:
    """For each band the document whose key is used, int64[n, 14]: as for planted signatures, but without making any."""
    params = MinHashParams()
    bands = np.arange(params.num_bands)
    sources = np.repeat(documents[:, None], params.num_bands, axis=1)
    while True:
        drawn = mixed((sources << 4 | bands).astype(np.uint64) ^ np.uint64(1 << 63)) / 2**64
        similarities = LEAST_SIMILAR + (1 - LEAST_SIMILAR) * (mixed(~sources.astype(np.uint64)) / 2**64)
        is_shared = is_copy(sources) & (drawn < similarities**params.rows_per_band)
        if not is_shared.any():
            return sources
        sources = np.where(is_shared, originals(sources), sources)


def labels_of(num_documents: int, edges: I64) -> I64:
    """The smallest document that each is connected to, by scipy."""
    graph = coo_array((np.ones(len(edges), dtype=np.int8), edges.T), shape=(num_documents, num_documents))
    _, labels = scipy_components(graph, directed=False)
    _, smallest = np.unique(labels, return_index=True)
    return smallest[labels].astype(np.int64)


def run_in_buckets(folder: Path, size: Size) -> dict[str, Any]:
    """The answer of one process: seconds, peak of its memory, digest of its labels."""
    script = Path(__file__).with_name("lsh_in_buckets.py")
    command = [sys.executable, str(script), str(folder / str(size.num_documents)), str(size.num_documents)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer
