"""The text of installed Python packages, written as Parquet in FineWeb's schema.

In: the installed distributions that corpusmill's runtime requirements resolve to, and a byte limit per pool. Out: one
folder a pool, files of row groups of 250. Which files are taken depends on their recorded hashes and the limits
alone, so one environment gives the same bytes every time. Nothing of a package is imported or run.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from packaging.utils import canonicalize_name

from training_io.errors import SourceError
from training_io.hashing import sha256_file

DISTRIBUTION = "corpusmill"
ROWS_PER_GROUP = 250
MIN_FILE_BYTES = 200
MAX_FILE_BYTES = 60_000
PROSE_SUFFIXES = frozenset({".md", ".rst", ".txt"})
PROSE_STEMS = frozenset({"license", "licence", "copying", "notice", "readme", "authors", "changelog", "changes"})
POOLS = ("prose", "code")


@dataclass(frozen=True, kw_only=True)
class PackageText:
    """One document that a package offers."""

    pool: str
    distribution: str
    version: str
    member: str
    recorded_hash: str
    num_bytes: int  # as recorded; the description's own size
    location: Path | None  # None for the package's own description


def runtime_distributions() -> list[metadata.Distribution]:
    """The installed distributions that corpusmill needs at run time, by name, without extras."""
    from packaging.requirements import Requirement  # its grammar is long, and only this needs it

    found: dict[str, metadata.Distribution] = {}
    waiting = [DISTRIBUTION]
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name in found:
            continue
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError as error:
            raise SourceError(
                f"source packages: expected the distribution {name!r} to be installed, found none."
                " Install corpusmill with `make env`."
            ) from error
        found[name] = distribution
        requirements = [Requirement(text) for text in distribution.requires or []]
        waiting += [need.name for need in requirements if need.marker is None or need.marker.evaluate({"extra": ""})]
    return [found[name] for name in sorted(found) if name != DISTRIBUTION]


def offered_texts(distributions: list[metadata.Distribution]) -> list[PackageText]:
    """Every prose and source file of the distributions, and each one's description, by distribution and member."""
    return sorted(
        (text for distribution in distributions for text in _texts_of(distribution)),
        key=lambda text: (text.distribution, text.member),
    )


def _texts_of(distribution: metadata.Distribution) -> Iterator[PackageText]:
    name, version = canonicalize_name(distribution.metadata["Name"]), distribution.version
    for member in distribution.files or []:
        if member.hash is None or not MIN_FILE_BYTES <= (member.size or 0) <= MAX_FILE_BYTES:
            continue
        pool = _pool_of(member)
        if pool is None:
            continue
        yield PackageText(
            pool=pool,
            distribution=name,
            version=version,
            member=member.as_posix(),
            recorded_hash=member.hash.value,
            num_bytes=member.size or 0,
            location=Path(str(member.locate())),
        )
    description = _description(distribution)
    if len(description.encode()) >= MIN_FILE_BYTES:
        yield PackageText(
            pool="prose",
            distribution=name,
            version=version,
            member="METADATA#description",
            recorded_hash=hashlib.sha256(description.encode()).hexdigest(),
            num_bytes=len(description.encode()),
            location=None,
        )


def _pool_of(member: PurePosixPath) -> str | None:
    if member.is_absolute() or ".." in member.parts:
        return None
    if member.suffix == ".py":
        return "code"
    if member.suffix.lower() in PROSE_SUFFIXES or member.stem.lower() in PROSE_STEMS:
        return "prose"
    return None


def _description(distribution: metadata.Distribution) -> str:
    return str(distribution.metadata.get_payload() or "")


def choose_texts(texts: list[PackageText], limits: Mapping[str, int]) -> list[PackageText]:
    """A spread of texts over all packages within each pool's byte limit, back in their first order.

    They are tried by the hash of their recorded hash and name, so that a limit does not favour packages early in
    the alphabet. Sizes are the files' sizes on disk.
    """
    chosen: set[tuple[str, str]] = set()
    left = dict(limits)
    for text in sorted(texts, key=lambda text: hashlib.sha256(f"{text.recorded_hash} {text.member}".encode()).digest()):
        if text.location is not None and not text.location.is_file():
            continue
        size = text.location.stat().st_size if text.location is not None else text.num_bytes
        if size <= left[text.pool]:
            left[text.pool] -= size
            chosen.add((text.distribution, text.member))
    return [text for text in texts if (text.distribution, text.member) in chosen]


def corpus_inputs(texts: list[PackageText]) -> dict[str, Any]:
    """What decides the corpus's bytes, before it is written: each text's name, version and the hash of its bytes."""
    return {
        "texts": [
            [text.pool, text.distribution, text.version, text.member, _content_hash(text), text.location is None]
            for text in texts
        ]
    }


def _content_hash(text: PackageText) -> str:
    return text.recorded_hash if text.location is None else sha256_file(text.location)


def write_package_corpus(folder: Path, texts: list[PackageText]) -> dict[str, Any]:
    """Write `<pool>/000_00000.parquet` for each pool; returns documents and bytes by pool.

    A file that is not valid UTF-8 is left out. Addresses are `pkg:` URIs; dates are not given.
    """
    descriptions = {
        canonicalize_name(distribution.metadata["Name"]): _description(distribution)
        for distribution in (metadata.distribution(name) for name in {text.distribution for text in texts})
    }
    counts: dict[str, Any] = {}
    for pool in POOLS:
        rows = list(_rows([text for text in texts if text.pool == pool], descriptions))
        if not rows:
            raise SourceError(
                f"source packages: expected texts for the pool {pool!r} in the installed packages, found none."
                " Raise the pool's byte limit in the recipe."
            )
        (folder / pool).mkdir()
        table = pa.Table.from_pylist(rows, schema=_SCHEMA)
        pq.write_table(table, folder / pool / "000_00000.parquet", row_group_size=ROWS_PER_GROUP, compression="zstd")
        counts[pool] = {"documents": len(rows), "bytes": sum(len(row["text"].encode()) for row in rows)}
    return counts


_SCHEMA = pa.schema(
    [
        ("text", pa.string()),
        ("id", pa.string()),
        ("dump", pa.string()),
        ("url", pa.string()),
        ("date", pa.string()),
        ("file_path", pa.string()),
        ("language", pa.string()),
        ("language_score", pa.float64()),
        ("token_count", pa.int64()),
    ]
)


def _rows(texts: list[PackageText], descriptions: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    for text in texts:
        try:
            content = descriptions[text.distribution] if text.location is None else text.location.read_bytes().decode()
        except UnicodeDecodeError:
            continue
        address = f"pkg:pypi/{text.distribution}@{text.version}#{text.member}"
        yield {
            "text": content,
            "id": hashlib.sha256(address.encode()).hexdigest()[:32],
            "dump": f"{text.distribution}-{text.version}",
            "url": address,
            "date": None,
            "file_path": f"{text.distribution}/{text.member}",
            "language": "en" if text.pool == "prose" else "py",
            "language_score": None,
            "token_count": None,
        }
