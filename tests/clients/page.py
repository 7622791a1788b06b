"""docs/clients.md, from the versions in requirements-clients.txt and what the tests say of themselves."""

from __future__ import annotations

import ast
import re
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
PAGE = ROOT / "docs" / "clients.md"
REQUIREMENTS = ROOT / "requirements-clients.txt"

_HEAD = """# Clients

Clients of other people's, unchanged but for the base URL, that were tried with `toolkit serve`, each with the version that passed.
`make test-clients` tries them again, and writes this page.

| client | version | what was tried |
| --- | --- | --- |
"""
_TAIL = """
[Server](server.md) has the routes, and [Other vendors' APIs](vendor_apis.md) what is taken of Anthropic's, Cohere's and Ollama's.
"""


def versions() -> dict[str, str]:
    """By client, the version that is tried."""
    return dict(re.findall(r"^([\w-]+)==([\w.]+)$", REQUIREMENTS.read_text(), re.MULTILINE))


def page() -> str:
    """The page as it should be."""
    tried = {}
    for path in sorted(HERE.glob("test_*.py")):
        head = ast.get_docstring(ast.parse(path.read_text())) or ""
        name, _, what = " ".join(head.split()).partition(": ")
        tried[name] = what.removesuffix(".")
    pinned = versions()
    if tried.keys() != pinned.keys():
        raise ValueError(f"clients without tests, or tests without clients: {sorted(tried.keys() ^ pinned.keys())}")
    rows = "".join(f"| [{name}](https://pypi.org/project/{name}/) | {pinned[name]} | {what} |\n" for name, what in tried.items())
    return _HEAD + rows + _TAIL
