"""The routes POST /tokenize and /detokenize, in vLLM's shapes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import Request, Response
from toolkit_lm.errors import RequestError
from toolkit_lm.processing import check_token_ids
from toolkit_lm.renderer import Rendered, Renderer
from toolkit_lm.resolution import read_json

from toolkit_lm_server.answers import answer
from toolkit_lm_server.engines import Models
from toolkit_lm_server.render_protocol import DetokenizeBody, TokenizeBody
from toolkit_lm_server.route import request_context

if TYPE_CHECKING:
    from toolkit_lm_serving.engine import ServedModel


class Tokens:
    """Handlers of the models' tokenizers."""

    def __init__(self, models: Models) -> None:
        self._models = models

    async def tokenize(self, body: TokenizeBody, request: Request) -> Response:
        """Token ids of a text or a conversation."""
        model = self._models[body.model]
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("Give either 'prompt' or 'messages'.", "prompt")
        if body.messages is None:
            body.refuse_render_options()
        prompt = body.prompt if body.messages is None else (body.messages, body.render_options())
        with model.hold_rendering([prompt], {"context": request_context(request)}):
            token_ids = (await _rendered(model.renderer, body)).token_ids
            return await answer(lambda: _tokenized(model, token_ids, body))

    async def detokenize(self, body: DetokenizeBody) -> Response:
        """The text of token ids."""
        renderer = self._models[body.model].renderer
        return await answer(lambda: {"prompt": _detokenized(renderer, body.tokens)})

    async def info(self) -> Response:
        """Shows the content of tokenizer_config.json, and the chat template."""
        return await answer(self._info)

    def _info(self) -> dict[str, Any]:
        model = self._models[None]
        config = model.config
        assert config.checkpoint is not None, "the engine is ready"
        path = Path(config.renderer.tokenizer or config.checkpoint.path) / "tokenizer_config.json"
        stated = read_json(path) if path.is_file() else {}
        return {
            "tokenizer_class": "",
            **stated,
            "chat_template": model.renderer.chat_template_source or None,
        }


async def _rendered(renderer: Renderer, body: TokenizeBody) -> Rendered:
    if body.messages is not None:
        return await renderer.render_conversation_async(body.messages, **body.render_options())
    assert body.prompt is not None
    return await renderer.render_prompt_async(
        body.prompt, add_special_tokens=body.add_special_tokens is not False
    )


def _tokenized(model: ServedModel, token_ids: list[int], body: TokenizeBody) -> dict[str, Any]:
    texts = model.renderer.vocabulary_texts(token_ids) if body.return_token_strs else None
    return {
        "count": len(token_ids),
        "max_model_len": model.config.max_model_len,
        "tokens": token_ids,
        "token_strs": texts,
    }


def _detokenized(renderer: Renderer, token_ids: list[int]) -> str:
    check_token_ids(token_ids, renderer.vocab_size, "tokens")
    return renderer.decode(token_ids)
