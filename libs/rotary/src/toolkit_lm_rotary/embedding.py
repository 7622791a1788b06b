"""The table of angles, and the rotation of a step's tokens."""

from __future__ import annotations

import torch
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import CheckpointError
from toolkit_lm.model import Rotation, choose_kernels, torch_dtype
from torch import Tensor, nn

from toolkit_lm_rotary.scaling import RopeParameters


class RotaryEmbedding(nn.Module):
    """The cosines and sines of all positions below the engine's max_model_len. One per kind of
    layer; layers share it.

    With `interleaved`, pairs are neighbouring dimensions (GPT-J); without, dimension i and i + half
    (GPT-NeoX, Llama).
    """

    table: Tensor
    """[max_model_len, rotated dimensions], in the model's dtype: cosines, then sines, of half the
    dimensions each."""
    axes: Tensor
    """[rotated dimensions] int64: which of three positions turns each, where tokens have three."""

    def __init__(
        self, parameters: RopeParameters, *, interleaved: bool = False, vllm_config: VllmConfig
    ) -> None:
        super().__init__()
        self.interleaved = interleaved
        self.kernels = choose_kernels()
        max_len = vllm_config.max_model_len
        frequencies, attention_factor = parameters.inverse_frequencies(max_len)
        if 2 * len(frequencies) > parameters.head_size:
            raise CheckpointError(
                f"{2 * len(frequencies)} rotary dimensions do not fit into heads of size "
                f"{parameters.head_size}."
            )
        angles = torch.outer(torch.arange(max_len, dtype=torch.float32), frequencies)
        table = torch.cat((angles.cos(), angles.sin()), dim=-1).mul_(attention_factor)
        # Multimodal rotary embedding (Wang et al. 2024): of half the dimensions, so many for time,
        # for height and for width.
        self.sections = parameters.values.get("mrope_section", list, [])
        if self.sections and (
            [type(count) for count in self.sections] != [int] * 3
            or sum(self.sections) != len(frequencies)
        ):
            raise CheckpointError(
                "config.json: 'mrope_section' must be three counts that sum to "
                f"{len(frequencies)}, not {self.sections}."
            )
        if self.sections:
            self.register_buffer("axes", self._axes(parameters).repeat(2), persistent=False)
        self.register_buffer(
            "table", table.to(torch_dtype(vllm_config.model.dtype)), persistent=False
        )

    def _axes(self, parameters: RopeParameters) -> Tensor:
        """The axis that turns each of half the dimensions [rotated dimensions / 2] int64: 0 is
        time, 1 height, 2 width.

        They lie in a row; or, with `mrope_interleaved` (Qwen3-VL), side by side as long as height
        and width have some left, and time takes the rest.
        """
        time, height, width = self.sections
        if not parameters.values.get("mrope_interleaved", bool, False):
            return torch.tensor([0] * time + [1] * height + [2] * width)
        axes = torch.zeros(sum(self.sections), dtype=torch.int64)
        axes[1 : 3 * height : 3] = 1
        axes[2 : 3 * width : 3] = 2
        return axes

    def forward(self, positions: Tensor) -> Rotation:
        """The rotation of tokens at positions [T], or, by time, height and width, [3, T]."""
        found = self.table[positions]
        if positions.ndim == 2:
            found = found.gather(0, self.axes.expand(1, *found.shape[1:]))[0]
        cos, sin = found.unsqueeze(1).chunk(2, dim=-1)
        if self.interleaved:
            return Rotation(
                cos.repeat_interleave(2, -1),
                torch.stack((-sin, sin), -1).flatten(-2),
                True,
                self.kernels,
            )
        return Rotation(torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1), False, self.kernels)
