"""What a renderer asks about items of media: which of them the engine holds already."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class HeldFeature(NamedTuple):
    """An item whose data the engine holds. A feature made of it has the data None."""

    token_ids: list[int]
    """What stands in a prompt in its place."""
    mask: list[bool] | None
    """As in PlaceholderRange."""
    layout: dict[str, list[float]]
    """As in MultiModalFeatureSpec."""
    num_bytes: int


class FeatureLookup(Protocol):
    """The items that the engine holds for a front. May be asked from several threads."""

    def get(self, identifier: str) -> HeldFeature | None:
        """A found item stays held until the request that is being rendered is sent, or given up.

        Ask in the context that the renderer was called in, or a copy of it
        (`contextvars.copy_context`): in another, nothing is found.
        """

    def held_keys(self, limit: int) -> list[str]:
        """The identifiers used last, the newest first: for a renderer elsewhere. Whatever it leaves
        out must be found here by `get`."""
