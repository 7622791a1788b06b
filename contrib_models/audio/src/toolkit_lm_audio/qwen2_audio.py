"""Qwen2-Audio (Chu et al. 2024): Whisper's encoder, whose states are pooled by twos and projected,
and any language model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from toolkit_lm.config import VllmConfig
from toolkit_lm.messages import Array
from toolkit_lm.model import (
    HFConfig,
    LayerNorm,
    Model,
    ReplicatedLinear,
    join,
    torch_dtype,
)
from toolkit_lm.parts import EncoderSequences
from toolkit_lm_decoder.composed import ComposedModel, text_config
from toolkit_lm_encdec.attention import PACKED
from toolkit_lm_encdec.bart import BartEncoderLayer, Shape, Style
from toolkit_lm_encdec.substitutes import with_substitutes
from torch import Tensor, nn
from torch.nn import functional as F

from toolkit_lm_audio.rules import FEATURES, MASK
from toolkit_lm_audio.shape import TEXT_DEFAULTS, AudioShape, text_size

_STYLE = Style(norms_first=True, norms_embeddings=False)


class AudioTower(nn.Module):
    """Features of recordings [mels, frames of a window], and how many frames are sound -> states of
    each [tokens, H].

    What is after a recording is not computed: its states would be seen by none.
    """

    def __init__(self, shape: AudioShape, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        dtype = torch_dtype(vllm_config.model.dtype)
        layer = Shape.read(shape.config, "encoder", _STYLE)
        size = layer.heads.hidden_size
        self.shape = shape
        self.conv1 = nn.Conv1d(shape.num_mels, size, kernel_size=3, padding=1, dtype=dtype)
        self.conv2 = nn.Conv1d(size, size, kernel_size=3, stride=2, padding=1, dtype=dtype)
        self.embed_positions = nn.Embedding(shape.num_states, size, dtype=dtype)
        self.layers = nn.ModuleList(
            BartEncoderLayer(layer, vllm_config=vllm_config, prefix=join(prefix, f"layers.{i}"))
            for i in range(layer.num_layers)
        )
        self.layer_norm = LayerNorm(size, dtype=dtype)

    def forward(
        self, features: list[Tensor], num_frames: list[int], sequences: EncoderSequences
    ) -> list[Tensor]:
        counts = [self.shape.states(count) for count in num_frames]
        x = torch.cat(
            [self._embedded(mels, count) for mels, count in zip(features, counts, strict=True)]
        )
        with sequences(counts):
            for layer in self.layers:
                x = layer(x)
        each = zip(torch.split(x, counts), counts, strict=True)
        pooled = [
            states[: count // 2 * 2].view(count // 2, 2, -1).mean(dim=1) for states, count in each
        ]
        states: Tensor = self.layer_norm(torch.cat(pooled))
        return list(torch.split(states, [len(state) for state in pooled]))

    def _embedded(self, features: Tensor, num_states: int) -> Tensor:
        """The first states [num_states, H]. The last of them reads two frames further."""
        x = features[:, : 2 * num_states + 2].to(self.conv1.weight.dtype)[None]
        x = F.gelu(self.conv2(F.gelu(self.conv1(x))))[0].T
        return x[:num_states] + self.embed_positions.weight[:num_states]


class AudioProjector(nn.Module):
    """States [..., tower's size] -> [..., H]."""

    def __init__(self, input_size: int, size: int, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        self.linear = ReplicatedLinear(
            input_size, size, bias=True, vllm_config=vllm_config, prefix=join(prefix, "linear")
        )

    def forward(self, states: Tensor) -> Tensor:
        out: Tensor = self.linear(states)
        return out


class Qwen2AudioEncoder(Model):
    """Encoder that turns recordings into embeddings. Weight names are those of the checkpoint's
    `model`."""

    packed = PACKED
    renames = ((r"^model\.", ""),)

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.shape = AudioShape.read(vllm_config.hf_config)
        size = text_size(HFConfig(vllm_config.hf_config).require("text_config", dict))
        self.audio_tower = AudioTower(
            self.shape, vllm_config=vllm_config, prefix=join(prefix, "audio_tower")
        )
        self.multi_modal_projector = AudioProjector(
            self.shape.config.require("d_model", int),
            size,
            vllm_config=vllm_config,
            prefix=join(prefix, "multi_modal_projector"),
        )

    def embeddings(
        self, features: list[Tensor], num_frames: list[int], sequences: EncoderSequences
    ) -> list[Tensor]:
        """Embeddings of each recording, [tokens, H], from features in the tower's form."""
        states = self.audio_tower(features, num_frames, sequences)
        projected: Tensor = self.multi_modal_projector(torch.cat(states))
        return list(torch.split(projected, [len(state) for state in states]))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        # Keys have no bias, and are packed with what has one.
        none = torch.zeros(self.shape.config.require("d_model", int), device="cpu")
        names = [
            f"audio_tower.layers.{i}.self_attn.k_proj.bias"
            for i in range(len(self.audio_tower.layers))
        ]
        return super().load_weights(with_substitutes(weights, dict.fromkeys(names, none)))


class Qwen2AudioForConditionalGeneration(ComposedModel):
    """Qwen2-Audio with its language-modeling head."""

    encoder_class = Qwen2AudioEncoder

    def text_config(self) -> dict[str, Any]:
        return text_config(self.vllm_config.hf_config, TEXT_DEFAULTS)

    def encode_items(
        self, modality: str, items: list[dict[str, Tensor]], sequences: EncoderSequences
    ) -> list[Tensor]:
        part: Any = self.encoder
        embeds: list[Tensor] = part.embeddings(
            [item[FEATURES][0] for item in items],
            [int(item[MASK].sum()) for item in items],
            sequences,
        )
        return embeds

    def example_items(self) -> list[tuple[str, dict[str, Array]]]:
        """A whole window."""
        shape = AudioShape.read(self.vllm_config.hf_config)
        silence = np.zeros((1, shape.num_mels, shape.num_frames), np.float32)
        return [
            (
                "audio",
                {
                    FEATURES: Array.of(silence),
                    MASK: Array.of(np.ones((1, shape.num_frames), np.int32)),
                },
            )
        ]
