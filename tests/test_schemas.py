import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pytest

from pipeline_assets.conformance import validated
from pipeline_assets.schemas import (
    BoilerplateNgrams,
    Clusters,
    Contract,
    Evidence,
    ExamplePairs,
    FilteredRows,
    FloorEffects,
    LargestClusters,
    MixtureLedger,
    RawRows,
    ReferenceHits,
    References,
    RemovedByPair,
    RowFilterEffects,
    SampledColumns,
    SampledFiles,
    SampledNames,
    SampledThresholds,
    SampledTotals,
    SampledValues,
    ShortestDocuments,
    SplitDocuments,
    arrow_schema,
)
from pipeline_assets.transforms import clusters
from pipeline_assets.transforms.sampled import PERCENTS
from training_io.errors import InvariantBroken

ROOT = Path(__file__).parent.parent
A, B = b"\1" * 32, b"\2" * 32

GOOD = {
    RawRows: [
        {"doc_id": A, "text": "a", "pool": "web", "file": "a", "row_group": 0, "row": 0},
        {
            "doc_id": B, "text": "b", "pool": "web", "file": "a", "row_group": 3, "row": 9, "id": "1", "dump": "x",
            "url": "u", "language": "en", "language_score": 0.5, "score": 3.0,
        },
    ],
    FilteredRows: [
        {"row_group": 0, "row": 0, "filter": "dumps", "text_bytes": 1},
        {
            "row_group": 3, "row": 9, "filter": "min_score", "text_bytes": 7, "dump": "x", "language": "en",
            "language_score": 0.5, "score": 2.5, "int_score": 3,
        },
    ],
    SampledNames: [
        {"pool": "web", "file": "a", "column": column, "name": name, "documents": 1, "text_bytes": 1}
        for column, name in (("dump", None), ("language", "en"))
    ],
    SampledValues: [
        {"pool": "web", "column": column, "value": -0.5, "documents": 1, "text_bytes": 1} for column in ("score", "bytes")
    ],
    SampledTotals: [
        {"pool": "web", "file": "a", "column": "date", "is_in_file": False},
        {
            "pool": "web", "file": "a", "column": "bytes", "is_in_file": True, "with_value": 0, "total": "1/2",
            "smallest": 0.5, "largest": 0.5,
        },
    ],
    SampledColumns: [
        {"pool": "web", "column": "date", "files": 0, "files_without": 1},
        {
            "pool": "web", "column": "score", "files": 1, "files_without": 0, "with_value": 1, "without_value": 0,
            "mean": 0.5, "smallest": 0.5, **{f"p{percent}": 0.5 for percent in PERCENTS}, "largest": 1.0,
        },
    ],
    SampledFiles: [
        {
            "pool": "web", "file": "a", "row_groups": 1, "row_groups_read": 1, "row_groups_excluded": 0, "documents": 0,
            "text_bytes": 0, "num_dumps": num_dumps,
        }
        for num_dumps in (None, 0)
    ],
    SampledThresholds: [
        {
            "pool": "web", "column": column, "threshold": -1.0, "is_chosen": False, "documents": 0, "text_bytes": 0,
            "share_of_documents": 0.0, "share_of_bytes": 1.0,
        }
        for column in ("score", "int_score")
    ],
    RowFilterEffects: [
        {
            "pool": "web", "filter": name, "limit": "3.0", "documents": 0, "text_bytes": 0, "removed_documents": 0,
            "removed_bytes": 0, "failing_documents": 0, "failing_bytes": 0, "failing_without_value": 0,
            "row_groups_excluded": 0, "rows_excluded": 0,
        }
        for name in ("dumps", "min_score")
    ],
    References: [{"doc_id": A, "text": "a"}, {"doc_id": B, "text": "b"}],
    Clusters: [
        {
            "doc_id": doc_id, "cluster_id": A, "cluster_size": 2, "kept": doc_id == A, "kept_doc_id": A,
            "reason": reason, "barred": False, "references": "", "pools": "web,code",
        }
        for doc_id, reason in ((A, "kept"), (B, "near_duplicate"))
    ],
    Evidence: [
        {
            "removed_doc_id": doc_id, "kept_doc_id": B, "removed_pool": "web", "kept_pool": "code", "removed_dump": "",
            "kept_dump": "c1", "removed_bytes": size, "shared_bands": bands, "jaccard": jaccard,
        }
        for doc_id, size, bands, jaccard in ((A, 0, 0, 0.0), (B, 9, 14, 1.0))
    ],
    ReferenceHits: [
        {
            "reference_set": "exam", "reference_doc_id": A, "doc_id": doc_id, "kind": kind, "jaccard": jaccard,
            "num_ngrams": ngrams, "excerpt": "",
        }
        for doc_id, kind, jaccard, ngrams in ((A, "exact", 1.0, 0), (B, "overlap", 0.0, 3))
    ],
    BoilerplateNgrams: [
        {"reference_set": "exam", "ngram": ngram, "num_documents": 11, "num_items": 1} for ngram in ("a b", "c")
    ],
    LargestClusters: [
        {
            "cluster_id": cluster, "documents": 2, "min_jaccard": 0.0, "mean_jaccard": 1.0, "compared": 2, "pools": "web × 2",
            "dumps": " × 2", "files": "a × 2", "first_words": "It begins",
        }
        for cluster in (A, B)
    ],
    ExamplePairs: [
        {
            "jaccard": 1.0, "shared_bands": 0, "removed_doc_id": A, "removed_dump": "", "removed_url": "",
            "removed_text": "a", "kept_doc_id": kept, "kept_dump": "c1", "kept_url": "u", "kept_text": "b",
        }
        for kept in (A, B)
    ],
    RemovedByPair: [{"by": by, "removed": "a", "kept": "b", "documents": 1, "bytes": 0} for by in ("pool", "dump")],
    FloorEffects: [
        {
            "floor": floor, "is_chosen": False, "documents": 0, "tokens": 0, "share_of_documents": 0.0,
            "share_of_tokens": 1.0, "mean_score": score, "mean_score_of_all": score,
        }
        for floor, score in ((0, None), (64, 2.5))
    ],
    ShortestDocuments: [
        {
            "doc_id": doc_id, "num_tokens": 1, "pool": "web", "split": split, "reason": reason, "score": score, "text": "",
        }
        for doc_id, split, reason, score in ((A, "train", "used", None), (B, "unused", "over_budget", 0.5))
    ],
    MixtureLedger: [
        {
            "stage": stage, "pool": "web", "first_step": 0, "first_token": 0, "quota_tokens": 0, "tokens": 1,
            "body_tokens": 0, "eos_tokens": 1, "overlap_tokens": 0, "loss_tokens": 1, "documents_seen": 0,
            "documents_unique": 1, "documents_unread": 0, "inventory_tokens": 3, "passes": 0.5, "passes_so_far": 2.5,
        }
        for stage in ("base", "more_code")
    ],
    SplitDocuments: [
        {"doc_id": A, "text": "a", "num_tokens": 1, "cluster_id": A, "pool": "web", "split": "train", "reason": "used"},
        {"doc_id": B, "text": "b", "num_tokens": 9, "cluster_id": A, "pool": "web", "split": "unused", "reason": "below_min_tokens"},
    ],
}  # fmt: skip

NULLABLE = {
    *("id", "dump", "url", "language", "language_score", "score", "int_score", "mean_score", "mean_score_of_all"),
    *("name", "num_dumps", "with_value", "without_value", "total", "mean", "smallest", "largest"),
    *(f"p{percent}" for percent in PERCENTS),
}


def good(contract):
    return pa.Table.from_pylist(GOOD[contract], schema=arrow_schema(contract))


def columns_of(*kinds):
    """Every (contract, column) whose type is one of the kinds, or every one at all."""
    return [
        pytest.param(contract, field.name, id=f"{contract.__name__}.{field.name}")
        for contract in GOOD
        for field in arrow_schema(contract)
        if not kinds or field.type in kinds
    ]


def with_column(table, name, values, kind=None):
    kind = kind or table.schema.field(name).type
    return table.set_column(table.column_names.index(name), pa.field(name, kind), pa.array(values, kind))


def test_every_contract_is_tested():
    assert set(GOOD) == set(Contract.__subclasses__())


@pytest.mark.parametrize("contract", GOOD, ids=lambda contract: contract.__name__)
def test_a_good_table_is_accepted_as_it_is_and_so_is_an_empty_one(contract):
    table = good(contract)
    assert validated(contract, table) is table
    empty = arrow_schema(contract).empty_table()
    assert validated(contract, empty) is empty
    in_chunks = pa.concat_tables([table, empty, table])
    assert validated(contract, in_chunks) is in_chunks


@pytest.mark.parametrize("contract", GOOD, ids=lambda contract: contract.__name__)
def test_every_column_says_what_it_holds_and_the_arrow_schema_has_all_of_them(contract):
    columns = contract.to_schema().columns
    assert arrow_schema(contract).names == list(columns)
    for name, column in columns.items():
        assert column.description, name
        assert not column.description.endswith("."), name
    assert contract.__doc__


@pytest.mark.parametrize(("contract", "name"), columns_of())
def test_a_missing_column_is_refused(contract, name):
    with pytest.raises(InvariantBroken, match=rf"table {contract.__name__} of 2 rows: .*{name}"):
        validated(contract, good(contract).drop_columns([name]))


@pytest.mark.parametrize(("contract", "name"), columns_of())
def test_another_type_is_refused(contract, name):
    wrong = with_column(good(contract), name, [1, 2], pa.int8())
    with pytest.raises(InvariantBroken, match=rf"{name}: dtype"):
        validated(contract, wrong)


@pytest.mark.parametrize(("contract", "name"), columns_of())
def test_null_is_refused_where_a_value_is_needed(contract, name):
    table = good(contract)
    holed = with_column(table, name, [None, *table.column(name).to_pylist()[1:]])
    if name in NULLABLE:
        validated(contract, holed)
    else:
        with pytest.raises(InvariantBroken, match=name):
            validated(contract, holed)


@pytest.mark.parametrize(("contract", "name"), columns_of(pa.binary()))
@pytest.mark.parametrize("doc_id", [b"", A[:31], A + b"\0"])
def test_a_doc_id_of_another_length_is_refused(contract, name, doc_id):
    with pytest.raises(InvariantBroken, match=name):
        validated(contract, with_column(good(contract), name, [A, doc_id]))


@pytest.mark.parametrize("contract", GOOD, ids=lambda contract: contract.__name__)
def test_an_unknown_column_or_another_order_is_refused(contract):
    table = good(contract)
    with pytest.raises(InvariantBroken, match="extra"):
        validated(contract, table.append_column("extra", pa.array([1, 2])))
    with pytest.raises(InvariantBroken):
        validated(contract, table.select(table.column_names[::-1]))


@pytest.mark.parametrize(
    ("contract", "name", "value"),
    [
        (RawRows, "row_group", -1),
        (RawRows, "row", -1),
        (Clusters, "cluster_size", 0),
        (Clusters, "reason", "removed"),
        (Evidence, "shared_bands", -1),
        (Evidence, "jaccard", -0.1),
        (Evidence, "jaccard", 1.1),
        (Evidence, "jaccard", float("nan")),
        (ReferenceHits, "kind", "guess"),
        (ReferenceHits, "num_ngrams", -1),
        (BoilerplateNgrams, "num_documents", 0),
        (BoilerplateNgrams, "num_items", 0),
        (LargestClusters, "documents", 1),
        (LargestClusters, "min_jaccard", 1.5),
        (ExamplePairs, "jaccard", -1.0),
        (RemovedByPair, "by", "file"),
        (RemovedByPair, "documents", 0),
        (FloorEffects, "floor", -1),
        (FloorEffects, "documents", -1),
        (FloorEffects, "share_of_tokens", 1.5),
        (ShortestDocuments, "num_tokens", 0),
        (FilteredRows, "filter", "max_score"),
        (FilteredRows, "text_bytes", 0),
        (SampledNames, "column", "score"),
        (SampledNames, "documents", 0),
        (SampledValues, "column", "dump"),
        (SampledTotals, "with_value", -1),
        (SampledColumns, "column", "url"),
        (SampledFiles, "row_groups_read", -1),
        (SampledThresholds, "share_of_documents", 1.5),
        (RowFilterEffects, "removed_documents", -1),
        (MixtureLedger, "tokens", -1),
        (MixtureLedger, "passes", -0.5),
        (SplitDocuments, "num_tokens", 0),
        (SplitDocuments, "split", "dev"),
        (SplitDocuments, "reason", "lost"),
    ],
)
def test_a_value_out_of_bounds_is_refused_and_shown(contract, name, value):
    values = [*good(contract).column(name).to_pylist()[:1], value]
    with pytest.raises(InvariantBroken, match=rf"{name}: .*found {value}"):
        validated(contract, with_column(good(contract), name, values))


def test_every_reason_of_the_transform_is_allowed():
    table = pa.concat_tables([good(Clusters).slice(0, 1)] * len(clusters.REASONS))
    validated(Clusters, with_column(table, "reason", list(clusters.REASONS)))


def test_tables_may_be_validated_by_several_threads_at_once():
    tables = [(contract, good(contract)) for contract in GOOD] * 8
    with ThreadPoolExecutor(4) as threads:
        kept = list(threads.map(lambda pair: validated(*pair), tables))
    assert [table.num_rows for table in kept] == [table.num_rows for _, table in tables]


def test_pandera_does_not_look_for_missing_engines_with_each_column():
    """In a process of its own: this one knows already."""
    code = """
import sys

import pyarrow as pa
from pipeline_assets.conformance import validated
from pipeline_assets.schemas import FilteredRows, RawRows, arrow_schema
from tests.test_schemas import GOOD

class Asked:
    names = []
    def find_spec(self, name, path=None, target=None):
        self.names.append(name)

sys.meta_path.insert(0, Asked())
for contract in (RawRows, FilteredRows):
    validated(contract, pa.Table.from_pylist(GOOD[contract], schema=arrow_schema(contract)))
assert {"pandas", "pyspark"} <= set(Asked.names), Asked.names
twice = sorted({name for name in Asked.names if Asked.names.count(name) > 1} - {"pandas"})
assert twice == [], twice
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
