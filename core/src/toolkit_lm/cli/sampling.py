"""Flags for sampling parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from toolkit_lm.config import Option
from toolkit_lm.errors import ConfigError, RequestError
from toolkit_lm.param_spec import spec_of
from toolkit_lm.params import SAMPLING_PARAMS, SamplingParams
from toolkit_lm.plugin import LogitsProcessorRegistry


def sampling_flags(processors: LogitsProcessorRegistry) -> dict[str, Option]:
    """The parameters that have a flag, those of plugins' logits processors among them."""
    return {name: o for name, o in (SAMPLING_PARAMS | processors.params).items() if spec_of(o).flag}


class SamplingFlags(dict[str, Any]):
    """The sampling parameters given on the command line; a command that has an argument of this type gets a flag for each parameter."""

    def __init__(self, processors: LogitsProcessorRegistry) -> None:
        super().__init__()
        self._processors = processors

    def params(self, overrides: Mapping[str, Any] | None = None, **defaults: Any) -> SamplingParams:
        """`overrides` over the given flags over `defaults`. Raises RequestError for an unknown name or a value out of range."""
        merged = {**defaults, **self, **(overrides or {})}
        extra = {name: merged.pop(name) for name in list(merged) if name not in SAMPLING_PARAMS}
        self._processors.parse(extra)
        try:
            return msgspec.convert(merged | ({"extra_args": extra} if extra else {}), SamplingParams, str_keys=True)
        except msgspec.ValidationError as error:
            if isinstance(error.__cause__, RequestError):
                raise error.__cause__ from None
            raise RequestError(f"wrong sampling parameters: {error}") from None


def parse_flags(values: Mapping[str, Any], processors: LogitsProcessorRegistry) -> SamplingFlags:
    """SamplingFlags from texts, as flags carry them. Raises ConfigError."""
    known, flags = sampling_flags(processors), SamplingFlags(processors)
    for name, o in known.items():
        if name in values:
            value = None if values[name] == "none" else values[name]
            try:
                flags[name] = msgspec.convert(value, o.type, strict=False)
            except msgspec.ValidationError as error:
                raise ConfigError(f"option {o.flag!r}: {values[name]!r} is not a value for it: {error}") from None
    try:
        flags.params()
    except RequestError as error:
        raise ConfigError(f"option '--{(error.param or '').replace('_', '-')}': {error}") from None
    return flags
