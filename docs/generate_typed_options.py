"""Writes core/src/toolkit_lm/config/typed_options.pyi: the options of engines as TypedDicts, for
type checkers and editors.

usage: python docs/generate_typed_options.py
"""

from __future__ import annotations

import textwrap
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, Union, get_args, get_origin

from toolkit_lm.config import Option, VllmConfig
from toolkit_lm.config.typed_options import APART

FILE = Path(__file__).parents[1] / "core/src/toolkit_lm/config/typed_options.pyi"
HEAD = '''"""Written by docs/generate_typed_options.py."""

from collections.abc import Mapping
from typing import Any, Literal, TypedDict

APART: tuple[str, ...]

'''
LLM = "Options of `LLM(...)`, beside its model and its plugins."
ALL = "Options of an engine, of which `VllmConfig.make(...)` makes a config."


def text() -> str:
    """The file as it should be."""
    options = VllmConfig.options()
    apart = [one for one in options if one.name in APART]
    return (
        HEAD
        + typed_dict("LLMOptions(TypedDict, total=False)", LLM, options, APART)
        + "\n"
        + typed_dict("VllmOptions(LLMOptions, total=False)", ALL, apart)
    )


def typed_dict(
    head: str, doc: str, options: Iterable[Option], without: tuple[str, ...] = ()
) -> str:
    fields = "".join(field(one) for one in options if one.name not in without)
    return f'class {head}:\n    """{doc}"""\n\n{fields}'


def field(one: Option) -> str:
    """An option's name and type, and its help below."""
    of_type = "str | Mapping[str, Any]" if one.spec.is_json else named(get_args(one.type)[0])
    line = f"    {one.name}: {of_type}\n"
    if len(line) > 100:
        values = "".join(f'        "{value}",\n' for value in one.choices)
        line = f"    {one.name}: Literal[\n{values}    ]\n"
    lines = textwrap.wrap(f'"""{one.help}', 100 - 4 - 3, break_on_hyphens=False)
    return line + textwrap.indent("\n".join(lines) + '"""\n', "    ")


def named(kind: object) -> str:
    """A type as it is written."""
    if isinstance(kind, types.UnionType) or get_origin(kind) is Union:
        return " | ".join(map(named, get_args(kind)))
    if get_origin(kind) is Literal:
        values = ", ".join(f'"{value}"' for value in get_args(kind))
        return f"Literal[{values}]"
    if arguments := get_args(kind):
        return f"{named(get_origin(kind))}[{', '.join(map(named, arguments))}]"
    return "None" if kind is types.NoneType else getattr(kind, "__name__", str(kind))


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
