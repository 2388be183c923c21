"""Slow, independent oracles for segments, packs, batches, windows and layouts. Imports nothing of the project."""

from collections import Counter
from fractions import Fraction
from itertools import combinations, pairwise, takewhile


def segments_of(num_tokens, max_seq_len):
    """Input ranges of a document, walked token by token."""
    ranges, start = [], 0
    while start < num_tokens - 1:
        end = start
        while end < num_tokens - 1 and end - start < max_seq_len:
            end += 1
        ranges.append((start, end))
        start = end
    return ranges


def overlapping_segments(num_tokens, max_seq_len, overlap):
    """(start, end, inputs repeated) of a document's segments, walked token by token, with a step back at each cut."""
    ranges, start, repeated = [], 0, 0
    while start + repeated < num_tokens - 1:
        end = start
        while end < num_tokens - 1 and end - start < max_seq_len:
            end += 1
        ranges.append((start, end, repeated))
        start, repeated = end - overlap, overlap
    return ranges


def pair_multiset(docs):
    """Every (token, next token) of every document that includes its EOS."""
    return Counter((a, b) for doc in docs for a, b in pairwise(doc))


def steps_alike(one, other):
    """How many first batches of two sequences hold the same tokens in the same segments."""
    read, also_read = ([(b.inputs.tolist(), b.cu_seqlens.tolist()) for b in batches] for batches in (one, other))
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(read, also_read, strict=True)))


def batch_pairs(batch):
    """Every (input, target) that a batch trains."""
    return Counter(pair for pair in zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True) if pair[1] != -100)


def best_fit_packs(lengths, capacity, buffer):
    """Best fit by scanning a plain list: the oldest candidate opens, then the longest that fits, ties to the oldest."""
    arriving = list(enumerate(lengths))
    candidates, arriving = arriving[:buffer], arriving[buffer:]
    packs = []
    while candidates:
        chosen, remaining = [], capacity
        while fitting := [candidate for candidate in candidates if candidate[1] <= remaining]:
            longest = max(length for _, length in fitting)
            pick = next(one for one in fitting if one[1] == longest) if chosen else candidates[0]
            candidates.remove(pick)
            chosen.append(pick[0])
            remaining -= pick[1]
            candidates += arriving[:1]
            del arriving[:1]
        packs.append(chosen)
    return packs


def best_fit_decreasing_packs(lengths, capacity):
    """Longest first into the open pack with the least sufficient space."""
    packs = []
    for number in sorted(range(len(lengths)), key=lambda n: (-lengths[n], n)):
        space = [capacity - sum(lengths[m] for m in chosen) for chosen in packs]
        fitting = [at for at in range(len(packs)) if space[at] >= lengths[number]]
        if fitting:
            least = min(space[at] for at in fitting)
            packs[next(at for at in fitting if space[at] == least)].append(number)
        else:
            packs.append([number])
    return packs


def first_fit_packs(lengths, capacity, buffer):
    """Each segment into the first of the packs still open; beyond `buffer` open ones the first is closed."""
    packs, num_closed = [], 0
    for number, length in enumerate(lengths):
        held = [sum(lengths[m] for m in chosen) for chosen in packs]
        fitting = [at for at in range(num_closed, len(packs)) if held[at] + length <= capacity]
        if fitting:
            packs[fitting[0]].append(number)
        else:
            packs.append([number])
        if len(packs) - num_closed > buffer:
            num_closed += 1
    return packs


def first_fit_decreasing_packs(lengths, capacity):
    """First fit of the segments sorted by length, no pack ever closed."""
    by_length = sorted(range(len(lengths)), key=lambda n: (-lengths[n], n))
    packs = first_fit_packs([lengths[n] for n in by_length], capacity, len(lengths))
    return [[by_length[at] for at in chosen] for chosen in packs]


def next_fit_packs(lengths, capacity):
    """Arrival order, a new pack when a segment does not fit."""
    packs = []
    for number, length in enumerate(lengths):
        if not packs or sum(lengths[m] for m in packs[-1]) + length > capacity:
            packs.append([])
        packs[-1].append(number)
    return packs


def worst_fit_decreasing_totals(lengths, capacity):
    """Tokens in each pack, sorted, when the longest go first, each into the pack with the fewest tokens."""
    totals = []
    for length in sorted(lengths, reverse=True):
        totals.sort()
        if totals and totals[0] + length <= capacity:
            totals[0] += length
        else:
            totals.append(length)
    return sorted(totals)


def best_subset_sum(sizes, limit):
    """Largest sum of a subset that does not exceed the limit, over all subsets."""
    return max(
        total
        for count in range(len(sizes) + 1)
        for chosen in combinations(sizes, count)
        if (total := sum(chosen)) <= limit
    )


def waits(packs, buffer):
    """For each segment, how many packs opened with it in the buffer before its own pack did (refilled after each
    choice).
    """
    arrived_at_opening, taken = [], 0
    for chosen in packs:
        arrived_at_opening.append(taken + buffer)
        taken += len(chosen)
    return {
        number: sum(1 for opened in arrived_at_opening[:at] if opened > number)
        for at, chosen in enumerate(packs)
        for number in chosen
    }


def padded_grid(docs, row_len):
    """Rows of one document each, cut at row_len, None in empty cells."""
    rows = [doc[at : at + row_len] for doc in docs for at in range(0, len(doc), row_len)]
    return [row + [None] * (row_len - len(row)) for row in rows]


def concatenated_rows(docs, row_len):
    """Owner of every token of the stream, in full rows only."""
    owners = [number for number, doc in enumerate(docs) for _ in doc]
    return [owners[at : at + row_len] for at in range(0, len(owners) - row_len + 1, row_len)]


def restarted_positions(row):
    """Position of each token since its owner began in the row."""
    positions = []
    for at, owner in enumerate(row):
        positions.append(0 if at == 0 or row[at - 1] != owner else positions[-1] + 1)
    return positions


def causal_pairs(owners):
    """Query-key pairs of a row under a causal document mask, counted one by one; None owns nothing."""
    return sum(1 for q, owner in enumerate(owners) for k in range(q + 1) if owner is not None and owners[k] == owner)


def largest_remainder(shares, total):
    """Quotas by handing out one token at a time to the largest unmet claim after the whole parts."""
    whole = sum(shares)
    quotas = [int(total * share // whole) for share in shares]
    while sum(quotas) < total:
        unmet = [total * share / whole - quota for share, quota in zip(shares, quotas, strict=True)]
        quotas[unmet.index(max(unmet))] += 1
    return quotas


def furthest_from_quota(quotas, used):
    """How far any pool is from its part of all that was used, exactly."""
    total, whole = sum(used.values()), sum(quotas.values())
    return max(abs(used[pool] - Fraction(quota * total, whole)) for pool, quota in quotas.items())


def ledger(segments, document_tokens, pools, eos_id):
    """Counts by (stage, pool) from the segments read, each (stage, pool, document, inputs, targets); -100 is untrained.

    Document d is in pool d modulo the pools. Inputs encode their address, so a first segment is known by its first
    token.
    """
    counts, unread = {}, {d for d, length in enumerate(document_tokens) if length > 1}
    for stage in dict.fromkeys(segment[0] for segment in segments):
        here = [segment for segment in segments if segment[0] == stage]
        unread -= {document for _, _, document, _, _ in here}
        for number, pool in enumerate(pools):
            read = [segment for segment in here if segment[1] == pool]
            targets = [target for *_, targets in read for target in targets]
            counts[stage, pool] = {
                "tokens": len(targets),
                "eos_tokens": targets.count(eos_id),
                "overlap_tokens": targets.count(-100),
                "body_tokens": len(targets) - targets.count(eos_id) - targets.count(-100),
                "loss_tokens": len(targets) - targets.count(-100),
                "documents_seen": sum(inputs[0] % 10_000 == 1 for _, _, _, inputs, _ in read),
                "documents_unique": len({document for _, _, document, _, _ in read}),
                "documents_unread": sum(document % len(pools) == number for document in unread),
            }
    return counts
