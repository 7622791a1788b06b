"""Contract for rendering a query and a document as one text instead of a pair of texts."""

from __future__ import annotations

from abc import ABC, abstractmethod

from toolkit_lm.prompts import Scored
from toolkit_lm.renderer import RenderedText


class PairRenderer(ABC):
    """How a reranker reads a query and a document. Thread-safe. Needs no torch."""

    takes_instruction: bool
    """`render_pair` has a place for an instruction. Where it has none, requests that bring one are
    refused."""
    takes_media: bool = False
    """`render_media_pair` reads pairs of which a side has images or other media. Where it is false,
    they are refused."""

    @abstractmethod
    def render_pair(
        self,
        query: str,
        document: str,
        instruction: str | None = None,
        *,
        max_tokens: int | None = None,
    ) -> list[int]:
        """The token ids of the whole, special tokens included; `max_tokens` at most, None: as many
        as there are.

        Raises RequestError for a text that cannot be rendered or is empty, and ContextLengthError
        where it cannot be cut to `max_tokens`.
        """

    def render_media_pair(
        self, query: Scored, document: Scored, instruction: str | None = None
    ) -> RenderedText:
        """The token ids and the items of a pair with media. It is called where `takes_media` is
        true.

        Raises RequestError for a side that cannot be rendered or is empty.
        """
        raise NotImplementedError
