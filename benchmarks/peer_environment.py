"""The peers: an environment of their own, and scripts in it that work on request.

The scripts in `peers/` stay alive between runs, so that starting Python and reading the text is not part of any
measured time. They inherit the one core and the thread limits.
"""

import json
import os
import subprocess
import sys
import venv
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
REQUIREMENTS = {HERE / "requirements-peers.txt": (), HERE / "requirements-peers-alone.txt": ("--no-deps",)}
SCRIPTS = HERE / "peers"

Ask = Callable[[str], dict[str, Any]]


def peer_python(folder: Path) -> Path:
    """The interpreter of the peers' environment, which is installed first unless its requirements are those asked."""
    python = folder / "bin" / "python"
    if not all(_is_installed(folder, path) for path in REQUIREMENTS):
        print(f"installing the peers into {folder}", file=sys.stderr)
        venv.create(folder, with_pip=True)
        for path, options in REQUIREMENTS.items():
            subprocess.run([python, "-m", "pip", "install", "--quiet", *options, "-r", path], check=True)
            (folder / path.name).write_bytes(path.read_bytes())
    return python


def _is_installed(folder: Path, requirements: Path) -> bool:
    installed = folder / requirements.name
    return installed.is_file() and installed.read_bytes() == requirements.read_bytes()


@contextmanager
def running_peer(python: Path, script: str, folder: Path) -> Iterator[Ask]:
    """A script of `peers/` on a folder of inputs: a function that gives it a job and waits for the answer."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(python), str(SCRIPTS / script), str(folder)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        requests, answers = process.stdin, process.stdout

        def ask(job: str) -> dict[str, Any]:
            print(job, file=requests, flush=True)
            line = answers.readline()
            if not line:
                raise RuntimeError(f"{script}: expected an answer to {job!r}, found that it ended; its error is above.")
            answer: dict[str, Any] = json.loads(line)
            return answer

        yield ask
