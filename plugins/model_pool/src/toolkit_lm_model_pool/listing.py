"""The models of a pool as OpenAI, llama.cpp, llama-swap and Ollama list them."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from toolkit_lm_server.errors import missing

from toolkit_lm_model_pool.model import PooledModel
from toolkit_lm_model_pool.names import adapter_of, find, may_use, names_of
from toolkit_lm_model_pool.pool import Pool
from toolkit_lm_model_pool.schemas import ShowBody

_LLAMA = {"loading": "loading", "ready": "loaded", "asleep": "sleeping"}
_SWAP = {
    "loading": "starting",
    "ready": "ready",
    "asleep": "asleep",
    "unloading": "stopping",
}
_NEVER = "9999-12-31T00:00:00Z"


class Listing:
    """Handlers that list models. A key sees those that it may use."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._created = int(time.time())
        self._since = _utc(self._created)

    def _models(self) -> Iterator[PooledModel]:
        return (model for model in list(self._pool.models.values()) if may_use(model))

    async def models(self) -> dict[str, Any]:
        """The models, with the state of each."""
        models = list(self._pool.models.values())
        cards = [self._card(model, name) for model in models for name in names_of(model)]
        return {"object": "list", "data": cards}

    async def model(self, model: str) -> dict[str, Any]:
        """Describes one model."""
        if not model:
            return await self.models()
        found = find(self._pool.models, model)
        names = [*names_of(found)]
        return self._card(
            found, model if model in names else adapter_of(found, model) or found.name
        )

    async def running(self) -> dict[str, Any]:
        """The models that have a process, as llama-swap lists them."""
        found = [
            {
                "model": model.name,
                "state": _SWAP[model.state],
                "progress": model.progress(time.monotonic()),
            }
            for model in self._models()
            if model.state in _SWAP
        ]
        return {"running": found}

    async def load(self) -> dict[str, int]:
        """Counts the requests that are under way or wait."""
        models = self._pool.models.values()
        return {"server_load": sum(model.in_flight + len(model.waiters) for model in models)}

    async def tags(self) -> dict[str, Any]:
        """The models, as Ollama lists them."""
        return {"models": [self._tag(model) for model in self._models()]}

    async def loaded(self) -> dict[str, Any]:
        """The models that are loaded or asleep, as Ollama lists them."""
        return {
            "models": [
                {
                    **self._tag(model),
                    "expires_at": self._expiry(model),
                    "size_vram": 0,
                    "context_length": _length(model) or 0,
                    "state": model.state,
                }
                for model in self._models()
                if model.state in ("ready", "asleep")
            ]
        }

    async def show(self, body: ShowBody) -> dict[str, Any]:
        """Describes a model as Ollama does, without loading it."""
        name = body.model or body.name
        if name is None:
            raise missing("model")
        model = find(self._pool.models, name)
        config = model.resolved
        facts = {} if config is None else config.hf_config
        family = _family(model)
        info: dict[str, Any] = {"general.architecture": family}
        for theirs, value in (
            ("context_length", _length(model)),
            ("embedding_length", facts.get("hidden_size")),
            ("block_count", facts.get("num_hidden_layers")),
            ("attention.head_count", facts.get("num_attention_heads")),
        ):
            if isinstance(value, int):
                info[f"{family}.{theirs}"] = value
        pools = config is not None and config.model.runner == "pooling"
        return {
            "modelfile": "",
            "parameters": "",
            "template": "",
            "details": _details(model),
            "model_info": info,
            "capabilities": ["embedding"] if pools else ["completion"],
            "modified_at": self._since,
        }

    def _card(self, model: PooledModel, name: str) -> dict[str, Any]:
        value = _LLAMA.get(model.state, "unloaded")
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "toolkit-lm",
            "root": model.adapters.get(name, model.settings.config.model.model),
            "parent": None if name == model.name else model.name,
            "max_model_len": _length(model),
            "aliases": model.entry.aliases,
            "status": {"value": value, "failed": model.state == "failed"},
            **model.facts(),
        }

    def _tag(self, model: PooledModel) -> dict[str, Any]:
        return {
            "name": model.name,
            "model": model.name,
            "modified_at": self._since,
            "size": 0 if model.need is None else model.need.weights,
            "digest": hashlib.sha256(model.name.encode()).hexdigest(),
            "details": _details(model),
        }

    @staticmethod
    def _expiry(model: PooledModel) -> str:
        if model.entry.pin or model.keep_alive is None or model.state == "asleep":
            return _NEVER
        idle = time.monotonic() - max(model.last_used, model.ready_since)
        return _utc(time.time() + max(model.keep_alive - idle, 0.0))


def _utc(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _length(model: PooledModel) -> int | None:
    return None if model.resolved is None else model.resolved.max_model_len


def _family(model: PooledModel) -> str:
    config = model.resolved
    return "model" if config is None else str(config.hf_config.get("model_type", "model"))


def _details(model: PooledModel) -> dict[str, Any]:
    family = _family(model)
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": "",
        "quantization_level": "",
    }
