"""Calls between <tool_call> and </tool_call>: of Hermes and Qwen as JSON, of Qwen3-Coder as XML."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from toolkit_lm.renderer import AnswerFormat, AnswerParser

from toolkit_lm_parsers.json_calls import MarkedCalls, dumps, is_json
from toolkit_lm_parsers.scanning import Reading
from toolkit_lm_parsers.structures import ANY_TEXT, Structure, calls, choice, json_schema, sequence, tag, text

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION, _END_FUNCTION = "<function=", "</function>"
_PARAMETER, _END_PARAMETER = "<parameter=", "</parameter>"


class ToolCallTagParser(MarkedCalls):
    """Reads both: a model of one kind that has seen the other may write it."""

    opens: tuple[str, ...] = (_OPEN,)

    def read_calls(self, mark: str) -> Reading[bool]:
        if mark != _FUNCTION:
            yield from self.spaces()
            is_xml = yield from self.accept(_FUNCTION)
        else:
            is_xml = True
        done = yield from (self._xml_call() if is_xml else self.json_calls())
        if done:
            yield from self.spaces()
            yield from self.close(_CLOSE)
        return done

    def _xml_call(self) -> Reading[bool]:
        name = yield from self.word((">",))
        if name is None or not (yield from self.accept(">")):
            return False
        yield from self.spaces()
        schema = self.functions.get(name, {}).get("parameters")
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        properties = properties if isinstance(properties, Mapping) else {}
        num_read = 0
        while True:
            mark = yield from self.accept_any((_PARAMETER, _END_FUNCTION))
            if not self.is_call_open and (mark is not None or self.is_cut):
                self.begin_call(name)
            if mark is None:
                return False
            if mark == _END_FUNCTION:
                self.add_arguments("}" if num_read else "{}")
                self.end_call()
                return True
            key = yield from self.word((">",))
            if key is None or not (yield from self.accept(">")):
                return False
            value: list[str] = []
            end = yield from self.until((_END_PARAMETER, _PARAMETER, _END_FUNCTION), value.append)
            if end is None:
                return False
            if end != _END_PARAMETER:
                self.at -= len(end)
            written = argument("".join(value).removeprefix("\n").removesuffix("\n"), properties.get(key))
            self.add_arguments(f"{', ' if num_read else '{'}{dumps(key)}: {written}")
            num_read += 1
            yield from self.spaces()


class QwenCoderParser(ToolCallTagParser):
    opens = (_OPEN, _FUNCTION)


def argument(value: str, schema: Any) -> str:
    """The JSON of an argument that is written without quotes: a text where the schema says so, or nothing else."""
    kinds = _kinds(schema)
    plain = value.strip()
    for written in (plain, plain.lower()):
        if kinds - {"string"} and is_json(written) and ("string" not in kinds or not written.startswith('"')):
            return written
    if plain in ("None", "null") and kinds - {"string"}:
        return "null"
    return dumps(value)


def _kinds(schema: Any) -> set[str]:
    """The types that a schema names; of one that names none, a text."""
    found: set[str] = set()
    left = [schema]
    while left and len(found) < 8:
        one = left.pop()
        if not isinstance(one, Mapping):
            continue
        kind = one.get("type")
        found.update([kind] if isinstance(kind, str) else [each for each in _listed(kind) if isinstance(each, str)])
        found.update("string" if isinstance(each, str) else "any" for each in _listed(one.get("enum")))
        for name in ("anyOf", "oneOf", "allOf"):
            left += _listed(one.get(name))[:16]
        if "$ref" in one:
            found.add("any")
    return found or {"string"}


def _listed(value: Any) -> list[Any]:
    """A list of a schema, that may be none."""
    return value if isinstance(value, list) else []


class HermesFormat(AnswerFormat):
    """Hermes 2, Qwen 2.5 and Qwen 3: <tool_call>{"name": ..., "arguments": ...}</tool_call>."""

    finds = ("tool_calls",)

    @classmethod
    def refuses(cls, template: str) -> str | None:
        if _OPEN not in template:
            return f"the chat template writes no {_OPEN}"
        return "its calls are XML" if "<function=" in template or "<arg_key>" in template else None

    def parser(self, prompt_end: str, tools: Sequence[Mapping[str, Any]]) -> AnswerParser:
        return ToolCallTagParser(tools)

    def structure(self, tools: Sequence[Mapping[str, Any]], *, parallel: bool, required: bool = True) -> Structure | None:
        def begin(name: str) -> str:
            return f'{_OPEN}\n{{"name": {json.dumps(name)}, "arguments": '

        return calls(tools, begin, f"}}\n{_CLOSE}", parallel=parallel, trigger=None if required else _OPEN)


class QwenCoderFormat(AnswerFormat):
    """Qwen3-Coder: <tool_call><function=name><parameter=key>value</parameter></function></tool_call>."""

    finds = ("tool_calls",)

    @classmethod
    def refuses(cls, template: str) -> str | None:
        return None if _FUNCTION in template and _PARAMETER in template else f"the chat template writes no {_FUNCTION}...>"

    def parser(self, prompt_end: str, tools: Sequence[Mapping[str, Any]]) -> AnswerParser:
        return QwenCoderParser(tools)

    def structure(self, tools: Sequence[Mapping[str, Any]], *, parallel: bool, required: bool = True) -> Structure | None:
        def begin(name: str) -> str:
            return f"{_OPEN}\n{_FUNCTION}{name}>\n"

        return calls(
            tools, begin, f"{_END_FUNCTION}\n{_CLOSE}", parallel=parallel, content=_parameters, trigger=None if required else _OPEN
        )


def _parameters(schema: dict[str, Any]) -> Structure:
    """Those that are required must come, in the order of the schema. A schema that names none takes any."""
    if "properties" not in schema:
        return ANY_TEXT
    elements: list[Structure] = []
    properties = schema.get("properties")
    definitions = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    for key, one in (properties if isinstance(properties, Mapping) else {}).items():
        is_text = _kinds(one) == {"string"} and not (isinstance(one, Mapping) and {"enum", "const", "pattern"} & one.keys())
        if is_text or not isinstance(one, Mapping):
            written = tag(f"{_PARAMETER}{key}>\n", ANY_TEXT, f"\n{_END_PARAMETER}\n")
        elif "string" in _kinds(one) and _listed(one.get("enum")):
            options = [text(each if isinstance(each, str) else json.dumps(each)) for each in one["enum"]]
            written = tag(f"{_PARAMETER}{key}>\n", choice(*options), f"\n{_END_PARAMETER}\n")
        else:
            written = tag(f"{_PARAMETER}{key}>\n", json_schema({**one, **definitions}), f"\n{_END_PARAMETER}\n")
        elements.append(written if key in _listed(schema.get("required")) else choice(written, text("")))
    return sequence(*elements) if elements else text("")
