"""Parquet to token files with datatrove: its MinHash stages with their defaults, then its DocumentTokenizer.

The stages are those of its own example of deduplication: signatures, buckets, clusters, and a pass over the text that
leaves out what is to be removed, here straight into the tokenizer instead of files in between. Its defaults are what
corpusmill's recipes say: 5-grams, 14 buckets of 8 hashes of 64 bits, documents shuffled, files of at most 100 M tokens.
It has no split into train and validation; that is left out.
"""

import contextlib
import os
import shutil
import struct
import sys
import time
from pathlib import Path
from typing import Any

from datatrove.executor.local import LocalPipelineExecutor
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.dedup import (
    MinhashDedupBuckets,
    MinhashDedupCluster,
    MinhashDedupFilter,
    MinhashDedupSignature,
)
from datatrove.pipeline.dedup.minhash import MinhashConfig
from datatrove.pipeline.readers import ParquetReader
from datatrove.pipeline.tokens import DocumentTokenizer
from jobs import answer_jobs, versions_of

EOS = "<|endoftext|>"
MAX_TOKENS_PER_FILE = 100_000_000


def stages(folder: Path, texts: Path, config: MinhashConfig) -> dict[str, tuple[list[PipelineStep], int]]:
    """The pipeline of each stage and its number of tasks; every stage starts where the one before it wrote."""
    signatures, buckets, removed, tokens = (
        str(folder / name) for name in ("signatures", "buckets", "removed", "tokens")
    )
    tokenizer = DocumentTokenizer(
        tokens,
        str(texts.parent / "tokenizer.json"),
        eos_token=EOS,
        max_tokens_per_file=MAX_TOKENS_PER_FILE,
        seed=config.seed,
    )
    return {
        "signatures": ([ParquetReader(str(texts)), MinhashDedupSignature(signatures, config)], 1),
        "buckets": ([MinhashDedupBuckets(signatures, buckets, config=config)], config.num_buckets),
        "clusters": ([MinhashDedupCluster(buckets, removed, config=config)], 1),
        "tokens": ([ParquetReader(str(texts)), MinhashDedupFilter(removed), tokenizer], 1),
    }


def run(folder: Path, texts: Path) -> dict[str, Any]:
    """Seconds on a folder of Parquet files, one worker, by the clock and of the processor; what came out."""
    shutil.rmtree(folder, ignore_errors=True)
    seconds, start_of_processor = {}, processor_seconds()
    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stderr(nowhere):  # its log of every stage
        for name, (pipeline, tasks) in stages(folder, texts, MinhashConfig()).items():
            start = time.perf_counter()
            LocalPipelineExecutor(pipeline, tasks=tasks, workers=1, logging_dir=str(folder / "logs" / name)).run()
            seconds[name] = time.perf_counter() - start
    cpu_seconds = processor_seconds() - start_of_processor
    return {
        "seconds": sum(seconds.values()),
        "cpu_seconds": cpu_seconds,
        "stages": seconds,
        **written(folder / "tokens"),
    }


def processor_seconds() -> float:
    """Seconds of the processor that this process and its ended children took."""
    return sum(os.times()[:4])


def written(folder: Path) -> dict[str, int]:
    """Documents and tokens of the files, by their indices of document ends."""
    ends = [struct.unpack(f"<{len(data) // 8}Q", data) for data in map(Path.read_bytes, folder.glob("*.ds.index"))]
    return {"documents": sum(map(len, ends)), "tokens": sum(file[-1] for file in ends)}


def main() -> None:
    """Answer jobs on the folder named on the command line: a small text to start with, and the one that is timed."""
    folder = Path(sys.argv[1])
    run(folder / "datatrove_warm_up", folder / "warm_up")
    answer_jobs(
        {
            "run": lambda: run(folder / "datatrove", folder / "text"),
            "versions": lambda: versions_of("datatrove", "spacy", "tokenizers"),
        }
    )


if __name__ == "__main__":
    main()
