"""Prompt rules of Gemma 3: placeholders of pictures. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from math import isqrt
from typing import TYPE_CHECKING

from toolkit_lm.errors import CheckpointError, RequestError
from toolkit_lm.renderer import Replacement

from toolkit_lm_vision.pictures import PictureRules

if TYPE_CHECKING:
    import numpy as np


def tokens_per_side(num_tokens: int, side: int) -> int:
    """Tokens per side of a picture of `num_tokens` tokens and `side` patches per side. Raises
    CheckpointError if the patches cannot be pooled into the tokens."""
    found = isqrt(max(num_tokens, 0))
    if not 0 < found <= side or found**2 != num_tokens or side // (side // found) != found:
        raise CheckpointError(
            f"config.json: {side} x {side} patches cannot be pooled into "
            f"mm_tokens_per_image={num_tokens}."
        )
    return found


class Gemma3Rules(PictureRules):
    """A picture stands between two tokens that mark its ends, with two line breaks on both sides;
    its tokens see each other."""

    bidirectional = True
    surround = {"image": ("\n\n", "\n\n")}
    default_hidden_size = 2304

    def placeholder_id(self, modality: str) -> int:
        return self.token_id("boi", 255_999)

    def replacement(self, modality: str, data: Mapping[str, np.ndarray]) -> Replacement:
        if "pixel_values" in data and "num_crops" in data:
            crops, data = (
                data["num_crops"],
                {name: array for name, array in data.items() if name != "num_crops"},
            )
            if crops.shape != (1,) or crops[0] != 0:
                raise RequestError(
                    "crops of an image are not read: num_crops must be [0], as without "
                    "do_pan_and_scan."
                )
        return super().replacement(modality, data)

    def tokens_of_picture(self) -> Replacement:
        count = self.hf_config.get("mm_tokens_per_image", int, 256)
        tokens_per_side(count, self.shape.side)
        ids = [
            self.placeholder_id("image"),
            *[self.token_id("image", 262_144)] * count,
            self.token_id("eoi", 256_000),
        ]
        return Replacement(ids, [False, *[True] * count, False])
