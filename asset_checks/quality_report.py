"""Promise: the report's page needs no network, runs nothing, fits its size, and shows each verdict once."""

from collections import Counter
from html.parser import HTMLParser

from asset_checks.verdicts import Verdict, law, verdict_of
from pipeline_assets.quality_page import MAX_PAGE_BYTES
from pipeline_assets.quality_report import FACTS_NAME, PAGE_NAME
from pipeline_assets.stripes import Stage
from resources.artifact_store import ArtifactRef
from resources.tables import read_json

RUN_OR_FETCH = {"script", "iframe", "frame", "object", "embed", "link", "base", "form", "audio", "video", "applet"}
ADDRESSES = {"src", "href", "xlink:href", "srcset", "action", "formaction", "data", "poster", "background"}
OUTCOME = "data-outcome"


class _Elements(HTMLParser):
    """What a page would run or fetch, and the outcomes that it shows, read from its bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.violations: list[str] = []
        self.outcomes: dict[str, list[str]] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        line = f"line {self.getpos()[0]:,}: <{tag}>"
        if tag in RUN_OR_FETCH:
            self.violations.append(f"{line}: expected no element that runs or fetches")
        for name, value in attrs:
            if name.startswith("on"):
                self.violations.append(f"{line}: expected no attribute that runs, found {name}")
            if name in ADDRESSES and not (value or "").startswith(("data:image/png;base64,", "#")):
                self.violations.append(f"{line}: expected {name} within the page, found {(value or '')[:80]!r}")
        found = dict(attrs)
        if (found.get("http-equiv") or "").lower() == "refresh":
            self.violations.append(f"{line}: expected no refresh")
        if (outcome := found.get(OUTCOME)) is not None:
            self.outcomes.setdefault((found.get("id") or "").removeprefix("check-"), []).append(outcome)

    def handle_data(self, data: str) -> None:
        if self.lasttag == "style" and ("url(" in data or "@import" in data):
            self.violations.append(f"line {self.getpos()[0]:,}: expected a style that fetches nothing")


def report_is_self_contained(stage: Stage, quality_report: ArtifactRef) -> Verdict:
    """The page's own bytes: no element or attribute runs or fetches, and each verdict is there once, as recorded."""
    folder = stage.folder(quality_report)
    content = (folder / PAGE_NAME).read_bytes()
    page = _Elements()
    page.feed(content.decode())
    page.close()
    recorded = read_json(folder / FACTS_NAME)
    violations = list(page.violations)
    if len(content) >= MAX_PAGE_BYTES:
        violations.append(f"expected fewer than {MAX_PAGE_BYTES:,} bytes, found {len(content):,}")
    for name in sorted(recorded.keys() | page.outcomes.keys()):
        expected, found = [recorded[name]] if name in recorded else [], page.outcomes.get(name, [])
        if expected != found:
            violations.append(f"{name}: expected the verdict {expected}, found {found}")
    for outcome, number in sorted(Counter(recorded.values()).items()):
        counted = quality_report.counts[f"checks_{outcome.replace(' ', '_')}"]
        if counted != number:
            violations.append(f"expected {counted:,} checks {outcome} as counted, found {number:,}")
    return verdict_of(
        "a page that fetches and runs nothing, and shows every verdict once",
        violations,
        f"{len(content):,} bytes with {len(page.outcomes):,} verdicts",
    )


CHECKS = [
    law(
        report_is_self_contained,
        blocking=True,
        description="Fails when the page would fetch or run something, is too large, or shows other verdicts than were"
        " recorded: do not open it or pass it on. Materialize quality_report again; if it fails again, report it.",
    ),
]
