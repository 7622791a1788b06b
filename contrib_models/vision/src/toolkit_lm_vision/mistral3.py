"""Mistral 3 (Mistral Small 3.1 and 3.2): Pixtral's tower, whose squares of patches are merged, and
Mistral."""

from __future__ import annotations

from typing import Any

import torch
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import UnsupportedError
from toolkit_lm.messages import Array
from toolkit_lm.model import HFConfig, ReplicatedLinear, RMSNorm, join
from toolkit_lm_decoder.composed import ComposedModel
from torch import Tensor, nn

from toolkit_lm_vision.llava import LlavaProjector, llava_text_config
from toolkit_lm_vision.pixtral import Grid, PixtralImages, example_picture
from toolkit_lm_vision.pixtral_rules import merge_size
from toolkit_lm_vision.shape import text_size


class PatchMerger(nn.Module):
    """States of patches [N, H] -> of squares of merge x merge of them [N / merge², H]."""

    def __init__(self, size: int, merge: int, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        self.merge = merge
        self.merging_layer = ReplicatedLinear(
            size * merge**2,
            size,
            bias=False,
            vllm_config=vllm_config,
            prefix=join(prefix, "merging_layer"),
        )

    def forward(self, states: Tensor, grids: list[Grid]) -> Tensor:
        merge = self.merge
        squares = []
        parts = torch.split(states, [rows * columns for rows, columns in grids])
        for part, (rows, columns) in zip(parts, grids, strict=True):
            cut = part.view(rows // merge, merge, columns // merge, merge, part.shape[1])
            # Each number of all of a square's patches, then the next number: as `unfold` has them.
            squares.append(cut.permute(0, 2, 4, 1, 3).reshape(-1, part.shape[1] * merge**2))
        out: Tensor = self.merging_layer(torch.cat(squares))
        return out


class Mistral3Projector(LlavaProjector):
    """States of patches [N, tower's size] -> embeddings of tokens [n, H]."""

    bias = False

    def __init__(
        self, input_size: int, size: int, eps: float, *, vllm_config: VllmConfig, prefix: str
    ) -> None:
        super().__init__(input_size, size, vllm_config=vllm_config, prefix=prefix)
        self.norm = RMSNorm(input_size, eps=eps, vllm_config=vllm_config)
        self.patch_merger = PatchMerger(
            input_size,
            merge_size(vllm_config.hf_config),
            vllm_config=vllm_config,
            prefix=join(prefix, "patch_merger"),
        )

    def merged(self, states: Tensor, grids: list[Grid]) -> Tensor:
        merged: Tensor = self.patch_merger(self.norm(states.contiguous()), grids)
        return merged


class Mistral3Images(PixtralImages):
    layer = -1
    strategy = "full"

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        if len(self.layers) > 1:
            raise UnsupportedError(
                "config.json: 'vision_feature_layer' must be one layer, not "
                f"{list(self.layers)}: its states are normed."
            )
        text = mistral3_text_config(vllm_config.hf_config)
        self.multi_modal_projector = Mistral3Projector(
            self.shape.hidden_size,
            text_size(text),
            HFConfig(text).get("rms_norm_eps", float, 1e-6),
            vllm_config=vllm_config,
            prefix=join(prefix, "multi_modal_projector"),
        )

    def projected(self, states: Tensor, grids: list[Grid]) -> Tensor:
        projector = self.multi_modal_projector
        found: Tensor = projector(projector.merged(states, grids))
        return found


def mistral3_text_config(hf_config: Any) -> dict[str, Any]:
    """The config.json of the language part."""
    config = HFConfig(hf_config)
    text = {"model_type": "mistral", **config.require("text_config", dict)}
    return {
        **llava_text_config({**hf_config, "text_config": text}),
        "tie_word_embeddings": config.get("tie_word_embeddings", bool, True),
    }


class Mistral3ForConditionalGeneration(ComposedModel):
    """Mistral 3 with its language-modeling head."""

    encoder_class = Mistral3Images

    def text_config(self) -> dict[str, Any]:
        return mistral3_text_config(self.vllm_config.hf_config)

    def example_items(self) -> list[tuple[str, dict[str, Array]]]:
        return [("image", example_picture(self.vllm_config))]
