"""Contract for rendering a query and a document as one text instead of a pair of texts."""

from __future__ import annotations

from abc import ABC, abstractmethod


class PairRenderer(ABC):
    """How a reranker reads a query and a document. Thread-safe. Needs no torch."""

    takes_instruction: bool
    """`render_pair` has a place for an instruction. Where it has none, requests that bring one are
    refused."""

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
