"""A checkpoint is whole or absent, verified before use, and bound to its run."""

import hashlib
import json
import os
import resource

import pytest
import torch

from training_io import checkpoint
from training_io.checkpoint import (
    check_identities,
    checkpoint_at,
    checkpoint_path,
    list_checkpoints,
    load_checkpoint,
    load_newest,
    read_times,
    save_checkpoint,
    write_times,
)
from training_io.errors import FormatError, StateMismatch

IDENTITIES = {"plan": "9f31c2", "model.vocab_size": 50}


def save(folder, step, keep_last=2):
    payload = {"model": {"w": torch.full((3,), float(step))}, "stream": {"plan": "9f31c2", "next_step": step}}
    return save_checkpoint(folder, step, payload, identities=IDENTITIES, keep_last=keep_last)


def test_newest_comes_back_as_it_was_saved(tmp_path):
    for step in (9, 10, 100):
        save(tmp_path, step)
    found = load_newest(tmp_path)
    assert (found.step, found.identities) == (100, IDENTITIES)
    assert found.payload["model"]["w"].tolist() == [100.0] * 3
    assert found.payload["stream"] == {"plan": "9f31c2", "next_step": 100}


def test_the_last_k_stay(tmp_path):
    for step in range(1, 8):
        save(tmp_path, step, keep_last=3)
    assert [load_checkpoint(path).step for path in list_checkpoints(tmp_path)] == [5, 6, 7]
    assert len(list(tmp_path.iterdir())) == 3


def test_no_folder_and_an_empty_one_have_no_checkpoint(tmp_path):
    assert load_newest(tmp_path / "absent") is None
    assert load_newest(tmp_path) is None


@pytest.mark.parametrize("call", ["rename", "fsync", "save"])
def test_a_crash_while_saving_leaves_the_one_before_and_no_trace_after_the_next(tmp_path, monkeypatch, call):
    save(tmp_path, 1)

    def crash(*arguments, **options):
        raise OSError("power failure")

    target = {"rename": (checkpoint.Path, "rename"), "fsync": (os, "fsync"), "save": (torch, "save")}[call]
    with monkeypatch.context() as patch:
        patch.setattr(*target, crash)
        with pytest.raises(OSError, match="power failure"):
            save(tmp_path, 2)
    assert len(list(tmp_path.iterdir())) == 1  # nothing half-written stays
    assert load_newest(tmp_path).step == 1
    save(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000000001", "step_000000002"]


def test_a_disk_that_is_full_is_named_and_nothing_half_written_stays(tmp_path):
    save(tmp_path, 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))  # no file may become larger
    try:
        with pytest.raises(OSError, match=r"state\.pt: the checkpoint was not written, .*File too large"):
            save_checkpoint(tmp_path, 2, {"weights": torch.zeros(100_000)}, identities={}, keep_last=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000000001"]


def flip_last_byte(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: flip_last_byte(path / "state.pt"), "state.pt: expected .* bytes with SHA-256"),
        (lambda path: (path / "state.pt").write_bytes(b""), "state.pt: expected .* found 0 bytes"),
        (lambda path: (path / "state.pt").unlink(), "state.pt: expected .* with no file"),
        (lambda path: (path / "checkpoint.json").unlink(), "checkpoint.json: expected a checkpoint record"),
        (lambda path: (path / "checkpoint.json").write_text("{"), "checkpoint.json: expected a checkpoint record"),
        (lambda path: (path / "checkpoint.json").write_text('{"format": 1}'), "checkpoint.json: expected a checkpoint"),
    ],
)
def test_damage_is_named_with_its_remedy_and_not_skipped(tmp_path, damage, message):
    save(tmp_path, 1)
    damage(save(tmp_path, 2))
    with pytest.raises(FormatError, match=message) as caught:
        load_newest(tmp_path)
    assert "Delete" in str(caught.value)
    assert "step_000000002" in str(caught.value)


def test_another_format_is_refused(tmp_path):
    record = save(tmp_path, 1) / "checkpoint.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | {"format": "corpusmill-checkpoint/2"}))
    with pytest.raises(FormatError, match="expected format corpusmill-checkpoint/1, found corpusmill-checkpoint/2"):
        load_newest(tmp_path)


class Payload:
    """Something that only arbitrary code could load."""


def test_a_payload_that_would_run_code_is_refused(tmp_path):
    path = save_checkpoint(tmp_path, 1, {"model": Payload()}, identities={}, keep_last=1)
    with pytest.raises(FormatError, match="expected tensors and plain values"):
        load_checkpoint(path)


def test_a_step_is_saved_once(tmp_path):
    save(tmp_path, 1_000)
    with pytest.raises(FormatError, match="expected no checkpoint of step 1,000 yet"):
        save(tmp_path, 1_000)


def test_everything_that_differs_is_named_with_both_values(tmp_path):
    save(tmp_path, 1)
    found = load_newest(tmp_path)
    check_identities(found, IDENTITIES)
    with pytest.raises(StateMismatch) as caught:
        check_identities(found, {"plan": "77ab04", "model.vocab_size": 50, "dtype": "float32"})
    message = str(caught.value)
    assert "plan: saved for 9f31c2, this run has 77ab04" in message
    assert "dtype: saved for None, this run has float32" in message
    assert "vocab_size" not in message


def test_a_checkpoint_from_before_a_fact_was_named_is_bound_by_its_plan(tmp_path):
    save(tmp_path, 1)
    check_identities(load_newest(tmp_path), IDENTITIES | {"capacity": 4_096, "token_dtype": "uint16"})
    save_checkpoint(tmp_path, 2, {}, identities=IDENTITIES | {"capacity": 2_048}, keep_last=1)
    with pytest.raises(StateMismatch, match="capacity: saved for 2048, this run has 4096"):
        check_identities(load_newest(tmp_path), IDENTITIES | {"capacity": 4_096, "token_dtype": "uint16"})


def test_what_may_differ_is_named_by_the_caller(tmp_path):
    save(tmp_path, 1)
    other = IDENTITIES | {"plan": "77ab04"}
    check_identities(load_newest(tmp_path), other, may_differ=frozenset({"plan"}))
    with pytest.raises(StateMismatch, match="plan: saved for 9f31c2, this run has 77ab04"):
        check_identities(load_newest(tmp_path), other, may_differ=frozenset({"recipe"}))


def test_a_checkpoint_is_found_by_its_folder_or_as_the_newest_of_a_folder(tmp_path):
    first, second = save(tmp_path, 1), save(tmp_path, 2)
    assert [checkpoint_at(path).step for path in (first, second, tmp_path)] == [1, 2, 2]
    assert checkpoint_at(first).sha256 == hashlib.sha256((first / "state.pt").read_bytes()).hexdigest()
    with pytest.raises(FormatError, match="expected a checkpoint or a folder of them, found none"):
        checkpoint_at(tmp_path / "elsewhere")


def test_times_lie_beside_their_checkpoint_and_go_with_it(tmp_path):
    for step in (1, 2, 3):
        write_times(checkpoint_path(tmp_path, step), {"seconds": float(step)})
        save(tmp_path, step, keep_last=2)
    assert [read_times(path) for path in list_checkpoints(tmp_path)] == [{"seconds": 2.0}, {"seconds": 3.0}]
    assert len(list(tmp_path.iterdir())) == 4
    alone = checkpoint_path(tmp_path / "alone", 3)
    assert read_times(alone) is None
    write_times(alone, {})
    next(alone.parent.iterdir()).write_text("{")
    with pytest.raises(FormatError, match="expected JSON"):
        read_times(alone)
