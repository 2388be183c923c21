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
    repeated = repeated_inputs(start, plan.overlap)
    is_last = end == plan.planned_lengths[doc] - 1
    pool_of = plan.index.pools[doc]
    num_pools = len(plan.index.pool_names)
    inventory = _sums(pool_of, end - start, num_pools)
    is_unread = plan.planned_lengths > 1
    so_far = np.zeros(num_pools, dtype=np.int64)
    rows = []
    for stage, packs in _stages(plan, inventory):
        times = np.repeat(np.bincount(packs, minlength=plan.num_packs), np.diff(plan.pack_offsets))
        read = np.zeros(plan.index.num_documents, dtype=np.bool_)
        read[doc[times > 0]] = True
        is_unread &= ~read
        tokens = _sums(pool_of, times * (end - start), num_pools)
        overlap = _sums(pool_of, times * repeated, num_pools)
        eos = _sums(pool_of, times * is_last, num_pools)
        seen = _sums(pool_of, times * (start == 0), num_pools)
        unique = np.bincount(plan.index.pools[read], minlength=num_pools)
        unread = np.bincount(plan.index.pools[is_unread], minlength=num_pools)
        so_far += tokens
        rows += [
            LedgerRow(
                stage=stage.name,
                pool=name,
                first_step=stage.first_step,
                first_token=stage.first_token,
                quota_tokens=stage.quotas.get(name, 0),
                tokens=int(tokens[pool]),
                body_tokens=int(tokens[pool] - eos[pool] - overlap[pool]),
                eos_tokens=int(eos[pool]),
                overlap_tokens=int(overlap[pool]),
                loss_tokens=int(tokens[pool] - overlap[pool]),
                documents_seen=int(seen[pool]),
                documents_unique=int(unique[pool]),
                documents_unread=int(unread[pool]),
                inventory_tokens=int(inventory[pool]),
                passes=float(tokens[pool] / max(inventory[pool], 1)),
                passes_so_far=float(so_far[pool] / max(inventory[pool], 1)),
            )
            for pool, name in enumerate(plan.index.pool_names)
        ]
    return rows


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


def _sums(groups: npt.NDArray[np.integer], values: npt.NDArray[np.integer], num_groups: int) -> I64:
    """Sum of the values of each group, exactly: int64[num_groups]."""
    sums = np.zeros(num_groups, dtype=np.int64)
    np.add.at(sums, groups, values)
    return sums
