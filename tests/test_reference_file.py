"""Files of reference texts: what a line is, whatever the editor, and one error for a line that is none."""

import gzip
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resources.reference_file import read_texts
from training_io.errors import SourceError

BOM = b"\xef\xbb\xbf"
TEXTS = ["one two", "東京 é", "three\u2028four\x0bfive", "\tsix "]


def jsonl(rows, end="\n"):
    return end.join(json.dumps(row) for row in rows).encode()


FILES = {
    "a.txt": "\n".join(TEXTS).encode(),
    "A.TXT": "\n".join(TEXTS).encode() + b"\n",
    "marked.txt": BOM + "\n".join(TEXTS).encode(),
    "windows.txt": BOM + "\r\n".join([*TEXTS, "", "  "]).encode(),
    "a.jsonl": jsonl({"text": text} for text in TEXTS),
    "A.JsonL": jsonl({"id": 1, "text": text, "answer": ["A", None]} for text in TEXTS),
    "marked.jsonl": BOM + jsonl([{"text": text} for text in TEXTS], "\r\n") + b"\r\n\r\n",
    "raw.jsonl": "\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in TEXTS).encode(),
    "empty_ones.jsonl": jsonl([{"text": ""}, *({"text": text} for text in TEXTS), {"text": None}]),
    "a.v1.txt.gz": gzip.compress(BOM + "\r\n".join(TEXTS).encode()),
    "A.JSONL.GZ": gzip.compress(jsonl({"text": text} for text in TEXTS)),
}


@pytest.mark.parametrize("name", FILES)
def test_the_same_texts_are_read_from_each_kind_of_file(tmp_path, name):
    (tmp_path / name).write_bytes(FILES[name])
    assert read_texts(tmp_path / name) == TEXTS


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1)), st.sampled_from(["\n", "\r\n"]))
def test_any_text_survives_jsonl(tmp_path_factory, texts, end):
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    path.write_bytes(jsonl([{"text": text} for text in texts], end))
    assert read_texts(path) == texts


def test_only_the_files_own_byte_order_mark_is_taken_off(tmp_path):
    (tmp_path / "a.txt").write_bytes(BOM + BOM + b"one\n" + BOM + b"two")
    assert read_texts(tmp_path / "a.txt") == ["\ufeffone", "\ufefftwo"]
    (tmp_path / "a.jsonl").write_bytes(BOM + jsonl([{"text": "\ufeffone"}]))
    assert read_texts(tmp_path / "a.jsonl") == ["\ufeffone"]


LONG = b'"' + b"x" * 10_000 + b'"'


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"one\ntwo\r\ncaf\xe9 au lait\n", r"a\.txt, line 3: expected UTF-8 text, found .*0xe9.*Save the file"),
        ("a.txt", BOM + b"one\n\xff", r"a\.txt, line 2: expected UTF-8 text"),
        ("a.txt", "one\ntwo".encode("utf-16"), r"a\.txt, line 1: expected UTF-8 text"),
        ("a.jsonl", b'{"text": "one"}\n{"text": "\xe9"}', r"a\.jsonl, line 2: expected UTF-8 text"),
        ("a.jsonl", b'{"text": "one"}\n\n{"text": "tw', r"a\.jsonl, line 3: expected a JSON object .*'\{\"text\": \"tw'"),
        ("a.jsonl", b"one two", r"a\.jsonl, line 1: expected a JSON object .*Mend the line"),
        ("a.jsonl", b'["one"]', r"line 1: .*found \['one'\]"),
        ("a.jsonl", LONG, r"line 1: .*found 'x{79}\. Mend the line\.$"),
        ("a.jsonl", b"[" * 200_000, r"line 1: .*found '\[{80}' \(.*recursion.*\)"),
        ("a.jsonl", b'{"question": "one", "answer": 2}', r"line 1: .*found the fields 'question', 'answer'\. Mend"),
        ("a.jsonl", b'{"text": ["one"]}', r"line 1: .*found 'text': \['one'\]"),
        ("a.jsonl", b'{"text": 1' + b"0" * 5_000 + b"}", r"line 1: expected a JSON object .*4300 digits"),
        ("a.jsonl", rb'{"text": "half \ud800 of a pair"}', r"line 1: .*half of a surrogate pair in 'half \\ud800"),
        ("a.csv", b"text\none", r"a\.csv: expected a file \.parquet, \.jsonl or \.txt.*found 'a\.csv'\. Rename"),
        ("exam", b"one", r"exam: expected a file \.parquet, \.jsonl or \.txt"),
        ("a.json", b'["one"]', r"expected a file \.parquet, \.jsonl or \.txt"),
        ("a.jsonl.zst", b"", r"the latter two also as \.gz, found 'a\.jsonl\.zst'"),
        ("a.parquet.gz", b"", r"the latter two also as \.gz, found 'a\.parquet\.gz'"),
        ("a.gz", gzip.compress(b"one", mtime=0), r"the latter two also as \.gz, found 'a\.gz'"),
        ("a.txt.gz", b"one two", r"a\.txt\.gz: expected gzip data, found Not a gzipped file"),
        ("a.txt.gz", gzip.compress(b"one two" * 99, mtime=0)[:-9], r"a\.txt\.gz: expected gzip data, found .*end-of-stream"),
        ("a.txt.gz", gzip.compress(b"one", mtime=0)[:10] + b"\xff" * 9, r"a\.txt\.gz: expected gzip data, found Error"),
    ],
)  # fmt: skip
def test_what_is_no_text_is_one_error_that_says_where(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SourceError) as caught:
        read_texts(tmp_path / name)
    assert re.search(message, str(caught.value)), caught.value
    assert str(caught.value).startswith(str(tmp_path / name))
    assert len(str(caught.value)) < len(str(tmp_path)) + 400
    assert "\n" not in str(caught.value)
