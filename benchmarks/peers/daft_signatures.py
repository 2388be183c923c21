"""Signatures with Daft's `minhash` expression over a column of texts in memory."""

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from jobs import answer_jobs, read_plain, versions_of

if TYPE_CHECKING:
    from daft import DataFrame

NUM_HASHES, SEED, NGRAM = 112, 1, 5
QUIET = {"DAFT_PROGRESS_BAR": "0", "DAFT_ANALYTICS_ENABLED": "0"}


def load(texts: list[str]) -> "DataFrame":
    """A collected table of the texts and of their lower-cased forms."""
    os.environ.update(QUIET)  # read when daft is imported
    from daft import col, from_arrow
    from daft.functions import lower

    frame = from_arrow(pa.table({"text": pa.array(texts, pa.large_string())}))
    return frame.with_column("lowered", lower(col("text"))).collect()


def run(frame: "DataFrame", is_lowered: bool) -> dict[str, Any]:
    """Seconds of signing all texts, lower-casing them first unless that was done, and the shape of the result."""
    from daft import col
    from daft.functions import lower, minhash

    words = col("lowered") if is_lowered else lower(col("text"))
    signatures = minhash(words, num_hashes=NUM_HASHES, ngram_size=NGRAM, seed=SEED)
    start = time.perf_counter()
    signed = frame.select(signatures.alias("signature")).collect()
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "shape": [len(signed), signed.to_arrow().schema.field("signature").type.list_size]}


def main() -> None:
    """Answer jobs on the folder named on the command line."""
    frame = load(read_plain(Path(sys.argv[1]), "texts"))
    answer_jobs(
        {
            "run": lambda: run(frame, is_lowered=False),
            "run lowered": lambda: run(frame, is_lowered=True),
            "versions": lambda: versions_of("daft"),
        }
    )


if __name__ == "__main__":
    main()
