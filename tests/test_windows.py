"""Windows: slices of the stream of all shards, whatever the shards, and whose tokens they are."""

import json
from itertools import islice

import naive_batches as naive
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from training_io.errors import FormatError, RecipeError, StateMismatch
from training_io.shard_format import write_shard
from training_io.windows import RandomWindows, WindowLoader, context_offsets, document_mask, window_documents

relaxed = settings(deadline=None, max_examples=40)


def write_shards(folder, sizes, dtype="uint16", start=0):
    paths = []
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


# Nine documents whose tokens are ten times their number and up, each with its end marker 0, written out by hand.
NINE_DOCUMENTS = [
    [11, 12, 13], [21, 22, 23, 24, 25, 26, 27, 28], [31, 32], [41, 42, 43, 44, 45], [51], [61, 62, 63, 64, 65, 66],
    [71, 72, 73, 74], [81, 82, 83, 84, 85, 86, 87], [91, 92, 93],
]  # fmt: skip
ROWS_OF_EIGHT = [  # tokens, owners, positions
    ([11, 12, 13, 0, 21, 22, 23, 24], [0, 0, 0, 0, 1, 1, 1, 1], [0, 1, 2, 3, 0, 1, 2, 3]),
    ([25, 26, 27, 28, 0, 31, 32, 0], [1, 1, 1, 1, 1, 2, 2, 2], [0, 1, 2, 3, 4, 0, 1, 2]),
    ([41, 42, 43, 44, 45, 0, 51, 0], [3, 3, 3, 3, 3, 3, 4, 4], [0, 1, 2, 3, 4, 5, 0, 1]),
    ([61, 62, 63, 64, 65, 66, 0, 71], [5, 5, 5, 5, 5, 5, 5, 6], [0, 1, 2, 3, 4, 5, 6, 0]),
    ([72, 73, 74, 0, 81, 82, 83, 84], [6, 6, 6, 6, 7, 7, 7, 7], [0, 1, 2, 3, 0, 1, 2, 3]),
    ([85, 86, 87, 0, 91, 92, 93, 0], [7, 7, 7, 7, 8, 8, 8, 8], [0, 1, 2, 3, 0, 1, 2, 3]),
]
ROWS_OF_FOUR = [
    ([11, 12, 13, 0], [0, 0, 0, 0], [0, 1, 2, 3]),
    ([21, 22, 23, 24], [1, 1, 1, 1], [0, 1, 2, 3]),
    ([25, 26, 27, 28], [1, 1, 1, 1], [0, 1, 2, 3]),
    ([0, 31, 32, 0], [1, 2, 2, 2], [0, 0, 1, 2]),
    ([41, 42, 43, 44], [3, 3, 3, 3], [0, 1, 2, 3]),
    ([45, 0, 51, 0], [3, 3, 4, 4], [0, 1, 0, 1]),
    ([61, 62, 63, 64], [5, 5, 5, 5], [0, 1, 2, 3]),
    ([65, 66, 0, 71], [5, 5, 5, 6], [0, 1, 2, 0]),
    ([72, 73, 74, 0], [6, 6, 6, 6], [0, 1, 2, 3]),
    ([81, 82, 83, 84], [7, 7, 7, 7], [0, 1, 2, 3]),
    ([85, 86, 87, 0], [7, 7, 7, 7], [0, 1, 2, 3]),
    ([91, 92, 93, 0], [8, 8, 8, 8], [0, 1, 2, 3]),
]
MASK_OF_THE_FIRST_EIGHT = [
    [1, 0, 0, 0, 0, 0, 0, 0],
    [1, 1, 0, 0, 0, 0, 0, 0],
    [1, 1, 1, 0, 0, 0, 0, 0],
    [1, 1, 1, 1, 0, 0, 0, 0],
    [0, 0, 0, 0, 1, 0, 0, 0],
    [0, 0, 0, 0, 1, 1, 0, 0],
    [0, 0, 0, 0, 1, 1, 1, 0],
    [0, 0, 0, 0, 1, 1, 1, 1],
]
MASK_OF_THE_FOURTH_FOUR = [[1, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0], [0, 1, 1, 1]]


def nine_documents_loader(folder, B, T):
    """A loader over the nine documents in shards of 20 and 28 tokens and one more, which only the last target needs."""
    stream = [token for doc in NINE_DOCUMENTS for token in [*doc, 0]] + [101]
    paths = [folder / "train_000000.bin", folder / "train_000001.bin"]
    write_shard(paths[0], np.array(stream[:20], np.uint16))
    write_shard(paths[1], np.array(stream[20:], np.uint16))
    offsets = np.concatenate([[0], np.cumsum([len(doc) + 1 for doc in NINE_DOCUMENTS])])
    return WindowLoader(paths, B, T), offsets


@pytest.mark.parametrize("expected", [ROWS_OF_EIGHT, ROWS_OF_FOUR], ids=["eight", "four"])
def test_nine_documents_row_by_row(tmp_path, expected):
    length = len(expected[0][0])
    loader, offsets = nine_documents_loader(tmp_path, len(expected), length)
    x, y = loader.batch(0)
    owners, positions = loader.batch_documents(0, offsets)
    assert list(zip(x.tolist(), owners.tolist(), positions.tolist(), strict=True)) == expected
    assert y[:, -1].tolist() == [*(row[0][0] for row in expected[1:]), 101]
    assert np.array_equal(x[:, 1:], y[:, :-1])
    rows = naive.concatenated_rows([[0] * (len(doc) + 1) for doc in NINE_DOCUMENTS], length)
    assert owners.tolist() == rows
    assert positions.tolist() == [naive.restarted_positions(row) for row in rows]


def test_the_masks_of_nine_documents(tmp_path):
    loader, offsets = nine_documents_loader(tmp_path, 6, 8)
    assert document_mask(loader.batch_documents(0, offsets)[0])[0].astype(int).tolist() == MASK_OF_THE_FIRST_EIGHT
    (tmp_path / "four").mkdir()
    loader, offsets = nine_documents_loader(tmp_path / "four", 12, 4)
    assert document_mask(loader.batch_documents(0, offsets)[0])[3].astype(int).tolist() == MASK_OF_THE_FOURTH_FOUR


def test_half_the_row_length_cuts_more_documents():
    def is_in_two_rows(rows):
        return [sum(doc in owners for _, owners, _ in rows) > 1 for doc in range(9)]

    assert is_in_two_rows(ROWS_OF_EIGHT) == [doc in (1, 6, 7) for doc in range(9)]
    assert is_in_two_rows(ROWS_OF_FOUR) == [doc in (1, 3, 5, 6, 7) for doc in range(9)]


def test_documents_of_a_batch_wrap_with_it(tmp_path):
    loader, offsets = nine_documents_loader(tmp_path, 2, 8)
    assert loader.n_batches == 3
    for i in range(3):
        again = loader.batch_documents(i + 3, offsets)
        assert np.array_equal(loader.batch_documents(i, offsets), again)
        assert again[0].tolist() == [row[1] for row in ROWS_OF_EIGHT[2 * i : 2 * i + 2]]


@relaxed
@given(st.lists(st.lists(st.integers(0, 3), min_size=4, max_size=4), min_size=1, max_size=4))
def test_mask_and_context_offsets_say_the_same(rows):
    owners = np.sort(np.array(rows, dtype=np.int64), axis=1)  # documents of a row are in order
    mask = document_mask(owners)
    for row, row_mask in zip(owners.tolist(), mask, strict=True):
        allowed = [[k <= q and row[k] == row[q] for k in range(4)] for q in range(4)]
        assert row_mask.tolist() == allowed
        assert row_mask.sum() == naive.causal_pairs(row)
    offsets = context_offsets(owners)
    assert offsets.dtype == np.int32
    of_token = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets)).reshape(owners.shape)
    assert np.array_equal(document_mask(of_token), mask)
    assert (offsets[0], offsets[-1]) == (0, owners.size)
    assert set(range(0, owners.size, 4)) <= set(offsets.tolist())  # every row begins a context


@pytest.mark.parametrize("world_size", [1, 2, 3, 6])
def test_ranks_together_take_each_step(tmp_path, world_size):
    loader = WindowLoader(write_shards(tmp_path, [40, 30, 61]), 2, 4)
    alone = [x.tolist() for x, _ in islice(loader.batches(2, 6), 12)]
    share = 6 // world_size
    ranks = [
        [x.tolist() for x, _ in islice(loader.batches(2, 6, rank, world_size), 2 * share)] for rank in range(world_size)
    ]
    for step in range(2):
        taken = [batch for rank in ranks for batch in rank[step * share : (step + 1) * share]]
        assert sorted(taken) == sorted(alone[6 * step : 6 * step + 6])
    for rank, world, accum in ((0, 4, 6), (2, 2, 6), (0, 1, 0)):
        with pytest.raises(RecipeError, match=f"found {rank}, {world} and {accum}"):
            next(loader.batches(0, accum, rank, world))


def test_random_rows_are_slices_at_offsets_that_are_all_drawn(tmp_path):
    loader = WindowLoader(write_shards(tmp_path, [5, 0, 7]), 3, 4 - 1)
    starts = set()
    for x, y in islice(RandomWindows(loader, seed=1), 60):
        assert x.shape == y.shape == (3, 3)
        assert np.array_equal(x + 1, y)
        assert np.array_equal(x, x[:, :1] + np.arange(3))
        starts |= set(x[:, 0].tolist())
    assert starts == set(range(12 - 3))  # the last one needs the stream's last token as its last target


def test_random_rows_resume_exactly_twice_in_a_row(tmp_path):
    loader = WindowLoader(write_shards(tmp_path, [400, 300]), 4, 5)
    windows = RandomWindows(loader, seed=9)
    states, batches = [], []
    for x, _ in islice(windows, 12):
        batches.append(x.tolist())
        states.append(json.loads(json.dumps(windows.state_dict())))
    assert len({str(batch) for batch in batches}) == 12
    for number, state in enumerate(states[:-4]):
        resumed = RandomWindows(loader, seed=0)
        resumed.load_state_dict(state)
        assert [x.tolist() for x, _ in islice(resumed, 2)] == batches[number + 1 : number + 3]
        again = RandomWindows(loader, seed=5)
        again.load_state_dict(resumed.state_dict())
        assert [x.tolist() for x, _ in islice(again, 2)] == batches[number + 3 : number + 5]


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_random_rows_of_the_ranks_are_the_batch(tmp_path, world_size):
    loader = WindowLoader(write_shards(tmp_path, [400, 300]), 5, 6)
    alone = RandomWindows(loader, seed=2)
    ranks = [RandomWindows(loader, 2, rank, world_size) for rank in range(world_size)]
    for _ in range(4):
        whole = next(alone)
        shares = [next(rank) for rank in ranks]
        assert np.array_equal(np.concatenate([x for x, _ in shares]), whole[0])
        assert np.array_equal(np.concatenate([y for _, y in shares]), whole[1])
    assert {json.dumps(rank.state_dict()) for rank in ranks} == {json.dumps(alone.state_dict())}
    ranks[0].load_state_dict(alone.state_dict())  # from one rank to several in the middle
    assert np.array_equal(next(ranks[0])[0], next(alone)[0][: 5 // world_size])
    with pytest.raises(RecipeError, match="found 0, 6 and 5"):
        RandomWindows(loader, 2, 0, 6)


def test_a_state_of_other_windows_is_refused(tmp_path):
    paths = write_shards(tmp_path, [40, 30])
    state = RandomWindows(WindowLoader(paths, 2, 4), seed=1).state_dict()
    for other in (WindowLoader(paths, 2, 5), WindowLoader(paths, 3, 4), WindowLoader(paths[:1], 2, 4)):
        with pytest.raises(StateMismatch, match="window state was saved for stream"):
            RandomWindows(other, seed=1).load_state_dict(state)
    windows = RandomWindows(WindowLoader(paths, 2, 4), seed=1)
    for broken in (
        {},
        {"stream": state["stream"]},
        {**state, "rng": 3},
        {**state, "rng": {"bit_generator": "MT19937"}},
    ):
        with pytest.raises(StateMismatch, match="window state"):
            windows.load_state_dict(broken)
    windows.load_state_dict(state)


@pytest.mark.parametrize(
    ("first", "dtype", "message"),
    [
        (7, "uint16", "…; sampled: saved for [0-9a-f]{12}, this run has"),
        (0, "uint32", "…; dtype: saved for uint32, this"),
    ],
)
def test_a_state_of_shards_of_the_same_lengths_is_refused_naming_both(tmp_path, first, dtype, message):
    (other := tmp_path / "other").mkdir()
    loader = WindowLoader(write_shards(tmp_path, [400, 0, 300]), 2, 4)
    others = WindowLoader(write_shards(other, [400, 0, 300], dtype, first), 2, 4)
    with pytest.raises(StateMismatch, match=message):
        RandomWindows(loader, seed=1).load_state_dict(RandomWindows(others, seed=1).state_dict())


def test_a_refusal_of_other_windows_names_what_differs(tmp_path):
    paths = write_shards(tmp_path, [40, 30])
    state = RandomWindows(WindowLoader(paths[:1], 3, 4), seed=1).state_dict()
    expected = "…; B: saved for 3, this run has 2; tokens: saved for 40, this run has 70; sampled: saved for"
    with pytest.raises(StateMismatch, match=expected):
        RandomWindows(WindowLoader(paths, 2, 4), seed=1).load_state_dict(state)


def test_a_state_of_old_still_loads(tmp_path):
    loader = WindowLoader(write_shards(tmp_path, [40, 30]), 2, 4)
    windows, again = RandomWindows(loader, seed=1), RandomWindows(loader, seed=2)
    next(windows)
    again.load_state_dict({name: windows.state_dict()[name] for name in ("stream", "rng")})
    assert np.array_equal(next(again)[0], next(windows)[0])


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
