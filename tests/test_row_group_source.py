import os
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from resources.artifact_store import ArtifactStore
from resources.listings import PoolFolder
from resources.readers import Network
from resources.row_group_source import list_files as list_files_of
from resources.row_group_source import listing_fingerprint, read_reference_table
from resources.row_group_source import read_row_groups as read_row_groups_of
from training_io.errors import SourceError

COLUMNS = ("text", "id", "score")
NOWHERE = Network(store=ArtifactStore(Path("/nowhere")))  # local files need none


def list_files(pools):
    return list_files_of(pools, NOWHERE)


def read_row_groups(file, row_groups, columns):
    for fetched, table in read_row_groups_of(file, row_groups, columns, NOWHERE):
        assert fetched.ranges == ()
        yield fetched.row_group, table


def write(path, table=None, *, row_group_size=10, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    if table is None:
        texts = [f"text {number} of {path.name} " * 9 for number in range(30)]
        table = pa.table({"text": texts, "id": [str(number) for number in range(30)]})
    pq.write_table(table, path, row_group_size=row_group_size, **options)
    return path


def pool(folder, name="web", glob="**/*.parquet"):
    return PoolFolder(name=name, folder=folder, glob=glob)


def read_all(folder, columns=COLUMNS):
    return [
        (file.file, row_group, table)
        for file in list_files([pool(folder)])
        for row_group, table in read_row_groups(file, range(len(file.row_groups)), columns)
    ]


def test_files_come_by_pool_and_name_with_their_footers_facts(tmp_path):
    for name in ("b/one.parquet", "a/two.parquet", "a/deep/three.parquet"):
        write(tmp_path / name)
    (tmp_path / "a" / "notes.txt").write_text("not data")
    (tmp_path / "a" / "folder.parquet").mkdir()
    files = list_files([pool(tmp_path / "b", "second"), pool(tmp_path / "a", "first")])
    assert [(file.pool, file.file) for file in files] == [
        ("second", "one.parquet"),
        ("first", "deep/three.parquet"),
        ("first", "two.parquet"),
    ]
    assert [facts.num_rows for facts in files[0].row_groups] == [10, 10, 10]
    assert files[0].columns == ("text", "id")
    assert files[0].size_bytes == (tmp_path / "b" / "one.parquet").stat().st_size
    metadata = pq.read_metadata(tmp_path / "b" / "one.parquet")
    assert [facts.text_bytes for facts in files[0].row_groups] == [
        metadata.row_group(number).column(0).total_uncompressed_size for number in range(3)
    ]


def test_only_the_asked_row_groups_and_columns_are_read(tmp_path):
    table = pa.table({"id": [1, 2, 3], "text": ["a", "b", "c"], "more": ["x", "y", "z"]})
    [file] = list_files([pool(write(tmp_path / "a.parquet", table, row_group_size=1).parent)])
    read = dict(read_row_groups(file, [2, 0], COLUMNS))
    assert list(read) == [2, 0]
    assert read[2].to_pydict() == {"text": ["c"], "id": [3]}


@pytest.mark.parametrize(
    ("glob", "message"),
    [
        ("*.csv", r"pool web: expected at least one file matching '\*\.csv'"),
        ("", "pool web: expected a glob relative to"),
        ("/etc/*", "pool web: expected a glob relative to"),
        ("**.parquet", "pool web: expected a glob relative to"),
    ],
)
def test_a_glob_without_files_or_sense_is_refused(tmp_path, glob, message):
    write(tmp_path / "a.parquet")
    with pytest.raises(SourceError, match=message):
        list_files([pool(tmp_path, glob=glob)])


def test_a_missing_or_empty_folder_or_a_file_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(SourceError, match=r"pool web: expected at least one file .* found none"):
        list_files([pool(tmp_path / "empty")])
    file = write(tmp_path / "a.parquet")
    for folder in (tmp_path / "absent", file):
        with pytest.raises(SourceError, match=r"pool web: expected a folder of Parquet files at .*mend source\.pools"):
            list_files([pool(folder)])


def overwrite(content, start, replacement):
    return content[:start] + replacement + content[start + len(replacement) :]


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: b"PAR1",
        lambda content: content[: len(content) // 2],
        lambda content: content[:-1],
        lambda content: content[:-4] + b"PARX",
        lambda content: content[:-8] + (2**31).to_bytes(4, "little") + b"PAR1",
        lambda content: content[:-8] + (0).to_bytes(4, "little") + b"PAR1",
        lambda content: overwrite(content, len(content) - 8 - int.from_bytes(content[-8:-4], "little"), b"\xff" * 9),
        lambda content: b"not Parquet at all, but long enough to be asked for its footer",
    ],
    ids=["zero", "magic", "half", "one-short", "end-mark", "footer-size", "no-footer", "footer", "text"],
)
def test_a_file_that_is_cut_short_or_has_a_corrupt_footer_is_one_error_that_names_it(tmp_path, damage):
    path = write(tmp_path / "bad.parquet")
    path.write_bytes(damage(path.read_bytes()))
    write(tmp_path / "good.parquet")
    with pytest.raises(SourceError, match=r"bad\.parquet: expected .*cut short or damaged; fetch it again"):
        list_files([pool(tmp_path)])


def test_a_corrupt_data_page_is_one_error_that_names_the_file(tmp_path):
    path = write(tmp_path / "bad.parquet", compression="zstd")
    start = pq.read_metadata(path).row_group(1).column(0).dictionary_page_offset
    path.write_bytes(overwrite(path.read_bytes(), start, b"\xff" * 64))
    [file] = list_files([pool(tmp_path)])
    assert len(list(read_row_groups(file, [0], COLUMNS))) == 1
    with pytest.raises(SourceError, match=r"bad\.parquet: expected readable row groups"):
        list(read_row_groups(file, [1], COLUMNS))


def test_one_flipped_letter_is_found_where_the_pages_have_checksums(tmp_path):
    path = write(tmp_path / "bad.parquet", compression="none", use_dictionary=False, write_page_checksum=True)
    content = path.read_bytes()
    path.write_bytes(overwrite(content, content.find(b"text 15"), b"T"))
    [file] = list_files([pool(tmp_path)])
    with pytest.raises(SourceError, match=r"bad\.parquet.*CRC"):
        list(read_row_groups(file, [0, 1, 2], COLUMNS))


def test_a_file_that_is_gone_after_the_listing_is_one_error(tmp_path):
    path = write(tmp_path / "a.parquet")
    [file] = list_files([pool(tmp_path)])
    path.unlink()
    with pytest.raises(SourceError, match=r"a\.parquet: expected readable row groups"):
        list(read_row_groups(file, [0], COLUMNS))


@pytest.mark.parametrize(
    ("table", "found"),
    [
        (pa.table({"content": ["a"], "url": ["b"]}), "found content, url"),
        (pa.table({"Text": ["a"]}), "found Text"),
        (pa.table({"outer": [{"text": "a"}]}), "found outer"),
        (pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"]), "found text, text"),
    ],
)
def test_a_missing_or_doubled_text_column_is_an_error_that_lists_the_columns(tmp_path, table, found):
    write(tmp_path / "a.parquet", table)
    with pytest.raises(SourceError, match=rf"a\.parquet: expected one column 'text', {found}\. Rename"):
        list_files([pool(tmp_path)])


@pytest.mark.parametrize("texts", [[1, 2], [["a"], ["b"]], [{"a": "b"}] * 2, [1.5, None]])
def test_a_text_column_that_holds_no_text_is_an_error_that_names_its_type(tmp_path, texts):
    table = pa.table({"text": pa.array(texts)})
    write(tmp_path / "a.parquet", table)
    with pytest.raises(SourceError, match=r"a\.parquet: expected strings in the column 'text', found "):
        list_files([pool(tmp_path)])


def test_nested_and_unknown_columns_are_not_read(tmp_path):
    table = pa.table(
        {
            "lists": [[1, 2], None],
            "text": ["a", "b"],
            "structs": [{"text": "inner", "deep": [{"text": 1}]}, None],
            "maps": pa.array([[("text", 1)], []], pa.map_(pa.string(), pa.int64())),
        }
    )
    write(tmp_path / "a.parquet", table)
    [(_, _, read)] = read_all(tmp_path)
    assert read.to_pydict() == {"text": ["a", "b"]}


@pytest.mark.parametrize(
    "kind",
    [
        pa.string(),
        pa.large_string(),
        pa.string_view(),
        pa.binary(),
        pa.dictionary(pa.int32(), pa.string()),
        pa.dictionary(pa.int8(), pa.large_string()),
    ],
    ids=str,
)
def test_text_may_be_of_any_string_type(tmp_path, kind):
    texts = (
        pa.array(["a", None, "中", "a"]).cast(kind)
        if kind != pa.string_view()
        else pa.array(["a", None, "中", "a"], kind)
    )
    write(tmp_path / "a.parquet", pa.table({"text": texts}))
    [(_, _, read)] = read_all(tmp_path)
    assert read.column("text").cast(pa.binary()).to_pylist() == [b"a", None, "中".encode(), b"a"]


def test_files_of_one_pool_may_differ_in_columns_types_and_order(tmp_path):
    write(tmp_path / "a.parquet", pa.table({"text": ["a"], "date": ["2020"], "id": ["1"]}))
    write(tmp_path / "b.parquet", pa.table({"score": [0.5], "id": [2], "text": pa.array(["b"], pa.large_string())}))
    write(tmp_path / "c.parquet", pa.table({"text": pa.nulls(2)}))
    assert [(name, read.to_pydict()) for name, _, read in read_all(tmp_path)] == [
        ("a.parquet", {"text": ["a"], "id": ["1"]}),
        ("b.parquet", {"text": ["b"], "id": [2], "score": [0.5]}),
        ("c.parquet", {"text": [None, None]}),
    ]


def test_files_and_row_groups_of_zero_rows_pass(tmp_path):
    schema = pa.schema([("text", pa.string())])
    write(tmp_path / "a.parquet", schema.empty_table())
    with pq.ParquetWriter(tmp_path / "b.parquet", schema) as writer:
        for texts in (["a"], [], ["b", "c"]):
            writer.write_table(pa.table({"text": texts}, schema))
    with pq.ParquetWriter(tmp_path / "c.parquet", schema):
        pass
    files = {file.file: [facts.num_rows for facts in file.row_groups] for file in list_files([pool(tmp_path)])}
    assert files["b.parquet"] == [1, 0, 2]
    assert files["c.parquet"] == []
    assert sum(files["a.parquet"]) == 0
    read = [(name, table.column("text").to_pylist()) for name, _, table in read_all(tmp_path)]
    assert [(name, texts) for name, texts in read if texts] == [("b.parquet", ["a"]), ("b.parquet", ["b", "c"])]
    assert ("b.parquet", []) in read


def fingerprint(folder):
    return listing_fingerprint(list_files([pool(folder)]))


def test_the_fingerprint_is_one_of_content_and_names_not_of_times_or_order(tmp_path):
    one = tmp_path / "one"
    for name in ("a.parquet", "b.parquet"):
        write(one / name)
    before = fingerprint(one)
    other = tmp_path / "other"
    other.mkdir()
    for name in ("b.parquet", "a.parquet"):
        shutil.copyfile(one / name, other / name)
    os.utime(other / "a.parquet", (1, 1))
    assert fingerprint(other) == before
    assert fingerprint(one) == before


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: write(folder / "a.parquet", pa.table({"text": ["other"]})),
        lambda folder: write(folder / "a.parquet", row_group_size=15),
        lambda folder: write(folder / "c.parquet"),
        lambda folder: (folder / "a.parquet").unlink(),
        lambda folder: (folder / "a.parquet").rename(folder / "c.parquet"),
    ],
)
def test_the_fingerprint_changes_with_every_file(tmp_path, change):
    for name in ("a.parquet", "b.parquet"):
        write(tmp_path / name)
    before = fingerprint(tmp_path)
    change(tmp_path)
    assert fingerprint(tmp_path) != before


def test_the_fingerprint_knows_the_pool(tmp_path):
    write(tmp_path / "a.parquet")
    assert listing_fingerprint(list_files([pool(tmp_path, "x")])) != listing_fingerprint(
        list_files([pool(tmp_path, "y")])
    )


def test_a_reference_table_is_the_text_column_of_one_file(tmp_path):
    path = write(tmp_path / "a.parquet", pa.table({"id": [1, 2, 3], "text": ["a", "b", "c"]}), row_group_size=2)
    assert read_reference_table(path).to_pydict() == {"text": ["a", "b", "c"]}
    with pq.ParquetWriter(path, pa.schema([("text", pa.string())])):
        pass
    assert read_reference_table(path).num_rows == 0
    path.write_bytes(b"")
    with pytest.raises(SourceError, match=r"a\.parquet"):
        read_reference_table(path)


def test_an_optional_column_that_is_there_twice_is_left_out(tmp_path):
    arrays = [pa.array([value]) for value in ("a", "1", "2", "b")]
    pq.write_table(pa.Table.from_arrays(arrays, names=["text", "id", "id", "url"]), tmp_path / "twice.parquet")
    (file,) = list_files([PoolFolder(name="pool", folder=tmp_path, glob="*.parquet")])
    [(_, table)] = read_row_groups(file, [0], ["text", "id", "url"])
    assert table.to_pydict() == {"text": ["a"], "url": ["b"]}


def test_a_link_to_nothing_or_to_a_folder_is_an_error(tmp_path):
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "there.parquet")
    pool = PoolFolder(name="pool", folder=tmp_path, glob="**/*.parquet")
    assert len(list_files([pool])) == 1
    (tmp_path / "gone.parquet").symlink_to(tmp_path / "nothing")
    with pytest.raises(SourceError, match=r"gone\.parquet, a link to nothing"):
        list_files([pool])
    (tmp_path / "gone.parquet").unlink()
    (tmp_path / "elsewhere").symlink_to(tmp_path.parent, target_is_directory=True)
    with pytest.raises(SourceError, match=r"elsewhere, a link to nothing or to a folder"):
        list_files([pool])


def test_a_file_that_changed_after_it_was_listed_is_an_error(tmp_path):
    path = tmp_path / "changing.parquet"
    pq.write_table(pa.table({"text": ["a", "b"]}), path)
    (file,) = list_files([PoolFolder(name="pool", folder=tmp_path, glob="*.parquet")])
    pq.write_table(pa.table({"text": ["a", "b", "c"]}), path)
    with pytest.raises(SourceError, match=r"changing\.parquet: expected the file of [\d,]+ bytes that was listed"):
        list(read_row_groups(file, [0], ["text"]))
