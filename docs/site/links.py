"""Fails, and names them, if links or pictures of a built site lead nowhere.

python3 docs/site/links.py build/docs
"""

import sys
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

# Doxygen writes it also where EXCLUDE_SYMBOLS leaves no nested class.
_NOT_OURS = {"#nested-classes"}


class _Page(HTMLParser):
    """Where a page links to, and what of it others can link to."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") or (tag, name) == ("object", "data"):
                self.links.append(value or "")
            elif name in ("id", "name"):
                self.anchors.add(value or "")


@cache
def _read(file: Path) -> _Page:
    page = _Page()
    page.feed(file.read_text(encoding="utf-8"))
    return page


def broken(site: Path) -> Iterator[str]:
    """Each with its page; a folder is nothing to open, and other sites are not asked."""
    for file in sorted(site.rglob("*.html")):
        for link in dict.fromkeys(_read(file).links):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or link in _NOT_OURS:
                continue
            target = (file.parent / unquote(parts.path)).resolve() if parts.path else file.resolve()
            if not target.is_file() or not _has(target, unquote(parts.fragment)):
                yield f"{file.relative_to(site)}: {link}"


def _has(target: Path, anchor: str) -> bool:
    return not anchor or target.suffix != ".html" or anchor in _read(target).anchors


if __name__ == "__main__":
    found = list(broken(Path(sys.argv[1])))
    if found:
        sys.exit("\n".join(["These links lead nowhere:", *found]))
