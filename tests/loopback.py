"""A server on loopback in place of the Hub or of one of its content stores: it answers as a test says."""

import http.server
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

Answer = Callable[[http.server.BaseHTTPRequestHandler], None]


@dataclass
class Server:
    """A server's address, what it was asked, and what it answers: the queued answers of a path, the last for ever."""

    url: str
    answers: dict[str, list[Answer]] = field(default_factory=dict)
    asked: list[tuple[str, str | None]] = field(default_factory=list)  # path with query, Authorization

    def paths(self) -> list[str]:
        return [path.partition("?")[0] for path, _ in self.asked]


@contextmanager
def serving() -> Iterator[Server]:
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            server.asked.append((self.path, self.headers.get("Authorization")))
            queue = server.answers[self.path.partition("?")[0]]
            self.close_connection = True
            (queue.pop(0) if len(queue) > 1 else queue[0])(self)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        server = Server(url=f"http://127.0.0.1:{listening.server_port}")
        thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:  # else the thread keeps the process of the tests alive
            listening.shutdown()
            thread.join()


def answer(status: int, body: bytes = b"", **headers: str) -> Answer:
    def send(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, value in {"Content_Length": str(len(body)), **headers}.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(body)

    return send
