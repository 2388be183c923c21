import hashlib
from dataclasses import asdict

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline_assets.schemas import RawRows, arrow_schema
from pipeline_assets.transforms.rows import (
    OPTIONAL_COLUMNS,
    clean_rows,
    doc_id_array,
    doc_id_matrix,
    first_of_each,
    text_doc_ids,
)

BOM = b"\xef\xbb\xbf"


def unchecked(values, kind=None):
    """Bytes as an Arrow string column: Arrow does not check them, just as it does not when it reads Parquet."""
    kind = kind or pa.string()
    array = pa.array(values, pa.binary() if kind == pa.string() else pa.large_binary())
    return pa.Array.from_buffers(kind, len(array), array.buffers(), offset=array.offset)


def clean(texts, **columns):
    return clean_rows(pa.table({"text": texts, **columns}), pool="web", file="a/b.parquet", row_group=3)


def is_utf8(value):
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


def counts(stats):
    return {name: count for name, count in asdict(stats).items() if count}


@pytest.mark.parametrize(
    ("text", "used", "counted"),
    [
        (b"plain", True, {}),
        (None, False, {"null_text": 1}),
        (b"", False, {"empty_text": 1}),
        (b" ", True, {}),
        (b"caf\xe9", False, {"invalid_utf8": 1}),
        (b"\xed\xa0\x80", False, {"invalid_utf8": 1}),  # a lone surrogate
        (b"\xc0\x80", False, {"invalid_utf8": 1}),  # NUL in two bytes
        (b"\xf4\x90\x80\x80", False, {"invalid_utf8": 1}),  # beyond the last code point
        (b"a\0b", True, {"with_nul": 1}),
        (BOM + b"text", True, {"with_byte_order_mark": 1}),
        (b"text" + BOM, True, {}),
        (b"a\r\nb", True, {"with_crlf": 1}),
        (b"a\rb\nc", True, {}),
        (BOM + b"\0\r\n", True, {"with_nul": 1, "with_byte_order_mark": 1, "with_crlf": 1}),
    ],
)
def test_each_rule_counts_and_alters_nothing(text, used, counted):
    table, stats = clean(unchecked([text, b"other"]))
    expected = [text, b"other"] if used else [b"other"]
    assert table.column("text").cast(pa.large_binary()).to_pylist() == expected
    assert counts(stats) == counted | {
        "rows_read": 2,
        "rows_used": len(expected),
        "text_bytes": sum(map(len, expected)),
    }


texts_strategy = st.lists(
    st.none()
    | st.just(b"")
    | st.binary(max_size=6)
    | st.text(st.sampled_from("ab\0\r\n\ufeff中😀"), max_size=6).map(str.encode),
    max_size=12,
)


@given(texts_strategy, st.sampled_from(["string", "large_string", "binary", "dictionary"]), st.integers(0, 3))
def test_every_row_is_used_byte_for_byte_or_counted_with_its_reason(texts, kind, cut):
    if kind == "dictionary":
        distinct = list(dict.fromkeys(text for text in texts if text is not None))
        numbers = pa.array([None if text is None else distinct.index(text) for text in texts], pa.int32())
        column = pa.DictionaryArray.from_arrays(numbers, unchecked(distinct))
    elif kind == "binary":
        column = pa.array(texts, pa.binary())
    else:
        column = unchecked(texts, pa.string() if kind == "string" else pa.large_string())
    chunks = pa.chunked_array([column[:cut], column[cut:]]) if len(texts) > cut else column
    table, stats = clean(chunks)
    used = [(row, text) for row, text in enumerate(texts) if text and is_utf8(text)]
    assert table.column("row").to_pylist() == [row for row, _ in used]
    assert table.column("text").cast(pa.large_binary()).to_pylist() == [text for _, text in used]
    assert table.column("doc_id").to_pylist() == [hashlib.sha256(text).digest() for _, text in used]
    assert stats.rows_read == len(texts)
    assert stats.rows_read == stats.rows_used + stats.null_text + stats.empty_text + stats.invalid_utf8
    assert (stats.rows_used, stats.null_text, stats.empty_text) == (len(used), texts.count(None), texts.count(b""))
    assert stats.with_nul == sum(b"\0" in text for _, text in used)
    assert stats.with_crlf == sum(b"\r\n" in text for _, text in used)
    assert stats.with_byte_order_mark == sum(text.startswith(BOM) for _, text in used)
    assert stats.text_bytes == sum(len(text) for _, text in used)


def test_the_coordinate_and_the_schema_are_ours():
    for texts in (pa.array(["a", "", "b"]), pa.nulls(3), pa.array([], pa.string())):
        table, stats = clean(texts)
        assert table.schema == arrow_schema(RawRows)
        assert stats.rows_read == len(texts)
    table, _ = clean(pa.array(["a", "", "b"]))
    rows = table.select(["pool", "file", "row_group", "row"]).to_pylist()
    assert rows == [{"pool": "web", "file": "a/b.parquet", "row_group": 3, "row": row} for row in (0, 2)]


def test_optional_columns_are_kept_as_our_types_and_absent_ones_are_null():
    table, _ = clean(
        pa.array(["a", None, "b"]),
        id=pa.array([1, 2, 3]),
        dump=pa.array(["x", "y", None]).dictionary_encode(),
        language_score=pa.array([1, 2, 3], pa.int8()),
        score=pa.nulls(3),
        date=pa.array(["not", "ours", "."]),
    )
    read = table.select(list(OPTIONAL_COLUMNS)).to_pydict()
    assert read == {
        "id": ["1", "3"],
        "dump": ["x", None],
        "url": [None, None],
        "language": [None, None],
        "language_score": [1.0, 3.0],
        "score": [None, None],
    }


def as_dictionary(values):
    return pa.DictionaryArray.from_arrays(pa.array([0, 1, None], pa.int8()), values[:2])


BAD_URLS = [b"http://a", b"\xff", None]


@pytest.mark.parametrize(
    "urls",
    [
        pa.array(BAD_URLS, pa.binary()),
        pa.array(BAD_URLS, pa.large_binary()),
        pa.array(BAD_URLS, pa.binary_view()),
        pa.array([b"http://a", b"\xff" * 8, None], pa.binary(8)),
        as_dictionary(pa.array(BAD_URLS, pa.binary())),
        as_dictionary(unchecked(BAD_URLS)),
        unchecked(BAD_URLS),
        unchecked(BAD_URLS, pa.large_string()),
        unchecked(BAD_URLS).cast(pa.string_view()),
    ],
    ids=lambda urls: str(urls.type),
)
def test_bytes_of_another_column_that_are_not_utf8_are_null_whatever_their_type(urls):
    for name in ("id", "dump", "url", "language"):
        table, stats = clean(pa.array(["a", "b", "c"]), **{name: urls})
        assert table.schema == arrow_schema(RawRows)
        assert table.column(name).to_pylist() == ["http://a", None, None]
        assert (stats.rows_used, stats.invalid_values) == (3, 1)


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("score", pa.array(["0.5", "high", None]), [0.5, None, None]),
        ("score", pa.array([2**60, 3, None]), [None, 3.0, None]),
        ("score", pa.array([[0.5], [], None]), [None, None, None]),
        ("language_score", unchecked([b"0.5", b"\xff", None]), [0.5, None, None]),
        ("language_score", pa.array([0, 1, None], pa.timestamp("us")), [None, None, None]),
        ("dump", pa.array([["a"], [], None]), [None, None, None]),
        ("url", pa.array([{"host": "a"}, {}, None]), [None, None, None]),
        ("id", pa.array([[("a", 1)], [], None], pa.map_(pa.string(), pa.int64())), [None, None, None]),
        ("url", pa.array([0, 1, None], pa.timestamp("us", tz="Nowhere/Else")), [None, None, None]),
    ],
)
def test_values_that_cannot_be_read_as_ours_are_null_and_counted(name, values, expected):
    table, stats = clean(pa.array(["a", "b", "c"]), **{name: values})
    assert table.schema == arrow_schema(RawRows)
    assert table.column(name).to_pylist() == expected
    assert stats.invalid_values == expected.count(None) - 1


def test_a_value_of_another_column_that_is_not_utf8_is_null_and_counted():
    urls = unchecked([b"http://a", b"\xff", None, b"\xfe"])
    table, stats = clean(pa.array(["a", "b", "c", ""]), url=urls, id=unchecked([b"1", b"2", b"3", b"4"]))
    assert table.column("url").to_pylist() == ["http://a", None, None]
    assert table.column("id").to_pylist() == ["1", "2", "3"]
    assert (stats.rows_used, stats.invalid_utf8, stats.invalid_values) == (3, 0, 1)


doc_ids = st.lists(st.binary(min_size=32, max_size=32), max_size=5)


@given(doc_ids, st.integers(0, 5))
def test_doc_ids_go_from_array_to_matrix_and_back(ids, start):
    array = pa.array(ids, pa.binary())
    matrix = doc_id_matrix(array)
    assert (matrix.dtype, matrix.shape) == (np.uint8, (len(ids), 32))
    assert [bytes(row) for row in matrix] == ids
    assert doc_id_array(matrix).equals(array)
    assert doc_id_array(matrix[::-1]).to_pylist() == ids[::-1]
    assert [bytes(row) for row in doc_id_matrix(pa.chunked_array([array[:start], array[start:]], pa.binary()))] == ids


@given(st.lists(st.text(max_size=9), max_size=5))
def test_a_doc_id_is_the_hash_of_the_texts_bytes(texts):
    for kind in (pa.string(), pa.large_string()):
        ids = text_doc_ids(pa.array(texts, kind))
        assert ids.to_pylist() == [hashlib.sha256(text.encode()).digest() for text in texts]


@given(
    st.lists(
        st.tuples(st.sampled_from([b"\1" * 32, b"\2" * 32, b"\3" * 32, b"\4" * 32]), st.sampled_from(["x", "y", None]))
    ),
    st.integers(1, 3),
    st.randoms(use_true_random=False),
)
def test_the_first_distinct_documents_of_each_group(rows, limit, random):
    order = list(range(len(rows)))
    random.shuffle(order)
    ids, groups = [row[0] for row in rows], [row[1] for row in rows]
    matrix = np.frombuffer(b"".join(ids), np.uint8).reshape(-1, 32)
    chosen = first_of_each(np.array(order, dtype=np.int64), matrix, groups, limit)
    expected = []
    for row in order:
        of_its_group = [other for other in expected if groups[other] == groups[row]]
        if len(of_its_group) < limit and ids[row] not in [ids[other] for other in expected]:
            expected.append(row)
    assert chosen == expected
