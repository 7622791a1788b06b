"""llama.cpp's routes of the tokenizer and of the chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from fastapi import Request, Response
from toolkit_lm.errors import RequestError
from toolkit_lm.processing import check_token_ids
from toolkit_lm_server.answers import answer
from toolkit_lm_server.engines import Engines
from toolkit_lm_server.render_protocol import DetokenizeBody
from toolkit_lm_server.route import request_context
from toolkit_lm_server.threads import aside
from toolkit_lm_server.tokens import Tokens

from toolkit_lm_vendor_apis.llama_cpp.body import (
    ApplyTemplateBody,
    LlamaPrompt,
    LlamaTokenizeBody,
    Part,
)

if TYPE_CHECKING:
    from toolkit_lm.renderer import Renderer


class LlamaTokenizer:
    """Handlers of the models' tokenizers and chat templates."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self._tokens = Tokens(engines)

    async def tokenize(self, body: LlamaTokenizeBody, request: Request) -> Response:
        """Token ids of `content`, or vLLM's answer where there is none."""
        if body.content is None:
            body.refuse_options()
            return await self._tokens.tokenize(body, request)
        model = self._engines[body.model]
        if body.prompt is not None or body.messages is not None:
            raise RequestError("Give one of 'content', 'prompt' and 'messages'.", "content")
        content = await aside(body.parts)
        texts = [content] if isinstance(content, str) else [*content]
        with model.hold_rendering(texts, {"context": request_context(request)}):
            renderer = model.renderer
            tokens = await token_ids_of(renderer, content, add_special=body.add_special)
            if not body.with_pieces:
                return await answer(lambda: {"tokens": tokens})
            return await answer(lambda: {"tokens": _pieces(renderer, tokens)})

    async def detokenize(self, body: DetokenizeBody) -> Response:
        """The text of token ids: llama.cpp's `content`, and vLLM's `prompt`."""
        renderer = self._engines[body.model].renderer

        def made() -> dict[str, Any]:
            check_token_ids(body.tokens, renderer.vocab_size, "tokens")
            text = renderer.decode(body.tokens)
            return {"content": text, "prompt": text}

        return await answer(made)

    async def apply_template(self, body: ApplyTemplateBody, request: Request) -> Response:
        """A conversation as the chat template writes it."""
        model = self._engines[body.model]
        prompt = (body.messages, body.render_options())
        with model.hold_rendering([prompt], {"context": request_context(request)}):
            rendered = await model.renderer.render_conversation_async(
                body.messages, **body.render_options()
            )
            if rendered.features:
                raise RequestError(
                    "a text has no place for images and other media: ask /v1/chat/completions.",
                    "messages",
                )
            return await answer(lambda: {"prompt": model.renderer.decode(rendered.token_ids)})


async def token_ids_of(renderer: Renderer, prompt: LlamaPrompt, *, add_special: bool) -> list[int]:
    """The tokens of a prompt. `add_special`: the tokenizer's special tokens are added to a text
    with which it begins."""
    parts = [prompt] if isinstance(prompt, str) else prompt
    made: list[int] = []
    done = 0
    for index, text in await aside(_texts_among, parts):
        made += cast(list[int], parts[done:index])
        special = add_special and index == 0
        rendered = await renderer.render_prompt_async(text, add_special_tokens=special)
        made += rendered.token_ids
        done = index + 1
    return made + cast(list[int], parts[done:])


def texts_of(prompts: Sequence[LlamaPrompt]) -> list[str]:
    """The texts among the token ids of prompts."""
    lists = [prompt for prompt in prompts if isinstance(prompt, list)]
    return [text for parts in lists for _, text in _texts_among(parts)]


def _texts_among(parts: Sequence[Part]) -> list[tuple[int, str]]:
    """The texts among token ids, with their indices."""
    return [(index, part) for index, part in enumerate(parts) if isinstance(part, str)]


def _pieces(renderer: Renderer, token_ids: list[int]) -> list[dict[str, Any]]:
    check_token_ids(token_ids, renderer.vocab_size, "content")
    return [
        {"id": token, "piece": _piece(content)}
        for token, content in zip(token_ids, renderer.token_bytes(token_ids), strict=True)
    ]


def _piece(content: bytes) -> str | list[int]:
    """A token's text, or its bytes where they are a part of a character."""
    try:
        return content.decode()
    except UnicodeDecodeError:
        return list(content)
