"""source, filtered: which rows of a pool are used, by what the source says of them.

In: the recipe's filters by pool, and what footers say. Out: which columns and row groups are read, and why others are
not. Promise: nothing is left out uncounted: a row that fails is stored with what it failed by, and a row group that is
not read with the statistics that prove that no row would pass.
"""

from collections.abc import Sequence
from typing import Any

from pipeline_assets.recipe import Recipe
from pipeline_assets.transforms.filters import FILTERS, Limits, filter_that_excludes
from pipeline_assets.transforms.rows import MEASURED_COLUMNS, OPTIONAL_COLUMNS
from resources.artifact_store import ArtifactRef
from resources.row_group_source import TEXT_COLUMN, SourceFile
from training_io.errors import SourceError

READ_COLUMNS = (TEXT_COLUMN, *OPTIONAL_COLUMNS, *MEASURED_COLUMNS)
FILTERED_NAME = "filtered_rows.parquet"


def limits_of(recipe: Recipe, pool: str) -> Limits:
    """The filters of a pool, by name; none where the recipe has none for it."""
    return recipe.reading.filters[pool].limits if pool in recipe.reading.filters else {}


def check_filtered_columns(files: Sequence[SourceFile], recipe: Recipe) -> None:
    """SourceError for the first file that lacks a column which a filter of its pool looks at."""
    for file in files:
        wanted = [FILTERS[name] for name in limits_of(recipe, file.pool)]
        missing = [name for name in wanted if file.columns.count(name) != 1]
        if missing:
            raise SourceError(
                f"reading.filters.{file.pool}: expected one column each of {', '.join(wanted)} in every file, found"
                f" {', '.join(missing)} missing or twice in {file.file}, whose columns are {', '.join(file.columns)}."
                " Take the filter out of the recipe, or leave the file out with the glob of its pool."
            )


def split_row_groups(
    file: SourceFile, row_groups: Sequence[int], limits: Limits
) -> tuple[list[int], list[dict[str, Any]]]:
    """The row groups to read, and those of which the footer's statistics prove that no row passes, with the proof."""
    wanted, excluded = [], []
    for number in row_groups:
        facts = file.row_groups[number]
        name = filter_that_excludes(facts.bounds, limits)
        if name is None:
            wanted.append(number)
        else:
            smallest, largest = facts.bounds[FILTERS[name]]
            proof = {"smallest": _written(smallest), "largest": _written(largest)}
            excluded.append({"row_group": number, "rows": facts.num_rows, "filter": name, **proof})
    return wanted, excluded


def _written(bound: Any) -> str | None:
    """A bound as JSON can hold it, which has no infinity."""
    return None if bound is None else str(bound)


def rows_left_out_by_filters(parts: Sequence[ArtifactRef]) -> dict[str, int]:
    """Rows that failed a filter, and rows of row groups that no filter let be read, of some units."""
    filtered = [effect["removed_documents"] for part in parts for effect in part.counts.get("filters", {}).values()]
    excluded = [group["rows"] for part in parts for group in part.counts.get("row_groups_excluded", ())]
    return {"rows_filtered": sum(filtered), "rows_excluded": sum(excluded)}
