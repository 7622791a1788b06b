"""Reading values from a checkpoint's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar, cast, overload

from toolkit_lm.errors import CheckpointError, nearest

T = TypeVar("T")
_HUGE = 10.0**300
"""Bound of the numbers in a config."""


class HFConfig:
    """A checkpoint's config.json, with checked access:
    `HFConfig(vllm_config.hf_config).require("hidden_size", int)`.

    Raises CheckpointError, which names the key.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    def require(self, key: str, kind: type[T]) -> T:
        """Returns the value of `key`, which must be present and of type `kind`."""
        value = self.get(key, kind)
        if value is None:
            raise CheckpointError(
                f"config.json has no {key!r}, which this model needs. {nearest(key, self.values)}"
            )
        return value

    @overload
    def get(self, key: str, kind: type[T]) -> T | None: ...
    @overload
    def get(self, key: str, kind: type[T], default: T) -> T: ...
    def get(self, key: str, kind: type[T], default: T | None = None) -> T | None:
        """Returns the value of `key`, of type `kind`; `default` if it is missing or null."""
        value = self.values.get(key)
        if value is None:
            return default
        if kind is float and type(value) is int and abs(value) < _HUGE:
            return cast(T, float(value))
        is_nan_or_inf = isinstance(value, float) and not -_HUGE < value < _HUGE
        if (
            not isinstance(value, kind)
            or (isinstance(value, bool) and kind is not bool)
            or is_nan_or_inf
        ):
            raise CheckpointError(
                f"config.json: {key!r} must be of type {kind.__name__}, not {value!r}."
            )
        return value
