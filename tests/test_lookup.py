"""Looking texts up: datasketch's objects, the direct search, planted texts, refusals, and the command `find`."""

import io
import json
import sys
from dataclasses import replace
from pathlib import Path

import naive_lookup
import naive_text
import numpy as np
import pyarrow as pa
import pytest
import small_corpus
from datasketch import MinHash
from hypothesis import given
from hypothesis import strategies as st
from small_corpus import Built, doc_id, sentences

from pipeline_assets import signatures as signing
from pipeline_assets.__main__ import main
from pipeline_assets.answers import Answer
from pipeline_assets.lookup import Lookup, find_texts, look_up, memory_index, open_lookup, refuse_other_parameters
from pipeline_assets.recipe_file import load_recipe
from pipeline_assets.references import Pipeline
from pipeline_assets.stripes import units_in
from pipeline_assets.transforms.lookup import (
    beginning,
    candidates_of,
    empty_index,
    insert_documents,
    lost_buckets,
    minhash_of,
    printable,
    rows_of_doc_ids,
    rows_sharing_a_band,
)
from pipeline_assets.transforms.lsh import band_keys
from pipeline_assets.transforms.minhash import MinHashParams, sign_documents
from pipeline_assets.transforms.shingles import shingle_hashes
from resources.artifact_store import ArtifactStore
from resources.redis_index import (
    PASSWORD_VARIABLE,
    REDIS_VARIABLE,
    IndexDamaged,
    RedisAddress,
    redis_address,
    storage_config,
)
from resources.tables import read_rows, read_table, write_table
from training_io.errors import FormatError, RecipeError, SourceError, StateMismatch

EMPTY = 2**32 - 1
PARAMS = MinHashParams()
SMALL = MinHashParams(num_perm=4, num_bands=2, rows_per_band=2)
WITHOUT_WORDS = [EMPTY] * 4
SIGNATURES = st.lists(
    st.just(WITHOUT_WORDS) | st.lists(st.sampled_from([0, 1, EMPTY]), min_size=4, max_size=4), max_size=8
)
ANOTHER_ENDING = small_corpus.NEAR_ORIGINAL.rsplit(" ", 2)[0] + " yet another ending"
UNKNOWN = sentences(99_999)
HOSTILE = "\x1b[2J\x1b]0;owned\x07 red \x9b31m back \x7f turned \u202e over\u2028 \t" + sentences(3_000)
HOSTILE_URL = "https://example/\x1b[31m?\u202e"


@pytest.fixture(scope="session")
def lookup(clean: Built) -> Lookup:
    return open_lookup(pipeline_of(clean))


@pytest.fixture(scope="session")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """A home whose corpus holds a text and an address that would take a terminal over."""
    folder = small_corpus.write_corpus(tmp_path_factory.mktemp("hostile"))
    small_corpus.write_rows(folder / "beta" / "b_001.parquet", [{"text": HOSTILE, "url": HOSTILE_URL, "dump": "\x1bc"}])
    return small_corpus.build(small_corpus.write_recipe(folder), folder / "home", upto="lsh_clusters")


def pipeline_of(built: Built) -> Pipeline:
    return Pipeline(store=ArtifactStore(built.home.resolve()), recipe=load_recipe(str(built.recipe)))


def all_texts(lookup: Lookup) -> list[str]:
    tables = [lookup.stage.table(unit, "rows.parquet", ["text"]) for unit in lookup.rows]
    return [text for table in tables for text in table.column("text").to_pylist()]


# --- the pure parts


@given(st.text(max_size=60) | st.text(alphabet="ab 東", max_size=60), st.integers(0, 9))
def test_a_signature_is_datasketchs_object_fed_the_shingles(text: str, seed: int) -> None:
    params = MinHashParams(seed=seed)
    signed, _ = sign_documents(pa.array([text, "a b"], pa.string()), params)
    sketches = [
        MinHash(num_perm=112, seed=seed, scheme="affine32", hashfunc=lambda data: int.from_bytes(data, "little"))
        for _ in signed
    ]
    for sketch, one in zip(sketches, [text, "a b"], strict=True):
        sketch.update_batch([value.to_bytes(4, "little") for value in shingle_hashes(one).tolist()])
    ours = [minhash_of(signature, params) for signature in signed]
    for mine, theirs in zip(ours, sketches, strict=True):
        assert (mine.seed, mine.scheme) == (theirs.seed, theirs.scheme)
        assert mine.hashvalues.tolist() == theirs.hashvalues.tolist()
        assert mine.jaccard(theirs) == 1.0
    assert ours[0].jaccard(ours[1]) == sketches[0].jaccard(sketches[1]) == (signed[0] == signed[1]).mean()


@given(SIGNATURES, SIGNATURES)
def test_direct_search_datasketch_and_the_plain_version_find_the_same_rows(stored: list, asked: list) -> None:
    signatures, queries = (np.array(rows, np.uint32).reshape(-1, 4) for rows in (stored, asked))
    keys = band_keys(signatures, SMALL)
    order = np.argsort(keys, axis=None, kind="stable")
    rows = np.repeat(np.arange(len(signatures), dtype=np.uint32), SMALL.num_bands)[order]
    found = rows_sharing_a_band(keys.ravel()[order], rows, band_keys(queries, SMALL)).tolist()
    assert found == naive_lookup.rows_sharing_a_band(stored, asked, SMALL.rows_per_band, EMPTY)
    doc_ids = np.repeat(np.arange(len(signatures), dtype=np.uint8), 32).reshape(-1, 32)
    index = empty_index(SMALL)
    insert_documents(index, doc_ids, signatures, SMALL, str)
    by_library = [
        [number, int(key[:2], 16)] for number, query in enumerate(queries) for key in candidates_of(index, query, SMALL)
    ]
    assert by_library == found


def test_a_hot_band_is_found_whole() -> None:
    keys = np.full(1_000, 7, np.uint64)
    rows = np.arange(1_000, dtype=np.uint32)
    assert len(rows_sharing_a_band(keys, rows, np.array([[7, 7], [6, 8]], np.uint64))) == 1_000


@given(st.lists(st.integers(0, 3), max_size=12), st.lists(st.integers(0, 3), max_size=4))
def test_rows_of_doc_ids_are_those_of_the_plain_version(stored: list[int], wanted: list[int]) -> None:
    # ids that differ in their last byte alone: the first pass sees 8 bytes and must not be believed
    doc_ids, asked = (
        np.array([[9] * 31 + [number] for number in numbers], np.uint8).reshape(-1, 32) for numbers in (stored, wanted)
    )
    assert rows_of_doc_ids(doc_ids, asked).tolist() == naive_lookup.rows_of_doc_ids(stored, wanted)


def test_a_document_inserted_twice_is_one() -> None:
    index = empty_index(SMALL)
    signatures = np.array([[1, 2, 3, 4], [1, 2, 3, 4]], np.uint32)
    insert_documents(index, np.zeros((2, 32), np.uint8), signatures, SMALL, str)
    assert len(index.keys) == 1
    assert candidates_of(index, signatures[0], SMALL) == ["00" * 32]


def test_an_index_that_lost_nothing_has_lost_no_bucket() -> None:
    index = empty_index(SMALL)
    signatures = np.array([[1, 2, 3, 4], [9, 9, 3, 4], WITHOUT_WORDS], np.uint32)
    insert_documents(index, np.zeros((3, 32), np.uint8), signatures[:1], SMALL, str)
    assert [lost_buckets(index, signature, SMALL) for signature in signatures] == [[], [], []]


def test_one_band_is_refused_by_the_index_alone() -> None:
    with pytest.raises(RecipeError, match=r"at least 2 bands, found dedup\.num_bands 1"):
        empty_index(MinHashParams(num_perm=8, num_bands=1, rows_per_band=8))


@given(st.text() | st.text(alphabet="\x1b\x9b\x7f\u202e\n\\x1b"))
def test_what_is_printed_is_printable(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable()
    assert (shown == text) == (text.isprintable() and "\\" not in text)


def test_an_escape_and_its_spelling_are_told_apart() -> None:
    assert printable("\x1b") == r"\x1b"
    assert printable(r"\x1b") == r"\\x1b"


@given(st.text(alphabet="ab \t\r\n\x1b", max_size=60), st.integers(1, 20))
def test_an_excerpt_is_the_beginning_on_one_line(text: str, width: int) -> None:
    shown = beginning(text, width)
    assert len(shown) <= width
    assert not set(shown) & set("\t\r\n")
    whole = " ".join(part for part in text.replace("\t", " ").replace("\r", " ").replace("\n", " ").split(" ") if part)
    assert shown == whole or (shown.endswith("…") and whole.startswith(shown[:-1]))


@pytest.fixture(scope="module")
def three_row_groups(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "rows.parquet"
    texts = pa.array([f"text {number}" for number in range(2_500)], pa.large_string())
    write_table(pa.table({"number": np.arange(2_500), "text": texts}), path)
    return path


@given(rows=st.lists(st.integers(0, 2_499), max_size=20))
def test_rows_are_read_as_taking_them_from_the_whole_table_gives_them(three_row_groups: Path, rows: list[int]) -> None:
    wanted = np.array(rows, np.int64)
    expected = read_table(three_row_groups).take(pa.array(wanted)).select(["text"])
    assert read_rows(three_row_groups, wanted, ["text"]).equals(expected)


# --- a corpus


def test_every_text_is_found_and_both_ways_give_the_same_answers(lookup: Lookup) -> None:
    texts = [*all_texts(lookup), ANOTHER_ENDING, UNKNOWN, "", "…", *small_corpus.PLANTED["beta"]]
    answers = find_texts(lookup, texts)
    assert find_texts(lookup, texts, memory_index(lookup)) == answers
    assert all(answer.is_identical for answer in answers[: len(all_texts(lookup))])
    assert [answer.doc_id for answer in answers] == [doc_id(text).hex() for text in texts]
    assert any(not answer.is_identical and answer.matches for answer in answers)
    assert any(not match.kept for answer in answers for match in answer.matches)


def test_candidates_are_the_kept_documents_that_datasketch_finds(lookup: Lookup) -> None:
    kept = {match.doc_id for answer in find_texts(lookup, all_texts(lookup)) for match in answer.matches if match.kept}
    index = empty_index(lookup.params)
    for text in all_texts(lookup):
        if doc_id(text).hex() in kept and naive_text.words(text):
            signature = sign_documents(pa.array([text]), lookup.params)[0][0]
            index.insert(doc_id(text).hex(), minhash_of(signature, lookup.params), check_duplication=False)
    near = 0
    for text in [*all_texts(lookup), ANOTHER_ENDING]:
        (answer,) = find_texts(lookup, [text])
        signature = sign_documents(pa.array([text]), lookup.params)[0][0]
        expected = set(candidates_of(index, signature, lookup.params)) - {answer.doc_id}
        assert {match.doc_id for match in answer.matches if not match.is_identical} == expected
        near += len(expected)
    assert near > 2


def test_similarities_are_those_of_the_stored_texts(lookup: Lookup) -> None:
    texts = {doc_id(text).hex(): text for text in all_texts(lookup)}
    (answer,) = find_texts(lookup, [ANOTHER_ENDING])
    (match,) = answer.matches
    shingles = [naive_text.shingles(text, lookup.params.ngram) for text in (ANOTHER_ENDING, texts[match.doc_id])]
    assert match.jaccard == pytest.approx(naive_text.jaccard(*shingles), abs=0, rel=1e-12)
    assert 0 < match.jaccard < 1
    assert match.excerpt == beginning(texts[match.doc_id])


def test_an_exact_copy_is_found_in_each_of_its_rows(lookup: Lookup) -> None:
    (answer,) = find_texts(lookup, [small_corpus.CROSS_POOL])
    assert [(match.pool, match.is_identical, match.kept) for match in answer.matches] == [
        ("alpha", True, True),
        ("beta", True, False),
    ]
    rows = small_corpus.corpus_rows()
    for match in answer.matches:
        row = rows[match.pool][match.file.removesuffix(".parquet")][match.row_group * 12 + match.row]
        assert (row["text"], row["url"], row["dump"]) == (small_corpus.CROSS_POOL, match.url, match.dump)
        assert match.kept_doc_id == answer.doc_id
        assert (match.jaccard, match.estimated_jaccard, match.shared_bands) == (1.0, 1.0, 14)


def test_a_near_copy_is_found_with_what_is_kept_of_it(lookup: Lookup) -> None:
    (answer,) = find_texts(lookup, [ANOTHER_ENDING])
    (match,) = answer.matches
    assert not answer.is_identical
    assert match.kept
    assert match.doc_id in {doc_id(text).hex() for text in (small_corpus.NEAR_ORIGINAL, small_corpus.NEAR_COPY)}
    assert match.shared_bands > 0


def test_a_removed_near_copy_is_found_and_says_what_is_kept(lookup: Lookup) -> None:
    (answer,) = find_texts(lookup, [small_corpus.NEAR_COPY])
    first, second = answer.matches
    assert (first.is_identical, first.kept, first.reason) == (True, False, "near_duplicate")
    assert (second.is_identical, second.kept, second.doc_id) == (False, True, first.kept_doc_id)


def test_an_unknown_text_is_not_found(lookup: Lookup) -> None:
    assert [answer.matches for answer in find_texts(lookup, [UNKNOWN, small_corpus.UNIQUE.upper()[:20], ""])] == [
        ()
    ] * 3


def test_a_text_without_words_is_found_by_identity_alone(lookup: Lookup) -> None:
    for index in (None, memory_index(lookup)):
        known, unknown = find_texts(lookup, [small_corpus.WORDLESS, "…!"], index)
        assert known.is_wordless
        assert unknown.is_wordless
        assert [(match.is_identical, match.shared_bands) for match in known.matches] == [(True, 0)]
        assert not unknown.matches


def test_no_texts_have_no_answers(lookup: Lookup) -> None:
    assert find_texts(lookup, []) == []
    assert find_texts(lookup, [], memory_index(lookup)) == []


def test_in_mode_off_every_copy_is_kept_and_found(tmp_path: Path) -> None:
    folder = small_corpus.write_corpus(tmp_path)
    recipe = small_corpus.write_recipe(folder, {"dedup.mode": "off"})
    lookup = open_lookup(pipeline_of(small_corpus.build(recipe, folder / "home", upto="lsh_clusters")))
    texts = [small_corpus.EXACT, ANOTHER_ENDING]
    exact, near = find_texts(lookup, texts)
    assert [match.kept for match in exact.matches] == [True, True]
    assert {match.doc_id for match in near.matches} == {
        doc_id(text).hex() for text in (small_corpus.NEAR_ORIGINAL, small_corpus.NEAR_COPY)
    }
    assert find_texts(lookup, texts, memory_index(lookup)) == [exact, near]


# --- refusals


def test_another_recipes_signatures_are_refused_with_both_values(clean: Built, tmp_path: Path) -> None:
    small_corpus.write_corpus(tmp_path)
    for key, built_with, value in (("seed", 1, 2), ("ngram", 5, 4), ("num_bands", 14, 16)):
        recipe = small_corpus.write_recipe(tmp_path, {f"dedup.{key}": value})
        with pytest.raises(
            StateMismatch, match=rf"dedup\.{key}: this recipe says {value}, it was built with {built_with}"
        ):
            open_lookup(pipeline_of(Built(recipe=recipe, home=clean.home, refs={})))


def test_signatures_of_another_unicode_version_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = small_corpus.write_corpus(tmp_path)
    recipe = small_corpus.write_recipe(folder)
    with monkeypatch.context() as another_python:
        another_python.setattr(signing, "UNICODE_VERSION", "1.1.0")
        built = small_corpus.build(recipe, folder / "home", upto="lsh_clusters")
    with pytest.raises(StateMismatch, match=rf"unicode: .* say '{PARAMS.unicode_version}', it was signed with '1.1.0'"):
        open_lookup(pipeline_of(built))


@pytest.mark.parametrize("name", ["num_perm", "num_bands", "rows_per_band", "ngram", "seed", "scheme", "unicode"])
def test_each_parameter_that_differs_or_is_missing_is_named(lookup: Lookup, name: str) -> None:
    (unit, *_) = lookup.signed
    stored = dict(lookup.stage.open(unit)[1].parameters)
    refuse_other_parameters(stored, lookup.params, "here")
    for found in ({**stored, name: "other"}, {key: value for key, value in stored.items() if key != name}):
        with pytest.raises(StateMismatch, match=rf"^here: .*: {name}: .*{stored[name]!r}, .* {found.get(name)!r}\."):
            refuse_other_parameters(found, lookup.params, "here")


def test_an_index_of_other_bands_is_refused(lookup: Lookup) -> None:
    with pytest.raises(StateMismatch, match=r"112 values in 14 bands of 8 .* found 4 in 2 of 2"):
        find_texts(lookup, ["a"], empty_index(SMALL))


ASKED = [*small_corpus.PLANTED["beta"], ANOTHER_ENDING, UNKNOWN]


@pytest.fixture
def changed(tmp_path: Path) -> Built:
    """A home up to the clusters whose source has a new row since, which nothing has read yet."""
    folder = small_corpus.write_corpus(tmp_path)
    built = small_corpus.build(small_corpus.write_recipe(folder), folder / "home", upto="lsh_clusters")
    for path in (built.home / "_references").glob("*/run-built.json"):
        path.rename(path.with_name("run-first.json"))  # what is built next is another run
    small_corpus.write_rows(folder / "alpha" / "a_009.parquet", [{"text": UNKNOWN}])
    return built


def as_before(answers: list[Answer], expected: list[Answer]) -> bool:
    return [replace(answer, note="") for answer in answers] == expected


@pytest.mark.parametrize("upto", ["raw_row_groups", "reference_sets", "minhash_signatures"])
def test_the_last_clusters_answer_until_there_are_new_ones(
    changed: Built, find, upto: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = look_up(pipeline_of(changed), ASKED)
    assert {answer.note for answer in expected} == {""}
    small_corpus.build(changed.recipe, changed.home, upto=upto)
    answers = look_up(pipeline_of(changed), ASKED)
    assert as_before(answers, expected)
    assert not answers[-1].matches
    assert all(answer.note.startswith("raw_row_groups") for answer in answers)
    use(changed, monkeypatch)
    status, out, err = find(UNKNOWN)
    assert (status, err.count("\n")) == (1, 1)
    assert err == f"Note: {answers[0].note}\n"
    status, out, err = find("--json", UNKNOWN)
    assert (status, json.loads(out)["note"]) == (1, answers[0].note)
    small_corpus.build(changed.recipe, changed.home, upto="lsh_clusters")
    (answer,) = look_up(pipeline_of(changed), [UNKNOWN])
    assert (answer.is_identical, answer.note) == (True, "")


def test_a_run_that_failed_after_it_read_new_rows_changes_no_answer(changed: Built) -> None:
    expected = look_up(pipeline_of(changed), ASKED)
    (changed.recipe.parent / "held_out.txt").unlink()
    result = small_corpus.materialize(changed.recipe, changed.home, "raw_row_groups", "reference_sets")
    assert list(small_corpus.failures(result)) == ["reference_sets"]
    answers = look_up(pipeline_of(changed), ASKED)
    assert as_before(answers, expected)
    assert answers[0].note.startswith("raw_row_groups changed after lsh_clusters")


def test_clusters_that_are_held_back_leave_the_answer_to_those_before_them(changed: Built) -> None:
    expected = look_up(pipeline_of(changed), ASKED)
    small_corpus.build(changed.recipe, changed.home, upto="lsh_clusters")
    pipeline = pipeline_of(changed)
    pipeline.store.quarantine(pipeline.resolve("lsh_clusters"), "a_law", "it was broken")
    answers = look_up(pipeline, ASKED)
    assert as_before(answers, expected)
    assert "it was broken" in answers[0].note
    assert "earlier clusters answer. raw_row_groups, " in answers[0].note
    pipeline.store.lift(pipeline.resolve("lsh_clusters"), "a_law")
    (answer,) = look_up(pipeline, [UNKNOWN])
    assert (answer.is_identical, answer.note) == (True, "")


def test_clusters_whose_rows_nobody_recorded_are_refused(changed: Built) -> None:
    small_corpus.build(changed.recipe, changed.home, upto="raw_row_groups")
    (changed.home / "_references" / "raw_row_groups" / "run-first.json").unlink()
    with pytest.raises(StateMismatch, match=r"lsh_clusters: expected the raw_row_groups .* found no record of them"):
        open_lookup(pipeline_of(changed))


def test_a_corpus_that_a_check_holds_back_is_refused(clean: Built, tmp_path: Path) -> None:
    copy = small_corpus.copy_home(clean, tmp_path / "home")
    copy.stage.store.quarantine(copy.refs["lsh_clusters"], "a_law", "it was broken")
    with pytest.raises(FormatError, match="it was broken"):
        look_up(pipeline_of(copy), ["a"])


@pytest.mark.parametrize("members", [["zz" * 32], ["ab"], [""], ["ab" * 32], [doc_id(small_corpus.UNIQUE).hex()]])
def test_an_index_that_holds_what_is_not_near_is_refused(lookup: Lookup, members: list[str]) -> None:
    index = memory_index(lookup)
    signature = sign_documents(pa.array([ANOTHER_ENDING]), lookup.params)[0][0]
    for member in members:
        index.insert(member, minhash_of(signature, lookup.params), check_duplication=False)
    with pytest.raises(IndexDamaged, match=r"expected .*, found .*"):
        find_texts(lookup, [ANOTHER_ENDING], index)
    assert not find_texts(lookup, [UNKNOWN], index)[0].matches


def test_text_that_is_not_unicode_is_refused(lookup: Lookup) -> None:
    with pytest.raises(SourceError, match="expected valid Unicode"):
        find_texts(lookup, ["half \ud800 a pair"])


# --- Redis without a server


@pytest.mark.parametrize(
    ("given_value", "host", "port"), [("localhost:6379", "localhost", 6379), ("[::1]:7", "::1", 7)]
)
def test_an_address_is_read(given_value: str, host: str, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(REDIS_VARIABLE, raising=False)
    assert redis_address() is None
    address = redis_address(given_value)
    assert address == RedisAddress(host=host, port=port)
    assert str(address) == given_value
    monkeypatch.setenv(REDIS_VARIABLE, given_value)
    assert redis_address() == address
    assert redis_address("other:1") == RedisAddress(host="other", port=1)


@pytest.mark.parametrize(
    "wrong",
    [
        "localhost",
        "localhost:",
        ":6379",
        "a:0",
        "a:65536",
        "a:1x",
        "redis://a:1",
        "a:²",
        "a..b:1",
        f"{'a' * 64}:1",
        "\udcff:1",
    ],
)
def test_a_wrong_address_is_refused_and_shown(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RecipeError, match="--redis: expected HOST:PORT") as caught:
        redis_address(wrong)
    assert repr(wrong) in str(caught.value)
    monkeypatch.setenv(REDIS_VARIABLE, wrong)
    with pytest.raises(RecipeError, match=REDIS_VARIABLE):
        redis_address()


def test_an_address_with_a_password_is_refused_and_not_shown() -> None:
    with pytest.raises(RecipeError, match=PASSWORD_VARIABLE) as caught:
        redis_address("redis://:s3cret@localhost:6379")
    assert "s3cret" not in str(caught.value)


def test_the_configuration_holds_no_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PASSWORD_VARIABLE, "s3cret")
    assert "s3cret" not in repr(storage_config(RedisAddress(host="a", port=1), b"name"))


def test_a_missing_client_is_one_clear_error(clean: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(SourceError, match=r"expected the Python client `redis`.*pip install 'corpusmill\[redis\]'"):
        look_up(pipeline_of(clean), ["a"], RedisAddress(host="127.0.0.1", port=1))


# --- the command


@pytest.fixture
def find(clean: Built, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Run `find` in this process on the clean home: status, standard output, standard error."""
    use(clean, monkeypatch)

    def run(*arguments: str) -> tuple[int, str, str]:
        status = main(["find", *arguments])
        return status, *capsys.readouterr()

    return run


def use(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORPUSMILL_RECIPE", str(built.recipe))
    monkeypatch.setenv("CORPUSMILL_HOME", str(built.home))
    monkeypatch.delenv(REDIS_VARIABLE, raising=False)


def test_the_status_says_whether_it_was_found(find, clean: Built, tmp_path: Path, monkeypatch) -> None:
    before = sorted(clean.home.rglob("*"))
    status, out, err = find(small_corpus.CROSS_POOL)
    assert (status, err) == (0, "")
    assert "The very text is in the corpus: 2 found" in out
    assert "removed: exact_duplicate, kept is" in out
    status, out, _ = find(ANOTHER_ENDING)
    assert status == 0
    assert "Not this text but near ones are in the corpus: 1 found" in out
    status, out, err = find(UNKNOWN)
    assert (status, err) == (1, "")
    assert out.startswith("Not found among")
    assert "Whole documents are compared: a passage of a longer document is not found." in out
    assert find(small_corpus.LONG[:400])[0] == 1
    assert find(small_corpus.LONG)[0] == 0
    assert "no words" in find("…")[1]
    assert sorted(clean.home.rglob("*")) == before
    monkeypatch.setenv("CORPUSMILL_HOME", str(tmp_path / "none"))
    status, out, err = find(UNKNOWN)
    assert (status, out) == (2, "")
    assert "StateMismatch: lsh_clusters: expected an artifact" in err
    assert not (tmp_path / "none").exists()


def flip_a_byte(path: Path) -> None:
    """The smallest damage: the size stays, and the file can still be read."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def cut_in_half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def files_read(built: Built, text: str) -> dict[str, list[Path]]:
    """The files that an answer about a text rests on, by what they hold; those of units that hold nothing of it too."""
    store, refs = built.stage.store, built.refs
    signed = [unit for unit in units_in(built.stage, refs["minhash_signatures"]) if "." not in unit.unit]
    of_all = {
        "units": [store.folder(refs[asset]) / "units.json" for asset in ("raw_row_groups", "minhash_signatures")],
        **{
            name: [store.folder(unit) / name for unit in signed]
            for name in ("doc_id.npy", "band_keys.npy", "band_rows.npy")
        },
    }
    if text == UNKNOWN:
        return of_all
    return {
        **of_all,
        "signatures.npy": [store.folder(unit) / "signatures.npy" for unit in signed],
        "rows.parquet": [store.folder(unit) / "rows.parquet" for unit in units_in(built.stage, refs["raw_row_groups"])],
        "clusters": sorted((store.folder(refs["lsh_clusters"]) / "clusters").rglob("*.parquet")),
    }


@pytest.mark.parametrize("damage", [flip_a_byte, empty, cut_in_half, Path.unlink])
@pytest.mark.parametrize("text", [UNKNOWN, ANOTHER_ENDING, small_corpus.CROSS_POOL])
def test_damage_is_an_error_and_not_a_text_that_is_not_there(
    find, clean: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, damage
) -> None:
    copy = small_corpus.copy_home(clean, tmp_path / "home")
    use(copy, monkeypatch)
    answer = find(text)
    assert answer[0] == (1 if text == UNKNOWN else 0)
    for paths in files_read(copy, text).values():
        whole = {path: path.read_bytes() for path in paths}
        for path in paths:
            damage(path)
        status, out, err = find(text)
        assert (status, out, err.count("\n")) == (2, "", 1), paths
        assert err.startswith("FormatError: ")
        assert any(str(path) in err for path in paths)
        assert "aterialize" in err
        for path, content in whole.items():
            path.write_bytes(content)
    assert find(text) == answer


@pytest.mark.parametrize("text", [UNKNOWN, ANOTHER_ENDING])
def test_whichever_file_is_damaged_the_answer_is_right_or_refused(
    find, clean: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    copy = small_corpus.copy_home(clean, tmp_path / "home")
    use(copy, monkeypatch)
    answer = find(text)
    refused = []
    for asset in ("raw_row_groups", "minhash_signatures", "lsh_clusters"):
        for path in sorted((copy.home / asset).rglob("*")):
            if path.is_file() and path.name not in ("run.json", "manifest.json"):
                whole = path.read_bytes()
                flip_a_byte(path)
                found = find(text)
                assert found == answer or found[:2] == (2, ""), path
                refused += [path.name] if found != answer else []
                path.write_bytes(whole)
    assert {"units.json", "doc_id.npy", "band_keys.npy", "band_rows.npy"} <= set(refused)
    assert ("signatures.npy" in refused) == ("rows.parquet" in refused) == (text != UNKNOWN)


@pytest.mark.parametrize("asset", ["raw_row_groups", "minhash_signatures"])
def test_a_list_of_units_that_was_edited_is_damage(clean: Built, tmp_path: Path, asset: str) -> None:
    copy = small_corpus.copy_home(clean, tmp_path / "home")
    path = copy.folder(asset) / "units.json"
    units = json.loads(path.read_text())
    units[0]["counts"]["documents"] += 1
    path.write_text(json.dumps(units))
    with pytest.raises(FormatError, match=r"units\.json: expected .*, found .* materialize"):
        open_lookup(pipeline_of(copy))


def test_no_index_is_built_of_damaged_signatures(clean: Built, tmp_path: Path) -> None:
    copy = small_corpus.copy_home(clean, tmp_path / "home")
    lookup = open_lookup(pipeline_of(copy))
    flip_a_byte(lookup.stage.store.folder(lookup.signed[-1]) / "signatures.npy")
    with pytest.raises(FormatError, match=r"signatures\.npy: expected SHA-256"):
        memory_index(lookup)


def test_an_artifact_without_a_file_that_is_needed_is_of_another_version(lookup: Lookup) -> None:
    with pytest.raises(FormatError, match=r"expected a file another\.npy, found .* another version"):
        lookup.array(0, "another.npy")


def test_json_holds_what_is_known(find) -> None:
    status, out, _ = find("--json", "--limit", "1", small_corpus.CROSS_POOL)
    answer = json.loads(out)
    assert status == 0
    assert (answer["is_identical"], answer["num_matches"], len(answer["matches"])) == (True, 2, 1)
    assert answer["doc_id"] == answer["matches"][0]["doc_id"] == doc_id(small_corpus.CROSS_POOL).hex()
    assert answer["matches"][0]["pool"] == "alpha"
    status, out, _ = find("--json", UNKNOWN)
    assert (status, json.loads(out)["matches"]) == (1, [])


def test_what_reference_sets_exclude_says_so_and_names_nothing_as_kept(tmp_path: Path, find, monkeypatch) -> None:
    folder = small_corpus.write_corpus(tmp_path)
    references = [
        {"name": "sample", "kind": "tokenizer_sample", "documents_per_pool": 12},
        {"name": "benchmark", "kind": "file", "path": "held_out.txt", "action": "exclude"},
        {"name": "also", "kind": "file", "path": "held_out.txt", "action": "train_only"},
    ]
    recipe = small_corpus.write_recipe(folder, {"references": references})
    built = small_corpus.build(recipe, folder / "home", upto="lsh_clusters")
    use(built, monkeypatch)
    status, out, _ = find("--json", small_corpus.HELD_OUT)
    matches = json.loads(out)["matches"]
    assert status == 0
    assert [(match["kept"], match["reason"], match["kept_doc_id"], match["excluded_by"]) for match in matches] == [
        (False, "reference", None, ["benchmark"])
    ]
    _, out, _ = find(small_corpus.HELD_OUT)
    assert "\n  removed: its cluster matches the reference sets that exclude, benchmark\n" in out
    assert "kept is" not in out
    _, out, _ = find("--json", small_corpus.CROSS_POOL)
    assert [match["excluded_by"] for match in json.loads(out)["matches"]] == [[], []]
    assert all(match["kept_doc_id"] for match in json.loads(out)["matches"])


def test_a_limit_says_what_it_leaves_out(find) -> None:
    _, out, _ = find("--limit", "1", small_corpus.CROSS_POOL)
    assert out.endswith("1 more; raise --limit to see them.\n")
    assert out.count("identical (") == 1


@pytest.mark.parametrize("ending", ["", "\n", "\r\n"])
def test_a_file_is_found_with_and_without_its_last_line_end(find, tmp_path: Path, ending: str, monkeypatch) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes((small_corpus.CRLF + ending).encode())
    status, out, _ = find("--file", str(path))
    assert status == 0
    assert "The very text" in out
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(path.read_bytes())))
    assert find("-") == (status, out, "")


def test_what_cannot_be_read_is_an_error(find, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(b"\xff")
    for arguments, message in (
        (("--file", str(path)), "expected UTF-8"),
        (
            ("--file", str(tmp_path / "none")),
            "none: expected a text to look up, found No such file or directory. Correct --file.",
        ),
        (("\udcff",), "expected valid Unicode"),
        (("--redis", "nowhere", "a"), "expected HOST:PORT"),
    ):
        status, out, err = find(*arguments)
        assert (status, out) == (2, ""), arguments
        assert message in err


def test_an_empty_text_is_an_error_and_not_a_text_that_is_not_there(find, tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "text.txt"
    for content in ("", "\n", "\r\n"):
        path.write_bytes(content.encode())
        status, out, err = find("--file", str(path))
        assert (status, out) == (2, "")
        assert err.startswith(f"SourceError: {path}: expected a text to look up, found it empty.")
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content.encode())))
        assert find("-")[:2] == (2, "")
    assert find("")[:2] == (2, "")
    assert find(" ")[0] == 1


def test_the_help_says_that_whole_documents_are_compared(find, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        find("--help")
    assert "Whole documents are compared" in " ".join(capsys.readouterr().out.split())


def test_each_mistake_of_a_recipe_has_a_line_of_its_own(find, tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text('name: "\\e[31m"\n')
    monkeypatch.setenv("CORPUSMILL_RECIPE", str(path))
    status, out, err = find("a")
    assert (status, out) == (2, "")
    assert len(err.splitlines()) == err.count("Mend the recipe") > 1
    assert "\x1b" not in err


@pytest.mark.parametrize("arguments", [[], ["a", "--file", "b"], ["--limit", "0", "a"], ["--limit", "x", "a"]])
def test_a_wrong_call_has_status_2(find, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        find(*arguments)
    assert caught.value.code == 2


def test_no_text_of_the_corpus_reaches_a_terminal_raw(find, hostile: Built, monkeypatch) -> None:
    use(hostile, monkeypatch)
    status, out, _ = find(HOSTILE)
    assert status == 0
    assert all(character.isprintable() or character == "\n" for character in out)
    for spelled in (
        r"\x1b[2J",
        r"\x1b]0;owned\x07",
        r"\x9b31m",
        r"\x7f",
        r"\u202e",
        r"\u2028",
        r"example/\x1b[31m",
        r"\x1bc",
    ):
        assert spelled in out
    _, out, _ = find("--json", HOSTILE)
    assert all(" " <= character <= "~" or character == "\n" for character in out)
    (match,) = json.loads(out)["matches"]
    assert (match["url"], match["excerpt"]) == (HOSTILE_URL, beginning(HOSTILE))


def test_no_string_of_the_web_fills_the_terminal(find, tmp_path: Path, monkeypatch) -> None:
    folder = small_corpus.write_corpus(tmp_path)
    url, dump = "https://example/" + "a" * 100_000, " \n d" * 100_000
    small_corpus.write_rows(folder / "beta" / "b_001.parquet", [{"text": UNKNOWN * 1_000, "url": url, "dump": dump}])
    use(small_corpus.build(small_corpus.write_recipe(folder), folder / "home", upto="lsh_clusters"), monkeypatch)
    (path := tmp_path / "text.txt").write_text(UNKNOWN * 1_000, encoding="utf-8")
    status, out, _ = find("--file", str(path))
    assert status == 0
    assert max(map(len, out.splitlines())) < 1_000
    assert f"  {beginning(url)}  {beginning(dump)}  b_001.parquet row group 0 row 0\n" in out
    _, out, _ = find("--json", "--file", str(path))
    (match,) = json.loads(out)["matches"]
    assert (match["url"], match["dump"]) == (url, dump)


def test_a_terminal_that_knows_ascii_alone_gets_an_answer(clean: Built, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text(small_corpus.CJK, encoding="utf-8")
    done = small_corpus.run_command(clean.recipe, clean.home, "find", "--file", str(path), PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert "The very text" in done.stdout
    assert r"\u4e2d\u6587" in done.stdout
