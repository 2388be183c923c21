"""Promise: each document is in the split of the rule, or unused with a reason, and nothing is lost or miscounted."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from math import fsum, isclose
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from asset_checks.columns import I64
from asset_checks.verdicts import Verdict, law, verdict_of
from pipeline_assets.clusters import slice_name
from pipeline_assets.floors import FLOORS_NAME
from pipeline_assets.sections.splits import FractionSplit
from pipeline_assets.source import ROWS_NAME
from pipeline_assets.splits import TABLE_NAME
from pipeline_assets.stripes import Stage, units_in
from pipeline_assets.tokens import DOC_IDS, LENGTHS, ROWS
from pipeline_assets.transforms.rows import doc_id_matrix
from pipeline_assets.transforms.split import SPLITS
from resources.artifact_store import ArtifactRef
from resources.tables import read_table
from training_io.hashing import derive_seed, keyed_hash

USED_REASON, FLOOR_REASON = "used", "below_min_tokens"


def every_kept_document_has_a_split_or_a_reason(
    stage: Stage,
    split_documents: ArtifactRef,
    document_tokens: ArtifactRef,
    lsh_clusters: ArtifactRef,
    raw_row_groups: ArtifactRef,
) -> Verdict:
    """Row by row: the tokenized document, its text, length, cluster and pool; a split if used, a reason if not.

    And the counts of splits and reasons are recounted, as is what each floor would remove; where reading stopped at
    full budgets, that they are full, and were not before the last round.
    """
    violations, documents = [], 0
    lengths: list[I64] = []
    scores: list[Scores] = []
    counted: Counter[str] = Counter()
    units = [units_in(stage, asset) for asset in (split_documents, document_tokens, raw_row_groups)]
    for unit, tokens, raw in zip(*units, strict=True):
        expected = _expected_rows(stage, tokens, raw, lsh_clusters)
        table = stage.table(unit, TABLE_NAME)
        documents += table.num_rows
        lengths.append(expected.column("num_tokens").to_numpy())
        scores.append(stage.table(raw, ROWS_NAME, ["score"]).column("score").take(_rows_of(stage, tokens)).to_numpy())
        wanted, found = expected.to_pylist(), table.to_pylist()
        if len(found) != len(wanted):
            violations.append(f"{unit.unit}: {len(wanted):,} documents tokenized, {len(found):,} in the table")
        faults = _faulty_rows(wanted, found, stage.recipe.splits.min_tokens)
        violations += [f"{unit.unit}: {fault}" for fault in faults]
        counted.update(_counts_of(wanted, found))
    stated = stage.open(split_documents)[1].counts
    violations += [
        f"{name}: counted {counted[name]:,}, found {count:,} in the manifest"
        for name, count in stated.items()
        if count != counted[name]
    ]
    violations += _misstated_floors(stage, split_documents, np.concatenate(lengths), np.concatenate(scores))
    violations += _misread_rounds(stage, split_documents, raw_row_groups)
    return verdict_of(
        "tokenized documents = documents with a split + unused with a reason", violations, f"{documents:,} documents"
    )


Rows = Sequence[Mapping[str, Any]]
Scores = npt.NDArray[np.float64]


def _faulty_rows(wanted: Rows, found: Rows, min_tokens: int) -> Iterator[str]:
    """Rows of a table that are not the tokenized documents, or whose split, reason and length do not go together."""
    for number, (document, row) in enumerate(zip(wanted, found, strict=False)):
        if differing := [name for name, value in document.items() if row[name] != value]:
            yield f"row {number:,}: {', '.join(differing)} is not that of {document['doc_id'].hex()[:16]}"
        if (row["split"] in SPLITS) != (row["reason"] == USED_REASON):
            yield f"{row['doc_id'].hex()[:16]} is in {row['split']} with reason {row['reason']}"
        if (document["num_tokens"] < min_tokens) != (row["reason"] == FLOOR_REASON):
            length = document["num_tokens"]
            yield f"{document['doc_id'].hex()[:16]} of {length:,} tokens has reason {row['reason']}"


def _counts_of(wanted: Rows, found: Rows) -> Counter[str]:
    """Documents, tokens and bytes by split and by reason, as a unit's manifest names them."""
    counted: Counter[str] = Counter()
    for document, row in zip(wanted, found, strict=False):
        reason, text_bytes = f"unused_{row['reason']}", len(document["text"].encode())
        counted["text_bytes"] += text_bytes
        for prefix in ("", *([f"{row['split']}_"] if row["reason"] == USED_REASON else ["unused_", f"{reason}_"])):
            counted[f"{prefix}documents"] += 1
            counted[f"{prefix}tokens"] += document["num_tokens"]
        counted[reason] += 1
        counted[f"{reason}_bytes"] += text_bytes
    return counted


def _misstated_floors(stage: Stage, split_documents: ArtifactRef, lengths: I64, scores: Scores) -> list[str]:
    """Numbers of the plan's table of floors that are not what lengths and scores (NaN for none) say."""
    (plan,) = stage.open(split_documents)[1].inputs["plans"]
    folder = stage.store.root / split_documents.asset / plan["unit"] / plan["identity"]
    violations = []
    rows = read_table(folder / FLOORS_NAME).to_pylist()
    if [row["floor"] for row in rows if row["is_chosen"]] != [stage.recipe.splits.min_tokens]:
        violations.append(f"floors: expected the recipe's, {stage.recipe.splits.min_tokens:,}, as the chosen one")
    for row in rows:
        is_below = lengths < row["floor"]
        documents, tokens = int(is_below.sum()), int(lengths[is_below].sum())
        wanted = {
            "documents": documents,
            "tokens": tokens,
            "share_of_documents": documents / len(lengths),
            "share_of_tokens": tokens / int(lengths.sum()),
            "mean_score": _mean(scores[is_below]),
            "mean_score_of_all": _mean(scores),
        }
        violations += [
            f"floor {row['floor']:,}: {name}: counted {value}, found {row[name]}"
            for name, value in wanted.items()
            if not _are_equal(value, row[name])
        ]
    return violations


def _misread_rounds(stage: Stage, split_documents: ArtifactRef, raw_row_groups: ArtifactRef) -> list[str]:
    """What the rounds of reading say about the budgets, against the tokens of the tables."""
    if stage.recipe.reading.until != "budgets":
        return []
    rounds: list[Counter[str]] = []
    for unit in units_in(stage, split_documents):
        table = stage.table(unit, TABLE_NAME, ["split", "num_tokens"])
        rounds.append(Counter())
        for split, tokens in zip(
            table.column("split").to_pylist(), table.column("num_tokens").to_pylist(), strict=True
        ):
            rounds[-1][split] += tokens
    before, total = sum(rounds[:-1], Counter()), sum(rounds, Counter())
    budgets = stage.recipe.splits.budgets_to_fill.items()
    counted = {"rounds": len(rounds), "budgets_filled": {name: total[name] >= tokens for name, tokens in budgets}}
    stated = stage.open(raw_row_groups)[1].counts
    violations = [
        f"{name}: counted {value}, found {stated[name]}" for name, value in counted.items() if stated[name] != value
    ]
    if all(before[name] >= tokens for name, tokens in budgets):
        violations.append(f"round {len(rounds):,} was read though the budgets were full before it")
    return violations


def _mean(scores: Scores) -> float | None:
    known = scores[np.isfinite(scores)]
    return fsum(known / len(known)) if len(known) else None


def _are_equal(wanted: float | None, found: float | None) -> bool:
    if wanted is None or found is None:
        return wanted is found
    return isclose(wanted, found, rel_tol=1e-12, abs_tol=1e-12)


def _rows_of(stage: Stage, tokens: ArtifactRef) -> pa.Array:
    return pa.array(stage.array(tokens, ROWS))


def _expected_rows(stage: Stage, tokens: ArtifactRef, raw: ArtifactRef, lsh_clusters: ArtifactRef) -> pa.Table:
    """What a unit's table must hold, from the tokens, the raw rows and the clusters."""
    rows = _rows_of(stage, tokens)
    source = stage.table(raw, ROWS_NAME, ["text", "pool"]).take(rows)
    clusters = stage.table(lsh_clusters, slice_name(raw.unit), ["cluster_id"]).take(rows)
    return pa.table(
        {
            "doc_id": pa.array([doc_id.tobytes() for doc_id in stage.array(tokens, DOC_IDS)], pa.binary()),
            "text": source.column("text"),
            "num_tokens": pa.array(stage.array(tokens, LENGTHS)),
            "cluster_id": clusters.column("cluster_id"),
            "pool": source.column("pool"),
        }
    )


def documents_are_in_the_split_of_the_rule(
    stage: Stage, split_documents: ArtifactRef, lsh_clusters: ArtifactRef
) -> Verdict:
    """With policy fraction: each used document's split is that of its id's keyed hash, and a barred one trains."""
    assignment = stage.recipe.splits.assignment
    violations, documents = [], 0
    for unit in units_in(stage, split_documents) if isinstance(assignment, FractionSplit) else []:
        slices = stage.table(lsh_clusters, slice_name(unit.unit), ["doc_id", "barred"])
        barred = dict(zip(slices.column("doc_id").to_pylist(), slices.column("barred").to_pylist(), strict=True))
        table = stage.table(unit, TABLE_NAME, ["doc_id", "cluster_id", "split"])
        key = "cluster_id" if stage.recipe.dedup.splits_by_cluster else "doc_id"
        hashes = keyed_hash(doc_id_matrix(table.column(key)), derive_seed(assignment.seed, "split")).tolist()
        for row, number in zip(table.to_pylist(), hashes, strict=True):
            wanted = SPLITS[0] if barred[row["doc_id"]] else _split_of(number, assignment)
            documents += 1
            if row["split"] not in (wanted, "unused"):
                violations.append(f"{row['doc_id'].hex()[:16]}: expected {wanted}, found {row['split']}")
    return verdict_of("splits as the keyed hash says", violations, f"{documents:,} documents")


def _split_of(number: int, assignment: FractionSplit) -> str:
    validation = Fraction(assignment.validation_fraction)
    share = Fraction(number, 1 << 64)
    if share < validation:
        return SPLITS[1]
    return SPLITS[2] if share < validation + Fraction(assignment.test_fraction) else SPLITS[0]


def every_pool_is_in_every_split(stage: Stage, split_documents: ArtifactRef) -> Verdict:
    """Each pool has training documents, and documents in each other split that the recipe asks for."""
    found: Counter[tuple[str, str]] = Counter()
    for unit in units_in(stage, split_documents):
        table = stage.table(unit, TABLE_NAME, ["pool", "split"])
        found.update(zip(table.column("pool").to_pylist(), table.column("split").to_pylist(), strict=True))
    documents: Counter[str] = Counter()
    for (pool, _), number in found.items():
        documents[pool] += number
    pools = sorted({pool for pool, split in found if split == SPLITS[0]})
    wanted = [name for name in stage.recipe.splits.names if name != SPLITS[0] and _is_asked_for(stage, name)]
    empty = [split for split in wanted if not any(found[pool, split] for pool in pools)]
    violations = [f"{split} holds no document of any pool: nothing would be measured there" for split in empty]
    violations += [
        f"pool {pool}: no document is in {split}, {found[pool, SPLITS[0]]:,} are in {SPLITS[0]}"
        for pool in pools
        for split in wanted
        if not found[pool, split] and split not in empty
    ]
    violations += [
        f"pool {pool}: none of its {documents[pool]:,} kept documents is in {SPLITS[0]}"
        for pool in sorted(documents.keys() - set(pools))
    ]
    return verdict_of("documents of every pool in every split", violations, f"{len(documents):,} pools")


def _is_asked_for(stage: Stage, split: str) -> bool:
    assignment = stage.recipe.splits.assignment
    return any(getattr(assignment, f"{split}_{kind}", 0) for kind in ("fraction", "tokens"))


CHECKS = [
    law(
        every_kept_document_has_a_split_or_a_reason,
        blocking=True,
        description="Fails when a document was lost while splitting, is unused without a reason or under the floor and "
        "used, or is counted wrong. Materialize split_documents again.",
    ),
    law(
        documents_are_in_the_split_of_the_rule,
        blocking=True,
        description="Fails when a document is in another split than its id's hash says. Materialize split_documents "
        "again.",
    ),
    law(
        every_pool_is_in_every_split,
        blocking=False,
        description="Warns when a pool is not trained on, or never validated on. Often the tokenizer's sample holds "
        "the whole pool, which bars it: lower documents_per_pool, or raise the validation share; or its documents are "
        "all below splits.min_tokens.",
    ),
]
