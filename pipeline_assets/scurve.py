"""The measured S-curve of the signatures in use: drawn documents -> planted near-copies -> pairs, table and picture.

An artifact of its own, beside the signed units: made when they are sealed, kept by the identity of the raw rows and of
the hash family. What was seen of each pair is stored, so that a check can count everything again.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pipeline_assets.pictures import interval_picture
from pipeline_assets.report import files_metadata, pictures_metadata, shown_table
from pipeline_assets.source import ROWS_NAME
from pipeline_assets.stripes import Stage, units_in
from pipeline_assets.transforms.arrays import located
from pipeline_assets.transforms.lsh import collision_probability
from pipeline_assets.transforms.minhash import MinHashParams
from pipeline_assets.transforms.scurve import (
    MeasuredPairs,
    ScurveMeasurement,
    draw_order,
    measure_scurve,
    middle_words,
    plant_pairs,
)
from resources.artifact_store import ArtifactRef
from resources.tables import read_json, read_rows, write_json, write_table
from training_io.errors import StateMismatch
from training_io.hashing import derive_seed
from training_io.manifest import open_artifact

SCURVE_VERSION = 4
SCURVE = "scurve"
PAIRS_NAME, BINS_NAME, PICTURE_NAME = "pairs.parquet", "bins.json", "scurve.png"
NUM_TEXTS = 600
MAX_LOOKED_AT = 20 * NUM_TEXTS
FEWEST_READ = NUM_TEXTS // 4  # at once: each is a row group of a file
COPIES_PER_TEXT = 20
MIN_WORDS, MAX_WORDS = 20, 150  # a text of a few shingles has few similarities; longer ones cost more and say no more
MAX_REPLACED_SHARE = 0.12  # similarity falls to about a third: from nearly always flagged to nearly never
NUM_BINS = 20


def measure_curve(
    stage: Stage,
    params: MinHashParams,
    family: Mapping[str, Any],
    doc_ids: Sequence[npt.NDArray[np.uint8]],
    raw_row_groups: ArtifactRef,
) -> ArtifactRef:
    """The curve of a hash family, `family` being what identifies it; `doc_ids` are the raw units' in their order."""
    seed = derive_seed(stage.recipe.seed, "scurve")

    def write(folder: Path) -> dict[str, Any]:
        texts = _drawn_texts(stage, draw_order(np.concatenate(doc_ids), seed), units_in(stage, raw_row_groups))
        planted = plant_pairs(texts, copies_per_text=COPIES_PER_TEXT, max_replaced_share=MAX_REPLACED_SHARE, seed=seed)
        measured, curve = measure_scurve(planted.texts, planted.pairs, params, num_bins=NUM_BINS)
        return {"texts": len(texts), **write_curve(folder, measured, curve, params)}

    return stage.materialize(
        asset="minhash_signatures",
        unit=SCURVE,
        inputs={"rows": raw_row_groups.digest},
        parameters={
            **family,
            "texts": NUM_TEXTS,
            "copies_per_text": COPIES_PER_TEXT,
            "words": [MIN_WORDS, MAX_WORDS],
            "max_replaced_share": MAX_REPLACED_SHARE,
            "bins": NUM_BINS,
            "planting_seed": seed,
        },
        version=SCURVE_VERSION,
        write=write,
    )


def _drawn_texts(stage: Stage, order: npt.NDArray[np.int64], units: list[ArtifactRef]) -> list[str]:
    """The first texts of enough words, cut to so many, when documents are taken in `order`.

    Those of a template may be cut to equal texts: each is taken, since its pairs will have words of their own. In a
    corpus of short texts the search ends after some times as many documents as are wanted.
    """
    texts: list[str] = []
    left = order[:MAX_LOOKED_AT]
    while len(left) and len(texts) < NUM_TEXTS:
        num_read = max(NUM_TEXTS - len(texts), FEWEST_READ)
        for text in _texts_of(stage, units, left[:num_read]):
            found = middle_words(text, MAX_WORDS)
            if len(found) >= MIN_WORDS:
                texts.append(" ".join(found))
        left = left[num_read:]
    return texts[:NUM_TEXTS]


def _texts_of(stage: Stage, units: list[ArtifactRef], documents: npt.NDArray[np.int64]) -> Iterator[str]:
    """Texts of documents, which are numbered unit after unit, in the order given."""
    firsts = np.cumsum([0, *(unit.counts["documents"] for unit in units)])
    unit_of, row_of = located(firsts, documents)
    texts = np.empty(len(documents), object)
    for unit in np.unique(unit_of).tolist():
        table = read_rows(stage.folder(units[unit]) / ROWS_NAME, row_of[unit_of == unit], ["text"])
        texts[unit_of == unit] = table.column("text").to_pylist()
    return iter(texts.tolist())


def write_curve(
    folder: Path, measured: MeasuredPairs, curve: ScurveMeasurement, params: MinHashParams
) -> dict[str, Any]:
    """Write the pairs, the table of bins and the picture; returns the counts for the manifest."""
    pairs = {
        "similarity": pa.array(measured.similarity),
        "num_equal": pa.array(measured.num_equal, pa.int32()),
        "flagged": pa.array(measured.is_flagged),
    }
    write_table(pa.table(pairs), folder / PAIRS_NAME)
    write_json([asdict(one) for one in curve.bins], folder / BINS_NAME)
    (folder / PICTURE_NAME).write_bytes(_picture(curve, params))
    return {
        "pairs": curve.num_pairs,
        "flagged": curve.num_flagged,
        "max_abs_z": curve.max_abs_z,
        "chance": curve.chance,
        "signature_error": curve.signature_error,
        "expected_error": curve.expected_error,
        "error_z": curve.error_z,
        "mean_bias": curve.mean_bias,
    }


def _picture(curve: ScurveMeasurement, params: MinHashParams) -> bytes:
    similarities = np.linspace(0, 1, 201)
    formula = np.asarray(collision_probability(similarities, params.num_bands, params.rows_per_band))
    return interval_picture(
        f"{curve.num_pairs:,} planted near-copies, with 95 % intervals",
        "Jaccard similarity s",
        "share of pairs flagged",
        (f"1 - (1 - s^{params.rows_per_band})^{params.num_bands}", similarities.tolist(), formula.tolist()),
        (
            "measured",
            [one.similarity for one in curve.bins],
            [one.flagged for one in curve.bins],
            [(one.low, one.high) for one in curve.bins],
        ),
    )


def curve_of(stage: Stage, minhash_signatures: ArtifactRef) -> ArtifactRef:
    """The curve that was sealed with the signatures; its counts are in its manifest. StateMismatch where none was."""
    folder, manifest = stage.open(minhash_signatures)
    listed = manifest.inputs.get("plans", ())
    if len(listed) != 1:
        raise StateMismatch(
            f"{folder}: expected one measured curve sealed with the signatures, found {len(listed)}."
            " An earlier version sealed them; materialize minhash_signatures again."
        )
    ref = ArtifactRef(
        asset=minhash_signatures.asset,
        unit=listed[0]["unit"],
        identity=listed[0]["identity"],
        digest="",
        counts={},
        outcome="reused",
        seconds=0.0,
    )
    curve = open_artifact(stage.store.folder(ref), allow_quarantined=stage.is_judging)
    return replace(ref, digest=curve.digest)


def curve_metadata(stage: Stage, curve: ArtifactRef) -> dict[str, Any]:
    """Picture, table and numbers for the asset's page."""
    folder = stage.folder(curve)
    return {
        **pictures_metadata(folder, {"scurve": "share of planted near-copies flagged, over the formula's curve"}),
        **files_metadata(folder / PAIRS_NAME, folder / BINS_NAME),
        **shown_table("scurve_table", [curve_row(one) for one in read_json(folder / BINS_NAME)]),
        **{f"scurve_{name}": number for name, number in curve.counts.items()},
    }


def curve_row(one: Mapping[str, Any]) -> dict[str, float]:
    """A stored bin as a row for people."""
    return {
        "similarity": round(one["similarity"], 3),
        "pairs": one["num_pairs"],
        "flagged": round(one["num_flagged"] / one["num_pairs"], 4),
        "predicted": round(one["predicted"], 4),
        "low": round(one["low"], 4),
        "high": round(one["high"], 4),
    }
