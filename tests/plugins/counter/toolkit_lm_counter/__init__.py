"""Counts the tokens that each rank computes: an app asks for it, and sets it back."""

from toolkit_lm.plugin import PartRegistry, hookimpl


@hookimpl
def toolkit_register_parts(parts: PartRegistry) -> None:
    parts.add("counter", worker="toolkit_lm_counter.worker:CounterPart")
    parts.add("last", worker="toolkit_lm_counter.worker:LastPart")
