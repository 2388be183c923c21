"""Splits: documents in their final order in, train / validation / test or unused with the reason out.

In this order: documents below the floor are unused; barred clusters never leave training; the policy assigns; token
budgets take whole documents in order until they are filled. The unit that a policy assigns is the assignment id (the
doc_id, or the cluster's smallest doc_id where duplicates stay), so no unit is ever in two splits. A fraction depends on
content and seed alone; a budget also on the order. Cost: a few vectorised passes, one sort where ids repeat.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from pipeline_assets.transforms.arrays import I64, U8, whole_rows
from training_io.errors import RecipeError
from training_io.hashing import DOC_ID_BYTES, derive_seed, keyed_hash

SPLITS = ("train", "validation", "test")
TRAIN, VALIDATION, TEST = range(3)
UNUSED = 255

REASONS = ("used", "below_min_tokens", "over_budget")
USED, BELOW_MIN_TOKENS, OVER_BUDGET = range(3)

NO_BUDGETS: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class SplitInputs:
    """Documents in their final order: assignment_ids uint8[n, 32], num_tokens int64[n] (EOS included), barred bool[n].

    Where ids repeat, the caller sees to it that all members of a barred cluster are barred.
    """

    assignment_ids: U8
    num_tokens: I64
    barred: npt.NDArray[np.bool_]

    def __post_init__(self) -> None:
        assert self.assignment_ids.shape == (len(self.num_tokens), DOC_ID_BYTES), self.assignment_ids.shape
        assert self.barred.shape == self.num_tokens.shape, self.barred.shape
        assert self.barred.dtype == np.bool_, self.barred.dtype


@dataclass(frozen=True, kw_only=True)
class FractionPolicy:
    """Validation is an interval of a keyed hash of the id, test the next one: expected shares, not exact ones."""

    seed: int
    validation_fraction: float
    test_fraction: float = 0.0

    def __post_init__(self) -> None:
        _check_fractions(self.validation_fraction, self.test_fraction)


@dataclass(frozen=True, kw_only=True)
class BudgetPolicy:
    """The first units in order, barred ones skipped, until validation holds its tokens, then test; the rest trains."""

    validation_tokens: int
    test_tokens: int = 0

    def __post_init__(self) -> None:
        if self.validation_tokens < 0 or self.test_tokens < 0:
            raise RecipeError(
                f"split budget: expected token counts of at least 0, found validation {self.validation_tokens:,} and"
                f" test {self.test_tokens:,}."
            )


@dataclass(frozen=True, kw_only=True)
class SplitPlan:
    """One code a document: split uint8[n] (index into SPLITS, or UNUSED), reason uint8[n] (index into REASONS)."""

    split: U8
    reason: U8


@dataclass(frozen=True, kw_only=True)
class SplitStats:
    """Counts by split name, by reason, and which token budgets were filled."""

    num_documents: Mapping[str, int]
    num_tokens: Mapping[str, int]
    num_unused: Mapping[str, int]
    num_unused_tokens: Mapping[str, int]
    num_barred: int
    filled: Mapping[str, bool]


def assign_split(doc_id: bytes, seed: int, validation_fraction: float) -> str:
    """ "train" or "validation" for one document; validation iff its keyed hash is below fraction × 2^64, exactly.

    The hash is `keyed_hash(doc_id, derive_seed(seed, "split"))`. RecipeError for a fraction outside 0 to 1.

    >>> assign_split(bytes(32), 20261003, 1.0)
    'validation'
    """
    assert len(doc_id) == DOC_ID_BYTES, len(doc_id)
    ids = np.frombuffer(doc_id, dtype=np.uint8).reshape(1, DOC_ID_BYTES)
    return SPLITS[int(split_by_fraction(ids, seed, validation_fraction)[0])]


def split_by_fraction(doc_ids: U8, seed: int, validation_fraction: float, test_fraction: float = 0.0) -> U8:
    """`assign_split` for many: uint8[n, 32] -> uint8[n] indices into SPLITS; test is the interval that comes next."""
    _check_fractions(validation_fraction, test_fraction)
    hashes = keyed_hash(doc_ids, derive_seed(seed, "split"))
    validation_end = Fraction(validation_fraction)
    split = np.full(len(hashes), TRAIN, dtype=np.uint8)
    split[_is_below(hashes, validation_end + Fraction(test_fraction))] = TEST
    split[_is_below(hashes, validation_end)] = VALIDATION
    return split


def plan_splits(
    documents: SplitInputs,
    policy: FractionPolicy | BudgetPolicy,
    *,
    min_tokens: int = 0,
    budgets: Mapping[str, int] = NO_BUDGETS,
) -> tuple[SplitPlan, SplitStats]:
    """A split or a reason for every document. Budgets are tokens by split name; a split without one takes all.

    RecipeError for a budget below 1 or of an unknown split.
    """
    _check_budgets(budgets)
    reason = np.full(len(documents.num_tokens), USED, dtype=np.uint8)
    reason[documents.num_tokens < min_tokens] = BELOW_MIN_TOKENS
    split = np.full(len(reason), UNUSED, dtype=np.uint8)
    rows = np.flatnonzero(reason == USED)
    split[rows] = _assign(documents.assignment_ids[rows], documents.num_tokens[rows], documents.barred[rows], policy)
    filled: dict[str, bool] = {}
    for name, budget in sorted(budgets.items()):
        rows = np.flatnonzero(split == SPLITS.index(name))
        is_over = _tokens_before(documents.num_tokens[rows]) >= budget
        split[rows[is_over]] = UNUSED
        reason[rows[is_over]] = OVER_BUDGET
        filled[name] = int(documents.num_tokens[rows].sum()) >= budget
    plan = SplitPlan(split=split, reason=reason)
    return plan, _stats(plan, documents, filled)


def _assign(ids: U8, num_tokens: I64, barred: npt.NDArray[np.bool_], policy: FractionPolicy | BudgetPolicy) -> U8:
    if isinstance(policy, FractionPolicy):
        split = split_by_fraction(ids, policy.seed, policy.validation_fraction, policy.test_fraction)
        split[barred] = TRAIN
        return split
    unit_of = _units_in_order(ids)
    num_units = int(unit_of.max(initial=-1)) + 1
    unit_tokens = np.zeros(num_units, dtype=np.int64)
    np.add.at(unit_tokens, unit_of, num_tokens)
    is_barred = np.zeros(num_units, dtype=np.bool_)
    is_barred[unit_of[barred]] = True
    return _fill_budgets(unit_tokens, is_barred, policy)[unit_of]


def _fill_budgets(unit_tokens: I64, is_barred: npt.NDArray[np.bool_], policy: BudgetPolicy) -> U8:
    split = np.full(len(unit_tokens), TRAIN, dtype=np.uint8)
    candidates = np.flatnonzero(~is_barred)
    for code, budget in ((VALIDATION, policy.validation_tokens), (TEST, policy.test_tokens)):
        is_taken = _tokens_before(unit_tokens[candidates]) < budget
        split[candidates[is_taken]] = code
        candidates = candidates[~is_taken]
    return split


def _units_in_order(ids: U8) -> I64:
    """Number equal ids alike, by first appearance: uint8[n, 32] -> int64[n]."""
    ids = np.ascontiguousarray(ids)
    # Eight bytes of a SHA-256 nearly always tell two ids apart, and sort ten times faster than all of them.
    _, first, inverse = np.unique(ids.view("<u8")[:, 0], return_index=True, return_inverse=True)
    if (ids[first[inverse]] != ids).any():
        _, first, inverse = np.unique(whole_rows(ids), return_index=True, return_inverse=True)
    rank = np.empty(len(first), dtype=np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    return rank[inverse]


def _tokens_before(num_tokens: I64) -> I64:
    before: I64 = np.cumsum(num_tokens) - num_tokens
    return before


def _is_below(hashes: npt.NDArray[np.uint64], fraction: Fraction) -> npt.NDArray[np.bool_]:
    threshold = ceil(fraction * (1 << 64))
    if threshold >= 1 << 64:
        return np.ones(len(hashes), dtype=np.bool_)
    return hashes < np.uint64(threshold)


def _check_fractions(validation: float, test: float) -> None:
    if not (0 <= validation <= 1 and 0 <= test <= 1 and validation + test <= 1):
        raise RecipeError(
            f"split fractions: expected each from 0 to 1 and their sum at most 1, found validation {validation} and"
            f" test {test}."
        )


def _check_budgets(budgets: Mapping[str, int]) -> None:
    for name, budget in budgets.items():
        if name not in SPLITS:
            raise RecipeError(f"token budgets: expected splits among {', '.join(SPLITS)}, found {name!r}.")
        if budget < 1:
            raise RecipeError(f"token budgets: expected at least 1 token for {name}, found {budget:,}.")


def _stats(plan: SplitPlan, documents: SplitInputs, filled: Mapping[str, bool]) -> SplitStats:
    in_split = {name: plan.split == code for code, name in enumerate(SPLITS)}
    for_reason = {name: plan.reason == code for code, name in enumerate(REASONS) if code != USED}
    return SplitStats(
        num_documents={name: int(rows.sum()) for name, rows in in_split.items()},
        num_tokens={name: int(documents.num_tokens[rows].sum()) for name, rows in in_split.items()},
        num_unused={name: int(rows.sum()) for name, rows in for_reason.items()},
        num_unused_tokens={name: int(documents.num_tokens[rows].sum()) for name, rows in for_reason.items()},
        num_barred=int(documents.barred.sum()),
        filled=dict(filled),
    )
