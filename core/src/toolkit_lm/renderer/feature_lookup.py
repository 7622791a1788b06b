"""FeatureLookup: tells a renderer which multimodal items the engine holds already."""

from __future__ import annotations

from contextvars import ContextVar
from typing import NamedTuple, Protocol

MEDIA_OWNER: ContextVar[str] = ContextVar("toolkit_lm_media_owner", default="")
"""Tenant of the rendering, such as the name of an API key. Names of media items (`uuid`) are known
to the tenant that gave them."""


class HeldFeature(NamedTuple):
    """An item whose data the engine holds. A feature made from it has the data None."""

    token_ids: list[int]
    """Tokens that stand for the item in a prompt."""
    mask: list[bool] | None
    """Tokens of the range that embeddings replace, as in PlaceholderRange."""
    layout: dict[str, list[float]]
    """Values that token positions depend on, as in MultiModalFeatureSpec."""
    num_bytes: int


class FeatureLookup(Protocol):
    """The items that the engine holds for a front. May be called from several threads."""

    def get(self, identifier: str) -> HeldFeature | None:
        """Returns the held item of an identifier. It stays held until the request being rendered is
        sent, or given up.

        Call it in the renderer's own context, or a copy of it (`contextvars.copy_context`): in
        another, nothing is found.
        """

    def held_keys(self, limit: int) -> list[str]:
        """Identifiers used last, newest first, for a renderer elsewhere. `get` must find here what
        that renderer leaves out."""
