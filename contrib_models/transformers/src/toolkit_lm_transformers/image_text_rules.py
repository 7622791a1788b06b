"""Prompt rules of the fallback for pictures: a picture is the tokens that the processor made of its
placeholder. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import CheckpointError, RequestError
from toolkit_lm.renderer import MultiModalRules, Replacement

if TYPE_CHECKING:
    from collections.abc import Iterator

TOKENS = "input_ids"
"""Name of the array [n] of a picture's tokens, beside those that the model reads."""
_TOKEN_KEYS = (
    "image_token_id",
    "image_token_index",
    "media_token_id",
    "media_placeholder_token_id",
    "img_context_token_id",
    "im_patch_id",
    "image_patch_id",
)
_INFINITE = 3e38
"""Values of float32 are smaller."""


def image_token(hf_config: Mapping[str, Any]) -> int | None:
    """The token whose embeddings pictures replace, by config.json. None: it names none."""
    for part in _parts(hf_config):
        for key in _TOKEN_KEYS:
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
    """The model's forward takes pictures whole."""

    def __init__(self, config: VllmConfig) -> None:
        super().__init__(config)
        token = image_token(config.hf_config)
        if token is None or not 0 <= token < (config.vocab_size or token + 1):
            raise CheckpointError(
                f"config.json: the token of pictures, {token}, is not in the vocabulary."
            )
        self.token = token
        self.placeholder = token
        """Token of a picture in a prompt. A processor may know another one."""

    def placeholder_id(self, modality: str) -> int:
        return self.placeholder

    def replacement(self, modality: str, data: Mapping[str, np.ndarray]) -> Replacement:
        tokens = data.get(TOKENS)
        if tokens is None or len(data) < 2:
            raise RequestError(
                f"an image must have {TOKENS}, and what the processor of its model makes, not "
                f"{sorted(data)}."
            )
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise RequestError(f"{TOKENS} of an image must be integers [n].")
        for name, array in data.items():
            if array.dtype.kind not in "fiub":
                raise RequestError(f"{name} of an image must be numbers, not {array.dtype}.")
            if array.dtype.kind == "f" and array.size and not float(abs(array).max()) < _INFINITE:
                raise RequestError(f"{name} of an image must be finite.")
        found: list[int] = tokens.tolist()
        if min(found, default=-1) < 0 or max(found) >= (self.config.vocab_size or max(found) + 1):
            raise RequestError(f"{TOKENS} of an image are not in the vocabulary.")
        if self.token not in found:
            raise RequestError(f"{TOKENS} of an image have no token of pictures, {self.token}.")
        mask = [token == self.token for token in found]
        return Replacement(found, None if all(mask) else mask)
