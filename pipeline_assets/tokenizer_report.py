"""tokens: the chosen tokenizer and others side by side on the same documents, and the inventory in the chosen one's.

In: kept documents and the recipe's candidates. Out: tables and a picture. Promise: all tokenizers get the same
documents, drawn from each pool by content. The cost: a sample of each pool is encoded and decoded once a tokenizer; the
inventory was counted when it was tokenized.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import dagster as dg
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pipeline_assets.ops import asset_spec, materialized
from pipeline_assets.parameters import own_parameters
from pipeline_assets.pictures import grouped_bar_picture
from pipeline_assets.report import asset_metadata, pictures_metadata, shown_table
from pipeline_assets.schemas import ROWS_NAME
from pipeline_assets.sections.tokenizer import CHOSEN
from pipeline_assets.source import pool_names
from pipeline_assets.stored_documents import REPORT_NAME
from pipeline_assets.stripes import Sealed, Stage, units_in
from pipeline_assets.tokenizer import given_file, given_tokenizer, open_tokenizer
from pipeline_assets.tokens import DOC_IDS, ROWS
from pipeline_assets.transforms.arrays import I64
from pipeline_assets.transforms.tokenizer_comparison import (
    LENGTH_SHARES,
    TextMeasure,
    choose_documents,
    estimate_tokens,
    measure_texts,
    table_cost,
)
from pipeline_assets.transforms.word_cache import encoder_for
from resources.artifact_store import ArtifactRef
from resources.tables import read_json, read_rows, write_json
from resources.tokenizer import Tokenizer
from training_io.hashing import derive_seed, sha256_file

REPORT_VERSION = 2
PICTURE_NAME = "bytes_a_token.png"
PICTURED_POOLS, MAX_BARS = 8, 32  # more are too many to look at

Measures = Mapping[str, TextMeasure]  # by pool


def build_report(
    stage: Stage, raw_row_groups: ArtifactRef, tokenizer: ArtifactRef, document_tokens: ArtifactRef
) -> Sealed:
    """Compare the tokenizers on a sample of each pool and lay out the inventory."""
    files = {
        candidate.name: sha256_file(given_file(stage, candidate, _key(candidate.name)))
        for candidate in stage.recipe.tokenizer_report.candidates
    }

    ref = stage.materialize(
        asset="tokenizer_report",
        inputs={
            "raw_row_groups": raw_row_groups.digest,
            "tokenizer": tokenizer.digest,
            "document_tokens": document_tokens.digest,
            "candidates": files,
        },
        parameters=own_parameters(stage.recipe, "tokenizer_report"),
        version=REPORT_VERSION,
        write=lambda folder: _write_report(stage, folder, raw_row_groups, tokenizer, document_tokens),
    )
    folder = stage.folder(ref)
    report = read_json(folder / REPORT_NAME)
    metadata = asset_metadata(stage, ref) | {
        **shown_table("comparison", report["tokenizers"]),
        **shown_table("comparison_by_pool", report["pools"]),
        **shown_table("inventory", report["inventory"]),
        **pictures_metadata(folder, {"bytes_a_token": "bytes a token by pool"}),
        "report": dg.MetadataValue.path(str(folder / REPORT_NAME)),
    }
    return Sealed(ref=ref, metadata=metadata)


def _write_report(
    stage: Stage, folder: Path, raw_row_groups: ArtifactRef, tokenizer: ArtifactRef, document_tokens: ArtifactRef
) -> dict[str, Any]:
    inventory = inventory_of(stage, document_tokens)
    texts = sampled_texts(stage, raw_row_groups, document_tokens)
    tokenizers = {CHOSEN: open_tokenizer(stage, tokenizer), **_candidates(stage)}
    measures = {
        name: {pool: measure_texts(one, sample) for pool, sample in texts.items()} for name, one in tokenizers.items()
    }
    summary = _summary(stage, tokenizers, measures, inventory)
    by_pool = [_measure_row(name, pool, one) for name, of in measures.items() for pool, one in of.items()]
    report = {"tokenizers": summary, "pools": by_pool, "inventory": [_with_ratios(row) for row in inventory]}
    write_json(report, folder / REPORT_NAME)
    (folder / PICTURE_NAME).write_bytes(_picture(measures, inventory))
    totals = {name: sum(row[name] for row in inventory) for name in ("documents", "text_bytes", "tokens")}
    sampled = sum(len(sample) for sample in texts.values())
    return {**totals, "tokenizers": len(tokenizers), "sampled_documents": sampled}


def _key(name: str) -> str:
    return f"tokenizer_report.candidates.{name}"


def _candidates(stage: Stage) -> dict[str, Tokenizer]:
    candidates = stage.recipe.tokenizer_report.candidates
    return {one.name: given_tokenizer(stage, one, _key(one.name))[1] for one in candidates}


def inventory_of(stage: Stage, document_tokens: ArtifactRef) -> list[dict[str, Any]]:
    """Documents, bytes and tokens of each pool that has any, in order of priority."""
    units = units_in(stage, document_tokens)
    rows = [
        {
            "pool": pool,
            **{
                name: sum(unit.counts[name] for unit in units if unit.counts["pool"] == pool)
                for name in ("documents", "text_bytes", "tokens")
            },
        }
        for pool in pool_names(stage.recipe)
    ]
    return [row for row in rows if row["documents"]]


def _with_ratios(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **row,
        "bytes_a_token": row["text_bytes"] / row["tokens"],
        "tokens_a_document": row["tokens"] / row["documents"],
    }


def sampled_texts(
    stage: Stage, raw_row_groups: ArtifactRef, document_tokens: ArtifactRef
) -> dict[str, pa.ChunkedArray]:
    """Texts of the drawn documents of each pool that has any, in order of priority of the pools and of the drawing."""
    raw = {unit.unit: unit for unit in units_in(stage, raw_row_groups)}
    by_pool: dict[str, list[ArtifactRef]] = {pool: [] for pool in pool_names(stage.recipe)}
    for unit in units_in(stage, document_tokens):
        if unit.counts["documents"]:
            by_pool[unit.counts["pool"]].append(unit)
    return {pool: _texts_of_pool(stage, units, raw) for pool, units in by_pool.items() if units}


def _texts_of_pool(stage: Stage, units: list[ArtifactRef], raw: Mapping[str, ArtifactRef]) -> pa.ChunkedArray:
    """Only what is chosen from all units is read."""
    doc_ids = [np.asarray(stage.array(unit, DOC_IDS)) for unit in units]
    drawn = [_draw(stage, ids) for ids in doc_ids]
    unit_of = np.repeat(np.arange(len(units)), [len(rows) for rows in drawn])
    row_of = np.concatenate([stage.array(unit, ROWS)[rows] for unit, rows in zip(units, drawn, strict=True)])
    chosen = _draw(stage, np.concatenate([ids[rows] for ids, rows in zip(doc_ids, drawn, strict=True)]))
    order = np.argsort(unit_of[chosen], kind="stable")  # unit by unit
    tables = [
        read_rows(stage.folder(raw[units[number].unit]) / ROWS_NAME, row_of[rows], ["text"])
        for number, rows in _runs(unit_of, chosen[order])
    ]
    return pa.concat_tables(tables).column("text").take(pa.array(np.argsort(order)))


def _runs(unit_of: I64, rows: I64) -> Iterator[tuple[int, I64]]:
    """Each unit's number and those of the rows that are its own, from rows in the order of their units."""
    for number in np.unique(unit_of[rows]).tolist():
        yield number, rows[unit_of[rows] == number]


def _draw(stage: Stage, doc_ids: npt.NDArray[np.uint8]) -> I64:
    seed = derive_seed(stage.recipe.seed, "tokenizer_report")
    return choose_documents(doc_ids, stage.recipe.tokenizer_report.documents_per_pool, seed)


def _summary(
    stage: Stage,
    tokenizers: Mapping[str, Tokenizer],
    measures: Mapping[str, Measures],
    inventory: list[dict[str, Any]],
) -> list[dict[str, Any]]:
    """One row a tokenizer, over all pools: what the sample says of the whole inventory, and the table's price."""
    text_bytes = {row["pool"]: row["text_bytes"] for row in inventory}
    tokens = {name: estimate_tokens(of, text_bytes) for name, of in measures.items()}
    model = stage.recipe.tokenizer_report.model or stage.recipe.training.model
    rows = []
    for name, tokenizer in tokenizers.items():
        cost = table_cost(tokenizer.max_id, model)
        bytes_a_token = sum(text_bytes.values()) / tokens[name]
        encoder, reason = encoder_for(tokenizer)
        rows.append(
            {
                "tokenizer": name,
                "vocabulary": cost.num_rows,
                "tokens_estimated": round(tokens[name]),
                "tokens_to_chosen": tokens[name] / tokens[CHOSEN],
                "bytes_a_token": bytes_a_token,
                "round_trip_share": _share_of_round_trips(measures[name]),
                "table_parameters": cost.table_parameters,
                "table_share_of_model": cost.share,
                "multiply_adds_a_byte": cost.multiply_adds_a_byte(bytes_a_token),
                "encoder": "library" if encoder is None else "words",
                "because": reason,
                "eos": tokenizer.eos,
                "fingerprint": tokenizer.fingerprint,
            }
        )
    return rows


def _share_of_round_trips(measures: Measures) -> float:
    of = measures.values()
    return sum(one.num_round_trips for one in of) / sum(one.num_documents for one in of)


def _measure_row(name: str, pool: str, measure: TextMeasure) -> dict[str, Any]:
    quantiles = zip(LENGTH_SHARES, measure.length_quantiles, strict=True)
    return {
        "tokenizer": name,
        "pool": pool,
        "documents": measure.num_documents,
        "text_bytes": measure.text_bytes,
        "tokens": measure.num_tokens,
        "bytes_a_token": measure.bytes_a_token,
        "round_trip_share": measure.num_round_trips / measure.num_documents,
        "mean_length": measure.num_tokens / measure.num_documents,
        **{f"length_{share:.0%}": length for share, length in quantiles},
        "longest": measure.longest,
    }


def _picture(measures: Mapping[str, Measures], inventory: list[dict[str, Any]]) -> bytes:
    num_pools = min(PICTURED_POOLS, MAX_BARS // len(measures))
    largest = sorted(inventory, key=lambda row: -row["text_bytes"])[:num_pools]
    pools = [row["pool"] for row in inventory if row in largest]
    title = "Bytes a token by pool" + (f", the {num_pools} largest" if len(inventory) > num_pools else "")
    series = {name: [of[pool].bytes_a_token for pool in pools] for name, of in measures.items()}
    return grouped_bar_picture(title, "bytes of text for each token (more is shorter)", pools, series, "pool")


@dg.asset(
    **asset_spec(
        "tokenizer_report",
        REPORT_VERSION,
        {"tokenizers"},
        "The chosen tokenizer beside the recipe's candidates, and the whole inventory in the chosen one's tokens. "
        "Promise: all tokenizers get the same documents, drawn from each pool by content.",
    )
)
def tokenizer_report(
    context: dg.AssetExecutionContext,
    raw_row_groups: ArtifactRef,
    tokenizer: ArtifactRef,
    document_tokens: ArtifactRef,
) -> dg.MaterializeResult[ArtifactRef]:
    upstream = {"raw_row_groups": raw_row_groups, "tokenizer": tokenizer, "document_tokens": document_tokens}
    return materialized(context, build_report, **upstream)
