"""Output of `--help`: flag names are never cut, and the engine's many options are shown in
sections."""

from __future__ import annotations

import inspect
import os
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import typer
from toolkit_lm.errors import nearest

ALL = "all"
"""The section that stands for all."""
_WIDEST = 110
_INDENT = 2
_HELP_COLUMN = 26
"""Column where help texts begin. A longer name gets a line of its own."""
_FEW = 4
"""So many sections are shown whole."""
_HELP = "--help"


class Row(NamedTuple):
    name: str
    help: str


class Section(NamedTuple):
    title: str
    rows: list[Row]


def _with_first(sections: list[Section], flags: Sequence[str]) -> list[Section]:
    """The sections with these flags moved to one of their own, behind the arguments."""

    def is_first(row: Row) -> bool:
        return _flag(row) in flags

    found = sorted(
        (row for section in sections for row in section.rows if is_first(row)),
        key=lambda row: flags.index(_flag(row)),
    )
    if not found:
        return sections
    rest = [Section(title, [row for row in rows if not is_first(row)]) for title, rows in sections]
    at = 1 if rest[0].title == "Arguments" else 0
    return [
        *rest[:at],
        Section("Most used", found),
        *(section for section in rest[at:] if section.rows),
    ]


def asked_section(arguments: Sequence[str]) -> str | None:
    """SECTION of `--help=SECTION`, where it is among a command's arguments."""
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return next(
        (argument[len(_HELP) + 1 :] for argument in own if argument.startswith(f"{_HELP}=")), None
    )


def help_page(
    command: Any,
    ctx: Any,
    folded: Iterable[str] = (),
    commands: Sequence[Row] = (),
    first: Sequence[str] = (),
) -> str:
    """The help of a command. Of `folded` sections it has the names of the flags alone. `first`:
    flags that a section of their own explains, at the beginning."""
    sections = _with_first(list(_sections(command, ctx)), first)
    short = set(folded) if len(sections) > _FEW else set()
    parts = [_usage(command, ctx), _paragraphs(command.help or "")]
    parts += [_section(section) for section in sections if section.title not in short]
    if commands:
        parts.append(_section(Section("Commands", list(commands))))
    if rest := [section for section in sections if section.title in short]:
        path = ctx.command_path
        parts.append(
            f"{_title('More options')}\n"
            + _fill(
                f"{path} {_HELP}=SECTION explains those of a section, {_HELP}={ALL} all of them."
            )
        )
        parts += [_flags(section) for section in rest]
    return "\n\n".join(part for part in parts if part) + "\n"


def section_page(command: Any, ctx: Any, asked: str) -> str:
    """The sections that are named so, all of them for "all", or else the options that have the word
    in their flag.

    Raises typer.BadParameter where there are none.
    """
    sections = list(_sections(command, ctx))
    word = asked.strip().lower()
    found = [section for section in sections if word in (ALL, section.title.lower())]
    found = found or [
        Section(title, rows)
        for title, all_rows in sections
        if (rows := [row for row in all_rows if _has(row, word)])
    ]
    if not word or not found:
        titles = [title.lower() for title, _ in sections]
        raise typer.BadParameter(
            f"there is no section {asked!r}, and no option with it in its name. "
            f"{nearest(word, [*titles, ALL])}"
        )
    return "\n\n".join([_usage(command, ctx), *map(_section, found)]) + "\n"


def _sections(command: Any, ctx: Any) -> Iterator[Section]:
    """Arguments, the command's own options, then those of each panel."""
    panels: dict[str, list[Row]] = {"Arguments": [], "Options": []}
    for param in command.get_params(ctx):
        if (record := param.get_help_record(ctx)) is None:
            continue
        is_argument = param.param_type_name == "argument"
        name = param.metavar or param.name.upper() if is_argument else _name(param, ctx)
        is_help = name == _HELP
        row = (
            Row(f"{_HELP}[=SECTION]", "Show this, or what a section holds.")
            if is_help
            else Row(name, record[1])
        )
        panel = getattr(param, "rich_help_panel", None) or (
            "Arguments" if is_argument else "Options"
        )
        panels.setdefault(panel, []).append(row)
    return (Section(title, rows) for title, rows in panels.items() if rows)


def _name(param: Any, ctx: Any) -> str:
    names = ", ".join([*sorted(param.opts, key=len), *param.secondary_opts])
    return (
        names
        if param.is_flag
        else f"{names} {param.metavar or param.display_type(ctx).strip('<>').upper()}"
    )


def _has(row: Row, word: str) -> bool:
    return word.strip("-").replace("_", "-") in row.name.lower()


def _usage(command: Any, ctx: Any) -> str:
    pieces = " ".join(command.collect_usage_pieces(ctx))
    return _fill(f"Usage: {ctx.command_path} {pieces}", 0)


def _paragraphs(text: str) -> str:
    return "\n\n".join(
        _fill(" ".join(part.split())) for part in inspect.cleandoc(text).split("\n\n")
    )


def _section(section: Section) -> str:
    return "\n".join([_title(section.title), *map(_row, section.rows)])


def _row(row: Row) -> str:
    lines = textwrap.wrap(
        " ".join(row.help.split()), _width() - _HELP_COLUMN, break_on_hyphens=False
    )
    names = _name_lines(row.name)
    room = _HELP_COLUMN - _INDENT - len(names[-1])
    shown = [" " * _INDENT + _bold(name) for name in names]
    if lines and room >= 2 and len(names) == 1:
        shown[-1] += " " * room + lines.pop(0)
    return "\n".join([*shown, *(" " * _HELP_COLUMN + line for line in lines)])


def _name_lines(name: str) -> list[str]:
    """A flag and its value. No name is cut: where many choices do not fit, they go on in the next
    line."""
    lines = [""]
    most = _width() - _INDENT
    for number, part in enumerate(name.split("|")):
        joined = f"{lines[-1]}|{part}" if number else part
        if number == 0 or len(joined) <= most:
            lines[-1] = joined
        else:
            lines.append(f"  |{part}")
    return lines


def _flag(row: Row) -> str:
    return row.name.partition(" ")[0].rstrip(",")


def _flags(section: Section) -> str:
    names = ", ".join(map(_flag, section.rows))
    return f"{' ' * _INDENT}{_bold(section.title.lower())}\n{_fill(names, 2 * _INDENT)}"


def _fill(text: str, indent: int = _INDENT) -> str:
    return textwrap.fill(
        text,
        _width(),
        initial_indent=" " * indent,
        subsequent_indent=" " * indent,
        break_on_hyphens=False,
        break_long_words=False,
    )


def _width() -> int:
    return max(min(shutil.get_terminal_size().columns, _WIDEST), 2 * _HELP_COLUMN)


def _title(text: str) -> str:
    return _styled(f"{text}:", bold=True, fg="yellow")


def _bold(text: str) -> str:
    return _styled(text, bold=True)


def _styled(text: str, **style: Any) -> str:
    """Text with a style. `echo` removes styles if the output is not a terminal."""
    return text if "NO_COLOR" in os.environ else typer.style(text, **style)
