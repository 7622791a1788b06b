"""Gemma 3n (text): several streams of hidden states (AltUp), an augmented residual (LAuReL),
embeddings of each layer, and a feed-forward whose gates are sparse."""

from __future__ import annotations

import math
from typing import Any

import torch
from toolkit_lm.config import VllmConfig
from toolkit_lm.distributed import tensor_parallel_group
from toolkit_lm.errors import CheckpointError
from toolkit_lm.model import (
    Absent,
    HFConfig,
    MergedColumnParallelLinear,
    ReplicatedLinear,
    Rotation,
    RowParallelLinear,
    Shard,
    ShardLoader,
    get_activation,
    join,
    layer_index,
    new_parameter,
    torch_dtype,
)
from torch import Tensor, nn

from toolkit_lm_decoder.dense import dense
from toolkit_lm_decoder.llama import LlamaParts, norm_of
from toolkit_lm_decoder.per_layer import (
    Float32RMSNorm,
    PerLayerDecoderLayer,
    PerLayerForCausalLM,
    PerLayerModel,
    SharedKV,
    activation_of,
)


def of_layer(config: HFConfig, key: str, kind: type, layer: int, default: float) -> float:
    """A value that config.json states once, or for each layer."""
    values = config.get(key, object, default)
    if isinstance(values, list):
        if layer >= len(values):
            raise CheckpointError(
                f"config.json: {key!r} has {len(values)} values, and none for layer {layer}."
            )
        values = values[layer]
    return HFConfig({key: values}).require(key, kind)


class Gemma3nMLP(nn.Module):
    """Gated feed-forward, x [T, H] -> [T, H], in which a gate counts by how far it exceeds most of
    the token's others."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config = HFConfig(vllm_config.hf_config)
        layer = layer_index(prefix)
        hidden_size = config.require("hidden_size", int)
        inner_size = int(of_layer(config, "intermediate_size", int, layer, 16_384))
        self.gate_up_proj = MergedColumnParallelLinear(
            hidden_size,
            [inner_size, inner_size],
            vllm_config=vllm_config,
            prefix=join(prefix, "gate_up_proj"),
        )
        self.down_proj = RowParallelLinear(
            inner_size, hidden_size, vllm_config=vllm_config, prefix=join(prefix, "down_proj")
        )
        self.activation = get_activation(activation_of(config))
        self.parallel = vllm_config.parallel
        sparsity = of_layer(config, "activation_sparsity_pattern", float, layer, 0.0)
        self.deviations = quantile(sparsity) if sparsity > 0 else None

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        if self.deviations is not None:
            gates = tensor_parallel_group(self.parallel).all_gather(dense(gate), -1)
            deviation, mean = torch.std_mean(gates, dim=-1, keepdim=True, unbiased=False)
            gate = (gate - (mean + deviation * self.deviations)).relu_()
        out: Tensor = self.down_proj(self.activation(gate) * up)
        return out


def quantile(share: float) -> float:
    """Deviations from the mean below which a `share` of a normal distribution lies."""
    argument = torch.tensor(2 * share - 1, dtype=torch.float32, device="cpu")
    return math.sqrt(2) * argument.erfinv().item()


class Laurel(nn.Module):
    """Learned augmented residual (Menghani et al. 2024): x [T, H] -> x + norm(R L x)."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config = HFConfig(vllm_config.hf_config)
        rank = config.get("laurel_rank", int, 64)
        hidden_size = config.require("hidden_size", int)
        self.linear_left = ReplicatedLinear(
            hidden_size, rank, vllm_config=vllm_config, prefix=join(prefix, "linear_left")
        )
        self.linear_right = ReplicatedLinear(
            rank, hidden_size, vllm_config=vllm_config, prefix=join(prefix, "linear_right")
        )
        self.post_laurel_norm = norm_of(config, vllm_config, Float32RMSNorm)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.post_laurel_norm(self.linear_right(self.linear_left(x)))
        return x + added


class AltUp(nn.Module):
    """Alternating updates (Baykal et al. 2023): a layer computes one of S streams [T, S, H], the
    active one; the others are predicted, and corrected by what came of it."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config = HFConfig(vllm_config.hf_config)
        hidden_size = config.require("hidden_size", int)
        self.streams = config.get("altup_num_inputs", int, 4)
        self.active = config.get("altup_active_idx", int, 0)
        self.scales = config.get("altup_correct_scale", bool, True)
        self.correction_coefs = ReplicatedLinear(
            self.streams,
            self.streams,
            vllm_config=vllm_config,
            prefix=join(prefix, "correction_coefs"),
        )
        self.prediction_coefs = ReplicatedLinear(
            self.streams,
            self.streams**2,
            vllm_config=vllm_config,
            prefix=join(prefix, "prediction_coefs"),
        )
        self.modality_router = ReplicatedLinear(
            hidden_size,
            self.streams,
            vllm_config=vllm_config,
            prefix=join(prefix, "modality_router"),
        )
        self.router_norm = norm_of(config, vllm_config, Float32RMSNorm)
        self.router_scale = 1 / hidden_size
        dtype = torch_dtype(vllm_config.model.dtype)
        loader = ShardLoader((Shard.whole(hidden_size),))
        self.correct_output_scale = new_parameter((hidden_size,), dtype, loader)

    def _modalities(self, x: Tensor) -> Tensor:
        routed = self.modality_router(self.router_norm(x) * self.router_scale)
        return torch.tanh(routed.float()).to(x.dtype)

    def predict(self, streams: Tensor) -> Tensor:
        coefficients: Tensor = self.prediction_coefs(self._modalities(streams[:, self.active]))
        return coefficients.view(-1, self.streams, self.streams) @ streams + streams

    def correct(self, predicted: Tensor, activated: Tensor) -> Tensor:
        innovation = activated - predicted[:, self.active]
        coefficients: Tensor = self.correction_coefs(self._modalities(activated)) + 1
        return predicted + innovation.unsqueeze(1) * coefficients.unsqueeze(2)

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.correct_output_scale if self.scales else x


class Gemma3nDecoderLayer(PerLayerDecoderLayer):
    def __init__(self, parts: type[LlamaParts], *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__(parts, vllm_config=vllm_config, prefix=prefix)
        self.altup = AltUp(vllm_config=vllm_config, prefix=join(prefix, "altup"))
        self.laurel = Laurel(vllm_config=vllm_config, prefix=join(prefix, "laurel"))

    def forward(
        self,
        streams: Tensor,
        residual: None,
        rotation: Rotation,
        embedding: Tensor,
        shared: SharedKV,
    ) -> tuple[Tensor, None]:
        active = self.altup.active
        predicted = self.altup.predict(streams)
        normed = self.input_layernorm(predicted[:, active])
        attended = self.post_attention_layernorm(self.self_attn(normed, rotation, shared))
        x = (predicted[:, active] + attended + self.laurel(normed)) * math.sqrt(0.5)
        x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        corrected = self.altup.correct(predicted, x)
        added = self.gated(self.altup.scaled(corrected[:, active]), embedding)
        # In place on the view: an assignment to it would be traced for more than one token alone.
        corrected[:, 1:].add_(added.unsqueeze(1))
        return corrected, None


class Gemma3nModel(PerLayerModel):
    def __init__(
        self, parts: type[LlamaParts], *, vllm_config: VllmConfig, prefix: str = ""
    ) -> None:
        super().__init__(parts, vllm_config=vllm_config, prefix=prefix)
        self.altup_projections = self._projections("altup_projections", self.is_first)
        self.altup_unembed_projections = self._projections(
            "altup_unembed_projections", self.is_last
        )

    def _projections(self, name: str, is_held: bool) -> Any:
        config = HFConfig(self.vllm_config.hf_config)
        size = config.require("hidden_size", int)
        prefix = join(self.prefix, name)
        if not is_held:
            return Absent()
        return nn.ModuleList(
            ReplicatedLinear(size, size, vllm_config=self.vllm_config, prefix=join(prefix, str(i)))
            for i in range(config.get("altup_num_inputs", int, 4) - 1)
        )

    def spread(self, embeds: Tensor) -> Tensor:
        streams = [projection(embeds) for projection in self.altup_projections]
        return torch.stack([embeds, *(as_large(stream, embeds) for stream in streams)], dim=1)

    def merge(self, x: Tensor) -> Tensor:
        first = x[:, 0]
        streams = [
            projection(dense(x[:, i]))
            for i, projection in enumerate(self.altup_unembed_projections, start=1)
        ]
        return torch.stack([first, *(as_large(stream, first) for stream in streams)]).mean(0)


def as_large(x: Tensor, example: Tensor) -> Tensor:
    """x [T, H], scaled to the root mean square of the example's rows."""
    target = example.square().mean(-1, keepdim=True).sqrt()
    return x * target / x.square().mean(-1, keepdim=True).clamp_(min=1e-5).sqrt()


class Gemma3nForCausalLM(PerLayerForCausalLM):
    feed_forward = Gemma3nMLP
    layer = Gemma3nDecoderLayer
    decoder = Gemma3nModel
