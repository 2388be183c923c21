"""HTML by the standard library's parser alone: what elements a page has, with what attributes, and what texts."""

import re
from dataclasses import dataclass, field
from html.parser import HTMLParser


@dataclass
class Parsed:
    """Elements in order, attributes as (element, name, value), and the text between each two tags, blanks left out."""

    tags: list[str] = field(default_factory=list)
    attributes: list[tuple[str, str, str]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    def values(self, name: str) -> list[str]:
        """Values of all attributes of a name."""
        return [value for _, attribute, value in self.attributes if attribute == name]


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parsed = Parsed()
        self.pending = ""

    def flush(self) -> None:
        if self.pending.strip(" \n"):
            self.parsed.texts.append(self.pending)
        self.pending = ""

    def handle_starttag(self, tag, attrs):
        self.flush()
        self.parsed.tags.append(tag)
        self.parsed.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag):
        self.flush()
        self.parsed.tags.append(f"/{tag}")

    def handle_data(self, data):
        self.pending += data

    def handle_comment(self, data):
        self.parsed.tags.append("comment")

    def unknown_decl(self, data):
        self.parsed.tags.append("declaration")


def parse(html: str) -> Parsed:
    """A whole page."""
    reader = _Reader()
    reader.feed(html)
    reader.close()
    reader.flush()
    return reader.parsed


ESCAPES = re.compile(r"\\(\\|n|r|t|x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8})")
NAMED = {"\\": "\\", "n": "\n", "r": "\r", "t": "\t"}


def spelled_back(text: str) -> str:
    """A text of which characters were spelled out with backslashes, as it was."""
    return ESCAPES.sub(lambda found: NAMED.get(found[1]) or chr(int(found[1][1:], 16)), text)
