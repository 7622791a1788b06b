"""Mamba-2 (Dao and Gu 2024): its mixers, and the decoder of them alone."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from toolkit_lm.config import ParallelConfig, VllmConfig
from toolkit_lm.errors import CheckpointError
from toolkit_lm.model import (
    HFConfig,
    LinearBase,
    LinearSpec,
    RowParallelLinear,
    Shard,
    join,
    torch_dtype,
)
from torch import Tensor
from torch.nn import functional as F

from toolkit_lm_hybrid.mixer import CausalConv, RecurrentMixer, head_parameter
from toolkit_lm_hybrid.mixer_layer import RecurrentForCausalLM
from toolkit_lm_hybrid.norm import GatedRMSNorm
from toolkit_lm_hybrid.recurrence import attend, heads_of


class Mamba2Shape(NamedTuple):
    """Sizes of a family's mixers, from config.json."""

    inner_size: int
    heads: int
    groups: int
    state_size: int
    kernel_size: int
    conv_bias: bool
    bias: bool
    """Whether the projections have biases."""
    eps: float
    norm: bool = True
    """Whether the result is normed. False: it is only gated."""
    gate_first: bool = True

    def check(self, prefix: str) -> None:
        """Raises CheckpointError where heads cannot be divided."""
        if min(self.heads, self.groups) < 1 or self.inner_size % self.heads:
            raise CheckpointError(
                f"{prefix}: {self.inner_size} channels cannot be divided over {self.heads} heads."
            )
        if self.heads % self.groups:
            raise CheckpointError(
                f"{prefix}: {self.heads} heads cannot share {self.groups} groups evenly."
            )

    @classmethod
    def read(cls, config: HFConfig) -> Mamba2Shape:
        """Reads config.json by the names of Bamba and its kin."""
        inner = config.get("mamba_expand", int, 2) * config.require("hidden_size", int)
        return cls(
            inner_size=inner,
            heads=config.get("mamba_n_heads", int, 128),
            groups=config.get("mamba_n_groups", int, 1),
            state_size=config.get("mamba_d_state", int, 256),
            kernel_size=config.get("mamba_d_conv", int, 4),
            conv_bias=config.get("mamba_conv_bias", bool, True),
            bias=config.get("mamba_proj_bias", bool, False),
            eps=config.get("rms_norm_eps", float, 1e-5),
        )


class Mamba2Mixer(RecurrentMixer):
    """x [T, H] -> [T, H]: a causal convolution, then the state space dual. Head counts are this
    rank's."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__(prefix)
        config = HFConfig(vllm_config.hf_config)
        shape = self.shape(config)
        parallel = vllm_config.parallel
        shape.check(prefix)
        heads = Shard.even(shape.heads, parallel, f"heads of {prefix}")
        groups = _shared(shape.groups, parallel, f"groups of {prefix}")
        inner = _times(heads, shape.inner_size // shape.heads)
        states = _times(groups, shape.state_size)
        self.num_heads = heads.size
        self.num_groups = groups.size
        self.sizes = [inner.size, inner.size + 2 * states.size, heads.size]
        self.conv_sizes = [inner.size, states.size, states.size]
        self.conv1d = CausalConv(
            (inner, states, states),
            shape.kernel_size,
            bias=shape.conv_bias,
            activation=config.get("hidden_act", str, "silu"),
            vllm_config=vllm_config,
        )
        self.dt_bias = head_parameter(heads)
        self.A_log = head_parameter(heads)
        self.D = head_parameter(heads)
        self.limits = dt_limits(config)
        self.norm = (
            GatedRMSNorm(
                inner,
                group=shape.inner_size // shape.groups,
                eps=shape.eps,
                gate_first=shape.gate_first,
                vllm_config=vllm_config,
            )
            if shape.norm
            else None
        )
        hidden_size = config.require("hidden_size", int)
        self.in_proj = _InProj(
            hidden_size,
            (inner, inner, states, states, heads),
            bias=shape.bias,
            vllm_config=vllm_config,
            prefix=join(prefix, "in_proj"),
        )
        self.out_proj = RowParallelLinear(
            shape.inner_size,
            hidden_size,
            bias=self.has_output_bias(config, shape),
            vllm_config=vllm_config,
            prefix=join(prefix, "out_proj"),
        )
        self.keep_states(
            self.conv1d.state_shape,
            (self.num_heads, shape.state_size, shape.inner_size // shape.heads),
            vllm_config=vllm_config,
        )

    def shape(self, config: HFConfig) -> Mamba2Shape:
        return Mamba2Shape.read(config)

    def has_output_bias(self, config: HFConfig, shape: Mamba2Shape) -> bool:
        return shape.bias

    def project(self, x: Tensor) -> Tensor:
        """Gate, inputs of the convolution and time steps, side by side: [T, sum(sizes)]."""
        projected: Tensor = self.in_proj(x)
        return projected

    def forward(self, x: Tensor) -> Tensor:
        gate, inputs, steps = torch.split(self.project(x), self.sizes, dim=-1)
        out = torch.empty((len(x), self.sizes[0]), dtype=torch.float32, device=x.device)
        self.run(inputs, steps, out=out)
        gated = (
            (out * F.silu(gate.float())).to(x.dtype) if self.norm is None else self.norm(out, gate)
        )
        result: Tensor = self.out_proj(gated)
        return result

    def compute(self, *inputs: Tensor, out: Tensor) -> None:
        mixed, steps = inputs
        out.zero_()
        time = F.softplus(steps.float() + self.dt_bias).clamp(*self.limits)
        decay = torch.exp(-self.A_log.exp() * time)
        heads = out.view(len(out), self.num_heads, -1)
        for rows, (windows, states) in self.steps():
            convolved = self.conv1d(mixed, windows, rows)
            x, into, out_of = torch.split(convolved, self.conv_sizes, dim=-1)
            x = heads_of(x, self.num_heads)
            attend(
                self.kernels,
                heads_of(out_of, self.num_groups),
                heads_of(into, self.num_groups),
                x,
                decay,
                time,
                ring=states,
                rows=rows,
                out=heads,
            )
            heads[rows.tokens] += x * self.D[:, None]


class PlainMamba2Mixer(Mamba2Mixer):
    def shape(self, config: HFConfig) -> Mamba2Shape:
        hidden_size = config.require("hidden_size", int)
        return Mamba2Shape(
            inner_size=int(config.get("expand", float, 2.0) * hidden_size),
            heads=config.get("num_heads", int, 128),
            groups=config.get("n_groups", int, 8),
            state_size=config.get("state_size", int, 128),
            kernel_size=config.get("conv_kernel", int, 4),
            conv_bias=config.get("use_conv_bias", bool, True),
            bias=config.get("use_bias", bool, False),
            eps=config.get("layer_norm_epsilon", float, 1e-5),
        )


class Mamba2ForCausalLM(RecurrentForCausalLM):
    mixers = {"linear_attention": {"mixer": PlainMamba2Mixer}}


class _InProj(LinearBase):
    """Projections of one input that ranks share in different ways."""

    def __init__(
        self,
        inputs: int,
        shards: tuple[Shard, ...],
        *,
        bias: bool,
        vllm_config: VllmConfig,
        prefix: str,
    ) -> None:
        spec = LinearSpec(
            kind="linear",
            prefix=prefix,
            inputs=Shard.whole(inputs),
            outputs=shards,
            dtype=torch_dtype(vllm_config.model.dtype),
        )
        super().__init__(spec, bias=bias)


def dt_limits(config: HFConfig) -> tuple[float, float]:
    """Least and greatest time step."""
    values = config.get("time_step_limit", list, [0.0, math.inf])
    # transformers writes infinity as {"__float__": "Infinity"}.
    limits: list[Any] = [
        value.get("__float__") if isinstance(value, dict) else value for value in values
    ]
    try:
        least, greatest = map(float, limits)
    except (TypeError, ValueError):
        raise CheckpointError(
            f"config.json: 'time_step_limit' must be two numbers, not {values!r}."
        ) from None
    return least, greatest


def _shared(groups: int, parallel: ParallelConfig, subject: str) -> Shard:
    """This rank's groups: an even share, or, where there is one, that one."""
    return Shard.whole(groups) if groups == 1 else Shard.even(groups, parallel, subject)


def _times(shard: Shard, count: int) -> Shard:
    """The share of `count` entries for each of a shard's."""
    return Shard(shard.full * count, shard.start * count, shard.size * count)
