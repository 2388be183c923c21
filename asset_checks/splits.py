"""Promise: no document, cluster or reference text in two splits, and nothing lost on the way."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import fsum, isclose
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from asset_checks.columns import I64, U8, Flags, find_rows, id_rows, joined, run_starts, sorted_rows, whole
from asset_checks.similarity import Run, Runs, are_alike, items_in, searched_runs, texts_of, word_runs
from asset_checks.verdicts import Verdict, law, verdict_of
from pipeline_assets.clusters import slice_name, split_units
from pipeline_assets.corpus import Corpus
from pipeline_assets.floors import FLOORS_NAME
from pipeline_assets.recipe import FractionSplit
from pipeline_assets.reference_hits import reference_texts
from pipeline_assets.signatures import DOC_IDS as SIGNED_IDS
from pipeline_assets.signatures import SIGNATURES, minhash_params
from pipeline_assets.source import ROWS_NAME
from pipeline_assets.splits import TABLE_NAME
from pipeline_assets.stripes import Stage, units_in
from pipeline_assets.tokens import DOC_IDS, LENGTHS, ROWS
from pipeline_assets.transforms.rows import doc_id_matrix
from pipeline_assets.transforms.split import SPLITS
from resources.artifact_store import ArtifactRef
from resources.tables import read_table
from training_io.errors import InvariantBroken
from training_io.hashing import derive_seed, keyed_hash

USED_REASON, FLOOR_REASON = "used", "below_min_tokens"
MAX_SEARCHED = 1_000  # held-out documents whose runs of words are compared with those of references


def no_document_is_in_two_splits(stage: Stage, split_documents: ArtifactRef) -> Verdict:
    """Each doc_id has one split, over all units."""
    parts = list(_documents_in_splits(stage, split_documents))
    splits = np.concatenate([splits for _, splits in parts])
    doc_ids = joined(doc_ids for doc_ids, _ in parts)
    del parts
    violations, _ = _in_two_splits("document", doc_ids, splits)
    return verdict_of("one split a document", violations, f"{len(doc_ids):,} documents")


def no_cluster_is_in_two_splits(stage: Stage, split_documents: ArtifactRef, lsh_clusters: ArtifactRef) -> Verdict:
    """Each cluster, as clustering decided it, has one split over all units."""
    decided = _decided(stage, split_documents, lsh_clusters)
    parts = [(decided.rows_of(doc_ids), splits) for doc_ids, splits in _documents_in_splits(stage, split_documents)]
    rows, splits = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    cluster_ids = decided.cluster_ids[rows]
    del decided
    violations, clusters = _in_two_splits("cluster", cluster_ids, splits)
    return verdict_of("one split a cluster", violations, f"{clusters:,} clusters")


def no_reference_text_is_in_validation(
    stage: Stage,
    split_documents: ArtifactRef,
    reference_sets: ArtifactRef,
    lsh_clusters: ArtifactRef,
    minhash_signatures: ArtifactRef,
    raw_row_groups: ArtifactRef,
) -> Verdict:
    """Neither a reference text, nor a text with a band of one, nor another of such a text's cluster, is in validation.

    Bands are compared again as the signatures' raw bytes; the hits that clustering recorded are not believed.
    """
    parts = list(_documents_in_splits(stage, split_documents, SPLITS[1:]))
    splits = np.concatenate([splits for _, splits in parts])
    judged = joined(doc_ids for doc_ids, _ in parts)
    near = _documents_near_references(stage, reference_sets, raw_row_groups, minhash_signatures)
    for reference in stage.recipe.references:
        near |= set(stage.table(reference_sets, f"{reference.name}.parquet", ["doc_id"]).column("doc_id").to_pylist())
    sample = [doc_id.tobytes() for doc_id in np.unique(whole(judged))[:MAX_SEARCHED]]
    near |= _documents_with_runs_of_references(stage, lsh_clusters, reference_sets, raw_row_groups, sample)
    held_out = np.isin(whole(judged), whole(id_rows(near)))
    held_out |= _of_their_clusters(_decided(stage, split_documents, lsh_clusters), judged, near, held_out)
    violations = [
        f"{judged[row].tobytes().hex()[:16]} of a held-out cluster is in {SPLITS[splits[row]]}"
        for row in np.flatnonzero(held_out).tolist()
    ]
    return verdict_of("no reference text or near copy in validation or test", violations, f"{len(judged):,} documents")


def _documents_near_references(
    stage: Stage, reference_sets: ArtifactRef, raw_row_groups: ArtifactRef, minhash_signatures: ArtifactRef
) -> set[bytes]:
    """Documents of the corpus that agree with a reference text in all values of some band, and are alike if asked."""
    signed, references = split_units(units_in(stage, minhash_signatures))
    if not references:
        return set()
    wanted = np.concatenate([stage.array(unit, SIGNATURES) for unit in references])
    found = _sharing_a_band(stage, signed, wanted)
    threshold, ngram = stage.recipe.dedup.verify_jaccard, stage.recipe.dedup.ngram
    if threshold is not None:
        held_out = [word_runs(text, ngram) for text in reference_texts(stage, reference_sets).to_pylist()]
        corpus = Corpus(stage, units_in(stage, raw_row_groups), signed)
        texts = corpus.rows(np.array(list(found), np.int64), ["text"]).column("text").to_pylist()
        alike = _alike_to_some((word_runs(text, ngram) for text in texts), held_out, threshold)
        return {doc_id for doc_id, is_alike in zip(found.values(), alike, strict=True) if is_alike}
    return set(found.values())


def _alike_to_some(texts: Iterable[Runs], others: Sequence[Runs], threshold: float) -> Iterator[bool]:
    """Whether each text is alike to one of the others; compared with those alone that share a run of words with it."""
    holders: defaultdict[Run, list[int]] = defaultdict(list)
    for place, runs in enumerate(others):
        for run in runs:
            holders[run].append(place)
    for runs in texts:
        places = {place for run in runs & holders.keys() for place in holders[run]}
        yield any(are_alike(runs, others[place], threshold) for place in places)


def _sharing_a_band(stage: Stage, signed: list[ArtifactRef], wanted: npt.NDArray[np.uint32]) -> dict[int, bytes]:
    """Numbers and doc_ids of the documents that agree with one of the wanted signatures in a band, ascending."""
    rows_per_band = minhash_params(stage.recipe).rows_per_band
    wanted = wanted[(wanted != 0xFFFFFFFF).any(axis=1)]
    found: dict[int, bytes] = {}
    first = 0
    for unit in signed:
        signatures, doc_ids = stage.array(unit, SIGNATURES), stage.array(unit, SIGNED_IDS)
        shares = np.zeros(len(signatures), np.bool_)
        for start in range(0, signatures.shape[1], rows_per_band):
            texts, banned = (
                whole(np.ascontiguousarray(values[:, start : start + rows_per_band]).view(np.uint8))
                for values in (signatures, wanted)
            )
            shares |= np.isin(texts, banned)
        found |= {first + row: doc_ids[row].tobytes() for row in np.flatnonzero(shares).tolist()}
        first += len(signatures)
    return found


def _documents_with_runs_of_references(
    stage: Stage,
    lsh_clusters: ArtifactRef,
    reference_sets: ArtifactRef,
    raw_row_groups: ArtifactRef,
    documents: Iterable[bytes],
) -> set[bytes]:
    """Of some documents, those that hold a run of words of a text that is searched for by overlap."""
    searched = list(searched_runs(stage, lsh_clusters, reference_sets).values())
    texts = texts_of(stage, raw_row_groups, documents if searched else ())
    return {doc_id for doc_id, text in texts.items() if any(items_in(text, runs) for runs in searched)}


@dataclass(frozen=True)
class _Decided:
    """Every row's document and cluster, as clustering decided, and the rows by doc_id: 72 bytes a row."""

    doc_ids: U8  # [n, 32]
    by_doc_id: I64  # [n]
    cluster_ids: U8  # [n, 32]

    def rows_of(self, doc_ids: U8) -> I64:
        """The row of each document; InvariantBroken where there is none."""
        rows = find_rows(self.doc_ids, self.by_doc_id, doc_ids)
        if (rows < 0).any():
            lost = doc_ids[np.argmax(rows < 0)].tobytes().hex()[:16]
            raise InvariantBroken(
                f"split_documents: expected documents that lsh_clusters decided about, found {lost}, of which it says"
                " nothing. Materialize split_documents again."
            )
        return rows


def _decided(stage: Stage, split_documents: ArtifactRef, lsh_clusters: ArtifactRef) -> _Decided:
    names = [slice_name(unit.unit) for unit in units_in(stage, split_documents)]
    doc_ids, cluster_ids = (
        joined(doc_id_matrix(stage.table(lsh_clusters, name, [column]).column(column)) for name in names)
        for column in ("doc_id", "cluster_id")
    )
    return _Decided(doc_ids, sorted_rows(doc_ids), cluster_ids)


def _of_their_clusters(decided: _Decided, judged: U8, near: Iterable[bytes], is_near: Flags) -> Flags:
    """Whether a judged document, if not near a reference itself, is of the cluster of one that is."""
    rows = find_rows(decided.doc_ids, decided.by_doc_id, id_rows(near))
    held_out = whole(decided.cluster_ids[rows[rows >= 0]])
    found = np.zeros(len(judged), np.bool_)
    found[~is_near] = np.isin(whole(decided.cluster_ids[decided.rows_of(judged[~is_near])]), held_out)
    return found


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
    """Each pool with training documents has documents in each other split that the recipe asks for."""
    found: Counter[tuple[str, str]] = Counter()
    for unit in units_in(stage, split_documents):
        table = stage.table(unit, TABLE_NAME, ["pool", "split"])
        found.update(zip(table.column("pool").to_pylist(), table.column("split").to_pylist(), strict=True))
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
    return verdict_of("documents of every pool in every split", violations, f"{len(pools):,} pools")


def _is_asked_for(stage: Stage, split: str) -> bool:
    assignment = stage.recipe.splits.assignment
    return any(getattr(assignment, f"{split}_{kind}", 0) for kind in ("fraction", "tokens"))


def _documents_in_splits(
    stage: Stage, split_documents: ArtifactRef, names: Sequence[str] = SPLITS
) -> Iterator[tuple[U8, npt.NDArray[np.int8]]]:
    """Unit after unit, the doc_ids of the documents in some splits, uint8[n, 32], and the splits' places in SPLITS."""
    for unit in units_in(stage, split_documents):
        table = stage.table(unit, TABLE_NAME, ["doc_id", "split"])
        table = table.filter(pc.is_in(table.column("split"), pa.array(names)))
        splits = pc.index_in(table.column("split"), pa.array(SPLITS))
        yield doc_id_matrix(table.column("doc_id")), np.asarray(splits, np.int8)


def _in_two_splits(what: str, values: U8, splits: npt.NDArray[np.int8]) -> tuple[list[str], int]:
    """The values that are in several splits, in words, by their first rows; and how many values there are.

    Sorted, a value's rows lie together: one split is the smallest and the largest of them.
    """
    by_value = sorted_rows(values)
    starts = np.flatnonzero(run_starts(values, by_value))
    ordered = splits[by_value]
    torn = np.empty(0, np.int64)
    if len(starts):
        torn = np.flatnonzero(np.minimum.reduceat(ordered, starts) != np.maximum.reduceat(ordered, starts))
    torn = torn[np.argsort(by_value[starts[torn]])]
    ends = np.append(starts[1:], len(ordered))
    violations = [
        f"{what} {values[by_value[start]].tobytes().hex()[:16]} is in"
        f" {' and '.join(sorted(SPLITS[split] for split in np.unique(ordered[start:end])))}"
        for start, end in zip(starts[torn].tolist(), ends[torn].tolist(), strict=True)
    ]
    return violations, len(starts)


LEAK = "a validation loss would measure memory. Materialize split_documents again; nothing downstream may be used."

CHECKS = [
    law(
        no_document_is_in_two_splits,
        blocking=True,
        description=f"Fails when one text is both trained on and validated on: {LEAK}",
    ),
    law(
        no_cluster_is_in_two_splits,
        blocking=True,
        description=f"Fails when near copies are in two splits: {LEAK}",
    ),
    law(
        no_reference_text_is_in_validation,
        blocking=True,
        description=f"Fails when a held-out text, or a near copy of one, is validated on: {LEAK}",
    ),
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
        description="Warns when a pool is trained on but never validated on. Often the tokenizer's sample holds the "
        "whole pool, which bars it: lower documents_per_pool, or raise the validation share.",
    ),
]
