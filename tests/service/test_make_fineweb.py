"""`make fineweb`, the command itself, against a Hub on loopback with files in FineWeb's layout.

The counts are those of a slow walk over the documents in source order; they are not the counts of FineWeb.
"""

import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import naive_text
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers
from file_server import serving_files

from pipeline_assets.recipe import Recipe
from pipeline_assets.recipe_file import load_recipe
from training_io.hashing import derive_seed

ROOT = Path(__file__).resolve().parents[2]
COLUMNS = ("text", "id", "dump", "url", "date", "file_path", "language", "language_score", "token_count")
ROWS_PER_GROUP, GROUPS_PER_FILE, NUM_FILES = 1_000, 6, 3


def write_files(folder: Path) -> list[str]:
    """Files in FineWeb's layout, of documents of made-up words and a copy now and then; their texts in source order."""
    noise = random.Random(7)
    words = ["".join(noise.choices("abcdefghijklmnopqrstuvwxyz", k=noise.randint(2, 7))) for _ in range(8_000)]
    types = {"language_score": pa.float64(), "token_count": pa.int64()}
    schema = pa.schema([(name, types.get(name, pa.string())) for name in COLUMNS])
    texts: list[str] = []
    folder.mkdir(parents=True)
    for number in range(NUM_FILES):
        with pq.ParquetWriter(folder / f"{number:03d}_00000.parquet", schema, compression="snappy") as writer:
            for _ in range(GROUPS_PER_FILE):
                new = [" ".join(noise.choices(words, k=noise.randint(50, 500))) for _ in range(ROWS_PER_GROUP)]
                new[::100] = [texts[noise.randrange(len(texts))] if texts else text for text in new[::100]]
                rows = [
                    {
                        "text": text,
                        "id": f"<urn:uuid:{noise.randbytes(16).hex()}>",
                        "dump": "CC-MAIN-2013-20",
                        "url": f"http://example/{row}",
                        "date": "2013-05-18T05:48:54Z",
                        "file_path": f"s3://commoncrawl/crawl-data/{noise.randbytes(40).hex()}",
                        "language": "en",
                        "language_score": noise.random(),
                        "token_count": 700,
                    }
                    for row, text in enumerate(new)
                ]
                writer.write_table(pa.Table.from_pylist(rows, schema), row_group_size=ROWS_PER_GROUP)
                texts += new
    return texts


def counts_of(home: Path, asset: str) -> dict[str, Any]:
    """What the manifest of an asset's one artifact counts."""
    (manifest,) = home.glob(f"{asset}/-/*/manifest.json")
    counts: dict[str, Any] = json.loads(manifest.read_text())["counts"]
    return counts


def naive_counts(texts: list[str], tokenizer: tokenizers.Tokenizer, recipe: Recipe) -> dict[str, tuple[int, int]]:
    """Documents and tokens of each split: distinct texts in order, each to its split until that has its tokens."""
    splits = recipe.splits
    budgets = dict(splits.budgets_to_fill)
    counts = dict.fromkeys(budgets, (0, 0))
    seen: set[bytes] = set()
    for text in texts:
        doc_id = hashlib.sha256(text.encode()).digest()
        if doc_id in seen:
            continue
        seen.add(doc_id)
        seed, fraction = splits.assignment.seed, splits.assignment.validation_fraction
        split = naive_text.fraction_split(doc_id, derive_seed(seed, "split"), fraction)
        documents, tokens = counts[split]
        if tokens < budgets[split]:
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            counts[split] = documents + 1, tokens + len(ids) + 1
        if all(tokens >= budgets[name] for name, (_, tokens) in counts.items()):
            return counts
    raise AssertionError(f"the files end before the budgets are full: {counts}")


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_one_command_reads_the_hub_and_builds_all_but_the_training(tmp_path: Path, sample_data: Path) -> None:
    texts = write_files(tmp_path / "files" / "sample" / "10BT")
    recipe = load_recipe("fineweb-lab")
    tokenizer = sample_data / "tokenizers" / "gpt2.tokenizer.json"
    home = tmp_path / "home"
    with serving_files(tmp_path / "files") as server:
        server.commits = {"pinned": recipe.source.revision, "main": "f" * 40}
        server.models = {f"{recipe.tokenizer.repository}/resolve/{recipe.tokenizer.revision}/tokenizer.json": tokenizer}
        done = subprocess.run(
            # The environment is the one that the tests run in.
            ["make", "--old-file=env-prepare", f"BIN={Path(sys.executable).parent}", "fineweb"],
            cwd=ROOT,
            env=os.environ | {"HF_ENDPOINT": server.url, "HF_TOKEN": "", "CORPUSMILL_HOME": str(home)},
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stdout[-3_000:] + done.stderr[-3_000:]

    expected = naive_counts(texts, tokenizers.Tokenizer.from_file(str(tokenizer)), recipe)
    shards, plan = counts_of(home, "token_shards")["splits"], counts_of(home, "packing_plan")["splits"]
    found = {name: (split["documents"], split["tokens"]) for name, split in shards.items()}
    assert found == expected
    for name, (documents, tokens) in expected.items():
        assert tokens >= recipe.splits.budgets[name]
        assert plan[name]["targets"] == tokens - documents  # next-token pairs
    assert "\nFailed:\n" not in done.stdout + done.stderr
    assert not (home / "varlen_training_run").exists()

    asked = [one.path for one in server.log if one.path.startswith("/datasets/")]
    assert asked
    assert all(f"/resolve/{recipe.source.revision}/" in path for path in asked)
    files = ["/store/sample/10BT/" + f"{number:03d}_00000.parquet" for number in range(NUM_FILES)]
    requests = [[one for one in server.data() if one.path.startswith(f"{file}?")] for file in files]
    assert all(len(one) > 1 for one in requests[:2])
    assert len(requests[2]) == 1  # its footer: the budgets were full before it
    sizes = [(tmp_path / "files" / "sample" / "10BT" / Path(file).name).stat().st_size for file in files]
    assert sum(one.sent for group in requests for one in group) < 0.8 * sum(sizes)
