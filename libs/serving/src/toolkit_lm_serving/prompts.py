"""Prompts that a plugin's part makes of a request's parameters, in place of a text or tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from toolkit_lm.params import SamplingParams
    from toolkit_lm.prompts import TokensPrompt

    from toolkit_lm_serving.engine import ServingEngine


@runtime_checkable
class MakesPrompt(Protocol):
    """A front half of a part, one of whose parameters is a prompt."""

    def prompt_of(self, params: SamplingParams) -> TokensPrompt | None:
        """The prompt in `params`; None: there is none. Raises RequestError."""


def prompt_makers(engine: ServingEngine) -> list[tuple[str, MakesPrompt]]:
    """The parts of an engine that make prompts, with their names."""
    halves = engine.processor.parts.by_name.items()
    return [(name, half) for name, half in halves if isinstance(half, MakesPrompt)]
