"""Descriptions of the served models."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from toolkit_lm import __version__

from toolkit_lm_vendor_apis.ollama.output import now

if TYPE_CHECKING:
    from toolkit_lm_serving.engine import ServingEngine

_NEVER = "9999-12-31T00:00:00Z"


class Models:
    """Models of one engine: all names stand for its model."""

    def __init__(self, engine: ServingEngine) -> None:
        self._engine = engine
        self._since = now()

    def version(self) -> dict[str, str]:
        """The version of toolkit-lm."""
        return {"version": __version__}

    def tags(self) -> dict[str, Any]:
        """The models that are served."""
        return {"models": [self._entry(name) for name in self._engine.config.served_model_names]}

    def running(self) -> dict[str, Any]:
        """The loaded models, which are all served models."""
        more = {
            "expires_at": _NEVER,
            "size_vram": 0,
            "context_length": self._engine.config.max_model_len,
        }
        return {"models": [entry | more for entry in self.tags()["models"]]}

    def card(self) -> dict[str, Any]:
        """Description of the model and its abilities."""
        config = self._engine.config
        family = self._family
        info: dict[str, Any] = {
            "general.architecture": family,
            f"{family}.context_length": config.max_model_len,
        }
        for theirs, ours in (
            ("embedding_length", "hidden_size"),
            ("block_count", "num_hidden_layers"),
            ("attention.head_count", "num_attention_heads"),
        ):
            if isinstance(value := config.hf_config.get(ours), int):
                info[f"{family}.{theirs}"] = value
        return {
            "modelfile": "",
            "parameters": "",
            "template": self.template,
            "details": self._details(),
            "model_info": info,
            "capabilities": self._capabilities(),
            "modified_at": self._since,
        }

    @property
    def template(self) -> str:
        """The chat template; empty where there is none."""
        return self._engine.renderer.chat_template_source

    @property
    def _family(self) -> str:
        return str(self._engine.config.hf_config.get("model_type", "model"))

    def _capabilities(self) -> list[str]:
        tasks = self._engine.tasks
        rules = self._engine.renderer.rules
        can = {
            "completion": "generate" in tasks,
            "vision": rules is not None and "image" in rules.modalities,
            "tools": "generate" in tasks
            and bool(self.template)
            and self._engine.renderer.writes_tools,
            "embedding": "embed" in tasks,
        }
        return [name for name, is_so in can.items() if is_so]

    def _entry(self, name: str) -> dict[str, Any]:
        # It names the model, and is of nothing that is kept.
        digest = hashlib.sha256(name.encode()).hexdigest()
        return {
            "name": name,
            "model": name,
            "modified_at": self._since,
            "size": 0,
            "digest": digest,
            "details": self._details(),
        }

    def _details(self) -> dict[str, Any]:
        family = self._family
        return {
            "parent_model": "",
            "format": "safetensors",
            "family": family,
            "families": [family],
            "parameter_size": "",
            "quantization_level": "",
        }
