"""source: rows read in rounds, in source order, until the recipe's token budgets are full.

A round is one unit. After each one, what was read is planned as the splits will plan it: identical texts once, floor,
assignment, budgets. Promise: the documents used are those that reading everything would use, whatever the size of a
round; the number of rounds is in the manifest. Cost: what is read is tokenized once more, and its lengths and ids stay,
72 bytes a document; each round plans the documents of all rounds before it again.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from pipeline_assets.policy import policy_of
from pipeline_assets.recipe import Recipe
from pipeline_assets.schemas import ROWS_NAME
from pipeline_assets.sections.tokenizer import TokenizerFile
from pipeline_assets.stripes import Stage, reported
from pipeline_assets.tokenizer import given_tokenizer
from pipeline_assets.transforms.arrays import whole_rows
from pipeline_assets.transforms.encode import encode_documents
from pipeline_assets.transforms.rows import doc_id_matrix
from pipeline_assets.transforms.split import SplitInputs, SplitStats, plan_splits
from resources.artifact_store import ArtifactRef
from resources.tables import write_array
from resources.tokenizer import Tokenizer
from training_io.errors import InvariantBroken
from training_io.hashing import DOC_ID_BYTES

ROUNDS_VERSION = 1
LENGTHS_NAME = "length.npy"  # int64[n]: tokens of each row's text, EOS included

Unit = TypeVar("Unit")
Documents = tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]  # doc_ids uint8[n, 32], lengths int64[n]


def read_until_full(stage: Stage, units: Sequence[Unit], read: Callable[[Unit], ArtifactRef]) -> Sequence[Unit]:
    """The first of the units in source order, read one by one: as many as fill every budget, or all."""
    tokenizer = _tokenizer_of(stage)
    documents: list[Documents] = []
    read_units = reported(stage, "rounds", map(read, units), total=len(units))
    rounds = (_documents_of(stage, tokenizer, unit) for unit in read_units)
    for number, new in enumerate(_new_documents(rounds), 1):
        documents.append(new)
        stats = _planned(stage.recipe, documents)
        stage.say(f"raw_row_groups: round {number:,} of at most {len(units):,}: {_in_words(stage.recipe, stats)}")
        if all(stats.filled.values()):
            return units[:number]
    return units


def counts_of_rounds(stage: Stage, parts: Sequence[ArtifactRef]) -> dict[str, Any]:
    """How many rounds were read and which budgets they fill; a warning where the source ended before they were full."""
    tokenizer = _tokenizer_of(stage)
    documents = list(_new_documents(_documents_of(stage, tokenizer, part) for part in parts))
    stats = _planned(stage.recipe, documents)
    if not all(stats.filled.values()):
        stage.warn(
            f"raw_row_groups: expected the token budgets to be filled, found the source's end after {len(parts):,}"
            f" rounds: {_in_words(stage.recipe, stats)}. Lower splits.budgets or add to the source."
        )
    return {"rounds": len(parts), "budgets_filled": dict(stats.filled)}


def parameters_of_rounds(stage: Stage) -> Mapping[str, Any]:
    """What decides how many rounds there are, besides the rows themselves."""
    return {"splits": stage.recipe.splits.model_dump(mode="json"), "tokenizer": _tokenizer_of(stage).fingerprint}


def _tokenizer_of(stage: Stage) -> Tokenizer:
    given = stage.recipe.tokenizer
    if not isinstance(given, TokenizerFile):
        raise InvariantBroken("reading until budgets: expected a recipe with a given tokenizer, found a trained one.")
    return given_tokenizer(stage, given)[1]


def _documents_of(stage: Stage, tokenizer: Tokenizer, unit: ArtifactRef) -> Documents:
    def write(folder: Path) -> dict[str, Any]:
        _, offsets = encode_documents(tokenizer, stage.table(unit, ROWS_NAME, ["text"]).column("text"))
        write_array(np.diff(offsets), folder / LENGTHS_NAME)
        return {"documents": len(offsets) - 1, "tokens": int(offsets[-1])}

    lengths = stage.materialize(
        asset="raw_row_groups",
        unit=f"{unit.unit}-lengths",
        inputs={"rows": unit.digest, "tokenizer": tokenizer.fingerprint},
        parameters={"eos": tokenizer.eos},
        version=ROUNDS_VERSION,
        write=write,
    )
    doc_ids = doc_id_matrix(stage.table(unit, ROWS_NAME, ["doc_id"]).column("doc_id"))
    return doc_ids, stage.array(lengths, LENGTHS_NAME)


def _new_documents(rounds: Iterable[Documents]) -> Iterator[Documents]:
    """Of each round those that were in none before, each once; the ids of all are held sorted, 32 bytes each."""
    seen = whole_rows(np.empty((0, DOC_ID_BYTES), np.uint8))
    for doc_ids, lengths in rounds:
        ids, rows = np.unique(whole_rows(doc_ids), return_index=True)
        places = np.searchsorted(seen, ids)
        is_new = np.ones(len(ids), np.bool_)
        inside = np.flatnonzero(places < len(seen))
        is_new[inside] = seen[places[inside]] != ids[inside]
        seen = np.insert(seen, places[is_new], ids[is_new])
        new = np.sort(rows[is_new])
        yield doc_ids[new], lengths[new]


def _planned(recipe: Recipe, documents: Sequence[Documents]) -> SplitStats:
    lengths = np.concatenate([lengths for _, lengths in documents])
    distinct = SplitInputs(
        assignment_ids=np.concatenate([doc_ids for doc_ids, _ in documents]),
        num_tokens=lengths,
        barred=np.zeros(len(lengths), np.bool_),
    )
    splits = recipe.splits
    return plan_splits(distinct, policy_of(splits), min_tokens=splits.min_tokens, budgets=splits.budgets_to_fill)[1]


def _in_words(recipe: Recipe, stats: SplitStats) -> str:
    budgets = recipe.splits.budgets_to_fill
    return ", ".join(f"{name} {stats.num_tokens[name]:,} of {tokens:,} tokens" for name, tokens in budgets.items())
