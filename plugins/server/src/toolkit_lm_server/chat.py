"""The route POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from fastapi import Request, Response
from toolkit_lm.errors import ContextLengthError, RequestError

from toolkit_lm_server.answer_reading import (
    ALL_CONTENT,
    BUDGET,
    AnswerFormats,
    AnswerReader,
    Reading,
)
from toolkit_lm_server.answers import answer
from toolkit_lm_server.caller import CALLER
from toolkit_lm_server.engines import Engines
from toolkit_lm_server.errors import printable, validated
from toolkit_lm_server.event_stream import stream_of
from toolkit_lm_server.fingerprint import Fingerprints
from toolkit_lm_server.generation import ChoicePiece, Generation, Outputs, are_large
from toolkit_lm_server.logprobs import chat_logprobs, prompt_logprobs, settle_logprobs
from toolkit_lm_server.options import ServerOptions
from toolkit_lm_server.prefills import MARKS, prefilled
from toolkit_lm_server.protocol import ChatBody
from toolkit_lm_server.route import caller_of, check_generates, check_priority, request_context
from toolkit_lm_server.stored_chats import ChatStore, StoringChatBody, Streamed
from toolkit_lm_server.threads import aside
from toolkit_lm_server.tool_texts import with_tool_texts
from toolkit_lm_server.tools import ToolUse, tool_use, with_functions
from toolkit_lm_server.unknown_fields import STRICT, is_plain

if TYPE_CHECKING:
    from toolkit_lm.prompts import Conversation
    from toolkit_lm_serving.engine import ServingEngine


_UNSAID = {"logprobs": None, "finish_reason": None}
"""Fields of each choice in a stream, with their values before the end."""
_SWITCHES = ("enable_thinking", "thinking")
"""Names of template variables that switch reasoning on and off."""


class Chat:
    """Conversations with the models that are served."""

    def __init__(
        self,
        engines: Engines,
        body: type[ChatBody] = ChatBody,
        options: ServerOptions | None = None,
    ) -> None:
        """`body`: the body class with plugins' fields. Raises PluginError, and ConfigError for an
        unknown parser in the options."""
        self._engines = engines
        self.body = body
        options = options or ServerOptions()
        self.store = ChatStore(options.max_stored_responses)
        self._max_prompts = options.max_prompts
        self._fingerprints = Fingerprints(engines)
        self._formats = engines.each(lambda engine: AnswerFormats(engine, options))

    async def create(self, body: ChatBody, request: Request) -> Response:
        """Answers a conversation, or several."""
        begin = self.begin(body, request_context(request))
        stored = body if isinstance(body, StoringChatBody) and body.store else None
        owner = caller_of(request).client
        if body.stream and stored is not None:
            return await stream_of(begin, partial(self._stored_chunks, body=stored, owner=owner))
        if body.stream:
            return await stream_of(begin, partial(ChatAnswer.chunks, in_pieces=True))
        reply = await begin
        choices = await reply.choices()
        is_large = body.prompt_logprobs is not None or are_large(choices)

        def made() -> dict[str, Any]:
            whole = reply.whole(choices)
            if stored is not None:
                whole["choices"] = [*whole["choices"]]
                self.store.add(whole, stored, owner)
            return whole

        return await answer(made, is_large=is_large)

    async def _stored_chunks(
        self, reply: ChatAnswer, *, body: StoringChatBody, owner: str
    ) -> AsyncGenerator[list[dict[str, Any]], None]:
        """The objects of a stream, whose answer is kept at its end."""
        streamed = Streamed()
        async with aclosing(reply.chunks(in_pieces=True)) as pieces:
            async for chunks in pieces:
                streamed.read(chunks)
                yield chunks
        self.store.add(streamed.completion(reply.usage()), body, owner)

    def budget(self, tokens: int | None, name: str, model: str | None = None) -> dict[str, Any]:
        """The field that limits reasoning, where the model is known to reason. Otherwise the limit
        is ignored, and told under `name`, its name in another API."""
        if tokens is None:
            return {}
        # A model that is not served is refused with the rest of the body.
        if (formats := self._formats.get(model)) is None or formats.reasoning is not None:
            return {BUDGET: tokens}
        (CALLER.get().unknown or STRICT).drop(
            name,
            "this model's chat template shows no reasoning that is known here. Leave it out, or "
            "ask the operator to choose a parser (reasoning_parser).",
        )
        return {}

    async def ask(
        self,
        fields: Mapping[str, Any],
        context: dict[str, str],
        names: Mapping[str, str] = MappingProxyType({}),
    ) -> ChatAnswer:
        """Checks the fields of a body, and asks the engine as `begin` does. Raises
        RequestValidationError, too.

        `names`: another API's names by our fields.
        """
        return await self.begin(await aside(validated, self.body, fields), context, names)

    async def count(self, fields: Mapping[str, Any], context: dict[str, str]) -> int:
        """The number of tokens of a body's prompt. Raises the errors of `ask`."""
        body = await aside(validated, self.body, fields)
        engine = self._engines[body.model]
        use = tool_use(body.tools, body.tool_choice, body.parallel_tool_calls)
        found, options = _prefilled([body.messages], self._render_options(body))
        [messages], tools = self._with_tools(body, found, use)
        options |= tools
        with engine.hold_rendering([(messages, options)], {"context": context}):
            rendered = await engine.renderer.render_conversation_async(messages, **options)
        return len(rendered.token_ids)

    def _with_tools(
        self, body: ChatBody, conversations: list[list[dict[str, Any]]], use: ToolUse
    ) -> tuple[list[list[dict[str, Any]]], dict[str, Any]]:
        """Conversations as the chat template takes them, and its option that has the prompt tell of
        tools. An answer that must call one is held to them without it, too."""
        found = [
            with_functions(messages)
            if any(isinstance(message, dict) and "tool_calls" in message for message in messages)
            else messages
            for messages in conversations
        ]
        if body.tools and self._formats[body.model].tells(use):
            return [
                with_tool_texts(messages, use.tools, parallel=use.parallel) for messages in found
            ], {}
        writes = self._engines[body.model].renderer.writes_tools
        return found, {"tools": use.tools} if use.tools and (not use.required or writes) else {}

    def _render_options(
        self, body: ChatBody, names: Mapping[str, str] = MappingProxyType({})
    ) -> dict[str, Any]:
        """The body's options of rendering. The verbosity is among them where the chat template
        reads it, and is told as ignored elsewhere."""
        options = body.render_options()
        if body.verbosity is None:
            return options
        read = self._engines[body.model].renderer.template_names or ()
        if "verbosity" in read or body.chat_template is not None:
            variables = {"verbosity": body.verbosity} | (options["chat_template_kwargs"] or {})
            return options | {"chat_template_kwargs": variables}
        if body.verbosity != "medium":
            name = names.get("verbosity", "verbosity")
            why = "the model's chat template does not read it."
            (CALLER.get().unknown or STRICT).drop(name, why)
        return options

    def _tell_unread(self, body: ChatBody, names: Mapping[str, str]) -> None:
        """Tells of switches that the chat template is given and does not read. Raises RequestError
        for a name that is not plain.

        The renderer refuses documents that the template does not read, because an answer without
        them would be another one.
        """
        kwargs = body.template_kwargs() or {}
        if (
            (unknown := CALLER.get().unknown) is None
            or body.chat_template is not None
            or not kwargs
        ):
            return
        if (read := self._engines[body.model].renderer.template_names) is None:
            return
        reasons = self._formats[body.model].reasoning is not None
        for name, value in kwargs.items():
            # A switch at its default need not be set.
            if name in read or (name in _SWITCHES and value == reasons):
                continue
            if not is_plain(name):
                raise RequestError(
                    f"chat_template_kwargs: the chat template reads no {printable(name)!r}.",
                    "chat_template_kwargs",
                )
            is_inside = name in (body.chat_template_kwargs or ())
            field = f"chat_template_kwargs.{name}" if is_inside else "reasoning_effort"
            unknown.drop(names.get(field, field), "the model's chat template does not read it.")

    async def begin(
        self,
        body: ChatBody,
        context: dict[str, str],
        names: Mapping[str, str] = MappingProxyType({}),
    ) -> ChatAnswer:
        """Asks the engine. `context`: facts of the request for plugins that watch the engine.
        `names`: another API's names by our fields.

        Raises RequestError and ApiError for a request that gets no answer.
        """
        engine = self._engines[body.model]
        formats = self._formats[body.model]
        check_generates(engine)
        self._tell_unread(body, names)
        if -1 in (body.top_logprobs, body.prompt_logprobs):
            settle_logprobs(engine, body)
        conversations = body.conversations(self._max_prompts)
        if body.truncate_prompt_tokens is None:
            _check_lengths(engine, conversations)
        reading = ALL_CONTENT
        params = body.params()
        options = body.request_options(context)
        if body.tools or body.tool_choice is not None or formats.reasoning is not None:
            await formats.prepare()
            use = tool_use(body.tools, body.tool_choice, body.parallel_tool_calls)
            # Schemas of tools are read in a thread: other requests do not wait for it.
            reading = (
                await asyncio.to_thread(formats.reading_of, body, use)
                if use.tools
                else formats.reading_of(body, use)
            )
            params = reading.applied(params)
            if reading.reasoning is not None:
                options["stop_scope"] = reading.reasoning.stop_scope
        check_priority(engine, options)
        rendering = self._render_options(body, names)

        def asked() -> tuple[list[list[dict[str, Any]]], Outputs]:
            chats, prefilling = _prefilled(conversations, rendering)
            chats, tools = self._with_tools(body, chats, reading.use)
            return chats, engine.chat_many(chats, params, options=options, **prefilling, **tools)

        # It looks at each message, of which there may be tens of thousands.
        is_large = CALLER.get().is_large
        conversations, outputs = await asyncio.to_thread(asked) if is_large else asked()
        async with AsyncExitStack() as on_error:
            on_error.push_async_callback(outputs.aclose)
            try:
                first = await anext(outputs)
            except RequestError as error:
                raise reading.named(error) from error
            generation = Generation(
                first, outputs, len(conversations), params.n, names=body.return_tokens_as_token_ids
            )
            on_error.pop_all()
        await generation.check_first()
        fingerprint = self._fingerprints[body.model]
        return ChatAnswer(engine, body, conversations, generation, reading, fingerprint)


def _check_lengths(engine: ServingEngine, conversations: Sequence[Conversation]) -> None:
    """Raises ContextLengthError for a conversation of more messages than a prompt may have tokens.
    To render 50,000 messages takes half a second."""
    model = engine.config.model
    most = max(model.max_model_len or 0, model.max_encoder_len or 0)
    if (longest := max(map(len, conversations), default=0)) > most:
        raise ContextLengthError(
            f"a conversation of {longest} turns is refused before it is rendered, where this "
            f"model's maximum context length is {most} tokens (max_model_len). Shorten it.",
            "messages",
        )


class ChatAnswer:
    """The answer to conversations, as OpenAI's objects. Take `chunks` where the body asks for a
    stream, else `completion`."""

    def __init__(
        self,
        engine: ServingEngine,
        body: ChatBody,
        conversations: Sequence[Conversation],
        generation: Generation,
        reading: Reading,
        fingerprint: str,
    ) -> None:
        """`conversations`: all that the body has. A stream has one. `fingerprint`: the answer's
        system_fingerprint."""
        self._fingerprint = fingerprint
        self._engine = engine
        self._body = body
        self._echoes = [_echo(messages) if body.echo else "" for messages in conversations]
        self._generation = generation
        self._reader = AnswerReader(reading, generation, engine)

    async def aclose(self) -> None:
        """Aborts the sequences that are not finished."""
        await self._generation.aclose()

    def usage(self) -> dict[str, Any]:
        """Token counts so far."""
        return self._reader.usage()

    async def completion(self) -> dict[str, Any]:
        """The whole answer, a chat.completion. Raises ApiError."""
        whole = self.whole(await self.choices())
        return {**whole, "choices": [*whole["choices"]]}

    async def choices(self) -> list[ChoicePiece]:
        """The finished choices of the whole answer. Raises ApiError."""
        return await self._generation.choices()

    def whole(self, choices: Sequence[ChoicePiece]) -> dict[str, Any]:
        """The whole answer, a chat.completion. Its choices are an iterator, and each is made when
        it is taken."""
        body = self._body
        generation = self._generation
        self._reader.count(choices)
        found = map(self._choice, choices)
        is_one = len(self._echoes) == 1
        prompt = {
            "prompt_token_ids": generation.prompt(0).prompt_token_ids
            if body.return_token_ids and is_one
            else None
        }
        of_prompt = prompt_logprobs(
            None if body.prompt_logprobs is None else generation.prompt(0).prompt_logprobs
        )
        return {
            **self._head("chat.completion"),
            "choices": found,
            "usage": self.usage(),
            "prompt_logprobs": of_prompt,
            **prompt,
            **self._timings(),
            **generation.fields,
        }

    def raw(self, choice: ChoicePiece) -> list[tuple[str, list[int]]]:
        """Text and tokens of the prompt, as the model read it, and of a whole choice, as it was
        drawn."""
        decode = self._engine.renderer.decode
        return [
            (decode(tokens), [*tokens])
            for tokens in (self._generation.prompt(choice.index).prompt_token_ids, choice.token_ids)
        ]

    async def chunks(
        self, *, in_pieces: bool = False
    ) -> AsyncGenerator[list[dict[str, Any]], None]:
        """The objects of a stream, each a chat.completion.chunk, as they come. Raises ApiError.

        `in_pieces`: a call that a grammar guarantees comes as it is written, and may be cut.
        Otherwise all calls come whole.
        """
        body = self._body
        generation = self._generation
        self._reader.in_pieces = in_pieces
        head = self._head("chat.completion.chunk")

        def chunk(index: int, delta: dict[str, Any], **more: Any) -> dict[str, Any]:
            choice = {"index": index, "delta": delta, **_UNSAID, **more}
            return {**head, "choices": [choice], **body.usage_so_far(self.usage)}

        first = [chunk(index, {"role": "assistant", "content": ""}) for index in range(body.n or 1)]
        if body.return_token_ids:
            first[0]["prompt_token_ids"] = generation.first_prompt_token_ids
        yield first + [
            chunk(index, {"content": echo})
            for index in range(body.n or 1)
            for echo in self._echoes
            if echo
        ]
        async for deltas in generation.pieces():
            chunks = []
            self._reader.count(deltas)
            for delta in deltas:
                wanted: dict[str, Any] = (
                    {"token_ids": delta.token_ids} if body.return_token_ids else {}
                )
                parts, reason = self._reader.read(delta)
                end: dict[str, Any] = (
                    {}
                    if reason is None
                    else {
                        "finish_reason": reason,
                        "stop_reason": delta.stop_reason,
                        **delta.extras(),
                    }
                )
                if parts or delta.logprobs or wanted.get("token_ids"):
                    more = {"logprobs": self._logprobs(delta), **wanted, **end}
                    made = chunk(delta.index, self._reader.delta(parts), **more)
                    chunks.append(made | self._timings() | generation.fields)
                elif end:
                    made = chunk(delta.index, {}, **end)
                    chunks.append(made | self._timings() | generation.fields)
            yield chunks
        if body.include_usage:
            yield [{**head, "choices": [], "usage": self.usage()}]

    def _logprobs(self, piece: ChoicePiece) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        token_bytes = self._engine.renderer.token_bytes
        named = self._body.logprob_token_ids
        return chat_logprobs(
            piece.token_ids, piece.logprobs, self._body.top_logprobs or 0, token_bytes, named
        )

    def _choice(self, choice: ChoicePiece) -> dict[str, Any]:
        body = self._body
        reader = self._reader
        parts, reason = reader.read(choice)
        message = reader.message(parts)
        if echo := self._echoes[choice.index // (body.n or 1)]:
            message["content"] = echo + (message["content"] or "")
        return {
            "index": choice.index,
            "message": message,
            "logprobs": self._logprobs(choice),
            "finish_reason": reason,
            "stop_reason": choice.stop_reason,
            "token_ids": choice.token_ids if body.return_token_ids else None,
            **self._prompt_of(choice),
            **choice.extras(),
        }

    def _prompt_of(self, choice: ChoicePiece) -> dict[str, Any]:
        """The prompt's tokens, where conversations have prompts of their own."""
        if not self._body.return_token_ids or len(self._echoes) == 1:
            return {}
        return {"prompt_token_ids": self._generation.prompt(choice.index).prompt_token_ids}

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{self._generation.id}",
            "object": kind,
            "created": self._generation.created,
            "model": self._engine.served_model_name,
            "system_fingerprint": self._fingerprint,
            **({} if self._body.service_tier is None else {"service_tier": "default"}),
        }

    def _timings(self) -> dict[str, Any]:
        return {"timings": self._generation.timings()} if self._body.timings else {}


def _prefilled(
    conversations: Sequence[list[dict[str, Any]]], options: dict[str, Any]
) -> tuple[list[list[dict[str, Any]]], dict[str, Any]]:
    """Returns what `prefilled` does, for conversations of which hardly any has a mark."""
    messages = [message for conversation in conversations for message in conversation]
    if any(isinstance(message, dict) and name in message for name in MARKS for message in messages):
        return prefilled(conversations, options)
    return [*conversations], options


def _echo(messages: Conversation) -> str:
    """The text of the last message where it is the assistant's. The answer begins with it."""
    last = messages[-1]
    content = last.get("content") if last.get("role") == "assistant" else None
    parts = content if isinstance(content, list) else [{"text": content}]
    return "".join(
        part["text"]
        for part in parts
        if isinstance(part, dict) and isinstance(part.get("text"), str)
    )
