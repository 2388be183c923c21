"""Inspection: what an artifact holds, in numbers.

In: a folder and, if wanted, a recipe to compare with. Out: one nested object of plain values. The promise: counts
come from the index and the plan, not from the manifest, wherever they can be counted. Cost: the lengths and pack
columns are read, the tokens are not.
"""

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from training_io.document_index import DocumentIndex, read_index
from training_io.errors import FormatError, RecipeError
from training_io.ledger import ledger_of
from training_io.manifest import load_manifest, quarantine_reasons
from training_io.packing import pack
from training_io.plan import PLAN_NAME, Plan, load_plan, splits_of
from training_io.segments import keep_whole, repeated_inputs, segment_table
from training_io.verification import artifacts_at, index_folders

QUANTILES = {"min": 0.0, "p5": 0.05, "p25": 0.25, "median": 0.5, "p75": 0.75, "p95": 0.95, "p99": 0.99, "max": 1.0}
RECIPE_NUMBERS = ("max_seq_len", "capacity", "strategy", "buffer")
RECIPE_DEFAULTS: dict[str, Any] = {"long_documents": "cut", "overlap": 0}  # what a recipe means that does not say


def inspect(path: Path, recipe_path: Path | None) -> dict[str, Any]:
    """Counts, length quantiles, packs, segments, tokens and utilisation of an artifact, split folder or package.

    Raises FormatError for a folder that is none of these, RecipeError for a recipe that cannot be read.
    """
    if not path.is_dir():
        raise FormatError(f"{path}: expected the folder of an artifact or a package, found none. Check the path.")
    recipe = {} if recipe_path is None else read_recipe(recipe_path)
    artifacts = artifacts_at(path)
    only_split = path.absolute().name if (path / PLAN_NAME).is_file() else None
    report: dict[str, Any] = (
        _inspect_artifact(path if only_split is None else artifacts[0], only_split, recipe)
        if artifacts == [path] or only_split
        else {"package": [_inspect_artifact(artifact, None, recipe) for artifact in artifacts]}
    )
    if recipe_path is not None:
        report["recipe"] = {"path": str(recipe_path), **recipe}
    return report


def read_recipe(path: Path) -> dict[str, Any]:
    """The packing numbers that a recipe states: those of max_seq_len, capacity, strategy, buffer, long_documents and
    overlap that it has.

    They are looked for in its section `packs` if it has one, else anywhere. JSON always; YAML where PyYAML is
    installed, which a training box may lack.
    """
    if not path.is_file():
        raise RecipeError(f"{path}: expected a recipe file, found none. Give the path of a .json or .yaml file.")
    text = path.read_text(encoding="utf-8")
    try:
        value = json.loads(text) if path.suffix == ".json" else importlib.import_module("yaml").safe_load(text)
    except ImportError as error:
        raise RecipeError(
            f"{path}: expected PyYAML to read a YAML recipe, found it not installed."
            " Give the recipe as JSON, or install pyyaml."
        ) from error
    except Exception as error:  # PyYAML's errors cannot be named where it may not be installed
        raise RecipeError(f"{path}: expected a readable recipe, found {error!r}. Correct the file.") from error
    if not isinstance(value, dict):
        raise RecipeError(f"{path}: expected a mapping of settings, found {type(value).__name__}. Correct the file.")
    found = dict(_entries(value.get("packs", value)))
    return {name: found[name] for name in (*RECIPE_NUMBERS, *RECIPE_DEFAULTS) if name in found}


def _entries(value: Any) -> Iterator[tuple[str, Any]]:
    """Every plain key and value of nested mappings."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if isinstance(inner, dict):
                yield from _entries(inner)
            else:
                yield str(key), inner


def _inspect_artifact(artifact: Path, only_split: str | None, recipe: dict[str, Any]) -> dict[str, Any]:
    manifest = load_manifest(artifact)
    report: dict[str, Any] = {"asset": manifest.asset, "identity": manifest.identity, "digest": manifest.digest}
    if reasons := quarantine_reasons(artifact):
        report["quarantined"] = reasons
    if manifest.asset == "token_shards":
        indexes = [read_index(folder) for folder in index_folders(artifact, manifest)]
        report["splits"] = {index.split: _shards_report(index, recipe) for index in indexes}
    elif manifest.asset == "packing_plan":
        splits = [only_split] if only_split else splits_of(artifact)
        plans = [load_plan(artifact / split, allow_quarantined=True) for split in splits]
        report["splits"] = {plan.split: _plan_report(plan, recipe) for plan in plans}
    else:
        report["counts"] = dict(manifest.counts)
        report["files"] = len(manifest.files)
        report["bytes"] = sum(int(entry["bytes"]) for entry in manifest.files.values())
    return report


def _shards_report(index: DocumentIndex, recipe: dict[str, Any]) -> dict[str, Any]:
    pools = {
        name: {
            "documents": int((index.pools == pool).sum()),
            "tokens": int(index.lengths[index.pools == pool].sum()),
        }
        for pool, name in enumerate(index.pool_names)
    }
    report: dict[str, Any] = {
        "documents": index.num_documents,
        "tokens": index.num_tokens,
        "pairs": index.num_tokens - index.num_documents,
        "shards": len(index.shard_files),
        "token_dtype": index.token_dtype,
        "eos_id": index.eos_id,
        "document_lengths": _quantiles(index),
        "pools": pools,
    }
    if "max_seq_len" in recipe:
        report["under_recipe"] = _under_recipe(index, recipe)
    return report


def _under_recipe(index: DocumentIndex, recipe: dict[str, Any]) -> dict[str, Any]:
    """Segments that a recipe would cut from these documents, how many documents it would divert and, if it says how,
    the packs that it would make; of a recipe that refuses them, for how many documents it does.
    """
    max_seq_len = int(recipe["max_seq_len"])
    stated = RECIPE_DEFAULTS | recipe
    num_long = int((index.lengths - 1 > max_seq_len).sum())
    if stated["long_documents"] == "refuse" and num_long:
        return {"refused": num_long}
    lengths = keep_whole(index.lengths, max_seq_len, str(stated["long_documents"]))
    overlap = int(stated["overlap"])
    _, start, end = segment_table(lengths, max_seq_len, overlap)
    num_diverted = num_long if stated["long_documents"] == "divert" else 0
    report: dict[str, Any] = {"segments": len(start), "diverted": num_diverted}
    if all(name in recipe for name in RECIPE_NUMBERS):
        capacity = int(recipe["capacity"])
        _, pack_offsets = pack(end - start, capacity, str(recipe["strategy"]), int(recipe["buffer"]))
        num_repeated = int(repeated_inputs(start, overlap).sum())
        report |= _packing_report(len(pack_offsets) - 1, int((end - start).sum()), num_repeated, capacity)
    return report


def _plan_report(plan: Plan, recipe: dict[str, Any]) -> dict[str, Any]:
    stored = {name: getattr(plan, name) for name in (*RECIPE_NUMBERS, *RECIPE_DEFAULTS)}
    report: dict[str, Any] = {
        "documents": plan.index.num_documents,
        "tokens": plan.index.num_tokens,
        "diverted": len(plan.diverted),
        "segments": plan.num_segments,
        **_packing_report(plan.num_packs, plan.num_inputs, plan.num_repeated, plan.capacity),
        "steps": plan.num_steps,
        "packs_per_step": plan.packs_per_step,
        **stored,
        "plan_identity": plan.identity,
        "document_lengths": _quantiles(plan.index),
    }
    if plan.stages:
        report["scheduled_packs"] = plan.num_scheduled
        report["mixture"] = _mixture_report(plan)
    if recipe:
        report["differs_from_recipe"] = {
            name: {"plan": stored[name], "recipe": recipe[name]} for name in recipe if recipe[name] != stored[name]
        }
    return report


def _mixture_report(plan: Plan) -> dict[str, dict[str, Any]]:
    """What each stage reads of each pool, from the plan's own ledger."""
    report: dict[str, dict[str, Any]] = {}
    for row in ledger_of(plan):
        stage = report.setdefault(row.stage, {"first_step": row.first_step, "first_token": row.first_token})
        stage[row.pool] = {
            "quota": row.quota_tokens,
            "tokens": row.tokens,
            "documents": row.documents_unique,
            "passes_so_far": round(row.passes_so_far, 4),
        }
    return report


def _packing_report(num_packs: int, num_inputs: int, num_repeated: int, capacity: int) -> dict[str, Any]:
    return {
        "packs": num_packs,
        "targets": num_inputs - num_repeated,
        "repeated": num_repeated,
        "utilisation": num_inputs / (num_packs * capacity) if num_packs else 1.0,
        "packs_above_minimum": num_packs - -(-num_inputs // capacity),
    }


def _quantiles(index: DocumentIndex) -> dict[str, int]:
    """Lengths of real documents, not interpolated, EOS included; nothing for no documents."""
    if index.num_documents == 0:
        return {}
    values = np.quantile(index.lengths, list(QUANTILES.values()), method="inverted_cdf")
    return {name: int(value) for name, value in zip(QUANTILES, values, strict=True)}
