"""Pools of Parquet files, wherever they are: folders, data sets of the Hub, buckets, URLs.

In: pools. Out: the files of each, by name. The promise: what a pool names and does not have is an error; names, sizes
and content hashes are the listing's own, fresh each time. The cost: a walk of a folder; a request a thousand names on
the Hub and in a bucket; one a file behind a URL.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from urllib.parse import unquote, urlsplit

from resources.hub import HubFile, list_hub_files
from resources.readers import Network, RemoteFile, WebFile
from resources.s3 import Bucket, list_objects
from resources.web import size_and_etag
from training_io.errors import SourceError
from training_io.hashing import identity_of, sha256_file

HASH_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class PoolFolder:
    """A pool's files in a local folder."""

    name: str
    folder: Path
    glob: str


@dataclass(frozen=True, kw_only=True)
class PoolOnHub:
    """A pool's files in a data set of the Hub; those that `local_folder` has whole are read there."""

    name: str
    repository: str
    revision: str  # a commit, a tag or a branch
    folder: str
    glob: str
    branch: str = "main"  # where a newer commit than a pinned one would be
    local_folder: Path | None = None


@dataclass(frozen=True, kw_only=True)
class PoolInBucket:
    """A pool's files in a bucket."""

    name: str
    bucket: Bucket
    prefix: str
    glob: str


@dataclass(frozen=True, kw_only=True)
class PoolOfUrls:
    """A pool's files, each behind a URL."""

    name: str
    urls: tuple[str, ...]


Pool = PoolFolder | PoolOnHub | PoolInBucket | PoolOfUrls


@dataclass(frozen=True, kw_only=True)
class Listed:
    """A file of a pool: its name in it, with forward slashes; where its bytes are; what they are called, if known."""

    pool: str
    file: str
    location: Path | RemoteFile
    content: str = ""
    commit: str = ""


def files_of(pool: Pool, network: Network) -> list[Listed]:
    """Every file of a pool, by name; SourceError where it has none."""
    if isinstance(pool, PoolFolder):
        return _in_folder(pool)
    if isinstance(pool, PoolOnHub):
        return _on_hub(pool, network)
    return _in_bucket(pool, network) if isinstance(pool, PoolInBucket) else _behind_urls(pool, network)


def _in_folder(pool: PoolFolder) -> list[Listed]:
    paths = _paths(pool)
    return [Listed(pool=pool.name, file=path.relative_to(pool.folder).as_posix(), location=path) for path in paths]


def _paths(pool: PoolFolder) -> list[Path]:
    if not pool.folder.is_dir():
        raise SourceError(
            f"pool {pool.name}: expected a folder of Parquet files at {pool.folder}, found none."
            " Put the files there or mend source.pools in the recipe."
        )
    try:
        # By name, as source coordinates are: paths sort by their parts, which is another order ("a/b" and "a-b").
        found = sorted(pool.folder.glob(pool.glob), key=Path.as_posix)
    except (ValueError, NotImplementedError) as error:
        raise SourceError(
            f"pool {pool.name}: expected a glob relative to {pool.folder}, such as **/*.parquet, found {pool.glob!r}"
            f" ({error}). Mend the glob in the recipe."
        ) from error
    paths = [path for path in found if not path.is_dir()]
    if not paths:
        raise SourceError(
            f"pool {pool.name}: expected at least one file matching {pool.glob!r} in {pool.folder}, found none."
            " Put the files there or mend the glob in the recipe."
        )
    unreadable = [path for path in paths if not path.is_file()]
    links = [path for path in sorted(pool.folder.rglob("*")) if path.is_symlink() and path.is_dir()]
    if unreadable or links:
        raise SourceError(
            f"pool {pool.name}: expected files and plain folders in {pool.folder}, found"
            f" {[*unreadable, *links][0]}, a link to nothing or to a folder, or no file. Its rows would be missing:"
            " put the files there, or make the folder a pool of its own."
        )
    unnamed = [path for path in paths if not _is_utf8(path.relative_to(pool.folder).as_posix())]
    if unnamed:
        raise SourceError(
            f"pool {pool.name}: expected file names in UTF-8 in {pool.folder}, found {unnamed[0].name!a}."
            " Rename the file."
        )
    return paths


def _is_utf8(name: str) -> bool:
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _on_hub(pool: PoolOnHub, network: Network) -> list[Listed]:
    found = list_hub_files(network.hub, repository=pool.repository, revision=pool.revision, folder=pool.folder)
    names = {_below(pool.folder, file.path): file for file in found}
    return [
        Listed(
            pool=pool.name,
            file=name,
            location=_local_copy(pool, name, names[name], network) or names[name],
            content=names[name].content,
            commit=names[name].commit,
        )
        for name in _matching(pool.name, list(names), pool.glob, f"{pool.repository}/{pool.folder}".rstrip("/"))
    ]


def _local_copy(pool: PoolOnHub, name: str, file: HubFile, network: Network) -> Path | None:
    """The whole file in the local folder: same name, size and SHA-256."""
    path = (pool.local_folder or Path()) / name
    if pool.local_folder is None or not path.is_file() or path.stat().st_size != file.size_bytes:
        return None
    return path if file.content == f"sha256:{_known_sha256(path, network)}" else None


def _known_sha256(path: Path, network: Network) -> str:
    """A file's SHA-256, counted once for each size and time of its last change."""
    state = path.stat()
    ref = network.store.materialize(
        asset="source_hashes",
        unit=identity_of(str(path.resolve()))[:16],
        inputs={"bytes": state.st_size, "changed": state.st_mtime_ns, "inode": state.st_ino},
        parameters={},
        version=HASH_VERSION,
        write=lambda _: {"sha256": sha256_file(path)},
    )
    return str(ref.counts["sha256"])


def _in_bucket(pool: PoolInBucket, network: Network) -> list[Listed]:
    found = list_objects(pool.bucket, pool.prefix, network.bucket_web(pool.bucket))
    files = {_below(pool.prefix, file.key): file for file in found}
    where = f"s3://{pool.bucket.name}/{pool.prefix}".rstrip("/")
    return [
        Listed(pool=pool.name, file=name, location=files[name], content=files[name].content)
        for name in _matching(pool.name, list(files), pool.glob, where)
    ]


def _behind_urls(pool: PoolOfUrls, network: Network) -> list[Listed]:
    listed = []
    for name, url in sorted(zip(names_of_urls(pool.urls), pool.urls, strict=True)):
        size_bytes, etag = size_and_etag(network.web, url, f"pool {pool.name}")
        file = WebFile(url=url, size_bytes=size_bytes, etag=etag)
        listed.append(Listed(pool=pool.name, file=name, location=file, content=file.content))
    return listed


def names_of_urls(urls: Sequence[str]) -> list[str]:
    """A name for each URL: its path below the last folder that all of them share; ValueError where two have one name.

    >>> names_of_urls(["https://host/set/a/0.parquet", "https://host/set/b/0.parquet"])
    ['a/0.parquet', 'b/0.parquet']
    """
    paths = [[urlsplit(url).netloc, *unquote(urlsplit(url).path).strip("/").split("/")] for url in urls]
    shared = 0
    while all(len(path) > shared + 1 for path in paths) and len({path[shared] for path in paths}) == 1:
        shared += 1
    names = ["/".join(path[shared:]) for path in paths]
    first: dict[str, int] = {}
    for number, name in enumerate(names, start=1):
        if first.setdefault(name, number) != number:
            raise ValueError(  # by number: a URL may hold a secret
                f"expected a name of its own for each URL's file, found one name for URLs {first[name]:,} and"
                f" {number:,}, which differ only by http or https, or by %2F for a slash or the like; remove one"
            )
    return names


def _below(folder: str, path: str) -> str:
    return path.removeprefix(f"{folder.strip('/')}/") if folder.strip("/") else path


def _matching(pool: str, names: Sequence[str], glob: str, where: str) -> list[str]:
    found = sorted(name for name in names if matches(name, glob))
    if not found:
        raise SourceError(
            f"pool {pool}: expected at least one file matching {glob!r} in {where}, found none among"
            f" {len(names):,} files. Mend the glob or the folder in the recipe."
        )
    return found


def matches(name: str, glob: str) -> bool:
    """Whether a relative path matches a glob as pathlib means it: `**` is any folders, `*` stops at slashes.

    >>> [matches(name, "**/*.parquet") for name in ("a.parquet", "x/y/a.parquet", "a.csv")]
    [True, True, False]
    """
    return _match_parts(name.split("/"), glob.split("/"))


def _match_parts(parts: Sequence[str], patterns: Sequence[str]) -> bool:
    if not patterns:
        return not parts
    if patterns[0] == "**":
        return any(_match_parts(parts[skipped:], patterns[1:]) for skipped in range(len(parts) + 1))
    return bool(parts) and fnmatchcase(parts[0], patterns[0]) and _match_parts(parts[1:], patterns[1:])
