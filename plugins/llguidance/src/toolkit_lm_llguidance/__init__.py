"""Structured output by llguidance. This entry module only registers it; llguidance is imported when
a request asks for it."""

from toolkit_lm.plugin import hookimpl
from toolkit_lm_structured_output.registry import StructuredOutputRegistry


@hookimpl(optionalhook=True)
def toolkit_register_structured_output(backends: StructuredOutputRegistry) -> None:
    backends.add("llguidance", "toolkit_lm_llguidance.backend:LLGuidanceReader")
