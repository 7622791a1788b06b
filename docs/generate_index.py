"""Writes the table of pages in docs/index.md, from mkdocs.yml's navigation and each page's summary.

A summary is a comment below the page's title: `<!-- summary: ... -->`.

usage: python docs/generate_index.py
"""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parent
INDEX = DOCS / "index.md"
_HEAD = "| page | what it has |\n| --- | --- |\n"


def pages() -> list[str]:
    """Pages of the index in the navigation's order: guides, tutorials and overviews."""
    navigation = (DOCS.parent / "mkdocs.yml").read_text(encoding="utf-8")
    found = re.findall(r": ([\w/]+\.md)$", navigation, re.MULTILINE)
    return [
        page
        for page in found
        if page != INDEX.name
        and ("/" not in page or page.startswith("tutorials/") or page.endswith("README.md"))
    ]


def row(page: str) -> str:
    """The line of the table for one page. Raises ValueError for a page without a summary."""
    text = (DOCS / page).read_text(encoding="utf-8")
    found = re.match(r"# (.+)\n\n<!-- summary: (.+) -->\n", text)
    if found is None:
        raise ValueError(f"docs/{page} needs a comment <!-- summary: ... --> below its title")
    return f"| [{found[1]}]({page}) | {found[2]} |\n"


def text() -> str:
    """docs/index.md with the table written anew."""
    above, _, _ = INDEX.read_text(encoding="utf-8").partition(_HEAD)
    return above + _HEAD + "".join(map(row, pages()))


if __name__ == "__main__":
    INDEX.write_text(text(), encoding="utf-8")
