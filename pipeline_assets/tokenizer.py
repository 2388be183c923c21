"""tokens: the tokenizer, given as a file or trained on a reference set, and its canonical fingerprint.

In: a tokenizer.json (a local file, or one of the Hub at a commit, fetched once), or the texts of the recipe's tokenizer
sample. Out: one tokenizer.json. The promise: the named end-of-document token is in it, and text that spells it out does
not become it.
"""

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import dagster as dg
import numpy as np

from pipeline_assets.ops import asset_spec, materialized
from pipeline_assets.pools import network_of
from pipeline_assets.recipe import Recipe
from pipeline_assets.report import asset_metadata
from pipeline_assets.sections.tokenizer import TokenizerFile, TrainedTokenizer
from pipeline_assets.stripes import Sealed, Stage
from resources.artifact_store import ArtifactRef
from resources.tables import read_table
from resources.tokenizer import Tokenizer, fetch_tokenizer, load_tokenizer, train_tokenizer
from training_io.errors import SourceError, StateMismatch
from training_io.handoff import TOKENIZER_NAME
from training_io.hashing import sha256_file

TOKENIZER_VERSION = 1
FETCHED_VERSION = 1


def build_tokenizer(stage: Stage, reference_sets: ArtifactRef) -> Sealed:
    """Train the recipe's tokenizer on its sample, or take the given file; either must hold the named EOS."""
    recipe = stage.recipe.tokenizer
    if isinstance(recipe, TrainedTokenizer):
        sample = f"{recipe.sample}.parquet"
        folder, manifest = stage.store.open(reference_sets)
        inputs = {"sample": manifest.files[sample]["sha256"]}
        write = _train(stage, folder / sample, recipe)
    else:
        path, tokenizer = given_tokenizer(stage, recipe)
        inputs = {"file": sha256_file(path)}
        write = _take(tokenizer)
    parameters = recipe.model_dump(mode="json", exclude={"path", "fingerprint"})
    ref = stage.materialize(
        asset="tokenizer", inputs=inputs, parameters=parameters, version=TOKENIZER_VERSION, write=write
    )
    metadata = asset_metadata(stage, ref) | {"fingerprint": ref.counts["fingerprint"]}
    if warning := fewer_ids(stage.recipe, ref.counts):
        stage.warn(f"tokenizer: {warning}")
        metadata["warning"] = warning
    return Sealed(ref=ref, metadata=metadata)


def fewer_ids(recipe: Recipe, counts: Mapping[str, Any]) -> str | None:
    """A sentence where a trained tokenizer has fewer ids than the recipe asks for; `counts` are its manifest's."""
    if not isinstance(recipe.tokenizer, TrainedTokenizer) or counts["vocab_size"] >= recipe.tokenizer.vocab_size:
        return None
    return (
        f"expected {recipe.tokenizer.vocab_size:,} ids, the sample has merges for {counts['vocab_size']:,};"
        " enlarge the sample or lower tokenizer.vocab_size"
    )


def given_tokenizer(stage: Stage, given: TokenizerFile, key: str = "tokenizer") -> tuple[Path, Tokenizer]:
    """A tokenizer of the recipe: its file and what is in it; StateMismatch where the recipe speaks of another one.

    `key` is where the recipe names it.
    """
    path = given_file(stage, given, key)
    tokenizer = _opened(path, sha256_file(path), given.eos)
    if given.fingerprint is not None and tokenizer.fingerprint != given.fingerprint:
        raise StateMismatch(
            f"{path}: expected the tokenizer with fingerprint {given.fingerprint[:12]}, found"
            f" {tokenizer.fingerprint[:12]}. Name the right file or mend {key}.fingerprint in the recipe."
        )
    return path, tokenizer


def given_file(stage: Stage, given: TokenizerFile, key: str) -> Path:
    """A recipe's tokenizer file: the local one, else the home's copy of the Hub's, fetched where there is none yet."""
    if given.path is None:
        return _fetched_file(stage, given)
    if not Path(given.path).is_file():
        raise SourceError(f"{key}: expected a file at {given.path}, found none. Mend {key}.path in the recipe.")
    return Path(given.path)


def _fetched_file(stage: Stage, given: TokenizerFile) -> Path:
    repository, revision = given.repository, given.revision
    assert repository is not None
    assert revision is not None

    def write(folder: Path) -> dict[str, Any]:
        content = fetch_tokenizer(network_of(stage.pipeline, stage.warn).hub, repository, revision)
        (folder / TOKENIZER_NAME).write_bytes(content)
        return {}

    ref = stage.materialize(
        asset="hub_tokenizer",
        inputs={"repository": repository, "revision": revision},
        parameters={},
        version=FETCHED_VERSION,
        write=write,
    )
    return stage.folder(ref) / TOKENIZER_NAME


def _train(stage: Stage, sample: Path, recipe: TrainedTokenizer) -> Any:
    def write(folder: Path) -> dict[str, Any]:
        texts = read_table(sample, ["text"]).column("text").to_pylist()
        megabytes = sum(len(text.encode()) for text in texts) / 1e6
        stage.say(f"tokenizer: training {recipe.vocab_size:,} ids on {len(texts):,} texts, {megabytes:,.1f} MB")
        (folder / TOKENIZER_NAME).write_bytes(train_tokenizer(texts, recipe.vocab_size, recipe.eos))
        return _tokenizer_counts(load_tokenizer(folder / TOKENIZER_NAME, recipe.eos))

    return write


def _take(tokenizer: Tokenizer) -> Any:
    def write(folder: Path) -> dict[str, Any]:
        (folder / TOKENIZER_NAME).write_text(tokenizer.library.to_str(pretty=False), encoding="utf-8")
        return _tokenizer_counts(tokenizer)

    return write


def _tokenizer_counts(tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "vocab_size": tokenizer.vocab_size,
        "max_id": tokenizer.max_id,
        "eos_id": tokenizer.eos_id,
        "eos": tokenizer.eos,
        "token_dtype": np.dtype(tokenizer.token_dtype).name,
        "fingerprint": tokenizer.fingerprint,
    }


def open_tokenizer(stage: Stage, tokenizer: ArtifactRef) -> Tokenizer:
    """The materialized tokenizer, ready to encode."""
    return _opened(stage.folder(tokenizer) / TOKENIZER_NAME, tokenizer.digest, stage.recipe.tokenizer.eos)


@lru_cache(maxsize=2)  # GPT-2's takes 0.7 s to load, and every step of a process asks for it
def _opened(path: Path, digest: str, eos: str) -> Tokenizer:
    return load_tokenizer(path, eos)


@dg.asset(
    **asset_spec(
        "tokenizer",
        TOKENIZER_VERSION,
        {"tokenizers"},
        "One pinned tokenizer.json and its canonical fingerprint, given or trained on the tokenizer sample. "
        "Promise: the named end-of-document token is in it.",
    )
)
def tokenizer(context: dg.AssetExecutionContext, reference_sets: ArtifactRef) -> dg.MaterializeResult[ArtifactRef]:
    return materialized(context, build_tokenizer, reference_sets=reference_sets)
