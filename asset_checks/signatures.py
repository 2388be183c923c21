"""Promise: near-copies are found as often as the bands say, and the signatures are those of the texts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isclose, sqrt
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from asset_checks.verdicts import MAX_EXAMPLES, Verdict, law
from pipeline_assets.scurve import BINS_NAME, NUM_BINS, PAIRS_NAME, curve_of, curve_row
from pipeline_assets.signatures import SIGNATURES, TEXT_BYTES, minhash_params
from pipeline_assets.source import ROWS_NAME
from pipeline_assets.stripes import Stage, units_in
from pipeline_assets.transforms.minhash import MinHashParams
from pipeline_assets.transforms.scurve import FEW_TEXTS, MAX_ABS_Z, MAX_ERROR_DEVIATION
from pipeline_assets.transforms.words import words
from resources.artifact_store import ArtifactRef
from resources.tables import read_json, read_rows, read_table

SIGNED_AGAIN = 64  # rows, over all units; one of each at least
MAX_SIGNED_BYTES = 20_000  # plain Python takes microseconds a character

BASE, COUNT = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93
MASK_32, MASK_64 = (1 << 32) - 1, (1 << 64) - 1


def s_curve_matches_formula(stage: Stage, minhash_signatures: ArtifactRef, raw_row_groups: ArtifactRef) -> Verdict:
    """Planted pairs are flagged as often as 1 - (1 - s^rows)^bands says, and signatures err as much as they should.

    Everything that was stored about the planted pairs is counted again from the pairs themselves.
    """
    params = minhash_params(stage.recipe)
    folder, manifest = stage.open(curve_of(stage, minhash_signatures))
    expected = f"share flagged = 1 - (1 - s^{params.rows_per_band})^{params.num_bands} at every similarity s"
    recount = _Recount(read_table(folder / PAIRS_NAME), params)
    if not recount.num_pairs:
        return Verdict(expected=expected, found="no text has enough words: nothing can be measured", num_violations=1)
    bins, counts = recount.bins(), recount.counts()
    violations = [
        *_other_rows(read_json(folder / BINS_NAME), bins),
        *_other_numbers("the measurement", manifest.counts, counts),
        *_signed_differently(stage, minhash_signatures, raw_row_groups, params),
        *recount.deviations(),
    ]
    outside = sum(not one["low"] <= one["predicted"] <= one["high"] for one in bins)
    return Verdict(
        expected=f"{expected}, and stored signatures of that family",
        found=f"{len(violations):,} violations; {outside} of {len(bins)} 95 % intervals miss the curve, the farthest by"
        f" {counts['max_abs_z']:.1f} standard errors; signatures err by {counts['signature_error']:.4f}, expected"
        f" {counts['expected_error']:.4f}; {recount.num_pairs:,} planted pairs",
        num_violations=len(violations),
        examples=[{"violation": violation} for violation in violations[:MAX_EXAMPLES]] or [*map(curve_row, bins)],
        numbers={
            "max_abs_z": counts["max_abs_z"],
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
                }
            )
        return found

    def counts(self) -> dict[str, float]:
        similarity = self.column("similarity")
        misses = self.column("num_equal") / self.params.num_perm - similarity
        variance = (similarity - similarity**2) / self.params.num_perm  # of a mean of so many coins
        return {
            "texts": len(set(self.column("original").tolist())),
            "pairs": self.num_pairs,
            "flagged": int(self.column("flagged").sum()),
            "max_abs_z": max(abs(one["z"]) for one in self.bins()),
            "signature_error": sqrt(np.square(misses).mean()),
            "expected_error": sqrt(variance.mean()),
            "mean_bias": float(misses.mean()),
        }

    def deviations(self) -> list[str]:
        """How the curve or the errors differ from those of independent hash functions, beyond what chance explains."""
        counts = self.counts()
        slack = sqrt(max(1.0, FEW_TEXTS / counts["texts"]))
        violations = [
            f"similarity {one['similarity']:.3f}: {one['num_flagged']:,} of {one['num_pairs']:,} pairs flagged,"
            f" expected {one['predicted']:.2%}, off by {one['z']:+.1f} standard errors"
            for one in self.bins()
            if abs(one["z"]) > slack * MAX_ABS_Z
        ]
        error, due = counts["signature_error"], counts["expected_error"]
        if abs(error - due) > slack * MAX_ERROR_DEVIATION * due:
            violations.append(f"signatures miss the similarity by {error:.4f}, expected {due:.4f}")
        return violations


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


def _signed_differently(
    stage: Stage, minhash_signatures: ArtifactRef, raw_row_groups: ArtifactRef, params: MinHashParams
) -> list[str]:
    """Some rows of every unit whose stored signature is not what plain Python makes of the text."""
    stored = {unit.unit: unit for unit in units_in(stage, minhash_signatures)}
    units = units_in(stage, raw_row_groups)
    rows_per_unit = max(1, SIGNED_AGAIN // len(units))
    violations = []
    for unit in units:
        short = np.flatnonzero(stage.array(stored[unit.unit], TEXT_BYTES) <= MAX_SIGNED_BYTES)
        doc_ids = stage.table(unit, ROWS_NAME, ["doc_id"]).column("doc_id").to_pylist()
        rows = sorted(short.tolist(), key=doc_ids.__getitem__)[:rows_per_unit]
        table = read_rows(stage.folder(unit) / ROWS_NAME, np.array(rows, np.int64), ["text"])
        signatures = stage.array(stored[unit.unit], SIGNATURES)
        violations += [
            f"{unit.unit}: the stored signature of {doc_ids[row].hex()[:16]} is another"
            for row, text in zip(rows, table.column("text").to_pylist(), strict=True)
            if (signatures[row] != plain_signature(text, params)).any()
        ]
    return violations


def plain_signature(text: str, params: MinHashParams) -> npt.NDArray[np.uint32]:
    """MinHash values of a text from the formulas of the shingles and of affine32, with Python's integers."""
    hashes = [_word_hash(word) for word in words(text)]
    size = min(params.ngram, len(hashes))
    shingles = {
        _mixed(
            sum(one * BASE ** (size - 1 - place) for place, one in enumerate(hashes[start : start + size]))
            + size * COUNT
        )
        >> 32
        for start in range(len(hashes) - size + 1)
        if size
    }
    drawn = np.random.RandomState(params.seed)
    multipliers = drawn.randint(0, 1 << 31, params.num_perm, dtype=np.uint32).astype(np.uint64) * 2 + 1
    addends = drawn.randint(0, 1 << 32, params.num_perm, dtype=np.uint32).astype(np.uint64)
    values = np.full(params.num_perm, MASK_32, np.uint64)
    for shingle in shingles:
        values = np.minimum(values, (multipliers * np.uint64(_mixed_32(shingle)) + addends) & np.uint64(MASK_32))
    return values.astype(np.uint32)


def _word_hash(word: str) -> int:
    value = 0xCBF29CE484222325
    for character in word:
        value = (value ^ ord(character)) * 0x100000001B3 & MASK_64
    return _mixed(value)


def _mixed(value: int) -> int:
    value &= MASK_64
    value = (value ^ value >> 33) * 0xFF51AFD7ED558CCD & MASK_64
    value = (value ^ value >> 33) * 0xC4CEB9FE1A85EC53 & MASK_64
    return value ^ value >> 33


def _mixed_32(value: int) -> int:
    value = (value ^ value >> 16) * 0x85EBCA6B & MASK_32
    value = (value ^ value >> 13) * 0xC2B2AE35 & MASK_32
    return value ^ value >> 16


CHECKS = [
    law(
        s_curve_matches_formula,
        blocking=False,
        description="Warns when near-duplicates are found more or less often than the bands promise: the hash family "
        "or the parameters are wrong, and removal cannot be trusted. Compare the table with the formula.",
    ),
]
