"""What floors on the length of a document would remove, measured before the recipe's is applied.

The split plan stores two tables of the documents that deduplication kept: the effect of a few floors, and the shortest
documents with how they begin, to be read by a person. Nothing is decided here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pipeline_assets.conformance import validated
from pipeline_assets.report import shown_table
from pipeline_assets.schemas import ROWS_NAME, FloorEffects, ShortestDocuments, arrow_schema
from pipeline_assets.stripes import Stage
from pipeline_assets.transforms.arrays import located
from pipeline_assets.transforms.floors import measure_floors, shortest_documents
from pipeline_assets.transforms.lookup import beginning, printable
from pipeline_assets.transforms.split import REASONS, SPLITS, UNUSED
from resources.artifact_store import ArtifactRef
from resources.tables import read_rows, write_table

FLOORS_NAME, SHORTEST_NAME = "floors.parquet", "shortest.parquet"
NUM_SHORTEST = 20
COLUMNS = ("doc_id", "pool", "score", "text")
SPLIT_NAMES = {**dict(enumerate(SPLITS)), UNUSED: "unused"}


def scores_of(stage: Stage, raw: ArtifactRef, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """The source's quality scores of a raw unit's rows, NaN where it gives none."""
    scores = stage.table(raw, ROWS_NAME, ["score"]).column("score").fill_null(np.nan)
    return np.asarray(scores, np.float64)[rows]


def write_floors(
    stage: Stage,
    folder: Path,
    num_tokens: npt.NDArray[np.int64],
    scores: npt.NDArray[np.float64],
    places: Sequence[tuple[ArtifactRef, npt.NDArray[np.int64]]],
    order: npt.NDArray[np.int64],
    codes: npt.NDArray[np.uint8],
) -> None:
    """Write both tables. Lengths, scores and codes (uint8[n, 2] of split and reason) are in the final order; `order`
    numbers documents through the units, which `places` lists: each raw unit and its rows.
    """
    effects = [asdict(effect) for effect in measure_floors(num_tokens, scores, stage.recipe.splits.min_tokens)]
    table = pa.Table.from_pylist(effects, schema=arrow_schema(FloorEffects))
    write_table(validated(FloorEffects, table), folder / FLOORS_NAME)
    shown = shortest_documents(num_tokens, NUM_SHORTEST)
    firsts = np.cumsum([0, *(len(rows) for _, rows in places)])
    shortest = [
        {
            **_described(stage, places[unit][0], places[unit][1][place]),
            "num_tokens": int(num_tokens[document]),
            "split": SPLIT_NAMES[int(codes[document, 0])],
            "reason": REASONS[codes[document, 1]],
        }
        for unit, place, document in zip(*located(firsts, order[shown]), shown, strict=True)
    ]
    table = pa.Table.from_pylist(shortest, schema=arrow_schema(ShortestDocuments))
    write_table(validated(ShortestDocuments, table), folder / SHORTEST_NAME)


def _described(stage: Stage, raw: ArtifactRef, row: int) -> Mapping[str, Any]:
    (document,) = read_rows(stage.folder(raw) / ROWS_NAME, np.array([row]), COLUMNS).to_pylist()
    return {**document, "text": printable(beginning(document["text"]))}


def floors_metadata(stage: Stage, plan: ArtifactRef) -> dict[str, Any]:
    """Both tables for the asset's page."""
    return {
        **shown_table("floors", stage.table(plan, FLOORS_NAME).to_pylist()),
        **shown_table(
            "shortest_documents", stage.table(plan, SHORTEST_NAME).to_pylist(), total=plan.counts["documents"]
        ),
    }
