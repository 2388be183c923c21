"""Slow and plain versions of what happens to texts; they import nothing of the project."""

import unicodedata
from collections import deque
from fractions import Fraction

MASK_64 = (1 << 64) - 1

CJK_NAMES = ("CJK", "HIRAGANA", "KATAKANA", "IDEOGRAPH", "HANGZHOU", "KANA ", "HENTAIGANA")
NOT_CJK_NAMES = ("PARENTHESIZED", "CIRCLED", "IDEOGRAPHIC ANNOTATION", "IDEOGRAPHIC TALLY")


def lower(character):
    return character.lower() if len(character.lower()) == 1 else character


def kind(character):
    """'single', 'run' or 'separator'."""
    major = unicodedata.category(character)[0]
    name = unicodedata.name(character, "")
    if major in "LN" and any(part in name for part in CJK_NAMES) and not name.startswith(NOT_CJK_NAMES):
        return "single"
    return "run" if major in "LMN" else "separator"


def words(text):
    found, run = [], ""
    for character in text:
        if kind(character) == "run":
            run += lower(character)
            continue
        found += [run] if run else []
        found += [character] if kind(character) == "single" else []
        run = ""
    return found + ([run] if run else [])


def fmix64(value):
    value ^= value >> 33
    value = value * 0xFF51AFD7ED558CCD & MASK_64
    value ^= value >> 33
    value = value * 0xC4CEB9FE1A85EC53 & MASK_64
    return value ^ value >> 33


def word_hash(word):
    value = 0xCBF29CE484222325
    for character in word:
        value = (value ^ ord(character)) * 0x100000001B3 & MASK_64
    return fmix64(value)


def shingle_hash(some_words):
    value = 0
    for word in some_words:
        value = (value * 0x9E3779B97F4A7C15 + word_hash(word)) & MASK_64
    return fmix64((value + len(some_words) * 0xD6E8FEB86659FD93) & MASK_64) >> 32


def shingles(text, ngram):
    """The shingles themselves, as tuples of words."""
    found = words(text)
    if not found:
        return []
    return [tuple(found[i : i + ngram]) for i in range(max(1, len(found) - ngram + 1))]


def shingle_hashes(text, ngram):
    return [shingle_hash(shingle) for shingle in shingles(text, ngram)]


def fmix32(value):
    value ^= value >> 16
    value = value * 0x85EBCA6B & 0xFFFFFFFF
    value ^= value >> 13
    value = value * 0xC2B2AE35 & 0xFFFFFFFF
    return value ^ value >> 16


def signature(hashes, multipliers, addends):
    return [
        min(((a * fmix32(h) + b) & 0xFFFFFFFF for h in hashes), default=0xFFFFFFFF)
        for a, b in zip(multipliers, addends, strict=True)
    ]


def jaccard(left, right):
    left, right = set(left), set(right)
    return len(left & right) / len(left | right) if left | right else 0.0


def star_edges(keys, nodes):
    """Smallest node of each group of equal keys with each other one; key 0 is no key."""
    groups = {}
    for key, node in zip(keys, nodes, strict=True):
        groups.setdefault(key, set()).add(node)
    return sorted({(min(g), node) for key, g in groups.items() if key for node in g if node != min(g)})


def components(num_nodes, pairs):
    """Smallest reachable node of each node, by breadth-first search."""
    neighbours = [[] for _ in range(num_nodes)]
    for left, right in pairs:
        neighbours[left].append(right)
        neighbours[right].append(left)
    labels = [-1] * num_nodes
    for start in range(num_nodes):
        queue = deque([start] if labels[start] < 0 else [])
        while queue:
            node = queue.popleft()
            if labels[node] < 0:
                labels[node] = start
                queue.extend(neighbours[node])
    return labels


def kept(labels, priorities, keys):
    best = {}
    for node, (label, *rank) in enumerate(zip(labels, priorities, keys, strict=True)):
        best[label] = min(best.get(label, (float("inf"),)), (*rank, node))
    return [best[label][-1] for label in labels]


def keyed_hash(doc_id, key):
    value = fmix64(key)
    for start in range(0, 32, 8):
        value = fmix64(value ^ int.from_bytes(doc_id[start : start + 8], "little"))
    return value


def fraction_split(doc_id, key, validation, test=0.0):
    point = Fraction(keyed_hash(doc_id, key), 1 << 64)
    if point < Fraction(validation):
        return "validation"
    return "test" if point < Fraction(validation) + Fraction(test) else "train"


def budget_split(ids, num_tokens, barred, validation_tokens, test_tokens):
    """One document after the other; a unit is its id's documents and goes where its first one goes."""
    split, used = {}, {"validation": 0, "test": 0}
    for doc_id in dict.fromkeys(ids):
        members = [i for i, other in enumerate(ids) if other == doc_id]
        split[doc_id] = "train"
        for name, budget in (("validation", validation_tokens), ("test", test_tokens)):
            if split[doc_id] == "train" and not any(barred[i] for i in members) and used[name] < budget:
                split[doc_id] = name
                used[name] += sum(num_tokens[i] for i in members)
    return [split[doc_id] for doc_id in ids]


def fill_budget(num_tokens, budget):
    """Which documents are taken, in order, until the budget is filled; the last may overshoot."""
    taken, used = [], 0
    for count in num_tokens:
        taken.append(used < budget)
        used += count if used < budget else 0
    return taken
