"""PictureRules: those of models that read each picture alone, all of one size, and give each
equally many tokens. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import CheckpointError, RequestError
from toolkit_lm.model import HFConfig
from toolkit_lm.renderer import MultiModalRules, Replacement

from toolkit_lm_vision.shape import VisionShape, text_size

if TYPE_CHECKING:
    import numpy as np

_INFINITE = 3e38
"""Values of float32 are smaller."""


class PictureRules(MultiModalRules):
    """Pixels of a picture [1, channels, S, S], or its embeddings [tokens, hidden size] -> its
    tokens."""

    default_hidden_size: ClassVar[int]
    """Hidden size of a `text_config` that does not state it."""

    def __init__(self, config: VllmConfig) -> None:
        super().__init__(config)
        self.hf_config = HFConfig(config.hf_config)
        self.shape = VisionShape.read(config.hf_config)
        text: dict[str, Any] = self.hf_config.require("text_config", dict)
        self.hidden_size = text_size({"hidden_size": self.default_hidden_size, **text})
        self.tokens = self.tokens_of_picture()

    def tokens_of_picture(self) -> Replacement:
        """Tokens that replace any picture in a prompt."""
        raise NotImplementedError

    def token_id(self, name: str, default: int) -> int:
        """The id of a special token, as config.json has it under `name`_token_index or
        `name`_token_id."""
        found = self.hf_config.get(f"{name}_token_index", int)
        token = found if found is not None else self.hf_config.get(f"{name}_token_id", int, default)
        if not 0 <= token < (self.config.vocab_size or token + 1):
            raise CheckpointError(
                f"config.json: the {name} token {token} is not in the vocabulary."
            )
        return token

    def replacement(self, modality: str, data: Mapping[str, np.ndarray]) -> Replacement:
        num_embeds = (
            len(self.tokens.token_ids) if self.tokens.mask is None else sum(self.tokens.mask)
        )
        shapes: dict[str, tuple[int, ...]] = {
            "pixel_values": (1, *self.shape.picture),
            "embeds": (num_embeds, self.hidden_size),
        }
        if len(data) != 1 or next(iter(data)) not in shapes:
            raise RequestError(
                f"an image must have pixel_values, or embeds, and nothing else, not {sorted(data)}."
            )
        ((name, array),) = data.items()
        if array.shape != shapes[name]:
            raise RequestError(
                f"{name} of an image must have the shape {list(shapes[name])}, not "
                f"{list(array.shape)}."
            )
        if array.dtype.kind != "f":
            raise RequestError(f"{name} of an image must be floats, not {array.dtype}.")
        if not float(abs(array).max()) < _INFINITE:
            raise RequestError(f"{name} of an image must be finite.")
        return self.tokens
