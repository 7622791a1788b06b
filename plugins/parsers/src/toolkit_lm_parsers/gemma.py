"""Calls of FunctionGemma and Gemma 4: call:name{key:value}."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from toolkit_lm.renderer import AnswerFormat, AnswerParser

from toolkit_lm_parsers.gemma_structure import GemmaArguments
from toolkit_lm_parsers.json_calls import MarkedCalls, dumps
from toolkit_lm_parsers.json_scanner import MAX_DEPTH, is_literal
from toolkit_lm_parsers.scanning import Reading
from toolkit_lm_parsers.structures import Structure, calls

_CLOSES = {"<start_function_call>": "<end_function_call>", "<|tool_call>": "<tool_call|>"}
_QUOTES = ("<escape>", '<|"|>')


class GemmaParser(MarkedCalls):
    """Keys have no quotation marks, and texts have marks of their own."""

    opens = tuple(_CLOSES)

    def read_calls(self, mark: str) -> Reading[bool]:
        if not (yield from self.accept("call:")):
            return False
        name = yield from self.word(("{",))
        if name is None:
            return False
        read: list[str] = []
        self.at += 1
        whole = yield from self._mapping(read, 0)
        if not whole and not self.is_cut:
            return False
        self.begin_call(name)
        self.add_arguments("".join(read))
        if whole:
            self.end_call()
            yield from self.spaces()
            yield from self.close(_CLOSES[mark])
        return whole

    def _mapping(self, read: list[str], depth: int) -> Reading[bool]:
        """What comes after an opening brace, in JSON, of which `read` takes what there is."""
        read.append("{")
        num_items = 0
        yield from self.spaces()
        while not (yield from self.accept("}")):
            key = yield from self._key()
            if key is None:
                return False
            value: list[str] = []
            if not (yield from self._value(value, depth)):
                return False
            read.append(f"{', ' if num_items else ''}{dumps(key)}: {''.join(value)}")
            num_items += 1
            if not (yield from self._goes_on("}")):
                return False
        read.append("}")
        return True

    def _key(self) -> Reading[str | None]:
        if (quote := (yield from self.accept_any((*_QUOTES, '"')))) is None:
            key = yield from self.word((":",))
        else:
            key = yield from self.word((quote,))
            yield from self.accept(quote)
        yield from self.spaces()
        if not (yield from self.accept(":")):
            return None
        yield from self.spaces()
        return key

    def _value(self, read: list[str], depth: int) -> Reading[bool]:
        if depth > MAX_DEPTH:
            return False
        if (quote := (yield from self.accept_any((*_QUOTES, '"')))) is not None:
            text: list[str] = []
            if (yield from self.until((quote,), text.append)) is None:
                return False
            read.append(dumps("".join(text)))
            return True
        if (yield from self.accept("{")):
            return (yield from self._mapping(read, depth + 1))
        if (yield from self.accept("[")):
            items: list[str] = []
            yield from self.spaces()
            while not (yield from self.accept("]")):
                item: list[str] = []
                if not (yield from self._value(item, depth + 1)):
                    return False
                items.append("".join(item))
                if not (yield from self._goes_on("]")):
                    return False
            read.append(f"[{', '.join(items)}]")
            return True
        word = ""
        while (character := (yield from self.peek())) and character not in ",]}<\n" and len(word) < 400:
            word += character
            self.at += 1
        word = word.strip()
        read.append(word if is_literal(word) else dumps(word))
        return bool(word and character and character in ",]}\n")

    def _goes_on(self, closing: str) -> Reading[bool]:
        yield from self.spaces()
        if not (yield from self.accept(",")) and (yield from self.peek()) != closing:
            return False
        yield from self.spaces()
        return True


class GemmaFormat(AnswerFormat):
    """FunctionGemma and Gemma 4."""

    finds = ("tool_calls",)
    keeps_special_tokens = True

    @classmethod
    def refuses(cls, template: str) -> str | None:
        return None if any(mark in template for mark in _CLOSES) else f"the chat template writes no {' and no '.join(_CLOSES)}"

    def parser(self, prompt_end: str, tools: Sequence[Mapping[str, Any]]) -> AnswerParser:
        return GemmaParser(tools)

    def structure(self, tools: Sequence[Mapping[str, Any]], *, parallel: bool, required: bool = True) -> Structure | None:
        if not required:
            # Special tokens, that may mean something else, are no part of free text.
            return None
        opening = next((mark for mark in _CLOSES if mark in self.template), next(iter(_CLOSES)))
        quote = _QUOTES[[*_CLOSES].index(opening)]
        return calls(
            tools,
            lambda name: f"{opening}call:{name}",
            _CLOSES[opening],
            parallel=parallel,
            separator="",
            content=lambda schema: GemmaArguments(quote, schema, len(tools)).structure(),
        )
