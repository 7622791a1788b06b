"""`toolkit` itself: the group of commands, and what becomes of errors."""

from __future__ import annotations

import os
import re
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, TextIO

import typer
from toolkit_lm import __version__
from toolkit_lm.config import PluginsConfig, VllmConfig
from toolkit_lm.errors import ConfigError, ToolkitError, nearest
from toolkit_lm.plugin import Plugins, way_to_get
from toolkit_lm_commands.options import in_flags
from toolkit_lm_commands.registry import CommandRegistry, FlagNamesRegistry
from typer.core import TyperCommand, TyperGroup
from typer.exceptions import TyperException

from toolkit_lm_cli import hookspecs
from toolkit_lm_cli.help_page import Row, asked_section, help_page, section_page
from toolkit_lm_cli.prescan import plugins_config

_NAME = "cli"
"""Name of this plugin."""
_OPTION = re.compile(r"(^|\beither |\bor )option '([a-z][a-z_]*)'")
_COMPLETING = "_TOOLKIT_COMPLETE"
"""Variable by which a shell asks for completions."""


class SectionedCommand(TyperCommand):
    """A command with `--help=SECTION`."""

    folded: Sequence[str] = ()
    """Sections of which `--help` shows the flags' names alone."""
    first: Sequence[str] = ()
    """Flags that `--help` explains first."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        _show_section(self, ctx, args)
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(help_page(self, ctx, self.folded, first=self.first))


@contextmanager
def _as_toolkit_errors() -> Iterator[None]:
    """Makes Typer's errors of usage errors as all others are: a message, and what to read."""
    try:
        yield
    except TyperException as error:
        text = error.format_message().rstrip(".")
        message = f"{text[:1].lower()}{text[1:]}."
        if (ctx := getattr(error, "ctx", None)) is not None:
            message += f" See `{ctx.command_path} --help`."
        raise (ConfigError if error.exit_code == 2 else ToolkitError)(message) from error


class LazyGroup(TyperGroup):
    """Lists the commands that plugins register below `path`, and imports one when it is invoked.
    `toolkit` itself has no path."""

    def __init__(self, *, path: str = "", **attrs: Any) -> None:
        super().__init__(**attrs)
        self.path = path

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        with _as_toolkit_errors():
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: Any) -> Any:
        with _as_toolkit_errors():
            return super().invoke(ctx)

    def list_commands(self, ctx: Any) -> list[str]:
        return list(_commands(ctx).children(self.path))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        _show_section(self, ctx, args[:1])
        if not args and not ctx.resilient_parsing:
            typer.echo(ctx.get_help())
            ctx.exit(2)
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        commands = [Row(word, text) for word, text in _commands(ctx).children(self.path).items()]
        formatter.write(help_page(self, ctx, commands=commands))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A stand-in with the command's name and help, for listings."""
        children = _commands(ctx).children(self.path)
        return TyperCommand(cmd_name, help=children[cmd_name]) if cmd_name in children else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        commands = _commands(ctx)
        word = args[0]
        children = commands.children(self.path)
        name = f"{self.path} {word}".strip()
        if word not in children:
            if ctx.resilient_parsing:
                # A shell asks for completions of it: there are none.
                return None, None, []
            ctx.fail(
                f"No such command {word!r}. "
                f"{way_to_get(commands.noun, name) or nearest(word, children)}"
            )
        if name in commands:
            target = commands.load(name)
            if with_processors := getattr(target, "with_processors", None):
                target = with_processors(ctx.find_object(Plugins).logits_processors)
            command = _as_command(word, target)
            return (
                word,
                command,
                args[1:] if ctx.resilient_parsing else _in_our_names(ctx, command, args[1:]),
            )
        return word, LazyGroup(path=name, name=word), args[1:]


app = typer.Typer(cls=LazyGroup, pretty_exceptions_enable=False)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"toolkit-lm {__version__}")
        raise typer.Exit


@app.callback()
def toolkit(
    config: Annotated[
        str | None, typer.Option(metavar="FILE", help="YAML file of options.")
    ] = None,
    plugins: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Plugins to load, and no others. If one of them fails, the start fails.",
        ),
    ] = None,
    disable_plugins: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Plugins not to load.")
    ] = None,
    plugin_option: Annotated[
        list[str] | None, typer.Option(metavar="NAME.KEY=VALUE", help="An option of a plugin.")
    ] = None,
    traceback: Annotated[
        bool,
        typer.Option(
            "--traceback", help="Show the traceback of an error. May stand anywhere on the line."
        ),
    ] = False,
    version: Annotated[
        bool,
        typer.Option(
            "--version", "-V", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """LLM inference and serving. Options of engine, server and client may also come from
    TOOLKIT_LM_... variables or --config's file."""


def run(arguments: Sequence[str]) -> int:
    """Runs `toolkit` with these arguments, and returns the exit code.

    2: wrong usage or a wrong option; 130: interrupted; 1: any other error. An error is one message,
    without a traceback unless `--traceback` is among the arguments.
    """
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    arguments = [argument for argument in own if argument != "--traceback"] + list(
        arguments[len(own) :]
    )
    with warnings.catch_warnings():
        is_completing = _COMPLETING in os.environ
        warnings.showwarning = _show_warning
        if is_completing:
            # Completions that a shell requests while somebody types must not contain warnings.
            warnings.simplefilter("ignore")
        try:
            plugins = _load(plugins_config(arguments, os.environ))
            typer.main.get_command(app).main(arguments, prog_name="toolkit", obj=plugins)
        except SystemExit as done:
            return done.code if isinstance(done.code, int) else 0
        except ToolkitError as error:
            if is_completing:
                return 1
            if "--traceback" in own:
                traceback.print_exception(error)
            else:
                print(f"error: {_with_flags(str(error))}", file=sys.stderr)
            return 2 if isinstance(error, ConfigError) else 1
        except KeyboardInterrupt:
            return 130
    raise AssertionError("the command neither ended nor raised")


def _with_flags(message: str) -> str:
    """A message that names options of any plugin by their flags."""
    return _OPTION.sub(lambda found: f"{found[1]}--{found[2].replace('_', '-')}", message)


def _load(config: PluginsConfig) -> Plugins:
    """The plugins that are asked for. The hook for commands is there without this plugin, too:
    others bring commands."""
    is_left_out = _NAME in config.disable_plugins or (
        config.plugins is not None and _NAME not in config.plugins
    )
    return Plugins.load(config, [hookspecs] if is_left_out else [])


def _commands(ctx: Any) -> CommandRegistry:
    plugins = ctx.find_object(Plugins)
    assert plugins is not None, "the group is invoked with the loaded plugins as its object"
    commands: CommandRegistry = plugins.brought_registry(CommandRegistry)
    return commands


def _in_our_names(ctx: Any, command: Any, words: list[str]) -> list[str]:
    """The words after a command, with flags of ours in place of other projects'."""
    if isinstance(command, TyperGroup) or not any(word.startswith("-") for word in words):
        return words
    known = {
        flag
        for parameter in command.params
        for flag in (*parameter.opts, *parameter.secondary_opts)
    }
    plugins: Plugins = ctx.find_object(Plugins)
    return plugins.brought_registry(FlagNamesRegistry).translate(words, known)


def _as_command(name: str, target: Any) -> Any:
    if isinstance(target, typer.Typer):
        command = typer.main.get_command(target)
        command.name = name
        return command
    group = typer.Typer(add_completion=False)
    group.command(name, cls=SectionedCommand)(target)
    command = typer.main.get_command(group)
    if isinstance(command, SectionedCommand):
        command.folded = getattr(target, "folded_sections", ())
        command.first = getattr(target, "first_flags", ())
    return command


def _show_section(command: Any, ctx: Any, arguments: Sequence[str]) -> None:
    """Prints what `--help=SECTION` among the arguments asks for, and ends."""
    if not ctx.resilient_parsing and (asked := asked_section(arguments)) is not None:
        typer.echo(section_page(command, ctx, asked), nl=False)
        ctx.exit()


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    text = (
        in_flags(str(message), VllmConfig.options())
        if issubclass(category, UserWarning)
        else f"{category.__name__}: {message} ({filename}:{lineno})"
    )
    print(f"warning: {text}", file=file or sys.stderr)
