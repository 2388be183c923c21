"""Overlap by sets of word tuples, slow and plain; it imports nothing of the project."""

from naive_text import words


def ngrams(text, ngram, min_words):
    """An item's distinct n-grams in order; none where it has too few words."""
    found = words(text)
    if len(found) < min_words:
        return []
    length = min(ngram, len(found))
    return list(dict.fromkeys(tuple(found[i : i + length]) for i in range(len(found) - length + 1)))


def holds(document, ngram):
    """Whether a document's words have the n-gram in a row."""
    found = words(document)
    return any(tuple(found[i : i + len(ngram)]) == ngram for i in range(len(found) - len(ngram) + 1))


def overlap(items, documents, ngram, min_words, max_documents):
    """Hits (item, document, n-grams, n-grams of the item, excerpt), and boilerplate {n-gram: (documents, items)}.

    Of equal documents the first one stands for all, in hits and where boilerplate is told by its number of texts.
    """
    of_item = [ngrams(item, ngram, min_words) for item in items]
    holders = {one: [d for d, text in enumerate(documents) if holds(text, one)] for some in of_item for one in some}
    common = {one: found for one, found in holders.items() if len({documents[d] for d in found}) > max_documents}
    hits = []
    for item, some in enumerate(of_item):
        for document in sorted(documents.index(text) for text in set(documents)):
            matching = [one for one in some if one not in common and document in holders[one]]
            if matching:
                hits.append((item, document, len(matching), len(some), " ".join(matching[0])))
    return hits, {" ".join(one): (len(found), sum(one in some for some in of_item)) for one, found in common.items()}
