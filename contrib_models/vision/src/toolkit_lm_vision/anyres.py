"""LLaVA-NeXT (Liu et al. 2024) and LLaVA-OneVision (Li et al. 2024): LLaVA with pictures that are
cut into tiles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from toolkit_lm.config import VllmConfig
from toolkit_lm.messages import Array
from toolkit_lm.model import Shard, ShardLoader, join, new_parameter, torch_dtype
from toolkit_lm.parts import EncoderSequences
from toolkit_lm_decoder.composed import ComposedModel
from torch import Tensor
from torch.nn import functional as F

from toolkit_lm_vision.anyres_rules import NEXT, ONEVISION, AnyresShape, Tiling
from toolkit_lm_vision.llava import LlavaProjector, llava_text_config
from toolkit_lm_vision.shape import text_size
from toolkit_lm_vision.towers import TowerModel, VisionTower

_FRAMES = 32
"""Frames of a usual video."""


class AnyresImages(TowerModel):
    """Pixels of a picture's whole and its tiles, or of frames, [n, channels, S, S] -> embeddings
    [tokens, H]."""

    defaults: ClassVar[Mapping[str, Any]] = NEXT

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.shape = AnyresShape.read(vllm_config.hf_config, self.defaults)
        tower = self.shape.tower
        layers = self.shape.taken.layers
        self.vision_tower = VisionTower(
            tower,
            layers,
            normed=False,
            vllm_config=vllm_config,
            prefix=join(prefix, "vision_tower"),
        )
        size = text_size(llava_text_config(vllm_config.hf_config))
        self.multi_modal_projector = LlavaProjector(
            tower.hidden_size * len(layers),
            size,
            vllm_config=vllm_config,
            prefix=join(prefix, "multi_modal_projector"),
        )
        dtype = torch_dtype(vllm_config.model.dtype)
        self.image_newline = new_parameter((size,), dtype, ShardLoader((Shard.whole(size),)))

    def forward(  # type: ignore[override]
        self, pixels: list[Tensor], tilings: list[Tiling | None], sequences: EncoderSequences
    ) -> list[Tensor]:
        """Embeddings of each item. `tilings`: None for frames."""
        states = self.vision_tower(torch.cat(pixels), sequences)
        taken = torch.cat([state[:, self.shape.taken.first :] for state in states], dim=-1)
        flat: Tensor = self.multi_modal_projector(taken.flatten(0, 1))
        found = torch.split(flat.view(*taken.shape[:2], -1), [len(picture) for picture in pixels])
        return [
            self._frames(item)
            if tiling is None
            else torch.cat((item[0], self._rows(item[1:], tiling)))
            for item, tiling in zip(found, tilings, strict=True)
        ]

    def _frames(self, states: Tensor) -> Tensor:
        """States of frames [n, patches, H] -> [tokens, H]: squares of half the side, and one
        end."""
        side = self.shape.tower.side
        grid = states.view(len(states), side, side, -1).permute(0, 3, 1, 2).contiguous()
        half = self.shape.pooled_side
        pooled = F.interpolate(grid, (half, half), mode="bilinear").permute(0, 2, 3, 1)
        return torch.cat((pooled.flatten(0, 2), self.image_newline[None]))

    def _rows(self, tiles: Tensor, tiling: Tiling) -> Tensor:
        """States of tiles [n, patches, H] -> [tokens, H]: rows of the picture, each with an end."""
        side = self.shape.tower.side
        grid = tiles.view(tiling.rows, tiling.columns, side, side, -1).permute(4, 0, 2, 1, 3)
        whole = grid.flatten(3, 4).flatten(1, 2)
        high = whole.shape[1] - tiling.top
        wide = whole.shape[2] - tiling.left
        whole = whole[:, tiling.top : high, tiling.left : wide]
        if tiling.is_scaled:
            size = (tiling.height, tiling.width)
            whole = F.interpolate(whole[None].contiguous(), size, mode="bilinear")[0]
        ends = self.image_newline[:, None, None].expand(-1, whole.shape[1], 1)
        return torch.cat((whole, ends), dim=-1).flatten(1, 2).transpose(0, 1)


class OneVisionImages(AnyresImages):
    defaults = ONEVISION


class LlavaNextForConditionalGeneration(ComposedModel):
    """LLaVA-NeXT with its language-modeling head."""

    encoder_class: ClassVar[type[AnyresImages]] = AnyresImages

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.shape = AnyresShape.read(vllm_config.hf_config, self.encoder_class.defaults)

    def text_config(self) -> dict[str, Any]:
        return llava_text_config(self.vllm_config.hf_config)

    def encode_items(
        self, modality: str, items: list[dict[str, Tensor]], sequences: EncoderSequences
    ) -> list[Tensor]:
        if modality == "video":
            frames = [item["pixel_values_videos"] for item in items]
            of_videos: list[Tensor] = self.encoder(frames, [None] * len(items), sequences)
            return of_videos
        tilings = [self.shape.tiling(*item["image_sizes"].flatten().tolist()) for item in items]
        embeds: list[Tensor] = self.encoder(
            [item["pixel_values"][0] for item in items], tilings, sequences
        )
        return embeds

    def example_items(self) -> list[tuple[str, dict[str, Array]]]:
        height, width = min(self.shape.sizes)
        tiling = self.shape.tiling(height, width)
        count = tiling.rows * tiling.columns + 1
        pixels = np.zeros((1, count, *self.shape.tower.picture), np.float32)
        sizes = np.array([[height, width]])
        return [("image", {"pixel_values": Array.of(pixels), "image_sizes": Array.of(sizes)})]


class LlavaOnevisionForConditionalGeneration(LlavaNextForConditionalGeneration):
    """LLaVA-OneVision with its language-modeling head."""

    encoder_class = OneVisionImages

    def example_items(self) -> list[tuple[str, dict[str, Array]]]:
        room = (self.vllm_config.max_model_len - 2) // self.shape.pooled_side**2
        count = max(1, min(_FRAMES, room))
        frames = np.zeros((count, *self.shape.tower.picture), np.float32)
        return [*super().example_items(), ("video", {"pixel_values_videos": Array.of(frames)})]
