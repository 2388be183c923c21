"""What an asset stores beside its contracts, in words: one column an array or a field of JSON, and a few rows.

In: an artifact's folder. Out: names, types, units and descriptions, and rows to look at. A type is a dtype and a shape,
or a JSON type: `uint8[n, 32]` has one entry a row of the asset, other letters count what the description says. The
cost: a few headers and rows of an array; a JSON file is read whole by who reads it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipeline_assets.stripes import SAMPLE_ROWS, Stage
from pipeline_assets.transforms.split import SPLITS
from resources.artifact_store import ArtifactRef
from resources.tables import read_array

SHOWN_VALUES = 8  # of a row of an array
PLACE_UNIT = "place, from 0"  # the unit of what numbers things

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class StoredColumn:
    """One array, JSON field or file of an asset's artifact or units.

    `file` is a pattern below their folder; `key` leads to the field of a JSON file, `[]` from a list to its elements.
    """

    name: str
    type: str
    description: str
    file: str
    key: str = ""
    unit: str = ""
    is_optional: bool = False


@dataclass(frozen=True, kw_only=True)
class StoredRows:
    """How many rows an asset has, and the first few of them."""

    num_rows: int
    sample: Sequence[Row]


@dataclass(frozen=True, kw_only=True)
class StoredAsset:
    """An asset without a contract: its columns, and how its rows are counted and sampled.

    `rows` takes the stage, the asset's reference and those of its units.
    """

    columns: tuple[StoredColumn, ...]
    rows: Callable[[Stage, ArtifactRef, Sequence[ArtifactRef]], StoredRows]


def describe_array(name: str, kind: str, description: str, file: str = "", unit: str = "") -> StoredColumn:
    """A column that is one array, `<name>.npy` where no file is given."""
    return StoredColumn(name=name, type=kind, description=description, file=file or f"{name}.npy", unit=unit)


def describe_fields(
    file: str, prefix: str, described: Mapping[str, tuple[str, ...]], parent: str = ""
) -> list[StoredColumn]:
    """Fields of one JSON file: each a type, a description and, where it has one, a unit."""
    return [
        StoredColumn(
            name=f"{prefix}{key}",
            type=kind,
            description=description,
            file=file,
            key=f"{parent}{key}",
            unit="".join(unit),
        )
        for key, (kind, description, *unit) in described.items()
    ]


def show_values(values: Any) -> Any:
    """A row's entry as one printable cell: raw bytes, a number, or the first of several numbers."""
    if isinstance(values, np.ndarray) and values.dtype == np.uint8:
        return values.tobytes()
    if isinstance(values, np.ndarray) and values.ndim:
        some = ", ".join(map(str, values[:SHOWN_VALUES].tolist()))
        return f"{some}, … ({len(values):,})" if len(values) > SHOWN_VALUES else some
    return values.item() if isinstance(values, np.generic) else values


def read_array_rows(folder: Path, names: Sequence[str]) -> list[Row]:
    """The first rows of arrays of equal length, `<name>.npy` each."""
    arrays = [read_array(folder / f"{name}.npy")[:SAMPLE_ROWS] for name in names]
    return [dict(zip(names, map(show_values, row), strict=True)) for row in zip(*arrays, strict=True)]


def find_unit_with_documents(refs: Sequence[ArtifactRef]) -> ArtifactRef:
    """The first unit that holds a document; an asset without any is never sealed."""
    return next(ref for ref in refs if ref.counts.get("documents"))


def find_splits(counts: Mapping[str, Mapping[str, Any]], counted: str) -> list[str]:
    """Splits that hold any of what is counted, training first."""
    return [name for name in SPLITS if name in counts and counts[name][counted]]


def sample_rows(rows: Sequence[Row]) -> StoredRows:
    """Rows that are all in memory, and the first of them."""
    return StoredRows(num_rows=len(rows), sample=rows[:SAMPLE_ROWS])
