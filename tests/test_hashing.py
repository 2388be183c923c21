import hashlib
import json

import naive_text
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from training_io.hashing import canonical_json, derive_seed, identity_of, keyed_hash, mix64, sha256_file

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda children: st.lists(children) | st.dictionaries(st.text(), children),
    max_leaves=10,
)
doc_ids = st.lists(st.binary(min_size=32, max_size=32), max_size=6)
uint64 = st.integers(0, 2**64 - 1)


# Changing one of these changes splits, orders and kept documents of everyone: a version bump.
GOLDEN_SEEDS = [14645424786182763407, 7897901244767672573, 14747386916547307322, 1045088672301229376]
GOLDEN_NEXT_SEED = 84490234080972676
GOLDEN_HASHES = [15995648480080651192, 8680959174244271952, 4004840532087662475]


def as_array(ids):
    return np.frombuffer(b"".join(ids), dtype=np.uint8).reshape(-1, 32)


@given(plain)
def test_canonical_json_means_the_same_value(value):
    encoded = canonical_json(value)
    assert json.loads(encoded) == value
    assert canonical_json(json.loads(encoded)) == encoded


def test_canonical_json_has_one_form():
    assert (
        canonical_json({"b": 1, "a": (True, None, 0.5), "é": "中\n"})
        == '{"a":[true,null,0.5],"b":1,"é":"中\\n"}'.encode()
    )
    assert canonical_json({"a": 1, "b": 2}) == canonical_json({"b": 2, "a": 1})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {"a": -float("inf")}, {1, 2}, b"bytes", np.int64(1)])
def test_what_has_no_json_form_is_refused(value):
    with pytest.raises((ValueError, TypeError)):
        canonical_json(value)


def test_golden_identity():
    expected = hashlib.sha256(b'{"a":1}').hexdigest()
    assert identity_of({"a": 1}) == expected == "015abd7f5cc57a2dd94b7590f04ad8084273905ee33ec5cebeae62276a97f862"


def test_a_file_is_hashed_by_its_bytes(tmp_path):
    path = tmp_path / "file"
    for content in (b"", b"abc", bytes(300_000)):
        path.write_bytes(content)
        assert sha256_file(path) == hashlib.sha256(content).hexdigest()


def test_golden_seeds():
    assert [derive_seed(1337, name) for name in ("split", "shuffle", "kept", "epochs")] == GOLDEN_SEEDS
    assert derive_seed(1338, "split") == GOLDEN_NEXT_SEED


@given(uint64, st.text(max_size=8), uint64, st.text(max_size=8))
def test_a_seed_is_the_head_of_a_hash_and_every_name_has_its_own(seed, name, other_seed, other_name):
    digest = hashlib.sha256(json.dumps([seed, name], separators=(",", ":"), ensure_ascii=False).encode()).digest()
    assert derive_seed(seed, name) == int.from_bytes(digest[:8], "little")
    same = (seed, name) == (other_seed, other_name)
    assert (derive_seed(seed, name) == derive_seed(other_seed, other_name)) == same


def unmix64(value):
    """The inverse of MurmurHash3's finalizer: the xor-shifts by 33 undo themselves, the factors have inverses."""
    for factor in (0xC4CEB9FE1A85EC53, 0xFF51AFD7ED558CCD):
        value ^= value >> 33
        value = value * pow(factor, -1, 1 << 64) % (1 << 64)
    return value ^ value >> 33


@given(st.lists(uint64, max_size=8))
def test_mix64_is_murmurs_finalizer_and_loses_nothing(values):
    mixed = mix64(np.array(values, dtype=np.uint64))
    assert mixed.dtype == np.uint64
    assert mixed.tolist() == [naive_text.fmix64(value) for value in values]
    assert [unmix64(value) for value in mixed.tolist()] == values


@given(doc_ids, uint64)
def test_keyed_hash_equals_plain_integers(ids, key):
    hashes = keyed_hash(as_array(ids), key)
    assert hashes.dtype == np.uint64
    assert hashes.tolist() == [naive_text.keyed_hash(doc_id, key) for doc_id in ids]


@given(doc_ids, uint64)
def test_keyed_hash_looks_at_nothing_but_the_bytes(ids, key):
    array = as_array(ids)
    spread = np.zeros((len(ids), 64), np.uint8)[:, ::2]
    spread[:] = array
    assert keyed_hash(spread, key).tolist() == keyed_hash(array, key).tolist()
    assert keyed_hash(array[::-1], key).tolist() == keyed_hash(array, key).tolist()[::-1]


@pytest.mark.parametrize(
    "wrong",
    [np.zeros((2, 31), np.uint8), np.zeros((2, 32), np.int8), np.zeros(32, np.uint8), np.zeros((2, 4), np.uint64)],
)
def test_what_is_no_matrix_of_doc_ids_is_our_mistake(wrong):
    with pytest.raises(AssertionError):
        keyed_hash(wrong, 1)


def test_golden_keyed_hashes():
    ids = [hashlib.sha256(text).digest() for text in (b"", b"a", b"corpusmill")]
    assert keyed_hash(as_array(ids), 1337).tolist() == GOLDEN_HASHES
