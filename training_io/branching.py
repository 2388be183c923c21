"""Branching: a second run that begins from a checkpoint of a first, on another plan of the same tokens.

In: the first run's checkpoint, the second run's identities and stream. Out: where the second stream goes on, or a
refusal. Promise: a branch is a run that the second plan could have had from its first step on: up to the checkpoint
both plans read the same segments in the same steps, and tokenizer, model, seed and schedule agree. A checkpoint carries
a digest over what its steps read, so nobody needs the first plan to tell. Cost: a SHA-256 over a step's segments each
step, and all of them once more to branch.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

from training_io.checkpoint import Checkpoint, check_identities
from training_io.errors import StateMismatch
from training_io.stream import BatchStream, StreamFacts

# What two branches of one run may differ in; whether their steps so far agree is told by the digest.
MAY_DIFFER = frozenset({"plan", "recipe"})


def digest_with(digest: str, facts: StreamFacts, step: int) -> str:
    """The digest over all steps up to a step of the run, from the digest over those before it; "" before the first."""
    return hashlib.sha256(digest.encode() + facts.digest_of(step)).hexdigest()


def check_branch(origin: Checkpoint, identities: Mapping[str, Any], facts: StreamFacts) -> None:
    """StateMismatch unless a run of these identities, on this stream, could have come to the checkpoint itself."""
    check_identities(origin, identities, may_differ=MAY_DIFFER)
    digest = ""
    for step in range(origin.step):
        digest = digest_with(digest, facts, step)
    if digest != origin.payload["past"]["digest"]:
        raise StateMismatch(
            f"{origin.path}: expected plans that have their first {origin.step:,} steps in common, found that plan"
            f" {facts.identity[:12]}… reads others than plan {origin.identities['plan'][:12]}… did. Branch from a"
            " checkpoint of an earlier step, or plan the same stages up to it."
        )


def position_at(stream: BatchStream, step: int) -> dict[str, Any]:
    """The state of a freshly opened stream behind so many steps of the run."""
    state = stream.state_dict()
    if "epoch" not in state:
        return state | {"next_step": step}
    epoch, next_step = divmod(step, stream.facts.num_steps)
    return state | {"epoch": epoch, "next_step": next_step}
