"""The command line on a training box: numpy alone, counts that are right, one line a violation."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_artifacts import address_docs, make_package, make_plan, make_token_shards, seal, tiny_fingerprint

from training_io.__main__ import main
from training_io.errors import RecipeError
from training_io.inspection import inspect
from training_io.manifest import MANIFEST_NAME, QUARANTINE_NAME
from training_io.packing import STRATEGIES, STREAMING
from training_io.plan import load_plan
from training_io.planning import SNAPSHOT_PACKS

LENGTHS = [6, 4, 3, 2, 20, 1, 0, 9]
REPOSITORY = Path(__file__).resolve().parents[1]
NOT_ON_A_TRAINING_BOX = ["dagster", "pyarrow", "torch", "numba", "yaml", "pandas", "datasketch", "tokenizers"]
BLOCKER = f"""
import importlib.abc, sys
class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {NOT_ON_A_TRAINING_BOX!r}:
            raise ModuleNotFoundError(f"blocked {{name}}", name=name)
sys.meta_path.insert(0, Blocker())
"""


@pytest.fixture
def artifacts(tmp_path):
    shards = make_token_shards(
        tmp_path,
        {"train": address_docs(LENGTHS), "validation": address_docs([3, 5], 50)},
        max_shard_tokens=12,
        pool_names=("prose", "code"),
        fingerprint=tiny_fingerprint(),
    )
    return shards, make_plan(tmp_path, shards, splits=("train", "validation"))


def on_a_training_box(*arguments):
    """Run the command line in a process where everything but numpy and the standard library is missing."""
    code = BLOCKER + "from training_io.__main__ import main\nsys.exit(main(sys.argv[1:]))\n"
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_blocker_blocks():
    blocked = subprocess.run(
        [sys.executable, "-c", BLOCKER + "import pyarrow"], capture_output=True, text=True, check=False
    )
    assert "blocked pyarrow" in blocked.stderr


def test_a_training_box_needs_numpy_alone(artifacts):
    for artifact in artifacts:
        for command in ("inspect", "verify"):
            done = on_a_training_box(command, artifact, "--json")
            assert (done.returncode, done.stderr) == (0, "")
            assert json.loads(done.stdout)


def test_the_numpy_half_imports_neither_torch_nor_dagster():
    modules = [
        "shard_format",
        "segments",
        "packing",
        "plan",
        "sampler",
        "batch",
        "windows",
        "mixture",
        "invariants",
        "document_index",
    ]
    code = BLOCKER + "".join(f"import training_io.{module}\n" for module in modules)
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_module_runs(artifacts):
    done = subprocess.run(
        [sys.executable, "-m", "training_io", "verify", str(artifacts[1])],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0
    assert "train: 45 next-token pairs, each once" in done.stdout


def test_inspect_counts_shards(artifacts):
    report = inspect(artifacts[0], None)
    train = report["splits"]["train"]
    assert report["asset"] == "token_shards"
    assert (train["documents"], train["tokens"], train["pairs"], train["shards"]) == (8, 53, 45, 5)
    assert train["document_lengths"]["min"] == 1
    assert train["document_lengths"]["median"] == 4
    assert train["document_lengths"]["max"] == 21
    assert train["pools"] == {"prose": {"documents": 4, "tokens": 33}, "code": {"documents": 4, "tokens": 20}}


def test_inspect_counts_packs(artifacts):
    report = inspect(artifacts[1], None)
    train = report["splits"]["train"]
    assert (train["segments"], train["packs"], train["targets"], train["steps"]) == (10, 3, 45, 1)
    assert train["utilisation"] == 45 / 48
    assert train["packs_above_minimum"] == 0
    only = inspect(artifacts[1] / "validation", None)
    assert only["splits"] == {"validation": report["splits"]["validation"]}


def test_inspect_shows_the_counts_of_any_other_artifact(tmp_path):
    (tmp_path / "rows.parquet").write_bytes(b"12345")
    seal(tmp_path, "raw_row_groups", {}, {}, {"num_documents": 7})
    report = inspect(tmp_path, None)
    assert (report["asset"], report["counts"], report["bytes"]) == ("raw_row_groups", {"num_documents": 7}, 5)


def test_clusters_by_their_sizes_are_readable(tmp_path, capsys):
    (tmp_path / "evidence.parquet").write_bytes(b"12345")
    sizes = [["1", 1_399], ["8 to 15", 2]]
    seal(tmp_path, "lsh_clusters", {}, {}, {"cluster_sizes": sizes, "pairs": [[1, 2]]})
    assert main(["inspect", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    lines = ["  cluster_sizes (documents in a cluster: how many clusters)", "    1: 1,399", "    8 to 15: 2", "  pairs"]
    assert "\n".join(lines) in printed
    assert "    [0]\n      [0]: 1\n" in printed
    assert main(["inspect", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["counts"]["cluster_sizes"] == sizes


def test_inspect_prints_lines_and_writes_json(artifacts, tmp_path, capsys):
    output = tmp_path / "report.json"
    assert main(["inspect", str(artifacts[1]), "--output", str(output)]) == 0
    printed = capsys.readouterr().out
    assert "utilisation: 0.9375" in printed
    assert main(["inspect", str(artifacts[1]), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(output.read_text())


def test_a_report_that_cannot_be_written_is_one_line(artifacts, tmp_path, capsys):
    assert main(["inspect", str(artifacts[1]), "--output", str(tmp_path / "missing" / "report.json")]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("FileNotFoundError: ")


@pytest.mark.parametrize("suffix", ["json", "yaml"])
def test_a_recipe_is_compared(artifacts, tmp_path, suffix):
    recipe = tmp_path / f"recipe.{suffix}"
    packs = {"max_seq_len": 8, "capacity": 24, "strategy": "best_fit", "buffer": 16}
    if suffix == "yaml":
        pytest.importorskip("yaml")
    recipe.write_text(json.dumps({"name": "x", "capacity": 1, "packs": packs}))  # JSON is YAML as well
    train = inspect(artifacts[1], recipe)["splits"]["train"]
    assert train["differs_from_recipe"] == {
        "capacity": {"plan": 16, "recipe": 24},
        "strategy": {"plan": "oldest_first", "recipe": "best_fit"},
    }
    under = inspect(artifacts[0], recipe)["splits"]["train"]["under_recipe"]
    assert (under["segments"], under["packs"], under["targets"]) == (10, 2, 45)


def test_a_recipe_of_another_shape_gives_what_it_has(artifacts, tmp_path):
    recipe = tmp_path / "recipe.json"
    recipe.write_text('{"data": {"max_seq_len": 4}, "train": {"batch_size": 35}}')
    report = inspect(artifacts[0], recipe)
    assert report["recipe"] == {"path": str(recipe), "max_seq_len": 4}
    assert report["splits"]["train"]["under_recipe"] == {"segments": 14, "diverted": 0}


LONG = [length for length in LENGTHS if length > 8]


@pytest.mark.parametrize(
    ("long_documents", "inputs", "diverted"),
    [("cut", sum(LENGTHS), 0), ("divert", sum(LENGTHS) - sum(LONG), len(LONG)), (None, sum(LENGTHS), 0)],
)
def test_what_a_recipe_does_with_long_documents_is_counted(artifacts, tmp_path, long_documents, inputs, diverted):
    recipe = tmp_path / "recipe.json"
    packs = {"max_seq_len": 8, "capacity": 16, "strategy": "oldest_first", "buffer": 16}
    stated = {} if long_documents is None else {"long_documents": long_documents}
    recipe.write_text(json.dumps({"packs": packs | stated}))
    under = inspect(artifacts[0], recipe)["splits"]["train"]["under_recipe"]
    assert (under["targets"], under["diverted"]) == (inputs, diverted)
    plan = make_plan(tmp_path / "own", artifacts[0], **packs, **stated)
    train = inspect(plan, recipe)["splits"]["train"]
    assert (train["targets"], train["diverted"], train["differs_from_recipe"]) == (inputs, diverted, {})
    assert {name: train[name] for name in under} == under


def test_what_an_overlap_repeats_takes_room_and_is_no_target(artifacts, tmp_path):
    packs = {"max_seq_len": 8, "capacity": 16, "strategy": "oldest_first", "buffer": 16, "overlap": 3}
    recipe = tmp_path / "recipe.json"
    recipe.write_text(json.dumps({"packs": packs}))
    plan = make_plan(tmp_path / "own", artifacts[0], **packs)
    train = inspect(plan, recipe)["splits"]["train"]
    under = inspect(artifacts[0], recipe)["splits"]["train"]["under_recipe"]
    assert (train["targets"], train["repeated"]) == (45, 4 * 3)  # 20 inputs have three cuts, 9 have one
    assert train["utilisation"] == (45 + 12) / (16 * train["packs"])
    assert {name: train[name] for name in under} == under
    assert train["differs_from_recipe"] == {}
    assert inspect(artifacts[1], recipe)["splits"]["train"]["differs_from_recipe"] == {
        "overlap": {"plan": 0, "recipe": 3}
    }


def test_a_recipe_that_refuses_long_documents_says_how_many(artifacts, tmp_path):
    recipe = tmp_path / "recipe.json"
    packs = {"max_seq_len": 8, "capacity": 16, "strategy": "oldest_first", "buffer": 16, "long_documents": "refuse"}
    recipe.write_text(json.dumps({"packs": packs}))
    splits = inspect(artifacts[0], recipe)["splits"]
    assert splits["train"]["under_recipe"] == {"refused": len(LONG)}
    assert splits["validation"]["under_recipe"]["targets"] == 3 + 5
    differing = inspect(artifacts[1], recipe)["splits"]["train"]["differs_from_recipe"]
    assert differing == {"long_documents": {"plan": "cut", "recipe": "refuse"}}
    recipe.write_text(json.dumps({"packs": packs | {"long_documents": "shorten"}}))
    with pytest.raises(RecipeError, match="long_documents: expected one of cut, refuse, divert, found 'shorten'"):
        inspect(artifacts[0], recipe)


@pytest.mark.parametrize(("name", "text"), [("a.json", "{"), ("a.json", "[1]"), ("absent.json", None)])
def test_an_unreadable_recipe_is_one_line_on_stderr(artifacts, tmp_path, capsys, name, text):
    if text is not None:
        (tmp_path / name).write_text(text)
    assert main(["inspect", str(artifacts[0]), "--config", str(tmp_path / name)]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("RecipeError: ")
    assert captured.err.count("\n") == 1


def test_a_yaml_recipe_without_pyyaml_says_what_to_do(artifacts, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("packs: {max_seq_len: 8}")
    done = on_a_training_box("inspect", artifacts[0], "--config", recipe)
    assert done.returncode == 1
    assert "Give the recipe as JSON, or install pyyaml." in done.stderr
    assert "Traceback" not in done.stderr


def test_verify_says_what_it_verified(artifacts, capsys):
    assert main(["verify", str(artifacts[0])]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("8 documents tile the shards" in line for line in lines)
    assert any("18 files have their sizes and hashes" in line for line in lines)


def poison_byte(shards, plan):
    path = shards / "train_000000.bin"
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")


def poison_resealed_token(shards, plan):
    path = shards / "train_000000.bin"
    raw = bytearray(path.read_bytes())
    raw[1024 + 8 : 1024 + 12] = b"\0\0\0\0"
    path.write_bytes(raw)
    reseal(shards)


def reseal(folder):
    value = json.loads((folder / MANIFEST_NAME).read_text())
    seal(folder, value["asset"], value["inputs"], value["parameters"], value["counts"])


def poison_order(shards, plan):
    path = plan / "train" / "order.npy"
    raw = bytearray(path.read_bytes())
    raw[-4:] = raw[-8:-4]
    path.write_bytes(raw)
    reseal(plan)


def poison_file_away(shards, plan):
    (shards / "train_index" / "length.npy").unlink()


def poison_index_away(shards, plan):
    (shards / "train_index" / "index.json").unlink()


def poison_index_beside(shards, plan):
    shutil.copytree(shards / "train_index", shards / "extra_index")


def poison_unlisted_shard(shards, plan):
    path = shards / "train_000001.bin"
    whole = path.read_bytes()
    path.unlink()
    reseal(shards)
    path.write_bytes(whole)


def poison_split(shards, plan):
    path = shards / "train_index" / "index.json"
    path.write_text(path.read_text().replace('"split": "train"', '"split": "validation"'))
    reseal(shards)


def poison_unsealed(shards, plan):
    (plan / MANIFEST_NAME).unlink()
    (shards / MANIFEST_NAME).unlink()


def poison_quarantined(shards, plan):
    for artifact in (shards, plan):
        (artifact / QUARANTINE_NAME).write_text('{"no_overlap": "2 violations"}')


def poison_identity(shards, plan):
    path = shards / MANIFEST_NAME
    path.write_text(path.read_text().replace('"eos_id": 0', '"eos_id": 1'))


@pytest.mark.parametrize(
    ("poison", "which", "message"),
    [
        (poison_byte, 0, "train_000000.bin: expected SHA-256"),
        (poison_resealed_token, 0, "token 2: expected no EOS inside a document"),
        (poison_resealed_token, 1, "materialize|Materialize"),
        (poison_order, 1, "expected once in the plan, found 2 times"),
        (poison_file_away, 0, "length.npy"),
        (poison_index_away, 0, "train_index/index.json: expected a file of format"),
        (poison_index_beside, 0, "'extra_index/index.json': expected it among the manifest's files"),
        (poison_unlisted_shard, 0, "'train_000001.bin': expected it among the manifest's files"),
        (poison_split, 0, "expected a split of letters a to z"),
        (poison_unsealed, 0, "found none"),
        (poison_unsealed, 1, "found none"),
        (poison_quarantined, 0, "no_overlap: 2 violations"),
        (poison_quarantined, 1, "no_overlap: 2 violations"),
        (poison_identity, 0, "The manifest was edited"),
    ],
)
def test_each_poison_is_a_line_and_status_one(artifacts, capsys, poison, which, message):
    poison(*artifacts)
    assert main(["verify", str(artifacts[which])]) == 1
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert captured.err == ""
    assert any(part in line for line in lines for part in message.split("|"))
    assert main(["verify", str(artifacts[which]), "--json"]) == 1
    assert [f"FAIL {violation}" for violation in json.loads(capsys.readouterr().out)["violations"]] == lines


@pytest.mark.parametrize(
    ("poison", "which", "first"),
    [
        (poison_byte, 0, "FAIL 18 files have their sizes and hashes: /"),
        (poison_resealed_token, 0, "FAIL EOS at each document's end and nowhere else: train_000000.bin: token 2: "),
        (poison_order, 1, "FAIL 10 segments, each once: split train: segment "),
        (poison_index_away, 0, "FAIL 18 files have their sizes and hashes: /"),
        (poison_unsealed, 1, "FAIL sealed, with a manifest that can be read: "),
        (poison_quarantined, 1, "FAIL not quarantined: no_overlap: 2 violations (packing_plan "),
    ],
)
def test_a_violation_begins_with_the_law_and_ends_with_whose_it_is(artifacts, capsys, poison, which, first):
    poison(*artifacts)
    main(["verify", str(artifacts[which])])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(first)
    assert all(line.startswith("FAIL ") and line.endswith(")") for line in lines)


@pytest.fixture(scope="module")
def long_plan(tmp_path_factory):
    """A plan of two snapshots by first_fit, which holds open packs as well."""
    root = tmp_path_factory.mktemp("long")
    docs = [[1] * (1 + at * at * 7 % 5) for at in range(10_000)]
    shards = make_token_shards(root, {"train": docs}, token_dtype="uint16")
    artifact = make_plan(root, shards, max_seq_len=5, capacity=6, strategy="first_fit", buffer=3)
    assert SNAPSHOT_PACKS < load_plan(artifact).num_packs < 2 * SNAPSHOT_PACKS
    return artifact


def _drop_the_last(snapshots):
    del snapshots[-1]


def _forget_a_held_segment(snapshots):
    snapshots[1]["packs"][-1].pop()


def _read_on(snapshots):
    snapshots[1]["arrived"] += 1


def _read_too_far(snapshots):
    snapshots[1]["arrived"] = 10**6


def _close_the_packs_in_another_order(snapshots):
    snapshots[1]["packs"].reverse()


def _lose_a_key(snapshots):
    del snapshots[0]["waiting"]


@pytest.mark.parametrize(
    ("poison", "message"),
    [
        (_drop_the_last, "expected 2 snapshots of .* packs by first_fit, found 1"),
        (_forget_a_held_segment, "snapshot 1: expected the .* segments that were read and are in no pack before it"),
        (_read_on, "snapshot 1: expected the .* segments that were read"),
        (_read_too_far, "snapshot 1: expected .* read, found 1,000,000"),
        (_close_the_packs_in_another_order, "pack 4,096, replayed from snapshot 1: expected segments .* as stored"),
        (_lose_a_key, "cannot be recounted: KeyError"),
    ],
)
def test_a_poisoned_snapshot_is_a_line_and_status_one(long_plan, tmp_path, capsys, poison, message):
    copied = tmp_path / "packing_plan" / "-" / long_plan.name
    shutil.copytree(long_plan.parents[2], tmp_path, dirs_exist_ok=True)
    path = copied / "train" / "snapshots.json"
    stored = json.loads(path.read_text())
    poison(stored["snapshots"])
    path.write_text(json.dumps(stored))
    reseal(copied)
    assert main(["verify", str(copied)]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert re.match(f"FAIL [12] snapshots of the packer.*{message}", line)


@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
def test_snapshots_of_a_sound_plan_hold(tmp_path, capsys, strategy):
    docs = [[1] * (1 + at * at * 7 % 5) for at in range(6_000)]
    shards = make_token_shards(tmp_path, {"train": docs}, token_dtype="uint16")
    artifact = make_plan(tmp_path, shards, max_seq_len=5, capacity=5, strategy=strategy, buffer=4)
    assert main(["verify", str(artifact)]) == 0
    num_snapshots = load_plan(artifact).num_packs // SNAPSHOT_PACKS + 1 if strategy in STREAMING else 0
    assert f"train: {num_snapshots} snapshots of the packer" in capsys.readouterr().out


def test_a_package_is_verified_artifact_by_artifact(artifacts, tmp_path, capsys):
    make_package(tmp_path, *artifacts)
    assert main(["verify", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines} == {"token_shards", "packing_plan", "package:"}
    assert main(["inspect", str(tmp_path), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["package"]) == 2
    poison_order(*artifacts)
    (artifacts[0] / MANIFEST_NAME).unlink()
    assert main(["verify", str(tmp_path)]) == 1
    assert "sealed artifact" in capsys.readouterr().out


def test_a_package_without_artifacts_is_an_error(tmp_path, capsys):
    (tmp_path / "package.json").write_text("{}")
    assert main(["verify", str(tmp_path)]) == 1
    assert "expected a package with artifacts" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_a_path_that_is_not_there_is_one_line(tmp_path, capsys, command):
    assert main([command, str(tmp_path / "absent")]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1


class TestAnAssetsName:
    """It stands for what a run recorded last for the asset below the home."""

    @pytest.mark.parametrize("command", ["inspect", "verify"])
    def test_it_is_the_latest_artifact(self, clean, command, capsys, monkeypatch, tmp_path):
        monkeypatch.setenv("CORPUSMILL_HOME", str(clean.home))
        monkeypatch.chdir(tmp_path)
        for asset in ("lsh_clusters", "packing_plan", "tokenizer"):
            assert main([command, str(clean.folder(asset)), "--json"]) == 0
            by_path = capsys.readouterr().out
            assert main([command, asset, "--json"]) == 0
            assert capsys.readouterr().out == by_path

    def test_a_folder_of_that_name_is_taken_as_it_is(self, clean, capsys, monkeypatch, tmp_path):
        monkeypatch.setenv("CORPUSMILL_HOME", str(clean.home))
        monkeypatch.chdir(tmp_path)
        (tmp_path / "tokenizer").mkdir()
        (tmp_path / "tokenizer" / "rows.parquet").write_bytes(b"12345")
        seal(tmp_path / "tokenizer", "raw_row_groups", {}, {}, {"num_documents": 7})
        assert main(["inspect", "tokenizer", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["asset"] == "raw_row_groups"

    @pytest.mark.parametrize("record", [None, b"{", b"[]", b'{"ref": {}}', b'{"ref": 1}'])
    def test_a_name_without_an_artifact_says_what_to_write(self, record, capsys, monkeypatch, tmp_path):
        monkeypatch.delenv("CORPUSMILL_HOME", raising=False)
        monkeypatch.chdir(tmp_path)
        if record is not None:
            path = tmp_path / ".corpusmill" / "_references" / "lsh_clusters" / "latest.json"
            path.parent.mkdir(parents=True)
            path.write_bytes(record)
        assert main(["inspect", "lsh_clusters"]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(
            "FormatError: lsh_clusters: expected the folder of an artifact or a package, or the name"
        )
        assert str(tmp_path / ".corpusmill") in line
        assert "set CORPUSMILL_HOME" in line

    def test_object_storage_is_refused_as_home(self, capsys, monkeypatch, tmp_path):
        monkeypatch.setenv("CORPUSMILL_HOME", "s3://bucket/mill")
        monkeypatch.chdir(tmp_path)
        assert main(["inspect", "lsh_clusters"]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("RecipeError: CORPUSMILL_HOME: expected a local folder, found 's3://bucket/mill'.")
