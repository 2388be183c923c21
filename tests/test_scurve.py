import naive_text
import numpy as np
import pytest

from pipeline_assets.transforms.minhash import MinHashParams
from pipeline_assets.transforms.scurve import measure_scurve, plant_pairs, wilson_interval
from pipeline_assets.transforms.shingles import shingle_hashes
from pipeline_assets.transforms.words import words

PARAMS = MinHashParams()


def synthetic_texts(num_texts, num_words, seed):
    generator = np.random.default_rng(seed)
    return [" ".join(f"w{word}" for word in generator.integers(0, 5000, num_words)) for _ in range(num_texts)]


@pytest.fixture(scope="module")
def planted():
    return plant_pairs(synthetic_texts(400, 150, seed=3), copies_per_text=2, max_replaced_share=0.12, seed=8)


def correlated_family(texts, params):
    """h(x) = (a x + b) mod (2^61 - 1) with a, b and x below 2^32: the product wraps at most 8 times."""
    generator = np.random.default_rng(1)
    a, b = generator.integers(1, 2**32, (2, params.num_perm), dtype=np.uint64)
    rows = []
    for text in texts.to_pylist():
        x = np.unique(shingle_hashes(text, params.ngram)).astype(np.uint64)
        rows.append(((x[:, None] * a + b) % np.uint64((1 << 61) - 1)).min(axis=0))
    return np.array(rows), None


def test_our_family_follows_the_curve(planted):
    measured = measure_scurve(planted.texts, planted.pairs, PARAMS)
    assert measured.agrees, measured
    assert measured.num_pairs == 800
    assert 0.2 < measured.num_flagged / measured.num_pairs < 0.95
    # The curve is measured where it is steep, not only at its ends.
    assert sum(0.1 < one.predicted < 0.9 and one.num_pairs > 20 for one in measured.bins) >= 4
    assert abs(measured.mean_bias) < 0.01
    for one in measured.bins:
        assert one.start <= one.centre < one.end
        assert one.low <= one.flagged <= one.high


def test_a_correlated_family_is_rejected(planted):
    measured = measure_scurve(planted.texts, planted.pairs, PARAMS, sign=correlated_family)
    assert not measured.agrees
    assert measured.error_ratio > 2
    assert measured.max_abs_z > 4


def test_planting_replaces_the_asked_share_by_words_that_occur_nowhere(planted):
    vocabulary = {word for text in planted.texts[:400] for word in words(text)}
    shares, new_words = [], []
    for original, copy in planted.pairs.tolist():
        before, after = words(planted.texts[original]), words(planted.texts[copy])
        changed = [word for old, word in zip(before, after, strict=True) if old != word]
        shares.append(len(changed) / len(before))
        new_words += changed
    assert not vocabulary & set(new_words)
    assert len(set(new_words)) == len(new_words) > 1000
    assert max(shares) < 0.25
    assert 0.04 < np.mean(shares) < 0.08


def test_planting_depends_on_the_seed_alone():
    texts = synthetic_texts(3, 30, seed=1)
    first, again, other = (plant_pairs(texts, copies_per_text=2, max_replaced_share=0.5, seed=s) for s in (1, 1, 2))
    assert first.texts == again.texts
    assert first.texts != other.texts
    assert first.pairs.tolist() == [[0, 3], [0, 4], [1, 5], [1, 6], [2, 7], [2, 8]]


def test_planted_words_avoid_what_the_texts_contain():
    texts = ["planted0n0 PLANTEDX0n1 and more", "other"]
    planted = plant_pairs(texts, copies_per_text=1, max_replaced_share=1.0, seed=4)
    originals = {word for text in texts for word in naive_text.words(text)}
    kept = originals & {word for text in planted.texts[2:] for word in naive_text.words(text)}
    replaced = [word for text in planted.texts[2:] for word in naive_text.words(text) if word not in originals]
    assert replaced
    assert all(word.startswith("plantedxx") for word in replaced)
    assert kept <= originals


@pytest.mark.parametrize(
    ("hits", "trials", "low", "high"), [(0, 10, 0.0, 0.2775), (5, 10, 0.2366, 0.7634), (10, 10, 0.7225, 1.0)]
)
def test_wilson_intervals(hits, trials, low, high):
    assert wilson_interval(hits, trials) == pytest.approx((low, high), abs=1e-4)
