"""signatures: raw rows and reference texts -> MinHash signatures and sorted band keys, by stripe.

Promise: equal shingle sets give equal rows, on any machine, in any grouping. A unit's band keys are sorted by value,
so any number of buckets by their top bits is a contiguous range of them. Sealing also measures how often this very
hash family finds near-copies.
"""

from pathlib import Path
from typing import Any

import dagster as dg
import numpy as np
import pyarrow.compute as pc

from pipeline_assets.ops import graph_spec, mapped_op, planning_op, sealing_op
from pipeline_assets.recipe import Recipe
from pipeline_assets.report import asset_metadata
from pipeline_assets.scurve import curve_metadata, measure_curve
from pipeline_assets.source import ROWS_NAME
from pipeline_assets.stripes import Sealed, Stage, Task, build_each, seal_units, tasks_of, units_in
from pipeline_assets.transforms.lsh import band_keys
from pipeline_assets.transforms.minhash import SCHEME, MinHashParams, is_wordless, sign_documents
from pipeline_assets.transforms.rows import doc_id_matrix
from pipeline_assets.transforms.words import UNICODE_VERSION
from resources.artifact_store import ArtifactRef
from resources.execution import threads_of_a_step
from resources.tables import read_table, write_array
from training_io.errors import StateMismatch
from training_io.hashing import identity_of

SIGNATURES_VERSION = 2
SIGNATURES, DOC_IDS, KEYS, KEY_ROWS = "signatures.npy", "doc_id.npy", "band_keys.npy", "band_rows.npy"
TEXT_BYTES = "text_bytes.npy"
REFERENCE_PREFIX = "references."  # no pool can be called so: a pool's name has no dot


def minhash_params(recipe: Recipe) -> MinHashParams:
    """The recipe's signature parameters; unequal ones refuse to meet."""
    dedup = recipe.dedup
    return MinHashParams(
        num_perm=dedup.num_bands * dedup.rows_per_band,
        num_bands=dedup.num_bands,
        rows_per_band=dedup.rows_per_band,
        ngram=dedup.ngram,
        seed=dedup.seed,
    )


def plan_signatures(stage: Stage, raw_row_groups: ArtifactRef, reference_sets: ArtifactRef) -> list[Task]:
    """One step for a group of raw units, and one for all reference sets."""
    tasks = tasks_of(
        [(unit.unit, unit, ROWS_NAME) for unit in units_in(stage, raw_row_groups)],
        "units",
        stage.recipe.reading.stripes_read,
    )
    sets = [
        (f"{REFERENCE_PREFIX}{reference.name}", reference_sets, f"{reference.name}.parquet")
        for reference in stage.recipe.references
    ]
    return tasks + ([Task(key="references", units=tuple(sets))] if sets else [])


def build_signatures(stage: Stage, task: Task) -> list[ArtifactRef]:
    """Sign every text of the task's units."""
    return build_each(stage, task, lambda unit: _sign_unit(stage, *unit))


def _sign_unit(stage: Stage, name: str, ref: ArtifactRef, table: str) -> ArtifactRef:
    folder, manifest = stage.store.open(ref)
    params = minhash_params(stage.recipe)

    def write(target: Path) -> dict[str, Any]:
        rows = read_table(folder / table, ["doc_id", "text"])
        signatures, stats = sign_documents(rows.column("text"), params, threads_of_a_step())
        signed = np.flatnonzero(~is_wordless(signatures))
        keys = band_keys(signatures[signed], params)
        order = np.argsort(keys, axis=None, kind="stable")
        write_array(signatures, target / SIGNATURES)
        write_array(doc_id_matrix(rows.column("doc_id")), target / DOC_IDS)
        write_array(np.asarray(pc.binary_length(rows.column("text")), np.int64), target / TEXT_BYTES)
        write_array(keys.ravel()[order], target / KEYS)
        write_array(np.repeat(signed, params.num_bands)[order].astype(np.uint32), target / KEY_ROWS)
        return {
            "documents": stats.num_documents,
            "text_bytes": stats.num_bytes,
            "words": stats.num_words,
            "shingles": stats.num_shingles,
            "wordless_documents": stats.num_wordless,
        }

    return stage.materialize(
        asset="minhash_signatures",
        unit=name,
        inputs={"rows": manifest.files[table]["sha256"]},
        parameters=signature_family(params),
        version=SIGNATURES_VERSION,
        write=write,
    )


def signature_family(params: MinHashParams) -> dict[str, Any]:
    """What identifies a hash family: only signatures of one family may be compared."""
    return {
        "num_perm": params.num_perm,
        "num_bands": params.num_bands,
        "rows_per_band": params.rows_per_band,
        "ngram": params.ngram,
        "seed": params.seed,
        "scheme": SCHEME,
        "unicode": UNICODE_VERSION,
    }


def split_units(units: list[ArtifactRef]) -> tuple[list[ArtifactRef], list[ArtifactRef]]:
    """Signature units of the corpus, and those of reference sets."""
    corpus = [unit for unit in units if not unit.unit.startswith(REFERENCE_PREFIX)]
    return corpus, [unit for unit in units if unit.unit.startswith(REFERENCE_PREFIX)]


def seal_signatures(stage: Stage, parts: list[ArtifactRef], raw_row_groups: ArtifactRef) -> Sealed:
    """Seal the signed units as one asset, and measure how often this family finds near-copies."""
    corpus = [part for part in parts if not part.unit.startswith(REFERENCE_PREFIX)]
    names = ("documents", "text_bytes", "words", "shingles", "wordless_documents")
    counts = {name: sum(part.counts[name] for part in corpus) for name in names}
    counts["reference_texts"] = sum(part.counts["documents"] for part in parts) - counts["documents"]
    parameters = {identity_of(dict(stage.open(part)[1].parameters)) for part in parts}
    if len(parameters) != 1:
        raise StateMismatch(
            f"minhash_signatures: expected units signed with one set of parameters, found {len(parameters)}."
            " The recipe changed while they were signed; materialize minhash_signatures again."
        )
    params = minhash_params(stage.recipe)
    doc_ids = [stage.array(part, DOC_IDS) for part in corpus]
    curve = measure_curve(stage, params, signature_family(params), doc_ids, raw_row_groups)
    # Listed as a plan: held back and lifted with the asset, read by nobody who reads its units. Its picture's bytes are
    # no part of the signatures' identity.
    plans = [{"unit": curve.unit, "identity": curve.identity}]
    ref = seal_units(stage, "minhash_signatures", parts, counts, SIGNATURES_VERSION, plans=plans)
    metadata = asset_metadata(stage, ref, [*parts, curve]) | {
        "bytes_a_signature": 4 * params.num_perm,
        **curve_metadata(stage, curve),
    }
    return Sealed(ref=ref, metadata=metadata)


plan_signatures_op = planning_op("minhash_signatures", plan_signatures)
build_signatures_op = mapped_op("minhash_signatures", build_signatures)
seal_signatures_op = sealing_op("minhash_signatures", seal_signatures)


@dg.graph_asset(
    **graph_spec(
        "minhash_signatures",
        SIGNATURES_VERSION,
        {"numpy", "numba"},
        "112 MinHash values a document (datasketch's affine32 scheme) over 5-word shingles, and its 14 band keys. "
        "Promise: equal shingle sets give equal rows, on any machine, in any grouping.",
    )
)
def minhash_signatures(raw_row_groups, reference_sets):  # type: ignore[no-untyped-def]
    tasks = plan_signatures_op(raw_row_groups=raw_row_groups, reference_sets=reference_sets)
    return seal_signatures_op(parts=tasks.map(build_signatures_op).collect(), raw_row_groups=raw_row_groups)
