"""Promise: the plan reads of each pool what its quotas say, and the ledger says what the plan reads."""

from collections import Counter
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
    violations = [
        *quota_invariants.every_window_keeps_its_quotas(plan),
        *quota_invariants.pools_are_read_in_passes(plan),
    ]
    errors = quota_invariants.largest_quota_errors(plan)
    stages = f"{len(plan.stages):,} stages" if plan.stages else "a plan without a mixture"
    found = f"{plan.num_scheduled:,} packs in {stages}"
    verdict = verdict_of("each pool within one pack of its quota, at every pack", violations, found)
    return Verdict(
        expected=verdict.expected,
        found=verdict.found,
        num_violations=verdict.num_violations,
        examples=verdict.examples,
        numbers={f"{name}_largest_error_tokens": error for name, error in errors.items()},
    )


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
    violations += [f"stage {name}, pool {pool}: not in the plan" for name, pool in found.keys() - expected.keys()]
    tokens = sum(counts["tokens"] for counts in expected.values())
    return Verdict(
        expected="every row as recounted from the plan",
        found=f"{len(violations):,} numbers of {len(expected):,} rows differ, over {tokens:,} tokens",
        num_violations=len(violations),
        examples=[{"violation": violation} for violation in violations[:MAX_EXAMPLES]],
        numbers={f"{name}_{pool}_tokens": counts["tokens"] for (name, pool), counts in expected.items()},
    )


def _recounted(plan: Plan) -> dict[tuple[str, str], dict[str, Any]]:
    """The ledger's counts by stage and pool, from one pool's documents at a time."""
    schedule = np.arange(plan.num_packs) if plan.schedule is None else np.asarray(plan.schedule, dtype=np.int64)
    starts = [stage.first_step * plan.packs_per_step for stage in plan.stages] or [0]
    starts.append(len(schedule))
    names = [stage.name for stage in plan.stages] or [ONE_PASS]
    document, start, end = plan.locate(plan.order)
    pack_of = np.repeat(np.arange(plan.num_packs), np.diff(plan.pack_offsets))
    lengths = np.asarray(plan.index.lengths, dtype=np.int64)
    expected: dict[tuple[str, str], dict[str, Any]] = {}
    for number, pool in enumerate(plan.index.pool_names):
        mine = np.flatnonzero(plan.index.pools[document] == number)
        inventory = int((end - start)[mine].sum())
        read_before: set[int] = set()
        read_tokens = 0
        for at, name in enumerate(names):
            times = Counter(schedule[starts[at] : starts[at + 1]].tolist())
            reads = np.array([times[pack] for pack in pack_of[mine].tolist()], dtype=np.int64)
            tokens = int((reads * (end - start)[mine]).sum())
            eos = int(reads[(end == lengths[document] - 1)[mine]].sum())
            overlap = int(reads[(start > 0)[mine]].sum()) * plan.overlap
            unique = set(document[mine][reads > 0].tolist())
            read_before |= unique
            read_tokens += tokens
            planned = set(document[mine].tolist())
            quota = plan.stages[at].quotas.get(pool, 0) if plan.stages else inventory
            expected[name, pool] = {
                "first_step": plan.stages[at].first_step if plan.stages else 0,
                "first_token": plan.stages[at].first_token if plan.stages else 0,
                "quota_tokens": quota,
                "tokens": tokens,
                "body_tokens": tokens - eos - overlap,
                "eos_tokens": eos,
                "overlap_tokens": overlap,
                "loss_tokens": tokens - overlap,
                "documents_seen": int(reads[(start == 0)[mine]].sum()),
                "documents_unique": len(unique),
                "documents_unread": len(planned - read_before),
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
