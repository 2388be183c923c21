"""A small table on disk: one `.npy` file a column beside one JSON object of named fields.

In: arrays and plain values. Out: the same, memory-mapped. The promise: a missing, truncated or retyped column or
field is refused with its name. Cost: reading a column maps its file.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from training_io.errors import FormatError


def write_column(folder: Path, name: str, values: npt.NDArray[Any]) -> None:
    """Write one column as `<name>.npy` in little-endian C order."""
    np.save(
        folder / f"{name}.npy", np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<")), allow_pickle=False
    )


def read_column(folder: Path, name: str, dtypes: Iterable[str], shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """Map one column read-only; FormatError unless it has one of the dtypes and exactly the shape."""
    path = folder / f"{name}.npy"
    try:
        column: npt.NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise FormatError(
            f"{path}: expected an .npy column, found {error}. Materialize the asset that wrote it again."
        ) from error
    expected = " or ".join(dtypes)
    if column.dtype.name not in expected.split(" or ") or column.shape != shape:
        raise FormatError(
            f"{path}: expected {expected}{list(shape)}, found {column.dtype}{list(column.shape)}."
            " Materialize the asset that wrote it again."
        )
    return column


def write_fields(path: Path, fields: dict[str, Any]) -> None:
    """Write named fields as one readable JSON object."""
    path.write_text(json.dumps(fields, indent=1, sort_keys=True, allow_nan=False) + "\n", encoding="utf-8")


def read_fields(path: Path, expected_format: str, names: Iterable[str]) -> dict[str, Any]:
    """The named fields of a JSON object of one format; FormatError when it is broken or of another format."""
    try:
        fields = json.loads(path.read_bytes())
        found_format = fields["format"]
        chosen = {name: fields[name] for name in names}
    except OSError as error:
        raise FormatError(
            f"{path}: expected a file of format {expected_format}, found {error.strerror}."
            " Materialize the asset that wrote it again."
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError(
            f"{path}: expected format {expected_format}, found {error!r}. Materialize the asset that wrote it again."
        ) from error
    if found_format != expected_format:
        raise FormatError(
            f"{path}: expected format {expected_format}, found {found_format}. Materialize the asset again."
        )
    return chosen
