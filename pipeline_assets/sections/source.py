"""Where the rows of each pool come from.

In: one section of a recipe. Out: one of the kinds of source. The promise: a URL in which a secret could be is refused,
and each pool is named once.
"""

from typing import Annotated, Literal
from urllib.parse import SplitResult, urlsplit

from pydantic import Field, model_validator

from pipeline_assets.sections.section import MAX_NAMES, Name, Positive, Section
from resources.listings import names_of_urls
from training_io.hashing import identity_of

MAX_URLS = 10_000
ALL_PARQUET = "**/*.parquet"

Repository = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?$")]
Revision = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,199}$")]  # a commit, a tag or a branch


class LocalPool(Section):
    """Parquet files of one pool in a local folder."""

    name: Name
    path: str
    glob: str = ALL_PARQUET


class PackagesSource(Section):
    """The text of corpusmill's installed runtime requirements, written as Parquet first: pools `prose` and `code`."""

    kind: Literal["packages"]
    max_prose_bytes: Positive
    max_code_bytes: Positive


class LocalSource(Section):
    """Local folders of Parquet files, one pool each; the order of the pools is their priority."""

    kind: Literal["local"]
    pools: Annotated[tuple[LocalPool, ...], Field(min_length=1, max_length=MAX_NAMES, strict=False)]

    @model_validator(mode="after")
    def _pool_names_are_unique(self) -> "LocalSource":
        names = [pool.name for pool in self.pools]
        if len(set(names)) != len(names):
            raise ValueError(f"expected each pool name once, found {names}; rename one of them")
        return self


class FolderSource(Section):
    """One pool in a local folder of Parquet files."""

    kind: Literal["folder"]
    pool: Name
    path: str
    glob: str = ALL_PARQUET


class HubSource(Section):
    """One pool in a data set of the Hugging Face Hub, at a commit or at the one that a tag or a branch names now.

    `branch` is where a commit was taken from: what it has come to since is reported, and never read. `local_path` holds
    the pool's files: all of them, and the Hub is not asked; or some, and what is whole there, by size and SHA-256, is
    not fetched.
    """

    kind: Literal["hub"]
    repository: Repository
    path: str = ""
    glob: str = ALL_PARQUET
    revision: Revision
    branch: Revision = "main"  # the one that every repository of the Hub has
    pool: Name
    local_path: str | None = None
    local_copy: Literal["complete", "partial"] = "complete"

    @model_validator(mode="after")
    def _a_part_is_somewhere(self) -> "HubSource":
        if self.local_copy == "partial" and self.local_path is None:
            raise ValueError("expected a local_path with local_copy partial, found none; name it or remove local_copy")
        return self


class S3Source(Section):
    """One pool in a bucket; credentials come from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or it needs none."""

    kind: Literal["s3"]
    pool: Name
    bucket: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{1,254}$")]
    prefix: str = ""
    glob: str = ALL_PARQUET
    endpoint: str
    region: str = "us-east-1"
    credentials: Literal["environment", "anonymous"] = "environment"

    @model_validator(mode="after")
    def _endpoint_is_a_host(self) -> "S3Source":
        if _plain_url(self.endpoint).path.strip("/"):
            raise ValueError("expected an endpoint without a path; the bucket and the prefix have keys of their own")
        return self


class HttpsSource(Section):
    """One pool of files behind URLs that everyone may read, at a server that gives ranges."""

    kind: Literal["https"]
    pool: Name
    urls: Annotated[tuple[str, ...], Field(min_length=1, max_length=MAX_URLS, strict=False)]

    @model_validator(mode="after")
    def _urls_are_plain(self) -> "HttpsSource":
        for url in self.urls:
            _plain_url(url)
        if len(set(self.urls)) != len(self.urls):
            raise ValueError("expected each URL once, found one twice; remove it")
        names_of_urls(self.urls)  # ValueError where two of them name one file
        return self


def _plain_url(url: str) -> SplitResult:
    """Its parts; ValueError, without it, where it could hold a secret: recipes are shown on pages."""
    is_plain = url.isascii() and url.isprintable() and not set(url) & set(" <>[]")
    parts = urlsplit(url if is_plain else "")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("expected a URL with http or https and a host; mend it")
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ValueError("expected a URL without user name, query and fragment, since recipes are shown; shorten it")
    port = parts.netloc.partition(":")[2]
    if port and not port.isdecimal():  # a user name and password whose host was forgotten
        raise ValueError("expected a port in digits after the host's colon; mend the URL")
    return parts


PoolSource = FolderSource | HubSource | S3Source | HttpsSource


def place_of(pool: PoolSource) -> str:
    """Where a pool's files come from, told apart from every other such place."""
    if isinstance(pool, FolderSource):
        return pool.path
    if isinstance(pool, HttpsSource):
        return f"URLs of digest {identity_of(sorted(pool.urls))[:16]}"
    if isinstance(pool, S3Source):
        return f"s3://{pool.bucket}/{pool.prefix} at {pool.endpoint}"
    if pool.local_path is not None and pool.local_copy == "complete":
        return pool.local_path
    # A partial copy is no place: what is read there is, by its SHA-256, what the Hub would send.
    return f"{pool.repository}/{pool.path} on the Hub"


class PoolsSource(Section):
    """Several pools, each in a place of its own kind; their order is their priority."""

    kind: Literal["pools"]
    pools: Annotated[
        tuple[Annotated[PoolSource, Field(discriminator="kind")], ...], Field(max_length=MAX_NAMES, strict=False)
    ]

    @model_validator(mode="after")
    def _pool_names_are_unique(self) -> "PoolsSource":
        if not self.pools:
            raise ValueError("expected at least one pool, found none; add one")
        names = [pool.pool for pool in self.pools]
        if len(set(names)) != len(names):
            raise ValueError(f"expected each pool name once, found {names}; rename one of them")
        return self
