"""Whether a document of a JSON Schema can be finished: where parts of a schema contradict each other, none can."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
_MOST_PARTS = 20_000
"""Parts that are looked at. What is larger is left to the compiler."""
_ENDLESS = "each document of it has another one in it, without an end"


class DeadEnd(NamedTuple):
    """A part of a schema that no document follows."""

    where: str
    """Its JSON pointer."""
    reason: str


class _Part(NamedTuple):
    schema: Any
    where: str


class _TooLargeError(Exception):
    pass


def dead_end(schema: Any) -> DeadEnd | None:
    """What keeps all documents of a schema from being finished; None: nothing that is known here.

    Looked at are bounds, types, values that are listed, required properties and items, `allOf`, alternatives and references. What
    `not`, `if` and the patterns of names rule out is left to the compiler of grammars.
    """
    try:
        return _Search(schema).run()
    except (_TooLargeError, RecursionError):
        return None


class _Search:
    """The smallest set of parts that have a finite document: it grows until it has the whole schema, or no more."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._finite: set[tuple[int, ...]] = set()
        """Parts that are known to have a document, by the ids of the schemas that hold together."""
        self._tried: dict[tuple[int, ...], DeadEnd | None] = {}
        self._num_left = _MOST_PARTS

    def run(self) -> DeadEnd | None:
        while True:
            before = len(self._finite)
            self._tried.clear()
            found = self._all([_Part(self._root, "#")])
            if found is None or len(self._finite) == before:
                return found

    def _all(self, parts: Sequence[_Part]) -> DeadEnd | None:
        """Of a document that follows several schemas at once."""
        self._num_left -= 1
        if self._num_left < 0:
            raise _TooLargeError
        flat = list(self._flat(parts))
        key = tuple(id(part.schema) for part in flat)
        if key in self._finite:
            return None
        if key not in self._tried:
            # While it is being looked at, a part of it that is the same again does not help it to an end.
            self._tried[key] = DeadEnd(parts[0].where, _ENDLESS)
            self._tried[key] = self._looked_at(flat)
            if self._tried[key] is None:
                self._finite.add(key)
        return self._tried[key]

    def _flat(self, parts: Sequence[_Part]) -> Iterator[_Part]:
        """Each schema once, through references and `allOf`. A reference that leads nowhere is the compiler's business."""
        left, seen = list(reversed(parts)), set[int]()
        while left:
            part = left.pop()
            if id(part.schema) in seen:
                continue
            seen.add(id(part.schema))
            self._num_left -= 1
            if self._num_left < 0:
                raise _TooLargeError
            yield part
            if isinstance(part.schema, Mapping):
                left += [_Part(one, f"{part.where}/allOf/{place}") for place, one in enumerate(_listed(part.schema.get("allOf")))]
                target = self._target(part.schema.get("$ref"))
                left += [target] if target is not None else []

    def _target(self, reference: Any) -> _Part | None:
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            return None
        found: Any = self._root
        for step in reference.split("/")[1:]:
            if not isinstance(found, Mapping):
                return None
            found = found.get(step.replace("~1", "/").replace("~0", "~"))
        return None if found is None else _Part(found, reference)

    def _looked_at(self, flat: Sequence[_Part]) -> DeadEnd | None:
        for schema, where in flat:
            if schema is False:
                return DeadEnd(where, "false allows nothing")
        flat = [part for part in flat if isinstance(part.schema, Mapping)]
        for part in flat:
            for name in ("anyOf", "oneOf"):
                if (found := self._none_of(part, name)) is not None:
                    return found
        where = flat[0].where if flat else "#"
        if (listed := _values(flat)) is not None:
            if not listed:
                return DeadEnd(where, "no value is in all lists of values")
            # The values have ends: what rules all of them out is the reason.
            reasons = [_not_admitted(value, flat) for value in listed]
            return None if None in reasons else DeadEnd(where, reasons[0] or "")
        kinds = _types(flat)
        if not kinds:
            return DeadEnd(where, "no type is allowed")
        found = None
        for kind in kinds:
            found = self._of_type(kind, flat, where)
            if found is None:
                return None
        return found

    def _none_of(self, part: _Part, name: str) -> DeadEnd | None:
        """Why no alternative can be finished."""
        options = part.schema.get(name)
        if not isinstance(options, list):
            return None
        if not options:
            return DeadEnd(part.where, f"{name} has no alternatives")
        found = None
        for place, option in enumerate(options):
            found = self._all([_Part(option, f"{part.where}/{name}/{place}")])
            if found is None:
                return None
        return found

    def _of_type(self, kind: str, flat: Sequence[_Part], where: str) -> DeadEnd | None:
        match kind:
            case "string":
                return _crossed(flat, "minLength", "maxLength")
            case "integer" | "number":
                reason = _no_number(flat, whole=kind == "integer")
                return None if reason is None else DeadEnd(where, reason)
            case "array":
                return _crossed(flat, "minItems", "maxItems") or self._items(flat)
            case "object":
                return _crossed(flat, "minProperties", "maxProperties") or self._properties(flat, where)
        return None

    def _items(self, flat: Sequence[_Part]) -> DeadEnd | None:
        least = _limit(flat, "minItems", max)
        prefixes = [(part, _listed(part.schema.get("prefixItems"))) for part in flat]
        longest = max((len(prefix) for _, prefix in prefixes), default=0)
        # One item after the prefix is as good as any other.
        for place in range(int(min(least or 0, longest + 1))):
            parts = []
            for part, prefix in prefixes:
                if place < len(prefix):
                    parts.append(_Part(prefix[place], f"{part.where}/prefixItems/{place}"))
                elif isinstance(part.schema.get("items"), Mapping | bool):
                    parts.append(_Part(part.schema["items"], f"{part.where}/items"))
            if parts and (found := self._all(parts)) is not None:
                return found
        return None

    def _properties(self, flat: Sequence[_Part], where: str) -> DeadEnd | None:
        required = {name: None for part in flat for name in _listed(part.schema.get("required")) if isinstance(name, str)}
        most = _limit(flat, "maxProperties", min)
        if most is not None and len(required) > most:
            return DeadEnd(where, f"{len(required)} properties are required, and at most {most} are allowed")
        for name in required:
            parts = []
            for schema, place in flat:
                properties = _mapping(schema.get("properties"))
                if name in properties:
                    parts.append(_Part(properties[name], f"{place}/properties/{_escaped(name)}"))
                elif not _mapping(schema.get("patternProperties")) and "additionalProperties" in schema:
                    if schema["additionalProperties"] is False:
                        return DeadEnd(place, f"the property {name[:100]!r} is required, and not allowed")
                    parts.append(_Part(schema["additionalProperties"], f"{place}/additionalProperties"))
            if parts and (found := self._all(parts)) is not None:
                return found
        least = _limit(flat, "minProperties", max) or 0
        for schema, place in flat:
            is_closed = schema.get("additionalProperties") is False and not _mapping(schema.get("patternProperties"))
            if is_closed and len(_mapping(schema.get("properties"))) < least:
                return DeadEnd(place, f"at least {least} properties are needed, and fewer are allowed")
        return None


def _types(flat: Sequence[_Part]) -> list[str]:
    """Those that all allow."""
    kinds = set(_TYPES)
    for schema, _ in flat:
        told = schema.get("type")
        if isinstance(told, str) and told not in _TYPES:
            continue
        if isinstance(told, str | list):
            allowed = {told} if isinstance(told, str) else {one for one in told if isinstance(one, str)}
            kinds &= allowed | ({"integer"} if "number" in allowed else set())
            kinds |= {"null"} if schema.get("nullable") is True else set()
    return [kind for kind in _TYPES if kind in kinds]


def _values(flat: Sequence[_Part]) -> list[Any] | None:
    """The values that all lists have; None: there is no list."""
    lists = [[schema["const"]] for schema, _ in flat if "const" in schema]
    lists += [schema["enum"] for schema, _ in flat if isinstance(schema.get("enum"), list)]
    if not lists:
        return None
    return [value for value in lists[0] if all(any(_is_equal(value, one) for one in others) for others in lists[1:])]


def _is_equal(one: Any, other: Any) -> bool:
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)


def _not_admitted(value: Any, flat: Sequence[_Part]) -> str | None:
    """Why a value is not allowed, as far as it is plain."""
    if not set(types_of(value)) & set(_types(flat)):
        return f"no listed value is of an allowed type: {value!r:.50} is not"
    sizes = {str: ("minLength", "maxLength"), list: ("minItems", "maxItems"), dict: ("minProperties", "maxProperties")}
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        low, high, least, most = value, value, *_bounds(flat)[:2]
        if (least is not None and high < least) or (most is not None and low > most):
            return f"no listed value is within the bounds: {value!r:.50} is not"
    for kind, (least_name, most_name) in sizes.items():
        if isinstance(value, kind):
            least, most = _limit(flat, least_name, max), _limit(flat, most_name, min)
            if (least is not None and len(value) < least) or (most is not None and len(value) > most):
                return f"no listed value is as long as it may be: {value!r:.50} is not"
    return None


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


def _limit(flat: Sequence[_Part], name: str, choose: Callable[[Sequence[Any]], Any]) -> Any:
    """The strictest of a limit; None: there is none."""
    found = [schema[name] for schema, _ in flat if _is_number(schema.get(name))]
    return choose(found) if found else None


def _crossed(flat: Sequence[_Part], least_name: str, most_name: str) -> DeadEnd | None:
    least, most = _limit(flat, least_name, max), _limit(flat, most_name, min)
    if least is None or most is None or least <= most:
        return None
    where = next(part.where for part in flat if least_name in part.schema)
    return DeadEnd(where, f"{least_name} {least} is more than {most_name} {most}")


def _bounds(flat: Sequence[_Part]) -> tuple[Any, Any, bool, bool]:
    """The strictest bounds of a number, and whether they are themselves ruled out."""
    lows: list[tuple[Any, bool]] = []
    highs: list[tuple[Any, bool]] = []
    for schema, _ in flat:
        for name, exclusive, bounds in (("minimum", "exclusiveMinimum", lows), ("maximum", "exclusiveMaximum", highs)):
            if _is_number(schema.get(name)):
                bounds.append((schema[name], schema.get(exclusive) is True))
            if _is_number(schema.get(exclusive)):
                bounds.append((schema[exclusive], True))
    low, is_low_out = max(lows, default=(None, False))
    high, is_high_out = min(highs, key=lambda one: (one[0], not one[1]), default=(None, False))
    return low, high, is_low_out, is_high_out


def _no_number(flat: Sequence[_Part], *, whole: bool) -> str | None:
    """Why no number is within the bounds."""
    low, high, is_low_out, is_high_out = _bounds(flat)
    if low is None or high is None:
        return None
    between = f"the bounds {low} and {high}"
    if low > high or (low == high and (is_low_out or is_high_out)):
        return f"no number is within {between}"
    steps = [Fraction(str(schema["multipleOf"])) for schema, _ in flat if _is_step(schema.get("multipleOf"))]
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
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_step(value: Any) -> bool:
    # Of very small or large ones the fraction would be long.
    return _is_number(value) and 1e-12 < value < 1e12


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else []
