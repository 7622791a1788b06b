"""A wish becomes a grammar of llguidance: a text."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

from llguidance import LLMatcher, grammar_from, regex_to_lark
from toolkit_lm.errors import RequestError

from toolkit_lm_llguidance.tag_formats import FormatGrammar
from toolkit_lm_llguidance.wishes import Wish, read_json

MAX_SCHEMA = 256 * 1024
"""Characters of a schema, or of all choices together."""
MAX_TEXT = 32 * 1024
"""Characters of a regular expression or a grammar."""
MAX_DEPTH = 64
"""Of a schema: objects and lists in each other."""
MAX_CHOICES = 5_000
MAX_TAGS = 64

_WHITESPACE = r"[ ]|\n[ \t]{0,20}"
"""Between the parts of a JSON document: what formatters write. Without a bound, a model that has lost its way writes spaces for ever."""

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

SpecialTokens = Callable[[str], list[str | int]]
"""A text as pieces of text, and the ids of special tokens between them."""


def grammar_of(wish: Wish, special_tokens: SpecialTokens) -> str:
    """Raises RequestError for what is no such thing, or larger than it may be."""
    match wish.kind:
        case "json" | "json_object":
            schema = schema_of(wish)
            assert schema is not None, "this kind has one"
            return grammar_of_schema(schema, options_of(wish))
        case "regex":
            # Digits are 0 to 9 and letters a to z, as in JSON Schema: a model asked for a number is not to write it in another script.
            return LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(_text(wish, 'regular expression'), 'dw')}/")
        case "choice":
            return _choice(wish)
        case "grammar":
            text = _text(wish, "grammar")
            try:
                return grammar_from("grammar", text)
            except ValueError as error:
                raise RequestError(f"{wish.param}: the grammar is not valid: {error}", wish.param) from None
        case _:
            return _tags(wish, special_tokens)


def options_of(wish: Wish) -> dict[str, Any]:
    """How llguidance is to read a schema of this wish."""
    options: dict[str, Any] = {"lenient": wish.lenient, "coerce_one_of": wish.lenient}
    if wish.any_whitespace:
        return {**options, "whitespace_flexible": True, "whitespace_pattern": wish.whitespace_pattern or _WHITESPACE}
    return {**options, "whitespace_flexible": False}


def grammar_of_schema(schema: dict[str, Any], options: dict[str, Any]) -> str:
    """`options`: as `options_of` gives them."""
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=cast("JsonCompileOptions", options))


def schema_of(wish: Wish) -> dict[str, Any] | None:
    """The schema of a wish for JSON; None for others. Raises RequestError."""
    if wish.kind == "json_object":
        return {"type": "object"}
    return _schema(wish.value, wish) if wish.kind == "json" else None


def _schema(given: Any, wish: Wish) -> dict[str, Any]:
    schema = read_json(given, wish.param, "the schema")
    if not isinstance(schema, dict | bool):
        raise RequestError(f"{wish.param}: a JSON Schema is a mapping, not a {type(schema).__name__}.", wish.param)
    for _, depth, where in _parts(schema):
        if depth > MAX_DEPTH:
            raise RequestError(f"{wish.param}: the schema is nested more than {MAX_DEPTH} deep at {where[:200]}.", wish.param)
    try:
        length = len(json.dumps(schema, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise RequestError(f"{wish.param}: the schema is not JSON: {error}.", wish.param) from None
    if length > MAX_SCHEMA:
        raise RequestError(f"{wish.param}: the schema has {length} characters; at most {MAX_SCHEMA} are allowed.", wish.param)
    if isinstance(schema, bool):
        return {} if schema else {"not": {}}
    # What llguidance would read there is the request's business only where this plugin asks for it.
    schema = {name: value for name, value in schema.items() if name != "x-guidance"}
    return schema if wish.additional_properties else _closed(schema)


def _parts(schema: Any) -> Iterator[tuple[Any, int, str]]:
    """Everything in a schema, with its depth and JSON pointer."""
    left = [(schema, 0, "#")]
    while left:
        one, depth, where = left.pop()
        yield one, depth, where
        if depth > MAX_DEPTH:
            continue
        if isinstance(one, dict):
            left += [(value, depth + 1, f"{where}/{name}") for name, value in one.items()]
        elif isinstance(one, list):
            left += [(value, depth + 1, f"{where}/{index}") for index, value in enumerate(one)]


def _closed(schema: Any) -> Any:
    """The schema whose objects have no properties but those that it names."""
    if isinstance(schema, list):
        return [_closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: value if name in ("const", "enum", "default", "examples") else _closed(value) for name, value in schema.items()}
    if isinstance(closed.get("properties"), dict) or isinstance(closed.get("patternProperties"), dict):
        closed.setdefault("additionalProperties", False)
    return closed


def _text(wish: Wish, what: str) -> str:
    text = wish.value
    if not isinstance(text, str) or not text:
        raise RequestError(f"{wish.param}: a {what} must be a text, and not an empty one.", wish.param)
    if len(text) > MAX_TEXT:
        raise RequestError(f"{wish.param}: the {what} has {len(text)} characters; at most {MAX_TEXT} are allowed.", wish.param)
    return text


def _choice(wish: Wish) -> str:
    choices = wish.value
    if not isinstance(choices, list) or not choices or not all(isinstance(one, str) for one in choices):
        raise RequestError(f"{wish.param}: choice must be a list of texts, at least one.", wish.param)
    if len(choices) > MAX_CHOICES or sum(map(len, choices)) > MAX_SCHEMA:
        most = f"at most {MAX_CHOICES} of {MAX_SCHEMA} characters together"
        raise RequestError(f"{wish.param}: there are {len(choices)} choices; {most} are allowed.", wish.param)
    return grammar_from("choice", json.dumps(list(dict.fromkeys(choices))))


def _tags(wish: Wish, special_tokens: SpecialTokens) -> str:
    """Free text, in which what begins with a trigger must be one of the structures."""
    told = read_json(wish.value, wish.param, "the structural tag")
    if not isinstance(told, dict) or told.get("type", "structural_tag") != "structural_tag":
        raise RequestError(f"{wish.param}: a structural tag has structures and triggers.", wish.param)
    if "format" in told:
        return _tag_format(told["format"], wish, special_tokens)
    structures, triggers = told.get("structures"), told.get("triggers")
    if not isinstance(triggers, list) or not (_is_texts(triggers) and isinstance(structures, list) and 0 < len(structures) <= MAX_TAGS):
        raise RequestError(f"{wish.param}: a structural tag needs triggers, and 1 to {MAX_TAGS} structures.", wish.param)
    options, rules = [], []
    for index, one in enumerate(structures):
        where = f"{wish.param}: structure {index}"
        if not isinstance(one, dict) or not isinstance(one.get("begin"), str) or not isinstance(one.get("end", ""), str):
            raise RequestError(f"{where} must have a begin, a schema and an end.", wish.param)
        begin = one["begin"]
        trigger = next((text for text in triggers if begin.startswith(text)), None)
        if trigger is None:
            raise RequestError(f"{where} begins with none of the triggers.", wish.param)
        # Read as a whole schema is, so that the same is refused.
        schema = {**_schema(one.get("schema", {}), wish), "x-guidance": options_of(wish)}
        body = " ".join([*_literal(begin[len(trigger) :]), f"%json {json.dumps(schema)}", *_literal(one.get("end", ""))])
        pieces = special_tokens(trigger)
        if len(pieces) > 1 or isinstance(pieces[0], str):
            rules.append(f"tag_{index}_start[lazy]: TEXT {json.dumps(trigger)}\ntag_{index}: tag_{index}_start {body}")
        else:
            rules.append(f"tag_{index}: TEXT <[{pieces[0]}]> {body}")
        options.append(f"tag_{index}")
    lark = "\n".join(["%llguidance {}", f"start: ({' | '.join(options)})* rest", "rest: TEXT", r"TEXT: /(.|\n)*/", *rules])
    return LLMatcher.grammar_from_lark(lark)


def _tag_format(told: Any, wish: Wish, special_tokens: SpecialTokens) -> str:
    # Schemas are those of tools, whose authors know nothing of what a grammar can hold to.
    options = {**options_of(wish), "lenient": True, "coerce_one_of": True}
    lark = FormatGrammar(wish.param, lambda schema: {**_schema(schema, wish), "x-guidance": options}, special_tokens).lark(told)
    if len(lark) > 2 * MAX_SCHEMA:
        raise RequestError(f"{wish.param}: the structural tag makes a grammar of {len(lark)} characters; too many.", wish.param)
    return LLMatcher.grammar_from_lark(lark)


def _literal(text: str) -> list[str]:
    return [json.dumps(text)] if text else []


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and 0 < len(value) <= MAX_TAGS and all(isinstance(one, str) and one for one in value)
