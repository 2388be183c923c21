"""What an asset's own section of the report shows: its pictures, its manifest's counts, its tables for people.

In: a reference, and the stage that opens it. Out: blocks of the page, each number with its unit and meaning. Promise:
a file is shown when it is the one that was sealed and holds what it should; else its place says which file is not as
expected. The cost: one pass over the files shown, which are small.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pipeline_assets.columns import STORED
from pipeline_assets.duplicates import BY_PAIR_NAME
from pipeline_assets.findings import without_home
from pipeline_assets.floors import FLOORS_NAME
from pipeline_assets.layouts import TABLES_NAME
from pipeline_assets.ledger import LEDGER_NAME
from pipeline_assets.measures import MEASURES, Measures
from pipeline_assets.quality_page import MAX_ROWS, Block, Note, Picture, in_words, table_of
from pipeline_assets.report import in_per_cent
from pipeline_assets.scurve import BINS_NAME, curve_row
from pipeline_assets.shown_columns import TABLES
from pipeline_assets.stripes import Stage
from pipeline_assets.tokenizer_report import REPORT_NAME
from pipeline_assets.transforms.split import REASONS, SPLITS
from pipeline_assets.verdict_records import clipped
from resources.artifact_store import ArtifactRef
from resources.shapes import REMEDY
from resources.tables import count_rows, read_first_rows, read_json_rows, read_json_tables
from training_io.errors import CorpusmillError, FormatError
from training_io.manifest import MANIFEST_NAME, Manifest, damaged_files, load_manifest

OF_FILES: Mapping[str, Mapping[str, str]] = {
    "raw_row_groups": {
        "sampled_files.parquet": "sampled_files",
        "filter_effects.parquet": "filters",
        "sampled_thresholds.parquet": "score_thresholds",
    },
    "minhash_signatures": {BINS_NAME: "scurve_table"},
    "lsh_clusters": {BY_PAIR_NAME: "removed_by_pool_and_kept_pool"},
    "split_documents": {FLOORS_NAME: "floors"},
    "tokenizer_report": {REPORT_NAME: ""},
    "packing_stats": {TABLES_NAME: ""},
    "mixture_ledger": {LEDGER_NAME: "ledger"},
}
"""Files of each asset, and of the plans that it lists, that are tables for people, and as what their columns are
explained; a file of several tables explains each by its own name."""
EXPLAINED_AS = {"tokenizers": "comparison", "pools": "comparison_by_pool", "references": "reference_hits_by_set"}
"""Tables whose columns are explained under another name than their own."""
NAMED_BY = {"splits": "split", "removed_by_pool": "pool", "references": "set", "sets": "set"}
"""What the rows of a manifest's table are of."""
NOT_SHOWN = {"all_layouts"}  # it repeats others, for machines
SHARES = {"balance"}  # tables of shares that are shown in per cent
FACTS: Mapping[str, str] = {
    "eos": "The end-of-document token",
    "fingerprint": "SHA-256 of the tokenizer's canonical form",
    "token_dtype": "How a token's id is stored",
    "attention": "What computed the attention",
    "device": "What the model was trained on",
}
"""What a manifest says that is no number."""
NAMES: Mapping[str, Sequence[str]] = {"split": SPLITS, "reason": REASONS[1:]}
"""What stands in a measure's name for one in angle brackets, where that is known."""
PLACEHOLDER = re.compile("<(.+?)>")
MEANING_CHARACTERS = 400
BIN_KINDS: Mapping[str, type] = {
    **dict.fromkeys(("num_pairs", "num_flagged"), int),
    **dict.fromkeys(("similarity", "predicted", "low", "high"), float),
}


def asset_blocks(stage: Stage, ref: ArtifactRef) -> Iterator[Block]:
    """Pictures, counts and tables of one asset."""
    yield from readable(stage, lambda: _files(stage, ref, lambda name: name.endswith(".png"), _picture))
    yield from counts_blocks(ref.asset, ref.counts)
    of_asset = OF_FILES.get(ref.asset, {})
    yield from readable(stage, lambda: _files(stage, ref, lambda name: name in of_asset, _tables))


def readable(stage: Stage, draw: Callable[[], Iterator[Block]]) -> list[Block]:
    """What is drawn; where an artifact turns out to be damaged, what its reader says of it."""
    try:
        return list(draw())
    except CorpusmillError as error:
        return [Note(text=clipped(f"Not drawn: {without_home(stage, str(error))}"), is_unread=True)]


def _files(
    stage: Stage, ref: ArtifactRef, is_drawn: Callable[[str], bool], draw: Callable[[Path, str], Iterator[Block]]
) -> Iterator[Block]:
    """What is drawn of files at the top of the artifact's folder and of the plans that it lists, by name."""
    folder, manifest = stage.open(ref)
    listed = manifest.inputs.get("plans", ())
    for place in (folder, *(stage.store.root / ref.asset / plan["unit"] / plan["identity"] for plan in listed)):
        sealed = load_manifest(place)
        for name in sorted(name for name in sealed.files if "/" not in name and is_drawn(name)):
            yield from readable(stage, partial(_sealed, place, sealed, name, draw))


def _sealed(
    folder: Path, manifest: Manifest, name: str, draw: Callable[[Path, str], Iterator[Block]]
) -> Iterator[Block]:
    require_sealed(folder, manifest, [name])
    yield from draw(folder / name, manifest.asset)


def require_sealed(folder: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """FormatError unless these files of an artifact are those that were sealed. Cost: one pass over their bytes."""
    for damage in damaged_files(folder, manifest, names):
        raise FormatError(f"{damage}. The file is damaged; materialize {manifest.asset} again: it is rebuilt.")


def _picture(path: Path, asset: str) -> Iterator[Block]:
    yield Picture(png=path.read_bytes(), alternative=f"{asset}: {in_words(path.stem)}")


def counts_blocks(asset: str, counts: Mapping[str, Any]) -> Iterator[Block]:
    """What the manifest counts: numbers with their units and meanings, facts, and a table for each list of rows."""
    rest = f"{MANIFEST_NAME} of {asset}"
    numbers = {name: explanation_of(asset, name) for name, value in counts.items() if isinstance(value, int | float)}
    facts = [name for name, value in counts.items() if isinstance(value, str)]
    rows = [
        {"count": in_words(name), "value": counts[name], "unit": numbers[name].unit, "meaning": numbers[name].meaning}
        for name in sorted(numbers, key=lambda name: numbers[name].place)
    ]
    if rows:
        yield table_of(f"Counts of {asset}", rows, max_characters=MEANING_CHARACTERS, rest=rest)
    if facts:
        rows = [{"fact": in_words(name), "value": counts[name], "meaning": FACTS.get(name, "")} for name in facts]
        yield table_of(f"Facts of {asset}", rows, rest=rest)
    for name, value in counts.items():
        if (listed := _rows_of(name, value)) is not None:
            yield _explained_table(f"{asset}: {in_words(name)}", name, listed, rest=rest)


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What a count means, and its place among those of its asset: counts of one split or pool stay together."""

    unit: str
    meaning: str
    place: tuple[int, str, int]


def explanation_of(asset: str, name: str) -> Explanation:
    """What explains a number of an asset, which may be one of several of a kind.

    >>> explanation_of("split_documents", "unused_below_min_tokens").meaning
    'Documents in no split for this reason'
    >>> explanation_of("split_documents", "unused_below_min_tokens_bytes").unit
    'bytes'
    """
    keys = list(MEASURES[asset])
    for at, key in enumerate(keys):
        kind = PLACEHOLDER.search(key)
        if (found := re.fullmatch(PLACEHOLDER.sub(_one_of, key), name)) is None:
            continue
        first = at if kind is None else next(other for other, one in enumerate(keys) if kind[0] in one)
        unit, *meaning = MEASURES[asset][key]
        place = (first, "".join(found.groups()), at)
        return Explanation(unit=unit, meaning=plain_words(", ".join(filter(None, meaning))), place=place)
    return Explanation(unit="", meaning="", place=(len(keys), "", 0))


def _one_of(placeholder: re.Match[str]) -> str:
    return f"({'|'.join(NAMES.get(placeholder[1], ('.+',)))})"


def plain_words(meaning: str) -> str:
    """A meaning as the page says it: what is quoted is spelled as the page spells it.

    >>> plain_words("`text_bytes` over `tokens`")
    '“text bytes” over “tokens”'
    """
    return re.sub("`(.+?)`", lambda quoted: f"“{in_words(quoted[1])}”", meaning)


def legend_of(columns: Measures) -> dict[str, str]:
    """What columns mean, with units that the meanings leave open; nothing of those whose names say it all."""
    legend = {}
    for name, one in columns.items():
        meaning = plain_words(one.meaning.removesuffix(f", {name}"))
        is_said = one.unit in ("", "%") or meaning.lower().startswith(one.unit)
        if meaning.lower() != name:
            legend[name] = meaning if is_said else f"{meaning} ({one.unit})"
    return legend


def _explained_table(caption: str, name: str, rows: Sequence[Mapping[str, Any]], **more: Any) -> Block:
    """A table whose columns come in the order in which they are explained, behind the first that tells rows apart."""
    columns = TABLES.get(EXPLAINED_AS.get(name, name), {})
    texts = [column for column in columns if all(isinstance(row.get(column), str) for row in rows)]
    naming = [column for column in texts if len({row[column] for row in rows}) == len(rows)][:1]
    order = [column for column in dict.fromkeys([*naming, *columns]) if any(column in row for row in rows)]
    ordered = [{**{column: row.get(column) for column in order}, **row} for row in rows]
    return table_of(caption, ordered, meanings=legend_of(columns), **more)


def _rows_of(name: str, value: Any) -> list[Mapping[str, Any]] | None:
    """A list of mappings, or a mapping of them, as rows; None for what is no table."""
    if isinstance(value, dict) and value and all(isinstance(row, dict) for row in value.values()):
        return [{NAMED_BY.get(name, "name"): key, **row} for key, row in value.items()]
    if isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
        return list(map(in_per_cent, value)) if name in SHARES else value
    return None


def _tables(path: Path, asset: str) -> Iterator[Block]:
    """The tables of one file."""
    explained_as, rest = OF_FILES[asset][path.name], f"{path.name} of {asset}"
    if path.suffix == ".parquet":
        rows, total = read_first_rows(path, MAX_ROWS).to_pylist(), count_rows(path)
        yield _explained_table(f"{asset}: {in_words(path.stem)}", explained_as, rows, total=total, rest=rest)
    elif path.name == BINS_NAME:
        yield _explained_table(f"{asset}: s-curve", explained_as, _curve_rows(path), rest=rest)
    else:
        for name, of_name in read_json_tables(path, _table_names(asset, path.name)).items():
            yield _explained_table(f"{asset}: {in_words(name)}", name, of_name, rest=rest)


def _curve_rows(path: Path) -> list[dict[str, float]]:
    bins = read_json_rows(path, BIN_KINDS)
    if any(one["num_pairs"] < 1 for one in bins):
        raise FormatError(f"{path}: expected bins of 1 pair or more, found one of none. {REMEDY}")
    return [curve_row(one) for one in bins]


def _table_names(asset: str, file: str) -> list[str]:
    """The tables of a JSON file, as what the asset states of what it stores."""
    keys = [column.key.partition("[]")[0] for column in STORED[asset].columns if column.file == file]
    return [name for name in dict.fromkeys(keys) if name not in NOT_SHOWN]
