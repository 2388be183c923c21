"""A Hugging Face dataset on disk, as `datasets.load_from_disk` opens it.

In: splits of token shards. Out: a folder for each with Arrow streams, one a shard. pyarrow is imported while this
runs, so that everything else does without it. Cost: tokens go from the mapped shard into the file, a batch at a time.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from training_io.columns import write_fields
from training_io.errors import RecipeError
from training_io.export_formats import Documents, TokenSplit
from training_io.hashing import identity_of
from training_io.segments import offsets_of


def write_datasets(splits: Sequence[TokenSplit], folder: Path) -> None:
    """A DatasetDict of rows `input_ids` (a list of the stored dtype, EOS included) and `doc_id` (hexadecimal digits).

    RecipeError where pyarrow is not installed.
    """
    try:
        import pyarrow as pa
    except ModuleNotFoundError as error:
        raise RecipeError(
            "datasets: expected pyarrow to write Arrow files, found it not installed. Install pyarrow, or export"
            " another format."
        ) from error
    write_fields(folder / "dataset_dict.json", {"splits": [split.name for split in splits]})
    for split in splits:
        own = folder / split.name
        own.mkdir()
        ids = pa.list_(pa.from_numpy_dtype(np.dtype(split.index.token_dtype)))
        schema = pa.schema([("input_ids", ids), ("doc_id", pa.string())])
        count = len(split.index.shard_files)
        names = [f"data-{number:05d}-of-{count:05d}.arrow" for number in range(count)]
        for name, shard in zip(names, split.shards(), strict=True):
            _write_stream(pa, own / name, schema, shard)
        _describe(own, split, names)


def _write_stream(pa: Any, path: Path, schema: Any, shard: Documents) -> None:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, schema) as stream:
        for run in shard.blocks():
            n = len(run.lengths)
            offsets = offsets_of(run.lengths).astype(np.int32)
            digits = np.arange(0, 64 * n + 1, 64, dtype=np.int32)
            columns = [
                pa.ListArray.from_arrays(pa.array(offsets), pa.array(run.tokens)),
                pa.StringArray.from_buffers(n, pa.py_buffer(digits), pa.py_buffer(run.hex_ids)),
            ]
            stream.write_batch(pa.record_batch(columns, schema=schema))


def _describe(folder: Path, split: TokenSplit, names: Sequence[str]) -> None:
    """What load_from_disk reads beside the rows. Their types stand in the Arrow files, so no version's way of
    spelling them is needed here; the fingerprint keys the cache of what is computed from the rows.
    """
    write_fields(folder / "dataset_info.json", {"dataset_name": "corpusmill"})
    state: dict[str, Any] = {
        "_data_files": [{"filename": name} for name in names],
        "_fingerprint": identity_of([split.digest, split.name])[:16],
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": split.name,
    }
    write_fields(folder / "state.json", state)
