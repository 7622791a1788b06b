"""One option of vLLM: its name, and the treatment of its values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from toolkit_lm.errors import ConfigError

from toolkit_lm_vllm_names import values

Kind = Literal["same", "renamed", "free", "refused"]
"""same: as here. renamed: another option here. free: any value is taken, for it changes nothing.
refused: only what asks for nothing."""
Convert = Callable[[Any], dict[str, Any]]
"""From vLLM's value to options in our names. It raises ValueError, with what to use, for a value
that cannot be had."""


class Name(NamedTuple):
    """One option of vLLM."""

    name: str
    kind: Kind
    ours: str = ""
    """The option here; empty: there is none."""
    note: str = ""
    """Treatment of its values; for a refused option, its replacement."""
    convert: Convert | None = None
    is_switch: bool = False
    """Whether the flag takes no value."""
    neutral: tuple[Any, ...] = ()
    """Values that ask for nothing, in addition to those of `values.asks_nothing`."""
    of_server: bool = False
    """Whether only `vllm serve` has the option."""
    ignored: Callable[[Any], list[str]] | None = None
    """Returns a sentence for each part of a value that has no effect."""

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    def translate(self, value: Any) -> dict[str, Any]:
        """Options in our names. Raises ConfigError for what cannot be had."""
        if value is None or self.kind == "free":
            return {}
        try:
            if self.convert is not None:
                return self.convert(value)
            if self.kind != "refused":
                return {self.ours: value}
            if values.asks_nothing(value, self.neutral):
                return {}
            raise ValueError(self.note)
        except ValueError as error:
            raise ConfigError(
                f"vLLM's {self.name!r} cannot be {values.shown(value)} here: {error}"
            ) from None

    def without_effect(self, value: Any) -> list[str]:
        """Reasons why parts of a value have no effect here: a sentence for each."""
        if value is None or (self.kind == "free" and values.asks_nothing(value)):
            return []
        if self.ignored is not None:
            return self.ignored(value)
        return [f"{self.name} has no effect: {self.note}"] if self.kind == "free" else []


def same(*names: str, **traits: Any) -> list[Name]:
    return [Name(name, "same", name, **traits) for name in names]


def free(note: str, *names: str, **traits: Any) -> list[Name]:
    return [Name(name, "free", note=note, **traits) for name in names]


def refused(note: str, *names: str, **traits: Any) -> list[Name]:
    return [Name(name, "refused", note=note, **traits) for name in names]


def renamed(
    name: str, ours: str, convert: Convert | None = None, note: str = "", **traits: Any
) -> list[Name]:
    return [Name(name, "renamed", ours, note, convert, **traits)]
