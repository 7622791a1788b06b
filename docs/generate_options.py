"""Writes the tables of options in docs/configuration.md, from where the options are stated.

usage: python docs/generate_options.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_type_hints

from msgspec import Struct
from toolkit_lm.config import Option, VllmConfig, options_of
from toolkit_lm_cli.converse import ClientOptions
from toolkit_lm_server.options import ServerOptions

PAGE = Path(__file__).with_name("configuration.md")
BEGIN = "<!-- options: written by docs/generate_options.py -->\n"
END = "<!-- end of options -->\n"


def main() -> None:
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def with_tables(page: str) -> str:
    """The page with its tables as they should be."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return before + BEGIN + tables() + END + after


def tables() -> str:
    """One table for each section of options."""
    sections = [kind for kind in get_type_hints(VllmConfig).values() if isinstance(kind, type) and options_of(kind)]
    commands = [("`toolkit serve`", ServerOptions), ("`toolkit chat` and `toolkit complete`", ClientOptions)]
    titled = [(section.__name__.removesuffix("Config"), section) for section in sections] + commands
    return "".join(table(title, section) for title, section in titled) + "\n"


def table(title: str, section: type[Struct]) -> str:
    """A section's heading, its sentence and its options."""
    rows = "".join(f"| `{o.name}` | {values(o)} | {default(o.default)} | {escape(o.help)} |\n" for o in options_of(section))
    return f"\n### {title}\n\n{section.__doc__}\n\n| option | values | default | meaning |\n| --- | --- | --- | --- |\n{rows}"


def values(o: Option) -> str:
    """What may be given."""
    if o.choices:
        return ", ".join(f"`{choice}`" for choice in o.choices)
    if o.is_mapping:
        return "NAME.KEY=VALUE, several times"
    if o.is_list:
        return "names"
    if o.is_flag:
        return "switch"
    low, high = o.statement.ge, o.statement.le
    kind = "integer" if int in o.kinds else "number" if float in o.kinds else "text"
    if low is None:
        return kind
    return f"{kind}, {low} or more" if high is None or high >= 2**63 - 1 else f"{kind}, {low} to {high}"


def default(value: Any) -> str:
    """The default as a reader would write it."""
    if value in (None, "", [], {}):
        return ""
    return ("off", "on")[value] if isinstance(value, bool) else f"`{value}`"


def escape(text: str) -> str:
    """`text` inside a table."""
    return text.replace("|", "\\|")


if __name__ == "__main__":
    main()
