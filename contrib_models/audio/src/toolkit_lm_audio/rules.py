"""Prompt rules of Qwen2-Audio: placeholders of recordings. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import CheckpointError, RequestError
from toolkit_lm.model import HFConfig
from toolkit_lm.renderer import MultiModalRules, Replacement

from toolkit_lm_audio.shape import AudioShape, text_size

if TYPE_CHECKING:
    import numpy as np

FEATURES = "input_features"
MASK = "feature_attention_mask"
"""Names of a recording's arrays, as transformers has them: floats [1, mels, frames of a window],
and integers [1, frames of a window], which are 1 for the frames of the recording and 0 for those of
the silence after it.
"""
_AUDIO_TOKEN = 151646
_INFINITE = 3e38
"""Values of float32 are smaller."""


class Qwen2AudioRules(MultiModalRules):
    """A recording is an audio token for each four of its frames: 25 a second, where frames are 10
    ms apart."""

    modalities = ("audio",)

    def __init__(self, config: VllmConfig) -> None:
        super().__init__(config)
        self.shape = AudioShape.read(config.hf_config)
        self.hidden_size = text_size(HFConfig(config.hf_config).get("text_config", dict) or {})

    def placeholder_id(self, modality: str) -> int:
        config = HFConfig(self.config.hf_config)
        found = config.get("audio_token_index", int)
        token = found if found is not None else config.get("audio_token_id", int, _AUDIO_TOKEN)
        if not 0 <= token < (self.config.vocab_size or token + 1):
            raise CheckpointError(f"config.json: the audio token {token} is not in the vocabulary.")
        return token

    def placeholder_text(self, modality: str, token: str) -> str:
        return f"<|audio_bos|>{token}<|audio_eos|>"

    def replacement(self, modality: str, data: Mapping[str, np.ndarray]) -> Replacement:
        if set(data) == {"embeds"}:
            count = data["embeds"].shape[0] if data["embeds"].ndim else 0
            most = self.shape.tokens(self.shape.num_frames)
            if not 0 < count <= most:
                raise RequestError(f"embeds of a recording must be 1 to {most}, not {count}.")
            self._check_floats("embeds", data["embeds"], (count, self.hidden_size))
        elif set(data) == {FEATURES, MASK}:
            self._check_floats(
                FEATURES, data[FEATURES], (1, self.shape.num_mels, self.shape.num_frames)
            )
            count = self.shape.tokens(self._num_frames(data[MASK]))
        else:
            raise RequestError(
                f"a recording must have {FEATURES} and {MASK}, or embeds, and nothing else, not "
                f"{sorted(data)}."
            )
        return Replacement([self.placeholder_id(modality)] * count)

    def _num_frames(self, mask: np.ndarray) -> int:
        """Number of frames of the recording. Raises RequestError."""
        shape = (1, self.shape.num_frames)
        if mask.shape != shape or mask.dtype.kind not in "iu":
            raise RequestError(
                f"{MASK} must be integers of shape {list(shape)}, not {mask.dtype} of shape "
                f"{list(mask.shape)}."
            )
        count = int((mask == 1).sum())
        if not (mask[0, :count] == 1).all() or mask[0, count:].any():
            raise RequestError(f"{MASK} must be ones, and zeros after them.")
        if not self.shape.tokens(count):
            raise RequestError(
                f"it is too short: it has {count} frames of sound, and the model hears no less "
                "than 3."
            )
        return count

    def _check_floats(self, name: str, array: np.ndarray, shape: tuple[int, ...]) -> None:
        if array.shape != shape or array.dtype.kind != "f":
            raise RequestError(
                f"{name} must be floats of shape {list(shape)}, not {array.dtype} of shape "
                f"{list(array.shape)}."
            )
        if not float(abs(array).max()) < _INFINITE:
            raise RequestError(f"{name} must be finite.")
