"""The training command: needs no Dagster, ends behind a saved step when told to, and goes on to the same bits."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tiny_artifacts
import torch

from training_io.checkpoint import list_checkpoints, load_newest
from training_io.model import ModelConfig
from training_io.stream import StreamSpec, WindowSpec
from training_io.train import train
from training_io.train_command import main
from training_io.train_config import TrainConfig

REPOSITORY = Path(__file__).resolve().parents[1]
VOCAB = 40
SHAPE = "d_model=16,num_layers=1,num_heads=2,num_kv_heads=1,d_ff=24"
MODEL = ModelConfig(vocab_size=VOCAB, d_model=16, num_layers=1, num_heads=2, num_kv_heads=1, d_ff=24, max_positions=8)
MODEL_FLAG = f"--model={SHAPE},vocab_size={VOCAB}"


def documents(num_documents, seed):
    rng = np.random.default_rng(seed)
    return [rng.integers(1, VOCAB, size=rng.integers(1, 25)).tolist() for _ in range(num_documents)]


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    docs = {"train": documents(20, seed=1), "validation": documents(9, seed=2)}
    return tiny_artifacts.make_token_shards(tmp_path_factory.mktemp("artifacts"), docs, token_dtype="uint16")


@pytest.fixture(scope="module")
def plan(shards):
    return tiny_artifacts.make_plan(shards.parents[2], shards, splits=("train", "validation"))


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def flags(plan, output, *more):
    common = ["--device=cpu", "--num-threads=1", MODEL_FLAG, "--learning-rate=0.02", "--warmup-steps=2"]
    return [*map(str, ["--plan", plan, "--output", output]), *common, *map(str, more)]


def start(arguments, *launcher):
    """The command as a process of its own, its lines readable as they come."""
    return subprocess.Popen(
        [sys.executable, *launcher, "-m", "training_io.train", *arguments],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_the_command_is_the_functions_run(plan, tmp_path, capsys):
    report = tmp_path / "run.json"
    arguments = flags(plan, tmp_path / "by_command", "--steps=5", "--eval-every=2", "--progress-every=2")
    assert main([*arguments, "--json", str(report)]) == 0
    expected = train(
        StreamSpec(plan_path=str(plan), device="cpu"),
        MODEL,
        TrainConfig(steps=5, learning_rate=0.02, warmup_steps=2, eval_every=2, device="cpu", num_threads=1),
        tmp_path / "by_function",
        validation=StreamSpec(plan_path=str(plan), split="validation", device="cpu"),
    )
    found = json.loads(report.read_text())
    assert tuple(found["losses"]) == expected.losses
    assert tuple(map(tuple, found["validation"])) == expected.validation
    assert (found["steps"], found["is_stopped"], found["positions"]) == (5, False, vars(expected.positions))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines[:3]] == ["step 2 of 5", "step 4 of 5", "step 5 of 5"]
    assert lines[3].startswith("5 steps done: loss ")
    assert len(lines) == 4


def test_windows_are_trained_on_by_the_same_command(shards, tmp_path):
    report = tmp_path / "run.json"
    arguments = flags(
        "-",
        tmp_path / "by_command",
        "--steps=3",
        "--batch-size=2",
        "--accumulation=3",
        "--eval-batch-size=3",
        "--document-mask",
    )
    arguments[:2] = ["--shards", str(shards), "--window-length", "8"]
    assert main([*arguments, "--json", str(report)]) == 0
    windows = {"batch_size": 2, "max_seq_len": 8, "document_mask": True, "device": "cpu", "shards_path": str(shards)}
    expected = train(
        WindowSpec(accumulation=3, **windows),
        MODEL,
        TrainConfig(steps=3, learning_rate=0.02, warmup_steps=2, device="cpu", num_threads=1),
        tmp_path / "by_function",
        validation=WindowSpec(split="validation", accumulation=1, **(windows | {"batch_size": 3})),
    )
    found = json.loads(report.read_text())
    assert tuple(found["losses"]) == expected.losses
    assert tuple(map(tuple, found["validation"])) == expected.validation


def test_it_runs_where_dagster_parquet_and_numba_are_not_installed(plan, tmp_path):
    code = (
        "import sys\n"
        "for name in ('dagster', 'pyarrow', 'numba', 'tensorboard'):\n"
        "    sys.modules[name] = None\n"  # to import it is an error then
        "from training_io.train_command import main\n"
        "sys.exit(main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *flags(plan, tmp_path, "--steps=2")],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert len(list_checkpoints(tmp_path / "checkpoints")) == 1


def test_events_without_tensorboard_are_refused_before_a_step_is_trained(plan, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tensorboard.summary.writer.event_file_writer", None)
    assert main(flags(plan, tmp_path, "--steps=20", "--events", "--checkpoint-every=1")) == 1
    message = capsys.readouterr()
    assert "expected tensorboard beside torch" in message.err
    assert "`pip install tensorboard`" in message.err
    assert (message.out, list(tmp_path.iterdir())) == ("", [])


def test_the_folder_of_a_split_finds_the_artifacts_validation(plan, tmp_path):
    reports = [tmp_path / name for name in ("artifact.json", "split.json")]
    for given, report in zip((plan, plan / "train"), reports, strict=True):
        assert main(flags(given, tmp_path / report.stem, "--steps=2", "--json", report)) == 0
    whole, split = (json.loads(report.read_text())["validation"] for report in reports)
    assert [step for step, _ in whole] == [0, 2]
    assert split == whole


@pytest.mark.parametrize("layout", ["packs", "windows"])
def test_a_validation_split_that_is_not_there_is_refused_where_it_was_named(shards, plan, tmp_path, capsys, layout):
    data = ["--plan", plan] if layout == "packs" else ["--shards", shards, "--window-length=8", "--batch-size=2"]
    arguments = [*data, *flags(plan, tmp_path, "--steps=1")[2:]]
    assert main([*map(str, arguments), "--validation=dev"]) == 1
    found = capsys.readouterr().err
    assert re.search("--validation: expected a split with targets of .*, train, validation, found dev", found), found
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("layout", ["packs", "windows"])
def test_without_a_validation_split_nothing_is_evaluated_unless_one_is_named(tmp_path, layout):
    docs = {"train": documents(20, seed=1), "validation": [[]]}  # an EOS alone has no target
    shards = tiny_artifacts.make_token_shards(tmp_path, docs, token_dtype="uint16")
    plan = tiny_artifacts.make_plan(tmp_path, shards, splits=("train", "validation"))
    data = ["--plan", plan] if layout == "packs" else ["--shards", shards, "--window-length=8", "--batch-size=2"]
    arguments = [*map(str, data), *flags(plan, tmp_path / "run", "--steps=2", "--json", tmp_path / "run.json")[2:]]
    assert main([*arguments, "--validation=validation"]) == 1
    assert main(arguments) == 0
    assert json.loads((tmp_path / "run.json").read_text())["validation"] == []


def test_a_split_below_a_microbatch_of_evaluation_is_refused_before_a_step_is_trained(shards, tmp_path, capsys):
    arguments = ["--shards", str(shards), "--window-length=8", "--batch-size=2", *flags("-", tmp_path, "--steps=2")[2:]]
    assert main([*arguments, "--eval-batch-size=999"]) == 1
    found = capsys.readouterr().err
    assert "expected 7,993 tokens of split validation for one microbatch of 999 x 8, found" in found
    assert "--eval-batch-size; in a recipe packs.eval_microbatch_tokens" in found
    assert list(tmp_path.iterdir()) == []


def test_sigterm_saves_and_exits_with_0_and_the_resumed_run_is_the_same_to_the_bit(plan, tmp_path):
    long = ["--steps=600", "--progress-every=1", "--checkpoint-every=600", "--eval-every=600"]
    process = start(flags(plan, tmp_path / "run", *long))
    first_line = process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    rest, errors = process.communicate()
    assert (process.returncode, errors) == (0, "")
    assert first_line.startswith("step 1 of 600: ")
    (checkpoint,) = list_checkpoints(tmp_path / "run" / "checkpoints")
    stopped_at = load_newest(checkpoint.parent).step
    assert 1 < stopped_at < 600
    assert rest.splitlines()[-1] == f"stopped at step {stopped_at:,}, saved in {checkpoint}; --resume goes on"
    assert main(flags(plan, tmp_path / "run", *long, "--resume")) == 0
    assert main(flags(plan, tmp_path / "whole", *long)) == 0
    resumed, whole = (load_newest(tmp_path / name / "checkpoints").payload for name in ("run", "whole"))
    assert torch.equal(resumed["past"]["losses"], whole["past"]["losses"])
    assert resumed["past"]["validation"] == whole["past"]["validation"]
    assert all(torch.equal(resumed["model"][name], weight) for name, weight in whole["model"].items())


def test_sigterm_to_torchrun_saves_on_every_rank(plan, tmp_path):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    process = start(flags(plan, tmp_path, "--steps=100000", "--progress-every=1"), *launcher)
    assert process.stdout.readline().startswith("step 1 of 100,000: ")
    process.send_signal(signal.SIGTERM)
    rest, _ = process.communicate()  # torchrun itself tells of the signal, and ends with a status that says so
    newest = list_checkpoints(tmp_path / "checkpoints")[-1]
    stopped_at = load_newest(newest.parent).step
    assert rest.splitlines()[-1] == f"stopped at step {stopped_at:,}, saved in {newest}; --resume goes on"


def test_an_earlier_runs_checkpoints_are_not_lost(plan, tmp_path, capsys):
    assert main(flags(plan, tmp_path, "--steps=2")) == 0
    capsys.readouterr()
    assert main(flags(plan, tmp_path, "--steps=2")) == 1
    message = capsys.readouterr().err
    assert message.startswith("RecipeError: ")
    assert "expected no checkpoint of an earlier run, found step_000000002. Give --resume" in message
    assert message.count("\n") == 1
    assert main(flags(plan, tmp_path, "--steps=2", "--resume")) == 0
    assert main(flags(plan, tmp_path, "--steps=2", "--resume", "--seed=1")) == 1
    assert "train_seed: saved for 0, this run has 1" in capsys.readouterr().err


def test_resume_says_where_it_begins_and_so_many_checkpoints_stay(plan, tmp_path, capsys):
    assert main(flags(plan, tmp_path, "--steps=4", "--checkpoint-every=1", "--keep-last=3", "--resume")) == 0
    assert f"no checkpoint in {tmp_path / 'checkpoints'}: starting at step 0" in capsys.readouterr().out
    assert [path.name[-1] for path in list_checkpoints(tmp_path / "checkpoints")] == ["2", "3", "4"]
    assert main(flags(plan, tmp_path, "--steps=4", "--checkpoint-every=1", "--keep-last=3", "--resume")) == 0
    assert f"resuming from {tmp_path / 'checkpoints' / 'step_000000004'}" in capsys.readouterr().out


def test_resume_begins_at_the_start_where_nothing_was_saved_yet(plan, tmp_path):
    assert main(flags(plan, tmp_path, "--steps=2", "--resume")) == 0
    assert load_newest(tmp_path / "checkpoints").step == 2


def test_branching_begins_from_another_runs_checkpoint(plan, tmp_path):
    assert main(flags(plan, tmp_path / "first", "--steps=4", "--checkpoint-every=2")) == 0
    origin = list_checkpoints(tmp_path / "first" / "checkpoints")[0]
    report = tmp_path / "branch.json"
    branch = flags(plan, tmp_path / "branch", "--steps=4", "--branch-from", origin, "--json", report)
    assert main(branch) == 0
    found = json.loads(report.read_text())
    assert found["losses"] == load_newest(tmp_path / "first" / "checkpoints").payload["past"]["losses"].tolist()
    assert (found["resumed_from"], found["branched_from"]["step"]) == (2, 2)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--model=huge"], "--model: expected tiny, 124m or name=value of vocab_size, .* found 'huge'"),
        (["--model=tiny,heads=2"], "--model: .* found 'heads=2'"),
        (["--model=tiny"], "--model: expected every field without a default, found no vocab_size"),
        (["--model=tiny,vocab_size=many"], "--model: expected vocab_size to be a whole number, found 'many'"),
        (["--model=tiny,tied_embeddings=no"], "--model: expected tied_embeddings to be true or false, found 'no'"),
        (["--steps=0"], "train.steps: expected 1 to 999,999,999, found 0"),
        (["--steps=1000000000"], "train.steps: expected 1 to 999,999,999, found 1,?000,?000,?000"),
        (["--learning-rate=inf"], "train.learning_rate: expected above 0 and finite, found inf"),
        (["--num-threads=9999"], "train.num_threads: expected 1 to 1,024, found 9,?999"),
        (["--attention=flex"], "attention backend flex: expected CUDA for training .* found cpu. Choose sdpa"),
        (["--json=/nowhere/run.json"], "--json: expected a file in a folder that is there, found /nowhere/run.json"),
        (["--device=tpu"], "device: expected auto, cpu, cuda"),
        (["--compile"], "compile: expected attention by varlen or flex, found sdpa"),
        (["--split=test"], "expected a plan of split test, found train, validation"),
        (["--branch-from=/nowhere"], "/nowhere: expected a checkpoint or a folder of them, found none"),
    ],
)
def test_what_cannot_be_trained_is_one_line_and_status_1(plan, tmp_path, capsys, more, message):
    assert main(flags(plan, tmp_path, "--steps=2", *more)) == 1
    found = capsys.readouterr().err
    assert found.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
    assert re.search(message, found), found


def test_a_kernel_that_the_cpu_lacks_is_one_line(plan, tmp_path):
    process = start(flags(plan, tmp_path, "--steps=2", "--attention=varlen"))  # others here may have registered one
    _, found = process.communicate(timeout=120)
    assert process.returncode == 1
    assert re.fullmatch("RecipeError: attention backend varlen: expected CUDA .* found cpu. Choose sdpa.\n", found)


def test_windows_without_a_length_are_refused(shards, tmp_path, capsys):
    assert main(["--shards", str(shards), "--steps=1", "--output", str(tmp_path)]) == 1
    assert "--shards: expected --window-length too" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("described", "expected"),
    [
        ("tiny", {"d_model": 128, "vocab_size": VOCAB, "max_positions": 8}),
        ("124m,num_kv_heads=4", {"num_layers": 12, "num_kv_heads": 4, "vocab_size": VOCAB}),
        ("tiny,positions=learned,max_positions=9,tied_embeddings=false", {"positions": "learned", "max_positions": 9}),
    ],
)
def test_a_model_is_a_preset_or_fields_over_the_shards_vocabulary(tmp_path, described, expected):
    from training_io.train_command import _model_config

    folder = tmp_path / "token_shards" / "-" / "made"
    folder.mkdir(parents=True)
    tiny_artifacts.seal(folder, "token_shards", {}, {}, {"vocab_size": VOCAB})
    found = vars(_model_config(described, folder, 8))
    assert {name: found[name] for name in expected} == expected
