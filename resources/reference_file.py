"""Reference texts from a file of lines.

In: a `.txt` file, one text a line, or a `.jsonl` file, a JSON object a line with the text in its field `text`; either
may be compressed (`.gz`). Out: the texts in order. Lines end in LF or CR LF; other separators of Unicode belong to the
texts, a byte-order mark at the start of the file does not. Blank lines, and texts that are null or empty, are left out.
The promise: whatever else is no text is one error that names the file and the line, since what cannot be read bars
nothing. The cost: the file is held in memory.
"""

import gzip
import json
import zlib
from codecs import BOM_UTF8
from pathlib import Path

from resources.row_group_source import TEXT_COLUMN
from training_io.errors import SourceError

SHOWN_CHARACTERS = 80


def read_texts(path: Path) -> list[str]:
    """The texts of a `.txt` or `.jsonl` file, which may be `.gz`; SourceError for another file or a line without."""
    kind = Path(path.name.lower().removesuffix(".gz")).suffix
    if kind not in (".txt", ".jsonl"):
        raise SourceError(
            f"{path}: expected a file .parquet, .jsonl or .txt, the latter two also as .gz, found {path.name!a}."
            " Rename or convert it: the suffix says how it is read."
        )
    numbered = [(number, line) for number, line in enumerate(_lines(path), 1) if line.strip()]
    if kind == ".txt":
        return [line for _, line in numbered]
    return [text for number, line in numbered if (text := _field(line, f"{path}, line {number:,}"))]


def _lines(path: Path) -> list[str]:
    content = _content(path).removeprefix(BOM_UTF8)
    try:
        return [line.removesuffix("\r") for line in content.decode("utf-8").split("\n")]
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise SourceError(
            f"{path}, line {line:,}: expected UTF-8 text, found {error}. Save the file as UTF-8."
        ) from error


def _content(path: Path) -> bytes:
    try:
        content = path.read_bytes()
        return gzip.decompress(content) if path.suffix.lower() == ".gz" else content
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise SourceError(f"{path}: expected gzip data, found {error}. Fetch or compress the file again.") from error


def _field(line: str, where: str) -> str | None:
    """The text of one JSON object; null for none."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _no_text(where, f"{line[:SHOWN_CHARACTERS]!a} ({error})") from error
    if not isinstance(row, dict):
        raise _no_text(where, repr(row)[:SHOWN_CHARACTERS])
    text = row.get(TEXT_COLUMN, 0)
    if text is not None and not isinstance(text, str):
        found = f"the fields {', '.join(map(ascii, row))}" if TEXT_COLUMN not in row else f"{TEXT_COLUMN!r}: {text!r}"
        raise _no_text(where, found[:SHOWN_CHARACTERS])
    if text and not _is_unicode(text):
        raise _no_text(where, f"half of a surrogate pair in {text[:SHOWN_CHARACTERS]!a}")
    return text


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _no_text(where: str, found: str) -> SourceError:
    return SourceError(
        f"{where}: expected a JSON object with a string in its field {TEXT_COLUMN!r}, found {found}. Mend the line."
    )
