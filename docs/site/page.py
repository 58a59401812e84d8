"""Prints a page of docs/ as Doxygen is to read it, which does not name headings as GitHub does.

python3 docs/site/page.py docs/auto.md
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

_HEADING = re.compile(r"^##+ (.*)$")


def lines(page: Path) -> Iterator[str]:
    """Headings with names to link to; in the site, examples lie beside the pages."""
    fenced, seen = False, dict[str, int]()
    for line in page.read_text(encoding="utf-8").splitlines():
        fenced ^= line.startswith("```")
        if fenced:
            yield line
        elif heading := _HEADING.match(line):
            yield f"{line} {{#{page.stem}-{_anchor(heading[1], seen)}}}"
        else:
            yield _linked(line, page.stem)


def _anchor(heading: str, seen: dict[str, int]) -> str:
    """As GitHub names it; a second one of the same name is counted."""
    name = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
    seen[name] = seen.get(name, -1) + 1
    return f"{name}-{seen[name]}" if seen[name] else name


def _linked(line: str, page: str) -> str:
    line = re.sub(r"\]\((?:(\w+)\.md)?#([\w-]+)\)", lambda to: f"](#{to[1] or page}-{to[2]})", line)
    return line.replace("](../examples)", "](examples/index.html)").replace(
        "](../examples/", "](examples/"
    )


if __name__ == "__main__":
    sys.stdout.write("\n".join(lines(Path(sys.argv[1]))) + "\n")
