"""Promise: the package is complete, hashed, and can be trained on."""

from asset_checks.verdicts import Verdict, law, verdict_of
from pipeline_assets.stripes import Stage
from resources.artifact_store import ArtifactRef
from training_io.verification import verify


def handoff_self_test_passes(stage: Stage, handoff_package: ArtifactRef) -> Verdict:
    """What `python -m training_io verify PACKAGE` says: hashes, laws, tiny documents, a restart in a short stretch."""
    verification = verify(stage.folder(handoff_package))
    violations = [line for line in verification.violations if "not quarantined" not in line]
    return verdict_of(
        "every hash, law and self-test holds", violations, f"{len(verification.verified):,} verifications"
    )


CHECKS = [
    law(
        handoff_self_test_passes,
        blocking=True,
        description="Fails when the package could not be trained on as it is. Materialize handoff_package again; if "
        "the shards or the plan are at fault, materialize them first.",
    ),
]
