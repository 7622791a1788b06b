"""LFM3: LFM2 with windows in some attention layers, an output gate per head, and norms of what each
half of a layer gives."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from toolkit_lm.config import VllmConfig
from toolkit_lm.model import ColumnParallelLinear, HFConfig, RMSNorm, Rotation, join
from toolkit_lm_decoder.gemma3 import rope_parameters
from toolkit_lm_decoder.llama import layer_window, norm_of
from toolkit_lm_decoder.qwen3 import Qwen3Attention
from toolkit_lm_rotary import RotaryEmbedding
from torch import Tensor, nn

from toolkit_lm_hybrid.hybrid import HybridLayer, HybridModel, HybridParts
from toolkit_lm_hybrid.lfm2 import Lfm2ForCausalLM, ShortConv, lfm_values
from toolkit_lm_hybrid.mixer import RecurrentMixer

ROPE = {
    "full_attention": {
        "rope_type": "proportional",
        "rope_theta": 1e6,
        "partial_rotary_factor": 0.5,
    },
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
"""`rope_parameters` of a checkpoint that states none."""


class Lfm3Attention(Qwen3Attention):
    """The results of a head times the sigmoid of a gate, which `g_proj` computes of the input."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config = HFConfig(vllm_config.hf_config)
        self.g_proj = (
            ColumnParallelLinear(
                config.require("hidden_size", int),
                config.require("num_attention_heads", int),
                vllm_config=vllm_config,
                prefix=join(prefix, "g_proj"),
            )
            if config.get("use_attention_gate", bool, True)
            else None
        )

    def window(self, config: HFConfig, layer: int) -> int | None:
        return layer_window(config, layer, otherwise=False)

    def forward(self, x: Tensor, rotation: Rotation) -> Tensor:
        attended: Tensor = self.attn(*self.project(x, rotation))
        if self.g_proj is not None:
            heads = attended.view(len(x), -1, self.head_size)
            attended = (heads * torch.sigmoid(self.g_proj(x))[..., None]).view(len(x), -1)
        out: Tensor = self.o_proj(attended)
        return out


class Lfm3Layer(HybridLayer):
    post_operator_norm: RMSNorm | nn.Identity
    post_ffn_norm: RMSNorm | nn.Identity

    def __init__(self, parts: type[HybridParts], *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__(parts, vllm_config=vllm_config, prefix=prefix)
        config = HFConfig(vllm_config.hf_config)
        normed = config.get("use_sandwich_norm", bool, True)
        for name in ("post_operator_norm", "post_ffn_norm"):
            norm = norm_of(config, vllm_config, parts.norm) if normed else nn.Identity()
            self.add_module(name, norm)

    def forward(
        self, x: Tensor, residual: Tensor | None, rotation: Rotation
    ) -> tuple[Tensor, Tensor]:
        if residual is None:
            x, residual = self.input_layernorm(x), x
        else:
            x, residual = self.input_layernorm(x, residual)
        x = self.post_operator_norm(self.mix(x, rotation))
        x, residual = self.post_attention_layernorm(x, residual)
        return self.post_ffn_norm(self.mlp(x)), residual


class Lfm3Model(HybridModel):
    """Layers with a window rotate at a pace of their own."""

    def __init__(self, parts: type[Any], *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(parts, vllm_config=vllm_config, prefix=prefix)
        config = HFConfig(vllm_config.hf_config)
        self.local_rotary = self._rotary_of(config, "sliding_attention")
        owned: tuple[Any, ...] = self.layers.owned
        mixers = [layer.get_submodule(layer.mixer_names[0]) for layer in owned]
        self.is_local = [
            not isinstance(mixer, RecurrentMixer) and mixer.attn.params.window is not None
            for mixer in mixers
        ]

    def _rotary(self, config: HFConfig) -> RotaryEmbedding:
        return self._rotary_of(config, "full_attention")

    def _rotary_of(self, config: HFConfig, kind: str) -> RotaryEmbedding:
        return RotaryEmbedding(rope_parameters(config, kind), vllm_config=self.vllm_config)

    def rotations(self, positions: Tensor) -> list[Rotation]:
        everywhere = self.rotary(positions)
        nearby = self.local_rotary(positions)
        return [nearby if is_local else everywhere for is_local in self.is_local]


class Lfm3ForCausalLM(Lfm2ForCausalLM):
    renames = (*Lfm2ForCausalLM.renames, (r"\.self_attn\.gate_proj\.", ".self_attn.g_proj."))
    mixers = {
        "conv": {"conv": ShortConv},
        "full_attention": {"self_attn": Lfm3Attention},
        "sliding_attention": {"self_attn": Lfm3Attention},
    }
    layer: ClassVar[Any] = Lfm3Layer
    decoder = Lfm3Model

    @classmethod
    def values(cls, config: HFConfig) -> dict[str, Any]:
        stated = config.get("rope_parameters", dict, {})
        return {
            **lfm_values(config),
            "layer_types": cls.layer_kinds(config),
            "rope_parameters": {kind: stated.get(kind) or ROPE[kind] for kind in ROPE},
        }

    @classmethod
    def layer_kinds(cls, config: HFConfig) -> list[str]:
        if (kinds := config.get("layer_types", list)) is not None:
            return kinds
        names = ("sliding_attention", "conv", "full_attention", "conv")
        count = config.require("num_hidden_layers", int)
        return ["conv", *(names[i % 4] for i in range(1, count))][:count]
