"""Objects of an S3 bucket behind an explicit endpoint: a bucket and a prefix in, names, sizes, ETags and ranges out.

Credentials come from the environment alone (`AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, `AWS_SESSION_TOKEN`), or the
bucket is read anonymously. Names are listed through pyarrow. Ranges are asked for by `web` with AWS's Signature Version
4, since Arrow's own reader takes any body for the range that it asked for, and a short one for a whole one. The
promise: no secret leaves but as a signature. Cost: a request a thousand listed keys, one a file for its ETag, one a
range.
"""

import hashlib
import hmac
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote, urlsplit

from resources.web import Advice, FailedTry, Patience, Traffic, Web, as_anyone, with_retries
from training_io.errors import RecipeError

KEY_VARIABLE, SECRET_VARIABLE, SESSION_VARIABLE = "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"
ADVICE = Advice(
    network="Check the network and the endpoint in the recipe.",
    forbidden=f"Set {KEY_VARIABLE} and {SECRET_VARIABLE} to credentials that may read it, or read it anonymously.",
    missing="Mend the bucket, the prefix or the endpoint in the recipe.",
)
PASSING_ERRORS = frozenset(
    {"NETWORK_CONNECTION", "SLOW_DOWN", "THROTTLING", "REQUEST_TIMEOUT", "INTERNAL_FAILURE", "SERVICE_UNAVAILABLE"}
)
REFUSALS = frozenset(
    {"ACCESS_DENIED", "INVALID_ACCESS_KEY_ID", "SIGNATURE_DOES_NOT_MATCH", "MISSING_AUTHENTICATION_TOKEN"}
)


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """A bucket, where it is, and whether it is read without credentials."""

    name: str
    endpoint: str  # with its scheme
    region: str
    is_anonymous: bool


@dataclass(frozen=True, kw_only=True)
class S3File:
    """An object as it was listed."""

    bucket: Bucket
    key: str
    size_bytes: int
    etag: str

    @property
    def content(self) -> str:
        """What the bytes are called."""
        return f"etag:{self.etag}"

    @property
    def place(self) -> str:
        """Where it is."""
        return f"s3://{self.bucket.name}/{self.key} at {self.bucket.endpoint}"

    @property
    def url(self) -> str:
        """Where its bytes are asked for."""
        return object_url(self.bucket, self.key)

    def __str__(self) -> str:
        return self.place


def object_url(bucket: Bucket, key: str) -> str:
    """An object's URL, the bucket in its path: so any endpoint takes it."""
    return f"{bucket.endpoint.rstrip('/')}/{bucket.name}/{quote(key, safe='/~')}"


def bucket_web(bucket: Bucket, patience: Patience, traffic: Traffic) -> Web:
    """How a bucket's URLs are asked for, with the environment's credentials unless it is anonymous."""
    identify = as_anyone if bucket.is_anonymous else _signer(bucket)
    return Web(advice=ADVICE, patience=patience, identify=identify, traffic=traffic)


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """Who asks; never shown."""

    key: str
    secret: str
    session: str

    def __repr__(self) -> str:
        return "Credentials(…)"


def _credentials(bucket: Bucket) -> Credentials:
    names = (KEY_VARIABLE, SECRET_VARIABLE, SESSION_VARIABLE)
    key, secret, session = (os.environ.get(name, "").strip() for name in names)
    if not key or not secret:
        raise RecipeError(
            f"s3://{bucket.name}: expected credentials in {KEY_VARIABLE} and {SECRET_VARIABLE}, found none."
            " Set both, or set credentials to anonymous in the recipe."
        )
    if not all(value.isascii() and value.isprintable() and " " not in value for value in (key, secret, session)):
        raise RecipeError(
            f"s3://{bucket.name}: expected credentials in {KEY_VARIABLE}, {SECRET_VARIABLE} and {SESSION_VARIABLE},"
            " found characters that none have. Mend them."
        )
    return Credentials(key=key, secret=secret, session=session)


def _signer(bucket: Bucket) -> Any:
    credentials = _credentials(bucket)

    def identify(url: str, headers: Mapping[str, str]) -> Mapping[str, str]:
        return signature_headers(url, headers, credentials, bucket.region, datetime.now(UTC))

    return identify


def signature_headers(
    url: str, headers: Mapping[str, str], credentials: Credentials, region: str, now: datetime
) -> dict[str, str]:
    """The headers that sign a GET of a URL without a query (AWS Signature Version 4, service s3)."""
    parts, stamp = urlsplit(url), now.strftime("%Y%m%dT%H%M%SZ")
    no_body = hashlib.sha256(b"").hexdigest()
    own = {"x-amz-content-sha256": no_body, "x-amz-date": stamp}
    own |= {"x-amz-security-token": credentials.session} if credentials.session else {}
    signed = sorted((name.lower(), value) for name, value in {**headers, **own, "host": parts.netloc}.items())
    names = ";".join(name for name, _ in signed)
    canonical = "\n".join(["GET", parts.path, "", *(f"{name}:{value}" for name, value in signed), "", names, no_body])
    scope = f"{stamp[:8]}/{region}/s3/aws4_request"
    text = "\n".join(["AWS4-HMAC-SHA256", stamp, scope, hashlib.sha256(canonical.encode()).hexdigest()])
    key = f"AWS4{credentials.secret}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    signature = hmac.digest(key, text.encode(), "sha256").hex()
    credential = f"Credential={credentials.key}/{scope}"
    return {**own, "Authorization": f"AWS4-HMAC-SHA256 {credential},SignedHeaders={names},Signature={signature}"}


def list_keys(bucket: Bucket, prefix: str, patience: Patience, traffic: Traffic) -> list[str]:
    """The keys of all objects below a prefix that ends at a `/`, by name; SourceError for a prefix without any."""
    import pyarrow.fs as fs  # 0.6 s, for those who need it

    place = urlsplit(bucket.endpoint)
    credentials = None if bucket.is_anonymous else _credentials(bucket)
    identity: dict[str, Any] = {"anonymous": True}
    if credentials is not None:
        session = credentials.session or None
        identity = {"access_key": credentials.key, "secret_key": credentials.secret, "session_token": session}
    filesystem = fs.S3FileSystem(
        endpoint_override=place.netloc,
        scheme=place.scheme,
        region=bucket.region,
        connect_timeout=patience.timeout_seconds,
        request_timeout=patience.timeout_seconds,
        retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=1),  # ours follow, and say what happened
        **identity,
    )
    selector = fs.FileSelector(f"{bucket.name}/{prefix}".rstrip("/"), recursive=True)

    def attempt() -> list[str]:
        traffic.count(requests=1)  # and one more a thousand names, which the library does not tell
        try:
            found = filesystem.get_file_info(selector)
        except OSError as error:
            raise _failed_listing(error) from None
        return sorted(info.path.removeprefix(f"{bucket.name}/") for info in found if info.type == fs.FileType.File)

    what = f"s3://{bucket.name}/{prefix} at {bucket.endpoint}"
    return with_retries(patience, what, "a list of objects", ADVICE.network, attempt)


def _failed_listing(error: OSError) -> FailedTry:
    """The library's error by the name of its kind: its own sentences may quote a request."""
    if isinstance(error, FileNotFoundError):
        return FailedTry("none", ADVICE.missing)
    found = re.search(r"AWS Error ([A-Z_]+)(?: \(HTTP status (\d+)\))?", str(error))
    name, status = (found[1], int(found[2] or 0)) if found else ("no answer", 0)
    cause = f"HTTP {status} ({name})" if status else name
    if name in REFUSALS or status in (401, 403):
        return FailedTry(cause, ADVICE.forbidden)
    if name.startswith("NO_SUCH") or status == 404:
        return FailedTry(cause, ADVICE.missing)
    return FailedTry(cause, may_pass=name in PASSING_ERRORS or status in (408, 429) or status >= 500)
