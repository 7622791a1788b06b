"""Pixels of any mode become RGB, in one place for all pictures and frames."""

from __future__ import annotations

import numpy as np
from PIL import Image

from toolkit_lm_media.refusal import RefusedError

_HALF = 256
"""Values of one byte."""


def to_rgb(image: Image.Image) -> Image.Image:
    """A picture of any Pillow mode in RGB, 8 bits per sample, equal to Pillow's convert("RGB"),
    which transformers uses too.

    Alpha is dropped, in a channel, a palette or a key: the colours under transparent pixels show.
    Samples of 16 bits keep their high byte, although Pillow makes all above 255 white. Raises
    RefusedError for values of 32 bits or floats, whose range is not known."""
    if image.mode.startswith("I;16"):
        return _from_16_bits(np.asarray(image))
    if image.mode == "I":
        return _from_integers(np.asarray(image))
    if image.mode == "F":
        _check_floats(np.asarray(image))
    if image.mode == "La":
        # Pillow knows no direct way.
        image = image.convert("LA")
    if "transparency" in image.info:
        # It would warn that RGB has no room for it.
        image = image.copy()
        del image.info["transparency"]
    return image.convert("RGB")


def _from_16_bits(samples: np.ndarray) -> Image.Image:
    return Image.fromarray((samples // _HALF).astype(np.uint8)).convert("RGB")


def _from_integers(samples: np.ndarray) -> Image.Image:
    least = int(samples.min())
    most = int(samples.max())
    if least < 0 or most >= _HALF**2:
        raise RefusedError(
            f"its samples are from {least} to {most}; of 32-bit samples, those from 0 to "
            f"{_HALF**2 - 1} are read"
        )
    return (
        _from_16_bits(samples)
        if most >= _HALF
        else Image.fromarray(samples.astype(np.uint8)).convert("RGB")
    )


def _check_floats(samples: np.ndarray) -> None:
    least = float(samples.min())
    most = float(samples.max())
    if not 0 <= least <= most < _HALF or (0 < most <= 1):
        raise RefusedError(
            f"its samples are floats from {least:g} to {most:g}; those from 0 to 255 are read: "
            "scale them"
        )
