"""GlanceForConditionalGeneration: tiles see each other once, and stand among the tokens of any
registered decoder."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from toolkit_lm.attention import Attention, AttentionType
from toolkit_lm.config import VllmConfig
from toolkit_lm.messages import Array
from toolkit_lm.model import (
    Absent,
    HFConfig,
    IntermediateTensors,
    Model,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    is_first_stage,
    make_part,
    see_encoder_tokens,
)
from toolkit_lm.parts import EncoderSequences, MediaPart
from torch import Tensor

HEAD_SIZE = 16


class TileEncoder(Model):
    """Tiles [N, numbers] -> embeddings [N, H]."""

    packed = {"qkv": ("query", "key", "value")}

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config = HFConfig(vllm_config.hf_config)
        size = HFConfig(config.require("text_config", dict)).require("hidden_size", int)
        heads = config.require("tile_heads", int)
        made: dict[str, Any] = {"vllm_config": vllm_config}
        self.tile = ReplicatedLinear(
            config.require("tile_size", int) ** 2, size, prefix=f"{prefix}.tile", **made
        )
        self.qkv = QKVParallelLinear(size, HEAD_SIZE, heads, heads, prefix=f"{prefix}.qkv", **made)
        self.attn = Attention(
            self.qkv.num_heads,
            HEAD_SIZE,
            type=AttentionType.ENCODER,
            prefix=f"{prefix}.attn",
            **made,
        )
        self.out = RowParallelLinear(heads * HEAD_SIZE, size, prefix=f"{prefix}.out", **made)

    def look(self, tiles: Tensor) -> Tensor:
        x = self.tile(tiles.to(self.tile.spec.dtype))
        seen: Tensor = self.out(self.attn(*self.qkv(x).split(self.qkv.q_size, dim=-1)), x)
        return seen


class GlanceForConditionalGeneration(Model):
    parts = {"media": MediaPart}
    renames = ((r"^(eye|language)\.", ""),)
    """Each part's own names."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.language: Any = make_part(
            vllm_config, HFConfig(vllm_config.hf_config).require("text_config", dict), "language"
        )
        self.eye = (
            TileEncoder(vllm_config=vllm_config, prefix="eye")
            if is_first_stage(vllm_config.parallel)
            else Absent()
        )
        see_encoder_tokens(self.eye)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        embedded: Tensor = self.language.embed_input_ids(input_ids)
        return embedded

    def encode_items(
        self, modality: str, items: list[dict[str, Tensor]], sequences: EncoderSequences
    ) -> list[Tensor]:
        tiles = [item["tiles"].flatten(0, 1) for item in items]
        assert isinstance(self.eye, TileEncoder)
        with sequences([len(one) for one in tiles]):
            return list(torch.split(self.eye.look(torch.cat(tiles)), [len(one) for one in tiles]))

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        *,
        inputs_embeds: Tensor | None = None,
        intermediate: IntermediateTensors | None = None,
    ) -> Tensor | IntermediateTensors:
        out: Tensor = self.language(
            input_ids, positions, inputs_embeds=inputs_embeds, intermediate=intermediate
        )
        return out

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        logits: Tensor = self.language.compute_logits(hidden_states)
        return logits

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        given = list(weights)
        eye = [
            (name.removeprefix("eye."), tensor) for name, tensor in given if name.startswith("eye.")
        ]
        language = [
            (name.removeprefix("language."), tensor)
            for name, tensor in given
            if not name.startswith("eye.")
        ]
        loaded = {f"language.{name}" for name in self.language.load_weights(language)}
        return loaded | (
            {f"eye.{name}" for name in self.eye.load_weights(eye)}
            if isinstance(self.eye, TileEncoder)
            else set()
        )

    def example_items(self) -> list[tuple[str, dict[str, Array]]]:
        numbers = HFConfig(self.vllm_config.hf_config).require("tile_size", int) ** 2
        return [("image", {"tiles": Array.of(np.zeros((4, 4, numbers), np.float32))})]
