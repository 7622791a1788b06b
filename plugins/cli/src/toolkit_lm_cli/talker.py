"""The contract of a model to talk with, in this process or on a server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from toolkit_lm_cli.sampling import SamplingFlags


class Usage(NamedTuple):
    """Tokens of a request."""

    prompt: int
    output: int


class Talker(Protocol):
    """A model to talk with. The streams give text as it comes, and stop the request when they are
    closed."""

    usage: Usage | None
    """Usage of the last request that finished; None if it is not known."""

    def facts(self) -> Mapping[str, str]:
        """Facts to show first: the model, its location, precision and context."""

    def max_model_len(self) -> int | None:
        """Tokens of its context, where they are known."""

    def chat(self, messages: list[dict[str, Any]], flags: SamplingFlags) -> Iterator[str]: ...

    def complete(self, prompt: str, flags: SamplingFlags) -> Iterator[str]: ...

    def close(self) -> None: ...
