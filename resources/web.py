"""Reading over HTTP(S): a URL, and a range of bytes where only a part is wanted, in; exactly those bytes out.

The promise: the right bytes, or a SourceError that names what was asked for, where, and the cause. What may pass
(overload, faults of the server and of the network, a body that is cut short or of another range) is tried again, with
longer and longer waits and what `Retry-After` asks for; the rest is said at once. Servers send readers on to content
stores by signed URLs: neither such a URL nor a token is ever in a message, and a token goes to no other host.
Cost: one request and one for each redirect, and as many again as an overloaded server asks for.
"""

import http.client
import random
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from email.message import Message
from email.utils import mktime_tz, parsedate_tz
from threading import Event, Lock
from typing import IO, TypeVar
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from training_io.errors import SourceError

FIRST_WAIT_SECONDS = 1.0  # doubled with every try
JITTER = 0.25  # the share of a wait that is left to chance, so that many readers do not come back at once
MIN_BYTES_PER_SECOND = 10_000  # a body that comes slower than this, beyond the time-out, is given up
READ_BYTES = 1 << 20
MAX_PAGE_BYTES = 64_000_000  # of a listing
MAX_PAGES = 10_000

OWN_CHANCE = random.Random()  # a draw from the shared generator would change what a program that seeds it sees

T = TypeVar("T")


def silent(_: str) -> None:
    """Say nothing."""


class End(Event):
    """An event that sets its parts with itself: what ends a whole ends each of them, and none ends the whole."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = Lock()
        self._parts: list[End] = []

    def part(self) -> "End":
        """A new part, set where the whole is."""
        part = End()
        with self._lock:
            self._parts.append(part)
        if self.is_set():
            part.set()
        return part

    def set(self) -> None:
        """Set it and its parts."""
        super().set()
        with self._lock:
            parts = list(self._parts)
        for part in parts:
            part.set()


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long is waited and how often tried; `warn` is told of every try that failed.

    `timeout_seconds` bounds each wait for the network; a whole body may take that and its bytes at 10 kB a second.
    `is_over` ends all waits for good.
    """

    num_tries: int = 5
    timeout_seconds: float = 30.0
    max_wait_seconds: float = 300.0  # the Hub counts requests in windows of five minutes
    is_over: End = field(default_factory=End, compare=False)
    sleep: Callable[[Event, float], object] = Event.wait
    jitter: Callable[[], float] = OWN_CHANCE.random  # in [0, 1)
    warn: Callable[[str], None] = silent


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What to do when a file cannot be had: in general, where it may not be read, and where it is not."""

    network: str
    forbidden: str
    missing: str


@dataclass
class Traffic:
    """What was asked for so far and came, counted from several threads; a part's also counts in what it is part of.

    A try is a request and one more for each redirect; bytes are those of bodies, of failed tries too.
    """

    num_tries: int = 0
    num_requests: int = 0
    num_bytes: int = 0
    part_of: "Traffic | None" = field(default=None, repr=False, compare=False)
    _lock: Lock = field(default_factory=Lock, repr=False, compare=False)

    def count(self, *, tries: int = 0, requests: int = 0, num_bytes: int = 0) -> None:
        """Add to all three."""
        with self._lock:
            self.num_tries += tries
            self.num_requests += requests
            self.num_bytes += num_bytes
        if self.part_of is not None:
            self.part_of.count(tries=tries, requests=requests, num_bytes=num_bytes)


def as_anyone(url: str, headers: Mapping[str, str]) -> Mapping[str, str]:
    """No headers that say who asks."""
    return {}


@dataclass(frozen=True, kw_only=True)
class Web:
    """How URLs are asked for.

    `identify` gives, for a URL and the headers of a request, those that say who asks: they go to that host alone.
    """

    advice: Advice
    patience: Patience = field(default_factory=Patience)
    identify: Callable[[str, Mapping[str, str]], Mapping[str, str]] = field(default=as_anyone, repr=False)
    traffic: Traffic = field(default_factory=Traffic)


@dataclass(frozen=True, kw_only=True)
class ETagged:
    """A file whose bytes are named by the ETag that they come with."""

    size_bytes: int
    etag: str

    @property
    def content(self) -> str:
        """What the bytes are called."""
        return f"etag:{self.etag}"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A body and what came with it.

    `etag` is what names the content: `X-Linked-Etag`, which the Hub gives for what its content stores hold; else `ETag`
    or `Last-Modified` of whoever sent the body. It is empty where nobody gave one.
    """

    content: bytes
    headers: Message
    etag: str
    is_of_store: bool  # whether the ETag is one of a store that the asked host sent us to


class FailedTry(Exception):
    """Why one try gave nothing, in words that hold no secret."""

    def __init__(self, cause: str, advice: str = "", *, may_pass: bool = False, asked_seconds: float = 0.0) -> None:
        super().__init__(cause)
        self.advice = advice
        self.may_pass = may_pass
        self.asked_seconds = asked_seconds


def with_retries(patience: Patience, what: str, expected: str, advice: str, attempt: Callable[[], T]) -> T:
    """What `attempt` gives, tried again after every FailedTry that may pass; SourceError after the last one."""
    number = 0
    while True:
        number += 1
        try:
            return attempt()
        except FailedTry as failed:
            wait = max(failed.asked_seconds, FIRST_WAIT_SECONDS * 2 ** (number - 1))
            if number < patience.num_tries and failed.may_pass and wait <= patience.max_wait_seconds:
                patience.warn(f"{what}: expected {expected}, found {failed}; trying again in {wait:,.0f} s")
                patience.sleep(patience.is_over, wait * (1 + JITTER * patience.jitter()))
                if not patience.is_over.is_set():
                    continue
            tries = f"{number:,} tries" if number > 1 else "one try"
            raise SourceError(
                f"{what}: expected {expected}, found {failed} in {tries}. {failed.advice or advice}"
            ) from failed


def get(web: Web, url: str, what: str, max_bytes: int) -> Answer:
    """The whole body behind a URL without secrets, at most so many bytes; `what` names it in messages."""

    def attempt() -> Answer:
        answer = _ask(web, url, None, max_bytes)
        if len(answer.content) > max_bytes:
            raise FailedTry(f"more than {max_bytes:,} bytes")
        return answer

    return with_retries(web.patience, what, f"the file at {url}", web.advice.network, attempt)


def get_range(web: Web, url: str, what: str, start: int, end: int, size_bytes: int) -> Answer:
    """The bytes [start, end) of a file of `size_bytes` behind a URL without secrets."""

    def attempt() -> Answer:
        answer = _ask(web, url, f"bytes={start}-{end - 1}", end - start)
        _refuse_other_range(answer, start, end, size_bytes)
        return answer

    return with_retries(web.patience, what, f"bytes {start:,} to {end:,} of {url}", web.advice.network, attempt)


def size_and_etag(web: Web, url: str, what: str) -> tuple[int, str]:
    """Size and ETag of the file behind a URL, from a request for its last 8 bytes: not every server answers HEAD."""

    def attempt() -> tuple[int, str]:
        answer = _ask(web, url, "bytes=-8", 8)
        found = _CONTENT_RANGE.fullmatch(answer.headers.get("Content-Range", ""))
        if found is None:
            raise FailedTry(f"no Content-Range with the file's size {_of_header(answer)}", may_pass=True)
        if not answer.etag:
            raise FailedTry(
                "neither ETag nor Last-Modified",
                "A change of the file would go unseen: download it and read it from a local folder.",
            )
        return int(found[3]), answer.etag

    return with_retries(web.patience, what, f"a file at {url}", web.advice.network, attempt)


_CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})")


def _refuse_other_range(answer: Answer, start: int, end: int, size_bytes: int) -> None:
    found = _CONTENT_RANGE.fullmatch(answer.headers.get("Content-Range", ""))
    if found is None or tuple(map(int, found.groups())) != (start, end - 1, size_bytes):
        raise FailedTry(f"another range {_of_header(answer)}", may_pass=True)
    if len(answer.content) != end - start:
        raise FailedTry(f"{len(answer.content):,} bytes of {end - start:,}", may_pass=True)


def _of_header(answer: Answer) -> str:
    return f"(Content-Range: {answer.headers.get('Content-Range', 'none')[:60]!a})"


class _Redirects(HTTPRedirectHandler):
    """Within a host (a renamed repository) the token goes along, to other hosts not; off the web nothing goes."""

    def __init__(self, traffic: Traffic) -> None:
        self.traffic = traffic
        self.linked_etag = ""
        self.left_host = False

    def redirect_request(
        self, req: Request, fp: IO[bytes], code: int, msg: str, headers: Message, newurl: str
    ) -> Request | None:
        """The next request; a redirect's own body is left unread, since the library would read all of it."""
        if urlsplit(newurl).scheme not in ("http", "https"):
            raise HTTPError(req.full_url, code, msg, headers, fp)
        fp.close()
        request = super().redirect_request(req, fp, code, msg, headers, newurl)  # type: ignore[arg-type]
        self.linked_etag = self.linked_etag or ("" if self.left_host else headers.get("X-Linked-Etag", ""))
        if request is not None and _origin(newurl) == _origin(req.full_url):
            request.unredirected_hdrs.update(req.unredirected_hdrs)
        else:
            self.left_host = True
        self.traffic.count(requests=1)
        return request


def _origin(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    return parts.scheme, parts.netloc


def _ask(web: Web, url: str, wanted_range: str | None, max_bytes: int) -> Answer:
    """One try: the body, at most one byte more than `max_bytes` of it; FailedTry for any other answer."""
    headers_of_range = {} if wanted_range is None else {"Range": wanted_range}
    request = Request(url, headers={"User-Agent": "corpusmill", **headers_of_range})
    for name, value in web.identify(url, headers_of_range).items():
        request.add_unredirected_header(name, value)
    redirects = _Redirects(web.traffic)
    web.traffic.count(tries=1, requests=1)
    # What the library says is not quoted: it may hold the signed URL of a redirect.
    try:
        with build_opener(redirects).open(request, timeout=web.patience.timeout_seconds) as response:
            if response.status != (200 if wanted_range is None else 206):
                raise _failed_status(response.status, response.headers, web.advice)
            content = _body(response, max_bytes, web)
            headers = response.headers
    except HTTPError as error:
        error.close()
        raise _failed_status(error.code, error.headers, web.advice) from None
    except (OSError, http.client.HTTPException, ValueError) as error:  # ValueError: a redirect to what is no URL
        raise FailedTry(_fault_of_connection(error, web.patience.timeout_seconds), may_pass=True) from None
    _refuse_part_of_body(content, headers, max_bytes)
    own = headers.get("X-Linked-Etag") or headers.get("ETag") or headers.get("Last-Modified") or ""
    etag = redirects.linked_etag or own
    return Answer(
        content=content,
        headers=headers,
        etag=etag.removeprefix("W/").strip('"'),
        is_of_store=redirects.left_host and not redirects.linked_etag,
    )


def _body(response: http.client.HTTPResponse, max_bytes: int, web: Web) -> bytes:
    deadline = time.monotonic() + web.patience.timeout_seconds + max_bytes / MIN_BYTES_PER_SECOND
    parts: list[bytes] = []
    left = max_bytes + 1
    while left and (part := response.read1(min(left, READ_BYTES))):
        parts.append(part)
        left -= len(part)
        web.traffic.count(num_bytes=len(part))
        if time.monotonic() > deadline:
            raise FailedTry(f"{max_bytes + 1 - left:,} bytes after so long a time that it was given up", may_pass=True)
    return b"".join(parts)


def _refuse_part_of_body(content: bytes, headers: Message, max_bytes: int) -> None:
    encoding = headers.get("Content-Encoding", "identity")
    if encoding != "identity":
        raise FailedTry(f"a body of Content-Encoding {encoding[:20]!a} that was not asked for")
    length = headers.get("Content-Length", "an unknown number")
    is_chunked = headers.get("Transfer-Encoding", "").lower() == "chunked"  # chunks are counted by the library
    if not is_chunked and length != str(len(content)) and len(content) <= max_bytes:
        raise FailedTry(f"{len(content):,} bytes of {length[:20]}", may_pass=True)


def _fault_of_connection(error: Exception, timeout_seconds: float) -> str:
    reason = error.reason if isinstance(error, URLError) else error
    if isinstance(reason, TimeoutError):
        return f"no answer within {timeout_seconds:g} s"
    return f"no connection that lasted ({getattr(reason, 'strerror', None) or type(reason).__name__})"


def _failed_status(code: int, headers: Message, advice: Advice) -> FailedTry:
    name = headers.get("X-Error-Code", "")  # GatedRepo, RevisionNotFound, ...
    cause = f"HTTP {code} {http.client.responses.get(code, '')}".rstrip()
    cause += f" ({name})" if name.isascii() and name.isalnum() and len(name) <= 40 else ""
    if code == 200:
        return FailedTry(
            f"{cause}, the whole file", "The server gives no ranges: download the files and read a local folder."
        )
    if code in (401, 403):
        return FailedTry(cause, advice.forbidden)
    if code in (404, 410):
        return FailedTry(cause, advice.missing)
    asked = _seconds_until(headers.get("Retry-After", "")) or _seconds_of_window(headers.get("RateLimit", ""))
    cause += f", to be asked again in {asked:,.0f} s" if asked else ""
    return FailedTry(cause, may_pass=code in (408, 429) or code >= 500, asked_seconds=asked)


def _seconds_until(retry_after: str) -> float:
    """`Retry-After` in seconds from now: a number of them, or a date; 0 for anything else."""
    if retry_after.isascii() and retry_after.isdecimal():
        return float(retry_after[:9])
    try:
        date = parsedate_tz(retry_after)
        return max(0.0, mktime_tz(date) - time.time()) if date is not None else 0.0
    except (ValueError, OverflowError):  # a year that the calendar does not have
        return 0.0


def _seconds_of_window(rate_limit: str) -> float:
    """Seconds until a `RateLimit` window starts anew, as the Hub gives them: `"resolvers";r=0;t=57`; else 0."""
    found = re.search(r";\s*t=(\d{1,9})(;|$)", rate_limit)
    return float(found[1]) if found else 0.0
