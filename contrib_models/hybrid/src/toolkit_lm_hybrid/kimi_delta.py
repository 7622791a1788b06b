"""Kimi Delta Attention (Kimi Team 2025): the gated delta rule with a decay for each channel."""

from __future__ import annotations

from typing import Any

import torch
from toolkit_lm.config import VllmConfig
from toolkit_lm.model import (
    ColumnParallelLinear,
    HFConfig,
    ReplicatedLinear,
    Rotation,
    RowParallelLinear,
    Shard,
    ShardLoader,
    join,
    new_parameter,
)
from torch import Tensor
from torch.nn import functional as F

from toolkit_lm_hybrid.delta_rule import DeltaRule
from toolkit_lm_hybrid.mixer import CausalConv, head_parameter
from toolkit_lm_hybrid.norm import GatedRMSNorm


class KimiDeltaAttention(DeltaRule):
    """x [T, H] -> [T, H]. Head counts are this rank's."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__(prefix)
        config = HFConfig(vllm_config.hf_config)
        heads = config.get("linear_num_heads", int, 32)
        self.head_size = config.get("linear_head_dim", int, 128)
        hidden_size = config.require("hidden_size", int)
        size = heads * self.head_size
        share = Shard.even(heads, vllm_config.parallel, f"heads of {prefix}")
        channels = Shard(size, share.start * self.head_size, share.size * self.head_size)
        options: dict[str, Any] = {"bias": False, "vllm_config": vllm_config}

        def column(inputs: int, outputs: int, name: str) -> ColumnParallelLinear:
            return ColumnParallelLinear(inputs, outputs, prefix=join(prefix, name), **options)

        def replicated(name: str) -> ReplicatedLinear:
            size = self.head_size
            return ReplicatedLinear(hidden_size, size, prefix=join(prefix, name), **options)

        self.q_proj = column(hidden_size, size, "q_proj")
        self.k_proj = column(hidden_size, size, "k_proj")
        self.v_proj = column(hidden_size, size, "v_proj")
        self.b_proj = column(hidden_size, heads, "b_proj")
        self.f_a_proj = replicated("f_a_proj")
        self.f_b_proj = column(self.head_size, size, "f_b_proj")
        self.g_a_proj = replicated("g_a_proj")
        self.g_b_proj = column(self.head_size, size, "g_b_proj")
        self.o_proj = RowParallelLinear(size, hidden_size, prefix=join(prefix, "o_proj"), **options)
        self.num_heads = self.num_groups = share.size
        self.sizes = [channels.size] * 3
        self.conv1d = CausalConv(
            (channels, channels, channels),
            config.get("linear_conv_kernel_dim", int, 4),
            bias=False,
            activation=config.get("hidden_act", str, "silu"),
            vllm_config=vllm_config,
        )
        self.dt_bias = head_parameter(channels)
        self.A_log = new_parameter((1, 1, share.size, 1), torch.float32, ShardLoader((share,), 2))
        self.o_norm = GatedRMSNorm(
            Shard.whole(self.head_size),
            group=self.head_size,
            eps=config.get("rms_norm_eps", float, 1e-5),
            activation="sigmoid",
            vllm_config=vllm_config,
        )
        self.keep_states(
            self.conv1d.state_shape,
            (share.size, self.head_size, self.head_size),
            vllm_config=vllm_config,
        )

    def forward(self, x: Tensor, rotation: Rotation | None = None) -> Tensor:
        """The rotation is not used: states know the order of tokens."""
        qkv = torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], dim=-1)
        faded = self.f_b_proj(self.f_a_proj(x))
        gate = self.g_b_proj(self.g_a_proj(x))
        out = torch.empty(
            (len(x), self.num_heads, self.head_size), dtype=torch.float32, device=x.device
        )
        self.run(qkv, self.b_proj(x), faded, out=out)
        result: Tensor = self.o_proj(self.o_norm(out, gate.view(out.shape)).flatten(1))
        return result

    def compute(self, *inputs: Tensor, out: Tensor) -> None:
        qkv, b, faded = inputs
        steps = F.softplus(faded.float() + self.dt_bias).view(out.shape)
        decay = torch.exp(-self.A_log[0].exp() * steps)
        self.apply_rule(qkv, decay, b.float().sigmoid(), out)
