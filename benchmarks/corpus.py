"""The text that is measured on: a bounded part of Parquet files, in memory, the same for every entry.

`CORPUSMILL_BENCH_TEXT` names a folder of Parquet files with a column `text`; without it, it is the package corpus of
the recipe `sample`. Of more text than the limit, every n-th row group of all files is read, then cut at the limit.
"""

import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline_assets.recipe_file import load_recipe
from pipeline_assets.sections.source import PackagesSource
from resources.package_corpus import choose_texts, offered_texts, runtime_distributions, write_package_corpus
from training_io.errors import SourceError

TEXT_VARIABLE = "CORPUSMILL_BENCH_TEXT"
TEXT_COLUMN = "text"
ROWS_PER_GROUP = 1000
WORDS_THAT_CHANGE_PLACES = 16


@dataclass(frozen=True, kw_only=True)
class Text:
    """Documents and where they are from; `texts` is one large_string array without nulls."""

    source: str
    texts: pa.LargeStringArray

    @property
    def num_bytes(self) -> int:
        """UTF-8 bytes of all documents."""
        return num_bytes_of(self.texts)

    @property
    def num_megabytes(self) -> float:
        """The same in MB of 10^6 bytes."""
        return self.num_bytes / 1e6


def num_bytes_of(texts: pa.LargeStringArray) -> int:
    """UTF-8 bytes of an array of texts."""
    return int(pc.sum(pc.binary_length(texts)).as_py() or 0)


def load_text(max_bytes: int) -> Text:
    """The text to measure on, at most `max_bytes` or one document; SourceError where there is none."""
    folder = os.environ.get(TEXT_VARIABLE)
    if folder:
        return Text(source=f"{TEXT_VARIABLE}={folder}", texts=read_texts(Path(folder), max_bytes))
    with tempfile.TemporaryDirectory() as written:
        _write_sample(Path(written))
        return Text(source="package corpus of the recipe sample", texts=read_texts(Path(written), max_bytes))


def read_texts(folder: Path, max_bytes: int) -> pa.LargeStringArray:
    """Up to `max_bytes` of the texts in a folder's Parquet files, in order, nulls left out."""
    files = [pq.ParquetFile(path) for path in sorted(folder.rglob("*.parquet"))]
    if not files:
        raise SourceError(f"{folder}: expected Parquet files, found none. Set {TEXT_VARIABLE} to a folder of them.")
    groups = [(file, number, _text_bytes(file, number)) for file in files for number in range(file.num_row_groups)]
    stride = max(1, sum(size for _, _, size in groups) // max_bytes)
    parts: list[pa.LargeStringArray] = []
    left = max_bytes
    for file, number, _ in groups[::stride]:
        column = file.read_row_group(number, columns=[TEXT_COLUMN])[TEXT_COLUMN]
        parts.append(column.cast(pa.large_string()).drop_null().combine_chunks())
        left -= num_bytes_of(parts[-1])
        if left <= 0:
            break
    texts = limited(pa.concat_arrays([pa.array([], pa.large_string()), *parts]), max_bytes)
    if not len(texts):
        raise SourceError(f"{folder}: expected at least 1 document, found none. Choose a folder with text.")
    return texts


def limited(texts: pa.LargeStringArray, max_bytes: int) -> pa.LargeStringArray:
    """The first texts of at most `max_bytes` together, at least one.

    >>> limited(pa.array(["abc", "de", "f"], pa.large_string()), 5).to_pylist()
    ['abc', 'de']
    """
    ends = np.cumsum(pc.binary_length(texts).to_numpy())
    return texts[: max(int(np.searchsorted(ends, max_bytes, side="right")), 1)]


def altered_copy(texts: pa.LargeStringArray, number: int) -> pa.LargeStringArray:
    """The same documents in other words: copy 0 is the text itself, and no two copies share next to any five words.

    Words, here what stands between spaces, change places with others of the same length and about the same frequency,
    all over the text alike. So a copy has the text's bytes a document, its distribution of words, and its near-copies.
    """
    if number == 0:
        return texts
    words = pc.split_pattern(texts, " ")
    coded = words.values.dictionary_encode()
    counts = np.bincount(coded.indices, minlength=len(coded.dictionary))
    lengths = pc.binary_length(coded.dictionary).to_numpy()
    order = np.lexsort([-counts, lengths])
    groups, drawn = np.arange(len(order)) // WORDS_THAT_CHANGE_PLACES, np.random.default_rng(number).random(len(order))
    mixed = order[np.lexsort([drawn, groups, lengths[order]])]
    exchanged = np.empty_like(order)
    exchanged[order] = mixed
    taken = coded.dictionary.take(pa.array(exchanged)).take(coded.indices)
    return pc.binary_join(pa.LargeListArray.from_arrays(words.offsets, taken), pa.scalar(" ", taken.type))


def write_parquet(folder: Path, parts: Iterable[pa.LargeStringArray]) -> None:
    """Texts, part after part, as one Parquet file, for what reads files."""
    folder.mkdir(parents=True)
    schema = pa.schema({TEXT_COLUMN: pa.large_string()})
    with pq.ParquetWriter(folder / "000_00000.parquet", schema) as writer:
        for texts in parts:
            writer.write_table(pa.table({TEXT_COLUMN: texts}), row_group_size=ROWS_PER_GROUP)


def write_plain(folder: Path, name: str, texts: pa.LargeStringArray) -> None:
    """Texts as `<name>.bin` and `<name>_offsets.npy`, for peers that have no Arrow."""
    folder.mkdir(parents=True, exist_ok=True)
    encoded = texts.cast(pa.large_binary()).to_pylist()
    (folder / f"{name}.bin").write_bytes(b"".join(encoded))
    np.save(folder / f"{name}_offsets.npy", np.cumsum([0, *map(len, encoded)], dtype=np.int64))


def _text_bytes(file: pq.ParquetFile, number: int) -> int:
    names = file.schema_arrow.names
    if TEXT_COLUMN not in names:
        raise SourceError(f"{TEXT_VARIABLE}: expected a column {TEXT_COLUMN!r}, found {', '.join(names)}.")
    group = file.metadata.row_group(number)
    columns = (group.column(position) for position in range(group.num_columns))
    return sum(column.total_uncompressed_size for column in columns if column.path_in_schema == TEXT_COLUMN)


def _write_sample(folder: Path) -> None:
    source = load_recipe("sample").source
    assert isinstance(source, PackagesSource), source
    limits = {"prose": source.max_prose_bytes, "code": source.max_code_bytes}
    write_package_corpus(folder, choose_texts(offered_texts(runtime_distributions()), limits))
