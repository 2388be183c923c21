"""Files of a folder behind loopback as the Hub, a plain web server and S3 give them, with faults as tests ask for them.

    Hub   (any data set) /api/datasets/ORG/NAME/revision/REV, …/tree/COMMIT/FOLDER, /datasets/ORG/NAME/resolve/COMMIT/FILE; what is
          resolved is sent on to /store/SHA256?X-Signature=…, as large files are
    web   /files/FILE
    S3    /bucket?list-type=2&prefix=…, /bucket/FILE

A fault is a function of the handler and of a whole answer: it sends another one. Each is used up by one request for
bytes, unless it lasts for a path. Every request is logged with what it asked for, who asked, and how many bytes of a body it was sent.
"""

import contextlib
import hashlib
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
PAGE = 2  # names on a page of the Hub's listing


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
    commits: dict[str, str] = field(default_factory=lambda: {"main": COMMIT})
    faults: list[Fault] = field(default_factory=list)
    lasting: dict[str, Fault] = field(default_factory=dict)  # by the end of a path
    log: list[Request] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def data(self) -> list[Request]:
        """The requests that were sent bytes of files."""
        return [one for one in self.log if one.range and one.method == "GET"]

    def fault_of(self, path: str, is_data: bool) -> Fault | None:
        """What goes wrong with this request: what always does with that path, else the next of the faults for bytes."""
        with self.lock:
            lasting = [fault for name, fault in self.lasting.items() if path.endswith(name)]
            return lasting[0] if lasting else self.faults.pop(0) if self.faults and is_data else None


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
        is_data = self.command == "GET" and answer.status in (200, 206) and "ETag" in answer.headers
        fault = self.server_of_files.fault_of(path, is_data)
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
        if found := re.fullmatch(rf"/(?:files|store|{BUCKET})/(.+)", path):
            return self.bytes_of(files.folder / found[1])
        return self.objects() if path == f"/{BUCKET}" else _missing("EntryNotFound")

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

    def objects(self) -> Answer:
        query = urllib.parse.parse_qs(urllib.parse.urlsplit(self.path).query)
        base, prefix = self.server_of_files.folder, query.get("prefix", [""])[0]
        keys = [path.relative_to(base).as_posix() for path in sorted(base.rglob("*")) if path.is_file()]
        entries = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{(base / key).stat().st_size}</Size>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            for key in keys
            if key.startswith(prefix)
        )
        count = entries.count("<Contents>")
        body = f"<ListBucketResult><KeyCount>{count}</KeyCount><IsTruncated>false</IsTruncated>{entries}</ListBucketResult>"
        return Answer(200, f'<?xml version="1.0"?>{body}'.encode(), {"Content-Type": "application/xml"})

    def bytes_of(self, path: Path) -> Answer:
        if not path.is_file():
            return _missing("NoSuchKey")
        content = path.read_bytes()
        headers = {"ETag": f'"md5-{hashlib.md5(content).hexdigest()}"', "Last-Modified": formatdate(0, usegmt=True)}
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
    return Answer(answer.status, answer.body, answer.headers | {"ETag": '"other"'})
