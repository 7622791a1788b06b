"""Reads chats' answers with the parsers of plugins, which separate reasoning, tool calls and
content."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import structs
from toolkit_lm.errors import RequestError
from toolkit_lm.params import SamplingParams
from toolkit_lm.plugin import ParserRegistry
from toolkit_lm.renderer import (
    AnswerDelta,
    AnswerFormat,
    AnswerParser,
    ReasoningCounter,
    ToolCallDelta,
    prompt_end,
)

from toolkit_lm_server.generation import ChoicePiece, Generation
from toolkit_lm_server.structures import (
    ANY_TEXT,
    CallsOrContent,
    beginnings_of,
    content_structure,
    either,
    may_begin_json,
)
from toolkit_lm_server.tools import NO_TOOLS, ToolUse, input_of

if TYPE_CHECKING:
    from toolkit_lm_serving.engine import ServingEngine

    from toolkit_lm_server.options import ServerOptions
    from toolkit_lm_server.protocol import ChatBody

Counters = Callable[[Sequence[int]], ReasoningCounter]
_BARE = "llama3_json"
"""The parser of tool calls without marks, used for models of an unknown format."""
_SHORT_ID = 16
BUDGET = "thinking_token_budget"
_FORMAT = "thinking_format"
"""The request parameter with the name of the reasoning format, for the thinking budget."""
_STRUCTURES = (
    "structured_outputs",
    "response_format",
    "guided_json",
    "guided_json_object",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "grammar",
    "json_schema",
    "regex",
    "ebnf",
)


def make_format(
    parsers: ParserRegistry, kind: str, wanted: str, template: str
) -> tuple[str | None, AnswerFormat | None]:
    """Returns the name and the format for `kind` ("tool_calls" or "reasoning"), chosen by
    ParserRegistry.find_format. Both are None if no format fits."""
    name = parsers.find_format(kind, template, wanted)
    return name, None if name is None else parsers.make(name, template)


class Reading(NamedTuple):
    """The way in which one request's answers are read."""

    tools: AnswerFormat | None
    reasoning: AnswerFormat | None
    use: ToolUse
    structure: dict[str, Any] | None
    """The value of `structured_outputs` for the answers. None: the request's own is used."""
    shows_reasoning: bool
    reasoning_name: str | None = None
    """The name of the reasoning's format."""
    counters: Counters | None = None
    """The factory of token counters for one request. None counts nothing."""
    asked: str = ""
    """The request's field from which `structure` was made."""
    holds_calls: bool = False
    """Text that begins like a call becomes one: a grammar allows nothing else."""
    beginnings: tuple[str, ...] = ()
    """Texts with which calls begin, where content has a structure, too: what begins with none of
    them is all content."""

    @property
    def keeps_special_tokens(self) -> bool:
        return any(
            parser is not None and parser.keeps_special_tokens
            for parser in (self.tools, self.reasoning)
        )

    def applied(self, params: SamplingParams) -> SamplingParams:
        """The request's parameters, changed so that its answers can be read."""
        changed: dict[str, Any] = (
            {"skip_special_tokens": False} if self.keeps_special_tokens else {}
        )
        if self.structure is not None:
            extra = {
                name: value
                for name, value in (params.extra_args or {}).items()
                if name not in _STRUCTURES
            }
            changed |= {"structured_outputs": self.structure, "extra_args": extra or None}
        extra_args = changed.get("extra_args", params.extra_args) or {}
        if self.reasoning_name is not None and extra_args.get(BUDGET) is not None:
            changed["extra_args"] = {_FORMAT: self.reasoning_name, **extra_args}
        return structs.replace(params, **changed) if changed else params

    def named(self, error: RequestError) -> RequestError:
        """Returns the error with the request's own field in place of `structured_outputs`."""
        if not self.asked or error.param != "structured_outputs":
            return error
        return RequestError(str(error).replace(error.param, self.asked, 1), self.asked)

    @property
    def is_plain(self) -> bool:
        """Whether all of an answer is content."""
        return self.tools is None and self.reasoning is None

    def parser(self, prompt_end: str, *, in_pieces: bool = False) -> AnswerParser:
        """Returns a parser for one answer. `in_pieces`: calls that a grammar guarantees to become
        complete may be returned in pieces."""
        is_chain = (
            self.reasoning is not None
            and self.tools is not None
            and type(self.reasoning) is not type(self.tools)
        )
        part_parser = self.tools or self.reasoning
        assert part_parser is not None, "a plain answer needs no parser"
        parser = part_parser.parser("" if is_chain else prompt_end, self.use.tools)
        # The input of a custom tool is known when its JSON is whole.
        parser.in_pieces = in_pieces and self.holds_calls and not self.use.custom
        if self.beginnings:
            parser = CallsOrContent(parser, self.beginnings)
        if not is_chain:
            return parser
        assert self.reasoning is not None
        return _ReasoningThenTools(self.reasoning.parser(prompt_end, self.use.tools), parser)


ALL_CONTENT = Reading(None, None, NO_TOOLS, None, shows_reasoning=False)
"""The reading of answers that are all content."""


class AnswerFormats:
    """The formats by which a model's answers are read."""

    def __init__(self, engine: ServingEngine, options: ServerOptions) -> None:
        """Raises ConfigError and PluginError like ParserRegistry.find_format."""
        self._parsers = engine.plugins.parsers
        self._renderer = engine.renderer
        template = engine.renderer.chat_template_source
        _, self._tools = make_format(
            self._parsers, "tool_calls", options.tool_call_parser, template
        )
        self._name, self.reasoning = make_format(
            self._parsers, "reasoning", options.reasoning_parser, template
        )
        self._writes_tools = engine.renderer.writes_tools
        self._may_tell = options.tool_call_parser != "none" and _BARE in self._parsers
        self._counters: Counters | None = None
        self._has_counters = False

    async def prepare(self) -> None:
        """Reads the vocabulary to find the marks of reasoning, which is slow. Await it before the
        first `reading_of`."""
        if not self._has_counters and self.reasoning is not None:
            self._counters = await asyncio.to_thread(
                self.reasoning.reasoning_counters, self._renderer
            )
        self._has_counters = True

    def tells(self, use: ToolUse) -> bool:
        """Whether the server tells the model of tools, and not the chat template: it knows none, or
        has calls in a format that is unknown."""
        return self._tools is None and self._may_tell and not (use.required and self._writes_tools)

    def reading_of(self, body: ChatBody, use: ToolUse) -> Reading:
        """Returns how one request's answers are read. Raises RequestError for tools that the model
        cannot call."""
        tools = self._format_of(use) if use.tools else None
        asked = {} if use.required else body.structures(_STRUCTURES)
        structure: dict[str, Any] | None = None
        options: dict[str, Any] = {}
        reasoning = self.reasoning
        beginnings: tuple[str, ...] = ()
        calls_begin: list[str] = []
        if tools is not None and not asked:
            structure = self._of_calls(tools, use)
            if structure is not None and not use.required:
                calls_begin = beginnings_of(structure)
        elif asked and (tools or reasoning) is not None:
            # Without this, the structure would apply to the reasoning already.
            structure, options, beginnings = _of_content(asked, tools, reasoning, use)
            calls_begin = [*beginnings]
            if structure is None:
                reasoning = None
        kwargs = body.template_kwargs() or {}
        if structure is not None and (use.required or asked):
            last = reasoning or tools
            assert last is not None, "a structure is of one of them"
            structure = last.after_reasoning(structure, kwargs)
        elif structure is not None:
            assert tools is not None, "calls have a format"
            structure = _amid_text(structure, tools, reasoning, kwargs)
        if any(_is_strict(tool) for tool in use.tools):
            options["disable_additional_properties"] = True
        tagged = (
            None
            if structure is None
            else {"structural_tag": {"type": "structural_tag", "format": structure}, **options}
        )
        name, counters = (None, None) if reasoning is None else (self._name, self._counters)
        return Reading(
            tools,
            reasoning,
            use,
            tagged,
            body.include_reasoning is not False,
            name,
            counters,
            "" if tagged is None else next(iter(asked), "tools"),
            tools is not None and tagged is not None and not any(map(may_begin_json, calls_begin)),
            beginnings,
        )

    def _of_calls(self, tools: AnswerFormat, use: ToolUse) -> dict[str, Any] | None:
        """The structure of an answer that must have calls, or whose calls must be whole. None: it
        has none. Raises RequestError."""
        if use.required:
            return _required(tools, use)
        if self.tells(use):
            # A model that has not learned to call is held to the schemas of all tools.
            return tools.structure(use.callable, parallel=use.parallel, required=False)
        if not use.is_limited and not any(map(_is_strict, use.tools)):
            return None
        loose = [tool if _is_strict(tool) else _loose(tool) for tool in use.callable]
        structure = tools.structure(loose, parallel=use.parallel, required=False)
        if structure is None and use.is_limited:
            raise RequestError(
                "this model's calls cannot be held to some of the tools: leave the others out.",
                "tool_choice",
            )
        return structure

    def _format_of(self, use: ToolUse) -> AnswerFormat:
        """Returns the format of tool calls. Raises RequestError if there is none."""
        if self._tools is not None:
            return self._tools
        if (use.required and _BARE in self._parsers) or self.tells(use):
            bare: AnswerFormat = self._parsers.make(_BARE, "")
            return bare
        raise RequestError(
            "this server reads no tool calls of this model. Ask with tool_choice "
            '"required", or ask the operator to choose a parser (tool_call_parser).',
            "tools",
        )


def _required(tools: AnswerFormat, use: ToolUse) -> dict[str, Any]:
    """Returns the structure of tool calls, and nothing else. Raises RequestError."""
    structure = tools.structure(use.callable, parallel=use.parallel)
    if structure is None:
        raise RequestError(
            "this model's tool calls cannot be required: only tool_choice auto and none are "
            "supported.",
            "tool_choice",
        )
    return structure


def _of_content(
    asked: dict[str, Any], tools: AnswerFormat | None, reasoning: AnswerFormat | None, use: ToolUse
) -> tuple[dict[str, Any] | None, dict[str, Any], tuple[str, ...]]:
    """Returns the structure of an answer of calls, or of content that has its own; the options of
    `structured_outputs`; and the texts with which calls begin. None if it cannot be expressed.
    Raises RequestError where there are tools, too."""
    structure, options = content_structure(asked)
    if structure is None:
        if tools is None:
            return None, {}, ()
        field = next(iter(asked))
        raise RequestError(
            f"{field}: beside tools, it must be one of json, json_object, regex, choice, "
            "grammar and structural_tag.",
            field,
        )
    for form in _different(tools, reasoning):
        structure = form.content(structure)
    if tools is None:
        return structure, options, ()
    calls = _required(tools, use)
    # Content with marks of its own is told from calls by the parser.
    is_plain = tools.content(ANY_TEXT) == ANY_TEXT
    return either(calls, structure), options, tuple(beginnings_of(calls)) if is_plain else ()


def _different(*forms: AnswerFormat | None) -> list[AnswerFormat]:
    """Formats that are there, one of each kind."""
    return [*{type(form): form for form in forms if form is not None}.values()]


def _amid_text(
    structure: dict[str, Any],
    tools: AnswerFormat,
    reasoning: AnswerFormat | None,
    template_kwargs: Mapping[str, Any],
) -> dict[str, Any]:
    """The structure of an answer of any text whose calls have a structure: where marks are special
    tokens, which free text lacks, with those of reasoning and content."""
    forms = _different(tools, reasoning)
    if not any(form.keeps_special_tokens for form in forms):
        return structure
    for form in forms[1:]:
        if (content := form.content(ANY_TEXT)) != ANY_TEXT:
            structure = either(content, structure)
    return forms[-1].after_reasoning(structure, template_kwargs)


class _ReasoningThenTools(AnswerParser):
    """Reads reasoning with one parser, and the remaining content with another."""

    def __init__(self, reasoning: AnswerParser, tools: AnswerParser) -> None:
        self._reasoning = reasoning
        self._tools = tools

    def push(self, text: str) -> AnswerDelta:
        first = self._reasoning.push(text)
        return self._tools.push(first.content)._replace(reasoning=first.reasoning)

    def finish(self, *, cut: bool) -> AnswerDelta:
        first = self._reasoning.finish(cut=cut)
        second = self._tools.push(first.content)
        last = self._tools.finish(cut=cut)
        return AnswerDelta(
            second.content + last.content, first.reasoning, (*second.tool_calls, *last.tool_calls)
        )

    @property
    def calls_tools(self) -> bool:
        return self._tools.calls_tools


class AnswerReader:
    """Reads the answers of one request, choice by choice."""

    def __init__(self, reading: Reading, generation: Generation, engine: ServingEngine) -> None:
        self._reading = reading
        self._generation = generation
        self._renderer = engine.renderer
        self.in_pieces = False
        """Whether calls that a grammar guarantees to become complete are returned in pieces."""
        self._parsers: dict[int, AnswerParser] = {}
        self._counters: dict[int, ReasoningCounter] = {}

    def count(self, pieces: Sequence[ChoicePiece]) -> None:
        """Counts the tokens of pieces, for `usage`."""
        if self._reading.counters is None:
            return
        for piece in pieces:
            counter = self._counters.get(piece.index)
            if counter is None:
                prompt = self._generation.prompt(piece.index).prompt_token_ids or []
                counter = self._counters[piece.index] = self._reading.counters(prompt)
            counter.push(piece.token_ids)

    def usage(self) -> dict[str, Any]:
        """Returns token counts so far, with those of reasoning if they are counted."""
        usage = self._generation.usage()
        if self._reading.counters is None:
            return usage
        num_reasoning = sum(counter.num_tokens for counter in self._counters.values())
        return usage | {"completion_tokens_details": {"reasoning_tokens": num_reasoning}}

    def read(self, piece: ChoicePiece) -> tuple[list[AnswerDelta], str | None]:
        """Returns the deltas that a piece adds to its choice, and the choice's finish reason. The
        reason is None until the choice ends."""
        reason = piece.finish_reason
        if self._reading.is_plain:
            return [AnswerDelta(piece.text)] if piece.text else [], reason
        parser = self._parsers.get(piece.index)
        if parser is None:
            token_ids = self._generation.prompt(piece.index).prompt_token_ids or []
            end = prompt_end(self._renderer, token_ids)
            parser = self._parsers[piece.index] = self._reading.parser(
                end, in_pieces=self.in_pieces
            )
        deltas = [parser.push(piece.text)] if piece.text else []
        if reason is not None:
            # A stop text may also end a call.
            deltas.append(parser.finish(cut=reason != "stop" or isinstance(piece.stop_reason, str)))
            del self._parsers[piece.index]
            if reason == "stop" and parser.calls_tools:
                reason = "tool_calls"
        if not self._reading.use.parallel:
            deltas = [
                delta._replace(
                    tool_calls=tuple(call for call in delta.tool_calls if call.index == 0)
                )
                for delta in deltas
            ]
        return [delta for delta in deltas if any(delta)], reason

    def delta(self, parts: Sequence[AnswerDelta]) -> dict[str, Any]:
        """The delta of a stream's chunk, in OpenAI's form."""
        delta: dict[str, Any] = {}
        reasoning = "".join(part.reasoning for part in parts)
        content = "".join(part.content for part in parts)
        if reasoning and self._reading.shows_reasoning:
            delta |= {"reasoning_content": reasoning, "reasoning": reasoning}
        calls: dict[int, dict[str, Any]] = {}
        for call in (call for part in parts for call in part.tool_calls):
            if (known := calls.get(call.index)) is not None:
                known["function"]["arguments"] += call.arguments
            elif call.name:
                calls[call.index] = {"index": call.index, **self._call(call)}
            else:
                calls[call.index] = {"index": call.index, "function": {"arguments": call.arguments}}
        if content or not (delta or calls):
            delta["content"] = content
        return delta | ({"tool_calls": [*calls.values()]} if calls else {})

    def message(self, parts: Sequence[AnswerDelta]) -> dict[str, Any]:
        """The message of a whole choice, in OpenAI's form."""
        reasoning = "".join(part.reasoning for part in parts)
        content = "".join(part.content for part in parts)
        calls = [self._call(call) for part in parts for call in part.tool_calls]
        message: dict[str, Any] = {
            "role": "assistant",
            "content": content or (None if calls else ""),
            "refusal": None,
        }
        if reasoning and self._reading.shows_reasoning:
            message |= {"reasoning_content": reasoning, "reasoning": reasoning}
        return message | ({"tool_calls": calls} if calls else {})

    def _call(self, call: ToolCallDelta) -> dict[str, Any]:
        assert self._reading.tools is not None
        number = call.id or _call_id(self._reading.tools.call_id_length)
        if call.name in self._reading.use.custom:
            custom = {"name": call.name, "input": input_of(call.arguments)}
            return {"id": number, "type": "custom", "custom": custom}
        function = {"name": call.name, "arguments": call.arguments}
        return {"id": number, "type": "function", "function": function}


def _call_id(length: int) -> str:
    """A new id for a call, in OpenAI's form unless it has to be short."""
    digits = secrets.token_hex(length)
    return digits[:length] if length < _SHORT_ID else f"call_{digits}"[:length]


def _is_strict(tool: Mapping[str, Any]) -> bool:
    return tool["function"].get("strict") is True


def _loose(tool: Mapping[str, Any]) -> dict[str, Any]:
    """The tool with any arguments."""
    return {**tool, "function": {**tool["function"], "parameters": {"type": "object"}}}
