"""One run of clustering in bounded memory, for `lsh.py`: `python benchmarks/lsh_in_buckets.py FOLDER NUM_DOCUMENTS`.

Units lie in the folder as `<unit>.keys` (ascending uint64), `<unit>.documents` (uint32, the document of each key) and
`<unit>.npy` (where each bucket begins). Files are read, not mapped: pages of mapped files count as memory in use.
Prints one line of JSON: seconds, the peak of resident memory in bytes, and the SHA-256 of the labels.
"""

import hashlib
import json
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from io import FileIO
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pipeline_assets.transforms.components import components_of_parts
from pipeline_assets.transforms.lsh import star_edges

STATUS = Path("/proc/self/status")


def read_buckets(folder: Path) -> Iterator[tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint32]]]:
    """Bucket after bucket, its keys of all units and their documents."""
    names = sorted(path.stem for path in folder.glob("*.npy"))
    bounds = np.array([np.load(folder / f"{name}.npy") for name in names])
    with ExitStack() as stack:
        keys, documents = (
            [stack.enter_context((folder / f"{name}.{kind}").open("rb", buffering=0)) for name in names]
            for kind in ("keys", "documents")
        )
        for starts, ends in zip(bounds[:, :-1].T, bounds[:, 1:].T, strict=True):
            yield read(keys, np.uint64, starts, ends), read(documents, np.uint32, starts, ends)


def read(
    files: Sequence[FileIO], dtype: type[np.generic], starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]
) -> npt.NDArray[np.generic]:
    """Items [start, end) of each file, one after the other."""
    items = np.empty(int((ends - starts).sum()), dtype=dtype)
    offsets = np.append(0, np.cumsum(ends - starts)).tolist()
    for file, start, (first, last) in zip(files, starts.tolist(), pairwise(offsets), strict=True):
        file.seek(start * items.itemsize)
        num_read = file.readinto(items[first:last])
        assert num_read == (last - first) * items.itemsize, file.name
    return items


def peak_bytes() -> int:
    """Most memory that this process had resident; what it inherits of who started it is left out where that can be."""
    if STATUS.is_file():
        line = next(line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def main() -> None:
    """Cluster the documents of the folder named on the command line."""
    folder, num_documents = Path(sys.argv[1]), int(sys.argv[2])
    nothing = np.empty(0, dtype=np.uint64)
    components_of_parts(0, [star_edges(nothing, nothing.astype(np.uint32))])  # loads the kernels
    start = time.perf_counter()
    labels = components_of_parts(num_documents, (star_edges(*bucket) for bucket in read_buckets(folder)))
    seconds = time.perf_counter() - start
    digest = hashlib.sha256(labels).hexdigest()
    print(json.dumps({"seconds": seconds, "peak_bytes": peak_bytes(), "digest": digest}))


if __name__ == "__main__":
    main()
