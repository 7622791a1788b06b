"""Statement of options, and lookup of their values: flag or keyword, then environment, then
default.

An option is a field of a frozen `msgspec.Struct` section, annotated with `option(help, ...)`:

    class CacheConfig(Struct, frozen=True):
        block_size: Annotated[int, option("Tokens per KV cache block.", ge=1)] = 16

Its flag (`--block-size`), environment variable (`TOOLKIT_LM_BLOCK_SIZE`), key in the command line's
file (`block_size`) and Python keyword are derived from the field's name, so names are unique over
all sections.
"""

from __future__ import annotations

import difflib
import re
import types
import warnings
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

import msgspec

from toolkit_lm.errors import ConfigError, in_plain_words, nearest

ENV_PREFIX = "TOOLKIT_LM_"
"""Prefix of options' environment variables."""
_SECRETS = ("launch_key",)
"""Variables that are not options: a secret has no flag."""


@dataclass(frozen=True, slots=True)
class OptionSpec:
    """Statement of an option in a field's `Annotated[...]`: help text, and bounds of a number. `gt`
    is exclusive, `ge` and `le` are inclusive."""

    help: str
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    none: str = ""
    """Meaning of None, for the help text."""
    is_json: bool = False
    """The value is a text in JSON, which may also be given as a mapping."""

    def admits(self, value: float) -> bool:
        """Whether a number is within the bounds."""
        # Written so that NaN, which is never in a range, is refused.
        return (
            (self.ge is None or value >= self.ge)
            and (self.gt is None or value > self.gt)
            and (self.le is None or value <= self.le)
        )

    @property
    def range(self) -> str:
        """The bounds, as the end of "it must be ..."."""
        if self.ge is not None and self.le is not None:
            return f"between {self.ge} and {self.le}"
        bounds = [(self.ge, "at least"), (self.gt, "above"), (self.le, "at most")]
        return " and ".join(f"{word} {bound}" for bound, word in bounds if bound is not None)


def option(
    help: str,
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    none: str = "",
    is_json: bool = False,
) -> OptionSpec:
    """States an option: its help text, the bounds of a number, the meaning of None, and whether a
    mapping may replace its text."""
    return OptionSpec(help, ge, gt, le, none, is_json)


class Option(NamedTuple):
    """One option as stated in a section."""

    name: str
    type: Any
    """The annotated type. `msgspec.convert(value, option.type, strict=False)` checks a value."""
    default: Any
    spec: OptionSpec

    @property
    def help(self) -> str:
        return self.spec.help

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def env(self) -> str:
        return ENV_PREFIX + self.name.upper()

    @property
    def choices(self) -> tuple[str, ...]:
        """The allowed values of a `Literal` option, otherwise ()."""
        return tuple(
            choice
            for arm in self.kinds
            if str(get_origin(arm)) == "typing.Literal"
            for choice in get_args(arm)
        )

    @property
    def kinds(self) -> tuple[Any, ...]:
        """The types of values: (int, NoneType) for `int | None`."""
        bare = get_args(self.type)[0]
        return (
            get_args(bare)
            if get_origin(bare) is types.UnionType or str(get_origin(bare)) == "typing.Union"
            else (bare,)
        )

    @property
    def is_flag(self) -> bool:
        """Whether the option is a switch: its flag takes no value, and has a form with --no-."""
        return bool in self.kinds and {*self.kinds} <= {bool, types.NoneType}

    @property
    def is_list(self) -> bool:
        """Whether the flag may be given several times."""
        return any(get_origin(arm) is list for arm in self.kinds)

    @property
    def is_mapping(self) -> bool:
        """Whether the option has the form NAME.KEY=VALUE, and its flag may be given several
        times."""
        return any(get_origin(arm) is dict for arm in self.kinds)

    def convert(self, value: Any, source: str) -> Any:
        """`value` as this option's type. Raises ConfigError.

        `source`: the option's name as the user wrote it, with the file or variable it came from.
        """
        try:
            if (
                isinstance(value, int | float)
                and not isinstance(value, bool)
                and {int, float, str} & {*self.kinds} == {str}
            ):
                # YAML and Python parse as a number what a flag gives as text ("0.5").
                value = str(value)
            if self.spec.is_json and isinstance(value, Mapping):
                value = msgspec.json.encode(dict(value)).decode()
            if isinstance(value, str) or (self.is_mapping and isinstance(value, list)):
                value = self._from_text(value)
            value = msgspec.convert(value, self.type, strict=False)
        except (msgspec.ValidationError, ValueError) as error:
            wrong = in_plain_words(error, source, value)
            if self.choices:
                hint = nearest(str(value), self.choices, otherwise="")
                wrong = f"{source} must be one of {', '.join(self.choices)}, not {value!r}. {hint}"
            raise ConfigError(f"{wrong.strip()} {self.help}") from None
        if value is not None and not self.spec.admits(value):
            raise ConfigError(f"{source} must be {self.spec.range}, not {value!r}. {self.help}")
        return value

    def _from_text(self, value: str | list[str]) -> Any:
        # Flags and the environment carry text only: a list is comma-separated, and "none" is None
        # if None is allowed.
        if self.is_mapping:
            # A comma ends an item only if another item begins after it: values may contain commas.
            return _nested(
                re.split(r",(?=\s*[^.=,\s]+\.[^=,\s]+=)", value)
                if isinstance(value, str)
                else value
            )
        assert isinstance(value, str)
        if types.NoneType in self.kinds and value.lower() == "none":
            return None
        if self.is_list:
            return [item.strip() for item in value.split(",") if item.strip()]
        for arm in self.kinds:
            if arm in (int, float, bool):
                try:
                    return msgspec.convert(value, arm, strict=False)
                except msgspec.ValidationError:
                    continue
        return value


def _nested(items: list[str]) -> dict[str, dict[str, str]]:
    """["a.b=c"] -> {"a": {"b": "c"}}."""
    nested: dict[str, dict[str, str]] = {}
    for item in items:
        match = re.fullmatch(r"\s*([^.=\s]+)\.([^=\s]+)=(.*)", str(item), re.DOTALL)
        if match is None:
            raise ValueError(f"write NAME.KEY=VALUE, not {item!r}")
        name, key, value = match.groups()
        nested.setdefault(name, {})[key.replace("-", "_")] = value
    return nested


@cache
def options_of(section: type[msgspec.Struct]) -> Sequence[Option]:
    """The options that a section states, in order. Fields without `option(...)` are derived values,
    not options."""
    hints = get_type_hints(section, include_extras=True)
    found = []
    for field in msgspec.structs.fields(section):
        hint = hints[field.name]
        if get_origin(hint) is not Annotated:
            continue
        (spec,) = (m for m in get_args(hint)[1:] if isinstance(m, OptionSpec))
        default = (
            field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
        )
        found.append(Option(field.name, hint, default, spec))
    return tuple(found)


def load_options(
    options: Sequence[Option],
    overrides: Mapping[str, Any],
    *,
    environ: Mapping[str, str] | None = None,
    foreign: Container[str] = (),
    named: Callable[[Option], str] = attrgetter("name"),
) -> dict[str, Any]:
    """Merges the sources of options: `overrides` (flags or keywords) over `environ`. Defaults are
    left to the sections.

    `foreign` names options of other commands, which a shared environment may also hold; only
    misspellings are compared with it. Raises ConfigError for an unknown key in `overrides`. An
    unknown `TOOLKIT_LM_*` variable may belong to another program: there is a warning only if it
    looks like a misspelling."""
    known = {o.name: o for o in options}
    merged: dict[str, Any] = {}
    for variable, text in (environ or {}).items():
        if not variable.startswith(ENV_PREFIX):
            continue
        key = re.sub(f"^{ENV_PREFIX}", "", variable).lower()
        if key in known:
            merged[key] = known[key].convert(text, f"environment variable {variable}")
        elif (
            key not in _SECRETS
            and (similar := difflib.get_close_matches(key, known, n=1, cutoff=0.75))
            and key not in foreign
        ):
            # A variable without a similar option belongs to another command, or another program.
            warnings.warn(
                f"environment variable {variable} sets no option. Did you mean "
                f"{known[similar[0]].env}?",
                stacklevel=3,
            )
    for key, value in overrides.items():
        if key not in known:
            raise ConfigError(f"unknown option {key!r}. {nearest(key, known)}")
        merged[key] = known[key].convert(value, named(known[key]))
    return merged
