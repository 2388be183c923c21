"""The self-test of a hand-off package: two tiny documents and a short stretch, through the whole reading path.

In: a package folder. Out: a list of violations, empty when the package can be trained on. It needs numpy; where the
`tokenizers` library is installed, the recorded ids are encoded again as well. Cost: a few batches.
"""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from training_io.batch import PackedBatch, assemble_batch
from training_io.document_index import index_of
from training_io.errors import FormatError
from training_io.hashing import identity_of
from training_io.plan import Plan, load_plan
from training_io.sampler import Sampler
from training_io.segments import segment_table

PACKAGE_NAME = "package.json"
PACKAGE_FORMAT = "corpusmill-package/1"
TOKENIZER_NAME = "tokenizer.json"
STRETCH_STEPS = 4
_SECTIONS = (
    "format",
    "tokenizer",
    "data",
    "sequence_rules",
    "quotas",
    "sampling",
    "plans",
    "reading_state",
    "self_test",
)


def read_package(folder: Path) -> dict[str, Any]:
    """The package's description; FormatError when it is missing or of another format."""
    path = folder / PACKAGE_NAME
    if not path.is_file():
        raise FormatError(f"{folder}: expected a package with {PACKAGE_NAME}, found none. Copy the whole package.")
    try:
        package: dict[str, Any] = json.loads(path.read_bytes())
        found = package["format"]
        missing = [name for name in _SECTIONS if name not in package]
    except (ValueError, TypeError, KeyError) as error:
        raise FormatError(
            f"{path}: expected a description of a package, found {error!r}. Materialize handoff_package again."
        ) from error
    if missing or found != PACKAGE_FORMAT:
        raise FormatError(
            f"{path}: expected format {PACKAGE_FORMAT} with {', '.join(_SECTIONS)}, found"
            f" {found} without {', '.join(missing) or 'none of them missing'}."
            " Materialize handoff_package again."
        )
    return package


def self_test(folder: Path) -> list[str]:
    """Everything that a training team relies on, tried: encoding, targets, isolation, resuming."""
    package = read_package(folder)
    violations = tiny_documents_hold(package)
    violations += tokenizer_gives_recorded_ids(folder, package)
    for split, reference in sorted(package["plans"].items()):
        plan = load_plan(folder / reference["path"], split)
        if plan.index.tokenizer_fingerprint != package["tokenizer"]["fingerprint"]:
            violations.append(
                f"plan of {split}: expected shards of tokenizer {package['tokenizer']['fingerprint'][:12]},"
                f" found {plan.index.tokenizer_fingerprint[:12]}"
            )
        if plan.identity != reference["identity"]:
            violations.append(
                f"plan of {split}: expected identity {reference['identity'][:12]}, found {plan.identity[:12]}"
            )
        violations += stretch_resumes(plan, package["reading_state"][split]) if plan.num_packs else []
    return violations


def tiny_documents_hold(package: dict[str, Any]) -> list[str]:
    """The two tiny documents as one flat batch: each its own segment, every pair a target, EOS the last target."""
    documents = [document["ids"] for document in package["self_test"]["documents"]]
    rules = package["sequence_rules"]
    tokens = np.concatenate([np.array(ids, dtype=rules["token_dtype"]) for ids in documents])
    lengths = np.array([len(ids) for ids in documents], dtype=np.int64)
    index = index_of(
        split="self_test",
        doc_ids=np.zeros((len(documents), 32), np.uint8),
        pools=np.zeros(len(documents), np.uint16),
        pool_names=["self_test"],
        lengths=lengths,
        cuts=np.array([0, len(documents)]),
        eos_id=rules["eos_id"],
        token_dtype=rules["token_dtype"],
        tokenizer_fingerprint=package["tokenizer"]["fingerprint"],
    )
    doc, start, end = segment_table(lengths, max(2, int(lengths.max())))
    batch = assemble_batch(
        index, (tokens,), doc, start, end, step_targets=int(lengths.sum()) - len(documents), epoch=0, step=0
    )
    expected = {
        "inputs": [token for ids in documents for token in ids[:-1]],
        "targets": [token for ids in documents for token in ids[1:]],
        "position_ids": [position for ids in documents for position in range(len(ids) - 1)],
        "cu_seqlens": [0, *np.cumsum(lengths - 1).tolist()],
    }
    violations = [
        f"tiny documents: {name}: expected {values}, found {getattr(batch, name).tolist()}"
        for name, values in expected.items()
        if getattr(batch, name).tolist() != values
    ]
    if any(ids[-1] != rules["eos_id"] or rules["eos_id"] in ids[:-1] for ids in documents):
        violations.append(f"tiny documents: expected the EOS {rules['eos_id']} once, at each document's end")
    return violations


def tokenizer_gives_recorded_ids(folder: Path, package: dict[str, Any]) -> list[str]:
    """The packaged tokenizer encodes the tiny documents to the recorded ids and back (where tokenizers is there)."""
    if not (folder / TOKENIZER_NAME).is_file():
        return [f"tokenizer: expected {TOKENIZER_NAME} in the package, found none"]
    violations = _fingerprint_differs(folder / TOKENIZER_NAME, package["tokenizer"]["fingerprint"])
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError:  # a training box needs numpy alone; the fingerprint stands for the tokenizer
        return violations
    tokenizer = Tokenizer.from_file(str(folder / TOKENIZER_NAME))
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    for document in package["self_test"]["documents"]:
        ids = tokenizer.encode(document["text"], add_special_tokens=False).ids
        if ids != document["ids"][:-1]:
            violations.append(f"tokenizer: {document['text']!r}: expected {document['ids'][:-1]}, found {ids}")
        back = tokenizer.decode(ids, skip_special_tokens=False)
        if back != document["text"]:
            violations.append(f"tokenizer: expected {document['text']!r} back, found {back!r}")
    return violations


def _fingerprint_differs(path: Path, expected: str) -> list[str]:
    """The file's canonical fingerprint: of its JSON without truncation and padding, which are not the tokenizer's."""
    content = json.loads(path.read_bytes())
    found = identity_of({name: value for name, value in content.items() if name not in ("truncation", "padding")})
    return [] if found == expected else [f"tokenizer: expected fingerprint {expected[:12]}, found {found[:12]}"]


def stretch_resumes(plan: Plan, state: dict[str, Any]) -> list[str]:
    """From the recorded state, a short stretch read at once equals the stretch read with a restart in it."""
    uninterrupted = Sampler(plan)
    uninterrupted.load_state_dict(state)
    stretch = list(islice(uninterrupted, STRETCH_STEPS))
    first = Sampler(plan)
    first.load_state_dict(state)
    parts = list(islice(first, STRETCH_STEPS // 2))
    second = Sampler(plan)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    parts += list(islice(second, STRETCH_STEPS - len(parts)))
    return [
        f"plan of {plan.split}: step {number:,} after a restart differs from the uninterrupted one"
        for number, (expected, found) in enumerate(zip(stretch, parts, strict=True))
        if not _are_equal(expected, found)
    ]


def _are_equal(left: PackedBatch, right: PackedBatch) -> bool:
    names = ("inputs", "targets", "position_ids", "cu_seqlens", "segment_doc")
    return all(np.array_equal(getattr(left, name), getattr(right, name)) for name in names)
