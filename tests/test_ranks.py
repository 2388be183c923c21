"""Ranks: any number of them is the same run, a resumed one to the bit, and the end of one is the end of all."""

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny_artifacts
import torch

from training_io.checkpoint import list_checkpoints
from training_io.errors import RecipeError, StateMismatch
from training_io.model import ModelConfig
from training_io.ranks import Ranks, current_ranks, joined, ranks_of_environment
from training_io.stream import StreamSpec, WindowSpec
from training_io.train_config import TrainConfig
from training_io.train_job import TrainJob, run_job, train_on_ranks

REPOSITORY = Path(__file__).resolve().parents[1]
MODEL = ModelConfig(vocab_size=40, d_model=16, num_layers=1, num_heads=2, num_kv_heads=1, d_ff=24, max_positions=16)
CONFIG = TrainConfig(
    steps=6,
    learning_rate=0.02,
    warmup_steps=2,
    dtype="float64",
    eval_every=3,
    eval_steps=3,
    checkpoint_every=2,
    keep_last=99,
    progress_every=1,
    device="cpu",
    num_threads=1,
)
# The same on a command line; four microbatches a step, two for each of two ranks.
FLAGS = [
    "--model=vocab_size=40,d_model=16,num_layers=1,num_heads=2,num_kv_heads=1,d_ff=24,max_positions=16",
    *("--steps=6", "--learning-rate=0.02", "--warmup-steps=2", "--dtype=float64", "--eval-every=3", "--eval-steps=3"),
    *("--device=cpu", "--num-threads=1"),
]


def documents(num_documents, seed):
    rng = np.random.default_rng(seed)
    return [rng.integers(1, 40, size=rng.integers(1, 25)).tolist() for _ in range(num_documents)]


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    docs = {"train": documents(40, seed=1), "validation": documents(9, seed=2)}
    return tiny_artifacts.make_token_shards(
        tmp_path_factory.mktemp("artifacts"), docs, token_dtype="uint16", pool_names=("a", "b")
    )


@pytest.fixture(scope="module")
def plan(shards):
    return tiny_artifacts.make_plan(
        shards.parents[2], shards, splits=("train", "validation"), packs_per_microbatch=1, microbatches_per_step=4
    )


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def specs(layout, plan, shards):
    """Streams of training and validation; a validation step of windows has one microbatch, fewer than ranks."""
    if layout == "packs":
        return [StreamSpec(plan_path=str(plan), split=split, device="cpu") for split in ("train", "validation")]
    windows = WindowSpec(shards_path=str(shards), batch_size=2, max_seq_len=8, accumulation=4, device="cpu")
    return [windows, replace(windows, split="validation", accumulation=1)]


def job_of(layout, plan, shards, folder, **changes):
    spec, validation = specs(layout, plan, shards)
    return TrainJob(
        spec=spec,
        validation=validation,
        model_config=MODEL,
        config=replace(CONFIG, **changes),
        checkpoint_dir=folder,
    )


def torchrun(num_ranks, *arguments):
    """The training command on so many ranks of this machine."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(num_ranks)]
    return subprocess.run(
        [*command, "-m", "training_io.train", *map(str, arguments)],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("layout", ["packs", "windows"])
def test_two_ranks_under_torchrun_are_one_with_doubled_accumulation(plan, shards, tmp_path, layout):
    one = run_job(job_of(layout, plan, shards, tmp_path / "one"))
    data = {
        "packs": ["--plan", plan],
        "windows": ["--shards", shards, "--window-length", 8, "--batch-size", 2, "--accumulation", 4],
    }
    done = torchrun(2, *data[layout], *FLAGS, "--output", tmp_path / "two", "--json", tmp_path / "two.json")
    assert done.returncode == 0, done.stderr
    two = json.loads((tmp_path / "two.json").read_text())
    assert two["losses"] == pytest.approx(one.losses, rel=0, abs=1e-10)
    assert two["gradient_norms"] == pytest.approx(one.gradient_norms, rel=0, abs=1e-10)
    assert np.array(two["validation"]) == pytest.approx(np.array(one.validation), rel=0, abs=1e-10)
    assert len(two["validation"]) == 3
    for pool, points in one.validation_by_pool.items():
        assert np.array(two["validation_by_pool"][pool]) == pytest.approx(np.array(points), rel=0, abs=1e-10)
    assert (two["tokens"], two["positions"]) == (one.tokens, vars(one.positions))


def test_three_ranks_resume_to_the_bit(plan, shards, tmp_path):
    """Three shares of a gradient round differently in another order, which a reduction takes from the buckets.

    PyTorch makes these anew behind the first step of a process, and this model is larger than one.
    """
    wide = replace(MODEL, d_model=128, num_layers=2, d_ff=512, vocab_size=3_000)

    def job(folder):
        return replace(job_of("packs", plan, shards, tmp_path / folder, dtype="float32"), model_config=wide)

    whole, seen = train_on_ranks(job("whole"), 3), []
    checkpoint = list_checkpoints(tmp_path / "whole")[1]
    shutil.copytree(checkpoint, tmp_path / "cut" / checkpoint.name)
    resumed = train_on_ranks(job("cut"), 3, seen.append)
    assert (resumed.resumed_from, resumed.losses, resumed.validation) == (4, whole.losses, whole.validation)
    assert resumed.gradient_norms == whole.gradient_norms
    assert [progress.step for progress in seen] == [5, 6]
    assert run_job(job("one")).gradient_norms != whole.gradient_norms  # so the order of a sum does show


def test_a_signal_to_the_caller_stops_every_rank_behind_a_saved_step_and_comes_back(plan, shards, tmp_path):
    came = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    try:
        told = []

        def interrupt(progress):
            if not told:
                told.append(progress.step)
                os.kill(os.getpid(), signal.SIGTERM)

        config = {"steps": 100_000, "warmup_steps": 2, "checkpoint_every": 100_000}
        result = train_on_ranks(job_of("packs", plan, shards, tmp_path / "run", **config), 2, interrupt)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert came == [signal.SIGTERM]
    assert (result.is_stopped, result.signal) == (True, signal.SIGTERM)
    assert list_checkpoints(tmp_path / "run") == [result.checkpoint]
    assert not multiprocessing.active_children()


def test_one_rank_trains_in_this_process_and_gives_a_signal_back_too(plan, shards, tmp_path):
    came = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    try:
        job = job_of("packs", plan, shards, tmp_path)
        result = train_on_ranks(job, 1, lambda progress: os.kill(os.getpid(), signal.SIGTERM))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert came == [signal.SIGTERM]
    assert (result.is_stopped, result.steps) == (True, 2)


def test_the_error_of_a_rank_is_raised_where_they_were_started(plan, shards, tmp_path):
    train_on_ranks(job_of("packs", plan, shards, tmp_path, steps=2, checkpoint_every=1), 1)
    with pytest.raises(StateMismatch, match="train_seed: saved for 0, this run has 1"):
        train_on_ranks(job_of("packs", plan, shards, tmp_path, steps=2, seed=1), 2)
    assert not multiprocessing.active_children()


def test_an_error_of_who_listens_ends_the_ranks(plan, shards, tmp_path):
    def refuse(progress):
        raise LookupError("no more")

    with pytest.raises(LookupError, match="no more"):
        train_on_ranks(job_of("packs", plan, shards, tmp_path, steps=100_000), 2, refuse)
    assert not multiprocessing.active_children()


def test_a_rank_that_is_killed_ends_the_run(plan, shards, tmp_path):
    def kill_one(progress):
        os.kill(multiprocessing.active_children()[-1].pid, signal.SIGKILL)

    # the killed rank's silence and the other's complaint about it race each other
    with pytest.raises(RuntimeError, match=r"^ranks: expected every rank to end by itself|^rank 0 of 2: "):
        train_on_ranks(job_of("packs", plan, shards, tmp_path, steps=100_000), 2, kill_one)
    assert not multiprocessing.active_children()


def train_with_a_folder_of_its_own(rank, plan, folder):
    torch.set_num_threads(1)
    job = job_of("packs", plan, None, folder / f"rank_{rank}")
    with joined(Ranks(rank=rank, world_size=2), "cpu", (folder / "meeting").as_uri()):
        try:
            run_job(replace(job, validation=None))
        except StateMismatch as error:
            (folder / f"error_{rank}").write_text(str(error))


def test_ranks_that_find_different_checkpoints_do_not_train(plan, shards, tmp_path):
    run_job(replace(job_of("packs", plan, shards, tmp_path / "rank_0"), validation=None))
    for checkpoint in list_checkpoints(tmp_path / "rank_0")[1:]:
        shutil.rmtree(checkpoint)
    torch.multiprocessing.spawn(train_with_a_folder_of_its_own, (plan, tmp_path), nprocs=2)
    errors = [(tmp_path / f"error_{rank}").read_text() for rank in range(2)]
    assert "found step 2 here and 2 added up over 2 ranks" in errors[0]
    assert "found step 0 here and 2 added up over 2 ranks" in errors[1]
    assert not list_checkpoints(tmp_path / "rank_1")


def test_torchruns_environment_says_which_rank_this_is():
    assert ranks_of_environment({}) == Ranks(rank=0, world_size=1, local_rank=0)
    found = ranks_of_environment({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "HOME": "/"})
    assert found == Ranks(rank=5, world_size=8, local_rank=1)


@pytest.mark.parametrize(
    "environment",
    [
        {"RANK": "0"},
        {"RANK": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "0"},
        {"RANK": "-1", "WORLD_SIZE": "2", "LOCAL_RANK": "0"},
        {"RANK": "0", "WORLD_SIZE": "two", "LOCAL_RANK": "0"},
    ],
)
def test_half_an_environment_is_refused(environment):
    with pytest.raises(RecipeError, match=r"expected RANK below WORLD_SIZE and LOCAL_RANK.*found RANK="):
        ranks_of_environment(environment)


def test_one_rank_needs_no_group_and_several_choose_no_single_device():
    with joined(Ranks(), "cpu") as device:
        assert (device, current_ranks()) == ("cpu", (0, 1))
    with (
        pytest.raises(RecipeError, match=r"auto, cpu or cuda with 2 ranks.* found cpu:0"),
        joined(Ranks(rank=0, world_size=2), "cpu:0"),
    ):
        pass
