"""Looking up: is this text in the corpus? Texts in, the rows that hold them or share a band with them out.

    signatures, decisions and rows, by unit ─▶ identical text by doc_id, kept near-copies by band ─▶ exact Jaccard

The stored band keys are searched where they lie; an index (datasketch's MinHashLSH, in memory or in Redis) finds the
same documents. Promise: signatures of other parameters than the recipe's are refused. Cost: a unit at a time, and
the texts of those units alone in which something was found.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pipeline_assets.answers import LIKELY, Answer, Match
from pipeline_assets.clusters import slice_name, split_units
from pipeline_assets.references import Pipeline
from pipeline_assets.signatures import DOC_IDS, KEY_ROWS, KEYS, SIGNATURES, minhash_params, signature_family
from pipeline_assets.source import ROWS_NAME
from pipeline_assets.stripes import Stage, units_in
from pipeline_assets.transforms.jaccard import jaccard_of_pairs
from pipeline_assets.transforms.lookup import (
    IN_MEMORY,
    candidates_of,
    empty_index,
    excerpt,
    insert_documents,
    rows_of_doc_ids,
    rows_sharing_a_band,
)
from pipeline_assets.transforms.lsh import band_keys, collision_probability, shared_bands
from pipeline_assets.transforms.minhash import MinHashParams, is_wordless, sign_documents
from pipeline_assets.transforms.rows import doc_id_matrix, text_doc_ids
from resources.artifact_store import ArtifactRef
from resources.redis_index import RedisAddress, build_once, storage_config, talking_to
from resources.tables import read_rows
from training_io.errors import SourceError, StateMismatch
from training_io.hashing import DOC_ID_BYTES, identity_of

if TYPE_CHECKING:
    from datasketch import MinHashLSH

INDEX_VERSION = 1  # of what is put into Redis; part of its base name
BATCH_DOCUMENTS = 1_000
BUFFERED_COMMANDS = 2_000  # in each of the library's 15 buffers
ROW_COLUMNS = ("text", "pool", "file", "row_group", "row", "url", "dump")
DECISION_COLUMNS = ("kept", "reason", "kept_doc_id")


@dataclass(frozen=True, kw_only=True)
class Lookup:
    """What is looked into: an artifact of clusters, and the signed and raw units that it was made from, in order."""

    stage: Stage
    params: MinHashParams
    clusters: ArtifactRef
    signed: tuple[ArtifactRef, ...]
    rows: tuple[ArtifactRef, ...]

    @property
    def identity(self) -> str:
        """What an index of the kept documents depends on."""
        digests = [self.clusters.digest, [unit.digest for unit in self.signed]]
        return identity_of([INDEX_VERSION, digests, asdict(self.params)])

    def kept(self, number: int) -> npt.NDArray[np.bool_]:
        """Which rows of one unit are kept."""
        table = self.stage.table(self.clusters, slice_name(self.rows[number].unit), ["kept"])
        return np.asarray(table.column("kept"), dtype=np.bool_)


def open_lookup(pipeline: Pipeline) -> Lookup:
    """The latest clusters of the recipe; StateMismatch when signatures or rows are not those that they were made from,
    or were signed with other parameters."""
    stage = Stage(pipeline=pipeline, say=_ignore, warn=_ignore, observe=_ignore)
    raw, signatures, clusters = map(pipeline.resolve, ("raw_row_groups", "minhash_signatures", "lsh_clusters"))
    inputs = stage.open(clusters)[1].inputs
    for name, ref in (("rows", raw), ("signatures", signatures)):
        if inputs[name] != ref.digest:
            raise StateMismatch(
                f"lsh_clusters: expected to be made from the latest {ref.asset} {ref.digest[:12]}, found"
                f" {inputs[name][:12]}. Materialize everything up to lsh_clusters in one run."
            )
    params = minhash_params(stage.recipe)
    signed, _ = split_units(units_in(stage, signatures))
    rows = units_in(stage, raw)
    assert [unit.unit for unit in signed] == [unit.unit for unit in rows]
    for unit in signed:
        folder, manifest = stage.open(unit)
        refuse_other_parameters(manifest.parameters, params, str(folder))
    return Lookup(stage=stage, params=params, clusters=clusters, signed=tuple(signed), rows=tuple(rows))


def _ignore(*_: Any) -> None:
    """A look-up has no log."""


def refuse_other_parameters(found: Any, params: MinHashParams, where: str) -> None:
    """StateMismatch, naming both, when signatures were made with other parameters than these."""
    expected = signature_family(params)
    differing = [
        f"{name}: this recipe and this Python say {expected.get(name)!r}, it was signed with {found.get(name)!r}"
        for name in sorted(expected.keys() | found.keys())
        if expected.get(name) != found.get(name)
    ]
    if differing:
        raise StateMismatch(
            f"{where}: expected signatures of these parameters, found others: {'; '.join(differing)}."
            " Materialize minhash_signatures and lsh_clusters again, or go back to the recipe and Python that signed."
        )


def memory_index(lookup: Lookup) -> "MinHashLSH":
    """datasketch's index of the kept documents in this process's memory; its keys are hex doc_ids."""
    index = empty_index(lookup.params, IN_MEMORY)
    for doc_ids, signatures in _kept_batches(lookup):
        insert_documents(index, doc_ids, signatures, lookup.params, str)
    return index


def redis_index(lookup: Lookup, address: RedisAddress) -> "MinHashLSH":
    """The same index in Redis, built by whoever first needs it for these clusters; its keys are the doc_ids' hex bytes.

    SourceError when Redis cannot be used.
    """
    basename = f"corpusmill:{lookup.identity[:32]}".encode()
    storage = storage_config(address, basename)

    def build(still_here: Any) -> int:
        index = empty_index(lookup.params, storage)
        with index.insertion_session(buffer_size=BUFFERED_COMMANDS) as session:
            for doc_ids, signatures in _kept_batches(lookup):
                insert_documents(session, doc_ids, signatures, lookup.params, str.encode)
                still_here()
        return len(index.keys)

    build_once(address, basename, build)
    with talking_to(address):
        return empty_index(lookup.params, storage)


def _kept_batches(lookup: Lookup) -> Iterator[tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint32]]]:
    """doc_ids and signatures of the kept documents, a bounded number at a time."""
    for number, unit in enumerate(lookup.signed):
        doc_ids, signatures = lookup.stage.array(unit, DOC_IDS), lookup.stage.array(unit, SIGNATURES)
        kept = np.flatnonzero(lookup.kept(number))
        for start in range(0, len(kept), BATCH_DOCUMENTS):
            rows = kept[start : start + BATCH_DOCUMENTS]
            yield doc_ids[rows], signatures[rows]


def look_up(pipeline: Pipeline, texts: Sequence[str], address: RedisAddress | None = None) -> list[Answer]:
    """Find texts in the latest corpus of the recipe, through the index in Redis where an address is given."""
    lookup = open_lookup(pipeline)
    if address is None:
        return find_texts(lookup, texts)
    index = redis_index(lookup, address)
    with talking_to(address):
        return find_texts(lookup, texts, index)


def find_texts(lookup: Lookup, texts: Sequence[str], index: "MinHashLSH | None" = None) -> list[Answer]:
    """Each text's identical rows and kept near-copies, best first, by the stored band keys or an index of them.

    SourceError for a text that is not valid Unicode, StateMismatch for an index of other bands.
    """
    params = lookup.params
    if index is not None and (index.h, index.b, index.r) != (params.num_perm, params.num_bands, params.rows_per_band):
        raise StateMismatch(
            f"index: expected {params.num_perm:,} values in {params.num_bands:,} bands of {params.rows_per_band:,}"
            f" (the recipe's), found {index.h:,} in {index.b:,} of {index.r:,}. Build the index from this corpus."
        )
    asked = _asked(texts, params, index)
    matches: list[list[Match]] = [[] for _ in texts]
    for number in range(len(lookup.signed)):
        for query, match in _matches_in_unit(lookup, number, asked):
            matches[query].append(match)
    num_documents = sum(unit.counts["documents"] for unit in lookup.rows)
    return [
        Answer(
            doc_id=asked.doc_ids[query].tobytes().hex(),
            is_wordless=bool(asked.is_wordless[query]),
            num_documents=num_documents,
            chance=float(collision_probability(LIKELY, params.num_bands, params.rows_per_band)),
            matches=tuple(sorted(found, key=_rank)),
        )
        for query, found in enumerate(matches)
    ]


def _rank(match: Match) -> tuple[Any, ...]:
    return (not match.is_identical, -match.jaccard, -match.estimated_jaccard, not match.kept, match.doc_id)


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """The texts that are looked for, in the forms that are compared; candidates are given where an index was asked."""

    texts: pa.Array
    doc_ids: npt.NDArray[np.uint8]
    signatures: npt.NDArray[np.uint32]
    keys: npt.NDArray[np.uint64]
    is_wordless: npt.NDArray[np.bool_]
    candidates: tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]] | None  # queries int64[c], doc_ids uint8[c, 32]


def _asked(texts: Sequence[str], params: MinHashParams, index: "MinHashLSH | None") -> _Asked:
    array = _text_array(texts)
    signatures, _ = sign_documents(array, params)
    is_empty = is_wordless(signatures)
    candidates = None
    if index is not None:
        found = [(query, key) for query, row in enumerate(signatures) for key in candidates_of(index, row, params)]
        joined = b"".join(bytes.fromhex(key) for _, key in found)
        candidates = (
            np.array([query for query, _ in found], dtype=np.int64),
            np.frombuffer(joined, dtype=np.uint8).reshape(-1, DOC_ID_BYTES),
        )
    return _Asked(
        texts=array,
        doc_ids=doc_id_matrix(text_doc_ids(array)),
        signatures=signatures,
        keys=band_keys(signatures, params),
        is_wordless=is_empty,
        candidates=candidates,
    )


def _text_array(texts: Sequence[str]) -> pa.Array:
    try:
        return pa.array(texts, pa.large_string())
    except UnicodeEncodeError as error:
        raise SourceError(f"text to look up: expected valid Unicode, found {error}. Give it as UTF-8.") from error


def _matches_in_unit(lookup: Lookup, number: int, asked: _Asked) -> Iterator[tuple[int, Match]]:
    """The unit's rows that answer a query, with the query's number."""
    stage, unit = lookup.stage, lookup.signed[number]
    unit_ids, signatures = stage.array(unit, DOC_IDS), stage.array(unit, SIGNATURES)
    pairs = _answering_rows(lookup, number, asked, unit_ids, signatures)
    if not len(pairs):
        return
    queries, rows = pairs.T
    found = read_rows(stage.folder(lookup.rows[number]) / ROWS_NAME, rows, ROW_COLUMNS)
    decisions = stage.table(lookup.clusters, slice_name(unit.unit), DECISION_COLUMNS).take(pa.array(rows))
    texts = pa.chunked_array([asked.texts, *found.column("text").chunks])
    places = np.column_stack([queries, len(asked.texts) + np.arange(len(pairs))])
    columns = {
        "is_identical": (asked.doc_ids[queries] == unit_ids[rows]).all(axis=1),
        "jaccard": jaccard_of_pairs(texts, places, lookup.params.ngram),
        "estimated_jaccard": (asked.signatures[queries] == signatures[rows]).mean(axis=1),
        "shared_bands": _bands_shared(asked, signatures, pairs, lookup.params),
        "doc_id": [doc_id.tobytes().hex() for doc_id in unit_ids[rows]],
        "kept": decisions.column("kept"),
        "reason": decisions.column("reason"),
        "kept_doc_id": [doc_id.hex() for doc_id in decisions.column("kept_doc_id").to_pylist()],
        **{name: found.column(name) for name in ROW_COLUMNS if name != "text"},
        "excerpt": [excerpt(text) for text in found.column("text").to_pylist()],
    }
    for query, row in zip(queries.tolist(), pa.table(columns).to_pylist(), strict=True):
        yield query, Match(**row)


def _answering_rows(
    lookup: Lookup,
    number: int,
    asked: _Asked,
    unit_ids: npt.NDArray[np.uint8],
    signatures: npt.NDArray[np.uint32],
) -> npt.NDArray[np.int64]:
    """The unit's rows of a query's text, and its kept rows that share a band with one: int64[m, 2] of (query, row)."""
    near = _near_rows(lookup.stage, lookup.signed[number], unit_ids, asked)
    if len(near):
        near = near[lookup.kept(number)[near[:, 1]]]
        near = near[_bands_shared(asked, signatures, near, lookup.params) > 0]  # a 64-bit key may stand for two bands
    return np.unique(np.concatenate([rows_of_doc_ids(unit_ids, asked.doc_ids), near]), axis=0)


def _bands_shared(
    asked: _Asked, signatures: npt.NDArray[np.uint32], pairs: npt.NDArray[np.int64], params: MinHashParams
) -> npt.NDArray[np.int64]:
    queries, rows = pairs.T
    return np.where(asked.is_wordless[queries], 0, shared_bands(asked.signatures[queries], signatures[rows], params))


def _near_rows(
    stage: Stage, unit: ArtifactRef, unit_ids: npt.NDArray[np.uint8], asked: _Asked
) -> npt.NDArray[np.int64]:
    """Rows of the unit that share a band with a query, kept or not: int64[m, 2] of (query, row)."""
    if asked.candidates is None:
        return rows_sharing_a_band(stage.array(unit, KEYS), stage.array(unit, KEY_ROWS), asked.keys)
    queries, doc_ids = asked.candidates
    found = rows_of_doc_ids(unit_ids, doc_ids)
    return np.column_stack([queries[found[:, 0]], found[:, 1]])
