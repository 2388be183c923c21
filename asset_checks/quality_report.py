"""Promise: the report's page needs no network, runs nothing, fits its size, and shows each verdict once."""

import re
from collections import Counter
from html.parser import HTMLParser

from asset_checks.verdicts import Verdict, law, verdict_of
from pipeline_assets.quality_page import MAX_PAGE_BYTES
from pipeline_assets.quality_report import FACTS_NAME, PAGE_NAME
from pipeline_assets.stripes import Stage
from resources.artifact_store import ArtifactRef
from resources.shapes import expect_fields
from resources.tables import read_json

TAGS = (
    {
        "html",
        "head",
        "meta",
        "title",
        "style",
        "body",
        "header",
        "nav",
        "main",
        "section",
        "article",
        "h1",
        "h2",
        "h3",
        "p",
        "ul",
        "li",
        "div",
    }
    | {"a", "span", "code", "b", "dl", "dt", "dd", "table", "caption", "thead", "tbody", "tr", "th", "td"}
    | {"figure", "img", "figcaption", "svg", "rect", "path", "polygon"}
)
ATTRIBUTES = {
    "lang",
    "charset",
    "http-equiv",
    "content",
    "name",
    "class",
    "id",
    "role",
    "tabindex",
    "scope",
    "colspan",
    "alt",
    "aria-label",
} | {
    "aria-hidden",
    "data-outcome",
    "viewbox",
    "preserveaspectratio",
    "d",
    "x",
    "y",
    "width",
    "height",
    "fill",
    "points",
}
"""What the template and the drawings are made of: whatever else a page holds, some browser may run or fetch."""
WITHIN = {
    ("a", "href"): re.compile(r"#[\w-]+"),
    ("img", "src"): re.compile(r"data:image/png;base64,[A-Za-z0-9+/=]*"),
    ("svg", "xmlns"): re.compile(r"http://www\.w3\.org/2000/svg"),
}
"""The attributes that name a place, by element, and the places that are within the page."""
PLACES = frozenset(attribute for _, attribute in WITHIN)
COLOUR = re.compile(r"#[0-9a-f]{6}")
FETCHING_STYLE = re.compile(r"url|@import|image-set|src|expression|\\|<", re.IGNORECASE)
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
POLICY_NAME = "content-security-policy"
OUTCOME = "data-outcome"


class _Elements(HTMLParser):
    """What a page would run or fetch, and the outcomes that it shows, read from its bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.violations: list[str] = []
        self.outcomes: dict[str, list[str]] = {}
        self.policies: list[str] = []

    def _refuse(self, where: str, expected: str) -> None:
        self.violations.append(f"line {self.getpos()[0]:,}: {where}: expected {expected}")

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in TAGS:
            self._refuse(f"<{tag[:80]}>", "no element but the template's: another may run or fetch")
        for name, value in attrs:
            self._judge(tag, name, value or "")
        found = dict(attrs)
        if len(found) < len(attrs):
            self._refuse(f"<{tag[:80]}>", "each attribute once")
        if (kind := found.get("http-equiv")) is not None:
            if kind.lower() == POLICY_NAME:
                self.policies.append(found.get("content") or "")
            else:
                self._refuse(f"<{tag[:80]}>", f"no refresh and no header but the policy, found {kind[:80]!r}")
        if (outcome := found.get(OUTCOME)) is not None:
            self.outcomes.setdefault((found.get("id") or "").removeprefix("check-"), []).append(outcome)

    def _judge(self, tag: str, name: str, value: str) -> None:
        where = f"<{tag[:80]}>"
        if name in PLACES:
            within = WITHIN.get((tag, name))
            if within is None or not within.fullmatch(value):
                self._refuse(where, f"{name} within the page, found {value[:80]!r}")
        elif name.startswith("on"):
            self._refuse(where, f"no attribute that runs, found {name[:80]}")
        elif name not in ATTRIBUTES:
            self._refuse(where, f"no attribute but the template's, found {name[:80]}")
        elif name == "fill" and not COLOUR.fullmatch(value):
            self._refuse(where, f"a colour as fill, found {value[:80]!r}")

    def handle_data(self, data: str) -> None:
        if self.cdata_elem == "style" and (found := FETCHING_STYLE.search(data)):
            self._refuse("<style>", f"a style that fetches nothing, found {found.group()!r}")

    def handle_comment(self, data: str) -> None:
        self._refuse("a comment", f"none: browsers differ in where one ends, found {data[:80]!r}")


def _unlike_markup(html: str) -> list[str]:
    """Openings of comments, declarations and instructions, of which a page has one: parsers differ in their ends."""
    openings = re.findall(r"<[!?].{0,20}", html)
    if openings == ["<!DOCTYPE html>"]:
        return []
    return [f"expected <!DOCTYPE html> and no comment or declaration, found {openings[:3]}"]


def report_is_self_contained(stage: Stage, quality_report: ArtifactRef) -> Verdict:
    """The page's own bytes: no element or attribute runs or fetches, and each verdict is there once, as recorded."""
    folder = stage.folder(quality_report)
    content = (folder / PAGE_NAME).read_bytes()
    page = _Elements()
    html = content.decode()
    page.feed(html)
    page.close()
    recorded = expect_fields(read_json(folder / FACTS_NAME), {}, str(folder / FACTS_NAME))
    violations = [*page.violations, *_unlike_markup(html)]
    if page.policies != [POLICY]:
        violations.append(f"expected one policy {POLICY!r}, found {page.policies}")
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
