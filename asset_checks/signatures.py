"""Promise: near-copies are found as often as the bands say, and signatures and band keys are those of the texts."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isclose, sqrt
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from asset_checks.similarity import sampling_keys, shingle_hashes
from asset_checks.verdicts import MAX_EXAMPLES, Verdict, law, verdict_of
from pipeline_assets.scurve import BINS_NAME, NUM_BINS, PAIRS_NAME, curve_of, curve_row
from pipeline_assets.signatures import (
    DOC_IDS,
    KEY_ROWS,
    KEYS,
    REFERENCE_PREFIX,
    SIGNATURES,
    TEXT_BYTES,
    minhash_params,
)
from pipeline_assets.source import ROWS_NAME
from pipeline_assets.stripes import Stage, number_in_words, units_in
from pipeline_assets.transforms.minhash import MinHashParams
from pipeline_assets.transforms.rows import doc_id_matrix
from pipeline_assets.transforms.scurve import MAX_ERROR_DEVIATION, MAX_ERROR_Z, MAX_FALSE_ALARMS
from resources.artifact_store import ArtifactRef
from resources.tables import read_json, read_table
from training_io.hashing import mix64

SIGNED_AGAIN = 64  # rows, over all units; one of each at least
MAX_SIGNED_BYTES = 20_000  # Python takes a tenth of a microsecond a character

MASK_32 = np.uint64((1 << 32) - 1)


def s_curve_matches_formula(stage: Stage, minhash_signatures: ArtifactRef) -> Verdict:
    """Planted pairs are flagged as often as 1 - (1 - s^rows)^bands says, and signatures err as much as they should.

    Everything that was stored about the planted pairs is counted again from the pairs themselves.
    """
    params = minhash_params(stage.recipe)
    folder, manifest = stage.open(curve_of(stage, minhash_signatures))
    expected = f"share flagged = 1 - (1 - s^{params.rows_per_band})^{params.num_bands} at every similarity s"
    recount = _Recount(read_table(folder / PAIRS_NAME), params, manifest.parameters["copies_per_text"])
    if not recount.num_pairs:
        return Verdict(expected=expected, found="no text has enough words: nothing can be measured", num_violations=1)
    bins, counts = recount.bins(), recount.counts()
    violations = [
        *_other_rows(read_json(folder / BINS_NAME), bins),
        *_other_numbers("the measurement", manifest.counts, counts),
        *recount.deviations(),
    ]
    outside = sum(not one["low"] <= one["predicted"] <= one["high"] for one in bins)
    return Verdict(
        expected=f"{expected}; of sound families, one of {1 / MAX_FALSE_ALARMS:,.0f} at most is taken for another",
        found=f"{number_in_words(len(violations), 'violation')}; {outside} of {len(bins)} 95 % intervals miss the"
        f" curve, the farthest by {counts['max_abs_z']:.1f} standard errors (chance {counts['chance']:.1g} at most);"
        f" signatures err by {counts['signature_error']:.4f}, expected {counts['expected_error']:.4f};"
        f" {recount.num_pairs:,} planted pairs",
        num_violations=len(violations),
        examples=[{"violation": violation} for violation in violations[:MAX_EXAMPLES]] or [*map(curve_row, bins)],
        numbers={
            "max_abs_z": counts["max_abs_z"],
            "chance": counts["chance"],
            "signature_error": counts["signature_error"],
            "expected_error": counts["expected_error"],
            "intervals_that_miss": outside,
        },
    )


@dataclass(frozen=True)
class _Recount:
    """What follows from the stored pairs, by formulas of the check's own."""

    pairs: pa.Table
    params: MinHashParams
    copies_per_text: int

    @property
    def num_pairs(self) -> int:
        return self.pairs.num_rows

    def column(self, name: str) -> npt.NDArray[Any]:
        return self.pairs.column(name).to_numpy()

    def chances(self) -> npt.NDArray[np.float64]:
        """That some band agrees: one minus the product, over the bands, of the chances that each one does not."""
        agrees = np.power(self.column("similarity"), self.params.rows_per_band)
        missed = np.ones(self.num_pairs)
        for _ in range(self.params.num_bands):
            missed *= 1 - agrees
        return 1 - missed

    def bins(self) -> list[dict[str, Any]]:
        edges = np.arange(NUM_BINS + 1) / NUM_BINS
        similarity, chances, flagged = self.column("similarity"), self.chances(), self.column("flagged")
        found = []
        for start, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            inside = (similarity >= start) & ((similarity < end) | (end == 1))
            if not (num_pairs := int(inside.sum())):
                continue
            num_flagged, due = int(flagged[inside].sum()), float(chances[inside].sum())
            variance = due - float(np.square(chances[inside]).sum())
            low, high = _interval(num_flagged, num_pairs)
            found.append(
                {
                    "start": start,
                    "end": end,
                    "similarity": float(similarity[inside].sum()) / num_pairs,
                    "num_pairs": num_pairs,
                    "num_flagged": num_flagged,
                    "predicted": due / num_pairs,
                    "low": low,
                    "high": high,
                    "z": (num_flagged - due) / sqrt(max(1.0, variance)),
                    "chance": _chance(num_flagged, num_pairs, due / num_pairs),
                }
            )
        return found

    def counts(self) -> dict[str, float]:
        similarity, bins, num_perm = self.column("similarity"), self.bins(), self.params.num_perm
        misses = self.column("num_equal") / num_perm - similarity
        variance = (similarity - similarity**2) / num_perm  # of a mean of so many coins
        fourth = variance * (1 + 3 * (num_perm - 2) * num_perm * variance) / num_perm**2  # its fourth central moment
        spread = sqrt((fourth - variance**2).sum())
        return {
            "texts": self.num_pairs // self.copies_per_text,
            "pairs": self.num_pairs,
            "flagged": int(self.column("flagged").sum()),
            "max_abs_z": max(abs(one["z"]) for one in bins),
            "chance": min(1.0, len(bins) * min(one["chance"] for one in bins)),
            "signature_error": sqrt(np.square(misses).mean()),
            "expected_error": sqrt(variance.mean()),
            "error_z": float((np.square(misses) - variance).sum()) / spread if spread else 0.0,
            "mean_bias": float(misses.mean()),
        }

    def deviations(self) -> list[str]:
        """How the curve or the errors differ from those of independent hash functions, beyond what chance explains."""
        bins, counts = self.bins(), self.counts()
        violations = [
            f"similarity {one['similarity']:.3f}: {one['num_flagged']:,} of {one['num_pairs']:,} pairs flagged,"
            f" expected {one['predicted']:.2%}, off by {one['z']:+.1f} standard errors"
            for one in bins
            if len(bins) * one["chance"] < MAX_FALSE_ALARMS
        ]
        error, due = counts["signature_error"], counts["expected_error"]
        is_chance = 0 < abs(counts["error_z"]) <= MAX_ERROR_Z
        if abs(error - due) > MAX_ERROR_DEVIATION * due and not is_chance:
            violations.append(f"signatures miss the similarity by {error:.4f}, expected {due:.4f}")
        return violations


def _chance(num_hits: int, num_trials: int, expected: float) -> float:
    """Twice the tail of a binomial count from the hits outwards; 1 where they are the expected ones."""
    from scipy.special import bdtr, bdtrc  # half a second: not with the code location

    off = num_hits - num_trials * expected
    if abs(off) < 1:
        return 1.0
    tail = bdtr(num_hits, num_trials, expected) if off < 0 else bdtrc(num_hits - 1, num_trials, expected)
    return min(1.0, 2 * float(tail))


def _interval(num_hits: int, num_trials: int) -> tuple[float, float]:
    """Shares p that lie within 1.96 standard errors of the observed one: between the roots of a quadratic in p."""
    reach = NormalDist().inv_cdf(0.975) ** 2
    share = num_hits / num_trials
    a, half_b, c = num_trials + reach, num_trials * share + reach / 2, num_trials * share**2
    root = sqrt(max(0.0, half_b**2 - a * c))
    return max(0.0, (half_b - root) / a), min(1.0, (half_b + root) / a)


def _other_rows(stored: Sequence[Mapping[str, Any]], recounted: Sequence[Mapping[str, Any]]) -> list[str]:
    if len(stored) != len(recounted):
        return [f"the table: expected {len(recounted)} bins, found {len(stored)}"]
    return [
        violation
        for row, one in zip(stored, recounted, strict=True)
        for violation in _other_numbers(f"the bin from {one['start']:.2f}", row, one)
    ]


def _other_numbers(where: str, stored: Mapping[str, Any], recounted: Mapping[str, Any]) -> list[str]:
    violations = [f"{where} says {name}" for name in sorted(stored.keys() ^ recounted.keys())]
    return violations + [
        f"{where} says {name} = {stored[name]!r}, the pairs give {number!r}"
        for name, number in recounted.items()
        if name in stored and not isclose(stored[name], number, rel_tol=1e-9, abs_tol=1e-9)
    ]


def signatures_are_those_of_the_texts(
    stage: Stage, minhash_signatures: ArtifactRef, raw_row_groups: ArtifactRef, reference_sets: ArtifactRef
) -> Verdict:
    """Unit by unit, references too: doc_ids, lengths and counts are the texts', band keys those of the signatures.

    And some rows of every unit are signed again, in plain Python.
    """
    params = minhash_params(stage.recipe)
    tables = [(unit.unit, unit, ROWS_NAME) for unit in units_in(stage, raw_row_groups)]
    tables += [
        (f"{REFERENCE_PREFIX}{reference.name}", reference_sets, f"{reference.name}.parquet")
        for reference in stage.recipe.references
    ]
    signed = {unit.unit: unit for unit in units_in(stage, minhash_signatures)}
    violations = []
    if list(signed) != (wanted := [name for name, _, _ in tables]):
        violations.append(f"units: expected {', '.join(wanted)}, found {', '.join(signed)}")
    totals = dict.fromkeys(("documents", "text_bytes", "wordless_documents", "reference_texts"), 0)
    for name, ref, file in tables:
        if name not in signed:
            continue
        unit = _SignedUnit(stage, signed[name], stage.table(ref, file, ["doc_id", "text"]), params)
        violations += [f"{name}: {violation}" for violation in unit.violations(max(1, SIGNED_AGAIN // len(tables)))]
        if name.startswith(REFERENCE_PREFIX):
            totals["reference_texts"] += len(unit.doc_ids)
        else:
            totals = {key: number + unit.counts().get(key, 0) for key, number in totals.items()}
    violations += _other_numbers("the manifest", _some_of(stage.open(minhash_signatures)[1].counts, totals), totals)
    texts = totals["documents"] + totals["reference_texts"]
    return verdict_of("signatures and band keys of these very texts", violations, f"{texts:,} texts")


def _some_of(counts: Mapping[str, Any], names: Mapping[str, Any]) -> dict[str, Any]:
    return {name: counts[name] for name in names}


@dataclass(frozen=True)
class _SignedUnit:
    """What a unit holds, beside the texts that were signed."""

    stage: Stage
    unit: ArtifactRef
    rows: pa.Table
    params: MinHashParams

    def array(self, name: str) -> npt.NDArray[Any]:
        return self.stage.array(self.unit, name)

    @cached_property
    def doc_ids(self) -> list[bytes]:
        return list(self.rows.column("doc_id").to_pylist())

    @cached_property
    def text_bytes(self) -> list[int]:
        return [len(text.encode()) for text in self.rows.column("text").to_pylist()]

    @cached_property
    def is_wordless(self) -> npt.NDArray[np.bool_]:
        return np.asarray((self.array(SIGNATURES) == MASK_32).all(axis=1))

    def counts(self) -> dict[str, int]:
        return {
            "documents": len(self.doc_ids),
            "text_bytes": sum(self.text_bytes),
            "wordless_documents": int(self.is_wordless.sum()),
        }

    def violations(self, num_signed: int) -> Iterator[str]:
        if not np.array_equal(self.array(DOC_IDS), doc_id_matrix(self.rows.column("doc_id"))):
            yield f"{DOC_IDS} holds other documents, or in another order"
        if self.array(TEXT_BYTES).tolist() != self.text_bytes:
            yield f"{TEXT_BYTES} holds other lengths than the texts have"
        yield from _other_numbers("the list of units", _some_of(self.unit.counts, self.counts()), self.counts())
        keys, rows = self._band_keys()
        if not (np.array_equal(self.array(KEYS), keys) and np.array_equal(self.array(KEY_ROWS), rows)):
            yield f"{KEYS} and {KEY_ROWS} are not those of the signatures, ascending"
        yield from self._signed_differently(num_signed)

    def _band_keys(self) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint32]]:
        """Each band's values folded into a key of its number, ascending by key and then by row; none without words."""
        signatures = self.array(SIGNATURES)
        rows = np.flatnonzero(~self.is_wordless)
        keys = []
        for band in range(self.params.num_bands):
            key = mix64(np.full(len(rows), band + 1, np.uint64))
            for column in range(band * self.params.rows_per_band, (band + 1) * self.params.rows_per_band):
                key = mix64(key ^ signatures[rows, column].astype(np.uint64))
            keys.append(np.maximum(key, np.uint64(1)))
        order = np.lexsort((np.tile(rows, len(keys)), np.concatenate(keys)))
        return np.concatenate(keys)[order], np.tile(rows, len(keys))[order].astype(np.uint32)

    def _signed_differently(self, num_signed: int) -> Iterator[str]:
        """Some rows whose stored signature is not what plain Python makes of the text."""
        keys = sampling_keys(self.doc_ids, self.stage.recipe.seed)
        short = [row for row, size in enumerate(self.text_bytes) if size <= MAX_SIGNED_BYTES]
        signatures = self.array(SIGNATURES)
        for row in sorted(short, key=keys.__getitem__)[:num_signed]:
            if (signatures[row] != plain_signature(self.rows.column("text")[row].as_py(), self.params)).any():
                yield f"the stored signature of {self.doc_ids[row].hex()[:16]} is another"


def plain_signature(text: str, params: MinHashParams) -> npt.NDArray[np.uint32]:
    """MinHash values of a text from the formulas of the shingles and of affine32, with numpy's integers."""
    drawn = np.random.RandomState(params.seed)
    multipliers = drawn.randint(0, 1 << 31, params.num_perm, dtype=np.uint32).astype(np.uint64) * 2 + 1
    addends = drawn.randint(0, 1 << 32, params.num_perm, dtype=np.uint32).astype(np.uint64)
    shingles = _mixed_32(shingle_hashes(text, params.ngram).astype(np.uint64))[:, None]
    return ((multipliers * shingles + addends) & MASK_32).min(axis=0, initial=MASK_32).astype(np.uint32)


def _mixed_32(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    values = (values ^ values >> np.uint64(16)) * np.uint64(0x85EBCA6B) & MASK_32
    values = (values ^ values >> np.uint64(13)) * np.uint64(0xC2B2AE35) & MASK_32
    return values ^ values >> np.uint64(16)


CHECKS = [
    law(
        s_curve_matches_formula,
        blocking=False,
        description="Warns when near-duplicates are found more or less often than the bands promise: the hash family "
        "or the parameters are wrong, and removal cannot be trusted. Compare the table with the formula.",
    ),
    law(
        signatures_are_those_of_the_texts,
        blocking=True,
        description="Fails when signatures or band keys are not those of the texts: near copies would be missed. Band "
        f"keys, doc_ids and lengths are all recounted, and {SIGNED_AGAIN} texts are signed again. Materialize "
        "minhash_signatures again.",
    ),
]
