"""The laws of shards, index and plan, recounted by a second route.

In: folders, indexes and plans as read from disk. Out: a list of violations for each law, empty where it holds; a
violation is never raised. No law calls the code that it judges: headers are unpacked by hand, pairs are counted on
token positions, batches are compared with the bytes of the shards. Cost: one pass over the tokens a law, one shard in
memory at a time.
"""

import struct
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from training_io.batch import IGNORED, PackedBatch
from training_io.document_index import DocumentIndex
from training_io.plan import Plan
from training_io.sampler import Sampler

I64 = npt.NDArray[np.int64]

MAX_EXAMPLES = 5

# token_dtype -> (magic, version, bytes a token)
_LAYOUTS = {"uint16": (20240520, 1, 2), "uint32": (20240801, 7, 4)}
_HEADER_BYTES = 256 * 4


def shards_match_headers(artifact: Path, index: DocumentIndex) -> list[str]:
    """Every shard's header names its dtype and count as the index does, and its size is header + tokens."""
    magic, version, token_bytes = _LAYOUTS[index.token_dtype]
    violations = []
    for file, num_tokens in zip(index.shard_files, index.shard_tokens, strict=True):
        path = artifact / file
        if not path.is_file():
            violations.append(f"{file}: expected a shard of {num_tokens:,} tokens, found no file")
            continue
        expected_bytes, found_bytes = _HEADER_BYTES + num_tokens * token_bytes, path.stat().st_size
        if found_bytes != expected_bytes:
            violations.append(f"{file}: expected {expected_bytes:,} bytes, found {found_bytes:,}")
        with path.open("rb") as opened:
            header = opened.read(12).ljust(12, b"\0")
        if (found := struct.unpack("<3i", header)) != (magic, version, num_tokens):
            violations.append(f"{file}: expected header {(magic, version, num_tokens)}, found {found}")
    return violations


def documents_tile_shards(index: DocumentIndex) -> list[str]:
    """Each shard begins with a document, the next begins where one ends, and the last ends with the shard."""
    violations = []
    if bool((np.diff(index.shards.astype(np.int64)) < 0).any()):
        violations.append(f"split {index.split}: expected documents in shard order, found a step back")
    for shard, num_tokens in enumerate(index.shard_tokens):
        inside = np.flatnonzero(index.shards == shard)
        ends = index.offsets[inside] + index.lengths[inside]
        expected = np.concatenate([[0], ends[:-1]]) if len(inside) else index.offsets[inside]
        for at in np.flatnonzero(index.offsets[inside] != expected)[:MAX_EXAMPLES]:
            document = int(inside[at])
            violations.append(
                f"split {index.split}: document {document:,}: expected offset {int(expected[at]):,},"
                f" found {int(index.offsets[document]):,}"
            )
        reached = int(ends[-1]) if len(ends) else 0
        if reached != num_tokens:
            violations.append(
                f"{index.shard_files[shard]}: expected documents up to token {num_tokens:,}, found {reached:,}"
            )
    return violations


def eos_ends_documents(artifact: Path, index: DocumentIndex) -> list[str]:
    """The last token of every document is the EOS, and it occurs nowhere else.

    It holds for tokens of an encoder that spells special tokens out; where the EOS may stand inside a text, leave it
    out.
    """
    violations = []
    for shard, tokens in _shards(artifact, index):
        inside = index.shards == shard
        expected = index.offsets[inside] + index.lengths[inside] - 1
        found = np.flatnonzero(tokens == index.eos_id)
        file = index.shard_files[shard]
        violations += [
            f"{file}: token {int(position):,}: expected EOS {index.eos_id:,} at a document's end, found another"
            for position in np.setdiff1d(expected, found)[:MAX_EXAMPLES]
        ]
        violations += [
            f"{file}: token {int(position):,}: expected no EOS inside a document, found one"
            for position in np.setdiff1d(found, expected)[:MAX_EXAMPLES]
        ]
    return violations


def doc_ids_once(indexes: Sequence[DocumentIndex], *, repeats_within_split: bool) -> list[str]:
    """No doc_id is in two of the splits; none is twice in one either, unless repeats_within_split (dedup mode off)."""
    if not indexes:
        return []
    words = np.concatenate([np.ascontiguousarray(index.doc_ids).view("<u8").reshape(-1, 4) for index in indexes])
    split = np.repeat(np.arange(len(indexes)), [index.num_documents for index in indexes])
    by_id = np.lexsort((split, *words.T))
    repeated = np.flatnonzero((words[by_id[1:]] == words[by_id[:-1]]).all(axis=1))
    violations = []
    for first, second in zip(by_id[repeated].tolist(), by_id[repeated + 1].tolist(), strict=True):
        names = indexes[split[first]].split, indexes[split[second]].split
        if names[0] != names[1] or not repeats_within_split:
            doc_id = words[first].tobytes().hex()
            violations.append(f"doc_id {doc_id[:12]}…: expected once, found in {names[0]} and again in {names[1]}")
    return violations[:MAX_EXAMPLES]


def order_is_permutation(plan: Plan) -> list[str]:
    """The plan lists each segment number of its documents exactly once."""
    num_segments = int(_segment_counts(plan).sum())
    order = np.asarray(plan.order, dtype=np.int64)
    outside = order[(order < 0) | (order >= num_segments)]
    violations = [
        f"split {plan.split}: expected segments below {num_segments:,}, found {int(number):,}"
        for number in outside[:MAX_EXAMPLES]
    ]
    times = np.bincount(order[(order >= 0) & (order < num_segments)], minlength=num_segments)
    violations += [
        f"split {plan.split}: segment {int(number):,}: expected once in the plan, found {int(times[number]):,} times"
        for number in np.flatnonzero(times != 1)[:MAX_EXAMPLES]
    ]
    return violations


def every_pair_once(plan: Plan) -> list[str]:
    """Each token but a document's last is the input of exactly one trained pair, and is repeated untrained before each
    cut of its document as far as the overlap goes, counted on the positions of the shards; of a document that the plan
    diverts, none is.
    """
    index = plan.index
    if documents_tile_shards(index):
        return [f"split {plan.split}: pairs not recounted: the documents do not tile the shards"]
    doc, start, end = _planned_segments(plan)
    trained = start + np.where(start > 0, plan.overlap, 0)
    shard_of, begins = index.shards[doc], index.offsets[doc]
    cut_doc, cut = _cuts(plan)
    violations = []
    for shard, num_tokens in enumerate(index.shard_tokens):
        here = shard_of == shard
        expected = np.ones(num_tokens, dtype=np.int32)
        inside = index.shards == shard
        expected[index.offsets[inside] + index.lengths[inside] - 1] = 0
        for document in np.flatnonzero(inside & _is_diverted(plan)).tolist():
            expected[index.offsets[document] : index.offsets[document] + index.lengths[document]] = 0
        found = _times_covered(num_tokens, (begins + trained)[here], (begins + end)[here])
        where = f"{index.shard_files[shard]}: token"
        violations += _differences(where, "planned pairs from it", expected, found)
        if plan.overlap:
            cuts_here = (index.offsets[cut_doc] + cut)[index.shards[cut_doc] == shard]
            expected = _times_covered(num_tokens, cuts_here - plan.overlap, cuts_here)
            found = _times_covered(num_tokens, (begins + start)[here], (begins + trained)[here])
            violations += _differences(where, "repeats of it", expected, found)
    return violations


def _times_covered(num_tokens: int, starts: I64, ends: I64) -> npt.NDArray[np.int32]:
    """How many of the half-open ranges hold each token: int32[num_tokens]."""
    steps = np.zeros(num_tokens + 1, dtype=np.int32)
    np.add.at(steps, starts, 1)
    np.add.at(steps, ends, -1)
    return np.cumsum(steps[:-1], dtype=np.int32)


def _differences(where: str, what: str, expected: npt.NDArray[np.int32], found: npt.NDArray[np.int32]) -> list[str]:
    return [
        f"{where} {int(position):,}: expected {int(expected[position])} {what}, found {int(found[position]):,}"
        for position in np.flatnonzero(found != expected)[:MAX_EXAMPLES]
    ]


def packs_within_capacity(plan: Plan) -> list[str]:
    """Packs follow one another without gaps, none is empty, and none holds more inputs than the capacity."""
    if _offsets_are_broken(plan):
        return [f"split {plan.split}: expected pack offsets that rise from 0 to {plan.num_segments:,}, found others"]
    _, held, _, _ = _pack_totals(plan)
    return [
        f"split {plan.split}: pack {int(number):,}: expected at most {plan.capacity:,} inputs,"
        f" found {int(held[number]):,}"
        for number in np.flatnonzero(held > plan.capacity)[:MAX_EXAMPLES]
    ]


def pack_sums_are_right(plan: Plan) -> list[str]:
    """pack_targets and pack_sum_squares are the sums over each pack's segments, repeated inputs no targets."""
    if _offsets_are_broken(plan):
        return [f"split {plan.split}: sums not recounted: the pack offsets do not rise from 0 to the segments"]
    known, _, targets, squares = _pack_totals(plan)
    violations = []
    for name, stored, recounted in (
        ("pack_targets", plan.pack_targets, targets),
        ("pack_sum_squares", plan.pack_sum_squares, squares),
    ):
        violations += [
            f"split {plan.split}: {name} of pack {int(number):,}: expected {int(recounted[number]):,},"
            f" found {int(stored[number]):,}"
            for number in np.flatnonzero((stored != recounted) & known)[:MAX_EXAMPLES]
        ]
    return violations


def sampled_steps(plan: Plan) -> list[tuple[int, int]]:
    """Epoch and step of the steps that steps_match_shards looks at: first, middle, last, and the first of epoch 1."""
    if plan.num_steps == 0:
        return []
    return [*((0, step) for step in sorted({0, plan.num_steps // 2, plan.num_steps - 1})), (1, 0)]


def steps_match_shards(plan: Plan) -> list[str]:
    """Batches of a few steps have well-formed cu_seqlens, restarted positions, and the shards' tokens and targets."""
    artifact = plan.shards.path
    if shards_match_headers(artifact, plan.index) or order_is_permutation(plan) or packs_within_capacity(plan):
        return [f"split {plan.split}: steps not recounted: shards, order or packs are broken"]
    tokens = dict(_shards(artifact, plan.index))
    violations = []
    for epoch, step in sampled_steps(plan):
        sampler = Sampler(plan)
        sampler.load_state_dict({"plan": plan.identity, "epoch": epoch, "next_step": step})
        where = f"split {plan.split}: epoch {epoch}, step {step:,}"
        violations += [f"{where}: {fault}" for fault in batch_faults(next(sampler), plan, tokens)]
    return violations


def batch_faults(batch: PackedBatch, plan: Plan, shards: dict[int, npt.NDArray[Any]]) -> list[str]:
    """What is wrong with a batch of a whole step, its tokens compared with the shards by document and position."""
    bounds = batch.cu_seqlens.tolist()
    if bounds[0] != 0 or bounds[-1] != len(batch.inputs) or any(a >= b for a, b in pairwise(bounds)):
        return [f"expected cu_seqlens rising from 0 to {len(batch.inputs):,}, found {bounds[0]:,} to {bounds[-1]:,}"]
    faults = []
    longest = max((b - a for a, b in pairwise(bounds)), default=0)
    if batch.max_seqlen != longest:
        faults.append(f"expected max_seqlen {longest:,}, found {batch.max_seqlen:,}")
    num_trained = int(np.count_nonzero(batch.targets != IGNORED))
    if not batch.num_targets == batch.step_targets == num_trained:
        faults.append(f"expected {num_trained:,} targets as denominator, found {batch.step_targets:,}")
    for number, document in enumerate(batch.segment_doc.tolist()):
        first, last = bounds[number], bounds[number + 1]
        segment = np.append(batch.inputs[first:last], batch.targets[last - 1])
        trained = np.flatnonzero(batch.targets[first:last] != IGNORED)
        repeats = last - first - len(trained)
        if repeats not in (0, plan.overlap) or trained.tolist() != list(range(repeats, last - first)):
            faults.append(f"segment {number:,}: expected its first 0 or {plan.overlap:,} targets ignored, found others")
        if not np.array_equal(segment[1:][trained], batch.targets[first:last][trained]):
            faults.append(f"segment {number:,}: expected each target to be the next input, found another")
        if batch.position_ids[first:last].tolist() != list(range(last - first)):
            faults.append(f"segment {number:,}: expected positions from 0, found others")
        if not _occurs(segment, document, plan, shards, is_first=repeats == 0):
            faults.append(f"segment {number:,}: expected tokens of document {document:,}, found others")
    return faults[:MAX_EXAMPLES]


def _occurs(segment: I64, document: int, plan: Plan, shards: dict[int, npt.NDArray[Any]], *, is_first: bool) -> bool:
    """Whether the tokens stand in the document at a multiple of the stride, up to max_seq_len inputs or the end; with
    an overlap, at its start if is_first, else behind it.
    """
    begin, length = int(plan.index.offsets[document]), int(plan.index.lengths[document])
    text = shards[int(plan.index.shards[document])][begin : begin + length]
    starts = range(0, max(length - 1 - plan.overlap, 1), plan.max_seq_len - plan.overlap)
    if plan.overlap:
        starts = starts[:1] if is_first else starts[1:]
    return any(np.array_equal(segment, text[start : start + plan.max_seq_len + 1]) for start in starts)


def _shards(artifact: Path, index: DocumentIndex) -> Iterator[tuple[int, npt.NDArray[Any]]]:
    """Tokens of each shard, as many as the file has; shards_match_headers reports what is missing."""
    dtype = np.dtype(index.token_dtype).newbyteorder("<")
    for shard, (file, num_tokens) in enumerate(zip(index.shard_files, index.shard_tokens, strict=True)):
        path = artifact / file
        present = (path.stat().st_size - _HEADER_BYTES) // dtype.itemsize if path.is_file() else 0
        if present >= num_tokens:
            yield shard, np.memmap(path, dtype=dtype, mode="r", offset=_HEADER_BYTES, shape=(num_tokens,))


def _segment_counts(plan: Plan) -> I64:
    """Segments of each document: one more than it has cuts, and none for an empty or a diverted one."""
    inputs = np.asarray(plan.index.lengths, dtype=np.int64) - 1
    num_cuts = -(-np.maximum(inputs - plan.max_seq_len, 0) // (plan.max_seq_len - plan.overlap))
    return np.where((inputs < 1) | _is_diverted(plan), 0, 1 + num_cuts)


def _cuts(plan: Plan) -> tuple[I64, I64]:
    """Document and input of every cut: the first after max_seq_len inputs, each next one a stride later."""
    num_cuts = np.maximum(_segment_counts(plan) - 1, 0)
    document = np.repeat(np.arange(len(num_cuts), dtype=np.int64), num_cuts)
    nth = np.arange(len(document), dtype=np.int64) - np.repeat(np.cumsum(num_cuts) - num_cuts, num_cuts)
    return document, plan.max_seq_len + nth * (plan.max_seq_len - plan.overlap)


def _is_diverted(plan: Plan) -> npt.NDArray[np.bool_]:
    """Whether a document is too long for a plan that never cuts."""
    return (plan.index.lengths > plan.max_seq_len + 1) & (plan.long_documents == "divert")


def _planned_segments(plan: Plan) -> tuple[I64, I64, I64]:
    """Document, start and end of the planned segments that exist, in plan order."""
    counts = _segment_counts(plan)
    document = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    nth = np.arange(len(document), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)
    order = np.asarray(plan.order, dtype=np.int64)
    order = order[(order >= 0) & (order < len(document))]
    doc, start = document[order], nth[order] * (plan.max_seq_len - plan.overlap)
    return doc, start, np.minimum(start + plan.max_seq_len, plan.index.lengths[doc] - 1)


def _offsets_are_broken(plan: Plan) -> bool:
    offsets = plan.pack_offsets.astype(np.int64)
    return bool(offsets[0] != 0 or offsets[-1] != plan.num_segments or (np.diff(offsets) < 1).any())


def _pack_totals(plan: Plan) -> tuple[npt.NDArray[np.bool_], I64, I64, I64]:
    """For each pack whether all its segments exist, its inputs, those trained, and the sum of the squared lengths."""
    num_segments = int(_segment_counts(plan).sum())
    order = np.asarray(plan.order, dtype=np.int64)
    exists = (order >= 0) & (order < num_segments)
    pack_of = np.repeat(np.arange(plan.num_packs), np.diff(plan.pack_offsets))
    _, start, end = _planned_segments(plan)
    held, targets, squares = (np.zeros(plan.num_packs, dtype=np.int64) for _ in range(3))
    np.add.at(held, pack_of[exists], end - start)
    np.add.at(targets, pack_of[exists], end - start - np.where(start > 0, plan.overlap, 0))
    np.add.at(squares, pack_of[exists], (end - start) ** 2)
    known = np.ones(plan.num_packs, dtype=np.bool_)
    known[pack_of[~exists]] = False
    return known, held, targets, squares
