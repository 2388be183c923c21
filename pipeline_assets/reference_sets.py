"""Reference sets: named texts that must stay out of validation, or out altogether; one is the tokenizer's sample.

In: the recipe's sets, and raw rows. Out: a table of distinct texts for each set, in the order of their doc_ids. The
promise: a missing or empty set is an error, and what is drawn depends on content alone. Cost: a sample reads the
doc_ids of all rows.
"""

import hashlib
from pathlib import Path
from typing import Any

import dagster as dg
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline_assets.conformance import validated
from pipeline_assets.ops import asset_spec, materialized
from pipeline_assets.report import asset_metadata, shown_table, table_metadata
from pipeline_assets.schemas import ROWS_NAME, References, arrow_schema
from pipeline_assets.sections.references import ReferenceFile, TokenizerSample
from pipeline_assets.source import document_coordinates
from pipeline_assets.stripes import Sealed, Stage, units_in
from pipeline_assets.transforms.overlap import check_universe
from pipeline_assets.transforms.rows import clean_rows, doc_id_matrix, first_of_each, text_doc_ids
from resources.artifact_store import ArtifactRef
from resources.reference_file import read_texts
from resources.row_group_source import read_reference_table
from resources.tables import write_table
from training_io.errors import SourceError
from training_io.hashing import derive_seed, keyed_hash

REFERENCES_VERSION = 2


def build_references(stage: Stage, raw_row_groups: ArtifactRef) -> Sealed:
    """Draw or read every reference set of the recipe; an empty or missing one is an error."""
    references = stage.recipe.references
    units = units_in(stage, raw_row_groups)
    tables = {reference.name: _reference_table(stage, reference, units) for reference in references}
    for reference in references:
        if isinstance(reference, ReferenceFile) and (universe := reference.universe_documents) is not None:
            texts, documents = tables[reference.name].num_rows, raw_row_groups.counts["documents"]
            check_universe(reference.name, texts, documents, universe)

    def write(folder: Path) -> dict[str, Any]:
        for name, table in tables.items():
            write_table(validated(References, table), folder / f"{name}.parquet")
        texts = sum(table.num_rows for table in tables.values())
        return {"documents": texts, "sets": {name: table.num_rows for name, table in tables.items()}}

    ref = stage.materialize(
        asset="reference_sets",
        inputs={"texts": [[name, _content_of(table)] for name, table in tables.items()]},
        parameters={"references": [reference.model_dump(mode="json", exclude={"path"}) for reference in references]},
        version=REFERENCES_VERSION,
        write=write,
    )
    sample = next(iter(tables.values()), arrow_schema(References).empty_table())
    metadata = {
        **asset_metadata(stage, ref),
        **table_metadata(References, ref.counts["documents"], sample),
        **shown_table("sets", [{"set": name, "texts": count} for name, count in ref.counts["sets"].items()]),
    }
    return Sealed(ref=ref, metadata=metadata)


def _content_of(table: pa.Table) -> str:
    return hashlib.sha256(doc_id_matrix(table.column("doc_id"))).hexdigest()


def _reference_table(stage: Stage, reference: TokenizerSample | ReferenceFile, units: list[ArtifactRef]) -> pa.Table:
    table = (
        _drawn_sample(stage, reference, units) if isinstance(reference, TokenizerSample) else _given_texts(reference)
    )
    if not table.num_rows:
        raise SourceError(
            f"reference set {reference.name}: expected at least one text, found none."
            " A missing reference set would bar nothing from validation; mend references in the recipe."
        )
    return table


def _drawn_sample(stage: Stage, reference: TokenizerSample, units: list[ArtifactRef]) -> pa.Table:
    """Distinct texts: by pool, those of the smallest keyed hash; by dump, the first in source order."""
    columns = ["doc_id", "pool", "dump"]
    rows = pa.concat_tables([stage.table(unit, ROWS_NAME, columns) for unit in units])
    doc_ids = doc_id_matrix(rows.column("doc_id"))
    in_source_order = np.lexsort(document_coordinates(stage, units).T[::-1])
    if reference.documents_per_pool is not None:
        hashes = keyed_hash(doc_ids, derive_seed(stage.recipe.seed, reference.name))
        order = in_source_order[np.argsort(hashes[in_source_order], kind="stable")]
        chosen = first_of_each(order, doc_ids, rows.column("pool").to_pylist(), reference.documents_per_pool)
    else:
        assert reference.documents_per_dump is not None
        chosen = first_of_each(in_source_order, doc_ids, rows.column("dump").to_pylist(), reference.documents_per_dump)
    wanted = {doc_ids[row].tobytes() for row in chosen}
    found: dict[bytes, str] = {}
    for unit in units:
        table = stage.table(unit, ROWS_NAME, ["doc_id", "text"])
        mask = pc.is_in(table.column("doc_id"), pa.array(sorted(wanted), pa.binary()))
        hits = table.filter(mask)
        found.update(zip(hits.column("doc_id").to_pylist(), hits.column("text").to_pylist(), strict=True))
    doc_id_order = sorted(found)
    return pa.table(
        {
            "doc_id": pa.array(doc_id_order, pa.binary()),
            "text": pa.array([found[doc_id] for doc_id in doc_id_order], pa.large_string()),
        }
    )


def _given_texts(reference: ReferenceFile) -> pa.Table:
    path = Path(reference.path)
    if not path.is_file():
        raise SourceError(
            f"reference set {reference.name}: expected a Parquet, JSONL or text file at {path}, found none."
            " Put the file there or mend references in the recipe."
        )
    try:
        texts = _parquet_texts(path) if path.suffix.lower() == ".parquet" else read_texts(path)
    except SourceError as error:
        raise SourceError(f"reference set {reference.name}: {error}") from error
    distinct = pa.array(sorted(set(texts)), pa.large_string())
    return pa.table({"doc_id": text_doc_ids(distinct), "text": distinct}).sort_by("doc_id")


def _parquet_texts(path: Path) -> list[str]:
    table, stats = clean_rows(read_reference_table(path), pool="references", file=path.name, row_group=0)
    if stats.invalid_utf8:
        raise SourceError(
            f"{path}: expected UTF-8 texts, found {stats.invalid_utf8:,} that are not."
            " Write the file again; a text that cannot be read bars nothing."
        )
    texts: list[str] = table.column("text").to_pylist()
    return texts


@dg.asset(
    **asset_spec(
        "reference_sets",
        REFERENCES_VERSION,
        {"parquet"},
        "Named texts that must stay out of validation, or out altogether; the tokenizer's sample is one of them. "
        "Promise: a missing or empty set is an error.",
    )
)
def reference_sets(context: dg.AssetExecutionContext, raw_row_groups: ArtifactRef) -> dg.MaterializeResult[ArtifactRef]:
    return materialized(context, build_references, raw_row_groups=raw_row_groups)
