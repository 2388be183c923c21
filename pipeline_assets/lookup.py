"""Looking up: is this text in the corpus? Texts in, the rows that hold them or share a band with them out.

    signatures, decisions and rows, by unit ─▶ identical text by doc_id, kept near-copies by band ─▶ exact Jaccard

The stored band keys are searched where they lie; an index (datasketch's MinHashLSH, in memory or in Redis) finds the
same documents. Promise: signatures of other parameters than the recipe's are refused, and so is damage: every file that
an answer rests on is held once against its SHA-256 before. Cost: a unit at a time, hashing 200 bytes a document (its
id, band keys, their rows; with an index 32), and where something was found its signatures, decisions and texts too.
"""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pipeline_assets.answers import LIKELY, Answer, Match, decided
from pipeline_assets.clusters import slice_name
from pipeline_assets.references import Pipeline
from pipeline_assets.signatures import (
    DOC_IDS,
    KEY_ROWS,
    KEYS,
    SIGNATURES,
    minhash_params,
    signature_family,
    split_units,
)
from pipeline_assets.source import ROWS_NAME
from pipeline_assets.stripes import UNITS_NAME, Stage, units_in
from pipeline_assets.transforms.jaccard import jaccard_of_pairs
from pipeline_assets.transforms.lookup import (
    IN_MEMORY,
    beginning,
    candidates_of,
    empty_index,
    insert_documents,
    lost_buckets,
    rows_of_doc_ids,
    rows_sharing_a_band,
)
from pipeline_assets.transforms.lsh import band_keys, collision_probability, shared_bands
from pipeline_assets.transforms.minhash import MinHashParams, is_wordless, sign_documents
from pipeline_assets.transforms.rows import doc_id_matrix, text_doc_ids
from resources.artifact_store import ArtifactRef
from resources.redis_index import (
    INDEX_PREFIX,
    IndexDamaged,
    RedisAddress,
    WholeIndex,
    build_once,
    storage_config,
    talking_to,
)
from resources.tables import read_array, read_rows, read_table
from training_io.errors import FormatError, SourceError, StateMismatch
from training_io.hashing import DOC_ID_BYTES, identity_of

if TYPE_CHECKING:
    from datasketch import MinHashLSH

INDEX_VERSION = 2  # of what is put into Redis; part of its base name
BATCH_DOCUMENTS = 1_000
BUFFERED_COMMANDS = 2_000  # in each of the library's 15 buffers
ROW_COLUMNS = ("text", "pool", "file", "row_group", "row", "url", "dump")
DECISION_COLUMNS = ("kept", "reason", "kept_doc_id", "references")
INPUTS = {"rows": "raw_row_groups", "references": "reference_sets", "signatures": "minhash_signatures"}
DOC_ID = re.compile(rf"[0-9a-f]{{{2 * DOC_ID_BYTES}}}")


@dataclass(frozen=True, kw_only=True)
class Lookup:
    """What is looked into: an artifact of clusters, and the signed and raw units that it was made from, in order."""

    stage: Stage
    params: MinHashParams
    clusters: ArtifactRef
    signed: tuple[ArtifactRef, ...]
    rows: tuple[ArtifactRef, ...]
    note: str  # why this is not the newest corpus; empty where it is
    _verified: dict[tuple[str, str], Path] = field(default_factory=dict, repr=False, compare=False)

    @property
    def identity(self) -> str:
        """What an index of the kept documents depends on."""
        digests = [self.clusters.digest, [unit.digest for unit in self.signed]]
        return identity_of([INDEX_VERSION, digests, asdict(self.params)])

    def verified(self, ref: ArtifactRef, name: str) -> Path:
        """A file of an artifact, held against its SHA-256 when it is first asked for."""
        if (ref.identity, name) not in self._verified:
            self._verified[ref.identity, name] = self.stage.store.verified(ref, name)
        return self._verified[ref.identity, name]

    def array(self, number: int, name: str) -> npt.NDArray[Any]:
        """An array of one signed unit, its bytes verified."""
        return read_array(self.verified(self.signed[number], name))

    def decisions(self, number: int, columns: Sequence[str] = DECISION_COLUMNS) -> pa.Table:
        """What was decided about each row of one unit, verified."""
        return read_table(self.verified(self.clusters, slice_name(self.rows[number].unit)), columns)

    def texts(self, number: int, rows: npt.NDArray[np.int64], columns: Sequence[str] = ROW_COLUMNS) -> pa.Table:
        """Some rows of one raw unit, verified."""
        return read_rows(self.verified(self.rows[number], ROWS_NAME), rows, columns)


def open_lookup(pipeline: Pipeline) -> Lookup:
    """The recipe's last clusters that may be read, and the very rows and signatures that they were made from.

    Whatever a later run has read, or made and not finished, changes no answer until it has clusters of its own.
    StateMismatch when there are no clusters, their rows or signatures are gone, or were signed with other parameters.
    """
    stage = Stage(pipeline=pipeline, say=_ignore, warn=_ignore, observe=_ignore)
    clusters, held_back = _readable_clusters(pipeline)
    inputs = stage.open(clusters)[1].inputs
    params = minhash_params(stage.recipe)
    signed, _ = split_units(_verified_units(stage, _made_from(pipeline, inputs, "signatures")))
    rows = _verified_units(stage, _made_from(pipeline, inputs, "rows"))
    assert [unit.unit for unit in signed] == [unit.unit for unit in rows]
    for unit in signed:
        folder, manifest = stage.open(unit)
        refuse_other_parameters(manifest.parameters, params, str(folder))
    notes = [note for note in (held_back, _note_of_newer(pipeline, inputs, clusters)) if note]
    return Lookup(
        stage=stage,
        params=params,
        clusters=clusters,
        signed=tuple(signed),
        rows=tuple(rows),
        note=" ".join(notes),
    )


def _readable_clusters(pipeline: Pipeline) -> tuple[ArtifactRef, str]:
    """The latest clusters, else the last before them that are whole and not held back, and why; else FormatError."""
    latest = pipeline.resolve("lsh_clusters")
    refused: list[FormatError] = []
    for clusters in itertools.chain([latest], pipeline.recorded("lsh_clusters")):
        try:
            pipeline.store.open(clusters)
        except FormatError as error:
            refused.append(error)
            continue
        return clusters, f"{refused[0]} Until then earlier clusters answer." if refused else ""
    raise refused[0]


def _made_from(pipeline: Pipeline, inputs: Mapping[str, str], name: str) -> ArtifactRef:
    asset, digest = INPUTS[name], inputs[name]
    for ref in pipeline.recorded(asset):
        if ref.digest == digest:
            return ref
    raise StateMismatch(
        f"lsh_clusters: expected the {asset} {digest[:12]} that they were made from, found no record of them in"
        f" {pipeline.store.root}. Materialize everything up to lsh_clusters in one run."
    )


def _note_of_newer(pipeline: Pipeline, inputs: Mapping[str, str], clusters: ArtifactRef) -> str:
    newer = [asset for name, asset in INPUTS.items() if pipeline.resolve(asset).digest != inputs[name]]
    if not newer:
        return ""
    return (
        f"{', '.join(newer)} changed after lsh_clusters {clusters.digest[:12]} were made; these answer."
        " Materialize lsh_clusters to look into what is newer."
    )


def _verified_units(stage: Stage, ref: ArtifactRef) -> list[ArtifactRef]:
    stage.store.verified(ref, UNITS_NAME)
    return units_in(stage, ref)


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


def redis_index(lookup: Lookup, address: RedisAddress) -> tuple["MinHashLSH", WholeIndex]:
    """The same index in Redis, built by whoever first needs it for these clusters; its keys are the doc_ids' hex bytes.

    SourceError when Redis cannot be used.
    """
    basename = INDEX_PREFIX + lookup.identity[:32].encode()
    storage = storage_config(address, basename)

    def build(still_here: Any) -> None:
        index = empty_index(lookup.params, storage)
        with index.insertion_session(buffer_size=BUFFERED_COMMANDS) as session:
            for doc_ids, signatures in _kept_batches(lookup):
                insert_documents(session, doc_ids, signatures, lookup.params, str.encode)
                still_here()

    whole = build_once(address, basename, lookup.params.num_bands, build)
    with talking_to(address):
        return empty_index(lookup.params, storage), whole


def _kept_batches(lookup: Lookup) -> Iterator[tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint32]]]:
    """doc_ids and signatures of the kept documents, a bounded number at a time."""
    for number in range(len(lookup.signed)):
        doc_ids, signatures = lookup.array(number, DOC_IDS), lookup.array(number, SIGNATURES)
        kept = np.flatnonzero(lookup.decisions(number).column("kept"))
        for start in range(0, len(kept), BATCH_DOCUMENTS):
            rows = kept[start : start + BATCH_DOCUMENTS]
            yield doc_ids[rows], signatures[rows]


def look_up(pipeline: Pipeline, texts: Sequence[str], address: RedisAddress | None = None) -> list[Answer]:
    """Find texts in the latest corpus of the recipe, through the index in Redis where an address is given."""
    lookup = open_lookup(pipeline)
    if address is None:
        return find_texts(lookup, texts)
    index, whole = redis_index(lookup, address)
    with whole.reading():
        return find_texts(lookup, texts, index)


def find_texts(lookup: Lookup, texts: Sequence[str], index: "MinHashLSH | None" = None) -> list[Answer]:
    """Each text's identical rows and kept near-copies, best first, by the stored band keys or an index of them.

    SourceError for a text that is not valid Unicode, StateMismatch for an index of other bands, IndexDamaged for one
    that lost or changed what it says of these texts.
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
    if asked.candidates is not None:
        _refuse_other_documents(*asked.candidates, matches)
    num_documents = sum(unit.counts["documents"] for unit in lookup.rows)
    return [
        Answer(
            doc_id=asked.doc_ids[query].tobytes().hex(),
            is_wordless=bool(asked.is_wordless[query]),
            num_documents=num_documents,
            chance=float(collision_probability(LIKELY, params.num_bands, params.rows_per_band)),
            note=lookup.note,
            matches=tuple(sorted(found, key=_rank)),
        )
        for query, found in enumerate(matches)
    ]


def _refuse_other_documents(
    queries: npt.NDArray[np.int64], doc_ids: npt.NDArray[np.uint8], matches: Sequence[Sequence[Match]]
) -> None:
    kept = {(query, match.doc_id) for query, found in enumerate(matches) for match in found if match.kept}
    for query, doc_id in zip(queries.tolist(), doc_ids, strict=True):
        if (query, doc_id.tobytes().hex()) not in kept:
            raise IndexDamaged(
                f"expected kept documents that share a band with the text, found another one, {doc_id.tobytes().hex()}."
            )


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
    return _Asked(
        texts=array,
        doc_ids=doc_id_matrix(text_doc_ids(array)),
        signatures=signatures,
        keys=band_keys(signatures, params),
        is_wordless=is_wordless(signatures),
        candidates=None if index is None else _candidates(index, signatures, params),
    )


def _candidates(
    index: "MinHashLSH", signatures: npt.NDArray[np.uint32], params: MinHashParams
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
    """What an index holds in the texts' buckets: queries int64[c], doc_ids uint8[c, 32]."""
    found: list[tuple[int, str]] = []
    for query, signature in enumerate(signatures):
        found += [(query, key) for key in candidates_of(index, signature, params)]
        if lost := lost_buckets(index, signature, params):
            raise IndexDamaged(f"expected every bucket that it lists, found none under the key {lost[0]!r}.")
    for _, key in found:
        if not DOC_ID.fullmatch(key):
            raise IndexDamaged(
                f"expected doc_ids of {2 * DOC_ID_BYTES} hex digits in buckets, found {beginning(key)!r}."
            )
    joined = b"".join(bytes.fromhex(key) for _, key in found)
    return (
        np.array([query for query, _ in found], dtype=np.int64),
        np.frombuffer(joined, dtype=np.uint8).reshape(-1, DOC_ID_BYTES),
    )


def _text_array(texts: Sequence[str]) -> pa.Array:
    try:
        return pa.array(texts, pa.large_string())
    except UnicodeEncodeError as error:
        raise SourceError(f"text to look up: expected valid Unicode, found {error}. Give it as UTF-8.") from error


def _matches_in_unit(lookup: Lookup, number: int, asked: _Asked) -> Iterator[tuple[int, Match]]:
    """The unit's rows that answer a query, with the query's number: those of its text, and kept ones near it."""
    unit_ids = lookup.array(number, DOC_IDS)
    identical, near = rows_of_doc_ids(unit_ids, asked.doc_ids), _near_rows(lookup, number, unit_ids, asked)
    if not len(identical) + len(near):
        return
    decisions, signatures = lookup.decisions(number), lookup.array(number, SIGNATURES)
    near = near[np.asarray(decisions.column("kept"), dtype=np.bool_)[near[:, 1]]]
    near = near[_bands_shared(asked, signatures, near, lookup.params) > 0]  # a 64-bit key may stand for two bands
    pairs = np.unique(np.concatenate([identical, near]), axis=0)
    if not len(pairs):
        return
    queries, rows = pairs.T
    found = lookup.texts(number, rows)
    texts = pa.chunked_array([asked.texts, *found.column("text").chunks])
    places = np.column_stack([queries, len(asked.texts) + np.arange(len(pairs))])
    columns = {
        "is_identical": (asked.doc_ids[queries] == unit_ids[rows]).all(axis=1),
        "jaccard": jaccard_of_pairs(texts, places, lookup.params.ngram),
        "estimated_jaccard": (asked.signatures[queries] == signatures[rows]).mean(axis=1),
        "shared_bands": _bands_shared(asked, signatures, pairs, lookup.params),
        "doc_id": [doc_id.tobytes().hex() for doc_id in unit_ids[rows]],
        **decided(decisions.take(pa.array(rows)), lookup.stage.recipe),
        **{name: found.column(name) for name in ROW_COLUMNS if name != "text"},
        "excerpt": [beginning(text) for text in found.column("text").to_pylist()],
    }
    for query, row in zip(queries.tolist(), pa.table(columns).to_pylist(), strict=True):
        yield query, Match(**row)


def _bands_shared(
    asked: _Asked, signatures: npt.NDArray[np.uint32], pairs: npt.NDArray[np.int64], params: MinHashParams
) -> npt.NDArray[np.int64]:
    queries, rows = pairs.T
    return np.where(asked.is_wordless[queries], 0, shared_bands(asked.signatures[queries], signatures[rows], params))


def _near_rows(lookup: Lookup, number: int, unit_ids: npt.NDArray[np.uint8], asked: _Asked) -> npt.NDArray[np.int64]:
    """Rows of the unit that share a band with a query, kept or not: int64[m, 2] of (query, row)."""
    if asked.candidates is None:
        return rows_sharing_a_band(lookup.array(number, KEYS), lookup.array(number, KEY_ROWS), asked.keys)
    queries, doc_ids = asked.candidates
    found = rows_of_doc_ids(unit_ids, doc_ids)
    return np.column_stack([queries[found[:, 0]], found[:, 1]])
