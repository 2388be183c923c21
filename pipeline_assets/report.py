"""What an asset's page shows: metadata, table schemas, sample rows, pictures.

In: references, counts, tables and series. Out: Dagster metadata values, small enough to stay in the event log for
ever. Pictures and tables are files beside the artifact: the page embeds the pictures and links all of them.
"""

import base64
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa

from pipeline_assets.columns import LINEAGE, STORED, rows_of
from pipeline_assets.measures import Measures, explained_column, explained_table
from pipeline_assets.parameters import own_parameters
from pipeline_assets.schemas import Contract
from pipeline_assets.shown_columns import TABLES, columns_of_sample, of_contract
from pipeline_assets.stripes import Stage
from resources.artifact_store import ArtifactRef
from training_io.places import spread_places

MAX_CELL_CHARACTERS = 160
MAX_ROWS = 50
DIGITS = 6  # of shares and means, as shown


def asset_metadata(stage: Stage, ref: ArtifactRef, parts: Sequence[ArtifactRef] = ()) -> dict[str, Any]:
    """What every asset's page says: folder, identity, counts, sizes, work done, parameters in force."""
    folder, _ = stage.open(ref)
    files = [entry for item in (ref, *parts) for entry in stage.open(item)[1].files.values()]
    stored = {entry["sha256"]: entry["bytes"] for entry in files}  # a shard is linked, not stored twice
    done = [*parts, ref]
    numbers = {key: rounded(value) for key, value in ref.counts.items() if isinstance(value, int | float)}
    return {
        **numbers,
        "folder": dg.MetadataValue.path(str(folder)),
        "identity": ref.identity,
        "bytes": sum(stored.values()),
        "seconds": round(sum(item.seconds for item in done), 3),
        **_speed_metadata(ref, done),
        **{f"artifacts_{outcome}": sum(item.outcome == outcome for item in done) for outcome in _OUTCOMES},
        "parameters": dg.MetadataValue.json(own_parameters(stage.pipeline.recipe, ref.asset)),
        **stored_metadata(stage, ref, parts),
    }


def _speed_metadata(ref: ArtifactRef, done: Sequence[ArtifactRef]) -> dict[str, Any]:
    """Million bytes of an asset's text a second of work, where all of it was built: a part of it says less or more."""
    text_bytes, seconds = ref.counts.get("text_bytes", 0), sum(item.seconds for item in done)
    if not text_bytes or any(item.outcome == "reused" for item in done):
        return {}
    return {"megabytes_per_second": round(text_bytes / 1e6 / seconds, 6)}


_OUTCOMES = ("built", "reused", "rebuilt")


def stored_metadata(stage: Stage, ref: ArtifactRef, parts: Sequence[ArtifactRef]) -> dict[str, Any]:
    """Where columns come from; of an asset whose rows are under no contract, its columns, row count and sample rows."""
    lineage = {
        column: [dg.TableColumnDep(asset_key=asset, column_name=name) for asset, name in sources]
        for column, sources in LINEAGE.get(ref.asset, {}).items()
    }
    found: dict[str, Any] = {"dagster/column_lineage": dg.TableColumnLineage(lineage)} if lineage else {}
    if ref.asset not in STORED:
        return found
    columns = [
        dg.TableColumn(
            column.name,
            column.type,
            description=f"{column.description}; in `{column.file}`",
            tags={"unit": column.unit} if column.unit else None,
        )
        for column in STORED[ref.asset].columns
    ]
    rows = rows_of(stage, ref, parts)
    return found | {
        "dagster/row_count": rows.num_rows,
        "dagster/column_schema": dg.TableSchema(columns=columns),
        "sample_rows": rows_metadata(rows.sample, columns_of_sample(ref.asset)),
    }


def table_metadata(contract: type[Contract], num_rows: int, sample: pa.Table) -> dict[str, Any]:
    """Row count, column schema with descriptions, and a few sample rows."""
    columns = of_contract(contract)
    schema = dg.TableSchema(
        columns=[explained_column(name, str(contract.__annotations__[name]), one) for name, one in columns.items()]
    )
    return {
        "dagster/row_count": num_rows,
        "dagster/column_schema": schema,
        "sample_rows": rows_metadata(sample.slice(0, 5).to_pylist(), columns),
    }


def shown_table(
    name: str, rows: Sequence[Mapping[str, Any]], *, total: int | None = None, most: int = MAX_ROWS
) -> dict[str, Any]:
    """A table under its name; where rows are left out, `NAME_rows` says how many of `total` (all the rows) are shown.

    >>> shown_table("by_pool", [{"pool": "web", "share": 1 / 3}] * 3, most=2)["by_pool_rows"]
    '2 of 3'
    """
    total = len(rows) if total is None else total
    shown = [{key: rounded(value) for key, value in row.items()} for row in rows[: min(most, MAX_ROWS)]]
    left_out = {f"{name}_rows": f"{len(shown):,} of {total:,}"} if len(shown) < total else {}
    return {name: rows_metadata(shown, TABLES.get(name, {}))} | left_out


def spread_rows(table: pa.Table, most: int) -> list[dict[str, Any]]:
    """At most so many rows of an ordered table, from all over it, the first and the last among them.

    >>> [row["n"] for row in spread_rows(pa.table({"n": range(50)}), most=4)]
    [0, 16, 32, 49]
    """
    return table.take(pa.array(spread_places(table.num_rows, most), pa.int64())).to_pylist()


def in_per_cent(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of which the shares, all its floats, are shown in per cent, behind what they are of.

    >>> in_per_cent({"inputs": 0.25, "ranks": 2})
    {'ranks': 2, 'inputs %': 25.0}
    """
    shares = {f"{name} %": 100 * one for name, one in row.items() if isinstance(one, float)}
    return {name: one for name, one in row.items() if not isinstance(one, float)} | shares


def rounded(value: Any) -> Any:
    """A float to six significant digits, to be read; anything else as it is. Never for what is stored or hashed.

    >>> rounded(2 / 3), rounded(1234567), rounded(12.0)
    (0.666667, 1234567, 12.0)
    """
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def rows_metadata(rows: Sequence[Mapping[str, Any]], columns: Measures | None = None) -> dg.MetadataValue[Any]:
    """Some rows of many, as of a sample: plain values, bytes as hex, long texts cut, at most 50 rows.

    A table that stands for all its rows is a `shown_table`.
    """
    shown = [{key: plain_cell(value) for key, value in row.items()} for row in rows[:MAX_ROWS]]
    return explained_table(shown, columns or {}) if shown else dg.MetadataValue.text("no rows")


def plain_cell(value: Any) -> str | int | float | bool:
    """A value as a table shows it: bytes as the beginning of their hex, long texts cut, nothing as an empty text."""
    if isinstance(value, bytes):
        return value.hex()[:16]
    if isinstance(value, str):
        return value if len(value) <= MAX_CELL_CHARACTERS else value[:MAX_CELL_CHARACTERS] + "…"
    if value is None:
        return ""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no such numbers: the UI would lose the row
    if isinstance(value, int | float | bool):
        return value
    return str(value)


def pictures_metadata(folder: Path, alternatives: Mapping[str, str]) -> dict[str, Any]:
    """The pictures `NAME.png` of a folder that are there, embedded and as links: alternative texts by name."""
    drawn = {name: folder / f"{name}.png" for name in alternatives if (folder / f"{name}.png").exists()}
    embedded = {name: picture_metadata(path.read_bytes(), alternatives[name]) for name, path in drawn.items()}
    return embedded | files_metadata(*drawn.values())


def files_metadata(*paths: Path) -> dict[str, Any]:
    """Links to files, each under its name without the ending."""
    return {f"{path.stem}_file": dg.MetadataValue.path(str(path)) for path in paths}


def picture_metadata(picture: bytes, alternative: str) -> dg.MetadataValue[Any]:
    """A picture that shows on the asset's page."""
    return dg.MetadataValue.md(f"![{alternative}](data:image/png;base64,{base64.b64encode(picture).decode()})")
