"""A program for a process of its own: it kills forked children inside the artifact store, or lets them race.

usage: python store_crashes.py kill|damaged|race|quarantine ROOT
Writes JSON to standard output. A child is killed at its n-th file operation (Python's audit events), for n = 0, 1, … until it finishes.
"""

import json
import os
import signal
import sys
from multiprocessing import get_context
from pathlib import Path

from resources.artifact_store import ArtifactRef, ArtifactStore
from training_io.errors import FormatError
from training_io.manifest import damaged_files, load_manifest

FILE_OPERATIONS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}
NUM_RACERS = 4
NUM_ROUNDS = 12


def write(folder: Path) -> dict[str, int]:
    (folder / "part").mkdir()
    for number in range(3):
        (folder / "part" / f"{number}.bin").write_bytes(bytes([number]) * 1_000)
    return {"documents": 3}


def materialize(root: Path, write=write) -> ArtifactRef:
    return ArtifactStore(root).materialize(
        asset="thing", unit="unit-0", inputs={"a": 1}, parameters={"b": 2}, version=1, write=write
    )


def run_and_die(work, at: int) -> str | None:
    """Run work in a child that kills itself at its at-th file operation; the operation, or None when it finished."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        seen = 0

        def watch(event: str, arguments: tuple) -> None:
            nonlocal seen
            if event in FILE_OPERATIONS:
                if seen == at:
                    os.write(writer, event.encode())
                    os.kill(os.getpid(), signal.SIGKILL)
                seen += 1

        sys.addaudithook(watch)
        work()
        os._exit(0)
    os.close(writer)
    _, status = os.waitpid(child, 0)
    operation = os.read(reader, 100).decode()
    os.close(reader)
    return operation if os.WIFSIGNALED(status) else None


def state_of(folder: Path) -> str:
    if not folder.exists():
        return "none"
    try:
        return "damaged" if damaged_files(folder, load_manifest(folder)) else "whole"
    except FormatError:
        return "unsealed"


def bytes_in(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes().hex()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "run.json"
    }


def kill_everywhere(root: Path, *, starts_damaged: bool) -> list[dict]:
    undisturbed = materialize(root / "undisturbed")
    expected = bytes_in(ArtifactStore(root / "undisturbed").folder(undisturbed))
    crashes, at = [], 0
    while True:
        home = root / str(at)
        folder = ArtifactStore(home).folder(undisturbed)
        if starts_damaged:
            materialize(home)
            (folder / "part" / "1.bin").write_bytes(b"")
        operation = run_and_die(lambda home=home: materialize(home), at)
        if operation is None:
            return crashes
        state = state_of(folder)
        leftovers = [path.name for path in folder.parent.glob("*") if path != folder]
        again = materialize(home)
        crashes.append(
            {
                "operation": operation,
                "state": state,
                "leftovers": len(leftovers),
                "outcome": again.outcome,
                "same_bytes": bytes_in(folder) == expected,
                "names_after": sorted(path.name for path in folder.parent.iterdir()),
                "identity": again.identity,
            }
        )
        at += 1


def together(work) -> list:
    """What NUM_RACERS forked processes return when all are inside their work at once."""
    context = get_context("fork")
    barrier, results = context.Barrier(NUM_RACERS), context.SimpleQueue()
    racers = [
        context.Process(target=lambda number=number: results.put(work(number, barrier)), daemon=True)
        for number in range(NUM_RACERS)
    ]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join()
    return [results.get() for racer in racers if racer.exitcode == 0]


def race(root: Path) -> list[dict]:
    rounds = []
    for number in range(NUM_ROUNDS):
        home = root / str(number)
        starts_damaged = bool(number % 2)
        if starts_damaged:
            folder = ArtifactStore(home).folder(materialize(home))
            (folder / "part" / "1.bin").write_bytes(b"")

        def build(_: int, barrier, home: Path = home) -> dict:
            def write_together(temporary: Path) -> dict[str, int]:
                counts = write(temporary)
                barrier.wait()
                return counts

            return materialize(home, write_together).to_json()

        refs = together(build)
        folder = ArtifactStore(home).folder(ArtifactRef.from_json(refs[0]))
        rounds.append(
            {
                "starts_damaged": starts_damaged,
                "finished": len(refs),
                "digests": len({ref["digest"] for ref in refs}),
                "state": state_of(folder),
                "names_after": [path.name == folder.name for path in folder.parent.iterdir()],
            }
        )
    return rounds


def quarantine_at_once(root: Path) -> list[list[str]]:
    store = ArtifactStore(root)
    rounds = []
    for _ in range(NUM_ROUNDS):
        ref = materialize(root)

        def hold(number: int, barrier, ref: ArtifactRef = ref) -> int:
            barrier.wait()
            for check in range(8):
                store.quarantine(ref, f"check_{number}_{check}", "failed")
            return number

        together(hold)
        rounds.append(sorted(json.loads((store.folder(ref) / "quarantine.json").read_bytes())))
    return rounds


if __name__ == "__main__":
    what, root = sys.argv[1], Path(sys.argv[2])
    runs = {
        "kill": lambda: kill_everywhere(root, starts_damaged=False),
        "damaged": lambda: kill_everywhere(root, starts_damaged=True),
        "race": lambda: race(root),
        "quarantine": lambda: quarantine_at_once(root),
    }
    json.dump(runs[what](), sys.stdout)
