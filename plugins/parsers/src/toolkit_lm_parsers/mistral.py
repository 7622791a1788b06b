"""Mistral's calls, after [TOOL_CALLS]."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from toolkit_lm.renderer import AnswerFormat, AnswerParser

from toolkit_lm_parsers.json_calls import MarkedCalls
from toolkit_lm_parsers.reading import Reading
from toolkit_lm_parsers.schemas import Schemas, refers
from toolkit_lm_parsers.structures import (
    Structure,
    amid_text,
    calls,
    functions_of,
    json_schema,
    refuse_grammars,
    sequence,
    text,
)

_CALLS = "[TOOL_CALLS]"
_ARGS = "[ARGS]"
_ID = "[CALL_ID]"


class MistralParser(MarkedCalls):
    """[TOOL_CALLS] and a list of JSON objects, or, of newer models, for each call
    [TOOL_CALLS]name[ARGS]{...}."""

    opens = (_CALLS, _ARGS, _ID)

    def read_calls(self, mark: str) -> Reading[bool]:
        if mark != _CALLS:
            # A part of no call.
            return True
        yield from self.spaces()
        if (yield from self.peek()) in ("[", "{") and not (
            yield from self.comes((_ARGS, _ID, _CALLS))
        ):
            return (yield from self.json_calls())
        name = yield from self.word((_ARGS, _ID, "{", _CALLS))
        if name is None:
            return False
        if (yield from self.accept(_ID)) and (yield from self.word((_ARGS, "{"))) is None:
            return False
        yield from self.accept(_ARGS)
        yield from self.spaces()
        arguments = yield from self.json_arguments(name)
        if arguments is None:
            return False
        return self.call(name, arguments)


class MistralFormat(AnswerFormat):
    """Mistral, by its special tokens."""

    finds = ("tool_calls",)
    keeps_special_tokens = True
    call_id_length = 9

    @classmethod
    def refuses(cls, template: str) -> str | None:
        return None if _CALLS in template else f"the chat template writes no {_CALLS}"

    def parser(self, prompt_end: str, tools: Sequence[Mapping[str, Any]]) -> AnswerParser:
        return MistralParser(tools)

    def structure(
        self, tools: Sequence[Mapping[str, Any]], *, parallel: bool, required: bool = True
    ) -> Structure | None:
        if _ARGS in self.template:
            return calls(
                tools,
                lambda name: f"{_CALLS}{name}{_ARGS}",
                "",
                parallel=parallel,
                separator="",
                trigger=None if required else _CALLS,
            )
        refuse_grammars(tools)
        # Older models write all calls as one list.
        functions: list[dict[str, Any]] = []
        definitions: dict[str, Any] = {}
        for name, schema in functions_of(tools):
            arguments: Any = schema
            if refers(schema):
                # Its references are from the beginning of a schema, which is the list's now.
                key = f"arguments{len(definitions)}"
                arguments = {"$ref": f"#/$defs/{key}"}
                definitions[key] = Schemas(schema).definition(key)
            functions.append(
                {
                    "type": "object",
                    "properties": {"name": {"const": name}, "arguments": arguments},
                    "required": ["name", "arguments"],
                    "additionalProperties": False,
                }
            )
        listed = {
            "type": "array",
            "items": {"anyOf": functions},
            "minItems": 1,
            **({} if parallel else {"maxItems": 1}),
        }
        listed |= {"$defs": definitions} if definitions else {}
        if not required:
            return amid_text(_CALLS, _CALLS, json_schema(listed), "")
        return sequence(text(_CALLS), json_schema(listed))
