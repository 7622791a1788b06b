"""MultiModalRules: a multimodal model's handling of media in prompts. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import RequestError
from toolkit_lm.messages import MultiModalFeatureSpec

if TYPE_CHECKING:
    import numpy as np

_LONGEST_IDENTIFIER = 256


class Replacement(NamedTuple):
    """Tokens that stand for an item in a prompt."""

    token_ids: list[int]
    """Tokens in place of the placeholder token."""
    mask: list[bool] | None = None
    """Marks the tokens that the item's embeddings replace, as in PlaceholderRange; None: all."""
    layout: dict[str, list[float]] = {}
    """Values that token positions depend on, as in MultiModalFeatureSpec."""


class MultiModalRules:
    """Rules for media of a model. A model that reads media is registered with a subclass:
    `models.add(..., multimodal="module:Class")`.

    One instance serves all requests of an engine, from several threads.
    """

    modalities: tuple[str, ...] = ("image",)
    """Modalities that the model reads. An instance may have fewer than its class, as its checkpoint
    does."""
    bidirectional: ClassVar[bool] = False
    """An item's tokens attend to each other in both directions: no chunk of a prompt ends inside
    one."""
    whole_prompts: ClassVar[bool] = False
    """All tokens of a prompt with items attend to each other in both directions. Needs
    `bidirectional`."""
    surround: ClassVar[Mapping[str, tuple[str, str]]] = {}
    """Texts put before and after each placeholder, by modality. They are tokenized with the text
    around them."""

    def __init__(self, config: VllmConfig) -> None:
        """`config` is resolved."""
        self.config = config

    def placeholder_id(self, modality: str) -> int:
        """The token that stands for one item in a prompt, before `replacement`."""
        raise NotImplementedError

    def placeholder_text(self, modality: str, token: str) -> str:
        """Text of a conversation for an item if the chat template writes none; `token` is the
        placeholder's text."""
        return token

    def texts(self, modality: str, data: Mapping[str, np.ndarray]) -> Mapping[str, Sequence[str]]:
        """Texts among an item's tokens. `replacement` finds each name in `data`: their token ids
        [texts, longest] int64, padded with -1."""
        return {}

    def replacement(self, modality: str, data: Mapping[str, np.ndarray]) -> Replacement:
        """Returns the tokens for an item, computed from its arrays alone: from its processor's
        arrays, or from `embeds` [n, hidden size] and the arrays that go with it.

        Raises RequestError for arrays that the model's encoder does not accept: their names,
        shapes, types and sizes.
        """
        raise NotImplementedError

    def complete(self, token_ids: Sequence[int]) -> Sequence[int]:
        """Returns the tokens of a prompt with items, each a placeholder, as the model's own
        processor completes them. What is complete stays as it is."""
        return token_ids

    def check(
        self,
        feature: MultiModalFeatureSpec,
        token_ids: Sequence[int],
        held: Replacement | None = None,
    ) -> None:
        """Raises RequestError unless the feature matches its data by the model's rules. `held`: the
        replacement, if the engine holds the data."""
        at = feature.mm_position
        if feature.modality not in self.modalities:
            raise RequestError(
                f"this model takes no {feature.modality}, only {' and '.join(self.modalities)}."
            )
        if not 0 < len(feature.mm_identifier) <= _LONGEST_IDENTIFIER:
            raise RequestError(f"its identifier must have 1 to {_LONGEST_IDENTIFIER} characters.")
        if feature.data is not None:
            held = self.replacement(
                feature.modality, {name: array.to_numpy() for name, array in feature.data.items()}
            )
        if held is None:
            raise RequestError("it has no data, and the engine does not hold it.")
        if (
            held != (list(token_ids[at.offset : at.end]), at.mask, feature.layout)
            or not at.num_embeds
        ):
            raise RequestError("its place in the prompt is not what the model makes of it.")
