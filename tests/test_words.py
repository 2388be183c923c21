import naive_text
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline_assets.transforms.words import NUM_CODE_POINTS, SINGLE, UNICODE_VERSION, fold_table, words

KIND = {"separator": 0, "run": 1, "single": 2}


def test_the_table_agrees_with_the_rule_for_every_code_point():
    characters = [chr(code_point) for code_point in range(NUM_CODE_POINTS)]
    kinds = np.array([KIND[naive_text.kind(character)] for character in characters])
    lowered = np.array([ord(naive_text.lower(character)) for character in characters])
    table = fold_table()
    assert (np.where(table == 0, 0, np.where(table < SINGLE, 1, 2)) == kinds).all()
    is_word = kinds > 0
    assert (table[is_word] & ~SINGLE == lowered[is_word]).all()
    assert set(kinds.tolist()) == {0, 1, 2}


def test_a_lower_case_form_is_of_the_same_kind_so_the_order_of_the_rules_does_not_matter():
    table = fold_table()
    code_points = np.flatnonzero(table)
    lowered = table[code_points] & ~SINGLE
    assert (table[lowered] == table[code_points]).all()
    assert (lowered != code_points).sum() > 1000


def test_ascii_words_are_runs_of_letters_and_digits_and_one_bit_is_their_case():
    """The shingle kernel folds ASCII by arithmetic instead of the table."""
    characters = [chr(code_point) for code_point in range(128)]
    expected = [ord(character) | 0x20 if character.isalnum() else 0 for character in characters]
    assert fold_table()[:128].tolist() == expected


@given(st.text(max_size=60))
def test_words_are_those_of_the_plain_rule(text):
    assert words(text) == naive_text.words(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The cat SAT, on the mat.", ["the", "cat", "sat", "on", "the", "mat"]),
        ("don't snake_case 3.14", ["don", "t", "snake", "case", "3", "14"]),
        ("日本語です。ok", ["日", "本", "語", "で", "す", "ok"]),
        ("abc東京def", ["abc", "東", "京", "def"]),
        ("안녕 하세요", ["안녕", "하세요"]),
        ("ｶﾀｶﾅ ー", ["ｶ", "ﾀ", "ｶ", "ﾅ", "ー"]),
        ("naïve nai\u0308ve", ["naïve", "nai\u0308ve"]),
        ("İSTANBUL ΣΟΦΟΣ STRAßE", ["İstanbul", "σοφοσ", "straße"]),
        ("\ufeffa\0b\r\nc\u00a0d", ["a", "b", "c", "d"]),
        ("… --- 🙂", []),
        ("", []),
    ],
)
def test_examples(text, expected):
    assert words(text) == expected


def test_the_table_is_read_only_and_names_its_unicode_version():
    assert not fold_table().flags.writeable
    assert UNICODE_VERSION.count(".") == 2
