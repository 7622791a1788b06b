"""Statement and checks of request parameters: as options, with additional bounds for lists.

A parameter is a field of a frozen `msgspec.Struct`, annotated with `param(help, ...)`:

    class SamplingParams(Struct, frozen=True):
        min_p: Annotated[float, param("Drop tokens less likely than ...", ge=0, le=1)] = 0.0
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import NoneType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, get_args, get_origin

import msgspec
from msgspec import StructMeta

from toolkit_lm.config import Option, options_of
from toolkit_lm.config.options import OptionSpec
from toolkit_lm.errors import RequestError, nearest

Use = Literal["draws", "beams", "both"]
"""Use of a parameter: in sampling, in a beam search, or in both."""
Check = Callable[[Any], None]
"""Function that raises RequestError for a value of another type, or out of bounds."""

MAX_TOKEN_ID = 2**31 - 1


class ParamsMeta(StructMeta):
    """Metaclass of parameters whose constructor names the nearest parameter for an unknown one."""

    if not TYPE_CHECKING:  # The signature that a type checker sees is the struct's.

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 (a metaclass)
            """Raises TypeError for an unknown parameter."""
            try:
                return super().__call__(*args, **kwargs)
            except TypeError:
                for name in kwargs.keys() - set(cls.__struct_fields__):
                    known = nearest(name, cls.__struct_fields__)
                    raise TypeError(f"{cls.__name__} has no parameter {name!r}. {known}") from None
                raise


@dataclass(frozen=True, slots=True)
class ParamSpec(OptionSpec):
    """Statement of a parameter in a field's `Annotated[...]`. `ge`, `gt` and `le` bound numbers,
    and also the values of a mapping."""

    use: Use = "draws"
    flag: bool = True
    """Whether the parameter has a flag on the command line."""
    by_processor: bool = False
    """Whether a plugin's logits processor reads it, and states a parameter of the same name."""
    max_items: int | None = None
    max_length: int | None = None
    """Most characters of a text, or of each text in a list."""


param = ParamSpec
"""States a parameter."""


def params_of(struct: type[msgspec.Struct]) -> dict[str, Option]:
    """The parameters that a struct states, by name and in order. The `spec` of each is a
    ParamSpec."""
    return {o.name: o for o in options_of(struct)}


def spec_of(o: Option) -> ParamSpec:
    """The ParamSpec of a parameter."""
    assert isinstance(o.spec, ParamSpec)
    return o.spec


class ProcessorParams(msgspec.Struct):
    """Front half of a logits processor: the request's parameters that turn it on. They are fields
    with a default and `param(help, ...)`.

    An instance is made when a request with any of them arrives. It raises RequestError for a value
    out of range. Its module imports no torch.
    """

    changes_forward: ClassVar[bool] = True
    """Whether the model's forward pass may depend on the arguments. Requests with different
    arguments then share no cached prefix.

    False promises that the arguments only affect sampling.
    """

    def __post_init__(self) -> None:
        check_fields(self, checks_of(type(self)))

    def prepare(self, renderer: Any) -> Mapping[str, Any] | None:
        """Returns the arguments for the worker's half, for one sequence: numbers, texts, lists and
        mappings of them. None: the processor is not applied.

        `renderer` is the engine's toolkit_lm.renderer.Renderer. A ValueError fails the request. A
        RequestError may name the parameter.
        """
        return msgspec.structs.asdict(self)


class FieldCheck(NamedTuple):
    """The check of one parameter. Its default value needs none."""

    name: str
    default: Any
    check: Check
    takes_none: bool


@cache
def checks_of(struct: type[msgspec.Struct]) -> tuple[FieldCheck, ...]:
    """The checks of a struct's parameters, made once and run by `check_fields`."""
    return tuple(
        FieldCheck(o.name, o.default, _check_of(o), NoneType in o.kinds) for o in options_of(struct)
    )


def check_fields(values: msgspec.Struct, checks: Sequence[FieldCheck]) -> None:
    """Raises RequestError for the first parameter of `values` that has a wrong type or is out of
    bounds. None is replaced by the default."""
    for name, default, check, takes_none in checks:
        value = getattr(values, name)
        if value is None and not takes_none:
            msgspec.structs.force_setattr(values, name, default)
        elif value is not default:
            check(value)


def require(ok: bool, name: str, wanted: str, got: object) -> None:
    """Raises RequestError unless `ok`."""
    if not ok:
        # A client's value may be of any length.
        raise RequestError(f"{name} must be {wanted}, not {_shown(got)}.", name)


def is_token_id(value: object) -> bool:
    return type(value) is int and 0 <= value <= MAX_TOKEN_ID


def is_number(value: object) -> bool:
    """Whether the value is a finite number; true and false are not numbers."""
    try:
        return (
            isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        )
    except OverflowError:
        return False


def _check_of(o: Option) -> Check:
    check = _check_of_arms(o, [arm for arm in o.kinds if arm is not NoneType])
    if NoneType not in o.kinds:
        return check

    def check_unless_none(value: Any) -> None:
        if value is not None:
            check(value)

    return check_unless_none


def _check_of_arms(o: Option, arms: list[Any]) -> Check:
    if arms == [float]:
        return _number_check(o, "a finite number", is_number)
    if arms == [int]:
        return _number_check(o, "an integer of at most 64 bits", _is_integer)
    if arms == [str]:
        return _text_check(o)
    if any(get_origin(arm) is dict for arm in arms):
        return _mapping_check(o)
    lists = [arm for arm in arms if get_origin(arm) is list]
    return _list_check(o, lists[0], takes_one=str in arms) if lists else _choice_check(o, arms)


def _number_check(o: Option, wanted: str, is_kind: Callable[[object], bool]) -> Check:
    name = o.name
    bounds = o.spec.range
    ge = o.spec.ge
    gt = o.spec.gt
    le = o.spec.le

    def check(value: Any) -> None:
        require(is_kind(value), name, wanted, value)
        admitted = (
            (ge is None or value >= ge)
            and (gt is None or value > gt)
            and (le is None or value <= le)
        )
        require(admitted, name, bounds, value)

    return check


def _choice_check(o: Option, arms: list[Any]) -> Check:
    choices = [
        choice for arm in arms for choice in ((True, False) if arm is bool else get_args(arm))
    ]
    if not choices:
        raise TypeError(
            f"{o.name} is neither a number, a switch, a text, a choice, a mapping nor a list of "
            "texts or token ids."
        )
    words = [
        str(choice).lower() if isinstance(choice, bool) else f'"{choice}"' for choice in choices
    ]
    wanted = f"{', '.join(words[:-1])} or {words[-1]}"

    def check(value: Any) -> None:
        # 1 equals True, but is not accepted for it.
        require(
            any(type(value) is type(choice) and value == choice for choice in choices),
            o.name,
            wanted,
            value,
        )

    return check


def _text_check(o: Option) -> Check:
    longest = spec_of(o).max_length

    def check(value: Any) -> None:
        require(isinstance(value, str), o.name, "a text", value)
        require(
            longest is None or len(value) <= longest,
            o.name,
            f"a text of at most {longest} characters",
            len(value),
        )

    return check


def _mapping_check(o: Option) -> Check:
    most = spec_of(o).max_items

    def check(value: Any) -> None:
        require(isinstance(value, dict), o.name, "a mapping", value)
        require(
            most is None or len(value) <= most,
            o.name,
            f"a mapping of at most {most} entries",
            len(value),
        )

    return check


def _list_check(o: Option, kind: Any, *, takes_one: bool) -> Check:
    """Check of a list of texts, of token ids or of both, or of mappings. `takes_one`: one text is
    accepted too."""
    name = o.name
    most = spec_of(o).max_items
    longest = spec_of(o).max_length
    (item,) = get_args(kind)
    kinds = (dict,) if get_origin(item) is dict else get_args(item) or (item,)
    names = {str: "texts", int: "token ids", dict: "mappings"}
    items = " or ".join(names[kind] for kind in kinds)
    wanted = f"a text or a list of {items}" if takes_one else f"a list of {items}"

    def check(value: Any) -> None:
        values = [value] if takes_one and isinstance(value, str) else value
        require(isinstance(values, list | tuple), name, wanted, value)
        require(most is None or len(values) <= most, name, f"at most {most} {items}", len(values))
        fits = all(
            (str in kinds if isinstance(value, str) else int in kinds and is_token_id(value))
            or (isinstance(value, dict) and dict in kinds)
            for value in values
        )
        require(fits, name, wanted, value)
        texts = [value for value in values if isinstance(value, str)]
        require(all(texts), name, f"{wanted}, none of them empty", value)
        length = max(map(len, texts), default=0)
        require(
            longest is None or length <= longest,
            name,
            f"texts of at most {longest} characters",
            length,
        )

    return check


def _is_integer(value: object) -> bool:
    return type(value) is int and -(2**63) <= value < 2**63


def _shown(value: object) -> str:
    try:
        return reprlib.repr(value)
    except ValueError:
        # Python refuses to write integers of thousands of digits.
        return f"a {type(value).__name__}"
