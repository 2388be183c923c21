"""Slow and plain deduplication decisions with sets and breadth-first search; nothing of the project is imported."""

from collections import deque

import naive_text


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


def decide(doc_ids, coordinates, edges, hits, mode, excluding, seed):
    """One dict a document: doc_ids are bytes, coordinates tuples with the pool's priority first."""
    documents = range(len(doc_ids))
    same_text = [(left, right) for left in documents for right in documents if doc_ids[left] == doc_ids[right]]
    twins = components(len(doc_ids), same_text)
    connected = components(len(doc_ids), [*same_text, *edges])
    clusters = twins if mode == "exact" else connected
    decisions = []
    for document in documents:
        cluster = clusters[document]
        chosen = min(
            cluster,
            key=lambda member: (
                coordinates[member][0],
                naive_text.keyed_hash(doc_ids[member], seed),
                doc_ids[member],
                coordinates[member],
            ),
        )
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


def match_references(corpus, references):
    """Each reference with the smallest document of every bucket that they share; both are lists of (key, number)."""
    return sorted(
        {
            (reference, min(document for other, document in corpus if other == key))
            for key, reference in references
            if any(other == key for other, _ in corpus)
        }
    )
