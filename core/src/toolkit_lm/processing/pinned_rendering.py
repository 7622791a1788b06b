"""Renderings that rely on data held by the engine."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from hashlib import sha256

from msgspec.structs import replace

from toolkit_lm.renderer import Rendered
from toolkit_lm.renderer.feature_lookup import HeldFeature


class PinnedRendering:
    """A rendering of one prompt, to be called at least once. Items that it finds stay held until
    `release`, or the end of this object."""

    def __init__(self, render: Callable[[], Rendered], salt: str | None = None) -> None:
        """`salt`: items with different salts have different identifiers."""
        self._render = render
        self.salt = salt
        self.found: dict[str, HeldFeature] = {}
        """Found items by identifier."""
        self._unpins: list[Callable[[], object]] = []

    def __call__(self) -> Rendered:
        token = CURRENT.set(self)
        try:
            return self._salted(self._render())
        finally:
            CURRENT.reset(token)

    async def awaited(self, rendered: Awaitable[Rendered]) -> Rendered:
        """Awaits a coroutine that renders the same prompt, in place of a call."""
        token = CURRENT.set(self)
        try:
            return self._salted(await rendered)
        finally:
            CURRENT.reset(token)

    def _salted(self, rendered: Rendered) -> Rendered:
        if not self.salt or not rendered.features:
            return rendered
        return rendered._replace(
            features=[
                replace(feature, mm_identifier=self.name(feature.mm_identifier))
                for feature in rendered.features
            ]
        )

    def name(self, identifier: str) -> str:
        """The item's identifier outside of the renderer."""
        return (
            sha256(repr((self.salt, identifier)).encode()).hexdigest() if self.salt else identifier
        )

    def add(self, identifier: str, held: HeldFeature, unpin: Callable[[], object]) -> None:
        """Adds a found item. `unpin` is called once, from any thread, at any point."""
        self.found[identifier] = held
        self._unpins.append(unpin)

    def release(self) -> None:
        """Releases the found items."""
        while self._unpins:
            self._unpins.pop()()

    __del__ = release


CURRENT: ContextVar[PinnedRendering | None] = ContextVar("toolkit_lm_rendering", default=None)
"""The rendering that runs in this context."""
