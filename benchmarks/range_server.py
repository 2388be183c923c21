"""A server of a folder's files by ranges on loopback: `python range_server.py FOLDER` prints its port and serves on."""

import http.server
import re
import sys
from pathlib import Path


def serve(folder: Path) -> None:
    """Serve until the process ends."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = folder / Path(self.path).name
            size = path.stat().st_size
            found = re.fullmatch(r"bytes=(\d*)-(\d+)", self.headers["Range"])
            assert found is not None
            start, end = (int(found[1]), int(found[2]) + 1) if found[1] else (size - int(found[2]), size)
            self.send_response(206)
            self.send_header("Content-Length", str(end - start))
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{size}")
            self.send_header("ETag", '"1"')
            self.end_headers()
            with path.open("rb") as file:
                file.seek(start)
                self.wfile.write(file.read(end - start))

        def log_message(self, *_: object) -> None:
            pass

    listening = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(listening.server_port, flush=True)
    listening.serve_forever()


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
