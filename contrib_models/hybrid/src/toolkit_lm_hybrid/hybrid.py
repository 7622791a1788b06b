"""Parts that hybrid families share: a layer whose mixer is attention or a recurrence."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import msgspec
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import CheckpointError
from toolkit_lm.model import HFConfig, Rotation, join, layer_index
from toolkit_lm_decoder.llama import (
    LlamaForCausalLM,
    LlamaModel,
    LlamaParts,
    head_size_of,
    norm_of,
)
from toolkit_lm_rotary import RopeParameters, RotaryEmbedding
from torch import Tensor, nn

Mixers = Mapping[str, Mapping[str, Callable[..., nn.Module]]]
"""Kind of layer -> its mixers: name in checkpoints -> class. A mixer takes x [T, H], and a Rotation
if its name is "self_attn". The results of several are summed."""


def with_values(vllm_config: VllmConfig, **values: Any) -> VllmConfig:
    """The config of a part that reads other values in config.json."""
    assert vllm_config.checkpoint is not None
    hf_config = {**vllm_config.hf_config, **values}
    return vllm_config.with_checkpoint(
        msgspec.structs.replace(vllm_config.checkpoint, hf_config=hf_config)
    )


def renamed(
    weights: Iterable[tuple[str, Tensor]], renames: Sequence[tuple[str, str]]
) -> Iterator[tuple[str, Tensor]]:
    """Weights with their names replaced by `re.sub`, in order."""
    for name, tensor in weights:
        for pattern, replacement in renames:
            name = re.sub(pattern, replacement, name)
        yield name, tensor


def layer_kind(parts: type[HybridParts], config: HFConfig, layer: int) -> str:
    """The kind of a layer by `parts.layer_kinds`. Raises CheckpointError for one that is
    unknown."""
    kinds = parts.layer_kinds(config)
    if layer < len(kinds) and kinds[layer] in parts.mixers:
        return kinds[layer]
    known = ", ".join(parts.mixers)
    found = kinds[layer] if layer < len(kinds) else None
    raise CheckpointError(
        f"config.json: 'layer_types' must name one of {known} for layer {layer}, not {found!r}."
    )


class HybridLayer(nn.Module):
    """A mixer and a feed-forward, each after a norm. The residual is passed on its own."""

    def __init__(self, parts: type[HybridParts], *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config = HFConfig(vllm_config.hf_config)
        self.input_layernorm = norm_of(config, vllm_config, parts.norm)
        self.post_attention_layernorm = norm_of(config, vllm_config, parts.norm)
        mixers = parts.mixers[layer_kind(parts, config, layer_index(prefix))]
        self.mixer_names = tuple(mixers)
        for name, make in mixers.items():
            self.add_module(name, make(vllm_config=vllm_config, prefix=join(prefix, name)))
        self.mlp = parts.feed_forward(vllm_config=vllm_config, prefix=join(prefix, "mlp"))
        self.multiplier = parts.residual_multiplier(config)

    def mix(self, x: Tensor, rotation: Rotation) -> Tensor:
        """The mixers' result [T, H]."""
        outputs = [self.mix_by(name, x, rotation) for name in self.mixer_names]
        return outputs[0] if len(outputs) == 1 else sum(outputs[1:], outputs[0])

    def mix_by(self, name: str, x: Tensor, rotation: Rotation) -> Tensor:
        """The result [T, H] of the mixer of that name."""
        mixer = self.get_submodule(name)
        out: Tensor = mixer(x, rotation) if name == "self_attn" else mixer(x)
        return out

    def forward(
        self, x: Tensor, residual: Tensor | None, rotation: Rotation
    ) -> tuple[Tensor, Tensor]:
        if residual is None:
            x, residual = self.input_layernorm(x), x
        else:
            x, residual = self.input_layernorm(x, residual)
        x, residual = self.post_attention_layernorm(self.scaled(self.mix(x, rotation)), residual)
        return self.scaled(self.mlp(x)), residual

    def scaled(self, x: Tensor) -> Tensor:
        """The summand of the residual that a half of the layer makes of x [T, H]."""
        return x if self.multiplier == 1 else x * self.multiplier


class NoRotation(nn.Module):
    """A rotation that changes nothing: attention without positions."""

    def forward(self, positions: Tensor) -> NoRotation:
        return self

    def rotate(self, x: Tensor) -> Tensor:
        return x


class HybridModel(LlamaModel):
    """The embedding, the layers and the last norm."""

    def __init__(
        self, parts: type[LlamaParts], *, vllm_config: VllmConfig, prefix: str = ""
    ) -> None:
        assert issubclass(parts, HybridParts)
        self.partial_rotary_factor = parts.partial_rotary_factor
        super().__init__(parts, vllm_config=vllm_config, prefix=prefix)

    def rotates(self, config: HFConfig) -> bool:
        """Whether attention has rotary positions."""
        return True

    def _rotary(self, config: HFConfig) -> nn.Module:  # type: ignore[override]
        values = {"partial_rotary_factor": self.partial_rotary_factor, **config.values}
        if not self.rotates(config):
            return NoRotation()
        return RotaryEmbedding(
            RopeParameters.read(HFConfig(values), head_size_of(config)),
            vllm_config=self.vllm_config,
        )


class HybridParts(LlamaParts):
    """The classes that a hybrid model is made of."""

    mixers: ClassVar[Mixers]
    layer: ClassVar[Callable[..., nn.Module]] = HybridLayer
    decoder: ClassVar[type[LlamaModel]] = HybridModel
    partial_rotary_factor: ClassVar[float] = 1.0
    """Default share of rotated dimensions."""

    @classmethod
    def layer_kinds(cls, config: HFConfig) -> list[str]:
        """The kind of each layer, a key of `mixers`."""
        if (kinds := config.get("layer_types", list)) is not None:
            return kinds
        # How checkpoints stated it before transformers 5.
        every = config.get("full_attention_interval", int, 4)
        count = config.require("num_hidden_layers", int)
        return ["linear_attention" if (i + 1) % every else "full_attention" for i in range(count)]

    @classmethod
    def residual_multiplier(cls, config: HFConfig) -> float:
        """Factor of what each half of a layer adds to the residual."""
        return 1.0


class HybridForCausalLM(HybridParts, LlamaForCausalLM):
    """A hybrid decoder and its language-modeling head."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        values = self.values(HFConfig(vllm_config.hf_config))
        super().__init__(vllm_config=with_values(vllm_config, **values), prefix=prefix)

    @classmethod
    def values(cls, config: HFConfig) -> dict[str, Any]:
        """Fields of config.json by Llama's names: those that this family names otherwise."""
        return {}
