"""source: row groups of Parquet files -> raw rows, by stripe.

Stripe k of n is every n-th row group of every file, starting with the k-th: an unbiased sample of all files. The unit
of storage is a run of one file's row groups within a stripe, about 64 MB of text, so a changed file costs its own
units only.
"""

import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import dagster as dg
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pipeline_assets.conformance import validated
from pipeline_assets.measures import numbers_metadata
from pipeline_assets.ops import GROUP, OWNERS, STAGE_TAG, graph_spec, mapped_op, planning_op, run_stage, sealing_op
from pipeline_assets.parameters import recipe_digest
from pipeline_assets.pools import (
    ObservedSource,
    cost_in_words,
    network_of,
    observe_source,
    pools_of,
    traffic_metadata,
    write_run_facts,
)
from pipeline_assets.recipe import Recipe
from pipeline_assets.report import asset_metadata, shown_table, table_metadata
from pipeline_assets.rounds import counts_of_rounds, parameters_of_rounds, read_until_full
from pipeline_assets.row_filters import (
    READ_COLUMNS,
    check_filtered_columns,
    limits_of,
    rows_left_out_by_filters,
    split_row_groups,
)
from pipeline_assets.run_tags import revision_tag, tag_run
from pipeline_assets.sampled import write_sample, write_sampled
from pipeline_assets.sampled_page import sampled_metadata, write_pictures
from pipeline_assets.schemas import ROWS_NAME, FilteredRows, RawRows, arrow_schema
from pipeline_assets.sections.reading import Reading
from pipeline_assets.stripes import Sealed, Stage, Task, build_each, seal_units
from pipeline_assets.transforms.filters import Limits
from pipeline_assets.transforms.rows import OPTIONAL_COLUMNS, RowStats
from pipeline_assets.transforms.sift import sift_rows
from resources.artifact_store import ArtifactRef
from resources.readers import Network, apart
from resources.row_group_source import SourceFile, list_with_cost, read_row_groups
from resources.tables import write_table
from training_io.errors import SourceError
from training_io.hashing import identity_of

ROWS_VERSION = 3
SEALED_ROWS_VERSION = ROWS_VERSION + 1  # of what lies beside the units: its pictures changed, and no row did
UNITS_AT_ONCE = 2  # of files that are elsewhere: more would cost memory, and the network is busy with two


def pool_names(recipe: Recipe) -> list[str]:
    """The recipe's pools in order of priority."""
    return recipe.pool_names


def units_of_stripe(files: list[SourceFile], stripe: int, reading: Reading) -> list[tuple[SourceFile, tuple[int, ...]]]:
    """The stripe's units: runs of one file's selected row groups of about `unit_megabytes` of text, in order."""
    limit = reading.unit_megabytes * 1_000_000
    units: list[tuple[SourceFile, tuple[int, ...]]] = []
    for file in files:
        run: list[int] = []
        size = 0
        for number in range(stripe, len(file.row_groups), reading.stripes):
            if run and size + file.row_groups[number].text_bytes > limit:
                units.append((file, tuple(run)))
                run, size = [], 0
            run.append(number)
            size += file.row_groups[number].text_bytes
        if run:
            units.append((file, tuple(run)))
    return units


def unit_name(file: SourceFile, row_groups: tuple[int, ...], stripes: int) -> str:
    """A folder name from the pool, a hash of the file's name and the first row group: never the file's own words."""
    return f"{file.pool}-{identity_of(file.file)[:12]}-{row_groups[0]:06d}-by-{stripes}"


def plan_rows(stage: Stage) -> list[Task]:
    """List the source's files and cut the selected stripes into units."""
    reading = stage.recipe.reading
    network = network_of(stage.pipeline, stage.warn)
    files, cost = list_with_cost(pools_of(stage.pipeline), network)
    observed = ObservedSource(files=files, cost=cost)
    stage.observe("dataset_revision", observed.revision, observed.metadata)
    check_filtered_columns(files, stage.recipe)
    stage.say(
        f"raw_row_groups: {len(files):,} files, {sum(len(file.row_groups) for file in files):,} row groups"
        f"{cost_in_words(files, cost)}"
    )
    stripes = [units_of_stripe(files, stripe, reading) for stripe in range(reading.stripes_read)]
    if reading.until == "budgets":
        stripes = [read_until_full(stage, stripes[0], lambda unit: _build_unit(stage, network, *unit))]
    return [
        Task(key=f"stripe_{stripe:03d}_of_{reading.stripes:03d}", units=tuple(units))
        for stripe, units in enumerate(stripes)
    ]


def build_rows(stage: Stage, task: Task) -> list[ArtifactRef]:
    """Read the stripe's row groups into tables of usable rows.

    Of files that are elsewhere, the bytes of one unit come while the rows of another are hashed, counted and written.
    """
    is_elsewhere = any(not isinstance(file.location, Path) for file, _ in task.units)
    network = network_of(stage.pipeline, stage.warn)
    return build_each(
        stage,
        task,
        lambda unit: _build_unit(stage, network, *unit),
        UNITS_AT_ONCE if is_elsewhere else 1,
        network.patience.is_over.set,
    )


def _build_unit(stage: Stage, network: Network, file: SourceFile, row_groups: tuple[int, ...]) -> ArtifactRef:
    limits = limits_of(stage.recipe, file.pool)
    return stage.materialize(
        asset="raw_row_groups",
        unit=unit_name(file, row_groups, stage.recipe.reading.stripes),
        inputs={"pool": file.pool, "row_groups": list(row_groups), **file.provenance},
        parameters={"columns": list(READ_COLUMNS), **({"filters": dict(limits)} if limits else {})},
        version=ROWS_VERSION,
        write=lambda folder: _write_unit(folder, file, row_groups, limits, apart(network)),
    )


def _write_unit(
    folder: Path, file: SourceFile, row_groups: tuple[int, ...], limits: Limits, network: Network
) -> dict[str, Any]:
    wanted, excluded = split_row_groups(file, row_groups, limits)
    removed = arrow_schema(FilteredRows)
    read = [
        (fetched, sift_rows(table, limits, removed, pool=file.pool, file=file.file, row_group=fetched.row_group))
        for fetched, table in read_row_groups(file, wanted, READ_COLUMNS, network)
    ]
    write_run_facts(folder, file, [fetched for fetched, _ in read])
    parts = [part for _, part in read]
    table = pa.concat_tables([arrow_schema(RawRows).empty_table(), *(part.rows for part in parts)])
    write_table(validated(RawRows, table), folder / ROWS_NAME)
    sampled = write_sample(folder, file, parts, limits, excluded)
    stats = {name: sum(getattr(part.stats, name) for part in parts) for name in RowStats.__dataclass_fields__}
    missing = [name for name in OPTIONAL_COLUMNS if file.columns.count(name) != 1]
    return {
        "documents": stats["rows_used"],
        **stats,
        "pool": file.pool,
        "file": file.file,
        "rows_in_footer": sum(file.row_groups[number].num_rows for number in row_groups),
        "row_groups_in_file": len(file.row_groups),
        "missing_columns": missing,
        "other_columns": [name for name in file.columns if name not in READ_COLUMNS],
        **sampled,
    }


def seal_rows(stage: Stage, parts: list[ArtifactRef]) -> Sealed:
    """Seal the units as one asset and count what was read, used and left out."""
    totals = {name: sum(part.counts[name] for part in parts) for name in RowStats.__dataclass_fields__}
    if any(limits_of(stage.recipe, pool) for pool in pool_names(stage.recipe)):
        totals |= rows_left_out_by_filters(parts)
    _refuse_no_documents(totals)

    def write_beside(folder: Path) -> None:
        write_sampled(stage, parts, folder)
        write_pictures(folder)

    counts, inputs = {"documents": totals["rows_used"], **totals}, {}
    if stage.recipe.reading.until == "budgets":
        counts |= counts_of_rounds(stage, parts)
        inputs = {"rounds": parameters_of_rounds(stage)}
    ref = seal_units(stage, "raw_row_groups", parts, counts, SEALED_ROWS_VERSION, write_beside, **inputs)
    sample = stage.sample(parts[0], ROWS_NAME)
    metadata = {
        **asset_metadata(stage, ref, parts),
        **table_metadata(RawRows, totals["rows_used"], sample),
        **shown_table("schema_drift", _schema_drift(parts)),
        **sampled_metadata(stage, ref),
        **traffic_metadata(stage, parts),
        "recipe": stage.recipe.name,
        "recipe_digest": recipe_digest(stage.recipe),
    }
    return Sealed(ref=ref, metadata=metadata)


def _refuse_no_documents(totals: Mapping[str, int]) -> None:
    if not totals["rows_used"]:
        raise SourceError(
            f"raw_row_groups: expected at least one usable document, found none in {totals['rows_read']:,} rows"
            f" ({totals['null_text']:,} null, {totals['empty_text']:,} empty, {totals['invalid_utf8']:,} not UTF-8,"
            f" {totals.get('rows_filtered', 0):,} filtered) and {totals.get('rows_excluded', 0):,} in row groups that"
            " the filters exclude. Check the source's text column and the recipe's reading section."
        )


def _schema_drift(parts: list[ArtifactRef]) -> list[dict[str, str]]:
    """The units of files that lack columns or have others."""
    return [
        {
            "pool": part.counts["pool"],
            "file": part.counts["file"],
            "absent": ", ".join(part.counts["missing_columns"]),
            "not read": ", ".join(part.counts["other_columns"]),
        }
        for part in parts
        if part.counts["missing_columns"] or part.counts["other_columns"]
    ]


def document_coordinates(stage: Stage, units: list[ArtifactRef]) -> npt.NDArray[np.int64]:
    """Source coordinate of every row of the units: int64[n, 4] of pool priority, file number, row group, row."""
    priority = {name: number for number, name in enumerate(pool_names(stage.recipe))}
    files = sorted({(priority[unit.counts["pool"]], unit.counts["file"]) for unit in units})
    numbers = {file: number for number, file in enumerate(files)}
    columns = [np.empty((0, 4), np.int64)]
    for unit in units:
        rows = stage.table(unit, ROWS_NAME, ["row_group", "row"])
        pool = priority[unit.counts["pool"]]
        fixed = np.tile([pool, numbers[pool, unit.counts["file"]]], (rows.num_rows, 1))
        columns.append(np.column_stack([fixed, rows.column("row_group"), rows.column("row")]).astype(np.int64))
    return np.concatenate(columns)


DATASET_REVISION = (
    "Fingerprint of the source: names, sizes, Parquet footers and listed content hashes of every file of every pool. "
    "The sensor starts a run when it changes. Where the recipe pins a commit, a newer one is told of and not read."
)


with warnings.catch_warnings():
    warnings.simplefilter("ignore", dg.BetaWarning)  # the one beta API in use; pinned with dagster itself

    # The decorator for one asset takes no owners.
    @dg.multi_observable_source_asset(
        name="dataset_revision",
        specs=[
            dg.AssetSpec(
                "dataset_revision",
                group_name=GROUP,
                tags={STAGE_TAG: "source"},
                owners=list(OWNERS),
                kinds={"parquet"},
                description=DATASET_REVISION,
                metadata=numbers_metadata("dataset_revision"),
            )
        ],
        required_resource_keys={"pipeline"},
    )
    def dataset_revision(context: dg.OpExecutionContext) -> Iterator[dg.ObserveResult]:
        observed = run_stage(context, lambda stage: observe_source(stage.pipeline))
        tag_run(context.instance, context.run_id, revision_tag(observed.revision))
        yield dg.ObserveResult(
            asset_key="dataset_revision",
            data_version=dg.DataVersion(observed.revision),
            metadata=observed.metadata,
        )


plan_rows_op = planning_op("raw_row_groups", plan_rows, after=["dataset_revision"])
build_rows_op = mapped_op("raw_row_groups", build_rows)
seal_rows_op = sealing_op("raw_row_groups", seal_rows)


@dg.graph_asset(
    **graph_spec(
        "raw_row_groups",
        SEALED_ROWS_VERSION,
        {"parquet"},
        "Usable rows of the selected row groups, text unaltered, each with its doc_id and source coordinate. "
        "Promise: the same upstream bytes give the same table, and every row read is used or counted with a reason.",
        after=["dataset_revision"],
    )
)
def raw_row_groups(dataset_revision):  # type: ignore[no-untyped-def]
    tasks = plan_rows_op(dataset_revision=dataset_revision)
    return seal_rows_op(parts=tasks.map(build_rows_op).collect())
