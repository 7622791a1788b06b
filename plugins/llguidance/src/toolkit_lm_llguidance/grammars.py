"""A wish becomes a grammar of llguidance: a text."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from llguidance import LLMatcher, grammar_from, regex_to_lark
from toolkit_lm.errors import RequestError
from toolkit_lm_structured_output.checks import (
    MAX_SCHEMA,
    MAX_TAGS,
    checked_schema,
    choices_of,
    schema_of,
    text_of,
)
from toolkit_lm_structured_output.wishes import Wish, read_json

from toolkit_lm_llguidance.tag_formats import FormatGrammar

_WHITESPACE = r"[ ]|\n[ \t]{0,20}"
"""Between the parts of a JSON document: what formatters write. Without a bound, a model that has
lost its way writes spaces for ever."""

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

SpecialTokens = Callable[[str], list[str | int]]
"""A text as pieces of text, and the ids of special tokens between them."""


def grammar_of(wish: Wish, special_tokens: SpecialTokens) -> str:
    """The wish as an llguidance grammar. Raises RequestError if it is malformed or too large."""
    match wish.kind:
        case "json" | "json_object":
            schema = schema_of(wish)
            assert schema is not None, "this kind has one"
            return grammar_of_schema(schema, options_of(wish))
        case "regex":
            # Digits are 0 to 9 and letters a to z, as in JSON Schema: a model asked for a number is
            # not to write it in another script.
            return LLMatcher.grammar_from_lark(
                f"start: /{regex_to_lark(text_of(wish, 'regular expression'), 'dw')}/"
            )
        case "choice":
            return _choice(wish)
        case "grammar":
            text = text_of(wish, "grammar")
            try:
                return grammar_from("grammar", text)
            except ValueError as error:
                raise RequestError(
                    f"{wish.param}: the grammar is not valid: {error}", wish.param
                ) from None
        case _:
            return _tags(wish, special_tokens)


def options_of(wish: Wish) -> dict[str, Any]:
    """How llguidance is to read a schema of this wish."""
    options: dict[str, Any] = {"lenient": wish.lenient, "coerce_one_of": wish.lenient}
    if wish.any_whitespace:
        return {
            **options,
            "whitespace_flexible": True,
            "whitespace_pattern": wish.whitespace_pattern or _WHITESPACE,
        }
    return {**options, "whitespace_flexible": False}


def grammar_of_schema(schema: dict[str, Any], options: dict[str, Any]) -> str:
    """`options`: as `options_of` gives them."""
    return LLMatcher.grammar_from_json_schema(
        json.dumps(schema), overrides=cast("JsonCompileOptions", options)
    )


def _choice(wish: Wish) -> str:
    return grammar_from("choice", json.dumps(choices_of(wish)))


def _tags(wish: Wish, special_tokens: SpecialTokens) -> str:
    """Free text, in which what begins with a trigger must be one of the structures."""
    tag = read_json(wish.value, wish.param, "the structural tag")
    if not isinstance(tag, dict) or tag.get("type", "structural_tag") != "structural_tag":
        raise RequestError(
            f"{wish.param}: a structural tag has structures and triggers.", wish.param
        )
    if "format" in tag:
        return _tag_format(tag["format"], wish, special_tokens)
    structures = tag.get("structures")
    triggers = tag.get("triggers")
    if not isinstance(triggers, list) or not (
        _is_texts(triggers) and isinstance(structures, list) and 0 < len(structures) <= MAX_TAGS
    ):
        raise RequestError(
            f"{wish.param}: a structural tag needs triggers, and 1 to {MAX_TAGS} structures.",
            wish.param,
        )
    options = []
    rules = []
    for index, item in enumerate(structures):
        where = f"{wish.param}: structure {index}"
        if (
            not isinstance(item, dict)
            or not isinstance(item.get("begin"), str)
            or not isinstance(item.get("end", ""), str)
        ):
            raise RequestError(f"{where} must have a begin, a schema and an end.", wish.param)
        begin = item["begin"]
        trigger = next((text for text in triggers if begin.startswith(text)), None)
        if trigger is None:
            raise RequestError(f"{where} begins with none of the triggers.", wish.param)
        # Read as a whole schema is, so that the same is refused.
        schema = {**checked_schema(item.get("schema", {}), wish), "x-guidance": options_of(wish)}
        body = " ".join(
            [
                *_literal(begin[len(trigger) :]),
                f"%json {json.dumps(schema)}",
                *_literal(item.get("end", "")),
            ]
        )
        pieces = special_tokens(trigger)
        if len(pieces) > 1 or isinstance(pieces[0], str):
            rules.append(
                f"tag_{index}_start[lazy]: TEXT {json.dumps(trigger)}\ntag_{index}: "
                f"tag_{index}_start {body}"
            )
        else:
            rules.append(f"tag_{index}: TEXT <[{pieces[0]}]> {body}")
        options.append(f"tag_{index}")
    lark = "\n".join(
        [
            "%llguidance {}",
            f"start: ({' | '.join(options)})* rest",
            "rest: TEXT",
            r"TEXT: /(.|\n)*/",
            *rules,
        ]
    )
    return LLMatcher.grammar_from_lark(lark)


def _tag_format(tag_format: Any, wish: Wish, special_tokens: SpecialTokens) -> str:
    # Schemas are those of tools, whose authors know nothing of what a grammar can hold to.
    options = {**options_of(wish), "lenient": True, "coerce_one_of": True}
    lark = FormatGrammar(
        wish.param,
        lambda schema: {**checked_schema(schema, wish), "x-guidance": options},
        special_tokens,
    ).lark(tag_format)
    if len(lark) > 2 * MAX_SCHEMA:
        raise RequestError(
            f"{wish.param}: the structural tag makes a grammar of {len(lark)} characters; too "
            "many.",
            wish.param,
        )
    return LLMatcher.grammar_from_lark(lark)


def _literal(text: str) -> list[str]:
    return [json.dumps(text)] if text else []


def _is_texts(value: Any) -> bool:
    return (
        isinstance(value, list)
        and 0 < len(value) <= MAX_TAGS
        and all(isinstance(text, str) and text for text in value)
    )
