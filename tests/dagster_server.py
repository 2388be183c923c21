"""`dagster dev`, webserver and daemon, as a process of its own on a free port of loopback, asked through GraphQL."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from resources.execution import prepare_instance

ROOT = Path(__file__).parents[1]
START_SECONDS = 180


class Server:
    """`dagster dev` on a fresh home and a free port, asked through GraphQL."""

    def __init__(self, home: Path, recipe: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        with socket.socket() as probe:  # or the test would talk to somebody else's server
            assert probe.connect_ex(("127.0.0.1", self.port)) != 0, self.port
        self.address = f"http://127.0.0.1:{self.port}"
        self.log = home / "server.log"
        environment = os.environ | {
            "CORPUSMILL_HOME": str(home),
            "CORPUSMILL_RECIPE": str(recipe),
            "DAGSTER_HOME": str(prepare_instance(home)),
        }
        command = [sys.executable, "-m", "dagster", "dev", "--workspace", "workspace.yaml"]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*command, "--host", "127.0.0.1", "--port", str(self.port)],
                cwd=ROOT,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def ask(self, query: str) -> dict[str, Any]:
        request = urllib.request.Request(
            f"{self.address}/graphql", json.dumps({"query": query}).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=30) as response:
            return json.load(response)["data"]

    def stop(self) -> None:
        os.killpg(self.process.pid, signal.SIGTERM)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:  # a busy machine: its children are still being told
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(60)


def wait_until(found: Callable[[], Any], seconds: float, what: str) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := found():
            return value
        time.sleep(0.5)
    raise AssertionError(f"after {seconds:.0f} s still waiting for {what}")


@contextmanager
def running(home: Path, recipe: Path) -> Iterator[Server]:
    """A server that has loaded the code location, until it is not needed any more."""
    server = Server(home, recipe)

    def is_loaded() -> bool:
        assert server.process.poll() is None, server.log.read_text()
        try:
            entries = server.ask("{workspaceOrError{... on Workspace{locationEntries{loadStatus}}}}")
        except OSError:
            return False
        return [entry["loadStatus"] for entry in entries["workspaceOrError"]["locationEntries"]] == ["LOADED"]

    try:
        wait_until(is_loaded, START_SECONDS, "the code location")
        yield server
    finally:
        server.stop()


def runs_of(server: Server) -> list[dict[str, Any]]:
    """The runs of the instance, the latest first."""
    return server.ask("{runsOrError{... on Runs{results{runId status tags{key value}}}}}")["runsOrError"]["results"]
