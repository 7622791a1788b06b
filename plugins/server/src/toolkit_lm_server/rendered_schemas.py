"""Shapes of the answers of a render server, for the description of the API."""

from __future__ import annotations

from typing import Any, Literal

from toolkit_lm_server.schema_texts import Described


class RenderedArray(Described):
    """A tensor: C order, little-endian."""

    dtype: str
    """The dtype's name in numpy, such as "float32"."""
    shape: list[int]
    """The tensor's shape."""
    data: str
    """Values in base64. An answer in msgpack has them in binary."""


class RenderedRange(Described):
    offset: int
    """The first token of the item."""
    length: int
    """Tokens of the item."""
    mask: list[bool] | None
    """Marks the tokens that the item's embeddings replace. null marks all."""


class RenderedFeature(Described):
    """A media item in a prompt."""

    modality: str
    """The kind of media, such as "image"."""
    mm_identifier: str
    """Identifier of the item's content. Items with equal ones have equal data."""
    mm_position: RenderedRange
    """The tokens that the item stands at."""
    data: dict[str, RenderedArray] | None
    """Tensors by name. null where the request's `held` has the identifier."""
    layout: dict[str, list[float]]
    """Facts about the item's tokens, by name."""


class RenderedPrompt(Described):
    """A prompt, as an engine takes it. It comes in msgpack where the client accepts
    application/msgpack."""

    model: str
    """The model that answered, by its first name."""
    token_ids: list[int]
    """The tokens of the prompt."""
    features: list[RenderedFeature] | None
    """Items of media among the tokens, by offset."""
    sampling_params: dict[str, Any]
    """Sampling parameters that differ from their defaults."""
    max_model_len: int
    """Most tokens of prompt and output together."""


class RenderedList(Described):
    object: Literal["list"]
    """The kind of object."""
    data: list[RenderedPrompt]
    """The entries, in order."""


class Derendered(Described):
    text: str
    """The text of the tokens."""
