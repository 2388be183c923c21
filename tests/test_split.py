import hashlib

import naive_text
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline_assets.transforms.split import (
    REASONS,
    SPLITS,
    UNUSED,
    BudgetPolicy,
    FractionPolicy,
    SplitInputs,
    assign_split,
    plan_splits,
    split_by_fraction,
)
from training_io.errors import RecipeError
from training_io.hashing import derive_seed

doc_id_strategy = st.binary(min_size=32, max_size=32)
# Ids from few values, some of which share their first eight bytes.
repeated_id = st.sampled_from([bytes([1]) * 32, bytes([2]) * 32, bytes([1]) * 8 + bytes(24), bytes(32)])
fraction_strategy = st.floats(0, 0.5)


def doc_ids_of(num_documents):
    return [hashlib.sha256(str(number).encode()).digest() for number in range(num_documents)]


def as_array(ids):
    return np.frombuffer(b"".join(ids), dtype=np.uint8).reshape(-1, 32)


@st.composite
def documents(draw, ids=doc_id_strategy):
    """Rows of (id, tokens, barred); a barred id is barred wherever it occurs."""
    rows = draw(st.lists(st.tuples(ids, st.integers(1, 9)), max_size=15))
    barred_ids = set(draw(st.lists(st.sampled_from([row[0] for row in rows]), max_size=4))) if rows else set()
    return [doc_id for doc_id, _ in rows], [count for _, count in rows], [doc_id in barred_ids for doc_id, _ in rows]


def inputs_of(ids, num_tokens, barred):
    return SplitInputs(
        assignment_ids=as_array(ids),
        num_tokens=np.array(num_tokens, dtype=np.int64),
        barred=np.array(barred, dtype=np.bool_),
    )


def names(split):
    return ["unused" if code == UNUSED else SPLITS[code] for code in split.tolist()]


@given(doc_id_strategy, st.integers(0, 2**40), st.floats(0, 1))
def test_one_document_is_assigned_by_its_keyed_hash(doc_id, seed, fraction):
    expected = naive_text.fraction_split(doc_id, derive_seed(seed, "split"), fraction)
    assert assign_split(doc_id, seed, fraction) == expected


@given(st.lists(doc_id_strategy, max_size=10), st.integers(0, 9), fraction_strategy, fraction_strategy)
def test_many_are_assigned_as_one(ids, seed, validation, test):
    split = split_by_fraction(as_array(ids), seed, validation, test)
    key = derive_seed(seed, "split")
    assert names(split) == [naive_text.fraction_split(doc_id, key, validation, test) for doc_id in ids]


def test_the_threshold_is_exact():
    doc_id = doc_ids_of(1)[0]
    value = naive_text.keyed_hash(doc_id, derive_seed(5, "split"))
    above = np.nextafter(value / 2**64, 1)
    below = np.nextafter(value / 2**64, 0)
    assert assign_split(doc_id, 5, above) == "validation"
    assert assign_split(doc_id, 5, below) == "train"
    assert assign_split(doc_id, 5, 1.0) == "validation"
    assert assign_split(doc_id, 5, 0.0) == "train"


def test_a_fraction_is_about_its_share_and_grows_without_moving_anyone_back():
    ids = as_array(doc_ids_of(4000))
    small, large = split_by_fraction(ids, 1, 0.05), split_by_fraction(ids, 1, 0.1)
    assert 140 < (small == 1).sum() < 260
    assert ((small == 1) <= (large == 1)).all()
    other = split_by_fraction(ids, 2, 0.05)
    assert ((small == 1) & (other == 1)).sum() < 30


def test_golden_assignment():
    ids = doc_ids_of(64)
    assert [
        number for number, doc_id in enumerate(ids) if assign_split(doc_id, 20261003, 0.05) == "validation"
    ] == GOLDEN


GOLDEN = [1, 29, 46, 51]


@given(documents() | documents(ids=repeated_id), fraction_strategy, fraction_strategy)
def test_fraction_policy(rows, validation, test):
    plan, _ = plan_splits(inputs_of(*rows), FractionPolicy(seed=3, validation_fraction=validation, test_fraction=test))
    key = derive_seed(3, "split")
    assert names(plan.split) == [
        "train" if barred else naive_text.fraction_split(doc_id, key, validation, test)
        for doc_id, _, barred in zip(*rows, strict=True)
    ]


@given(documents() | documents(ids=repeated_id), st.integers(0, 30), st.integers(0, 10))
def test_budget_policy(rows, validation_tokens, test_tokens):
    policy = BudgetPolicy(validation_tokens=validation_tokens, test_tokens=test_tokens)
    plan, _ = plan_splits(inputs_of(*rows), policy)
    assert names(plan.split) == naive_text.budget_split(*rows, validation_tokens, test_tokens)


policies = st.sampled_from(
    [
        FractionPolicy(seed=1, validation_fraction=0.4, test_fraction=0.2),
        BudgetPolicy(validation_tokens=9, test_tokens=4),
    ]
)
budgets_strategy = st.dictionaries(st.sampled_from(SPLITS), st.integers(1, 20))


@given(documents() | documents(ids=repeated_id), policies, st.integers(0, 6), budgets_strategy)
def test_laws_of_every_plan(rows, policy, min_tokens, budgets):
    ids, num_tokens, barred = rows
    inputs = inputs_of(*rows)
    plan, stats = plan_splits(inputs, policy, min_tokens=min_tokens, budgets=budgets)
    unlimited, _ = plan_splits(inputs, policy, min_tokens=min_tokens)
    split, reason = names(plan.split), [REASONS[code] for code in plan.reason]

    assert [one == "unused" for one in split] == [one != "used" for one in reason]
    assert [one == "below_min_tokens" for one in reason] == [count < min_tokens for count in num_tokens]
    assert all(one in ("train", "unused") for one, is_barred in zip(split, barred, strict=True) if is_barred)
    homes = {(doc_id, one) for doc_id, one in zip(ids, split, strict=True) if one != "unused"}
    assert len(homes) == len({doc_id for doc_id, _ in homes})

    for name in SPLITS:
        rows_of = [row for row, one in enumerate(names(unlimited.split)) if one == name]
        taken = naive_text.fill_budget([num_tokens[row] for row in rows_of], budgets.get(name, float("inf")))
        assert [split[row] == name for row in rows_of] == taken
        assert stats.num_documents[name] == sum(taken)
        assert stats.num_tokens[name] == sum(num_tokens[row] for row, one in zip(rows_of, taken, strict=True) if one)
    assert stats.filled == {name: stats.num_tokens[name] >= budget for name, budget in budgets.items()}
    assert sum(stats.num_documents.values()) + sum(stats.num_unused.values()) == len(ids)
    assert sum(stats.num_tokens.values()) + sum(stats.num_unused_tokens.values()) == sum(num_tokens)
    assert stats.num_barred == sum(barred)


def test_validation_is_the_first_documents_that_are_not_barred_and_the_last_overshoots():
    ids = doc_ids_of(6)
    inputs = inputs_of(ids, [10, 3, 10, 10, 10, 10], [True, False, False, False, True, False])
    plan, stats = plan_splits(inputs, BudgetPolicy(validation_tokens=15), min_tokens=5, budgets={"train": 11})
    assert names(plan.split) == ["train", "unused", "validation", "validation", "train", "unused"]
    assert [REASONS[code] for code in plan.reason] == [
        "used",
        "below_min_tokens",
        "used",
        "used",
        "used",
        "over_budget",
    ]
    assert stats.num_tokens == {"train": 20, "validation": 20, "test": 0}
    assert stats.num_unused_tokens == {"below_min_tokens": 3, "over_budget": 10}
    assert stats.filled == {"train": True}


def test_a_later_copy_follows_its_first_one_into_validation():
    first, other, third = doc_ids_of(3)
    inputs = inputs_of([first, other, third, first], [4, 4, 4, 4], [False] * 4)
    plan, _ = plan_splits(inputs, BudgetPolicy(validation_tokens=5))
    assert names(plan.split) == ["validation", "train", "train", "validation"]


def test_no_documents():
    for policy in (FractionPolicy(seed=1, validation_fraction=0.1), BudgetPolicy(validation_tokens=5)):
        plan, stats = plan_splits(inputs_of([], [], []), policy, budgets={"train": 5})
        assert len(plan.split) == 0
        assert stats.filled == {"train": False}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: assign_split(bytes(32), 1, 1.5), "found validation 1.5"),
        (lambda: FractionPolicy(seed=1, validation_fraction=0.7, test_fraction=0.4), "sum at most 1"),
        (lambda: BudgetPolicy(validation_tokens=-1_000), "found validation -1,000"),
        (
            lambda: plan_splits(inputs_of([], [], []), BudgetPolicy(validation_tokens=1), budgets={"valid": 5}),
            "expected splits among train, validation, test, found 'valid'",
        ),
        (
            lambda: plan_splits(inputs_of([], [], []), BudgetPolicy(validation_tokens=1), budgets={"train": 0}),
            "at least 1 token for train, found 0",
        ),
    ],
)
def test_impossible_numbers_are_refused(call, message):
    with pytest.raises(RecipeError, match=message):
        call()
