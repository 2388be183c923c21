import copy
import inspect
import re
import traceback
import types
import typing
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

from pipeline_assets.flow import UPSTREAM, ancestors
from pipeline_assets.parameters import own_parameters, parameters_that_matter, recipe_digest
from pipeline_assets.recipe import Recipe
from pipeline_assets.recipe_file import load_recipe, parse_recipe
from pipeline_assets.recipes import BUILT_IN
from training_io.errors import RecipeError
from training_io.hashing import identity_of

MISSING = object()

# Reading that may stop early, and what it asks of the rest.
BOUNDED = {
    "reading.until": "budgets",
    "reading.stripes_read": 1,
    "references": [],
    "dedup.mode": "exact",
    "tokenizer": {"kind": "file", "path": "/t.json", "eos": "x"},
    "splits.order": "source",
    "splits.budgets": {"train": 9, "validation": 5},
}


# The sample recipe's keys with values of the tests' own, so that tuning the recipe changes no test.
VALUES = {
    "name": "mine",
    "seed": 1337,
    "source": {"kind": "packages", "max_prose_bytes": 60_000, "max_code_bytes": 140_000},
    "reading": {"stripes": 4, "stripes_read": 4, "unit_megabytes": 64, "until": "end", "filters": {}},
    "references": [
        {
            "name": "tokenizer_sample",
            "kind": "tokenizer_sample",
            "documents_per_pool": 150,
            "documents_per_dump": None,
            "action": "train_only",
        }
    ],
    "dedup": {
        "mode": "near",
        "scope": "global",
        "keep": "pool_priority",
        "verify_jaccard": None,
        "ngram": 5,
        "num_bands": 14,
        "rows_per_band": 8,
        "seed": 1,
        "num_buckets": 1,
    },
    "tokenizer": {"kind": "trained", "sample": "tokenizer_sample", "vocab_size": 8192, "eos": "<|endoftext|>"},
    "tokenizer_report": {
        "candidates": [],
        "documents_per_pool": 500,
        "model": None,
        "min_bytes_a_token": 2.0,
        "max_bytes_a_token": 8.0,
    },
    "splits": {
        "order": "shuffled",
        "min_tokens": 16,
        "assignment": {"policy": "fraction", "seed": 7, "validation_fraction": 0.05, "test_fraction": 0.0},
        "budgets": {},
    },
    "shards": {"max_shard_tokens": 100_000_000},
    "mixture": None,
    "packs": {
        "max_seq_len": 512,
        "long_documents": "cut",
        "overlap": 0,
        "capacity": 512,
        "strategy": "oldest_first",
        "buffer": 256,
        "batch_size": 8,
        "microbatch_tokens": None,
        "accumulation": 1,
        "eval_microbatch_tokens": 4096,
    },
    "training": {
        "layout": "packs",
        "windows": None,
        "model": {
            "d_model": 128,
            "num_layers": 2,
            "num_heads": 4,
            "num_kv_heads": 2,
            "d_ff": 384,
            "norm": "rmsnorm",
            "positions": "rotary",
        },
        "steps": 200,
        "learning_rate": 0.003,
        "warmup_steps": 20,
        "weight_decay": 0.1,
        "grad_clip": 1.0,
        "seed": 7,
        "eval_every": 50,
        "eval_microbatches": 4,
        "checkpoint_every": 100,
        "dtype": "auto",
        "num_threads": 2,
        "attention": "auto",
        "compile": False,
        "num_ranks": 1,
    },
}


HUB = {"kind": "hub", "repository": "a/b", "path": "c", "revision": "main", "pool": "p"}
S3 = {"kind": "s3", "pool": "q", "bucket": "data", "endpoint": "https://s3.example"}
HTTPS = {"kind": "https", "pool": "r", "urls": ["https://host/a.parquet"]}
EXAM = {"name": "exam", "kind": "file", "path": "/exam", "action": "exclude"}
OTHER = {"name": "other", "path": "other.json", "eos": "x"}


def changed(values, changes):
    """A copy of nested values with some dotted keys set; MISSING removes one."""
    values = copy.deepcopy(values)
    for key, value in changes.items():
        *parents, last = [int(part) if part.isdigit() else part for part in key.split(".")]
        section = values
        for parent in parents:
            section = section[parent]
        if value is MISSING:
            del section[last]
        elif isinstance(section, list) and last == len(section):
            section.append(value)
        else:
            section[last] = value
    return values


@cache
def base_recipe():
    return parse_recipe(yaml.safe_dump(VALUES), where="mine.yaml", folder=Path("/recipes"))


def parse(changes):
    if not changes:
        return base_recipe()
    return parse_recipe(yaml.safe_dump(changed(VALUES, changes)), where="mine.yaml", folder=Path("/recipes"))


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_built_in_recipe_loads_and_is_named_after_its_file(name):
    recipe = load_recipe(name)
    assert recipe.name == name
    assert parse_recipe(yaml.safe_dump(recipe.model_dump(mode="json")), where="x", folder=Path("/")) == recipe


def test_the_articles_numbers_are_in_the_built_in_recipes():
    lab, edu = load_recipe("fineweb-lab"), load_recipe("fineweb-edu")
    assert (lab.packs.max_seq_len, lab.packs.batch_size, lab.packs.buffer, lab.packs.strategy) == (
        4096,
        35,
        64,
        "best_fit",
    )
    assert lab.splits.budgets == {"train": 8_000_000, "validation": 100_000}
    assert (edu.reading.stripes, edu.reading.stripes_read, edu.splits.min_tokens) == (4, 1, 64)
    assert (edu.training.layout, edu.training.windows.length, edu.tokenizer.vocab_size) == ("windows", 1024, 32_768)


@pytest.mark.parametrize(
    ("changes", "location", "parts"),
    [
        ({"sede": 1}, "sede", ["unknown key. Mend"]),
        ({"packs.max_seq_length": 8}, "packs.max_seq_length", ["unknown key. Mend"]),
        ({"references.0.documents": 8}, "references.0.tokenizer_sample.documents", ["unknown key"]),
        ({"packs": MISSING}, "packs", ["required key is missing"]),
        ({"packs.capacity": MISSING}, "packs.capacity", ["required key is missing"]),
        ({"seed": "1337"}, "seed", ["expected a valid integer", "found '1337'"]),
        ({"seed": 1.0}, "seed", ["expected a valid integer", "found 1.0"]),
        ({"seed": True}, "seed", ["expected a valid integer", "found True"]),
        ({"seed": None}, "seed", ["expected a valid integer", "found None"]),
        ({"source": []}, "source", ["expected a valid dictionary"]),
        ({"references": {}}, "references", ["expected a valid tuple"]),
        ({"name": "My recipe"}, "name", ["found 'My recipe'"]),
        ({"seed": -1}, "seed", ["greater than or equal to 0", "found -1"]),
        ({"source.max_code_bytes": 0}, "source.packages.max_code_bytes", ["greater than 0. Mend"]),
        ({"dedup.seed": 2**32}, "dedup.seed", ["less than 4294967296"]),
        ({"reading.stripes": 129}, "reading.stripes", ["less than or equal to 128", "found 129"]),
        ({"packs.max_seq_len": 1}, "packs.max_seq_len", ["greater than or equal to 2", "found 1"]),
        ({"shards.max_shard_tokens": 2**31}, "shards.max_shard_tokens", ["less than 2147483648"]),
        ({"tokenizer.vocab_size": 256}, "tokenizer.trained.vocab_size", ["greater than 256"]),
        ({"training.learning_rate": 0}, "training.learning_rate", ["greater than 0"]),
        ({"training.learning_rate": float("inf")}, "training.learning_rate", ["finite number", "found inf"]),
        ({"training.learning_rate": float("nan")}, "training.learning_rate", ["found nan"]),
        ({"splits.assignment.validation_fraction": 1}, "splits.assignment.fraction.validation_fraction", ["less than 1"]),
        ({"splits.budgets": {"train": 0}}, "splits.budgets.train", ["greater than 0"]),
        ({"splits.budgets": {"traim": 1}}, "splits.budgets.traim.[key]", ["'train', 'validation' or 'test'"]),
        ({"dedup.mode": "fuzzy"}, "dedup.mode", ["'near', 'exact' or 'off'", "found 'fuzzy'"]),
        ({"splits.assignment.policy": "all"}, "splits.assignment", ["expected 'policy' among 'fraction'", "found 'all'"]),
        ({"source.kind": "ftp"}, "source", ["expected 'kind' among 'packages', 'local', 'folder', 'hub', 's3', 'https', 'pools'"]),
        ({"packs.batch_size": 8, "packs.microbatch_tokens": 4096}, "packs", ["exactly one of batch_size", "batch_size=8, microbatch_tokens=4096"]),
        ({"packs.batch_size": None}, "packs", ["exactly one of batch_size", "batch_size=None, microbatch_tokens=None"]),
        ({"packs.batch_size": None, "packs.microbatch_tokens": 511}, "packs", ["microbatch_tokens of at least", "512", "found 511"]),
        ({"packs.eval_microbatch_tokens": 511}, "packs", ["eval_microbatch_tokens of at least", "512", "found 511"]),
        ({"packs.capacity": 511}, "packs", ["capacity of at least max_seq_len, 512, found 511"]),
        ({"packs.long_documents": "whole"}, "packs.long_documents", ["'cut', 'refuse' or 'divert'", "found 'whole'"]),
        ({"packs.overlap": -1}, "packs.overlap", ["greater than or equal to 0", "found -1"]),
        ({"packs.overlap": 512}, "packs", ["overlap below max_seq_len, 512, found 512"]),
        ({"packs.overlap": 9, "packs.long_documents": "divert"}, "packs", ["long_documents cut with an overlap of 9, found divert"]),
        ({"packs.strategy": "next_fit"}, "packs", ["oldest_first", "found 'next_fit'"]),
        ({"reading.stripes_read": 5}, "reading", ["stripes_read of at most stripes, 4, found 5", "lower stripes_read"]),
        ({"reading.filters": {"prose": {}}}, "reading.filters.prose", ["at least one of dumps, languages, min_language_score, min_score, min_int_score"]),
        ({"reading.filters": {"proes": {"min_score": 3.0}}}, "reading.filters", ["filters of the pools prose, code, found some of proes"]),
        ({"reading.filters": {"prose": {"max_score": 3.0}}}, "reading.filters.prose.max_score", ["unknown key. Mend"]),
        ({"reading.filters": {"prose": {"min_score": float("nan")}}}, "reading.filters.prose.min_score", ["found nan"]),
        ({"reading.filters": {"prose": {"min_int_score": 2.5}}}, "reading.filters.prose.min_int_score", ["expected a valid integer", "found 2.5"]),
        ({"reading.filters": {"prose": {"min_int_score": 2**31}}}, "reading.filters.prose.min_int_score", ["less than 2147483648"]),
        ({"reading.filters": {"prose": {"min_language_score": 65}}}, "reading.filters.prose.min_language_score", ["less than or equal to 1", "found 65"]),
        ({"reading.filters": {"prose": {"languages": []}}}, "reading.filters.prose.languages", ["at least 1 item"]),
        ({"reading.filters": {"prose": {"languages": "en"}}}, "reading.filters.prose.languages", ["expected a valid tuple", "found 'en'"]),
        ({"reading.filters": {"prose": {"languages": ["en", False]}}}, "reading.filters.prose.languages.1", ["expected a valid string", "found False"]),
        ({"reading.filters": {"prose": {"dumps": ["a", ""]}}}, "reading.filters.prose.dumps.1", ["at least 1 character"]),
        ({"reading.until": "budgets"}, "reading.until", ["reading.until", "splits.order source, dedup.mode exact, no references, a tokenizer of kind file", "stripes_read 1, splits.budgets of train, validation"]),
        ({**BOUNDED, "dedup.keep": "highest_score"}, "reading.until", ["to stop at full budgets, a dedup.keep other than highest_score;"]),
        ({**BOUNDED, "splits.budgets": {"train": 9}}, "reading.until", ["to stop at full budgets, splits.budgets of train, validation;"]),
        ({"dedup.num_buckets": 12}, "dedup", ["power of two, found 12"]),
        ({"dedup.num_buckets": 2**17}, "dedup.num_buckets", ["less than or equal to 65536", "found 131072"]),
        ({"dedup.num_bands": 1024, "dedup.rows_per_band": 5}, "dedup", ["num_bands × rows_per_band of at most 4,096", "1,024 × 5 = 5,120"]),
        ({"reading.unit_megabytes": 2_001}, "reading.unit_megabytes", ["less than or equal to 2000", "found 2001"]),
        ({"packs.max_seq_len": 2**31}, "packs.max_seq_len", ["less than or equal to 2147483647", "found 2147483648"]),
        ({"packs.capacity": 2**31}, "packs.capacity", ["less than or equal to 2147483647"]),
        ({"packs.eval_microbatch_tokens": 2**31}, "packs.eval_microbatch_tokens", ["less than or equal to 2147483647"]),
        ({"packs.batch_size": None, "packs.microbatch_tokens": 2**31}, "packs.microbatch_tokens", ["less than or equal to 2147483647"]),
        ({"packs.batch_size": 2**20, "packs.accumulation": 4}, "packs", ["a step of at most 2,147,483,647 tokens", "4 microbatches of 1,048,576 packs of 512, 2,147,483,648 tokens"]),
        ({"training.layout": "windows", "training.windows": {"length": 2**16, "batch_size": 2**15}}, "training.windows", ["batch_size × length of at most 2,147,483,647", "32,768 × 65,536"]),
        ({"training.steps": 10**9}, "training.steps", ["less than 1000000000"]),
        ({"training.learning_rate": 1e38}, "training.learning_rate", ["less than or equal to 1000000000000000"]),
        ({"training.model.d_model": 2**17}, "training.model.d_model", ["less than or equal to 65536"]),
        ({"seed": 2**63}, "seed", ["less than 9223372036854775808"]),
        ({"dedup.mode": "near" * 1000}, "dedup.mode", ["found 'nearnear", "…. Mend the recipe"]),
        ({"dedup.scope": "crawl"}, "dedup.scope", ["'global' or 'dump'", "found 'crawl'"]),
        ({"dedup.keep": "first"}, "dedup.keep", ["'pool_priority', 'random', 'longest' or 'highest_score'"]),
        ({"dedup.verify_jaccard": 0.0}, "dedup.verify_jaccard", ["greater than 0"]),
        ({"dedup.verify_jaccard": 1.5}, "dedup.verify_jaccard", ["less than or equal to 1"]),
        ({"dedup.mode": "off", "dedup.scope": "dump"}, "dedup", ["mode near with scope dump, found mode off"]),
        ({"dedup.mode": "off", "dedup.keep": "longest"}, "dedup", ["no keep rule in mode off", "found longest"]),
        ({"dedup.mode": "exact", "dedup.verify_jaccard": 0.8}, "dedup", ["no verify_jaccard in mode exact"]),
        ({"references": []}, "tokenizer.sample", ["tokenizer.sample", "none is there", "found 'tokenizer_sample'"]),
        ({"tokenizer.sample": "other"}, "tokenizer.sample", ["tokenizer.sample", "['tokenizer_sample']", "found 'other'"]),
        ({"references.1": {"name": "tokenizer_sample", "kind": "file", "path": "a", "action": "exclude"}}, "references", ["references", "each name once", "tokenizer_sample"]),
        ({"references.0.documents_per_dump": 3}, "references.0.tokenizer_sample", ["exactly one of documents_per_pool"]),
        ({"references.0.documents_per_pool": None}, "references.0.tokenizer_sample", ["exactly one of documents_per_pool"]),
        ({"references.1": {**EXAM, "overlap": {"min_words": 14}}}, "references.1.file.overlap", ["min_words of at most ngram, 13, found 14"]),
        ({"references.1": {**EXAM, "overlap": {"ngram": 65}}}, "references.1.file.overlap.ngram", ["less than or equal to 64", "found 65"]),
        ({"references.1": {**EXAM, "overlap": {"max_documents": 0}}}, "references.1.file.overlap.max_documents", ["greater than 0", "found 0"]),
        ({"references.1": {**EXAM, "overlap": {"max_documents": 2**31}}}, "references.1.file.overlap.max_documents", ["less than 2147483648"]),
        ({"references.1": {**EXAM, "universe_documents": 0}}, "references.1.file.universe_documents", ["greater than 0", "found 0"]),
        ({"references.0.overlap": {}}, "references.0.tokenizer_sample.overlap", ["unknown key"]),
        ({"source": {"kind": "local", "pools": []}}, "source.local.pools", ["at least 1 item"]),
        ({"source": {"kind": "local", "pools": [{"name": "a", "path": "a"}, {"name": "a", "path": "b"}]}}, "source.local", ["each pool name once", "['a', 'a']"]),
        ({"source": {**HUB, "revision": "../main"}}, "source.hub.revision", ["String should match pattern"]),
        ({"source": {**HUB, "local_copy": "partial"}}, "source.hub", ["a local_path with local_copy partial, found none"]),
        ({"source": {**S3, "endpoint": "s3.example"}}, "source.s3", ["a URL with http or https and a host"]),
        ({"source": {**S3, "endpoint": "https://s3.example/bucket"}}, "source.s3", ["an endpoint without a path"]),
        ({"source": {**S3, "bucket": "a/b"}}, "source.s3.bucket", ["String should match pattern"]),
        ({"source": {**S3, "credentials": "key"}}, "source.s3.credentials", ["'environment' or 'anonymous'. Mend"]),
        ({"source": {**HTTPS, "urls": []}}, "source.https.urls", ["at least 1 item"]),
        ({"source": {**HTTPS, "urls": ["https://host/a"] * 2}}, "source.https", ["each URL once"]),
        ({"source": {**HTTPS, "urls": ["https://host/b", "https://host/a/x", "https://host/a%2Fx"]}}, "source.https", ["one name for URLs 2 and 3", "remove one"]),
        ({"source": {**HTTPS, "urls": ["http://host/a/x", "https://host/a/x"]}}, "source.https", ["one name for URLs 1 and 2"]),
        ({"source": {**HTTPS, "urls": ["file:///etc/passwd"]}}, "source.https", ["a URL with http or https and a host"]),
        ({"source": {**HTTPS, "urls": ["https://host/a b"]}}, "source.https", ["a URL with http or https and a host"]),
        ({"source": {**HTTPS, "urls": ["https://[host/a"]}}, "source.https", ["a URL with http or https and a host"]),
        ({"source": {"kind": "pools", "pools": []}}, "source.pools", ["at least one pool, found none"]),
        ({"source": {"kind": "pools", "pools": [HUB, {**S3, "pool": "p"}]}}, "source.pools", ["each pool name once, found ['p', 'p']"]),
        ({"source": {"kind": "pools", "pools": [{"kind": "packages"}]}}, "source.pools.pools.0", ["'folder', 'hub', 's3', 'https'"]),
        ({"tokenizer": {"kind": "file", "eos": "x"}}, "tokenizer.file", ["a path or a repository"]),
        ({"splits.assignment.test_fraction": 0.96}, "splits.assignment.fraction", ["below 1", "found 1.01"]),
        ({"training.layout": "windows"}, "training", ["windows exactly when layout is windows"]),
        ({"training.windows": {"length": 8, "batch_size": 1}}, "training", ["windows exactly when layout is windows"]),
        ({"tokenizer": {"kind": "file", "repository": "a/b", "eos": "x"}}, "tokenizer.file", ["a repository and its revision", "repository=a/b, revision=None"]),
        ({"tokenizer": {"kind": "file", "path": "t", "revision": "0" * 40, "eos": "x"}}, "tokenizer.file", ["a repository and its revision"]),
        ({"tokenizer": {"kind": "file", "repository": "a/b", "revision": "main", "eos": "x"}}, "tokenizer.file.revision", ["found 'main'"]),
        ({"tokenizer": {"kind": "file", "repository": "a/b", "revision": "0" * 7, "eos": "x"}}, "tokenizer.file.revision", ["found '0000000'"]),
        ({"tokenizer": {"kind": "file", "repository": "../b", "revision": "0" * 40, "eos": "x"}}, "tokenizer.file.repository", ["found '../b'"]),
        ({"tokenizer_report.candidates": [OTHER, OTHER]}, "tokenizer_report", ["each candidate's name once", "['other', 'other']"]),
        ({"tokenizer_report.candidates": [{**OTHER, "name": "chosen"}]}, "tokenizer_report", ["none called chosen"]),
        ({"tokenizer_report.candidates": [{"name": "other", "eos": "x"}]}, "tokenizer_report.candidates.0", ["a path or a repository"]),
        ({"tokenizer_report.candidates": [{**OTHER, "name": f"other_{n}"} for n in range(8)]}, "tokenizer_report.candidates", ["at most 7"]),
        ({"tokenizer_report.max_bytes_a_token": 2.0}, "tokenizer_report", ["min_bytes_a_token below max_bytes_a_token, found 2 and 2"]),
        ({"tokenizer_report.documents_per_pool": 0}, "tokenizer_report.documents_per_pool", ["greater than 0"]),
        ({"training.model.num_heads": 3}, "training.model", ["num_heads to divide d_model", "d_model=128, num_heads=3"]),
        ({"training.model.num_kv_heads": 3}, "training.model", ["num_kv_heads=3"]),
        ({"training.model": {"preset": "7b"}}, "training.model", ["a preset among tiny, 124m", "found '7b'"]),
        ({"training.model": {"preset": ["tiny"]}}, "training.model", ["a preset among tiny, 124m", "found ['tiny']"]),
        ({"training.attention": "flash"}, "training.attention", ["'auto', 'varlen', 'flex' or 'sdpa'", "found 'flash'"]),
        ({"training.attention": "sdpa", "training.compile": True}, "training", ["varlen or flex with compile", "found sdpa"]),
        ({"training.num_ranks": 1_025}, "training.num_ranks", ["less than or equal to 1024"]),
        ({"training.layout": "windows", "training.windows": {"length": 8, "batch_size": 1}, "training.num_ranks": 2}, "training", ["num_ranks of at most windows.accumulation, 1", "found 2"]),
    ],
)  # fmt: skip
def test_a_wrong_recipe_is_refused_in_one_line_that_says_where_what_and_what_to_do(changes, location, parts):
    with pytest.raises(RecipeError) as caught:
        parse(changes)
    message = str(caught.value)
    assert message.startswith(f"mine.yaml: {location}: "), message
    assert message.count("\n") == 0, message
    assert "Mend the recipe" in message
    for part in parts:
        assert part in message


def test_where_the_keys_are_listed_is_where_the_sections_are():
    with pytest.raises(RecipeError) as caught:
        parse({"packs.max_seq_length": 8})
    (path,) = re.findall(r"Mend the recipe; (\S+) lists its keys", str(caught.value))
    kinds = [kind for field in Recipe.model_fields.values() for kind in sections_in(field.annotation)]
    assert {Path(inspect.getfile(kind)).parent for kind in kinds} == {Path(__file__).resolve().parents[1] / path}


def test_every_violation_gets_a_line_of_its_own():
    with pytest.raises(RecipeError) as caught:
        parse({"seed": -1, "sede": 1, "packs.capacity": 0})
    assert sorted(line.split(": ")[1] for line in str(caught.value).splitlines()) == ["packs.capacity", "sede", "seed"]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("a: [1", ["expected YAML", "line 1"]),
        ("a: \0", ["expected YAML"]),
        ("a: !!python/name:os.system x", ["expected YAML", "python/name"]),
        ("seed: 1\npacks: {buffer: 2, buffer: 3}\n", ["'buffer' twice", "line 2"]),
        ("seed: 1\nname: a\nseed: 2\n", ["'seed' twice", "line 3"]),
        ("name: a\nseed: " + "1" * 5_000, ["which is no int", "line 2"]),
        ("name: a\nseed: 0b_", ["'0b_', which is no int", "line 2"]),
        ("name: 2020-13-45", ["'2020-13-45', which is no timestamp", "line 1"]),
        ("name: !!timestamp x", ["'x', which is no timestamp", "line 1"]),
        ("name: !!float x", ["'x', which is no float", "line 1"]),
        ("- seed\n", ["expected a mapping of sections, found list"]),
        ("", ["expected a mapping of sections, found NoneType"]),
        ("sample", ["expected a mapping of sections, found str"]),
        ("a: &a [*a]", ["recursion"]),
        ("a: " + "[" * 400, ["expected YAML"]),
        ("path: ~nobody_of_this_name/x", ["expected plain sections and paths"]),
    ],
)
def test_a_file_that_is_no_mapping_in_yaml_is_refused(text, parts):
    with pytest.raises(RecipeError) as caught:
        parse_recipe(text, where="mine.yaml", folder=Path("/recipes"))
    for part in ["mine.yaml: expected", *parts]:
        assert part in str(caught.value)


def test_a_byte_order_mark_is_no_error():
    text = "\ufeff" + yaml.safe_dump(VALUES)
    assert parse_recipe(text, where="x", folder=Path("/")) == parse({})


def test_the_environment_names_a_built_in_recipe_or_a_path(monkeypatch, tmp_path):
    monkeypatch.delenv("CORPUSMILL_RECIPE", raising=False)
    assert load_recipe().name == "sample"
    monkeypatch.setenv("CORPUSMILL_RECIPE", "")
    assert load_recipe().name == "sample"
    monkeypatch.setenv("CORPUSMILL_RECIPE", "fineweb-edu")
    assert load_recipe().name == "fineweb-edu"
    assert load_recipe("mixture").name == "mixture"
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(VALUES), encoding="utf-8")
    monkeypatch.setenv("CORPUSMILL_RECIPE", str(path))
    assert load_recipe().name == "mine"


@pytest.mark.parametrize("chosen", ["no-such-recipe", "no/such/file.yaml", "."])
def test_a_missing_recipe_is_refused_with_the_names_that_there_are(monkeypatch, chosen):
    monkeypatch.setenv("CORPUSMILL_RECIPE", chosen)
    with pytest.raises(RecipeError) as caught:
        load_recipe()
    for part in [*BUILT_IN, repr(chosen), "CORPUSMILL_RECIPE"]:
        assert part in str(caught.value)


def test_a_recipe_that_is_not_utf8_is_refused_with_its_path(tmp_path):
    path = tmp_path / "latin.yaml"
    path.write_bytes("name: café".encode("latin-1"))
    with pytest.raises(RecipeError, match=r"latin\.yaml: expected UTF-8 text"):
        load_recipe(str(path))


def test_relative_paths_are_taken_from_the_recipes_own_folder(tmp_path, monkeypatch):
    folder = tmp_path / "recipes"
    folder.mkdir()
    values = changed(
        VALUES,
        {
            "source": {
                "kind": "local",
                "pools": [{"name": "a", "path": "pools/a"}, {"name": "b", "path": "/b"}, {"name": "c", "path": "~/c"}],
            },
            "references.1": {"name": "exam", "kind": "file", "path": "exam.txt", "action": "exclude"},
            "tokenizer": {"kind": "file", "path": "../tokenizer.json", "eos": "<eos>"},
        },
    )
    (folder / "mine.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/someone")
    recipe = load_recipe("recipes/mine.yaml")
    assert [pool.path for pool in recipe.source.pools] == [f"{folder}/pools/a", "/b", "/home/someone/c"]
    assert recipe.references[1].path == f"{folder}/exam.txt"
    assert Path(recipe.tokenizer.path).resolve() == tmp_path / "tokenizer.json"


def test_a_path_on_the_hub_stays_and_its_local_copy_is_a_path():
    source = {"kind": "hub", "repository": "a/b", "path": "sample/10BT", "revision": "0" * 40, "pool": "p"}
    recipe = parse({"source": {**source, "local_path": "copy"}})
    assert (recipe.source.path, recipe.source.local_path) == ("sample/10BT", "/recipes/copy")


@pytest.mark.parametrize(
    "url",
    [
        "https://me:sentinel@host/a", "https://me:sentinel", "https://host/a?token=sentinel", "https://host/a#sentinel",
        "ftp://sentinel",
    ],
)  # fmt: skip
def test_a_url_that_may_hold_a_secret_is_refused_without_being_shown(url):
    nested = {"kind": "pools", "pools": [{**HTTPS, "urls": [url]}]}
    for source in ({**HTTPS, "urls": [url]}, {**HTTPS, "urls": url}, {**S3, "endpoint": url}, nested):
        with pytest.raises(RecipeError, match=r"source\.(https|s3|pools).*: expected a ") as caught:
            parse({"source": source})
        assert "sentinel" not in str(caught.value)


WITH_SECRETS = {
    "an unknown key of a source": {"source": {**HUB, "token": "sentinel"}},
    "an unknown key of one of several sources": {"source": {"kind": "pools", "pools": [{**S3, "secret": "sentinel"}]}},
    "an unknown section": {"credentials": ["sentinel"]},
    "an unknown key elsewhere": {"tokenizer.token": "sentinel"},
    "credentials": {"source": {**S3, "credentials": "AK:sentinel"}},
    "a list of credentials": {"source": {**S3, "credentials": ["AK", "sentinel"]}},
    "a bucket": {"source": {**S3, "bucket": "https://AK:sentinel@host"}},
    "a nested bucket": {"source": {"kind": "pools", "pools": [{**S3, "bucket": "https://AK:sentinel@host"}]}},
    "a repository": {"source": {**HUB, "repository": "https://AK:sentinel@host/a"}},
    "a kind": {"source": {**HUB, "kind": "https://AK:sentinel@host"}},
    "a source of one word": {"source": "https://AK:sentinel@host"},
    "one of two URLs of one file": {"source": {**HTTPS, "urls": ["http://host/sentinel", "https://host/sentinel"]}},
}


@pytest.mark.parametrize("changes", WITH_SECRETS.values(), ids=WITH_SECRETS)
def test_a_wrong_value_that_may_be_a_secret_is_in_no_message_and_no_traceback(changes):
    with pytest.raises(RecipeError, match=r"Mend the recipe") as caught:
        parse(changes)
    assert "sentinel" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("line", ["credentials: AK: sentinel", "credentials: 'AK:sentinel", "token: @sentinel"])
def test_yaml_that_is_none_is_told_by_its_lines_number_and_not_by_its_text(line):
    with pytest.raises(RecipeError, match=r"expected YAML, found (.*\n)+.*line 2, column") as caught:
        parse_recipe(f"source:\n  {line}\n", where="mine.yaml", folder=Path("/recipes"))
    assert "sentinel" not in "".join(traceback.format_exception(caught.value))


def test_pools_may_lie_in_places_of_several_kinds_in_the_order_of_their_priority():
    folder = {"kind": "folder", "pool": "own", "path": "pools/own"}
    recipe = parse({"source": {"kind": "pools", "pools": [HTTPS, folder, {**HUB, "local_path": "copy"}, S3]}})
    assert recipe.pool_names == ["r", "own", "p", "q"]
    assert list(recipe.source_places) == recipe.pool_names
    assert recipe.source.pools[2].path == "c"


@pytest.mark.parametrize(
    ("source", "elsewhere"),
    [
        (HUB, {"local_path": "/copy", "local_copy": "partial"}),
        (S3, {"endpoint": "http://127.0.0.1:9000", "region": "eu-west-1", "credentials": "anonymous"}),
        ({"kind": "folder", "pool": "own", "path": "here"}, {"path": "there"}),
    ],
)
def test_where_the_files_lie_is_not_what_they_hold(source, elsewhere):
    for nest in (lambda one: one, lambda one: {"kind": "pools", "pools": [one]}):
        here, there = (parse({"source": nest(one)}) for one in (source, {**source, **elsewhere}))
        assert own_parameters(here, "raw_row_groups") == own_parameters(there, "raw_row_groups")
        assert recipe_digest(here) != recipe_digest(there)


@pytest.mark.parametrize(
    ("source", "place"),
    [
        ({"kind": "folder", "pool": "own", "path": "pools/own"}, "/recipes/pools/own"),
        ({"kind": "local", "pools": [{"name": "own", "path": "pools/own"}]}, "/recipes/pools/own"),
        (HUB, "a/b/c on the Hub"),
        ({**HUB, "local_path": "copy"}, "/recipes/copy"),
        ({**HUB, "local_path": "copy", "local_copy": "partial"}, "a/b/c on the Hub"),
        ({**S3, "prefix": "set"}, "s3://data/set at https://s3.example"),
        (HTTPS, f"URLs of digest {identity_of(HTTPS['urls'])[:16]}"),
    ],
)
def test_a_place_is_where_a_pools_files_come_from(source, place):
    assert list(parse({"source": source}).source_places.values()) == [place]


def test_texts_are_matched_by_overlap_where_the_recipe_says_so():
    assert parse({"references.1": EXAM}).references[1].overlap is None
    overlap = parse({"references.1": {**EXAM, "overlap": {}}}).references[1].overlap
    assert (overlap.ngram, overlap.min_words, overlap.max_documents) == (13, 8, 10)


@pytest.mark.parametrize("changes", [{"overlap": {}}, {"overlap": {"max_documents": 9}}, {"universe_documents": 9}])
def test_how_a_reference_file_is_matched_is_among_the_values_of_what_matches_it(changes):
    before, after = parse({"references.1": EXAM}), parse({"references.1": {**EXAM, **changes}})
    own = {asset for asset in UPSTREAM if own_parameters(before, asset) != own_parameters(after, asset)}
    assert own == {"reference_sets", "lsh_clusters"}


def test_packs_of_a_microbatch_follow_from_its_tokens():
    assert parse({}).packs.packs_per_microbatch("train") == 8
    assert parse({}).packs.packs_per_microbatch("validation") == 4096 // 512
    by_tokens = parse({"packs.batch_size": None, "packs.microbatch_tokens": 1_600}).packs
    assert by_tokens.packs_per_microbatch("train") == 3


LOCAL = {"kind": "local", "pools": [{"name": "prose", "path": "/prose"}]}
CANNOT_CHANGE = None

# One row a leaf of the sample recipe: a valid change of it, and the assets whose own values it is among.
LEAVES = {
    "name": ({"name": "other"}, ["handoff_package", "quality_report"]),
    "seed": ({"seed": 1}, ["reference_sets", "lsh_clusters", "document_tokens", "tokenizer_report", "packing_plan"]),
    "source.kind": ({"source": LOCAL}, ["raw_row_groups"]),
    "source.max_prose_bytes": ({"source.max_prose_bytes": 1}, ["raw_row_groups"]),
    "source.max_code_bytes": ({"source.max_code_bytes": 1}, ["raw_row_groups"]),
    "reading.stripes": ({"reading.stripes": 8}, ["raw_row_groups"]),
    "reading.stripes_read": ({"reading.stripes_read": 1}, ["raw_row_groups"]),
    "reading.unit_megabytes": ({"reading.unit_megabytes": 1}, ["raw_row_groups"]),
    "reading.until": (
        BOUNDED,
        ["raw_row_groups", "reference_sets", "lsh_clusters", "tokenizer", "document_tokens", "split_documents"],
    ),
    "reading.filters": ({"reading.filters": {"prose": {"min_score": 3.0}}}, ["raw_row_groups"]),
    "references.0.name": (
        {"references.0.name": "other", "tokenizer.sample": "other"},
        ["reference_sets", "lsh_clusters", "tokenizer"],
    ),
    "references.0.kind": ({"references.1": EXAM}, ["reference_sets", "lsh_clusters"]),
    "references.0.documents_per_pool": ({"references.0.documents_per_pool": 9}, ["reference_sets", "lsh_clusters"]),
    "references.0.documents_per_dump": (
        {"references.0.documents_per_pool": None, "references.0.documents_per_dump": 9},
        ["reference_sets", "lsh_clusters"],
    ),
    "references.0.action": CANNOT_CHANGE,
    "dedup.mode": ({"dedup.mode": "off"}, ["lsh_clusters", "split_documents"]),
    "dedup.scope": ({"dedup.scope": "dump"}, ["lsh_clusters", "split_documents"]),
    "dedup.keep": ({"dedup.keep": "longest"}, ["lsh_clusters"]),
    "dedup.verify_jaccard": ({"dedup.verify_jaccard": 0.8}, ["lsh_clusters"]),
    "dedup.ngram": ({"dedup.ngram": 4}, ["minhash_signatures", "lsh_clusters"]),
    "dedup.num_bands": ({"dedup.num_bands": 7}, ["minhash_signatures", "lsh_clusters"]),
    "dedup.rows_per_band": ({"dedup.rows_per_band": 4}, ["minhash_signatures", "lsh_clusters"]),
    "dedup.seed": ({"dedup.seed": 2}, ["minhash_signatures", "lsh_clusters"]),
    "dedup.num_buckets": ({"dedup.num_buckets": 2}, ["lsh_clusters"]),
    "tokenizer.kind": ({"tokenizer": {"kind": "file", "path": "/t", "eos": "<|endoftext|>"}}, ["tokenizer"]),
    "tokenizer.sample": (
        {"references.1": {**EXAM, "name": "more"}, "references.0.name": "other", "tokenizer.sample": "other"},
        ["reference_sets", "lsh_clusters", "tokenizer"],
    ),
    "tokenizer.vocab_size": ({"tokenizer.vocab_size": 300}, ["tokenizer"]),
    "tokenizer.eos": ({"tokenizer.eos": "<eos>"}, ["tokenizer"]),
    "tokenizer_report.documents_per_pool": ({"tokenizer_report.documents_per_pool": 9}, ["tokenizer_report"]),
    "tokenizer_report.model": (
        {"tokenizer_report.model": {**VALUES["training"]["model"], "d_model": 64}},
        ["tokenizer_report"],
    ),
    "tokenizer_report.min_bytes_a_token": ({"tokenizer_report.min_bytes_a_token": 1.0}, []),
    "tokenizer_report.max_bytes_a_token": ({"tokenizer_report.max_bytes_a_token": 9.0}, []),
    "splits.order": ({"splits.order": "source"}, ["document_tokens", "split_documents"]),
    "splits.min_tokens": ({"splits.min_tokens": 1}, ["split_documents"]),
    "splits.assignment.policy": (
        {"splits.assignment": {"policy": "budget", "validation_tokens": 9}},
        ["split_documents"],
    ),
    "splits.assignment.seed": ({"splits.assignment.seed": 1}, ["split_documents"]),
    "splits.assignment.validation_fraction": ({"splits.assignment.validation_fraction": 0.1}, ["split_documents"]),
    "splits.assignment.test_fraction": ({"splits.assignment.test_fraction": 0.1}, ["split_documents"]),
    "splits.budgets": ({"splits.budgets": {"train": 9}}, ["split_documents"]),
    "shards.max_shard_tokens": ({"shards.max_shard_tokens": 9}, ["token_shards"]),
    "mixture": (
        {"mixture": {"stages": [{"name": "base", "tokens": 9, "shares": {"prose": 61.6, "code": "7/3"}}]}},
        ["packing_plan", "mixture_ledger"],
    ),
    "packs.max_seq_len": ({"packs.max_seq_len": 9}, ["packing_plan", "packing_stats"]),
    "packs.long_documents": ({"packs.long_documents": "divert"}, ["packing_plan", "packing_stats"]),
    "packs.overlap": ({"packs.overlap": 9}, ["packing_plan", "packing_stats"]),
    "packs.capacity": ({"packs.capacity": 1024}, ["packing_plan", "packing_stats"]),
    "packs.strategy": ({"packs.strategy": "best_fit"}, ["packing_plan", "packing_stats"]),
    "packs.buffer": ({"packs.buffer": 9}, ["packing_plan", "packing_stats"]),
    "packs.batch_size": ({"packs.batch_size": 9}, ["packing_plan", "packing_stats"]),
    "packs.microbatch_tokens": (
        {"packs.batch_size": None, "packs.microbatch_tokens": 4096},
        ["packing_plan", "packing_stats"],
    ),
    "packs.accumulation": ({"packs.accumulation": 9}, ["packing_plan", "packing_stats"]),
    "packs.eval_microbatch_tokens": ({"packs.eval_microbatch_tokens": 9_000}, ["packing_plan", "packing_stats"]),
    "training.layout": (
        {"training.layout": "windows", "training.windows": {"length": 8, "batch_size": 1}},
        ["varlen_training_run"],
    ),
    "training.windows": (
        {"training.layout": "windows", "training.windows": {"length": 9, "batch_size": 1}},
        ["varlen_training_run"],
    ),
    "training.model.d_model": ({"training.model.d_model": 64}, ["tokenizer_report", "varlen_training_run"]),
    "training.model.num_layers": ({"training.model.num_layers": 1}, ["tokenizer_report", "varlen_training_run"]),
    "training.model.num_heads": ({"training.model.num_heads": 8}, ["tokenizer_report", "varlen_training_run"]),
    "training.model.num_kv_heads": ({"training.model.num_kv_heads": 1}, ["tokenizer_report", "varlen_training_run"]),
    "training.model.d_ff": ({"training.model.d_ff": 1}, ["tokenizer_report", "varlen_training_run"]),
    "training.model.norm": ({"training.model.norm": "layernorm"}, ["tokenizer_report", "varlen_training_run"]),
    "training.model.positions": ({"training.model.positions": "learned"}, ["tokenizer_report", "varlen_training_run"]),
    "training.steps": ({"training.steps": 99}, ["varlen_training_run"]),
    "training.learning_rate": ({"training.learning_rate": 1}, ["varlen_training_run"]),
    "training.warmup_steps": ({"training.warmup_steps": 0}, ["varlen_training_run"]),
    "training.weight_decay": ({"training.weight_decay": 0}, ["varlen_training_run"]),
    "training.grad_clip": ({"training.grad_clip": 2}, ["varlen_training_run"]),
    "training.seed": ({"training.seed": 0}, ["varlen_training_run"]),
    "training.eval_every": ({"training.eval_every": 1}, ["varlen_training_run"]),
    "training.eval_microbatches": ({"training.eval_microbatches": 1}, ["varlen_training_run"]),
    "training.checkpoint_every": ({"training.checkpoint_every": 1}, ["varlen_training_run"]),
    "training.dtype": ({"training.dtype": "bfloat16"}, ["varlen_training_run"]),
    "training.num_threads": ({"training.num_threads": 1}, ["varlen_training_run"]),
    "training.attention": ({"training.attention": "sdpa"}, ["varlen_training_run"]),
    "training.compile": ({"training.compile": True}, ["varlen_training_run"]),
    "training.num_ranks": ({"training.num_ranks": 2}, ["varlen_training_run"]),
}


def leaves(value, prefix=""):
    if isinstance(value, list) or (isinstance(value, dict) and value):
        items = enumerate(value) if isinstance(value, list) else value.items()
        return [leaf for key, item in items for leaf in leaves(item, f"{prefix}{key}.")]
    return [prefix.removesuffix(".")]


def test_the_table_above_has_every_leaf_of_the_sample_recipe():
    assert list(LEAVES) == leaves(VALUES)
    assert leaves(VALUES) == leaves(load_recipe("sample").model_dump(mode="json"))


def downstream(owners):
    """Every asset that is reached from the owners along the edges of UPSTREAM."""
    reached = set(owners)
    while True:
        more = {asset for asset, reads in UPSTREAM.items() if reached & set(reads)} - reached
        if not more:
            return reached
        reached |= more


@pytest.mark.parametrize("leaf", [leaf for leaf, row in LEAVES.items() if row is not CANNOT_CHANGE])
def test_a_changed_value_changes_exactly_what_is_downstream_of_it(leaf):
    changes, owners = LEAVES[leaf]
    before, after = parse({}), parse(changes)
    own = {asset for asset in UPSTREAM if own_parameters(before, asset) != own_parameters(after, asset)}
    assert own == set(owners)
    matters = {
        asset
        for asset in UPSTREAM
        if identity_of(parameters_that_matter(before, asset)) != identity_of(parameters_that_matter(after, asset))
    }
    assert matters == downstream(owners)
    assert recipe_digest(before) != recipe_digest(after)


@pytest.mark.parametrize("leaf", [leaf for leaf in LEAVES if leaf.startswith(("packs.", "training."))])
def test_context_capacity_and_batch_sizes_do_not_touch_tokens_or_shards(leaf):
    changes, _ = LEAVES[leaf]
    before, after = parse({}), parse(changes)
    assert before != after
    for asset in ("document_tokens", "split_documents", "token_shards"):
        assert parameters_that_matter(before, asset) == parameters_that_matter(after, asset)


def test_ancestors_are_an_asset_and_all_that_it_reads_from():
    assert ancestors("raw_row_groups") == ("raw_row_groups",)
    assert ancestors("tokenizer") == ("raw_row_groups", "reference_sets", "tokenizer")
    for asset in UPSTREAM:
        assert set(ancestors(asset)) == {other for other in UPSTREAM if asset in downstream([other])}


def test_a_preset_is_the_numbers_that_it_stands_for():
    shape = {"d_model": 768, "num_layers": 12, "num_heads": 12, "num_kv_heads": 12, "d_ff": 2048}
    assert parse({"training.model": {"preset": "124m"}}) == parse({"training.model": shape})
    grouped = parse({"training.model": {"preset": "124m", "num_kv_heads": 4}})
    assert grouped == parse({"training.model": {**shape, "num_kv_heads": 4}})
    assert parse({"tokenizer_report.model": {"preset": "tiny"}}).tokenizer_report.model.d_model == 128


def sections_in(annotation):
    """The sections within a type: Annotated, unions and tuples are looked through."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if typing.get_origin(annotation) in (typing.Annotated, typing.Union, types.UnionType, tuple, Mapping):
        return [section for part in typing.get_args(annotation) for section in sections_in(part)]
    return []


def knobs(section, prefix=""):
    """Every dotted key; where one of several kinds of section is possible, the kind is part of the key."""
    keys = []
    for name, field in section.model_fields.items():
        kinds = sections_in(field.annotation)
        keys += [] if kinds else [f"{prefix}{name}"]
        for kind in kinds:
            tags = [
                typing.get_args(kind.model_fields[tag].annotation)[0]
                for tag in ("kind", "policy")
                if tag in kind.model_fields
            ]
            keys += knobs(kind, f"{prefix}{'.'.join([name, *tags])}.")
    return keys


KNOBS = """
name seed
source.packages.kind source.packages.max_prose_bytes source.packages.max_code_bytes
source.local.kind source.local.pools.name source.local.pools.path source.local.pools.glob
source.folder.kind source.folder.pool source.folder.path source.folder.glob
source.hub.kind source.hub.repository source.hub.path source.hub.glob source.hub.revision
source.hub.branch source.hub.pool source.hub.local_path source.hub.local_copy
source.s3.kind source.s3.pool source.s3.bucket source.s3.prefix source.s3.glob source.s3.endpoint source.s3.region source.s3.credentials
source.https.kind source.https.pool source.https.urls
source.pools.kind
source.pools.pools.folder.kind source.pools.pools.folder.pool source.pools.pools.folder.path source.pools.pools.folder.glob
source.pools.pools.hub.kind source.pools.pools.hub.repository source.pools.pools.hub.path source.pools.pools.hub.glob
source.pools.pools.hub.revision source.pools.pools.hub.branch source.pools.pools.hub.pool
source.pools.pools.hub.local_path source.pools.pools.hub.local_copy
source.pools.pools.s3.kind source.pools.pools.s3.pool source.pools.pools.s3.bucket source.pools.pools.s3.prefix
source.pools.pools.s3.glob source.pools.pools.s3.endpoint source.pools.pools.s3.region source.pools.pools.s3.credentials
source.pools.pools.https.kind source.pools.pools.https.pool source.pools.pools.https.urls
reading.stripes reading.stripes_read reading.unit_megabytes reading.until
reading.filters.dumps reading.filters.languages reading.filters.min_language_score reading.filters.min_score
reading.filters.min_int_score
references.tokenizer_sample.name references.tokenizer_sample.kind references.tokenizer_sample.documents_per_pool
references.tokenizer_sample.documents_per_dump references.tokenizer_sample.action
references.file.name references.file.kind references.file.path references.file.action
references.file.overlap.ngram references.file.overlap.min_words references.file.overlap.max_documents
references.file.universe_documents
dedup.mode dedup.scope dedup.keep dedup.verify_jaccard dedup.ngram dedup.num_bands dedup.rows_per_band dedup.seed dedup.num_buckets
tokenizer.file.kind tokenizer.file.path tokenizer.file.repository tokenizer.file.revision tokenizer.file.fingerprint
tokenizer.file.eos
tokenizer.trained.kind tokenizer.trained.sample tokenizer.trained.vocab_size tokenizer.trained.eos
tokenizer_report.candidates.file.kind tokenizer_report.candidates.file.path
tokenizer_report.candidates.file.repository tokenizer_report.candidates.file.revision
tokenizer_report.candidates.file.fingerprint tokenizer_report.candidates.file.eos tokenizer_report.candidates.file.name
tokenizer_report.documents_per_pool
tokenizer_report.model.d_model tokenizer_report.model.num_layers tokenizer_report.model.num_heads
tokenizer_report.model.num_kv_heads tokenizer_report.model.d_ff tokenizer_report.model.norm
tokenizer_report.model.positions
tokenizer_report.min_bytes_a_token tokenizer_report.max_bytes_a_token
splits.order splits.min_tokens
splits.assignment.fraction.policy splits.assignment.fraction.seed splits.assignment.fraction.validation_fraction
splits.assignment.fraction.test_fraction
splits.assignment.budget.policy splits.assignment.budget.validation_tokens splits.assignment.budget.test_tokens
splits.budgets
shards.max_shard_tokens
mixture.stages.name mixture.stages.tokens mixture.stages.shares
packs.max_seq_len packs.long_documents packs.overlap packs.capacity packs.strategy packs.buffer packs.batch_size
packs.microbatch_tokens packs.accumulation packs.eval_microbatch_tokens
training.layout training.windows.length training.windows.batch_size training.windows.accumulation
training.windows.document_mask
training.model.d_model training.model.num_layers training.model.num_heads training.model.num_kv_heads
training.model.d_ff training.model.norm training.model.positions
training.steps training.learning_rate training.warmup_steps training.weight_decay training.grad_clip training.seed
training.eval_every training.eval_microbatches training.checkpoint_every training.dtype training.num_threads
training.attention training.compile training.num_ranks
"""


# What gradients are scaled by is at most 1, whatever their limit is; what only warns takes any number.
ANY_NUMBER = {"grad_clip", "min_bytes_a_token", "max_bytes_a_token"}


def numbers(schema, name=""):
    """Every number in a JSON schema, with the key that it is the value of."""
    if isinstance(schema, list):
        return [found for part in schema for found in numbers(part, name)]
    if not isinstance(schema, dict):
        return []
    own = [(name, schema)] if schema.get("type") in ("integer", "number") else []
    return own + [found for key, part in schema.items() for found in numbers(part, name if key in UNNAMED else key)]


UNNAMED = {"anyOf", "items", "additionalProperties", "oneOf"}


def test_every_number_has_an_upper_limit():
    found = numbers(Recipe.model_json_schema())
    assert {"seed", "num_buckets", "budgets", "microbatch_tokens", "max_documents", "learning_rate"} <= {
        name for name, _ in found
    }
    unbounded = {name for name, schema in found if not {"maximum", "exclusiveMaximum"} & schema.keys()}
    assert unbounded <= ANY_NUMBER


def test_a_number_that_cannot_be_written_out_is_refused_all_the_same():
    text = yaml.safe_dump(VALUES).replace("seed: 1337", f"seed: 0x1{'0' * 5_000}")
    with pytest.raises(RecipeError, match=r"mine\.yaml: seed: .*less than \d+, found a number of 20,001 bits\. Mend"):
        parse_recipe(text, where="mine.yaml", folder=Path("/recipes"))


def test_the_largest_numbers_load():
    largest = {
        "seed": 2**63 - 1,
        "reading.unit_megabytes": 2_000,
        "reading.filters": {"code": {"min_score": 1e15, "min_int_score": 2**31 - 1, "languages": ["x"] * 1_000}},
        "references.1": {**EXAM, "overlap": {"max_documents": 2**31 - 1}, "universe_documents": 2**63 - 1},
        "dedup.num_buckets": 2**16,
        "dedup.num_bands": 1024,
        "dedup.rows_per_band": 4,
        "splits.budgets": {"train": 2**63 - 1},
        "packs.max_seq_len": 2**31 - 1,
        "packs.overlap": 2**31 - 2,
        "packs.capacity": 2**31 - 1,
        "packs.batch_size": 1,
        "packs.eval_microbatch_tokens": 2**31 - 1,
        "training.steps": 10**9 - 1,
        "training.grad_clip": 1e300,
    }
    assert parse(largest).dedup.num_buckets == 65_536


def test_the_set_of_knobs_is_frozen():
    assert knobs(Recipe) == KNOBS.split()
