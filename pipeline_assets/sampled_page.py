"""source, shown: the page of what was sampled.

In: the tables that `sampled` wrote. Out: pictures of them, and metadata for the asset's page. What the source lacks is
said to be absent. The source's own words are shown as `shown_name` made them.
"""

from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pyarrow.compute as pc

from pipeline_assets.pictures import bar_picture, line_picture
from pipeline_assets.report import files_metadata, pictures_metadata, shown_table
from pipeline_assets.sampled import (
    COLUMNS_NAME,
    EFFECTS_NAME,
    FILES_NAME,
    NAMES_NAME,
    THRESHOLDS_NAME,
    VALUES_NAME,
)
from pipeline_assets.stripes import Stage
from pipeline_assets.transforms.arrays import F64, I64
from pipeline_assets.transforms.sampled_tables import Row, Rows, columns_of
from resources.artifact_store import ArtifactRef
from resources.tables import read_table
from training_io.places import spread_places

PICTURES = {
    "kept_by_score": "share of documents that a smallest score would keep",
    "text_lengths": "share of documents of at most so many characters",
    "documents_by_dump": "documents by crawl",
    "dumps_by_file": "crawls in each file",
}
ABSENT = {
    "sampled_columns": "nothing was read",
    "sampled_files": "nothing was read",
    "sampled_dumps": "no file that was read has the column dump",
    "sampled_languages": "no file that was read has the column language",
    "sampled_int_scores": "no document that was read has a value in a column int_score",
    "score_thresholds": "no document that was read has a value in a column language_score, score or int_score",
    "filters": "the recipe has no reading.filters",
}
TABLES = (NAMES_NAME, VALUES_NAME, COLUMNS_NAME, FILES_NAME, THRESHOLDS_NAME, EFFECTS_NAME)
PICTURED_POOLS, PICTURED_POINTS = 8, 150


def write_pictures(folder: Path) -> None:
    """Draw the tables below a folder beside them; nothing where the source gives nothing to draw."""
    values, files = read_table(folder / VALUES_NAME), read_table(folder / FILES_NAME)
    documents = files.group_by("pool").aggregate([("documents", "sum")]).to_pylist()
    by_size = sorted(documents, key=lambda row: (-row["documents_sum"], row["pool"]))
    pools = [row["pool"] for row in by_size[:PICTURED_POOLS]]
    dumps = _by_name(read_table(folder / NAMES_NAME), "dump")
    per_file = [row for row in files.to_pylist() if row["num_dumps"] is not None]
    per_file.sort(key=lambda row: (-row["num_dumps"], row["pool"], row["file"]))
    scores = {pool: found for pool in pools if (found := _share_from(*columns_of(values, pool, "score")[:2]))}
    lengths = {pool: found for pool in pools if (found := _share_upto(*columns_of(values, pool, "characters")[:2]))}
    share = "% of documents"
    pictures = {
        "kept_by_score": scores
        and line_picture("What a smallest score would keep", "smallest score", f"{share} with a score", scores),
        "text_lengths": lengths
        and line_picture(
            "Lengths of texts", "characters (logarithmic)", f"{share} at most so long", lengths, log_x=True
        ),
        "documents_by_dump": dumps
        and bar_picture(
            "Documents by crawl, the largest first",
            "documents",
            "crawl",
            [row["name"] for row in dumps],
            [row["documents"] for row in dumps],
        ),
        "dumps_by_file": per_file
        and bar_picture(
            "Crawls in each file, the most first",
            "crawls",
            "file",
            [f"{row['pool']}/{row['file'].removesuffix('.parquet')}" for row in per_file],
            [row["num_dumps"] for row in per_file],
        ),
    }
    for name, picture in pictures.items():
        if isinstance(picture, bytes):
            (folder / f"{name}.png").write_bytes(picture)


Points = tuple[list[float], list[float]]


def _share_from(value: F64, documents: I64) -> Points | None:
    return _points(value, documents[::-1].cumsum()[::-1] / max(documents.sum(), 1))


def _share_upto(value: F64, documents: I64) -> Points | None:
    return _points(value, documents.cumsum() / max(documents.sum(), 1))


def _points(x: F64, share: F64) -> Points | None:
    shown = spread_places(len(x), PICTURED_POINTS)
    return (x[shown].tolist(), (100 * share[shown]).tolist()) if len(x) else None


def _by_name(names: pa.Table, column: str) -> list[Row]:
    """Documents, bytes, files and pools of each name of a column, the most frequent first."""
    table = names.filter(pc.equal(names.column("column"), column))
    sums = [("documents", "sum"), ("text_bytes", "sum"), ("file", "count"), ("pool", "count_distinct")]
    counted = table.group_by("name").aggregate(sums).to_pylist()
    total = sum(row["documents_sum"] for row in counted)
    rows = [
        {
            "name": "(none)" if row["name"] is None else row["name"],
            "documents": row["documents_sum"],
            "share_of_documents": row["documents_sum"] / total,
            "text_bytes": row["text_bytes_sum"],
            "files": row["file_count"],
            "pools": row["pool_count_distinct"],
        }
        for row in counted
    ]
    return sorted(rows, key=lambda row: (-row["documents"], row["name"]))


def sampled_metadata(stage: Stage, ref: ArtifactRef) -> dict[str, Any]:
    """Tables, numbers and pictures for the asset's page."""
    folder, names, files = stage.folder(ref), stage.table(ref, NAMES_NAME), stage.table(ref, FILES_NAME).to_pylist()
    tables = {
        "sampled_columns": stage.table(ref, COLUMNS_NAME).to_pylist(),
        "sampled_files": files,
        "sampled_dumps": _by_name(names, "dump"),
        "sampled_languages": _by_name(names, "language"),
        "sampled_int_scores": _int_scores(stage.table(ref, VALUES_NAME)),
        "score_thresholds": stage.table(ref, THRESHOLDS_NAME).to_pylist(),
        "filters": stage.table(ref, EFFECTS_NAME).to_pylist(),
    }
    shown: dict[str, Any] = {}
    for name, rows in tables.items():
        shown |= shown_table(name, rows) if rows else {name: dg.MetadataValue.text(ABSENT[name])}
    return {
        **_dump_numbers(names, files),
        **shown,
        **pictures_metadata(folder, PICTURES),
        **files_metadata(*(folder / name for name in TABLES)),
    }


def _dump_numbers(names: pa.Table, files: Rows) -> dict[str, int]:
    """Crawls in the whole sample, and in the files of fewest and of most; nothing where no file names any."""
    per_file = [row["num_dumps"] for row in files if row["num_dumps"] is not None]
    if not per_file:
        return {}
    dumps = names.filter(pc.equal(names.column("column"), "dump")).column("name")
    return {
        "dumps": pc.count_distinct(dumps).as_py(),
        "fewest_dumps_of_a_file": min(per_file),
        "most_dumps_of_a_file": max(per_file),
    }


def _int_scores(values: pa.Table) -> list[Row]:
    rows = values.filter(pc.equal(values.column("column"), "int_score")).to_pylist()
    counted = ("documents", "text_bytes")
    return [{"pool": row["pool"], "int_score": int(row["value"]), **{key: row[key] for key in counted}} for row in rows]
