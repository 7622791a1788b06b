"""`toolkit` itself: the group of commands, and what becomes of errors."""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import Annotated, Any, TextIO

import typer
from toolkit_lm import __version__
from toolkit_lm.config import PluginsConfig
from toolkit_lm.errors import ConfigError, ToolkitError, nearest
from toolkit_lm.plugin import Plugins
from typer.core import TyperCommand, TyperGroup

from toolkit_lm_cli import hookspecs
from toolkit_lm_cli.prescan import plugins_config
from toolkit_lm_cli.registry import CommandRegistry

_NAME = "cli"
"""Of this plugin."""


class LazyGroup(TyperGroup):
    """Lists the commands that plugins register below `path`, and imports one when it is invoked. `toolkit` itself has no path."""

    def __init__(self, *, path: str = "", **attrs: Any) -> None:
        super().__init__(**attrs)
        self.path = path

    def list_commands(self, ctx: Any) -> list[str]:
        return list(_commands(ctx).children(self.path))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A stand-in with the command's name and help, for listings."""
        children = _commands(ctx).children(self.path)
        return TyperCommand(cmd_name, help=children[cmd_name]) if cmd_name in children else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        commands, word = _commands(ctx), args[0]
        children = commands.children(self.path)
        if word not in children:
            ctx.fail(f"No such command {word!r}. {nearest(word, children)}")
        name = f"{self.path} {word}".strip()
        if name in commands:
            target = commands.load(name)
            if with_processors := getattr(target, "with_processors", None):
                target = with_processors(ctx.find_object(Plugins).logits_processors)
            return word, _as_command(word, target), args[1:]
        return word, LazyGroup(path=name, name=word, no_args_is_help=True), args[1:]


app = typer.Typer(cls=LazyGroup, no_args_is_help=True, pretty_exceptions_enable=False)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"toolkit-lm {__version__}")
        raise typer.Exit


@app.callback()
def toolkit(
    config: Annotated[str | None, typer.Option(metavar="FILE", help="YAML file of options.")] = None,
    plugins: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Plugins to load, and no others. If one of them fails, the start fails.")
    ] = None,
    disable_plugins: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Plugins not to load.")] = None,
    plugin_option: Annotated[list[str] | None, typer.Option(metavar="NAME.KEY=VALUE", help="An option of a plugin.")] = None,
    traceback: Annotated[bool, typer.Option("--traceback", help="Show the traceback of an error. May stand anywhere on the line.")] = False,
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """LLM inference and serving. Options of engine, server and client may also come from TOOLKIT_LM_... variables or --config's file."""


def main() -> None:
    """The command `toolkit`."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Runs `toolkit` with these arguments, and returns the exit code.

    2: wrong usage or a wrong option; 130: interrupted; 1: any other error. An error is one message, without a traceback unless
    `--traceback` is among the arguments.
    """
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    arguments = [argument for argument in own if argument != "--traceback"] + list(arguments[len(own) :])
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        try:
            plugins = _load(plugins_config(arguments, os.environ))
            typer.main.get_command(app).main(arguments, prog_name="toolkit", obj=plugins)
        except SystemExit as done:
            return done.code if isinstance(done.code, int) else 0
        except ToolkitError as error:
            if "--traceback" in own:
                traceback.print_exception(error)
            else:
                print(f"error: {error}", file=sys.stderr)
            return 2 if isinstance(error, ConfigError) else 1
        except KeyboardInterrupt:
            return 130
    raise AssertionError("the command neither ended nor raised")


def _load(config: PluginsConfig) -> Plugins:
    """The plugins that are asked for. The hook for commands is there without this plugin, too: others bring commands."""
    is_left_out = _NAME in config.disable_plugins or (config.plugins is not None and _NAME not in config.plugins)
    return Plugins.load(config, [hookspecs] if is_left_out else [])


def _commands(ctx: Any) -> CommandRegistry:
    plugins = ctx.find_object(Plugins)
    assert plugins is not None, "the group is invoked with the loaded plugins as its object"
    commands: CommandRegistry = plugins.brought_registry(CommandRegistry)
    return commands


def _as_command(name: str, target: Any) -> Any:
    if isinstance(target, typer.Typer):
        command = typer.main.get_command(target)
        command.name = name
        return command
    one = typer.Typer(add_completion=False)
    one.command(name)(target)
    return typer.main.get_command(one)


def _show_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, file: TextIO | None = None, line: str | None = None
) -> None:
    text = str(message) if issubclass(category, UserWarning) else f"{category.__name__}: {message} ({filename}:{lineno})"
    print(f"warning: {text}", file=file or sys.stderr)
