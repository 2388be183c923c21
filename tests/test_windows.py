"""Windows: slices of the stream of all shards, whatever the shards, and whose tokens they are."""

from itertools import islice

import naive_batches as naive
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from training_io.errors import FormatError, RecipeError
from training_io.shard_format import write_shard
from training_io.windows import WindowLoader, window_documents

relaxed = settings(deadline=None, max_examples=40)
NINE_LENGTHS = [3, 8, 2, 5, 1, 6, 4, 7, 3]


def write_shards(folder, sizes, dtype="uint16"):
    paths, start = [], 0
    for number, size in enumerate(sizes):
        paths.append(folder / f"train_{number:06d}.bin")
        write_shard(paths[-1], np.arange(start, start + size, dtype=dtype))
        start += size
    return paths


@relaxed
@given(st.lists(st.integers(0, 30), min_size=1, max_size=5), st.integers(1, 3), st.integers(1, 5))
def test_a_batch_is_a_slice_of_the_stream(tmp_path_factory, sizes, B, T):
    paths = write_shards(tmp_path_factory.mktemp("shards"), sizes)
    if sum(sizes) < B * T + 1:
        with pytest.raises(FormatError, match=f"at least B x T \\+ 1 = {B * T + 1} tokens, found {sum(sizes)}"):
            WindowLoader(paths, B, T)
        return
    loader = WindowLoader(paths, B, T)
    assert (loader.n_tokens, loader.n_batches) == (sum(sizes), (sum(sizes) - 1) // (B * T))
    for i in range(loader.n_batches):
        x, y = loader.batch(i)
        assert x.dtype == y.dtype == np.int64
        assert x.tolist() == [[i * B * T + b * T + t for t in range(T)] for b in range(B)]
        assert np.array_equal(x + 1, y)
        assert np.array_equal(x[:, 1:], y[:, :-1])
        assert np.array_equal(loader.batch(i + loader.n_batches)[0], x)


def test_a_window_spans_three_shards(tmp_path):
    loader = WindowLoader(write_shards(tmp_path, [5, 0, 2, 9]), 1, 8)
    x, y = loader.batch(0)
    assert (x.tolist(), y.tolist()) == ([list(range(8))], [list(range(1, 9))])


def test_a_later_start_is_the_same_sequence(tmp_path):
    loader = WindowLoader(write_shards(tmp_path, [40, 30]), 2, 4)
    from_zero = list(islice(loader.batches(0, 3), 30))
    from_four = list(islice(loader.batches(4, 3), 18))
    assert loader.n_batches < 18  # the sequence wrapped
    assert all(np.array_equal(a[0], b[0]) for a, b in zip(from_zero[12:], from_four, strict=True))


def test_inputs_and_targets_do_not_share_memory(tmp_path):
    x, y = WindowLoader(write_shards(tmp_path, [40]), 2, 4).batch(1)
    assert not np.shares_memory(x, y)


def test_uint16_and_uint32_shards_do_not_mix(tmp_path):
    write_shard(tmp_path / "a.bin", np.zeros(9, np.uint16))
    write_shard(tmp_path / "b.bin", np.zeros(9, np.uint32))
    with pytest.raises(FormatError, match="found uint16 and uint32"):
        WindowLoader([tmp_path / "a.bin", tmp_path / "b.bin"], 1, 4)


def test_no_shards_and_no_size_are_refused(tmp_path):
    with pytest.raises(FormatError, match=r"0 shards: .*found 0"):
        WindowLoader([], 1, 4)
    with pytest.raises(RecipeError, match="found 0 and 4"):
        WindowLoader(write_shards(tmp_path, [9]), 0, 4)


def test_the_first_row_of_nine_documents_holds_two():
    lengths = np.array(NINE_LENGTHS) + 1
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    owners, positions = window_documents(offsets, 0, 6, 8)
    assert owners[0].tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert positions[0].tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    rows = naive.concatenated_rows([[0] * n for n in lengths], 8)
    assert owners.tolist() == rows
    assert positions.tolist() == [naive.restarted_positions(row) for row in rows]


@relaxed
@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.data())
def test_owners_and_positions_are_those_of_a_walk(lengths, data):
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    T = data.draw(st.integers(1, sum(lengths)))
    start = data.draw(st.integers(0, sum(lengths) - T))
    owner_of = [number for number, length in enumerate(lengths) for _ in range(length)]
    owners, positions = window_documents(offsets, start, 1, T)
    assert owners[0].tolist() == owner_of[start : start + T]
    assert positions[0].tolist() == naive.restarted_positions(owner_of[start : start + T])
