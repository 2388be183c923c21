"""The measured S-curve: broken families fail it, sound ones pass, and its documents are drawn by their content."""

import hashlib
from itertools import pairwise
from math import comb, inf, sqrt

import naive_text
import numpy as np
import pyarrow as pa
import pytest
import small_corpus
from hypothesis import given
from hypothesis import strategies as st

from pipeline_assets.pictures import MAX_PICTURE_BYTES, interval_picture
from pipeline_assets.scurve import BINS_NAME, PAIRS_NAME, PICTURE_NAME, curve_of
from pipeline_assets.stripes import units_in
from pipeline_assets.transforms.minhash import MinHashParams, sign_documents
from pipeline_assets.transforms.scurve import (
    CHARACTERS_PER_WORD,
    MAX_FALSE_ALARMS,
    chance_of_share,
    draw_order,
    measure_scurve,
    middle_words,
    plant_pairs,
    wilson_interval,
)
from pipeline_assets.transforms.shingles import unique_shingles
from pipeline_assets.transforms.words import words
from resources.tables import read_json, read_table
from training_io.errors import StateMismatch
from training_io.hashing import mix64
from training_io.manifest import load_manifest

PARAMS = MinHashParams()


def synthetic_texts(num_texts, num_words, seed):
    generator = np.random.default_rng(seed)
    return [" ".join(f"w{word}" for word in generator.integers(0, 5000, num_words)) for _ in range(num_texts)]


@pytest.fixture(scope="module")
def planted():
    return plant_pairs(synthetic_texts(300, 120, seed=3), copies_per_text=10, max_replaced_share=0.12, seed=8)


def signer_of(hashes_of):
    """Signatures by another hash family: uint64[shingles, 1] -> uint64[shingles, num_perm], of which the least count."""

    def sign(texts, params):
        sets = [unique_shingles(text, params.ngram).astype(np.uint64)[:, None] for text in texts.to_pylist()]
        return np.array([hashes_of(one).min(axis=0) for one in sets]), None

    return sign


def correlated_family(seed):
    """h(x) = (a x + b) mod (2^61 - 1) with a, b and x below 2^32: the product wraps at most 8 times."""
    a, b = np.random.default_rng(seed).integers(0, 2**32, (2, PARAMS.num_perm), dtype=np.uint64)
    return signer_of(lambda x: (x * a + b) % np.uint64((1 << 61) - 1))


def mixing_family(seed):
    """Top 32 bits of mix64(x xor seed_i): MurmurHash3's finalizer over 64-bit seeds."""
    seeds = np.random.default_rng(seed).integers(0, 2**64, PARAMS.num_perm, dtype=np.uint64)
    return signer_of(lambda x: mix64(x ^ seeds) >> np.uint64(32))


@pytest.mark.parametrize("sign", [sign_documents, mixing_family(1)], ids=["ours", "xor and mix64"])
def test_independent_families_follow_the_curve(planted, sign):
    measured, curve = measure_scurve(planted.texts, planted.pairs, PARAMS, sign=sign)
    assert curve.agrees, curve
    assert curve.num_pairs == len(measured.similarity) == 3000
    assert curve.num_flagged == measured.is_flagged.sum()
    assert curve.chance > 0.05
    assert abs(curve.error_z) < 3
    assert 0.2 < curve.num_flagged / curve.num_pairs < 0.95
    assert 0.03 < curve.signature_error < 0.05
    assert abs(curve.mean_bias) < 0.005
    # The curve is measured where it is steep, not only at its ends.
    assert sum(0.1 < one.predicted < 0.9 and one.num_pairs > 100 for one in curve.bins) >= 4
    # Wilson's interval covers less where less than a few pairs are expected to be flagged, or not to be.
    many = [one for one in curve.bins if 5 / one.num_pairs < one.predicted < 1 - 5 / one.num_pairs]
    outside = [one for one in many if not one.low <= one.predicted <= one.high]
    assert len(many) >= 7
    assert len(outside) <= 2  # at 95 %
    for one in curve.bins:
        assert one.start <= one.similarity < one.end or one.end == one.similarity == 1
        assert one.low <= one.flagged <= one.high


@pytest.mark.parametrize("seed", [1, 2])
def test_a_correlated_family_is_rejected(planted, seed):
    _, curve = measure_scurve(planted.texts, planted.pairs, PARAMS, sign=correlated_family(seed))
    assert not curve.agrees
    assert 0.13 < curve.signature_error < 0.22
    assert curve.signature_error > 3 * curve.expected_error
    assert curve.error_z > 10
    assert curve.max_abs_z > 10
    assert curve.chance < 1e-6
    (third,) = [one for one in curve.bins if one.start == 0.3]
    assert third.num_pairs > 100
    assert third.predicted < 0.003
    assert 0.02 < third.flagged < 0.2
    assert third.low > third.predicted


def test_a_family_of_half_as_many_functions_each_twice_is_rejected(planted):
    def sign(texts, params):
        signatures, stats = sign_documents(texts, MinHashParams(num_perm=56, num_bands=7))
        return np.repeat(signatures, 2, axis=1), stats

    _, curve = measure_scurve(planted.texts, planted.pairs, PARAMS, sign=sign)
    assert not curve.agrees
    assert curve.error_ratio == pytest.approx(sqrt(2), rel=0.05)
    assert curve.chance < MAX_FALSE_ALARMS


@pytest.mark.parametrize(("num_bands", "rows_per_band"), [(4, 4), (14, 8)])
def test_texts_of_one_template_raise_no_false_alarm(num_bands, rows_per_band):
    template = [f"shared{place}" for place in range(200)]
    texts = [" ".join([*template, *(f"own{number}x{place}" for place in range(38))]) for number in range(20)]
    planted = plant_pairs(texts, copies_per_text=20, max_replaced_share=0.12, seed=2)
    shape = {"num_perm": num_bands * rows_per_band, "num_bands": num_bands, "rows_per_band": rows_per_band}
    curves = [
        measure_scurve(planted.texts, planted.pairs, MinHashParams(**shape, seed=seed))[1] for seed in range(1, 21)
    ]
    assert all(curve.agrees for curve in curves)
    outside = [not one.low <= one.predicted <= one.high for curve in curves for one in curve.bins]
    assert np.mean(outside) < 0.08  # of 95 % intervals, some of few pairs


def test_exact_similarity_and_equal_values_are_those_of_the_plain_versions():
    planted = plant_pairs(synthetic_texts(4, 40, seed=5), copies_per_text=3, max_replaced_share=0.3, seed=1)
    measured, _ = measure_scurve(planted.texts, planted.pairs, PARAMS)
    signatures, _ = sign_documents(pa.array(planted.texts), PARAMS)
    for row, (left, right) in enumerate(planted.pairs.tolist()):
        sets = [set(naive_text.shingles(planted.texts[number], 5)) for number in (left, right)]
        assert measured.similarity[row] == pytest.approx(naive_text.jaccard(*sets))
        equal = [a == b for a, b in zip(signatures[left].tolist(), signatures[right].tolist(), strict=True)]
        assert measured.num_equal[row] == sum(equal)
        assert measured.is_flagged[row] == any(all(equal[band : band + 8]) for band in range(0, 112, 8))


def test_nothing_to_measure_agrees_with_nothing():
    planted = plant_pairs([], copies_per_text=20, max_replaced_share=0.12, seed=1)
    measured, curve = measure_scurve(planted.texts, planted.pairs, PARAMS)
    assert len(measured.similarity) == curve.num_pairs == 0
    assert (curve.bins, curve.chance) == ((), 1.0)
    assert not curve.agrees


def test_copies_without_a_change_leave_nothing_to_err_about():
    texts = synthetic_texts(2, 30, seed=1)
    planted = plant_pairs(texts, copies_per_text=2, max_replaced_share=0.0, seed=1)
    _, curve = measure_scurve(planted.texts, planted.pairs, PARAMS)
    assert (curve.error_ratio, curve.agrees) == (1.0, True)

    def sign_by_place(texts, params):
        return np.arange(len(texts) * params.num_perm).reshape(-1, params.num_perm), None

    _, curve = measure_scurve(planted.texts, planted.pairs, PARAMS, sign=sign_by_place)
    assert (curve.error_ratio, curve.agrees) == (inf, False)


def test_planting_replaces_the_asked_share_by_words_that_occur_nowhere(planted):
    vocabulary = {word for text in planted.texts[:3000] for word in words(text)}
    shares, new_words = [], []
    for original, copy in planted.pairs.tolist():
        before, after = words(planted.texts[original]), words(planted.texts[copy])
        changed = [word for old, word in zip(before, after, strict=True) if old != word]
        shares.append(len(changed) / len(before))
        new_words += changed
    assert not vocabulary & set(new_words)
    assert len(set(new_words)) == len(new_words) > 1000
    assert max(shares) < 0.25
    assert 0.05 < np.mean(shares) < 0.07
    assert np.quantile(shares, 0.1) < 0.02
    assert np.quantile(shares, 0.9) > 0.1


def test_planting_depends_on_the_seed_alone():
    texts = synthetic_texts(3, 30, seed=1)
    first, again, other = (plant_pairs(texts, copies_per_text=2, max_replaced_share=0.5, seed=s) for s in (1, 1, 2))
    assert first.texts == again.texts
    assert first.texts != other.texts
    assert first.pairs.tolist() == [[0, 6], [1, 7], [2, 8], [3, 9], [4, 10], [5, 11]]


def test_no_two_pairs_share_a_word_and_equal_words_stay_equal():
    texts = ["The cat, the CAT; 東京 and the cat 東", "0w0 1w0 0n1 0w0", "The cat, the CAT; 東京 and the cat 東"]
    planted = plant_pairs(texts, copies_per_text=3, max_replaced_share=0.4, seed=4)
    said = [naive_text.words(text) for text in planted.texts]
    for pair, original in enumerate(said[:9]):
        before = naive_text.words(texts[pair // 3])
        assert len(original) == len(said[9 + pair]) == len(before)
        assert len(set(zip(before, original, strict=True))) == len(set(before)) == len(set(original))
    by_pair = [{*said[pair], *said[9 + pair]} for pair in range(9)]
    assert sum(map(len, by_pair)) == len(set().union(*by_pair))
    assert any(set(said[pair]) != set(said[9 + pair]) for pair in range(9))


def binomial(num_trials, chance):
    return [
        comb(num_trials, hits) * chance**hits * (1 - chance) ** (num_trials - hits) for hits in range(num_trials + 1)
    ]


@pytest.mark.parametrize("chances", [[0.5] * 12, [0.02] * 40, [0.9] * 7 + [0.99] * 20, [0.1, 0.4, 0.7, 0.2] * 5, [1.0]])
def test_the_chance_of_a_share_is_no_less_than_both_tails(chances):
    exact = np.ones(1)
    for chance in chances:
        exact = np.convolve(exact, [1 - chance, chance])
    bounds = [chance_of_share(hits, len(chances), float(np.mean(chances))) for hits in range(len(chances) + 1)]
    for hits, bound in enumerate(bounds):
        assert bound == 1 or min(exact[hits:].sum(), exact[: hits + 1].sum()) <= bound / 2 * (1 + 1e-9)
    # Whatever limit is taken, at most so many sound families are beyond it.
    for limit in (0.2, 0.01, MAX_FALSE_ALARMS):
        assert sum(exact[hits] for hits, bound in enumerate(bounds) if bound < limit) <= limit


def test_a_share_that_nothing_allows_has_no_chance():
    assert (chance_of_share(1, 9, 0.0), chance_of_share(8, 9, 1.0)) == (0.0, 0.0)
    assert (chance_of_share(0, 9, 0.0), chance_of_share(9, 9, 1.0)) == (1.0, 1.0)


def test_the_errors_of_signatures_are_told_in_standard_deviations_of_binomial_ones():
    texts = synthetic_texts(3, 40, seed=5)
    planted = plant_pairs(texts, copies_per_text=4, max_replaced_share=0.3, seed=1)
    measured, curve = measure_scurve(planted.texts, planted.pairs, MinHashParams(num_perm=16, num_bands=2))
    off = variance = 0.0
    for similarity, num_equal in zip(measured.similarity.tolist(), measured.num_equal.tolist(), strict=True):
        weights, squares = binomial(16, similarity), [(equal / 16 - similarity) ** 2 for equal in range(17)]
        mean = sum(weight * square for weight, square in zip(weights, squares, strict=True))
        variance += sum(weight * (square - mean) ** 2 for weight, square in zip(weights, squares, strict=True))
        off += (num_equal / 16 - similarity) ** 2 - mean
    assert curve.error_z == pytest.approx(off / sqrt(variance))


def test_more_of_what_is_off_is_less_likely():
    for later, earlier in pairwise(chance_of_share(hits, 50, 0.3) for hits in range(50, 20, -1)):
        assert later < earlier


@pytest.mark.parametrize(
    ("hits", "trials", "low", "high"), [(0, 10, 0.0, 0.2775), (5, 10, 0.2366, 0.7634), (10, 10, 0.7225, 1.0)]
)
def test_wilson_intervals(hits, trials, low, high):
    assert wilson_interval(hits, trials) == pytest.approx((low, high), abs=1e-4)


def doc_ids_of(numbers):
    return np.array([list(hashlib.sha256(str(number).encode()).digest()) for number in numbers], np.uint8).reshape(
        -1, 32
    )


@given(st.lists(st.integers(0, 30), max_size=40), st.randoms(use_true_random=False), st.integers(0, 2**64 - 1))
def test_documents_are_drawn_by_content_and_each_text_once(numbers, random, key):
    drawn = [numbers[row] for row in draw_order(doc_ids_of(numbers), key).tolist()]
    shuffled = random.sample(numbers, len(numbers))
    assert drawn == [shuffled[row] for row in draw_order(doc_ids_of(shuffled), key).tolist()]
    assert sorted(drawn) == sorted(set(numbers))


def test_what_is_drawn_are_not_the_first_rows():
    first, other = (draw_order(doc_ids_of(range(2000)), key)[:200] for key in (1, 2))
    assert 800 < first.mean() < 1200
    assert len(np.intersect1d(first, other)) < 60


@given(st.text(alphabet="ab ,東", max_size=80), st.integers(1, 6))
def test_the_middle_is_a_run_of_the_texts_words(text, max_words):
    found = naive_text.words(text)
    middle = middle_words(text, max_words)
    # Of a longer text only the middle is looked at, where a word may be cut.
    if len(text) <= CHARACTERS_PER_WORD * max_words:
        first = max(0, (len(found) - max_words) // 2)
        assert middle == found[first : first + max_words]
    assert len(middle) <= max_words


def test_a_text_without_spaces_is_cut_as_well():
    assert middle_words("東京" * 50_000, 300) == ["東", "京"] * 150


def test_a_picture_shows_intervals_and_is_small():
    curve = ("curve", [0.0, 0.5, 1.0], [0.0, 0.1, 1.0])
    picture, same, wider = (
        interval_picture("Title", "x", "y", curve, ("points", [0.2, 0.9], [0.0, 1.0], intervals))
        for intervals in ([(0.0, 0.1), (0.8, 1.0)], [(0.0, 0.1), (0.8, 1.0)], [(0.0, 0.3), (0.6, 1.0)])
    )
    assert picture.startswith(b"\x89PNG")
    assert len(picture) < MAX_PICTURE_BYTES
    assert picture == same != wider


def curve_files(built):
    stage = built.stage
    return stage.store.folder(curve_of(stage, built.refs["minhash_signatures"]))


def test_the_curve_is_measured_when_the_signatures_are_sealed(clean):
    folder, counts = curve_files(clean), load_manifest(curve_files(clean)).counts
    texts = {row["text"] for rows in small_corpus.corpus_rows().values() for file in rows.values() for row in file}
    long_enough = [text for text in texts if text and len(words(text)) >= 20]
    assert len(long_enough) > 100
    assert counts["texts"] == len(long_enough)
    assert counts["pairs"] == 20 * counts["texts"]
    pairs = read_table(folder / PAIRS_NAME).to_pylist()
    assert len(pairs) == counts["pairs"]
    assert sum(row["flagged"] for row in pairs) == counts["flagged"] > 0
    assert sum(row["num_pairs"] for row in read_json(folder / BINS_NAME)) == counts["pairs"]
    metadata = small_corpus.materialized_metadata(clean.result)["minhash_signatures"]
    assert "](data:image/png;base64," in metadata["scurve"]
    assert len(metadata["scurve_table"].records) == len(read_json(folder / BINS_NAME))
    assert metadata["scurve_max_abs_z"] == counts["max_abs_z"]
    assert 0 < (folder / PICTURE_NAME).stat().st_size < MAX_PICTURE_BYTES


def test_the_curve_is_none_of_the_signed_units(clean):
    names = [unit.unit for unit in units_in(clean.stage, clean.refs["minhash_signatures"])]
    rows = [unit.unit for unit in units_in(clean.stage, clean.refs["raw_row_groups"])]
    assert names == [*rows, "references.sample", "references.held_out"]


def test_signatures_that_were_sealed_without_a_curve_are_refused(clean):
    unit = units_in(clean.stage, clean.refs["minhash_signatures"])[0]
    with pytest.raises(StateMismatch, match=r"expected one measured curve .* found 0\. .* materialize"):
        curve_of(clean.stage, unit)


def test_stripes_change_nothing_that_is_measured(clean, tmp_path):
    home = tmp_path / "home"
    recipe = small_corpus.write_recipe(
        clean.recipe.parent, {"reading.stripes": 3, "reading.stripes_read": 3}, "scurve_stripes.yaml"
    )
    other = small_corpus.build(recipe, home, upto="minhash_signatures")
    assert other.refs["raw_row_groups"].digest != clean.refs["raw_row_groups"].digest
    for name in (PAIRS_NAME, BINS_NAME, PICTURE_NAME):
        assert (curve_files(other) / name).read_bytes() == (curve_files(clean) / name).read_bytes()


def test_a_changed_family_or_seed_is_measured_anew_and_nothing_else_is(clean, tmp_path):
    copy = small_corpus.copy_home(clean, tmp_path / "home")

    def measured(changes):
        recipe = small_corpus.write_recipe(copy.recipe.parent, changes, "scurve_changed.yaml")
        return curve_files(small_corpus.build(recipe, copy.home, upto="minhash_signatures"))

    same = curve_files(copy)
    assert measured({"packs.buffer": 7}) == measured({"references": small_corpus.RECIPE["references"][:1]}) == same
    assert measured({"dedup.seed": 2}) != same
    assert measured({"seed": 12}) != same


def test_a_corpus_of_short_texts_is_sealed_and_said_not_to_be_measured(tmp_path):
    small_corpus.write_rows(tmp_path / "alpha" / "a.parquet", [{"text": f"only {n} words"} for n in range(30)])
    changes = {
        "source.pools": [{"name": "alpha", "path": "alpha"}],
        "references": small_corpus.RECIPE["references"][:1],
    }
    built = small_corpus.build(
        small_corpus.write_recipe(tmp_path, changes), tmp_path / "home", upto="minhash_signatures"
    )
    assert load_manifest(curve_files(built)).counts["pairs"] == 0
    verdict = small_corpus.judged("s_curve_matches_formula", built)
    assert verdict.num_violations == 1
    assert "nothing can be measured" in verdict.found


def test_each_text_of_a_template_is_measured(tmp_path):
    template = " ".join(f"shared{place}" for place in range(200))
    rows = [{"text": f"own{number} {template} end{number}"} for number in range(60)]
    small_corpus.write_rows(tmp_path / "alpha" / "a.parquet", rows)
    changes = {
        "source.pools": [{"name": "alpha", "path": "alpha"}],
        "references": small_corpus.RECIPE["references"][:1],
        "dedup.num_bands": 4,
        "dedup.rows_per_band": 4,
    }
    recipe = small_corpus.write_recipe(tmp_path, changes)
    built = small_corpus.build(recipe, tmp_path / "home", upto="minhash_signatures")
    counts = load_manifest(curve_files(built)).counts
    assert (counts["texts"], counts["pairs"]) == (60, 1200)  # though they are equal when cut
    assert small_corpus.judged("s_curve_matches_formula", built).num_violations == 0


def test_a_curve_is_held_back_with_its_asset(clean, tmp_path):
    copy = small_corpus.copy_home(clean, tmp_path / "home")
    ref, folder = copy.refs["minhash_signatures"], curve_files(copy)
    copy.stage.store.quarantine(ref, "a_check", "a reason")
    assert (folder / "quarantine.json").exists()
    copy.stage.store.lift(ref, "a_check")
    assert not (folder / "quarantine.json").exists()
