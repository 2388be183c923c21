"""Merging sorted runs: whatever the blocks, the documents one after another, read from front to back."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline_assets.transforms.merge import gather_rows, merge_documents, merged_blocks
from resources.tables import MappedArrays
from training_io.errors import InvariantBroken

document_strategy = st.lists(st.integers(0, 65_535), max_size=4)
runs_strategy = st.lists(st.lists(document_strategy, max_size=4), min_size=1, max_size=4)


class Watched(list):
    """Runs that note which one was asked for."""

    def __init__(self, runs):
        super().__init__(runs)
        self.asked = []

    def __getitem__(self, number):
        self.asked.append(number)
        return super().__getitem__(number)


@st.composite
def merges(draw):
    """Runs of documents, and some of the documents in any order, as (run, number)."""
    runs = draw(runs_strategy)
    places = [(run, number) for run, documents in enumerate(runs) for number in range(len(documents))]
    return runs, draw(st.lists(st.sampled_from(places), max_size=8)) if places else []


def as_arrays(runs, chosen, dtype):
    """The same as `merged_blocks` takes it: runs, run, start and length of each chosen document."""
    arrays = Watched(np.array([token for document in run for token in document], dtype) for run in runs)
    columns = (
        [run for run, _ in chosen],
        [sum(len(document) for document in runs[run][:number]) for run, number in chosen],
        [len(runs[run][number]) for run, number in chosen],
    )
    return arrays, *(np.array(column, np.int64) for column in columns)


@given(merges(), st.sampled_from([np.uint16, np.uint32]), st.integers(1, 9))
def test_blocks_are_the_documents_one_after_another(merge, dtype, block_tokens):
    runs, chosen = merge
    expected = [token for run, number in chosen for token in runs[run][number]]
    blocks = list(merged_blocks(*as_arrays(runs, chosen, dtype), dtype, block_tokens))
    assert all(block.dtype == dtype for block in blocks)
    assert [token for block in blocks for token in block.tolist()] == expected
    assert all(len(block) == block_tokens for block in blocks[:-1])
    assert len(blocks) == -(-len(expected) // block_tokens)
    whole = merge_documents(*as_arrays(runs, chosen, dtype), dtype)
    assert (whole.dtype, whole.tolist()) == (dtype, expected)


@given(merges(), st.integers(1, 9))
def test_a_run_is_asked_for_once_a_block_and_only_where_it_has_a_document(merge, block_tokens):
    runs, chosen = merge
    arrays, *columns = as_arrays(runs, chosen, np.uint16)
    run_of_token = [run for run, number in chosen for _ in runs[run][number]]
    for position, _ in enumerate(merged_blocks(arrays, *columns, np.uint16, block_tokens)):
        here = set(run_of_token[position * block_tokens : (position + 1) * block_tokens])
        assert len(arrays.asked) == len(set(arrays.asked))
        assert here <= set(arrays.asked)
        arrays.asked.clear()


@pytest.mark.parametrize(
    ("dtype", "start", "length", "message"),
    [
        ("uint16", 3, 3, "expected uint16 tokens up to 6, found 5 of uint16"),
        ("uint32", 0, 2, "expected uint32 tokens up to 2, found 5 of uint16"),
        ("uint16", -1, 2, "found 5 of uint16"),
    ],
)
def test_a_plan_of_other_tokens_is_refused(dtype, start, length, message):
    run = np.arange(5, dtype=np.uint16)
    with pytest.raises(InvariantBroken, match=message):
        merge_documents([run], np.array([0]), np.array([start]), np.array([length]), dtype)


def test_a_document_past_two_to_the_31_tokens_of_a_run_is_found(tmp_path):
    """A sparse file: 4 GiB of zeros of which the file system holds a page."""
    start, path = 2**31 + 3, tmp_path / "tokens.npy"
    stored = np.lib.format.open_memmap(path, mode="w+", dtype=np.uint16, shape=(start + 4,))
    stored[start:] = [7, 8, 9, 5]
    stored.flush()
    del stored
    assert path.stat().st_blocks * 512 < 1 << 20
    runs = MappedArrays([path])
    merged = merge_documents(runs, np.array([0, 0]), np.array([start, start - 2]), np.array([4, 3]), np.uint16)
    assert merged.tolist() == [7, 8, 9, 5, 0, 0, 7]


@given(st.lists(st.lists(st.integers(0, 99), max_size=5), min_size=1, max_size=4), st.data())
def test_rows_of_several_parts_are_gathered_in_any_order(parts, data):
    places = [(part, row) for part, values in enumerate(parts) for row in range(len(values))]
    chosen = data.draw(st.lists(st.sampled_from(places), max_size=9)) if places else []
    arrays = [np.array([[value, value + 1] for value in part], np.int16).reshape(-1, 2) for part in parts]
    columns = (np.array([place[at] for place in chosen], np.int64) for at in (0, 1))
    found = gather_rows(arrays, *columns)
    assert (found.dtype, found.shape) == (np.int16, (len(chosen), 2))
    assert found.tolist() == [[parts[part][row], parts[part][row] + 1] for part, row in chosen]
