"""Files of a folder behind loopback as the Hub, a plain web server and S3 give them, with faults as tests ask for them.

    Hub   (any data set) /api/datasets/ORG/NAME/revision/REV, …/tree/COMMIT/FOLDER, /datasets/ORG/NAME/resolve/COMMIT/FILE; what is
          resolved is sent on to /store/SHA256?X-Signature=…, as large files are
    web   /files/FILE
    S3    /bucket?list-type=2&prefix=…&continuation-token=…, /bucket/FILE; who signs is held to the secret's signature,
          who does not is taken for anyone, whom a private bucket refuses

A fault is a function of the handler and of a whole answer: it sends another one. Each is used up by one request for
bytes, unless it lasts for a path. Every request is logged with what it asked for, who asked, and how many bytes of a body it was sent.
"""

import contextlib
import hashlib
import hmac
import http.server
import json
import re
import socket
import struct
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from pathlib import Path
from xml.sax.saxutils import escape

REPOSITORY = "someone/corpus"  # as good as any
COMMIT = "0123456789abcdef0123456789abcdef01234567"
SIGNATURE = "X-Signature=sentinelsignature"
BUCKET = "bucket"
PAGE = 2  # names on a page of a listing
REGION = "us-east-1"


@dataclass
class Answer:
    """A whole answer, before a fault makes another of it."""

    status: int
    body: bytes
    headers: dict[str, str]
    more: int = 0  # bytes that Content-Length says and that do not come


@dataclass(frozen=True)
class Request:
    """What was asked, by whom, and what was sent."""

    method: str
    path: str
    range: str
    authorization: str
    status: int
    sent: int


Fault = Callable[["Handler", Answer], Answer | None]


@dataclass
class FileServer:
    """Where it is, what it serves, and what happened."""

    folder: Path
    url: str = ""
    store_url: str = ""  # another host name for the same server: where resolved files are sent on to
    models: dict[str, Path] = field(
        default_factory=dict
    )  # files of model repositories, by "ORG/NAME/resolve/COMMIT/FILE"
    commits: dict[str, str] = field(default_factory=lambda: {"main": COMMIT})
    secrets: dict[str, str] = field(default_factory=dict)  # of the bucket's readers, by key id
    is_private: bool = False  # whether the bucket is closed to whoever does not sign
    faults: list[Fault] = field(default_factory=list)
    aim: Callable[[str, str], bool] | None = None  # by path and range: whom the faults are for, if not all for bytes
    lasting: dict[str, Fault] = field(default_factory=dict)  # by the end of a path
    log: list[Request] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def data(self) -> list[Request]:
        """The requests that were sent bytes of files."""
        return [one for one in self.log if one.range and one.method == "GET"]

    def fault_of(self, path: str, is_meant: bool) -> Fault | None:
        """What goes wrong with this request: what always does with that path, else the next of the faults, if it is meant."""
        with self.lock:
            lasting = [fault for name, fault in self.lasting.items() if path.endswith(name)]
            return lasting[0] if lasting else self.faults.pop(0) if self.faults and is_meant else None


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_of_files: FileServer

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        answer = self.answer(path)
        aim = self.server_of_files.aim
        is_data = self.command == "GET" and answer.status in (200, 206) and "ETag" in answer.headers
        is_meant = is_data if aim is None else aim(path, self.headers.get("Range", ""))
        fault = self.server_of_files.fault_of(path, is_meant)
        changed = fault(self, answer) if fault is not None else answer
        if changed is not None:
            self.send(changed)

    def send(self, answer: Answer) -> None:
        body = answer.body if self.command == "GET" else b""
        entry = Request(
            self.command,
            self.path,
            self.headers.get("Range", ""),
            self.headers.get("Authorization", ""),
            answer.status,
            len(body),
        )
        self.server_of_files.log.append(entry)  # before the body, so that whoever read it finds it counted
        self.send_response(answer.status)
        for name, value in {"Content-Length": str(len(answer.body) + answer.more), **answer.headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)
        if answer.more:
            self.close_connection = True

    def answer(self, path: str) -> Answer:
        files = self.server_of_files
        if found := re.fullmatch(r"/api/datasets/[^/]+/[^/]+/revision/(.+)", path):
            commit = files.commits.get(found[1])
            return _json({"sha": commit}) if commit else _missing("RevisionNotFound")
        if found := re.fullmatch(r"/api/datasets/[^/]+/[^/]+/tree/([0-9a-f]+)/?(.*)", path):
            return self.tree(found[1], found[2])
        if found := re.fullmatch(r"/datasets/[^/]+/[^/]+/resolve/([0-9a-f]+)/(.+)", path):
            target = files.folder / found[2]
            if found[1] not in files.commits.values() or not target.is_file():
                return _missing("EntryNotFound")
            location = f"{files.store_url}/store/{found[2]}?{SIGNATURE}"
            return Answer(302, b"", {"Location": location, "X-Linked-Etag": f'"{_sha256(target)}"'})
        if path.removeprefix("/") in files.models:
            return self.bytes_of(files.models[path.removeprefix("/")])
        if found := re.fullmatch(r"/(?:files|store)/(.+)", path):
            return self.bytes_of(files.folder / found[1])
        return self.of_bucket(path.removeprefix("/").partition("/"))

    def tree(self, commit: str, folder: str) -> Answer:
        """A page of the listing; the next one is named as the Hub names it, by its own host."""
        base = self.server_of_files.folder
        if commit not in self.server_of_files.commits.values() or not (base / folder).is_dir():
            return _missing("EntryNotFound")
        paths = sorted((base / folder).rglob("*"))
        start = int(urllib.parse.parse_qs(urllib.parse.urlsplit(self.path).query).get("cursor", ["0"])[0])
        link = f'<https://huggingface.co/elsewhere?recursive=true&expand=false&cursor={start + PAGE}>; rel="next"'
        answer = _json([_entry(path, base) for path in paths[start : start + PAGE]])
        answer.headers |= {"Link": link} if start + PAGE < len(paths) else {}
        return answer

    def of_bucket(self, place: tuple[str, str, str]) -> Answer:
        bucket, _, key = place
        if bucket != BUCKET:
            return _error(404, "NoSuchBucket")
        if refusal := self.refusal():
            return _error(403, refusal)
        if not key:
            return self.objects()
        path = self.server_of_files.folder / key
        return self.bytes_of(path) if path.is_file() else _error(404, "NoSuchKey")

    def refusal(self) -> str:
        """Why S3 refuses whoever asks, if it does: the signature is counted again from what was received."""
        files = self.server_of_files
        authorization = self.headers.get("Authorization", "")
        if not authorization:
            return "AccessDenied" if files.is_private else ""
        found = re.fullmatch(
            r"AWS4-HMAC-SHA256 Credential=([^/]+)/(\d{8})/([^/]+)/s3/aws4_request, ?"
            r"SignedHeaders=([a-z0-9;-]+), ?Signature=([0-9a-f]{64})",
            authorization,
        )
        if found is None or found[1] not in files.secrets:
            return "InvalidAccessKeyId"
        key, day, region, names, signature = found.groups()
        stamp = self.headers["x-amz-date"]
        wanted = {"host", "x-amz-date", "x-amz-content-sha256"} | ({"range"} & {n.lower() for n in self.headers})
        if region != REGION or not stamp.startswith(day) or not wanted <= set(names.split(";")):
            return "AuthorizationHeaderMalformed"
        path, _, query = self.path.partition("?")
        pairs = sorted(urllib.parse.parse_qsl(query, keep_blank_values=True))
        parts = ["&".join(f"{_quoted(name)}={_quoted(value)}" for name, value in pairs)]
        parts += [f"{name}:{' '.join(self.headers[name].split())}" for name in names.split(";")]
        request = "\n".join([self.command, path, *parts, "", names, self.headers["x-amz-content-sha256"]])
        scope = f"{day}/{region}/s3/aws4_request"
        text = f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{hashlib.sha256(request.encode()).hexdigest()}"
        secret = b"AWS4" + files.secrets[key].encode()
        for part in (*scope.split("/"), text):
            secret = hmac.new(secret, part.encode(), hashlib.sha256).digest()
        return "" if secret.hex() == signature else "SignatureDoesNotMatch"

    def objects(self) -> Answer:
        """A page of the bucket's keys, in the order of their bytes; the next one is asked for by a token."""
        query = urllib.parse.parse_qs(urllib.parse.urlsplit(self.path).query)
        base, prefix = self.server_of_files.folder, query.get("prefix", [""])[0]
        assert query["list-type"] == ["2"]
        keys = sorted((path.relative_to(base).as_posix() for path in base.rglob("*") if path.is_file()), key=str.encode)
        keys = [key for key in keys if key.startswith(prefix)]
        start = int(query.get("continuation-token", ["+/=0"])[0].removeprefix("+/="))
        entries = "".join(
            f"<Contents><Key>{escape(key)}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
            f"<ETag>&quot;{_etag(base / key)}&quot;</ETag><Size>{(base / key).stat().st_size}</Size></Contents>"
            for key in keys[start : start + PAGE]
        )
        more = start + PAGE < len(keys)
        token = f"<NextContinuationToken>+/={start + PAGE}</NextContinuationToken>" if more else ""
        about = f"<Name>{BUCKET}</Name><IsTruncated>{str(more).lower()}</IsTruncated>{token}"
        return _xml(
            200,
            f'<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{about}{entries}</ListBucketResult>',
        )

    def bytes_of(self, path: Path) -> Answer:
        if not path.is_file():
            return _missing("NoSuchKey")
        content = path.read_bytes()
        headers = {"ETag": f'"{_etag(path)}"', "Last-Modified": formatdate(0, usegmt=True)}
        found = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        if not found:
            return Answer(200, content, headers)
        start = int(found[1]) if found[1] else max(0, len(content) - int(found[2]))
        end = min(int(found[2]) + 1, len(content)) if found[1] and found[2] else len(content)
        if start >= end:
            return Answer(416, b"", {"Content-Range": f"bytes */{len(content)}"})
        return Answer(206, content[start:end], headers | {"Content-Range": f"bytes {start}-{end - 1}/{len(content)}"})


def _entry(path: Path, base: Path) -> dict[str, object]:
    name = path.relative_to(base).as_posix()
    if path.is_dir():
        return {"type": "directory", "oid": "0" * 40, "size": 0, "path": name}
    size = path.stat().st_size
    return {
        "type": "file",
        "oid": "1" * 40,
        "size": size,
        "path": name,
        "lfs": {"oid": _sha256(path), "size": size, "pointerSize": 135},
    }


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _etag(path: Path) -> str:
    return f"md5-{hashlib.md5(path.read_bytes()).hexdigest()}"


def _quoted(text: str) -> str:
    return urllib.parse.quote(text, safe="-_.~")


def _xml(status: int, body: str) -> Answer:
    return Answer(status, f'<?xml version="1.0" encoding="UTF-8"?>{body}'.encode(), {"Content-Type": "application/xml"})


def _error(status: int, code: str) -> Answer:
    return _xml(status, f"<Error><Code>{code}</Code><Message>{SIGNATURE}</Message></Error>")


def _json(value: object) -> Answer:
    return Answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})


def _missing(name: str) -> Answer:
    return Answer(404, b"", {"X-Error-Code": name})


@contextmanager
def serving_files(folder: Path) -> Iterator[FileServer]:
    """A server of a folder for as long as it is asked."""
    files = FileServer(folder)
    handler = type("FolderHandler", (Handler,), {"server_of_files": files})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as listening:
        files.url = f"http://127.0.0.1:{listening.server_port}"
        files.store_url = f"http://localhost:{listening.server_port}"
        thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield files
        finally:
            listening.shutdown()
            thread.join()


def none(_: Handler, answer: Answer) -> Answer:
    """What was asked for."""
    return answer


def status(code: int, **headers: str) -> Fault:
    """Another status, without a body."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda handler, answer: Answer(code, b"", named)


def cut_short(_: Handler, answer: Answer) -> Answer:
    """Half of the body, then the connection ends."""
    half = len(answer.body) // 2
    return Answer(answer.status, answer.body[:half], answer.headers, more=len(answer.body) - half)


def reset(handler: Handler, answer: Answer) -> None:
    """Half of the body, then the connection is reset."""
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    handler.send(cut_short(handler, answer))
    handler.wfile.flush()
    handler.connection.close()


def shorter(_: Handler, answer: Answer) -> Answer:
    """One byte less, which Content-Length admits."""
    return Answer(answer.status, answer.body[:-1], answer.headers)


def another_range(_: Handler, answer: Answer) -> Answer:
    """As many bytes of another place, which Content-Range admits."""
    found = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", answer.headers["Content-Range"])
    assert found is not None
    moved = f"bytes {int(found[1]) + 1}-{int(found[2]) + 1}/{found[3]}"
    return Answer(answer.status, answer.body[::-1], answer.headers | {"Content-Range": moved})


def without_content_range(_: Handler, answer: Answer) -> Answer:
    """The right status and no word of which bytes these are."""
    return Answer(206, answer.body, {name: value for name, value in answer.headers.items() if name != "Content-Range"})


def encoded(_: Handler, answer: Answer) -> Answer:
    """A body that somebody on the way has compressed."""
    return Answer(answer.status, answer.body, answer.headers | {"Content-Encoding": "gzip"})


def silent(seconds: float) -> Fault:
    """No answer for some time, and then none."""

    def wait(handler: Handler, _: Answer) -> None:
        time.sleep(seconds)
        handler.close_connection = True

    return wait


def dripping(handler: Handler, answer: Answer) -> None:
    """A body that comes a little at a time, never so late that the reader's time-out passes."""
    handler.send(Answer(answer.status, answer.body[:1], answer.headers, more=len(answer.body) - 1))
    with contextlib.suppress(OSError):  # the reader has gone
        for byte in answer.body[1:]:
            handler.wfile.write(bytes([byte]))
            time.sleep(0.1)


def changed(_: Handler, answer: Answer) -> Answer:
    """The bytes of a file that is now another one."""
    name = "X-Linked-Etag" if "X-Linked-Etag" in answer.headers else "ETag"
    return Answer(answer.status, answer.body, answer.headers | {name: '"other"'})
