"""Promise: the plan reads of each pool what its quotas say, and the ledger says what the plan reads."""

from fractions import Fraction
from typing import Any

import numpy as np

from asset_checks.verdicts import MAX_EXAMPLES, Verdict, law, verdict_of
from pipeline_assets.ledger import LEDGER_NAME
from pipeline_assets.stripes import Stage
from resources.artifact_store import ArtifactRef
from training_io import quota_invariants
from training_io.ledger import ONE_PASS
from training_io.plan import Plan, load_plan


def every_window_keeps_its_quotas(stage: Stage, packing_plan: ArtifactRef) -> Verdict:
    """From a stage's start to any pack, each pool is within one pack of its share, and pools are read pass by pass."""
    plan = load_plan(stage.folder(packing_plan), "train", allow_quarantined=stage.is_judging)
    counted = quota_invariants.count_packs(plan) if plan.stages else None  # else no law counts them
    violations = [
        *quota_invariants.every_window_keeps_its_quotas(plan, counted),
        *quota_invariants.pools_are_read_in_passes(plan, counted),
        *_otherwise_than_the_recipe(stage, plan),
    ]
    errors = quota_invariants.largest_quota_errors(plan, counted)
    stages = f"{len(plan.stages):,} stages" if plan.stages else "a plan without a mixture"
    found = f"{plan.num_scheduled:,} packs in {stages}"
    verdict = verdict_of("each pool within one pack of its quota, at every pack", violations, found)
    return Verdict(
        expected=verdict.expected,
        found=verdict.found,
        num_violations=verdict.num_violations,
        examples=verdict.examples,
        numbers={f"{name}/largest_error_tokens": error for name, error in errors.items()},
    )


def _otherwise_than_the_recipe(stage: Stage, plan: Plan) -> list[str]:
    """Stages and quotas that the recipe does not ask for: each within a token of its share of what is left."""
    wanted = stage.recipe.mixture.stages if stage.recipe.mixture else ()
    names, found = [one.name for one in wanted], [one.name for one in plan.stages]
    if names != found:
        return [f"expected the recipe's stages, {names or 'none'}, found {found or 'none'}"]
    violations, budget = [], 0
    for one, planned in zip(wanted, plan.stages, strict=True):
        budget += one.tokens
        left = budget - planned.first_token
        shares = {pool: Fraction(share) for pool, share in one.shares.items()}
        if sum(planned.quotas.values()) != left:
            violations.append(f"stage {one.name}: expected quotas of {left:,} tokens, found {planned.quotas}")
        violations += [
            f"stage {one.name}: expected about {float(left * share / sum(shares.values())):,.0f} tokens of {pool},"
            f" found {planned.quotas.get(pool, 0):,}"
            for pool, share in shares.items()
            if abs(planned.quotas.get(pool, 0) - left * share / sum(shares.values())) >= 1
        ]
    return violations


def ledger_is_what_the_plan_reads(stage: Stage, mixture_ledger: ArtifactRef, packing_plan: ArtifactRef) -> Verdict:
    """Each number of the ledger, recounted segment by segment in the order of reading."""
    plan = load_plan(stage.folder(packing_plan), "train", allow_quarantined=stage.is_judging)
    expected = _recounted(plan)
    found = {(row["stage"], row["pool"]): row for row in stage.table(mixture_ledger, LEDGER_NAME).to_pylist()}
    violations = [
        f"stage {key[0]}, pool {key[1]}: expected {name} {value:,}, the ledger says {found.get(key, {}).get(name)}"
        for key, counts in expected.items()
        for name, value in counts.items()
        if found.get(key, {}).get(name) != value
    ]
    violations += [
        f"stage {name}, pool {pool}: not in the plan" for name, pool in sorted(found.keys() - expected.keys())
    ]
    tokens = sum(counts["tokens"] for counts in expected.values())
    return Verdict(
        expected="every row as recounted from the plan",
        found=f"{len(violations):,} numbers of {len(expected):,} rows differ, over {tokens:,} tokens",
        num_violations=len(violations),
        examples=[{"violation": violation} for violation in violations[:MAX_EXAMPLES]],
        numbers={f"{name}/{pool}/tokens": counts["tokens"] for (name, pool), counts in expected.items()},
    )


def _recounted(plan: Plan) -> dict[tuple[str, str], dict[str, Any]]:
    """The ledger's counts by stage and pool, one pool's segments and one stage's packs at a time."""
    schedule = np.arange(plan.num_packs) if plan.schedule is None else np.asarray(plan.schedule, dtype=np.int64)
    firsts = [stage.first_step * plan.packs_per_step for stage in plan.stages] or [0]
    segments = plan.locate(plan.order)
    pack_of = np.repeat(np.arange(plan.num_packs), np.diff(plan.pack_offsets))
    expected: dict[tuple[str, str], dict[str, Any]] = {}
    for number, pool in enumerate(plan.index.pool_names):
        mine = np.flatnonzero(plan.index.pools[segments[0]] == number)
        document, start, end = (column[mine] for column in segments)
        inventory = int((end - start).sum())
        unread, read_tokens = np.unique(document), 0
        for at, packs in enumerate(np.split(schedule, firsts[1:])):
            reads = np.bincount(packs, minlength=plan.num_packs)[pack_of[mine]]
            read = np.unique(document[reads > 0])
            unread = np.setdiff1d(unread, read, assume_unique=True)
            tokens = int(reads @ (end - start))
            eos = int(reads[end == plan.index.lengths[document] - 1].sum())
            overlap = int(reads[start > 0].sum()) * plan.overlap
            read_tokens += tokens
            stage = plan.stages[at] if plan.stages else None
            expected[stage.name if stage else ONE_PASS, pool] = {
                "first_step": stage.first_step if stage else 0,
                "first_token": stage.first_token if stage else 0,
                "quota_tokens": stage.quotas.get(pool, 0) if stage else inventory,
                "tokens": tokens,
                "body_tokens": tokens - eos - overlap,
                "eos_tokens": eos,
                "overlap_tokens": overlap,
                "loss_tokens": tokens - overlap,
                "documents_seen": int(reads[start == 0].sum()),
                "documents_unique": len(read),
                "documents_unread": len(unread),
                "inventory_tokens": inventory,
                "passes": tokens / max(inventory, 1),
                "passes_so_far": read_tokens / max(inventory, 1),
            }
    return expected


CHECKS = [
    law(
        every_window_keeps_its_quotas,
        blocking=True,
        description="Fails when a stretch of training reads more or less of a pool than its share, or one document "
        "again before the others of its pool. Materialize packing_plan again; if it fails again, report it.",
    ),
    law(
        ledger_is_what_the_plan_reads,
        blocking=True,
        description="Fails when the ledger does not say what the plan's steps read. Materialize mixture_ledger again; "
        "if it fails again, report it.",
    ),
]
