"""llama.cpp's routes that describe the model and the server."""

from __future__ import annotations

from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from toolkit_lm import __version__
from toolkit_lm_server.errors import ApiError, validated
from toolkit_lm_server.plugin_routes import OpenAIApi

from toolkit_lm_vendor_apis.llama_cpp.body import LlamaCompletionBody
from toolkit_lm_vendor_apis.llama_cpp.output import settings_of


class About:
    """Properties of the model, and the places of the batch."""

    def __init__(self, api: OpenAIApi, body: type[LlamaCompletionBody]) -> None:
        """`body`: the body class with plugins' fields."""
        self._api = api
        self._body = body

    async def props(self) -> dict[str, Any]:
        """Properties of the model and of the server."""
        model = self._api.engines[None]
        rules = model.renderer.rules
        modalities = () if rules is None else rules.modalities
        return {
            "default_generation_settings": {
                "id": 0,
                "id_task": -1,
                "n_ctx": model.config.max_model_len,
                "speculative": model.config.scheduler.drafter is not None,
                "is_processing": False,
                "params": self._settings(),
                "prompt": "",
            },
            "total_slots": model.config.scheduler.max_num_seqs,
            "model_path": model.config.model.model,
            "model_alias": model.served_model_name,
            "chat_template": model.renderer.chat_template_source,
            "bos_token": self._token("bos_token_id"),
            "eos_token": self._token("eos_token_id"),
            "modalities": {"vision": "image" in modalities, "audio": "audio" in modalities},
            "build_info": f"toolkit-lm {__version__}",
            "is_sleeping": False,
        }

    async def set_props(self) -> Response:
        """Properties cannot be changed (501)."""
        raise ApiError(
            501, "Properties cannot be changed by a request: they are options of toolkit serve."
        )

    async def slots(self, request: Request) -> Response:
        """Places of the batch, of which as many are busy as requests are under way."""
        model = self._api.engines[None]
        total = model.config.scheduler.max_num_seqs
        busy = min(self._api.num_requests(), total)
        if busy == total and request.query_params.get("fail_on_no_slot", "") not in ("", "0"):
            raise ApiError(503, "no slot is available: all of them are busy.")
        speculative = model.config.scheduler.drafter is not None
        settings = self._settings()
        return JSONResponse(
            [
                {
                    "id": index,
                    "id_task": -1,
                    "n_ctx": model.config.max_model_len,
                    "speculative": speculative,
                    "is_processing": index < busy,
                    "params": settings,
                }
                for index in range(total)
            ]
        )

    def _settings(self) -> dict[str, Any]:
        """The sampling parameters of a request that says nothing."""
        body = self._body(prompt="")
        fields = {**body.completion(), "prompt": ""}
        params = validated(self._api.completions.body, fields).params()
        return settings_of(params, 0, stream=False)

    def _token(self, name: str) -> str:
        """The text of a token that the model's config names; empty where it names none."""
        model = self._api.engines[None]
        found = model.config.hf_config.get(name)
        token = found[0] if isinstance(found, list) and found else found
        if type(token) is not int or not 0 <= token < model.renderer.vocab_size:
            return ""
        return model.renderer.token_texts([token])[0]
