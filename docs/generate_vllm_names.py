"""Writes the tables of vLLM's names in docs/vllm.md, from the table of the plugin vllm_names.

usage: python docs/generate_vllm_names.py
"""

from __future__ import annotations

from pathlib import Path

from toolkit_lm_vllm_names.name import Name
from toolkit_lm_vllm_names.table import TABLE, names

PAGE = Path(__file__).with_name("vllm.md")
BEGIN = "<!-- written by docs/generate_vllm_names.py -->\n"
END = "<!-- end of what is written -->\n"


def main() -> None:
    PAGE.write_text(page(), encoding="utf-8")


def page() -> str:
    """The page with its tables as they should be."""
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    _, after = rest.split(END)
    return before + BEGIN + tables() + END + after


def tables() -> str:
    """Tables of vLLM's names that have an option here, need none, or are refused: of the engine,
    then of the server."""
    text = ""
    for title, of_server in (("Options of the engine", False), ("Flags of the server", True)):
        rows = names(TABLE.values(), of_server=of_server)
        text += f"\n### {title}\n\n| vLLM | here | |\n| --- | --- | --- |\n"
        text += "".join(
            f"| `{row.name}` | {here(row)} | {row.note} |\n"
            for row in rows
            if row.kind in ("same", "renamed")
        )
        text += f"\n### {title}: any value is taken\n\n| vLLM | why |\n| --- | --- |\n" + grouped(
            rows, "free"
        )
        text += (
            f"\n### {title}: only what asks for nothing is taken\n\n| vLLM | what to use |\n"
            "| --- | --- |\n"
        ) + grouped(rows, "refused")
    return text + "\n"


def grouped(rows: list[Name], kind: str) -> str:
    """One row for each note."""
    notes: dict[str, list[str]] = {}
    for row in rows:
        if row.kind == kind:
            notes.setdefault(row.note, []).append(f"`{row.name}`")
    return "".join(f"| {', '.join(found)} | {note} |\n" for note, found in notes.items())


def here(row: Name) -> str:
    """The options of ours."""
    return ", ".join(word if word == "..." else f"`{word}`" for word in row.ours.split(", "))


if __name__ == "__main__":
    main()
