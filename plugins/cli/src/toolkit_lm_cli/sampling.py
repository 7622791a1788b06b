"""Flags for sampling parameters."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Annotated, Any, Self, get_args

import msgspec
import typer
from toolkit_lm.config import Option
from toolkit_lm.errors import ConfigError, RequestError, in_plain_words, nearest
from toolkit_lm.param_spec import spec_of
from toolkit_lm.params import SAMPLING_PARAMS, SamplingParams
from toolkit_lm.plugin import LogitsProcessorRegistry
from toolkit_lm_commands.options import CommandFlags, command_parameter, flag_help, in_flags


def sampling_flags(processors: LogitsProcessorRegistry) -> dict[str, Option]:
    """The parameters that have a flag, those of plugins' logits processors among them."""
    return {name: o for name, o in (SAMPLING_PARAMS | processors.params).items() if spec_of(o).flag}


class SamplingFlags(CommandFlags, dict[str, Any]):
    """The sampling parameters given on the command line; a command that has an argument of this
    type gets a flag for each parameter."""

    def __init__(self, processors: LogitsProcessorRegistry) -> None:
        super().__init__()
        self._processors = processors

    @classmethod
    def flags(cls, processors: LogitsProcessorRegistry) -> list[inspect.Parameter]:
        return [_flag(o) for o in sampling_flags(processors).values()]

    @classmethod
    def parse(cls, values: Mapping[str, Any], processors: LogitsProcessorRegistry) -> Self:
        flags = cls(processors)
        known = sampling_flags(processors)
        for name, text in values.items():
            o = known[name]
            try:
                flags[name] = msgspec.convert(
                    None if text == "none" else text, o.type, strict=False
                )
            except msgspec.ValidationError as error:
                wrong = in_plain_words(error, o.flag, text)
                raise ConfigError(f"{wrong} {o.help}") from None
        try:
            flags.params()
        except RequestError as error:
            raise ConfigError(in_flags(str(error), known.values())) from None
        return flags

    def updated(self, values: Mapping[str, str | None]) -> SamplingFlags:
        """With other values, as a flag would give them; None takes one away. Raises ConfigError,
        also for an unknown name."""
        known = sampling_flags(self._processors)
        if wrong := [name for name in values if name not in known]:
            raise ConfigError(
                f"there is no sampling parameter {wrong[0]!r}. {nearest(wrong[0], known)}"
            )
        flags = {
            name: [text] if known[name].is_list else text
            for name, text in values.items()
            if text is not None
        }
        made = SamplingFlags(self._processors)
        made.update(
            {name: value for name, value in self.items() if name not in values}
            | self.parse(flags, self._processors)
        )
        made.params()
        return made

    def params(self, overrides: Mapping[str, Any] | None = None, **defaults: Any) -> SamplingParams:
        """`overrides` over the given flags over `defaults`. Raises RequestError for an unknown name
        or a value out of range."""
        flags = {**self, **(overrides or {})}
        if flags.get("use_beam_search"):
            defaults = {
                name: value
                for name, value in defaults.items()
                if spec_of(SAMPLING_PARAMS[name]).use != "draws"
            }
        merged = {**defaults, **flags}
        extra = {name: merged.pop(name) for name in list(merged) if name not in SAMPLING_PARAMS}
        self._processors.parse(extra)
        try:
            return msgspec.convert(
                merged | ({"extra_args": extra} if extra else {}), SamplingParams, str_keys=True
            )
        except msgspec.ValidationError as error:
            if isinstance(error.__cause__, RequestError):
                raise error.__cause__ from None
            raise RequestError(in_plain_words(error, "sampling parameters", merged)) from None


def _flag(o: Option) -> inspect.Parameter:
    if o.is_flag:
        return command_parameter(
            o.name,
            Annotated[bool | None, typer.Option(o.flag, help=o.help, rich_help_panel="Sampling")],
        )
    flag = typer.Option(o.flag, metavar=_metavar(o), help=flag_help(o), rich_help_panel="Sampling")
    return command_parameter(o.name, Annotated[list[str] | None if o.is_list else str | None, flag])


def _metavar(o: Option) -> str:
    if bool in o.kinds:
        return "|".join(
            ["true", "false", *(choice for kind in o.kinds for choice in get_args(kind))]
        )
    if float in o.kinds:
        return "NUMBER"
    return "INTEGER" if int in o.kinds or list[int] in o.kinds else "TEXT"
