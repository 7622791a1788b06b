"""`engine_command`: makes a command of a function that takes configs. Every option's flag is
derived from where it is stated."""

from __future__ import annotations

import contextlib
import inspect
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, wraps
from typing import Annotated, Any, Protocol, Self, get_type_hints, runtime_checkable

import msgspec
import typer
from toolkit_lm.config import Option, VllmConfig, options_of
from toolkit_lm.errors import PluginError, ToolkitError
from toolkit_lm.plugin import LogitsProcessorRegistry, Plugins

from toolkit_lm_commands.completion import models, values_of
from toolkit_lm_commands.config_file import flag_value, merge_options
from toolkit_lm_commands.registry import CommandRegistry

Section = type[msgspec.Struct]
_Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

_NAME = re.compile(
    r"(?<![\w./'\"-])(?P<name>[a-z][a-z_]*)(?:=(?P<value>'[^']*'|\['[^]]*'\]|[\w]+))?(?![\w'=/-])"
)
"""An option's name as Python has it, with its value or without."""
_QUOTED = re.compile(r"\boption '(?P<name>[a-z_]+)'")


@runtime_checkable
class CommandFlags(Protocol):
    """Flags that depend on which logits processors are installed: a command that has an argument of
    a subclass gets them."""

    @classmethod
    def flags(cls, processors: LogitsProcessorRegistry) -> list[inspect.Parameter]:
        """The parameters of a Typer command, as `command_parameter` makes them."""

    @classmethod
    def parse(cls, values: Mapping[str, Any], processors: LogitsProcessorRegistry) -> Self:
        """The argument, from the flags that are given. Raises ConfigError."""


def engine_command(*extra_sections: Section, first: Sequence[str] = ()) -> _Decorator:
    """Makes a Typer command of a function. What the function asks for by type is made from flags,
    environment and config file:

    - `VllmConfig`: the whole config, with MODEL as an optional argument and a flag for each other
      option;
    - any of `extra_sections` (frozen structs whose fields are stated with `option(...)`, of core or
      the plugin's own);
    - a subclass of `CommandFlags`: what it makes of its flags;
    - `Plugins`: the loaded plugins;
    - `typer.Context`, and any parameter that Typer itself understands, as it is.

    `first`: options that `--help` explains; of the others of `extra_sections` it then has names.

    Precedence: flag, then TOOLKIT_LM_... variable, then the file of `--config`, then default. Its
    attribute `with_processors`, which `toolkit` runs, has flags for logits processors besides.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        hints = get_type_hints(function, include_extras=True)
        wanted = {name: hints[name] for name in inspect.signature(function).parameters}
        sections = [kind for kind in wanted.values() if kind in extra_sections]
        options = VllmConfig.options() + [
            o for kind in sections if kind not in _core_sections() for o in options_of(kind)
        ]

        def with_processors(processors: LogitsProcessorRegistry) -> Callable[..., Any]:
            flags = {
                kind: kind.flags(processors)
                for kind in wanted.values()
                if isinstance(kind, type) and issubclass(kind, CommandFlags)
            }

            @_told_in_flags(options)
            def command(ctx: typer.Context, **values: Any) -> Any:
                made = _made(ctx, options, sections, values)
                made |= {
                    kind: kind.parse(_present(values, [option.name for option in own]), processors)
                    for kind, own in flags.items()
                }
                return function(
                    **{
                        name: made[kind] if kind in made else values[name]
                        for name, kind in wanted.items()
                    }
                )

            _disguise(
                command,
                function,
                list(_parameters(function, wanted, sections, flags)),
                [o.name for o in options],
            )
            _tell_help(command, sections, options, first)
            vars(command)["with_processors"] = with_processors
            return command

        return with_processors(LogitsProcessorRegistry())

    return decorate


def _tell_help(
    command: Callable[..., Any],
    sections: Sequence[Section],
    options: Sequence[Option],
    first: Sequence[str],
) -> None:
    """Tells what `--help` shows of a command: the flags that come first, and folded sections."""
    flags = {option.name: option.flag for option in options}
    folded = [*_core_sections(), *(sections if first else ())]
    vars(command)["folded_sections"] = ("Sampling", *map(_title, folded))
    vars(command)["first_flags"] = [flags[name] for name in first]


def _told_in_flags(
    options: Sequence[Option],
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes the errors of a command name options by their flags."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(command)
        def run(*arguments: Any, **values: Any) -> Any:
            try:
                return command(*arguments, **values)
            except ToolkitError as error:
                error.args = (in_flags(str(error), options), *error.args[1:])
                raise

        return run

    return decorate


def in_flags(message: str, options: Iterable[Option]) -> str:
    """A message for the command line: it names options by their flags, not as Python does.

    `name=value` becomes `--name value`, `name=['a', 'b']` `--name a,b`, and `name=False` of a
    switch `--no-name`. A name alone is
    replaced where it has an underscore or begins the message: others may be plain words.
    `option 'name'` becomes `--name`.
    """
    if message.startswith(("config file ", "environment variable ")):
        return message
    known = {o.name: o for o in options}

    def named(match: re.Match[str]) -> str:
        return known[match["name"]].flag if match["name"] in known else match[0]

    message = _QUOTED.sub(named, message)

    def flag(match: re.Match[str]) -> str:
        name = match["name"]
        value = match["value"]
        if name not in known or not (value or "_" in name or match.start() == 0):
            return match[0]
        o = known[name]
        if o.is_flag and value in ("True", "False"):
            return o.flag if value == "True" else f"--no-{o.flag[2:]}"
        return o.flag if value is None else f"{o.flag} {_unquoted(value)}"

    return _NAME.sub(flag, message)


def _unquoted(value: str) -> str:
    """A text or a list of texts of Python, as a flag takes it: words with commas between."""
    return value.strip("[]'").replace("', '", ",")


def _made(
    ctx: typer.Context, options: list[Option], sections: list[Section], values: dict[str, Any]
) -> dict[Any, Any]:
    """Arguments a function can ask for, by type, except those made of its own flags. Raises
    ConfigError."""
    plugins: Plugins = ctx.obj
    merged = _merged(options, _command_line_values(ctx, options, values), plugins)

    def chosen(options: Iterable[Option]) -> dict[str, Any]:
        return {option.name: merged[option.name] for option in options if option.name in merged}

    config = VllmConfig.make(**chosen(VllmConfig.options()))
    if config.plugins != plugins.config:
        plugins = Plugins.load(config.plugins)
    made: dict[Any, Any] = {VllmConfig: config, Plugins: plugins, typer.Context: ctx}
    return made | {kind: kind(**chosen(options_of(kind))) for kind in sections}


def _merged(options: list[Option], values: dict[str, Any], plugins: Plugins) -> dict[str, Any]:
    """The options of all sources, by name. Raises ConfigError."""
    return merge_options(
        options,
        values,
        environ=os.environ,
        file=values.pop("config", None),
        foreign=_ForeignNames(plugins),
        translate=plugins.option_names.translate,
    )


def _parameters(
    function: Callable[..., Any],
    wanted: Mapping[str, Any],
    sections: list[Section],
    flags: Mapping[Any, list[inspect.Parameter]],
) -> Iterator[inspect.Parameter]:
    yield command_parameter("ctx", typer.Context, inspect.Parameter.empty)
    if VllmConfig in wanted.values():
        model, *_ = options_of(_core_sections()[0])
        argument = typer.Argument(metavar="MODEL", help=flag_help(model), autocompletion=models)
        yield command_parameter("model", Annotated[str | None, argument])
        sections = [*sections, *_core_sections()]
    own = inspect.signature(function).parameters.values()
    made = {VllmConfig, Plugins, typer.Context, *flags, *sections}
    yield from (
        p.replace(annotation=wanted[p.name], kind=p.KEYWORD_ONLY)
        for p in own
        if wanted[p.name] not in made
    )
    taken = {o.name for o in VllmConfig.options()} if VllmConfig in wanted.values() else set()
    yield from (
        parameter
        for parameters in flags.values()
        for parameter in parameters
        if parameter.name not in taken
    )
    yield command_parameter(
        "config",
        Annotated[
            str | None, typer.Option("--config", metavar="FILE", help="YAML file of options.")
        ],
    )
    for section in sections:
        yield from (_flag(o, _title(section)) for o in options_of(section) if o.name != "model")


def command_parameter(name: str, annotation: Any, default: Any = None) -> inspect.Parameter:
    """A parameter of a Typer command."""
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


def _flag(o: Option, panel: str) -> inspect.Parameter:
    # The type is text for all but switches: `Option.convert` checks values, whichever source they
    # come from.
    if o.is_flag:
        flag = typer.Option(f"{o.flag}/--no-{o.flag[2:]}", help=flag_help(o), rich_help_panel=panel)
        return command_parameter(o.name, Annotated[bool | None, flag])
    flag = typer.Option(
        o.flag,
        metavar=_metavar(o),
        help=flag_help(o),
        rich_help_panel=panel,
        autocompletion=values_of(o),
    )
    return command_parameter(
        o.name, Annotated[list[str] | None if o.is_list or o.is_mapping else str | None, flag]
    )


def flag_help(o: Option) -> str:
    """The help text with bounds and default."""
    default = o.default
    none = o.spec.none
    bounds = o.spec.range
    shown = "" if default in ("", [], {}) else default
    if default is None:
        shown = none
    if isinstance(shown, bool):
        shown = ("off", "on")[shown] if o.is_flag else str(shown).lower()
    parts = [
        o.help,
        "May be given several times." if o.is_list or o.is_mapping else "",
        f"{bounds[0].upper()}{bounds[1:]}." if bounds else "",
        f"none: {none}." if none and default is not None else "",
        f"Default: {shown}." if shown != "" else "",
    ]
    return " ".join(part for part in parts if part)


def _metavar(o: Option) -> str:
    if o.is_mapping:
        return "NAME.KEY=VALUE"
    if o.choices:
        return "|".join(o.choices)
    if o.is_list:
        return "NAME"
    if int in o.kinds:
        return "INTEGER"
    return "NUMBER" if float in o.kinds else "TEXT"


def _title(section: Section) -> str:
    return re.sub("(Config|Options)$", "", section.__name__) or section.__name__


def _core_sections() -> list[Section]:
    factories = (field.default_factory for field in msgspec.structs.fields(VllmConfig))
    return [
        kind for kind in factories if isinstance(kind, type) and issubclass(kind, msgspec.Struct)
    ]


def _command_line_values(
    ctx: typer.Context, options: Iterable[Option], values: Mapping[str, Any]
) -> dict[str, Any]:
    """Options on the command line, after the command or before it."""
    present = {}
    for source in (ctx.find_root().params, values):
        for o in options:
            if o.name in _present(source, [o.name]):
                value = source[o.name]
                present[o.name] = flag_value(o, value) if isinstance(value, list | tuple) else value
        present |= _present(source, ["config"])
    return present


def _present(values: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: values[name] for name in names if values.get(name) not in (None, [], ())}


class _ForeignNames:
    """Names of other commands' options. The modules of all commands, some of which need torch, are
    imported at the first question."""

    def __init__(self, plugins: Plugins) -> None:
        self._plugins = plugins

    @cached_property
    def _names(self) -> set[str]:
        names: set[str] = set()
        commands = self._plugins.brought_registry(CommandRegistry)
        for command in commands:
            # A command that cannot be imported is an error when it is invoked, not when another one
            # is.
            with contextlib.suppress(PluginError):
                names.update(getattr(commands.load(command), "option_names", ()))
        return names

    def __contains__(self, name: object) -> bool:
        return name in self._names


def _disguise(
    command: Any,
    function: Callable[..., Any],
    parameters: list[inspect.Parameter],
    option_names: list[str],
) -> None:
    command.__name__ = function.__name__
    command.__doc__ = function.__doc__
    command.__module__ = function.__module__
    command.__signature__ = inspect.Signature(parameters)
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.option_names = tuple(option_names)
