"""The registry that this plugin brings."""

from __future__ import annotations

from toolkit_lm.plugin import PlainRegistry


class StructuredOutputRegistry(PlainRegistry):
    """Subclasses of toolkit_lm_structured_output.contract.WishReader, by the name that the option
    `structured_output.backend` gives."""

    noun = "structured output backend"
    base = "toolkit_lm_structured_output.contract:WishReader"
