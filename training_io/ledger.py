"""The ledger of a mixture: what each stage of a plan reads of each pool.

In: a plan. Out: one row a stage and pool. The promise: every position that a step computes is in exactly one row, as a
body token, an EOS or an overlap, by the target that it predicts. Cost: a few numpy passes over the segments for each
stage.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from training_io.mixture import PlannedStage
from training_io.plan import Plan
from training_io.segments import offsets_of, repeated_inputs

I64 = npt.NDArray[np.int64]

ONE_PASS = "one_pass"  # the stage of a plan without a mixture


@dataclass(frozen=True, kw_only=True)
class LedgerRow:
    """One pool in one stage. Tokens are positions that are computed: body, EOS and overlap by what they predict.

    Loss tokens are body and EOS; the loss of an overlap is off. Documents are seen as often as their first segment is
    read; unique ones have any segment read in the stage, unread ones none up to its end. Passes are tokens over those
    of reading the pool once, in this stage and up to its end.
    """

    stage: str
    pool: str
    first_step: int
    first_token: int  # of all pools, before the stage
    quota_tokens: int
    tokens: int
    body_tokens: int
    eos_tokens: int
    overlap_tokens: int
    loss_tokens: int
    documents_seen: int
    documents_unique: int
    documents_unread: int
    inventory_tokens: int  # of reading the pool once
    passes: float
    passes_so_far: float


def ledger_of(plan: Plan) -> list[LedgerRow]:
    """A row a stage and pool, stage by stage; without a mixture one stage, which reads every pack once.

    A pool has a row also in stages that do not read it.
    """
    doc, start, end = plan.locate(plan.order)
    inventory = _by_pool(plan, doc, end - start)
    is_unread, so_far = plan.planned_lengths > 1, np.zeros_like(inventory)
    rows = []
    for stage, packs in _stages(plan, inventory):
        times = np.repeat(np.bincount(packs, minlength=plan.num_packs), np.diff(plan.pack_offsets))
        read = np.unique(doc[times > 0])
        is_unread[read] = False
        tokens = _by_pool(plan, doc, times * (end - start))
        so_far += tokens
        counts = {
            "tokens": tokens,
            "eos_tokens": _by_pool(plan, doc, times * (end == plan.planned_lengths[doc] - 1)),
            "overlap_tokens": _by_pool(plan, doc, times * repeated_inputs(start, plan.overlap)),
            "documents_seen": _by_pool(plan, doc, times * (start == 0)),
            "documents_unique": _by_pool(plan, read, np.ones_like(read)),
            "documents_unread": _by_pool(plan, np.arange(len(is_unread)), is_unread),
            "inventory_tokens": inventory,
        }
        rows += [
            _row(stage, name, {key: int(values[pool]) for key, values in counts.items()}, int(so_far[pool]))
            for pool, name in enumerate(plan.index.pool_names)
        ]
    return rows


def _row(stage: PlannedStage, pool: str, counts: dict[str, int], so_far: int) -> LedgerRow:
    """One pool's counts in one stage, with what follows from them."""
    loss_tokens = counts["tokens"] - counts["overlap_tokens"]
    whole = max(counts["inventory_tokens"], 1)
    return LedgerRow(
        stage=stage.name,
        pool=pool,
        first_step=stage.first_step,
        first_token=stage.first_token,
        quota_tokens=stage.quotas.get(pool, 0),
        loss_tokens=loss_tokens,
        body_tokens=loss_tokens - counts["eos_tokens"],
        passes=counts["tokens"] / whole,
        passes_so_far=so_far / whole,
        **counts,
    )


def cumulative_tokens(plan: Plan) -> dict[str, I64]:
    """Tokens read of each pool up to each step of an epoch, int64[num_steps] a pool."""
    doc, start, end = plan.locate(plan.order)
    pool_of, lengths = plan.index.pools[doc], end - start
    schedule = np.arange(plan.num_packs) if plan.schedule is None else plan.schedule
    last_packs = np.minimum(np.arange(1, plan.num_steps + 1) * plan.packs_per_step, len(schedule))
    cumulative = {}
    for number, pool in enumerate(plan.index.pool_names):
        pack_tokens = np.diff(offsets_of(np.where(pool_of == number, lengths, 0))[plan.pack_offsets])
        cumulative[pool] = offsets_of(pack_tokens[schedule])[last_packs]
    return cumulative


def _stages(plan: Plan, inventory: I64) -> list[tuple[PlannedStage, npt.NDArray[np.integer]]]:
    """The stages and the packs that each reads, in order."""
    if plan.schedule is None:
        quotas = dict(zip(plan.index.pool_names, inventory.tolist(), strict=True))
        whole = PlannedStage(name=ONE_PASS, first_step=0, first_token=0, quotas=quotas)
        return [(whole, np.arange(plan.num_packs))]
    firsts = [stage.first_step * plan.packs_per_step for stage in plan.stages]
    return list(zip(plan.stages, np.split(plan.schedule, firsts[1:]), strict=True))


def _by_pool(plan: Plan, documents: I64, values: npt.NDArray[np.integer | np.bool_]) -> I64:
    """Sum over each pool of what its documents' entries have, exactly: int64[pools]."""
    sums = np.zeros(len(plan.index.pool_names), dtype=np.int64)
    np.add.at(sums, plan.index.pools[documents], values)
    return sums
