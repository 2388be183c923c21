"""Files of the Hugging Face Hub at a pinned commit: a repository, a commit and a file's name in, its bytes out.

The promise: the whole file, or a SourceError that names it, its URL and the cause. The Hub sends readers on to a
content store by a signed URL: neither that URL nor the token is ever in a message, and the token goes to no other host.
Cost: one request, and as many again as an overloaded server asks for.
"""

import http.client
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from email.message import Message
from email.utils import mktime_tz, parsedate_tz
from typing import IO
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from training_io.errors import RecipeError, SourceError

ENDPOINT_VARIABLE = "HF_ENDPOINT"
TOKEN_VARIABLE = "HF_TOKEN"
DEFAULT_ENDPOINT = "https://huggingface.co"
FIRST_WAIT_SECONDS = 1.0  # doubled with every try


def _silent(_: str) -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class Hub:
    """Where files are asked for and with how much patience; `warn` is told of every try that failed.

    `timeout_seconds` bounds each wait for the network, not the whole of a large file.
    """

    endpoint: str = DEFAULT_ENDPOINT
    token: str = field(default="", repr=False)
    num_tries: int = 5
    timeout_seconds: float = 30.0
    max_wait_seconds: float = 300.0  # the Hub counts requests in windows of five minutes
    sleep: Callable[[float], None] = time.sleep
    warn: Callable[[str], None] = _silent


def hub_of_environment(warn: Callable[[str], None] = _silent) -> Hub:
    """The Hub that `HF_ENDPOINT` and `HF_TOKEN` speak of; RecipeError, without their values, where they cannot be."""
    endpoint = (os.environ.get(ENDPOINT_VARIABLE) or DEFAULT_ENDPOINT).strip().rstrip("/")
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc or parts.query:
        raise RecipeError(
            f"{ENDPOINT_VARIABLE}: expected the URL of a Hub, such as {DEFAULT_ENDPOINT}, without a user name or a"
            f" query, found something else. Mend or unset {ENDPOINT_VARIABLE}."
        )
    token = os.environ.get(TOKEN_VARIABLE, "").strip()
    if not (token.isascii() and token.isprintable()) or " " in token:
        raise RecipeError(
            f"{TOKEN_VARIABLE}: expected an access token, found spaces or other characters that no token has."
            f" Mend or unset {TOKEN_VARIABLE}."
        )
    return Hub(endpoint=endpoint, token=token, warn=warn)


def read_hub_file(hub: Hub, *, repository: str, revision: str, name: str, max_bytes: int) -> bytes:
    """The bytes of a model repository's file at a commit; SourceError as `get` raises it."""
    url = f"{hub.endpoint}/{quote(repository)}/resolve/{quote(revision)}/{quote(name)}"
    return get(hub, url, f"{name} of {repository} at {revision[:12]}", max_bytes)


def get(hub: Hub, url: str, what: str, max_bytes: int) -> bytes:
    """The whole body behind a URL without secrets; `what` names it in messages.

    Overload, faults of the server and of the network are tried again, after what `Retry-After` says. SourceError after
    the last try, and at once where another one would not help.
    """
    number = 0
    while True:
        number += 1
        try:
            return _get_once(hub, url, max_bytes)
        except _FailedTry as failed:
            wait = max(failed.asked_seconds, FIRST_WAIT_SECONDS * 2 ** (number - 1))
            if number >= hub.num_tries or not failed.may_pass or wait > hub.max_wait_seconds:
                tries = f"{number:,} tries" if number > 1 else "one try"
                raise SourceError(
                    f"{what}: expected the file at {url}, found {failed} in {tries}. {failed.advice}"
                ) from failed
            hub.warn(f"{what}: {url}: {failed}; trying again in {wait:,.0f} s")
            hub.sleep(wait)


class _FailedTry(Exception):
    """Why one request gave no file, in words that hold no secret."""

    def __init__(self, cause: str, advice: str = "", *, may_pass: bool = False, asked_seconds: float = 0.0) -> None:
        super().__init__(cause)
        self.advice = advice or f"Check the network and {ENDPOINT_VARIABLE}, or name a local copy in the recipe."
        self.may_pass = may_pass
        self.asked_seconds = asked_seconds


class _Redirects(HTTPRedirectHandler):
    """Within the Hub (a renamed repository) the token goes along, to other hosts not; off the web nothing goes."""

    def redirect_request(
        self, req: Request, fp: IO[bytes], code: int, msg: str, headers: Message, newurl: str
    ) -> Request | None:
        """The next request; a redirect's own body is left unread, since the library would read all of it."""
        if urlsplit(newurl).scheme not in ("http", "https"):
            raise HTTPError(req.full_url, code, msg, headers, fp)
        fp.close()
        request = super().redirect_request(req, fp, code, msg, headers, newurl)  # type: ignore[arg-type]
        if request is not None and _origin(newurl) == _origin(req.full_url):
            request.unredirected_hdrs.update(req.unredirected_hdrs)
        return request


def _origin(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    return parts.scheme, parts.netloc


def _get_once(hub: Hub, url: str, max_bytes: int) -> bytes:
    request = Request(url, headers={"User-Agent": "corpusmill"})
    if hub.token:
        request.add_unredirected_header("Authorization", f"Bearer {hub.token}")
    # What the library says is not quoted: it may hold the signed URL of a redirect.
    try:
        with build_opener(_Redirects).open(request, timeout=hub.timeout_seconds) as response:
            if response.status != 200:
                raise _failed_status(response.status, response.headers)
            content: bytes = response.read(max_bytes + 1)
            headers = response.headers
    except HTTPError as error:
        error.close()
        raise _failed_status(error.code, error.headers) from None
    except (OSError, http.client.HTTPException, ValueError) as error:  # ValueError: a redirect to what is no URL
        raise _FailedTry(_fault_of_connection(error, hub.timeout_seconds), may_pass=True) from None
    if len(content) > max_bytes:
        raise _FailedTry(f"more than {max_bytes:,} bytes")
    length = headers.get("Content-Length", "an unknown number")
    is_chunked = headers.get("Transfer-Encoding", "").lower() == "chunked"  # chunks are counted by the library
    if not is_chunked and length != str(len(content)):
        raise _FailedTry(f"{len(content):,} bytes of {length}", may_pass=True)
    return content


def _fault_of_connection(error: Exception, timeout_seconds: float) -> str:
    reason = error.reason if isinstance(error, URLError) else error
    if isinstance(reason, TimeoutError):
        return f"no answer within {timeout_seconds:g} s"
    return f"no connection that lasted ({getattr(reason, 'strerror', None) or type(reason).__name__})"


def _failed_status(code: int, headers: Message) -> _FailedTry:
    name = headers.get("X-Error-Code", "")  # GatedRepo, RevisionNotFound, ...
    cause = f"HTTP {code} {http.client.responses.get(code, '')}".rstrip()
    cause += f" ({name})" if name.isascii() and name.isalnum() and len(name) <= 40 else ""
    if code in (401, 403):
        return _FailedTry(cause, f"Set {TOKEN_VARIABLE} to a token that may read it, or name a local copy.")
    if code in (404, 410):
        return _FailedTry(cause, "Mend the repository, the revision or the file's name in the recipe.")
    asked = _seconds_until(headers.get("Retry-After", ""))
    cause += f", to be asked again in {asked:,.0f} s" if asked else ""
    return _FailedTry(cause, may_pass=code in (408, 429) or code >= 500, asked_seconds=asked)


def _seconds_until(retry_after: str) -> float:
    """`Retry-After` in seconds from now: a number of them, or a date; 0 for anything else."""
    if retry_after.isascii() and retry_after.isdecimal():
        return float(retry_after[:9])
    try:
        date = parsedate_tz(retry_after)
        return max(0.0, mktime_tz(date) - time.time()) if date is not None else 0.0
    except (ValueError, OverflowError):  # a year that the calendar does not have
        return 0.0
