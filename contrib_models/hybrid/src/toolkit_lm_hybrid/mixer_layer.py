"""Layers of one mixer after a norm: Mamba, Mamba-2, Nemotron-H."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from toolkit_lm.config import VllmConfig
from toolkit_lm.model import HFConfig, Rotation, join, layer_index
from toolkit_lm_decoder.llama import norm_of
from torch import Tensor, nn

from toolkit_lm_hybrid.hybrid import (
    HybridForCausalLM,
    HybridModel,
    HybridParts,
    layer_kind,
)


class MixerLayer(nn.Module):
    """A mixer, a recurrence, attention or a feed-forward, after a norm. The residual is passed on
    its own."""

    def __init__(self, parts: type[HybridParts], *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config = HFConfig(vllm_config.hf_config)
        self.norm = norm_of(config, vllm_config, parts.norm)
        [(name, make)] = parts.mixers[layer_kind(parts, config, layer_index(prefix))].items()
        self.mixer = make(vllm_config=vllm_config, prefix=join(prefix, "mixer"))
        self.has_positions = name == "self_attn"

    def forward(
        self, x: Tensor, residual: Tensor | None, rotation: Rotation
    ) -> tuple[Tensor, Tensor]:
        if residual is None:
            x, residual = self.norm(x), x
        else:
            x, residual = self.norm(x, residual)
        return self.mixer(x, rotation) if self.has_positions else self.mixer(x), residual


class UnrotatedModel(HybridModel):
    """Layers without rotary positions."""

    def rotates(self, config: HFConfig) -> bool:
        return False


class RecurrentForCausalLM(HybridForCausalLM):
    """A decoder of `MixerLayer`s. config.json has its fields by the names of Mamba."""

    packed = {}
    renames: ClassVar[Sequence[tuple[str, str]]] = (
        (r"^backbone\.", "model."),
        (r"^model\.embeddings?\.", "model.embed_tokens."),
        (r"^model\.norm_f\.", "model.norm."),
    )
    layer: ClassVar[Callable[..., nn.Module]] = MixerLayer
    decoder = UnrotatedModel

    @classmethod
    def values(cls, config: HFConfig) -> dict[str, Any]:
        return {"rms_norm_eps": config.get("layer_norm_epsilon", float, 1e-5)}

    @classmethod
    def layer_kinds(cls, config: HFConfig) -> list[str]:
        return ["linear_attention"] * config.require("num_hidden_layers", int)
