"""Files of the Hugging Face Hub at a pinned commit: a repository, a revision and names in, listings and bytes out.

The promise: a tag or a branch is resolved to its commit once and every file is read at that commit; the token of the
environment goes to the Hub's host alone. Faults are those of `web`. Cost: a request a thousand listed files, and one
more for a revision that is no commit.
"""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from resources.web import MAX_PAGE_BYTES, MAX_PAGES, Advice, Patience, Traffic, Web, get
from training_io.errors import RecipeError, SourceError

ENDPOINT_VARIABLE = "HF_ENDPOINT"
TOKEN_VARIABLE = "HF_TOKEN"
DEFAULT_ENDPOINT = "https://huggingface.co"
ADVICE = Advice(
    network=f"Check the network and {ENDPOINT_VARIABLE}, or name a local copy in the recipe.",
    forbidden=f"Set {TOKEN_VARIABLE} to a token that may read it, or name a local copy.",
    missing="Mend the repository, the revision or the file's name in the recipe.",
)


@dataclass(frozen=True, kw_only=True)
class Hub:
    """Where files are asked for, by whom, and with how much patience."""

    endpoint: str = DEFAULT_ENDPOINT
    token: str = field(default="", repr=False)
    patience: Patience = field(default_factory=Patience)
    traffic: Traffic = field(default_factory=Traffic)

    @property
    def web(self) -> Web:
        """How its URLs are asked for."""
        return Web(advice=ADVICE, patience=self.patience, identify=self._identify, traffic=self.traffic)

    def _identify(self, url: str, headers: Mapping[str, str]) -> Mapping[str, str]:
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}


@dataclass(frozen=True, kw_only=True)
class HubFile:
    """A file of a data set's repository at a commit; `content_hash` names its bytes whatever commit they are in."""

    repository: str
    commit: str
    path: str
    size_bytes: int
    content_hash: str  # SHA-256 of a file in large-file storage, else git's SHA-1

    @property
    def content(self) -> str:
        """What the bytes are called, the same in every revision that holds them."""
        return f"{'sha256' if len(self.content_hash) == 64 else 'git'}:{self.content_hash}"

    @property
    def place(self) -> str:
        """Where it is, at whatever commit."""
        return f"hub:{self.repository}/{self.path}"

    def url(self, hub: Hub) -> str:
        """Where its bytes are asked for."""
        return f"{hub.endpoint}/datasets/{quote(self.repository)}/resolve/{quote(self.commit)}/{quote(self.path)}"

    def __str__(self) -> str:
        return f"{self.path} of {self.repository} at {self.commit[:12]}"


def hub_of_environment(patience: Patience, traffic: Traffic) -> Hub:
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
    return Hub(endpoint=endpoint, token=token, patience=patience, traffic=traffic)


def read_hub_file(hub: Hub, *, repository: str, revision: str, name: str, max_bytes: int) -> bytes:
    """The bytes of a model repository's file at a commit; SourceError where the Hub does not give it."""
    url = f"{hub.endpoint}/{quote(repository)}/resolve/{quote(revision)}/{quote(name)}"
    return get(hub.web, url, f"{name} of {repository} at {revision[:12]}", max_bytes).content


def list_hub_files(hub: Hub, *, repository: str, revision: str, folder: str) -> list[HubFile]:
    """Every file below a folder of a data set's repository, by name, at the commit of a commit, tag or branch."""
    commit = revision if is_commit(revision) else commit_of(hub, repository, revision)
    what = f"the files of {repository} at {commit[:12]}"
    below = f"/{quote(folder.strip('/'))}" if folder.strip("/") else ""
    path = f"/api/datasets/{quote(repository)}/tree/{quote(commit, safe='')}{below}"
    query = urlencode({"recursive": "true", "expand": "false"})
    found: list[HubFile] = []
    for _ in range(MAX_PAGES):
        answer = get(hub.web, f"{hub.endpoint}{path}?{query}", what, MAX_PAGE_BYTES)
        entries = _parsed(answer.content, what)
        found += [_file_of(entry, repository, commit, what) for entry in entries if entry.get("type") == "file"]
        query = _query_of_next_page(answer.headers.get("Link", ""))
        if not query:
            return sorted(found, key=lambda file: file.path)
    raise SourceError(f"{what}: expected at most {MAX_PAGES:,} pages of names, found more. Name a smaller folder.")


def is_commit(revision: str) -> bool:
    """Whether a revision is pinned: a whole commit, which never names anything else."""
    return bool(re.fullmatch(r"[0-9a-f]{40}", revision))


def commit_of(hub: Hub, repository: str, revision: str) -> str:
    """The commit that a tag or a branch of a data set's repository names now; SourceError where it names none."""
    what = f"the commit of {revision} of {repository}"
    url = f"{hub.endpoint}/api/datasets/{quote(repository)}/revision/{quote(revision, safe='')}"
    entry = _parsed(get(hub.web, url, what, MAX_PAGE_BYTES).content, what)
    commit = entry.get("sha") if isinstance(entry, dict) else None
    if not isinstance(commit, str) or not re.fullmatch(r"[0-9A-Za-z._-]{1,64}", commit):
        raise SourceError(f"{what}: expected a commit in the field 'sha', found none. {ADVICE.network}")
    return commit


def _parsed(content: bytes, what: str) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{what}: expected JSON, found {content[:40]!a}. {ADVICE.network}") from error


def _file_of(entry: dict[str, Any], repository: str, commit: str, what: str) -> HubFile:
    try:
        stored = entry.get("lfs") or entry
        path, size, content_hash = entry["path"], int(stored["size"]), stored["oid"]
        if not re.fullmatch(r"[0-9a-f]{40}([0-9a-f]{24})?", content_hash) or not isinstance(path, str) or size < 0:
            raise ValueError(content_hash)
    except (KeyError, TypeError, ValueError) as error:
        raise SourceError(
            f"{what}: expected entries with path, size and oid, found {str(entry)[:200]!a}. {ADVICE.network}"
        ) from error
    return HubFile(repository=repository, commit=commit, path=path, size_bytes=size, content_hash=content_hash)


def _query_of_next_page(link: str) -> str:
    """Where the listing goes on, of which the query alone is taken: a mirror may name the host that it mirrors."""
    found = re.search(r'<([^<>]*)>\s*;\s*rel="next"', link)
    return urlsplit(found[1]).query if found else ""
