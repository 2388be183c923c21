"""Exports: what another trainer reads is the shards' documents; whole or not at all; only what may be read."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tracemalloc
from pathlib import Path

import naive_exports
import numpy as np
import pytest
import small_corpus
from test_inspect_verify import on_a_training_box
from tiny_artifacts import make_package, make_plan, make_token_shards, seal, tiny_fingerprint

from pipeline_assets.__main__ import main as pipeline_main
from training_io import export_formats, exports
from training_io.__main__ import main
from training_io.errors import FormatError, RecipeError
from training_io.exports import FORMATS, export_shards
from training_io.manifest import MANIFEST_NAME, QUARANTINE_NAME, load_manifest
from training_io.verification import verify

REPOSITORY = Path(__file__).resolve().parents[1]
EOS = 7
LENGTHS = [6, 4, 3, 2, 20, 1, 300, 9]
DOCUMENTS = {
    "train": [[(17 * d + 31 * p) % 60_000 + 8 for p in range(length)] for d, length in enumerate(LENGTHS)],
    "validation": [[65_535, 8], [9]],
    "test": [],
}
FORMATS_OF = [(name, dtype) for name in FORMATS for dtype in ("uint16", "uint32") if (name, dtype) != ("nanogpt", "uint32")]  # fmt: skip


def shards_of(root, documents=None, dtype="uint16", max_shard_tokens=40, **more):
    return make_token_shards(
        root, documents or DOCUMENTS, EOS, token_dtype=dtype, max_shard_tokens=max_shard_tokens, **more
    )


def expected(split):
    ids = [hashlib.sha256(repr(document).encode()).hexdigest() for document in DOCUMENTS[split]]
    return [(doc_id, [*document, EOS]) for doc_id, document in zip(ids, DOCUMENTS[split], strict=True)]


def joined(documents):
    return [token for _, tokens in documents for token in tokens]


def files_in(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(("name", "dtype"), FORMATS_OF)
@pytest.mark.parametrize(("block_tokens", "mds_bytes"), [(1 << 20, 1 << 26), (5, 300)])
def test_a_reader_gets_every_document_in_order_with_its_eos(
    tmp_path, monkeypatch, name, dtype, block_tokens, mds_bytes
):
    monkeypatch.setattr(export_formats, "BLOCK_TOKENS", block_tokens)
    monkeypatch.setattr(export_formats, "MDS_SHARD_BYTES", mds_bytes)
    artifact = shards_of(tmp_path, dtype=dtype)
    assert len(list(artifact.glob("train_*.bin"))) > 2
    manifest = export_shards(artifact, name, tmp_path / "out" / "new")
    for split in ("train", "validation"):
        found = naive_exports.READERS[name](tmp_path / "out" / "new", split)
        assert joined(found) == joined(expected(split))
        if name not in ("nanogpt", "llm.c"):
            assert [tokens for _, tokens in found] == [tokens for _, tokens in expected(split)]
        if name in ("document-cache", "datasets", "mds"):
            assert [doc_id for doc_id, _ in found] == [doc_id for doc_id, _ in expected(split)]
    assert manifest.counts["splits"]["train"] == {"documents": len(LENGTHS), "tokens": sum(LENGTHS) + len(LENGTHS)}
    assert manifest.counts["splits"]["test"] == {"documents": 0, "tokens": 0}
    assert not [file for file in manifest.files if file.startswith("test")]


def test_the_cuts_were_really_made(tmp_path, monkeypatch):
    monkeypatch.setattr(export_formats, "MDS_SHARD_BYTES", 300)
    export_shards(shards_of(tmp_path), "mds", tmp_path / "mds")
    shards = json.loads((tmp_path / "mds" / "train" / "index.json").read_text())["shards"]
    assert [shard["samples"] for shard in shards] == [3, 2, 1, 1, 1]


def real_reader(module):
    """A reader of someone else's, where it is installed; none of them is small enough for the test environment."""
    return pytest.importorskip(module, reason=f"{module.partition('.')[0]} is not installed", exc_type=ImportError)


@pytest.mark.filterwarnings("ignore")  # of files that they leave open and libraries that they miss
@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
class TestRealReaders:
    def test_datasets(self, tmp_path, dtype):
        datasets = real_reader("datasets")
        export_shards(shards_of(tmp_path, dtype=dtype), "datasets", tmp_path / "out")
        opened = datasets.load_from_disk(str(tmp_path / "out"))
        assert set(opened) == {"train", "validation"}
        for split, rows in opened.items():
            assert [(row["doc_id"], row["input_ids"]) for row in rows] == expected(split)

    def test_megatron(self, tmp_path, dtype):
        indexed_dataset = real_reader("megatron.core.datasets.indexed_dataset")
        export_shards(shards_of(tmp_path, dtype=dtype), "megatron", tmp_path / "out")
        for split in ("train", "validation"):
            opened = indexed_dataset.IndexedDataset(str(tmp_path / "out" / split))
            assert [opened[number].tolist() for number in range(len(opened))] == [ids for _, ids in expected(split)]
            assert opened.document_indices.tolist() == list(range(len(opened) + 1))

    def test_mds(self, tmp_path, dtype, monkeypatch):
        streaming = real_reader("streaming")
        monkeypatch.setattr(export_formats, "MDS_SHARD_BYTES", 300)
        export_shards(shards_of(tmp_path, dtype=dtype), "mds", tmp_path / "out")
        for split in ("train", "validation"):
            opened = streaming.LocalDataset(local=str(tmp_path / "out"), split=split)
            samples = [opened[number] for number in range(len(opened))]
            assert [(sample["doc_id"], sample["tokens"].tolist()) for sample in samples] == expected(split)
            assert {sample["tokens"].dtype.name for sample in samples} == {dtype}


def test_nanogpt_maps_its_files(tmp_path):
    export_shards(shards_of(tmp_path), "nanogpt", tmp_path / "out")
    for split, file in (("train", "train.bin"), ("validation", "val.bin")):
        mapped = np.memmap(tmp_path / "out" / file, dtype=np.uint16, mode="r")
        assert mapped.tolist() == joined(expected(split))


@pytest.mark.parametrize("name", FORMATS)
def test_the_same_shards_give_the_same_bytes_and_another_manifest_for_another_split(tmp_path, name):
    artifact = shards_of(tmp_path)
    for output in ("one", "two"):
        export_shards(artifact, name, tmp_path / output)
    assert files_in(tmp_path / "one") == files_in(tmp_path / "two")
    only = export_shards(artifact, name, tmp_path / "three", ["validation", "validation"])
    assert list(only.counts["splits"]) == ["validation"]
    assert only.identity != load_manifest(tmp_path / "one").identity


def test_the_manifest_names_where_it_comes_from_and_every_file(tmp_path):
    artifact = shards_of(tmp_path)
    manifest = export_shards(artifact, "document-cache", tmp_path / "out")
    shards = load_manifest(artifact)
    assert manifest.inputs["token_shards"] == {"identity": shards.identity, "digest": shards.digest}
    assert len(manifest.inputs["tokenizer"]) == 64
    assert manifest.counts["eos_id"] == EOS
    written = files_in(tmp_path / "out")
    assert set(written) == {*manifest.files, MANIFEST_NAME}
    assert {name: hashlib.sha256(written[name]).hexdigest() for name in manifest.files} == {
        name: entry["sha256"] for name, entry in manifest.files.items()
    }
    assert load_manifest(tmp_path / "out") == manifest
    assert not verify(tmp_path / "out").violations
    (tmp_path / "out" / "train.bin").write_bytes(written["train.bin"][:-1] + b"\1")
    assert "train.bin: expected SHA-256" in verify(tmp_path / "out").violations[0]


def test_a_package_gives_what_its_shards_give(tmp_path):
    root = tmp_path / "package"
    artifact = shards_of(root, fingerprint=tiny_fingerprint())
    plan = make_plan(root, artifact)
    make_package(root, artifact, plan)
    export_shards(root, "megatron", tmp_path / "from_package")
    export_shards(artifact, "megatron", tmp_path / "from_shards")
    assert files_in(tmp_path / "from_package") == files_in(tmp_path / "from_shards")
    with pytest.raises(FormatError, match="expected a token_shards artifact or a package with one, found packing_plan"):
        export_shards(plan, "megatron", tmp_path / "from_plan")


class TestRefused:
    def refused(self, error, message, artifact, tmp_path, name="megatron", splits=()):
        before = sorted(path.name for path in tmp_path.iterdir())
        with pytest.raises(error, match=message):
            export_shards(artifact, name, tmp_path / "out", splits)
        assert sorted(path.name for path in tmp_path.iterdir()) == before

    def test_unsealed_quarantined_and_damaged_shards(self, tmp_path):
        artifact = shards_of(tmp_path)
        shard = artifact / "train_000001.bin"
        whole = shard.read_bytes()
        shard.write_bytes(whole[:-2] + b"\1\1")
        self.refused(FormatError, r"train_000001\.bin: expected SHA-256", artifact, tmp_path)
        export_shards(artifact, "megatron", tmp_path / "validation", ["validation"])
        shard.write_bytes(whole)
        (artifact / QUARANTINE_NAME).write_text('{"shards_end_every_document_once": "2 violations"}')
        self.refused(FormatError, "quarantined by a failed blocking check", artifact, tmp_path)
        (artifact / QUARANTINE_NAME).unlink()
        (artifact / MANIFEST_NAME).unlink()
        self.refused(FormatError, "expected a sealed artifact", artifact, tmp_path)

    def test_unknown_splits_and_formats_and_nothing_to_export(self, tmp_path):
        artifact = shards_of(tmp_path)
        self.refused(RecipeError, "--split: expected splits of test, train, validation, found dev", artifact, tmp_path, splits=["train", "dev"])  # fmt: skip
        self.refused(RecipeError, "expected documents to export, found none in test", artifact, tmp_path, splits=["test"])  # fmt: skip
        self.refused(RecipeError, "expected a format of document-cache, .*, found 'parquet'", artifact, tmp_path, name="parquet")  # fmt: skip

    def test_ids_that_the_format_cannot_hold_wrap_nowhere(self, tmp_path):
        artifact = shards_of(tmp_path, {"train": [[1, 2], [3, 2**31]]}, dtype="uint32")
        self.refused(FormatError, r"expected ids of at most 2,147,483,647, found 2,147,483,648", artifact, tmp_path)
        export_shards(artifact, "document-cache", tmp_path / "cache")
        assert naive_exports.document_cache(tmp_path / "cache", "train")[1][1] == [3, 2**31, EOS]

    def test_ids_of_32_bits_for_nanogpt(self, tmp_path):
        artifact = shards_of(tmp_path, dtype="uint32")
        self.refused(FormatError, "nanogpt: expected ids of 16 bits, .* found uint32", artifact, tmp_path, "nanogpt")

    def test_a_sample_beyond_the_offsets_of_mds(self, tmp_path, monkeypatch):
        monkeypatch.setattr(export_formats, "MAX_MDS_SHARD_BYTES", 800)
        self.refused(FormatError, "mds: document [0-9a-f]{64}: expected a sample of at most 800 bytes", shards_of(tmp_path), tmp_path, "mds")  # fmt: skip

    def test_a_folder_that_holds_something(self, tmp_path):
        artifact = shards_of(tmp_path)
        (tmp_path / "out").mkdir()
        export_shards(artifact, "nanogpt", tmp_path / "out")
        written = files_in(tmp_path / "out")
        self.refused(RecipeError, "--output: expected a folder that is empty", artifact, tmp_path)
        assert files_in(tmp_path / "out") == written

    def test_a_folder_that_another_export_filled_meanwhile(self, tmp_path, monkeypatch):
        def write_while_another_finishes(splits, folder):
            export_formats.write_nanogpt(splits, folder)
            (tmp_path / "out").mkdir()
            (tmp_path / "out" / "other.bin").write_bytes(b"other")

        monkeypatch.setitem(exports.FORMATS, "nanogpt", write_while_another_finishes)
        with pytest.raises(RecipeError, match="--output: expected a folder that is empty"):
            export_shards(shards_of(tmp_path), "nanogpt", tmp_path / "out")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "token_shards"]
        assert files_in(tmp_path / "out") == {"other.bin": b"other"}


class TestTheManifestSaysWhatThereIs:
    def test_a_listed_index_that_is_gone_drops_no_split(self, tmp_path):
        artifact = shards_of(tmp_path)
        (artifact / "train_index" / "index.json").unlink()
        with pytest.raises(FormatError, match=r"train_index/index\.json: expected [0-9,]+ bytes, found no file"):
            export_shards(artifact, "nanogpt", tmp_path / "out")
        shutil.rmtree(artifact / "train_index")
        with pytest.raises(FormatError, match=r"train_index/.*: expected [0-9,]+ bytes, found no file"):
            export_shards(artifact, "nanogpt", tmp_path / "out")
        assert list(export_shards(artifact, "nanogpt", tmp_path / "out", ["validation"]).counts["splits"]) == ["validation"]  # fmt: skip

    def test_an_index_beside_the_listed_ones_is_no_split(self, tmp_path):
        artifact = shards_of(tmp_path)
        shutil.copytree(artifact / "train_index", artifact / "extra_index")
        with pytest.raises(RecipeError, match="expected splits of test, train, validation, found extra"):
            export_shards(artifact, "nanogpt", tmp_path / "out", ["extra"])
        exported = export_shards(artifact, "nanogpt", tmp_path / "out")
        assert list(exported.counts["splits"]) == ["test", "train", "validation"]

    @pytest.mark.parametrize("file", ["train_000002.bin", "train_index/length.npy"])
    def test_a_file_that_is_read_but_not_listed(self, tmp_path, file):
        artifact = shards_of(tmp_path)
        whole = (artifact / file).read_bytes()
        (artifact / file).unlink()
        seal_again(artifact)
        (artifact / file).write_bytes(whole)
        with pytest.raises(FormatError, match=f"expected splits whose files the manifest lists, found {file} unlisted"):
            export_shards(artifact, "nanogpt", tmp_path / "out")


def seal_again(artifact):
    manifest = load_manifest(artifact)
    seal(artifact, "token_shards", dict(manifest.inputs), dict(manifest.parameters), dict(manifest.counts))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("split", ["../../escaped/train", "{absolute}/escaped/train", "validation"])
def test_a_sealed_index_from_elsewhere_writes_nowhere_else(tmp_path, name, split):
    artifact = shards_of(tmp_path / "shards")
    (tmp_path / "escaped").mkdir()
    change_index(artifact, split=split.format(absolute=tmp_path))
    with pytest.raises(FormatError, match="expected a split of letters a to z"):
        export_shards(artifact, name, tmp_path / "exports" / "out")
    assert not list((tmp_path / "escaped").iterdir())
    assert not (tmp_path / "exports").exists()


def test_a_sealed_index_from_elsewhere_reads_nowhere_else(tmp_path):
    artifact = shards_of(tmp_path / "shards", max_shard_tokens=1_000)
    secret = tmp_path / "secret.bin"
    secret.write_bytes((artifact / "train_000000.bin").read_bytes())
    for file in (str(secret), os.path.relpath(secret, artifact)):
        change_index(artifact, shards=[{"file": file, "num_tokens": sum(LENGTHS) + len(LENGTHS)}])
        with pytest.raises(FormatError, match=r"expected shards train_000000\.bin and on, found "):
            export_shards(artifact, "nanogpt", tmp_path / "out")
        assert any("expected shards train_000000.bin" in line for line in verify(artifact).violations)


def change_index(artifact, **changes):
    path = artifact / "train_index" / "index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    seal_again(artifact)


def test_a_killed_export_leaves_no_folder_of_its_name(tmp_path):
    artifact = shards_of(tmp_path)
    code = (
        "import os, sys; from training_io.__main__ import main; os.fsync = lambda file: os._exit(9); main(sys.argv[1:])"
    )
    arguments = ["export", "nanogpt", str(artifact), "--output", str(tmp_path / "out")]
    killed = subprocess.run([sys.executable, "-c", code, *arguments], cwd=REPOSITORY, check=False)
    assert killed.returncode == 9
    assert [path.name for path in tmp_path.glob(".unfinished-out-*")]
    assert not (tmp_path / "out").exists()
    assert main(arguments) == 0


@pytest.mark.parametrize("name", FORMATS)
def test_memory_does_not_grow_with_the_shards(tmp_path, monkeypatch, name):
    monkeypatch.setattr(export_formats, "BLOCK_TOKENS", 4_096)
    documents = {"train": [[8] * 3_000 for _ in range(300)]}
    artifact = shards_of(tmp_path, documents, max_shard_tokens=150_000)
    assert sum(path.stat().st_size for path in artifact.glob("train_*.bin")) > 1_800_000
    tracemalloc.start()
    try:
        export_shards(artifact, name, tmp_path / "out")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 600_000  # of which 256 KiB are the buffer that hashes files


class TestCommand:
    def test_it_prints_counts_or_the_manifest(self, tmp_path, capsys):
        artifact = shards_of(tmp_path)
        assert (
            main(["export", "llm.c", str(artifact), "--output", str(tmp_path / "a"), "--split", "train", "test"]) == 0
        )
        assert capsys.readouterr().out.splitlines() == [
            "test: 0 documents, 0 tokens",
            "train: 8 documents, 353 tokens",
            f"llm.c: 4 files, 4,802 bytes in {tmp_path / 'a'}",
        ]
        assert main(["export", "llm.c", str(artifact), "--output", str(tmp_path / "b"), "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == json.loads((tmp_path / "b" / MANIFEST_NAME).read_text())

    def test_an_error_is_one_line_and_status_1(self, tmp_path, capsys):
        artifact = shards_of(tmp_path)
        (tmp_path / "file").write_bytes(b"")
        assert main(["export", "llm.c", str(artifact), "--output", str(tmp_path)]) == 1
        assert main(["export", "llm.c", str(artifact), "--output", str(tmp_path / "file" / "below")]) == 1
        captured = capsys.readouterr()
        assert captured.out == ""
        first, second = captured.err.splitlines()
        assert first.startswith("RecipeError: --output: expected a folder that is empty")
        assert second.startswith("FileExistsError: ")

    @pytest.mark.parametrize("output", ["{root}/loop", "{root}/loop/below", "~no-such-user/out", "{root}/nul\0"])
    def test_an_output_that_is_no_path_is_one_line(self, tmp_path, capsys, output):
        artifact = shards_of(tmp_path)
        (tmp_path / "loop").symlink_to("loop")
        assert main(["export", "llm.c", str(artifact), "--output", output.format(root=tmp_path)]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(("RecipeError: --output: expected a folder", "OSError: "))
        assert sorted(path.name for path in tmp_path.iterdir()) == ["loop", "token_shards"]

    def test_an_output_inside_an_artifact_would_break_it(self, tmp_path, capsys):
        artifact = shards_of(tmp_path)
        (tmp_path / "link").symlink_to(artifact / "train_index")
        for output in (artifact / "out", artifact / "new" / "out", tmp_path / "link" / "out"):
            assert main(["export", "llm.c", str(artifact), "--output", str(output)]) == 1
            assert "expected a folder outside every artifact" in capsys.readouterr().err
        assert not verify(artifact).violations
        assert not (artifact / "new").exists()

    def test_a_mount_point_is_refused_before_anything_is_written(self, tmp_path, monkeypatch):
        artifact = shards_of(tmp_path)
        (tmp_path / "volume").mkdir()
        monkeypatch.setattr(Path, "is_mount", lambda path: path == tmp_path / "volume")  # mounting needs privileges
        with pytest.raises(RecipeError, match=r"found the mount point .*/volume\. Name a folder inside it"):
            export_shards(artifact, "llm.c", tmp_path / "volume")
        assert export_shards(artifact, "llm.c", tmp_path / "volume" / "out").files

    def test_a_training_box_needs_numpy_alone_and_pyarrow_for_arrow(self, tmp_path):
        artifact = shards_of(tmp_path)
        for name in FORMATS:
            done = on_a_training_box("export", name, artifact, "--output", tmp_path / name)
            if name == "datasets":
                assert done.returncode == 1
                assert "expected pyarrow to write Arrow files, found it not installed" in done.stderr
                assert not (tmp_path / name).exists()
            else:
                assert (done.returncode, done.stderr) == (0, "")

    def test_the_pipeline_finds_the_latest_shards_of_the_recipe(self, clean, tmp_path, monkeypatch, capsys):
        environment = small_corpus.command_environment(clean.recipe, clean.home)
        for variable in ("CORPUSMILL_RECIPE", "CORPUSMILL_HOME"):
            monkeypatch.setitem(os.environ, variable, environment[variable])
        shards = clean.folder("token_shards")
        assert pipeline_main(["export", "mds", "--output", str(tmp_path / "latest")]) == 0
        assert pipeline_main(["export", "mds", str(shards), "--output", str(tmp_path / "named")]) == 0
        assert files_in(tmp_path / "latest") == files_in(tmp_path / "named")
        tokens = clean.refs["token_shards"].counts["tokens"]
        exported = load_manifest(tmp_path / "latest")
        assert exported.counts["tokens"] == tokens
        assert exported.counts["vocab_size"] == clean.refs["token_shards"].counts["vocab_size"]
        monkeypatch.setenv("CORPUSMILL_HOME", str(tmp_path / "empty"))
        capsys.readouterr()
        assert pipeline_main(["export", "mds", "--output", str(tmp_path / "none")]) == 1
        assert "Materialize token_shards first" in capsys.readouterr().err
        assert not (tmp_path / "empty").exists()
