"""RecurrentMixer: base of the layers that keep a recurrent state."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from toolkit_lm.attention import BatchView, CacheBackend, CacheLayer, current
from toolkit_lm.config import VllmConfig
from toolkit_lm.kv import KVCacheSpec, PageTensor
from toolkit_lm.model import (
    Shard,
    ShardLoader,
    choose_kernels,
    get_activation,
    new_parameter,
    torch_dtype,
)
from torch import Tensor, nn

from toolkit_lm_hybrid.spec import RecurrentStateSpec

REWINDS = 3
"""Most drafts of a sequence in a step: tokens that it can take back."""
SNAPSHOT_EVERY = 512
"""Tokens between snapshots within a prompt."""


class Rows(NamedTuple):
    """R sequences that compute L tokens each in a step."""

    tokens: Tensor
    """Their tokens in the flat batch: [R, L] int64."""
    blocks: Tensor
    """Their blocks: [R] int64."""
    starts: Tensor
    """Tokens of each that earlier steps computed: [R] int64. 0: there is no state yet."""

    def load(self, ring: Tensor) -> Tensor:
        """States before the step, zeros where there is none: a ring [blocks, places, ...] -> [R,
        ...], a copy."""
        found = ring[self.blocks, (self.starts - 1) % ring.shape[1]]
        return found.masked_fill_((self.starts == 0).view(-1, *[1] * (found.ndim - 1)), 0)

    def store(self, ring: Tensor, token: int, state: Tensor) -> None:
        """Stores the states [R, ...] after the step's `token`-th token of each row, unless later
        tokens take their place."""
        if token >= self.tokens.shape[1] - ring.shape[1]:
            ring[self.blocks, (self.starts + token) % ring.shape[1]] = state


class RecurrentBackend(CacheBackend):
    """The states of each shape, in rings [places, *shape]. The metadata of a step are its `Rows`,
    by number of tokens."""

    @classmethod
    def page_layout(cls, spec: KVCacheSpec) -> list[PageTensor]:
        assert isinstance(spec, RecurrentStateSpec)
        return [PageTensor((spec.places, *shape), "float32") for shape in spec.shapes]

    def build(self, batch: BatchView) -> list[Rows]:
        assert batch.block_table is not None
        lengths = np.where(batch.seq_lens > 0, np.diff(batch.query_start), 0)
        blocks = batch.block_table[:, 0].to(torch.int64)
        device = blocks.device
        return [
            Rows(
                torch.from_numpy(
                    batch.query_start[rows, None].astype(np.int64) + np.arange(length)
                ).to(device),
                blocks[torch.from_numpy(rows).to(device)],
                torch.from_numpy(batch.starts[rows]).to(device),
            )
            for length in np.unique(lengths[lengths > 0]).tolist()
            for rows in [np.flatnonzero(lengths == length)]
        ]


class CausalConv(nn.Module):
    """Causal depthwise convolution, then the activation of that name: `shards` of the channels,
    kernels of `size` inputs."""

    def __init__(
        self,
        shards: Iterable[Shard],
        size: int,
        *,
        bias: bool,
        activation: str | None = None,
        vllm_config: VllmConfig,
    ) -> None:
        super().__init__()
        self.kernels = choose_kernels()
        self.activation = activation
        loader = ShardLoader(tuple(shards))
        channels = sum(shard.size for shard in loader.shards)
        dtype = torch_dtype(vllm_config.model.dtype)
        self.weight = new_parameter((channels, 1, size), dtype, loader)
        self.bias = new_parameter((channels,), dtype, loader) if bias else None

    @property
    def state_shape(self) -> tuple[int, int]:
        """The last inputs: [size - 1, channels]."""
        return self.weight.shape[2] - 1, len(self.weight)

    def forward(self, x: Tensor, ring: Tensor, rows: Rows) -> Tensor:
        """The tokens of `rows` of x [T, channels] -> [R, L, channels], in float32. `ring` [blocks,
        places, size - 1, channels] has the inputs before, and gets the last ones."""
        done = self.kernels.causal_conv(x, self.weight, self.bias, self.activation, ring, rows)
        return self.convolve(x[rows.tokens], ring, rows) if done is None else done

    def convolve(self, x: Tensor, ring: Tensor, rows: Rows) -> Tensor:
        """x [R, L, channels] -> the same, in float32, in plain torch."""
        size = self.weight.shape[2]
        length = x.shape[1]
        wide = torch.cat([rows.load(ring), x.float()], dim=1)
        for token in range(max(0, length - ring.shape[1]), length):
            rows.store(ring, token, wide[:, token + 1 : token + size])
        weight = self.weight.float()
        out = wide[:, :length] * weight[:, 0, 0]
        for i in range(1, size):
            out += wide[:, i : i + length] * weight[:, 0, i]
        if self.bias is not None:
            out += self.bias.float()
        return out if self.activation is None else get_activation(self.activation)(out)


Steps = Sequence[tuple[Rows, tuple[Tensor, ...]]]
"""What `RecurrentMixer.steps` gives."""


def cover(steps: Steps, num_tokens: int) -> bool:
    """Whether the tokens of the rows are all of the batch, in its order: each length has rows in
    that order, and there is one length, as in decoding."""
    return len(steps) == 1 and steps[0][0].tokens.numel() == num_tokens


def convolved(conv: CausalConv, x: Tensor, steps: Steps) -> Tensor:
    """The convolution of a step's tokens, whose windows are their first ring: x [T, channels] -> as
    x, in float32. Tokens that the step does not compute get zeros."""
    if cover(steps, len(x)):
        rows, rings = steps[0]
        done: Tensor = conv(x, rings[0], rows)
        return done.flatten(0, 1)
    out = x.new_zeros(x.shape, dtype=torch.float32)
    for rows, rings in steps:
        out[rows.tokens] = conv(x, rings[0], rows)
    return out


def joined_convolutions(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Weights with "q_conv1d", "k_conv1d" and "v_conv1d" of a layer joined to one "conv1d".

    transformers writes it cut in three of equal sizes, whatever those of queries, keys and values
    are.
    """
    found: dict[tuple[str, str], dict[str, Tensor]] = {}
    for name, tensor in weights:
        match = re.fullmatch(r"(.*\.)([qkv])_(conv1d\.\w+)", name)
        if match is None:
            yield name, tensor
            continue
        parts = found.setdefault((match[1], match[3]), {})
        # The loader may use the memory of a tensor again.
        parts[match[2]] = tensor.clone()
        if len(parts) == 3:
            yield match[1] + match[3], torch.cat([parts[part] for part in "qkv"])
            del found[match[1], match[3]]
    for (prefix, rest), parts in found.items():
        yield from ((f"{prefix}{part}_{rest}", tensor) for part, tensor in parts.items())


class RecurrentMixer(CacheLayer):
    """Base of layers that keep float32 states. A subclass calls `keep_states` in its constructor,
    and `steps` in `compute`."""

    backend = RecurrentBackend
    spec: RecurrentStateSpec

    def __init__(self, prefix: str) -> None:
        super().__init__(prefix)
        self.kernels = choose_kernels()

    def keep_states(self, *shapes: tuple[int, ...], vllm_config: VllmConfig) -> None:
        """Makes the layer's spec: one state of each shape per sequence."""
        cache = vllm_config.cache
        self.spec = RecurrentStateSpec(
            block_size=vllm_config.max_model_len,
            shapes=shapes,
            every=SNAPSHOT_EVERY,
            snapshots=0 if cache.enable_prefix_caching is False else cache.block_size,
            rewinds=REWINDS if vllm_config.scheduler.drafter is not None else 0,
        )

    def kv_cache_spec(self) -> RecurrentStateSpec:
        return self.spec

    def steps(self) -> Iterator[tuple[Rows, tuple[Tensor, ...]]]:
        """The rows of the step, and the rings of the layer's states, [blocks, places, *shape]
        each."""
        binding, found = current(self.prefix)
        assert binding.kv_cache is not None
        for rows in found:
            yield rows, binding.kv_cache


def head_parameter(heads: Shard) -> nn.Parameter:
    """A number per head, in float32."""
    return new_parameter((heads.size,), torch.float32, ShardLoader((heads,)))
