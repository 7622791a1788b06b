"""Whisper (Radford et al. 2022): convolutions over log-mel features, a transformer encoder, and a
decoder that writes what was said."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import ConfigError
from toolkit_lm.messages import Array, EncoderInput
from toolkit_lm.model import (
    HFConfig,
    LayerNorm,
    Model,
    ParallelLMHead,
    VocabParallelEmbedding,
    join,
    logits_of,
    see_encoder_tokens,
    torch_dtype,
)
from toolkit_lm.parts import EncoderPart
from toolkit_lm_encdec.attention import PACKED
from toolkit_lm_encdec.bart import BartDecoderLayer, BartEncoderLayer, Shape, Style
from toolkit_lm_encdec.substitutes import with_substitutes
from torch import Tensor, nn
from torch.nn import functional as F

STYLE = Style(norms_first=True, norms_embeddings=False)


class WhisperEncoder(nn.Module):
    """Features of each recording [num_mels, frames] -> states [E, H], half as many as frames of
    each."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config = HFConfig(vllm_config.hf_config)
        dtype = torch_dtype(vllm_config.model.dtype)
        shape = Shape.read(config, "encoder", STYLE)
        size = shape.heads.hidden_size
        self.conv1 = nn.Conv1d(
            config.require("num_mel_bins", int), size, kernel_size=3, padding=1, dtype=dtype
        )
        self.conv2 = nn.Conv1d(size, size, kernel_size=3, stride=2, padding=1, dtype=dtype)
        self.embed_positions = nn.Embedding(
            config.require("max_source_positions", int), size, dtype=dtype
        )
        self.layers = nn.ModuleList(
            BartEncoderLayer(shape, vllm_config=vllm_config, prefix=join(prefix, f"layers.{i}"))
            for i in range(shape.num_layers)
        )
        self.layer_norm = LayerNorm(size, dtype=dtype)

    def forward(self, features: list[Tensor]) -> Tensor:
        x = torch.stack(features).to(self.conv1.weight.dtype)
        x = F.gelu(self.conv2(F.gelu(self.conv1(x)))).transpose(1, 2)
        x = (x + self.embed_positions.weight[: x.shape[1]]).flatten(0, 1)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.layer_norm(x)
        return out


class WhisperDecoder(nn.Module):
    """Tokens [T] at positions [T], and encoder states as CrossAttention takes them -> hidden states
    [T, H]."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config = HFConfig(vllm_config.hf_config)
        dtype = torch_dtype(vllm_config.model.dtype)
        shape = Shape.read(config, "decoder", STYLE)
        size = shape.heads.hidden_size
        scale = size**0.5 if config.get("scale_embedding", bool, False) else 1.0
        vocab_size = config.require("vocab_size", int)
        self.embed_tokens = VocabParallelEmbedding(
            vocab_size,
            size,
            scale=scale,
            vllm_config=vllm_config,
            prefix=join(prefix, "embed_tokens"),
        )
        self.embed_positions = nn.Embedding(
            config.require("max_target_positions", int), size, dtype=dtype
        )
        self.layers = nn.ModuleList(
            BartDecoderLayer(shape, vllm_config=vllm_config, prefix=join(prefix, f"layers.{i}"))
            for i in range(shape.num_layers)
        )
        self.layer_norm = LayerNorm(size, dtype=dtype)

    def forward(
        self, input_ids: Tensor, positions: Tensor, encoder_hidden_states: Tensor | None
    ) -> Tensor:
        x = self.embed_tokens(input_ids) + self.embed_positions(positions)
        for layer in self.layers:
            x = layer(x, encoder_hidden_states)
        out: Tensor = self.layer_norm(x)
        return out


class WhisperModel(nn.Module):
    """Encoder and decoder."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        self.encoder = WhisperEncoder(vllm_config=vllm_config, prefix=join(prefix, "encoder"))
        see_encoder_tokens(self.encoder)
        self.decoder = WhisperDecoder(vllm_config=vllm_config, prefix=join(prefix, "decoder"))


class WhisperForConditionalGeneration(Model):
    """Whisper with its head, which is the embedding of its tokens."""

    parts = {"encoder": EncoderPart}
    packed = PACKED
    ignored = (r"^proj_out\.",)

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.config = config = HFConfig(vllm_config.hf_config)
        states = config.require("max_source_positions", int)
        longest = vllm_config.max_encoder_len
        if longest != states:
            raise ConfigError(
                f"max_encoder_len is {longest}, but a window of this model has {states} states: "
                "leave it out."
            )
        self.model = WhisperModel(vllm_config=vllm_config, prefix=join(prefix, "model"))
        self.lm_head = ParallelLMHead(
            config.require("vocab_size", int),
            config.require("d_model", int),
            tied_to=self.model.decoder.embed_tokens,
            vllm_config=vllm_config,
            prefix=join(prefix, "lm_head"),
        )

    def encode(self, input_ids: Tensor, positions: Tensor, *, features: list[Tensor]) -> Tensor:
        out: Tensor = self.model.encoder(features)
        return out

    def forward(  # type: ignore[override]
        self, input_ids: Tensor, positions: Tensor, *, encoder_hidden_states: Tensor | None = None
    ) -> Tensor:
        out: Tensor = self.model.decoder(input_ids, positions, encoder_hidden_states)
        return out

    @logits_of("lm_head")
    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(hidden_states)
        return logits

    def example_input(self, num_tokens: int) -> EncoderInput:
        """Silence: its length is always that of a window."""
        states = self.config.require("max_source_positions", int)
        silence = np.zeros((self.config.require("num_mel_bins", int), 2 * states), np.float32)
        return EncoderInput(num_tokens=states, features=Array.of(silence))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        # Keys have no bias, and are packed with what has one.
        none = torch.zeros(self.config.require("d_model", int), device="cpu")
        encoder, decoder = (f"model.{side}.layers" for side in ("encoder", "decoder"))
        names = [f"{encoder}.{i}.self_attn" for i in range(len(self.model.encoder.layers))]
        names += [
            f"{decoder}.{i}.{part}"
            for i in range(len(self.model.decoder.layers))
            for part in ("self_attn", "encoder_attn")
        ]
        return super().load_weights(
            with_substitutes(weights, {f"{name}.k_proj.bias": none for name in names})
        )
