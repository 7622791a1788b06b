"""Calls of FunctionGemma and Gemma 4: call:name{key:value}."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from toolkit_lm.renderer import AnswerFormat, AnswerParser

from toolkit_lm_parsers.gemma_structure import GemmaArguments
from toolkit_lm_parsers.json_calls import MarkedCalls, dumps
from toolkit_lm_parsers.json_scanner import MAX_DEPTH, literal
from toolkit_lm_parsers.reading import Reading
from toolkit_lm_parsers.schemas import Copies, Schemas
from toolkit_lm_parsers.structures import Structure, calls, refuse_grammars

_CLOSES = {"<start_function_call>": "<end_function_call>", "<|tool_call>": "<tool_call|>"}
_QUOTES = ("<escape>", '<|"|>')
_MOST_BARE = 400
"""Characters of a value without quotes."""


class GemmaParser(MarkedCalls):
    """Keys have no quotation marks, and texts have marks of their own.

    Also read is what models write for it: no "call", parentheses for braces, = for a colon, JSON's
    and Python's quotes.
    """

    opens = (*_CLOSES, *_CLOSES.values())
    ends = opens

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(tools)
        self._schemas = Schemas(None)

    def read_calls(self, mark: str) -> Reading[bool]:
        if mark not in _CLOSES:
            # A part of no call.
            return True
        yield from self.spaces()
        yield from self.accept("call")
        yield from self.accept(":")
        name = yield from self.word(("{", "(", *self.opens))
        if name is None or (yield from self.accept_any("{(")) is None:
            return False
        self._schemas = Schemas(self.functions.get(name, {}).get("parameters"))
        read: list[str] = []
        if not (yield from self._mapping(read, 0, self._schemas.root)) or not self.call(
            name, "".join(read)
        ):
            return False
        yield from self.spaces()
        yield from self.close(_CLOSES[mark])
        return True

    def _mapping(self, read: list[str], depth: int, schema: Any) -> Reading[bool]:
        """Reads a mapping after its opening brace, and writes it as JSON."""
        items: list[str] = []
        yield from self.spaces()
        while not (yield from self._closes("})")):
            key = yield from self._key()
            if key is None:
                return False
            value: list[str] = []
            if not (yield from self._value(value, depth, self._schemas.property(schema, key))):
                return False
            items.append(f"{dumps(key)}: {''.join(value)}")
            if not (yield from self._goes_on("})")):
                return False
        read.append(f"{{{', '.join(items)}}}")
        return True

    def _closes(self, brackets: str) -> Reading[bool]:
        """Reads a closing bracket, which may lack where the call ends."""
        return (yield from self.accept_any(brackets)) is not None or (yield from self.ends_here())

    def _goes_on(self, brackets: str) -> Reading[bool]:
        """Reads a comma, unless a bracket closes what it would go on with."""
        yield from self.spaces()
        if (
            not (yield from self.accept(","))
            and not (yield from self.comes(brackets))
            and not (yield from self.ends_here())
        ):
            return False
        yield from self.spaces()
        return True

    def _key(self) -> Reading[str | None]:
        if (quote := (yield from self.accept_any(_QUOTES))) is not None:
            key = yield from self.word((quote,))
            yield from self.accept(quote)
        elif (yield from self.comes(('"', "'"))):
            key = yield from self.json_text()
        else:
            key = yield from self.word((":", "=", "{", "}", "(", ")", ",", *_QUOTES))
        yield from self.spaces()
        if (yield from self.accept_any(":=")) is None:
            return None
        yield from self.spaces()
        return key

    def _value(self, read: list[str], depth: int, schema: Any) -> Reading[bool]:
        if depth > MAX_DEPTH:
            return False
        if (quote := (yield from self.accept_any(_QUOTES))) is not None:
            text: list[str] = []
            if (yield from self.until((quote,), text.append)) is None:
                return False
            read.append(dumps("".join(text)))
            return True
        if (yield from self.comes(('"', "'"))):
            return (yield from self.json_value(read.append))
        if (yield from self.accept("{")):
            return (yield from self._mapping(read, depth + 1, schema))
        if (yield from self.accept("[")):
            return (yield from self._list(read, depth, self._schemas.items(schema)))
        return (yield from self._bare(read, schema))

    def _list(self, read: list[str], depth: int, schema: Any) -> Reading[bool]:
        items: list[str] = []
        yield from self.spaces()
        while not (yield from self._closes("]")):
            item: list[str] = []
            if not (yield from self._value(item, depth + 1, schema)):
                return False
            items.append("".join(item))
            if not (yield from self._goes_on("]")):
                return False
        read.append(f"[{', '.join(items)}]")
        return True

    def _bare(self, read: list[str], schema: Any) -> Reading[bool]:
        """A value without quotes: a number or a constant, or a text whose first quote is
        missing."""
        word = ""
        while (
            (character := (yield from self.peek()))
            and character not in ",]})<\n"
            and len(word) < _MOST_BARE
        ):
            word += character
            self.at += 1
        word = word.strip()
        if word and (yield from self.accept_any(_QUOTES)) is not None:
            read.append(dumps(word))
            return True
        known = literal(word) if self._schemas.kinds(schema) is None else None
        read.append(known or self._schemas.argument(word, schema))
        is_over = (bool(character) and character in ",]})\n") or (yield from self.ends_here())
        return bool(word) and is_over


class GemmaFormat(AnswerFormat):
    """FunctionGemma and Gemma 4."""

    finds = ("tool_calls",)
    keeps_special_tokens = True

    @classmethod
    def refuses(cls, template: str) -> str | None:
        return (
            None
            if any(mark in template for mark in _CLOSES)
            else f"the chat template writes no {' and no '.join(_CLOSES)}"
        )

    def parser(self, prompt_end: str, tools: Sequence[Mapping[str, Any]]) -> AnswerParser:
        return GemmaParser(tools)

    def structure(
        self, tools: Sequence[Mapping[str, Any]], *, parallel: bool, required: bool = True
    ) -> Structure | None:
        refuse_grammars(tools)
        opening = next((mark for mark in _CLOSES if mark in self.template), next(iter(_CLOSES)))
        quote = _QUOTES[[*_CLOSES].index(opening)]
        copies = Copies()
        return calls(
            tools,
            lambda name: f"{opening}call:{name}",
            _CLOSES[opening],
            parallel=parallel,
            separator="",
            content=lambda schema: GemmaArguments(quote, schema, len(tools), copies).structure(),
            trigger=None if required else opening,
        )
