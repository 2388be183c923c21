"""How a report becomes one page of HTML that stands by itself.

In: headings, tables, pictures and drawings as plain values. Out: HTML text without a script, a link to elsewhere or a
request. Promise: whatever a text holds is shown and never run: every value is escaped, what is unprintable is spelled
out, and only drawings, which are made of numbers, are put in as they are. The same page gives the same text.
"""

import base64
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources as package_resources
from typing import TYPE_CHECKING, Any, ClassVar

from pipeline_assets.transforms.lookup import beginning, printable

if TYPE_CHECKING:
    from jinja2 import Template

TEMPLATE_NAME = "quality_report.html.jinja"
MAX_PAGE_BYTES = 3_000_000
AIMED_BYTES = 2_500_000  # a page that would be larger is shortened: what is added to pages later has room
MAX_ROWS, MAX_COLUMNS, MAX_CELL_CHARACTERS = 50, 40, 160
FEW_ROWS, MANY_COLUMNS = 5, 8  # a table of more columns and at most so many rows is turned
FEW_CHARACTERS, SHORT_TEXT = 60, 200  # of a cell and of a paragraph, where a page is shortened
SHORT_CHARACTERS, ID_DIGITS = 24, 16
DIGITS, WHOLE_FROM = 5, 10_000  # of a float; from here on it is shown whole


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of plain values under headings.

    `total`, `num_columns`: how many there are, where only the first are here; `rest`: where all are to be found;
    `meanings`: of the columns, by name; `is_turned`: rows are to be shown as columns; `is_mixed`: they are, so that a
    column may hold numbers beside texts.
    """

    kind: ClassVar[str] = "table"
    caption: str
    columns: Sequence[Any]
    rows: Sequence[Sequence[Any]]
    total: int = 0
    num_columns: int = 0
    rest: str = ""
    meanings: Mapping[str, str] = field(default_factory=dict)
    is_turned: bool = False
    is_mixed: bool = False

    @property
    def note(self) -> str:
        """How many of its rows and columns are here, where some are left out, and where the rest is."""
        kinds = ("columns", "rows") if self.is_turned else ("rows", "columns")
        counts = ((len(self.rows), self.total), (len(self.columns), self.num_columns))
        left_out = [f"{here:,} of {of:,} {kind}" for kind, (here, of) in zip(kinds, counts, strict=True) if here < of]
        place = f"; the rest is in {self.rest}" if self.rest else ""
        return f"Shown: {' and '.join(left_out)}{place}." if left_out else ""

    @property
    def laid_out(self) -> "Table":
        """The table as it is drawn; of a turned one, the first column is the headings and each other one a row."""
        if not self.is_turned:
            return self
        first, *rest = zip(*self.rows, strict=True)
        rows = [[name, *cells] for name, cells in zip(self.columns[1:], rest, strict=True)]
        return replace(self, columns=[self.columns[0], *first], rows=rows, is_turned=False, is_mixed=True)

    @property
    def legend(self) -> dict[str, str]:
        """The meanings by the names of columns, of which several may mean the same: each meaning is told once."""
        names = {
            meaning: [one for one in self.meanings if self.meanings[one] == meaning]
            for meaning in self.meanings.values()
        }
        return {", ".join(some): meaning for meaning, some in names.items()}

    @property
    def headings(self) -> list[tuple[Any, bool]]:
        """Each column's name, and whether numbers in it are aligned as such: it holds no others, or is mixed."""
        cells = [[row[number] for row in self.rows if row[number] is not None] for number in range(len(self.columns))]
        enough = any if self.is_mixed else all
        return [
            (name, bool(some) and enough(map(_is_counted, some)))
            for name, some in zip(self.columns, cells, strict=True)
        ]


@dataclass(frozen=True, kw_only=True)
class CutText:
    """A text in a cell, in parts: ␟ is shown between them, marked so that none of the text's own is taken for it."""

    parts: Sequence[str]


class Spelled(str):
    """A text of which the unprintable characters were spelled out before."""

    __slots__ = ()


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A PNG, and what it shows in words."""

    kind: ClassVar[str] = "picture"
    png: bytes
    alternative: str

    @property
    def address(self) -> str:
        """The picture itself as a URL."""
        return f"data:image/png;base64,{base64.b64encode(self.png).decode()}"


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """An SVG element made of numbers alone, and what it shows in words."""

    kind: ClassVar[str] = "drawing"
    svg: str
    alternative: str
    shape: str = "bar"  # bar or square


@dataclass(frozen=True, kw_only=True)
class Note:
    """A paragraph; `is_unread`: it says that something that should be there could not be read."""

    kind: ClassVar[str] = "note"
    text: str
    is_unread: bool = False


@dataclass(frozen=True, kw_only=True)
class CheckEntry:
    """What one check said: its law as a sentence, what it found, and what a failure means and asks for."""

    kind: ClassVar[str] = "check"
    name: str
    asset: str
    outcome: str
    severity: str
    expected: str
    found: str
    description: str
    numbers: Mapping[str, float]
    examples: Table | None

    @property
    def sentence(self) -> str:
        """The law in words: no_token_sees_another_document is "No token sees another document"."""
        words = in_words(self.name)
        return words[:1].upper() + words[1:]


Block = Table | Picture | Drawing | Note | CheckEntry


@dataclass(frozen=True, kw_only=True)
class Section:
    """A heading, where links lead to it, and what is below it."""

    heading: str
    anchor: str
    blocks: Sequence[Block]


@dataclass(frozen=True, kw_only=True)
class Page:
    """A whole report: its title, what is to be known first, and its sections."""

    title: str
    summary: Sequence[str]
    sections: Sequence[Section]

    @property
    def unread(self) -> list[str]:
        """What could not be read when the page was drawn, in words."""
        return unread_in(self.sections)


def unread_in(sections: Sequence[Section]) -> list[str]:
    """What sections say that could not be read."""
    blocks = [block for section in sections for block in section.blocks]
    return [block.text for block in blocks if isinstance(block, Note) and block.is_unread]


def in_words(name: str) -> str:
    """A name of ours as it is read."""
    return name.replace("_", " ")


def table_of(
    caption: str,
    rows: Sequence[Mapping[str, Any]],
    max_rows: int = MAX_ROWS,
    max_characters: int = MAX_CELL_CHARACTERS,
    *,
    total: int | None = None,
    rest: str = "",
    meanings: Mapping[str, str] | None = None,
) -> Table:
    """The first rows as a table whose columns are their keys, turned if wide; texts, lists and mappings are cut.

    `total`: how many rows there are where `rows` are the first of them; `rest`: where all are to be found; `meanings`
    of columns, by key, of which those that are shown are told below the table.
    """
    keys = list(dict.fromkeys(key for row in rows for key in row))
    columns = keys[:MAX_COLUMNS]
    return Table(
        caption=caption,
        columns=[in_words(column) for column in columns],
        rows=[[_cut(row.get(column), max_characters) for column in columns] for row in rows[:max_rows]],
        total=total or len(rows),
        num_columns=len(keys),
        rest=rest,
        meanings={in_words(name): meaning for name, meaning in (meanings or {}).items() if name in columns},
        is_turned=len(columns) > MANY_COLUMNS and 0 < min(len(rows), max_rows) <= FEW_ROWS,
    )


def _cut(value: Any, max_characters: int) -> Any:
    if isinstance(value, list | dict):
        return beginning(str(value), max_characters)
    return type(value)(beginning(value, max_characters)) if isinstance(value, str) else value


def render(page: Page) -> str:
    """The page as HTML."""
    return _template().render(page=page)


def render_within(page: Page, max_bytes: int = AIMED_BYTES) -> str:
    """The page as HTML of fewer bytes than `max_bytes`, shortened step by step as far as it must be.

    A shortened page says so on top, and in the place of whatever was left out.
    """
    left_out: list[str] = []
    html = render(page)
    for what, shorten in SHORTENINGS.items():
        if len(html.encode()) < max_bytes:
            break
        left_out.append(what)
        page = _without(page, shorten)
        told = f"Left out, to keep this page small: {', '.join(left_out)}."
        html = render(replace(page, summary=[*page.summary, told]))
    assert len(html.encode()) < MAX_PAGE_BYTES, f"a page of {len(html.encode()):,} bytes, of bounded texts alone"
    return html


def _without(page: Page, shorten: Callable[[Block], Block]) -> Page:
    sections = [replace(section, blocks=[shorten(block) for block in section.blocks]) for section in page.sections]
    return replace(page, sections=sections)


def _of_tables(shorten: Callable[[Table], Table]) -> Callable[[Block], Block]:
    """What is done to each table, also to those of checks."""

    def shortened(block: Block) -> Block:
        if isinstance(block, CheckEntry) and block.examples is not None:
            return replace(block, examples=shorten(block.examples))
        return shorten(block) if isinstance(block, Table) else block

    return shortened


def _few_rows(table: Table) -> Table:
    return replace(table, rows=table.rows[:FEW_ROWS], total=max(table.total, len(table.rows)))


def _short_cells(table: Table) -> Table:
    return replace(table, rows=[[_short_cell(cell) for cell in row] for row in table.rows], meanings={})


def _short_cell(value: Any) -> Any:
    if isinstance(value, CutText):
        return _cut("␟".join(value.parts), FEW_CHARACTERS)
    return _cut(value, FEW_CHARACTERS)


def _no_picture(block: Block) -> Block:
    if not isinstance(block, Picture):
        return block
    return Note(text=f"Left out, to keep this page small: {beginning(block.alternative, SHORT_TEXT)}.")


def _no_table(block: Block) -> Block:
    if isinstance(block, CheckEntry):
        return replace(block, examples=None)
    if not isinstance(block, Table):
        return block
    place = f"; it is in {block.rest}" if block.rest else ""
    return Note(text=f"Left out, to keep this page small: {block.caption}{place}.")


def _short_texts(block: Block) -> Block:
    if isinstance(block, Note):
        return replace(block, text=beginning(block.text, SHORT_TEXT))
    if not isinstance(block, CheckEntry):
        return block
    texts = {name: beginning(getattr(block, name), SHORT_TEXT) for name in ("expected", "found", "description")}
    return replace(block, **texts, numbers={})


SHORTENINGS: Mapping[str, Callable[[Block], Block]] = {
    f"rows of tables beyond {FEW_ROWS}": _of_tables(_few_rows),
    "pictures": _no_picture,
    "ends of long cells, meanings of columns": _of_tables(_short_cells),
    "tables": _no_table,
    "numbers of checks, ends of long texts": _short_texts,
}
"""How a page is shortened, and what that leaves out; the last gives a page of bounded texts alone."""


@cache
def _template() -> "Template":
    from jinja2 import Environment, StrictUndefined  # not with the code location

    source = (package_resources.files("pipeline_assets") / TEMPLATE_NAME).read_text(encoding="utf-8")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, finalize=_shown, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"drawn": _drawn, "look": _look}
    environment.tests |= {"cut": lambda value: isinstance(value, CutText)}
    return environment.from_string(source)


def _drawn(drawing: Drawing) -> Any:
    """The drawing's SVG, the only text that is not escaped."""
    from markupsafe import Markup

    return Markup(drawing.svg)


def _is_counted(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _look(value: Any, is_among_numbers: bool) -> str:
    """The class of a cell: columns of numbers are aligned, ids and short texts kept on a line, long ones given room."""
    if _is_counted(value) and is_among_numbers:
        return "number"
    if isinstance(value, bytes):
        return "id"
    return "long" if isinstance(value, CutText) or len(str(value)) > SHORT_CHARACTERS else "short"


def _shown(value: Any) -> Any:
    """A value as it is read: thousands separated, ids by the start of their hex, unprintable characters spelled out."""
    from markupsafe import Markup

    if isinstance(value, Markup):
        return value
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if WHOLE_FROM <= abs(value) < math.inf else f"{value:,.{DIGITS}g}"
    if isinstance(value, bytes):
        return value.hex()[:ID_DIGITS]
    if isinstance(value, Spelled) and value.isprintable():
        return value
    return printable(str(value))
