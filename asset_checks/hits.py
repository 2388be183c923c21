"""Promise: what the reference sets match is found and barred, and each hit is told as it is."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from asset_checks.columns import I64, count_rows, group_numbers, id_rows, places_in
from asset_checks.components import all_signatures, near_components
from asset_checks.decisions import AGAIN, other_rows
from asset_checks.hit_records import Hit, HitRecords
from asset_checks.similarity import (
    MAX_COMPARED_BYTES,
    documents_with_run,
    items_in,
    jaccard,
    runs_in_order,
    runs_of_items,
    sampling_keys,
    searched_runs,
    shingle_hashes,
    within_budget,
)
from asset_checks.verdicts import Verdict, law, verdict_of
from pipeline_assets.reference_hits import BOILERPLATE_NAME, KINDS, overlaps_of
from pipeline_assets.sections.references import TokenizerSample
from pipeline_assets.stripes import Stage
from resources.artifact_store import ArtifactRef

MAX_BOILERPLATE = 5  # runs of words whose documents are counted again
MAX_COUNTED = 1_000  # documents of each of those; of a commoner run, that so many hold it
MAX_SEARCHED = 300  # documents whose runs of words are recounted
MAX_VERIFIED = 50  # reference texts whose near copies are looked for, where pairs are verified
MAX_CANDIDATES = 2_000  # documents that share a band with those


def reference_texts_are_found(
    stage: Stage,
    lsh_clusters: ArtifactRef,
    reference_sets: ArtifactRef,
    raw_row_groups: ArtifactRef,
    minhash_signatures: ArtifactRef,
) -> Verdict:
    """Known positives: every reference text that is also in the corpus is an exact hit, and its cluster is barred.

    Near hits are recounted from the signatures' raw bytes, without band keys; similarities and runs of words on a
    sample. What bars a row follows from the hits of its cluster.
    """
    records = HitRecords(stage, lsh_clusters, reference_sets, raw_row_groups, minhash_signatures)
    if violations := other_rows(stage, records.table, raw_row_groups):
        return verdict_of(
            "every reference text of the corpus is found", violations, f"{records.table.num_rows:,} decisions"
        )
    violations = [
        *_not_drawn_from_the_corpus(records),
        *_matched_otherwise(records),
        *_misstated_hits(records),
        *_overlaps_found_otherwise(records),
        *_other_boilerplate(records),
        *_barred_otherwise(records),
        *_misstated_counts(records),
    ]
    known = sum(text in records.row_of for texts in records.sets.values() for text in texts)
    return verdict_of("every reference text of the corpus is found and barred", violations, f"{known:,} known texts")


def _not_drawn_from_the_corpus(records: HitRecords) -> Iterator[str]:
    for reference in records.stage.recipe.references:
        outside = sum(text not in records.row_of for text in records.sets[reference.name])
        if isinstance(reference, TokenizerSample) and outside:
            yield f"{reference.name}: {outside:,} of its texts are not in the corpus"


def _matched_otherwise(records: HitRecords) -> Iterator[str]:
    """Hits of whole texts that are missing, and such that nothing explains."""
    found = Counter(_key_of(hit) for hit in records.hits if hit["kind"] != "overlap")
    exact = {(name, text, text) for name, texts in records.sets.items() for text in texts if text in records.row_of}
    if records.stage.recipe.dedup.verify_jaccard is None:
        wanted = exact | _first_of_each_band(records)
        yield from _hit_otherwise(found.keys() - wanted, wanted - found.keys())
        copies = Counter(dict.fromkeys(found, 1))
    else:
        yield from _hit_otherwise(_not_alike(records), (exact | _alike(records)) - found.keys())
        documents = id_rows(key[2] for key in found)
        counts = count_rows(records.doc_ids, records.by_doc_id, documents).tolist()
        copies = Counter(dict(zip(found, counts, strict=True)))
    for name, text, document in found - copies:
        yield f"{name}: the hit of {text.hex()[:16]} on {document.hex()[:16]} is told too often"
    for hit in records.hits:
        is_exact = hit["reference_doc_id"] == hit["doc_id"]
        if hit["kind"] != "overlap" and hit["kind"] != ("exact" if is_exact else "near"):
            yield f"{hit['reference_set']}: {hit['doc_id'].hex()[:16]} is no {hit['kind']} hit"


def _key_of(hit: Hit) -> tuple[str, bytes, bytes]:
    return hit["reference_set"], hit["reference_doc_id"], hit["doc_id"]


def _hit_otherwise(surplus: set[tuple[str, bytes, bytes]], missing: set[tuple[str, bytes, bytes]]) -> Iterator[str]:
    for name, text, document in sorted(missing):
        where = "is in the corpus" if text == document else f"is near {document.hex()[:16]}"
        yield f"{name}: {text.hex()[:16]} {where}, but no hit says so"
    for name, text, document in sorted(surplus):
        yield f"{name}: a hit says that {text.hex()[:16]} is near {document.hex()[:16]}, and it is not"


def _first_of_each_band(records: HitRecords) -> set[tuple[str, bytes, bytes]]:
    """Each reference text with the smallest document of those that share a band with it, band by band."""
    names, signatures = records.references()
    if not names:
        return set()
    return {
        (*name, records.doc_ids[rows[0]].tobytes())
        for holders in records.in_bands_of(signatures, 1)
        for name, rows in zip(names, holders, strict=True)
        if rows
    }


def _alike(records: HitRecords) -> set[tuple[str, bytes, bytes]]:
    """Of some reference texts that are not in the corpus, the documents that share a band and are alike: a sample."""
    names, signatures = records.references()
    keys = sampling_keys([text for _, text in names], records.stage.recipe.seed)
    outside = [
        number for number in sorted(range(len(names)), key=keys.__getitem__) if names[number][1] not in records.row_of
    ]
    sample = outside[:MAX_VERIFIED]
    candidates = {
        (names[number], records.doc_ids[row].tobytes())
        for holders in records.in_bands_of(signatures[sample], MAX_CANDIDATES // MAX_VERIFIED)
        for number, rows in zip(sample, holders, strict=True)
        for row in rows
    }
    texts = records.texts({document for _, document in candidates})
    ngram, threshold = records.stage.recipe.dedup.ngram, records.stage.recipe.dedup.verify_jaccard
    found = set()
    for (name, text), document in _affordable(records, candidates):
        alike = jaccard(shingle_hashes(records.sets[name][text], ngram), shingle_hashes(texts[document], ngram))
        if threshold is not None and alike >= threshold:
            found.add((name, text, document))
    return found


def _affordable(records: HitRecords, pairs: Any) -> list[Any]:
    """Pairs of a set's text and a document, by a keyed hash of the document, while their texts are not too much."""
    listed = sorted(pairs)
    text_bytes, row_of = records.text_bytes(), records.rows_of(document for _, document in listed)
    sizes = [
        len(records.sets[name][text].encode()) + int(text_bytes[row_of[document]]) for (name, text), document in listed
    ]
    keys = sampling_keys([document for _, document in listed], records.stage.recipe.seed)
    return [listed[number] for number in within_budget(sizes, keys)]


def _not_alike(records: HitRecords) -> set[tuple[str, bytes, bytes]]:
    """Hits of near copies that share no band, or whose similarity is stated below the limit."""
    names, signatures = records.references()
    number_of = {name: number for number, name in enumerate(names)}
    threshold = records.stage.recipe.dedup.verify_jaccard
    stored = records.signatures_of(records.row_of.values())
    found = set()
    for hit in records.hits:
        name, text, document = _key_of(hit)
        if hit["kind"] == "overlap" or text == document:
            continue
        row, number = records.row_of.get(document), number_of.get((name, text))
        is_alike = row is not None and number is not None and threshold is not None and hit["jaccard"] >= threshold
        if is_alike:
            equal = stored[row] == signatures[number]
            is_alike = bool(equal.reshape(-1, records.rows_per_band).all(axis=1).any())
        if not is_alike:
            found.add((name, text, document))
    return found


def _misstated_hits(records: HitRecords) -> Iterator[str]:
    """Similarities that the texts do not have, on a sample, and runs of words where the whole text is the hit."""
    known = []
    for hit in records.hits:
        if hit["doc_id"] in records.row_of and hit["reference_doc_id"] in records.sets.get(hit["reference_set"], ()):
            known.append(hit)
        else:
            yield f"{hit['reference_set']}: a hit names {hit['reference_doc_id'].hex()[:16]} or a document not there"
    pairs = {((hit["reference_set"], hit["reference_doc_id"]), hit["doc_id"]) for hit in known}
    chosen = {*_affordable(records, pairs)}
    ngram = records.stage.recipe.dedup.ngram
    texts = records.texts({document for _, document in chosen})
    texts |= {text: records.sets[name][text] for (name, text), _ in chosen}
    hashes = {doc_id: shingle_hashes(text, ngram) for doc_id, text in texts.items()}
    for hit in known:
        name, text, document = _key_of(hit)
        where = f"{name}: the hit of {text.hex()[:16]} on {document.hex()[:16]}"
        if ((name, text), document) in chosen:
            alike = jaccard(hashes[text], hashes[document])
            if hit["jaccard"] != alike:
                yield f"{where}: jaccard: expected {alike}, found {hit['jaccard']}"
        if hit["kind"] != "overlap" and (hit["num_ngrams"], hit["excerpt"]) != (0, ""):
            yield f"{where}: expected no run of words, found {hit['num_ngrams']:,} and {hit['excerpt'][:60]!r}"


def _overlaps_found_otherwise(records: HitRecords) -> Iterator[str]:
    """Hits by runs of words, recounted with Python sets on a sample of the hits and of all documents."""
    searched = searched_runs(records.stage, records.lsh_clusters, records.reference_sets)
    for name, runs in searched.items():
        ngram = overlaps_of(records.stage.recipe)[name].ngram
        hits: dict[bytes, list[tuple[bytes, int, str]]] = {}
        for hit in records.hits:
            if hit["reference_set"] == name and hit["kind"] == "overlap":
                hits.setdefault(hit["doc_id"], []).append((hit["reference_doc_id"], hit["num_ngrams"], hit["excerpt"]))
        sample = {*records.first_texts(MAX_SEARCHED), *sorted(hits)[:MAX_SEARCHED]}
        texts = records.texts(sample)
        for document in sorted(sample):
            expected = [
                (item, len(found), _first_run(records.sets[name][item], ngram, found))
                for item, found in items_in(texts.get(document, ""), runs).items()
            ]
            if sorted(expected) != sorted(found := hits.get(document, [])):
                yield (
                    f"{name}: {document.hex()[:16]} holds runs of words of {len(expected):,} texts,"
                    f" the hits name {len(found):,}, or other numbers of runs, or other runs"
                )


def _first_run(text: str, ngram: int, found: set[tuple[str, ...]]) -> str:
    return " ".join(next(run for run in runs_in_order(text, ngram) if run in found))


def _other_boilerplate(records: HitRecords) -> Iterator[str]:
    """Runs of words that are called boilerplate: a sample of the rarest, and how many texts of the set hold each."""
    overlaps = overlaps_of(records.stage.recipe)
    stored = records.stage.table(records.lsh_clusters, BOILERPLATE_NAME).to_pylist()
    rows = [row for row in stored if row["reference_set"] in overlaps]
    if len(rows) != len(stored):
        yield f"{len(stored) - len(rows):,} runs of words are boilerplate of a set that is not searched by them"
    items = {name: runs_of_items(records.sets[name], overlaps[name]) for name in {row["reference_set"] for row in rows}}
    for row in rows:
        holders = len(items[row["reference_set"]].get(tuple(row["ngram"].split(" ")), ()))
        if holders != row["num_items"]:
            yield f"{_called(row)}, and {holders:,} texts of the set hold it, not {row['num_items']:,}"
    for row in sorted(rows, key=lambda row: (row["num_documents"], row["ngram"]))[:MAX_BOILERPLATE]:
        enough = 1 + max(overlaps[row["reference_set"]].max_documents, min(row["num_documents"], MAX_COUNTED))
        texts, documents = documents_with_run(records.stage, records.raw_row_groups, row["ngram"], enough)
        is_counted = documents == row["num_documents"] or documents == enough <= row["num_documents"]
        if texts <= overlaps[row["reference_set"]].max_documents or not is_counted:
            stated = row["num_documents"]
            yield f"{_called(row)}, and {documents:,} documents hold it, {texts:,} different ones, not {stated:,}"


def _called(row: Mapping[str, Any]) -> str:
    return f"{row['reference_set']}: {row['ngram'][:60]!r} is called boilerplate"


def _barred_otherwise(records: HitRecords) -> Iterator[str]:
    """Rows that are barred by other sets than those that hit their cluster; in mode exact, what is near them."""
    groups = _groups(records)
    matched: dict[int, set[str]] = {}
    for hit in records.hits:
        if (row := records.row_of.get(hit["doc_id"])) is not None:
            matched.setdefault(int(groups[row]), set()).add(hit["reference_set"])
    listed = [reference.name for reference in records.stage.recipe.references]
    found, names = records.named("references")
    numbers = {name: number for number, name in enumerate(names)}
    expected = np.full(groups.max(initial=-1) + 1, numbers.setdefault("", len(numbers)), np.int32)
    for group, sets in matched.items():
        expected[group] = numbers.setdefault(",".join(name for name in listed if name in sets), len(numbers))
    names, barred = list(numbers), np.asarray(records.table.column("barred"))
    wanted = expected[groups]
    for row in np.flatnonzero((found != wanted) | (barred != (wanted != numbers[""]))).tolist():
        yield (
            f"{records.doc_ids[row].tobytes().hex()[:16]}: expected to be barred by {names[wanted[row]] or 'nothing'},"
            f" found barred {barred[row]} by {names[found[row]] or 'nothing'}"
        )


def _groups(records: HitRecords) -> I64:
    """Number of each row's group, all of which a hit on one of them bars."""
    if records.stage.recipe.dedup.mode != "exact" or not records.hits:
        return group_numbers(records.ids("cluster_id"))
    signatures = all_signatures(records.stage, records.units[0])
    return near_components(records.doc_ids, signatures, records.rows_per_band).astype(np.int64)


def _misstated_counts(records: HitRecords) -> Iterator[str]:
    """Numbers of the manifest about each set."""
    stated = records.stage.open(records.lsh_clusters)[1].counts["references"]
    found, names = records.named("references")
    kept = np.asarray(records.table.column("kept"))
    reasons, reason_names = records.named("reason")
    removed = reasons == places_in(reason_names, pa.array(["reference"]))
    for reference in records.stage.recipe.references:
        texts = records.sets[reference.name]
        universe = getattr(reference, "universe_documents", None)
        kinds = Counter(hit["kind"] for hit in records.hits if hit["reference_set"] == reference.name)
        matched = np.isin(found, [at for at, name in enumerate(names) if reference.name in name.split(",")])
        wanted = {
            "texts": len(texts),
            "exact_documents": int(count_rows(records.doc_ids, records.by_doc_id, id_rows(texts)).sum()),
            "exact_by_chance": universe and len(texts) * records.table.num_rows / universe,
            "matched_documents": int(matched.sum()),
            "kept_out_of_validation": int(kept[matched].sum()),
            "removed": int(removed[matched].sum()),
            **{f"{kind}_hits": kinds[kind] for kind in KINDS},
        }
        for name, number in wanted.items():
            if number != (counted := stated[reference.name][name]):
                yield f"{reference.name}: {name}: counted {number}, found {counted} in the manifest"


CHECKS = [
    law(
        reference_texts_are_found,
        blocking=True,
        description="Fails when a text that must stay out of validation was not recognised in the corpus, or a hit is "
        f"told otherwise than it is. Similarities are recounted on a keyed sample of {MAX_COMPARED_BYTES // 1_000_000} "
        f"MB of text, runs of words on {MAX_SEARCHED} documents. {AGAIN}",
    ),
]
