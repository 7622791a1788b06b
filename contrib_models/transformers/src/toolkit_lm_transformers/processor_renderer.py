"""ProcessorRenderer: prompts whose pictures, or recordings, the checkpoint's processor reads. It
also makes the tokens that stand for them. Needs no torch until media comes."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from toolkit_lm.errors import CheckpointError, RequestError
from toolkit_lm.renderer import MultiModalRules, Renderer
from toolkit_lm_renderer_hf.audio_processor import AudioProcessor
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
        return _arrays(made)


class RecordingProcessor(AudioProcessor):
    """Arrays of a recording, and its tokens, by the processor that transformers makes of the
    folder. Nothing is fetched, and no code of the checkpoint runs."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.whole = _load(folder)
        if not isinstance(self.placeholder, str):
            raise CheckpointError(f"{type(self.whole).__name__} has no token of recordings.")

    @property
    def placeholder(self) -> Any:
        """Text of a recording in a prompt."""
        return getattr(self.whole, "audio_token", None)

    def require_known(self) -> None:
        """Accepts all: the checkpoint's own processor reads them."""

    def process(self, samples: np.ndarray) -> dict[str, np.ndarray]:
        try:
            # Its class may make no other tensors.
            made = self.whole(
                text=self.placeholder,
                audio=[samples],
                sampling_rate=self.window.sampling_rate,
                return_tensors="pt",
                add_special_tokens=False,
            )
        except Exception as error:  # whatever a processor raises
            raise RequestError(
                f"the checkpoint's processor cannot read it: {str(error)[:_MOST_REASON]}"
            ) from error
        return _arrays({name: np.asarray(tensor) for name, tensor in made.items()})


def _arrays(made: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The arrays of an item that the model reads, and its tokens [n]."""
    found = {
        name: np.ascontiguousarray(array)
        for name, array in made.items()
        if name not in _OF_TOKENS and isinstance(array, np.ndarray) and array.dtype.kind in "fiub"
    }
    return {**found, TOKENS: found[TOKENS].reshape(-1)}


class ProcessorRenderer(HfRenderer):
    """HfRenderer for the fallbacks of pictures, or recordings, and text."""

    def set_rules(self, rules: MultiModalRules) -> None:
        assert isinstance(rules, ImageTextRules)
        try:
            assert self.config.checkpoint is not None
            folder = Path(self.config.checkpoint.path)
            processor: PictureProcessor | RecordingProcessor
            if "audio" in rules.modalities:
                processor = self.audio = RecordingProcessor(folder)
            else:
                bound = self.config.renderer.max_media_pixels
                processor = self.images = PictureProcessor(folder, bound)
            (rules.placeholder,) = self.render_prompt(
                str(processor.placeholder), add_special_tokens=False
            ).token_ids
            super().set_rules(rules)
        except (CheckpointError, ValueError) as error:
            name = self.config.served_model_name
            logger.warning("%s reads no %s: %s", name, rules.nouns[1], error)
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
