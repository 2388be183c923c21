"""Dagster's webserver and daemon on one home and a free port of loopback, asked through GraphQL.

`running` starts the two as processes of their own, so that a test can stop one of them and start it again;
`running_make_ui` starts them as the README says. Both wait until the code location is loaded, and stop what they
started. A test waits for what a person would wait for, by `wait_until` over GraphQL or by the page: never by sleeping.
"""

import json
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from resources.execution import INSTANCE_FOLDER, open_instance, prepare_instance

ROOT = Path(__file__).parents[1]
SCRIPTS = Path(sys.executable).parent
START_SECONDS = 180
RUN_SECONDS = 600
ENDED = ("SUCCESS", "FAILURE", "CANCELED")
WEBSERVER, DAEMON, MAKE_UI = "webserver", "daemon", "make-ui"
DEFINITIONS = 'repositoryLocationName:"pipeline_assets.definitions",repositoryName:"__repository__"'
"""Of all definitions, as a selector of GraphQL names it."""


class Server:
    """One home, one port, and the processes that serve them: each is started and stopped by its name."""

    def __init__(self, home: Path, recipe: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        with socket.socket() as probe:  # or the test would talk to somebody else's server
            assert probe.connect_ex(("127.0.0.1", self.port)) != 0, self.port
        self.address = f"http://127.0.0.1:{self.port}"
        self.home = home
        instance_folder = prepare_instance(home)
        self.log = instance_folder / "server.log"
        self.environment = os.environ | {
            "CORPUSMILL_HOME": str(home),
            "CORPUSMILL_RECIPE": str(recipe),
            "DAGSTER_HOME": str(instance_folder),
        }
        for name in [name for name in self.environment if name.startswith("MAKE")]:
            del self.environment[name]  # of the `make test` above us
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str) -> None:
        """Start one of the processes, and return at once."""
        workspace = ["--workspace", "workspace.yaml"]
        commands = {
            WEBSERVER: [SCRIPTS / "dagster-webserver", "--host", "127.0.0.1", "--port", str(self.port), *workspace],
            DAEMON: [SCRIPTS / "dagster-daemon", "run", *workspace],
            # The environment that runs the tests stands for the one that the target `env` would make.
            MAKE_UI: ["make", "--old-file=env", "ui", f"BIN={SCRIPTS}", f"PORT={self.port}"],
        }
        assert name not in self.processes, name
        with self.log.open("ab") as log:
            self.processes[name] = subprocess.Popen(
                commands[name],
                cwd=ROOT,
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def stop(self, *names: str) -> None:
        """Stop some of the processes with their children, all of them when none is named."""
        stopping = [self.processes.pop(name) for name in names or list(self.processes)]
        for process in stopping:
            os.killpg(process.pid, signal.SIGTERM)
        for process in stopping:
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:  # a busy machine: its children are still being told
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(60)

    def wait_until_loaded(self) -> None:
        """Wait until the webserver answers and has loaded the code location."""

        def is_loaded() -> bool:
            for name, process in self.processes.items():
                assert process.poll() is None, f"{name} ended:\n{self.log_tail()}"
            try:
                answer = self.ask(
                    "{workspaceOrError{... on Workspace{locationEntries{loadStatus"
                    " locationOrLoadError{... on PythonError{message}}}}}}"
                )
            except OSError:
                return False
            (entry,) = answer["workspaceOrError"]["locationEntries"]
            error = (entry["locationOrLoadError"] or {}).get("message")
            assert error is None, error
            return bool(entry["loadStatus"] == "LOADED")

        wait_until(is_loaded, START_SECONDS, "the code location")

    def ask(self, query: str) -> dict[str, Any]:
        """The data that answers a GraphQL query."""
        request = urllib.request.Request(
            f"{self.address}/graphql", json.dumps({"query": query}).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=30) as response:
            answer = json.load(response)
        assert "errors" not in answer, answer["errors"]
        data: dict[str, Any] = answer["data"]
        return data

    def log_tail(self) -> str:
        """The end of what the processes printed."""
        return self.log.read_text(errors="replace")[-5_000:]


def wait_until(found: Callable[[], Any], seconds: float, what: str) -> Any:
    """The first true answer, asked for twice a second; a failure that says what was waited for."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := found():
            return value
        time.sleep(0.5)
    raise AssertionError(f"after {seconds:.0f} s still waiting for {what}")


@contextmanager
def running(home: Path, recipe: Path, *names: str) -> Iterator[Server]:
    """Webserver and daemon as two processes (`server.stop(DAEMON)`, `server.start(DAEMON)`), until not needed.

    Only those of the two that are named, where any is.
    """
    server = Server(home, recipe)
    make_databases(home)
    with _serving(server, *(names or (WEBSERVER, DAEMON))):
        yield server


@contextmanager
def running_make_ui(home: Path, recipe: Path) -> Iterator[Server]:
    """What `make ui` starts, by that very target, until not needed."""
    server = Server(home, recipe)
    with _serving(server, MAKE_UI):
        yield server


@contextmanager
def _serving(server: Server, *names: str) -> Iterator[None]:
    try:
        for name in names:
            server.start(name)
        server.wait_until_loaded()
        yield
    finally:
        server.stop()


def make_databases(home: Path) -> None:
    """Make Dagster's databases on a new home: two processes that both find none race, and the daemon dies of it."""
    folder = prepare_instance(home)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DAGSTER_HOME", str(folder))
        with open_instance(folder):
            pass


def copy_served_home(home: Path, target: Path) -> None:
    """Copy a home that a server may be holding open: artifacts as files, each of Dagster's databases as of one moment.

    No run may be under way.
    """
    databases = [path.relative_to(home) for path in (home / INSTANCE_FOLDER).rglob("*.db")]
    shutil.copytree(home, target, ignore=shutil.ignore_patterns("*.db", "*.db-wal", "*.db-shm", "server.log"))
    for path in databases:
        with closing(sqlite3.connect(home / path)) as source, closing(sqlite3.connect(target / path)) as copy:
            source.backup(copy)


def runs_of(server: Server) -> list[dict[str, Any]]:
    """The runs of the instance, the latest first."""
    return server.ask("{runsOrError{... on Runs{results{runId status tags{key value}}}}}")["runsOrError"]["results"]


def wait_for_new_runs(server: Server, known: Sequence[dict[str, Any]], number: int = 1) -> list[dict[str, Any]]:
    """Runs that are not among the known ones, once there are that many and every one has ended; the latest first."""
    ids = {run["runId"] for run in known}

    def ended() -> list[dict[str, Any]]:
        found = [run for run in runs_of(server) if run["runId"] not in ids]
        return found if len(found) >= number and all(run["status"] in ENDED for run in found) else []

    found: list[dict[str, Any]] = wait_until(ended, RUN_SECONDS, f"{number} new runs to end")
    return found


def steps_of(server: Server, run_id: str) -> dict[str, str]:
    """Status of each step of a run by its key: mapped steps are there once they have started."""
    answer = server.ask(f'{{runOrError(runId:"{run_id}"){{... on Run{{stepStats{{stepKey status}}}}}}}}')
    return {step["stepKey"]: step["status"] for step in answer["runOrError"]["stepStats"]}


def ticks_of(server: Server, sensor: str) -> list[dict[str, Any]]:
    """A sensor's last ticks, the latest first."""
    answer = server.ask(
        f'{{sensorOrError(sensorSelector:{{{DEFINITIONS},sensorName:"{sensor}"}}){{... on Sensor{{sensorState{{'
        "ticks(limit:20){status timestamp skipReason error{message}}}}}}"
    )
    ticks: list[dict[str, Any]] = answer["sensorOrError"]["sensorState"]["ticks"]
    return ticks


def skipped_since(server: Server, sensor: str, moment: float) -> list[str]:
    """Why a sensor's ticks after a moment asked for no run; none of them may have failed."""
    found = [tick for tick in ticks_of(server, sensor) if tick["timestamp"] > moment]
    assert not [tick for tick in found if tick["error"]], found
    return [tick["skipReason"] for tick in found if tick["status"] == "SKIPPED"]


def materializations_of(server: Server) -> dict[str, dict[str, Any]]:
    """The latest materialization of each asset that has one: run, timestamp, data version, metadata by its label."""
    nodes = server.ask(
        "{assetNodes{assetKey{path} assetMaterializations(limit:1){runId timestamp tags{key value} metadataEntries{"
        "label ... on IntMetadataEntry{intValue} ... on FloatMetadataEntry{floatValue} ... on PathMetadataEntry{path}"
        " ... on MarkdownMetadataEntry{mdStr} ... on TableSchemaMetadataEntry{schema{columns{name description}}}}}}}"
    )["assetNodes"]
    return {
        node["assetKey"]["path"][-1]: {
            "run": last["runId"],
            "timestamp": last["timestamp"],
            "data_version": {tag["key"]: tag["value"] for tag in last["tags"]}["dagster/data_version"],
            "metadata": {
                entry["label"]: next((value for key, value in entry.items() if key != "label"), None)
                for entry in last["metadataEntries"]
            },
        }
        for node in nodes
        for last in node["assetMaterializations"]
    }


def verdicts_of(server: Server) -> dict[str, dict[str, Any]]:
    """The latest execution of each check, by its name: asset, run, status, and what its evaluation says."""
    nodes = server.ask(
        "{assetNodes{assetKey{path} assetChecksOrError{... on AssetChecks{checks{name executionForLatestMaterialization"
        "{runId status evaluation{severity description}}}}}}}"
    )["assetNodes"]
    found = {}
    for node in nodes:
        for check in node["assetChecksOrError"].get("checks", []):
            execution = check["executionForLatestMaterialization"] or {"runId": None, "status": None}
            evaluation = execution.get("evaluation") or {}
            found[check["name"]] = {
                "asset": node["assetKey"]["path"][-1],
                "run": execution["runId"],
                "status": execution["status"],
                "severity": evaluation.get("severity"),
                "description": evaluation.get("description"),
            }
    return found
