"""Twin: T tokens of the flat batch, H hidden size, V vocabulary.

Attention and feed-forward of a layer read the same normed hidden states, and are added together.
Layers with an odd number see a window, and rotate at a pace of their own.
"""

from toolkit_lm.config import VllmConfig
from toolkit_lm.model import ColumnParallelLinear, HFConfig, Rotation, RowParallelLinear, join
from toolkit_lm_decoder.llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaForCausalLM,
    LlamaModel,
    LlamaParts,
)
from toolkit_lm_rotary import RopeParameters, RotaryEmbedding
from torch import Tensor, nn


def is_nearby(layer: int) -> bool:
    """Whether a layer sees a window alone."""
    return layer % 2 == 1


class TwinAttention(LlamaAttention):
    """Grouped-query self-attention: x [T, H] -> [T, H]."""

    def scale(self, config: HFConfig) -> float | None:
        return config.get("attention_multiplier", float)

    def window(self, config: HFConfig, layer: int) -> int | None:
        return config.require("sliding_window", int) if is_nearby(layer) else None


class TwinMLP(nn.Module):
    """Feed-forward without a gate, by squared ReLU: x [T, H] -> [T, H]."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config = HFConfig(vllm_config.hf_config)
        size = config.require("hidden_size", int)
        inner = config.require("intermediate_size", int)
        self.up_proj = ColumnParallelLinear(
            size, inner, vllm_config=vllm_config, prefix=join(prefix, "up_proj")
        )
        self.down_proj = RowParallelLinear(
            inner, size, vllm_config=vllm_config, prefix=join(prefix, "down_proj")
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.up_proj(x).relu().square())
        return out


class TwinLayer(LlamaDecoderLayer):
    """One norm, and two parts beside each other."""

    norms = ("input_layernorm",)

    def forward(
        self, x: Tensor, residual: Tensor | None, rotation: Rotation
    ) -> tuple[Tensor, Tensor]:
        x, residual = self.enter(x, residual)
        # Attention may write where x lies.
        fed = self.mlp(x)
        return self.self_attn(x, rotation) + fed, residual


class TwinModel(LlamaModel):
    """The layers, with a second table of angles for those that see a window."""

    def __init__(
        self, parts: type[LlamaParts], *, vllm_config: VllmConfig, prefix: str = ""
    ) -> None:
        super().__init__(parts, vllm_config=vllm_config, prefix=prefix)
        config = HFConfig(vllm_config.hf_config)
        theta = config.get("rope_local_base_freq", float, 10000.0)
        rope = RopeParameters.read(
            HFConfig({**config.values, "rope_theta": theta}), config.require("head_dim", int)
        )
        self.nearby = RotaryEmbedding(rope, vllm_config=vllm_config)
        numbers = range(len(self.layers))
        self.is_nearby = [is_nearby(i) for i in numbers if self.layers[i] in self.layers.owned]

    def rotations(self, positions: Tensor) -> list[Rotation]:
        everywhere = self.rotary(positions)
        nearby = self.nearby(positions)
        return [nearby if near else everywhere for near in self.is_nearby]


class TwinForCausalLM(LlamaForCausalLM):
    """The decoder with its language-modeling head, whose logits are scaled."""

    attention = TwinAttention
    feed_forward = TwinMLP
    layer = TwinLayer
    decoder = TwinModel
    packed = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.logit_scale = HFConfig(vllm_config.hf_config).get("logit_scale", float, 1.0)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """hidden_states [T, H] -> [T, V]."""
        logits: Tensor = super().compute_logits(hidden_states)
        return logits * self.logit_scale
