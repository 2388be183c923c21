import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resources.tables import MAPPED_FROM_BYTES, read_array, read_json, read_table, write_array, write_json, write_table


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
    assert all(size == 1_000 for size in sizes[:-1])


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
    with pytest.raises(ValueError, match="allow_pickle"):
        read_array(tmp_path / "b.npy")


@given(st.integers(0, 20), st.integers(0, 20))
def test_slices_of_a_table_have_the_tables_rows(tmp_path_factory, start, length):
    path = tmp_path_factory.mktemp("tables") / "rows.parquet"
    part = table_of(20).slice(start, length)
    write_table(part, path)
    assert read_table(path).to_pylist() == part.to_pylist()
