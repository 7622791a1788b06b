"""Gated delta net (Yang et al. 2024)."""

from __future__ import annotations

from typing import Any

import torch
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import CheckpointError
from toolkit_lm.model import (
    ColumnParallelLinear,
    HFConfig,
    MergedColumnParallelLinear,
    RowParallelLinear,
    Shard,
    join,
)
from torch import Tensor
from torch.nn import functional as F

from toolkit_lm_hybrid.delta_rule import DeltaRule
from toolkit_lm_hybrid.mixer import CausalConv, head_parameter
from toolkit_lm_hybrid.norm import GatedRMSNorm


class GatedDeltaNet(DeltaRule):
    """x [T, H] -> [T, H], with the projections of Qwen3.5. Head counts are this rank's."""

    beta_scale = 1.0
    """Greatest beta. Above 1, an eigenvalue of a state's transition may be negative."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__(prefix)
        config = HFConfig(vllm_config.hf_config)
        parallel = vllm_config.parallel
        key_heads = config.get("linear_num_key_heads", int, 16)
        value_heads = config.get("linear_num_value_heads", int, 32)
        self.key_size = config.get("linear_key_head_dim", int, 128)
        self.value_size = config.get("linear_value_head_dim", int, 128)
        if min(key_heads, value_heads) < 1 or value_heads % key_heads:
            raise CheckpointError(
                f"config.json: 'linear_num_value_heads' must be a multiple of "
                f"'linear_num_key_heads' ({key_heads}), not {value_heads}."
            )
        groups = Shard.even(key_heads, parallel, f"key heads of {prefix}")
        heads = Shard.even(value_heads, parallel, f"value heads of {prefix}")
        keys = Shard.even(key_heads * self.key_size, parallel, prefix)
        values = Shard.even(value_heads * self.value_size, parallel, prefix)
        self.num_groups = groups.size
        self.num_heads = heads.size
        self.sizes = [keys.size, keys.size, values.size]
        self.conv1d = CausalConv(
            (keys, keys, values),
            config.get("linear_conv_kernel_dim", int, 4),
            bias=False,
            activation=config.get("hidden_act", str, "silu"),
            vllm_config=vllm_config,
        )
        self.dt_bias = head_parameter(heads)
        self.A_log = head_parameter(heads)
        self.norm = GatedRMSNorm(
            Shard.whole(self.value_size),
            group=self.value_size,
            eps=self.norm_eps(config),
            vllm_config=vllm_config,
        )
        hidden_size = config.require("hidden_size", int)
        self.make_projections(
            hidden_size, keys.full, values.full, heads.full, vllm_config=vllm_config, prefix=prefix
        )
        self.out_proj = RowParallelLinear(
            values.full, hidden_size, vllm_config=vllm_config, prefix=join(prefix, "out_proj")
        )
        self.keep_states(
            self.conv1d.state_shape,
            (self.num_heads, self.key_size, self.value_size),
            vllm_config=vllm_config,
        )

    def norm_eps(self, config: HFConfig) -> float:
        """Epsilon of the norm of the result."""
        return config.get("rms_norm_eps", float, 1e-6)

    def make_projections(
        self, hidden_size: int, keys: int, values: int, heads: int, **options: Any
    ) -> None:
        """Makes the projections of the input. Sizes are those of all ranks."""
        prefix = options.pop("prefix")
        self.in_proj_qkv = MergedColumnParallelLinear(
            hidden_size, [keys, keys, values], prefix=join(prefix, "in_proj_qkv"), **options
        )
        self.in_proj_z = ColumnParallelLinear(
            hidden_size, values, prefix=join(prefix, "in_proj_z"), **options
        )
        self.in_proj_ba = MergedColumnParallelLinear(
            hidden_size, [heads, heads], prefix=join(prefix, "in_proj_ba"), **options
        )

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries, keys and values [T, channels], the gate [T, heads * value size], and the logits
        of beta and of the decay [T, heads]."""
        b, a = self.in_proj_ba(x).chunk(2, dim=-1)
        return self.in_proj_qkv(x), self.in_proj_z(x), b, a

    def forward(self, x: Tensor) -> Tensor:
        qkv, z, b, a = self.project(x)
        out = torch.empty(
            (len(x), self.num_heads, self.value_size), dtype=torch.float32, device=x.device
        )
        self.run(qkv, b, a, out=out)
        result: Tensor = self.out_proj(self.norm(out, z.reshape(out.shape)).flatten(1))
        return result

    def compute(self, *inputs: Tensor, out: Tensor) -> None:
        qkv, b, a = inputs
        beta = b.float().sigmoid()
        if self.beta_scale != 1:
            beta *= self.beta_scale
        decay = torch.exp(-self.A_log.exp() * F.softplus(a.float() + self.dt_bias))
        self.apply_rule(qkv, decay, beta, out)


class GroupedGatedDeltaNet(GatedDeltaNet):
    """The same with the projections of Qwen3-Next, which are sorted by groups of heads."""

    def make_projections(
        self, hidden_size: int, keys: int, values: int, heads: int, **options: Any
    ) -> None:
        prefix = options.pop("prefix")
        self.in_proj_qkvz = ColumnParallelLinear(
            hidden_size, 2 * (keys + values), prefix=join(prefix, "in_proj_qkvz"), **options
        )
        self.in_proj_ba = ColumnParallelLinear(
            hidden_size, 2 * heads, prefix=join(prefix, "in_proj_ba"), **options
        )

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        groups = self.num_groups
        sizes = [size // groups for size in (*self.sizes, self.sizes[2])]
        q, k, v, z = self.in_proj_qkvz(x).unflatten(-1, (groups, -1)).split(sizes, dim=-1)
        b, a = self.in_proj_ba(x).unflatten(-1, (groups, -1)).chunk(2, dim=-1)
        qkv = torch.cat([q.flatten(1), k.flatten(1), v.flatten(1)], dim=-1)
        return qkv, z.flatten(1), b.flatten(1), a.flatten(1)
