"""Structured output by llguidance. This entry module only registers it; llguidance is imported when a request asks for it."""

from toolkit_lm.plugin import LogitsProcessorRegistry, hookimpl

from toolkit_lm_llguidance.params import StructuredOutputs


@hookimpl
def toolkit_register_logits_processors(processors: LogitsProcessorRegistry) -> None:
    target = "toolkit_lm_llguidance.processor:StructuredOutput"
    # It has the last word: what the grammar rules out must not come back, and at its end one token must be left.
    processors.add("structured_outputs", target, params=StructuredOutputs, priority=-10_000)
