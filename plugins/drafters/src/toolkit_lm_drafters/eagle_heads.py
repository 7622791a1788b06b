"""EAGLE heads: the networks of EAGLE-1/2 (Li et al. 2024) and EAGLE-3 (Li et al. 2025), under the
names of published checkpoints."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import torch
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import CheckpointError
from toolkit_lm.model import (
    HFConfig,
    Model,
    ParallelLMHead,
    QKVParallelLinear,
    ReplicatedLinear,
    Rotation,
    VocabParallelEmbedding,
    join,
)
from toolkit_lm_decoder.llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaForCausalLM,
    LlamaParts,
    head_size_of,
    norm_of,
)
from toolkit_lm_rotary import RopeParameters, RotaryEmbedding
from torch import Tensor, nn


class EagleAttention(LlamaAttention):
    def has_output_bias(self, config: HFConfig) -> bool:
        return config.get("output_bias", bool, False)


class EagleParts(LlamaParts):
    attention = EagleAttention


class UnnormedLayer(LlamaDecoderLayer):
    """First layer of EAGLE-1, without a norm before its attention."""

    norms = ("post_attention_layernorm",)

    def enter(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        assert residual is None, "only the first layer has no norm"
        return x, x


class WideAttention(EagleAttention):
    """First attention of EAGLE-3: x [T, 2 * H] -> [T, H]."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config = HFConfig(vllm_config.hf_config)
        num_heads = config.require("num_attention_heads", int)
        self.qkv_proj = QKVParallelLinear(
            2 * config.require("hidden_size", int),
            self.head_size,
            num_heads,
            config.get("num_key_value_heads", int, num_heads),
            bias=self.has_qkv_bias(config),
            vllm_config=vllm_config,
            prefix=join(prefix, "qkv_proj"),
        )


class WideParts(EagleParts):
    attention = WideAttention


class WideLayer(LlamaDecoderLayer):
    """First layer of EAGLE-3: embeddings and hidden states, each normed, side by side."""

    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    hidden_norm: nn.Module

    def __init__(self, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__(WideParts, vllm_config=vllm_config, prefix=prefix)
        config = HFConfig(vllm_config.hf_config)
        self.norm_first = config.get("norm_before_residual", bool, False)

    def parts(self) -> None:
        """Not fused: its input has another width than its output."""

    def combine(self, embeds: Tensor, hidden: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """The layer's result, and the residual to be added to it, [T, H] each."""
        normed = self.hidden_norm(hidden)
        residual = normed if self.norm_first else hidden
        x = self.self_attn(torch.cat([self.input_layernorm(embeds), normed], dim=-1), rotation)
        x, residual = self.post_attention_layernorm(x, residual)
        return self.mlp(x), residual


class EagleHead(Model):
    """Base of both: `num_hidden_layers` layers over embeddings and hidden states.

    `forward` takes `embeds` [T, E] of the next tokens and `hidden` [T, H] beside the arguments of a
    model.
    """

    packed = LlamaForCausalLM.packed
    renames = ((r"^model\.", ""), (r"^midlayer\.", "layers.0."))
    ignored: ClassVar = (r"rotary_emb\.inv_freq$", r"^t2d$")
    layers: nn.ModuleList

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config = HFConfig(vllm_config.hf_config)
        self.hidden_size = config.require("hidden_size", int)
        self.rotary = RotaryEmbedding(
            RopeParameters.read(config, head_size_of(config)), vllm_config=vllm_config
        )
        self.layers = nn.ModuleList(
            self._layer(config, index) for index in range(config.get("num_hidden_layers", int, 1))
        )
        self.embed_tokens = (
            VocabParallelEmbedding(
                config.require("vocab_size", int),
                self.hidden_size,
                vllm_config=vllm_config,
                prefix=join(prefix, "embed_tokens"),
            )
            if config.get("own_embedding", bool, False)
            else None
        )

    def _layer(self, config: HFConfig, index: int) -> nn.Module:
        prefix = join(self.prefix, f"layers.{index}")
        if index:
            return LlamaDecoderLayer(EagleParts, vllm_config=self.vllm_config, prefix=prefix)
        return self._first_layer(prefix)

    def _first_layer(self, prefix: str) -> nn.Module:
        raise NotImplementedError

    def _linear(self, inputs: int, name: str, *, bias: bool) -> ReplicatedLinear:
        return ReplicatedLinear(
            inputs,
            self.hidden_size,
            bias=bias,
            vllm_config=self.vllm_config,
            prefix=join(self.prefix, name),
        )

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        dropped = [
            name for name in ("embed_tokens", "lm_head") if getattr(self, name, None) is None
        ]
        return super().load_weights(
            (name, x)
            for name, x in weights
            if not name.removeprefix("model.").startswith(tuple(f"{module}." for module in dropped))
        )


class Eagle1Head(EagleHead):
    """EAGLE-1 and 2: fc over an embedding and the model's last hidden state, then layers. The
    model's own head turns the result into logits."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        bias = HFConfig(vllm_config.hf_config).get("fc_bias", bool, False)
        self.fc = self._linear(2 * self.hidden_size, "fc", bias=bias)

    def _first_layer(self, prefix: str) -> nn.Module:
        return UnnormedLayer(EagleParts, vllm_config=self.vllm_config, prefix=prefix)

    def forward(  # type: ignore[override]
        self, input_ids: Tensor, positions: Tensor, *, embeds: Tensor, hidden: Tensor
    ) -> Tensor:
        rotation = self.rotary(positions)
        x = self.fc(torch.cat([embeds, hidden], dim=-1))
        residual = None
        for layer in self.layers:
            x, residual = layer(x, residual, rotation)
        out: Tensor = x + residual
        return out


class Eagle3Head(EagleHead):
    """EAGLE-3: fc over hidden states of several layers of the model, then layers whose first reads
    embeddings too, a norm, and a head for `draft_vocab_size` tokens.

    Draft token i is the model's token i + d2t[i].
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config = HFConfig(vllm_config.hf_config)
        self.vocab_size = config.require("vocab_size", int)
        self.draft_vocab_size = config.get("draft_vocab_size", int, self.vocab_size)
        num_taps = config.get("num_taps", int, 3)
        width = config.get("target_hidden_size", int, self.hidden_size)
        bias = config.get("fc_bias", bool, False)
        self.fc = self._linear(num_taps * width, "fc", bias=bias) if num_taps else None
        self.norm = norm_of(config, vllm_config, EagleParts.norm)
        self.lm_head = (
            ParallelLMHead(
                self.draft_vocab_size,
                self.hidden_size,
                vllm_config=vllm_config,
                prefix=join(prefix, "lm_head"),
            )
            if config.get("own_lm_head", bool, True)
            else None
        )
        self.targets: Tensor | None = None
        """[draft_vocab_size] int64: the model's tokens. None: they are the same."""

    def _first_layer(self, prefix: str) -> nn.Module:
        return WideLayer(vllm_config=self.vllm_config, prefix=prefix)

    def forward(  # type: ignore[override]
        self, input_ids: Tensor, positions: Tensor, *, embeds: Tensor, hidden: Tensor
    ) -> Tensor:
        rotation = self.rotary(positions)
        first, *further = self.layers
        assert isinstance(first, WideLayer)
        x, residual = first.combine(embeds, hidden, rotation)
        for layer in further:
            x, residual = layer(x, residual, rotation)
        out: Tensor = x + residual
        return out

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        others = []
        for name, tensor in weights:
            if name.removeprefix("model.") == "d2t":
                self._map(tensor)
            else:
                others.append((name, tensor))
        if self.targets is None and self.draft_vocab_size != self.vocab_size:
            raise CheckpointError(
                f"draft_vocab_size is {self.draft_vocab_size} and vocab_size {self.vocab_size}, "
                "but there is no d2t, which says what the model's tokens are"
            )
        return super().load_weights(others)

    def _map(self, d2t: Tensor) -> None:
        targets = d2t.long() + torch.arange(len(d2t), device=d2t.device)
        outside = (targets < 0) | (targets >= self.vocab_size)
        if len(d2t) != self.draft_vocab_size or outside.any():
            raise CheckpointError(
                f"d2t has {len(d2t)} entries up to token {int(targets.max())}: draft_vocab_size is "
                f"{self.draft_vocab_size}, and vocab_size {self.vocab_size}"
            )
        self.targets = targets.to(self.norm.weight.device)
