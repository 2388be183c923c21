"""The benchmark harness: its statistics, its text, and a run of its peers on a handful of documents. Nothing here
judges a time.
"""

import dataclasses
import doctest
import importlib
import importlib.util
import json
import os
import shutil
import sys
from pathlib import Path

import dagster as dg
import naive_clusters
import naive_text
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from browser import CHROMIUM
from tokenizers import Tokenizer

from pipeline_assets.definitions import ASSETS
from pipeline_assets.recipe_file import load_recipe
from pipeline_assets.transforms.jaccard import jaccard_of_pairs
from pipeline_assets.transforms.minhash import MinHashParams, sign_documents
from resources.tokenizer import train_tokenizer
from training_io.attention import BACKENDS, attend_sdpa
from training_io.errors import InvariantBroken, SourceError

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
TEXTS = [f"document {number} says that the mill grinds {number * 7} sacks of grain before noon" for number in range(40)]


@pytest.fixture
def load(monkeypatch):
    """Import a benchmark module by its file's name; all of them are forgotten afterwards."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    known = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - known:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").is_relative_to(BENCHMARKS):
            del sys.modules[name]


@pytest.fixture
def peers_dir(tmp_path):
    """Stands for an installed environment of the peers: this interpreter under another name."""
    if importlib.util.find_spec("xxhash") is None:
        pytest.skip("xxhash is not installed")
    folder = tmp_path / "peers"
    (folder / "bin").mkdir(parents=True)
    python = folder / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n', encoding="utf-8")
    python.chmod(0o755)
    for requirements in BENCHMARKS.glob("requirements-peers*.txt"):
        shutil.copy(requirements, folder)
    return folder


@pytest.fixture
def text_dir(tmp_path, monkeypatch):
    folder = tmp_path / "text"
    folder.mkdir()
    table = pa.table({"extra": [[1]] * 40, "text": pa.array([*TEXTS[:39], None])})
    pq.write_table(table, folder / "a.parquet", row_group_size=10)
    pq.write_table(pa.table({"text": pa.array(["", TEXTS[39]])}), folder / "b.parquet")
    monkeypatch.setenv("CORPUSMILL_BENCH_TEXT", str(folder))
    return folder


def test_every_entry_has_a_file_and_a_measure(load):
    for name in load("run").ENTRIES:
        assert callable(load(name).measure)


def test_examples_in_docstrings_hold(load):
    tried = [doctest.testmod(load(path.stem)) for path in sorted(BENCHMARKS.glob("*.py"))]
    assert sum(result.failed for result in tried) == 0
    assert sum(result.attempted for result in tried) >= 3


def test_contenders_take_turns(load):
    turns = []
    contenders = {name: lambda name=name: float(turns.append(name) or len(turns)) for name in ("ours", "peer")}
    assert load("measure").alternate(3, contenders) == {"ours": (1.0, 3.0, 5.0), "peer": (2.0, 4.0, 6.0)}
    assert turns == ["ours", "peer"] * 3


def test_figures_are_ratios_of_medians_with_the_range_of_rounds(load):
    measure = load("measure")
    row = measure.Row(
        name="x",
        amount=20,
        unit="MB",
        ours_seconds=(2.0, 1.0, 4.0),
        peer="p",
        peer_seconds=(20.0, 30.0, 10.0),
        extra={"waste": 0.5},
        bars=[measure.Bar(figure="ratio", at_least=10), measure.Bar(figure="waste", at_most=0.4)],
    )
    report = measure.report_of(row)
    assert report["figures"] == {
        "waste": 0.5,
        "seconds": 2.0,
        "rate": 10.0,
        "peer_seconds": 20.0,
        "peer_rate": 1.0,
        "ratio": 10.0,
        "ratio_min": 2.5,
        "ratio_max": 30.0,
    }
    assert [bar["met"] for bar in report["bars"]] == [True, False]
    assert json.loads(json.dumps(report)) == report
    table = measure.table_of([row, measure.Row(name="nothing", amount=1, unit="MB", note="not measured: no peer")])
    assert "ratio 10 ≥ 10: met, waste 0.5 ≤ 0.4: NOT met" in table
    assert table.endswith("nothing: not measured: no peer")


def test_results_that_differ_are_not_timed(load):
    load("measure").require_same("x", 1, 1)
    with pytest.raises(InvariantBroken, match="nothing was timed"):
        load("measure").require_same("x", 1, 2)


def test_text_is_bounded_and_has_no_nulls(load, text_dir):
    corpus = load("corpus")
    whole = corpus.load_text(10**9)
    assert whole.texts.to_pylist() == [*TEXTS[:39], "", TEXTS[39]]
    assert whole.num_bytes == sum(map(len, TEXTS))
    limited = corpus.load_text(whole.num_bytes // 3)
    assert 0 < limited.num_bytes <= whole.num_bytes // 3
    assert set(limited.texts.to_pylist()) < set(whole.texts.to_pylist())
    assert len(corpus.load_text(1).texts) == 1


def test_text_that_is_not_there_is_an_error(load, tmp_path, monkeypatch):
    monkeypatch.setenv("CORPUSMILL_BENCH_TEXT", str(tmp_path))
    with pytest.raises(SourceError, match="expected Parquet files"):
        load("corpus").load_text(100)
    pq.write_table(pa.table({"content": ["a"]}), tmp_path / "a.parquet")
    with pytest.raises(SourceError, match="column 'text', found content"):
        load("corpus").load_text(100)


def test_the_peer_signs_as_we_do(load, tmp_path, peers_dir):
    corpus, signatures, environment = load("corpus"), load("signatures"), load("peer_environment")
    hashes = np.arange(1, 8, dtype=np.uint32)
    corpus.write_plain(tmp_path, "texts", pa.array(TEXTS, pa.large_string()))
    np.save(tmp_path / "hashes.npy", hashes)
    np.save(tmp_path / "hash_offsets.npy", np.array([0, 7]))
    others, _ = sign_documents(pa.array(TEXTS[:1]), MinHashParams())
    python = environment.peer_python(peers_dir)
    with environment.running_peer(python, "datasketch_signatures.py", tmp_path) as ask:
        with pytest.raises(InvariantBroken, match="signatures"):
            signatures.require_same_signatures(ask, others)
        with pytest.raises(RuntimeError, match="expected an answer to 'nonsense'"):
            ask("nonsense")


def test_entries_with_peers_run(load, tmp_path, text_dir, peers_dir):
    bench = load("bench").Bench(
        runs=2, max_bytes=10**6, peers_dir=peers_dir, tokenizer_path=None, scratch=tmp_path / "scratch"
    )
    signing = load("signatures").against_datasketch(bench)
    assert "datasketch" in signing.peer
    assert signing.amount == bench.text.num_bytes / 1e6
    tokenizing = load("tokenizing")
    inputs = tokenizing.write_inputs(bench)
    assert tokenizing.peers_for(inputs.path) == [tokenizing.TOKENIZERS, tokenizing.TIKTOKEN, tokenizing.COLD]
    encoding = tokenizing.against(tokenizing.TOKENIZERS, bench, inputs, "trained")
    assert encoding.extra["vocab_size"] > 256
    cold = tokenizing.against(tokenizing.COLD, bench, inputs, "trained")
    assert encoding.amount < cold.amount == bench.text.num_bytes / 1e6
    for row in (signing, encoding, cold):
        assert len(row.ours_seconds) == len(row.peer_seconds) == 2


def test_peers_that_sign_another_number_of_texts_are_not_timed(load, text_dir, tmp_path):
    bench = load("bench").Bench(
        runs=1, max_bytes=10**6, peers_dir=tmp_path, tokenizer_path=None, scratch=tmp_path / "scratch"
    )
    shape = [len(bench.text.texts), 112]
    load("signatures").require_same_shape("x", bench, lambda job: {"shape": shape})
    with pytest.raises(InvariantBroken, match="x: expected"):
        load("signatures").require_same_shape("x", bench, lambda job: {"shape": [shape[0] - 1, 112]})


def test_python_shingles_are_runs_of_five_words(load, monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS / "peers")
    shingles = load("python_shingles").shingles
    assert shingles("One two, three FOUR five six") == ["one two three four five", "two three four five six"]
    assert shingles("One, two") == ["one two"]


def test_pathological_bytes_take_few_steps(load, tmp_path, text_dir):
    bench = load("bench").Bench(
        runs=1, max_bytes=10**6, peers_dir=tmp_path, tokenizer_path=None, scratch=tmp_path / "scratch"
    )
    pathological = load("pathological")
    text, *rows = pathological.signing(bench)
    assert text.amount == bench.text.num_megabytes
    assert text.extra["times_text"] == 1
    assert len(rows) == len(pathological.KINDS)
    for row in rows:
        assert 3.9 < row.amount <= 4
        assert 1 <= row.extra["steps_a_byte"] <= 5
    num_words = {row.name.removeprefix("pathological: "): row.extra["num_words"] for row in rows}
    assert num_words["one-letter words"] == 2_000_000
    assert num_words["no space"] == num_words["combining marks"] == 4
    assert num_words["emoji"] == num_words["NUL"] == num_words["not UTF-8"] == 0


def test_one_document_of_one_word_is_timed_at_two_sizes(load, tmp_path, text_dir, monkeypatch):
    bench = load("bench").Bench(
        runs=1, max_bytes=10**6, peers_dir=tmp_path, tokenizer_path=None, scratch=tmp_path / "scratch"
    )
    pathological = load("pathological")
    monkeypatch.setattr(pathological, "ONE_DOCUMENT_BYTES", 80_000)
    rows = pathological.encoding(bench)
    assert [row.name for row in rows] == [f"one document: {kind}" for kind in ("text", *pathological.LONG_WORDS)]
    for row in rows:
        assert 0.07 < row.amount <= 0.08
        assert row.extra["growth"] > 0
    assert rows[0].extra["times_text"] == 1


def test_ranks_become_the_merges_that_give_the_same_tokens(load, tmp_path):
    """Of ranks that a training gave; its own merges give the same ids."""
    shipped, byte_pairs = load("encodings_shipped"), importlib.import_module("pipeline_assets.transforms.byte_pairs")
    trained = Tokenizer.from_str(train_tokenizer(TEXTS, 500).decode())
    byte_of = {character: byte for byte, character in enumerate(byte_pairs.byte_characters())}
    ranks = {
        bytes(byte_of[one] for one in word).decode("latin-1"): number
        for word, number in trained.get_vocab().items()
        if byte_of.keys() >= set(word)
    }
    for name in shipped.ENCODINGS:
        shipped.write_tokenizer(tmp_path / "tokenizer.json", name, ranks)
        library = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
        for word in (*" ".join(TEXTS).split(), "grainsackmill"):
            assert [one.id for one in library.model.tokenize(word)] == [one.id for one in trained.model.tokenize(word)]


def test_the_peer_finds_the_same_clusters_in_memory(load, tmp_path, peers_dir):
    bench = load("bench").Bench(
        runs=2, max_bytes=1, peers_dir=peers_dir, tokenizer_path=None, scratch=tmp_path / "scratch"
    )
    row = load("lsh").in_memory(bench, runs=2, num_documents=5_000)
    assert row.extra["num_clustered"] > 20
    assert len(row.ours_seconds) == len(row.peer_seconds) == 2


def test_planted_copies_are_as_similar_as_they_should_be(load):
    lsh = load("lsh")
    signatures, documents = lsh.planted_signatures(20_000), np.arange(20_000)
    copies = documents[lsh.is_copy(documents)]
    equal = (signatures[copies] == signatures[lsh.originals(copies)]).mean(axis=1)
    assert (lsh.originals(copies) < copies).all()
    assert equal.min() < 0.65
    assert equal.max() > 0.95
    assert abs(equal.mean() - 0.8) < 0.02
    others = documents[2:][~lsh.is_copy(documents[2:])]
    assert not (signatures[others] == signatures[lsh.originals(others)]).mean(axis=1).any()


def test_buckets_end_in_the_planted_clusters(load, tmp_path, monkeypatch):
    lsh = load("lsh")
    monkeypatch.setattr(lsh, "UNIT_DOCUMENTS", 300)
    size = lsh.Size(num_documents=1_000, num_buckets=4)
    labels = lsh.write_units(tmp_path / "1000", size)
    keys = np.concatenate([np.fromfile(path, np.uint64) for path in sorted(tmp_path.glob("1000/*.keys"))])
    nodes = np.concatenate([np.fromfile(path, np.uint32) for path in sorted(tmp_path.glob("1000/*.documents"))])
    edges = naive_text.star_edges(keys.tolist(), nodes.tolist())
    assert len(keys) == 14_000
    assert labels.tolist() == naive_text.components(1_000, edges)
    assert 900 < len(set(labels.tolist())) < 1_000
    answer = lsh.run_in_buckets(tmp_path, size)
    assert answer["digest"] == lsh.digest_of(labels)
    assert answer["peak_bytes"] > 10_000_000


def test_buckets_are_timed_at_two_sizes(load, tmp_path):
    lsh = load("lsh")
    small, large = (lsh.Size(num_documents=number, num_buckets=1) for number in (1_000, 2_000))
    row = lsh.in_buckets(tmp_path, 2, small, large)
    assert len(row.ours_seconds) == 2
    assert {bar.figure for bar in row.bars} < set(row.extra)


def plain_pairs(texts, least):
    """Every pair at least so alike, by sets of 5 words."""
    hashes = [naive_text.shingle_hashes(text, 5) for text in texts]
    every = ((left, right) for right in range(len(texts)) for left in range(right))
    alike = {(left, right): naive_text.jaccard(hashes[left], hashes[right]) for left, right in every}
    return {pair: similarity for pair, similarity in alike.items() if similarity >= least}


@pytest.fixture
def copied(load):
    """Texts of 60 words, each the beginning of a row of numbers, and their near copies."""
    deduplication = load("deduplication")
    rows = [" ".join(f"word{(row * 50 + at) % 700}," for at in range(60)) for row in range(12)]
    texts, planted = deduplication.with_copies(pa.array([*rows, "too short"], pa.large_string()))
    assert texts.to_pylist()[:12] == rows
    assert planted.tolist() == [[number % 12, 12 + number] for number in range(24)]
    return deduplication, texts, planted


def test_alike_pairs_are_those_of_the_plain_sets(copied):
    deduplication, texts, planted = copied
    alike = deduplication.alike_pairs(texts, 5)
    expected = plain_pairs(texts.to_pylist(), 0.7)
    assert dict(zip(map(tuple, alike.pairs.tolist()), alike.similarities.tolist(), strict=True)) == expected
    assert 5 < len(expected) < 36
    deduplication.require_planted(texts, planted, alike)
    fewer = deduplication.Alike(pairs=alike.pairs[1:], similarities=alike.similarities[1:])
    with pytest.raises(InvariantBroken, match="planted pairs"):
        deduplication.require_planted(texts, planted[::-1], fewer)


def test_near_copies_keep_all_but_words(load):
    near_copy, text = load("deduplication").near_copy, "A cat, (the)\n\tdog; a man."
    assert near_copy(text, 0.0, np.random.default_rng(0)) == text
    replaced = near_copy(text, 1.0, np.random.default_rng(0))
    assert load("deduplication").WORD.sub("#", replaced) == "# #, (#)\n\t#; # #."
    assert not set(text.split()) & set(replaced.split())


def test_quality_counts_pairs_of_clusters(copied):
    deduplication, texts, _ = copied
    alike = deduplication.alike_pairs(texts, 5)
    params = MinHashParams()
    ours = deduplication.found_by_us(texts, params, alike)
    figures = deduplication.quality_of(ours, alike)
    alike_pairs = plain_pairs(texts.to_pylist(), 0.8)
    sets = naive_clusters.components(len(texts), np.argwhere(ours.labels[:, None] == ours.labels).tolist())
    together = {(left, right) for right in range(len(texts)) for left in range(right) if left in sets[right]}
    assert figures["pairs_0.8"] == len(alike_pairs)
    assert figures["recall_0.8"] == pytest.approx(len(together & set(alike_pairs)) / len(alike_pairs))
    assert figures["precision_0.8"] == pytest.approx(len(together & set(alike_pairs)) / len(together))
    assert figures["expected_recall_0.8"] == pytest.approx(
        np.mean([1 - (1 - s**8) ** 14 for s in alike_pairs.values()])
    )
    assert figures["band_recall_0.8"] <= figures["recall_0.8"]
    assert deduplication.num_removed_again(texts, params) == 0
    answer = {
        "labels": ours.labels.tolist(),
        "shares_band": ours.shares_band.tolist(),
        "num_bands": 14,
        "rows_per_band": 8,
    }
    theirs = deduplication.quality_of(deduplication.found_by_peer(answer), alike)
    row = deduplication.row_of(len(texts), {"ours": [1.0], "peer": [50.0]}, "other 1.0", figures, theirs)
    assert row.extra["peer_recall_0.8"] == figures["recall_0.8"]
    assert f"J ≥ 0.8 ({len(alike_pairs)} pairs): recall" in row.note


def test_quality_of_nothing_is_perfect(load):
    deduplication = load("deduplication")
    none = np.empty((0, 2), np.int64)
    found = deduplication.Found(labels=np.arange(3), shares_band=none[:, 0] > 0, num_bands=2, rows_per_band=2)
    figures = deduplication.quality_of(found, deduplication.Alike(pairs=none, similarities=none[:, 0] * 1.0))
    assert {name: value for name, value in figures.items() if "pairs" not in name and value != 1.0} == {}


def test_packing_refuses_to_time_a_wrong_packing(load):
    packing = load("packing")
    lengths = np.minimum(packing.web_lengths(500), packing.CAPACITY)
    peer = packing.Peer(script="x.py", name="x", num_packs=100, num_packs_in_batches=110)
    packed = packing.pack(lengths, packing.CAPACITY)
    row = packing.row_of("oldest_first", lengths, packed, {"oldest_first": (1.0,), "x.py": (2.0,)}, peer)
    assert row.amount == lengths.sum() / 1e6
    assert row.extra["peer_waste_percent_in_batches"] > row.extra["peer_waste_percent"] > row.extra["waste_percent"]
    at_once = dataclasses.replace(peer, script="y.py", num_packs_in_batches=None)
    row = packing.row_of("oldest_first", lengths, packed, {"oldest_first": (1.0,), "y.py": (3.0,)}, at_once)
    assert row.peer_seconds == (3.0,)
    assert "peer_waste_percent_in_batches" not in row.extra
    order, ends = np.arange(500), np.arange(501)
    packing.require_sound("x", lengths, order, ends)
    with pytest.raises(InvariantBroken, match="each segment once"):
        packing.require_sound("x", lengths, np.zeros_like(order), ends)
    with pytest.raises(InvariantBroken, match="fullest pack"):
        packing.require_sound("x", lengths, order, np.array([0, 500]))


def test_displacement_counts_packs_between_a_segment_and_its_turn(load):
    packing = load("packing")
    lengths, ends = np.full(8, 5), np.array([0, 2, 4, 6, 8])
    assert packing.mean_displacement(lengths, np.arange(8), ends) == 0
    assert packing.mean_displacement(lengths, np.array([6, 1, 2, 3, 4, 5, 0, 7]), ends) == 2 * 3 / 8


def test_assembly_refuses_to_time_wrong_batches(load, tmp_path):
    assembly = load("assembly")
    lengths = load("packing").web_lengths(300)
    sampler = assembly.open_sampler(tmp_path / "shards", lengths)
    batches = [next(sampler) for _ in range(sampler.plan.num_steps)]
    assembly.require_right_tokens(batches, int(lengths.sum()) - 300)
    with pytest.raises(InvariantBroken, match="pairs in an epoch"):
        assembly.require_right_tokens(batches, int(lengths.sum()))
    batches[0].targets[5] += 1
    with pytest.raises(InvariantBroken, match="targets of step 0"):
        assembly.require_right_tokens(batches, int(lengths.sum()) - 300)


def test_windows_are_measured_from_four_places_and_refused_when_wrong(load, tmp_path, monkeypatch):
    windows = load("windows")
    for name, value in {"B": 2, "T": 8, "ACCUMULATION": 2, "NUM_STEPS": 3, "SHARD_TOKENS": 400}.items():
        monkeypatch.setattr(windows, name, value)
    bench = load("bench").Bench(
        runs=2, max_bytes=1, peers_dir=tmp_path, tokenizer_path=None, scratch=tmp_path / "scratch"
    )
    rows = windows.measure(bench)
    assert [row.name for row in rows] == ["windows warm", "windows cold", "windows random"]
    assert [len(row.extra) for row in rows] == [5, 5, 2]
    assert all(len(row.ours_seconds) == 2 and row.extra["times_training"] > 0 for row in rows)
    paths = sorted((tmp_path / "scratch" / "windows").iterdir())
    starts = windows.starts_of(paths)
    assert starts == sorted(set(starts))
    assert starts[1] * 32 < 400 < (starts[1] + 3) * 32  # crosses the border
    x, y = next(windows.served(paths, windows.from_step(0)))
    windows.require_right_tokens([(x, y)])
    with pytest.raises(InvariantBroken, match="targets follow their inputs"):
        windows.require_right_tokens([(x, y + 1)])
    with pytest.raises(InvariantBroken, match="rows are runs of the stream"):
        windows.require_right_tokens([(x[:, ::-1], y)])


def test_ranges_are_measured_against_the_local_file(load, tmp_path, monkeypatch):
    ranges = load("ranges")
    monkeypatch.setattr(ranges, "NUM_GROUPS", 6)
    monkeypatch.setattr(ranges, "ROWS_PER_GROUP", 60)
    bench = load("bench").Bench(runs=2, max_bytes=1, peers_dir=tmp_path, tokenizer_path=None, scratch=tmp_path)
    (row,) = ranges.measure(bench)
    assert (len(row.ours_seconds), len(row.peer_seconds)) == (2, 2)
    assert 1 <= row.extra["bytes_ratio"] <= 1.1
    assert row.amount * 1e9 < 0.5 * (tmp_path / "ranges" / "000.parquet").stat().st_size


@pytest.mark.usefixtures("one_thread")
def test_training_is_compared_with_padded_rows_and_refused_when_it_differs(load, tmp_path, monkeypatch):
    training = load("training")
    for name, value in {"NUM_BATCHES": 2, "DOCUMENTS_PER_BATCH": 3, "MAX_SEQ_LEN": 12}.items():
        monkeypatch.setattr(training, name, value)
    monkeypatch.setattr(training, "web_lengths", lambda num: np.arange(num) * 5 % 12 + 2)  # 2 7 12 5 10 3
    bench = load("bench").Bench(runs=2, max_bytes=1, peers_dir=tmp_path, tokenizer_path=None, scratch=tmp_path)
    (row,) = training.measure(bench)
    assert (row.amount, len(row.ours_seconds), len(row.peer_seconds)) == (39, 2, 2)
    assert row.extra["peer_padding_percent"] == pytest.approx(100 * (1 - 39 / (3 * 12 + 3 * 10)))
    assert [bar.figure for bar in row.bars] == ["ratio"]


def test_padded_rows_hold_the_same_pairs_and_nothing_else_to_learn(load):
    training = load("training")
    documents = [np.arange(10, 14), np.arange(20, 22), np.arange(30, 33)]
    flat, padded = training.flat_batch(documents), training.padded_batch(documents)
    assert flat.inputs.tolist() == [10, 11, 12, 20, 30, 31]
    assert flat.targets.tolist() == [11, 12, 13, 21, 31, 32]
    assert flat.position_ids.tolist() == [0, 1, 2, 0, 0, 1]
    assert (flat.cu_seqlens.tolist(), flat.max_seqlen, flat.num_targets) == ([0, 3, 4, 6], 3, 6)
    assert padded.inputs.tolist() == [10, 11, 12, 20, 0, 0, 30, 31, 0]
    assert padded.targets.tolist() == [11, 12, 13, 21, -100, -100, 31, 32, -100]
    assert padded.position_ids.tolist() == [0, 1, 2] * 3
    assert (padded.cu_seqlens.tolist(), padded.max_seqlen, padded.num_targets) == ([0, 3, 6, 9], 3, 6)
    training.require_same_step(0, flat, padded)
    padded.targets[8] = 5  # padding that is trained
    with pytest.raises(InvariantBroken, match=r"batch 7, loss: .* nothing was timed"):
        training.require_same_step(7, flat, padded)


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def gpu_report(gpu, tmp_path, *options):
    output = tmp_path / "gpu.json"
    shape = (
        "--device cpu --preset tiny --vocab-size 4096 --context 48 --rows 2 --documents 16 --backends varlen --eager"
    )
    status = gpu.main([*shape.split(), *options, "--output", str(output)])
    return status, json.loads(output.read_text(encoding="utf-8"))


@pytest.mark.usefixtures("varlen_on_cpu", "one_thread")
def test_the_gpu_benchmark_reports_every_figure_of_every_contender(load, tmp_path, monkeypatch, capsys):
    gpu = load("gpu")
    monkeypatch.setattr(load("gpu_verdicts"), "LENGTHS", (1, 40, 1, 9, 16))
    status, report = gpu_report(gpu, tmp_path, "--max-steps", "3", "--seconds", "300")
    assert set(report) == {
        "started", "seconds", "finished", "machine", "settings", "parameters", "verdicts", "contenders", "bars",
    }  # fmt: skip
    assert report["finished"]
    assert (report["machine"]["device"], report["settings"]["context"]) == ("cpu", 48)
    assert [(v["name"], v["backend"]) for v in report["verdicts"]] == [
        ("parity of outputs", "varlen"),
        ("parity of gradients", "varlen"),
        ("one-token segments, numbers not finite", "varlen"),
        ("isolation, outputs changed elsewhere", "varlen"),
        ("first loss, from that of guessing", "varlen, packed"),
        ("first loss, from that of guessing", "sdpa, padded"),
        ("first losses apart", "packed"),
    ]
    assert all(verdict["passed"] for verdict in report["verdicts"])
    assert status == 0
    packed, padded = report["contenders"]
    assert [packed["name"], padded["name"]] == ["varlen, packed", "sdpa, padded"]
    for figures in (packed, padded):
        assert figures["steps"] == 3
        assert figures["computed_tokens"] == 3 * 2 * 48
        assert 0 < figures["real_tokens"] <= figures["computed_tokens"]
        assert figures["real_tokens_per_second"] == figures["real_tokens"] / figures["seconds"]
        assert 0 <= figures["idle_percent"] <= 100
        assert (figures["mfu"], figures["graphs"], figures["peak_memory_bytes"]) == (None, 0, None)
    assert [(bar["backend"], bar["figure"], bar["met"] is None) for bar in report["bars"]] == [
        ("varlen", "mfu", True),
        ("varlen", "idle_percent", False),
    ]
    printed = capsys.readouterr().out
    assert "verdicts: 7 of 7 passed" in printed
    assert "varlen mfu: bar not measured" in printed
    assert "rows" not in load("gpu").BACKENDS


@pytest.mark.usefixtures("varlen_on_cpu")
def test_the_gpu_benchmark_ends_by_its_own_clock_with_what_it_has(load, tmp_path, capsys):
    gpu = load("gpu")
    status, report = gpu_report(gpu, tmp_path, "--seconds", "0.001")  # the first verdict alone takes longer
    assert (status, report["finished"], report["contenders"]) == (1, False, [])
    assert [bar["met"] for bar in report["bars"]] == [None, None]
    assert "0.001 s are over" in capsys.readouterr().err


def test_bars_of_the_gpu_benchmark_compare_with_the_projects_limits(load):
    figures = {"backend": "varlen", "mfu": 0.44, "idle_percent": 1.9, "graphs": 1}
    bars = load("gpu").bars_of([figures, {"backend": "rows", "graphs": 2}], is_compiled=True)
    assert [(bar["backend"], bar["figure"], bar["met"]) for bar in bars] == [
        ("varlen", "mfu", False),
        ("varlen", "idle_percent", True),
        ("varlen", "graphs", True),
        ("rows", "graphs", False),
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_without_a_gpu_the_gpu_benchmark_says_so_and_measures_nothing(load, tmp_path, capsys):
    output = tmp_path / "gpu.json"
    assert load("gpu").main(["--output", str(output)]) == 1
    assert "expected a CUDA device, found none; nothing was measured" in capsys.readouterr().err
    assert not output.exists()


@pytest.mark.parametrize(
    "options", [["--rows", "0"], ["--seconds", "-1"], ["--documents", "3"], ["--backends", "sdpa"]]
)
def test_the_gpu_benchmark_refuses_impossible_arguments(load, options, capsys):
    with pytest.raises(SystemExit):
        load("gpu").main(["--device", "cpu", *options])
    assert options[0] in capsys.readouterr().err


@pytest.mark.usefixtures("varlen_on_cpu")
def test_verdicts_fail_on_attention_that_leaks_and_on_nan(load, monkeypatch):
    gpu_verdicts = load("gpu_verdicts")
    monkeypatch.setattr(gpu_verdicts, "LENGTHS", (1, 40, 1, 9, 16))

    def over_all_segments(q, k, v, cu_seqlens, max_seqlen):
        return attend_sdpa(q, k, v, cu_seqlens[[0, -1]], len(q))

    monkeypatch.setitem(BACKENDS, "leaking", over_all_segments)
    monkeypatch.setitem(BACKENDS, "broken", lambda q, k, v, *rest: q * torch.nan + k.sum() + v.sum())
    found = gpu_verdicts.verdicts_of(("varlen", "leaking", "broken"), torch.device("cpu"), torch.bfloat16)
    assert [verdict.passed for verdict in found[:4]] == [True] * 4
    assert [verdict.passed for verdict in found[4:8]] == [False, False, True, False]
    assert [verdict.passed for verdict in found[8:]] == [False, False, False, False]


def test_padded_rows_of_the_gpu_benchmark_are_the_plans_documents(load, tmp_path):
    gpu = load("gpu")
    shape = "--device cpu --preset tiny --vocab-size 64 --context 48 --rows 2 --documents 16"
    settings, _ = gpu._parse(shape.split())
    plan = gpu.make_plan(tmp_path, settings)
    tokens, offsets = plan.token_shards[0].tolist(), [*plan.index.offsets.tolist(), plan.index.num_tokens]
    host = gpu.padded_batch(plan, rows=2, number=3)
    for row, (first, end) in enumerate([offsets[6:8], offsets[7:9]]):
        length = end - first - 1
        assert host.packed.inputs[row * 48 :][:48].tolist() == tokens[first : end - 1] + [0] * (48 - length)
        assert host.packed.targets[row * 48 :][:48].tolist() == tokens[first + 1 : end] + [-100] * (48 - length)
        assert tokens[end - 1] == 0
    lengths = [offsets[7] - offsets[6] - 1, offsets[8] - offsets[7] - 1]
    assert host.num_inputs == host.packed.num_targets == host.packed.step_targets == sum(lengths)
    assert (host.num_eos, host.sum_squares) == (2, lengths[0] ** 2 + lengths[1] ** 2)


def test_altered_copies_are_the_documents_in_other_words(load, copied):
    _, texts, planted = copied
    altered_copy = load("corpus").altered_copy
    assert altered_copy(texts, 0) is texts
    near = jaccard_of_pairs(texts, planted)
    for number in (1, 2):
        copy = altered_copy(texts, number)
        assert copy.equals(altered_copy(texts, number))
        assert list(map(len, copy.to_pylist())) == list(map(len, texts.to_pylist()))
        assert np.abs(jaccard_of_pairs(copy, planted) - near).max() < 0.1
        both = pa.concat_arrays([texts, copy])
        assert jaccard_of_pairs(both, np.array([[row, len(texts) + row] for row in range(24)])).max() < 0.05


def test_the_whole_flow_is_compared_with_the_peer(load):
    whole_flow = load("whole_flow")

    def ours(seconds):
        return {"seconds": seconds, "cpu_seconds": seconds / 2, "assets": {"raw_row_groups": 1.5, "token_shards": 0.5}}

    theirs = {"seconds": 20.0, "cpu_seconds": 16.0, "documents": 3, "tokens": 9}
    row, long = whole_flow.rows_against(10.0, "peer 1.0", [(ours(4.0), theirs, ours(5.0))] * 2)
    figures = load("measure").figures_of(row)
    assert (figures["rate"], figures["ratio"], figures["cpu_ratio"]) == (2.5, 5.0, 8.0)
    assert (figures["raw_row_groups_seconds"], figures["between_steps_seconds"]) == (1.5, 2.0)
    assert (long.amount, long.extra["rate_over_peer_rate"], long.extra["cpu_rate_over_peer_cpu_rate"]) == (200, 80, 128)
    assert [bar.is_met(long.extra[bar.figure]) for bar in long.bars] == [True]


def test_memory_of_the_whole_flow_is_compared_at_two_sizes(load):
    answers = [{"start_bytes": 100, "peak_bytes": peak} for peak in (200, 280)]
    row = load("whole_flow").memory_row(*answers)
    assert row.extra["peak_for_10_times"] == 1.4
    assert row.extra["bytes_beyond_start_of_10_times"] == 180
    assert [bar.is_met(row.extra[bar.figure]) for bar in row.bars] == [False]


def test_the_flow_to_shards_runs_on_the_benchmarks_recipes(load, tmp_path):
    whole_flow = load("whole_flow")
    texts = pa.array([" ".join(TEXTS[row : row + 4]) for row in range(0, 40, 4)], pa.large_string())
    inputs = whole_flow.write_inputs(tmp_path / "flow", load("corpus").Text(source="test", texts=texts), None)
    recipes = {name: load_recipe(str(path)) for name, path in inputs.items()}
    assert {recipe.source.pools[0].name for recipe in recipes.values()} == {"text"}
    assert recipes["command"].tokenizer.kind == "trained"
    assert len({recipes[name].tokenizer.path for name in inputs if name != "command"}) == 1
    assert recipes["tenfold_in_units"].reading.unit_megabytes < recipes["long"].reading.unit_megabytes
    num_rows = [pq.read_table(tmp_path / "flow" / name).num_rows for name in ("text", "tenfold", "long")]
    assert num_rows == [len(texts), 10 * len(texts), 20 * len(texts)]
    answer = whole_flow.run_to_shards(tmp_path / "home", inputs["warm_up"], inputs["text"])
    assert list(answer["assets"])[-1] == "token_shards"
    assert min(answer["assets"].values()) > 0
    assert sum(answer["assets"].values()) < answer["seconds"]
    assert 10_000_000 < answer["start_bytes"] <= answer["peak_bytes"]
    shards = list((tmp_path / "home" / "timed" / "token_shards").glob("train-*/*/tokens.bin"))
    assert len(shards) == 1
    with pytest.raises(RuntimeError, match=r"flow_to_shards\.py: exit status 1"):
        whole_flow.run_to_shards(tmp_path / "other", tmp_path / "none.json", inputs["text"])


def test_overhead_is_the_time_in_which_no_step_is_under_way(load):
    spans = {"a": (1.0, 3.0), "b": (2.0, 5.0), "inside b": (2.5, 4.0), "c": (6.0, 7.0)}
    started = [("STEP_START", step, start) for step, (start, _) in spans.items()]
    ended = [("STEP_SUCCESS", step, end) for step, (_, end) in spans.items()]
    run = [("RUN_START", "", 0.5), ("RUN_SUCCESS", "", 9.0), ("STEP_START", "mapped over nothing", 7.5)]
    times = load("ui").times_of([*ended, *run, *started])
    assert (times.num_steps, times.seconds, times.seconds_in_steps) == (4, 8.5, 5.0)
    assert times.overhead_per_step == 3.5 / 4


def test_a_runs_times_are_read_from_its_event_log(load, tmp_path):
    @dg.op
    def first():
        return 1

    @dg.op
    def second(number):
        return number

    @dg.job
    def two_steps():
        second(first())

    with dg.DagsterInstance.ephemeral(tempdir=str(tmp_path)) as instance:
        two_steps.execute_in_process(instance=instance)
        times = load("ui").times_of_last_run(instance)
    assert times.num_steps == 2
    assert 0 < times.seconds_in_steps < times.seconds


def test_profiles_are_compared_and_the_slowest_page_is_named(load):
    ui, measure = load("ui"), load("measure")

    def runs(*seconds):
        return [ui.RunTimes(num_steps=10, seconds=each, seconds_in_steps=1.0) for each in seconds]

    row = ui.row_of_profiles({"local": runs(2.0, 3.0, 2.5), "processes": runs(9.0, 11.0, 10.0)})
    figures = measure.figures_of(row)
    assert (figures["seconds"], figures["ratio"]) == (2.5, 4.0)
    assert figures["overhead_seconds_a_step_local"] == pytest.approx(0.15)
    assert figures["overhead_seconds_a_step_processes"] == pytest.approx(0.9)

    clicked = {"slow once": (1.0, 9.0, 1.0), "slow": (2.5, 2.0, 2.5), "fast": (0.5, 0.5, 0.5)}
    loaded = {"slow once": (4.0, 9.0, 4.0), "slow": (2.5, 2.0, 2.5), "fast": (0.5, 0.5, 0.5)}
    row = ui.row_of_pages(ui.PageTimes(clicked=clicked, loaded=loaded))
    assert (row.amount, row.ours_seconds) == (3, [4.0, 11.5, 4.0])
    assert row.extra["worst_page_seconds"] == 2.5
    assert (row.extra["fast_seconds"], row.extra["slow once_loaded_seconds"]) == (0.5, 4.0)
    assert row.note.startswith("by a click: worst is slow, 2.50 s, the median page takes 1.00 s; ")
    assert row.note.endswith("worst is slow once, 4.00 s, the median page 2.50 s")
    assert [bar["met"] for bar in measure.report_of(row)["bars"]] == [False]


def test_all_cores_are_given_back_to_the_pin(load, monkeypatch):
    ui = load("ui")
    before = os.sched_getaffinity(0)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    try:
        os.sched_setaffinity(0, {max(before)})
        with ui.all_cores():
            assert os.sched_getaffinity(0) >= before
            assert "OMP_NUM_THREADS" not in os.environ
        assert os.sched_getaffinity(0) == {max(before)}
        assert os.environ["OMP_NUM_THREADS"] == "1"
    finally:
        os.sched_setaffinity(0, before)


def test_the_code_location_is_imported_in_a_new_process(load):
    ui = load("ui")
    row = ui.import_row([ui.import_seconds(), 60.0, 61.0])
    assert row.extra["best_seconds"] == row.ours_seconds[0] > 0
    assert load("measure").report_of(row)["bars"][0]["found"] == 60.0


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_asset_pages_are_timed_until_their_description_is_there(load, tmp_path, monkeypatch):
    """On a home without artifacts: an asset's description is there before it is materialized."""
    ui, names = load("ui"), ("dataset_revision", "packing_plan")
    monkeypatch.setattr(ui, "READING_MILLISECONDS", 1)  # nobody reads
    with ui.serving(tmp_path) as address:
        descriptions = ui.descriptions_of(address)
        some = {name: descriptions[name] for name in names}
        times = ui.times_of_pages(address, some, 2, CHROMIUM)
    assert descriptions.keys() == {asset.key.path[-1] for asset in ASSETS}
    for ways in (times.clicked, times.loaded):
        assert [(name, len(seconds)) for name, seconds in ways.items()] == [(name, 2) for name in names]
        assert min(map(min, ways.values())) > 0


def test_without_a_browser_the_pages_row_says_so(load, tmp_path, monkeypatch):
    ui = load("ui")
    monkeypatch.setattr(ui.shutil, "which", lambda name: None)
    assert ui.pages_row(tmp_path, 1).note == "not measured: there is no Chromium on this machine"
