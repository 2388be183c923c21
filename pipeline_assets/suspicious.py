"""What a person should look at first: examples from the ends of every distribution, drawn from sealed artifacts.

In: references and the stage that opens them. Out: tables and drawings for the report's page. Nothing is decided here.
The cost: one column of lengths a unit, and the texts of the few documents that are shown.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from pipeline_assets.duplicates import EXAMPLES_NAME, EXCERPT_CHARACTERS, LARGEST_NAME
from pipeline_assets.floors import SHORTEST_NAME
from pipeline_assets.quality_page import Block, CutText, Drawing, Note, Spelled, Table, table_of
from pipeline_assets.quality_tables import legend_of
from pipeline_assets.schemas import ExamplePairs, SplitDocuments
from pipeline_assets.shown_columns import OF_CUTS, TABLES, of_contract
from pipeline_assets.splits import TABLE_NAME
from pipeline_assets.stripes import Stage, number_in_words, units_in
from pipeline_assets.tokenizer import open_tokenizer
from pipeline_assets.transforms.drawings import attention_svg, pack_svg
from resources.artifact_store import ArtifactRef
from resources.tables import read_rows, read_table
from resources.tokenizer import Tokenizer
from training_io.plan import Plan, load_plan

NUM_SHOWN = 10
CONTEXT_CHARACTERS = 60  # on each side of a document's first border
CONTEXT_TOKENS = 8 * CONTEXT_CHARACTERS  # behind it: no character takes more tokens
MAX_CUT_DOCUMENTS = 256  # looked at
MAX_DRAWN_SEGMENTS = 512
TEXT_CHARACTERS = 300

I64 = npt.NDArray[np.int64]


def largest_clusters(stage: Stage, lsh_clusters: ArtifactRef) -> Iterator[Block]:
    """The clusters of most documents: a chain of unlike pages shows as a low least similarity."""
    columns = ("documents", "min_jaccard", "mean_jaccard", "compared", "first_words", "pools", "dumps", "files")
    rows = stage.table(lsh_clusters, LARGEST_NAME, columns).to_pylist()
    shown = [
        {
            **row,
            "compared": f"{row['compared']:,} of {row['documents']:,}",
            "first_words": _marked(row["first_words"], EXCERPT_CHARACTERS),
        }
        for row in rows
    ]
    files = {row["files"].rpartition(" × ")[0] for row in rows}
    if len(files) == 1 and " × " not in next(iter(files)):  # one file, the same beside every cluster
        shown = [{name: value for name, value in row.items() if name != "files"} for row in shown]
    yield table_of(
        "Largest clusters", shown, NUM_SHOWN, TEXT_CHARACTERS, meanings=legend_of(TABLES["largest_clusters"])
    )
    if any(row["compared"] < row["documents"] for row in rows):
        yield Note(
            text="Similarities, pools, crawls and files are of the documents compared, not of the whole cluster."
        )


def _marked(text: str, stored_characters: int) -> str:
    """A text that was stored up to so many characters, with … where there may be more of it."""
    return f"{text}…" if len(text) >= stored_characters else text


def near_pairs(stage: Stage, lsh_clusters: ArtifactRef) -> Iterator[Block]:
    """Removed near-copies beside what was kept: the least similar, which may be none, and the most similar."""
    rows = stage.table(lsh_clusters, EXAMPLES_NAME).to_pylist()
    near = [row for row in rows if row["removed_doc_id"] != row["kept_doc_id"]]
    near.sort(key=lambda row: (-row["jaccard"], row["removed_doc_id"]))
    columns = ("jaccard", "shared_bands", "removed_text", "kept_text", "removed_url", "kept_url")
    shown = [{column: row[column] for column in columns} for row in near]
    for row in shown:
        row |= {side: _marked(row[side], EXCERPT_CHARACTERS) for side in ("removed_text", "kept_text")}
    legend = legend_of(of_contract(ExamplePairs))
    yield table_of("Least similar pairs of the examples", shown[::-1], NUM_SHOWN, TEXT_CHARACTERS, meanings=legend)
    yield table_of("Most similar pairs of the examples", shown, NUM_SHOWN, TEXT_CHARACTERS, meanings=legend)


def shortest_documents(stage: Stage, split_documents: ArtifactRef) -> Iterator[Block]:
    """The kept documents of fewest tokens, as the split's plan stored them."""
    for plan in stage.open(split_documents)[1].inputs["plans"]:
        folder = stage.store.root / split_documents.asset / plan["unit"] / plan["identity"]
        rows = [{**row, "text": Spelled(row["text"])} for row in read_table(folder / SHORTEST_NAME).to_pylist()]
        legend = legend_of(TABLES["shortest_documents"])
        yield table_of("Shortest kept documents", rows, NUM_SHOWN, TEXT_CHARACTERS, meanings=legend)


def longest_documents(stage: Stage, split_documents: ArtifactRef) -> Iterator[Block]:
    """The documents of most tokens, with how they begin."""
    tables = [stage.folder(unit) / TABLE_NAME for unit in units_in(stage, split_documents)]
    lengths = [np.asarray(read_table(path, ["num_tokens"]).column("num_tokens"), np.int64) for path in tables]
    table_of_row = np.repeat(np.arange(len(tables)), [len(some) for some in lengths])
    row_in_table = np.concatenate([np.arange(len(some)) for some in [np.empty(0), *lengths]]).astype(np.int64)
    order = np.argsort(-np.concatenate([np.empty(0, np.int64), *lengths]), kind="stable")[:NUM_SHOWN]
    columns = ("doc_id", "num_tokens", "pool", "split", "reason", "text")
    rows = [
        row
        for place in order.tolist()
        for row in read_rows(tables[table_of_row[place]], row_in_table[place : place + 1], columns).to_pylist()
    ]
    legend = legend_of(of_contract(SplitDocuments))
    yield table_of("Longest kept documents", rows, NUM_SHOWN, TEXT_CHARACTERS, meanings=legend)


@dataclass(frozen=True, kw_only=True)
class Cut:
    """A document's text around its first segment border, in parts that end at each border in it."""

    text: CutText
    is_inside_character: bool
    is_inside_word: bool


def cut_examples(stage: Stage, packing_plan: ArtifactRef, tokenizer: ArtifactRef, split: str) -> Iterator[Block]:
    """Documents cut into segments: ␟ stands where one ends, those cut inside a character or a word first."""
    plan, encoder = _plan(stage, packing_plan, split), open_tokenizer(stage, tokenizer)
    documents = np.flatnonzero(plan.planned_lengths - 1 > plan.max_seq_len)
    if not len(documents):
        yield Note(text=f"No document of {split} is cut: none has more than {plan.max_seq_len:,} inputs.")
        return
    cuts = [(document, cut_text(plan, encoder, document)) for document in documents[:MAX_CUT_DOCUMENTS].tolist()]
    cuts.sort(key=lambda cut: (not cut[1].is_inside_character, not cut[1].is_inside_word, cut[0]))
    rows = [
        {
            "document": plan.index.doc_ids[document].tobytes(),
            "pool": plan.index.pool_names[plan.index.pools[document]],
            "tokens": int(plan.index.lengths[document]),
            "segments": len(plan.segments.numbers_of(np.array([document]))),
            "inside_a_character": cut.is_inside_character,
            "inside_a_word": cut.is_inside_word,
            "text": cut.text,
        }
        for document, cut in cuts[:NUM_SHOWN]
    ]
    caption = f"Documents of {split} that are cut, around their first border (␟ on red ends a segment)"
    yield table_of(caption, rows, NUM_SHOWN, TEXT_CHARACTERS, meanings=legend_of(OF_CUTS))
    yield Note(
        text=f"{len(documents):,} documents of {split} are cut. Every pair across a border is still trained once."
    )


def cut_text(plan: Plan, tokenizer: Tokenizer, document: int) -> Cut:
    """The text around the end of a document's first segment, cut where each segment in it ends.

    A border inside a character, of which the tokenizer made several tokens, is put before the character.
    """
    ends = plan.locate(plan.segments.numbers_of(np.array([document])))[2][:-1]
    last = int(plan.index.lengths[document]) - 1  # the EOS is no text
    ids = document_tokens(plan, document, min(last, int(ends[0]) + CONTEXT_TOKENS))
    (text,) = tokenizer.decode_batch([ids])
    within = [int(end) for end in ends if end < len(ids)]
    before = tokenizer.decode_batch([ids[:end] for end in within])
    places = [_shared_length(part, text) for part in before]
    first = places[0]
    start, stop = max(0, first - CONTEXT_CHARACTERS), min(len(text), first + CONTEXT_CHARACTERS)
    bounds = [start, *(place for place in places if place < stop), stop]
    return Cut(
        text=CutText(parts=[text[one:other] for one, other in pairwise(bounds)]),
        is_inside_character=len(before[0]) > first,
        is_inside_word=text[max(0, first - 1) : first].isalnum() and text[first : first + 1].isalnum(),
    )


def _shared_length(one: str, other: str) -> int:
    """Characters with which both begin; the token behind a cut character decodes to another than it."""
    if other.startswith(one):
        return len(one)
    return next(at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)


def document_tokens(plan: Plan, document: int, count: int) -> list[int]:
    """The first tokens of a document of the plan."""
    offset = int(plan.index.offsets[document])
    ids: list[int] = plan.token_shards[int(plan.index.shards[document])][offset : offset + count].tolist()
    return ids


def drawn_packs(stage: Stage, packing_plan: ArtifactRef, tokenizer: ArtifactRef, split: str) -> Iterator[Block]:
    """The fullest and the emptiest pack as blocks, what the fullest holds, and who attends to whom in it."""
    plan, encoder = _plan(stage, packing_plan, split), open_tokenizer(stage, tokenizer)
    inputs = plan.pack_inputs(np.arange(plan.num_packs))
    num_segments = np.diff(plan.pack_offsets.astype(np.int64))
    drawable = np.flatnonzero(num_segments <= MAX_DRAWN_SEGMENTS)
    if not len(drawable):
        yield Note(text=f"{split} has no pack of at most {MAX_DRAWN_SEGMENTS:,} segments to draw.")
        return
    fullest = int(drawable[np.lexsort([-num_segments[drawable], -inputs[drawable]])[0]])  # of many segments
    emptiest = int(drawable[inputs[drawable].argmin()])
    for name, pack in (("fullest", fullest), ("emptiest", emptiest)):
        lengths = pack_lengths(plan, pack)
        share, segments = 100 * sum(lengths) / plan.capacity, number_in_words(len(lengths), "segment")
        yield Drawing(
            svg=pack_svg(lengths, plan.capacity),
            alternative=f"The {name} pack of {split}, pack {pack:,}: {segments}, a block each,"
            f" {sum(lengths):,} of {plan.capacity:,} tokens ({share:.1f} %)",
        )
    yield _contents(plan, encoder, fullest)
    lengths = pack_lengths(plan, fullest)
    pairs = sum(length * (length + 1) // 2 for length in lengths)
    yield Drawing(
        svg=attention_svg(lengths),
        alternative=f"Attention in pack {fullest:,}: queries down, keys across, a block a segment. {pairs:,} pairs"
        f" attend, of {sum(lengths) * (sum(lengths) + 1) // 2:,} under one causal mask over the whole pack",
        shape="square",
    )


def pack_lengths(plan: Plan, pack: int) -> list[int]:
    """Inputs of each segment of a pack, in its order."""
    _, start, end = plan.locate(plan.segments_of(np.array([pack])))
    lengths: list[int] = (end - start).tolist()
    return lengths


def _contents(plan: Plan, tokenizer: Tokenizer, pack: int) -> Table:
    doc, start, end = (column.tolist() for column in plan.locate(plan.segments_of(np.array([pack]))))
    rows = []
    for document, first, last in list(zip(doc, start, end, strict=True))[:NUM_SHOWN]:
        ids = document_tokens(plan, document, last)[first : first + CONTEXT_CHARACTERS]
        rows.append(
            {
                "document": plan.index.doc_ids[document].tobytes(),
                "pool": plan.index.pool_names[plan.index.pools[document]],
                "inputs": f"{first:,} to {last:,}",
                "tokens": last - first,
                "begins": tokenizer.decode_batch([ids])[0] + ("…" if last - first > len(ids) else ""),
            }
        )
    return table_of(f"What pack {pack:,} holds", rows, NUM_SHOWN)


def _plan(stage: Stage, packing_plan: ArtifactRef, split: str) -> Plan:
    return load_plan(stage.folder(packing_plan), split, allow_quarantined=stage.is_judging)
