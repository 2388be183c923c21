"""What the numbers on asset pages mean: a unit and a sentence for each, asset by asset.

In: an asset's name. Out: the table `numbers` of its definition, which stays the same from run to run. The promise:
every number of an event is explained, and nothing else; tests compare them with what runs write. The cost: a few small
tables when the definitions load, nothing in an event. A name in angle brackets stands for several: `<pool>` for each
pool's.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import dagster as dg


class Measure(NamedTuple):
    """A number of an asset's page; `where` says under which recipe or machine it is there, if not always."""

    unit: str
    meaning: str
    where: str = ""


Measures = Mapping[str, Measure]

SHARE = "share, 0 to 1"
ERRORS = "standard errors"
NATS = "nats a token"
FILTERED = "where the recipe has reading.filters"
FETCHED = "where the source is not local"
VERIFIED = "where the recipe has dedup.verify_jaccard"
VALIDATED = "where the validation split has packs"

OF_ALL: Measures = {
    "bytes": Measure("bytes", "Size of the files; one that is linked from a part counts once"),
    "seconds": Measure("seconds", "Work of this run, added over the parts; a reused one counts what verifying it took"),
    "artifacts_built": Measure("artifacts", "The asset's own and its parts' that this run built"),
    "artifacts_reused": Measure("artifacts", "Those that were there, whole and verified"),
    "artifacts_rebuilt": Measure("artifacts", "Those that were there damaged or held back, and were built again"),
    "dagster/row_count": Measure("rows", "Rows of the asset, as its column schema describes them"),
}
OF_FANNED_OUT: Measures = {
    "mapped_steps": Measure("steps", "Steps that the parts were built in, at once where workers are free"),
    "units": Measure("artifacts", "Parts that those steps handed over: what is stored and reused by itself"),
}
OF_TEXTS: Measures = {
    "text_bytes": Measure("bytes", "UTF-8 bytes of the texts of `documents`"),
    "megabytes_per_second": Measure(
        "million bytes a second", "`text_bytes` over `seconds`", "where this run built all of it"
    ),
}

ROWS: Measures = {
    "documents": Measure("documents", "Rows that are used, each a document; the same as `rows_used`"),
    "rows_read": Measure("rows", "Rows of the row groups that were read"),
    "rows_used": Measure("rows", "Rows with a text that passes the filters"),
    "null_text": Measure("rows", "Left out: no text"),
    "empty_text": Measure("rows", "Left out: an empty text"),
    "invalid_utf8": Measure("rows", "Left out: a text that is not UTF-8"),
    "invalid_values": Measure("values", "Values of other columns that could not be read and count as absent"),
    "with_nul": Measure("rows", "Used, with a NUL somewhere in the text"),
    "with_byte_order_mark": Measure("rows", "Used, with a byte order mark before the text"),
    "with_crlf": Measure("rows", "Used, with a line of the text ended by CR LF"),
    "rows_filtered": Measure("rows", "Left out: failed a filter", FILTERED),
    "rows_excluded": Measure("rows", "In row groups whose statistics prove that no row passes, unread", FILTERED),
    "rounds": Measure("rounds", "Units that were read until the budgets were full", "where reading.until is budgets"),
    "dumps": Measure("crawls", "Crawls in all that was read", "where a file names crawls"),
    "fewest_dumps_of_a_file": Measure("crawls", "Crawls in the file that has the fewest", "where a file names crawls"),
    "most_dumps_of_a_file": Measure("crawls", "Crawls in the file that has the most", "where a file names crawls"),
    "bytes_fetched": Measure("bytes", "Fetched over the network by this run", FETCHED),
    "requests": Measure("requests", "Sent by this run for those bytes", FETCHED),
    "retries": Measure("tries", "Of this run's tries, those after the first one of a byte range", FETCHED),
}
SIGNATURES: Measures = {
    "documents": Measure("documents", "Documents that are signed"),
    "reference_texts": Measure("texts", "Reference texts that are signed beside them"),
    "words": Measure("words", "Words of the documents, as shingling splits them"),
    "shingles": Measure("shingles", "Shingles of the documents, repeats included"),
    "wordless_documents": Measure("documents", "Documents without a word, which have no band key"),
    "bytes_a_signature": Measure("bytes", "Size of one document's signature"),
    "scurve_texts": Measure("texts", "Texts that near-copies were planted of, to measure the S-curve"),
    "scurve_pairs": Measure("pairs", "Pairs of a text and a planted copy"),
    "scurve_flagged": Measure("pairs", "Those of them that share a band"),
    "scurve_max_abs_z": Measure(ERRORS, "Largest distance of a bin's share of flagged pairs from the formula's"),
    "scurve_chance": Measure("probability", "That independent hash functions have a bin as far off, at most"),
    "scurve_signature_error": Measure(
        "similarity", "Root mean square of a pair's share of equal values less its Jaccard similarity"
    ),
    "scurve_expected_error": Measure("similarity", "The same as independent hash functions would have it"),
    "scurve_error_z": Measure(ERRORS, "Distance of the squares of those two"),
    "scurve_mean_bias": Measure("similarity", "Mean of a pair's share of equal values less its similarity"),
}
CLUSTERS: Measures = {
    "documents": Measure("documents", "Documents that were clustered"),
    "clusters": Measure("clusters", "Clusters, those of one document included"),
    "duplicate_clusters": Measure("clusters", "Clusters of two documents or more"),
    "clusters_within_one_dump": Measure("clusters", "Those of them within one crawl"),
    "clusters_over_several_dumps": Measure("clusters", "Those of them over several crawls"),
    "largest_cluster": Measure("documents", "Documents of the largest cluster"),
    "kept": Measure("documents", "Documents that stay"),
    "removed": Measure("documents", "Documents that do not stay: `exact_duplicate`, `near_duplicate` and `reference`"),
    "exact_duplicate": Measure("documents", "Removed: the text of the document kept"),
    "near_duplicate": Measure("documents", "Removed: in a cluster of which another document is kept"),
    "reference": Measure("documents", "Removed: in a cluster that a reference set with action exclude hit"),
    "barred": Measure("documents", "Kept, but not for validation: in a cluster that a reference set hit"),
    "removed_bytes": Measure("bytes", "UTF-8 bytes of exact and near duplicates that were removed"),
    "removed_share_of_documents": Measure(SHARE, "Removed exact and near duplicates over `documents`"),
    "removed_share_of_bytes": Measure(SHARE, "`removed_bytes` over `text_bytes`"),
    "pairs_compared": Measure("pairs", "Pairs whose Jaccard similarity was computed", VERIFIED),
    "pairs_verified": Measure("pairs", "Those of them that are similar enough to connect a cluster", VERIFIED),
    "documents_left_unverified": Measure(
        "documents", "Documents that share a band with more than they were compared with, once a band", VERIFIED
    ),
}
TOKENIZER: Measures = {
    "eos_id": Measure("id", "The end-of-document token's"),
    "max_id": Measure("id", "The largest; it decides whether tokens take two bytes or four"),
    "vocab_size": Measure("tokens", "Entries of the model's own vocabulary; added tokens may have larger ids"),
}
TOKENS: Measures = {
    "documents": Measure("documents", "Kept documents, each tokenized whole"),
    "tokens": Measure("tokens", "Their tokens, one end-of-document token each included"),
    "removed_tokens": Measure("tokens", "What the documents that deduplication removed would have had"),
    "bytes_a_token": Measure("bytes a token", "`text_bytes` over `tokens`"),
    "tokens_a_document": Measure("tokens a document", "`tokens` over `documents`"),
    "removed_share_of_tokens": Measure(SHARE, "`removed_tokens` over them and `tokens` together"),
}
TOKENIZER_REPORT: Measures = {
    "documents": Measure("documents", "Kept documents: the inventory"),
    "tokens": Measure("tokens", "The inventory in the chosen tokenizer's tokens"),
    "tokenizers": Measure("tokenizers", "Tokenizers compared, the chosen one included"),
    "sampled_documents": Measure("documents", "Documents drawn from the pools, on which they are compared"),
}
SPLITS: Measures = {
    "documents": Measure("documents", "Kept documents, the unused ones included"),
    "tokens": Measure("tokens", "Their tokens, one end-of-document token each included"),
    "<split>_documents": Measure("documents", "Documents in the split"),
    "<split>_tokens": Measure("tokens", "Tokens in the split"),
    "unused_documents": Measure("documents", "Documents in no split"),
    "unused_tokens": Measure("tokens", "Their tokens"),
    "unused_<reason>": Measure("documents", "Documents in no split for this reason"),
    "unused_<reason>_tokens": Measure("tokens", "Their tokens"),
    "unused_<reason>_bytes": Measure("bytes", "UTF-8 bytes of their texts"),
}
SHARDS: Measures = {
    "documents": Measure("documents", "Documents in the shards of all splits"),
    "tokens": Measure("tokens", "Tokens in the shards, one end-of-document token a document included"),
    "shards": Measure("files", "Token files of all splits"),
    "vocab_size": Measure("tokens", "The largest id that may occur and one: rows of an embedding table"),
}
PLAN: Measures = {
    "packs": Measure("packs", "Packs of all splits"),
    "segments": Measure("segments", "Segments in those packs"),
    "targets": Measure("tokens", "Tokens with a loss when each pack is read once"),
    "train_utilisation": Measure(SHARE, "Tokens over the room of the training split's packs"),
    "train_waste": Measure(SHARE, "Room of those packs that no token fills"),
    "steps_a_pass": Measure("steps", "Training steps that read what the plan schedules once"),
}
LEDGER: Measures = {
    "stages": Measure("stages", "Stages of the mixture; one without a mixture"),
    "tokens": Measure("tokens", "Inputs that all stages read together, overlap included"),
    "loss_tokens": Measure("tokens", "Those of them whose target counts in the loss"),
    "most_passes": Measure("passes", "How often the pool that is read most often is read, over all stages"),
    "largest_quota_error_tokens": Measure(
        "tokens", "Farthest that a pool ever is from its part of a stage's tokens so far; 0 without a mixture"
    ),
}
STATS: Measures = {
    "<layout>_utilisation": Measure(SHARE, "Cells that hold a token over the cells of all rows of the layout"),
}
PACKAGE: Measures = {
    "documents": Measure("documents", "Documents in the shards of the package"),
    "tokens": Measure("tokens", "Their tokens, one end-of-document token each included"),
}
TRAINING: Measures = {
    "model_parameters": Measure("numbers", "Numbers that the training changes"),
    "steps": Measure("steps", "Optimizer steps that were trained"),
    "tokens": Measure("tokens", "Targets with a loss in all steps"),
    "vocab_size": Measure("tokens", "Rows of the model's embedding table"),
    "final_training_loss": Measure(NATS, "Cross-entropy of the last step, summed over its targets, over their number"),
    "first_validation_loss": Measure(NATS, "The same of the validation split, the first time", VALIDATED),
    "final_validation_loss": Measure(NATS, "The same, the last time", VALIDATED),
    "final_validation_loss_of_<pool>": Measure(NATS, "The same, the last time, of the pool's documents", VALIDATED),
    "body_positions": Measure("positions", "Targets that are no end-of-document token"),
    "eos_positions": Measure("positions", "Targets that are one"),
    "overlap_positions": Measure("positions", "Inputs that repeat the segment before theirs, without a loss"),
    "slack_positions": Measure("positions", "Room of the packs that no segment fills"),
    "padding_positions": Measure("positions", "Positions that the model computed without a token of a document"),
    "seconds_of_training": Measure(
        "seconds", "Time of training, validation and checkpoints included", "where this run trained"
    ),
    "resumed_from_step": Measure("step", "Where it went on from; 0 for a run from the start", "where this run trained"),
    "<device>_hours": Measure(
        "hours", "Time on that kind of device, over all ranks and what came before a resume", "where this run trained"
    ),
    "tokens_per_second": Measure(
        "tokens a second", "`tokens` over `seconds_of_training`", "where this run trained from the start"
    ),
    "hours_that_padding_would_add": Measure(
        "hours", "What it would take longer on padded rows, at that speed", "where this run trained from the start"
    ),
}
REPORT: Measures = {
    "assets_shown": Measure("assets", "Assets that are there to be shown"),
    "checks_passed": Measure("checks", "Checks that passed on the present bytes"),
    "checks_warned": Measure("checks", "Checks that warned"),
    "checks_failed": Measure("checks", "Checks that failed"),
    "checks_not_counted": Measure("checks", "Checks that said nothing of the present bytes"),
}
SOURCE: Measures = {
    "files": Measure("files", "Parquet files of all pools"),
    "row_groups": Measure("row groups", "Row groups of those files"),
    "rows": Measure("rows", "Rows of those files, by their footers"),
    "bytes": Measure("bytes", "Size of those files"),
    "listing_requests": Measure("requests", "Sent over the network to list names; 0 for local files"),
    "listing_bytes": Measure("bytes", "Received for them"),
    "footer_requests": Measure("requests", "Sent over the network for footers; 0 for those that were there"),
    "footer_bytes": Measure("bytes", "Received for them"),
}

MEASURES: Mapping[str, Measures] = {
    "dataset_revision": SOURCE,
    "raw_row_groups": ROWS | OF_TEXTS | OF_FANNED_OUT | OF_ALL,
    "reference_sets": {"documents": Measure("texts", "Texts of all sets"), **OF_ALL},
    "minhash_signatures": SIGNATURES | OF_TEXTS | OF_FANNED_OUT | OF_ALL,
    "lsh_clusters": CLUSTERS | OF_TEXTS | OF_FANNED_OUT | OF_ALL,
    "tokenizer": TOKENIZER | OF_ALL,
    "document_tokens": TOKENS | OF_TEXTS | OF_FANNED_OUT | OF_ALL,
    "tokenizer_report": TOKENIZER_REPORT | OF_TEXTS | OF_ALL,
    "split_documents": SPLITS | OF_TEXTS | OF_FANNED_OUT | OF_ALL,
    "token_shards": SHARDS | OF_FANNED_OUT | OF_ALL,
    "packing_plan": PLAN | OF_ALL,
    "packing_stats": STATS | OF_ALL,
    "mixture_ledger": LEDGER | OF_ALL,
    "handoff_package": PACKAGE | OF_ALL,
    "varlen_training_run": TRAINING | OF_ALL,
    "quality_report": REPORT | OF_ALL,
}
"""Every asset's numbers, its own first."""


def numbers_metadata(asset: str) -> dict[str, Any]:
    """The table `numbers` of an asset's definition.

    >>> numbers_metadata("packing_plan")["numbers"].records[0].data
    {'number': 'packs', 'unit': 'packs', 'meaning': 'Packs of all splits'}
    """
    rows = [
        {"number": number, "unit": one.unit, "meaning": ", ".join(filter(None, one[1:]))}
        for number, one in MEASURES[asset].items()
    ]
    return {"numbers": explained_table(rows, NUMBERS)}


NUMBERS: Measures = {
    "number": Measure("", "Name of an entry of the asset's events; <…> stands for several names"),
    "unit": Measure("", "What it counts, or is measured in"),
    "meaning": Measure("", "What it is, and where it is there if not always"),
}


def explained_table(rows: Sequence[Mapping[str, Any]], columns: Measures) -> dg.TableMetadataValue:
    """Rows of plain values, at least one, as a table whose schema says what its columns mean.

    >>> table = explained_table([{"floor": 16}], {"floor": Measure("tokens", "Fewest that are enough")})
    >>> [(column.name, column.type, column.description, column.tags) for column in table.schema.columns]
    [('floor', 'int', 'Fewest that are enough', {'unit': 'tokens'})]
    """
    table = dg.MetadataValue.table([dg.TableRecord(dict(row)) for row in rows])
    explained = [
        explained_column(column.name, column.type, columns.get(column.name, UNEXPLAINED))
        for column in table.schema.columns
    ]
    return dg.MetadataValue.table(table.records, dg.TableSchema(columns=explained))


UNEXPLAINED = Measure("", "")


def explained_column(name: str, kind: str, one: Measure) -> dg.TableColumn:
    """A column with what it means, its unit as a tag."""
    return dg.TableColumn(name, kind, description=one.meaning or None, tags={"unit": one.unit} if one.unit else None)
