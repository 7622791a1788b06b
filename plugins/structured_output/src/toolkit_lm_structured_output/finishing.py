"""Whether a document of a JSON Schema can be finished: where parts of a schema contradict each
other, none can."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from fractions import Fraction
from typing import Any, NamedTuple

_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
_MOST_PARTS = 20_000
"""Parts that are looked at, and entries of their lists. What is larger is left to the compiler."""
_LISTS = ("type", "enum", "required", "allOf")
"""Keywords whose lists are read whole each time that their part is looked at."""
_ENDLESS = "each document of it has another one in it, without an end"


_LENGTHS: dict[type[Sized], tuple[str, str]] = {
    str: ("minLength", "maxLength"),
    list: ("minItems", "maxItems"),
    dict: ("minProperties", "maxProperties"),
}


class DeadEnd(NamedTuple):
    """A part of a schema that no document follows."""

    where: str
    """Its JSON pointer."""
    reason: str


class _Subschema(NamedTuple):
    schema: Any
    where: str


class _TooLargeError(Exception):
    pass


def dead_end(schema: Any) -> DeadEnd | None:
    """Reason why no document of a schema can ever be finished; None if no such reason is known
    here.

    Checked are bounds, types, listed values, required properties and items, `allOf`, alternatives
    and references. Effects of `not`, `if` and name patterns are left to the grammar's compiler."""
    try:
        return _Search(schema).run()
    except (_TooLargeError, RecursionError):
        return None


class _Search:
    """The smallest set of parts that have a finite document: it grows until it has the whole
    schema, or no more."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._finite: set[tuple[int, ...]] = set()
        """Parts that are known to have a document, by the ids of the schemas that hold together."""
        self._tried: dict[tuple[int, ...], DeadEnd | None] = {}
        self._targets: dict[str, _Subschema | None] = {}
        """Parts that references lead to, by reference."""
        self._listed: dict[int, dict[Any, Any]] = {}
        """Values of a list by equality key, by the list's id."""
        self._num_left = _MOST_PARTS

    def run(self) -> DeadEnd | None:
        while True:
            before = len(self._finite)
            self._tried.clear()
            found = self._all([_Subschema(self._root, "#")])
            if found is None or len(self._finite) == before:
                return found

    def _charge(self, count: int) -> None:
        """Counts what is to be looked at, before it is."""
        self._num_left -= count
        if self._num_left < 0:
            raise _TooLargeError

    def _all(self, parts: Sequence[_Subschema]) -> DeadEnd | None:
        """The dead end of a document that must follow several schemas at once; None if it can be
        finished."""
        self._charge(1)
        flat = list(self._flat(parts))
        key = tuple(id(part.schema) for part in flat)
        if key in self._finite:
            return None
        if key not in self._tried:
            # While it is being looked at, a part of it that is the same again does not help it to
            # an end.
            self._tried[key] = DeadEnd(parts[0].where, _ENDLESS)
            self._tried[key] = self._looked_at(flat)
            if self._tried[key] is None:
                self._finite.add(key)
        return self._tried[key]

    def _flat(self, parts: Sequence[_Subschema]) -> Iterator[_Subschema]:
        """Each schema once, through references and `allOf`. A reference that leads nowhere is the
        compiler's business."""
        left = list(reversed(parts))
        seen = set[int]()
        while left:
            part = left.pop()
            self._charge(1)
            if id(part.schema) in seen:
                continue
            seen.add(id(part.schema))
            if isinstance(part.schema, Mapping):
                self._charge(sum(len(_listed(part.schema.get(name))) for name in _LISTS))
            yield part
            if isinstance(part.schema, Mapping):
                left += [
                    _Subschema(subschema, f"{part.where}/allOf/{place}")
                    for place, subschema in enumerate(_listed(part.schema.get("allOf")))
                ]
                target = self._target(part.schema.get("$ref"))
                left += [target] if target is not None else []

    def _target(self, reference: Any) -> _Subschema | None:
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            return None
        if reference not in self._targets:
            self._targets[reference] = self._followed(reference)
        return self._targets[reference]

    def _followed(self, reference: str) -> _Subschema | None:
        found: Any = self._root
        for step in reference.split("/")[1:]:
            if not isinstance(found, Mapping):
                return None
            found = found.get(step.replace("~1", "/").replace("~0", "~"))
        return None if found is None else _Subschema(found, reference)

    def _looked_at(self, flat: Sequence[_Subschema]) -> DeadEnd | None:
        for schema, where in flat:
            if schema is False:
                return DeadEnd(where, "false allows nothing")
        flat = [part for part in flat if isinstance(part.schema, Mapping)]
        for part in flat:
            for name in ("anyOf", "oneOf"):
                if (found := self._none_of(part, name)) is not None:
                    return found
        where = flat[0].where if flat else "#"
        if (listed := self._values(flat)) is not None:
            if not listed:
                return DeadEnd(where, "no value is in all lists of values")
            return self._none_admitted(listed, flat, where)
        kinds = _types(flat)
        if not kinds:
            return DeadEnd(where, "no type is allowed")
        found = None
        for kind in kinds:
            found = self._of_type(kind, flat, where)
            if found is None:
                return None
        return found

    def _values(self, flat: Sequence[_Subschema]) -> list[Any] | None:
        """Values that all lists have in common, each once; None if there are no lists."""
        lists = [
            {_key(schema["const"]): schema["const"]} for schema, _ in flat if "const" in schema
        ]
        for schema, _ in flat:
            if isinstance(listed := schema.get("enum"), list):
                if id(listed) not in self._listed:
                    self._listed[id(listed)] = {_key(value): value for value in listed}
                lists.append(self._listed[id(listed)])
        if not lists:
            return None
        lists.sort(key=len)
        self._charge(len(lists[0]) * len(lists))
        return [value for key, value in lists[0].items() if all(key in others for others in lists)]

    def _none_admitted(
        self, listed: Sequence[Any], flat: Sequence[_Subschema], where: str
    ) -> DeadEnd | None:
        """Why none of some values is allowed, as far as it is plain. They have ends: what rules all
        of them out is the reason."""
        limits = _Limits(flat)
        reason = None
        for value in listed:
            self._charge(1)
            found = limits.excluded(value)
            if found is None:
                return None
            reason = reason or found
        return DeadEnd(where, reason or "")

    def _none_of(self, part: _Subschema, name: str) -> DeadEnd | None:
        """Why no alternative can be finished."""
        options = part.schema.get(name)
        if not isinstance(options, list):
            return None
        if not options:
            return DeadEnd(part.where, f"{name} has no alternatives")
        found = None
        for place, option in enumerate(options):
            found = self._all([_Subschema(option, f"{part.where}/{name}/{place}")])
            if found is None:
                return None
        return found

    def _of_type(self, kind: str, flat: Sequence[_Subschema], where: str) -> DeadEnd | None:
        match kind:
            case "string":
                return _crossed(flat, "minLength", "maxLength")
            case "integer" | "number":
                reason = _no_number(flat, whole=kind == "integer")
                return None if reason is None else DeadEnd(where, reason)
            case "array":
                return _crossed(flat, "minItems", "maxItems") or self._items(flat)
            case "object":
                return _crossed(flat, "minProperties", "maxProperties") or self._properties(
                    flat, where
                )
        return None

    def _items(self, flat: Sequence[_Subschema]) -> DeadEnd | None:
        least = _limit(flat, "minItems", max)
        prefixes = [(part, _listed(part.schema.get("prefixItems"))) for part in flat]
        longest = max((len(prefix) for _, prefix in prefixes), default=0)
        # One item after the prefix is as good as any other.
        for place in range(int(min(least or 0, longest + 1))):
            self._charge(len(flat))
            parts = []
            for part, prefix in prefixes:
                if place < len(prefix):
                    parts.append(_Subschema(prefix[place], f"{part.where}/prefixItems/{place}"))
                elif isinstance(part.schema.get("items"), Mapping | bool):
                    parts.append(_Subschema(part.schema["items"], f"{part.where}/items"))
            if parts and (found := self._all(parts)) is not None:
                return found
        return None

    def _properties(self, flat: Sequence[_Subschema], where: str) -> DeadEnd | None:
        required = {
            name: None
            for part in flat
            for name in _listed(part.schema.get("required"))
            if isinstance(name, str)
        }
        most = _limit(flat, "maxProperties", min)
        if most is not None and len(required) > most:
            return DeadEnd(
                where, f"{len(required)} properties are required, and at most {most} are allowed"
            )
        for name in required:
            self._charge(len(flat))
            parts = []
            for schema, place in flat:
                properties = _mapping(schema.get("properties"))
                if name in properties:
                    parts.append(
                        _Subschema(properties[name], f"{place}/properties/{_escaped(name)}")
                    )
                elif (
                    not _mapping(schema.get("patternProperties"))
                    and "additionalProperties" in schema
                ):
                    if schema["additionalProperties"] is False:
                        return DeadEnd(
                            place, f"the property {name[:100]!r} is required, and not allowed"
                        )
                    parts.append(
                        _Subschema(schema["additionalProperties"], f"{place}/additionalProperties")
                    )
            if parts and (found := self._all(parts)) is not None:
                return found
        least = _limit(flat, "minProperties", max) or 0
        for schema, place in flat:
            is_closed = schema.get("additionalProperties") is False and not _mapping(
                schema.get("patternProperties")
            )
            if is_closed and len(_mapping(schema.get("properties"))) < least:
                return DeadEnd(
                    place, f"at least {least} properties are needed, and fewer are allowed"
                )
        return None


def _types(flat: Sequence[_Subschema]) -> list[str]:
    """Types that all the schemas allow."""
    kinds = set(_TYPES)
    for schema, _ in flat:
        types = schema.get("type")
        if isinstance(types, str) and types not in _TYPES:
            continue
        if isinstance(types, str | list):
            allowed = (
                {types}
                if isinstance(types, str)
                else {type_ for type_ in types if isinstance(type_, str)}
            )
            kinds &= allowed | ({"integer"} if "number" in allowed else set())
            kinds |= {"null"} if schema.get("nullable") is True else set()
    return [kind for kind in _TYPES if kind in kinds]


class _Limits:
    """Combined limits of several schemas on a value that they list."""

    def __init__(self, flat: Sequence[_Subschema]) -> None:
        self._kinds = frozenset(_types(flat))
        self._low, self._high, _, _ = _bounds(flat)
        self._lengths = {
            kind: (_limit(flat, least, max), _limit(flat, most, min))
            for kind, (least, most) in _LENGTHS.items()
        }

    def excluded(self, value: Any) -> str | None:
        """Why a value is not allowed, as far as it is plain."""
        if self._kinds.isdisjoint(types_of(value)):
            return f"no listed value is of an allowed type: {_shown(value)} is not"
        if isinstance(value, bool):
            return None
        if isinstance(value, int | float) and _is_outside(value, self._low, self._high):
            return f"no listed value is within the bounds: {_shown(value)} is not"
        for kind, (least, most) in self._lengths.items():
            if isinstance(value, kind) and _is_outside(len(value), least, most):
                return f"no listed value is as long as it may be: {_shown(value)} is not"
        return None


def _is_outside(value: Any, least: Any, most: Any) -> bool:
    return (least is not None and value < least) or (most is not None and value > most)


def _shown(value: Any) -> str:
    return reprlib.repr(value)[:50]


def _key(value: Any) -> Any:
    """Equal for JSON values that are equal, 1 and 1.0 for one, and for no others."""
    match value:
        case bool():
            return ("boolean", value)
        case list():
            return ("array", *map(_key, value))
        case dict():
            return ("object", frozenset((name, _key(item)) for name, item in value.items()))
        case _:
            return value


def types_of(value: Any) -> tuple[str, ...]:
    """The types that a JSON value is of."""
    match value:
        case bool():
            return ("boolean",)
        case int():
            return ("integer", "number")
        case float():
            return ("integer", "number") if value.is_integer() else ("number",)
        case str():
            return ("string",)
        case list():
            return ("array",)
        case None:
            return ("null",)
        case _:
            return ("object",)


def _limit(flat: Sequence[_Subschema], name: str, choose: Callable[[Sequence[Any]], Any]) -> Any:
    """The strictest of a limit; None: there is none."""
    found = [schema[name] for schema, _ in flat if _is_number(schema.get(name))]
    return choose(found) if found else None


def _crossed(flat: Sequence[_Subschema], least_name: str, most_name: str) -> DeadEnd | None:
    least = _limit(flat, least_name, max)
    most = _limit(flat, most_name, min)
    if least is None or most is None or least <= most:
        return None
    where = next(part.where for part in flat if least_name in part.schema)
    return DeadEnd(where, f"{least_name} {least} is more than {most_name} {most}")


def _bounds(flat: Sequence[_Subschema]) -> tuple[Any, Any, bool, bool]:
    """The strictest bounds of a number, and whether they are themselves ruled out."""
    lows: list[tuple[Any, bool]] = []
    highs: list[tuple[Any, bool]] = []
    for schema, _ in flat:
        for name, exclusive, bounds in (
            ("minimum", "exclusiveMinimum", lows),
            ("maximum", "exclusiveMaximum", highs),
        ):
            if _is_number(schema.get(name)):
                bounds.append((schema[name], schema.get(exclusive) is True))
            if _is_number(schema.get(exclusive)):
                bounds.append((schema[exclusive], True))
    low, is_low_out = max(lows, default=(None, False))
    high, is_high_out = min(
        highs, key=lambda bound: (bound[0], not bound[1]), default=(None, False)
    )
    return low, high, is_low_out, is_high_out


def _no_number(flat: Sequence[_Subschema], *, whole: bool) -> str | None:
    """Why no number is within the bounds."""
    low, high, is_low_out, is_high_out = _bounds(flat)
    if low is None or high is None:
        return None
    between = f"the bounds {low} and {high}"
    if low > high or (low == high and (is_low_out or is_high_out)):
        return f"no number is within {between}"
    steps = [
        Fraction(str(schema["multipleOf"]))
        for schema, _ in flat
        if _is_step(schema.get("multipleOf"))
    ]
    step = max([*steps, Fraction(1)] if whole else steps, default=None)
    if step is None:
        return None
    first = math.ceil(Fraction(str(low)) / step)
    first += is_low_out and first * step == Fraction(str(low))
    last = first * step
    if last > Fraction(str(high)) or (is_high_out and last == Fraction(str(high))):
        return f"no {'integer' if step == 1 else f'multiple of {step}'} is within {between}"
    return None


def _is_number(value: Any) -> bool:
    # No float is as large as an integer may be.
    return (isinstance(value, int) and not isinstance(value, bool)) or (
        isinstance(value, float) and math.isfinite(value)
    )


def _is_step(value: Any) -> bool:
    # The fraction of a very small or large number would be long.
    return _is_number(value) and 1e-12 < value < 1e12


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else []
