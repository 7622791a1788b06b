"""ProcessorRenderer: prompts whose pictures the checkpoint's processor reads. It also makes the
tokens that stand for a picture. Needs no torch until a picture comes."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from toolkit_lm.errors import CheckpointError, RequestError
from toolkit_lm.renderer import MultiModalRules, Renderer
from toolkit_lm_renderer_hf.image_processor import ImageProcessor
from toolkit_lm_renderer_hf.renderer import HfRenderer

from toolkit_lm_transformers.image_text_rules import TOKENS, ImageTextRules

logger = logging.getLogger(__name__)

_OF_TOKENS = ("attention_mask", "mm_token_type_ids", "token_type_ids")
"""Arrays of the whole text, which its tokens say as well."""
_MOST_REASON = 300


class PictureProcessor(ImageProcessor):
    """Arrays of a picture, and its tokens, by the processor that transformers makes of the folder.
    Nothing is fetched, and no code of the checkpoint runs."""

    def __init__(self, folder: Path, max_pixels: int) -> None:
        super().__init__(folder, max_pixels)
        self.whole = _load(folder)
        if not isinstance(self.placeholder, str):
            raise CheckpointError(f"{type(self.whole).__name__} has no token of pictures.")

    @property
    def placeholder(self) -> Any:
        """Text of a picture in a prompt."""
        return getattr(self.whole, "image_token", None)

    @cached_property
    def _processor(self) -> Any:
        return self.whole.image_processor

    def process(self, pixels: np.ndarray, options: Mapping[str, Any]) -> dict[str, np.ndarray]:
        # Refuses sizes that it would blow up.
        height, width = pixels.shape[:2]
        self._check_sides(height, width, options.get("size") or self.loaded.size or {})
        try:
            made = self.whole(
                text=self.placeholder,
                images=[pixels],
                return_tensors="np",
                input_data_format="channels_last",
                add_special_tokens=False,
                **options,
            )
        except Exception as error:  # whatever a processor raises for a size that it cannot make
            raise RequestError(
                f"the checkpoint's processor cannot read it: {str(error)[:_MOST_REASON]}"
            ) from error
        found = {
            name: np.ascontiguousarray(array)
            for name, array in made.items()
            if name not in _OF_TOKENS
            and isinstance(array, np.ndarray)
            and array.dtype.kind in "fiub"
        }
        return {**found, TOKENS: found[TOKENS].reshape(-1)}


class ProcessorRenderer(HfRenderer):
    """HfRenderer for the fallback of pictures and text."""

    def set_rules(self, rules: MultiModalRules) -> None:
        assert isinstance(rules, ImageTextRules)
        try:
            bound = self.config.renderer.max_media_pixels
            assert self.config.checkpoint is not None
            images = PictureProcessor(Path(self.config.checkpoint.path), bound)
            self.images = images
            (rules.placeholder,) = self.render_prompt(
                str(images.placeholder), add_special_tokens=False
            ).token_ids
            super().set_rules(rules)
        except (CheckpointError, ValueError) as error:
            logger.warning("%s reads no pictures: %s", self.config.served_model_name, error)
            Renderer.set_rules(self, rules)


def _load(folder: Path) -> Any:
    from transformers import AutoProcessor

    try:
        # Reads a folder: nothing is fetched.
        return AutoProcessor.from_pretrained(  # nosec B615
            str(folder), backend="pil", trust_remote_code=False, local_files_only=True
        )
    except Exception as error:  # whatever its own reader raises
        raise CheckpointError(
            f"{folder}: transformers cannot make the processor: {error}"
        ) from error
