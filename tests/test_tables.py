import re
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resources.tables import (
    MAPPED_FROM_BYTES,
    ROWS_PER_GROUP,
    MappedArrays,
    read_array,
    read_first_rows,
    read_json,
    read_rows,
    read_table,
    write_array,
    write_json,
    write_table,
)
from training_io.errors import FormatError

READERS = {
    "table.parquet": [read_table, lambda path: read_table(path, ["n"]), lambda path: read_rows(path, SOME_ROWS, ["n"])],
    "small.npy": [read_array],
    "mapped.npy": [read_array, lambda path: MappedArrays([path])[0]],
    "values.json": [read_json],
}
SOME_ROWS = np.array([2_400, 5, 1_200])


def table_of(num_rows):
    return pa.table({"text": pa.array([f"text {n}" for n in range(num_rows)], pa.large_string()), "n": range(num_rows)})


@pytest.mark.parametrize("num_rows", [0, 1, 1_000, 2_500])
def test_a_table_comes_back_as_it_was_in_fixed_row_groups(tmp_path, num_rows):
    table = table_of(num_rows)
    path = tmp_path / "deep" / "rows.parquet"
    write_table(table, path)
    assert read_table(path).equals(table)
    assert read_table(path, ["n"]).column_names == ["n"]
    footer = pq.read_metadata(path)
    sizes = [footer.row_group(number).num_rows for number in range(footer.num_row_groups)]
    assert sum(sizes) == num_rows
    assert all(size == ROWS_PER_GROUP for size in sizes[:-1])
    columns = [footer.row_group(0).column(at) for at in range(2)] if num_rows else []
    assert [column.has_dictionary_page for column in columns] == [False, True][: len(columns)]
    assert [column.statistics is None for column in columns] == [True, False][: len(columns)]


@pytest.mark.parametrize("num_rows", [0, 3, 2_500])
def test_first_rows_are_those_of_the_table(tmp_path, num_rows):
    table = table_of(num_rows)
    write_table(table, tmp_path / "rows.parquet")
    assert read_first_rows(tmp_path / "rows.parquet", 5).equals(table.slice(0, 5))


def test_the_same_values_give_the_same_bytes(tmp_path):
    table = table_of(2_500)
    in_chunks = pa.concat_tables([table.slice(0, 7), table.slice(7, 1_500), table.slice(1_507)])
    for name, value in (("one", table), ("other", in_chunks)):
        write_table(value, tmp_path / f"{name}.parquet")
    assert (tmp_path / "one.parquet").read_bytes() == (tmp_path / "other.parquet").read_bytes()
    for name, value in (("one", {"a": 1, "b": "é"}), ("other", {"b": "é", "a": 1})):
        write_json(value, tmp_path / f"{name}.json")
    assert (tmp_path / "one.json").read_bytes() == (tmp_path / "other.json").read_bytes()
    assert read_json(tmp_path / "one.json") == {"a": 1, "b": "é"}


@pytest.mark.parametrize("num_bytes", [0, 5, MAPPED_FROM_BYTES + 1])
def test_an_array_comes_back_and_large_ones_are_mapped(tmp_path, num_bytes):
    array = np.arange(num_bytes, dtype=np.uint8)
    write_array(array, tmp_path / "deep" / "a.npy")
    read = read_array(tmp_path / "deep" / "a.npy")
    assert isinstance(read, np.memmap) == (num_bytes > MAPPED_FROM_BYTES)
    np.testing.assert_array_equal(read, array)


def test_objects_are_neither_written_nor_read(tmp_path):
    array = np.array([{"a": 1}], dtype=object)
    with pytest.raises(ValueError, match="allow_pickle"):
        write_array(array, tmp_path / "a.npy")
    np.save(tmp_path / "b.npy", array, allow_pickle=True)
    with pytest.raises(FormatError, match="allow_pickle"):
        read_array(tmp_path / "b.npy")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("written")
    write_table(table_of(2_500), folder / "table.parquet")
    write_array(np.arange(60, dtype=np.uint64).reshape(20, 3), folder / "small.npy")
    write_array(np.arange(200_000, dtype=np.uint64), folder / "mapped.npy")
    write_json([{"unit": "é", "counts": {"documents": 1}}], folder / "values.json")
    return folder


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("damage", ["missing", "empty", "half", "one byte short", "zeros", "other"])
def test_a_file_that_is_missing_cut_short_or_another_is_named(written, tmp_path, name, damage):
    path = tmp_path / name
    whole = (written / name).read_bytes()
    if damage != "missing":
        cut = {"empty": 0, "half": len(whole) // 2, "one byte short": len(whole) - 1}.get(damage, len(whole))
        other = {"zeros": bytes(cut), "other": b"\x1b[2J" * cut}
        path.write_bytes(other.get(damage, whole[:cut]))
    if (name, damage) == ("values.json", "one byte short"):
        assert read_json(path) == read_json(written / name)  # it ends in a line end
        return
    for read in READERS[name]:
        with pytest.raises(FormatError, match=f"^{re.escape(str(path))}: expected .*, found .* materialize") as caught:
            read(path)
        assert "\n" not in str(caught.value)
        assert ("found no file" in str(caught.value)) == (damage == "missing")


@given(name=st.sampled_from(sorted(READERS)), place=st.floats(0, 1), byte=st.integers(0, 255), is_end=st.booleans())
def test_whatever_byte_is_changed_there_is_a_value_or_an_error_that_names_the_file(written, name, place, byte, is_end):
    path = written / f"changed_{name}"
    shutil.copyfile(written / name, path)
    content = bytearray(path.read_bytes())
    # the header and the footer, where a byte changes the most, are asked as often as all the rest
    at = min(len(content) - 1, int(place * min(len(content), 1_500)))
    content[-1 - at if is_end else at] = byte
    path.write_bytes(content)
    for read in READERS[name]:
        try:
            read(path)
        except FormatError as error:
            assert str(error).startswith(f"{path}: expected ")  # noqa: PT017 - either outcome is right


def test_rows_that_a_table_does_not_have_are_an_error(written):
    with pytest.raises(FormatError, match="a Parquet table that holds these rows"):
        read_rows(written / "table.parquet", np.array([2_500]), ["n"])


def test_what_the_system_says_of_a_file_that_is_there_stays_an_error_of_the_system(tmp_path):
    for read in (read_table, read_array, read_json):
        (tmp_path / "loop").unlink(missing_ok=True)
        (tmp_path / "loop").symlink_to("loop")
        with pytest.raises(OSError, match="symbolic links"):
            read(tmp_path / "loop")


@given(st.integers(0, 20), st.integers(0, 20))
def test_slices_of_a_table_have_the_tables_rows(tmp_path_factory, start, length):
    path = tmp_path_factory.mktemp("tables") / "rows.parquet"
    part = table_of(20).slice(start, length)
    write_table(part, path)
    assert read_table(path).to_pylist() == part.to_pylist()


def test_arrays_that_are_mapped_when_asked_for_are_the_stored_ones_and_none_is_held(tmp_path):
    stored = [np.arange(5, dtype=np.uint16), np.arange(3, dtype=np.uint32), np.empty(0, np.int64)]
    for number, values in enumerate(stored):
        write_array(values, tmp_path / f"{number}.npy")
    arrays = MappedArrays([tmp_path / f"{number}.npy" for number in range(3)])
    assert len(arrays) == 3
    for _ in range(2):
        for number, values in enumerate(stored):
            found = arrays[number]
            assert isinstance(found, np.memmap)
            assert not found.flags.writeable
            assert (found.dtype, found.tolist()) == (values.dtype, values.tolist())
    assert arrays[0] is not arrays[0]
