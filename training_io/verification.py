"""Verification: every hash, size and law of an artifact, or of each artifact in a hand-off package.

In: a folder. Out: what was verified and what was violated, one line each. The promise: nothing is repaired and
nothing is skipped in silence. Cost: every byte is hashed once and read once a law.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from training_io import invariants, quota_invariants, snapshot_invariants
from training_io.document_index import DocumentIndex, read_index
from training_io.errors import CorpusmillError, FormatError, InvariantBroken
from training_io.handoff import PACKAGE_NAME, self_test
from training_io.manifest import MANIFEST_NAME, Manifest, damaged_files, load_manifest, quarantine_reasons
from training_io.plan import PLAN_NAME, load_plan, splits_of

_INDEX = re.compile("[^/]+_index/index[.]json")


@dataclass(frozen=True, kw_only=True)
class Verification:
    """Lines for what held and lines for what did not, in the order looked at; the latter begin with the law."""

    verified: list[str] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)

    def recount(self, subject: str, law: str, violations_of: Callable[[], list[str]]) -> None:
        """Add what a law's recount found; an artifact too damaged to be read, or to be counted, violates it."""
        try:
            found = violations_of()
        except CorpusmillError as error:
            found = [str(error)]
        except (InvariantBroken, KeyError, IndexError, TypeError, ValueError) as error:
            found = [f"cannot be recounted: {type(error).__name__}: {error}"]
        for violation in found:
            self.violate(subject, law, violation)
        if not found:
            self.verified.append(f"{subject}: {law}")

    def violate(self, subject: str, law: str, violation: object) -> None:
        """Add one violation."""
        self.violations.append(f"{law}: {violation} ({subject})")


def verify(path: Path) -> Verification:
    """Verify an artifact, the artifact of a split folder of a plan, or all artifacts of a hand-off package.

    Raises FormatError when there is no such folder or a package holds no artifact; everything else is a violation.
    """
    if not path.is_dir():
        raise FormatError(f"{path}: expected the folder of an artifact or a package, found none. Check the path.")
    verification = Verification()
    for artifact in artifacts_at(path):
        _verify_artifact(artifact, verification)
    if (path / PACKAGE_NAME).is_file():
        verification.recount("package", "its self-test passes", lambda: self_test(path))
    return verification


def artifacts_at(path: Path) -> list[Path]:
    """The artifact folders that a path stands for: those of a package, a split's parent, or the path itself."""
    if (path / PACKAGE_NAME).is_file():
        nested = sorted(folder for folder in path.glob("*/*/*") if folder.is_dir())
        if not nested:
            raise FormatError(
                f"{path}: expected a package with artifacts, found only {PACKAGE_NAME}. Copy the whole package."
            )
        return [path, *nested] if (path / MANIFEST_NAME).is_file() else nested
    if (path / PLAN_NAME).is_file():
        return [path.absolute().parent]
    return [path]


def _verify_artifact(artifact: Path, verification: Verification) -> None:
    try:
        manifest = load_manifest(artifact)
    except FormatError as error:
        verification.violate(artifact.name[:12], "sealed, with a manifest that can be read", error)
        return
    name = f"{manifest.asset} {manifest.identity[:12]}"
    verification.verified.append(f"{name}: sealed, its manifest agrees with its identity and digest")
    verification.recount(name, "not quarantined", lambda: _quarantined(artifact))
    verification.recount(
        name, f"{len(manifest.files):,} files have their sizes and hashes", lambda: damaged_files(artifact, manifest)
    )
    if manifest.asset == "token_shards":
        _verify_shards(artifact, name, manifest, verification)
    if manifest.asset == "packing_plan":
        for split in splits_of(artifact):
            _verify_plan(artifact, f"{name}: {split}", split, verification)


def _quarantined(artifact: Path) -> list[str]:
    return [f"{check}: {reason}" for check, reason in sorted(quarantine_reasons(artifact).items())]


def _verify_shards(artifact: Path, name: str, manifest: Manifest, verification: Verification) -> None:
    indexes: list[DocumentIndex] = []
    for folder in index_folders(artifact, manifest):
        try:
            index = read_index(folder)
        except FormatError as error:
            verification.violate(name, "an index that can be read", error)
            continue
        indexes.append(index)
        _verify_split(artifact, f"{name}: {index.split}", index, verification)
    verification.recount(
        name, "its splits consist of files that the manifest lists", lambda: _unlisted(artifact, manifest, indexes)
    )
    may_repeat = bool(manifest.parameters.get("repeats_within_split", False))
    verification.recount(
        name,
        "every doc_id once" + (" over the splits" if may_repeat else ""),
        lambda: invariants.doc_ids_once(indexes, repeats_within_split=may_repeat),
    )


def _unlisted(artifact: Path, manifest: Manifest, indexes: list[DocumentIndex]) -> list[str]:
    there = {path.relative_to(artifact).as_posix() for path in artifact.glob("*_index/index.json")}
    unlisted = there.union(*(index.files for index in indexes)) - manifest.files.keys()
    return [f"{file!r}: expected it among the manifest's files, found it beside them" for file in sorted(unlisted)]


def _verify_split(artifact: Path, subject: str, index: DocumentIndex, verification: Verification) -> None:
    verification.recount(
        subject,
        f"{len(index.shard_files):,} shards match their headers",
        lambda: invariants.shards_match_headers(artifact, index),
    )
    verification.recount(
        subject,
        f"{index.num_documents:,} documents tile the shards",
        lambda: invariants.documents_tile_shards(index),
    )
    verification.recount(
        subject,
        "EOS at each document's end and nowhere else",
        lambda: invariants.eos_ends_documents(artifact, index),
    )


def _verify_plan(artifact: Path, subject: str, split: str, verification: Verification) -> None:
    try:
        plan = load_plan(artifact / split, allow_quarantined=True)
    except CorpusmillError as error:
        verification.violate(subject, "a plan that can be read", error)
        return
    verification.recount(
        subject,
        f"made for token_shards {plan.shards.identity[:12]}, there and not quarantined",
        lambda: _quarantined(plan.shards.path),
    )
    verification.recount(
        subject, f"{plan.num_segments:,} segments, each once", lambda: invariants.order_is_permutation(plan)
    )
    verification.recount(
        subject, f"{plan.num_targets:,} next-token pairs, each once", lambda: invariants.every_pair_once(plan)
    )
    verification.recount(
        subject,
        f"{plan.num_packs:,} packs within {plan.capacity:,} inputs",
        lambda: invariants.packs_within_capacity(plan),
    )
    verification.recount(subject, "targets and squares of every pack", lambda: invariants.pack_sums_are_right(plan))
    if plan.stages:
        verification.recount(
            subject,
            f"{len(plan.stages):,} stages, each pool within one pack of its quota",
            lambda: quota_invariants.every_window_keeps_its_quotas(plan),
        )
        verification.recount(
            subject, "pools read pass by pass", lambda: quota_invariants.pools_are_read_in_passes(plan)
        )
    verification.recount(
        subject,
        f"{len(plan.snapshots):,} snapshots of the packer, from which it goes on with the stored packs",
        lambda: snapshot_invariants.snapshots_give_the_packs(plan),
    )
    verification.recount(
        subject,
        f"{len(invariants.sampled_steps(plan)):,} sampled steps of {plan.num_steps:,} match the shards",
        lambda: invariants.steps_match_shards(plan),
    )


def index_folders(artifact: Path, manifest: Manifest) -> list[Path]:
    """The index folders that a token_shards artifact's manifest lists, sorted by split, whether they are there or
    not.
    """
    return sorted(artifact / name.partition("/")[0] for name in manifest.files if _INDEX.fullmatch(name))
