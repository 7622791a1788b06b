"""`toolkit plugins list` and `toolkit plugins show`: which plugins there are, and what each
brings."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import re
import textwrap
from itertools import pairwise
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from toolkit_lm.config import PluginsConfig
from toolkit_lm.errors import PluginError
from toolkit_lm.plugin import PluginInfo, Plugins, Registry, by_hook
from toolkit_lm_commands.completion import plugin_names
from toolkit_lm_commands.options import engine_command

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

_COLORS = {"ok": "green", "broken": "red", "disabled": "dim"}


@engine_command(PluginsConfig)
def list_plugins(config: PluginsConfig, plugins: Plugins, json_output: AsJson = False) -> None:
    """List the plugins in load order, broken and disabled ones included."""
    if json_output:
        typer.echo(json.dumps([_row(plugins, info) for info in plugins.infos], indent=2))
        return
    table = _new_table(4)
    for info in plugins.infos:
        kinds = [
            hook.removeprefix("toolkit_").removeprefix("register_").replace("_", " ")
            for hook in info.hooks
        ]
        table.add_row(
            info.name,
            Text(info.status, style=_COLORS[info.status]),
            f"{info.distribution} {info.version}",
            f"error: {info.error}" if info.error else ", ".join(kinds),
        )
    _print(table)


@engine_command(PluginsConfig)
def show_plugin(
    name: Annotated[
        str,
        typer.Argument(
            help="Name of the plugin, or of its distribution.", autocompletion=plugin_names
        ),
    ],
    config: PluginsConfig,
    plugins: Plugins,
    json_output: AsJson = False,
) -> None:
    """Show all that is known of one plugin: the entries that it registers, its options, and the
    traceback of its failure."""
    row = _row(plugins, _info(plugins, name))
    if json_output:
        typer.echo(json.dumps(row, indent=2))
        return
    table = _new_table(2)
    for key, value in row.items():
        if value not in (None, [], {}):
            table.add_row(key, _text(value))
    _print(table)


def _info(plugins: Plugins, name: str) -> PluginInfo:
    """Raises PluginError for a name that is neither a plugin's nor that of a distribution with one
    plugin."""
    distribution = re.sub(r"[-_.]+", "-", name).lower()
    names = [info.name for info in plugins.infos if info.distribution == distribution]
    if name in names or not names:
        return plugins.info(name)
    if len(names) > 1:
        raise PluginError(
            f"{name} has {len(names)} plugins. Name one of them: {', '.join(sorted(names))}."
        )
    return plugins.info(names[0])


def _new_table(columns: int) -> Table:
    """For `add_row`. The first column is bold, the last one folds."""
    table = Table(show_header=False, box=None)
    for index in range(columns):
        table.add_column(
            style="bold" if index == 0 else None,
            overflow="fold" if index == columns - 1 else "ellipsis",
        )
    return table


def _print(table: Table) -> None:
    """Print a table. Lines are not wrapped in a file or a pipe."""
    console = Console(markup=False, emoji=False)
    if not console.is_terminal:
        console.width = 10_000
    console.print(table)


def _row(plugins: Plugins, info: PluginInfo) -> dict[str, Any]:
    row = dataclasses.asdict(info)
    row["entries"] = {
        hook.removeprefix("toolkit_register_"): entries
        for hook, implementations in by_hook(plugins).items()
        if (entries := _entries(implementations, info))
    }
    kind = plugins.options_class(info.name) if info.status == "ok" else None
    row["options"] = {} if kind is None else option_fields(kind)
    return row


def option_fields(kind: type[Any]) -> dict[str, str]:
    """The options that a plugin has: each with its type, its default, and as help the text that
    stands below it in the source."""
    helps = _texts_below(kind)
    options = inspect.signature(kind, eval_str=True).parameters.values()
    return {
        field.name: f"{str(field).partition(': ')[2]}{helps.get(field.name, '')}"
        for field in options
    }


def _texts_below(kind: type[Any]) -> dict[str, str]:
    try:
        definition: Any = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    except (OSError, TypeError, SyntaxError):
        return {}
    fields = [
        (statement, text)
        for statement, text in pairwise(definition.body)
        if isinstance(statement, ast.AnnAssign) and isinstance(text, ast.Expr)
    ]
    return {
        ast.unparse(field.target): f". {' '.join(ast.literal_eval(text.value).split())}"
        for field, text in fields
    }


def _entries(registry: Registry[Any], plugin: PluginInfo) -> dict[str, str]:
    replaced = {
        e.key: f" (in place of that of {e.replaced.owner})"
        for e in registry.entries()
        if e.replaced
    }
    return {
        e.key: f"{e.shown}{replaced.get(e.key, '')}"
        for e in registry.entries()
        if e.owner is plugin
    }


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return "\n".join(f"{key}: {_text(item)}" for key, item in value.items())
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)
