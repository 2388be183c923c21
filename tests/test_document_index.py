"""The document index: it comes back as written, tiles its shards, and is refused when it does not."""

import dataclasses
import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from training_io.document_index import cut_shards, index_of, read_index, write_index
from training_io.errors import FormatError

relaxed = settings(deadline=None, max_examples=40)


def make_index(documents, max_shard_tokens=10, **changes):
    lengths = np.array(documents, dtype=np.int64)
    n = len(lengths)
    index = index_of(
        split="train",
        doc_ids=np.arange(n * 32, dtype=np.uint8).reshape(n, 32),
        pools=(np.arange(n) % 2).astype(np.uint16),
        pool_names=("prose", "code"),
        lengths=lengths,
        cuts=cut_shards(lengths, max_shard_tokens),
        eos_id=0,
        token_dtype="uint16",
        tokenizer_fingerprint="f" * 64,
    )
    return dataclasses.replace(index, **changes)


@relaxed
@given(st.lists(st.integers(1, 12), max_size=30), st.integers(1, 20))
def test_shards_take_whole_documents_up_to_the_limit(lengths, limit):
    cuts = cut_shards(np.array(lengths, dtype=np.int64), limit).tolist()
    assert (cuts[0], cuts[-1]) == (0, len(lengths))
    for start, end in itertools.pairwise(cuts):
        assert end > start
        assert end - start == 1 or sum(lengths[start:end]) <= limit
        assert end == len(lengths) or sum(lengths[start : end + 1]) > limit


@relaxed
@given(st.lists(st.integers(1, 12), max_size=30))
def test_an_index_comes_back_as_written(tmp_path_factory, lengths):
    folder = tmp_path_factory.mktemp("index") / "train_index"
    index = make_index(lengths)
    write_index(folder, index)
    read = read_index(folder)
    assert (read.num_documents, read.num_tokens) == (len(lengths), sum(lengths))
    for field in dataclasses.fields(index):
        written, found = getattr(index, field.name), getattr(read, field.name)
        assert np.array_equal(written, found), field.name
        assert not isinstance(written, np.ndarray) or (written.dtype == found.dtype and not found.flags.writeable)


def test_offsets_are_inside_the_shard(tmp_path):
    index = make_index([4, 4, 9, 1])
    assert index.shards.tolist() == [0, 0, 1, 1]
    assert index.offsets.tolist() == [0, 4, 0, 9]
    assert index.shard_files == ("train_000000.bin", "train_000001.bin")
    assert index.shard_tokens == (8, 10)


def test_shards_are_cut_past_two_to_the_31_tokens():
    lengths = np.array([2**31 - 5, 4, 7, 2**31 - 1], dtype=np.int64)
    assert cut_shards(lengths, 2**31 - 1).tolist() == [0, 2, 3, 4]
    assert cut_shards(np.full(50, 2**30, dtype=np.int64), 2**31 - 1).tolist() == list(range(51))


def test_offsets_beyond_int32_stay_positive():
    lengths = np.full(3, 2**31, dtype=np.int64)
    index = index_of(
        split="train",
        doc_ids=np.zeros((3, 32), np.uint8),
        pools=np.zeros(3, np.uint16),
        pool_names=("a",),
        lengths=lengths,
        cuts=np.array([0, 3]),
        eos_id=0,
        token_dtype="uint32",
        tokenizer_fingerprint="f",
    )
    assert index.offsets.tolist() == [0, 2**31, 2**32]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": np.array([4, 0, 9, 1])}, "document 1: expected at least 1 token, found 0"),
        ({"offsets": np.array([0, 3, 0, 9])}, "document 1: expected offset 4, found 3"),
        ({"shards": np.array([0, 1, 0, 1], np.int32)}, "expected documents in the order of 2 shards"),
        ({"shards": np.array([0, 0, 1, 2], np.int32)}, "expected documents in the order of 2 shards"),
        ({"shard_tokens": (8, 11)}, "the index lists 10 tokens, the shard holds 11"),
        ({"pools": np.array([0, 1, 2, 0], np.uint16)}, "expected pools below 2, found 2"),
        ({"eos_id": 65_536}, "EOS id that fits uint16, found 65,536"),
        ({"token_dtype": "int32"}, "expected token_dtype uint16 or uint32, found int32"),
        ({"doc_ids": np.zeros((3, 32), np.uint8)}, "expected columns of 4 documents"),
    ],
)
def test_a_contradictory_index_is_refused(tmp_path, changes, message):
    with pytest.raises(FormatError, match=message):
        write_index(tmp_path / "train_index", make_index([4, 4, 9, 1], **changes))


@pytest.mark.parametrize("column", ["doc_id", "pool", "shard", "offset", "length"])
@pytest.mark.parametrize("damage", ["missing", "truncated", "retyped", "longer"])
def test_a_damaged_column_is_refused_by_name(tmp_path, column, damage):
    folder = tmp_path / "train_index"
    write_index(folder, make_index([4, 4, 9, 1]))
    path = folder / f"{column}.npy"
    if damage == "missing":
        path.unlink()
    elif damage == "truncated":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        values = np.load(path)
        np.save(path, values.astype(np.float64) if damage == "retyped" else np.concatenate([values, values]))
    with pytest.raises(FormatError, match=rf"{column}\.npy"):
        read_index(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other/1"}, "expected format corpusmill-index/1, found other/1"),
        ({"num_tokens": 7}, "says 7 tokens, its shards hold 18"),
        ({"shards": [{"file": "a"}]}, "num_tokens"),
        ({"num_documents": "many"}, "many"),
        ({"split": "validation"}, "expected a split .* its folder is named for, found 'validation'"),
        ({"split": "../../train"}, "expected a split .*, found '../../train'"),
        ({"split": "train\n"}, r"expected a split .*, found 'train\\n'"),
        (
            {"shards": [{"file": f, "num_tokens": n} for f, n in (("train_000000.bin", 8), ("/train_000001.bin", 10))]},
            "expected shards train_000000.bin and on, found '/train_000001.bin'",
        ),
        (
            {
                "shards": [
                    {"file": "../train_000000.bin", "num_tokens": 8},
                    {"file": "train_000001.bin", "num_tokens": 10},
                ]
            },
            "found '../train_000000.bin'",
        ),
        ({"shards": [{"file": "train_000000.bin", "num_tokens": n} for n in (8, 10)]}, "found 'train_000000.bin'"),
    ],
)
def test_a_damaged_index_json_is_refused(tmp_path, change, message):
    folder = tmp_path / "train_index"
    write_index(folder, make_index([4, 4, 9, 1]))
    path = folder / "index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(FormatError, match=message):
        read_index(folder)


@pytest.mark.parametrize("split", ["val", "Train", "dev1", "a.b", "..", "é", ""])
def test_only_plain_names_are_splits(tmp_path, split):
    with pytest.raises(FormatError, match="expected a split of letters a to z, not val"):
        write_index(tmp_path / f"{split}_index", make_index([4, 4], split=split))
    assert not list(tmp_path.iterdir())


def test_an_index_names_every_file_of_its_split(tmp_path):
    index = make_index([4, 4, 9, 1])
    write_index(tmp_path / "train_index", index)
    written = {path.relative_to(tmp_path).as_posix() for path in (tmp_path / "train_index").iterdir()}
    assert set(index.files) == {*written, "train_000000.bin", "train_000001.bin"}


def test_broken_json_is_refused(tmp_path):
    (tmp_path / "index.json").write_text("{")
    with pytest.raises(FormatError, match=r"index\.json"):
        read_index(tmp_path)
