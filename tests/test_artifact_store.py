import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline_assets.references import PipelineResource
from resources.artifact_store import ArtifactRef, ArtifactStore, link_or_copy, unit_inputs
from training_io.errors import FormatError, RecipeError
from training_io.home import home_folder
from training_io.manifest import MANIFEST_NAME, QUARANTINE_NAME, RUN_NAME, artifact_identity

REPOSITORY = Path(__file__).resolve().parents[1]
DEAD_PROCESS = 2**22 + 1  # above the largest process id of Linux


def write(folder):
    (folder / "part").mkdir()
    (folder / "part" / "a.bin").write_bytes(b"a" * 1_000)
    (folder / "b.txt").write_text("b")
    return {"documents": 2}


def refuse_to_write(folder):
    raise AssertionError(f"{folder} was built again")


def materialize(store, write=write, **changes):
    arguments = {"asset": "thing", "unit": "unit-0", "inputs": {"a": 1}, "parameters": {"b": [2]}, "version": 1}
    return store.materialize(**{**arguments, **changes}, write=write)


@pytest.fixture
def store(tmp_path):
    return ArtifactStore(tmp_path / "home")


def files_in(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != RUN_NAME
    }


def test_what_a_writer_says_of_its_run_joins_the_run_and_is_no_content(store):
    def write_and_tell(folder):
        (folder / RUN_NAME).write_text(json.dumps({"source": {"requests": 3}, "host": "elsewhere"}))
        return write(folder)

    built, plain = materialize(store, write_and_tell), materialize(store, unit="unit-1")
    folder, manifest = store.open(built)
    run = json.loads((folder / RUN_NAME).read_bytes())
    assert (run["source"], run["host"]) == ({"requests": 3}, socket.gethostname())
    assert set(run) == {"source", "started", "seconds", "host"}
    assert set(manifest.files) == {"part/a.bin", "b.txt"}
    assert built.digest == plain.digest


def test_an_artifact_is_built_once_and_then_reused(store):
    built = materialize(store)
    assert (built.outcome, built.counts, built.warnings) == ("built", {"documents": 2}, ())
    folder, manifest = store.open(built)
    assert folder == store.root / "thing" / "unit-0" / artifact_identity("thing", "unit-0", {"a": 1}, {"b": [2]}, 1)
    assert set(manifest.files) == {"part/a.bin", "b.txt"}
    assert json.loads((folder / RUN_NAME).read_bytes())["host"] == socket.gethostname()
    reused = materialize(store, refuse_to_write)
    assert reused.outcome == "reused"
    assert (reused.identity, reused.digest, reused.counts) == (built.identity, built.digest, built.counts)


def test_one_identity_gives_the_same_bytes_anywhere(tmp_path):
    stores = [ArtifactStore(tmp_path / name) for name in ("here", "there")]
    refs = [materialize(store) for store in stores]
    here, there = [files_in(store.folder(ref)) for store, ref in zip(stores, refs, strict=True)]
    assert here == there
    assert len(here) == 3


def flip_a_byte(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def edit_counts(path):
    path.write_text(path.read_text().replace('"documents": 2', '"documents": 3'))


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("part/a.bin", lambda path: path.write_bytes(path.read_bytes()[:-1])),
        ("part/a.bin", lambda path: path.write_bytes(path.read_bytes() + b"a")),
        ("part/a.bin", flip_a_byte),
        ("part/a.bin", Path.unlink),
        ("part", shutil.rmtree),
        ("b.txt", lambda path: path.write_bytes(b"")),
        (MANIFEST_NAME, Path.unlink),
        (MANIFEST_NAME, lambda path: path.write_bytes(b"")),
        (MANIFEST_NAME, lambda path: path.write_bytes(path.read_bytes()[:-9])),
        (MANIFEST_NAME, flip_a_byte),
        (MANIFEST_NAME, edit_counts),
        (QUARANTINE_NAME, lambda path: path.write_bytes(b"{")),
    ],
)
def test_damage_is_found_and_rebuilt_with_a_warning_that_names_the_file(store, name, damage):
    before = materialize(store)
    folder = store.folder(before)
    whole = files_in(folder)
    damage(folder / name)
    assert files_in(folder) != whole
    rebuilt = materialize(store)
    assert rebuilt.outcome == "rebuilt"
    assert any(name in warning for warning in rebuilt.warnings), rebuilt.warnings
    assert files_in(folder) == whole
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    assert materialize(store, refuse_to_write).outcome == "reused"


def test_a_reader_refuses_an_artifact_that_was_rebuilt_with_other_bytes(store):
    before = materialize(store)
    (store.folder(before) / "b.txt").unlink()

    def write_something_else(folder):
        (folder / "c.txt").write_text("c")
        return {}

    assert materialize(store, write_something_else).digest != before.digest
    with pytest.raises(FormatError, match=r"rebuilt with other bytes; materialize what is downstream of thing"):
        store.open(before)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_exception_in_write_leaves_nothing(store, error):
    def fail(folder):
        write(folder)
        raise error

    with pytest.raises(error):
        materialize(store, fail)
    assert list((store.root / "thing" / "unit-0").iterdir()) == []
    assert materialize(store).outcome == "built"


@pytest.mark.parametrize("counts", [{"loss": float("nan")}, {"path": Path("x")}])
def test_counts_that_are_no_plain_values_leave_nothing(store, counts):
    with pytest.raises((ValueError, TypeError)):
        materialize(store, lambda folder: counts)
    assert list((store.root / "thing" / "unit-0").iterdir()) == []


def test_a_failed_rebuild_keeps_what_was_there(store):
    ref = materialize(store)
    (store.folder(ref) / "b.txt").write_text("damaged")

    def fail(folder):
        raise ValueError("no space left")

    with pytest.raises(ValueError, match="no space left"):
        materialize(store, fail)
    assert (store.folder(ref) / "b.txt").read_text() == "damaged"


def test_quarantine_refuses_readers_and_a_rebuild_clears_it(store):
    ref = materialize(store)
    store.quarantine(ref, "every_pair_once", "3 pairs are missing")
    with pytest.raises(FormatError, match=r"every_pair_once: 3 pairs are missing.*Materialize thing again"):
        store.open(ref)
    store.open(ref, allow_quarantined=True)
    rebuilt = materialize(store)
    assert rebuilt.outcome == "rebuilt"
    assert "quarantined by every_pair_once: 3 pairs are missing" in rebuilt.warnings[0]
    store.open(rebuilt)


def test_each_check_holds_and_lifts_for_itself(store):
    ref = materialize(store)
    marker = store.folder(ref) / QUARANTINE_NAME
    store.quarantine(ref, "one", "first")
    store.quarantine(ref, "two", "second")
    store.quarantine(ref, "one", "again")
    assert json.loads(marker.read_bytes()) == {"one": "again", "two": "second"}
    store.lift(ref, "three")
    store.lift(ref, "one")
    with pytest.raises(FormatError, match="two: second"):
        store.open(ref)
    store.lift(ref, "two")
    assert not marker.exists()
    store.open(ref)
    assert materialize(store, refuse_to_write).outcome == "reused"
    store.lift(ref, "two")


def sealed_with_units(store):
    units = [materialize(store, unit=name) for name in ("unit-0", "unit-1")]
    plan = materialize(store, unit="plan")
    inputs = {"units": unit_inputs(units), "plans": unit_inputs([plan])}
    return [*units, plan], materialize(store, lambda folder: {}, unit="-", inputs=inputs)


def test_a_check_that_fails_says_so_even_where_something_else_holds_the_artifact_back(store):
    ref = materialize(store)
    marker = store.folder(ref) / QUARANTINE_NAME
    marker.mkdir()
    (marker / "file").touch()
    store.quarantine(ref, "one", "first")
    assert json.loads(marker.read_bytes()).keys() == {QUARANTINE_NAME, "one"}
    store.lift(ref, "one")
    with pytest.raises(FormatError, match="unreadable"):  # nobody lifts what nobody wrote
        store.open(ref)


def test_quarantine_covers_the_units_and_plans_of_a_sealed_artifact(store):
    units, whole = sealed_with_units(store)
    other = materialize(store, unit="unit-2")
    store.quarantine(whole, "check", "why")
    for ref in (*units, whole):
        with pytest.raises(FormatError, match="check: why"):
            store.open(ref)
    store.open(other)
    assert [materialize(store, unit=name).outcome for name in ("unit-0", "unit-1")] == ["rebuilt", "rebuilt"]
    store.lift(whole, "check")
    store.open(whole)


def test_quarantine_and_lift_pass_over_units_that_were_deleted(store):
    units, whole = sealed_with_units(store)
    shutil.rmtree(store.folder(units[0]))
    store.quarantine(whole, "check", "why")
    assert not store.folder(units[0]).exists()
    store.lift(whole, "check")
    store.open(units[1])


def test_leftovers_of_dead_writers_go_and_those_of_others_stay(store):
    ref = materialize(store)
    folder = store.folder(ref)
    host = socket.gethostname()
    dead = [f".tmp-{folder.name}-{host}-{DEAD_PROCESS}-0123abcd", f".damaged-{folder.name}-0123abcd"]
    alive = [
        f".tmp-{folder.name}-{host}-{os.getpid()}-0123abcd",
        f".tmp-{folder.name}-{host}-2-{DEAD_PROCESS}-0123abcd",  # a host whose name begins with ours
        f".tmp-{folder.name}-x{host}-{DEAD_PROCESS}-0123abcd",
        f".tmp-{'0' * 64}-{host}-{DEAD_PROCESS}-0123abcd",  # another identity's
    ]
    for name in (*dead, *alive):
        (folder.parent / name).mkdir()
        (folder.parent / name / "half.bin").write_bytes(b"half")
    assert materialize(store, refuse_to_write).outcome == "reused"
    assert sorted(path.name for path in folder.parent.iterdir()) == sorted([folder.name, *alive])


def in_a_process_of_its_own(what, root):
    finished = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("store_crashes.py")), what, str(root)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout)


@pytest.mark.parametrize(("what", "before"), [("kill", "none"), ("damaged", "damaged")])
def test_a_writer_killed_at_any_file_operation_leaves_the_whole_artifact_or_what_was_there(tmp_path, what, before):
    crashes = in_a_process_of_its_own(what, tmp_path)
    assert {crash["state"] for crash in crashes} <= {before, "none", "whole"}
    for crash in crashes:
        assert crash["same_bytes"], crash
        assert crash["names_after"] == [crash["identity"]], crash
        assert (crash["outcome"] == "reused") == (crash["state"] == "whole"), crash
    happened = {(crash["operation"], crash["state"]) for crash in crashes}
    assert {("os.mkdir", before), ("open", before), ("os.rename", before), ("open", "whole")} <= happened
    assert ("os.rename", "none") in happened  # at the rename that publishes, nothing is in the way
    assert max(crash["leftovers"] for crash in crashes) == (1 if before == "none" else 2)


def test_four_writers_of_one_identity_all_succeed_and_leave_one_artifact(tmp_path):
    rounds = in_a_process_of_its_own("race", tmp_path)
    assert {row["starts_damaged"] for row in rounds} == {True, False}
    for row in rounds:
        assert (row["finished"], row["digests"], row["state"]) == (4, 1, "whole"), row
        assert row["names_after"] == [True], row


def test_checks_that_fail_at_once_lose_no_reason(tmp_path):
    for reasons in in_a_process_of_its_own("quarantine", tmp_path):
        assert reasons == sorted(f"check_{process}_{check}" for process in range(4) for check in range(8))


def test_the_home_is_a_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CORPUSMILL_HOME", raising=False)
    assert home_folder() == tmp_path / ".corpusmill"
    monkeypatch.setenv("CORPUSMILL_HOME", "")
    assert home_folder() == tmp_path / ".corpusmill"
    monkeypatch.setenv("CORPUSMILL_HOME", "somewhere")
    assert home_folder() == tmp_path / "somewhere"
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    monkeypatch.setenv("CORPUSMILL_HOME", "~/mill")
    assert home_folder() == tmp_path / "me" / "mill"
    assert PipelineResource(recipe="sample", home="given").open().store.root == tmp_path / "given"


@pytest.mark.parametrize("home", ["s3://bucket/mill", "file:///mill", "gs://x"])
def test_a_uri_is_refused_as_home(monkeypatch, home):
    with pytest.raises(RecipeError, match=rf"CORPUSMILL_HOME: expected a local folder, found '{home}'.*name a folder"):
        PipelineResource(recipe="sample", home=home).open()
    monkeypatch.setenv("CORPUSMILL_HOME", home)
    with pytest.raises(RecipeError, match="expected a local folder"):
        home_folder()


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=3), children, max_size=3),
    max_leaves=6,
)
described = st.fixed_dictionaries(
    {
        "asset": st.sampled_from(["a", "b"]),
        "unit": st.sampled_from(["-", "u"]),
        "inputs": st.dictionaries(st.text(max_size=3), plain, max_size=2),
        "parameters": st.dictionaries(st.sampled_from("xyz"), plain, max_size=3),
        "version": st.integers(0, 2),
    }
)


@given(described, described)
def test_what_differs_has_another_identity(one, other):
    same = json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
    assert (artifact_identity(**one) == artifact_identity(**other)) == same


@given(described, st.data())
def test_one_changed_parameter_changes_the_identity(one, data):
    key = data.draw(st.sampled_from(sorted(one["parameters"]) or ["x"]))
    value = data.draw(plain)
    other = {**one, "parameters": {**one["parameters"], key: value}}
    differs = key not in one["parameters"] or json.dumps(one["parameters"][key], sort_keys=True) != json.dumps(
        value, sort_keys=True
    )
    assert (artifact_identity(**one) != artifact_identity(**other)) == differs


@given(described)
def test_the_order_of_keys_does_not_matter(one):
    turned = {key: dict(reversed(value.items())) if isinstance(value, dict) else value for key, value in one.items()}
    assert artifact_identity(**one) == artifact_identity(**turned)


@given(
    st.dictionaries(st.text(max_size=3), plain, max_size=3),
    st.lists(st.text(max_size=5), max_size=3),
    st.floats(0, 1e9),
    st.sampled_from(["built", "reused", "rebuilt"]),
)
def test_a_reference_survives_json(counts, warnings, seconds, outcome):
    ref = ArtifactRef(
        asset="thing", unit="-", identity="1" * 64, digest="2" * 64,
        counts=counts, outcome=outcome, seconds=seconds, warnings=tuple(warnings),
    )  # fmt: skip
    assert ArtifactRef.from_json(json.loads(json.dumps(ref.to_json()))) == ref


def test_a_sealed_file_gets_a_second_name(tmp_path):
    source = tmp_path / "source.bin"
    source.write_bytes(b"sealed")
    link_or_copy(source, tmp_path / "deep" / "target.bin")
    assert (tmp_path / "deep" / "target.bin").read_bytes() == b"sealed"
    assert source.read_bytes() == b"sealed"
