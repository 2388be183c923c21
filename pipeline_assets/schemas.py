"""Contracts of the tables that stages write: one pandera model a table, every column described.

A table is held against its contract in `conformance.py`.
"""

from typing import Any

import narwhals.stable.v1 as nw
import pandera.pyarrow as pap
import pyarrow as pa
import pyarrow.compute as pc
from pandera.dtypes import immutable
from pandera.engines import narwhals_engine

from pipeline_assets.transforms.filters import FILTERS
from pipeline_assets.transforms.sampled import COLUMNS, LENGTHS, NAMED, SCORED
from pipeline_assets.transforms.split import REASONS, SPLITS
from training_io.hashing import DOC_ID_BYTES

ROWS_NAME = "rows.parquet"
PLACE = ("pool", "file", "row_group", "row")  # the columns that say where a row is in the source


@narwhals_engine.Engine.register_dtype(equivalents=[nw.Binary, nw.Binary()])
@immutable
class Binary(narwhals_engine.DataType):  # type: ignore[misc]
    """Raw bytes: pandera's Arrow engine knows every type but this one."""

    type = nw.Binary


def _are_doc_ids(data: Any) -> bool:
    lengths = pc.binary_length(data.table.column(data.key))
    return bool(pc.all(pc.equal(lengths, DOC_ID_BYTES), min_count=0).as_py())


class Contract(pap.DataFrameModel):
    """Base of the contracts: exactly these columns, in this order."""

    class Config:
        """Strict: an unknown column is a violation."""

        strict = True
        ordered = True


def _doc_id(description: str) -> Any:
    return pap.Field(description=description)


class RawRows(Contract):
    """Rows of text as read from the source, with their source coordinate."""

    doc_id: pa.binary() = _doc_id("SHA-256 of the text's UTF-8 bytes, 32 raw bytes")
    text: pa.large_string() = pap.Field(description="The document's text, unaltered")
    pool: pa.string() = pap.Field(description="Pool that the row was read from")
    file: pa.string() = pap.Field(description="Source file, relative to its pool")
    row_group: pa.int32() = pap.Field(ge=0, description="Row group within the file")
    row: pa.int32() = pap.Field(ge=0, description="Row within the row group")
    id: pa.string() = pap.Field(nullable=True, description="The source's own id")
    dump: pa.string() = pap.Field(nullable=True, description="Crawl that the document comes from")
    url: pa.string() = pap.Field(nullable=True, description="Address that the document was crawled from")
    language: pa.string() = pap.Field(nullable=True, description="Language code given by the source")
    language_score: pa.float64() = pap.Field(nullable=True, description="Confidence of the language, 0 to 1")
    score: pa.float64() = pap.Field(nullable=True, description="Quality score given by the source")

    @pap.check("doc_id")
    def _doc_id_has_32_bytes(cls, data: Any) -> bool:  # noqa: N805 - pandera's checks are class methods
        return _are_doc_ids(data)


class FilteredRows(Contract):
    """Usable rows of one raw unit that failed a filter of their pool, with what the filters looked at."""

    row_group: pa.int32() = pap.Field(ge=0, description="Row group within the file")
    row: pa.int32() = pap.Field(ge=0, description="Row within the row group")
    filter: pa.string() = pap.Field(description="The first filter that the row failed", isin=list(FILTERS))
    text_bytes: pa.int64() = pap.Field(ge=1, description="UTF-8 bytes of the row's text")
    dump: pa.string() = pap.Field(nullable=True, description="Crawl that the document comes from")
    language: pa.string() = pap.Field(nullable=True, description="Language code given by the source")
    language_score: pa.float64() = pap.Field(nullable=True, description="Confidence of the language")
    score: pa.float64() = pap.Field(nullable=True, description="Quality score given by the source")
    int_score: pa.int32() = pap.Field(nullable=True, description="Rounded quality score given by the source")


class SampledNames(Contract):
    """Documents of each file by the crawl and by the language that the source gives; before filters."""

    pool: pa.string() = pap.Field(description="Pool")
    file: pa.string() = pap.Field(description="Source file, relative to its pool")
    column: pa.string() = pap.Field(description="Column that the name is of", isin=list(NAMED))
    name: pa.string() = pap.Field(nullable=True, description="Name as it is shown, null where a document has none")
    documents: pa.int64() = pap.Field(ge=1, description="Usable documents")
    text_bytes: pa.int64() = pap.Field(ge=1, description="UTF-8 bytes of their texts")


class SampledValues(Contract):
    """Documents of each pool by score and by length, rounded down to four significant digits; before filters."""

    pool: pa.string() = pap.Field(description="Pool")
    column: pa.string() = pap.Field(description="What the value is", isin=[*SCORED, *LENGTHS])
    value: pa.float64() = pap.Field(description="The value, or up to a thousandth below it")
    documents: pa.int64() = pap.Field(ge=1, description="Usable documents")
    text_bytes: pa.int64() = pap.Field(ge=1, description="UTF-8 bytes of their texts")


class SampledTotals(Contract):
    """What one file's rows in one raw unit hold in each column, exactly; before filters."""

    pool: pa.string() = pap.Field(description="Pool")
    file: pa.string() = pap.Field(description="Source file, relative to its pool")
    column: pa.string() = pap.Field(description="Column of the source, or a length", isin=[*COLUMNS, *LENGTHS])
    is_in_file: pa.bool_() = pap.Field(description="Whether the file has the column, once")
    with_value: pa.int64() = pap.Field(nullable=True, ge=0, description="Documents with a value; null: not read")
    total: pa.string() = pap.Field(nullable=True, description="Exact sum of the finite values, as a fraction")
    smallest: pa.float64() = pap.Field(nullable=True, description="Smallest finite value")
    largest: pa.float64() = pap.Field(nullable=True, description="Largest finite value")


class SampledColumns(Contract):
    """What the source gives of each pool beside the text, and the texts' lengths; null where it gives nothing."""

    pool: pa.string() = pap.Field(description="Pool")
    column: pa.string() = pap.Field(description="Column of the source, or a length", isin=[*COLUMNS, *LENGTHS])
    files: pa.int64() = pap.Field(ge=0, description="Files read that have the column")
    files_without: pa.int64() = pap.Field(ge=0, description="Files read that have it not, or twice")
    with_value: pa.int64() = pap.Field(nullable=True, ge=0, description="Documents with a value; null: not read")
    without_value: pa.int64() = pap.Field(nullable=True, ge=0, description="Documents without; null: not read")
    mean: pa.float64() = pap.Field(nullable=True, description="Mean of the finite values")
    smallest: pa.float64() = pap.Field(nullable=True, description="Smallest finite value")
    p1: pa.float64() = pap.Field(nullable=True, description="Value that 1 % do not exceed, four digits, rounded down")
    p5: pa.float64() = pap.Field(nullable=True, description="The same for 5 %")
    p25: pa.float64() = pap.Field(nullable=True, description="The same for 25 %")
    p50: pa.float64() = pap.Field(nullable=True, description="The same for half: the median")
    p75: pa.float64() = pap.Field(nullable=True, description="The same for 75 %")
    p95: pa.float64() = pap.Field(nullable=True, description="The same for 95 %")
    p99: pa.float64() = pap.Field(nullable=True, description="The same for 99 %")
    largest: pa.float64() = pap.Field(nullable=True, description="Largest finite value")


class SampledFiles(Contract):
    """What was read of each file; documents are those before filters."""

    pool: pa.string() = pap.Field(description="Pool")
    file: pa.string() = pap.Field(description="Source file, relative to its pool")
    row_groups: pa.int64() = pap.Field(ge=0, description="Row groups in the file")
    row_groups_read: pa.int64() = pap.Field(ge=0, description="Row groups that were read")
    row_groups_excluded: pa.int64() = pap.Field(ge=0, description="Not read: by its statistics no row passes")
    documents: pa.int64() = pap.Field(ge=0, description="Usable documents")
    text_bytes: pa.int64() = pap.Field(ge=0, description="UTF-8 bytes of their texts")
    num_dumps: pa.int64() = pap.Field(nullable=True, ge=0, description="Crawls among them; null: no column dump")


class SampledThresholds(Contract):
    """What a smallest score would keep of each pool, before filters; the recipe's own is among them."""

    pool: pa.string() = pap.Field(description="Pool")
    column: pa.string() = pap.Field(description="Score that the threshold is of", isin=list(SCORED))
    threshold: pa.float64() = pap.Field(description="Smallest score to keep")
    is_chosen: pa.bool_() = pap.Field(description="Whether it is the recipe's filter")
    documents: pa.int64() = pap.Field(ge=0, description="Documents that it keeps")
    text_bytes: pa.int64() = pap.Field(ge=0, description="UTF-8 bytes of their texts")
    share_of_documents: pa.float64() = pap.Field(ge=0, le=1, description="Of the pool's documents, 0 to 1")
    share_of_bytes: pa.float64() = pap.Field(ge=0, le=1, description="Of the pool's text, 0 to 1")


class RowFilterEffects(Contract):
    """What each filter of the recipe removed of its pool."""

    pool: pa.string() = pap.Field(description="Pool")
    filter: pa.string() = pap.Field(description="Filter of the recipe", isin=list(FILTERS))
    limit: pa.string() = pap.Field(description="The smallest value, or the names, that pass")
    documents: pa.int64() = pap.Field(ge=0, description="Usable documents before the filters")
    text_bytes: pa.int64() = pap.Field(ge=0, description="UTF-8 bytes of their texts")
    removed_documents: pa.int64() = pap.Field(ge=0, description="Removed by it, and by no filter before it")
    removed_bytes: pa.int64() = pap.Field(ge=0, description="UTF-8 bytes of their texts")
    failing_documents: pa.int64() = pap.Field(ge=0, description="Failing it, whatever the other filters say")
    failing_bytes: pa.int64() = pap.Field(ge=0, description="UTF-8 bytes of their texts")
    failing_without_value: pa.int64() = pap.Field(ge=0, description="Of these, without a value, or with NaN")
    row_groups_excluded: pa.int64() = pap.Field(ge=0, description="Not read: by its statistics no row passes")
    rows_excluded: pa.int64() = pap.Field(ge=0, description="Rows in them")


class References(Contract):
    """Texts of one reference set."""

    doc_id: pa.binary() = _doc_id("SHA-256 of the text's UTF-8 bytes, 32 raw bytes")
    text: pa.large_string() = pap.Field(description="A text that is held out")

    @pap.check("doc_id")
    def _doc_id_has_32_bytes(cls, data: Any) -> bool:  # noqa: N805
        return _are_doc_ids(data)


class Clusters(Contract):
    """What deduplication decided about each row of one raw unit, in the unit's row order."""

    doc_id: pa.binary() = _doc_id("The row's document")
    cluster_id: pa.binary() = _doc_id("Smallest doc_id of the row's cluster")
    cluster_size: pa.int64() = pap.Field(ge=1, description="Rows in the cluster, over all units")
    kept: pa.bool_() = pap.Field(description="Whether this row is used")
    kept_doc_id: pa.binary() = _doc_id("The document that is used in the row's place, or the row itself")
    reason: pa.string() = pap.Field(
        description="kept, exact_duplicate, near_duplicate, or excluded by a reference set",
        isin=["kept", "exact_duplicate", "near_duplicate", "reference"],
    )
    barred: pa.bool_() = pap.Field(description="Whether a reference set keeps the cluster out of validation")
    references: pa.string() = pap.Field(description="Names of the reference sets that match the cluster, with commas")
    pools: pa.string() = pap.Field(description="Names of all pools that hold this very text, with commas")

    @pap.check("doc_id", "cluster_id", "kept_doc_id")
    def _doc_ids_have_32_bytes(cls, data: Any) -> bool:  # noqa: N805
        return _are_doc_ids(data)


class Evidence(Contract):
    """Why each removed row was removed."""

    removed_doc_id: pa.binary() = _doc_id("The removed document")
    kept_doc_id: pa.binary() = _doc_id("The document kept in its place")
    removed_pool: pa.string() = pap.Field(description="Pool of the removed row")
    kept_pool: pa.string() = pap.Field(description="Pool of the kept row")
    removed_dump: pa.string() = pap.Field(description="Crawl of the removed row, empty where the source names none")
    kept_dump: pa.string() = pap.Field(description="Crawl of the kept row, empty where the source names none")
    removed_bytes: pa.int64() = pap.Field(ge=0, description="UTF-8 bytes of the removed text")
    shared_bands: pa.int64() = pap.Field(
        ge=0, description="Bands in which both signatures agree; 0: they are connected through others"
    )
    jaccard: pa.float64() = pap.Field(ge=0, le=1, description="Exact Jaccard similarity of their shingle sets")

    @pap.check("removed_doc_id", "kept_doc_id")
    def _doc_ids_have_32_bytes(cls, data: Any) -> bool:  # noqa: N805
        return _are_doc_ids(data)


class ReferenceHits(Contract):
    """Which rows a reference text matched, and how."""

    reference_set: pa.string() = pap.Field(description="Name of the reference set")
    reference_doc_id: pa.binary() = _doc_id("The reference text")
    doc_id: pa.binary() = _doc_id("The matched document; in a bucket without verification the smallest of those there")
    kind: pa.string() = pap.Field(
        isin=["exact", "near", "overlap"], description="The same text, a shared band, or a shared run of words"
    )
    jaccard: pa.float64() = pap.Field(ge=0, le=1, description="Exact Jaccard similarity of their shingle sets")
    num_ngrams: pa.int64() = pap.Field(ge=0, description="Runs of words that both hold, for overlap")
    excerpt: pa.string() = pap.Field(description="The first run of words that both hold, for overlap, else empty")

    @pap.check("reference_doc_id", "doc_id")
    def _doc_ids_have_32_bytes(cls, data: Any) -> bool:  # noqa: N805
        return _are_doc_ids(data)


class BoilerplateNgrams(Contract):
    """Runs of words of reference texts that too many documents hold to mean anything."""

    reference_set: pa.string() = pap.Field(description="Name of the reference set")
    ngram: pa.large_string() = pap.Field(description="The words")
    num_documents: pa.int64() = pap.Field(ge=1, description="Documents of the corpus that hold them, copies counted")
    num_items: pa.int64() = pap.Field(ge=1, description="Texts of the set that hold them")


class LargestClusters(Contract):
    """The clusters of most documents, to be looked at."""

    cluster_id: pa.binary() = _doc_id("Smallest doc_id of the cluster")
    documents: pa.int64() = pap.Field(ge=2, description="Rows in the cluster")
    min_jaccard: pa.float64() = pap.Field(ge=0, le=1, description="Least similar two of the compared members")
    mean_jaccard: pa.float64() = pap.Field(ge=0, le=1, description="Mean similarity of the compared members")
    compared: pa.int64() = pap.Field(ge=2, description="Members compared with each other: the smallest keyed hashes")
    pools: pa.string() = pap.Field(description="Pools of the compared members, with counts")
    dumps: pa.string() = pap.Field(description="Crawls of the compared members, with counts")
    files: pa.string() = pap.Field(description="Source files of the compared members, with counts")
    first_words: pa.large_string() = pap.Field(description="How the kept member begins")

    @pap.check("cluster_id")
    def _doc_ids_have_32_bytes(cls, data: Any) -> bool:  # noqa: N805
        return _are_doc_ids(data)


class ExamplePairs(Contract):
    """Removed documents beside what was kept, over the range of similarity."""

    jaccard: pa.float64() = pap.Field(ge=0, le=1, description="Exact Jaccard similarity of their shingle sets")
    shared_bands: pa.int64() = pap.Field(
        ge=0, description="Bands in which both signatures agree; 0: they are connected through others"
    )
    removed_doc_id: pa.binary() = _doc_id("The removed document")
    removed_dump: pa.string() = pap.Field(description="Its crawl")
    removed_url: pa.string() = pap.Field(description="Its address")
    removed_text: pa.large_string() = pap.Field(description="How it begins")
    kept_doc_id: pa.binary() = _doc_id("The document kept in its place")
    kept_dump: pa.string() = pap.Field(description="Its crawl")
    kept_url: pa.string() = pap.Field(description="Its address")
    kept_text: pa.large_string() = pap.Field(description="How it begins")

    @pap.check("removed_doc_id", "kept_doc_id")
    def _doc_ids_have_32_bytes(cls, data: Any) -> bool:  # noqa: N805
        return _are_doc_ids(data)


class RemovedByPair(Contract):
    """Documents removed, by where they are from and where the kept ones are from."""

    by: pa.string() = pap.Field(isin=["pool", "dump"], description="What the two names are names of")
    removed: pa.string() = pap.Field(description="Pool or crawl of the removed rows")
    kept: pa.string() = pap.Field(description="Pool or crawl of the rows kept in their place")
    documents: pa.int64() = pap.Field(ge=1, description="Removed rows")
    bytes: pa.int64() = pap.Field(ge=0, description="UTF-8 bytes of their texts")


class FloorEffects(Contract):
    """What each floor on a document's tokens would remove of the documents that deduplication kept."""

    floor: pa.int64() = pap.Field(ge=0, description="Fewest tokens that are enough, the end-of-document token included")
    is_chosen: pa.bool_() = pap.Field(description="Whether it is the recipe's, splits.min_tokens")
    documents: pa.int64() = pap.Field(ge=0, description="Documents below it")
    tokens: pa.int64() = pap.Field(ge=0, description="Their tokens")
    share_of_documents: pa.float64() = pap.Field(ge=0, le=1, description="Of all kept documents")
    share_of_tokens: pa.float64() = pap.Field(ge=0, le=1, description="Of all their tokens")
    mean_score: pa.float64() = pap.Field(nullable=True, description="Mean of the source's scores below it")
    mean_score_of_all: pa.float64() = pap.Field(nullable=True, description="Mean of the source's scores of all")


class ShortestDocuments(Contract):
    """The kept documents of fewest tokens, to be read."""

    doc_id: pa.binary() = _doc_id("The document")
    num_tokens: pa.int64() = pap.Field(ge=1, description="Tokens, the end-of-document token included")
    pool: pa.string() = pap.Field(description="Pool that the document belongs to")
    split: pa.string() = pap.Field(isin=[*SPLITS, "unused"], description="Split that the document is assigned to")
    reason: pa.string() = pap.Field(isin=list(REASONS), description="Why it is in this split or unused")
    score: pa.float64() = pap.Field(nullable=True, description="Quality score given by the source")
    text: pa.large_string() = pap.Field(description="How it begins, on one line, unprintable characters spelled out")

    @pap.check("doc_id")
    def _doc_ids_have_32_bytes(cls, data: Any) -> bool:  # noqa: N805
        return _are_doc_ids(data)


class SplitDocuments(Contract):
    """The deduplicated split tables: kept documents of one raw unit, with their split."""

    doc_id: pa.binary() = _doc_id("SHA-256 of the text's UTF-8 bytes, 32 raw bytes")
    text: pa.large_string() = pap.Field(description="The document's text, unaltered")
    num_tokens: pa.int64() = pap.Field(ge=1, description="Tokens, the end-of-document token included")
    cluster_id: pa.binary() = _doc_id("Smallest doc_id of the document's cluster")
    pool: pa.string() = pap.Field(description="Pool that the document belongs to")
    split: pa.string() = pap.Field(isin=[*SPLITS, "unused"], description="Split that the document is assigned to")
    reason: pa.string() = pap.Field(isin=list(REASONS), description="Why it is in this split or unused")

    @pap.check("doc_id", "cluster_id")
    def _doc_ids_have_32_bytes(cls, data: Any) -> bool:  # noqa: N805
        return _are_doc_ids(data)


class MixtureLedger(Contract):
    """What training reads of each pool in each stage. Tokens are positions that are computed, by what they predict."""

    stage: pa.string() = pap.Field(description="Stage of the mixture, one_pass without one")
    pool: pa.string() = pap.Field(description="Pool")
    first_step: pa.int64() = pap.Field(ge=0, description="Step at which the stage takes effect")
    first_token: pa.int64() = pap.Field(ge=0, description="Tokens of all pools read before it")
    quota_tokens: pa.int64() = pap.Field(ge=0, description="Tokens of the pool that the stage is to read")
    tokens: pa.int64() = pap.Field(ge=0, description="Tokens that its steps read: body, EOS and overlap")
    body_tokens: pa.int64() = pap.Field(ge=0, description="Tokens that predict a token of the text")
    eos_tokens: pa.int64() = pap.Field(ge=0, description="Tokens that predict the end of the document")
    overlap_tokens: pa.int64() = pap.Field(ge=0, description="Tokens read again as context, untrained")
    loss_tokens: pa.int64() = pap.Field(ge=0, description="Tokens with a loss: body and EOS")
    documents_seen: pa.int64() = pap.Field(ge=0, description="Times that a document's beginning is read")
    documents_unique: pa.int64() = pap.Field(ge=0, description="Different documents read in the stage")
    documents_unread: pa.int64() = pap.Field(ge=0, description="Documents never read up to the stage's end")
    inventory_tokens: pa.int64() = pap.Field(ge=0, description="Tokens of reading the pool once")
    passes: pa.float64() = pap.Field(ge=0, description="Tokens over inventory")
    passes_so_far: pa.float64() = pap.Field(ge=0, description="The same up to the stage's end")


def arrow_schema(contract: type[Contract]) -> pa.Schema:
    """The Arrow schema that a contract annotates, column by column."""
    return pa.schema([(name, contract.__annotations__[name]) for name in contract.to_schema().columns])
