"""What every check said last, pass or fail, kept beside the artifacts for whoever draws them together.

In: a check's verdict and the references that it read. Out: one small JSON file a judged artifact and check. Promise: a
record is of the very bytes that it names, and a check that is counting, or was killed, leaves none standing; none is
large, and one that is not as it was written is told as damaged, whatever is wrong with it.
"""

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args

from pipeline_assets.flow import STAGES
from pipeline_assets.report import MAX_CELL_CHARACTERS, plain_cell
from resources.artifact_store import ArtifactRef, ArtifactStore, replace_file
from training_io.errors import FormatError

VERDICTS_FOLDER = "_verdicts"
MAX_EXAMPLES = 20
MAX_TEXT_CHARACTERS = 1_000
MAX_NAME_CHARACTERS = 80
MAX_COLUMNS = 40  # of an example
MAX_NUMBERS = 150  # of a verdict: one for each of 64 pools in two stages, and some

Outcome = Literal["passed", "failed", "warned", "crashed"]


@dataclass(frozen=True, kw_only=True)
class VerdictRecord:
    """What a check said of the bytes that `judged` names: digests by asset, of all that it read; on which basis."""

    basis: str
    judged: Mapping[str, str]
    outcome: Outcome
    expected: str
    found: str
    num_violations: int
    examples: Sequence[Mapping[str, Any]] = ()
    numbers: Mapping[str, float] = field(default_factory=dict)


def clipped(text: str, max_characters: int = MAX_TEXT_CHARACTERS) -> str:
    """A text that can be stored and shown: of bounded length, lone surrogates spelled out.

    >>> clipped("a" * 12, 10)
    'aaaaa… cut'
    """
    mark = "… cut"
    kept = text if len(text) <= max_characters else text[: max_characters - len(mark)] + mark
    return kept.encode("utf-8", "backslashreplace").decode()


def record_verdict(store: ArtifactStore, ref: ArtifactRef, check: str, record: VerdictRecord) -> None:
    """Put a check's verdict on an artifact in the place of an earlier one."""
    path = _path(store, ref, check)
    if path.is_dir():
        forget_verdict(store, ref, check)
    replace_file(path, json.dumps(asdict(bounded(record)), indent=1, allow_nan=False))


def forget_verdict(store: ArtifactStore, ref: ArtifactRef, check: str) -> None:
    """Drop what a check said of an artifact, if it said anything, and whatever else is in the record's place."""
    path = _path(store, ref, check)
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def read_verdict(store: ArtifactStore, ref: ArtifactRef, check: str) -> VerdictRecord | None:
    """What a check said last of an artifact, None where it has said nothing; FormatError for a damaged record."""
    path = _path(store, ref, check)
    try:
        return bounded(_parsed(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, OverflowError, RecursionError) as error:
        said = clipped(str(error), MAX_TEXT_CHARACTERS // 2)
        raise FormatError(f"Its record is damaged ({path}: {said}). Execute {check} again.") from error


def _parsed(content: bytes) -> VerdictRecord:
    """A record from its JSON; ValueError where a value is not of the kind that is written."""
    values = json.loads(content, parse_constant=_refuse_constant)
    names = {one.name for one in fields(VerdictRecord)}
    if not isinstance(values, dict) or values.keys() != names:
        raise ValueError(f"expected an object of {', '.join(sorted(names))}")
    judged, numbers, examples = values["judged"], values["numbers"], values["examples"]
    laws = {
        "basis: a digest": isinstance(values["basis"], str),
        "judged: digests by asset": isinstance(judged, dict)
        and bool(judged)
        and all(asset in STAGES and isinstance(digest, str) for asset, digest in judged.items()),
        "outcome: one that is known": values["outcome"] in get_args(Outcome),
        "expected: a text": isinstance(values["expected"], str),
        "found: a text": isinstance(values["found"], str),
        "num_violations: a count": type(values["num_violations"]) is int and values["num_violations"] >= 0,
        "outcome: one that its violations give": values["outcome"] == "crashed"
        or (values["outcome"] == "passed") == (values["num_violations"] == 0),
        "examples: a list of rows": isinstance(examples, list) and all(isinstance(row, dict) for row in examples),
        "numbers: finite numbers by name": isinstance(numbers, dict) and all(map(_is_number, numbers.values())),
    }
    for expected, is_kept in laws.items():
        if not is_kept:
            raise ValueError(f"expected {expected}, found {values[expected.partition(':')[0]]!r:.80}")
    json.dumps(values, ensure_ascii=False).encode()  # UnicodeEncodeError, a ValueError, for a lone surrogate
    return VerdictRecord(**values)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"expected finite numbers, found {name}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def bounded(record: VerdictRecord) -> VerdictRecord:
    """The record as it is stored and shown: texts cut, the first examples and numbers, and only finite ones.

    The number `numbers_left_out` says how many were too many, not finite, or of a name that is another's once cut.
    """
    finite = {clipped(name, MAX_NAME_CHARACTERS): one for name, one in record.numbers.items() if math.isfinite(one)}
    is_whole = len(finite) == len(record.numbers) <= MAX_NUMBERS
    kept = finite if is_whole else dict(list(finite.items())[: MAX_NUMBERS - 1])
    left_out = {} if is_whole else {"numbers_left_out": len(record.numbers) - len(kept)}
    return replace(
        record,
        judged=dict(record.judged),
        expected=clipped(record.expected),
        found=clipped(record.found),
        examples=[_bounded_row(row) for row in record.examples[:MAX_EXAMPLES]],
        numbers=kept | left_out,
    )


def _bounded_row(row: Mapping[str, Any]) -> dict[str, Any]:
    return {clipped(str(key), MAX_NAME_CHARACTERS): _cell(value) for key, value in list(row.items())[:MAX_COLUMNS]}


def _cell(value: Any) -> str | int | float | bool:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    cell = plain_cell(value)
    if not isinstance(cell, str):
        return cell
    is_cut = len(cell) <= MAX_CELL_CHARACTERS + 1  # 1: the mark of a cut
    return clipped(cell, MAX_CELL_CHARACTERS + 1 if is_cut else MAX_CELL_CHARACTERS)


def _path(store: ArtifactStore, ref: ArtifactRef, check: str) -> Path:
    return store.root / VERDICTS_FOLDER / ref.asset / ref.identity / f"{check}.latest.json"
