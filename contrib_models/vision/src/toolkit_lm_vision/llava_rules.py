"""Prompt rules of LLaVA: the tower's states that it uses, and placeholders of pictures. Imports no
torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import CheckpointError
from toolkit_lm.model import HFConfig
from toolkit_lm.renderer import Replacement

from toolkit_lm_vision.pictures import PictureRules
from toolkit_lm_vision.pixtral_rules import PixtralRules, is_pixtral
from toolkit_lm_vision.shape import VisionShape

_STRATEGIES = ("default", "full")


class TakenStates(NamedTuple):
    """States of the tower that the model uses, by config.json."""

    layers: tuple[int, ...]
    """After how many of its layers; several lie side by side."""
    first: int
    """Index of the first state used: those before it are dropped in each picture."""

    @classmethod
    def read(cls, hf_config: Mapping[str, Any], shape: VisionShape) -> TakenStates:
        """`vision_feature_layer` counts from the end where it is negative;
        `vision_feature_select_strategy` "default" leaves one out."""
        config = HFConfig(hf_config)
        feature_layers = config.values.get("vision_feature_layer", -2)
        strategy = config.get("vision_feature_select_strategy", str, "default")
        if strategy not in _STRATEGIES:
            raise CheckpointError(
                f"config.json: 'vision_feature_select_strategy' must be one of {_STRATEGIES}, "
                f"not {strategy!r}."
            )
        layers = feature_layers if isinstance(feature_layers, list) else [feature_layers]
        count = shape.num_layers
        if not layers or any(
            type(layer) is not int or not -count - 1 <= layer <= count for layer in layers
        ):
            raise CheckpointError(
                f"config.json: 'vision_feature_layer' must name some of {count} layers, not "
                f"{feature_layers!r}."
            )
        return cls(tuple(layer % (count + 1) for layer in layers), int(strategy == "default"))

    def num_tokens(self, shape: VisionShape) -> int:
        """Number of tokens of a picture."""
        return shape.num_states - self.first


class LlavaRules(PictureRules):
    """A picture is as many image tokens as its states that are taken."""

    default_hidden_size = 4096

    def __new__(cls, config: VllmConfig) -> Any:
        """Rules of pictures of any size, where the tower is Pixtral's."""
        return PixtralRules(config) if is_pixtral(config.hf_config) else super().__new__(cls)

    def placeholder_id(self, modality: str) -> int:
        return self.token_id("image", 32000)

    def tokens_of_picture(self) -> Replacement:
        count = TakenStates.read(self.hf_config.values, self.shape).num_tokens(self.shape)
        return Replacement([self.placeholder_id("image")] * count)
