"""Prompt rules of the fallbacks for pictures and recordings: each is the tokens that the processor
made of its placeholder. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import CheckpointError, RequestError
from toolkit_lm.renderer import MultiModalRules, Replacement

if TYPE_CHECKING:
    from collections.abc import Iterator

TOKENS = "input_ids"
"""Name of the array [n] of a picture's tokens, beside those that the model reads."""
IMAGE_KEYS = (
    "image_token_id",
    "image_token_index",
    "media_token_id",
    "media_placeholder_token_id",
    "img_context_token_id",
    "im_patch_id",
    "image_patch_id",
)
AUDIO_KEYS = ("audio_token_id", "audio_token_index")
_INFINITE = 3e38
"""Values of float32 are smaller."""


def media_token(hf_config: Mapping[str, Any], keys: Sequence[str]) -> int | None:
    """The token whose embeddings media replace, by these keys of config.json. None: it names
    none."""
    for part in _parts(hf_config):
        for key in keys:
            if type(part.get(key)) is int:
                return int(part[key])
    return None


def _parts(hf_config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield hf_config
    if isinstance(text := hf_config.get("text_config"), Mapping):
        yield text


class ImageTextRules(MultiModalRules):
    """Arrays of a picture, by the names that its processor gives them, and `input_ids` -> its
    tokens."""

    bidirectional = True
    """The model's forward takes media whole."""
    token_keys: ClassVar[tuple[str, ...]] = IMAGE_KEYS
    nouns: ClassVar[tuple[str, str]] = ("an image", "pictures")

    def __init__(self, config: VllmConfig) -> None:
        super().__init__(config)
        token = media_token(config.hf_config, self.token_keys)
        if token is None or not 0 <= token < (config.vocab_size or token + 1):
            raise CheckpointError(
                f"config.json: the token of {self.nouns[1]}, {token}, is not in the vocabulary."
            )
        self.token = token
        self.placeholder = token
        """Token of a picture in a prompt. A processor may know another one."""

    def placeholder_id(self, modality: str) -> int:
        return self.placeholder

    def replacement(self, modality: str, data: Mapping[str, np.ndarray]) -> Replacement:
        item, plural = self.nouns
        tokens = data.get(TOKENS)
        if tokens is None or len(data) < 2:
            raise RequestError(
                f"{item} must have {TOKENS}, and what the processor of its model makes, not "
                f"{sorted(data)}."
            )
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise RequestError(f"{TOKENS} of {item} must be integers [n].")
        for name, array in data.items():
            if array.dtype.kind not in "fiub":
                raise RequestError(f"{name} of {item} must be numbers, not {array.dtype}.")
            if array.dtype.kind == "f" and array.size and not float(abs(array).max()) < _INFINITE:
                raise RequestError(f"{name} of {item} must be finite.")
        found: list[int] = tokens.tolist()
        if min(found, default=-1) < 0 or max(found) >= (self.config.vocab_size or max(found) + 1):
            raise RequestError(f"{TOKENS} of {item} are not in the vocabulary.")
        if self.token not in found:
            raise RequestError(f"{TOKENS} of {item} have no token of {plural}, {self.token}.")
        mask = [token == self.token for token in found]
        return Replacement(found, None if all(mask) else mask)


class AudioTextRules(ImageTextRules):
    """Arrays of a recording, by the names that its processor gives them, and `input_ids` -> its
    tokens."""

    modalities = ("audio",)
    token_keys = AUDIO_KEYS
    nouns = ("a recording", "recordings")
