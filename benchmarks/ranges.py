"""ranges: row groups read over HTTP ranges from a server on loopback, against the same row groups from the local file.

Every fourth row group of one file, its text and id. The server runs in a process of its own on the same core, so the
seconds hold its work too; `cpu_seconds_per_gb` is of the reading process alone. `bytes_ratio` is what crossed the
network over the chosen columns' chunks, the footer aside. The tables are shown to be equal first.
"""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import pyarrow as pa
import pyarrow.parquet as pq
from bench import Bench
from measure import Bar, Row, alternate, require_same

from resources.artifact_store import ArtifactStore
from resources.listings import PoolFolder, PoolOfUrls
from resources.ranges import chunk_ranges
from resources.readers import Network
from resources.row_group_source import SourceFile, list_files, read_row_groups

COLUMNS = ("text", "id")
STRIPES = 4
NUM_GROUPS, ROWS_PER_GROUP = 40, 1_000
BYTES_PER_TEXT = 3_000


def measure(bench: Bench) -> list[Row]:
    """One row: GB of chosen chunks a second, over ranges and from the local file."""
    folder = write_file(bench.scratch / "ranges")
    with serving(folder) as url:
        network = Network(store=ArtifactStore(bench.scratch / "ranges_home"))
        [remote] = list_files([PoolOfUrls(name="web", urls=(f"{url}/000.parquet",))], network)
        [local] = list_files([PoolFolder(name="web", folder=folder, glob="*.parquet")], network)
        require_same("ranges", read(remote, network), read(local, network))
        before = network.traffic.num_bytes
        read(remote, network)
        fetched = network.traffic.num_bytes - before
        cpu: dict[str, list[float]] = {"ranges": [], "file": []}

        def timed(name: str, file: SourceFile) -> float:
            started, used = time.perf_counter(), time.process_time()
            read(file, network)
            cpu[name].append(time.process_time() - used)
            return time.perf_counter() - started

        contenders = {"ranges": lambda: timed("ranges", remote), "file": lambda: timed("file", local)}
        seconds = alternate(bench.runs, contenders)
    chunks = chunk_bytes(folder / "000.parquet")
    per_gb = {name: median(used) / (chunks / 1e9) for name, used in cpu.items()}
    return [
        Row(
            name="ranges",
            amount=chunks / 1e9,
            unit="GB",
            ours_seconds=seconds["ranges"],
            peer="the local file",
            peer_seconds=seconds["file"],
            extra={
                "cpu_seconds_per_gb": per_gb["ranges"],
                "cpu_seconds_per_gb_of_file": per_gb["file"],
                "bytes_ratio": fetched / chunks,
            },
            bars=[Bar(figure="bytes_ratio", at_most=1.1)],
            note=f"{per_gb['ranges']:.1f} CPU s a GB, {per_gb['file']:.1f} from the file; the server shares the core",
        )
    ]


def selected(file: SourceFile) -> range:
    """Every fourth row group."""
    return range(0, len(file.row_groups), STRIPES)


def read(file: SourceFile, network: Network) -> list[pa.Table]:
    """The selected row groups' tables."""
    return [table for _, table in read_row_groups(file, selected(file), COLUMNS, network)]


def chunk_bytes(path: Path) -> int:
    """Bytes of the chosen columns' chunks in the selected row groups."""
    metadata = pq.read_metadata(path)
    groups = range(0, metadata.num_row_groups, STRIPES)
    return sum(end - start for group in groups for start, end in chunk_ranges(metadata.row_group(group), COLUMNS))


def write_file(folder: Path) -> Path:
    """Row groups of 1,000 texts of 3 kB that compress to about a half, as web text does, and ids."""
    folder.mkdir(parents=True)
    schema = pa.schema([("text", pa.string()), ("file_path", pa.string()), ("id", pa.string())])
    with pq.ParquetWriter(folder / "000.parquet", schema, compression="snappy") as writer:
        for group in range(NUM_GROUPS):
            numbers = range(group * ROWS_PER_GROUP, (group + 1) * ROWS_PER_GROUP)
            words = [
                [f"{(number * 7_919 + place * 104_729) % 99_991:05d}" for place in range(500)] for number in numbers
            ]
            columns = {
                "text": [" ".join(row)[:BYTES_PER_TEXT] for row in words],
                "file_path": [f"s3://crawl/{number:064d}" for number in numbers],
                "id": [f"<urn:{number:032x}>" for number in numbers],
            }
            writer.write_table(pa.table(columns, schema), row_group_size=ROWS_PER_GROUP)
    return folder


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """The URL of a server of a folder's files by ranges, in a process of its own."""
    script = Path(__file__).with_name("range_server.py")
    with subprocess.Popen([sys.executable, script, folder], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(server.stdout.readline())}"
        finally:
            server.terminate()
