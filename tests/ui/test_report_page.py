"""The report's page as a browser lays it out: nothing is wider than the page, on screens, in print, light and dark."""

from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe

from pipeline_assets.pictures import line_picture
from pipeline_assets.quality_page import CheckEntry, CutText, Drawing, Note, Page, Picture, Section, render, table_of
from pipeline_assets.transforms.drawings import attention_svg, pack_svg

PAPER_WIDTH = 718  # CSS pixels of A4 between margins of 1 cm
WIDE = "document.documentElement.scrollWidth > document.documentElement.clientWidth"
SCROLLING = """[...document.querySelectorAll(".scroll")].filter(box => box.scrollWidth > box.clientWidth)
    .map(box => [box.getAttribute("aria-label"), box.tabIndex, getComputedStyle(box).overflowX])"""
BEYOND = """[...document.querySelectorAll("table, img, svg, p, dl, dd, h1, h2, h3")].filter(
    one => one.getBoundingClientRect().right > document.documentElement.clientWidth + 0.5).map(one => one.innerText)"""


COUNTS = [
    {
        "count": "unused below min tokens bytes",
        "value": 15_800_938,
        "unit": "documents",
        "meaning": "Documents in no split for this reason",
    }
] * 3


@pytest.fixture
def report(tmp_path: Path) -> Path:
    """A page with a block of each kind, and tables as wide as any of ours, of words that do not break."""
    unbroken = "0123456789abcdef" * 12
    numbers = {f"documents_of_{column}": 1_234_567_890 for column in range(12)}
    rows = [{"layout": "best_fit_decreasing", **numbers} for _ in range(8)]
    texts = [{"doc_id": bytes(32), "text": unbroken, "cut": CutText(parts=[unbroken, unbroken]), "url": unbroken}]
    check = CheckEntry(
        name="every_pair_comes_exactly_once",
        asset="packing_plan",
        outcome="failed",
        severity="holds its asset back when it fails",
        expected=unbroken,
        found=unbroken,
        description="Fails when a pair is lost.",
        numbers={"headroom": 0.5},
        examples=table_of("Counter-examples", texts),
    )
    blocks = [
        check,
        table_of("Wide", rows, meanings={name: f"Documents of {name} (documents)" for name in numbers}),
        table_of("Counts of split_documents", COUNTS),
        table_of("Texts", texts * 6),
        Picture(png=line_picture("Loss", "step", "nats", {"all": ([0, 1], [1, 2])}), alternative="Loss"),
        Drawing(svg=pack_svg([3, 4], 8), alternative="A pack"),
        Drawing(svg=attention_svg([3, 4]), alternative="Attention", shape="square"),
        Note(text=unbroken),
    ]
    path = tmp_path / "report.html"
    sections = [Section(heading=unbroken, anchor="all", blocks=blocks)]
    path.write_text(render(Page(title=unbroken, summary=[unbroken], sections=sections)), encoding="utf-8")
    return path


@pytest.mark.parametrize("width", [1_300, 800, 390])
def test_what_is_wider_than_the_page_scrolls_in_a_box_of_its_own(page: Any, report: Path, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    page.goto(report.as_uri())
    assert not page.evaluate(WIDE)
    boxes = page.evaluate(SCROLLING)
    assert "Wide" in [name for name, *_ in boxes]
    assert all(name and (index, overflow) == (0, "auto") for name, index, overflow in boxes), boxes


def test_counts_and_their_meanings_are_read_on_a_phone_without_scrolling(page: Any, report: Path) -> None:
    page.set_viewport_size({"width": 390, "height": 900})
    page.goto(report.as_uri())
    box = page.get_by_role("group", name="Counts of split_documents")
    assert box.evaluate("box => box.scrollWidth <= box.clientWidth")
    assert box.get_by_text("Documents in no split for this reason").first.is_visible()
    assert page.get_by_text("Documents of documents_of_3 (documents)").is_visible()


def test_nothing_is_cut_off_on_paper(page: Any, report: Path) -> None:
    page.set_viewport_size({"width": PAPER_WIDTH, "height": 900})
    page.goto(report.as_uri())
    assert page.evaluate(BEYOND)
    page.emulate_media(media="print", color_scheme="dark")
    assert page.evaluate(BEYOND) == []
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_is_accessible_light_and_dark(page: Any, report: Path, scheme: str) -> None:
    page.emulate_media(color_scheme=scheme)
    page.goto(report.as_uri())
    assert (page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)") == (
        scheme == "light"
    )
    found = Axe().run(page).response["violations"]
    assert [(one["id"], [node["html"] for node in one["nodes"]]) for one in found if one["impact"] != "minor"] == []
