"""Flags for sampling parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from toolkit_lm.errors import ConfigError, RequestError, nearest
from toolkit_lm.param_spec import spec_of
from toolkit_lm.params import SAMPLING_PARAMS, SamplingParams

FLAGS = {name: o for name, o in SAMPLING_PARAMS.items() if spec_of(o).flag}
"""The parameters that have a flag."""


class SamplingFlags(dict[str, Any]):
    """The sampling parameters given on the command line; a command that has an argument of this type gets a flag for each parameter."""

    def params(self, overrides: Mapping[str, Any] | None = None, **defaults: Any) -> SamplingParams:
        """`overrides` over the given flags over `defaults`. Raises RequestError for an unknown name or a value out of range."""
        merged = {**defaults, **self, **(overrides or {})}
        for name in merged:
            if name not in SAMPLING_PARAMS:
                raise RequestError(f"unknown sampling parameter {name!r}. {nearest(name, SAMPLING_PARAMS)}", name)
        try:
            return msgspec.convert(merged, SamplingParams, str_keys=True)
        except msgspec.ValidationError as error:
            if isinstance(error.__cause__, RequestError):
                raise error.__cause__ from None
            raise RequestError(f"wrong sampling parameters: {error}") from None


def parse_flags(values: Mapping[str, Any]) -> SamplingFlags:
    """SamplingFlags from texts, as flags carry them. Raises ConfigError."""
    flags = SamplingFlags()
    for name, value in values.items():
        wanted = None if value == "none" else value
        try:
            flags[name] = msgspec.convert(wanted, FLAGS[name].type, strict=False)
        except msgspec.ValidationError as error:
            raise ConfigError(f"option {FLAGS[name].flag!r}: {value!r} is not a value for it: {error}") from None
    try:
        flags.params()
    except RequestError as error:
        raise ConfigError(f"option '--{(error.param or '').replace('_', '-')}': {error}") from None
    return flags
