"""Mamba: selective state spaces (Gu and Dao 2023)."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import CheckpointError
from toolkit_lm.model import (
    ColumnParallelLinear,
    HFConfig,
    MergedColumnParallelLinear,
    RowParallelLinear,
    Shard,
    ShardLoader,
    join,
    new_parameter,
)
from torch import Tensor
from torch.nn import functional as F

from toolkit_lm_hybrid.mixer import CausalConv, RecurrentMixer, convolved, head_parameter
from toolkit_lm_hybrid.mixer_layer import RecurrentForCausalLM
from toolkit_lm_hybrid.recurrence import scan


class MambaShape(NamedTuple):
    """Sizes of a family's mixers, from config.json."""

    inner_size: int
    state_size: int
    kernel_size: int
    rank: int
    """Inputs of the projection of time steps."""
    conv_bias: bool
    bias: bool
    """Whether the projections in and out have biases."""

    @classmethod
    def read(cls, config: HFConfig) -> MambaShape:
        """Reads config.json by the names of Mamba."""
        hidden_size = config.require("hidden_size", int)
        return cls(
            inner_size=int(config.get("expand", float, 2.0) * hidden_size),
            state_size=config.get("state_size", int, 16),
            kernel_size=config.get("conv_kernel", int, 4),
            rank=rank_of(config, "time_step_rank"),
            conv_bias=config.get("use_conv_bias", bool, True),
            bias=config.get("use_bias", bool, False),
        )


def rank_of(config: HFConfig, key: str) -> int:
    """The inputs of the projection of time steps. "auto" is a sixteenth of the hidden size."""
    found = config.values.get(key, "auto")
    if found == "auto":
        return math.ceil(config.require("hidden_size", int) / 16)
    if not isinstance(found, int) or found < 1:
        raise CheckpointError(f'config.json: {key!r} must be "auto" or 1 at least, not {found!r}.')
    return found


class MambaMixer(RecurrentMixer):
    """x [T, H] -> [T, H]: a causal convolution, then the selective scan. The channels are this
    rank's."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__(prefix)
        config = HFConfig(vllm_config.hf_config)
        shape = self.shape(config)
        hidden_size = config.require("hidden_size", int)
        inner = Shard.even(shape.inner_size, vllm_config.parallel, f"channels of {prefix}")
        self.sizes = [shape.rank, shape.state_size, shape.state_size]
        self.in_proj = MergedColumnParallelLinear(
            hidden_size,
            [shape.inner_size] * 2,
            bias=shape.bias,
            vllm_config=vllm_config,
            prefix=join(prefix, "in_proj"),
        )
        self.conv1d = CausalConv(
            (inner,),
            shape.kernel_size,
            bias=shape.conv_bias,
            activation=config.get("hidden_act", str, "silu"),
            vllm_config=vllm_config,
        )
        self.x_proj = RowParallelLinear(
            shape.inner_size,
            sum(self.sizes),
            bias=False,
            vllm_config=vllm_config,
            prefix=join(prefix, "x_proj"),
        )
        self.dt_proj = ColumnParallelLinear(
            shape.rank,
            shape.inner_size,
            bias=True,
            vllm_config=vllm_config,
            prefix=join(prefix, "dt_proj"),
        )
        self.A_log = new_parameter(
            (shape.state_size, inner.size), torch.float32, RateLoader((inner,), 1)
        )
        self.D = head_parameter(inner)
        self.out_proj = RowParallelLinear(
            shape.inner_size,
            hidden_size,
            bias=shape.bias,
            vllm_config=vllm_config,
            prefix=join(prefix, "out_proj"),
        )
        self.add_norms(config, shape, vllm_config)
        self.keep_states(
            self.conv1d.state_shape, (shape.state_size, inner.size), vllm_config=vllm_config
        )

    def shape(self, config: HFConfig) -> MambaShape:
        return MambaShape.read(config)

    def add_norms(self, config: HFConfig, shape: MambaShape, vllm_config: VllmConfig) -> None:
        """Adds what `normed` needs."""

    def normed(self, step: Tensor, into: Tensor, out_of: Tensor) -> tuple[Tensor, ...]:
        """Returns the time step [T, rank], B and C [T, N], as the scan takes them. The
        arguments are what the projection of x gives."""
        return step, into, out_of

    def forward(self, x: Tensor) -> Tensor:
        inputs, gate = self.in_proj(x).chunk(2, dim=-1)
        out = torch.empty(inputs.shape, dtype=torch.float32, device=x.device)
        self.run(inputs, out=out)
        result: Tensor = self.out_proj((out * F.silu(gate.float())).to(x.dtype))
        return result

    def compute(self, *inputs: Tensor, out: Tensor) -> None:
        steps = [*self.steps()]
        x = convolved(self.conv1d, inputs[0], steps)
        projected = self.x_proj(x.to(inputs[0].dtype))
        step, into, out_of = self.normed(*torch.split(projected, self.sizes, dim=-1))
        time = F.softplus(self.dt_proj(step.contiguous()).float())
        written = x * time
        into, out_of = into.float(), out_of.float()
        out.zero_()
        for rows, (_, states) in steps:
            scan(
                self.kernels,
                written,
                time,
                self.A_log,
                into,
                out_of,
                ring=states,
                rows=rows,
                out=out,
            )
        out.addcmul_(x, self.D)


class RateLoader(ShardLoader):
    """The WeightLoader of a parameter that holds rates of decay, -exp(A_log).T."""

    def __call__(self, param: Tensor, loaded: Tensor, shard_id: int | None = None) -> None:
        super().__call__(param, -loaded.float().exp().mT, shard_id)


class MambaForCausalLM(RecurrentForCausalLM):
    mixers = {"linear_attention": {"mixer": MambaMixer}}
