"""A pass stands for the bytes, recipe and code it was counted with, in runs that verified those bytes; else checks count."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import small_corpus
from small_corpus import CHECK_NAMES, ROOT, Built, evaluations, judged, materialize, run_checks, write_recipe

from asset_checks.remembered import recall, remember
from pipeline_assets.basis import PACKAGES, basis_of, code_digest
from pipeline_assets.stripes import units_in
from pipeline_assets.verdict_records import VERDICTS_FOLDER
from training_io.gpu_io_manager import device_type, may_have_gpu


def counted_in(result) -> dict[str, str]:
    return {name: evaluation.metadata["counted_in"].value for name, evaluation in evaluations(result).items()}


def told(result) -> dict[str, tuple]:
    """All that a person reads of each check, but for the run that counted it."""
    found = {}
    for name, evaluation in evaluations(result).items():
        metadata = {key: str(value) for key, value in evaluation.metadata.items() if key != "counted_in"}
        found[name] = (evaluation.passed, evaluation.severity, evaluation.description, metadata)
    return found


def remembered_by(built: Built) -> int:
    """How many passes a home remembers."""
    return len(list((built.home / VERDICTS_FOLDER).rglob("*.json")))


def test_a_run_over_unchanged_assets_shows_the_passes_of_the_run_that_counted_them(clean: Built, copy: Built) -> None:
    first, second = clean.result, materialize(copy.recipe, copy.home)
    assert first
    passed = {name for name, evaluation in evaluations(first).items() if evaluation.passed}
    assert counted_in(first) == dict.fromkeys(CHECK_NAMES, first.run_id)
    assert {name for name, run_id in counted_in(second).items() if run_id == first.run_id} == passed
    assert len(passed) >= len(CHECK_NAMES) - 1
    assert told(second) == told(first)


def test_a_check_by_itself_counts(copy: Built) -> None:
    assert remembered_by(copy) >= len(CHECK_NAMES) - 1
    result = run_checks(copy.recipe, copy.home, *CHECK_NAMES)
    assert counted_in(result) == dict.fromkeys(CHECK_NAMES, result.run_id)


def test_a_failure_drops_the_pass_so_that_the_rebuilt_asset_is_counted(copy: Built) -> None:
    name = "doc_ids_are_hashes_of_texts"
    materialize(copy.recipe, copy.home, "raw_row_groups")
    (unit, *_) = units_in(copy.stage, copy.refs["raw_row_groups"])
    rows = copy.stage.store.folder(unit) / "rows.parquet"
    whole = rows.read_bytes()
    other = small_corpus.sentences(9_999)
    table = pq.read_table(rows)
    texts = [other, *table.column("text").to_pylist()[1:]]
    at = table.schema.get_field_index("text")
    pq.write_table(table.set_column(at, table.schema.field(at), pa.array(texts, table.schema.field(at).type)), rows)
    assert not evaluations(run_checks(copy.recipe, copy.home, name))[name].passed
    again = materialize(copy.recipe, copy.home, "raw_row_groups")
    assert evaluations(again)[name].passed
    assert rows.read_bytes() == whole
    assert counted_in(again)[name] == again.run_id


def test_a_plan_is_counted_when_its_shards_were_not_verified_in_the_run(copy: Built) -> None:
    everything = [name for name in small_corpus.STAGES if name != small_corpus.TRAINING]
    first = materialize(copy.recipe, copy.home, *everything)
    assert first.success
    shards = sorted(copy.folder("token_shards").glob("*.bin"))
    for shard in shards:
        shard.write_bytes(shard.read_bytes()[:-2])
    alone = materialize(copy.recipe, copy.home, "packing_plan")
    assert not alone.success
    assert set(counted_in(alone).values()) <= {alone.run_id}


def test_a_changed_recipe_value_is_counted_with(copy: Built) -> None:
    materialize(copy.recipe, copy.home, "raw_row_groups")
    other = write_recipe(copy.recipe.parent, {"training.steps": 2}, "other.yaml")
    result = materialize(other, copy.home, "raw_row_groups")
    assert set(counted_in(result).values()) == {result.run_id}


def test_what_did_not_pass_is_counted_in_every_run(copy: Built) -> None:
    recipe = write_recipe(copy.recipe.parent, small_corpus.WINDOWS, "windows.yaml")
    first = materialize(recipe, copy.home)
    second = materialize(recipe, copy.home)
    name = "no_token_sees_another_document"
    assert not evaluations(second)[name].passed
    assert counted_in(second)[name] == second.run_id
    assert counted_in(second)["every_pair_comes_exactly_once"] == first.run_id


def test_a_verdict_is_recalled_on_its_own_basis_only(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "law.json"
    assert recall(path, "basis") is None
    remember(path, "basis", {"found": "0 violations"})
    assert recall(path, "basis") == {"found": "0 violations"}
    assert recall(path, "another") is None
    for damaged in ("", "[]", '{"basis": "basis"}', '{"basis": "basis", "verdict": 3}', path.read_text()[:-9]):
        path.write_text(damaged)
        assert recall(path, "basis") is None, damaged


def test_a_basis_covers_each_digest_each_recipe_value_and_each_source_file(tmp_path: Path) -> None:
    bases = {
        basis_of({"raw": "1"}, {"seed": 1}),
        basis_of({"raw": "2"}, {"seed": 1}),
        basis_of({"raw": "1", "tokens": "1"}, {"seed": 1}),
        basis_of({"raw": "1"}, {"seed": 2}),
        basis_of({"raw": "1", "varlen_training_run": "1"}, {"seed": 1}),
    }
    assert len(bases) == 5
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / "before" / package)
    digests = {code_digest(ROOT), code_digest(tmp_path / "before")}
    assert len(digests) == 1
    sources = sorted(path.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    assert Path("pipeline_assets/transforms/lsh.py") in sources
    for path in (tmp_path / "before" / source for source in sources):
        content = path.read_bytes()
        path.write_bytes(content + b"\n")
        digests.add(code_digest(tmp_path / "before"))
        path.write_bytes(content)
    assert len(digests) == 1 + len(sources)


def test_every_verdict_survives_being_written_down(clean: Built) -> None:
    for name in CHECK_NAMES:
        verdict = judged(name, clean)
        plain = {**vars(verdict), "numbers": dict(verdict.numbers), "examples": list(verdict.examples)}
        assert json.loads(json.dumps(plain)) == plain, name


@pytest.mark.skipif(may_have_gpu(), reason="this machine has a GPU driver: torch must be asked")
def test_no_torch_is_loaded_to_learn_that_there_is_no_gpu() -> None:
    code = """if True:
        import sys
        from training_io.gpu_io_manager import device_type
        assert device_type("auto") == device_type("cpu") == "cpu"
        assert "torch" not in sys.modules"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
    torch = pytest.importorskip("torch")
    assert not torch.cuda.is_available()


def test_a_device_that_is_not_here_is_refused_where_it_is_resolved() -> None:
    with pytest.raises(small_corpus.CorpusmillError, match="device"):
        device_type("cuda:99")
