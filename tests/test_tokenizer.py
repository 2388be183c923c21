import gzip
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import small_corpus
from loopback import answer, serving
from tokenizers import AddedToken, Tokenizer, models

from resources.artifact_store import ArtifactRef
from resources.tokenizer import load_tokenizer, train_tokenizer
from training_io.errors import FormatError, RecipeError, SourceError

EOS = "<|endoftext|>"
TEXTS = [f"the cat number {number} sat on the mat; el niño también, 東京 too\n" for number in range(200)]
GPT2_SHA256 = "8414cab924d8b9b33013f0d221c5862f365ee9be39c5c2bfae8a5a9e970478a6"


@pytest.fixture(scope="module")
def trained():
    return train_tokenizer(TEXTS, 400)


@pytest.fixture
def path(trained, tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(trained)
    return path


def changed(path, change):
    form = json.loads(path.read_bytes())
    change(form)
    other = path.with_name("other.json")
    other.write_text(json.dumps(form, indent=1))
    return other


def _data_file(name):
    folder = os.environ.get("CORPUSMILL_TEST_DATA")
    if not folder:
        pytest.skip("CORPUSMILL_TEST_DATA names no folder with tokenizers/")
    return Path(folder) / "tokenizers" / name


def test_training_twice_gives_the_same_bytes_in_this_process_and_another(trained):
    assert train_tokenizer(iter(TEXTS), 400) == trained
    program = (
        "import hashlib, sys; from resources.tokenizer import train_tokenizer;"
        "texts = eval(sys.stdin.read()); print(hashlib.sha256(train_tokenizer(texts, 400)).hexdigest())"
    )
    environment = {**os.environ, "RAYON_NUM_THREADS": "1", "PYTHONHASHSEED": "7"}
    result = subprocess.run(
        [sys.executable, "-c", program],
        input=repr(TEXTS),
        capture_output=True,
        text=True,
        check=True,
        env=environment,
        cwd=Path(__file__).parent.parent,
    )
    assert result.stdout.strip() == hashlib.sha256(trained).hexdigest()


def test_a_trained_tokenizer_has_eos_0_every_byte_and_the_asked_size(path):
    tokenizer = load_tokenizer(path)
    assert tokenizer.eos_id == 0
    assert tokenizer.vocab_size == 400
    assert tokenizer.max_id == 399
    assert tokenizer.token_dtype == np.uint16
    strange = ["\0\r\n\ufeff🙂 ß", " ", ""]
    assert tokenizer.decode_batch(tokenizer.encode_batch(strange)) == strange
    assert len(tokenizer.encode_batch(["the cat number"])[0]) < 8


def test_a_vocabulary_below_the_bytes_is_refused():
    with pytest.raises(RecipeError, match=r"at least 257 .* found 256"):
        train_tokenizer(TEXTS, 256)


@pytest.mark.parametrize("texts", [[], ["", ""]])
def test_training_on_no_text_is_refused(texts):
    with pytest.raises(SourceError, match=r"expected texts to train on, found none in [02] of the sample"):
        train_tokenizer(texts, 400)


def test_saving_again_truncation_and_padding_do_not_change_the_fingerprint(path, tmp_path):
    tokenizer = load_tokenizer(path)
    again = tmp_path / "again.json"
    tokenizer.library.save(str(again), pretty=True)
    limited = changed(
        path,
        lambda form: form.update(
            truncation={"direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 0}
        ),
    )
    compressed = tmp_path / "tokenizer.json.gz"
    compressed.write_bytes(gzip.compress(path.read_bytes()))
    for other in (again, limited, compressed):
        assert other.read_bytes() != path.read_bytes()
        assert load_tokenizer(other).fingerprint == tokenizer.fingerprint
    assert len(load_tokenizer(limited).encode_batch([TEXTS[0]])[0]) > 5


def test_two_swapped_ids_change_the_fingerprint(path):
    def swap(form):
        vocabulary = form["model"]["vocab"]
        vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]

    assert load_tokenizer(changed(path, swap)).fingerprint != load_tokenizer(path).fingerprint


def test_an_absent_eos_is_refused_with_near_names(path):
    with pytest.raises(
        RecipeError, match=r"tokenizer.json: expected the EOS token '<\|eos\|>' .* near names: <\|endoftext\|>"
    ):
        load_tokenizer(path, eos="<|eos|>")


def test_an_eos_that_literal_text_would_become_is_refused(path):
    def unmark(form):
        form["added_tokens"][0]["special"] = False

    with pytest.raises(RecipeError, match="found it encoded as the EOS id 0"):
        load_tokenizer(changed(path, unmark))


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"model": 1}', b"\xff\xfe", b'{"version": "1.0"}'])
def test_a_broken_file_is_named(content, tmp_path):
    path = tmp_path / "broken.json"
    path.write_bytes(content)
    with pytest.raises(FormatError, match=r"broken\.json: expected a tokenizer\.json"):
        load_tokenizer(path)


def test_two_words_of_one_id_are_refused(path):
    def double(form):
        vocabulary = form["model"]["vocab"]
        vocabulary["\x1b[2J"] = vocabulary["z" * 500] = vocabulary["a"]
        vocabulary["another"] = vocabulary["b"]

    words = r"id 65 of both '\\x1b\[2J' and 'a'\. Give one"
    messages = set()
    for _ in range(3):
        with pytest.raises(FormatError, match=rf"other\.json: expected one word for each id, found {words}") as refused:
            load_tokenizer(changed(path, double))
        messages.add(str(refused.value))
    (message,) = messages
    assert message.isprintable()


def test_an_added_token_that_gets_the_id_of_a_word_is_refused(path):
    """The library numbers added tokens from the number of words on."""

    def leave_a_gap(form):
        form["model"]["vocab"]["zzz"] = len(form["model"]["vocab"]) + 1
        form["added_tokens"] += [{**form["added_tokens"][0], "content": f"<{name}>", "id": 600} for name in "abc"]

    with pytest.raises(FormatError, match=r"found id 401 of both '<.>' and 'zzz'"):
        load_tokenizer(changed(path, leave_a_gap))


def test_a_file_that_the_library_panics_at_is_named(path):
    def prefix(form):
        form["model"]["continuing_subword_prefix"] = "#" * 40

    with pytest.raises(FormatError, match=r"other\.json: expected a tokenizer\.json, found '[^\n]{1,200}\. Fetch"):
        load_tokenizer(changed(path, prefix))


WITHOUT_UNKNOWN = {
    "WordLevel": models.WordLevel({"ba": 0, "ne": 1}),
    "Unigram": models.Unigram([("a", -1.0), ("b", -2.0)], None, False),
}


@pytest.mark.parametrize("model", WITHOUT_UNKNOWN)
@pytest.mark.parametrize("eos", ["ba", "a", EOS])
def test_a_tokenizer_that_does_not_encode_any_text_is_refused(model, eos, tmp_path):
    library = Tokenizer(WITHOUT_UNKNOWN[model])
    library.add_special_tokens([AddedToken(eos, special=True, normalized=False)])
    library.save(str(tmp_path / "limited.json"))
    with pytest.raises(
        FormatError, match=r"limited\.json: expected a tokenizer that encodes any text, found '[^\n]+\."
    ):
        load_tokenizer(tmp_path / "limited.json", eos=eos)


def test_a_template_that_the_library_panics_at_is_named(path):
    def second_of_a_pair(form):
        second = {"Sequence": {"id": "B", "type_id": 0}}
        form["post_processor"] = {"type": "TemplateProcessing", "single": [second], "pair": [], "special_tokens": {}}

    with pytest.raises(FormatError, match=r"other\.json: expected a tokenizer"):
        load_tokenizer(changed(path, second_of_a_pair))


def test_an_interrupt_is_no_fault_of_the_file(path, monkeypatch):
    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr("tokenizers.Tokenizer.from_str", interrupted)
    with pytest.raises(KeyboardInterrupt):
        load_tokenizer(path)


def test_broken_gzip_and_missing_files_are_named(tmp_path, trained):
    path = tmp_path / "cut.json.gz"
    for content in (b"not gzip", gzip.compress(trained)[:-20]):
        path.write_bytes(content)
        with pytest.raises(FormatError, match=r"cut\.json\.gz"):
            load_tokenizer(path)
    with pytest.raises(SourceError, match=r"absent\.json.* found no file"):
        load_tokenizer(tmp_path / "absent.json")


REVISION = "0123456789abcdef0123456789abcdef01234567"
HUB_PATH = f"/someone/model/resolve/{REVISION}/tokenizer.json"


@pytest.fixture
def from_hub(tmp_path, monkeypatch):
    """A small recipe whose tokenizer is named by repository and commit, and the server that it is asked of."""
    monkeypatch.delenv("HF_TOKEN", raising=False)
    small_corpus.write_corpus(tmp_path)
    given = {"kind": "file", "repository": "someone/model", "revision": REVISION, "eos": EOS}
    candidates = [{"name": "the_same", **given}]
    recipe = small_corpus.write_recipe(tmp_path, {"tokenizer": given, "tokenizer_report": {"candidates": candidates}})
    with serving() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield recipe, server


def hub_files(home):
    return sorted((home / "hub_tokenizer").rglob("tokenizer.json"))


def built(recipe, home) -> ArtifactRef:
    return small_corpus.build(recipe, home, upto="tokenizer").refs["tokenizer"]


def test_a_tokenizer_of_the_hub_is_fetched_once_and_then_needs_no_network(from_hub, trained, tmp_path, monkeypatch):
    recipe, server = from_hub
    server.answers[HUB_PATH] = [answer(200, trained)]
    first = small_corpus.build(recipe, tmp_path / "home", upto="tokenizer_report")
    assert server.asked == [(HUB_PATH, None)]
    assert first.refs["tokenizer"].counts["eos_id"] == 0
    (stored,) = hub_files(tmp_path / "home")
    assert stored.read_bytes() == trained
    manifest = json.loads((stored.parent / "manifest.json").read_bytes())
    assert manifest["inputs"] == {"repository": "someone/model", "revision": REVISION}
    assert manifest["files"]["tokenizer.json"]["sha256"] == hashlib.sha256(trained).hexdigest()

    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    again = small_corpus.build(recipe, tmp_path / "home", upto="tokenizer_report")
    assert {name: ref.outcome for name, ref in again.refs.items()} == dict.fromkeys(again.refs, "reused")
    assert len(server.asked) == 1


def test_a_damaged_copy_of_the_hubs_file_is_fetched_again(from_hub, trained, tmp_path):
    recipe, server = from_hub
    server.answers[HUB_PATH] = [answer(200, trained)]
    first = built(recipe, tmp_path / "home")
    (stored,) = hub_files(tmp_path / "home")
    stored.write_bytes(trained[:-1])
    assert built(recipe, tmp_path / "home").digest == first.digest
    assert stored.read_bytes() == trained
    assert len(server.asked) == 2


@pytest.mark.parametrize(
    "page", [b"<html>Sign in to the network</html>", b"version https://git-lfs.github.com/spec/v1"]
)
def test_what_is_no_tokenizer_is_not_kept(from_hub, trained, tmp_path, page):
    recipe, server = from_hub
    server.answers[HUB_PATH] = [answer(200, page), answer(200, trained)]
    with pytest.raises(
        FormatError, match=r"tokenizer.json of someone/model at 0123456789ab, from http://127.0.0.1:\d+"
    ):
        built(recipe, tmp_path / "home")
    assert hub_files(tmp_path / "home") == []
    assert built(recipe, tmp_path / "home").outcome == "built"


def test_a_local_copy_is_taken_instead_of_the_hubs(from_hub, path, tmp_path):
    recipe, server = from_hub
    given = {"kind": "file", "repository": "someone/model", "revision": REVISION, "path": str(path), "eos": EOS}
    built(small_corpus.write_recipe(recipe.parent, {"tokenizer": given}), tmp_path / "home")
    assert server.asked == []


def test_a_commit_that_the_hub_has_not_is_said(from_hub, tmp_path):
    recipe, server = from_hub
    server.answers[HUB_PATH] = [answer(404, X_Error_Code="RevisionNotFound")]
    with pytest.raises(SourceError, match=r"HTTP 404 Not Found \(RevisionNotFound\) in one try\. Mend the repository"):
        built(recipe, tmp_path / "home")


def test_gpt2():
    path = _data_file("gpt2.tokenizer.json")
    assert hashlib.sha256(path.read_bytes()).hexdigest() == GPT2_SHA256
    tokenizer = load_tokenizer(path)
    assert (tokenizer.eos_id, tokenizer.max_id, tokenizer.token_dtype) == (50256, 50256, np.uint16)
    assert tokenizer.vocab_size == 50257


def test_qwen3_has_ids_above_its_vocabulary():
    tokenizer = load_tokenizer(_data_file("qwen3.tokenizer.json.gz"))
    assert (tokenizer.eos_id, tokenizer.max_id, tokenizer.vocab_size) == (151643, 151668, 151643)
    assert tokenizer.token_dtype == np.uint32
    assert tokenizer.normalize("nai\u0308ve") == "naïve"


@pytest.mark.parametrize(("asked", "is_warned"), [(5_000, True), (300, False)])
def test_the_page_says_when_there_are_fewer_ids_than_asked_for(tmp_path, asked, is_warned):
    recipe = small_corpus.write_recipe(small_corpus.write_corpus(tmp_path), {"tokenizer.vocab_size": asked})
    built = small_corpus.build(recipe, tmp_path / "home", "tokenizer")
    found = built.refs["tokenizer"].counts["vocab_size"]
    assert (found < asked) == is_warned
    expected = f"expected {asked:,} ids, the sample has merges for {found:,};"
    assert built.pages["tokenizer"].get("warning", "").startswith(expected if is_warned else "")
    assert ("warning" in built.pages["tokenizer"]) == is_warned
