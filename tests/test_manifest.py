import json
import os

import pytest

from training_io.errors import FormatError
from training_io.hashing import sha256_file
from training_io.manifest import (
    MANIFEST_NAME,
    QUARANTINE_NAME,
    RUN_NAME,
    Manifest,
    damaged_files,
    load_manifest,
    open_artifact,
    quarantine_reasons,
)


def manifest_of(**changes):
    values = {
        "asset": "token_shards",
        "unit": "-",
        "inputs": {"rows": "ab"},
        "parameters": {"limit": 3},
        "version": 1,
        "counts": {"documents": 2, "by_size": {1: 5, 10: 2}},
        "files": {"a.bin": {"bytes": 3, "sha256": "0" * 64}},
    }
    return Manifest(**{**values, **changes})


def sealed(folder, manifest):
    folder.mkdir(exist_ok=True)
    (folder / MANIFEST_NAME).write_text(json.dumps(manifest.to_json()))
    return folder


def test_a_manifest_is_read_as_it_was_written(tmp_path):
    manifest = manifest_of()
    read = load_manifest(sealed(tmp_path / "x", manifest))
    assert (read.identity, read.digest) == (manifest.identity, manifest.digest)
    assert read.counts == {"documents": 2, "by_size": {"1": 5, "10": 2}}  # JSON has no integer keys
    assert load_manifest(sealed(tmp_path / "y", read)) == read


def test_identity_comes_from_what_goes_in_and_digest_from_what_came_out():
    manifest = manifest_of()
    for changes in ({"asset": "x"}, {"unit": "x"}, {"inputs": {}}, {"parameters": {}}, {"version": 2}):
        assert manifest_of(**changes).identity != manifest.identity
        assert manifest_of(**changes).digest == manifest.digest
    for files in ({}, {"b.bin": {"bytes": 3, "sha256": "0" * 64}}, {"a.bin": {"bytes": 3, "sha256": "1" * 64}}):
        assert manifest_of(files=files).digest != manifest.digest
        assert manifest_of(files=files).identity == manifest.identity
    assert manifest_of(counts={}).identity == manifest.identity


def test_an_unsealed_folder_is_refused(tmp_path):
    (tmp_path / RUN_NAME).write_text("{}")
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(FormatError, match=r"expected a sealed artifact with manifest\.json, found none"):
            load_manifest(folder)


OTHER = {
    "asset": "x",
    "unit": "x",
    "identity": "0" * 64,
    "digest": "0" * 64,
    "inputs": {},
    "parameters": {},
    "version": 2,
    "counts": {"documents": 3},
    "files": {},
    "seal": "0" * 64,
}


def test_the_edits_below_are_of_every_field():
    assert {"format", *OTHER} == set(manifest_of().to_json())


@pytest.mark.parametrize("field", OTHER)
def test_an_edited_field_is_refused_by_its_name_or_by_what_it_contradicts(tmp_path, field):
    value = manifest_of().to_json() | {field: OTHER[field]}
    (tmp_path / MANIFEST_NAME).write_text(json.dumps(value))
    with pytest.raises(FormatError, match=r"manifest\.json.*edited or damaged; materialize the asset again"):
        load_manifest(tmp_path)


def test_an_edited_size_and_an_unknown_key_are_refused(tmp_path):
    value = manifest_of().to_json()
    value["files"]["a.bin"]["bytes"] = 4
    for edited in (value, manifest_of().to_json() | {"note": "mine"}):
        (tmp_path / MANIFEST_NAME).write_text(json.dumps(edited))
        with pytest.raises(FormatError, match="edited or damaged"):
            load_manifest(tmp_path)


@pytest.mark.parametrize(
    "change",
    [{"files": []}, {"files": {"a": {}}}, {"files": {"a": 3}}, {"files": None}, {"inputs": "x"}, {"counts": 3}],
)
def test_fields_of_another_shape_are_refused(tmp_path, change):
    (tmp_path / MANIFEST_NAME).write_text(json.dumps(manifest_of().to_json() | change))
    with pytest.raises(FormatError, match=r"manifest\.json"):
        load_manifest(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", "{}", '{"format": "corpusmill/1"}', "\xff"])
def test_what_is_no_manifest_is_refused(tmp_path, text):
    (tmp_path / MANIFEST_NAME).write_bytes(text.encode("latin-1"))
    with pytest.raises(FormatError, match=r"manifest\.json: expected a manifest of format corpusmill/1"):
        load_manifest(tmp_path)


def test_another_format_is_refused_by_its_name(tmp_path):
    (tmp_path / MANIFEST_NAME).write_text(json.dumps(manifest_of().to_json() | {"format": "corpusmill/9"}))
    with pytest.raises(FormatError, match=r"expected format corpusmill/1, found corpusmill/9"):
        load_manifest(tmp_path)


def test_each_damaged_file_gets_a_line(tmp_path):
    entries = {}
    for name in ("absent", "short", "flipped", "whole"):
        path = tmp_path / name
        path.write_bytes(b"x" * 2_000)
        entries[name] = {"bytes": 2_000, "sha256": sha256_file(path)}
    (tmp_path / "absent").unlink()
    (tmp_path / "short").write_bytes(b"x" * 1_999)
    (tmp_path / "flipped").write_bytes(b"y" + b"x" * 1_999)
    (tmp_path / "stray").write_bytes(b"not listed, not read")
    lines = damaged_files(tmp_path, manifest_of(files=entries))
    assert [line.split(": ")[0] for line in lines] == [str(tmp_path / name) for name in ("absent", "flipped", "short")]
    assert lines[0].endswith("expected 2,000 bytes, found no file")
    assert "SHA-256" in lines[1]
    assert lines[2].endswith("expected 2,000 bytes, found 1,999")


def test_quarantine_lists_its_reasons_and_an_unreadable_marker_holds_too(tmp_path):
    folder = sealed(tmp_path / "x", manifest_of())
    assert quarantine_reasons(folder) == {}
    open_artifact(folder)
    (folder / QUARANTINE_NAME).write_text(json.dumps({"b": "second", "a": "first"}))
    with pytest.raises(FormatError, match=r"\(a: first; b: second\)\. Materialize token_shards again"):
        open_artifact(folder)
    assert open_artifact(folder, allow_quarantined=True) == load_manifest(folder)
    (folder / QUARANTINE_NAME).write_text("")
    with pytest.raises(FormatError, match=r"quarantine\.json: unreadable"):
        open_artifact(folder)


def make_folder(path):
    path.mkdir()


def make_pipe(path):
    os.mkfifo(path)


def make_link_to_nothing(path):
    path.symlink_to(path.with_name("gone"))


def make_link_to_itself(path):
    path.symlink_to(path)


def content(value):
    return lambda path: path.write_bytes(value)


@pytest.mark.parametrize(
    "put",
    [
        make_folder,
        make_pipe,
        make_link_to_nothing,
        make_link_to_itself,
        content(b""),
        content(b"{}"),
        content(b"[]"),
        content(b"null"),
        content(b'["a", 3]'),
        content(b'{"a": 3}'),
        content(b'{"a": null, "b": [1, {}]}'),
        content(b'{"a": "\xff"}'),
        content(b'{"a": "\\ud800", "\\udfff": "b"}'),
        content(b"[" * 200_000),
        content(b'{"a": ' * 200_000),
        content(b'{"a": ' + b"9" * 5_000 + b"}"),
        content(b'{"a": "first"'),
    ],
)
def test_whatever_is_in_the_markers_place_holds_the_artifact_back(tmp_path, put):
    folder = sealed(tmp_path / "x", manifest_of())
    put(folder / QUARANTINE_NAME)
    reasons = quarantine_reasons(folder)
    assert reasons
    assert all(isinstance(text, str) and text for text in (*reasons, *reasons.values()))
    "".join([*reasons, *reasons.values()]).encode()
    with pytest.raises(FormatError, match="quarantined by a failed blocking check"):
        open_artifact(folder)
    assert open_artifact(folder, allow_quarantined=True) == load_manifest(folder)


def test_a_reason_that_is_no_text_is_told_under_its_check(tmp_path):
    folder = sealed(tmp_path / "x", manifest_of())
    (folder / QUARANTINE_NAME).write_text('{"a": [1], "b": "second"}')
    assert quarantine_reasons(folder) == {"a": "unreadable, a reason of kind list", "b": "second"}


def test_a_path_without_a_folder_is_told_from_an_interrupted_write(tmp_path):
    (tmp_path / "begun").mkdir()
    with pytest.raises(FormatError, match=r"found none, nor such a folder\. Check the path: an artifact is the folder"):
        load_manifest(tmp_path / "gone")
    with pytest.raises(FormatError, match=r"found none\. The write was interrupted"):
        load_manifest(tmp_path / "begun")


@pytest.mark.parametrize("place", ["asset/-/identity", "-/identity"])
def test_a_folder_of_artifacts_names_one_of_them(tmp_path, place):
    folder = tmp_path / "home" / place
    folder.parent.mkdir(parents=True)
    sealed(folder, manifest_of())
    with pytest.raises(FormatError, match="found a folder of 1 artifacts") as refused:
        load_manifest(folder.parents[1])
    assert str(refused.value).endswith(f"such as {folder}.")
