"""The layer that keeps a state, and how it uses the cache."""

from __future__ import annotations

from typing import NamedTuple

import torch
from toolkit_lm.attention import BatchView, CacheBackend, CacheLayer, current
from toolkit_lm.config import VllmConfig
from toolkit_lm.kv import KVCacheSpec, PageTensor
from toolkit_lm.model import HFConfig, ReplicatedLinear, get_activation
from torch import Tensor, nn
from torch.nn import functional as F

from toolkit_lm_mamba.spec import MambaSpec

REWINDS = 3
"""Tokens that a sequence can take back where drafts are verified: a step computes as many."""


class Row(NamedTuple):
    """A sequence in a step."""

    tokens: slice
    block: int
    start: int
    """Tokens that were computed before. 0: it has no state yet."""


class MambaBackend(CacheBackend):
    """A page holds the convolution's last inputs [places, channels, kernel - 1], then the states
    [places, channels, state size]."""

    @classmethod
    def page_layout(cls, spec: KVCacheSpec) -> list[PageTensor]:
        assert isinstance(spec, MambaSpec)
        return [
            PageTensor((spec.places, spec.channels, spec.kernel_size - 1), "float32"),
            PageTensor((spec.places, spec.channels, spec.state_size), "float32"),
        ]

    def build(self, batch: BatchView) -> list[Row]:
        assert batch.block_table is not None
        starts = batch.query_start.tolist()
        blocks = batch.block_table[:, 0].tolist()
        rows = zip(
            starts, starts[1:], blocks, batch.starts.tolist(), batch.seq_lens.tolist(), strict=False
        )
        return [
            Row(slice(start, end), block, computed)
            for start, end, block, computed, length in rows
            if length
        ]


class MambaMixer(CacheLayer):
    """x [T, H] -> [T, H]: a causal convolution, then a selective state space."""

    backend = MambaBackend

    def __init__(self, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__(prefix)
        config = HFConfig(vllm_config.hf_config)
        hidden_size = config.require("hidden_size", int)
        bias = config.get("use_bias", bool, False)
        channels = (
            config.get("intermediate_size", int) or config.get("expand", int, 2) * hidden_size
        )
        self.rank = config.require("time_step_rank", int)
        self.state_size = config.require("state_size", int)
        cache = vllm_config.cache
        self.spec = MambaSpec(
            block_size=vllm_config.max_model_len,
            channels=channels,
            kernel_size=config.require("conv_kernel", int),
            snapshots=0 if cache.enable_prefix_caching is False else cache.block_size,
            rewinds=REWINDS if vllm_config.scheduler.drafter is not None else 0,
            state_size=self.state_size,
        )
        self.activation = get_activation(config.get("hidden_act", str, "silu"))

        def linear(inputs: int, outputs: int, name: str, bias: bool) -> ReplicatedLinear:
            return ReplicatedLinear(
                inputs, outputs, bias=bias, vllm_config=vllm_config, prefix=f"{prefix}.{name}"
            )

        self.in_proj = linear(hidden_size, 2 * channels, "in_proj", bias)
        self.x_proj = linear(channels, self.rank + 2 * self.state_size, "x_proj", False)
        self.dt_proj = linear(self.rank, channels, "dt_proj", True)
        self.out_proj = linear(channels, hidden_size, "out_proj", bias)
        self.conv1d = nn.Conv1d(
            channels,
            channels,
            self.spec.kernel_size,
            groups=channels,
            bias=config.get("use_conv_bias", bool, True),
        )
        self.A_log = nn.Parameter(torch.empty(channels, self.state_size))
        self.D = nn.Parameter(torch.empty(channels))

    def kv_cache_spec(self) -> MambaSpec:
        return self.spec

    def forward(self, x: Tensor) -> Tensor:
        inputs, gate = self.in_proj(x).chunk(2, dim=-1)
        out = self.run(inputs, out=torch.empty_like(inputs))
        result: Tensor = self.out_proj(out * self.activation(gate))
        return result

    def compute(self, inputs: Tensor, *, out: Tensor) -> None:
        binding, rows = current(self.prefix)
        assert binding.kv_cache is not None
        out.zero_()
        for row in rows:
            windows, states = (cache[row.block] for cache in binding.kv_cache)
            place = (row.start - 1) % self.spec.places
            began = [
                torch.zeros_like(ring[0]) if row.start == 0 else ring[place].clone()
                for ring in (windows, states)
            ]
            convolved = self.convolve(inputs[row.tokens], began[0], windows, row.start)
            out[row.tokens] = self.scan(convolved, began[1], states, row.start)

    def convolve(self, x: Tensor, window: Tensor, ring: Tensor, start: int) -> Tensor:
        """x [L, channels] -> the same; `window` [channels, kernel - 1] are the inputs before. The
        last ones after each of the last tokens go into the ring."""
        wide = torch.cat([window.to(x.dtype), x.T], dim=-1)
        for token in range(max(0, len(x) - len(ring)), len(x)):
            ring[(start + token) % len(ring)] = wide[:, token + 1 : token + 1 + window.shape[-1]]
        bias = None if self.conv1d.bias is None else self.conv1d.bias.to(x.dtype)
        return self.activation(
            F.conv1d(wide[None], self.conv1d.weight.to(x.dtype), bias, groups=len(wide))[0].T
        )

    def scan(self, x: Tensor, state: Tensor, ring: Tensor, start: int) -> Tensor:
        """x [L, channels] -> the same; `state` [channels, state size] is the one before. Those
        after the last tokens go into the ring."""
        step, into, out_of = self.x_proj(x).split(
            [self.rank, self.state_size, self.state_size], dim=-1
        )
        step = F.softplus(self.dt_proj(step).float())
        decay = torch.exp(-torch.exp(self.A_log.float()) * step[..., None])
        brought = (step * x.float())[..., None] * into.float()[:, None]
        outputs = []
        for token in range(len(x)):
            state.mul_(decay[token]).add_(brought[token])
            outputs.append(state @ out_of[token].float())
            if token >= len(x) - len(ring):
                ring[(start + token) % len(ring)] = state
        return (torch.stack(outputs) + x.float() * self.D.float()).to(x.dtype)
