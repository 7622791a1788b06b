"""Routes of vLLM that the server has not by itself: tokens in and tokens out, and the engine's
options. `--routes vllm_names` serves them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from fastapi import APIRouter, Request, Response
from pydantic import Field
from toolkit_lm.errors import RequestError
from toolkit_lm_server.answer_schemas import answers
from toolkit_lm_server.answers import encoded
from toolkit_lm_server.errors import described, validated
from toolkit_lm_server.fields import Items
from toolkit_lm_server.logprobs import chat_logprobs, prompt_logprobs
from toolkit_lm_server.protocol import EngineBody, examples
from toolkit_lm_server.request_fields import COMMON, refused
from toolkit_lm_server.route import request_context
from toolkit_lm_server.schema_texts import Described
from toolkit_lm_server.threads import aside

if TYPE_CHECKING:
    from toolkit_lm_server.generation import ChoicePiece, Generation
    from toolkit_lm_server.plugin_routes import OpenAIApi

_OF_THE_BODY = (
    *("prompt", "encoder_prompt", "decoder_prompt", "suffix", "echo", "stream", "stream_options"),
    *("model", "return_token_ids", "return_tokens_as_token_ids", "add_special_tokens"),
    *("truncation_side", "n_predict", "priority", "timeout", "cache_salt"),
    *("timings", "prompt_embeds"),
)
"""Fields of plain completions that are not sampling parameters."""
_NO_EFFECT = ("output_kind", "detokenize", "skip_clone")
"""Sampling parameters of vLLM that say how an answer is handed on: tokens are, once all are
there."""


class TokenGenerateBody(EngineBody):
    """The body of POST /inference/v1/generate."""

    verdicts = {
        **COMMON,
        **refused("send media in messages: /v1/chat/completions", "features"),
        **refused("use /v1/completions with token ids and return_token_ids", "stream", False),
        **refused("use /v1/completions with token ids", "stream_options"),
    }
    model_config = examples(
        {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 8, "temperature": 0}}
    )

    token_ids: Items[int]
    """The prompt."""
    sampling_params: dict[str, Any] = Field(default_factory=dict)
    """Fields of vLLM's SamplingParams."""
    request_id: str | None = Field(None, max_length=128)
    """The id that the answer tells. null: one is made."""

    def completion(self) -> dict[str, Any]:
        """The same as a plain completion. Raises RequestError for what is not a sampling
        parameter."""
        fields = {
            name: value
            for name, value in self.sampling_params.items()
            if value is not None and name not in _NO_EFFECT
        }
        extra_args = fields.pop("extra_args", {})
        if not isinstance(extra_args, dict):
            raise RequestError("extra_args must be a mapping.", "sampling_params")
        fields = {**extra_args, **fields}
        if wrong := [name for name in _OF_THE_BODY if name in fields]:
            raise RequestError(f"sampling_params have no {wrong[0]!r}.", "sampling_params")
        of_body = ("model", "priority", "timeout", "cache_salt")
        own = {name: found for name in of_body if (found := getattr(self, name)) is not None}
        return fields | own | {"prompt": self.token_ids}


class TokenChoice(Described):
    index: int
    token_ids: list[int]
    logprobs: dict[str, Any] | None = None
    """Log probabilities of the tokens, as chat completions have them."""
    finish_reason: str | None
    """Why it ended: "stop", "length", "timeout" or "abort"."""


class TokenAnswer(Described):
    """The answer of POST /inference/v1/generate."""

    request_id: str
    choices: list[TokenChoice]
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    """Entries by token id for each token of the prompt, null for the first."""


class ServerInfo(Described):
    """The answer of GET /server_info."""

    vllm_config: str | dict[str, Any]
    """The engine's resolved options, without those of plugins: one line, or an object of its
    sections, such as `model_config`."""


class TokenRoutes:
    """Answers of the routes, by the server's own completions."""

    def __init__(self, api: OpenAIApi) -> None:
        self._api = api

    async def generate(self, body: TokenGenerateBody, request: Request) -> Response:
        """Continues a prompt of tokens. The answer has tokens, and no text."""
        completions = self._api.completions
        completion = await aside(lambda: validated(completions.body, body.completion()))
        generation = await completions.begin(completion, request_context(request))
        choices = await generation.choices()
        top = completion.logprobs
        answer = await asyncio.to_thread(self._answer, body, generation, choices, top)
        return Response(answer, media_type="application/json")

    def _answer(
        self,
        body: TokenGenerateBody,
        generation: Generation,
        choices: list[ChoicePiece],
        top: int | None,
    ) -> bytes:
        token_bytes = self._api.engines[body.model].renderer.token_bytes
        made = [
            {
                "index": piece.index,
                "token_ids": piece.token_ids,
                "logprobs": None
                if top is None
                else chat_logprobs(piece.token_ids, piece.logprobs, top, token_bytes),
                "finish_reason": piece.finish_reason,
            }
            for piece in choices
        ]
        of_prompt = prompt_logprobs(generation.prompt(0).prompt_logprobs)
        request_id = body.request_id or f"generate-{generation.id}"
        return bytes(
            encoded({"request_id": request_id, "choices": made, "prompt_logprobs": of_prompt})
        )

    async def info(self, config_format: Literal["text", "json"] = "text") -> dict[str, Any]:
        """The engine's resolved options."""
        config = self._api.engines[None].config
        sections = {
            name: msgspec.to_builtins(getattr(config, name))
            for name in config.__struct_fields__
            if name not in ("checkpoint", "plugins")
        }
        if config_format == "json":
            return {"vllm_config": _as_vllm(sections, config.plugins.plugin_option.get("rl") or {})}
        options = [
            f"{name}={json.dumps(value)}"
            for section in sections.values()
            for name, value in section.items()
        ]
        return {"vllm_config": ", ".join(options)}


def _as_vllm(sections: dict[str, Any], rl: Mapping[str, Any]) -> dict[str, Any]:
    """Sections by vLLM's names. `rl`: options of the plugin rl."""
    made: dict[str, Any] = {f"{name}_config": section for name, section in sections.items()}
    made["model_config"] = {**sections["model"], **sections["limits"]}
    way = rl.get("weight_transfer", "off")
    made["weight_transfer_config"] = None if way == "off" else {"backend": way}
    return made


def add_routes(router: APIRouter, api: OpenAIApi) -> None:
    """Adds the routes; that of the options only with the server's option `admin_routes`."""
    routes = TokenRoutes(api)
    router.add_api_route(
        "/inference/v1/generate",
        routes.generate,
        methods=["POST"],
        response_model=None,
        responses=answers(TokenAnswer) | described(404, 429, 504),
    )
    if api.options.admin_routes:
        router.add_api_route(
            "/server_info", routes.info, response_model=None, responses=answers(ServerInfo)
        )
