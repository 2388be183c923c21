"""ui: what a person waits for at the desk: the code location, a click on what is there already, an asset's page.

`ui code location` is a new process that imports the definitions, as the webserver, the daemon and each run do.

`ui second run` is the command line's run of everything on a home where all is there, under each execution profile in
turns; seconds are those between the start and the end of the run in Dagster's event log. What is no step's own,
because no step was under way, is Dagster's overhead. Steps that run side by side count once.

`ui asset pages` are all assets of that home in headless Chromium, each from the click on its name in the catalog until
its description is to be seen, and each loaded anew by its address as well: that starts Dagster's whole application once
more, the page with it. The scripts are in the browser's cache, since the first screen came before. A page then has some
seconds to load its history, as while a person reads: no page competes with the last one.

Unlike the other entries this one uses all cores, and as many threads as it likes: that is what a person has, and
profiles that differ in how many steps run at once cannot be compared on one core. The home is that of the recipe
`sample`.
"""

import contextlib
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import dagster as dg
from bench import Bench
from measure import Bar, Row, alternate, seconds_of
from run import ONE_THREAD, ROOT

from resources.execution import INSTANCE_FOLDER, PROFILE_VARIABLE, PROFILES, prepare_instance

RECIPE = "sample"
MAX_RUNS = 3
START_SECONDS = 120
READING_MILLISECONDS = 10_000
VIEW = {"width": 1600, "height": 1000}
BROWSER_FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking")
IMPORT_BAR = Bar(figure="seconds", at_most=3)
PAGE_BAR = Bar(figure="worst_page_seconds", at_most=2)
PAGES = "ui asset pages"


@dataclass(frozen=True, kw_only=True)
class RunTimes:
    """One run by its event log: steps that succeeded, seconds from start to end, seconds with a step under way."""

    num_steps: int
    seconds: float
    seconds_in_steps: float

    @property
    def overhead_per_step(self) -> float:
        """Seconds a step in which none was under way."""
        return (self.seconds - self.seconds_in_steps) / self.num_steps


def measure(bench: Bench) -> list[Row]:
    """Three rows: imports, steps and pages a second."""
    home = bench.scratch / "ui_home"
    home.mkdir()
    with all_cores():
        imports = import_row([import_seconds() for _ in range(bench.runs)])
        materialize(home, PROFILES[0])
        return [imports, second_run_row(home, min(bench.runs, MAX_RUNS)), pages_row(home, MAX_RUNS)]


@contextlib.contextmanager
def all_cores() -> Iterator[None]:
    """Undo the harness's pin to one core and one thread meanwhile, for what is started here."""
    threads = {name: os.environ.pop(name) for name in ONE_THREAD if name in os.environ}
    pinned = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    try:
        if pinned is not None:
            os.sched_setaffinity(0, range(os.cpu_count() or 1))  # those that we may not use, the system leaves out
        yield
    finally:
        if pinned is not None:
            os.sched_setaffinity(0, pinned)
        os.environ.update(threads)


def import_seconds() -> float:
    """Seconds of a new process that imports the code location."""
    command = [sys.executable, "-c", "import pipeline_assets.definitions"]
    return seconds_of(lambda: subprocess.run(command, cwd=ROOT, check=True))


def import_row(seconds: Sequence[float]) -> Row:
    """The code location's row: the median against the bar, and the best."""
    return Row(
        name="ui code location",
        amount=1,
        unit="imports",
        ours_seconds=seconds,
        extra={"best_seconds": min(seconds)},
        bars=[IMPORT_BAR],
        note=f"median {median(seconds):.2f} s, best {min(seconds):.2f} s of {len(seconds)} new processes",
    )


def environment_of(home: Path, profile: str) -> dict[str, str]:
    """The environment of a process that works on the home."""
    return os.environ | {
        "CORPUSMILL_HOME": str(home),
        "CORPUSMILL_RECIPE": RECIPE,
        "DAGSTER_HOME": str(prepare_instance(home)),
        PROFILE_VARIABLE: profile,
    }


def materialize(home: Path, profile: str) -> None:
    """The command line's run of everything; RuntimeError with its last line of output when it fails."""
    command = [sys.executable, "-m", "pipeline_assets", "run"]
    environment = environment_of(home, profile)
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()
        raise RuntimeError(f"{' '.join(command)}: exit status {done.returncode}: {lines[-1]}")


def times_of_last_run(instance: dg.DagsterInstance) -> RunTimes:
    """What the event log says of the newest run."""
    [run] = instance.get_runs(limit=1)
    events = [
        (entry.dagster_event.event_type.name, entry.step_key or "", entry.timestamp)
        for entry in instance.all_logs(run.run_id)
        if entry.dagster_event is not None
    ]
    return times_of(events)


def times_of(events: Iterable[tuple[str, str, float]]) -> RunTimes:
    """Times of a run from its events: kind, step, and when, in seconds.

    >>> times_of([("RUN_START", "", 0), ("STEP_START", "a", 1), ("STEP_SUCCESS", "a", 3), ("RUN_SUCCESS", "", 5)])
    RunTimes(num_steps=1, seconds=5, seconds_in_steps=2.0)
    """
    when = {(kind, step): timestamp for kind, step, timestamp in events}
    ends = {step: timestamp for (kind, step), timestamp in when.items() if kind == "STEP_SUCCESS"}
    spans = sorted((when["STEP_START", step], end) for step, end in ends.items())
    covered, reached = 0.0, spans[0][0]
    for start, end in spans:
        covered += max(0, end - max(start, reached))
        reached = max(reached, end)
    seconds = when["RUN_SUCCESS", ""] - when["RUN_START", ""]
    return RunTimes(num_steps=len(spans), seconds=seconds, seconds_in_steps=covered)


def second_run_row(home: Path, runs: int) -> Row:
    """Run the finished home again under each profile in turns."""
    times: dict[str, list[RunTimes]] = {profile: [] for profile in PROFILES}

    def again(profile: str) -> float:
        materialize(home, profile)
        with dg.DagsterInstance.from_config(str(home / INSTANCE_FOLDER)) as instance:
            times[profile].append(times_of_last_run(instance))
        return times[profile][-1].seconds

    alternate(runs, {profile: lambda profile=profile: again(profile) for profile in PROFILES})
    return row_of_profiles(times)


def row_of_profiles(times: Mapping[str, Sequence[RunTimes]]) -> Row:
    """The default profile beside the other one: seconds of the run, and of Dagster's own for each step."""
    (default, ours), (other, others) = times.items()
    overhead = {name: median(run.overhead_per_step for run in runs) for name, runs in times.items()}
    return Row(
        name="ui second run",
        amount=ours[0].num_steps,
        unit="steps",
        ours_seconds=[run.seconds for run in ours],
        peer=f"the profile {other}",
        peer_seconds=[run.seconds for run in others],
        extra={f"overhead_seconds_a_step_{name}": seconds for name, seconds in overhead.items()},
        note=f"Dagster's own a step: {overhead[default]:.3f} s under {default}, {overhead[other]:.3f} s under {other}",
    )


def pages_row(home: Path, runs: int) -> Row:
    """The asset pages' row, or one with a note where there is no browser."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        return Row(name=PAGES, amount=0, unit="pages", note="not measured: there is no Chromium on this machine")
    if importlib.util.find_spec("playwright") is None:
        return Row(name=PAGES, amount=0, unit="pages", note="not measured: playwright is not installed (make env-test)")
    with serving(home) as address:
        return row_of_pages(times_of_pages(address, descriptions_of(address), runs, chromium))


@dataclass(frozen=True, kw_only=True)
class PageTimes:
    """Seconds of each asset's page, by the asset's name: one a round."""

    clicked: Mapping[str, Sequence[float]]
    loaded: Mapping[str, Sequence[float]]


def times_of_pages(address: str, descriptions: Mapping[str, str], runs: int, chromium: str) -> PageTimes:
    """Times of each asset's page, `runs` rounds over all of them in one tab, after the first screen."""
    from playwright.sync_api import sync_playwright  # of the tests' environment, which may be missing

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=BROWSER_FLAGS)
        tab = browser.new_page(viewport=VIEW)
        tab.set_default_timeout(START_SECONDS * 1_000)
        open_first_screen(tab, address, descriptions)
        ways = {"clicked": clicked_seconds, "loaded": loaded_seconds}
        contenders = {
            f"{way} {name}": partial(seconds, tab, address, name, text)
            for name, text in descriptions.items()
            for way, seconds in ways.items()
        }
        seconds = alternate(runs, contenders)
        browser.close()
    return PageTimes(**{way: {name: seconds[f"{way} {name}"] for name in descriptions} for way in ways})


def row_of_pages(times: PageTimes) -> Row:
    """All pages as one row, a round of clicks on them being a run; the bar is on the median of the slowest page."""
    clicked = {name: median(seconds) for name, seconds in times.clicked.items()}
    loaded = {name: median(seconds) for name, seconds in times.loaded.items()}
    worst, worst_loaded = (max(medians, key=medians.__getitem__) for medians in (clicked, loaded))
    return Row(
        name=PAGES,
        amount=len(clicked),
        unit="pages",
        ours_seconds=[sum(round_) for round_ in zip(*times.clicked.values(), strict=True)],
        extra={
            "worst_page_seconds": clicked[worst],
            "worst_loaded_seconds": loaded[worst_loaded],
            **{f"{name}_seconds": seconds for name, seconds in clicked.items()},
            **{f"{name}_loaded_seconds": seconds for name, seconds in loaded.items()},
        },
        bars=[PAGE_BAR],
        note=f"by a click: worst is {worst}, {clicked[worst]:.2f} s, the median page takes "
        f"{median(clicked.values()):.2f} s; loaded anew with the whole application: worst is {worst_loaded}, "
        f"{loaded[worst_loaded]:.2f} s, the median page {median(loaded.values()):.2f} s",
    )


@contextlib.contextmanager
def serving(home: Path) -> Iterator[str]:
    """The address of Dagster's webserver on the home, once it has loaded the code location."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    program = Path(sys.executable).with_name("dagster-webserver")
    command = [program, "--port", str(port), "--workspace", "workspace.yaml"]
    log = home / "webserver.log"
    with log.open("wb") as output:
        server = subprocess.Popen(
            command, cwd=ROOT, env=environment_of(home, PROFILES[0]), stdout=output, stderr=subprocess.STDOUT
        )
    try:
        wait_until_loaded(server, address, log)
        yield address
    finally:
        server.terminate()
        server.wait()


def wait_until_loaded(server: subprocess.Popen[bytes], address: str, log: Path) -> None:
    """Return once the assets can be asked for; RuntimeError when the server ended or takes too long."""
    deadline = time.monotonic() + START_SECONDS
    while server.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError):  # it does not listen yet
            if ask(address, "{assetNodes{id}}")["assetNodes"]:
                return
        time.sleep(0.2)
    said = log.read_text(errors="replace")[-2_000:]
    raise RuntimeError(f"dagster-webserver: expected the code location within {START_SECONDS} s, found:\n{said}")


def ask(address: str, query: str) -> dict[str, Any]:
    """The data that answers a GraphQL query."""
    body = json.dumps({"query": query}).encode()
    request = urllib.request.Request(f"{address}/graphql", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=START_SECONDS) as response:
        data: dict[str, Any] = json.load(response)["data"]
    return data


def descriptions_of(address: str) -> dict[str, str]:
    """The first line of each asset's description, by the asset's name."""
    nodes = ask(address, "{assetNodes{assetKey{path} description}}")["assetNodes"]
    return {node["assetKey"]["path"][-1]: node["description"].strip().splitlines()[0].strip() for node in nodes}


def open_first_screen(tab: Any, address: str, names: Iterable[str]) -> None:
    """Open the page that a person opens first, until every asset is to be seen on it."""
    tab.goto(f"{address}/asset-groups")
    for name in names:
        tab.get_by_text(name, exact=True).first.wait_for()


def clicked_seconds(tab: Any, address: str, name: str, text: str) -> float:
    """Seconds from the click on an asset's name in the catalog until the text is to be seen on the asset's page."""
    tab.goto(f"{address}/assets")
    link = tab.locator(f'a[href="/assets/{name}"]')
    link.wait_for()
    let_it_rest(tab)
    start = time.perf_counter()
    link.click()
    tab.wait_for_url(f"**/assets/{name}*", wait_until="commit")  # the catalog shows descriptions too
    tab.get_by_text(text).first.wait_for()
    seconds = time.perf_counter() - start
    let_it_rest(tab)
    return seconds


def loaded_seconds(tab: Any, address: str, name: str, text: str) -> float:
    """Seconds from the navigation to an asset's address until the text is to be seen."""
    start = time.perf_counter()
    tab.goto(f"{address}/assets/{name}", wait_until="commit")
    tab.get_by_text(text).first.wait_for()
    seconds = time.perf_counter() - start
    let_it_rest(tab)
    return seconds


def let_it_rest(tab: Any) -> None:
    """Return once the page asks for nothing more, or soon."""
    from playwright.sync_api import TimeoutError as StillAsking

    with contextlib.suppress(StillAsking):
        tab.wait_for_load_state("networkidle", timeout=READING_MILLISECONDS)
