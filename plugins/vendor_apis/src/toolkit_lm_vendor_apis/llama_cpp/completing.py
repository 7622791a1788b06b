"""POST /completion: its prompts and parameters as those of a plain completion."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

from fastapi import Request, Response
from toolkit_lm_server.answers import answer, encoded
from toolkit_lm_server.errors import as_api_error, renamed, validated
from toolkit_lm_server.event_stream import stream_of
from toolkit_lm_server.generation import Generation, are_large
from toolkit_lm_server.plugin_routes import OpenAIApi
from toolkit_lm_server.route import request_context
from toolkit_lm_server.threads import aside

from toolkit_lm_vendor_apis.llama_cpp.body import NAMES, LlamaCompletionBody
from toolkit_lm_vendor_apis.llama_cpp.output import Answers, LlamaEvents, settings_of
from toolkit_lm_vendor_apis.llama_cpp.slots import Slots
from toolkit_lm_vendor_apis.llama_cpp.tokens import texts_of, token_ids_of

if TYPE_CHECKING:
    from toolkit_lm_serving.engine import ServingEngine


class Completing:
    """Completions, as llama.cpp has them."""

    def __init__(self, api: OpenAIApi, body: type[LlamaCompletionBody], slots: Slots) -> None:
        """`body`: the body class with plugins' fields."""
        self._slots = slots
        self._api = api
        self._body = body

    async def complete(self, body: LlamaCompletionBody, request: Request) -> Response:
        """Completes one or several prompts."""
        begin = self._begin(body, request_context(request))
        if body.stream:
            return await stream_of(begin, _Begun.events, LlamaEvents)
        begun = await begin
        choices = await begun.generation.choices()
        if len(choices) == 1:
            await aside(begun.answers.keep, choices[0].token_ids)
        if body.is_several or len(choices) > 1:
            content = await asyncio.to_thread(
                lambda: bytes(encoded([*map(begun.answers.whole, choices)]))
            )
            return Response(content, media_type="application/json")
        [choice] = choices
        return await answer(lambda: begun.answers.whole(choice), is_large=are_large(choices))

    async def _begin(self, body: LlamaCompletionBody, context: dict[str, str]) -> _Begun:
        engine = self._api.engines[body.model]
        completions = self._api.completions
        try:
            fields = await aside(body.completion) | await _in_tokens(
                engine, body, context, self._api.options.max_prompts
            )
            completion = await aside(validated, completions.body, fields)
            settings = settings_of(completion.params(), body.n_probs or 0, stream=bool(body.stream))
            generation = await completions.begin(completion, context)
        except Exception as error:
            raise renamed(as_api_error(error), NAMES) from error
        name = body.model or engine.served_model_name
        return _Begun(
            generation, Answers(body, generation, engine.renderer, settings, name, self._slots)
        )


class _Begun:
    """A generation with its answers."""

    def __init__(self, generation: Generation, answers: Answers) -> None:
        self.generation = generation
        self.answers = answers

    def events(self) -> AsyncGenerator[list[dict[str, Any]], None]:
        return self.answers.events()

    async def aclose(self) -> None:
        await self.generation.aclose()


async def _in_tokens(
    engine: ServingEngine, body: LlamaCompletionBody, context: dict[str, str], most: int
) -> dict[str, Any]:
    """The prompts, at most `most`, and the biases of a body as a plain completion has them. Raises
    RequestError."""
    prompts = await aside(body.prompts, most)
    biases = body.biases()
    renderer = engine.renderer
    texts = [part for part, _ in biases if isinstance(part, str)]
    texts += await aside(texts_of, prompts)
    made: dict[str, Any] = {"prompt": prompts}
    with engine.hold_rendering(texts, {"context": context}):
        if not all(isinstance(prompt, str) for prompt in prompts):
            made["prompt"] = [
                await token_ids_of(renderer, prompt, add_special=True) for prompt in prompts
            ]
        if biases:
            made["logit_bias"] = {
                str(token): bias
                for part, bias in biases
                for token in await token_ids_of(renderer, [part], add_special=False)
            }
    return made
