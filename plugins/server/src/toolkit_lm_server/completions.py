"""POST /v1/completions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from toolkit_lm.prompts import TokensPrompt

from toolkit_lm_server.context import request_context
from toolkit_lm_server.event_stream import EventStream
from toolkit_lm_server.generation import Generation, Piece, check_generates, check_model
from toolkit_lm_server.logprobs import completion_logprobs, echo_logprobs, joined, prompt_logprobs
from toolkit_lm_server.options import ServerOptions
from toolkit_lm_server.protocol import CompletionBody

if TYPE_CHECKING:
    from toolkit_lm.frontend import AsyncLLM


class Completions:
    """Texts that the engine's model goes on with."""

    def __init__(self, engine: AsyncLLM, options: ServerOptions) -> None:
        self._engine = engine
        self._options = options

    async def create(self, body: CompletionBody, request: Request) -> Response:
        """Completes one or several prompts."""
        check_model(self._engine, body.model)
        check_generates(self._engine)
        params = body.params()
        prompts = body.prompts(self._options.max_prompts)
        # The tokenizer may take long: not on the event loop.
        token_ids = await asyncio.to_thread(self._render, prompts)
        echoes = await asyncio.to_thread(self._echoes, prompts) if body.echo else [""] * len(prompts)
        generation = await Generation.start(self._engine, token_ids, params, body.request_options(request_context(request)))
        if body.stream:
            return EventStream(self._chunks(body, generation, echoes, params.n), generation)
        choices = []
        for one in await generation.choices():
            choice = _choice(one, body.logprobs, len(echoes[one.index // params.n]))
            if body.echo:
                echo = self._echo(body, generation, one.index, echoes[one.index // params.n])
                choice["text"] = echo["text"] + choice["text"]
                choice["logprobs"] = joined(echo["logprobs"], choice["logprobs"]) if body.echoes_logprobs else None
            if body.prompt_logprobs is not None:
                choice["prompt_logprobs"] = prompt_logprobs(generation.prompt_logprobs(one.index))
            choices.append(choice)
        return JSONResponse({**self._head(generation), "choices": choices, "usage": generation.usage()})

    async def _chunks(
        self, body: CompletionBody, generation: Generation, echoes: list[str], n: int
    ) -> AsyncGenerator[list[dict[str, Any]], None]:
        head = self._head(generation) | ({"usage": None} if body.include_usage else {})
        echoed: set[int] = set()
        async for deltas in generation.deltas():
            chunks = []
            for one in deltas:
                echo = echoes[one.index // n]
                # The prompt's log probabilities are known when its first token is there.
                if body.echo and one.index not in echoed:
                    echoed.add(one.index)
                    chunks.append({**head, "choices": [self._echo(body, generation, one.index, echo)]})
                if one.text or one.logprobs or one.finish_reason is not None:
                    chunks.append({**head, "choices": [_choice(one, body.logprobs, len(echo))]})
            yield chunks
        if body.include_usage:
            yield [{**head, "choices": [], "usage": generation.usage()}]

    def _render(self, prompts: list[str] | list[list[int]]) -> list[list[int]]:
        render = self._engine.renderer.render_prompt
        return [render(one if isinstance(one, str) else TokensPrompt(prompt_token_ids=one))[0] for one in prompts]

    def _echoes(self, prompts: list[str] | list[list[int]]) -> list[str]:
        return [one if isinstance(one, str) else self._engine.renderer.decode(one) for one in prompts]

    def _echo(self, body: CompletionBody, generation: Generation, index: int, text: str) -> dict[str, Any]:
        """The part of a choice that gives its prompt back."""
        choice = _choice(Piece(index, text), None)
        if body.echoes_logprobs:
            prompt, logprobs = generation.prompt(index), generation.prompt_logprobs(index)
            assert logprobs is not None and body.logprobs is not None
            [first] = self._engine.renderer.token_texts(prompt[:1])
            choice["logprobs"] = echo_logprobs(prompt, logprobs, body.logprobs, first)
        return choice

    def _head(self, generation: Generation) -> dict[str, Any]:
        return {
            "id": f"cmpl-{generation.id}",
            "object": "text_completion",
            "created": generation.created,
            "model": self._engine.config.served_model_name,
        }


def _choice(one: Piece, logprobs: int | None, offset: int = 0) -> dict[str, Any]:
    """`offset`: characters of the prompt before the choice's text."""
    offset += one.text_offset
    return {
        "index": one.index,
        "text": one.text,
        "logprobs": None if logprobs is None else completion_logprobs(one.token_ids, one.logprobs, logprobs, offset),
        "finish_reason": one.finish_reason,
        "stop_reason": one.stop_reason,
    }
