"""RecurrentGemma (Botev et al. 2024): real-gated linear recurrent units, and windowed attention in
every third layer."""

from __future__ import annotations

import math
from typing import Any

import torch
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import CheckpointError
from toolkit_lm.model import (
    HFConfig,
    MergedColumnParallelLinear,
    RowParallelLinear,
    Shard,
    ShardLoader,
    choose_kernels,
    get_activation,
    join,
    new_parameter,
)
from toolkit_lm_decoder.gemma2 import CappedForCausalLM, GemmaMLP, GemmaRMSNorm
from toolkit_lm_decoder.llama import LlamaAttention
from torch import Tensor, nn
from torch.nn import functional as F

from toolkit_lm_hybrid.blocks import BlockProduct
from toolkit_lm_hybrid.hybrid import HybridForCausalLM, HybridModel
from toolkit_lm_hybrid.mixer import CausalConv, RecurrentMixer, convolved, head_parameter
from toolkit_lm_hybrid.recurrence import scan

_SHARPNESS = 8.0
"""Factor of the logarithm of a decay."""


class GateLoader(ShardLoader):
    """The WeightLoader of gates, side by side: blocks [heads, size, size], of which each is
    transposed, or biases [heads, size]."""

    def __call__(self, param: Tensor, loaded: Tensor, shard_id: int | None = None) -> None:
        size = param.shape[1] // 2
        assert shard_id is not None, "checkpoints hold gates apart"
        own = param.data.narrow(1, shard_id * size, size)
        super().__call__(own, loaded.mT if loaded.ndim == 3 else loaded)


class RgLru(nn.Module):
    """The gates of a real-gated linear recurrent unit (De et al. 2024), in float32: block-diagonal,
    a block for each of `heads`."""

    def __init__(self, heads: Shard, size: int, channels: Shard) -> None:
        super().__init__()
        self.kernels = choose_kernels()
        loader = GateLoader((heads,))
        self.gate_weight = new_parameter((heads.size, 2 * size, size), torch.float32, loader)
        self.gate_bias = new_parameter((heads.size, 2 * size), torch.float32, loader)
        self.recurrent_param = head_parameter(channels)
        self._made: tuple[list[Tensor], BlockProduct | None] | None = None
        """The block of each head, as kernels pack a constant tensor once, and the product of all
        in one. Both are made at the first use."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [T, C] -> the gates of the input and of the recurrence [T, C], and the rates of decay
        [1, C]."""
        heads = x.view(len(x), len(self.gate_bias), -1).transpose(0, 1)
        gates = self._multiply(heads).sigmoid_()
        entering, kept = (gate.transpose(0, 1).reshape(x.shape) for gate in gates.chunk(2, dim=-1))
        return entering, kept, -_SHARPNESS * F.softplus(self.recurrent_param)[None]

    def _multiply(self, x: Tensor) -> Tensor:
        """x [heads, T, size] -> [heads, T, 2 * size], each head by its block."""
        if self._made is None:
            weight = self.gate_weight.detach()
            self._made = [*weight], BlockProduct.of(self.kernels, weight)
        blocks, product = self._made
        if product is not None:
            return product(x, self.gate_bias)
        made = [
            self.kernels.linear(head, block, bias)
            for head, block, bias in zip(x, blocks, self.gate_bias, strict=True)
        ]
        return torch.stack(made)


class RecurrentBlock(RecurrentMixer):
    """x [T, H] -> [T, H]: a causal convolution, then the unit. The channels are this rank's."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__(prefix)
        config = HFConfig(vllm_config.hf_config)
        hidden_size = config.require("hidden_size", int)
        width = config.get("lru_width", int, hidden_size)
        count = config.require("num_attention_heads", int)
        if width % count:
            raise CheckpointError(
                f"config.json: 'lru_width' ({width}) must be a multiple of 'num_attention_heads' "
                f"({count})."
            )
        size = width // count
        heads = Shard.even(count, vllm_config.parallel, f"heads of {prefix}")
        channels = Shard(width, heads.start * size, heads.size * size)
        self.linear_yx = MergedColumnParallelLinear(
            hidden_size,
            [width] * 2,
            bias=True,
            vllm_config=vllm_config,
            prefix=join(prefix, "linear_yx"),
        )
        self.conv_1d = CausalConv(
            (channels,), config.get("conv1d_width", int, 4), bias=True, vllm_config=vllm_config
        )
        self.rg_lru = RgLru(heads, size, channels)
        self.linear_out = RowParallelLinear(
            width,
            hidden_size,
            bias=True,
            vllm_config=vllm_config,
            prefix=join(prefix, "linear_out"),
        )
        self.activation = get_activation(activation_of(config))
        self.keep_states(self.conv_1d.state_shape, (1, channels.size), vllm_config=vllm_config)

    def forward(self, x: Tensor) -> Tensor:
        gate, inputs = self.linear_yx(x).chunk(2, dim=-1)
        out = torch.empty(inputs.shape, dtype=torch.float32, device=x.device)
        self.run(inputs, out=out)
        result: Tensor = self.linear_out((out * self.activation(gate.float())).to(x.dtype))
        return result

    def compute(self, *inputs: Tensor, out: Tensor) -> None:
        steps = [*self.steps()]
        out.zero_()
        x = convolved(self.conv_1d, inputs[0], steps)
        entering, kept, rates = self.rg_lru(x)
        factor = (1 - torch.exp(2 * kept * rates)).sqrt()
        for rows, _ in steps:
            begins = (rows.starts == 0)[:, None]
            if len(rows.starts) == len(factor):
                # In the order of the batch, a token each.
                factor.masked_fill_(begins, 1)
                continue
            first = rows.tokens[:, 0]
            factor[first] = factor[first].masked_fill_(begins, 1)
        written = x * entering * factor
        whole = x.new_ones(1, 1).expand(len(x), 1)
        for rows, (_, states) in steps:
            scan(
                self.kernels,
                written,
                kept,
                rates,
                whole,
                whole,
                ring=states,
                rows=rows,
                out=out,
            )


def activation_of(config: HFConfig) -> str:
    return config.get("hidden_activation", str, "gelu_pytorch_tanh")


class RecurrentGemmaAttention(LlamaAttention):
    def has_output_bias(self, config: HFConfig) -> bool:
        return True

    def window(self, config: HFConfig, layer: int) -> int | None:
        return config.get("attention_window_size", int, 2048)


class RecurrentGemmaMLP(GemmaMLP):
    def inner_size(self, config: HFConfig, layer: int) -> int:
        return config.require("intermediate_size", int) // 2


class RecurrentGemmaModel(HybridModel):
    is_tied_by_default = True

    def embedding_scale(self, config: HFConfig) -> float:
        # The model was trained with a factor that is rounded to bfloat16.
        root = math.sqrt(config.require("hidden_size", int))
        return float(torch.tensor(root, dtype=torch.bfloat16, device="cpu"))


class RecurrentGemmaForCausalLM(HybridForCausalLM, CappedForCausalLM):
    packed = {
        **HybridForCausalLM.packed,
        "linear_yx": ("linear_y", "linear_x"),
        "gate_weight": ("input_gate_weight", "recurrent_gate_weight"),
        "gate_bias": ("input_gate_bias", "recurrent_gate_bias"),
    }
    renames = (
        (r"\.temporal_block\.([qkvo]_proj)\.", r".self_attn.\1."),
        (r"\.temporal_pre_norm\.", ".input_layernorm."),
        (r"\.channel_pre_norm\.", ".post_attention_layernorm."),
        (r"\.mlp_block\.", ".mlp."),
        (r"\.final_norm\.", ".norm."),
    )
    mixers = {
        "recurrent": {"temporal_block": RecurrentBlock},
        "attention": {"self_attn": RecurrentGemmaAttention},
    }
    feed_forward = RecurrentGemmaMLP
    norm = GemmaRMSNorm
    decoder = RecurrentGemmaModel
    partial_rotary_factor = 0.5

    @classmethod
    def values(cls, config: HFConfig) -> dict[str, Any]:
        return {
            "final_logit_softcapping": config.get("logits_soft_cap", float, 30.0),
            # The length that the model was trained on. Windows and states have no end.
            "max_position_embeddings": config.get("max_position_embeddings", int, 8192),
            "mlp_bias": True,
        }

    @classmethod
    def layer_kinds(cls, config: HFConfig) -> list[str]:
        period = config.get("block_types", list, ["recurrent", "recurrent", "attention"])
        count = config.require("num_hidden_layers", int)
        return [str(period[i % len(period)]) for i in range(count)] if period else []
