"""Slow and plain deduplication decisions with sets and breadth-first search; nothing of the project is imported."""

from collections import deque


def components(num_documents, pairs):
    """The set of documents that each document is connected to, itself included."""
    neighbours = {document: {document} for document in range(num_documents)}
    for left, right in pairs:
        neighbours[left].add(right)
        neighbours[right].add(left)
    found = {}
    for start in range(num_documents):
        if start in found:
            continue
        members, queue = {start}, deque([start])
        while queue:
            for other in neighbours[queue.popleft()] - members:
                members.add(other)
                queue.append(other)
        found |= dict.fromkeys(members, members)
    return found


def decide(doc_ids, coordinates, edges, hits, mode, excluding, preferred, within=None):
    """One dict a document: doc_ids are bytes, coordinates tuples with the pool's priority first.

    preferred is a tuple a document, lowest first; within is None or the documents' crawls and the edges inside crawls.
    """
    documents = range(len(doc_ids))
    same_text = [(left, right) for left in documents for right in documents if doc_ids[left] == doc_ids[right]]
    twins = components(len(doc_ids), same_text)
    connected = components(len(doc_ids), [*same_text, *edges])
    if within is not None:
        connected = components(len(doc_ids), [*same_text, *edges, *within[1]])
    clusters = groups = twins if mode == "exact" else connected
    if within is not None:
        dumps, inside = within
        groups = components(len(doc_ids), [*inside, *((a, b) for a, b in same_text if dumps[a] == dumps[b])])

    def first(members):
        return min(members, key=lambda member: (preferred[member], doc_ids[member], coordinates[member]))

    decisions = []
    for document in documents:
        cluster = clusters[document]
        survivor = first(groups[document])  # one of each group, then one of those of each text
        chosen = first([member for member in twins[survivor] if first(groups[member]) == member])
        kept = document if mode == "off" else chosen
        sets = {reference for reference, hit in hits if hit in connected[document]}
        if sets & excluding:
            reason = "reference"
        elif kept == document:
            reason = "kept"
        else:
            reason = "exact_duplicate" if doc_ids[kept] == doc_ids[document] else "near_duplicate"
        decisions.append(
            {
                "cluster": min(cluster, key=lambda member: (doc_ids[member], coordinates[member])),
                "kept": kept,
                "cluster_size": len(cluster),
                "reason": reason,
                "barred": bool(sets),
                "matched_sets": sets,
                "pool_tags": {coordinates[member][0] for member in twins[document]},
            }
        )
    return decisions


def match_references(corpus, references, order_of):
    """Each reference with the first document of every bucket that they share; both are lists of (key, number)."""
    return sorted(
        {
            (
                reference,
                min((document for other, document in corpus if other == key), key=lambda one: (order_of[one], one)),
            )
            for key, reference in references
            if any(other == key for other, _ in corpus)
        }
    )


def sharing_a_key(keys):
    """Every pair of documents, smaller first, with an equal key in the same band; 0 is no key."""
    return [
        (left, right)
        for right in range(len(keys))
        for left in range(right)
        if any(one == other != 0 for one, other in zip(keys[left], keys[right], strict=True))
    ]
