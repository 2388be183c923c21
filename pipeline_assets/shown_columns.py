"""What the columns of tables on asset pages mean: a unit and a sentence for each, table by table.

In: a table's name, or what its rows are stored as. Out: its columns, which the UI shows as its schema. The promise:
every column of an asset's page is explained, and nothing else; tests compare them with what runs write. What is stored
under a contract, or stated by `STORED`, is described there: here are the units of a contract's numbers. The cost: a
dictionary when the definitions load.
"""

from collections.abc import Mapping

from pipeline_assets.columns import STORED
from pipeline_assets.measures import SHARE, Measure, Measures
from pipeline_assets.schemas import (
    BoilerplateNgrams,
    Clusters,
    Contract,
    ExamplePairs,
    FloorEffects,
    LargestClusters,
    MixtureLedger,
    RawRows,
    ReferenceHits,
    RemovedByPair,
    RowFilterEffects,
    SampledColumns,
    SampledFiles,
    SampledThresholds,
    ShortestDocuments,
    SplitDocuments,
)
from pipeline_assets.stored import PLACE_UNIT
from pipeline_assets.transforms.tokenizer_comparison import LENGTH_SHARES
from training_io.packing import STRATEGIES

LAYOUTS = ("truncated", "concatenated", *STRATEGIES)
QUANTILES = ("1%", "10%", "25%", "50%", "75%", "90%", "99%")
EXAMPLE_COLUMNS = {"jaccard": "jaccard", "shared_bands": "bands", "removed_text": "removed", "kept_text": "kept"}
"""Of the stored pairs, as a narrow table names them: the others are in the file that the page links."""

UNITS: Mapping[type[Contract], Mapping[str, str]] = {
    RawRows: {"row_group": PLACE_UNIT, "row": PLACE_UNIT, "language_score": SHARE, "score": "the source's"},
    Clusters: {"cluster_size": "documents"},
    SplitDocuments: {"num_tokens": "tokens"},
    SampledColumns: {
        **dict.fromkeys(("files", "files_without"), "files"),
        **dict.fromkeys(("with_value", "without_value"), "documents"),
        **dict.fromkeys(("mean", "smallest", "largest"), "the column's"),
        **dict.fromkeys(("p1", "p5", "p25", "p50", "p75", "p95", "p99"), "the column's"),
    },
    SampledFiles: {
        **dict.fromkeys(("row_groups", "row_groups_read", "row_groups_excluded"), "row groups"),
        **{"documents": "documents", "text_bytes": "bytes", "num_dumps": "crawls"},
    },
    SampledThresholds: {
        **{"threshold": "the score's", "documents": "documents", "text_bytes": "bytes"},
        **dict.fromkeys(("share_of_documents", "share_of_bytes"), SHARE),
    },
    RowFilterEffects: {
        **dict.fromkeys(("documents", "removed_documents", "failing_documents", "failing_without_value"), "documents"),
        **dict.fromkeys(("text_bytes", "removed_bytes", "failing_bytes"), "bytes"),
        **{"row_groups_excluded": "row groups", "rows_excluded": "rows"},
    },
    ReferenceHits: {"jaccard": SHARE, "num_ngrams": "runs of words"},
    BoilerplateNgrams: {"num_documents": "documents", "num_items": "texts"},
    LargestClusters: {
        **dict.fromkeys(("documents", "compared"), "documents"),
        **dict.fromkeys(("min_jaccard", "mean_jaccard"), SHARE),
    },
    ExamplePairs: {"jaccard": SHARE, "shared_bands": "bands"},
    RemovedByPair: {"documents": "documents", "bytes": "bytes"},
    FloorEffects: {
        **{"floor": "tokens", "documents": "documents", "tokens": "tokens"},
        **dict.fromkeys(("share_of_documents", "share_of_tokens"), SHARE),
        **dict.fromkeys(("mean_score", "mean_score_of_all"), "the source's"),
    },
    ShortestDocuments: {"num_tokens": "tokens", "score": "the source's"},
    MixtureLedger: {
        "first_step": "step",
        "first_token": "tokens",
        **{f"{kind}_tokens": "tokens" for kind in ("quota", "body", "eos", "overlap", "loss", "inventory")},
        "tokens": "tokens",
        **dict.fromkeys(("documents_unique", "documents_unread"), "documents"),
        **{"documents_seen": "times", "passes": "passes", "passes_so_far": "passes"},
    },
}
"""Units of the numbers under a contract that a page shows."""


def of_contract(contract: type[Contract]) -> Measures:
    """A contract's columns, each described as its field is."""
    units = UNITS.get(contract, {})
    return {name: Measure(units.get(name, ""), field.description) for name, (_, field) in contract.__fields__.items()}


def of_stored(asset: str, parent: str = "") -> Measures:
    """What an asset states of what it stores, of JSON files the fields below `parent`."""
    columns = [column for column in STORED[asset].columns if not column.key or column.key == f"{parent}{column.name}"]
    return {column.name: Measure(column.unit, column.description) for column in columns}


def _length_of(share: str) -> Measure:
    return Measure("tokens", f"Length that {share} of them do not exceed")


POOL, FILE = Measure("", "Pool"), Measure("", "Source file, relative to its pool")
SPLIT = Measure("", "Split")
ROW_LENGTH = Measure("tokens", "Cells of a row")
TEXT_BYTES = Measure("bytes", "UTF-8 bytes of their texts")
TOKENS = Measure("tokens", "Their tokens, one end-of-document token each included")
BYTES_A_TOKEN = Measure("bytes a token", "UTF-8 bytes of text over tokens")
PAIRS_A_TOKEN = "pairs a token"
RATIO = "ratio"
PERCENT = "%"

COST: Measures = {
    "ranges": Measure("ranges", "Byte ranges that were asked for"),
    "requests": Measure("requests", "Sent for them"),
    "retries": Measure("tries", "Tries after the first one of a byte range"),
    "bytes fetched": Measure("bytes", "Received for them"),
    "commit": Measure("", "Commit of the Hub that was read, else empty"),
    "content": Measure("", "Hash or ETag that the source gave of the file, else empty"),
}
BY_NAME: Measures = {
    "documents": Measure("documents", "Documents of that name, before filters"),
    "share_of_documents": Measure(SHARE, "Of all documents read, before filters"),
    "text_bytes": TEXT_BYTES,
    "files": Measure("files", "Files that have any"),
    "pools": Measure("pools", "Pools that have any"),
}
OF_A_SPLIT: Measures = {
    "split": SPLIT,
    "documents": Measure("documents", "Documents in the split"),
    "packs": Measure("packs", "Packs of the split"),
    "segments": Measure("segments", "Segments in those packs"),
    "targets": Measure("tokens", "Tokens with a loss when each pack is read once"),
    "repeated": Measure("tokens", "Inputs that repeat the segment before theirs, without a loss"),
    "steps": Measure("steps", "Steps that read what the plan schedules once"),
}
OF_CUTS: Measures = {
    "tokens": Measure("tokens", "Tokens of the document, the end-of-document token included"),
    "segments": Measure("segments", "Segments that it is cut into"),
    "inside_a_character": Measure("", "Whether its first border is inside a character"),
    "inside_a_word": Measure("", "Whether its first border is inside a word"),
}
"""Of the documents that are cut, which the report alone shows."""
OF_LAYOUTS: Measures = {
    "row_length": ROW_LENGTH,
    "documents_packed": Measure("documents", "Documents that the strategies packed; of very many every n-th"),
}
OF_A_TOKENIZER: Measures = of_stored("tokenizer_report", "tokenizers[].")

TABLES: Mapping[str, Measures] = {
    # raw_row_groups
    "schema_drift": {
        "pool": POOL,
        "file": FILE,
        "absent": Measure("", "Columns that are looked for and are not in the file, with commas"),
        "not read": Measure("", "Columns of the file that are not looked at, with commas"),
    },
    "sampled_columns": of_contract(SampledColumns),
    "sampled_files": of_contract(SampledFiles),
    "sampled_dumps": {"name": Measure("", "Crawl; (none): the source names none"), **BY_NAME},
    "sampled_languages": {"name": Measure("", "Language; (none): the source names none"), **BY_NAME},
    "sampled_int_scores": {
        "pool": POOL,
        "int_score": Measure("the source's", "Rounded quality score given by the source"),
        "documents": Measure("documents", "Documents with that score, before filters"),
        "text_bytes": TEXT_BYTES,
    },
    "score_thresholds": of_contract(SampledThresholds),
    "filters": of_contract(RowFilterEffects),
    "fetched": {
        "pool": POOL,
        "file": FILE,
        "row groups": Measure("row groups", "Row groups that were read"),
        **COST,
    },
    "fetched_by_row_group": {
        "pool": POOL,
        "file": FILE,
        "row group": Measure(PLACE_UNIT, "Row group within the file"),
        "byte ranges": Measure("", "First byte of each range, and the one behind its last"),
        **COST,
    },
    # reference_sets
    "sets": {"set": Measure("", "Name of the reference set"), "texts": Measure("texts", "Texts of the set")},
    # minhash_signatures
    "scurve_table": {
        "similarity": Measure(SHARE, "Mean Jaccard similarity of the pairs of the range"),
        "pairs": Measure("pairs", "Pairs of a text and a planted copy in the range"),
        "flagged": Measure(SHARE, "Those of them that share a band, over `pairs`"),
        "predicted": Measure(SHARE, "The same by the formula"),
        "low": Measure(SHARE, "Lower end of the 95 % interval of `flagged`"),
        "high": Measure(SHARE, "Upper end of it"),
    },
    # lsh_clusters
    "removed_by_pool": {
        "pool": POOL,
        "documents": Measure("documents", "Documents of the pool"),
        "removed": Measure("documents", "Exact and near duplicates of them that were removed"),
        "bytes": Measure("bytes", "UTF-8 bytes of the pool's texts"),
        "removed_bytes": Measure("bytes", "UTF-8 bytes of the removed texts"),
    },
    "removed_by_pool_and_kept_pool": of_contract(RemovedByPair),
    "removed_by_dump_and_kept_dump": of_contract(RemovedByPair),
    "largest_clusters": of_contract(LargestClusters),
    "example_pairs": {
        **{shown: of_contract(ExamplePairs)[name] for name, shown in EXAMPLE_COLUMNS.items()},
        "removed": Measure("", "How the removed document begins"),
        "kept": Measure("", "How the document kept in its place begins"),
    },
    "reference_hits_by_set": {
        "set": Measure("", "Name of the reference set"),
        "texts": Measure("texts", "Texts of the set"),
        "exact_documents": Measure("documents", "Documents whose text is one of them"),
        "exact_by_chance": Measure("documents", "So many would be by chance; empty: no universe_documents"),
        "matched_documents": Measure("documents", "Documents of clusters that the set matches"),
        "kept_out_of_validation": Measure("documents", "Those of them that stay, and not for validation"),
        "removed": Measure("documents", "Those of them that the set excludes"),
        "exact_hits": Measure("hits", "Pairs of a text of the set and an identical document"),
        "near_hits": Measure("hits", "Pairs that share a band"),
        "overlap_hits": Measure("hits", "Pairs that share a run of words"),
    },
    "reference_hits": of_contract(ReferenceHits),
    "boilerplate_ngrams": of_contract(BoilerplateNgrams),
    # tokenizer_report
    "comparison": OF_A_TOKENIZER,
    "comparison_by_pool": {
        "tokenizer": OF_A_TOKENIZER["tokenizer"],
        "pool": POOL,
        "documents": Measure("documents", "Documents drawn from the pool"),
        "text_bytes": TEXT_BYTES,
        "tokens": TOKENS,
        "bytes_a_token": BYTES_A_TOKEN,
        "round_trip_share": Measure(SHARE, "Those of them that decode to their text, over `documents`"),
        "mean_length": Measure("tokens", "`tokens` over `documents`"),
        **{f"length_{share:.0%}": _length_of(f"{share:.0%}") for share in LENGTH_SHARES},
        "longest": Measure("tokens", "Length of the longest"),
    },
    "inventory": {
        "pool": POOL,
        "documents": Measure("documents", "Kept documents of the pool"),
        "text_bytes": TEXT_BYTES,
        "tokens": TOKENS,
        "bytes_a_token": BYTES_A_TOKEN,
        "tokens_a_document": Measure("tokens a document", "`tokens` over `documents`"),
    },
    # split_documents; `splits` of token_shards and packing_plan too
    "splits": {
        **OF_A_SPLIT,
        "tokens": TOKENS,
        "shards": Measure("files", "Token files of the split"),
        "diverted": Measure("documents", "Documents in no pack, being too long"),
        "utilisation": Measure(SHARE, "Tokens over the room of the packs"),
    },
    "unused": {
        "reason": Measure("", "Why documents are in no split"),
        "documents": Measure("documents", "Documents in no split for this reason"),
        "tokens": TOKENS,
        "bytes": TEXT_BYTES,
    },
    "floors": of_contract(FloorEffects),
    "shortest_documents": of_contract(ShortestDocuments),
    # packing_plan
    "balance": {
        "ranks": Measure("ranks", "Ranks that share each step's packs"),
        "inputs %": Measure(PERCENT, "Tokens that the fullest rank of a step has beyond the mean, mean of steps"),
        "squares %": Measure(PERCENT, "The same of squared lengths: the work of attention"),
        "inputs_in_turn %": Measure(PERCENT, "Tokens, were the packs dealt in turn"),
        "squares_in_turn %": Measure(PERCENT, "Squared lengths, were the packs dealt in turn"),
    },
    # packing_stats
    "layouts": of_stored("packing_stats", "all_layouts[]."),
    "strategies": {
        "strategy": Measure("", "How segments are put into packs"),
        "packs": Measure("packs", "Packs"),
        "packs_above_minimum": Measure("packs", "Packs beyond the fewest that so many tokens need"),
        "waste": Measure(SHARE, "Room of the packs that no token fills"),
        "segments_a_pack": Measure("segments a pack", "Segments over packs"),
        "mean_displacement": Measure("packs", "How far a segment is from its place in the order of arrival, mean"),
        "max_displacement": Measure("packs", "The farthest"),
    },
    "utilisation_by_row_length": {
        **OF_LAYOUTS,
        **{name: Measure(SHARE, f"Cells that hold a token over all cells, {name}") for name in LAYOUTS},
    },
    "rows_by_row_length": {**OF_LAYOUTS, **{name: Measure("rows", f"Rows, {name}") for name in LAYOUTS}},
    "windows": {
        "row_length": Measure("tokens", "Tokens of a window"),
        "windows": Measure("windows", "Windows over the concatenated documents"),
        "share_with_boundary": Measure(SHARE, "Windows that hold tokens of several documents"),
        "documents_a_window": Measure("documents", "Documents with a token in a window, mean"),
        "share_of_tokens_after_unrelated": Measure(SHARE, "Tokens in a window behind the end of another document"),
        "documents_cut": Measure("documents", "Documents that are in more than one window, or not whole"),
        "share_of_documents_cut": Measure(SHARE, "`documents_cut` over all documents"),
        "tail_left_out": Measure("tokens", "Tokens at the end that fill no window"),
    },
    "attention_work": {
        "row_length": ROW_LENGTH,
        "padded_pairs_a_token": Measure(PAIRS_A_TOKEN, "Query-key pairs of padded rows, each one causal sequence"),
        "masked_pairs_a_token": Measure(PAIRS_A_TOKEN, "The same of packs, under a mask that skips nothing"),
        "varlen_pairs_a_token": Measure(PAIRS_A_TOKEN, "The same of packs, each segment by itself"),
        "padded_over_varlen": Measure(RATIO, "`padded_pairs_a_token` over `varlen_pairs_a_token`"),
        "masked_over_varlen": Measure(RATIO, "`masked_pairs_a_token` over `varlen_pairs_a_token`"),
    },
    "counted_apart": {
        **OF_A_SPLIT,
        "tokens": TOKENS,
        "free_slots": Measure("tokens", "Room of the packs that no token fills"),
        "packs_above_minimum": Measure("packs", "Packs beyond the fewest that so many tokens need"),
    },
    "lengths": {
        "of": Measure("", "What the lengths are of"),
        "number": Measure("documents or segments", "How many there are"),
        "mean": Measure("tokens", "Mean length"),
        **{share: _length_of(share) for share in QUANTILES},
        "longest": Measure("tokens", "Length of the longest"),
    },
    "choices": {
        "choice": Measure("", "A way of making batches"),
        "for": Measure("", "What speaks for it"),
        "against": Measure("", "What speaks against it"),
        "here": Measure("", "What it comes to on these documents"),
    },
    # mixture_ledger
    "ledger": of_contract(MixtureLedger),
}
"""Every table of an asset's page but its sample rows; those of one name on several pages share their columns."""

SAMPLES: Mapping[str, Measures] = {
    "tokenizer": {
        "token": Measure("", "The token, as the model spells it"),
        "id": Measure("id", "Its id"),
    },
    "token_shards": {"split": SPLIT},
    "packing_plan": {
        "split": SPLIT,
        "pack": Measure(PLACE_UNIT, "Number of the pack"),
        "segments": Measure("", "Numbers of its segments, the first of them"),
    },
    "handoff_package": {"split": SPLIT},
    "varlen_training_run": {"step": Measure("step", "Step, counted from 1")},
    "quality_report": {
        "check": Measure("", "Name of the check"),
        "outcome": Measure("", "What it last said of the present bytes"),
    },
}
"""What sample rows show beside the columns that the asset states."""

PARENTS = {"tokenizer_report": "tokenizers[].", "packing_stats": "all_layouts[]."}
"""Where the rows of an asset are a list of a JSON file."""


def columns_of_sample(asset: str) -> Measures:
    """Columns of the sample rows of an asset in STORED."""
    return {**of_stored(asset, PARENTS.get(asset, "")), **SAMPLES.get(asset, {})}
