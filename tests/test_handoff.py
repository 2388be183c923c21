"""A hand-off package tests itself: each promise, broken in one place, is one violation."""

import json
import sys

import pytest
import small_corpus
from tiny_artifacts import address_docs, make_package, make_plan, make_token_shards, tiny_fingerprint

from resources.tokenizer import train_tokenizer
from training_io.errors import FormatError
from training_io.handoff import read_package, self_test
from training_io.verification import verify


@pytest.fixture
def package(tmp_path):
    documents = {"train": address_docs([6, 4, 3, 2, 20, 1, 0, 9, 7, 8, 30, 31, 12])}
    shards = make_token_shards(tmp_path, documents, fingerprint=tiny_fingerprint())
    return tmp_path, make_package(tmp_path, shards, make_plan(tmp_path, shards))


def rewritten(package, change):
    folder, description = package
    change(description)
    (folder / "package.json").write_text(json.dumps(description))
    return self_test(folder)


def test_a_whole_package_passes(package):
    assert self_test(package[0]) == []
    assert verify(package[0]).violations == []


@pytest.mark.parametrize(
    ("packing", "rule"),
    [
        ({"packs.long_documents": "cut"}, "cut into segments"),
        ({"packs.long_documents": "divert"}, "in no plan"),
        ({"packs.overlap": 5}, "all but the first repeat the 5 inputs before theirs, which are read, not trained"),
    ],
)
def test_a_package_says_what_became_of_long_documents_and_no_path_of_this_machine(tmp_path, packing, rule):
    folder = small_corpus.write_corpus(tmp_path)
    (folder / "other.json").write_bytes(train_tokenizer([small_corpus.HELD_OUT], 300))
    candidate = {"name": "other", "path": "other.json", "eos": "<|endoftext|>"}
    changes = {"tokenizer_report": {"candidates": [candidate]}, **packing}
    package = small_corpus.build(small_corpus.write_recipe(folder, changes), folder / "home").folder("handoff_package")
    assert rule in read_package(package)["sequence_rules"]["long_documents"]
    for name in ("package.json", "manifest.json"):
        assert str(tmp_path) not in (package / name).read_text()


def swap_ids(description):
    ids = description["self_test"]["documents"][0]["ids"]
    ids[0], ids[1] = ids[1], ids[0]


def name_another_tokenizer(description):
    description["tokenizer"]["fingerprint"] = "2" * 64


def drop_eos(description):
    description["self_test"]["documents"][1]["ids"][-1] = description["sequence_rules"]["eos_id"] + 1


def name_another_plan(description):
    description["plans"]["train"]["identity"] = "0" * 64


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (swap_ids, "tokenizer: 'ab ba': expected"),
        (drop_eos, "expected the EOS 0 once, at each document's end"),
        (name_another_tokenizer, "tokenizer: expected fingerprint 222222222222"),
        (name_another_tokenizer, "plan of train: expected shards of tokenizer 222222222222"),
        (name_another_plan, "plan of train: expected identity 000000000000"),
    ],
)
def test_each_broken_promise_is_a_violation(package, change, message):
    violations = rewritten(package, change)
    assert [violation for violation in violations if message in violation], violations


def test_a_state_of_another_plan_is_a_violation_of_verify(package):
    def change(description):
        description["reading_state"]["train"]["plan"] = "1" * 64

    folder, description = package
    change(description)
    (folder / "package.json").write_text(json.dumps(description))
    assert any("sampler state was saved for plan 111111111111" in line for line in verify(folder).violations)


def test_a_missing_tokenizer_is_a_violation(package):
    (package[0] / "tokenizer.json").unlink()
    assert self_test(package[0]) == ["tokenizer: expected tokenizer.json in the package, found none"]


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"format": "other/9"}'])
def test_a_malformed_description_is_one_error(package, text):
    (package[0] / "package.json").write_text(text)
    with pytest.raises(FormatError, match=r"package\.json: expected"):
        read_package(package[0])


def test_a_missing_description_is_one_error(tmp_path):
    with pytest.raises(FormatError, match=r"Copy the whole package"):
        read_package(tmp_path)


def test_a_tokenizer_with_two_ids_swapped_is_a_violation_without_the_library_too(package, monkeypatch):
    path = package[0] / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    first, second = sorted(vocabulary, key=vocabulary.__getitem__)[100:102]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    path.write_text(json.dumps(content))
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    violations = self_test(package[0])
    assert len(violations) == 1
    assert violations[0].startswith("tokenizer: expected fingerprint")
