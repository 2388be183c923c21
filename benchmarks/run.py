"""corpusmill against its peers, side by side on one core: `python benchmarks/run.py [--only NAME ...] [--runs N]`.

How to read it. The process and all that it starts, but for the entry `ui`, are pinned to one core with one thread each.
For each entry, ours and the peer run in turns in the same invocation, after both have been shown to compute the same.
The table gives medians: `ratio` is the peer's median time over ours, so above 1 corpusmill is faster; `min–max` are the
smallest and largest ratio of a single round, and a wide range means that the machine was busy. `bar` compares a figure
with the project's own limit. Rates are of this machine; ratios travel better, and even they depend on the text. Each
entry's file says what is timed on either side.

The text is the Parquet folder in CORPUSMILL_BENCH_TEXT, else the text of the installed packages; of more than
`--megabytes`, a part. Peers are installed into `.venv-bench` from `requirements-peers*.txt` when an entry needs them.
The JSON report (`bench-results/`, or `--output`) holds the machine, versions, text, every run's seconds and all
figures. Times are wall-clock: close other programs.
"""

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from measure import Row, report_of, table_of

ROOT = Path(__file__).resolve().parent.parent

# Each is a file here with a function `measure(bench) -> list[Row]`.
ENTRIES = (
    "signatures",
    "pathological",
    "lsh",
    "deduplication",
    "tokenizing",
    "packing",
    "assembly",
    "windows",
    "ranges",
    "training",
    "whole_flow",
    "ui",
)
NEED_TEXT = frozenset({"signatures", "pathological", "deduplication", "tokenizing", "whole_flow"})
OUR_LIBRARIES = ("numpy", "numba", "pyarrow", "tokenizers", "datasketch", "dagster")

ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "NUMBA_NUM_THREADS": "1",
    "RAYON_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the chosen entries, write the report, print the table."""
    parsed = _parse(arguments)
    started = time.gmtime()
    core = pin_to_one_core()
    from bench import Bench  # numpy, numba and tokenizers read their thread counts when they are imported

    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(
            runs=parsed.runs,
            max_bytes=int(parsed.megabytes * 1e6),
            peers_dir=parsed.peers.absolute(),
            tokenizer_path=parsed.tokenizer,
            scratch=Path(scratch),
        )
        rows: list[Row] = []
        for name in parsed.only:
            print(f"measuring {name}", file=sys.stderr)
            rows += import_module(name).measure(bench)
    report = {
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", started),
        "runs": parsed.runs,
        "machine": machine_facts(core),
        "text": text_facts(bench) if NEED_TEXT & set(parsed.only) else None,
        "rows": [report_of(row) for row in rows],
    }
    output = parsed.output or ROOT / "bench-results" / time.strftime("%Y%m%d-%H%M%S.json", started)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"{table_of(rows)}\n\n{output}")
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure corpusmill and its peers on one core.")
    parser.add_argument("--only", nargs="+", choices=ENTRIES, default=ENTRIES, metavar="NAME", help=", ".join(ENTRIES))
    parser.add_argument("--runs", type=int, default=5, help="rounds of each entry (5)")
    parser.add_argument("--megabytes", type=float, default=20, help="most text to measure on (20)")
    parser.add_argument("--tokenizer", type=Path, metavar="FILE", help="a tokenizer.json(.gz); else one is trained")
    parser.add_argument("--peers", type=Path, default=ROOT / ".venv-bench", metavar="FOLDER", help="their environment")
    parser.add_argument("--output", type=Path, metavar="FILE", help="the report (bench-results/<time>.json)")
    parsed = parser.parse_args(arguments)
    if parsed.runs < 1 or parsed.megabytes <= 0:
        parser.error("expected --runs of at least 1 and --megabytes above 0")
    return parsed


def pin_to_one_core() -> int | None:
    """Keep this process and its children on one core with one thread each; None where the system cannot pin."""
    os.environ.update(ONE_THREAD)
    if not hasattr(os, "sched_setaffinity"):
        return None
    core = max(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})
    return core


def machine_facts(core: int | None) -> dict[str, Any]:
    """What the numbers depend on: processor, system, load, versions."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "pinned_to_core": core,
        "load_average": os.getloadavg(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: metadata.version(name) for name in OUR_LIBRARIES},
    }


def text_facts(bench: Any) -> dict[str, Any]:
    """Which text was used."""
    return {"source": bench.text.source, "bytes": bench.text.num_bytes, "documents": len(bench.text.texts)}


def _processor() -> str:
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text().splitlines() if facts.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


if __name__ == "__main__":
    sys.exit(main())
