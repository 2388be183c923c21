"""Objects of an S3 bucket behind an explicit endpoint: a bucket and a prefix in, names, sizes, ETags and ranges out.

Credentials come from the environment alone (`AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, `AWS_SESSION_TOKEN`), or the
bucket is read anonymously. Names and ranges are asked for by `web` with AWS's Signature Version 4: Arrow's own reader
takes any body for the range that it asked for, and a short one for a whole one; its listing takes a page of a proxy
for an empty bucket, and tells nobody what it cost. The promise: no secret leaves but as a signature. Cost: a request a
thousand listed keys, one a range.
"""

import hashlib
import hmac
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote, urlencode, urlsplit
from xml.etree import ElementTree

from resources.web import MAX_PAGE_BYTES, MAX_PAGES, Advice, ETagged, Patience, Traffic, Web, as_anyone, get
from training_io.errors import RecipeError, SourceError

KEY_VARIABLE, SECRET_VARIABLE, SESSION_VARIABLE = "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"
MAX_SIZE_BYTES = 2**63 - 1  # what an int64 holds
ADVICE = Advice(
    network="Check the network, and the endpoint and the region in the recipe.",
    forbidden=f"Set {KEY_VARIABLE} and {SECRET_VARIABLE} to credentials that may read it, or read it anonymously.",
    missing="Mend the bucket, the prefix or the endpoint in the recipe.",
)


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """A bucket, where it is, and whether it is read without credentials."""

    name: str
    endpoint: str  # with its scheme
    region: str
    is_anonymous: bool


@dataclass(frozen=True, kw_only=True)
class S3File(ETagged):
    """An object as it was listed."""

    bucket: Bucket
    key: str

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
    """The headers that sign a GET (AWS Signature Version 4, service s3) of a URL whose query is sorted and quoted."""
    parts, stamp = urlsplit(url), now.strftime("%Y%m%dT%H%M%SZ")
    no_body = hashlib.sha256(b"").hexdigest()
    own = {"x-amz-content-sha256": no_body, "x-amz-date": stamp}
    own |= {"x-amz-security-token": credentials.session} if credentials.session else {}
    signed = sorted((name.lower(), value) for name, value in {**headers, **own, "host": parts.netloc}.items())
    names = ";".join(name for name, _ in signed)
    lines = [f"{name}:{value}" for name, value in signed]
    canonical = "\n".join(["GET", parts.path, parts.query, *lines, "", names, no_body])
    scope = f"{stamp[:8]}/{region}/s3/aws4_request"
    text = "\n".join(["AWS4-HMAC-SHA256", stamp, scope, hashlib.sha256(canonical.encode()).hexdigest()])
    key = f"AWS4{credentials.secret}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    signature = hmac.digest(key, text.encode(), "sha256").hex()
    credential = f"Credential={credentials.key}/{scope}"
    return {**own, "Authorization": f"AWS4-HMAC-SHA256 {credential},SignedHeaders={names},Signature={signature}"}


def list_objects(bucket: Bucket, prefix: str, web: Web) -> list[S3File]:
    """All objects below a prefix that ends at a `/`, by name; SourceError where there is none, or a page is damaged.

    A server that gives a continuation token again would be asked for the same pages until the limit: it is refused.
    """
    below = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
    what = f"the list of objects of s3://{bucket.name}/{below}"
    found: dict[str, S3File] = {}
    token, followed = "", set[str]()
    for _ in range(MAX_PAGES):
        asked = {"list-type": "2", "prefix": below, **({"continuation-token": token} if token else {})}
        query = urlencode(sorted(asked.items()), quote_via=quote, safe="~")
        answer = get(web, f"{bucket.endpoint.rstrip('/')}/{bucket.name}?{query}", what, MAX_PAGE_BYTES)
        page, token = _parsed(answer.content, bucket, what)
        for file in page:
            if found.setdefault(file.key, file) != file:
                raise SourceError(
                    f"{what}: expected each key with one ETag and size, found {file.key!r} with ETag"
                    f" {found[file.key].etag} ({found[file.key].size_bytes:,} bytes) and {file.etag}"
                    f" ({file.size_bytes:,} bytes). Wait until nothing writes there, and run again."
                )
        if not token:
            break
        if token in followed:
            raise SourceError(
                f"{what}: expected a new continuation token on each page, found on page {len(followed) + 1:,} one of"
                f" an earlier page. Check the endpoint in the recipe: it does not list as S3 does."
            )
        followed.add(token)
    else:
        raise SourceError(f"{what}: expected at most {MAX_PAGES:,} pages of names, found more. Name a smaller prefix.")
    if not found:
        raise SourceError(f"{what} at {bucket.endpoint}: expected at least one, found none. {ADVICE.missing}")
    return [found[key] for key in sorted(found)]


def _parsed(content: bytes, bucket: Bucket, what: str) -> tuple[list[S3File], str]:
    """The objects on a page of the listing, and how the next page is asked for, if there is one."""
    try:
        page = ElementTree.fromstring(content)
        for element in page.iter():
            element.tag = element.tag.rpartition("}")[2]  # servers differ in the namespace
        if page.tag != "ListBucketResult":
            raise ValueError(page.tag)
        entries = [(_text(entry, "Key"), _text(entry, "Size"), _text(entry, "ETag")) for entry in page.iter("Contents")]
        files = [
            S3File(bucket=bucket, key=key, size_bytes=_size_bytes(size), etag=_unquoted(etag))
            for key, size, etag in entries
            if not key.endswith("/")  # what stands for a folder
        ]
        return files, _next_token(page)
    except (ElementTree.ParseError, LookupError, ValueError) as error:  # LookupError: an encoding that nobody knows
        raise SourceError(
            f"{what}: expected a ListBucketResult with the key, size and ETag of each object, found {content[:40]!a}"
            f" ({str(error)[:60]!a}). {ADVICE.network}"
        ) from error


def _next_token(page: ElementTree.Element) -> str:
    """How the next page is asked for; empty where this is the last. Both elements must say the same."""
    is_cut = _text(page, "IsTruncated").strip().casefold()
    if is_cut == "true":
        return _text(page, "NextContinuationToken")
    if is_cut != "false":
        raise ValueError(f"IsTruncated {is_cut}")
    if page.findtext("NextContinuationToken"):
        raise ValueError("a NextContinuationToken, but IsTruncated is false")
    return ""


def _size_bytes(text: str) -> int:
    if not re.fullmatch("[0-9]{1,19}", text) or int(text) > MAX_SIZE_BYTES:  # int() takes signs and other digits
        raise ValueError(f"Size {text}")
    return int(text)


def _unquoted(etag: str) -> str:
    if not (tag := etag.strip('"')):
        raise ValueError("an empty ETag")
    return tag


def _text(element: ElementTree.Element, name: str) -> str:
    text = element.findtext(name)
    if not text:
        raise ValueError(f"no {name}")
    return text
